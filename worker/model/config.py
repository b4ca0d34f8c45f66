"""Checks on transformers configs.

A config comes from the coordinator, which the site does not trust. `check_config` refuses one that could run code,
reach a network or exhaust memory, before transformers reads it.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import fields
from inspect import getattr_static
from typing import Any, cast

from pydantic import JsonValue
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from tessera.shared.model.config_safety import INTERNAL, UNSAFE_MODEL_TYPES, unsafe_settings
from tessera.worker.errors import ConfigError, UnsafeConfig

_SETTINGS = {field.name for field in fields(cast("Any", PreTrainedConfig))} | {"model_type"}
_INTERNAL = INTERNAL | {
    name
    for name in dir(PreTrainedConfig)
    if name not in _SETTINGS and not isinstance(getattr_static(PreTrainedConfig, name), property)
}


def check_config(config: Mapping[str, JsonValue]) -> None:
    """Raise UnsafeConfig, naming every unsafe key, if a config could run code, reach a network or exhaust memory."""
    faults = unsafe_settings(config, _INTERNAL)
    if config.get("model_type") not in CONFIG_MAPPING:
        faults.append(f"model_type: transformers has no model type {config.get('model_type')!r}")
    if faults:
        raise UnsafeConfig("the config is refused: " + "; ".join(sorted(faults)))


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
