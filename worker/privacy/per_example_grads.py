"""The gradient of each example of a batch by itself, which is what differentially private training clips.

There are three ways, from fast to always right. Opacus takes each layer's inputs and output gradients apart; it needs
a loss that is a sum over the examples, and every tensor used by a layer whose first axis counts the examples.
Batching the gradient function itself (vmap) needs neither, but cannot branch on data. And there is one example after
the other.

Opacus has no way to notice that an axis counts classes or positions instead of examples, and what comes of that is a
promise that does not hold. So whichever way is taken has first given the gradients that single examples give.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import structlog
import torch
from opacus.grad_sample import GradSampleHooks
from opacus.grad_sample.gsm_base import OPACUS_PARAM_MONKEYPATCH_ATTRS
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

Batch = Mapping[str, Tensor]
Loss = Callable[[Batch], Tensor]
"""A batch's loss as a scalar, or the loss of each example by itself, [examples]."""

Gradients = list[Tensor]
"""For each parameter the gradient of each example, [examples, *shape]."""

EXACT = 1e-3
"""How far a gradient may be off in float32, as a share of its length: hundreds of times what rounding does."""
ROUGH = 5e-2
"""The same where the model computes in 16 bits."""

CHUNK_BYTES = 1 << 30
"""How much memory the gradients of single examples may take at a time."""


class PerExample(Protocol):
    """One way to find the gradients of single examples. Call `close` when it is no longer needed."""

    name: str

    def __call__(self, batch: Batch) -> Gradients: ...

    def close(self) -> None: ...


class OneByOne:
    """Plain autograd on one example after the other. `common` goes with each as it is."""

    name = "one by one"

    def __init__(self, loss: Loss, parameters: Sequence[nn.Parameter], common: Batch) -> None:
        self._loss = loss
        self._parameters = parameters
        self._common = common

    def __call__(self, batch: Batch) -> Gradients:
        rows = [self._gradient(example) for example in _examples(batch)]
        return [torch.stack(each) for each in zip(*rows, strict=True)]

    def _gradient(self, example: Batch) -> tuple[Tensor, ...]:
        loss = self._loss({**example, **self._common})
        return torch.autograd.grad(loss, self._parameters, materialize_grads=True)

    def close(self) -> None: ...


class Batched:
    """The gradient function of one example, batched by torch.func."""

    name = "vmap"

    def __init__(self, model: nn.Module, loss: Loss, parameters: Sequence[nn.Parameter], common: Batch) -> None:
        self._loss = _LossModule(model, loss)
        names = {parameter: name for name, parameter in self._loss.named_parameters()}
        self._parameters = {names[parameter]: parameter for parameter in parameters}
        self._common = common
        # Dropout is drawn for each example by itself, as it is in a batch.
        self._each = vmap(grad(self._alone), in_dims=(None, 0), randomness="different")

    def _alone(self, values: Mapping[str, Tensor], example: Batch) -> Tensor:
        batch = {name: tensor.unsqueeze(0) for name, tensor in example.items()}
        found: Tensor = functional_call(self._loss, dict(values), ({**batch, **self._common},))
        return found

    def __call__(self, batch: Batch) -> Gradients:
        values = {name: parameter.detach() for name, parameter in self._parameters.items()}
        # The fused kernels of attention have no batching rule.
        with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
            found = self._each(values, dict(batch))
        return [found[name].detach() for name in values]

    def close(self) -> None: ...


