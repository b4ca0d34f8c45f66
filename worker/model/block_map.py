"""Finds a model's blocks: which tensor, or which rows of a fused one, is a query, a key, a value.

An attention is recognised by the names of what it holds, and by its class where a fused projection could be ordered
in several ways; `LAYOUTS` in `worker/model/layouts.py` has one row for each arrangement, and a new family is a new
row, or a file with a mapping. A tensor that looks like attention and that nothing explains is refused, with its name
(`UnknownArchitecture`), because training or sending the wrong rows is not noticed by any loss.

Roles, in the order in which they are given:

- prompt, adapter: what Tessera itself added to the model (`worker/model/adapters.py`). An adapter also knows the
roles of
  its matrix (`adapts`). Beside a fused matrix, factor A serves all parts, and B's rows divide as the matrix's do;
- what a mapping says, if there is one;
- query, key, value, output: what a row of `LAYOUTS` says; biases go with their weights. Whatever else moves the
  attention's scores is a query or a key too: norms of queries and keys, tables of relative positions (`SCORES` names
  those outside the attention), the latent from which keys and values are unfolded. So training the values alone never
  changes who attends to whom in their own layer;
- head: what lies outside the base model (classifier, language-model head), and in a model that is its own base (CLIP)
  the modules of `OWN_HEADS`: projections into the joint space, their scale, classifiers;
- norm: any other normalisation;
- embedding: token, position and patch embeddings, class tokens;
- mlp: what is in a stack under one of the names in `MLPS`;
- other: poolers, layer scales, buffers, and whatever else no rule names.

`layer` counts within a stack, so a model with two towers has two layers 0: their names tell them apart. Layers that
share their tensors (ALBERT) are as many as there are sets of tensors: `layer` is the group.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tessera.shared.model.blocks import Block, Role, TensorSlice, check_table
from tessera.shared.model.spec import stored_name
from tessera.shared.tensors.dtypes import DType
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
    divided,
)

Claim = Role | Mapping[Role, TensorSlice]
"""What a tensor is: of one role, or fused of several parts."""

ADAPTER = re.compile(r"(?P<matrix>.+)\.lora_(?P<factor>[AB])\..+")

INSERTED: tuple[tuple[re.Pattern[str], Role], ...] = ((re.compile(r"prompts\..+"), "prompt"), (ADAPTER, "adapter"))
"""The names of what is added to a model, and their roles. A matrix beside an adapter keeps the role that it has."""

KERNEL_AND_VALUE: frozenset[Role] = frozenset({"query", "key", "value"})

DTYPES: dict[torch.dtype, DType] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}


class UnknownArchitecture(ValueError):
    """A model has attention that neither `LAYOUTS` nor a mapping explains. `tensors` are what was not understood."""

    def __init__(self, problem: str, tensors: Iterable[str]) -> None:
        self.tensors = tuple(sorted(tensors))
        shown = ", ".join(self.tensors[:12]) + (", ..." if len(self.tensors) > 12 else "")
        super().__init__(f"{problem}: {shown}. Describe it in a mapping file (docs/blockmap.md)")


@dataclass(frozen=True)
class _Attention:
    """An attention found in a model, at `path`, and the row that explains it."""

    path: str
    module: nn.Module
    layout: ModelLayout


@dataclass(frozen=True)
class _Told:
    """What is said of a tensor, by a mapping or by its own name: its claim, and its layer if that is said too."""

    claim: Claim
    layer: int | None


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return all that is learnt or averaged: parameters and persistent floating-point buffers, each once, but empty
    ones.

    A tensor with several names (tied weights) has the first of `named_parameters`. The tensors are the model's own.
    """
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    saved = model.state_dict(keep_vars=True)
    buffers = model.named_buffers()
    tensors |= {name: buffer for name, buffer in buffers if name in saved and buffer.is_floating_point()}
    # Some families make a parameter without elements where a size in the config is 0 (DINOv3's registers).
    return {name: tensor for name, tensor in tensors.items() if tensor.numel()}


