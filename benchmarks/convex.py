"""Methods against client drift on a convex problem of known minimum: `python -m benchmarks.convex [METHOD ...]`.

The head of a small vision transformer trains on frozen features: logistic regression with weight decay, by full
batches, at four sites of unequal sizes and different labels. Newton's method finds the minimum. Each method runs in
the simulation, which is the worker with its vault and the coordinator's aggregation, while sites are away, cohorts
are drawn, attempts are abandoned and updates left out. `error` is the head's distance from the minimum over the
minimum's length, in %; `paper` is that of the paper's equations in numpy, with all sites known, on the same cohorts;
`invariant` is, for methods that keep something at sites, the largest difference between the server's mean of it and
the mean of what the vaults hold.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import new_class
from typing import Any

import numpy as np
import torch

from benchmarks.measuring import OUT, Results
from tessera.shared.methods.base import CoordinatorHalf, Method, Participant, Plan, State
from tessera.shared.methods.registry import methods
from tessera.shared.model.selectors import roles
from tessera.shared.rounds.outliers import LEFT_OUT
from tessera.shared.tensors.lazy import Array, to_array
from tessera.worker.data.dataset import Dataset
from tessera.worker.model.build import instantiate
from tessera.worker.simulation import Conditions, Result, Weights, simulate

SIZES = {"east": 8, "north": 16, "south": 40, "west": 80}
MAX_EXAMPLES = 60
"""The run's cap, fixed for all rounds: a site of more examples weighs as one of so many."""
CLASSES, WIDTH = 3, 8
CONFIG: Mapping[str, Any] = {
    "model_type": "vit", "image_size": 4, "patch_size": 2, "num_channels": 1, "hidden_size": WIDTH,
    "num_labels": CLASSES, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
HEAD = ("classifier.weight", "classifier.bias")
RATE, DECAY, EPOCHS = 0.2, 0.3, 5
TRAINING = {
    "optimizer": "sgd", "learning_rate": RATE, "weight_decay": DECAY, "batch_size": None, "epochs": EPOCHS,
}  # fmt: skip
PREFIX = "head-of-"


# ---------------------------------------------------------------- the problem


def site_data(name: str, seed: int = 0) -> Dataset:
    """A site's images and labels, of which most are of one class that differs from its neighbours'."""
    place = list(SIZES).index(name)
    dice = torch.Generator().manual_seed(100 * seed + place)
    count = SIZES[name]
    pixels = torch.randn(count, 1, 4, 4, generator=dice) + torch.randn(1, 1, 4, 4, generator=dice) / 2
    own = torch.rand(count, generator=dice) < 0.7
    labels = torch.where(own, place % CLASSES, torch.randint(0, CLASSES, (count,), generator=dice))
    return Dataset({"pixel_values": pixels, "labels": labels})


@dataclass(frozen=True)
class Problem:
    """The head's problem: the start, and each site's features [examples, width + 1] with its one-hot labels."""

    start: Weights
    data: Mapping[str, Dataset]
    features: Mapping[str, Array]
    labels: Mapping[str, Array]

    @classmethod
    def draw(cls, seed: int = 0) -> Problem:
        model = instantiate(CONFIG, "image-classification", seed=seed)
        dice = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            # As it is initialised, every image has nearly the same features.
            for name, parameter in model.base_model.named_parameters():
                if "layernorm" not in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=dice) / 2)
        data = {name: site_data(name, seed) for name in SIZES}
        features, labels = {}, {}
        for name, dataset in data.items():
            (batch,) = dataset.batches(None, None)
            with torch.no_grad():
                found = model.base_model(pixel_values=batch["pixel_values"]).last_hidden_state[:, 0].double().numpy()
            features[name] = np.concatenate([found, np.ones((len(found), 1))], axis=1)
            labels[name] = np.eye(CLASSES)[batch["labels"].numpy()]
        return cls(Weights.of(model, CONFIG, "image-classification"), data, features, labels)

    def head(self, blocks: Mapping[str, Array]) -> Array:
        """The head as one matrix, float64 [classes, width + 1]."""
        weight, bias = (blocks[name].astype(np.float64) for name in HEAD)
        return np.concatenate([weight, bias[:, None]], axis=1)

    def probabilities(self, site: str, head: Array) -> Array:
        logits = self.features[site] @ head.T
        raised = np.exp(logits - logits.max(axis=1, keepdims=True))
        shares: Array = raised / raised.sum(axis=1, keepdims=True)
        return shares

    def gradient(self, site: str, head: Array) -> Array:
        """Of the site's mean loss with weight decay."""
        wrong = self.probabilities(site, head) - self.labels[site]
        slope: Array = wrong.T @ self.features[site] / len(wrong) + DECAY * head
        return slope

    def curvature(self, site: str, head: Array) -> Array:
        """Its second derivatives, [classes * (width + 1)] squared."""
        p, x = self.probabilities(site, head), self.features[site]
        between = np.einsum("ni,ij->nij", p, np.eye(CLASSES)) - np.einsum("ni,nj->nij", p, p)
        size = CLASSES * x.shape[1]
        found: Array = np.einsum("nij,na,nb->iajb", between, x, x).reshape(size, size) / len(x)
        return found + DECAY * np.eye(size)

    def minimum(self, weights: Mapping[str, float]) -> Array:
        """Where the weighted mean of the sites' losses is least, to rounding."""
        head = np.zeros((CLASSES, WIDTH + 1))
        whole = sum(weights.values())
        for _ in range(30):
            slope = np.sum([weight / whole * self.gradient(site, head) for site, weight in weights.items()], axis=0)
            bend = np.sum([weight / whole * self.curvature(site, head) for site, weight in weights.items()], axis=0)
            head = head - np.linalg.solve(bend, slope.ravel()).reshape(head.shape)
        return head


