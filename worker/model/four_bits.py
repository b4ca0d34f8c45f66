"""Linear layers of a frozen base in 4 bits (QLoRA: Dettmers et al. 2023, arXiv 2305.14314, section 3).

Values are NF4, with a float32 scale for each 64 of them: 4.5 bits a weight. Each product, forward and backward,
computes the matrix in its own dtype again. Only the functions of bitsandbytes that convert are used, not its layers,
which on some processors use a kernel from a hub.
"""

import importlib
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from tessera.shared.methods.base import Plan, UnsupportedRun
from tessera.shared.model.blocks import Block
from tessera.shared.model.selectors import Selector
from tessera.shared.model.spec import Model
from tessera.shared.version import install_line
from tessera.worker.errors import ConfigError
from tessera.worker.model.build import laid_out
from tessera.worker.model.layouts import MappingFile

VALUES = 64
"""Number of values with a common scale."""

BYTES = Fraction(1, 2) + Fraction(4, VALUES)
"""Bytes of a value, with its share of a scale."""

KEPT = frozenset({"head", "embedding", "prompt", "adapter"})
"""Roles whose blocks keep their dtype."""

REMEDY = f"{install_line('quantized')}, or remove base_bits from [compute]"


@cache
def library() -> ModuleType:
    """Return bitsandbytes' functions. Raises ConfigError if it is not installed, or does not work here."""
    with _without("kernels"):
        try:
            return importlib.import_module("bitsandbytes.functional")
        except (ImportError, OSError, RuntimeError) as fault:
            raise ConfigError(f"compute.base_bits = 4 needs bitsandbytes ({fault}): {REMEDY}") from fault


@contextmanager
def _without(package: str) -> Iterator[None]:
    """Let no import within the block find a package. bitsandbytes would ask `kernels` to fetch code from a hub."""
    known = sys.modules.get(package)
    sys.modules[package] = None  # type: ignore[assignment]  # what Python documents for this
    try:
        yield
    finally:
        if known is None:
            del sys.modules[package]
        else:
            sys.modules[package] = known


class FourBitLinear(nn.Module):
    """A linear layer in the place of one of torch's. Its matrix does not train and is no parameter."""

    packed: Tensor
    scales: Tensor
    bias: nn.Parameter | None

    def __init__(self, replaced: nn.Linear) -> None:
        super().__init__()
        self.weight = torch.empty_like(replaced.weight, device="meta")
        """The shape and the dtype, which some models look at, without values."""
        self.bias = replaced.bias
        self.content: tuple[str, ...] = ()
        """The digests of the blocks that were converted."""
        self.register_buffer("packed", torch.empty(0, dtype=torch.uint8), persistent=False)
        self.register_buffer("scales", torch.empty(0), persistent=False)

    def fill(self, matrix: Tensor, content: tuple[str, ...] = ()) -> None:
        """Convert a matrix [outputs, inputs]. The same `content` need not be converted again."""
        self.packed, state = library().quantize_4bit(matrix.contiguous(), blocksize=VALUES, quant_type="nf4")
        self.scales = state.absmax
        self.content = content

    def matrix(self) -> Tensor:
        """Return the matrix in its own dtype."""
        functions, shape = library(), self.weight.shape
        # bitsandbytes 0.50 with AVX-512 takes wrong scales in rows that begin within the values of a common scale.
        aligned = shape if shape[1] % VALUES == 0 else torch.Size((1, shape.numel()))
        state = functions.QuantState(
            absmax=self.scales,
            shape=aligned,
            code=functions.get_4bit_type("nf4", device=self.scales.device),
            blocksize=VALUES,
            quant_type="nf4",
            dtype=self.weight.dtype,
        )
        values: Tensor = functions.dequantize_4bit(self.packed, state)
        return values.reshape(shape)

    def forward(self, inputs: Tensor) -> Tensor:
        product: Tensor = _Product.apply(inputs, self)  # type: ignore[no-untyped-call]
        return product if self.bias is None else product + self.bias.to(product.dtype)


class _Product(torch.autograd.Function):
    """The product with a matrix that is computed again for the backward pass."""

    generate_vmap_rule = True

    @staticmethod
    def forward(inputs: Tensor, layer: FourBitLinear) -> Tensor:
        return linear(inputs, layer.matrix())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, FourBitLinear], output: Tensor) -> None:  # noqa: ARG004
        ctx.dtype, ctx.layer = inputs[0].dtype, inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return (gradient @ ctx.layer.matrix().to(gradient.dtype)).to(ctx.dtype), None


