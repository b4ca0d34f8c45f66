"""Builds the model that a run names, and reads and writes its blocks.

`build` allocates nothing until the model that the config describes has been laid out without storage and found to be
the one in the block table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, cast

import numpy as np
import torch
from pydantic import JsonValue
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from tessera.shared.model.blocks import Block
from tessera.shared.model.spec import Head, Lora, Model, Prompts
from tessera.shared.tensors.dtypes import NUMPY_DTYPES
from tessera.shared.updates.model_folder import ModelFolder
from tessera.worker.model.adapters import insert
from tessera.worker.model.block_map import DTYPES, block_table, named_tensors
from tessera.worker.model.config import ConfigError, UnsafeConfig, config_from
from tessera.worker.model.layouts import MappingFile

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

MAX_BUFFER_BYTES = 1 << 30
"""The most that masks and position tables may take: they are not in the block table, so nothing else bounds them."""


class ModelMismatch(ValueError):
    """A model is not the one that its block table describes. `faults` has a sentence for each block concerned."""

    def __init__(self, faults: Iterable[str]) -> None:
        self.faults = tuple(sorted(faults))
        super().__init__("the model and its block table disagree: " + "; ".join(self.faults))


def build(
    model: Model, *, attention: Attention | None = None, seed: int = 0, mapping: MappingFile | None = None
) -> PreTrainedModel:
    """Build the model of a block table, on the CPU, its weights random under `seed`.

    `attention` is the worker's own choice of implementation: only "eager" returns attention probabilities. Raises
    UnsafeConfig, ConfigError, UnknownArchitecture, or ModelMismatch, each before any weights are allocated.
    """
    check_model(model, mapping)
    return instantiate(
        model.config,
        model.head,
        attention=attention,
        seed=seed,
        prompts=model.prompts,
        lora=model.lora,
        mapping=mapping,
    )


def load(folder: ModelFolder, mapping: MappingFile | None = None) -> PreTrainedModel:
    """Return the model of a folder, with what Tessera added to it and `from_pretrained` leaves out. Raises as
    `build`."""
    model = build(folder.model, mapping=mapping)
    tensors = named_tensors(model)
    for block, raw in folder.blocks():
        write_block(tensors, block, np.frombuffer(raw, NUMPY_DTYPES[block.dtype]).reshape(block.shape))
    return model


def check_model(model: Model, mapping: MappingFile | None = None) -> tuple[Block, ...]:
    """Lay the model out without storage, compare its block table with `model.blocks`, and return it.

    Our own block map is what counts: a coordinator that calls a head a query block is told so, not believed. What the
    classes of transformers make beside parameters is not bounded here, but in `worker/model/sandbox.py`. Raises as
    `build` does.
    """
    with torch.device("meta"), _bounded(model):
        laid_out = instantiate(model.config, model.head, prompts=model.prompts, lora=model.lora, mapping=mapping)
    table = block_table(laid_out, mapping)
    if faults := list(_differences(model.by_name, {block.name: block for block in table})):
        raise ModelMismatch(faults)
    if (size := sum(buffer.nbytes for buffer in laid_out.buffers())) > MAX_BUFFER_BYTES + model.nbytes:
        raise UnsafeConfig(f"the config is refused: it needs {size} bytes of buffers beside its weights")
    return table


def instantiate(
    config: Mapping[str, JsonValue],
    head: Head,
    *,
    attention: Attention | None = None,
    seed: int = 0,
    prompts: Prompts | None = None,
    lora: Lora | None = None,
    mapping: MappingFile | None = None,
) -> PreTrainedModel:
    """Build a model that has no block table to be checked against yet. Float32 unless the config names a dtype.

    Leaves the global random state as it was, and gives transformers' own tensors the same values whatever is added.
    The mapping is for finding what adapters go beside. Raises UnsafeConfig or ConfigError, and with `lora` as
    `block_table`.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _plain(config, head, attention)
        insert(model, prompts, lora, mapping)
    return model


def _plain(config: Mapping[str, JsonValue], head: Head, attention: Attention | None) -> PreTrainedModel:
    made = config_from(config)
    options: dict[str, Any] = {"trust_remote_code": False, "dtype": made.dtype or torch.float32}
    if attention:
        options["attn_implementation"] = attention
    try:
        return cast("PreTrainedModel", AUTO_CLASSES[head].from_config(made, **options))
    except ModelMismatch:
        raise
    except Exception as error:  # a hostile or mistaken size fails in any of a model's own ways
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"transformers builds no {made.model_type} for {head}: {reason}") from error


@contextmanager
def _bounded(model: Model) -> Iterator[None]:
    """Stop a model that is being laid out once it has far outgrown its table: a billion layers never get built.

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
        for key in ("role", "adapts", "layer", "shape", "dtype", "part"):
            if (ours := getattr(found[name], key)) != (theirs := getattr(told[name], key)):
                yield f"{name}: {key} is {ours}, not {theirs}"


def read_block(tensors: Mapping[str, Tensor], block: Block) -> np.ndarray:
    """Return a copy of the block's values, C-contiguous and little-endian, of its shape and dtype.

    `tensors` are a model's `named_tensors`, on any device. Raises ModelMismatch if they do not hold such a block.
    """
    tensor = tensor_of(tensors, block).detach()
    if block.part:
        tensor = tensor.index_select(block.part.axis, rows_of(block.part.index(), tensor))
    values = tensor.to("cpu", copy=True).contiguous()
    # numpy has no bfloat16 of its own, so the bits cross as integers and are named again on the other side.
    plain = values.view(torch.int16) if values.dtype is torch.bfloat16 else values
    return plain.numpy().view(NUMPY_DTYPES[block.dtype])


def write_block(tensors: Mapping[str, Tensor], block: Block, values: np.ndarray) -> None:
    """Overwrite the block in place, leaving the tensor's other rows as they are.

    Raises ModelMismatch if the tensors hold no such block, or ValueError if `values` are not of its shape and dtype.
    """
    tensor = tensor_of(tensors, block).detach()
    if values.shape != block.shape or values.dtype != NUMPY_DTYPES[block.dtype]:
        raise ValueError(f"{block.name} is {block.dtype} {block.shape}, not {values.dtype} {values.shape}")
    plain = values.view(np.int16) if block.dtype == "BF16" else values
    # torch takes no read-only memory, such as a blob's.
    source = torch.from_numpy(np.array(plain, order="C")).view(tensor.dtype).to(tensor.device)
    if block.part:
        tensor.index_copy_(block.part.axis, rows_of(block.part.index(), tensor), source)
    else:
        tensor.copy_(source)


def tensor_of(tensors: Mapping[str, Tensor], block: Block) -> Tensor:
    """Return the tensor that the block is a part or all of. Raises ModelMismatch if there is none of its form."""
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


def rows_of(index: np.ndarray, tensor: Tensor) -> Tensor:
    """Return a part's rows as an index on the tensor's device."""
    return torch.from_numpy(index).to(tensor.device)
