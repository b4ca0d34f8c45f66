"""`tessera simulate`: a whole federation in this process, for research and for trials of methods."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from tessera.shared.client.export import in_place_of
from tessera.shared.client.round_outcomes import RoundOutcome
from tessera.shared.lazy_import import DeferredModule
from tessera.shared.metrics.convergence import levels_of
from tessera.shared.problems import Invalid
from tessera.shared.telemetry.logging import configure
from tessera.shared.terminal import output
from tessera.shared.terminal.failures import MAX_SHOWN, print_failures
from tessera.shared.terminal.output import AsJson, Reach
from tessera.shared.terminal.watch import print_ended, print_ended_as_json
from tessera.shared.updates.model_folder import ModelFolder
from tessera.simulation.checkpoint import claim
from tessera.simulation.cli import sweep
from tessera.simulation.config import SimulationFile, SimulationTable, read_file
from tessera.simulation.summary import (
    MEASUREMENTS,
    MODEL,
    SUMMARY,
    figures_of,
    not_in_all,
    remarks_on,
    summary_of,
)
from tessera.worker.cli.exits import BAD_SETTINGS, INTERRUPTED, fail
from tessera.worker.settings import SettingsError
from tessera.worker.state.atomic_files import alone_or

if TYPE_CHECKING:
    from tessera import simulation
else:
    simulation = DeferredModule("tessera.simulation")

STALLED = 3

app = typer.Typer(add_completion=False)


def _distinct_seeds(text: str) -> list[int]:
    try:
        seeds = [int(part) for part in text.split(",")]
    except ValueError:
        seeds = []
    if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise typer.BadParameter(f"{text!r} is no list of different whole numbers, such as 0,1,2")
    return seeds


@app.command(name="simulate")
def command(
    file: Annotated[
        Path, typer.Argument(metavar="FILE.toml", help="A run's settings, with a model and a table `simulation`.")
    ],
    model: Annotated[
        Path | None, typer.Option(help="The model folder to start from; by default the file's `model`.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The folder for all results, and to resume from; by default FILE-output.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a setting, e.g. simulation.sites=4."),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="Run once for each seed, and print mean and deviation.")
    ] = None,
    reach: Reach = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE,VALUE,...", help="Run once for each value, and each combination of several --vary."
        ),
    ] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Simulations of --vary at the same time; by default one for each core.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run a whole federation in this process, by the code that runs over HTTP; with --vary or a table `sweep` many.

    The same command resumes a stopped simulation. Exit code 0: done, 1: refused or, of many, one failed, 2: wrong
    usage, 3: a round could not reach its quorum.
    """
    changes: list[dict[str, int]] = [{"seed": seed} for seed in _distinct_seeds(seeds)] if seeds is not None else [{}]
    # Lower levels of the tasks' logs are of use at a worker. Unless configured, it would go to stdout.
    configure(sys.stderr, console=sys.stderr.isatty(), level=logging.WARNING)
    wanted = read_file(file, settings or [], output.note)
    levels_of("", 0.0, reach or ())
    if (source := model or wanted.model) is None:
        remedy = "Make one with `tessera model init`, and name it there or with --model."
        raise Invalid(f"{file} names no model to start from", remedy=remedy)
    start = ModelFolder.open(source)
    folder = out or Path(f"{file.stem}-output")
    if vary or wanted.sweep:
        given, kept = (wanted.sweep.vary, wanted.sweep.seeds) if wanted.sweep else ({}, ())
        chosen = [change["seed"] for change in changes if change] or kept
        varied = sweep.varied(vary or (), given)
        with _ends():
            _sweep(
                file, wanted, settings or [], varied, chosen, start, folder, processes, reach or (), as_json=as_json
            )
        return
    if processes is not None:
        remedy = "Set simulation.processes for the processes of one simulation."
        raise Invalid("--processes is about the simulations of --vary, which is not given", remedy=remedy)
    specs = [{**wanted.spec, **change} for change in changes]
    folders = [folder / f"seed-{spec['seed']}" if seeds is not None else folder for spec in specs]
    for own in folders:
        _require_other_model(start, own)
    results = {}
    with _ends():
        for spec, own in zip(specs, folders, strict=True):
            output.note(f"{len(wanted.table.names)} sites in {own}")
            complete = (own / SUMMARY).exists()
            watch = print_ended_as_json if as_json else partial(print_ended, output.out())
            results[int(spec.get("seed", 0))] = _run(wanted.table, spec, start, own, watch, reach or ())
            if complete:
                again = "To run it again, remove it or give another --out."
                output.note(f"{own} was complete, and nothing was computed. {again}")
    _conclude(results, reach or (), as_json=as_json)


