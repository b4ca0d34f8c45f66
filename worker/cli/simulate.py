"""`tessera simulate`: a whole federation in this process, for research and for trials of methods."""

from __future__ import annotations

import json
import logging
import shutil
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from tessera.shared.cli.export import in_place_of
from tessera.shared.cli.lazy_import import Deferred
from tessera.shared.cli.render import output
from tessera.shared.cli.render.failures import MAX_SHOWN, print_failures
from tessera.shared.cli.render.output import AsJson
from tessera.shared.cli.render.watch import print_ended, print_ended_as_json
from tessera.shared.problems import Invalid
from tessera.shared.telemetry.logging import configure
from tessera.shared.updates.model_folder import ModelFolder
from tessera.worker.cli.exits import BAD_SETTINGS, INTERRUPTED, fail
from tessera.worker.settings import SettingsError
from tessera.worker.simulation.config import SimulationFile, read_file
from tessera.worker.simulation.summary import (
    MEASUREMENTS,
    MODEL,
    SUMMARY,
    figures_of,
    not_in_all,
    remarks_on,
    summary_of,
)

if TYPE_CHECKING:
    from tessera.worker import simulation
else:
    simulation = Deferred("tessera.worker.simulation")

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
    as_json: AsJson = False,
) -> None:
    """Run a whole federation in this process, by the code that runs over HTTP.

    The same command resumes a stopped simulation. Exit code 0: done, 1: refused, 2: wrong usage, 3: a round could not
    reach its quorum.
    """
    changes: list[dict[str, int]] = [{"seed": seed} for seed in _distinct_seeds(seeds)] if seeds is not None else [{}]
    # What the tasks log at lower levels is of use at a worker. Unless configured, it would go to stdout.
    configure(sys.stderr, console=sys.stderr.isatty(), level=logging.WARNING)
    wanted = read_file(file, settings or [])
    if (source := model or wanted.model) is None:
        remedy = "Make one with `tessera model init`, and name it there or with --model."
        raise Invalid(f"{file} names no model to start from", remedy=remedy)
    start = ModelFolder.open(source)
    folder = out or Path(f"{file.stem}-output")
    specs = [{**wanted.spec, **change} for change in changes]
    folders = [folder / f"seed-{spec['seed']}" if seeds is not None else folder for spec in specs]
    for own in folders:
        _require_other_model(start, own)
    results = {}
    try:
        for spec, own in zip(specs, folders, strict=True):
            results[int(spec.get("seed", 0))] = _run(wanted, spec, start, own, as_json=as_json)
    except SettingsError as fault:
        fail(f"simulation.{fault}", BAD_SETTINGS)
    except simulation.Stalled as fault:
        fail(str(fault), STALLED)
    except KeyboardInterrupt:
        output.note("stopped; the same command resumes")
        raise typer.Exit(INTERRUPTED) from None
    _conclude(results, as_json=as_json)


def _require_other_model(start: ModelFolder, folder: Path) -> None:
    """Raise Invalid if the last version would replace the model that the simulation starts from."""
    result = folder / MODEL
    if start.path.resolve().is_relative_to(result.resolve()):
        raise Invalid(
            f"the simulation starts from {start.path}, and its result {result} would replace that",
            remedy="Choose another --out, or move the model.",
        )


def _run(
    wanted: SimulationFile, spec: Mapping[str, Any], start: ModelFolder, folder: Path, *, as_json: bool
) -> simulation.Result:
    """Run or resume one simulation, write its results to the folder, and return them."""
    sites, test = wanted.table.population(int(spec.get("seed", 0))), wanted.table.central()
    output.note(f"{len(sites)} sites in {folder}")
    watch = print_ended_as_json if as_json else partial(print_ended, output.out())
    complete = (folder / SUMMARY).exists()
    result = simulation.simulate(spec, start, sites, test=test, conditions=wanted.table, out=folder, watch=watch)
    if complete:
        output.note(
            f"{folder} was complete, and nothing was computed. To run it again, remove it or give another --out."
        )
    result.write_measurements(folder / MEASUREMENTS)
    with in_place_of(folder / MODEL) as made:
        result.export(made, like=start.path)
        shutil.rmtree(folder / MODEL, ignore_errors=True)
        made.rename(folder / MODEL)
    with in_place_of(folder / SUMMARY) as made:
        made.write_text(json.dumps(summary_of(result), indent=1) + "\n", encoding="utf-8")
        made.replace(folder / SUMMARY)
    return result


# ---------------------------------------------------------------- over seeds


def _conclude(results: Mapping[int, simulation.Result], *, as_json: bool) -> None:
    """Print the metrics of the last versions, for each seed and over all seeds."""
    runs = [summary_of(result) for result in results.values()]
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
