"""DP-SGD on whatever a phase trains (Abadi et al. 2016, arXiv 1607.00133, algorithm 1).

Each example is in a step's batch by a throw of the dice of its own, its gradient over all that trains is clipped to
one norm, Gaussian noise goes on the sum, and the sum is divided by the number of examples that a batch is expected to
have, since the number that it has is private. Needs the extra `privacy`.

The noisy sum is rounded to a grid that is known to everybody. Floating-point noise does not reach every number, and
which numbers a sum can come to would tell what lies under the noise (Mironov 2012); each place of the grid can be
reached from wherever the sum is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import structlog
import torch
from torch import Tensor

from tessera.shared.methods.base import WorkerHalf
from tessera.worker.data.registry import Dataset
from tessera.worker.model.forward import IGNORED, evaluation_mode, losses
from tessera.worker.privacy.noise import NoiseSource
from tessera.worker.privacy.per_example_grads import (
    EXACT,
    ROUGH,
    Batch,
    Gradients,
    OneByOne,
    at_once,
    fastest,
    isolate_examples,
    norms,
)
from tessera.worker.training.context import LocalTaskContext
from tessera.worker.training.freeze import Freeze
from tessera.worker.training.trainer import Trainer, autocast

GRID = 1024
"""Steps of the grid that the noise's standard deviation is at least: rounding adds less than a part in ten million to
the noise's variance, and each step holds some 2^50 of the values that the noise can take."""

NOISE_AT_ONCE = 1 << 20
"""Values of noise that are drawn at a time."""

ROUNDING = {EXACT: 2.0**-14, ROUGH: 2.0**-6}
"""By how much less than the clip norm an example counts, by how its gradient is found: what the others in its batch
change of its gradient by rounding, and it of theirs, is part of what one example changes."""


@dataclass(frozen=True)
class Sampling:
    """How batches are drawn: each of `examples` with probability `rate`, `steps` times an epoch."""

    examples: int
    rate: float
    steps: int

    @property
    def expected(self) -> float:
        return self.rate * self.examples


def sampling(examples: int, batch_size: int | None) -> Sampling:
    """As many steps as there are batches of this size, and as many examples in each, on average."""
    size = min(batch_size or examples, examples)
    return Sampling(examples, size / examples, math.ceil(examples / size))


@dataclass(frozen=True)
class Mechanism:
    """The Gaussian mechanism on sums of clipped gradients."""

    sampling: Sampling
    clip_norm: float
    noise_multiplier: float

    @property
    def deviation(self) -> float:
        """The standard deviation of the noise on each value of a sum."""
        return self.noise_multiplier * self.clip_norm

    @property
    def grid(self) -> float:
        """What released sums are multiples of: a power of two, which divides without rounding."""
        return math.ldexp(1.0, math.frexp(self.deviation / GRID)[1] - 1)


def scales(gradients: Gradients, clip_norm: float) -> Tensor:
    """Return what each example's gradient is multiplied by, float64 [examples].

    So it is no longer than `clip_norm` over all parameters together; 0 is for one that is no number.
    """
    lengths = norms(gradients)
    return torch.where(lengths.isfinite(), clip_norm / lengths.clamp(min=clip_norm), 0.0)


def scaled_sum(gradients: Gradients, scale: Tensor) -> list[Tensor]:
    """Return the sum over the examples for each parameter, float64. A value that is no number counts as zero."""
    # By way of `to` it is a copy even where the gradients are float64 already.
    return [
        torch.tensordot(scale, gradient.to(torch.float64, copy=True).nan_to_num_(0.0, 0.0, 0.0), dims=([0], [0]))
        for gradient in gradients
    ]


def clipped_sum(gradients: Gradients, clip_norm: float) -> list[Tensor]:
    """For each parameter the sum over the examples of their gradients, each scaled down to `clip_norm` where it is
    longer: over all parameters together, so that one example more or less moves the sums by no more than `clip_norm`
    in l2. A gradient that is no number counts as zero."""
    return scaled_sum(gradients, scales(gradients, clip_norm))


def release(total: Tensor, mechanism: Mechanism, dice: NoiseSource) -> None:
    """Add the noise to a sum, float64 and contiguous, and round it to the grid, in place.

    The data enter nowhere else: whatever is made of the result is made of multiples of the grid.
    """
    for values in torch.split(total.view(-1), NOISE_AT_ONCE):
        noise = torch.from_numpy(dice.normal(len(values))).to(values.device)
        values.add_(noise, alpha=mechanism.deviation).div_(mechanism.grid).round_().mul_(mechanism.grid)


def known_examples(context: LocalTaskContext, dataset: Dataset, sample: Batch) -> Tensor:
    """Return of which examples the model has all words and classes, bool [examples]: on a GPU any other would end the
    process, and on a CPU the batch. `sample` is a batch that the model takes."""
    with evaluation_mode(context.model), torch.no_grad():
        logits = context.forward(sample).logits
    config, classes = context.model.config, None if logits is None else logits.shape[-1]
    bounds = {
        "input_ids": getattr(config, "vocab_size", None),
        "token_type_ids": getattr(config, "type_vocab_size", None),
        "labels": None if classes == 1 else classes,  # one output is a number, and no class
    }
    known = torch.ones(dataset.examples, dtype=torch.bool)
    for name, bound in bounds.items():
        values = dataset.tensors.get(name)
        if bound and values is not None and not values.is_floating_point():
            fits = ((values >= 0) & (values < bound)) | ((values == IGNORED) & (name == "labels"))
            known &= fits.flatten(1).all(dim=1) if fits.ndim > 1 else fits
    return known


