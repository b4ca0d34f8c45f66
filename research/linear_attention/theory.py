"""The statements that can be checked to the digit: profile descent, the frozen stage's map, and its drift."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from linear_attention.federation import FrozenStage, Schedule, cohorts, versions
from linear_attention.problem import (
    Problem,
    draw,
    flat,
    moments,
    profile_gradient,
)

# ---------------------------------------------------------------- the warm-up descends on the profile


@dataclass(frozen=True)
class Descent:
    """A round of warm-up, seen on the profile objective G.

    Phi moves by -alpha (grad G + e) with alpha = rate * local steps, where e is what V's lag behind V* and the
    clients' drift make of the gradient.
    """

    before: float
    after: float
    gradient: float
    """|grad G|"""
    error: float
    """|e|"""
    alpha: float

    @property
    def bound(self) -> float:
        """What G is at most afterwards, if alpha is at most 1 over the curvature of G along the way."""
        return self.before - self.alpha / 2 * self.gradient**2 + self.alpha / 2 * self.error**2

    @property
    def rose(self) -> bool:
        """By more than rounding."""
        return self.after > self.before * (1 + 1e-12)

    @property
    def broke_its_bound(self) -> bool:
        """By more than rounding."""
        return self.after > self.bound * (1 + 1e-12)

    @property
    def ratio(self) -> float:
        return self.error / self.gradient


def descents(problem: Problem, rate: float, local_steps: int, rounds: int) -> list[Descent]:
    schedule = Schedule(rate, local_steps, cohorts(rounds, problem.clients, problem.clients, 0))
    alpha, found, here = rate * local_steps, [], problem.start
    for _, there in versions(problem, problem.start, schedule):
        gradient = profile_gradient(problem, here.query, here.key)
        moved = flat(there.query, there.key) - flat(here.query, here.key)
        found.append(
            Descent(
                before=moments(problem, here.query, here.key).profile(),
                after=moments(problem, there.query, there.key).profile(),
                gradient=float(np.linalg.norm(gradient)),
                error=float(np.linalg.norm(-moved / alpha - gradient)),
                alpha=alpha,
            )
        )
        here = there
    return found


# ---------------------------------------------------------------- the frozen stage is an affine map


def affine_error(problem: Problem, rate: float, local_steps: int, rounds: int = 3) -> float:
    """The largest difference in V between simulated rounds and the affine map, relative to the largest entry of V."""
    start = problem.start._replace(value=np.random.default_rng(0).normal(size=problem.start.value.shape))
    schedule = Schedule(rate, local_steps, cohorts(rounds, problem.clients, problem.clients, 0))
    stage = FrozenStage.of(problem, start.query, start.key, rate, local_steps)
    mapped, worst = start.value, 0.0
    for _, there in versions(problem, start, schedule, "value"):
        mapped = stage.keeps.mean(axis=0) @ mapped + stage.adds.mean(axis=0)
        worst = max(worst, float(np.abs(there.value - mapped).max() / np.abs(mapped).max()))
    return worst


@dataclass(frozen=True)
class Drift:
    """Where the frozen stage ends, less the best value matrix: V_inf - V*."""

    length: float
    """Relative to |V*|."""
    error: float
    """Of the formula, relative to the drift's own length."""
    cosine: float


def drift(problem: Problem, rate: float, local_steps: int) -> Drift:
    """Holds V_inf - V* against rate (E - 1) / 2 * (mean A)^-1 * mean of A_k grad F_k(V*), at the first kernel."""
    under = moments(problem, problem.start.query, problem.start.key)
    best = under.best_value()
    slopes = under.curvature @ best - under.slope  # grad F_k(V*)
    pull = (under.curvature @ slopes).mean(axis=0)
    told = rate * (local_steps - 1) / 2 * np.linalg.solve(under.curvature.mean(axis=0), pull)
    stage = FrozenStage.of(problem, problem.start.query, problem.start.key, rate, local_steps)
    found = stage.limit() - best
    length = float(np.linalg.norm(found))
    return Drift(
        length=length / float(np.linalg.norm(best)),
        error=float(np.linalg.norm(found - told)) / length,
        cosine=float(np.sum(found * told)) / length / float(np.linalg.norm(told)),
    )


def drift_of_equal_inputs(delta: float, seed: int, rate: float, local_steps: int) -> float:
    """|V_inf - V*| over |V*| where clients have the same inputs and other targets, so that all A_k are equal."""
    problem = draw("linear", delta, seed)
    alike = replace(problem, inputs=np.broadcast_to(problem.inputs[:1], problem.inputs.shape))
    query, key, _ = problem.start
    best = moments(alike, query, key).best_value()
    limit = FrozenStage.of(alike, query, key, rate, local_steps).limit()
    return float(np.linalg.norm(limit - best) / np.linalg.norm(best))