@contextmanager
def _ends() -> Iterator[None]:
    """Exit with the code of the fault that ended simulations early."""
    try:
        yield
    except SettingsError as fault:
        fail(f"simulation.{fault}", BAD_SETTINGS)
    except simulation.Stalled as fault:
        fail(str(fault), STALLED)
    except KeyboardInterrupt:
        output.note("stopped; the same command resumes")
        raise typer.Exit(INTERRUPTED) from None


def _require_other_model(start: ModelFolder, folder: Path) -> None:
    """Raise Invalid if the last version would replace the model that the simulation starts from."""
    result = folder / MODEL
    if start.path.resolve().is_relative_to(result.resolve()):
        raise Invalid(
            f"the simulation starts from {start.path}, and its result {result} would replace that",
            remedy="Choose another --out, or move the model.",
        )


def _run(
    table: SimulationTable,
    spec: Mapping[str, Any],
    start: ModelFolder,
    folder: Path,
    watch: Callable[[RoundOutcome], None],
    reach: Sequence[float],
) -> simulation.Result:
    """Run or resume one simulation, write its results to the folder, and return them."""
    sites, test = table.population(int(spec.get("seed", 0))), table.central()
    result = simulation.simulate(spec, start, sites, test=test, conditions=table, out=folder, watch=watch)
    result.write_measurements(folder / MEASUREMENTS, reach)
    with in_place_of(folder / MODEL) as made:
        result.export(made, like=start.path)
        shutil.rmtree(folder / MODEL, ignore_errors=True)
        made.rename(folder / MODEL)
    with in_place_of(folder / SUMMARY) as made:
        made.write_text(json.dumps(summary_of(result, reach), indent=1) + "\n", encoding="utf-8")
        made.replace(folder / SUMMARY)
    return result


# ---------------------------------------------------------------- sweeps


def _sweep(
    file: Path,
    base: SimulationFile,
    settings: Sequence[str],
    vary: Mapping[str, Sequence[Any]],
    seeds: Sequence[int],
    start: ModelFolder,
    folder: Path,
    processes: int | None,
    reach: Sequence[float],
    *,
    as_json: bool,
) -> None:
    """Run a simulation for each combination and seed, and write the table over them. Exit code 1 if one failed."""
    seeds = seeds or [int(base.spec.get("seed", 0))]
    files, model = sweep.checked(file, settings, sweep.combinations(vary), start, seeds[0])
    jobs = [sweep.Job(one, seed, folder / one.folder / f"seed-{seed}") for one in files for seed in seeds]
    for job in jobs:
        _require_other_model(start, job.folder)
    failed: dict[sweep.Job, str] = {}

    def run(job: sweep.Job) -> None:
        each = files[job.combination]
        table = each.table.model_copy(update={"threads": each.table.threads or 1})
        _run(table, {**each.spec, "seed": job.seed}, start, job.folder, lambda _: None, reach)

    def ended(job: sweep.Job, done: int, reason: str | None) -> None:
        if reason:
            failed[job] = reason
        if as_json:
            output.print_json({"event": "simulation", "name": job.name, "failure": reason}, line=True)
        else:
            output.note(f"{done} of {len(jobs)}: {job.name}: {f'failed: {reason}' if reason else 'done'}")

    def refuse(reason: str) -> Invalid:
        return Invalid(reason, remedy="Choose another --out, or wait until this one is free.")

    folder.mkdir(parents=True, exist_ok=True)
    with alone_or(refuse, folder):
        table = base.table.model_dump(
            mode="json", exclude={"device", "threads", "processes", "loaded", "keep_versions"}
        )
        identity = {"spec": dict(base.spec), "simulation": table, "model": model, "vary": sorted(vary)}
        claim(folder / sweep.IDENTITY, identity, "a sweep")
        count = processes or _processes(base.table)
        finished = sum((job.folder / SUMMARY).exists() for job in jobs)
        output.note(f"{len(jobs)} simulations in {folder}, {finished} of them finished before; {count} at a time")
        sweep.work(jobs, run, count, ended)
        found = sweep.SweepResults.of(vary, jobs, failed, reach)
        written = ", ".join(found.write(folder))
    if as_json:
        output.print_json({"event": "end", **found.document()}, line=True)
    else:
        output.out().print(f"{found.markdown()}\n{folder}: {written}", soft_wrap=True, markup=False)
    for job, reason in failed.items():
        output.complain(f"{job.name}: {reason}")
    if failed:
        raise typer.Exit(1)


