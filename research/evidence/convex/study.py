"""The methods, the conditions of a federation, and one run of a method in the product's simulation.

Each method trains the head alone, in the simulation: the worker with its vault, and the coordinator's aggregation.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import log10
from time import process_time
from types import new_class
from typing import Any

import numpy as np

from common.arrays import Array
from common.names import LEFT_OUT
from evidence.convex import papers
from evidence.convex.problem import HEAD, Problem
from tessera.shared.methods.base import (
    CoordinatorHalf,
    Method,
    Participant,
    Phase,
    Plan,
    State,
    TaskContext,
    WorkerHalf,
)
from tessera.shared.methods.fednova import FedNovaCoordinator
from tessera.shared.model.selectors import Selector, roles
from tessera.shared.tensors.lazy import to_array
from tessera.simulation import Conditions, Result, simulate

PREFIX = "head-of-"
LOCAL_STEPS = "local_steps"
"""The steps of a plan's worker, in the plan's scalars."""
STEPS = 4
"""Local steps of each site in a round, where they are equal."""
TRAINING_SECONDS = 16.0
"""A round's training, where sites train for a time: that of the slowest site's STEPS."""
MODEL_SECONDS = 2.0
"""The time of one model over a site's line, in one direction."""
ROUNDS = 30
SHOWN = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 18, 20, 22, 24, 27, 30)
"""Rounds whose distances are kept."""
LEVELS = (10.0, 1.0)
"""Distances, in %, whose first round is kept."""


@dataclass(frozen=True)
class Arm:
    """A method with its settings, its paper's equations, the objective that it minimises, and the prefix of the
    values that it keeps at sites."""

    method: str
    paper: type[papers.FedAvg]
    objective: str = "examples"
    settings: Mapping[str, Any] = field(default_factory=dict)
    keeps: str | None = None
    models_moved: int = 2
    """Down and up, in a round, for each site."""

    @property
    def name(self) -> str:
        return " ".join([self.method, *(f"{key}={value}" for key, value in self.settings.items())])


ARMS = (
    Arm("fedavg", papers.FedAvg),
    Arm("fedprox", papers.FedProx),
    Arm("fednova", papers.FedNova),
    Arm("scaffold", papers.Scaffold, "equal", keeps="control/", models_moved=3),
    Arm("scaffold", papers.Scaffold, "examples", {"weigh": "examples"}, keeps="control/", models_moved=3),
    Arm("feddyn", papers.FedDyn, keeps="gradient/"),
    Arm("feddyn", papers.FedDyn, settings={"alpha": 0.1}, keeps="gradient/"),
    Arm("feddyn", papers.FedDyn, settings={"alpha": 1.0}, keeps="gradient/"),
    Arm("feddyn", papers.FedDyn, settings={"alpha": 1.0, "weigh": "examples"}, keeps="gradient/"),
)
CONTROL_ARM = ARMS[0]


# ---------------------------------------------------------------- methods that train the head alone


class _HeadOnly(CoordinatorHalf[Any]):
    """Any method's coordinator half, whose plans ask for the head alone, and for the steps of a site."""

    steps: Mapping[str, int]

    def plan(self, state: State, cohort: Sequence[Participant], rng: Any) -> Mapping[str, Plan]:
        plans = super().plan(state, cohort, rng)
        found = {}
        for worker in cohort:
            plan = plans[worker.name]
            # A run's first plan is for a site that does not exist, to see what its method selects.
            asked = {LOCAL_STEPS: float(self.steps.get(worker.site, 1))} if self.steps else {}
            update = {"train": roles("head"), "upload": roles("head"), "scalars": {**plan.scalars, **asked}}
            found[worker.name] = plan.model_copy(update=update)
        return found

    def check(self, plan: Plan, examples: int, metrics: Mapping[str, float]) -> None:
        steps, run = plan.scalars.get(LOCAL_STEPS), self.run
        if steps:
            training = run.training.model_copy(update={"epochs": None, "steps": int(steps)})
            self.run = replace(run, training=training)
        try:
            super().check(plan, examples, metrics)
        finally:
            self.run = run


class _ByPlan(FedNovaCoordinator):
    """FedNova, whose effective steps are those of plain SGD that a plan asks for."""

    def expected_steps(self, plan: Plan, examples: int) -> float:
        return plan.scalars.get(LOCAL_STEPS) or super().expected_steps(plan, examples)


