"""The state of one phase of training, and its steps."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from typing import Any

import torch
from torch import Tensor

from tessera.shared.methods.base import Phase
from tessera.shared.model.blocks import Block
from tessera.worker.errors import NoFiniteLoss, TrainingDiverged
from tessera.worker.model.forward import label_count
from tessera.worker.model.four_bits import buffers_of_passes
from tessera.worker.training.batches import Batch, Batches
from tessera.worker.training.checkpoints import PrefixView, under
from tessera.worker.training.freeze import Freeze
from tessera.worker.training.optimization.micro_batch import PieceSize, pieces_of, require_additive
from tessera.worker.training.optimization.optimizer import make_moments, optimizer_of, parameter_groups, set_rate
from tessera.worker.training.optimization.optimizer_state import optimizer_tensors, set_optimizer_tensors
from tessera.worker.training.optimization.precision import MIN_LOSS_SCALE
from tessera.worker.training.randomness import generator_states, set_generator_states
from tessera.worker.training.setup import LocalTraining, PrivateGradients

COUNTS = ("batches", "steps", "rate_steps", "loss_sum", "examples", "skipped", "_fitted")
"""The attributes of a phase in a checkpoint."""

READ_SECONDS = 1.0
"""Seconds between readings of the loss from the device, each of which waits for it."""


@dataclass(frozen=True)
class _Unread:
    """A step whose results are still on the device."""

    loss: Tensor
    overflowed: Tensor | None
    """Not 0 if the gradients overflowed float16, so that the optimizer skipped the step; None in other precisions."""
    examples: int
    share: float
    """The share of the learning rate."""
    unusable: Tensor
    """The number of the batch's tensors in which some number is not finite."""


