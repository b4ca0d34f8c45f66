"""Builds the model that a run names, reads and writes its blocks, and keeps frozen what is not trained.

A config comes from the coordinator, which a site does not trust: `check_config` refuses whatever could run code,
reach a network or exhaust memory before transformers sees it, and `build` allocates nothing until the model that the
config describes has been laid out without storage and found to be the one in the block table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from inspect import getattr_static
from typing import Any, Literal, cast

import numpy as np
import torch
from pydantic import JsonValue
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from shared.blocks import NUMPY_DTYPES, Block
from shared.model import Head, Model
from worker.blockmap import DTYPES, block_table, named_tensors

__all__ = ["AUTO_CLASSES", "ConfigError", "Freeze", "ModelMismatch", "UnsafeConfig", "build", "check_config"]
__all__ += ["check_model", "config_from", "instantiate", "named_tensors", "read_block", "write_block"]

Attention = Literal["eager", "sdpa"]
"""The implementations of attention that are in torch itself."""

AUTO_CLASSES: dict[Head, Any] = {
    "image-classification": AutoModelForImageClassification,
    "text-classification": AutoModelForSequenceClassification,
    "token-classification": AutoModelForTokenClassification,
    "masked-lm": AutoModelForMaskedLM,
    "causal-lm": AutoModelForCausalLM,
    "seq2seq-lm": AutoModelForSeq2SeqLM,
    "contrastive": AutoModel,
    "features": AutoModel,
}
"""Transformers' class for each head. Untyped, because transformers types them only in part."""

# What each key of a config could make transformers do.
UNSAFE_KEYS = {
    "auto_map": "names code to import",
    "custom_pipelines": "names code to import",
    "trust_remote_code": "allows code to be imported",
    "quantization_config": "loads quantisation kernels",
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
UNSAFE_MODEL_TYPES = {"timm_backbone", "timm_wrapper"}  # timm resolves names to hubs and to local folders

# Methods and tables of the config classes. A config that set `attribute_map` would pass one key off as another.
_SETTINGS = {field.name for field in fields(cast("Any", PreTrainedConfig))} | {"model_type"}
_INTERNAL = {
    name
    for name in dir(PreTrainedConfig)
    if name not in _SETTINGS and not isinstance(getattr_static(PreTrainedConfig, name), property)
}

MAX_DEPTH = 16
MAX_COUNT = 1 << 20
"""The most layers, heads, labels or experts: a config class may make a list as long as it is told to."""
MAX_BUFFER_BYTES = 1 << 30
"""The most that masks and position tables may take: they are not in the block table, so nothing else bounds them."""


class ConfigError(ValueError):
    """Transformers builds no model from this config and head."""


class UnsafeConfig(ConfigError):
    """A config holds something that could run code, reach a network or exhaust memory."""


class ModelMismatch(ValueError):
    """A model is not the one that its block table describes. `faults` has a sentence for each block concerned."""

    def __init__(self, faults: Iterable[str]) -> None:
        self.faults = tuple(sorted(faults))
        super().__init__("the model and its block table disagree: " + "; ".join(self.faults))


def check_config(config: Mapping[str, JsonValue]) -> None:
    """Refuses a config that could run code, reach a network or exhaust memory, at any depth, naming every such key.

    Raises UnsafeConfig.
    """
    faults = list(_faults(config, "", 0))
    if config.get("model_type") not in CONFIG_MAPPING:
        faults.append(f"model_type: transformers has none called {config.get('model_type')!r}")
    if faults:
        raise UnsafeConfig("the config is refused: " + "; ".join(sorted(faults)))


def _faults(value: JsonValue | Mapping[str, JsonValue], path: str, depth: int) -> Iterator[str]:
    if depth > MAX_DEPTH:
        yield f"{path}: nested more than {MAX_DEPTH} deep"
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _faults(item, f"{path}[{index}]", depth + 1)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            where = f"{path}.{key}" if path else key
            # Labels are keys of the user's choosing, and their values plain.
            if not (key == "label2id" and isinstance(item, Mapping)):
                yield from (f"{where}: {reason}" for reason in _reasons(key, item))
                yield from _faults(item, where, depth + 1)


def _reasons(key: str, value: JsonValue) -> Iterator[str]:
    """Why a key with this value is not safe: nothing if it is."""
    if key.startswith("_") or key in _INTERNAL:
        yield "is internal to transformers"
    elif key in UNSAFE_KEYS:
        yield UNSAFE_KEYS[key]
    elif key == "model_type" and (value in UNSAFE_MODEL_TYPES or not isinstance(value, str)):
        yield f"may not be {value!r}"
    elif (key == "dtype" or key.endswith("_dtype")) and value is not None:
        if value not in {str(dtype).removeprefix("torch.") for dtype in DTYPES}:
            yield f"may not be {value!r}"
    elif isinstance(value, int) and value > MAX_COUNT and ("num" in key or "layer" in key or "depth" in key):
        yield f"is more than {MAX_COUNT}"


def config_from(config: Mapping[str, JsonValue]) -> PreTrainedConfig:
    """The transformers config, checked. Raises UnsafeConfig, or ConfigError if transformers does not accept it."""
    check_config(config)
    settings = {key: value for key, value in config.items() if key != "model_type"}
    try:
        made = AutoConfig.for_model(str(config["model_type"]), **cast("dict[str, Any]", settings))
    except Exception as error:  # each of hundreds of config classes has its own way to refuse
        reason = " ".join(str(error).split())
        raise ConfigError(f"transformers does not accept the {config['model_type']} config: {reason}") from error
    _check_made(made)
    return made


def _check_made(config: PreTrainedConfig) -> None:
    """Looks at what the config became: a class's own default may name a backbone of timm."""
    if config.model_type in UNSAFE_MODEL_TYPES or any(
        getattr(config, f"_{kind}_implementation", None) is not None for kind in ("attn", "experts")
    ):
        raise UnsafeConfig(f"the config is refused: {type(config).__name__} would load code or weights from a hub")
    for key in config.sub_configs:
        if isinstance(part := getattr(config, key, None), PreTrainedConfig):
            _check_made(part)


def build(model: Model, *, attention: Attention | None = None, seed: int = 0) -> PreTrainedModel:
    """Builds the model of a block table, on the CPU, its weights random under `seed`.

    `attention` is the worker's own choice of implementation: only "eager" returns attention probabilities. Raises
    UnsafeConfig, ConfigError, UnknownArchitecture, or ModelMismatch, each before any weights are allocated.
    """
    check_model(model)
    return instantiate(model.config, model.head, attention=attention, seed=seed)


def check_model(model: Model) -> None:
    """Lays the model out without storage and compares its block table with `model.blocks`.

    Our own block map is what counts: a coordinator that calls a head a query block is told so, not believed. Raises
    as `build` does.
    """
    with torch.device("meta"), _bounded(model):
        laid_out = instantiate(model.config, model.head)
    if faults := list(_differences(model.by_name, {block.name: block for block in block_table(laid_out)})):
        raise ModelMismatch(faults)
    if (size := sum(buffer.nbytes for buffer in laid_out.buffers())) > MAX_BUFFER_BYTES + model.nbytes:
        raise UnsafeConfig(f"the config is refused: it needs {size} bytes of buffers beside its weights")


def instantiate(
    config: Mapping[str, JsonValue], head: Head, *, attention: Attention | None = None, seed: int = 0
) -> PreTrainedModel:
    """Builds a model that has no block table to be checked against yet. Float32 unless the config names a dtype.

    Leaves the global random state as it was. Raises UnsafeConfig or ConfigError.
    """
    made = config_from(config)
    options: dict[str, Any] = {"trust_remote_code": False, "dtype": made.dtype or torch.float32}
    if attention:
        options["attn_implementation"] = attention
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return cast("PreTrainedModel", AUTO_CLASSES[head].from_config(made, **options))
    except ModelMismatch:
        raise
    except Exception as error:  # a hostile or mistaken size fails in any of a model's own ways
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"transformers builds no {made.model_type} for {head}: {reason}") from error


