"""The block map: the role and layer of each tensor of a model, or of each part of a fused tensor.

An attention module is recognised by the names of its children, and by its class where the order of a fused projection
is ambiguous. `LAYOUTS` in `worker/model/layouts.py` has one row per arrangement; a new family needs a new row or a
mapping file. A tensor that looks like attention but matches no row is refused by name (`UnknownArchitecture`),
because no loss reveals that the wrong rows were trained or sent.

Roles, in order of precedence:

- prompt, adapter: added by Tessera (`worker/model/prompts.py`, `worker/model/lora.py`). An adapter also has its
  matrix's roles (`adapts`). Beside a fused matrix, factor A serves all parts, and B's rows divide as the matrix's do;
- the roles that a mapping file gives;
- query, key, value, output: given by a row of `LAYOUTS`; biases go with their weights. Every other tensor that
  changes the attention scores is a query or a key too: norms of queries and keys, tables of relative positions
  (`SCORES` lists those outside the attention), the latent from which keys and values are computed. So training values
  alone never changes the attention probabilities of their own layer;
- head: everything outside the base model (classifier, language-model head), and in a model that is its own base
  (CLIP) the modules of `OWN_HEADS`: projections into the joint space, their scale, classifiers;
- norm: any other normalisation;
- embedding: token, position and patch embeddings, class tokens;
- mlp: tensors of a stack under one of the names in `MLPS`;
- other: poolers, layer scales and the rest.

A buffer, such as a batch normalisation's running statistics, has the role and the layer of its module's parameters,
so that a selector by these takes a module whole.

`layer` counts within a stack: in a model with two towers, both have a layer 0, under different names. Where layers
share tensors (ALBERT), `layer` is the index of the shared group.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tessera.shared.model.blocks import Block, Role, TensorSlice, check_table
from tessera.shared.model.spec import stored_name
from tessera.shared.tensors.dtypes import NUMPY_DTYPES, DType
from tessera.shared.tensors.lazy import Array
from tessera.shared.tensors.statistics import module_of
from tessera.worker.errors import UnknownArchitecture
from tessera.worker.model.layouts import (
    ATTENTION_LIKE,
    LAYOUTS,
    MLPS,
    OWN_HEADS,
    SCORES,
    Division,
    MappingError,
    MappingFile,
    ModelLayout,
    Spans,
    TensorPattern,
    spans_by_role,
)

Claim = Role | Mapping[Role, TensorSlice]
"""A tensor's single role, or the parts of a fused tensor by role."""

ADAPTER = re.compile(r"(?P<matrix>.+)\.lora_(?P<factor>A|B|magnitude_vector)\..+")

INSERTED: tuple[tuple[re.Pattern[str], Role], ...] = ((re.compile(r"prompts\..+"), "prompt"), (ADAPTER, "adapter"))
"""Name patterns of the tensors that Tessera adds, and their roles. A matrix beside an adapter keeps its own role."""

KERNEL_AND_VALUE: frozenset[Role] = frozenset({"query", "key", "value"})

DTYPES: dict[torch.dtype, DType] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}


def numpy_view(tensor: Tensor) -> Array:
    """Return an array that shares the memory of a tensor on the CPU."""
    # numpy has no bfloat16, so the bits are passed as int16 and reinterpreted.
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(NUMPY_DTYPES["BF16"])
    array: Array = tensor.numpy()
    return array


def torch_view(array: Array) -> Tensor:
    """Return a tensor that shares the memory of an array, which torch may write to."""
    if array.dtype == NUMPY_DTYPES["BF16"]:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