class _Steps(WorkerHalf[Any]):
    """Any method's worker half, which trains as many steps as its plan says: an epoch is a step of the full batch."""

    def phases(self, context: TaskContext, selected: Selector) -> Sequence[Phase]:
        steps = context.plan.scalars.get(LOCAL_STEPS)
        phases = super().phases(context, selected)
        return [replace(phase, epochs=int(steps)) for phase in phases] if steps else phases


def install(found: dict[str, Method[Any]], steps: Mapping[str, int] | None = None) -> None:
    """Add to the installed methods those that train the head alone, with the steps of each site, or of the run."""
    for name in {arm.method for arm in ARMS}:
        whole = found[name]
        above = (_HeadOnly, _ByPlan) if name == "fednova" else (_HeadOnly, whole.coordinator)
        coordinator = new_class("HeadOnly", above, exec_body=lambda body: body.update(steps=steps or {}))
        worker = new_class("Steps", (_Steps, whole.worker))
        found[PREFIX + name] = replace(whole, name=PREFIX + name, coordinator=coordinator, worker=worker)


# ---------------------------------------------------------------- what happens to a federation


@dataclass(frozen=True)
class Scenario:
    """The sites that take part, and the run's other settings."""

    name: str
    about: str
    spec: Mapping[str, Any] = field(default_factory=dict)
    conditions: Conditions = field(default_factory=Conditions)
    training: Mapping[str, Any] = field(default_factory=dict)
    """Where it is another than full batches: no equations in numpy then."""
    by_time: bool = False
    """True if each site trains for TRAINING_SECONDS, at its own speed."""

    def steps(self, problem: Problem) -> dict[str, int]:
        """Return the local steps of each site, where batches are full."""
        if self.by_time:
            return {site: round(TRAINING_SECONDS / each) for site, each in problem.step_seconds.items()}
        return dict.fromkeys(problem.sites, STEPS)


def scenarios(problem: Problem, rounds: int = ROUNDS) -> dict[str, Scenario]:
    """Return the conditions of a problem's federation, by name."""
    sites, half = len(problem.sites), len(problem.sites) // 2
    largest = max(problem.sites, key=lambda site: len(problem.labels[site]))
    away = tuple(number for number in range(1, rounds + 1) if number % 5)
    every = {"quorum": sites, "max_attempts": 100}
    small = {"epochs": 1, "batch_size": 16, "learning_rate": problem.rate / 4}
    known = (
        Scenario("all", "all sites in every round"),
        Scenario(
            "drawn", f"{half} of {sites} sites drawn for each round", {"cohort": {"size": half, "quorum": half}}
        ),
        Scenario("away", "the largest site away in four rounds of five", conditions=Conditions(away={largest: away})),
        Scenario(
            "drop-outs",
            "each site silent with probability 0.3 in each round, which goes on with half of them",
            {"cohort": {"quorum": half, "max_attempts": 100}},
            Conditions(dropout=0.3),
        ),
        Scenario(
            "abandoned",
            "each site silent with probability 0.1; the attempt is then abandoned and the round repeated",
            {"cohort": every},
            Conditions(dropout=0.1),
        ),
        Scenario("by time", "all sites in every round, each with the steps that it makes in 16 s", by_time=True),
        Scenario("batches", "all sites, one pass in batches of 16, at a quarter of the rate", training=small),
    )
    return {scenario.name: scenario for scenario in known}


def differs(arm: Arm, scenario: Scenario) -> bool:
    """Return whether a run can end elsewhere than another one of the study.

    FedNova is FedAvg, to the bit, where all sites make the same number of steps. An abandoned attempt changes nothing
    for a method that keeps nothing at sites; FedAvg stays as the control.
    """
    if arm.method == "fednova":
        return scenario.by_time or bool(scenario.training) or scenario.name == "all"
    return scenario.name != "abandoned" or arm.keeps is not None or arm is CONTROL_ARM


