"""Error feedback: the residual that a lossy codec drops from a block is added to the block's next update.

Residuals lie in the vault beside the method's private state, so they change only once the update is merged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import sqrt

import numpy as np

from tessera.shared.tensors.lazy import Array, squares, unpacked
from tessera.shared.updates.codecs import pipeline
from tessera.shared.updates.update_file import EncodedTensor, TrainedBlock

PREFIX = "feedback/"
"""Prefix of the vault's keys for error feedback, hidden from methods."""

TASKS = PREFIX + "tasks"
"""The vault's key for the number of the task that it dates from."""

FORGET_TASKS = 10
"""Residuals older than this many merged tasks of the worker are dropped. Rounds do not count: a slow site may send
one update while others make many versions."""


@dataclass(frozen=True)
class Residual:
    """A block's residual, float32 and flat, and the number of the worker's task that dropped it."""

    values: Array
    task: int


@dataclass
class Feedback:
    """Residuals of one stage's blocks."""

    stage: str = ""
    rests: dict[str, Residual] = field(default_factory=dict)
    """By block."""
    task: int = 1
    """The number of the worker's present task, among those since it last had no residuals."""

    @classmethod
    def of(cls, vault: Mapping[str, Array], stage: str) -> Feedback:
        """Return the residuals that apply in the worker's next task: of this stage, and recent enough."""
        last = vault.get(PREFIX + "stage")
        if last is None or bytes(last).decode() != stage:
            return cls(stage)
        task, rests = int(vault[TASKS][0]) + 1, dict[str, Residual]()
        for name, values in vault.items():
            block = name.removeprefix(PREFIX + "rest/")
            if block != name and task - (dropped := int(vault[f"{PREFIX}task/{block}"][0])) <= FORGET_TASKS:
                rests[block] = Residual(values, dropped)
        return cls(stage, rests, task)

    def add(self, changes: Iterable[TrainedBlock]) -> list[TrainedBlock]:
        """Return the changes with their residuals attached."""
        return [
            replace(change, rest=self.rests[change.block.name].values) if change.block.name in self.rests else change
            for change in changes
        ]

    def settle(self, changes: Iterable[TrainedBlock], sent: Mapping[str, EncodedTensor]) -> float:
        """Store the task's residuals. Return the codecs' relative error: the l2 norm of all residuals over the norm
        of all changes."""
        missing = whole = 0.0
        for change in changes:
            tensor = sent[change.block.name]
            left = []
            for step, read in zip(change.steps(), tensor.steps(), strict=True):
                rest = step - unpacked(read)
                missing += squares(rest)
                whole += squares(step)
                left.append(rest)
            self.rests.pop(change.block.name, None)
            if pipeline.parse(tensor.codec).drops:
                self.rests[change.block.name] = Residual(np.concatenate(left), self.task)
        return sqrt(missing / whole) if whole else 0.0

    def clear(self, changes: Iterable[TrainedBlock]) -> None:
        """Drop the residuals of blocks that were sent whole."""
        for change in changes:
            self.rests.pop(change.block.name, None)

    def keep(self, rests: Mapping[str, Array]) -> None:
        """Store what a masked update dropped of its blocks, float32 and flat."""
        self.rests |= {name: Residual(values, self.task) for name, values in rests.items()}

    def kept(self) -> dict[str, Array]:
        """Return the residuals as vault entries."""
        if not self.rests:
            return {}
        arrays = {PREFIX + "stage": np.frombuffer(self.stage.encode(), np.uint8), TASKS: np.array([self.task])}
        for name, rest in self.rests.items():
            arrays[f"{PREFIX}rest/{name}"] = rest.values
            arrays[f"{PREFIX}task/{name}"] = np.array([rest.task])
        return arrays


def without_feedback(vault: Mapping[str, Array]) -> dict[str, Array]:
    """Return the vault's entries that belong to the method."""
    return {name: values for name, values in vault.items() if not name.startswith(PREFIX)}