@dataclass(frozen=True)
class _Attention:
    """An attention module at `path` of a model, and the row of `LAYOUTS` that matches it."""

    path: str
    module: nn.Module
    layout: ModelLayout


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return all non-empty parameters and persistent floating-point buffers, each once. They share the model's
    memory.

    A tensor with several names (tied weights) has its first name in `named_parameters`.
    """
    tensors: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    seen: set[int] = set()
    # In one walk over the modules, which takes longer than the rest.
    for path, module in model.named_modules():
        for found, own in ((tensors, module._parameters), (buffers, module._buffers)):  # noqa: SLF001 (as torch does)
            for name, tensor in own.items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    found[f"{path}.{name}" if path else name] = tensor
    if buffers := {name: buffer for name, buffer in buffers.items() if buffer.is_floating_point()}:
        saved = model.state_dict(keep_vars=True)
        tensors |= {name: buffer for name, buffer in buffers.items() if name in saved}
    # Where a size in the config is 0, some families create a parameter without elements (DINOv3's registers).
    return {name: tensor for name, tensor in tensors.items() if tensor.numel()}


def tied_names(model: nn.Module) -> dict[str, list[str]]:
    """Return the further names of parameters with several (tied weights), by the name in `named_tensors`."""
    first = {id(tensor): name for name, tensor in named_tensors(model).items()}
    tied: dict[str, list[str]] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        if (known := first.get(id(tensor), name)) != name:
            tied.setdefault(known, []).append(name)
    return tied


def block_table(model: nn.Module, mapping: MappingFile | None = None) -> tuple[Block, ...]:
    """Return the model's blocks, covering each of `named_tensors` exactly once, in that order.

    Works on the meta device. A mapping takes precedence over `LAYOUTS`. Raises UnknownArchitecture, with the names of
    the tensors, for attention that cannot be resolved, MappingError for a mapping that does not fit the model, and
    ValueError for a parameter whose dtype cannot be averaged.
    """
    tensors = named_tensors(model)
    stated: dict[str, Claim] = {
        name: role for pattern, role in INSERTED for name in tensors if pattern.fullmatch(name)
    }
    layers: dict[str, int] = {}
    if mapping:
        mapped, layers = _mapped_claims(
            model, {name: tensors[name] for name in tensors if name not in stated}, mapping
        )
        stated |= mapped
    parameters = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, nn.Parameter)}
    claims, paths = _all_claims(model, parameters, stated)
    by_module: dict[str, list[str]] = {}
    for name in parameters:
        by_module.setdefault(module_of(name), []).append(name)
    stacks = {stack for path in paths if (stack := _outermost_stack(model, path))}
    blocks: list[Block] = []
    unexplained: list[str] = []
    for name, tensor in tensors.items():
        stack = _outermost_stack(model, name)
        source = name
        if name not in parameters and name not in stated:
            source = _parameter_of(tensor, by_module.get(module_of(name), ()), parameters) or name
        layer = layers.get(source)
        if layer is None and stack and stack in stacks:
            layer = int(name[len(stack) + 1 :].split(".")[0])
        claim = claims.get(source) or _plain_role(model, source, tensors[source], layer)
        if not isinstance(claim, str) and tensors[source].shape != tensor.shape:
            claim = "other"  # a buffer that a fused projection's parts share
        if adapter := ADAPTER.fullmatch(name):
            matrix = f"{adapter['matrix']}.base_layer.weight"
            of_matrix = claims.get(matrix) or _plain_role(model, matrix, tensors[matrix], layer)
            blocks += _adapter_blocks(name, tensor, layer, adapter["factor"], of_matrix)
            continue
        if (
            name in parameters
            and name not in claims
            and claim not in {"norm", "head"}
            and ATTENTION_LIKE.search(name, len(stack or ""))
        ):
            unexplained.append(name)
        blocks += _blocks(name, tensor, layer, claim)
    if unexplained:
        raise UnknownArchitecture(f"{type(model).__name__} has attention of an unknown layout", unexplained)
    check_table(blocks)
    return tuple(blocks)


def _all_claims(
    model: nn.Module, tensors: Mapping[str, Tensor], stated: Mapping[str, Claim]
) -> tuple[dict[str, Claim], list[str]]:
    """Return the claims on parameters in attention or in `stated`, and the paths at which the model has attention."""
    # An attention that the mapping describes completely need not match a row of `LAYOUTS`.
    attentions = [each for each in _attentions(model) if not stated.keys() >= {*_under(each.path, tensors)}]
    paths = [name for name, claim in stated.items() if not isinstance(claim, str) or claim in KERNEL_AND_VALUE]
    if not attentions and not paths:
        likely = [name for name in tensors if ATTENTION_LIKE.search(name)]
        raise UnknownArchitecture(f"no attention recognised in {type(model).__name__}", likely or tensors)
    claims: dict[str, Claim] = {**_score_claims(model, tensors), **stated}
    for attention in attentions:
        claims |= {**_claims(attention, tensors, claims), **stated}
    return claims, paths + [attention.path for attention in attentions]


def _attentions(model: nn.Module) -> list[_Attention]:
    attentions: list[_Attention] = []
    for path, module in model.named_modules():
        children = {name for name, _ in (*module.named_children(), *module.named_parameters(recurse=False))}
        rows = [
            layout
            for layout in LAYOUTS
            if layout.required <= children and (not layout.classes or type(module).__name__ in layout.classes)
        ]
        if rows:
            attentions.append(_Attention(path, module, max(rows, key=lambda row: len(row.required))))
    return attentions


def _score_claims(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Claim]:
    """Return the claims on tensors that enter attention scores from outside the attention module."""
    claims: dict[str, Claim] = {}
    for path, module in model.named_modules():
        for child, role in SCORES.get(type(module).__name__, {}).items():
            claims |= dict.fromkeys(_under(_join(path, child), tensors), role)
    return claims


def _claims(attention: _Attention, tensors: Mapping[str, Tensor], known: Mapping[str, Claim]) -> dict[str, Claim]:
    """Return the row's claims on its attention's tensors. Raises UnknownArchitecture if a tensor stays unclaimed."""
    claims: dict[str, Claim] = {}
    path, layout = attention.path, attention.layout
    for child, role in {**layout.whole, **layout.optional}.items():
        claims |= dict.fromkeys(_under(_join(path, child), tensors), role)
    for child, division in layout.fused.items():
        for name in _under(_join(path, child), tensors):
            if name not in known:
                claims[name] = _parts(attention, name, tensors[name], division)
    parent = path.rpartition(".")[0]
    for sibling, role in layout.beside.items():
        if not (names := _under(_join(parent, sibling), tensors)):
            raise UnknownArchitecture(f"there is no {sibling} beside the attention {path}", _under(parent, tensors))
        claims |= dict.fromkeys(names, role)
    if unclaimed := [name for name in _under(path, tensors) if name not in claims and name not in known]:
        raise UnknownArchitecture(f"the attention {path} holds tensors of unknown role", unclaimed)
    return claims


def _parts(attention: _Attention, name: str, tensor: Tensor, division: Division) -> Claim:
    child = name[len(attention.path) :].lstrip(".").rpartition(".")[0]
    # Conv1D stores its weight as [inputs, outputs], Linear as [outputs, inputs]; a bias has outputs only.
    axis = tensor.ndim - 1 if isinstance(attention.module.get_submodule(child), Conv1D) else 0
    rows = tensor.shape[axis]
    try:
        return _slices_by_role(spans_by_role(division(attention.module, rows), rows), axis)
    except (ValueError, AttributeError) as error:  # another version's class may lack an attribute that we read
        raise UnknownArchitecture(f"a fused projection does not divide into its roles ({error})", [name]) from error


def _slices_by_role(spans: Mapping[Role, Spans], axis: int) -> Mapping[Role, TensorSlice]:
    return {role: TensorSlice(label=role, axis=axis, spans=each) for role, each in spans.items()}


def _mapped_claims(
    model: nn.Module, tensors: Mapping[str, Tensor], mapping: MappingFile
) -> tuple[dict[str, Claim], dict[str, int]]:
    """Return the mapping's claims on the tensors that its rows match, and the layers that it gives.

    Raises MappingError, listing every fault.
    """
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if model_type != mapping.model_type:
        raise MappingError(f"the mapping is for {mapping.model_type}, but the model is a {model_type}")
    claims: dict[str, Claim] = {}
    layers: dict[str, int] = {}
    faults: list[str] = []
    for row in mapping.tensors:
        matches = {name: match for name in tensors if (match := row.match(stored_name(name)))}
        if not matches:
            faults.append(f"no tensor matches {row.names}")
        faults += [f"{name} is matched by two rows" for name in matches if name in claims]
        for name, match in matches.items():
            if layer := match.groupdict().get("layer"):
                layers[name] = int(layer)
            try:
                claims[name] = _claim_of(row, tensors[name])
            except ValueError as error:
                faults.append(f"{name}: {error}")
    if faults:
        raise MappingError(f"the mapping of {mapping.model_type} does not fit: " + "; ".join(sorted(set(faults))))
    return claims, layers


def _claim_of(row: TensorPattern, tensor: Tensor) -> Claim:
    if row.role is not None:
        return row.role
    if not -tensor.ndim <= row.axis < tensor.ndim:
        raise ValueError(f"it has no axis {row.axis}")
    axis = row.axis % tensor.ndim
    return _slices_by_role(spans_by_role([(piece.role, piece.rows) for piece in row.fused], tensor.shape[axis]), axis)


def _parameter_of(buffer: Tensor, siblings: Iterable[str], parameters: Mapping[str, Tensor]) -> str | None:
    """Return the parameter of a buffer's module that shows its role, one of its shape if there is any."""
    return min(siblings, key=lambda name: parameters[name].shape != buffer.shape, default=None)