@dataclass(frozen=True)
class Outcome:
    """A run: distances from the minimum, in % of its length, and the seconds since the start, by round."""

    distances: tuple[float, ...]
    seconds: tuple[float, ...]
    paper: float | None
    """The distance of the paper's equations after the last round."""
    invariant: float | None
    """The largest difference between the server's mean of the values that sites keep, and that of their vaults."""
    abandoned: int
    left_out: int
    processor_seconds: float

    def first(self, level: float) -> int | None:
        """Return the first round from which on the distance stays below a level, or None."""
        late = [number for number, distance in enumerate(self.distances, 1) if not distance < level]
        after = late[-1] + 1 if late else 1
        return after if after <= len(self.distances) else None

    def figures(self) -> dict[str, Any]:
        """Return the figures that are kept, with three digits."""
        shown = [number for number in SHOWN if number <= len(self.distances)]
        reached = {f"{level:g}": self.first(level) for level in LEVELS}
        return {
            "rounds": shown,
            "distances": [rounded(self.distances[number - 1]) for number in shown],
            "seconds": [self.seconds[number - 1] for number in shown],
            "reached": {
                level: None if number is None else [number, self.seconds[number - 1]]
                for level, number in reached.items()
            },
            "paper": None if self.paper is None else rounded(self.paper),
            "invariant": None if self.invariant is None else rounded(self.invariant),
            "abandoned": self.abandoned,
            "left_out": self.left_out,
            "processor_seconds": round(self.processor_seconds, 1),
        }


def rounded(value: float, digits: int = 3) -> float:
    """Return a number with that many significant digits."""
    if value == 0 or not np.isfinite(value):
        return value if value == 0 else 1e99
    return round(value, digits - 1 - int(np.floor(log10(abs(value)))))


def run(problem: Problem, arm: Arm, scenario: Scenario, rounds: int = ROUNDS) -> Outcome:
    """Simulate a method, whose head-only form is installed with the scenario's steps."""
    began = process_time()
    spec = {
        "method": {"name": PREFIX + arm.method, "settings": dict(arm.settings)},
        "rounds": rounds,
        "training": {
            "optimizer": "sgd",
            "learning_rate": problem.rate,
            "weight_decay": problem.decay,
            "batch_size": None,
            "epochs": STEPS,
            **scenario.training,
        },
        "max_examples": problem.max_examples,
        "codec": "raw",
        **scenario.spec,
    }
    conditions = scenario.conditions.model_copy(update={"keep_versions": "all", "loaded": len(problem.sites)})
    result = simulate(spec, problem.start, problem.data, conditions=conditions)
    cohorts, least = merged(result), problem.minima[arm.objective]

    def distance(head: Array) -> float:
        return float(100 * np.linalg.norm(head - least) / np.linalg.norm(least))

    paper = arm.paper(problem, scenario.steps(problem), arm.settings)
    head = problem.head(problem.start.values)
    for cohort in cohorts:
        head = paper.round(head, cohort)
    return Outcome(
        tuple(distance(problem.head(result.arrays(number))) for number in range(1, len(cohorts) + 1)),
        tuple(clock(problem, arm, scenario, result)),
        None if scenario.training else distance(head),
        invariant(problem, result, arm, {site for cohort in cohorts for site in cohort}) if arm.keeps else None,
        sum(attempt.state == "abandoned" for attempt in result.rounds),
        sum(LEFT_OUT in task.metrics for attempt in result.rounds for task in attempt.tasks),
        process_time() - began,
    )


def clock(problem: Problem, arm: Arm, scenario: Scenario, result: Result) -> list[float]:
    """Return the seconds until each version, by the study's clock.

    An attempt at a round, also one that is abandoned, lasts until its slowest site has trained and the models have
    moved. A silent site takes as long as if it answered: the round waits for it.
    """
    each, steps = problem.step_seconds, scenario.steps(problem)
    if batch := scenario.training.get("batch_size"):
        steps = {site: -(-len(labels) // batch) for site, labels in problem.labels.items()}
    now, found = 0.0, []
    for attempt in result.rounds:
        sites = [task.worker.partition("/")[0] for task in attempt.tasks]
        now += max(steps[site] * each[site] for site in sites) + arm.models_moved * MODEL_SECONDS
        if attempt.state == "committed":
            found.append(now)
    return found


def merged(result: Result) -> list[list[str]]:
    """Return the sites whose updates each version was made of."""
    return [
        [task.worker.partition("/")[0] for task in attempt.tasks if task.examples and LEFT_OUT not in task.metrics]
        for attempt in result.rounds
        if attempt.state == "committed"
    ]


def invariant(problem: Problem, result: Result, arm: Arm, sites: Collection[str]) -> float:
    """Return the largest difference between the server's mean and that of the values in these sites' vaults."""
    server_state, weights = result.state().server_state, problem.objectives[arm.objective]
    kept, whole = {site: result.kept(site) for site in sites}, sum(weights[site] for site in sites)
    names = [f"{arm.keeps}{name}" for name in HEAD]
    means = {name: sum(weights[site] / whole * own.get(name, 0.0) for site, own in kept.items()) for name in names}
    return max(float(np.abs(to_array(server_state[name]) - mean).max()) for name, mean in means.items())
