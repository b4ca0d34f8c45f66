"""Building a run's model, and reading and writing its blocks.

`check_model` lays the model out without storage and compares it with the block table, before memory is allocated.
"""

import importlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from threading import RLock, get_ident
from types import ModuleType
from typing import Any

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
    PreTrainedConfig,
    PreTrainedModel,
)

from tessera.shared.model.blocks import Block
from tessera.shared.model.spec import Float32Role, Head, Lora, Model, Prompts
from tessera.shared.tensors.dtypes import NUMPY_DTYPES
from tessera.shared.updates.model_folder import ModelFolder
from tessera.shared.version import install_line
from tessera.worker.errors import ConfigError, ModelMismatch, UnsafeConfig
from tessera.worker.model.block_map import DTYPES, block_table, named_tensors, numpy_view, tied_names, torch_view
from tessera.worker.model.config import config_from
from tessera.worker.model.layouts import MappingFile
from tessera.worker.model.prompts import add_prompts

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
"""Transformers' class for each head. Untyped, because transformers types them only partly."""


ALWAYS_CAUSAL = ("gpt_neox", "gpt_neox_japanese", "trocr")
"""Model types with a config of `is_decoder`, whose causal language models never read it."""


def require_head(config: PreTrainedConfig, head: Head) -> None:
    """Raise ConfigError with the heads that a config's models can have, if this head is none of them."""
    # No public interface lists the configs of an Auto class.
    own = [name for name, auto in AUTO_CLASSES.items() if type(config) in auto._model_mapping]  # noqa: SLF001
    if not config.sub_configs.keys() >= {"text_config", "vision_config"}:
        own = [name for name in own if name != "contrastive"]
    if head not in own:
        raise ConfigError(f"a {config.model_type} cannot have the head {head}; it can: {', '.join(own)}")
    if is_decoder_of(config, head) != getattr(config, "is_decoder", None):
        sees = "sees the tokens that it is to predict" if head == "causal-lm" else "does not see the tokens after one"
        raise ConfigError(
            f"is_decoder is {str(config.is_decoder).lower()} in the config of this {config.model_type}, with which a "
            f"model for {head} {sees}: make the model again with `tessera model init`, which sets it"
        )


def is_decoder_of(config: PreTrainedConfig, head: Head) -> bool | None:
    """Return the value of a config's `is_decoder` that the head needs; that of the config where it decides nothing.

    In BERT and its kin it alone decides whether a token sees those after it.
    """
    own: bool | None = getattr(config, "is_decoder", None)
    if own is None or head == "features" or config.is_encoder_decoder or config.model_type in ALWAYS_CAUSAL:
        return own
    return head == "causal-lm"


MAX_BUFFER_BYTES = 1 << 30
"""Limit on masks and position tables: they are not in the block table, so nothing else bounds them."""


def laid_out(
    model: Model,
    mapping: MappingFile | None = None,
    *,
    seed: int = 0,
    random_weights: bool = True,
) -> PreTrainedModel:
    """Return the model of a block table, which is not compared with it. See `instantiate`."""
    return instantiate(
        model.config,
        model.head,
        seed=seed,
        prompts=model.prompts,
        lora=model.lora,
        float32=model.float32,
        mapping=mapping,
        random_weights=random_weights,
    )


def load(folder: ModelFolder, mapping: MappingFile | None = None) -> PreTrainedModel:
    """Return a folder's model with its prompts and adapters, which `from_pretrained` ignores.

    Raises as `check_model`.
    """
    check_model(folder.model, mapping)
    model = laid_out(folder.model, mapping, random_weights=False)
    allocate(model, torch.device("cpu"))
    tensors = named_tensors(model)
    for block, raw in folder.blocks():
        write_block(tensors, block, np.frombuffer(raw, NUMPY_DTYPES[block.dtype]).reshape(block.shape))
    return model


def check_model(model: Model, mapping: MappingFile | None = None) -> tuple[Block, ...]:
    """Lay the model out without storage, compare its block table with `model.blocks`, and return it.

    The worker trusts only its own block map: if the coordinator's table calls a head a query block, the model is
    rejected. `worker/model/sandbox.py` bounds what transformers allocates besides parameters. Raises
    UnsafeConfig, ConfigError, UnknownArchitecture or ModelMismatch.
    """
    with torch.device("meta"), _bounded(model):
        without_storage = laid_out(model, mapping)
    table = block_table(without_storage, mapping)
    if faults := list(_differences(model.by_name, {block.name: block for block in table})):
        raise ModelMismatch(faults)
    if (size := sum(buffer.nbytes for buffer in without_storage.buffers())) > MAX_BUFFER_BYTES + model.nbytes:
        raise UnsafeConfig(
            f"the config is refused: it needs {size} bytes of buffers besides its weights, and "
            f"{MAX_BUFFER_BYTES + model.nbytes} are allowed"
        )
    return table


