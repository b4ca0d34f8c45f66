"""Which blocks drift, before and after a freeze: `python -m evidence.client_drift`.

The federation, the learning rate and the warm-up of F-t, for half of its rounds. Three arms of a seed are one run
until the freeze; then one trains on as before, one freezes queries and keys, and one freezes values. The fourth
trains all blocks at sites that have their wording's labels in equal shares. The method measures the sites' steps,
role by role. After a run, attention on some phrases is compared with that at the freeze.

Each finished run is one JSON file in the output folder. Repeat the command to continue. A new folder begins with the
runs of the repository.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common.document import write_block
from common.files import alone
from evidence import pool
from evidence.client_drift.report import lines
from evidence.client_drift.study import ARMS, TABLE, OneRun, Results, Study, run
from evidence.federations import NotPrepared, source
from evidence.jobs import Job, setup_of
from evidence.plan import Plan
from evidence.plan import read as read_plan
from evidence.pool import Figures
from evidence.results_folder import file_of, keep, write
from evidence.runs import inputs_of
from evidence.sources.prepare import OUT as PREPARED

COMMAND = "python -m evidence.client_drift"
SAVED = Path(__file__).parents[1] / "results" / "client_drift.json"
OUT = Path("bench-output/client-drift")
REFUSED = 2


def depends_on(plan: Plan, study: Study, inputs: str) -> dict[str, Any]:
    """Return what the figures of runs depend on, as it stands in their files."""
    setups = {
        arm: setup_of(plan, Job(TABLE, setting, named, seed=1, rate=study.learning_rate))
        for arm, (named, setting) in ARMS.items()
    }
    return {"study": json.loads(json.dumps(asdict(study))), "inputs": inputs, "setups": setups}


def figures_of(out: Path, one: OneRun, on: Mapping[str, Any]) -> Figures | None:
    """Return the figures of a finished run; None without one that depends on the same."""
    file = file_of(out, one.name)
    if not file.exists():
        return None
    figures: Figures = json.loads(file.read_bytes())
    return figures if all(figures.pop(name, None) == value for name, value in on.items()) else None


def finished(out: Path, study: Study, on: Mapping[str, Any]) -> Results:
    """Return the figures of every finished run in the folder that depends on the same."""
    found: dict[str, list[Figures]] = {}
    for arm in ARMS:
        of_arm = (figures_of(out, OneRun(arm, seed), on) for seed in study.seeds)
        found[arm] = [figures for figures in of_arm if figures is not None]
    return found


def begin_with_saved(out: Path, on: Mapping[str, Any], saved: Path = SAVED) -> None:
    """Write the repository's runs into the folder, if they depend on the same, but for those that it has."""
    there = json.loads(saved.read_bytes())
    if {name: there[name] for name in on} != on:
        return
    for arm, each in there["arms"].items():
        for seed, figures in zip(there["study"]["seeds"], each, strict=True):
            if figures_of(out, one := OneRun(arm, seed), on) is None:
                keep(out, one.name, {**on, **figures})


def work(
    plan: Plan, study: Study, on: Mapping[str, Any], prepared: Path, out: Path, processes: int
) -> dict[OneRun, str]:
    """Run what is not finished, several runs at the same time. Return the reason of each that failed.

    Raises BlockingIOError if another process works in the folder.
    """
    # All arms of a seed one after another: those that run at the same time are then of one seed.
    wanted = [OneRun(arm, seed) for seed in study.seeds for arm in ARMS]

    def left(begun: Collection[OneRun]) -> Iterator[OneRun]:
        return (one for one in wanted if one not in begun and figures_of(out, one, on) is None)

    def task(one: OneRun) -> tuple[Any, ...]:
        return run, plan, study, one, prepared, out

    def end(one: OneRun, figures: Figures) -> None:
        keep(out, one.name, {**on, **figures})
        print(one.name, file=sys.stderr, flush=True)

    with alone(out):
        return pool.work(left, task, end, processes)


def read(file: Path = SAVED) -> tuple[Study, Results]:
    """Return the repository's study with its results."""
    saved = json.loads(file.read_bytes())
    study = Study(**{**saved["study"], "seeds": tuple(saved["study"]["seeds"])})
    return study, {arm: saved["arms"][arm] for arm in ARMS}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=COMMAND, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=1, help="runs at the same time")
    parser.add_argument("--prepared", type=Path, default=PREPARED, help="the folder of prepared models and data")
    parser.add_argument("--out", type=Path, default=OUT, help="the folder of results")
    does = parser.add_mutually_exclusive_group()
    does.add_argument("--report", action="store_true", help="print the repository's results, and run nothing")
    does.add_argument("--save", action="store_true", help="write the results to the repository and its document")
    given = parser.parse_args(arguments)
    if given.report:
        print("\n".join(lines(*read())))
        return 0
    study, plan = Study(), read_plan()
    try:
        on = depends_on(plan, study, inputs_of(source(plan.tables[TABLE].federation), given.prepared))
        begin_with_saved(given.out, on)
        failed = work(plan, study, on, given.prepared, given.out, given.processes)
    except NotPrepared as fault:
        print(fault, file=sys.stderr)
        return REFUSED
    except BlockingIOError:
        print(
            f"another process works in {given.out}: wait for it, or name another folder with --out", file=sys.stderr
        )
        return REFUSED
    if failed:
        print(f"{len(failed)} runs failed: {', '.join(one.name for one in failed)}", file=sys.stderr)
        return 1
    results = finished(given.out, study, on)
    if given.save:
        write(SAVED, {**on, "arms": results})
        write_block(COMMAND, lines(study, results))
    print("\n".join(lines(study, results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
