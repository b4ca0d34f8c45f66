"""What is run: which problems, with which budgets, how many seeds. And what of it is written down."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path

from linear_attention.curves import Curve, Point, Setting, curves
from linear_attention.problem import CLIENTS, Kernel

KERNELS: tuple[Kernel, ...] = ("linear", "softmax")


@dataclass(frozen=True)
class Study:
    deltas: tuple[float, ...]
    local_steps: tuple[int, ...]
    rounds: int
    seeds: int
    control_lengths: tuple[int, ...]

    @property
    def steps(self) -> int:
        """The budget of equal local steps: what the most local steps come to over all rounds."""
        return max(self.local_steps) * self.rounds

    def settings(self) -> tuple[Setting, ...]:
        middle = self.local_steps[len(self.local_steps) // 2]
        return (
            *(
                Setting("rounds", e, self.rounds, CLIENTS, self.control_lengths if e == middle else ())
                for e in self.local_steps
            ),
            *(Setting("steps", e, self.steps // e, CLIENTS) for e in self.local_steps if e < max(self.local_steps)),
            *(Setting("cohort", e, self.rounds, CLIENTS // 2) for e in self.local_steps if e > 1),
        )


STANDARD = Study(deltas=(0.0, 0.25, 0.5, 0.75), local_steps=(1, 10, 50), rounds=150, seeds=3, control_lengths=(8, 30))
QUICK = Study(deltas=(0.0, 0.5), local_steps=(1, 4, 8), rounds=10, seeds=2, control_lengths=(8,))


COLUMNS = (
    *("kernel", "delta", "seed", "budget", "local_steps", "rounds", "cohort", "run", "warmup_rounds"),
    *("excess", "bias", "drift", "value", "least"),
)


def run(study: Study, jobs: int) -> list[Curve]:
    """Each problem is a job of its own; the result does not depend on how many run at a time."""
    problems = [(k, d, s, study.settings()) for k, d, s in product(KERNELS, study.deltas, range(study.seeds))]
    if jobs == 1:
        return [curve for problem in problems for curve in curves(*problem)]
    # The matrices are tiny: threads of the linear algebra would only wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        return [curve for found in pool.map(_of_problem, problems) for curve in found]


def _of_problem(problem: tuple[Kernel, float, int, Sequence[Setting]]) -> list[Curve]:
    return curves(*problem)


def write_csv(found: Sequence[Curve], path: Path) -> None:
    """A row for each run: which, how long its warm-up was and why, and its excess with the parts of it."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for curve in found:
            setting = curve.setting
            which = [curve.kernel, curve.delta, curve.seed, setting.budget, setting.local_steps, setting.rounds]
            for run_, point in _runs(curve):
                parts = [point.excess, point.bias, point.drift, point.value, curve.least]
                writer.writerow([*which, setting.cohort, run_, point.length, *(f"{part:.6g}" for part in parts)])


def _runs(curve: Curve) -> Iterator[tuple[str, Point]]:
    yield from (("fixed", point) for point in curve.points)
    yield "auto", curve.auto
    yield from (("value frozen", point) for point in curve.control)
