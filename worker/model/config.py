"""Checks on transformers configs.

A config comes from the coordinator, which the site does not trust. `check_config` refuses one that could run code,
reach a network or exhaust memory, before transformers reads it.
"""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import fields
from inspect import getattr_static
from typing import Any, cast

from pydantic import JsonValue
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from tessera.worker.model.block_map import DTYPES

# Keys of a config, and what they could make transformers do.
UNSAFE_KEYS = {
    "auto_map": "names code to import",
    "custom_pipelines": "names code to import",
    "trust_remote_code": "allows code to be imported",
    "quantization_config": "describes quantised weights, which need kernels: name the model before quantisation",
    "attn_implementation": "may name a kernel to download",
    "experts_implementation": "may name a kernel to download",
    "use_kernels": "downloads kernels",
    "kernel_config": "names kernels to download",
    "name_or_path": "names a place to load from",
    "pretrained_model_name_or_path": "names a place to load from",
    "transformers_weights": "names a file to load",
    "gguf_file": "names a file to load",
    "distributed_config": "starts processes that talk to each other",
    "fusion_config": "replaces modules",
    "backbone": "looks a model up on a hub",
    "backbone_kwargs": "is passed on to a model from a hub",
    "use_pretrained_backbone": "loads weights from a hub",
    "use_timm_backbone": "looks a model up on a hub",
}
UNSAFE_MODEL_TYPES = {"timm_backbone", "timm_wrapper"}  # timm resolves names to hubs and local folders

# Methods and tables of the config classes. With `attribute_map`, a config could disguise one key as another.
_SETTINGS = {field.name for field in fields(cast("Any", PreTrainedConfig))} | {"model_type"}
_INTERNAL = {
    name
    for name in dir(PreTrainedConfig)
    if name not in _SETTINGS and not isinstance(getattr_static(PreTrainedConfig, name), property)
}

MAX_DEPTH = 16
MAX_COUNT = 1 << 20
"""Limit on layers, heads, labels and experts, because a config class may create a list of any requested length. It
rejects absurd values early; the sandbox bounds the rest."""


class ConfigError(ValueError):
    """A config and head from which transformers cannot build a model."""


class UnsafeConfig(ConfigError):
    """A config that could run code, reach a network or exhaust memory."""


def check_config(config: Mapping[str, JsonValue]) -> None:
    """Raise UnsafeConfig, naming every unsafe key, if a config could run code, reach a network or exhaust memory."""
    faults = list(_faults(config, "", 0))
    if config.get("model_type") not in CONFIG_MAPPING:
        faults.append(f"model_type: transformers has no model type {config.get('model_type')!r}")
    if faults:
        raise UnsafeConfig("the config is refused: " + "; ".join(sorted(faults)))


def _faults(value: JsonValue | Mapping[str, JsonValue], path: str, depth: int) -> Iterator[str]:
    if depth > MAX_DEPTH:
        yield f"{path}: is nested more than {MAX_DEPTH} levels deep"
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _faults(item, f"{path}[{index}]", depth + 1)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            where = f"{path}.{key}" if path else key
            # The keys of label2id are the user's labels, and its values are numbers.
            if not (key == "label2id" and isinstance(item, Mapping)):
                yield from (f"{where}: {reason}" for reason in _reasons(key, item))
                yield from _faults(item, where, depth + 1)


def _reasons(key: str, value: JsonValue) -> Iterator[str]:
    """Yield the reasons why a key with this value is unsafe."""
    if key.startswith("_") or key in _INTERNAL:
        yield "is internal to transformers"
    elif key in UNSAFE_KEYS:
        yield UNSAFE_KEYS[key]
    elif key == "model_type" and (value in UNSAFE_MODEL_TYPES or not isinstance(value, str)):
        yield f"may not be {value!r}"
    elif (key == "dtype" or key.endswith("_dtype")) and value is not None:
        if value not in {str(dtype).removeprefix("torch.") for dtype in DTYPES}:
            yield f"may not be {value!r}"
    elif ("num" in key or "layer" in key or "depth" in key) and _sum(value) > MAX_COUNT:
        yield f"is more than {MAX_COUNT}"


def _sum(value: JsonValue) -> int:
    """Return a count, or the sum of a list of counts such as the layers of each stage."""
    if isinstance(value, list):
        return sum(map(_sum, value))
    return value if isinstance(value, int) else 0


def config_from(config: Mapping[str, JsonValue]) -> PreTrainedConfig:
    """Return the checked transformers config. Raises UnsafeConfig, or ConfigError if transformers rejects it."""
    check_config(config)
    # Some classes take entries out of a nested config.
    settings = {key: deepcopy(value) for key, value in config.items() if key != "model_type"}
    try:
        built = AutoConfig.for_model(str(config["model_type"]), **cast("dict[str, Any]", settings))
    except Exception as error:  # each of hundreds of config classes raises its own errors
        reason = " ".join(str(error).split())
        raise ConfigError(f"transformers does not accept the {config['model_type']} config: {reason}") from error
    _check_made(built)
    return built


def _check_made(config: PreTrainedConfig) -> None:
    """Check the created config too: a class's own default may name a backbone of timm."""
    if config.model_type in UNSAFE_MODEL_TYPES or any(
        getattr(config, f"_{kind}_implementation", None) is not None for kind in ("attn", "experts")
    ):
        raise UnsafeConfig(f"the config is refused: {type(config).__name__} would load code or weights from a hub")
    for key in config.sub_configs:
        if isinstance(part := getattr(config, key, None), PreTrainedConfig):
            _check_made(part)