def _plain_role(model: nn.Module, name: str, tensor: Tensor, layer: int | None) -> Role:
    """Return the role of a tensor that belongs to no attention."""
    steps = name.split(".")
    owner = model.get_submodule(".".join(steps[:-1]))
    prefix = str(getattr(model, "base_model_prefix", ""))
    has_base = bool(prefix) and hasattr(model, prefix)
    if steps[0] != prefix if has_base else steps[0] in OWN_HEADS:
        return "head"
    if "norm" in type(owner).__name__.lower() and tensor.ndim == 1:
        return "norm"
    if isinstance(owner, nn.Embedding) or any("embed" in step for step in steps):
        return "embedding"
    return "mlp" if layer is not None and MLPS.intersection(steps) else "other"


def _blocks(name: str, tensor: Tensor, layer: int | None, claim: Claim) -> Iterator[Block]:
    if tensor.dtype not in DTYPES:
        raise ValueError(f"{name} is {tensor.dtype}, which cannot be averaged: load it in a floating-point dtype")
    dtype = DTYPES[tensor.dtype]
    if isinstance(claim, str):
        yield Block(tensor=name, role=claim, layer=layer, shape=tuple(tensor.shape), dtype=dtype)
        return
    for role, part in claim.items():
        shape = tuple(part.rows if axis == part.axis else size for axis, size in enumerate(tensor.shape))
        yield Block(tensor=name, part=part, role=role, layer=layer, shape=shape, dtype=dtype)


