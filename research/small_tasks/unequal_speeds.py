"""How soon a federation of unequal speed reaches a score: `python -m small_tasks.unequal_speeds`.

Eight sites train a model that was pre-trained on other data; a step takes the slowest ten times as long as the
fastest. Each way of waiting has the simulated time in which the first one, `all`, makes its rounds. A score is the
mean of three measurements in a row, at the time of the second; in the time of a round of `all` are at most four.
The time to a score is that in which an arm first has the last score of `all` with the same seed, over the time that
`all` took to it. `reached` counts the seeds that got there, and the ratio is of these.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from itertools import product
from math import ceil
from multiprocessing import get_context
from statistics import fmean
from typing import Any, Literal

import torch

from common.figures import OUT, Cell, Results
from small_tasks.docstrings import AREAS, BERT, OTHERS, docstrings, others
from small_tasks.lora_ranks import HEAD, VIT
from tessera.shared.model.spec import Head
from tessera.simulation import Conditions, Result, Weights, simulate
from tessera.simulation.comparison.statistics import interval
from tessera.worker.data.dataset import Dataset
from tessera.worker.data.partition.division import divide, hold_out, key_of_seed
from tessera.worker.data.partition.schemes import Dirichlet, Iid
from tessera.worker.data.registry import load
from tessera.worker.model.build import instantiate

Task = Literal["digits", "docstrings"]
Data = Literal["similar", "dissimilar"]
TASKS: tuple[Task, ...] = ("digits", "docstrings")
DATA: tuple[Data, ...] = ("similar", "dissimilar")

SITES = 8
SLOWEST = 10.0
SPEEDS = {f"site-{place}": SLOWEST ** (place / (SITES - 1)) for place in range(SITES)}
"""Seconds of a step."""
SLOW = tuple(SPEEDS)[-SITES // 3 :]
"""The slowest third."""
UPDATES = SLOWEST * sum(1 / seconds for seconds in SPEEDS.values())
"""Updates that the sites can make in the time of a round that waits for all."""
ROUNDS, QUICK_ROUNDS = 12, 4
MEASURED, SMOOTHED = 4, 3
ALPHA, HELD_OUT = 0.3, 0.2
TRAINING: Mapping[str, Any] = {"optimizer": "adamw", "learning_rate": 5e-4, "batch_size": 32, "weight_decay": 0.0}
STEPS, EPOCHS = 8, 20
"""Of a round, and before the first."""
ENCODER: Mapping[str, Any] = {**BERT, "model_type": "bert", "hidden_dropout_prob": 0.0}
TEXT: Head = "text-classification"
ALL = "all"


@dataclass(frozen=True)
class Arm:
    """A way of waiting, as the settings of a cohort."""

    cohort: Mapping[str, Any] = field(default_factory=dict)
    versions: float = 1.0
    """Versions in the time of a round that waits for all, at most."""


def _buffer(sites: int, **settings: Any) -> Arm:
    return Arm({"mode": "buffer", "target_updates": sites, "quorum": sites, **settings}, UPDATES / sites)


ARMS: dict[str, Arm] = {
    ALL: Arm(),
    "first 6 of 8": Arm({"target_updates": 6}, SLOWEST / tuple(SPEEDS.values())[5]),
    "fitted work": Arm({"work": "fitted", "work_factor": SLOWEST}, SLOWEST / sum(tuple(SPEEDS.values())[3:5]) * 2),
    "FedBuff, 4 of 8": _buffer(4),
    "memory, 2 of 8": _buffer(2, staleness="none", memory=True),
}


@dataclass(frozen=True)
class Point:
    version: int
    seconds: float
    accuracy: float
    """On central data."""
    slow: float
    """The mean over the slowest third of sites, on their own data."""


def smoothed(points: Sequence[Point]) -> Iterator[Point]:
    for end in range(SMOOTHED, len(points) + 1):
        last = points[end - SMOOTHED : end]
        middle = last[SMOOTHED // 2]
        yield replace(middle, accuracy=fmean(p.accuracy for p in last), slow=fmean(p.slow for p in last))


@cache
def base(task: Task) -> Weights:
    """Return a model that was trained on digits on their side, or on docstrings of other packages."""
    if task == "digits":
        images = load("digits", {"split": "train"})
        turned = Dataset({**images.tensors, "pixel_values": images.tensors["pixel_values"].transpose(2, 3)})
        return _trained(VIT, HEAD, turned)
    before = _trained({**ENCODER, "num_labels": len(OTHERS)}, TEXT, others())
    config = {**ENCODER, "num_labels": len(AREAS)}
    start = Weights.of(instantiate(config, TEXT, seed=0), config, TEXT)
    kept = {block.name: before.values[block.name] for block in start.model.blocks if block.role != "head"}
    return Weights(start.model, {**start.values, **kept})


def _trained(config: Mapping[str, Any], head: Head, data: Dataset) -> Weights:
    start = Weights.of(instantiate(config, head, seed=0), config, head)
    spec = {"method": {"name": "fedavg"}, "rounds": 1, "training": {**TRAINING, "epochs": EPOCHS}}
    return Weights(start.model, simulate(spec, start, {"centre": data}, conditions=Conditions(threads=1)).arrays(1))


def curve(task: Task, data: Data, arm: str, seed: int, rounds: int) -> list[Point]:
    """Return the scores of an arm's versions in the time of `rounds` rounds that wait for all."""
    torch.set_num_threads(1)
    train, test = _sets(task)
    alike = Iid(scheme="iid", count=SITES, seed=seed)
    scheme = alike if data == "similar" else Dirichlet(scheme="dirichlet", count=SITES, alpha=ALPHA, seed=seed)
    parts = [hold_out(part, HELD_OUT, key_of_seed(seed)) for part in divide(train, scheme)]
    spec = {
        "method": {"name": "fedavg"},
        "rounds": ceil(rounds * ARMS[arm].versions),
        "seed": seed,
        "training": {**TRAINING, "steps": STEPS},
        "evaluation": {"dataset": "test", "sites": True, "every": ceil(ARMS[arm].versions / MEASURED)},
        "cohort": {**ARMS[arm].cohort, "deadline_seconds": 1e6},
    }
    conditions = Conditions(threads=1, speed=SPEEDS)
    result = simulate(spec, base(task), dict(zip(SPEEDS, parts, strict=True)), test=test, conditions=conditions)
    longest = rounds * STEPS * SLOWEST
    return [point for point in _points(result) if point.seconds <= longest]