class NoisyGradients:
    """Gives the parameters of a phase noisy gradients, a Poisson sample for each `fill`. `close` it when done.

    Whatever an example is, `fill` does not fail by it: an example whose gradient cannot be found counts as zero. How
    the gradients of single examples are found is settled on made-up ones.
    """

    def __init__(
        self, trainer: Trainer, freeze: Freeze, dataset: Dataset, mechanism: Mechanism, dice: NoiseSource
    ) -> None:
        self.steps = mechanism.sampling.steps
        """Steps of one epoch."""
        self._freeze = freeze
        self._dataset = dataset
        self._mechanism = mechanism
        self._dice = dice
        self._device = trainer.device
        self._without = 0
        self._log = structlog.get_logger("worker")
        common = {name: tensor.to(trainer.device) for name, tensor in dataset.common.items()}
        model = trainer.context.model
        isolate_examples(model, freeze.parameters)
        half, context = trainer.half, trainer.context

        def loss(batch: Batch) -> Tensor:
            with autocast(trainer.training, trainer.device):
                return half.loss(context, batch)

        def each(batch: Batch) -> Tensor:
            with autocast(trainer.training, trainer.device):
                return losses(context.forward(batch), context.head, batch["labels"])

        plain = type(half).loss is WorkerHalf.loss
        sample = {name: tensor.to(trainer.device) for name, tensor in trainer.context.made_up(dataset, 2).items()}
        exact = trainer.training.precision == "float32" and all(p.dtype.itemsize >= 4 for p in freeze.parameters)
        tolerance = EXACT if exact else ROUGH
        self._clip_norm = mechanism.clip_norm * (1 - ROUNDING[tolerance])
        self._way = fastest(model, loss, each if plain else None, freeze.parameters, common, sample, tolerance)
        self._known = known_examples(context, dataset, {name: tensor[:1] for name, tensor in sample.items()} | common)
        self._alone = OneByOne(loss, freeze.parameters, common)
        self._at_once = at_once(self._way, freeze.parameters)

    @property
    def way(self) -> str:
        """How the gradients of single examples are found."""
        return self._way.name

    def _rows(self, rows: Tensor) -> dict[str, Tensor]:
        return {name: tensor[rows].to(self._device) for name, tensor in self._dataset.tensors.items()}

    def fill(self) -> None:
        """Set each parameter's gradient to the noisy mean of clipped ones; frozen rows get neither."""
        how = self._mechanism.sampling
        rows = torch.from_numpy(self._dice.sample(how.examples, how.rate))
        for parameter, total in zip(self._freeze.parameters, self.sums(rows), strict=True):
            release(total, self._mechanism, self._dice)
            parameter.grad = total.div_(how.expected).to(parameter.dtype)
        self._freeze.mask_gradients()

    def sums(self, rows: Tensor) -> list[Tensor]:
        """For each parameter the sum of these examples' clipped gradients, float64, without any noise. `rows`, int64
        [sampled], may be none at all."""
        self._without += int((~self._known[rows]).sum())
        rows = rows[self._known[rows]]
        totals = [
            torch.zeros_like(parameter, dtype=torch.float64, memory_format=torch.contiguous_format)
            for parameter in self._freeze.parameters
        ]
        for some in torch.split(rows, self._at_once) if len(rows) else ():
            for gradients in self._gradients(some):
                for parameter, gradient in zip(self._freeze.parameters, gradients, strict=True):
                    self._freeze.mask(parameter, gradient)
                scale = scales(gradients, self._clip_norm)
                self._without += int((scale == 0).sum())
                for total, part in zip(totals, scaled_sum(gradients, scale), strict=True):
                    total.add_(part)
        return totals

    def _gradients(self, rows: Tensor) -> Iterator[Gradients]:
        """Yield the gradients of these examples: all together or, if that fails, one by one.

        An example by itself gets the next way where this one fails, and none if that fails too. So what an example
        adds follows from the example alone.
        """
        ways = [self._way] if len(rows) > 1 else [self._way, self._alone]
        for way in ways:
            try:
                found = way(self._rows(rows))
            except Exception as fault:  # noqa: BLE001  (a model's own code fails in any of its own ways)
                self._log.info("per-example-gradients-failed", way=way.name, examples=len(rows), reason=repr(fault))
            else:
                yield found
                return
        if len(rows) > 1:
            for row in torch.split(rows, 1):
                yield from self._gradients(row)
        else:
            self._without += 1

    def close(self) -> None:
        self._way.close()
        if self._without:
            # For the site alone: that there are such examples is an exact answer about its data.
            reason = "their gradients are no numbers, or could not be computed"
            self._log.warning("examples-counted-as-zero", times=self._without, reason=reason)
