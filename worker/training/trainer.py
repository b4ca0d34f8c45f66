"""The local training loop of all methods."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from tessera.shared.methods.base import Phase, TrainingStats, UnsupportedRun, WorkerHalf
from tessera.shared.model.blocks import Block
from tessera.shared.run_settings import Training
from tessera.shared.schedule import local_steps, rate_factors, steps_per_epoch
from tessera.worker.data.dataset import Dataset
from tessera.worker.model.block_map import named_tensors
from tessera.worker.model.forward import label_count
from tessera.worker.training.context import LocalTaskContext
from tessera.worker.training.freeze import Freeze
from tessera.worker.training.input_mismatch import InputMismatch, rehearsal_fault
from tessera.worker.training.progress import CALIBRATING, Check, Report

Batch = dict[str, Tensor]


MIN_LOSS_SCALE = 2.0**-24
"""Gradients that overflow float16 at this scale, its smallest positive number, are not finite at any scale."""


class PrivateGradients(Protocol):
    """The gradients of a phase, with the noise of differential privacy."""

    def fill(self) -> None:
        """Set each parameter's gradient."""

    def close(self) -> None:
        """Restore the model as it was before."""


class PrivateTraining(Protocol):
    """The differential privacy of a task, for the training loop. `worker.privacy` implements it."""

    def begin(self, steps: int) -> None:
        """Reserve the privacy of a number of steps. Raises PolicyViolation."""

    def phase(self, trainer: Trainer, freeze: Freeze, dataset: Dataset) -> PrivateGradients:
        """Return the gradients for one phase."""


class TrainingDiverged(ArithmeticError):
    """A loss, a gradient or a weight that is not finite."""


@dataclass(frozen=True)
class Batches:
    """The batches of a data set on a device, in a new order for each pass if there is a generator."""

    dataset: Dataset
    size: int | None
    device: torch.device
    generator: torch.Generator | None = None

    def __iter__(self) -> Iterator[Batch]:
        batches = self.dataset.batches(self.size, self.generator)
        for batch in _ahead(batches) if self.dataset.on_disk else batches:
            yield {name: tensor.to(self.device) for name, tensor in batch.items()}


