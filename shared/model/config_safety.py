"""Settings of a transformers config that could run code, reach a network or exhaust memory.

A worker refuses them, so no run begins with one, and no exported folder has one.
"""

from collections.abc import Collection, Iterator, Mapping

from pydantic import JsonValue

from tessera.shared.problems import Invalid
from tessera.shared.schema import MAX_NUMBER

# Keys of a config, and their possible effects in transformers.
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

DTYPES = {"float64", "float32", "float16", "bfloat16"}

INTERNAL = {
    "attribute_map", "base_config_key", "base_model_ep_plan", "base_model_fsdp_plan", "base_model_pp_plan",
    "base_model_tp_plan", "convert_rope_params_to_dict", "default_config_fields", "default_rope_type",
    "default_theta", "dict_dtype_to_str", "extra_config_files", "extra_files", "from_dict", "from_json_file",
    "from_pretrained", "get_config_dict", "get_mtp_config", "get_text_config", "ignore_keys_at_rope_validation",
    "is_custom_code", "is_remote_code", "nested_rope_parameter_keys", "push_to_hub", "register_for_auto_class",
    "save_pretrained", "standardize_rope_params", "sub_configs_defaults", "to_dict", "to_diff_dict",
    "to_json_file", "to_json_string", "update", "update_from_string", "validate", "validate_architecture",
    "validate_layer_type", "validate_output_attentions", "validate_rope", "validate_token_ids",
}  # fmt: skip
"""Methods and tables of the config classes. With `attribute_map`, a config could disguise one key as another."""

TARGET_SCALE = ("target_mean", "target_deviation")
"""The keys by which a run standardises a regression's targets. They are Tessera's own: no number of theirs may turn a
target into one that is not finite."""

MAX_DEPTH = 16
MAX_COUNT = 1 << 20
"""Limit on layers, heads, labels and experts, because a config class may create a list of any requested length. It
rejects absurd values early; the sandbox bounds the rest."""


def unsafe_settings(config: Mapping[str, JsonValue], internal: Collection[str] = INTERNAL) -> list[str]:
    """Return each unsafe setting of a config with the reason, sorted. `internal` has the names that transformers uses
    itself."""
    return sorted(_faults(config, internal, "", 0))


def require_safe(config: Mapping[str, JsonValue]) -> None:
    """Raise Invalid for a config with unsafe settings."""
    if faults := unsafe_settings(config):
        raise Invalid(
            f"the model's config has settings that no worker accepts: {'; '.join(faults)}",
            remedy="Create the model folder again with `tessera model init`, which leaves them out.",
        )


def _faults(
    value: JsonValue | Mapping[str, JsonValue], internal: Collection[str], path: str, depth: int
) -> Iterator[str]:
    if depth > MAX_DEPTH:
        yield f"{path}: is nested more than {MAX_DEPTH} levels deep"
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _faults(item, internal, f"{path}[{index}]", depth + 1)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            where = f"{path}.{key}" if path else key
            # The keys of label2id are the user's labels, and its values are numbers.
            if not (key == "label2id" and isinstance(item, Mapping)):
                yield from (f"{where}: {reason}" for reason in _reasons(key, item, internal))
                yield from _faults(item, internal, where, depth + 1)


def _reasons(key: str, value: JsonValue, internal: Collection[str]) -> Iterator[str]:
    """Yield the reasons why a key with this value is unsafe."""
    if key.startswith("_") or key in internal:
        yield "is internal to transformers"
    elif key in UNSAFE_KEYS:
        yield UNSAFE_KEYS[key]
    elif key == "model_type" and (value in UNSAFE_MODEL_TYPES or not isinstance(value, str)):
        yield f"may not be {value!r}"
    elif key in TARGET_SCALE:
        fits = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_NUMBER
        if not fits or (key == "target_deviation" and value <= 0):  # type: ignore[operator]
            yield f"may not be {value!r}: give a {'positive ' * (key == 'target_deviation')}number"
    elif (key == "dtype" or key.endswith("_dtype")) and value is not None:
        if value not in DTYPES:
            yield f"may not be {value!r}"
    elif ("num" in key or "layer" in key or "depth" in key) and _sum(value) > MAX_COUNT:
        yield f"is more than {MAX_COUNT}"


def _sum(value: JsonValue) -> int:
    """Return a count, or the sum of a list of counts such as the layers of each stage."""
    if isinstance(value, list):
        return sum(map(_sum, value))
    return value if isinstance(value, int) else 0
