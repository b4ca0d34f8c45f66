"""Finds a model's blocks: which tensor, or which rows of a fused one, is a query, a key, a value.

An attention is recognised by the names of what it holds, never by the model's type: `LAYOUTS` has one row for each
arrangement, and a new family is a new row. A tensor that looks like attention and that no row explains is refused
(`UnknownArchitecture`), because training or sending the wrong rows is not noticed by any loss.

Roles, in the order in which they are given:

- query, key, value, output: what a row of `LAYOUTS` says; biases go with their weights, and the norms of queries and
  keys with the queries and keys, since they too decide who attends to whom;
- head: what lies outside the base model (classifier, language-model head), and in a model that is its own base (CLIP)
  the modules of `OWN_HEADS`: projections into the joint space, their scale, classifiers;
- norm: any other normalisation;
- embedding: token, position and patch embeddings, class tokens;
- mlp: what is in a stack under one of the names in `MLPS`;
- other: poolers, layer scales, buffers, and whatever else no rule names.

`layer` counts within a stack, so a model with two towers has two layers 0: their names tell them apart.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from shared.blocks import Block, DType, Part, Role, check_table

Spans = tuple[tuple[int, int], ...]
Division = Callable[[nn.Module, int], Mapping[Role, Spans]]
"""How a fused projection divides: given the attention and its number of rows, each role's rows."""

Claim = Role | Mapping[Role, Part]
"""What a tensor is: of one role, or fused of several parts."""

DTYPES: dict[torch.dtype, DType] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}


