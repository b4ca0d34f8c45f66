"""Per-example gradients, which differentially private training clips.

There are three methods, from the fastest to the most general. Hooks compute them from each layer's inputs and output
gradients; this needs a loss that is a sum over the examples, and layers whose inputs have the examples as first axis.
On the CPU those of large matrices stay factors (`factors.py`), and Opacus computes the others. Batching the gradient
function (vmap) needs neither, but cannot branch on data. The last is one example after the other.

Hooks cannot detect that an axis counts classes or positions instead of examples, which would void the privacy
guarantee. So a method is used only if its gradients on a sample equal those of single examples.
"""

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import ClassVar, get_args

import structlog
import torch
from opacus.grad_sample import GradSampleHooks
from opacus.grad_sample.gsm_base import OPACUS_PARAM_MONKEYPATCH_ATTRS
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.hooks import RemovableHandle
from transformers.pytorch_utils import Conv1D

from tessera.worker.model.device_memory import free_bytes
from tessera.worker.privacy.factors import Factors, ProductFactors, RowFactors

Batch = Mapping[str, Tensor]
Loss = Callable[[Batch], Tensor]
"""A function to a batch's loss, a scalar, or to the loss of each example, [examples]."""

Gradients = list[Tensor]
"""The gradient of each example, [examples, *shape], for each parameter."""

Clippable = Sequence[Tensor | Factors]
"""The same, of some parameters as factors: enough to clip and to add up."""

EXACT = 1e-3
"""Tolerance for a gradient in float32, as a share of its norm: hundreds of times the rounding error."""
ROUGH = 5e-2
"""The tolerance for a model that computes in 16 bits."""
ROUNDED = {EXACT: 2.0**-18, ROUGH: 2.0**-8}
"""Roundings of a batch's gradient by tolerance, as a share of the sizes of its outer products: 64 of float32, one of
bfloat16."""

CHUNK_BYTES = 1 << 30
"""Limit on the memory of the per-example gradients that are computed at a time."""
GPU_SHARE = 32
"""The same on a GPU, as the divisor of its free memory, if that is more."""


NORM_RUN = 256
"""Number of squares that are added in float32: the sum is off by less than this many roundings."""
LEAST_NORM = 1e-9
"""Squares that underflow in float32, of a billion values, add up to less than a billionth of this one's."""


class PerExample:
    """A method that computes per-example gradients. Call `close` at the end."""

    name: ClassVar[str]

    def __call__(self, batch: Batch) -> Clippable:
        raise NotImplementedError

    def bytes_of_example(self, parameters: Sequence[nn.Parameter]) -> int:
        """Return the memory of one example's gradients in these, the method's parameters."""
        return sum(parameter.nbytes for parameter in parameters)

    def unchecked(self, batch: Batch) -> tuple[Clippable, Tensor | None]:
        """Return the gradients without a wait for the device, and whether they add up to the batch's gradient, a bool
        on the device; None if they do in any case. A call raises NotImplementedError if they do not."""
        return self(batch), None

    def close(self) -> None:
        """Remove everything that the method added to the model."""


class OneByOne(PerExample):
    """Plain autograd on one example after the other. `common` is added to each."""

    name = "one by one"

    def __init__(self, loss: Loss, parameters: Sequence[nn.Parameter], common: Batch) -> None:
        self._loss = loss
        self._parameters = parameters
        self._common = common

    def __call__(self, batch: Batch) -> Gradients:
        rows = []
        for row in range(len(next(iter(batch.values())))):
            example = {name: tensor[row : row + 1] for name, tensor in batch.items()}
            loss = self._loss({**example, **self._common})
            rows.append(torch.autograd.grad(loss, self._parameters, materialize_grads=True))
        return [torch.stack(each) for each in zip(*rows, strict=True)]