OBJECTIVES: Mapping[str, Mapping[str, float]] = {
    "equal": dict.fromkeys(SIZES, 1.0),
    "examples": {site: float(min(size, MAX_EXAMPLES)) for site, size in SIZES.items()},
}
"""The weights of the sites' losses in the objective that a method minimises."""


# ---------------------------------------------------------------- methods and their papers


@dataclass
class Paper:
    """A paper's algorithm in float64, with all sites known beforehand, on cohorts as they were."""

    problem: Problem
    settings: Mapping[str, Any]
    kept: dict[str, Array] = field(default_factory=dict)
    """What each site keeps; zero where nothing is."""

    def __post_init__(self) -> None:
        self.kept = {site: np.zeros((CLASSES, WIDTH + 1)) for site in SIZES}

    def local(self, site: str, head: Array, extra: Callable[[Array], Array]) -> Array:
        end = head
        for _ in range(EPOCHS):
            end = end - RATE * (self.problem.gradient(site, end) + extra(end))
        return end

    def round(self, head: Array, cohort: Sequence[str]) -> Array:
        """FedAvg's, which FedNova's is if all make as many steps."""
        ends = {site: self.local(site, head, _always(np.zeros(()))) for site in cohort}
        return self.mean(ends)

    def mean(self, ends: Mapping[str, Array], weights: Mapping[str, float] = OBJECTIVES["examples"]) -> Array:
        whole = sum(weights[site] for site in ends)
        found: Array = np.sum([weights[site] / whole * end for site, end in ends.items()], axis=0)
        return found


class Prox(Paper):
    def round(self, head: Array, cohort: Sequence[str]) -> Array:
        mu = self.settings.get("mu", 0.01)
        return self.mean({site: self.local(site, head, _towards(head, mu)) for site in cohort})