def tied_in(model: Model, mapping: MappingFile | None = None) -> dict[str, tuple[str, ...]]:
    """Return the `tied_names` of a model that `check_model` has checked."""
    with torch.device("meta"):
        return {name: tuple(others) for name, others in tied_names(laid_out(model, mapping)).items()}


_BUILDING = RLock()
"""One thread builds at a time: torch's seed and transformers' registries are global."""


def instantiate(
    config: Mapping[str, JsonValue],
    head: Head,
    *,
    seed: int = 0,
    prompts: Prompts | None = None,
    lora: Lora | None = None,
    float32: Collection[Float32Role] = (),
    mapping: MappingFile | None = None,
    random_weights: bool = True,
) -> PreTrainedModel:
    """Build a model without comparing it with a block table. Float32 unless the config names a dtype.

    Leaves the global random state as it was, and gives transformers' own tensors the same values with and without
    prompts and adapters. Without `random_weights` the parameters have no storage until `allocate`; the buffers, such
    as position tables, have their values. The mapping locates the matrices to adapt. Raises UnsafeConfig or
    ConfigError, and with `lora` as `block_table`.
    """
    built = config_from(config)
    require_head(built, head)
    dtype = built.dtype or torch.float32
    with _BUILDING, torch.random.fork_rng(devices=[]), nullcontext() if random_weights else _without_storage():
        torch.default_generator.manual_seed(seed)
        try:
            model: PreTrainedModel = AUTO_CLASSES[head].from_config(built, trust_remote_code=False, dtype=dtype)
        except ModelMismatch:
            raise
        except Exception as error:  # each model class fails in its own way on a hostile or mistaken size
            reason = " ".join(str(error).split())[:300]
            raise ConfigError(f"transformers builds no {built.model_type} for {head}: {reason}") from error
        insert(model, prompts, lora, mapping, float32)
    return model