def _adapter_blocks(name: str, tensor: Tensor, layer: int | None, factor: str, matrix: Claim) -> Iterator[Block]:
    """Yield the blocks of an adapter's A [rank, inputs], B [outputs, rank] or, in DoRA, lengths of rows [outputs].
    `matrix` is its matrix's claim."""
    if isinstance(matrix, str):
        matrix_roles: tuple[Role, ...] = (matrix,)
        claim: Claim = "adapter"
    else:
        matrix_roles = tuple(matrix)
        # A Conv1D's outputs are its last axis; B's outputs are always its first.
        parts = {role: part.model_copy(update={"axis": 0}) for role, part in matrix.items()}
        claim = "adapter" if factor == "A" else parts
    for block in _blocks(name, tensor, layer, claim):
        adapts = (block.role,) if block.part else matrix_roles
        yield block.model_copy(update={"role": "adapter", "adapts": adapts})


def _outermost_stack(model: nn.Module, path: str) -> str | None:
    """Return the path of the outermost list of modules that contains `path`."""
    steps = path.split(".")[:-1]
    prefixes = (".".join(steps[:length]) for length in range(1, len(steps) + 1))
    stacks = (nn.ModuleList, nn.Sequential)
    return next((prefix for prefix in prefixes if isinstance(model.get_submodule(prefix), stacks)), None)


def _under(path: str, names: Iterable[str]) -> list[str]:
    """Return the names that are `path` or lie beneath it; the empty path is the whole model."""
    return [name for name in names if not path or name == path or name.startswith(f"{path}.")]


def _join(parent: str, child: str) -> str:
    return f"{parent}.{child}" if parent else child