class _LossModule(nn.Module):
    """A loss as a module over the model that it calls, so that the model's tensors can be swapped for a call."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self, batch: Batch) -> Tensor:
        return self._loss(batch)


class Hooked:
    """Opacus' hooks on the model's layers. `losses` gives the loss of each example by itself.

    Raises NotImplementedError for a model with a layer that Opacus would get wrong.
    """

    name = "opacus"

    def __init__(
        self, model: nn.Module, losses: Loss, parameters: Sequence[nn.Parameter], tolerance: float = EXACT
    ) -> None:
        self._tolerance = tolerance
        self._model = model
        self._losses = losses
        self._parameters = parameters
        self._examples = 0
        holders = [module for module in model.modules() if _holds_any(module, set(parameters))]
        for holder in holders:
            # Opacus runs a layer that it has no rule for a second time, where dropout would be drawn anew.
            if type(holder) not in GradSampleHooks.GRAD_SAMPLERS and any(map(_drops, holder.modules())):
                raise NotImplementedError(f"{type(holder).__name__} has tensors of its own, and dropout within")
        self._expanding = [
            module.register_forward_pre_hook(self._expand) for module in holders if isinstance(module, nn.Embedding)
        ]
        try:
            self._hooks = GradSampleHooks(model, loss_reduction="sum")
        except Exception:
            self.close()
            raise
        self._hooks.disable_hooks()

    def _expand(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Positions are looked up once for the whole batch; Opacus needs to see them looked up for each example."""
        index, *rest = inputs
        if self._hooks.hooks_enabled and index.ndim > 1 and len(index) == 1:
            index = index.expand(self._examples, *index.shape[1:])
        return (index, *rest)

    def __call__(self, batch: Batch) -> Gradients:
        """Raise NotImplementedError if the gradients do not add up to that of the sum, for examples where it is a
        number."""
        self._examples = len(next(iter(batch.values())))
        self._reset()
        self._hooks.enable_hooks()
        try:
            with warnings.catch_warnings():
                # Of layers whose inputs need no gradient, such as the first.
                warnings.filterwarnings("ignore", "Full backward hook is firing", UserWarning)
                self._losses(batch).sum().backward()  # type: ignore[no-untyped-call]
            each = [self._each(parameter) for parameter in self._parameters]
            totals = [parameter.grad for parameter in self._parameters]
        finally:
            self._hooks.disable_hooks()
            self._reset()
        finite = norms(each).isfinite()
        if not bool(finite.all()):
            # One that is no number leaves no number of the sum, which then says nothing of the others.
            if bool(finite.any()):
                others = self({name: tensor[finite] for name, tensor in batch.items()})
                for one, other in zip(each, others, strict=True):
                    one[finite] = other
            return each
        # By the lengths of all together: where they cancel each other out their sum is all rounding.
        lengths = norms(each).sum()
        for one, total in zip(each, totals, strict=True):
            allowed = self._tolerance * norms([one]).sum() + self._tolerance / 100 * lengths
            if total is not None and not bool((one.sum(dim=0) - total).float().norm() <= allowed):
                raise NotImplementedError(
                    "the examples' gradients do not add up: a tensor is used outside its own layer"
                )
        return each

    def _reset(self) -> None:
        """Forget what the last pass left behind, and what one that failed half way did."""
        for module in self._model.modules():
            for left in ("activations", "max_batch_len"):
                module.__dict__.pop(left, None)
        for parameter in self._model.parameters():
            parameter.__dict__.pop("_current_grad_sample", None)
            if "_forward_counter" in parameter.__dict__:
                parameter.__dict__["_forward_counter"] = 0
        for parameter in self._parameters:
            parameter.grad_sample = None  # type: ignore[attr-defined]
            parameter.grad = None

    def _each(self, parameter: nn.Parameter) -> Tensor:
        if parameter.grad is None:
            return parameter.new_zeros((self._examples, *parameter.shape))
        each = parameter.grad_sample  # type: ignore[attr-defined]
        if not isinstance(each, Tensor) or len(each) != self._examples:
            raise NotImplementedError(
                f"a layer with a tensor of shape {tuple(parameter.shape)} has no row an example"
            )
        return each

    def close(self) -> None:
        """Remove every trace, also of hooks that were set only in part."""
        for handle in (*self._expanding, *self._model.__dict__.pop("autograd_grad_sample_hooks", ())):
            handle.remove()
        for module in self._model.modules():
            for left in ("ft_compute_sample_grad", "activations", "max_batch_len"):
                module.__dict__.pop(left, None)
        for parameter in self._model.parameters():
            for left in OPACUS_PARAM_MONKEYPATCH_ATTRS:
                parameter.__dict__.pop(left, None)


def _drops(module: nn.Module) -> bool:
    rate = module.p if isinstance(module, _DropoutNd) else getattr(module, "dropout", 0)
    return isinstance(rate, float) and rate > 0


