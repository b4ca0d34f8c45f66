"""DP-SGD on all parameters that a phase trains (Abadi et al. 2016, arXiv 1607.00133, algorithm 1).

Each unit, an example or a group of examples, is drawn into a step's batch independently. Its gradient over all
trained parameters, of a group the mean over its drawn examples, is clipped to one norm, or each layer's part of it to
that norm. Gaussian noise is added to the sum, and the sum is divided by the expected batch size, since the actual
size is private. Needs the extra `privacy`.

The noisy sum is rounded to a public grid. Floating-point noise does not reach every number, and the set of reachable
sums would reveal the sum without noise (Mironov 2012); every point of the grid is reachable from every sum.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np
import structlog
import torch
from torch import Tensor

from tessera.shared.methods.base import WorkerHalf
from tessera.shared.privacy.noise import NoiseSource, grid_of
from tessera.shared.tensors.lazy import Array
from tessera.worker.data.augmentation import augmentation_of
from tessera.worker.data.dataset import Dataset, Rows
from tessera.worker.data.loaders import attempt, finished, read_apart, read_in_pieces
from tessera.worker.errors import DataError, LoaderFailed
from tessera.worker.model.forward import losses
from tessera.worker.privacy.factors import Factors
from tessera.worker.privacy.known_examples import known_examples
from tessera.worker.privacy.per_example_grads import (
    EXACT,
    ROUGH,
    Batch,
    Clippable,
    OneByOne,
    PerExample,
    as_rows,
    at_once,
    fastest,
    is_here,
    isolate_examples,
    norms,
)
from tessera.worker.privacy.pieces import (
    GradientPiece,
    GroupSampling,
    add_by_group,
    group_pieces,
    single_pieces,
    zero_means,
)
from tessera.worker.privacy.sampling import Sampling
from tessera.worker.training.batches import copied
from tessera.worker.training.freeze import Freeze
from tessera.worker.training.optimization.micro_batch import PieceSize
from tessera.worker.training.optimization.precision import autocast
from tessera.worker.training.setup import LocalTraining

NOISE_AT_ONCE = 1 << 20
"""Number of noise values to draw at a time."""

ROUNDING = {EXACT: 2.0**-14, ROUGH: 2.0**-6}
"""Reduction of the clip norm, as a share of it, by the gradients' tolerance: the rounding errors that a unit causes
in the other gradients of its batch are part of its influence."""


@dataclass(frozen=True)
class Mechanism:
    """The Gaussian mechanism on sums of clipped gradients."""

    sampling: Sampling
    clip_norm: float
    noise_multiplier: float
    parts: tuple[int, ...] = ()
    """By parameter, the number of the part of the gradient that it is clipped in; empty for one part."""

    @property
    def count(self) -> int:
        """The number of parts, each of which is clipped to `clip_norm`."""
        return 1 + max(self.parts, default=0)

    @property
    def deviation(self) -> float:
        """The standard deviation of the noise on each value of a sum, in the unit of the gradients: a multiple of the
        sensitivity, which is the root of the sum of the parts' squared clip norms."""
        return self.noise_multiplier * self.clip_norm * math.sqrt(self.count)

    @property
    def grid(self) -> float:
        """The unit of released sums."""
        return grid_of(self.deviation)


def scales(gradients: Clippable, clip_norm: float) -> Tensor:
    """Return each unit's factor that clips its gradient to `clip_norm`, float64 [units].

    The norm is over all parameters together, so that adding or removing a unit changes the scaled sums by no more
    than `clip_norm` in l2. The factor of a gradient that is not finite is 0.
    """
    lengths = norms(gradients)
    return torch.where(lengths.isfinite(), clip_norm / lengths.clamp(min=clip_norm), 0.0)


def scaled_sum(gradients: Clippable, scale: Tensor) -> list[Tensor]:
    """Return the scaled sum over the units for each parameter, float64. Values that are not finite count as 0: theirs
    is a scale of 0."""
    return [each.total(scale) if isinstance(each, Factors) else _sum_of_rows(each, scale) for each in gradients]


def _sum_of_rows(rows: Tensor, scale: Tensor) -> Tensor:
    if not is_here(scale):
        # `to` copies gradients that are float64 already, so that none is changed in place.
        finite = rows.to(torch.float64, copy=True).nan_to_num_(0.0, 0.0, 0.0)
        total: Tensor = torch.tensordot(scale, finite, dims=([0], [0]))
        return total
    # One after the other stays in the processor's cache.
    total = torch.zeros(rows.shape[1:], dtype=torch.float64)
    for factor, row in zip(scale.tolist(), rows, strict=True):
        if factor:
            total.add_(row, alpha=factor)
    return total