class BatchedGradients(PerExample):
    """The gradient function of one example, batched by torch.func.

    Raises NotImplementedError for a model that holds a layer at two places.
    """

    name = "vmap"

    def __init__(self, model: nn.Module, loss: Loss, parameters: Sequence[nn.Parameter], common: Batch) -> None:
        holders = [
            each for _, each in model.named_modules(remove_duplicate=False) if _holds_any(each, set(parameters))
        ]
        if len(holders) > len(set(holders)):
            # `functional_call` would leave a tensor of its own in such a layer, instead of the parameter.
            raise NotImplementedError("the model holds a layer at two places")
        self._loss = _LossModule(model, loss)
        names = {parameter: name for name, parameter in self._loss.named_parameters()}
        self._parameters = {names[parameter]: parameter for parameter in parameters}
        self._common = common
        # Dropout is drawn for each example independently, as it is in a batch.
        self._each = vmap(grad(self._alone), in_dims=(None, 0), randomness="different")

    def _alone(self, values: Mapping[str, Tensor], example: Batch) -> Tensor:
        batch = {name: tensor.unsqueeze(0) for name, tensor in example.items()}
        loss: Tensor = functional_call(self._loss, dict(values), ({**batch, **self._common},))
        return loss

    def __call__(self, batch: Batch) -> Gradients:
        values = {name: parameter.detach() for name, parameter in self._parameters.items()}
        # The fused kernels of attention have no batching rule.
        with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
            gradients = self._each(values, dict(batch))
        return [gradients[name].detach() for name in values]


class _LossModule(nn.Module):
    """A loss as a module around its model, so that `functional_call` can replace the model's tensors."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self, batch: Batch) -> Tensor:
        return self._loss(batch)


Matrix = nn.Linear | Conv1D | nn.Embedding
"""The layers whose gradients can be factors."""


class _OtherLayers(GradSampleHooks):  # type: ignore[misc]  # Opacus has no types
    """Opacus' hooks on all layers but those with a matrix of `factored`, which it collects."""

    def __init__(self, model: nn.Module, factored: set[nn.Parameter]) -> None:
        self._factored = factored
        self.layers: list[Matrix] = []
        super().__init__(model, loss_reduction="sum")

    def iterate_submodules(self, module: nn.Module) -> Iterator[nn.Module]:
        for each in super().iterate_submodules(module):
            # A subclass may compute something else.
            if type(each) in get_args(Matrix) and each.weight in self._factored:
                self.layers.append(each)
            else:
                yield each