def block_table(model: nn.Module, mapping: MappingFile | None = None) -> tuple[Block, ...]:
    """Return the model's blocks, covering each of `named_tensors` exactly once, in that order.

    Works on the meta device. A mapping is stronger than `LAYOUTS`. Raises UnknownArchitecture for attention
    that cannot be resolved, with the names of the tensors in question, MappingError for a mapping that does not fit
    the model, and ValueError for a parameter that is not of an averageable floating-point type.
    """
    tensors = named_tensors(model)
    inserted = _inserted(tensors)
    own = {name: tensor for name, tensor in tensors.items() if name not in inserted}
    told = inserted | (_told(model, own, mapping) if mapping else {})
    claims, paths = _all_claims(model, tensors, told)
    stacks = {stack for path in paths if (stack := _outermost_stack(model, path))}
    blocks: list[Block] = []
    unexplained: list[str] = []
    for name, tensor in tensors.items():
        stack = _outermost_stack(model, name)
        layer = int(name[len(stack) + 1 :].split(".")[0]) if stack in stacks and stack else None
        if name in told and told[name].layer is not None:
            layer = told[name].layer
        claim = claims.get(name) or _plain_role(model, name, tensor, layer)
        if adapter := ADAPTER.fullmatch(name):
            matrix = f"{adapter['matrix']}.base_layer.weight"
            of_matrix = claims.get(matrix) or _plain_role(model, matrix, tensors[matrix], layer)
            blocks += _adapter_blocks(name, tensor, layer, adapter["factor"], of_matrix)
            continue
        if name not in claims and claim not in {"norm", "head"} and ATTENTION_LIKE.search(name, len(stack or "")):
            unexplained.append(name)
        blocks += _blocks(name, tensor, layer, claim)
    if unexplained:
        raise UnknownArchitecture(f"{type(model).__name__} has attention of an unknown layout", unexplained)
    check_table(blocks)
    return tuple(blocks)


def _all_claims(
    model: nn.Module, tensors: Mapping[str, Tensor], told: Mapping[str, _Told]
) -> tuple[dict[str, Claim], list[str]]:
    """Return what tensors are by their place in an attention or by what is said of them, and where there is
    attention."""
    by_name = {name: each.claim for name, each in told.items()}
    # Of an attention that is described whole, our own rows need not understand what stands beside it.
    attentions = [each for each in _attentions(model) if not told.keys() >= {*_under(each.path, tensors)}]
    paths = [name for name, claim in by_name.items() if not isinstance(claim, str) or claim in KERNEL_AND_VALUE]
    if not attentions and not paths:
        likely = [name for name in tensors if ATTENTION_LIKE.search(name)]
        raise UnknownArchitecture(f"no attention recognised in {type(model).__name__}", likely or tensors)
    claims: dict[str, Claim] = dict.fromkeys((name for name, _ in model.named_buffers()), "other")
    claims |= _score_claims(model, tensors) | by_name
    for attention in attentions:
        claims |= _claims(attention, tensors, claims) | by_name
    return claims, paths + [attention.path for attention in attentions]


def _attentions(model: nn.Module) -> list[_Attention]:
    found: list[_Attention] = []
    for path, module in model.named_modules():
        held = {name for name, _ in (*module.named_children(), *module.named_parameters(recurse=False))}
        rows = [
            layout
            for layout in LAYOUTS
            if layout.required <= held and (not layout.classes or type(module).__name__ in layout.classes)
        ]
        if rows:
            found.append(_Attention(path, module, max(rows, key=lambda row: len(row.required))))
    return found


def _score_claims(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Claim]:
    """Return what enters the scores of attention from outside it."""
    claims: dict[str, Claim] = {}
    for path, module in model.named_modules():
        for child, role in SCORES.get(type(module).__name__, {}).items():
            claims |= dict.fromkeys(_under(_join(path, child), tensors), role)
    return claims


def _claims(attention: _Attention, tensors: Mapping[str, Tensor], known: Mapping[str, Claim]) -> dict[str, Claim]:
    """Return what the row says of its attention's tensors. Raises UnknownArchitecture for one not in it nor
    `known`."""
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
            raise UnknownArchitecture(f"no {sibling} beside the attention {path}", _under(parent, tensors))
        claims |= dict.fromkeys(names, role)
    if unclaimed := [name for name in _under(path, tensors) if name not in claims and name not in known]:
        raise UnknownArchitecture(f"the attention {path} holds tensors of unknown role", unclaimed)
    return claims


def _parts(attention: _Attention, name: str, tensor: Tensor, division: Division) -> Claim:
    child = name[len(attention.path) :].lstrip(".").rpartition(".")[0]
    # Conv1D keeps its weight as [inputs, outputs], Linear as [outputs, inputs]; a bias has outputs only.
    axis = tensor.ndim - 1 if isinstance(attention.module.get_submodule(child), Conv1D) else 0
    rows = tensor.shape[axis]
    try:
        return _labelled(divided(division(attention.module, rows), rows), axis)
    except (ValueError, AttributeError) as error:  # another version's class may lack what its division reads
        raise UnknownArchitecture(f"a fused projection does not divide ({error})", [name]) from error