def _processes(table: SimulationTable) -> int:
    """Return the number of a table's simulations that have cores of their own; a GPU is not shared."""
    cores = len(os.sched_getaffinity(0))
    return max(1, cores // ((table.threads or 1) * table.processes)) if table.device == "cpu" else 1


# ---------------------------------------------------------------- over seeds


def _conclude(results: Mapping[int, simulation.Result], reach: Sequence[float], *, as_json: bool) -> None:
    """Print the metrics of the last versions, for each seed and over all seeds."""
    runs = [summary_of(result, reach) for result in results.values()]
    figures = [figures_of(run) for run in runs]
    lacking = not_in_all(figures)
    names = [name for name in figures[0] if name not in lacking]
    if lacking:
        output.note(f"not measured with every seed, and left out: {', '.join(lacking)}")
    for remark in dict.fromkeys(remark for run in runs for remark in remarks_on(run)):
        output.note(remark)
    by_name = {name: [found[name] for found in figures] for name in names}
    if as_json:
        over = {name: {"mean": fmean(found), "deviation": _deviation(found)} for name, found in by_name.items()}
        output.print_json({"event": "end", "runs": runs, "over_seeds": over}, line=True)
        return
    console = output.out()
    columns = ("at the end", *(f"seed {seed}" for seed in results), "mean", "deviation")
    rows = []
    for name, found in by_name.items():
        deviation = _deviation(found)
        spread = (f"{fmean(found):.4f}", None if deviation is None else f"{deviation:.4f}")
        rows.append((name.replace("_", " "), *(f"{value:.4f}" for value in found), *spread))
    shown = columns if len(results) > 1 else columns[:2]
    console.print(output.table(shown, [row[: len(shown)] for row in rows], right=shown[1:]))
    for result, run in zip(results.values(), runs, strict=True):
        if converged := result.history.convergence(reach):
            console.print(output.table(("", ""), list(converged.facts())))
        _print_failed(console, result, run["unmeasured"])
        console.print(f"{result.folder}: {MODEL}, {MEASUREMENTS} and {SUMMARY}", soft_wrap=True, markup=False)


def _print_failed(console: Console, result: simulation.Result, unmeasured: Sequence[Mapping[str, Any]]) -> None:
    """Print why tasks failed. Workers that `dropout` keeps silent have no reason, and are no failures."""
    failed = [made.model_copy(update={"tasks": tuple(t for t in made.tasks if t.problem)}) for made in result.rounds]
    print_failures(console, failed)
    versions: dict[tuple[str, ...], list[int]] = {}
    for one in unmeasured:
        versions.setdefault((one["worker"], one["reason"], one["remedy"]), []).append(one["version"])
    if versions:
        console.print("\n[bold]not measured[/]")
    for (worker, reason, remedy), numbers in list(versions.items())[:MAX_SHOWN]:
        several = f"versions {numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else f"version {numbers[0]}"
        for line in (f"{several}  {worker}  {reason}", f"  {remedy}"):
            console.print(line, soft_wrap=True, markup=False)
    if len(versions) > MAX_SHOWN:
        console.print(f"and {len(versions) - MAX_SHOWN} more, which {SUMMARY} has")


def _deviation(found: Sequence[float]) -> float | None:
    """Return the standard deviation of a sample, or None of a single value."""
    return stdev(found) if len(found) > 1 else None
