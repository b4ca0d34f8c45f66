"""Every method side by side on small tasks, over several seeds: `python -m benchmarks.results digits`.

Same data, rounds and local training for each arm; nothing was tuned for any of them. Each seed draws its own split,
first weights and local dice. Printed are the mean and the standard deviation over the seeds, and those of the paired
differences from the task's first arm. All runs are simulated, which gives the bits that HTTP would give.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.arms import Arm, Task
from benchmarks.fusing import FIGURES, attention_figures
from benchmarks.tasks import TASKS
from tessera.shared.metrics.site_spread import PERSONAL
from tessera.shared.updates.model_folder import ModelFolder
from tessera.worker.data.dataset import Dataset
from tessera.worker.simulation import Conditions, Result, simulate

QUICK_ROUNDS = 2


Figures = dict[str, float]


def made(task: Task, model: str, seed: int, folder: Path) -> Path:
    """The model folder of a seed, which the arms share. It is made when it is not there yet."""
    place = folder / f"{model}-{seed}"
    if not place.exists():
        place.mkdir()
        options = task.models(model, seed, place)
        command = [
            sys.executable,
            "-m",
            "tessera.shared.cli",
            "model",
            "init",
            str(place / "model"),
            "--seed",
            str(seed),
        ]
        subprocess.run([*command, *options], check=True, capture_output=True)
    return place / "model"


def measured(task: Task, arm: Arm, seed: int, rounds: int, model: Path) -> Figures:
    """Runs one arm with one seed."""
    sites = task.sites(seed)
    if arm.central:
        sites = {"all": joined(sites)}
    evaluation = {"dataset": "test", "sites": not arm.spec.get("privacy"), "every": rounds}
    spec = {
        "name": "results",
        "seed": seed,
        "rounds": rounds,
        "evaluation": evaluation,
        **arm.spec,
        "method": {"name": arm.method, "settings": dict(arm.settings)},
        "training": {**task.training, **arm.spec.get("training", {})},
    }
    start = ModelFolder.open(model)
    result = simulate(
        spec,
        start,
        sites,
        test=task.test(),
        conditions=Conditions(threads=1),
    )
    return {**figures(result, len(sites)), **attention_figures(result, start, sorted(sites))}


def joined(sites: Mapping[str, Dataset]) -> Dataset:
    """All sites' examples in one place, and all that they hold out."""
    parts = [site for _, site in sorted(sites.items())]
    held = [part.held_out for part in parts if part.held_out]
    return _together(parts, _together(held, None) if held else None)


def _together(parts: Sequence[Dataset], held_out: Dataset | None) -> Dataset:
    names = parts[0].tensors
    tensors = {name: torch.cat([part.tensors[name] for part in parts]) for name in names}
    return Dataset(tensors, parts[0].common, held_out)


def figures(result: Result, sites: int) -> Figures:
    """What the last version came to, and what moved: megabytes a site and round, both ways."""
    last = [each for each in result.measurements if each.version == result.versions[-1].number]
    found: Figures = {}
    own = []
    for measurement in last:
        metrics = measurement.metrics
        if not measurement.held_out:
            found["test accuracy"] = 100 * metrics["accuracy"]
        else:
            own.append(100 * metrics.get(f"{PERSONAL}accuracy", metrics["accuracy"]))
    if own:
        found |= {"sites' mean": fmean(own), "worst site": min(own)}
    outcomes = result.outcomes
    found["kB up"] = sum(outcome.upload_bytes for outcome in outcomes) / 1e3 / sites / len(outcomes)
    found["kB down"] = (
        sum(outcome.download_bytes - outcome.evaluation_bytes for outcome in outcomes) / 1e3 / sites / len(outcomes)
    )
    return found


# ---------------------------------------------------------------- printing


Runs = Mapping[tuple[str, int], Figures]
COLUMNS = ("test accuracy", "sites' mean", "worst site", "kB up", "kB down")


