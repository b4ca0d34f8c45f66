"""A cell of the table: a method on a task, by `tessera simulate`, in a process of its own."""

from __future__ import annotations

import csv
import json
import os
import shutil
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import fmean
from time import process_time
from typing import Any

import torch
from typer.testing import CliRunner

from benchmarks.measuring import forget_peak, own_peak_bytes, resident_bytes
from benchmarks.methods.arms import MODELS, ROUNDS, Arm
from benchmarks.methods.tasks import TASKS, World
from tessera.shared.cli.main import app
from tessera.shared.metrics.site_spread import PERSONAL

CHOOSING = World(0, chosen=True)


class Refused(Exception):
    """A command's refusal, as the command says it."""


@dataclass(frozen=True)
class Budget:
    """What every cell of a table has."""

    rounds: int = ROUNDS
    batch: int = 16
    rates: int = 3
    """Learning rates to choose from: the first of a kind's."""
    seeds: tuple[int, ...] = (0, 1, 2)
    steps: int | None = None
    """Of pre-training; the task's if None."""


def tessera(*words: str) -> None:
    """Run a command in this process. Raises Refused."""
    done = CliRunner().invoke(app, [*words, "--json"], prog_name="tessera")
    if isinstance(done.exception, Exception):
        raise done.exception
    if done.exit_code:
        raise Refused(_reason(done.stdout + done.stderr))


def _reason(printed: str) -> str:
    """Return the first error of the problem that a command printed, or its last line."""
    start = printed.find("{\n")
    if start < 0:
        return printed.strip().splitlines()[-1].removeprefix("error: ")
    problem, _ = json.JSONDecoder().raw_decode(printed[start:])
    return str(problem["errors"][0]["detail"] if problem.get("errors") else problem["detail"])


# ---------------------------------------------------------------- what cells share


def prepare(folder: Path, task: str, budget: Budget) -> None:
    """Pre-train a task's base, and write its worlds."""
    torch.set_num_threads(1)
    known, base = TASKS[task], folder / "base"
    base.mkdir(parents=True)
    known.pretrain(base, budget.steps or known.steps)
    for world in (CHOOSING, *map(World, budget.seeds)):
        place = _place(folder, world)
        place.mkdir()
        table = known.world(place, base, world)
        (place / "simulation.json").write_text(json.dumps(table), encoding="utf-8")


def _place(folder: Path, world: World) -> Path:
    return folder / f"{'choosing' if world.chosen else 'seed'}-{world.number}"


def _model(folder: Path, task: str, name: str) -> Path:
    """Return a model's folder, which is made unless it is there. Raises Refused."""
    out, known = folder / name, TASKS[task]
    if not out.exists():
        labels = ("--labels", str(known.labels)) if known.labels else ()
        start = ("--config", str(folder / "base"), "--pretrained", "--head", known.head)
        tessera("model", "init", str(out), *start, *labels, *MODELS[name])
    return out


# ---------------------------------------------------------------- a cell


def measure(folder: Path, task: str, arm: Arm, rate: float, budget: Budget) -> dict[str, Any]:
    """Return the figures of a method on a task, or why it was refused. For a process of its own."""
    torch.set_num_threads(1)
    try:
        _model(folder, task, arm.model)
        forget_peak(os.getpid())
        before, began = resident_bytes([os.getpid()]), process_time()
        found = [simulated(folder, World(seed), task, arm, budget, rate) for seed in budget.seeds]
    except Refused as fault:
        return {"refused": str(fault)}
    return {
        **{name: [each[name] for each in found] for name in ("score", "worst", "new")},
        **{name: fmean(each[name] for each in found) for name in ("up_bytes", "down_bytes")},
        "processor_seconds": (process_time() - began) / len(found),
        "peak_bytes": own_peak_bytes(os.getpid()) - before,
        "epsilon": arm.epsilon,
    }


def choose(folder: Path, task: str, arm: Arm, rates: Sequence[float], budget: Budget) -> dict[float, float]:
    """Return the score of each learning rate in the world of choices; none where the method is refused."""
    torch.set_num_threads(1)
    try:
        return {rate: simulated(folder, CHOOSING, task, arm, budget, rate)["score"] for rate in rates}
    except Refused:
        return {}


def simulated(folder: Path, world: World, task: str, arm: Arm, budget: Budget, rate: float) -> dict[str, Any]:
    """Run one simulation. Raises Refused."""
    model, place = _model(folder, task, arm.model), _place(folder, world)
    table = json.loads((place / "simulation.json").read_text(encoding="utf-8"))
    sites = table["sites"] if isinstance(table["sites"], dict) else [f"site-{n + 1}" for n in range(table["sites"])]
    run = {
        "rounds": budget.rounds,
        "seed": world.number,
        "method": {"name": arm.method, "settings": arm.settings},
        "training": {"learning_rate": rate, "batch_size": budget.batch, **arm.training},
        "evaluation": {"sites": True, "every": budget.rounds},
        "lora_ranks": dict(zip(sites, cycle(arm.ranks), strict=False)) if arm.ranks else {},
        **arm.run,
        "simulation": {**table, "threads": 1, "policy": {"min_evaluation_examples": 5}},
    }
    file, out = place / "run.toml", place / "out"
    file.write_text("".join(f"{key} = {toml(value)}\n" for key, value in run.items()), encoding="utf-8")
    shutil.rmtree(out, ignore_errors=True)
    tessera("simulate", str(file), "--model", str(model), "--out", str(out))
    return figures(out, TASKS[task].metric, len(sites))


def toml(value: Any) -> str:
    """Return a value as TOML. JSON's strings, numbers and lists are TOML's."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{json.dumps(key)} = {toml(each)}" for key, each in value.items()) + " }"
    return json.dumps(value)


def figures(out: Path, metric: str, sites: int) -> dict[str, Any]:
    """Return the scores of a finished simulation, and the bytes of a site and round after the first.

    A method with own models is measured by these at the sites, and has no score on data of no site. Raises Refused if
    an update was lost.
    """
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    at_sites = summary["sites"]
    personal = PERSONAL + metric in at_sites
    spread = at_sites[PERSONAL + metric if personal else metric]
    totals: defaultdict[str, float] = defaultdict(float)
    with (out / "measurements.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            count = row["metric"] in ("asked", "accepted")
            # Only rounds have attempts: their stages are named by the method.
            if row["attempt"] and (count or (row["site"] and row["round"] != "1")):
                totals[row["metric"]] += float(row["value"])
    if totals["accepted"] < totals["asked"]:
        raise Refused(f"{totals['asked'] - totals['accepted']:.0f} of {totals['asked']:.0f} updates were not merged")
    later = totals["asked"] - sites
    return {
        "score": spread["mean"],
        "worst": spread["worst"],
        "new": None if personal else summary["scores"][metric],
        **{f"{way}_bytes": totals[f"{way}load_bytes"] / later if later else 0.0 for way in ("up", "down")},
    }
