"""The tables of evidence, as evidence.toml states them: `python -m evidence`.

python -m evidence.sources.prepare         fetches models and data, once; the only step that downloads
python -m evidence --processes 2           all runs that are not finished; resumes after a kill at any time
python -m evidence --scope core --tables S-a --deadline 3600
python -m evidence --tables D-t --arms fedavg --seeds 11 12
python -m evidence --report                the tables of what is finished; starts no run
python -m evidence --save                  the finished runs into the repository, and its document
python -m evidence --check                 few arms, rounds and seeds: fails if a known direction flips

Each finished run is one JSON file in the output folder. Repeat the command to continue. A new folder begins with the
runs of the repository, so another machine goes on from there.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from statistics import fmean
from time import monotonic
from typing import Any

from common.files import alone
from evidence import pool, runs, store
from evidence.federations import NotPrepared, source
from evidence.gate import decided, shut
from evidence.jobs import Cell, Job, Selection, choices, left, startable
from evidence.plan import FILE, Plan, UnusablePlan, digest_of, read
from evidence.report.findings import Finding, directed, directions
from evidence.report.lines import lines
from evidence.report.section import write
from evidence.results_folder import RUNS, keep
from evidence.sources.prepare import OUT as PREPARED

OUT = Path("bench-output/tables")
CHECKED = Path("bench-output/check")
HOUR = 3600
REFUSED = 2


def work(
    plan: Plan,
    selection: Selection,
    prepared: Path,
    out: Path,
    device: str = "cpu",
    processes: int = 1,
    deadline: float = inf,
    rates: Mapping[Cell, float] | None = None,
) -> dict[Job, str]:
    """Run what is not finished, and start nothing after `deadline` seconds. Return the reason of each failed run.

    Raises NotPrepared, OtherInputs, and BlockingIOError if another process works in the folder.
    """
    began, found = monotonic(), store.finished(out, plan)
    for name in dict.fromkeys(table for table, *_ in selection.settings(plan)):
        store.check_inputs(found, name, runs.inputs_of(source(plan.tables[name].federation), prepared))
    scores = {job: figures["score"] for job, figures in found.items()}
    tuning, seconds = plan.protocol.tuning_seed, dict[tuple[str, bool], list[float]]()
    for job, figures in found.items():
        if figures["machine"] == runs.machine(device):
            seconds.setdefault((job.table, job.seed == tuning), []).append(figures["seconds"])

    def wanted(begun: Collection[Job]) -> Iterator[Job]:
        return startable(plan, selection, scores, begun, rates)

    def task(job: Job) -> tuple[Any, ...]:
        return runs.run, plan, job, prepared, out, device

    def end(job: Job, figures: pool.Figures) -> None:
        keep(out, job.name, figures)
        scores[job] = figures["score"]
        seconds.setdefault((job.table, job.seed == tuning), []).append(figures["seconds"])
        counts = left(plan, selection, scores, rates)
        about = f"{sum(counts.values())} left{time_left(counts, seconds, processes, plan.protocol.tuning_share)}"
        print(f"{job.name}: {figures['score']:.4f}, {figures['seconds']} s; {about}", file=sys.stderr, flush=True)

    with alone(out):
        # The versions of runs that were killed.
        shutil.rmtree(out / "scratch", ignore_errors=True)
        return pool.work(wanted, task, end, processes, over=lambda: monotonic() - began >= deadline)


def time_left(
    counts: Mapping[tuple[str, bool], int],
    seconds: Mapping[tuple[str, bool], list[float]],
    processes: int,
    tuning_share: float,
) -> str:
    """Return an estimate from the mean seconds of finished runs, or nothing if a table with runs left has none.

    `counts` and `seconds` are by table, and by whether a run chooses a rate, which takes a share of the rounds.
    """
    total = 0.0
    for (table, tunes), count in counts.items():
        own, other = seconds.get((table, tunes)), seconds.get((table, not tunes))
        if own:
            total += count * fmean(own)
        elif other:
            total += count * fmean(other) * (tuning_share if tunes else 1 / tuning_share)
        elif count:
            return ""
    return f", about {total / processes / HOUR:.1f} hours on {processes} processes"


def prepared_tables(plan: Plan, selection: Selection, prepared: Path) -> tuple[list[str], list[str]]:
    """Return the tables that can run, and those that lack something. Print what these lack, and which are void.

    A void table is in neither list: that is a result.
    """
    ready, lacking = [], []
    for name in plan.tables:
        if not selection.tables or name in selection.tables:
            gates = [table.gate_of(setting) for _, table, setting in replace(selection, tables=[name]).settings(plan)]
            if gates and all(shut(gate) for gate in gates):
                undecided = [gate for gate in gates if gate and not decided(gate)]
                lacking += [name] if undecided else []
                state = "cannot run" if undecided else "is void"
                print(f"{name} {state}: {shut((undecided or gates)[0])}", file=sys.stderr)
                continue
            try:
                source(plan.tables[name].federation).inputs(prepared)
                ready.append(name)
            except NotPrepared as fault:
                lacking.append(name)
                print(f"{name}: {fault}", file=sys.stderr)
    return ready, lacking


def check(full: Plan, prepared: Path, out: Path, selection: Selection, processes: int, saved: Path) -> int:
    """Run the short check and print its tables. Return the exit status: 1 if it did not pass or a run failed, 2 if a
    table lacks something.

    It begins with an empty folder: runs of other code would hide what this code does.
    """
    if (out / RUNS).exists():
        shutil.rmtree(out / RUNS)
    found = store.of_plan(full, store.loaded(saved))
    rates = choices(full, Selection(), {job: figures["score"] for job, figures in found.items()})
    plan = full.shortened()
    ready, lacking = prepared_tables(plan, selection, prepared)
    if lacking or not ready:
        return REFUSED if lacking else 0
    chosen = Selection("core", ready, selection.arms)
    # Where no rate was chosen yet, the middle one of those tried first.
    middle = {
        (name, table.settings[0].name, arm.name): plan.ladder(arm).first[len(plan.ladder(arm).first) // 2]
        for name, table in plan.tables.items()
        for arm in table.arms
    }
    failed = work(plan, chosen, prepared, out, processes=processes, rates={**middle, **rates})
    short = store.finished(out, plan)
    for line in lines(plan, short, tables=ready):
        print(line)
    return 0 if passed(directed(full, found), plan, short) and not failed else 1


def passed(known: Sequence[Finding], plan: Plan, found: store.Found) -> bool:
    """Print what became of each known direction in the short check. Return whether no run diverged and all directions
    that it compared are kept."""
    seen, diverged = directions(known, plan, found), [job for job, run in found.items() if run.get("diverged")]
    print()
    for each in seen:
        print(f"{'Same direction' if each.is_kept else 'FLIPPED'}: {each}")
    for other in known:
        if other not in [each.known for each in seen]:
            print(f"Not compared: {other.claim.name}, without runs of both arms")
    for job in diverged:
        print(f"DIVERGED: {job.name}")
    return not diverged and all(each.is_kept for each in seen)


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m evidence",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--plan", type=Path, default=FILE, help="the file of tables, arms, grids and claims")
    parser.add_argument("--prepared", type=Path, default=PREPARED, help="the folder of prepared models and data")
    parser.add_argument("--out", type=Path, help=f"the folder of results: {OUT}, or {CHECKED} for --check")
    parser.add_argument("--saved", type=Path, default=store.SAVED, help="the folder of the repository's results")
    parser.add_argument(
        "--scope",
        choices=["core", "headlines", "full", "gpu"],
        default="full",
        help="core: one setting and the main arms; headlines: the arms of headline claims, with all their seeds",
    )
    parser.add_argument("--tables", nargs="+", default=(), help="only these tables")
    parser.add_argument("--arms", nargs="+", default=(), help="only these arms")
    parser.add_argument("--seeds", nargs="+", type=int, default=(), help="only rows of these seeds")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N, which all processes share")
    parser.add_argument("--processes", type=int, default=1, help="runs at the same time")
    parser.add_argument("--deadline", type=float, default=inf, help="seconds after which no run starts")
    does = parser.add_mutually_exclusive_group()
    does.add_argument("--report", action="store_true", help="print the tables of finished runs, and start none")
    does.add_argument("--save", action="store_true", help="write finished runs and the document, and start none")
    does.add_argument("--check", action="store_true", help="the short check")
    return parser


def go_on(plan: Plan, given: argparse.Namespace, out: Path) -> int:
    """Run what is asked for and can run, and print the report. Return the command's exit status."""
    ready, lacking = prepared_tables(plan, Selection(given.scope, given.tables), given.prepared)
    failed: dict[Job, str] = {}
    if ready:
        selection = Selection(given.scope, ready, given.arms, given.seeds)
        failed = work(plan, selection, given.prepared, out, given.device, given.processes, given.deadline)
    show(plan, given, out)
    return 1 if failed else REFUSED if lacking else 0


