"""The local training loop of all methods."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from tessera.shared.methods.base import Phase, TrainingStats
from tessera.shared.run_settings import Training
from tessera.shared.schedule import local_steps, rate_factors, steps_per_epoch
from tessera.worker.data.dataset import Dataset
from tessera.worker.training.batches import Batches
from tessera.worker.training.divergence import TrainingDiverged
from tessera.worker.training.input_mismatch import InputMismatch, rehearsal_fault
from tessera.worker.training.phase_training import PhaseTraining
from tessera.worker.training.progress import CALIBRATING
from tessera.worker.training.setup import LocalTraining, PrivateTraining


@dataclass(frozen=True)
class Trainer(LocalTraining):
    """Local training of a model for one task.

    In float32 on the CPU, the same model, data, seed and number of threads give the same bits; with `private`, its
    noise must have the same key too.
    """

    def train(self, phases: Sequence[Phase], dataset: Dataset, seed: int) -> TrainingStats:
        """Train the phases, each with an optimizer of its own over the blocks that it trains.

        The returned loss is the mean over the examples of the last whole epoch, or of all steps if they are fewer;
        nan if these have fewer than `min_loss_examples`, without phases, or if training is private. Raises
        TrainingDiverged, SelectorError for a phase that names blocks which the model lacks, and the
        exceptions of `check` and `private`.
        """
        generator = torch.Generator().manual_seed(seed)
        batches = Batches(self.setup.ranks.share_of(dataset), self.training.batch_size, self.setup.device, generator)
        self.context.model.train()
        steps, rate_steps, loss = 0, 0.0, math.nan
        planned = [steps_of(phase, self.training, dataset.examples) for phase in phases]
        rates = rate_factors(self.training, sum(planned), self.round_number, self.rounds)
        if self.private and phases:
            self.report.activity = CALIBRATING
            self._rehearse(dataset)
            self.private.begin(sum(planned))
        self.report.begin("training", steps=sum(planned), by_quarter=self.private is not None)
        for phase, count in zip(phases, planned, strict=True):
            self.half.on_phase_start(self.context, phase)
            current = PhaseTraining(self, phase, rates, frozenset(dataset.common))
            if self.private:
                self._train_privately(self.private, current, count, dataset)
            else:
                loss = self._train_openly(current, count, batches)
            current.keep_moments()
            steps += current.steps
            rate_steps += current.rate_steps
        return TrainingStats(dataset.examples, steps, loss, self.training.learning_rate * rate_steps)

    def _train_openly(self, current: PhaseTraining, steps: int, batches: Batches) -> float:
        """Make the steps, over a new permutation for each pass over the data. Returns the loss, as `train` does."""
        loss, examples = math.nan, batches.dataset.examples
        whole = steps_per_epoch(self.training, examples)
        for first in range(0, steps, whole):
            count = min(whole, steps - first)
            mean = current.run(islice(batches, count))
            enough = first == 0 and count * (batches.size or examples) >= self.min_loss_examples
            # A pass that ends early does not replace the loss over all examples.
            loss = mean if count == whole or enough else loss
        return loss

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

    def _train_privately(
        self, private: PrivateTraining, current: PhaseTraining, steps: int, dataset: Dataset
    ) -> None:
        noisy = private.phase(self, current.freeze, dataset)
        try:
            for _ in range(steps):
                self.check()
                current.noisy_step(noisy)
                self.report.advance()
        finally:
            noisy.close()
        # The loss is private, so the weights show divergence.
        if not all(bool(parameter.isfinite().all()) for parameter in current.freeze.parameters):
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