class Scaffold(Paper):
    def round(self, head: Array, cohort: Sequence[str]) -> Array:
        weights = OBJECTIVES[self.settings.get("weigh", "equal")]
        whole = sum(weights.values())
        c: Array = np.sum([weights[site] / whole * own for site, own in self.kept.items()], axis=0)
        ends = {site: self.local(site, head, _always(c - self.kept[site])) for site in cohort}
        for site, end in ends.items():
            self.kept[site] = self.kept[site] - c + (head - end) / (EPOCHS * RATE)
        return self.mean(ends, weights)


class Dyn(Paper):
    """In the scales of the authors' code."""

    def round(self, head: Array, cohort: Sequence[str]) -> Array:
        sizes, equal = OBJECTIVES["examples"], self.settings.get("weigh", "equal") == "equal"
        usual = sum(sizes.values()) / len(sizes)
        alphas = {s: self.settings.get("alpha", 0.01) * (usual / sizes[s] if equal else 1) for s in SIZES}
        ends = {s: self.local(s, head, _towards(head - self.kept[s], alphas[s])) for s in cohort}
        for site, end in ends.items():
            self.kept[site] = self.kept[site] + end - head
        weights = OBJECTIVES["equal"] if equal else sizes
        cloud: Array = self.mean(ends, weights) + self.mean(self.kept, weights)
        return cloud


def _always(gradient: Array) -> Callable[[Array], Array]:
    return lambda _: gradient


def _towards(centre: Array, strength: float) -> Callable[[Array], Array]:
    return lambda head: strength * (head - centre)


@dataclass(frozen=True)
class Arm:
    """A method with its settings, the objective that it minimises, and what it keeps at sites under which prefix."""

    method: str
    paper: type[Paper]
    objective: str = "examples"
    settings: Mapping[str, Any] = field(default_factory=dict)
    keeps: str | None = None

    @property
    def name(self) -> str:
        return " ".join([self.method, *(f"{key}={value}" for key, value in self.settings.items())])


ARMS = (
    Arm("fedavg", Paper),
    Arm("fedprox", Prox),
    Arm("fednova", Paper),
    Arm("scaffold", Scaffold, "equal", keeps="control/"),
    Arm("scaffold", Scaffold, "examples", {"weigh": "examples"}, keeps="control/"),
    Arm("feddyn", Dyn, keeps="gradient/"),
    Arm("feddyn", Dyn, settings={"alpha": 1.0}, keeps="gradient/"),
    Arm("feddyn", Dyn, settings={"alpha": 1.0, "weigh": "examples"}, keeps="gradient/"),
)


class _HeadOnly(CoordinatorHalf[Any]):
    """Any method's coordinator half, whose plans ask for the head alone."""

    def plan(self, state: State, cohort: Sequence[Participant], rng: Any) -> Mapping[str, Plan]:
        plans = super().plan(state, cohort, rng)
        return {
            name: plan.model_copy(update={"train": roles("head"), "upload": roles("head")})
            for name, plan in plans.items()
        }


def install(found: dict[str, Method[Any]]) -> None:
    """Adds to the installed methods those that train the head alone."""
    for name in {arm.method for arm in ARMS}:
        whole = found[name]
        half = new_class("HeadOnly", (_HeadOnly, whole.coordinator))
        found[PREFIX + name] = replace(whole, name=PREFIX + name, coordinator=half)


# ---------------------------------------------------------------- what happens to a federation


@dataclass(frozen=True)
class Scenario:
    """Who is away, and what else a run says."""

    spec: Mapping[str, Any] = field(default_factory=dict)
    conditions: Conditions = field(default_factory=Conditions)
    training: Mapping[str, Any] = field(default_factory=dict)
    """Where it is another than the papers' here."""


def scenarios(arm: Arm, rounds: int) -> dict[str, Scenario]:
    away = tuple(number for number in range(1, rounds + 1) if number % 5)
    every = {
        "all": Scenario(),
        "one away 4 of 5": Scenario(conditions=Conditions(away={"west": away})),
        "2 of 4 drawn": Scenario({"cohort": {"size": 2, "quorum": 2}}),
    }
    if arm.keeps:
        abandoned = Scenario({"cohort": {"quorum": len(SIZES), "max_attempts": 100}}, Conditions(dropout=0.1))
        return {**every, "attempts abandoned": abandoned, "left out by norm": Scenario({"max_norm_of_median": 1.01})}
    # From 5 to 50 steps a round, by size.
    return {**every, "batches of 8": Scenario(training={"batch_size": 8, "learning_rate": RATE / 10})}


