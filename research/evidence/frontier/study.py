"""The runs of the privacy frontier, the rule that chooses their learning rates, and the order in which they start.

Nothing here trains or reads a file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf, isinf, log
from typing import Any

from evidence.rates import Ladder, best

TUNING_SEED = 0
"""It is in no table."""

LADDER = (3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
"""Learning rates of AdamW. The head's is HEAD_FACTOR times as large."""
FIRST_RATES = (1e-4, 3e-4, 1e-3)
OUTWARD = 2
"""Most further rates on each side, while the best rate is the last one there."""
HEAD_FACTOR = 10.0

SCORE = "macro_f1"


@dataclass(frozen=True)
class Arm:
    """A method with its settings; `adapters` if the model has them."""

    name: str
    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    privacy: Mapping[str, Any] = field(default_factory=dict)
    """What differs in the run's `privacy`."""
    adapters: bool = False


HEAD: Mapping[str, Any] = {"always": ["head"]}
"""Every arm trains the head, and beside it what its name says. Embeddings and pooler are frozen in all of them."""
THIRD = 1 / 3
"""The share of the layers that SAFL's paper trains: 8 of 24, here 2 of 6."""

FULL = Arm("full", "safl", {**HEAD, "score": "first", "share": 1.0})
"""All layers: SAFL whose choice is everything."""
ARMS = (
    FULL,
    Arm("attention", "safl", {**HEAD, "score": "attention", "share": THIRD}, {"selection": "noisy"}),
    Arm("random", "safl", {**HEAD, "score": "random", "share": THIRD, "chooser": "consensus"}),
    Arm("last", "safl", {**HEAD, "score": "last", "share": THIRD}),
    Arm("lora", "lora", {"freeze_a": True}, adapters=True),
    Arm("head", "head-only"),
)
"""`random` draws the layers of a round for all sites together."""


@dataclass(frozen=True)
class Job:
    """One run. Those of TUNING_SEED take half of the rounds and are scored on the validation part."""

    arm: str
    epsilon: float
    seed: int
    rate: float

    @property
    def tunes(self) -> bool:
        return self.seed == TUNING_SEED

    @property
    def name(self) -> str:
        return f"{self.arm}-epsilon-{self.epsilon:g}-seed-{self.seed}-rate-{self.rate:g}"


Scores = Mapping[Job, float]
"""The score of each finished run, from 0 to 1."""
Cell = tuple[str, float]
"""An arm and an epsilon, which share a learning rate."""


@dataclass(frozen=True)
class Study:
    """The settings of all runs."""

    rounds: int = 4
    steps: int = 5
    """Local steps of a round."""
    batch_size: int = 256
    sites_per_wording: int = 1
    examples: int = 5400
    """At each site."""
    delta: float = 1e-5
    clip_norm: float = 1.0
    rank: int = 8
    """Of LoRA, on queries and values."""
    tuned: tuple[float, ...] = (1.0, 4.0, inf)
    """Values of epsilon with a choice of the learning rate, and all seeds."""
    others: tuple[float, ...] = (0.5, 2.0, 8.0)
    """Values of epsilon with one seed, at the rate of the nearest tuned one."""
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    others_after: int = 3
    """Seeds of the tuned values that come before the others."""
    first_rates: tuple[float, ...] = FIRST_RATES
    outward: int = OUTWARD
    arms: tuple[Arm, ...] = ARMS

    def arm(self, name: str) -> Arm:
        return next(arm for arm in self.arms if arm.name == name)

    def described(self) -> dict[str, Any]:
        """Return the settings that every result depends on, for the results' folder."""
        return {
            "rounds": self.rounds,
            "local steps a round": self.steps,
            "batch size": self.batch_size,
            "sites per wording": self.sites_per_wording,
            "examples a site": self.examples,
            "delta": self.delta,
            "clip norm": self.clip_norm,
            "rank of LoRA": self.rank,
            "rates": list(LADDER),
            "first rates": list(self.first_rates),
            "further rates on each side": self.outward,
            "factor of the head's rate": HEAD_FACTOR,
            "arms": {
                arm.name: {"method": arm.method, "settings": dict(arm.settings), "privacy": dict(arm.privacy)}
                for arm in self.arms
            },
        }


STANDARD = Study()
QUICK = Study(
    rounds=2,
    steps=1,
    batch_size=16,
    examples=24,
    delta=1e-3,
    rank=2,
    tuned=(1.0, inf),
    others=(),
    seeds=(1,),
    first_rates=(1e-3,),
    outward=0,
)
"""Small enough for a tiny model on the CPU: shows that the study runs, and nothing else."""


# ---------------------------------------------------------------- learning rates


def tried(job_scores: Scores, cell: Cell) -> dict[float, float]:
    """Return the score of each learning rate that a cell has finished on the tuning seed."""
    arm, epsilon = cell
    return {
        job.rate: score for job, score in job_scores.items() if job.tunes and (job.arm, job.epsilon) == (arm, epsilon)
    }


def wanted_rates(study: Study, scores: Mapping[float, float]) -> tuple[float, ...]:
    """Return the rates that a cell still has to try, by the scores so far; none if its choice is settled."""
    return Ladder(LADDER, study.first_rates, study.outward).wanted(scores)


def choices(study: Study, scores: Scores) -> dict[Cell, float]:
    """Return the learning rate of every cell whose choice is settled."""
    chosen: dict[Cell, float] = {}
    for arm in study.arms:
        for epsilon in study.tuned:
            of_cell = tried(scores, (arm.name, epsilon))
            if of_cell and not wanted_rates(study, of_cell):
                chosen[arm.name, epsilon] = best(of_cell)
        for epsilon in study.others:
            if (rate := chosen.get((arm.name, nearest(study.tuned, epsilon)))) is not None:
                chosen[arm.name, epsilon] = rate
    return chosen


def nearest(tuned: Collection[float], epsilon: float) -> float:
    """Return the tuned epsilon of the smallest ratio to this one; of equals, the smaller."""
    finite = sorted(value for value in tuned if not isinf(value))
    return min(finite, key=lambda value: abs(log(value / epsilon)))


# ---------------------------------------------------------------- order


def startable(study: Study, scores: Scores, begun: Collection[Job]) -> Iterator[Job]:
    """Yield the runs that can start, the most important first: those that are neither finished nor `begun`.

    First the runs that choose rates, then seed by seed all arms at the tuned values of epsilon; after some seeds the
    other values. A run waits until its cell's rate is settled.
    """
    for epsilon in study.tuned:
        for arm in study.arms:
            for rate in wanted_rates(study, tried(scores, (arm.name, epsilon))):
                job = Job(arm.name, epsilon, TUNING_SEED, rate)
                if job not in scores and job not in begun:
                    yield job
    rates = choices(study, scores)
    for arm, epsilon, seed in _table(study):
        if (found := rates.get((arm.name, epsilon))) is not None:
            job = Job(arm.name, epsilon, seed, found)
            if job not in scores and job not in begun:
                yield job


def _table(study: Study) -> Iterator[tuple[Arm, float, int]]:
    for number, seed in enumerate(study.seeds):
        if number == study.others_after:
            yield from _others(study)
        yield from ((arm, epsilon, seed) for epsilon in study.tuned for arm in study.arms)
    if study.others_after >= len(study.seeds):
        yield from _others(study)


def _others(study: Study) -> Iterator[tuple[Arm, float, int]]:
    yield from ((arm, epsilon, study.seeds[0]) for epsilon in study.others for arm in study.arms)