def table(task: Task, seeds: Sequence[int], runs: Runs) -> Table:
    """A row an arm: mean and standard deviation of each figure over the seeds, and the paired difference."""
    shown = Table(title=f"{task.name}, seeds {', '.join(map(str, seeds))}", title_justify="left")
    for name in ("arm", *COLUMNS, "test, paired", "sites, paired"):
        shown.add_column(name, justify="left" if name == "arm" else "right")
    first = task.arms[0].name
    for arm in task.arms:
        of_arm = [runs[arm.name, seed] for seed in seeds]
        cells = [_spread([figures[name] for figures in of_arm if name in figures]) for name in COLUMNS]
        paired = [
            _spread(
                [runs[arm.name, s][name] - runs[first, s][name] for s in seeds if name in runs[arm.name, s]],
                sign=True,
            )
            for name in COLUMNS[:2]
        ]
        shown.add_row(arm.name, *cells, *(paired if arm.name != first else ("", "")))
    return shown


def attention_table(task: Task, seeds: Sequence[int], runs: Runs) -> Table | None:
    """A row for each tower of an arm that fuses prompts by attention; None if no arm does."""
    shown = Table(title=f"{task.name}: what attention adds (A) to global prompts (G)", title_justify="left")
    for name in ("arm", "tower", *FIGURES):
        shown.add_column(name, justify="left" if name in ("arm", "tower") else "right")
    for arm in task.arms:
        for tower in ("vision", "text"):
            of_arm = [runs[arm.name, seed] for seed in seeds if f"{tower} {FIGURES[0]}" in runs[arm.name, seed]]
            if of_arm:
                cells = [_spread([each[f"{tower} {name}"] for each in of_arm], digits=2) for name in FIGURES]
                shown.add_row(arm.name, tower, *cells)
    return shown if shown.row_count else None


def _spread(values: Sequence[float], *, sign: bool = False, digits: int = 1) -> str:
    if not values:
        return "-"
    plus = "+" if sign else ""
    spread = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{fmean(values):{plus}.{digits}f}{spread}"


def write_csv(path: Path, task: str, runs: Runs) -> None:
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("task", "arm", "seed", "figure", "value"))
        for (arm, seed), figures in sorted(runs.items()):
            rows.writerows((task, arm, seed, name, f"{value:.4f}") for name, value in figures.items())


def chosen(task: Task, names: Iterable[str]) -> Task:
    """The task with those arms alone whose names contain one of `names`, and the one to compare with."""
    wanted = tuple(names)
    kept = [arm for arm in task.arms[1:] if not wanted or any(name in arm.name for name in wanted)]
    return replace(task, arms=(task.arms[0], *kept))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("task", choices=sorted(TASKS))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--arms", nargs="*", default=[], help="parts of the names of the arms to run")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time, of one thread each")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds: to see that it works")
    parser.add_argument("--csv", type=Path)
    given = parser.parse_args()
    task = chosen(TASKS[given.task], given.arms)
    seeds = [int(seed) for seed in given.seeds.split(",")]
    rounds = QUICK_ROUNDS if given.quick else task.rounds
    wanted = [(arm, seed) for seed in seeds for arm in task.arms]
    with tempfile.TemporaryDirectory() as name, ProcessPoolExecutor(given.jobs) as pool:
        # The task itself holds functions, which do not travel between processes; its name does.
        futures = {
            (arm.name, seed): pool.submit(
                _one, given.task, arm.name, seed, rounds, made(task, arm.model, seed, Path(name))
            )
            for arm, seed in wanted
        }
        runs = {}
        for key, future in futures.items():
            runs[key] = future.result()
            print(*key, {name: round(value, 1) for name, value in runs[key].items()}, file=sys.stderr, flush=True)
    console = Console(width=140)
    console.print(table(task, seeds, runs))
    if attention := attention_table(task, seeds, runs):
        console.print(attention)
    if given.csv:
        write_csv(given.csv, given.task, runs)


def _one(task: str, arm: str, seed: int, rounds: int, model: Path) -> Figures:
    wanted = next(each for each in TASKS[task].arms if each.name == arm)
    return measured(TASKS[task], wanted, seed, rounds, model)


if __name__ == "__main__":
    main()