@dataclass(frozen=True)
class Outcome:
    """How far a run and its paper ended from the minimum, relative to its length, and the broken invariant."""

    error: float
    paper: float | None
    invariant: float | None
    abandoned: int
    left_out: int


def run(problem: Problem, arm: Arm, scenario: Scenario, rounds: int) -> Outcome:
    """Simulates a method, whose head-only form is installed."""
    spec = {
        "method": {"name": PREFIX + arm.method, "settings": dict(arm.settings)},
        "rounds": rounds,
        "training": {**TRAINING, **scenario.training},
        "max_examples": MAX_EXAMPLES,
        **scenario.spec,
    }
    result = simulate(spec, problem.start, problem.data, conditions=scenario.conditions)
    cohorts, least = merged(result), problem.minimum(OBJECTIVES[arm.objective])

    def distance(head: Array) -> float:
        return float(np.linalg.norm(head - least) / np.linalg.norm(least))

    paper, head = arm.paper(problem, arm.settings), problem.head(problem.start.values)
    for cohort in cohorts:
        head = paper.round(head, cohort)
    return Outcome(
        distance(problem.head(result.arrays())),
        None if scenario.training else distance(head),
        invariant(result, arm, {site for cohort in cohorts for site in cohort}) if arm.keeps else None,
        sum(attempt.state == "abandoned" for attempt in result.rounds),
        sum(LEFT_OUT in task.metrics for attempt in result.rounds for task in attempt.tasks),
    )


def merged(result: Result) -> list[list[str]]:
    """The sites whose updates each version was made of."""
    return [
        [task.worker.partition("/")[0] for task in attempt.tasks if task.examples and LEFT_OUT not in task.metrics]
        for attempt in result.rounds
        if attempt.state == "committed"
    ]


def invariant(result: Result, arm: Arm, sites: Collection[str]) -> float:
    """The largest difference between the server's mean and that of what the vaults of these sites hold."""
    server_state, weights = result.state().server_state, OBJECTIVES[arm.objective]
    kept, whole = {site: result.kept(site) for site in sites}, sum(weights[site] for site in sites)
    names = [f"{arm.keeps}{name}" for name in HEAD]
    means = {name: sum(weights[site] / whole * own.get(name, 0.0) for site, own in kept.items()) for name in names}
    return max(float(np.abs(to_array(server_state[name]) - mean).max()) for name, mean in means.items())


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("methods", nargs="*", help="methods, or rows as 'feddyn alpha=1.0'; all if none")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--out", type=Path, default=OUT)
    asked = parser.parse_args(given)
    install(methods())
    problem = Problem.draw()
    results = Results("convex", f"error after {asked.rounds} rounds, in % of the minimum's length")
    for arm in ARMS:
        if asked.methods and not {arm.method, arm.name} & {*asked.methods}:
            continue
        for name, scenario in scenarios(arm, asked.rounds).items():
            found = run(problem, arm, scenario, asked.rounds)
            results.add(
                method=arm.name,
                objective=arm.objective,
                scenario=name,
                error=100 * found.error,
                paper=None if found.paper is None else 100 * found.paper,
                invariant=found.invariant,
                abandoned=found.abandoned,
                left_out=found.left_out,
            )
    results.notes.append(
        f"objective equal: the mean of the sites' losses. examples: the same by their examples, of which at most "
        f"{MAX_EXAMPLES} of a site count; they have {', '.join(map(str, SIZES.values()))}."
    )
    results.finish(asked.out)


if __name__ == "__main__":
    main()