def _labelled(spans: Mapping[Role, Spans], axis: int) -> Mapping[Role, TensorSlice]:
    return {role: TensorSlice(label=role, axis=axis, spans=each) for role, each in spans.items()}


def _inserted(tensors: Iterable[str]) -> dict[str, _Told]:
    return {name: _Told(role, None) for pattern, role in INSERTED for name in tensors if pattern.fullmatch(name)}


def _told(model: nn.Module, tensors: Mapping[str, Tensor], mapping: MappingFile) -> dict[str, _Told]:
    """Return what the mapping says of each tensor that a row of it matches. Raises MappingError with all that is
    wrong."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if model_type != mapping.model_type:
        raise MappingError(f"the mapping is for {mapping.model_type}, and the model is a {model_type}")
    told: dict[str, _Told] = {}
    faults: list[str] = []
    for row in mapping.tensors:
        matches = {name: match for name in tensors if (match := row.match(stored_name(name)))}
        if not matches:
            faults.append(f"no tensor is called {row.names}")
        faults += [f"{name} is matched by two rows" for name in matches if name in told]
        for name, match in matches.items():
            layer = match.groupdict().get("layer")
            try:
                told[name] = _Told(_claim_of(row, tensors[name]), None if layer is None else int(layer))
            except ValueError as error:
                faults.append(f"{name}: {error}")
    if faults:
        raise MappingError(f"the mapping of {mapping.model_type} does not fit: " + "; ".join(sorted(set(faults))))
    return told


def _claim_of(row: TensorPattern, tensor: Tensor) -> Claim:
    if row.role is not None:
        return row.role
    if not -tensor.ndim <= row.axis < tensor.ndim:
        raise ValueError(f"it has no axis {row.axis}")
    axis = row.axis % tensor.ndim
    return _labelled(divided([(piece.role, piece.rows) for piece in row.fused], tensor.shape[axis]), axis)


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
        raise ValueError(
            f"{name} is {tensor.dtype}, which cannot be averaged: load the model in a floating-point type"
        )
    dtype = DTYPES[tensor.dtype]
    if isinstance(claim, str):
        yield Block(tensor=name, role=claim, layer=layer, shape=tuple(tensor.shape), dtype=dtype)
        return
    for role, part in claim.items():
        shape = tuple(part.rows if axis == part.axis else size for axis, size in enumerate(tensor.shape))
        yield Block(tensor=name, part=part, role=role, layer=layer, shape=shape, dtype=dtype)


def _adapter_blocks(name: str, tensor: Tensor, layer: int | None, factor: str, matrix: Claim) -> Iterator[Block]:
    """Yield the blocks of an adapter's factor, A [rank, inputs] or B [outputs, rank], beside a matrix of that
    claim."""
    if isinstance(matrix, str):
        matrix_roles: tuple[Role, ...] = (matrix,)
        claim: Claim = "adapter"
    else:
        matrix_roles = tuple(matrix)
        # A matrix may keep its outputs on the other axis (Conv1D); B has them first.
        parts = {role: part.model_copy(update={"axis": 0}) for role, part in matrix.items()}
        claim = parts if factor == "B" else "adapter"
    for block in _blocks(name, tensor, layer, claim):
        adapts = (block.role,) if block.part else matrix_roles
        yield block.model_copy(update={"role": "adapter", "adapts": adapts})


def _outermost_stack(model: nn.Module, path: str) -> str | None:
    """Return the path of the first list of modules on the way to `path`."""
    steps = path.split(".")[:-1]
    prefixes = (".".join(steps[:length]) for length in range(1, len(steps) + 1))
    stacks = (nn.ModuleList, nn.Sequential)
    return next((prefix for prefix in prefixes if isinstance(model.get_submodule(prefix), stacks)), None)


def _under(path: str, names: Iterable[str]) -> list[str]:
    """Return those of the names that are `path` or lie beneath it; the empty path is the whole model."""
    return [name for name in names if not path or name == path or name.startswith(f"{path}.")]


def _join(parent: str, child: str) -> str:
    return f"{parent}.{child}" if parent else child