def _ahead(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Yield the batches, each read while the one before it is used."""
    with ThreadPoolExecutor(1, "reading") as pool:
        coming = pool.submit(next, batches, None)
        while (batch := coming.result()) is not None:
            coming = pool.submit(next, batches, None)
            yield batch


def seed_everything(seed: int) -> None:
    """Seed every global source of randomness: Python's, numpy's, and torch's on each device."""
    random.seed(seed)
    np.random.seed(seed % (1 << 32))  # noqa: NPY002  (the global state is what other libraries draw from)
    torch.manual_seed(seed)


@dataclass(frozen=True)
class Trainer:
    """Local training of a model for one task.

    In float32 on the CPU, the same model, data, seed and number of threads give the same bits; with `private`, its
    noise must have the same key too.
    """

    half: WorkerHalf[Any]
    context: LocalTaskContext
    training: Training
    device: torch.device
    check: Check
    private: PrivateTraining | None = None
    report: Report = field(default_factory=Report)
    """The progress report, updated at each step."""
    min_loss_examples: int = 1
    """Number of examples from which on the mean loss is reported."""
    scaler: torch.amp.GradScaler = field(default_factory=lambda: torch.amp.GradScaler("cpu", enabled=False))
    """The loss scaler for float16. Pass the run's to begin at the scale of its last round."""
    round_number: int = 1
    """The round, from 1, of the `rounds` over which a schedule of the learning rate runs. By default it runs over
    this task alone, as for a personal model."""
    rounds: int = 1
    micro_batch: int | None = None
    """Number of examples in a forward and backward pass, for a device on which a batch does not fit. The gradients of
    a batch's pieces add up to the batch's. A private task splits its batches itself."""

    def train(self, phases: Sequence[Phase], dataset: Dataset, seed: int) -> TrainingStats:
        """Train the phases, each with an optimizer of its own over the blocks that it trains.

        The returned loss is the mean over the examples of the last whole epoch, or of all steps if they are fewer;
        nan if these have fewer than `min_loss_examples`, without phases, or if training is private. Raises
        TrainingDiverged, SelectorError for a phase that names blocks which the model lacks, and the
        exceptions of `check` and `private`.
        """
        generator = torch.Generator().manual_seed(seed)
        batches = Batches(dataset, self.training.batch_size, self.device, generator)
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
            epoch = _Epoch(self, phase, rates, frozenset(dataset.common))
            if self.private:
                self._train_privately(self.private, epoch, count, dataset)
            else:
                loss = self._train_openly(epoch, count, batches)
            steps += epoch.steps
            rate_steps += epoch.rate_steps
        return TrainingStats(dataset.examples, steps, loss, self.training.learning_rate * rate_steps)

    def _train_openly(self, epoch: _Epoch, steps: int, batches: Batches) -> float:
        """Make the steps, over a new permutation for each pass over the data. Returns the loss, as `train` does."""
        loss, examples = math.nan, batches.dataset.examples
        whole = steps_per_epoch(self.training, examples)
        for first in range(0, steps, whole):
            count = min(whole, steps - first)
            mean = epoch.run(islice(batches, count))
            enough = first == 0 and count * (batches.size or examples) >= self.min_loss_examples
            # A pass that ends early does not replace the loss over all examples.
            loss = mean if count == whole or enough else loss
        return loss

    def _rehearse(self, dataset: Dataset) -> None:
        """Compute a loss on a synthetic example.

        Raises InputMismatch if the model does not fit the data set, before any privacy is spent and independently of
        the examples, on which a private task must not fail afterwards.
        """
        with autocast(self.training, self.device):
            fault = rehearsal_fault(self.context, dataset, lambda batch: self.half.loss(self.context, batch))
        if fault:
            raise InputMismatch(
                f"the model gives no loss for a synthetic example of the data set ({dataset.schema}). "
                "A private run pads texts to the data set's max_length, which the model must accept."
            ) from fault

    def _train_privately(self, private: PrivateTraining, epoch: _Epoch, steps: int, dataset: Dataset) -> None:
        noisy = private.phase(self, epoch.freeze, dataset)
        try:
            for _ in range(steps):
                self.check()
                epoch.noisy_step(noisy)
                self.report.advance()
        finally:
            noisy.close()
        # The loss is private, so the weights show divergence.
        if not all(bool(parameter.isfinite().all()) for parameter in epoch.freeze.parameters):
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


class _Epoch:
    """The state of a phase: its trained blocks, its optimizer, and its number of steps so far."""

    def __init__(self, trainer: Trainer, phase: Phase, rates: Iterator[float], common: Collection[str] = ()) -> None:
        """Prepare a phase. `rates` gives the share of the learning rate at each step; `common` are inputs of a batch
        that have no row for each example."""
        self.steps = 0
        self.rate_steps = 0.0
        """The sum of the shares of the learning rate at these steps."""
        self._rates = rates
        self._common = common
        self._trainer = trainer
        context = trainer.context
        added = context.private if phase.private else ()
        trained = [*phase.train.resolve(context.blocks), *added]
        # Buffers such as a normalisation's statistics depend on the data without noise.
        self.freeze = Freeze(context.model, trained, keep_buffers=trainer.private is not None)
        tensors, training = named_tensors(context.model), trainer.training
        private_rate = training.learning_rate if phase.private_learning_rate is None else phase.private_learning_rate
        own = {id(tensors[block.tensor]) for block in added}
        undecayed = {
            id(tensors[block.tensor])
            for block in trained
            if not training.decay_norms_and_biases and _is_norm_or_bias(block)
        }
        # There is one group if nothing differs, and torch refuses to have none.
        groups: dict[tuple[float, float], list[Tensor]] = {(training.learning_rate, training.weight_decay): []}
        for each in self.freeze.parameters:
            rate = private_rate if id(each) in own else training.learning_rate
            decay = 0.0 if id(each) in undecayed else training.weight_decay
            groups.setdefault((rate, decay), []).append(each)
        self._optimizer = _optimizer(groups, training)

    def _set_rate(self) -> float:
        """Set the optimizer's rates for the next step. Returns their share of the full ones."""
        share = next(self._rates)
        for group in self._optimizer.param_groups:
            group["lr"] = group["initial_lr"] * share
        return share

    def run(self, batches: Iterable[Batch]) -> float:
        """Train on the batches, of at most one pass over the data. Returns the mean loss over their examples."""
        total, examples = 0.0, 0
        for batch in batches:
            self._trainer.check()
            count = len(batch["labels"])
            total += self._step(batch) * count
            examples += count
            self._trainer.report.advance(total / examples if examples >= self._trainer.min_loss_examples else None)
        return total / examples

    def _step(self, batch: Batch) -> float:
        """Take one step. After an overflow of float16 the step is repeated at half the scale, so each batch
        counts."""
        share = self._set_rate()
        while True:
            value, stepped = self._try_step(batch)
            if stepped:
                self.rate_steps += share
                return value
            self._trainer.check()

    def _try_step(self, batch: Batch) -> tuple[float, bool]:
        """Return the loss of a batch, and whether its gradients were finite and the optimizer took a step."""
        half, context, training = self._trainer.half, self._trainer.context, self._trainer.training
        scaler = self._trainer.scaler
        self._optimizer.zero_grad(set_to_none=True)
        value, scale = 0.0, scaler.get_scale()
        for piece, share in self._pieces(batch):
            with autocast(training, self._trainer.device):
                loss = half.loss(context, piece)
            loss = loss if share == 1 else loss * share
            value += float(loss.detach())
            if not math.isfinite(value) or scale < MIN_LOSS_SCALE:
                what = "gradients are not finite" if math.isfinite(value) else f"the loss is {value}"
                rate = f"{training.learning_rate:g}"
                raise TrainingDiverged(f"{what} at step {self.steps} with a learning rate of {rate}")
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.unscale_(self._optimizer)
        self._correct_gradients()
        # The scaler skips the step if a gradient is not finite; only the lower scale shows it.
        scaler.step(self._optimizer)
        scaler.update()
        stepped = scaler.get_scale() >= scale
        self.freeze.restore()
        self.steps += stepped
        return value, stepped

    def _pieces(self, batch: Batch) -> list[tuple[Batch, float]]:
        """Return the batch in pieces of `micro_batch` examples, each with its share of the batch's labels, by which
        its mean loss counts. Raises UnsupportedRun if the pieces' losses do not add up to the batch's."""
        size, labels = self._trainer.micro_batch, batch["labels"]
        if size is None or len(labels) <= size:
            return [(batch, 1.0)]
        context = self._trainer.context
        if any(isinstance(module, _BatchNorm) and module.training for module in context.model.modules()):
            raise UnsupportedRun(
                f"this worker trains batches in pieces of {size} examples (micro_batch), and the model has batch "
                f"normalisation, which needs whole batches: begin a run with a training.batch_size of at most {size}"
            )
        if self._trainer.half.loss_by_example and labels.ndim > 1:
            raise UnsupportedRun(
                f"this worker trains batches in pieces of {size} examples (micro_batch), whose losses do not add up "
                "to the batch's by this method where an example has several labels: begin a run with a "
                f"training.batch_size of at most {size}, or with another method"
            )
        cut = {name: torch.split(tensor, size) for name, tensor in batch.items() if name not in self._common}
        common = {name: batch[name] for name in self._common}
        pieces = [{**dict(zip(cut, parts, strict=True)), **common} for parts in zip(*cut.values(), strict=True)]
        counts = [label_count(context.head, piece["labels"]) for piece in pieces]
        whole = sum(counts)
        if not whole:
            return [(batch, 1.0)]
        # The mean loss of a piece without labels is not a number.
        return [(piece, count / whole) for piece, count in zip(pieces, counts, strict=True) if count]

    def noisy_step(self, noisy: PrivateGradients) -> None:
        """Take one step with a noisy gradient. What follows reads no data, so it costs no privacy."""
        share = self._set_rate()
        noisy.fill()
        self._correct_gradients()
        self._optimizer.step()
        self.freeze.restore()
        self.steps += 1
        self.rate_steps += share

    def _correct_gradients(self) -> None:
        self._trainer.half.after_backward(self._trainer.context)
        self.freeze.mask_gradients()
        if (norm := self._trainer.training.max_gradient_norm) is not None:
            torch.nn.utils.clip_grad_norm_(self.freeze.parameters, norm)


def _is_norm_or_bias(block: Block) -> bool:
    # A bias has the role of its weight. A table of position biases is a weight: its name goes on.
    return block.role == "norm" or block.tensor.rpartition(".")[2].endswith("bias")


def _optimizer(groups: Mapping[tuple[float, float], Sequence[Tensor]], training: Training) -> torch.optim.Optimizer:
    """Return an optimizer of these tensors, by their learning rate and weight decay."""
    parameters = [
        {"params": tensors, "lr": rate, "initial_lr": rate, "weight_decay": decay}
        for (rate, decay), tensors in groups.items()
    ]
    if training.optimizer == "adamw":
        return torch.optim.AdamW(parameters, betas=training.betas)
    return torch.optim.SGD(parameters, lr=training.learning_rate, momentum=training.momentum)


def gradient_scaler(training: Training, device: torch.device) -> torch.amp.GradScaler:
    """Return a run's loss scaler, without which small gradients vanish in float16.

    On the CPU, 16 bits mean bfloat16, which needs no scaling.
    """
    scaled = training.precision == "float16" and device.type == "cuda"
    return torch.amp.GradScaler(device.type, enabled=scaled)


def autocast(training: Training, device: torch.device) -> AbstractContextManager[object]:
    """Return the context of the forward pass's precision. Where there is no GPU, bfloat16 replaces float16."""
    half = torch.float16 if training.precision == "float16" and device.type == "cuda" else torch.bfloat16
    return torch.autocast(device.type, dtype=half, enabled=training.precision != "float32")
