"""FedFrozen that measures, for each role of blocks, how far sites move and disagree in a round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import sqrt

from pydantic import Field, PositiveInt

from tessera.shared.aggregation.drift import agreement
from tessera.shared.methods.base import Method, State, Update
from tessera.shared.methods.fedfrozen import FedFrozenCoordinator, FedFrozenSettings

MOVEMENT = "movement."
"""The prefix of a scalar: the length of the weighted mean step over that of a role's blocks."""
DISAGREEMENT = "disagreement."
"""Likewise: the weighted rms over sites of a step less the mean step."""
NOISE = "noise."
"""Likewise: the movement to expect from as much disagreement, if the sites' steps had independent directions."""


class MeasuredDriftSettings(FedFrozenSettings):
    every: PositiveInt = Field(default=1, description="rounds from one measurement to the next; each takes seconds")


class MeasuredDriftCoordinator(FedFrozenCoordinator):
    settings: MeasuredDriftSettings
    # The arms that freeze nothing, whose warm-up lasts for the whole run, are measured too.
    _never_frozen = False

    def merge(self, state: State, updates: Sequence[Update]) -> State:
        merged = super().merge(state, updates)
        scalars = {
            name: value
            for name, value in merged.scalars.items()
            if not name.startswith((MOVEMENT, DISAGREEMENT, NOISE))
        }
        if merged.round % self.settings.every == 0:
            senders = [(self.weight(update), update.blocks) for update in updates]
            for role in dict.fromkeys(block.role for block in self.run.blocks):
                names = [block.name for block in self.run.blocks if block.role == role]
                seen = agreement(state.model, names, senders)
                if seen.senders > 1 and seen.size:
                    scalars[MOVEMENT + role] = sqrt(seen.movement / seen.size)
                    scalars[DISAGREEMENT + role] = sqrt(seen.disagreement / seen.size)
                    scalars[NOISE + role] = sqrt(seen.noise / seen.size)
        return replace(merged, scalars=scalars)


METHOD = Method(
    name="measured-drift",
    settings=MeasuredDriftSettings,
    coordinator=MeasuredDriftCoordinator,
    source="none: for benchmarks",
)
