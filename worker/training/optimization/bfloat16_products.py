"""Products of bfloat16 matrices on a CPU that has no instructions for them.

There, torch's own products take 3 to 70 times as long as those of float32 (docs/decisions/0096). Here operands are
rounded to bfloat16, multiplied in float32, and the result is rounded again: what such instructions compute, too.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from tessera.shared.run_settings import Training

HALF, WHOLE = torch.bfloat16, torch.float32
PRODUCTS = {
    torch.matmul, torch.bmm, torch.mm, torch.baddbmm, torch.addmm, functional.linear, functional.conv1d,
    functional.conv2d, functional.conv3d, functional.scaled_dot_product_attention, Tensor.matmul, Tensor.bmm,
    Tensor.mm, Tensor.__matmul__, Tensor.__rmatmul__,
}  # fmt: skip
"""The functions that are replaced, which autocast computes in bfloat16."""


def is_native() -> bool:
    """Return whether this machine's CPU multiplies in bfloat16 itself."""
    has_library: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return has_library and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001


def bfloat16_products(training: Training, device: torch.device) -> AbstractContextManager[object]:
    """Return the context in which a CPU without instructions for bfloat16 multiplies it in float32.

    It changes nothing in a run in float32. It holds for this thread, and for the backward pass of what it computes.
    """
    wanted = device.type == "cpu" and training.precision != "float32" and not is_native()
    return InFloat32() if wanted else nullcontext()


class InFloat32(TorchFunctionMode):
    """Replaces the products of bfloat16 matrices, and those that autocast would compute in bfloat16."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = kwargs or {}
        if func not in PRODUCTS or "out" in options or not _is_half([*args, *options.values()]):
            return func(*args, **options)
        with torch.autocast("cpu", enabled=False):
            if func is functional.linear and len(args) > 1 and args[1].ndim == 2:
                return _linear(*args, **options)
            if func is torch.addmm and not options and args[0].ndim == 1:
                return _linear(args[1], args[2].transpose(0, 1), args[0])
            wide = func(*map(_widened, args), **{name: _widened(value) for name, value in options.items()})
        return wide.to(HALF)


def _is_half(operands: Sequence[Any]) -> bool:
    """Return whether a product would be of bfloat16, on the CPU."""
    found = [each for each in operands if isinstance(each, Tensor) and each.is_floating_point()]
    if any(each.device.type != "cpu" or each.dtype not in (HALF, WHOLE) for each in found):
        return False
    return bool(found) and (torch.is_autocast_enabled("cpu") or all(each.dtype == HALF for each in found))


def _widened(operand: Any) -> Any:
    if isinstance(operand, Tensor) and operand.is_floating_point():
        return operand.to(HALF).to(WHOLE)
    return operand


def _linear(given: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product: Tensor = _Linear.apply(given.to(HALF), weight, bias)  # type: ignore[no-untyped-call]
    return product


class _Linear(Function):
    """A layer that keeps its input in bfloat16 for the backward pass, and its weights as they are."""

    generate_vmap_rule = True

    @staticmethod
    def forward(given: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(given.to(WHOLE), _widened(weight), _widened(bias)).to(HALF)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
        del output
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        given, weight, bias = ctx.saved_tensors
        of_given, of_weight, of_bias = ctx.needs_input_grad
        wide = gradient.to(WHOLE)
        rows = wide.reshape(-1, wide.shape[-1])
        with torch.autocast("cpu", enabled=False):
            return (
                (wide @ _widened(weight)).to(HALF) if of_given else None,
                (rows.T @ given.reshape(-1, given.shape[-1]).to(WHOLE)).to(HALF).to(weight.dtype)
                if of_weight
                else None,
                rows.sum(0).to(HALF).to(bias.dtype) if of_bias else None,
            )
