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

FORGET_ROUNDS = 10
"""Residuals older than this many rounds are dropped: the model has moved on."""


@dataclass(frozen=True)
class Residual:
    """A block's residual, float32 and flat, and the round that dropped it."""

    values: Array
    round: int


@dataclass
class Feedback:
    """Residuals of one stage's blocks."""

    stage: str = ""
    rests: dict[str, Residual] = field(default_factory=dict)
    """By block."""

    @classmethod
    def of(cls, vault: Mapping[str, Array], stage: str, number: int) -> Feedback:
        """Return the residuals that apply in round `number`: of this stage, and recent enough."""
        last = vault.get(PREFIX + "stage")
        rests: dict[str, Residual] = {}
        if last is not None and bytes(last).decode() == stage:
            for name, values in vault.items():
                block = name.removeprefix(PREFIX + "rest/")
                if block != name:
                    rests[block] = Residual(values, int(vault[f"{PREFIX}round/{block}"][0]))
        return cls(stage, {name: rest for name, rest in rests.items() if number - rest.round <= FORGET_ROUNDS})

    def add(self, changes: Iterable[TrainedBlock]) -> list[TrainedBlock]:
        """Return the changes with their residuals attached."""
        return [
            replace(change, rest=self.rests[change.block.name].values) if change.block.name in self.rests else change
            for change in changes
        ]

    def settle(self, changes: Iterable[TrainedBlock], sent: Mapping[str, EncodedTensor], number: int) -> float:
        """Store the residuals of round `number`. Return the codecs' relative error: the l2 norm of all residuals
        over the norm of all changes."""
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
                self.rests[change.block.name] = Residual(np.concatenate(left), number)
        return sqrt(missing / whole) if whole else 0.0

    def clear(self, changes: Iterable[TrainedBlock]) -> None:
        """Drop the residuals of blocks that were sent whole."""
        for change in changes:
            self.rests.pop(change.block.name, None)

    def keep(self, rests: Mapping[str, Array], number: int) -> None:
        """Store what a masked update of round `number` dropped of its blocks, float32 and flat."""
        self.rests |= {name: Residual(values, number) for name, values in rests.items()}

    def kept(self) -> dict[str, Array]:
        """Return the residuals as vault entries."""
        if not self.rests:
            return {}
        arrays = {PREFIX + "stage": np.frombuffer(self.stage.encode(), np.uint8)}
        for name, rest in self.rests.items():
            arrays[f"{PREFIX}rest/{name}"] = rest.values
            arrays[f"{PREFIX}round/{name}"] = np.array([rest.round])
        return arrays


def without_feedback(vault: Mapping[str, Array]) -> dict[str, Array]:
    """Return the vault's entries that belong to the method."""
    return {name: values for name, values in vault.items() if not name.startswith(PREFIX)}
