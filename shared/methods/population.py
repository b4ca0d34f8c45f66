"""The sites that ever took part in a run, each with a weight that never changes: what a mean over all of them needs.

A method that keeps something at each site, and the mean of it at the server, moves that mean by what a round's sites
changed. It stays their mean only if each counts the same in every round, present or not. So a site is entered with
the first update of it that is merged, with the weight that it has then; what it declares later changes nothing.
Sites are counted and not workers, of which a site may name as many as it likes.

They are server state, and part of each version: one small tensor, which no plan fetches. It has no names in it, but
whoever knows the name of a site can find out whether it is there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum
from statistics import fmean
from typing import ClassVar, Literal, TypeVar

import numpy as np
from pydantic import Field, PositiveInt

from tessera.shared.hashing import derive_seed
from tessera.shared.methods.base import CoordinatorHalf, MethodSettings, State, UnsupportedRun, Update
from tessera.shared.tensors.lazy import ArrayTensor, to_array

MEMBERS = "members"
"""The name of the tensor in the server's memory, float64 [members, 2]: a digest of a site's name, and its weight."""


@dataclass(frozen=True)
class SitePopulation:
    """The sites of a run so far."""

    weights: Mapping[int, float]
    """By the digest of the site's name."""
    known: int = 0
    """How many there are, if that is known beforehand: who is still missing weighs as much as the mean."""

    @classmethod
    def of(cls, state: State, known: int | None = None) -> SitePopulation:
        """Return the population that a version remembers."""
        found = to_array(state.server_state[MEMBERS]) if MEMBERS in state.server_state else np.empty((0, 2))
        return cls({int(site): float(weight) for site, weight in found}, known or 0)

    @property
    def mean(self) -> float:
        """The mean weight, 0 before anybody took part."""
        return fmean(self.weights.values()) if self.weights else 0.0

    @property
    def total(self) -> float:
        """What all weigh together, 0 before anybody took part."""
        return fsum(self.weights.values()) if len(self.weights) >= self.known else self.known * self.mean

    def weight(self, site: str) -> float | None:
        """Return the weight of a site, or None if it never took part."""
        return self.weights.get(_digest(site))

    def joined(self, updates: Sequence[Update]) -> SitePopulation:
        """Return the population with the sites of these updates in it, the new ones weighed by their examples."""
        new = {_digest(update.site): float(update.examples) for update in updates}
        return replace(self, weights=new | dict(self.weights))

    def weighed(self, updates: Sequence[Update]) -> list[Update]:
        """Return the updates of members, each with its site's weight as the number of its examples."""
        return [replace(update, examples=int(self.weights[_digest(update.site)])) for update in updates]

    def server_state(self) -> dict[str, ArrayTensor]:
        """Return what the server remembers of it."""
        return {MEMBERS: ArrayTensor(np.array(sorted(self.weights.items()), np.float64), "F64")}


class PopulationSettings(MethodSettings):
    weigh: Literal["equal", "examples"] = Field(default="equal", description="what a site counts in the means")
    population: PositiveInt | None = Field(
        default=None, description="sites that there are, if known; as many as ever took part if left out"
    )


S = TypeVar("S", bound=PopulationSettings)


class PopulationCoordinator(CoordinatorHalf[S]):
    """A method that keeps something at each site, and a mean of it at the server."""

    sticky = True
    keeps: ClassVar[str]
    """What is kept, with its article."""

    def start(self, state: State) -> State:
        if self.run.workers_per_site > 1:
            raise UnsupportedRun(
                f"the method keeps {self.keeps} for each site, at the one worker that takes part for it: set "
                "cohort.workers_per_site to 1"
            )
        return state

    def check_robust(self) -> None:
        raise UnsupportedRun(
            f"the method keeps {self.keeps} that is a mean of steps, which no robust rule guards: leave out robust, "
            "or choose another method"
        )

    def counted(self, updates: Sequence[Update]) -> Sequence[Update]:
        """Return the updates as they count in the mean of the sites."""
        equal = self.settings.weigh == "equal"
        return [replace(update, examples=1) for update in updates] if equal else updates


def _digest(site: str) -> int:
    """Return 53 bits of a name's digest, which float64 holds exactly."""
    return derive_seed(0, "member", site)
