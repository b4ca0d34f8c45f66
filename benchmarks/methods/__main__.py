"""One table of all methods: `python -m benchmarks.methods`, or `make bench-methods`.

Each cell is a method on a task, by `tessera simulate` in a process of its own, with the same rounds, epochs and
seeds. The learning rate of each kind of training (`arms.KINDS`) is chosen on other data. Figures are written to
`benchmarks/methods/table.json` after each cell, and into docs/which-method.md and docs/method-table.md at the end.
Repeat a stopped command to resume: a cell is kept while its settings and the code are the same.

python -m benchmarks.methods --tasks text --methods fedavg lora      some cells
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.measuring import machine
from benchmarks.methods.arms import ARMS, KINDS, MODELS, Arm
from benchmarks.methods.cells import Budget, choose, measure, prepare
from benchmarks.methods.tasks import TASKS
from docs import method_table
from tessera.examples.processes import ROOT

TABLE = Path(__file__).with_name("table.json")
QUICK = Budget(rounds=2, rates=1, seeds=(0,), steps=2)
QUICK_ROWS = ("lora, `factors`", "promptfl")
PACKAGES = ("tessera-fl", "torch", "transformers", "peft", "scikit-learn", "numpy")

T = TypeVar("T")


def apart(work: Callable[..., T], *given: Any) -> T:
    """Call a function in a process of its own, which begins with its imports."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.methods.cells", "tessera.simulation", "peft", "scipy.stats"])
    with ProcessPoolExecutor(1, context) as processes:
        return processes.submit(work, *given).result()


def code_digest() -> str:
    """Return a digest of the code that decides a cell's figures."""
    files = [file for part in ("shared", "worker") for file in sorted((ROOT / part).rglob("*.py"))]
    files += [Path(__file__).with_name(f"{name}.py") for name in ("cells", "tasks")]
    found = hashlib.sha256()
    for file in files:
        found.update(file.read_bytes())
    return found.hexdigest()[:16]


def rows(task: str) -> list[Arm]:
    return [arm for arm in ARMS if arm.method in TASKS[task].methods and task in (arm.tasks or TASKS)]


@dataclass(frozen=True)
class Measuring:
    """A table in the making, as the file has it, and the folder of what cells share."""

    file: Path
    folder: Path
    budget: Budget
    found: dict[str, Any]
    code: str = field(default_factory=code_digest)

    def task(self, name: str) -> dict[str, Any]:
        known = TASKS[name]
        entry: dict[str, Any] = self.found.setdefault("tasks", {}).setdefault(name, {"rates": {}, "cells": {}})
        entry |= {"about": known.about, "metric": known.metric, "rows": [arm.name for arm in rows(name)]}
        return entry

    def add(self, task: str, arm: Arm, *, again: bool) -> None:
        """Measure a cell, unless the file has it."""
        cells = self.task(task)["cells"]
        rate = self.rate(task, arm.kind, again=again)
        key = self._digest(task, arm, rate)
        if again or cells.get(arm.name, {}).get("digest") != key:
            made = apart(measure, self._prepared(task), task, arm, rate, self.budget)
            cells[arm.name] = {"digest": key, "rate": rate, **made}
            self._write()
            print(f"{task}: {arm.name}: {method_table.brief(made)}", flush=True)

    def rate(self, task: str, name: str, *, again: bool) -> float:
        """Return the best learning rate of a kind of training, measured unless the file has it."""
        kind, known = KINDS[name], self.task(task)["rates"]
        by = next(arm for arm in ARMS if arm.name == kind.by)
        rates = kind.rates[: self.budget.rates]
        key = self._digest(task, by, *rates)
        if again or known.get(name, {}).get("digest") != key:
            tried = apart(choose, self._prepared(task), task, by, rates, self.budget) if len(rates) > 1 else {}
            best = max(tried, key=lambda rate: tried[rate]) if tried else rates[0]
            scores = {f"{rate:g}": score for rate, score in tried.items()}
            known[name] = {"digest": key, "chosen": best, "tried": scores}
            self._write()
        return float(known[name]["chosen"])

    def _prepared(self, task: str) -> Path:
        folder = self.folder / task
        if not folder.exists():
            apart(prepare, folder, task, self.budget)
        return folder

    def _digest(self, task: str, arm: Arm, *rates: float) -> str:
        given = json.dumps([self.code, task, asdict(arm), MODELS[arm.model], rates, asdict(self.budget)])
        return hashlib.sha256(given.encode()).hexdigest()[:16]

    def _write(self) -> None:
        versions = {name: version(name) for name in PACKAGES}
        self.found.update(
            budget=asdict(self.budget),
            packages=versions,
            machine={**machine(), "processor": _processor()},
        )
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps(self.found, indent=1) + "\n", encoding="utf-8")


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = (line.partition(": ")[2] for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.methods",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--methods", nargs="+", default=[], metavar="NAME", help="methods, or rows of the table")
    parser.add_argument("--work", type=Path, help="keep models and data here, for the next command")
    parser.add_argument("--again", action="store_true", help="also measure cells that are known")
    parser.add_argument("--page", action="store_true", help="measure nothing, and write the page from the file")
    parser.add_argument("--quick", action="store_true", help="a tiny cell for each task: to see that it works")
    parser.add_argument("--out", type=Path, help="the file of figures; with it the page is left as it is")
    given = parser.parse_args(arguments)
    file = given.out or TABLE
    os.environ["TESSERA_METHODS"] = str(ROOT / "benchmarks" / "own_methods")
    found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if not given.page:
        with tempfile.TemporaryDirectory(prefix="tessera-methods-") as name:
            table = Measuring(file, given.work or Path(name), QUICK if given.quick else Budget(), found)
            methods = QUICK_ROWS if given.quick else given.methods
            for task in given.tasks:
                for arm in rows(task):
                    if not methods or {arm.name, arm.method} & {*methods}:
                        table.add(task, arm, again=given.again)
    print(method_table.details(found))
    if file == TABLE:
        method_table.write(found)


if __name__ == "__main__":
    main()