@contextmanager
def _bounded(model: Model) -> Iterator[None]:
    """Stops a model that is being laid out once it has far outgrown its table: a billion layers never get built.

    The slack is for tied weights, which transformers first makes several times.
    """
    count, nbytes = 8 * len(model.blocks) + 64, 8 * model.nbytes + (1 << 20)

    def spend(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> None:
        nonlocal count, nbytes
        # The hook sees every module made in this process, so what other threads allocate is told apart by its device.
        if parameter is not None and parameter.device.type == "meta":
            count, nbytes = count - 1, nbytes - parameter.nbytes
            if count < 0 or nbytes < 0:
                raise ModelMismatch(
                    [f"the config describes a model far larger than its table of {model.nbytes} bytes"]
                )

    handle = register_module_parameter_registration_hook(spend)
    try:
        yield
    finally:
        handle.remove()


def _differences(told: Mapping[str, Block], found: Mapping[str, Block]) -> Iterator[str]:
    for name in told.keys() - found.keys():
        yield f"{name}: missing from the model that the config builds"
    for name in found.keys() - told.keys():
        yield f"{name}: unexpected, in the model but not in the table"
    for name in told.keys() & found.keys():
        for key in ("role", "layer", "shape", "dtype", "part"):
            if (ours := getattr(found[name], key)) != (theirs := getattr(told[name], key)):
                yield f"{name}: {key} is {ours}, not {theirs}"


def read_block(tensors: Mapping[str, Tensor], block: Block) -> np.ndarray:
    """A copy of the block's values, C-contiguous and little-endian, of its shape and dtype.

    `tensors` are a model's `named_tensors`, on any device. Raises ModelMismatch if they do not hold such a block.
    """
    tensor = _tensor_of(tensors, block).detach()
    if block.part:
        tensor = tensor.index_select(block.part.axis, _rows(block.part.index(), tensor))
    values = tensor.to("cpu", copy=True).contiguous()
    # numpy has no bfloat16 of its own, so the bits cross as integers and are named again on the other side.
    plain = values.view(torch.int16) if values.dtype is torch.bfloat16 else values
    return plain.numpy().view(NUMPY_DTYPES[block.dtype])


def write_block(tensors: Mapping[str, Tensor], block: Block, values: np.ndarray) -> None:
    """Overwrites the block in place, leaving the tensor's other rows as they are.

    Raises ModelMismatch if the tensors hold no such block, or ValueError if `values` are not of its shape and dtype.
    """
    tensor = _tensor_of(tensors, block).detach()
    if values.shape != block.shape or values.dtype != NUMPY_DTYPES[block.dtype]:
        raise ValueError(f"{block.name} is {block.dtype} {block.shape}, not {values.dtype} {values.shape}")
    plain = values.view(np.int16) if block.dtype == "BF16" else values
    # torch takes no read-only memory, such as a blob's.
    source = torch.from_numpy(np.array(plain, order="C")).view(tensor.dtype).to(tensor.device)
    if block.part:
        tensor.index_copy_(block.part.axis, _rows(block.part.index(), tensor), source)
    else:
        tensor.copy_(source)


def _tensor_of(tensors: Mapping[str, Tensor], block: Block) -> Tensor:
    tensor = tensors.get(block.tensor)
    if tensor is None:
        raise ModelMismatch([f"{block.tensor}: missing from the model"])
    axis = block.part.axis if block.part else None
    alike = tensor.ndim == len(block.shape) and all(
        there == own for i, (there, own) in enumerate(zip(tensor.shape, block.shape, strict=True)) if i != axis
    )
    within = alike and (block.part is None or block.part.spans[-1][1] <= tensor.shape[block.part.axis])
    if not within or DTYPES.get(tensor.dtype) != block.dtype:
        raise ModelMismatch(
            [f"{block.name}: {block.dtype} {block.shape} is no part of {tensor.dtype} {tensor.shape}"]
        )
    return tensor


def _rows(index: np.ndarray, tensor: Tensor) -> Tensor:
    return torch.from_numpy(index).to(tensor.device)


class Freeze:
    """Trains the given blocks of a model and keeps every other bit of it as it is.

    Create it when the model is on its device. In each step call `mask_gradients` after the backward pass and before
    clipping, so that frozen rows do not count towards the norm, and `restore` after the optimizer's step, since
    weight decay and old moments move rows whose gradient is zero. Raises ModelMismatch for a block that the model
    lacks.
    """

    def __init__(self, model: nn.Module, train: Sequence[Block]) -> None:
        tensors = named_tensors(model)
        trained: dict[str, list[Block]] = {}
        for block in train:
            _tensor_of(tensors, block)
            trained.setdefault(block.tensor, []).append(block)
        self.parameters: list[nn.Parameter] = []
        """What to hand to an optimizer: the parameters with a trained block."""
        self._rows: list[tuple[Tensor, int, Tensor, Tensor]] = []  # tensor, axis, its frozen rows, their values
        self._buffers: list[tuple[Tensor, Tensor]] = []  # buffers move in the forward pass, not by gradients
        for name, tensor in tensors.items():
            if isinstance(tensor, nn.Parameter):
                tensor.requires_grad_(name in trained)
                if name in trained:
                    self.parameters.append(tensor)
                    self._keep(tensor, trained[name])
            elif name not in trained:
                self._buffers.append((tensor, tensor.detach().clone()))

    def _keep(self, tensor: Tensor, blocks: Sequence[Block]) -> None:
        parts = [block.part for block in blocks if block.part]
        if len(parts) < len(blocks):
            return
        axis = parts[0].axis
        covered = np.concatenate([part.index() for part in parts])
        frozen = _rows(np.setdiff1d(np.arange(tensor.shape[axis]), covered), tensor)
        if len(frozen):
            self._rows.append((tensor, axis, frozen, tensor.detach().index_select(axis, frozen)))

    def mask_gradients(self) -> None:
        """Zeroes the gradients of frozen rows."""
        for tensor, axis, frozen, _ in self._rows:
            if tensor.grad is not None:
                tensor.grad.index_fill_(axis, frozen, 0)

    def restore(self) -> None:
        """Puts frozen rows and buffers back, bit for bit."""
        for tensor, axis, frozen, values in self._rows:
            tensor.detach().index_copy_(axis, frozen, values)
        for buffer, values in self._buffers:
            buffer.copy_(values)
