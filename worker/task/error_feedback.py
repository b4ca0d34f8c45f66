"""What lossy codecs leave out of a block stays here and is added to what the next update sends of it.

So nothing is lost, only late (error feedback). The rests lie in the vault beside what the method keeps: they are new
once the update is merged, and as they were if it is not, or not in the block.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import sqrt

import numpy as np

from tessera.shared.tensors.lazy import Array, unpacked
from tessera.shared.updates.codecs import pipeline
from tessera.shared.updates.update_file import EncodedTensor, TrainedBlock

PREFIX = "feedback/"
"""No method's: what a vault holds under it is not shown to one."""

FORGET_ROUNDS = 10
"""A rest that was not sent for so long is of another model, and would lead astray."""


@dataclass(frozen=True)
class Rest:
    """What was left out of a block, float32 and flat, and the round that left it out."""

    values: Array
    round: int


@dataclass
class Feedback:
    stage: str
    rests: dict[str, Rest] = field(default_factory=dict)
    """By block."""

    @classmethod
    def of(cls, vault: Mapping[str, Array], stage: str, number: int) -> Feedback:
        """Return what is of use in round `number`: nothing of another stage, which trains other blocks, or too long
        ago."""
        last = vault.get(PREFIX + "stage")
        rests: dict[str, Rest] = {}
        if last is not None and bytes(last).decode() == stage:
            for name, values in vault.items():
                block = name.removeprefix(PREFIX + "rest/")
                if block != name:
                    rests[block] = Rest(values, int(vault[f"{PREFIX}round/{block}"][0]))
        return cls(stage, {name: rest for name, rest in rests.items() if number - rest.round <= FORGET_ROUNDS})

    def add(self, changes: Iterable[TrainedBlock]) -> list[TrainedBlock]:
        """Return the changes with what was left out of them before."""
        return [
            replace(change, rest=self.rests[change.block.name].values) if change.block.name in self.rests else change
            for change in changes
        ]

    def settle(self, changes: Iterable[TrainedBlock], sent: Mapping[str, EncodedTensor], number: int) -> float:
        """Take in what round `number` left out, and returns the error that the codecs caused: the l2 norm of what is
        missing as a share of that of what was to be sent."""
        missing = whole = 0.0
        for change in changes:
            tensor = sent[change.block.name]
            left = []
            for step, read in zip(change.steps(), tensor.steps(), strict=True):
                rest = step - unpacked(read)
                missing += _squares(rest)
                whole += _squares(step)
                left.append(rest)
            self.rests.pop(change.block.name, None)
            if pipeline.parse(tensor.codec).drops:
                self.rests[change.block.name] = Rest(np.concatenate(left), number)
        return sqrt(missing / whole) if whole else 0.0

    def kept(self) -> dict[str, Array]:
        """As it is to lie in the vault."""
        if not self.rests:
            return {}
        arrays = {PREFIX + "stage": np.frombuffer(self.stage.encode(), np.uint8)}
        for name, rest in self.rests.items():
            arrays[f"{PREFIX}rest/{name}"] = rest.values
            arrays[f"{PREFIX}round/{name}"] = np.array([rest.round])
        return arrays


def without_feedback(vault: Mapping[str, Array]) -> dict[str, Array]:
    """Return what a vault holds of the method's own."""
    return {name: values for name, values in vault.items() if not name.startswith(PREFIX)}


def _squares(values: Array) -> float:
    wide = values.astype(np.float64)
    return float(wide @ wide)