def in_turn(*roles: Role) -> Division:
    """Equal runs of rows, one for each role, in this order."""

    def divide(_: nn.Module, rows: int) -> Mapping[Role, Spans]:
        if rows % len(roles):
            raise ValueError(f"{rows} rows do not divide into {len(roles)} equal parts")
        bounds = range(0, rows + 1, rows // len(roles))
        return {role: (span,) for role, span in zip(roles, pairwise(bounds), strict=True)}

    return divide


@dataclass(frozen=True)
class Layout:
    """One arrangement of an attention's projections, by the names of the attention's children.

    `whole` and `fused` are all there in an attention that the row explains, `optional` may be. `beside` are paths
    from the attention's parent, for families whose attention leaves its output projection to a sibling.
    """

    whole: Mapping[str, Role] = field(default_factory=dict)
    fused: Mapping[str, Division] = field(default_factory=dict)
    optional: Mapping[str, Role] = field(default_factory=dict)
    beside: Mapping[str, Role] = field(default_factory=dict)

    @property
    def required(self) -> frozenset[str]:
        return frozenset({*self.whole, *self.fused})


_NORMS: Mapping[str, Role] = {"q_norm": "query", "k_norm": "key"}

LAYOUTS: tuple[Layout, ...] = (
    # BERT and those built like it.
    Layout(whole={"query": "query", "key": "key", "value": "value"}, beside={"output.dense": "output"}),
    # Llama, Qwen, ViT. Grouped queries only make the key and value projections narrower.
    Layout(whole={"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "output"}, optional=_NORMS),
    # CLIP.
    Layout(whole={"q_proj": "query", "k_proj": "key", "v_proj": "value", "out_proj": "output"}),
    # GPT-2.
    Layout(whole={"c_proj": "output"}, fused={"c_attn": in_turn("query", "key", "value")}),
)

MLPS = frozenset({"mlp", "intermediate", "output", "fc1", "fc2", "ffn", "feed_forward"})

OWN_HEADS = frozenset({"visual_projection", "text_projection", "logit_scale", "logit_bias", "classifier"})

ATTENTION_LIKE = re.compile(r"attn|attention|qkv|(^|[._])(q|k|v|query|key|value)([._]|$)", re.IGNORECASE)


class UnknownArchitecture(ValueError):
    """A model has attention that no row of `LAYOUTS` explains. `tensors` are the names that were not understood."""

    def __init__(self, problem: str, tensors: Iterable[str]) -> None:
        self.tensors = tuple(sorted(tensors))
        shown = ", ".join(self.tensors[:12]) + (", ..." if len(self.tensors) > 12 else "")
        super().__init__(
            f"{problem}: {shown}. Use a family that LAYOUTS in worker/blockmap.py has a row for, or add its row"
        )


@dataclass(frozen=True)
class _Attention:
    """An attention found in a model, at `path`, and the row that explains it."""

    path: str
    module: nn.Module
    layout: Layout


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """All that is learnt or averaged: parameters and persistent floating-point buffers, each once.

    A tensor with several names (tied weights) has the first of `named_parameters`. The tensors are the model's own.
    """
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    saved = model.state_dict(keep_vars=True)
    buffers = model.named_buffers()
    return tensors | {name: buffer for name, buffer in buffers if name in saved and buffer.is_floating_point()}


def block_table(model: nn.Module) -> tuple[Block, ...]:
    """The model's blocks, covering each of `named_tensors` exactly once, in that order.

    Works on the meta device. Raises UnknownArchitecture for attention that cannot be resolved, with the names of the
    tensors in question, and ValueError for a parameter that is not of an averageable floating-point type.
    """
    tensors = named_tensors(model)
    attentions = _attentions(model)
    claims: dict[str, Claim] = dict.fromkeys((name for name, _ in model.named_buffers()), "other")
    for attention in attentions:
        claims |= _claims(attention, tensors, claims)
    stacks = {stack for attention in attentions if (stack := _outermost_stack(model, attention.path))}
    blocks: list[Block] = []
    unexplained: list[str] = []
    for name, tensor in tensors.items():
        stack = _outermost_stack(model, name)
        layer = int(name[len(stack) + 1 :].split(".")[0]) if stack in stacks and stack else None
        claim = claims.get(name) or _plain_role(model, name, tensor, layer)
        if stack and name not in claims and claim != "norm" and ATTENTION_LIKE.search(name, len(stack)):
            unexplained.append(name)
        blocks += _blocks(name, tensor, layer, claim)
    if unexplained:
        raise UnknownArchitecture(f"{type(model).__name__} has attention of an unknown layout", unexplained)
    check_table(blocks)
    return tuple(blocks)


def _attentions(model: nn.Module) -> list[_Attention]:
    found: list[_Attention] = []
    for path, module in model.named_modules():
        held = {name for name, _ in (*module.named_children(), *module.named_parameters(recurse=False))}
        rows = [layout for layout in LAYOUTS if layout.required <= held]
        if rows:
            found.append(_Attention(path, module, max(rows, key=lambda row: len(row.required))))
    if not found:
        names = list(named_tensors(model))
        likely = [name for name in names if ATTENTION_LIKE.search(name)]
        raise UnknownArchitecture(f"no attention recognised in {type(model).__name__}", likely or names)
    return found


def _claims(attention: _Attention, tensors: Mapping[str, Tensor], known: Mapping[str, Claim]) -> dict[str, Claim]:
    """What the row says of its attention's tensors. Raises UnknownArchitecture for one not in it nor `known`."""
    claims: dict[str, Claim] = {}
    path, layout = attention.path, attention.layout
    for child, role in {**layout.whole, **layout.optional}.items():
        claims |= dict.fromkeys(_under(_join(path, child), tensors), role)
    for child, division in layout.fused.items():
        for name in _under(_join(path, child), tensors):
            claims[name] = _parts(attention, name, tensors[name], division)
    parent = path.rpartition(".")[0]
    for sibling, role in layout.beside.items():
        if not (names := _under(_join(parent, sibling), tensors)):
            raise UnknownArchitecture(f"no {sibling} beside the attention {path}", _under(parent, tensors))
        claims |= dict.fromkeys(names, role)
    if unclaimed := [name for name in _under(path, tensors) if name not in claims and name not in known]:
        raise UnknownArchitecture(f"the attention {path} holds tensors of unknown role", unclaimed)
    return claims


def _parts(attention: _Attention, name: str, tensor: Tensor, division: Division) -> Mapping[Role, Part]:
    child = name[len(attention.path) :].lstrip(".").rpartition(".")[0]
    # Conv1D keeps its weight as [inputs, outputs], Linear as [outputs, inputs]; a bias has outputs only.
    axis = tensor.ndim - 1 if isinstance(attention.module.get_submodule(child), Conv1D) else 0
    try:
        divided = division(attention.module, tensor.shape[axis])
    except ValueError as error:
        raise UnknownArchitecture(f"a fused projection does not divide ({error})", [name]) from error
    return {role: Part(label=role, axis=axis, spans=spans) for role, spans in divided.items()}


def _plain_role(model: nn.Module, name: str, tensor: Tensor, layer: int | None) -> Role:
    """The role of a tensor that belongs to no attention."""
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


def _outermost_stack(model: nn.Module, path: str) -> str | None:
    """The path of the first list of modules on the way to `path`."""
    steps = path.split(".")[:-1]
    prefixes = (".".join(steps[:length]) for length in range(1, len(steps) + 1))
    stacks = (nn.ModuleList, nn.Sequential)
    return next((prefix for prefix in prefixes if isinstance(model.get_submodule(prefix), stacks)), None)


def _under(path: str, names: Iterable[str]) -> list[str]:
    """Those of the names that are `path` or lie beneath it; the empty path is the whole model."""
    return [name for name in names if not path or name == path or name.startswith(f"{path}.")]


def _join(parent: str, child: str) -> str:
    return f"{parent}.{child}" if parent else child