@contextmanager
def _without_storage() -> Iterator[None]:
    """Move each parameter that this thread registers in a module to the meta device, before it gets a value."""
    thread, moved = get_ident(), dict[int, tuple[nn.Parameter, nn.Parameter]]()

    def move(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.device.type == "meta" or get_ident() != thread:
            return None
        # A parameter with two names stays one.
        empty = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        return moved.setdefault(id(parameter), (parameter, empty))[1]

    # torch takes what a hook returns in place of the parameter, which its annotation leaves out.
    handle = register_module_parameter_registration_hook(move)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()


def allocate(model: nn.Module, device: torch.device) -> None:
    """Give each parameter without storage uninitialised memory on the device, and move all others there."""
    allocated: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.device.type == "meta":
                memory = torch.empty_like(parameter, device=device)
                own = allocated.setdefault(id(parameter), nn.Parameter(memory, parameter.requires_grad))
                module.register_parameter(name, own)
    model.to(device)


@contextmanager
def _bounded(model: Model) -> Iterator[None]:
    """Stop laying out a model once it far exceeds its table, so that a billion layers are never built.

    The slack is for tied weights, which transformers first creates several times.
    """
    thread, count, nbytes = get_ident(), 8 * len(model.blocks) + 64, 8 * model.nbytes + (1 << 20)

    def spend(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> None:
        nonlocal count, nbytes
        # The hook sees every module created in this process.
        if parameter is not None and parameter.device.type == "meta" and get_ident() == thread:
            count, nbytes = count - 1, nbytes - parameter.nbytes
            if count < 0 or nbytes < 0:
                raise ModelMismatch([f"the config describes a model far larger than its table: {model.nbytes} bytes"])

    handle = register_module_parameter_registration_hook(spend)
    try:
        yield
    finally:
        handle.remove()


def _differences(stated: Mapping[str, Block], built: Mapping[str, Block]) -> Iterator[str]:
    for name in stated.keys() - built.keys():
        yield f"{name}: missing from the model that the config builds"
    for name in built.keys() - stated.keys():
        yield f"{name}: unexpected, in the model but not in the table"
    for name in stated.keys() & built.keys():
        for key in ("role", "adapts", "layer", "shape", "dtype", "part"):
            if (ours := getattr(built[name], key)) != (theirs := getattr(stated[name], key)):
                yield f"{name}: {key} is {ours}, not {theirs}"


def insert(
    model: PreTrainedModel,
    prompts: Prompts | None,
    lora: Lora | None,
    mapping: MappingFile | None = None,
    float32: Collection[Float32Role] = (),
) -> None:
    """Add the prompts and adapters of a model document in place, and make the blocks of some roles float32.

    Their random values follow torch's seed.

    Raises ConfigError if the model does not support them or PEFT is not installed, and as `block_table` does.
    """
    if lora:
        _lora().add_lora(model, lora, block_table(model, mapping))
    if prompts:
        add_prompts(model, prompts)
    if float32:
        _make_float32(model, [block for block in block_table(model, mapping) if block.role in float32])


def _make_float32(model: nn.Module, blocks: Iterable[Block]) -> None:
    """Convert the tensors of these blocks to float32. A head's modules then convert their inputs; PEFT's adapters and
    the prompts do so by themselves."""
    hooked = set()
    for block in blocks:
        path, _, own = block.tensor.rpartition(".")
        module = model.get_submodule(path)
        tensor: Tensor = getattr(module, own)
        tensor.data = tensor.data.float()
        if block.role == "head" and path not in hooked and not any(True for _ in module.children()):
            module.register_forward_pre_hook(_cast_inputs)
            hooked.add(path)


def _cast_inputs(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    dtype = next(module.parameters()).dtype
    return tuple(each.to(dtype) if isinstance(each, Tensor) and each.is_floating_point() else each for each in args)


def merge_adapters(model: PreTrainedModel) -> None:
    """Add the adapters to their matrices in place, so that transformers alone can run the model."""
    _lora().merge_lora(model)


def activate_adapters(model: PreTrainedModel, parts: Collection[str]) -> None:
    """Let the model compute with these parts of its adapters alone."""
    _lora().activate_parts(model, parts)


def _lora() -> ModuleType:
    try:
        return importlib.import_module("tessera.worker.model.lora")
    except ImportError as error:
        raise ConfigError(
            f"the model has adapters, which need a package that is missing ({error}): {install_line('lora')}"
        ) from error


def read_block(tensors: Mapping[str, Tensor], block: Block) -> np.ndarray:
    """Return a copy of the block's values in its shape and dtype, C-contiguous and little-endian.

    `tensors` are a model's `named_tensors`, on any device. Raises ModelMismatch if they do not contain the block.
    """
    tensor = tensor_of(tensors, block).detach()
    if block.part:
        tensor = tensor.index_select(block.part.axis, rows_of(block.part.index(), tensor))
    return numpy_view(tensor.to("cpu", copy=True).contiguous())


def write_block(tensors: Mapping[str, Tensor], block: Block, values: np.ndarray) -> None:
    """Overwrite the block in place; the tensor's other rows stay unchanged.

    Raises ModelMismatch if `tensors` do not contain the block, and ValueError if `values` differ in shape or dtype.
    """
    tensor = tensor_of(tensors, block).detach()
    if values.shape != block.shape or values.dtype != NUMPY_DTYPES[block.dtype]:
        raise ValueError(f"{block.name} is {block.dtype} {block.shape}, not {values.dtype} {values.shape}")
    # torch does not accept read-only memory, such as a blob's.
    source = torch_view(np.require(values, requirements=["C", "W"])).to(tensor.device)
    if block.part:
        tensor.index_copy_(block.part.axis, rows_of(block.part.index(), tensor), source)
    else:
        tensor.copy_(source)


def memory_of(tensors: Mapping[str, Tensor], block: Block) -> np.ndarray | None:
    """Return the memory of a block, to be read and overwritten; None for a part of a tensor, and outside the CPU's
    memory. Raises ModelMismatch if `tensors` do not contain the block."""
    tensor = tensor_of(tensors, block).detach()
    if block.part or tensor.device.type != "cpu" or not tensor.is_contiguous():
        return None
    return numpy_view(tensor)


def tensor_of(tensors: Mapping[str, Tensor], block: Block) -> Tensor:
    """Return the tensor that contains the block. Raises ModelMismatch if there is none with its shape and dtype."""
    tensor = tensors.get(block.tensor)
    if tensor is None:
        raise ModelMismatch([f"{block.tensor}: missing from the model"])
    if block.part is None:
        within = tensor.shape == block.shape
    else:
        axis, shape = block.part.axis, tuple(tensor.shape)
        rows = block.shape[axis]
        alike = len(shape) == len(block.shape) and (*shape[:axis], rows, *shape[axis + 1 :]) == block.shape
        within = alike and block.part.spans[-1][1] <= shape[axis]
    if not within or DTYPES.get(tensor.dtype) != block.dtype:
        raise ModelMismatch([f"{block.name}: {block.dtype} {block.shape} is not in {tensor.dtype} {tensor.shape}"])
    return tensor


def rows_of(index: np.ndarray, tensor: Tensor) -> Tensor:
    """Return a part's row numbers as an index on the tensor's device."""
    return torch.from_numpy(index).to(tensor.device)