def isolate_examples(model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
    """Switch off dropout, which depends on an example's place in its batch, and statistics of batches.

    That is, put every module into evaluation mode, but for other layers that hold any of the parameters: Opacus looks
    only at layers in training mode.
    """
    trained = set(parameters)
    for module in model.modules():
        rates = [value for name, value in vars(module).items() if "drop" in name and isinstance(value, float)]
        mixes = isinstance(module, _BatchNorm) or any(rates)
        module.training = _holds_any(module, trained) and not mixes


def fastest(
    model: nn.Module,
    loss: Loss,
    losses: Loss | None,
    parameters: Sequence[nn.Parameter],
    common: Batch,
    sample: Batch,
    tolerance: float = EXACT,
) -> PerExample:
    """Return the fastest way that gives what single examples give on the `sample`, of two or more examples.

    Nothing of the data may be in the sample: which way is taken shows in how long a task takes.
    `loss` is a batch's; `losses`, if known, each example's in a batch without anything in common. Leaves the model as
    it was, bit for bit.
    """
    truth = OneByOne(loss, parameters, common)
    ways: list[Callable[[], PerExample]] = [lambda: Batched(model, loss, parameters, common)]
    if losses is not None and not common:
        known = losses
        ways.insert(0, lambda: Hooked(model, known, parameters, tolerance))
    with _at_a_generic_point(model, parameters):
        expected = truth(sample)
        for make in ways:
            if way := _agreeing(make, expected, sample, tolerance):
                return way
    return truth


def _agreeing(
    make: Callable[[], PerExample], expected: Gradients, sample: Batch, tolerance: float
) -> PerExample | None:
    way: PerExample | None = None
    try:
        way = make()
        if agree(way(sample), expected, tolerance):
            return way
        reason = "it finds other gradients than single examples give"
    except Exception as fault:  # noqa: BLE001  (a model's own code fails in any of its own ways)
        reason = f"{type(fault).__name__}: {' '.join(str(fault).split())[:200]}"
    if way is not None:
        way.close()
    name = "?" if way is None else way.name
    structlog.get_logger("worker").info("per-example-gradients-refused", way=name, reason=reason)
    return None


def agree(found: Gradients, expected: Gradients, tolerance: float = EXACT) -> bool:
    """Return whether gradients are equal but for rounding, example by example.

    An example whose expected gradient is no number says nothing; there must be one that does.
    """
    if [each.shape for each in found] != [each.shape for each in expected]:
        return False
    whole = norms(expected)  # [examples]
    says = whole.isfinite()
    for one, other in zip(found, expected, strict=True):
        allowed = tolerance * norms([other]) + tolerance / 100 * whole
        if not bool((norms([one - other])[says] <= allowed[says]).all()):
            return False
    return bool(says.any())


def norms(gradients: Gradients) -> Tensor:
    """Return the l2 norm of each example's gradient over all tensors together, float64 [examples].

    In float32 the squares of small gradients would vanish, and a clip norm yet smaller would not clip them.
    """
    lengths = [
        torch.linalg.vector_norm(gradient.reshape(len(gradient), -1), dim=1, dtype=torch.float64)
        for gradient in gradients
    ]
    whole: Tensor = torch.linalg.vector_norm(torch.stack(lengths), dim=0)
    return whole


@contextmanager
def _at_a_generic_point(model: nn.Module, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Move the parameters a little, and switches dropout off.

    Where training starts, much is zero that soon is not: the gradient of one half of an adapter, or of the distance
    to the start. A way that gets those wrong would agree there.
    """
    values = [parameter.detach().clone() for parameter in parameters]
    modes = [(module, module.training) for module in model.modules()]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in parameters:
            size = parameter.square().mean().sqrt().clamp(min=0.02)
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter) * size * 0.1)
    isolate_examples(model, parameters)
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(parameters, values, strict=True):
                parameter.copy_(value)
        for module, training in modes:
            module.training = training


def _holds_any(module: nn.Module, parameters: set[nn.Parameter]) -> bool:
    return any(parameter in parameters for parameter in module.parameters(recurse=False))


def _examples(batch: Batch) -> Iterator[Batch]:
    for row in range(len(next(iter(batch.values())))):
        yield {name: tensor[row : row + 1] for name, tensor in batch.items()}


def at_once(way: PerExample, parameters: Sequence[nn.Parameter]) -> int:
    """Return how many examples' gradients to hold at a time."""
    if isinstance(way, OneByOne):
        return 1
    sizes = [parameter.nbytes for parameter in parameters]
    # One tensor after the other is added up in float64.
    return max(1, CHUNK_BYTES // max(1, sum(sizes) + 2 * max(sizes, default=0)))
