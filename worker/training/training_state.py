"""The progress of a task's training, and its part in a checkpoint."""

from collections.abc import Collection, Iterator, Sequence

import structlog
import torch
from torch import Tensor

from tessera.shared.methods.base import Phase
from tessera.worker.model.block_map import named_tensors, numpy_view, torch_view
from tessera.worker.training.checkpoints import Position, PrefixView, TrainingCheckpoints, under
from tessera.worker.training.phase_training import PhaseTraining, trained_blocks
from tessera.worker.training.randomness import generator_states, set_generator_states
from tessera.worker.training.setup import LocalTraining


class TrainingState:
    """The progress of training some phases, from their start or from a checkpoint on.

    `order` is the generator of the examples' order. It is not drawn from here.
    """

    def __init__(self, local: LocalTraining, phases: Sequence[Phase], order: torch.Generator) -> None:
        self._local = local
        self._phases = phases
        self._order = order
        self._pass_order = order.get_state()
        """Its state at the start of the present pass over the data."""
        self._checkpoints = local.checkpoints if local.half.resumable else None
        self._resumed = self._checkpoints.document if self._checkpoints else None
        self.at = Position(**self._resumed["position"]) if self._resumed else Position()
        if self._resumed:
            log = structlog.get_logger("worker")
            log.info("training-resumed", phase=self.at.phase, batches=self.at.batches)

    def start(self, rates: Iterator[float], common: Collection[str]) -> PhaseTraining:
        """Start the phase that training is at, or resume it in its middle."""
        local, phase = self._local, self._phases[self.at.phase]
        if self._checkpoints is None or self._resumed is None or not self.at.batches:
            local.half.on_phase_start(local.context, phase)
            return PhaseTraining(local, phase, rates, common, is_first=self.at.phase == 0)
        with self._checkpoints.tensors() as stored:
            kept = PrefixView("half", stored)
            local.half.on_phase_resume(local.context, phase, {name: numpy_view(kept[name].clone()) for name in kept})
            local.context.held.forget(self._trained())
            for name, tensor in self._trained().items():
                tensor.copy_(stored[f"model/{name}"])
            if local.moments:
                moments = PrefixView("moments", stored)
                local.moments.values.update({name: numpy_view(moments[name].clone()) for name in moments})
            current = PhaseTraining(local, phase, rates, common)
            current.set_state(self._resumed["current"], stored)
        return current

    def restore_generators(self) -> None:
        """Restore all sources of randomness, after everything that draws from them before the first batch."""
        if self._checkpoints and self._resumed:
            with self._checkpoints.tensors() as stored:
                set_generator_states(self._resumed["generators"], PrefixView("generators", stored))
                self._pass_order = stored["order"].clone()
            self._order.set_state(self._pass_order)
            self._resumed = None

    def end_phase(self, current: PhaseTraining) -> None:
        """Count a phase's steps."""
        # The steps that it made up drew further orders.
        self._pass_order = self._order.get_state()
        self.at = Position(
            self.at.phase + 1,
            steps=self.at.steps + current.steps,
            rate_steps=self.at.rate_steps + current.rate_steps,
            loss=self.at.loss,
        )

    def end_pass(self, loss: float) -> None:
        """Note the loss after a whole pass over the data."""
        self.at.loss = loss
        self._pass_order = self._order.get_state()

    def save_if_due(self, current: PhaseTraining) -> None:
        """Write a checkpoint if it is time."""
        if self._checkpoints and self._checkpoints.due:
            self.at.batches = current.batches
            self._save(self._checkpoints, current)

    def save_start(self) -> None:
        """Write a checkpoint of a private task that has reserved its privacy, unless it resumes from one."""
        if self._checkpoints and not self._resumed:
            self._save(self._checkpoints)

    def _save(self, checkpoints: TrainingCheckpoints, current: PhaseTraining | None = None) -> None:
        local = self._local
        document, generators = generator_states()
        tensors = {"order": self._pass_order, **under("generators", generators)}
        saved = {"generators": document, "private": local.private.progress() if local.private else None}
        if current:
            saved["current"], state = current.state()
            arrays = local.half.training_state()
            tensors |= {**state, **under("model", self._trained())}
            tensors |= under("half", {name: torch_view(values) for name, values in arrays.items()})
            if local.moments:
                # Of the phases before, of which nothing else is left.
                moments = local.moments.values.items()
                tensors |= under("moments", {name: torch_view(values) for name, values in moments})
        self.at.progress = local.report.step if current else 0
        self.at.training_seconds = local.report.training_seconds
        checkpoints.write(self.at, saved, tensors)

    def _trained(self) -> dict[str, Tensor]:
        """Return the tensors that have trained so far, by name, in this phase and in earlier ones."""
        tensors = named_tensors(self._local.context.model)
        phases = self._phases[: self.at.phase + 1]
        names = {block.tensor for phase in phases for block in trained_blocks(self._local, phase)}
        return {name: tensor.detach() for name, tensor in tensors.items() if name in names}
