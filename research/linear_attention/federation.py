"""Federated averaging on the problem: the warm-up by simulation, the frozen stage by simulation or exactly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from linear_attention.problem import WIDTH, Array, Problem, Weights, gradients, moments

Trained = Literal["all", "value", "query_key"]

DIVERGED = 1e3
"""A matrix with a larger entry is taken to have diverged: those of the teacher are of the order of one."""


@dataclass(frozen=True)
class Schedule:
    """Who trains in each round, and how: `local_steps` of full-batch gradient descent at each client."""

    rate: float
    local_steps: int
    cohorts: Sequence[Array]

    @property
    def rounds(self) -> int:
        return len(self.cohorts)


def cohorts(rounds: int, clients: int, size: int, seed: int) -> list[Array]:
    """The clients of each round: all, or as many drawn anew."""
    if size == clients:
        return [np.arange(clients)] * rounds
    rng = np.random.default_rng([seed, 2])
    return [np.sort(rng.permutation(clients)[:size]) for _ in range(rounds)]


def round_of(
    problem: Problem, start: Weights, schedule: Schedule, cohort: Array, trained: Trained = "all"
) -> Weights:
    """Each client's weights at the end of a round, [clients, rows, columns]."""
    theirs = problem if len(cohort) == problem.clients else problem.of(cohort)
    ours = Weights(*(np.repeat(matrix[np.newaxis], len(cohort), axis=0) for matrix in start))
    moving = {"all": (0, 1, 2), "value": (2,), "query_key": (0, 1)}[trained]
    for _ in range(schedule.local_steps):
        slopes = gradients(theirs, ours)
        for index in moving:
            ours[index][...] -= schedule.rate * slopes[index]
    return ours


def versions(
    problem: Problem, start: Weights, schedule: Schedule, trained: Trained = "all"
) -> Iterator[tuple[Weights, Weights]]:
    """Round by round: what the clients sent, and their mean. It ends before its time if it diverges."""
    for cohort in schedule.cohorts:
        sent = round_of(problem, start, schedule, cohort, trained)
        start = Weights(*(matrix.mean(axis=0) for matrix in sent))
        if not all(np.abs(matrix).max() < DIVERGED for matrix in start):
            return
        yield sent, start


# ---------------------------------------------------------------- the frozen stage, exactly


@dataclass(frozen=True)
class FrozenStage:
    """With Phi fixed, a client's local steps are an affine map: V becomes M_k V + N_k, with

    M_k = (I - rate A_k)^E and N_k = (I - M_k) A_k^-1 b_k; and a round is the mean of its clients' maps.
    """

    keeps: Array  # M_k [clients, width, width]
    adds: Array  # N_k [clients, width, outputs]

    @classmethod
    def of(cls, problem: Problem, query: Array, key: Array, rate: float, local_steps: int) -> FrozenStage:
        under = moments(problem, query, key)
        with np.errstate(over="ignore", invalid="ignore"):
            keeps = np.linalg.matrix_power(np.eye(WIDTH) - rate * under.curvature, local_steps)
            return cls(keeps, (np.eye(WIDTH) - keeps) @ np.linalg.solve(under.curvature, under.slope))

    def limit(self) -> Array:
        """V_inf = (I - mean M)^-1 mean N: where rounds with every client lead."""
        return np.linalg.solve(np.eye(WIDTH) - self.keeps.mean(axis=0), self.adds.mean(axis=0))

    def after(self, value: Array, schedule: Schedule, done: int) -> Array | None:
        """V at the end of the schedule, `done` rounds of which are over. None if it diverges."""
        left = schedule.cohorts[done:]
        if not np.isfinite(self.keeps).all():
            return value if not left else None
        with np.errstate(over="ignore", invalid="ignore"):
            if left and len(left[0]) == len(self.keeps):
                last = self.limit()
                power = np.linalg.matrix_power(self.keeps.mean(axis=0), len(left))
                value = last + power @ (value - last)
            else:
                for cohort in left:
                    value = self.keeps[cohort].mean(axis=0) @ value + self.adds[cohort].mean(axis=0)
        # NaN is not less than anything.
        return value if np.abs(value).max() < DIVERGED else None