class HookedGradients(PerExample):
    """Hooks on the model's layers: Opacus', or for parameters among `factored` our own. `losses` returns the loss of
    each example.

    A layer's matrix stays factors where these are smaller than its gradients. Raises NotImplementedError for a model
    with a layer for which the gradients would be wrong.
    """

    name = "opacus"

    def __init__(
        self,
        model: nn.Module,
        losses: Loss,
        parameters: Sequence[nn.Parameter],
        tolerance: float = EXACT,
        factored: Collection[nn.Parameter] = (),
    ) -> None:
        self._tolerance = tolerance
        self._model = model
        self._losses = losses
        self._parameters = parameters
        self._examples = 0
        holders = [module for module in model.modules() if _holds_any(module, set(parameters))]
        self._padding = {
            module.weight: module.padding_idx
            for module in holders
            if isinstance(module, nn.Embedding) and module.padding_idx is not None
        }
        """The row of each table that autograd gives no gradient. Opacus does."""
        for holder in holders:
            # Opacus runs a layer without a rule twice, and would draw different dropout the second time.
            if type(holder) not in GradSampleHooks.GRAD_SAMPLERS and any(map(_drops, holder.modules())):
                raise NotImplementedError(f"{type(holder).__name__} has tensors of its own and dropout within")
        self._own_hooks: list[RemovableHandle] = [
            module.register_forward_pre_hook(self._expand) for module in holders if isinstance(module, nn.Embedding)
        ]
        self._found: dict[Tensor, list[Tensor | Factors]] = {}
        """The gradients by our own hooks for each parameter, one for each use of its layer."""
        self._bytes_of_example = super().bytes_of_example(parameters)
        directions = torch.Generator().manual_seed(0)
        self._directions = {
            parameter: (torch.randint(0, 2, parameter.shape[1:], generator=directions) * 2 - 1).to(parameter)
            for parameter in factored
        }
        """A direction for each matrix that may be factored, in which sums of gradients are compared."""
        try:
            self._hooks = _OtherLayers(model, set(factored))
        except Exception:
            self.close()
            raise
        self._own_hooks += [layer.register_forward_hook(self._watch) for layer in self._hooks.layers]
        self._hooks.disable_hooks()

    def _expand(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Expand positions, which are looked up once per batch: Opacus needs a lookup for each example."""
        index, *rest = inputs
        if self._hooks.hooks_enabled and index.ndim > 1 and len(index) == 1:
            index = index.expand(self._examples, *index.shape[1:])
        return (index, *rest)

    def _watch(self, layer: Matrix, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Keep a layer's inputs until the gradients of its outputs are known."""
        if self._hooks.hooks_enabled and output.requires_grad:
            output.register_hook(partial(self._keep, layer, inputs[0].detach()))  # type: ignore[no-untyped-call]

    def _keep(self, layer: Matrix, inputs: Tensor, outputs: Tensor) -> None:
        """Keep the examples' gradients in a layer's parameters, which follow from the gradients of its outputs."""
        if len(inputs) != self._examples or len(outputs) != self._examples:
            raise _no_gradient_per_example(layer.weight)
        outputs = outputs.detach().reshape(self._examples, -1, outputs.shape[-1])
        if isinstance(layer, nn.Embedding):
            index = inputs.reshape(self._examples, -1)
            if layer.padding_idx is not None:
                outputs = outputs.masked_fill((index == layer.padding_idx).unsqueeze(2), 0.0)
            factors: Factors = RowFactors(index, outputs, len(layer.weight))
        else:
            inputs = inputs.reshape(self._examples, -1, inputs.shape[-1])
            factors = (
                ProductFactors(inputs, outputs) if isinstance(layer, Conv1D) else ProductFactors(outputs, inputs)
            )
            bias: nn.Parameter | None = layer.bias
            if bias is not None and bias.requires_grad:
                self._found.setdefault(bias, []).append(outputs.sum(dim=1))
        smaller = factors.nbytes < self._examples * layer.weight.nbytes
        self._found.setdefault(layer.weight, []).append(factors if smaller else factors.rows())

    def bytes_of_example(self, parameters: Sequence[nn.Parameter]) -> int:
        """Return the memory of one example's gradients in the last batch."""
        return self._bytes_of_example

    def __call__(self, batch: Batch) -> Clippable:
        """Return the gradients. Raises NotImplementedError if they do not add up to the batch's gradient."""
        each, fits = self.unchecked(batch)
        if not fits:
            raise NotImplementedError("the examples' gradients do not add up: a tensor is used outside its own layer")
        return each

    def unchecked(self, batch: Batch) -> tuple[Clippable, Tensor]:
        # A sum that is not finite, as one example's gradient may make it, says nothing of the others, and passes: to
        # compute these again would take time that reveals the example.
        self._examples = len(next(iter(batch.values())))
        self._reset()
        self._hooks.enable_hooks()
        try:
            with warnings.catch_warnings():
                # Layers whose inputs need no gradient warn, such as the first.
                warnings.filterwarnings("ignore", "Full backward hook is firing", UserWarning)
                self._losses(batch).sum().backward()  # type: ignore[no-untyped-call]
            each = [self._each(parameter) for parameter in self._parameters]
            totals = [parameter.grad for parameter in self._parameters]
        finally:
            self._hooks.disable_hooks()
            self._reset()
        lengths = tensor_norms(each)
        whole = torch.linalg.vector_norm(lengths, dim=0)
        # The tolerance includes the norms over all parameters: if gradients cancel out, their sum is rounding error.
        allowed = self._tolerance * lengths.sum(dim=1) + self._tolerance / 100 * whole.sum()
        # So is the gradient of an example whose tokens cancel out. If it passed in some batches alone, other examples
        # would decide in which way it is computed.
        sizes = [one.sizes().sum() if isinstance(one, Factors) else lengths.new_zeros(()) for one in each]
        allowed += ROUNDED[self._tolerance] * torch.stack(sizes)
        misfits = [
            self._difference(parameter, one, parameter_total) > most
            for parameter, one, parameter_total, most in zip(self._parameters, each, totals, allowed, strict=True)
            if parameter_total is not None
        ]
        self._bytes_of_example = sum(one.nbytes for one in each) // self._examples
        return each, ~torch.stack([torch.zeros_like(whole[0], dtype=torch.bool), *misfits]).any()

    def _difference(self, parameter: nn.Parameter, each: Tensor | Factors, total: Tensor) -> Tensor:
        """Return the norm of the difference between the sum of gradients and the `total` by autograd, a scalar;
        0 if it is not finite.

        Of factors it is that in one direction of random signs, whose square is on average the square of the whole.
        """
        if isinstance(each, Tensor):
            difference = each.sum(dim=0) - total
        else:
            difference = each.projected(self._directions[parameter]) - total @ self._directions[parameter]
        length: Tensor = difference.float().norm()
        return length.nan_to_num(0.0, 0.0)

    def _reset(self) -> None:
        """Delete the state of the last pass, which may have failed half way."""
        self._found = {}
        for module in self._model.modules():
            for name in ("activations", "max_batch_len"):
                module.__dict__.pop(name, None)
        for parameter in self._model.parameters():
            parameter.__dict__.pop("_current_grad_sample", None)
            if "_forward_counter" in parameter.__dict__:
                parameter.__dict__["_forward_counter"] = 0
        for parameter in self._parameters:
            parameter.grad_sample = None  # type: ignore[attr-defined]
            parameter.grad = None

    def _each(self, parameter: nn.Parameter) -> Tensor | Factors:
        if parameter.grad is None:
            return parameter.new_zeros((self._examples, *parameter.shape))
        found = self._found.get(parameter, [])
        by_opacus = parameter.grad_sample  # type: ignore[attr-defined]
        if by_opacus is not None or not found:
            if not isinstance(by_opacus, Tensor) or len(by_opacus) != self._examples:
                raise _no_gradient_per_example(parameter)
            if (row := self._padding.get(parameter)) is not None:
                by_opacus[:, row] = 0.0
            found.append(by_opacus)
        # Several layers may share a tensor, and a layer may run several times.
        return found[0] if len(found) == 1 else torch.stack(as_rows(found)).sum(dim=0)

    def close(self) -> None:
        """Remove all hooks and their state, also after an incomplete installation."""
        for handle in (*self._own_hooks, *self._model.__dict__.pop("autograd_grad_sample_hooks", ())):
            handle.remove()
        for module in self._model.modules():
            for name in ("ft_compute_sample_grad", "activations", "max_batch_len"):
                module.__dict__.pop(name, None)
        for parameter in self._model.parameters():
            for name in OPACUS_PARAM_MONKEYPATCH_ATTRS:
                parameter.__dict__.pop(name, None)


def _no_gradient_per_example(parameter: Tensor) -> NotImplementedError:
    return NotImplementedError(f"a layer with a tensor of shape {tuple(parameter.shape)} has no gradient per example")


def _drops(module: nn.Module) -> bool:
    rate = module.p if isinstance(module, _DropoutNd) else getattr(module, "dropout", 0)
    return isinstance(rate, float) and rate > 0


def isolate_examples(model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
    """Switch off dropout, which depends on an example's position in its batch, and batch statistics.

    All modules are put into evaluation mode, except other layers with any of the parameters: Opacus ignores layers in
    evaluation mode.
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
    factored: Collection[nn.Parameter] = (),
) -> PerExample:
    """Return the fastest method that agrees with single examples on the `sample`, of two or more examples.

    The sample must not contain data, because the choice shows in a task's duration. `loss` is a batch's; `losses`, if
    known, is each example's in a batch without common tensors. Gradients of the `factored` parameters may be factors.
    Leaves the model as it was, bit for bit.
    """
    truth = OneByOne(loss, parameters, common)
    methods: list[Callable[[], PerExample]] = [partial(BatchedGradients, model, loss, parameters, common)]
    if losses is not None and not common:
        methods.insert(0, partial(HookedGradients, model, losses, parameters, tolerance, factored))
    with _at_a_generic_point(model, parameters):
        expected = truth(sample)
        for make in methods:
            if method := _agreeing(make, expected, sample, tolerance):
                return method
    return truth


def _agreeing(
    make: Callable[[], PerExample], expected: Gradients, sample: Batch, tolerance: float
) -> PerExample | None:
    method: PerExample | None = None
    try:
        method = make()
        if agree(as_rows(method(sample)), expected, tolerance):
            return method
        reason = "its gradients differ from those of single examples"
    except Exception as fault:  # noqa: BLE001  (each model's code raises its own errors)
        reason = f"{type(fault).__name__}: {' '.join(str(fault).split())[:200]}"
    if method is not None:
        method.close()
    name = "?" if method is None else method.name
    structlog.get_logger("worker").info("per-example-gradients-refused", way=name, reason=reason)
    return None


def agree(found: Gradients, expected: Gradients, tolerance: float = EXACT) -> bool:
    """Return True if gradients are equal within rounding, example by example.

    Examples whose expected gradient is not finite are ignored; there must be others.
    """
    if [each.shape for each in found] != [each.shape for each in expected]:
        return False
    whole = norms(expected)  # [examples]
    finite = whole.isfinite()
    for one, other in zip(found, expected, strict=True):
        allowed = tolerance * norms([other]) + tolerance / 100 * whole
        if not bool((norms([one - other])[finite] <= allowed[finite]).all()):
            return False
    return bool(finite.any())


def as_rows(gradients: Clippable) -> Gradients:
    """Return the gradients of each example, [examples, *shape], with those that are factors multiplied out."""
    return [each.rows() if isinstance(each, Factors) else each for each in gradients]


def norms(gradients: Clippable) -> Tensor:
    """Return the l2 norm of each example's gradient over all tensors together, float64 [examples]."""
    whole: Tensor = torch.linalg.vector_norm(tensor_norms(gradients), dim=0)
    return whole


def tensor_norms(gradients: Clippable) -> Tensor:
    """Return the l2 norm of each example's gradient in each tensor, float64 [tensors, examples]: never less than the
    exact one, but for roundings of float64."""
    return torch.stack(
        [each.norms() if isinstance(each, Factors) else _row_norms(each.reshape(len(each), -1)) for each in gradients]
    )


def is_here(tensor: Tensor) -> bool:
    """Return True if reading a tensor's values waits for no device."""
    return tensor.device.type == "cpu"


def _row_norms(rows: Tensor) -> Tensor:
    """Return the l2 norm of each row, float64.

    On the CPU float64 takes nine times as long as float32. There runs of NORM_RUN values are summed in float32, whose
    error is bounded, but for rows whose squares could underflow or overflow: a still smaller clip norm would not clip
    them. No row's norm depends on other rows: an example must not change how another one is clipped.
    """
    count = rows.shape[1] // NORM_RUN * NORM_RUN
    if is_here(rows) and rows.dtype == torch.float32 and count:
        runs = torch.linalg.vector_norm(rows[:, :count].view(len(rows), -1, NORM_RUN), dim=2)
        rest = torch.linalg.vector_norm(rows[:, count:], dim=1, keepdim=True)
        lengths: Tensor = torch.linalg.vector_norm(torch.cat([runs, rest], dim=1), dim=1, dtype=torch.float64)
        lengths *= 1 + NORM_RUN * 2.0**-24
        doubtful = ~((lengths > LEAST_NORM) & lengths.isfinite())
        if bool(doubtful.any()):
            lengths[doubtful] = torch.linalg.vector_norm(rows[doubtful], dim=1, dtype=torch.float64)
        return lengths
    exact: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    return exact


@contextmanager
def _at_a_generic_point(model: nn.Module, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Perturb the parameters slightly, and switch dropout off.

    At the start of training, some gradients are zero that later are not: of one factor of an adapter, or of the
    distance to the start. A method that computes these wrongly would agree there.
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


def at_once(method: PerExample, parameters: Sequence[nn.Parameter]) -> int:
    """Return the number of examples whose gradients are computed at a time."""
    if isinstance(method, OneByOne):
        return 1
    # Tensors are summed in float64, one after the other.
    summed = 2 * max((parameter.nbytes for parameter in parameters), default=0)
    return max(1, _chunk_bytes(parameters) // max(1, method.bytes_of_example(parameters) + summed))


def _chunk_bytes(parameters: Sequence[nn.Parameter]) -> int:
    """Return the bytes that the gradients of examples may take together. A GPU is faster with many at once."""
    if not parameters or parameters[0].device.type == "cpu":
        return CHUNK_BYTES
    return max(CHUNK_BYTES, free_bytes(parameters[0].device) // GPU_SHARE)
