"""Which blocks drift, before and after a freeze: `python -m benchmarks.evidence.client_drift`.

The federation, the learning rate and the warm-up of F-t, for half of its rounds. Three arms of a seed are one run
until the freeze; then one trains on as before, one freezes queries and keys, and one freezes values. The fourth
trains all blocks at sites that are alike. The method measures the sites' steps, role by role. After a run, attention
on some phrases is compared with that at the freeze.

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

from benchmarks.document import write_block
from benchmarks.evidence import pool
from benchmarks.evidence.client_drift.report import lines
from benchmarks.evidence.client_drift.study import ARMS, TABLE, OneRun, Results, Study, run
from benchmarks.evidence.federations import NotPrepared, source
from benchmarks.evidence.plan import Plan
from benchmarks.evidence.plan import read as read_plan
from benchmarks.evidence.pool import Figures
from benchmarks.evidence.results_folder import file_of, keep
from benchmarks.evidence.runs import inputs_of
from benchmarks.evidence.sources.prepare import OUT as PREPARED

COMMAND = "python -m benchmarks.evidence.client_drift"
SAVED = Path(__file__).parents[1] / "results" / "client_drift.json"
OUT = Path("bench-output/client-drift")
REFUSED = 2


def depends_on(study: Study, inputs: str) -> dict[str, Any]:
    """Return what the figures of a run depend on, as it stands in its file."""
    return {"study": json.loads(json.dumps(asdict(study))), "inputs": inputs}


def figures_of(out: Path, one: OneRun, on: Mapping[str, Any]) -> Figures | None:
    """Return the figures of a finished run; None without one that depends on the same."""
    file = file_of(out, one.name)
    if not file.exists():
        return None
    figures: Figures = json.loads(file.read_bytes())
    return figures if all(figures.pop(name) == value for name, value in on.items()) else None


def finished(out: Path, study: Study, inputs: str) -> Results:
    """Return the figures of every finished run in the folder that is of this study and these inputs."""
    found: dict[str, list[Figures]] = {}
    for arm in ARMS:
        of_arm = (figures_of(out, OneRun(arm, seed), depends_on(study, inputs)) for seed in study.seeds)
        found[arm] = [figures for figures in of_arm if figures is not None]
    return found


def begin_with_saved(out: Path, saved: Path = SAVED) -> None:
    """Write the repository's runs into the folder, but for those that it has."""
    study, inputs, results = read(saved)
    for arm, each in results.items():
        for seed, figures in zip(study.seeds, each, strict=True):
            if not file_of(out, name := OneRun(arm, seed).name).exists():
                keep(out, name, {**depends_on(study, inputs), **figures})


def work(plan: Plan, study: Study, prepared: Path, out: Path, processes: int) -> dict[OneRun, str]:
    """Run what is not finished, several runs at the same time. Return the reason of each that failed.

    Raises NotPrepared.
    """
    on = depends_on(study, inputs_of(source(plan.tables[TABLE].federation), prepared))
    # All arms of a seed one after another: those that run at the same time are then of one seed.
    wanted = [OneRun(arm, seed) for seed in study.seeds for arm in ARMS]

    def left(begun: Collection[OneRun]) -> Iterator[OneRun]:
        return (one for one in wanted if one not in begun and figures_of(out, one, on) is None)

    def task(one: OneRun) -> tuple[Any, ...]:
        return run, plan, study, one, prepared, out

    def end(one: OneRun, figures: Figures) -> None:
        keep(out, one.name, {**on, **figures})
        print(one.name, file=sys.stderr, flush=True)

    return pool.work(left, task, end, processes)


def read(file: Path = SAVED) -> tuple[Study, str, Results]:
    """Return the repository's study, its inputs and its results."""
    saved = json.loads(file.read_bytes())
    study = Study(**{**saved["study"], "seeds": tuple(saved["study"]["seeds"])})
    return study, saved["inputs"], saved["arms"]


def write(file: Path, study: Study, inputs: str, results: Results) -> None:
    """Save the results of a study, which are all of its runs."""
    file.write_text(json.dumps({**depends_on(study, inputs), "arms": results}) + "\n", encoding="utf-8")


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
        study, _, results = read()
        print("\n".join(lines(study, results)))
        return 0
    study, plan = Study(), read_plan()
    begin_with_saved(given.out)
    try:
        failed = work(plan, study, given.prepared, given.out, given.processes)
    except NotPrepared as fault:
        print(fault, file=sys.stderr)
        return REFUSED
    if failed:
        print(f"{len(failed)} runs failed: {', '.join(one.name for one in failed)}", file=sys.stderr)
        return 1
    inputs = inputs_of(source(plan.tables[TABLE].federation), given.prepared)
    results = finished(given.out, study, inputs)
    if given.save:
        write(SAVED, study, inputs, results)
        write_block(COMMAND, lines(study, results))
    print("\n".join(lines(study, results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