class _Overflow:
    """The overflow of the last step's gradients, which the optimizer shows only within the step.

    An optimizer whose hook referred to the phase would be in a cycle with it: its moments, twice the weights, would
    stay in memory after the task, until Python's garbage collector happens to run.
    """

    found: Tensor | None = None

    def note(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.found = getattr(optimizer, "found_inf", None)


class PhaseTraining:
    """The state of a phase: its trained blocks, its optimizer, and its number of steps so far.

    Steps do not wait for the device. Their losses stay there and are read about once a second and at the end of an
    epoch; only then is divergence noticed.
    """

    def __init__(
        self,
        local: LocalTraining,
        phase: Phase,
        rates: Iterator[float],
        common: Collection[str] = (),
        *,
        is_first: bool = False,
    ) -> None:
        """Prepare a phase. `rates` gives the share of the learning rate at each step; `common` are inputs of a batch
        that have no row for each example. `is_first` if the model has not trained in this task."""
        self._is_first = is_first
        self.batches = 0
        """The number of batches, or noisy steps, so far."""
        self.loss_sum = 0.0
        """The sum of this pass's losses over `examples`."""
        self.examples = 0
        self.steps = 0
        self.rate_steps = 0.0
        """The sum of the shares of the learning rate at these steps."""
        self._rates = rates
        self._common = common
        self._local = local
        self._unread: list[_Unread] = []
        self._read_at = local.clock()
        self.skipped: list[float] = []
        """The shares of the learning rate of skipped steps."""
        self._size = local.piece_size or PieceSize.of(local.setup.micro_batch)
        self._has_moments = not self._size.automatic
        """True once the optimizer has allocated its moments."""
        self._fitted = not local.scaler.is_enabled()
        """True once the loss scale fits the gradients."""
        self._overflow = _Overflow()
        context = local.context
        added = context.private if phase.private else ()
        trained = trained_blocks(local, phase)
        context.held.forget(block.tensor for block in trained)
        # Buffers such as a normalisation's statistics depend on the data without noise.
        self.freeze = Freeze(context.model, trained, keep_buffers=local.private is not None)
        self._ranks = local.setup.ranks
        self._ranks.start_phase(self.freeze.parameters)
        self._trained = [(block, self.freeze.tensors[block.tensor]) for block in trained]
        groups = parameter_groups(self.freeze.parameters, self._trained, added, phase, local.training)
        self._optimizer = optimizer_of(groups, local.training)
        self._optimizer.register_step_post_hook(self._overflow.note)
        self._name = phase.name
        if local.moments:
            local.moments.restore(phase.name, self._optimizer, self._trained)

    def end(self) -> None:
        """Keep the optimizer's moments for the next round, if the run does, and drop the gradients: a model that is
        kept for the next task would hold them until then."""
        if self._local.moments:
            self._local.moments.update(self._name, self._optimizer, self._trained)
        self._drop_gradients()

    def abandon(self) -> None:
        """Drop the gradients, and keep the moments of earlier rounds."""
        self._unread.clear()
        self._drop_gradients()

    def run(self, batches: Iterable[tuple[Batch, Tensor]], after_step: Callable[[], None] = lambda: None) -> float:
        """Train on the batches, each with its labels on the CPU, of at most one pass over the data.

        Returns the mean loss over the examples of the pass's steps, with those before a checkpoint from which it
        resumes; nan if these are fewer than `min_loss_examples`. Raises TrainingDiverged.
        """
        for batch, labels in batches:
            self._local.check()
            self._step(batch, labels)
            self.batches += 1
            self._local.report.advance()
            if self._local.clock() - self._read_at >= READ_SECONDS:
                self._read()
            after_step()
        self._read()
        mean = self._mean_loss
        self.loss_sum, self.examples = 0.0, 0
        return mean

    def make_up(self, passes: Iterator[Batches]) -> None:
        """Make the steps that were skipped, at their rates, on the batches of further passes: methods rely on the
        number of steps. Raises TrainingDiverged."""
        while self.skipped:
            count, self._rates, self.skipped = len(self.skipped), iter(self.skipped), []
            batches = chain.from_iterable(each.with_labels() for each in passes)
            self.run(islice(batches, count))

    def _read(self) -> None:
        """Read the steps since the last reading, count those that were made and report their mean loss.

        Raises TrainingDiverged.
        """
        unread, self._unread = self._unread, []
        losses = _values([step.loss for step in unread])
        overflows = _values([step.overflowed for step in unread if step.overflowed is not None])
        for step, loss, overflowed in zip_longest(unread, losses, overflows):
            if not math.isfinite(loss):
                raise self._diverged(f"the loss is {loss}", finite=not step.unusable)
            if overflowed:
                self.skipped.append(step.share)
                self._local.report.step -= 1
                continue
            self.loss_sum += loss * step.examples
            self.examples += step.examples
            self.steps += 1
            self.rate_steps += step.share
        if self._local.scaler.get_scale() < MIN_LOSS_SCALE:
            raise self._diverged("gradients are not finite")
        mean = self._mean_loss
        self._local.report.loss = None if math.isnan(mean) else mean
        self._read_at = self._local.clock()

    @property
    def _mean_loss(self) -> float:
        enough = self.examples >= self._local.min_loss_examples
        return self.loss_sum / self.examples if enough else math.nan

    def _diverged(self, what: str, *, finite: bool = True) -> TrainingDiverged:
        """Return the error of the step after `steps`. `finite` if the numbers of its batch are."""
        training, found = self._local.training, f"{what} at step {self.steps}"
        if not finite:
            return NoFiniteLoss(f"{found}: its batch has an input or a label that is infinite or not a number")
        if self._is_first and not self.steps:
            return NoFiniteLoss(
                f"{found}, before any training: the version has weights that are too large, or "
                + ("the model" if training.precision == "float32" else f"training.precision {training.precision}")
                + " does not suit the size of the inputs"
            )
        return TrainingDiverged(f"{found} with a learning rate of {training.learning_rate:g}")

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the state for a checkpoint: a JSON document, and tensors by name, which share the phase's memory.

        Raises TrainingDiverged.
        """
        self._read()
        counts = {name: getattr(self, name) for name in COUNTS}
        tensors = under("optimizer", optimizer_tensors(self._optimizer, self._by_name()))
        document = {"scaler": self._local.scaler.state_dict(), "micro_batch": self._size.examples}
        return {**counts, **document}, tensors

    def set_state(self, document: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Set the state that `state` returned, and skip the rates of the steps that it counts."""
        for name in COUNTS:
            setattr(self, name, document[name])
        self._local.scaler.load_state_dict(document["scaler"])
        if self._size.automatic:
            self._size.examples = document["micro_batch"]
        set_optimizer_tensors(self._optimizer, self._by_name(), PrefixView("optimizer", tensors))

    def _by_name(self) -> dict[str, Tensor]:
        return {block.tensor: tensor for block, tensor in self._trained}

    def _set_rate(self) -> float:
        share = next(self._rates)
        set_rate(self._optimizer, share)
        return share

    def _step(self, batch: Batch, labels: Tensor) -> None:
        """Take one step. The phase's first one is repeated at half the scale until float16 does not overflow. A later
        one that overflows is skipped: noticing it at once would wait for the device."""
        share = self._set_rate()
        while True:
            loss = self._try_step(batch, labels)
            if self._fitted or not self._overflow.found or not math.isfinite(float(loss)):
                break
            if self._local.scaler.get_scale() < MIN_LOSS_SCALE:
                raise self._diverged("gradients are not finite")
            self._local.check()
        self._fitted = True
        examples = self._ranks.examples(len(labels))
        if not self._ranks.any_rank(bool(label_count(self._local.context.head, labels))):
            examples = 0
        unusable = torch.zeros((), device=loss.device)
        for tensor in batch.values():
            if tensor.is_floating_point():
                unusable += ~tensor.isfinite().all()
        self._unread.append(_Unread(loss, self._overflow.found, examples, share, self._ranks.total(unusable)))

    def _try_step(self, batch: Batch, labels: Tensor) -> Tensor:
        """Take a step unless the gradients overflow, which `_overflow` then shows. Returns the batch's loss."""
        scaler = self._local.scaler
        value = self._fitting_gradients(batch, labels) if self._size.automatic else self._gradients(batch, labels)
        self._ranks.sum_gradients(self.freeze.parameters)
        value = self._ranks.total(value)
        scaler.unscale_(self._optimizer)
        self._correct_gradients()
        scaler.step(self._optimizer)
        scaler.update()
        self.freeze.restore()
        return value

    def _fitting_gradients(self, batch: Batch, labels: Tensor) -> Tensor:
        """Set the gradients to a batch's, in pieces that fit into memory. Returns its loss.

        When memory runs out, everything is as it was before the step, except the size of pieces. Raises
        ExampleTooLarge.
        """
        if not self._has_moments:
            make_moments(self._optimizer)
            self._has_moments = True
        value: Tensor | None
        while True:
            generators = generator_states()
            buffers = [(buffer, buffer.clone()) for buffer in buffers_of_passes(self._local.context.model)]
            try:
                value = self._gradients(batch, labels)
            except torch.OutOfMemoryError:
                # The traceback holds the tensors of the pass, so nothing is done about it before it is gone.
                value = None
            # A sum over the ranks in a step is repeated by all of them.
            short = value is None
            if not self._ranks.any_rank(short) and value is not None:
                return value
            self._drop_gradients()
            for buffer, values in buffers:
                buffer.copy_(values)
            set_generator_states(*generators)
            if short:
                self._size.halve(len(labels))

    def _gradients(self, batch: Batch, labels: Tensor) -> Tensor:
        """Set the gradients to a batch's. Returns its loss."""
        self._drop_gradients()
        value = torch.zeros((), dtype=torch.float64, device=self._local.setup.device)
        for piece, share in self._pieces(batch, labels):
            loss = self._local.loss(piece)
            loss = loss * share if isinstance(share, Tensor) or share != 1 else loss
            value += loss.detach()
            self._local.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        return value

    def _drop_gradients(self) -> None:
        for parameter in self.freeze.parameters:
            parameter.grad = None

    def _pieces(self, batch: Batch, labels: Tensor) -> list[tuple[Batch, float | Tensor]]:
        context, half, size = self._local.context, self._local.half, self._size.examples
        require_additive(context.model, half, labels, self._local.training, size)
        pieces = pieces_of(batch, labels, size, context.head, self._common, context.objective)
        return self._ranks.weigh(pieces, labels, context)

    def noisy_step(self, noisy: PrivateGradients) -> None:
        """Take one step with a noisy gradient. The rest of a step reads no data, so it costs no privacy."""
        share = self._set_rate()
        noisy.fill()
        self._correct_gradients()
        self._optimizer.step()
        self.freeze.restore()
        self.batches += 1
        self.steps += 1
        self.rate_steps += share

    def _correct_gradients(self) -> None:
        self._local.half.after_backward(self._local.context)
        self.freeze.mask_gradients()
        if (norm := self._local.training.max_gradient_norm) is not None:
            torch.nn.utils.clip_grad_norm_(self.freeze.parameters, norm)


def _values(scalars: Sequence[Tensor]) -> list[float]:
    """Read scalars of one device, all at once."""
    values: list[float] = torch.stack([*scalars]).tolist() if scalars else []
    return values


def trained_blocks(local: LocalTraining, phase: Phase) -> list[Block]:
    """Return the blocks that a phase trains, those of the method's private modules included."""
    context, trainable = local.context, local.half.run.trainable
    of_run = [block for block in phase.train.resolve(context.blocks) if trainable.holds(block)]
    return [*of_run, *(context.private if phase.private else ())]
