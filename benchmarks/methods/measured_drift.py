"""FedFrozen that measures, in each round and for each role of blocks, how far sites move and disagree."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import sqrt

from tessera.shared.aggregation.drift import agreement
from tessera.shared.methods.base import Method, State, Update
from tessera.shared.methods.fedfrozen import FedFrozenCoordinator, FedFrozenSettings
from tessera.shared.model.blocks import Block

MOVEMENT = "movement."
"""The prefix of a scalar: the length of the weighted mean step over that of a role's blocks."""
DISAGREEMENT = "disagreement."
"""Likewise: the weighted rms over sites of a step less the mean step."""


class MeasuredDriftCoordinator(FedFrozenCoordinator):
    def merge(self, state: State, updates: Sequence[Update]) -> State:
        merged = super().merge(state, updates)
        senders = [(self.weight(update), update.blocks) for update in updates]
        scalars = {
            name: each for name, each in merged.scalars.items() if not name.startswith((MOVEMENT, DISAGREEMENT))
        }
        for role in roles_of(self.run.blocks):
            seen = agreement(state.model, [block.name for block in self.run.blocks if block.role == role], senders)
            if seen.senders > 1:
                scalars[MOVEMENT + role] = sqrt(seen.movement / seen.size)
                scalars[DISAGREEMENT + role] = sqrt(seen.disagreement / seen.size)
        return replace(merged, scalars=scalars)


def roles_of(blocks: Iterable[Block]) -> list[str]:
    """Return the roles of a model's blocks, in the order of their first block."""
    return list(dict.fromkeys(block.role for block in blocks))


METHOD = Method(
    name="measured-drift",
    settings=FedFrozenSettings,
    coordinator=MeasuredDriftCoordinator,
    source="none: for benchmarks",
)
