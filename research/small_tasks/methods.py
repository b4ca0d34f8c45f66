"""Every method side by side on scikit-learn's digits, over several seeds: `python -m small_tasks.methods`.

All arms have the same data, rounds and local training; none was tuned. Each seed determines its own split, initial
weights and local randomness. The command prints the mean and the standard deviation over the seeds, and those of the
paired differences from the first arm. All runs are simulated, which gives the same bits as HTTP.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich.console import Console
from rich.table import Table

from common.modeling import init
from common.names import PERSONAL
from common.pooled import pooled
from tessera.simulation import Conditions, Result, simulate
from tessera.worker.data.partition.division import divide, hold_out, key_of_seed
from tessera.worker.data.partition.schemes import Dirichlet
from tessera.worker.data.registry import load

VIT = Path(__file__).with_name("vit.json")
"""The model of the demo."""
SITES = 8
HELD_OUT = 0.25
ROUNDS, QUICK_ROUNDS = 12, 2
TRAINING: Mapping[str, Any] = {"epochs": 2, "batch_size": 32, "optimizer": "adamw", "learning_rate": 5e-4}

Figures = dict[str, float]
Runs = Mapping[tuple[str, int], Figures]
COLUMNS = ("test accuracy", "sites' mean", "worst site", "kB up", "kB down")


@dataclass(frozen=True)
class Arm:
    """One way to train."""

    name: str
    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    spec: Mapping[str, Any] = field(default_factory=dict)
    """What differs in the run's spec."""
    central: bool = False
    """Whether one site holds all data."""


ARMS = {
    arm.name: arm
    for arm in (
        Arm("fedavg", "fedavg"),
        Arm("centralised", "fedavg", central=True),
        Arm("fedprox", "fedprox", {"mu": 0.01}),
        Arm("fednova", "fednova"),
        Arm("moon", "moon"),
        Arm("fedavg + server momentum", "fedavg", spec={"server_optimizer": {"kind": "sgd", "momentum": 0.9}}),
        Arm("fedavg + server adam", "fedavg", spec={"server_optimizer": {"kind": "adam", "learning_rate": 0.01}}),
        Arm("fedavg, int8", "fedavg", spec={"codec": "delta+int8"}),
        Arm("fedavg, int8 both ways", "fedavg", spec={"codec": "delta+int8", "download_codec": "int8"}),
        Arm("fedavg, top 5 % with feedback", "fedavg", spec={"codec": "delta+topk=0.05+shuffle+zstd"}),
        Arm("local only", "local"),
        Arm("fedper", "fedper"),
        Arm("fedrep", "fedrep"),
        Arm("fedbabu", "fedbabu"),
        Arm("fedbn", "fedbn"),
        Arm("ditto", "ditto"),
    )
}
FIRST = "fedavg"
"""The arm that the others are compared with."""


def measured(name: str, seed: int, rounds: int) -> Figures:
    """Run one arm with one seed."""
    arm = ARMS[name]
    parts = divide(load("digits", {}), Dirichlet(scheme="dirichlet", count=SITES, alpha=0.3, seed=seed))
    held_out = [hold_out(part, HELD_OUT, key_of_seed(seed)) for part in parts]
    sites = {"all": pooled(held_out)} if arm.central else {f"site-{i:02}": part for i, part in enumerate(held_out)}
    spec = {
        "name": "results",
        "seed": seed,
        "rounds": rounds,
        "evaluation": {"dataset": "test", "sites": True, "every": rounds},
        "method": {"name": arm.method, "settings": dict(arm.settings)},
        "training": TRAINING,
        **arm.spec,
    }
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()):
        model = Path(folder) / "model"
        init(model, config=VIT, head="image-classification", pretrained=False, seed=seed)
        test = load("digits", {"split": "test"})
        result = simulate(spec, model, sites, test=test, conditions=Conditions(threads=1))
        return figures(result, len(sites))


def figures(result: Result, sites: int) -> Figures:
    """Return the last version's accuracy in percent, and the kilobytes of a site and round, up and down."""
    own, found = [], Figures()
    for measurement in result.measurements:
        if measurement.version != result.versions[-1].number:
            continue
        metrics = measurement.metrics
        if measurement.held_out:
            own.append(100 * metrics.get(f"{PERSONAL}accuracy", metrics["accuracy"]))
        else:
            found["test accuracy"] = 100 * metrics["accuracy"]
    outcomes, tasks = result.outcomes, sites * len(result.outcomes)
    return {
        **found,
        "sites' mean": fmean(own),
        "worst site": min(own),
        "kB up": sum(each.upload_bytes for each in outcomes) / 1e3 / tasks,
        "kB down": sum(each.download_bytes - each.evaluation_bytes for each in outcomes) / 1e3 / tasks,
    }


def table(arms: Sequence[str], seeds: Sequence[int], runs: Runs) -> Table:
    """Return a row for each arm: mean and standard deviation of each figure, and the paired difference."""
    shown = Table(title=f"digits, seeds {', '.join(map(str, seeds))}", title_justify="left")
    for name in ("arm", *COLUMNS, "test, paired", "sites, paired"):
        shown.add_column(name, justify="left" if name == "arm" else "right")
    for arm in arms:
        cells = [_spread([runs[arm, seed][name] for seed in seeds]) for name in COLUMNS]
        paired = [
            _spread([runs[arm, seed][name] - runs[FIRST, seed][name] for seed in seeds], "+") for name in COLUMNS[:2]
        ]
        shown.add_row(arm, *cells, *(paired if arm != FIRST else ("", "")))
    return shown


def _spread(values: Sequence[float], sign: str = "") -> str:
    return f"{fmean(values):{sign}.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")


def write_csv(path: Path, runs: Runs) -> None:
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("arm", "seed", "figure", "value"))
        for (arm, seed), found in sorted(runs.items()):
            rows.writerows((arm, seed, name, f"{value:.4f}") for name, value in found.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--arms", nargs="*", default=[""], help="parts of the names of the arms to run")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time, of one thread each")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds: to see that it works")
    parser.add_argument("--csv", type=Path)
    given = parser.parse_args()
    arms = [arm for arm in ARMS if arm == FIRST or any(part in arm for part in given.arms)]
    seeds = [int(seed) for seed in given.seeds.split(",")]
    rounds = QUICK_ROUNDS if given.quick else ROUNDS
    with ProcessPoolExecutor(given.jobs) as pool:
        futures = {(arm, seed): pool.submit(measured, arm, seed, rounds) for seed in seeds for arm in arms}
        runs = {}
        for key, future in futures.items():
            runs[key] = future.result()
            print(*key, {name: round(value, 1) for name, value in runs[key].items()}, file=sys.stderr, flush=True)
    Console(width=140).print(table(arms, seeds, runs))
    if given.csv:
        write_csv(given.csv, runs)


if __name__ == "__main__":
    main()
