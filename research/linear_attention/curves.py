"""What a warm-up's length costs: the objective at the end of a run, and the parts that it is the sum of.

With Phi_w the kernel that w rounds of federated warm-up end with, and Phi'_w the one that as many local steps lead to
without drift (gradient descent on all data together),

  F(Phi_w, V at the end) - G* = [G(Phi'_w) - G*] + [G(Phi_w) - G(Phi'_w)] + [F(Phi_w, V at the end) - G(Phi_w)]
  excess                      =  bias            +  drift                 +  value

exactly: bias is what the kernel has not learnt in that many steps, drift what it learnt wrongly, value what is
between the value matrix and the best one for its kernel. G* is the least profile seen on any way through a problem.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal

import numpy as np

from linear_attention.auto import warmup_rounds
from linear_attention.federation import FrozenStage, Schedule, cohorts, versions
from linear_attention.problem import RATES, Kernel, Problem, Weights, draw, moments

Way = Sequence[tuple[Weights, Weights]]
Budget = Literal["rounds", "steps", "cohort"]


@dataclass(frozen=True)
class Setting:
    """How a run spends its budget: equal rounds, equal local steps, or equal rounds with some of the clients each."""

    budget: Budget
    local_steps: int
    rounds: int
    cohort: int
    control_lengths: tuple[int, ...] = ()
    """Warm-ups after which the value matrix, too, is frozen for once instead of query and key."""


@dataclass(frozen=True)
class Point:
    """A run with that much warm-up. `excess` is infinite if it diverged; nothing else is then told."""

    length: int
    excess: float
    bias: float
    drift: float
    value: float


@dataclass(frozen=True)
class Curve:
    kernel: Kernel
    delta: float
    seed: int
    setting: Setting
    points: tuple[Point, ...]
    auto: Point
    """Of the rule's own length."""
    control: tuple[Point, ...]
    """With the value matrix frozen instead. Only the excess is told."""
    profile: tuple[float, ...]
    """G at each length of `points`, as far as the warm-up came without diverging."""
    least: float
    """G*"""

    @property
    def best(self) -> Point:
        return min(self.points, key=lambda point: point.excess)

    @property
    def never(self) -> Point:
        """All warm-up."""
        return self.points[-1]

    def at(self, length: int) -> Point:
        """The point of the nearest length."""
        return min(self.points, key=lambda point: abs(point.length - length))


def lengths(rounds: int) -> list[int]:
    """From none to all, denser where it is short."""
    if not rounds:
        return [0]
    grown = np.unique(np.round(np.geomspace(1, rounds, 24)).astype(int))
    return [0, *(int(length) for length in grown)]


def curves(kernel: Kernel, delta: float, seed: int, settings: Sequence[Setting]) -> list[Curve]:
    """All settings on one problem."""
    problem = draw(kernel, delta, seed)
    ways: dict[tuple[int, int], Way] = {}
    for setting in sorted(settings, key=lambda setting: -setting.rounds):
        # A shorter run with as many steps per round begins as a longer one does.
        ways.setdefault((setting.local_steps, setting.cohort), _way(problem, setting, seed))
    steps = max(setting.local_steps * setting.rounds for setting in settings)
    together = ways.get((1, problem.clients), [])
    if len(together) < steps:
        # One local step per round, with everybody there, is gradient descent on all data together.
        together = _way(problem, Setting("steps", 1, steps, problem.clients), seed)
    kernels = [way[length - 1][1] for way in (*ways.values(), together) for length in lengths(len(way))[1:]]
    least = min(_profile(problem, weights) for weights in (problem.start, *kernels))
    return [
        _Run(
            problem, setting, ways[setting.local_steps, setting.cohort][: setting.rounds], together, least, seed
        ).curve(delta)
        for setting in settings
    ]


def _way(problem: Problem, setting: Setting, seed: int) -> Way:
    return list(versions(problem, problem.start, _schedule(problem, setting, seed)))


def _schedule(problem: Problem, setting: Setting, seed: int) -> Schedule:
    chosen = cohorts(setting.rounds, problem.clients, setting.cohort, seed)
    return Schedule(RATES[problem.kernel], setting.local_steps, chosen)


def _profile(problem: Problem, weights: Weights) -> float:
    return moments(problem, weights.query, weights.key).profile()


@dataclass(frozen=True)
class _Run:
    """One setting's way through one problem."""

    problem: Problem
    setting: Setting
    way: Way
    together: Way
    least: float
    seed: int

    def curve(self, delta: float) -> Curve:
        rounds = self.setting.rounds
        auto = warmup_rounds(self.problem.start, self.way, rounds)
        return Curve(
            self.problem.kernel,
            delta,
            self.seed,
            self.setting,
            points=tuple(self._point(length) for length in lengths(rounds)),
            auto=self._point(auto),
            control=tuple(self._control(length) for length in self.setting.control_lengths),
            profile=tuple(_profile(self.problem, self._weights(n)) for n in lengths(rounds) if n <= len(self.way)),
            least=self.least,
        )

    def _weights(self, length: int) -> Weights:
        return self.way[length - 1][1] if length else self.problem.start

    def _point(self, length: int) -> Point:
        if length > len(self.way):
            return Point(length, inf, inf, inf, inf)
        query, key, value = self._weights(length)
        rate = RATES[self.problem.kernel]
        stage = FrozenStage.of(self.problem, query, key, rate, self.setting.local_steps)
        last = stage.after(value, _schedule(self.problem, self.setting, self.seed), length)
        if last is None:
            return Point(length, inf, inf, inf, inf)
        under = moments(self.problem, query, key)
        steps = length * self.setting.local_steps
        without_drift = _profile(self.problem, self.together[steps - 1][1] if steps else self.problem.start)
        objective, profile = under.objective(last), under.profile()
        return Point(
            length,
            excess=objective - self.least,
            bias=without_drift - self.least,
            drift=profile - without_drift,
            value=objective - profile,
        )

    def _control(self, length: int) -> Point:
        """The same with the value matrix frozen, by simulation: this stage is no affine map."""
        if length > len(self.way):
            return Point(length, inf, inf, inf, inf)
        start, schedule = self._weights(length), _schedule(self.problem, self.setting, self.seed)
        rest = Schedule(schedule.rate, schedule.local_steps, schedule.cohorts[length:])
        final, done = start, 0
        for _, version in versions(self.problem, start, rest, "query_key"):
            final, done = version, done + 1
        if done < rest.rounds:
            return Point(length, inf, inf, inf, inf)
        objective = moments(self.problem, final.query, final.key).objective(final.value)
        return Point(length, objective - self.least, inf, inf, inf)
