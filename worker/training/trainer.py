"""The local training loop of all methods."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain, islice
from itertools import count as counted

import structlog
import torch

from tessera.shared.methods.base import Phase, TrainingStats
from tessera.shared.run_settings import Training
from tessera.shared.schedule import local_steps, rate_factors, steps_per_epoch
from tessera.worker.data.augmentation import augmentation_of
from tessera.worker.data.dataset import Dataset
from tessera.worker.errors import InputMismatch, TrainingDiverged
from tessera.worker.training.batches import Batches
from tessera.worker.training.freeze import Freeze
from tessera.worker.training.input_mismatch import count_labelled, rehearsal_fault
from tessera.worker.training.optimization.attention_masks import unread_masks
from tessera.worker.training.optimization.compilation import compiled
from tessera.worker.training.optimization.recomputation import recomputed
from tessera.worker.training.optimization.short_attention import short_attention
from tessera.worker.training.optimization.trimming import is_trimmable
from tessera.worker.training.phase_training import PhaseTraining, trained_blocks
from tessera.worker.training.ranks import require_summable
from tessera.worker.training.setup import LocalTraining, PrivateTraining
from tessera.worker.training.training_state import TrainingState


@dataclass(frozen=True)
class Trainer(LocalTraining):
    """Local training of a model for one task.

    In float32 on the CPU, the same model, data, seed and number of threads give the same bits; with `private`, its
    noise must have the same key too.
    """

    def train(self, phases: Sequence[Phase], dataset: Dataset, seed: int) -> TrainingStats:
        """Train the phases, each with an optimizer of its own over the blocks that it trains.

        The returned loss is the mean over the examples of the last whole epoch, or of all steps if they are fewer;
        nan if these examples are fewer than `min_loss_examples`, without phases, or if training is private. Raises
        TrainingDiverged, SelectorError for a phase that names blocks which the model lacks, UnsupportedRun for
        losses that several ranks cannot divide, and the exceptions of `check` and `private`.
        """
        if self.setup.ranks.size > 1 and not self.private:
            require_summable(self.half, self.context, dataset, self.setup.ranks.size)
        if not self.private:
            count_labelled(self.context.head, dataset)
        order = torch.Generator().manual_seed(seed)
        share, size = self.setup.ranks.share_of(dataset), self.training.batch_size
        changes = augmentation_of(self.training, seed)
        # A compiled model would be compiled again for each length.
        trims = not (self.private or self.setup.compute.compile) and is_trimmable(self.context, dataset)
        batches = Batches(share, size, self.setup.device, order, augmentation=changes, trims=trims)
        # Under privacy no module computes statistics of a batch, from its charge on.
        training = self.private is None
        if any(module.training != training for module in self.context.model.modules()):
            self.context.model.train(training)
        state = TrainingState(self, phases, order)
        # Batches of a private task are of its units, which may be groups of examples.
        units = self.private.units if self.private else dataset.examples
        planned = [steps_of(phase, self.training, units) for phase in phases]
        done = sum(planned[: state.at.phase]) + state.at.batches
        # Each phase has all of the round's rates, so that what one trains does not depend on the length of another.
        rates_of = (rate_factors(self.training, steps, self.round_number, self.rounds) for steps in planned)
        rates = islice(chain.from_iterable(rates_of), done, None)
        if self.private and phases:
            self._rehearse(dataset)
            self._fit_pieces(self.private, phases, dataset)
            self.private.begin(sum(planned))
            # If the worker is killed from now on, the same privacy is not spent again.
            state.save_start()
        self.report.begin("training", steps=sum(planned))
        self.report.resume(state.at.progress, state.at.training_seconds)
        for count in planned[state.at.phase :]:
            current = state.start(rates, frozenset(dataset.common))
            scale = self.scaler.get_scale()
            try:
                if self.private:
                    self._train_privately(self.private, current, count, dataset, state)
                else:
                    with self._set_up(), self._images_once(batches, phases) as data:
                        self._train_openly(current, count, replace(batches, dataset=data), state)
            except TrainingDiverged as fault:
                phase = phases[state.at.phase]
                if not phase.personal:
                    raise
                structlog.get_logger("worker").warning("personal-model-diverged", cause=str(fault))
                self.half.on_phase_diverged(self.context, phase)
                current.abandon()
                self.scaler.update(scale)
            else:
                current.end()
            state.end_phase(current)
        rate_sum = self.training.learning_rate * state.at.rate_steps
        return TrainingStats(units, state.at.steps, state.at.loss, rate_sum)

    def _train_openly(self, current: PhaseTraining, steps: int, batches: Batches, state: TrainingState) -> None:
        """Make the steps, over a new permutation for each pass over the data, and note the loss, as in `train`."""
        whole = steps_per_epoch(self.training, batches.dataset.examples)
        state.restore_generators()
        phase = state.at.phase
        while current.batches < steps:
            number, skip = divmod(current.batches, whole)
            first = number * whole
            count = min(whole, steps - first)
            mean = self._pass(current, batches.of_pass(phase, number, skip), first + count, state)
            # A pass that ends early does not replace the loss over all examples.
            replaces = (count == whole or first == 0) and not math.isnan(mean)
            state.end_pass(mean if replaces else state.at.loss)
            state.save_if_due(current)
        current.make_up(batches.of_pass(phase, number) for number in counted(math.ceil(steps / whole)))

    def _pass(self, current: PhaseTraining, batches: Batches, end: int, state: TrainingState) -> float:
        """Train up to the phase's batch `end`, in one pass over the data. Returns the mean loss."""

        def after_step() -> None:
            # After the pass's last batch, the loss has to be noted first.
            if current.batches < end:
                state.save_if_due(current)

        return current.run(islice(batches.with_labels(), end - current.batches), after_step)

    @contextmanager
    def _set_up(self) -> Iterator[None]:
        """Let forward and backward passes within the block be computed as the run and the worker set."""
        model, compiles = self.context.model, self.setup.compute.compile
        with ExitStack() as stack:
            stack.enter_context(unread_masks(self.setup.device))
            if not compiles:
                stack.enter_context(short_attention(self.training, self.setup.device))
            if self.training.gradient_checkpointing:
                stack.enter_context(recomputed(model, self._computed_again))
            if compiles:
                stack.enter_context(compiled(model))
            yield

    def _images_once(self, batches: Batches, phases: Sequence[Phase]) -> AbstractContextManager[Dataset]:
        """Let each image pass through a frozen vision tower once, unless images change or the tower is compiled."""
        if batches.augmentation or self.setup.compute.compile:
            return nullcontext(batches.dataset)
        return self.context.images_once(batches.dataset, phases)

    @contextmanager
    def _computed_again(self) -> Iterator[None]:
        """Let layers that the backward pass computes again be computed as in the forward pass."""
        is_compiled = self.setup.compute.compile
        with nullcontext() if is_compiled else short_attention(self.training, self.setup.device):
            yield

    def _rehearse(self, dataset: Dataset) -> None:
        """Compute a loss on a synthetic example.

        Raises InputMismatch if the model does not fit the data set, before any privacy is spent and independently of
        the examples, on which a private task must not fail afterwards.
        """
        if fault := rehearsal_fault(self.context, dataset, self.loss):
            raise InputMismatch(
                f"the model gives no loss for a synthetic example of the data set ({dataset.schema}). "
                "A private run pads texts to the data set's max_length, which the model must accept."
            ) from fault

    def _fit_pieces(self, private: PrivateTraining, phases: Sequence[Phase], dataset: Dataset) -> None:
        """Find the size of a private task's pieces, if it is automatic, before any privacy is spent."""
        if not self.piece_size or not self.piece_size.automatic:
            return
        for phase in phases:
            freeze = Freeze(self.context.model, trained_blocks(self, phase), keep_buffers=True)
            private.fit(self, freeze, dataset, self.piece_size)

    def _train_privately(
        self,
        private: PrivateTraining,
        current: PhaseTraining,
        steps: int,
        dataset: Dataset,
        state: TrainingState,
    ) -> None:
        self.check()
        noisy = private.phase(self, current.freeze, dataset)
        state.restore_generators()
        try:
            while current.batches < steps:
                self.check()
                current.noisy_step(noisy)
                self.report.advance()
                state.save_if_due(current)
        finally:
            noisy.close()
        # The loss is private, so the weights show divergence.
        finite = [parameter.isfinite().all() for parameter in current.freeze.parameters]
        if finite and not bool(torch.stack(finite).all()):
            raise TrainingDiverged(f"weights are not finite with a learning rate of {self.training.learning_rate:g}")


def steps_of(phase: Phase, training: Training, examples: int) -> int:
    """Return the number of optimizer steps of a phase."""
    if phase.epochs is None:
        return local_steps(training, examples)
    return phase.epochs * steps_per_epoch(training, examples)


def epochs_of(phases: Iterable[Phase], training: Training, examples: int) -> int:
    """Return the number of passes over the data in all phases together, rounded up."""
    steps = sum(steps_of(phase, training, examples) for phase in phases)
    return math.ceil(steps / steps_per_epoch(training, examples))
