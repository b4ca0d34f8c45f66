"""Methods with a value at each site and its mean over all sites that ever took part in the server state.

The mean moves by the changes of a round's sites. That is correct only if every site has the same weight in all
rounds, present or not. So a site joins the population with its first merged update, with its weight at that time;
its later declarations change nothing. Sites are counted, not workers: a site may have any number of workers.

The population is server state, and so part of each version: one small tensor, which no plan fetches. It contains no
names, but a reader who knows the name of a site can check whether it is included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import fsum
from statistics import fmean
from typing import ClassVar, Literal, TypeVar

import numpy as np
from pydantic import Field, PositiveInt

from tessera.shared.methods.base import CoordinatorHalf, MethodSettings, State, UnsupportedRun, Update
from tessera.shared.tensors.hashing import derive_seed
from tessera.shared.tensors.lazy import Array, ArrayTensor, ComputedTensor, Tensor, to_array, weighted_steps

MEMBERS = "members"
"""The name of the population in the server state, float64 [members, 2]: a digest of a site's name, and its weight."""


@dataclass(frozen=True)
class SitePopulation:
    """The sites of a run so far."""

    weights: Mapping[int, float]
    """By the digest of the site's name."""
    known: int = 0
    """The number of sites if known in advance, or 0; a missing site has the mean weight."""

    @classmethod
    def of(cls, state: State, known: int | None = None) -> SitePopulation:
        """Return the population stored in a version."""
        members = to_array(state.server_state[MEMBERS]) if MEMBERS in state.server_state else np.empty((0, 2))
        return cls({int(site): float(weight) for site, weight in members}, known or 0)

    @property
    def mean(self) -> float:
        """The mean weight, 0 before the first update."""
        return fmean(self.weights.values()) if self.weights else 0.0

    @property
    def total(self) -> float:
        """The total weight, 0 before the first update."""
        return fsum(self.weights.values()) if len(self.weights) >= self.known else self.known * self.mean

    def weight(self, site: str) -> float | None:
        """Return the weight of a site, or None if it never took part."""
        return self.weights.get(_digest(site))

    def joined(self, updates: Sequence[Update]) -> SitePopulation:
        """Return the population with these updates' sites added, weighted by their examples."""
        new = {_digest(update.site): float(update.examples) for update in updates}
        return replace(self, weights=new | dict(self.weights))

    def weighed(self, updates: Sequence[Update]) -> list[Update]:
        """Return the updates of members, with their sites' weights as the numbers of examples."""
        return [replace(update, examples=int(self.weights[_digest(update.site)])) for update in updates]

    def server_state(self) -> dict[str, ArrayTensor]:
        """Return the server state that stores it."""
        return {MEMBERS: ArrayTensor(np.array(sorted(self.weights.items()), np.float64), "F64")}


def _digest(site: str) -> int:
    # 53 bits, which float64 holds exactly.
    return derive_seed(0, "member", site)


class PopulationSettings(MethodSettings):
    weigh: Literal["equal", "examples"] = Field(default="equal", description="a site's weight in the means")
    population: PositiveInt | None = Field(
        default=None, description="number of sites, if known; by default the number that ever took part"
    )


S = TypeVar("S", bound=PopulationSettings)


class PopulationCoordinator(CoordinatorHalf[S]):
    """The coordinator's half of a method with a value at each site, and its mean in the server state."""

    sticky = True
    _keeps: ClassVar[str]
    """The value as a noun with its article."""
    _replaces: ClassVar[bool] = False
    """True if a sender's step replaces its site's share of the mean, rather than being added to it."""

    def _require_exact_updates(self) -> None:
        """Raise UnsupportedRun if the coordinator may read other steps than the steps behind a site's value:
        the values' mean would no longer be the mean of the values."""
        if lossy := self.run.lossy_settings:
            raise UnsupportedRun(
                f"sites and coordinator compute {self._keeps} from the same steps, and {' and '.join(lossy)} rounds "
                "those that the coordinator reads: leave out codec, upload_budget and upload_seconds, or choose "
                "another method, such as fedavg"
            )

    def start(self, state: State) -> State:
        if self.run.workers_per_site > 1:
            raise UnsupportedRun(
                f"the method keeps {self._keeps} for each site, at the one worker that takes part for it: set "
                "cohort.workers_per_site to 1"
            )
        return state

    def weight(self, update: Update) -> float:
        return 1.0 if self.settings.weigh == "equal" else super().weight(update)

    def _counted(self, updates: Sequence[Update]) -> Sequence[Update]:
        """Return the updates with the examples that weight them in the mean over sites."""
        equal = self.settings.weigh == "equal"
        return [replace(update, examples=1) for update in updates] if equal else updates

    def _next_means(
        self, state: State, updates: Sequence[Update], prefix: str, weight: Callable[[float, Update], float]
    ) -> tuple[list[Update], dict[str, Tensor]]:
        """Return the updates with their sites' weights as examples, and the changes of the server state: the
        population and, under `prefix`, each block's next mean. `weight` gives the factor of an update's step in that
        mean, from its site's share of the total weight."""
        before = SitePopulation.of(state, self.settings.population)
        population = before.joined(updates)
        members = population.weighed(updates)
        # New sites start with a value of zero, which scales the mean down.
        kept = before.total / population.total or 1.0
        server_state: dict[str, Tensor] = dict(population.server_state())
        for name, base in state.model.items():
            senders = [(u.examples / population.total, u) for u in members if name in u.blocks]
            last = state.server_state.get(prefix + name)
            if senders or (last is not None and kept != 1):
                steps = weighted_steps(base, [(weight(share, u), u.blocks[name]) for share, u in senders])
                rest = kept - fsum(share for share, _ in senders) if self._replaces else kept
                sources = (steps,) if last is None else (steps, last)
                server_state[prefix + name] = ComputedTensor(
                    base.shape, steps.dtype, sources, partial(scaled_sum, rest)
                )
        return members, server_state


def scaled_sum(factor: float, parts: Sequence[Array]) -> Array:
    """Return the first part plus `factor` times the second, if there is one, float64."""
    total: Array = parts[0].astype(np.float64) + (factor * parts[1].astype(np.float64) if len(parts) > 1 else 0.0)
    return total
