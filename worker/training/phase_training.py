"""The state of one phase of training, and its steps."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from tessera.shared.methods.base import Phase
from tessera.shared.model.blocks import Block
from tessera.worker.model.block_map import named_tensors
from tessera.worker.training.batches import Batch
from tessera.worker.training.checkpoints import Below, under
from tessera.worker.training.context import LocalTaskContext
from tessera.worker.training.divergence import TrainingDiverged
from tessera.worker.training.freeze import Freeze
from tessera.worker.training.optimization.micro_batch import pieces_of, require_additive
from tessera.worker.training.optimization.optimizer import optimizer_of, parameter_groups, set_rate
from tessera.worker.training.optimization.optimizer_state import optimizer_tensors, set_optimizer_tensors
from tessera.worker.training.optimization.precision import MIN_LOSS_SCALE
from tessera.worker.training.setup import LocalTraining, PrivateGradients

COUNTS = ("batches", "steps", "rate_steps", "loss_sum", "examples")


class PhaseTraining:
    """The state of a phase: its trained blocks, its optimizer, and its number of steps so far."""

    def __init__(
        self, local: LocalTraining, phase: Phase, rates: Iterator[float], common: Collection[str] = ()
    ) -> None:
        """Prepare a phase. `rates` gives the share of the learning rate at each step; `common` are inputs of a batch
        that have no row for each example."""
        self.batches = 0
        """The number of batches, or noisy steps, so far."""
        self.steps = 0
        self.loss_sum = 0.0
        """Of this pass, over `examples`."""
        self.examples = 0
        self.rate_steps = 0.0
        """The sum of the shares of the learning rate at these steps."""
        self._rates = rates
        self._common = common
        self._local = local
        context = local.context
        added = context.private if phase.private else ()
        trained = trained_blocks(context, phase)
        # Buffers such as a normalisation's statistics depend on the data without noise.
        self.freeze = Freeze(context.model, trained, keep_buffers=local.private is not None)
        self._ranks = local.setup.ranks
        self._ranks.start_phase(context.model, self.freeze.parameters)
        tensors = named_tensors(context.model)
        self._trained = [(block, tensors[block.tensor]) for block in trained]
        groups = parameter_groups(self.freeze.parameters, self._trained, added, phase, local.training)
        self._optimizer = optimizer_of(groups, local.training)
        self._name = phase.name
        if local.moments:
            local.moments.restore(phase.name, self._optimizer, self._trained)

    def keep_moments(self) -> None:
        """Keep the optimizer's moments for the next round, if the run does."""
        if self._local.moments:
            self._local.moments.update(self._name, self._optimizer, self._trained)

    def run(self, batches: Iterable[Batch], after_step: Callable[[], None] = lambda: None) -> float:
        """Train on the batches of at most one pass over the data. Returns the mean loss over the pass's examples,
        with those before a checkpoint from which it resumes."""
        for batch in batches:
            self._local.check()
            count = self._ranks.examples(len(batch["labels"]))
            self.loss_sum += self._step(batch) * count
            self.examples += count
            self.batches += 1
            enough = self.examples >= self._local.min_loss_examples
            self._local.report.advance(self.loss_sum / self.examples if enough else None)
            after_step()
        mean = self.loss_sum / self.examples
        self.loss_sum, self.examples = 0.0, 0
        return mean

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the state for a checkpoint: a JSON document, and tensors by name, which share the phase's memory."""
        counts = {name: getattr(self, name) for name in COUNTS}
        tensors = under("optimizer", optimizer_tensors(self._optimizer, self._by_name()))
        return {**counts, "scaler": self._local.scaler.state_dict()}, tensors

    def set_state(self, document: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Set the state that `state` returned, and skip the rates of the steps that it counts."""
        for name in COUNTS:
            setattr(self, name, document[name])
        self._local.scaler.load_state_dict(document["scaler"])
        set_optimizer_tensors(self._optimizer, self._by_name(), Below("optimizer", tensors))

    def _by_name(self) -> dict[str, Tensor]:
        return {block.tensor: tensor for block, tensor in self._trained}

    def _set_rate(self) -> float:
        share = next(self._rates)
        set_rate(self._optimizer, share)
        return share

    def _step(self, batch: Batch) -> float:
        """Take one step. After an overflow of float16 the step is repeated at half the scale, so each batch
        counts."""
        share = self._set_rate()
        while True:
            value, stepped = self._try_step(batch)
            if stepped:
                self.rate_steps += share
                return value
            self._local.check()

    def _try_step(self, batch: Batch) -> tuple[float, bool]:
        """Return the loss of a batch, and whether its gradients were finite and the optimizer took a step."""
        scaler = self._local.scaler
        self._optimizer.zero_grad(set_to_none=True)
        value, scale = 0.0, scaler.get_scale()
        for piece, share in self._pieces(batch):
            loss = self._local.loss(piece)
            loss = loss * share if isinstance(share, Tensor) or share != 1 else loss
            value += float(loss.detach())
            if not math.isfinite(value) or scale < MIN_LOSS_SCALE:
                what = "gradients are not finite" if math.isfinite(value) else f"the loss is {value}"
                rate = f"{self._local.training.learning_rate:g}"
                raise TrainingDiverged(f"{what} at step {self.steps} with a learning rate of {rate}")
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self._ranks.sum_gradients(self.freeze.parameters)
        value = self._ranks.total(value)
        scaler.unscale_(self._optimizer)
        self._correct_gradients()
        # The scaler skips the step if a gradient is not finite; only the lower scale shows it.
        scaler.step(self._optimizer)
        scaler.update()
        stepped = scaler.get_scale() >= scale
        self.freeze.restore()
        self.steps += stepped
        return value, stepped

    def _pieces(self, batch: Batch) -> list[tuple[Batch, float | Tensor]]:
        context, size = self._local.context, self._local.setup.micro_batch
        by_example, weighted = self._local.half.loss_by_example, self._local.training.class_weights is not None
        require_additive(context.model, batch, size, loss_by_example=by_example, weighted=weighted)
        pieces = pieces_of(batch, size, context.head, self._common, context.objective)
        return self._ranks.weigh(pieces, batch["labels"], context, loss_by_example=by_example)

    def noisy_step(self, noisy: PrivateGradients) -> None:
        """Take one step with a noisy gradient. What follows reads no data, so it costs no privacy."""
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


def trained_blocks(context: LocalTaskContext, phase: Phase) -> list[Block]:
    """Return the blocks that a phase trains, those of the method's private modules included."""
    return [*phase.train.resolve(context.blocks), *(context.private if phase.private else ())]
