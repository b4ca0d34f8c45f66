"""The papers' algorithms in numpy, float64, with all sites known from the start, on given cohorts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from common.arrays import Array
from evidence.convex.problem import Problem


@dataclass
class FedAvg:
    """McMahan et al. 2017, Algorithm 1, and what the others share."""

    problem: Problem
    steps: Mapping[str, int]
    """Local steps of each site, of full batches."""
    settings: Mapping[str, Any]
    kept: dict[str, Array] = field(init=False)
    """The value that each site keeps, in the shape of a head; zero at the start."""

    def __post_init__(self) -> None:
        self.kept = {site: np.zeros(self.problem.shape) for site in self.problem.sites}

    def round(self, head: Array, cohort: Sequence[str]) -> Array:
        """Return the next head."""
        return self.mean({site: self.local(site, head, _always(np.zeros(()))) for site in cohort})

    def local(self, site: str, head: Array, extra: Callable[[Array], Array]) -> Array:
        """Return the head after a site's steps, with a term added to each gradient."""
        end = head
        for _ in range(self.steps[site]):
            end = end - self.problem.rate * (self.problem.gradient(site, end) + extra(end))
        return end

    def weights(self, default: str = "examples") -> Mapping[str, float]:
        """Return the sites' weights in the objective that the settings name."""
        return self.problem.objectives[self.settings.get("weigh", default)]

    def mean(self, of_sites: Mapping[str, Array], weights: Mapping[str, float] | None = None) -> Array:
        """Return the weighted mean over the sites that are named."""
        chosen = weights or self.problem.objectives["examples"]
        whole = sum(chosen[site] for site in of_sites)
        found: Array = np.sum([chosen[site] / whole * value for site, value in of_sites.items()], axis=0)
        return found


class FedProx(FedAvg):
    """Li et al. 2020, equation (2)."""

    def round(self, head: Array, cohort: Sequence[str]) -> Array:
        pull = _towards(head, self.settings.get("mu", 0.01))
        return self.mean({site: self.local(site, head, pull) for site in cohort})


class FedNova(FedAvg):
    """Wang et al. 2020, Section 4: steps by their number, and the mean number for the length."""

    def round(self, head: Array, cohort: Sequence[str]) -> Array:
        directions = {
            site: (self.local(site, head, _always(np.zeros(()))) - head) / self.steps[site] for site in cohort
        }
        effective = self.mean({site: np.array(float(self.steps[site])) for site in cohort})
        moved: Array = head + effective * self.mean(directions)
        return moved


class Scaffold(FedAvg):
    """Karimireddy et al. 2020, Algorithm 1, option II."""

    def round(self, head: Array, cohort: Sequence[str]) -> Array:
        weights = self.weights("equal")
        c = self.mean(self.kept, weights)
        ends = {site: self.local(site, head, _always(c - self.kept[site])) for site in cohort}
        for site, end in ends.items():
            self.kept[site] = self.kept[site] - c + (head - end) / (self.steps[site] * self.problem.rate)
        return self.mean(ends, weights)


class FedDyn(FedAvg):
    """Acar et al. 2021, in the scales of the authors' code."""

    def round(self, head: Array, cohort: Sequence[str]) -> Array:
        sizes, equal = self.problem.objectives["examples"], self.settings.get("weigh", "equal") == "equal"
        usual, alpha = sum(sizes.values()) / len(sizes), self.settings.get("alpha", 0.01)
        alphas = {site: alpha * (usual / size if equal else 1) for site, size in sizes.items()}
        ends = {site: self.local(site, head, _towards(head - self.kept[site], alphas[site])) for site in cohort}
        for site, end in ends.items():
            self.kept[site] = self.kept[site] + end - head
        weights = self.weights("equal")
        cloud: Array = self.mean(ends, weights) + self.mean(self.kept, weights)
        return cloud


def _always(gradient: Array) -> Callable[[Array], Array]:
    return lambda _: gradient


def _towards(centre: Array, strength: float) -> Callable[[Array], Array]:
    return lambda head: strength * (head - centre)