def four_bit_tensors(document: Model, mapping: MappingFile | None = None) -> frozenset[str]:
    """Return the names of the matrices of a model that may be in 4 bits: of the linear layers in its stacks.

    Matrices of a head, embeddings and tied ones keep their dtype, and so do layers that are not torch's own, such as
    the experts that transformers joins.
    """
    with torch.device("meta"):
        model = laid_out(document, mapping)
    names = [id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False)]
    roles: dict[str, set[str]] = {}
    for block in document.blocks:
        if block.layer is not None:
            roles.setdefault(block.tensor, set()).add(block.role)
    return frozenset(
        f"{path}.weight"
        for path, module in model.named_modules()
        if type(module) is nn.Linear  # a subclass may read its matrix in its own way
        and names.count(id(module.weight)) == 1
        and (own := roles.get(f"{path}.weight"))
        and not own & KEPT
    )


def require_frozen(
    document: Model, tensors: Collection[str], plan: Plan, merged: Selector, *, is_training: bool
) -> None:
    """Raise UnsupportedRun for a task that needs these matrices as they are. `merged` selects the blocks that the
    method's merge changes."""
    remedy = "remove base_bits from [compute] in this worker's settings, or use the method lora"
    if not document.lora:
        raise UnsupportedRun(f"this worker keeps bases in 4 bits beside adapters, and the model has none: {remedy}")
    matrices = {block.name for block in document.blocks if block.tensor in tensors}
    if changed := sorted(block.name for block in document.blocks if block.name in matrices and merged.holds(block)):
        raise UnsupportedRun(
            f"each round changes {len(changed)} blocks of a base that this worker keeps in 4 bits, such as "
            f"{changed[0]}: {remedy} with another average"
        )
    # An evaluation trains none of the blocks that its plan names.
    selected = (("trains", plan.train), ("uploads", plan.upload)) if is_training else ()
    for asked, selector in selected:
        if touched := sorted(matrices.intersection(block.name for block in selector.resolve(document.blocks))):
            raise UnsupportedRun(
                f"the plan {asked} {len(touched)} blocks of a base that this worker keeps in 4 bits, such as "
                f"{', '.join(touched[:3])}: {remedy}"
            )
    if lacking := sorted(matrices.difference(block.name for block in plan.fetch.resolve(document.blocks))):
        raise UnsupportedRun(
            f"the plan leaves {len(lacking)} blocks of the base random, such as {lacking[0]}, and this worker keeps "
            f"them in 4 bits: {remedy}"
        )


def put_four_bits(model: nn.Module, tensors: Collection[str], *, fill: bool = False) -> None:
    """Replace the linear layers of these matrices. With `fill`, each keeps its values, in 4 bits."""
    for name in sorted(tensors):
        path = name.removesuffix(".weight")
        replaced = model.get_submodule(path)
        assert isinstance(replaced, nn.Linear)  # noqa: S101  (as `four_bit_tensors` says)
        layer = FourBitLinear(replaced)
        if fill:
            layer.fill(replaced.weight.detach())
        model.set_submodule(path, layer)


def four_bit_layers(model: nn.Module) -> dict[str, FourBitLinear]:
    """Return a model's layers in 4 bits, by the names of their matrices."""
    return {f"{path}.weight": module for path, module in model.named_modules() if isinstance(module, FourBitLinear)}


def buffers_of_passes(model: nn.Module) -> list[Tensor]:
    """Return the buffers that a forward pass may change: all except matrices in 4 bits, most of such a model."""
    modules = (module for module in model.modules() if not isinstance(module, FourBitLinear))
    return [buffer for module in modules for buffer in module.buffers(recurse=False)]


def stored_bytes(blocks: Iterable[Block], tensors: Collection[str]) -> int:
    """Return the bytes of blocks, some of them in 4 bits, with room to compute the largest matrix twice."""
    total, largest = Fraction(0), dict[str, int]()
    for block in blocks:
        if block.tensor in tensors:
            largest[block.tensor] = largest.get(block.tensor, 0) + block.nbytes
            total += block.numel * BYTES
        else:
            total += block.nbytes
    return int(total) + 2 * max(largest.values(), default=0)