def add_noise(total: Tensor, mechanism: Mechanism, source: NoiseSource) -> None:
    """Add the noise to a sum, float64 and contiguous, in place."""
    for values in torch.split(total.view(-1), NOISE_AT_ONCE):
        values.add_(normals(source, len(values), values.device), alpha=mechanism.deviation)


def normals(source: NoiseSource, count: int, device: torch.device) -> Tensor:
    """Draw standard normals, float64 [count] on the device, from `NoiseSource.normal`'s words.

    A GPU computes them itself, in a small part of the CPU's time. Its functions round some in another way.
    """
    if device.type == "cpu":
        return torch.from_numpy(source.normal(count))
    pairs = -(-count // 2)
    # torch takes arrays that it may write.
    first, second = (copied(torch.from_numpy(source.words(pairs).view(np.int64).copy()), device) for _ in range(2))
    return box_muller(first, second)[:count]


def box_muller(first: Tensor, second: Tensor) -> Tensor:
    """Return the normals of two rows of random words, int64 [pairs], as `NoiseSource.normal` computes them."""
    # torch computes with signed words alone.
    whole = first.double() + (first < 0) * 2.0**64
    radius = whole.add_(1.0).mul_(2.0**-64).log_().mul_(-2).sqrt_()
    angle = ((second >> 11) & ((1 << 53) - 1)).double().mul_(2.0**-53 * 2 * math.pi)
    return torch.cat([radius * angle.cos(), radius.mul_(angle.sin())])


def round_to_grid(total: Tensor, mechanism: Mechanism) -> None:
    """Round a noisy sum to the grid, in place. Only these multiples of the grid are released; the data are used
    nowhere else."""
    total.div_(mechanism.grid).round_().mul_(mechanism.grid)


class NoisyGradients:
    """Noisy gradients for the parameters of a phase, with one Poisson sample per `fill`. Call `close` at the end.

    No example can make `fill` fail: one whose gradient cannot be computed counts as 0. Nor does one cost a further
    pass through the model, which time would reveal to the coordinator, unless the model's own code raises an error at
    it. The method for per-example gradients is chosen on synthetic examples.
    """

    def __init__(
        self,
        local: LocalTraining,
        freeze: Freeze,
        dataset: Dataset,
        mechanism: Mechanism,
        source: NoiseSource,
        grouped: GroupSampling | None = None,
    ) -> None:
        """Prepare for the examples of a data set, or with `grouped` for their groups, as the units of privacy."""
        self._grouped, self._members_seed = grouped, 0
        self._freeze = freeze
        self._dataset = dataset
        self._mechanism = mechanism
        self._noise_source = source
        self._device = local.setup.device
        self._ranks = local.setup.ranks
        self._augmentation = augmentation_of(local.training, 0)
        self._by_loaders = dataset.in_loaders
        self._not_finite = torch.zeros((), dtype=torch.int64, device=self._device)
        """Number of examples whose gradients are not finite, or that have none. It stays on the device until the
        end."""
        self._misfits = torch.zeros((), dtype=torch.int64, device=self._device)
        """Number of passes in which the examples' gradients did not add up to the batch's."""
        self._log = structlog.get_logger("worker")
        half, context = local.half, local.context
        model, parameters = context.model, freeze.parameters
        common = {name: tensor.to(self._device) for name, tensor in dataset.common.items()}
        isolate_examples(model, parameters)

        def each(batch: Batch) -> Tensor:
            with autocast(local.training, self._device):
                return losses(context.forward(batch), context.head, batch["labels"], context.objective)

        plain = type(half).loss is WorkerHalf.loss
        synthetic = context.synthetic_examples(dataset, 2)
        sample = {name: tensor.to(self._device) for name, tensor in synthetic.items()}
        exact = local.training.precision == "float32" and all(p.dtype.itemsize >= 4 for p in parameters)
        tolerance = EXACT if exact else ROUGH
        self._clip_norm = mechanism.clip_norm * (1 - ROUNDING[tolerance])
        # Groups and frozen rows need the gradients themselves. A GPU may be slow in float64.
        whole = grouped or not is_here(sample["labels"])
        factored = [] if whole else [each for each in parameters if each.ndim == 2 and not freeze.in_part(each)]
        self._method = fastest(
            model, local.loss, each if plain else None, parameters, common, sample, tolerance, factored
        )
        self.method = self._method.name
        """The name of the method for per-example gradients."""
        self._stand_in = {name: tensor[:1] for name, tensor in sample.items()}
        # Read with the first sample: a coordinator may end the task unpaid before.
        self._known = cache(partial(known_examples, context, dataset, self._stand_in | common))
        self._alone = OneByOne(local.loss, parameters, common)
        # The gradients of groups are held beside those of their examples.
        self._at_once = max(1, at_once(self._method, parameters) // (2 if grouped else 1))
        if local.piece_size and local.piece_size.automatic and local.piece_size.examples:
            self._at_once = min(self._at_once, local.piece_size.examples)
        self._synthetic = partial(context.synthetic_examples, dataset)

    def fit(self, size: PieceSize) -> None:
        """Find the number of examples whose gradients fit into memory together, on synthetic ones of the largest
        shape, and set `size` to it.

        A step's sample is seldom more than twice as large as expected, and is then computed in parts. Raises
        ExampleTooLarge.
        """
        most = self._grouped.most if self._grouped else 1
        size.examples = min(self._at_once, math.ceil(2 * self._mechanism.sampling.expected) * most)
        while True:
            batch = {name: tensor.to(self._device) for name, tensor in self._synthetic(size.examples).items()}
            try:
                self._method(batch)
            except torch.OutOfMemoryError:
                # The traceback holds the tensors of the pass.
                pass
            else:
                return
            size.halve(size.examples)

    def fill(self) -> None:
        """Set each parameter's gradient to the noisy mean of clipped gradients, and to 0 in frozen rows."""
        sampling = self._mechanism.sampling
        sampled, seed, self._members_seed = self._ranks.same(lambda: self._draw(sampling))
        self._augmentation = self._augmentation and replace(self._augmentation, seed=seed)
        # Whole groups, if these are the units.
        units = self._ranks.rows(torch.from_numpy(sampled))
        totals = self.sums(units)
        # Drawing the noise takes this process some time, in which the device computes the sums.
        if self._ranks.is_first:
            for total in totals:
                add_noise(total, self._mechanism, self._noise_source)
        for parameter, own in zip(self._freeze.parameters, totals, strict=True):
            total = self._ranks.total(own)
            round_to_grid(total, self._mechanism)
            parameter.grad = total.div_(sampling.expected).to(parameter.dtype)
        self._freeze.mask_gradients()

    def _draw(self, sampling: Sampling) -> tuple[Array, int, int]:
        """Draw a step's sample, the seed of its augmentation, and that of the members of its groups.

        The seed is as secret as the noise, so that the changes of an example are distributed alike at any place: an
        example that is removed moves the places of later ones.
        """
        source = self._noise_source
        sample = source.sample(sampling.units, sampling.rate)
        return sample, source.seed() if self._augmentation else 0, source.seed() if self._grouped else 0

    def sums(self, units: Tensor) -> list[Tensor]:
        """Return the sum of these units' clipped gradients for each parameter, float64, without noise and without a
        wait for the device. `units`, int64 [sampled], are the places of examples or the numbers of groups, and may be
        empty."""
        totals = [
            torch.zeros_like(parameter, dtype=torch.float64, memory_format=torch.contiguous_format)
            for parameter in self._freeze.parameters
        ]
        pieces = self._pieces(units)
        reads = self._reads([part for piece in pieces for part in torch.split(piece.rows, self._at_once)])
        for piece in pieces:
            parts = zip(torch.split(piece.rows, self._at_once), torch.split(piece.owners, self._at_once), strict=True)
            found = (each for rows, owners in parts for each in self._gradients(rows, owners, next(reads)))
            if piece.sizes is None:
                for gradients, counts, _ in found:
                    self._add(totals, gradients, counts)
                continue
            of_groups = zero_means(self._freeze.parameters, len(piece.sizes))
            for gradients, counts, owners in found:
                rows = as_rows(gradients)
                if counts is not None:
                    self._not_finite += (~counts).sum()
                    for each in rows:
                        each.masked_fill_(~counts.view(-1, *[1] * (each.ndim - 1)), 0.0)
                add_by_group(of_groups, rows, owners, piece.sizes)
            self._add(totals, of_groups, None)
        # Loaders that have come to the end of a pass are ready for the next one.
        deque(reads, maxlen=0)
        return totals

    def _pieces(self, units: Tensor) -> list[GradientPiece]:
        if self._grouped is None:
            return single_pieces(units, self._at_once)
        return group_pieces(self._grouped.groups.drawn(units, self._grouped.most, self._members_seed), self._at_once)

    def _add(self, totals: list[Tensor], gradients: Clippable, counts: Tensor | None) -> None:
        """Add the sums of clipped gradients, of the units that count, bool [units]; all of them if None."""
        for parameter, gradient in zip(self._freeze.parameters, gradients, strict=True):
            if isinstance(gradient, Tensor):
                self._freeze.mask(parameter, gradient)
        parts = self._mechanism.parts or (0,) * len(totals)
        of_parts = [
            scales([each for each, own in zip(gradients, parts, strict=True) if own == part], self._clip_norm)
            for part in range(self._mechanism.count)
        ]
        # An example whose gradient is not finite in one part counts as 0 in all.
        none = torch.stack(of_parts).eq(0).any(0)
        if counts is not None:
            none |= ~counts
        self._not_finite += none.sum()
        factors = [scale.masked_fill(none, 0.0) for scale in of_parts]
        for total, gradient, part in zip(totals, gradients, parts, strict=True):
            total.add_(scaled_sum([gradient], factors[part])[0])

    def _note_failure(self, method: PerExample, rows: Tensor, fault: Exception) -> None:
        about = {"way": method.name, "examples": len(rows), "reason": repr(fault)}
        self._log.info("per-example-gradients-failed", **about)

    def _reads(self, parts: Sequence[Tensor]) -> Iterator[Rows | DataError | None]:
        """Yield the rows that loaders read of each part, or a reader's error; None if this process has to read it."""
        yielded = 0
        try:
            for read in read_in_pieces(self._dataset, parts, self._augmentation) if self._by_loaders else ():
                yield read
                yielded += 1
        except LoaderFailed as fault:
            # Perhaps because of an example, which must not fail the task.
            self._log.warning("loaders-not-used", reason=str(fault))
            self._by_loaders = False
        yield from [None] * (len(parts) - yielded)

    def _gradients(
        self, rows: Tensor, owners: Tensor, read: Rows | DataError | None = None
    ) -> Iterator[tuple[Clippable, Tensor | None, Tensor]]:
        """Yield the gradients of these examples, which of them count, bool [examples] or None for all, and their
        owners: all together or, if the model raises an error, one by one.

        An example at which plain autograd fails too has no gradient. So an example's contribution depends on this
        example alone.
        """
        batch, counts = self._there(rows, read)
        try:
            gradients, fits = self._method.unchecked(batch)
        except Exception as fault:  # noqa: BLE001  (each model's code raises its own errors)
            self._note_failure(self._method, rows, fault)
        else:
            if fits is not None:
                self._misfits += ~fits
            yield gradients, counts, owners
            return
        if len(rows) == 1 and isinstance(self._method, OneByOne):
            self._not_finite += 1
            return
        for place, owner in enumerate(torch.split(owners, 1)):
            try:
                alone = self._alone({name: tensor[place : place + 1] for name, tensor in batch.items()})
            except Exception as fault:  # noqa: BLE001  (as above)
                self._note_failure(self._alone, rows[place : place + 1], fault)
                self._not_finite += 1
            else:
                yield alone, None if counts is None else counts[place : place + 1], owner

    def _there(self, rows: Tensor, read: Rows | DataError | None = None) -> tuple[Rows, Tensor | None]:
        """Return the examples on the device, perhaps read before, and which of them count, bool [examples]; None if
        all do.

        A synthetic example stands in for one that cannot be read, or that the model lacks a token or a class for: it
        takes part in the same pass.
        """
        counts = self._known()[rows]
        if read is None:
            read = attempt(self._dataset, rows, self._augmentation)
        if isinstance(read, DataError):
            read, readable = read_apart(self._dataset, rows, self._augmentation)
            counts = counts & readable
        there = {name: copied(tensor, self._device) for name, tensor in read.items()}
        batch = finished(self._dataset, there)
        # In numpy: this process waits for no device.
        if counts.numpy().all():
            return batch, None
        counts = copied(counts, self._device)
        for name, one in self._stand_in.items():
            values = batch.get(name, one).expand(len(rows), *one.shape[1:])
            batch[name] = torch.where(counts.view(-1, *[1] * (one.ndim - 1)), values, one.to(values.dtype))
        return batch, counts

    def close(self) -> None:
        self._method.close()
        # Only for the site: the existence of such examples is exact information about its data.
        if without := int(self._not_finite):
            reason = "their gradients are not finite, or could not be computed"
            self._log.warning("examples-counted-as-zero", times=without, reason=reason)
        if misfits := int(self._misfits):
            reason = "the model uses a tensor outside its own layer for some examples, and this part is left out"
            self._log.warning("per-example-gradients-incomplete", times=misfits, reason=reason)