@cache
def _sets(task: Task) -> tuple[Dataset, Dataset]:
    return (
        docstrings()
        if task == "docstrings"
        else (load("digits", {"split": "train"}), load("digits", {"split": "test"}))
    )


def kept(task: Task, data: Data, arm: str, seed: int, rounds: int) -> list[Point]:
    """Return an arm's curve from its file; make the file where there is none: a study that was stopped goes on."""
    file = OUT / "unequal_speeds" / f"{task}, {data}, {arm}, seed {seed}, {rounds} rounds.json"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        made = file.with_suffix(".made")
        made.write_text(json.dumps([asdict(point) for point in curve(task, data, arm, seed, rounds)]))
        made.rename(file)
    return [Point(**point) for point in json.loads(file.read_text())]


def _points(result: Result) -> Iterator[Point]:
    """Yield a point for each measured version. A site at work measures later versions: its last one counts."""
    own: dict[str, float] = {}
    for version in result.versions:
        found = [one for one in result.measurements if one.version == version.number]
        own |= {one.worker.partition("/")[0]: one.metrics["accuracy"] for one in found if one.held_out}
        for central in (one.metrics["accuracy"] for one in found if not one.held_out):
            slow = fmean(own[site] for site in SLOW if site in own)
            yield Point(version.number, result.simulated_seconds[version.number], 100 * central, 100 * slow)


def row(found: Mapping[int, Sequence[Point]], all_: Mapping[int, Sequence[Point]]) -> dict[str, Cell]:
    """Compare an arm's curves with the curves of `all`, by seed."""
    ratios, central, slow, last = list[float](), list[float](), list[float](), list[float]()
    for seed, points in found.items():
        other, own = list(smoothed(all_[seed])), list(smoothed(points))
        goal = other[-1].accuracy
        first, then = (next((p.seconds for p in of if p.accuracy >= goal), None) for of in (other, own))
        ratios += [then / first] if first and then else []
        last.append(own[-1].accuracy)
        central.append(own[-1].accuracy - goal)
        slow.append(own[-1].slow - other[-1].slow)
    return {
        "versions": fmean(points[-1].version for points in found.values()),
        "accuracy": fmean(last),
        "reached": f"{len(ratios)} of {len(found)}",
        "time to it": _spread(ratios),
        "accuracy, paired": _spread(central),
        "slow sites, paired": _spread(slow),
    }


def _spread(values: Sequence[float]) -> str:
    """Return the mean and its 95 % t-interval."""
    if len(values) < 2:
        return f"{values[0]:.2f}" if values else "never"
    low, high = interval(values)
    return f"{fmean(values):.2f} ({low:.2f} to {high:.2f})"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--quick", action="store_true", help="a seed and few rounds: whether it runs, no figures")
    parser.add_argument("--processes", type=int, default=2)
    chosen = parser.parse_args(arguments)
    seeds = range(1 if chosen.quick else chosen.seeds)
    rounds = QUICK_ROUNDS if chosen.quick else ROUNDS
    results = Results("unequal_speeds", "Eight sites: the slowest takes ten times as long as the fastest")
    runs = list(product(chosen.tasks, DATA, ARMS, seeds))
    with ProcessPoolExecutor(chosen.processes, get_context("spawn")) as pool:
        curves = dict(zip(runs, pool.map(kept, *zip(*runs, strict=True), [rounds] * len(runs)), strict=True))
    for task, data, arm in product(chosen.tasks, DATA, ARMS):
        found, all_ = ({seed: curves[task, data, name, seed] for seed in seeds} for name in (arm, ALL))
        results.add(task=task, data=data, arm=arm, **row(found, all_))
    results.show()
    results.write()


if __name__ == "__main__":
    main()