def show(plan: Plan, given: argparse.Namespace, out: Path) -> None:
    """Print the tables of finished runs."""
    print(f"Plan {given.plan.name}, {digest_of(given.plan)}")
    for line in lines(plan, store.finished(out, plan), tables=given.tables):
        print(line)


def save(plan: Plan, given: argparse.Namespace, out: Path) -> None:
    """Write the finished runs into the folder of saved results; of the repository's plan, the document too."""
    for file in store.save(out, plan, given.saved):
        print(file)
    if (given.plan, given.saved) == (FILE, store.SAVED):
        write(plan, store.of_plan(plan, store.loaded()), digest_of(), repeated=store.repeated(plan))


def main(arguments: list[str] | None = None) -> int:
    parser = options()
    given = parser.parse_args(arguments)
    try:
        plan, out = read(given.plan), given.out or (CHECKED if given.check else OUT)
        if unknown := sorted({*given.tables} - set(plan.tables)):
            parser.error(f"no table is called {', '.join(unknown)}; there are {', '.join(plan.tables)}")
        arms = dict.fromkeys(arm.name for table in plan.tables.values() for arm in table.arms)
        if unknown := sorted({*given.arms} - set(arms)):
            parser.error(f"no arm is called {', '.join(unknown)}; there are {', '.join(arms)}")
        if given.check:
            selection = Selection("core", given.tables, given.arms)
            return check(plan, given.prepared, out, selection, given.processes, given.saved)
        store.begin_with_saved(out, plan, given.saved)
        if not (given.report or given.save):
            return go_on(plan, given, out)
        (save if given.save else show)(plan, given, out)
    except (UnusablePlan, NotPrepared, store.OtherInputs) as fault:
        print(fault, file=sys.stderr)
        return REFUSED
    except BlockingIOError:
        print(f"another process works in {out}: wait for it, or name another folder with --out", file=sys.stderr)
        return REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main())
