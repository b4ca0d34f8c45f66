"""`tessera simulate`: a whole federation in this process, for research and for trying methods out."""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any

import typer

from tessera.shared.cli.export import in_place_of
from tessera.shared.cli.render import output
from tessera.shared.cli.render.metric_tables import headlines
from tessera.shared.cli.render.output import AsJson
from tessera.shared.cli.render.watch import print_ended, print_ended_as_json
from tessera.shared.metrics.site_spread import spreads
from tessera.shared.problems import Invalid
from tessera.shared.updates.model_folder import ModelFolder
from tessera.worker.settings import SettingsError
from tessera.worker.simulation import Result, Stalled, simulate
from tessera.worker.simulation.config import SimulationFile, read_file

BAD_SETTINGS = 2
STALLED = 3
INTERRUPTED = 130

MEASUREMENTS = "measurements.csv"
MODEL = "model"
SUMMARY = "summary.json"

app = typer.Typer(add_completion=False)


def _whole_numbers(text: str | None) -> list[int] | None:
    if text is None:
        return None
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
        Path | None, typer.Option(help="The model folder to start from, if not the file's `model`.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where all goes, and from where it goes on; FILE-output if left out.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Changes a setting, e.g. simulation.sites=4."),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="Runs once for each seed; prints mean and deviation.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run a whole federation in this process, with the results that it would have over HTTP, bit for bit.

    Started again with the same settings, one that was stopped goes on. Exit code 0: done, 1: refused, 2: wrong usage,
    3: a round could not reach its quorum.
    """
    wanted_seeds = _whole_numbers(seeds)
    wanted = read_file(file, settings or [])
    start = _start(file, model or wanted.model)
    folder = out or Path(f"{file.stem}-output")
    with _told():
        if wanted_seeds is None:
            results = {int(wanted.spec.get("seed", 0)): _run(wanted, start, folder, {}, as_json=as_json)}
        else:
            results = {
                seed: _run(wanted, start, folder / f"seed-{seed}", {"seed": seed}, as_json=as_json)
                for seed in wanted_seeds
            }
    _conclude(results, as_json=as_json)


def _start(file: Path, model: Path | None) -> ModelFolder:
    if model is None:
        remedy = "Make one with `tessera model init`, and name it there or with --model."
        raise Invalid(f"{file} names no model to start from", remedy=remedy)
    return ModelFolder.open(model)


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except SettingsError as fault:
        output.complain(f"simulation.{fault}")
        raise typer.Exit(BAD_SETTINGS) from fault
    except Stalled as fault:
        output.complain(str(fault))
        raise typer.Exit(STALLED) from fault
    except KeyboardInterrupt:
        output.note("stopped; the same command goes on from here")
        raise typer.Exit(INTERRUPTED) from None


def _run(
    wanted: SimulationFile, start: ModelFolder, folder: Path, changed: Mapping[str, Any], *, as_json: bool
) -> Result:
    """Return one simulation from its beginning, or from where it was stopped, and what is written of it."""
    spec = {**wanted.spec, **changed}
    sites, test = wanted.table.population(int(spec.get("seed", 0))), wanted.table.central()
    output.note(f"{len(sites)} sites in {folder}")
    tell = print_ended_as_json if as_json else partial(print_ended, output.out())
    result = simulate(
        spec,
        start,
        sites,
        test=test,
        conditions=wanted.table,
        out=folder,
        watch=tell,
    )
    result.write_measurements(folder / MEASUREMENTS)
    with in_place_of(folder / MODEL) as made:
        result.export(made, like=start.path)
        shutil.rmtree(folder / MODEL, ignore_errors=True)
        made.rename(folder / MODEL)
    with in_place_of(folder / SUMMARY) as made:
        made.write_text(json.dumps(_summary(result, folder), indent=1) + "\n", encoding="utf-8")
        made.replace(folder / SUMMARY)
    return result


def _summary(result: Result, folder: Path) -> dict[str, Any]:
    """Return what the last version came to, and what it cost."""
    last, outcomes = result.versions[-1], result.outcomes
    at_sites = spreads(result.measurements).get(last.number, {})
    return {
        "name": result.spec.name,
        "method": result.spec.method.name,
        "seed": result.spec.seed,
        "version": last.number,
        "digest": last.digest,
        "scores": result.scores().get(last.number, {}),
        "sites": {name: asdict(spread) for name, spread in at_sites.items()},
        "scalars": last.scalars,
        "warnings": last.warnings,
        "download_bytes": sum(outcome.download_bytes for outcome in outcomes),
        "upload_bytes": sum(outcome.upload_bytes for outcome in outcomes),
        "seconds": sum(outcome.seconds() or 0.0 for outcome in outcomes),
        "model": str(folder / MODEL),
        "measurements": str(folder / MEASUREMENTS),
    }


# ---------------------------------------------------------------- over seeds


def _conclude(results: Mapping[int, Result], *, as_json: bool) -> None:
    """Print the metrics of the last versions, for each seed and over all seeds."""
    figures = [_figures(result) for result in results.values()]
    names = [name for name in figures[0] if all(name in found for found in figures)]
    by_name = {name: [found[name] for found in figures] for name in names}
    if as_json:
        runs = [_summary(result, result.folder) for result in results.values()]
        over = {name: {"mean": fmean(found), "deviation": _deviation(found)} for name, found in by_name.items()}
        output.print_json({"event": "end", "runs": runs, "over_seeds": over}, line=True)
        return
    console = output.out()
    columns = ("at the end", *(f"seed {seed}" for seed in results), "mean", "deviation")
    rows = [_row(name, found) for name, found in by_name.items()]
    shown = columns if len(results) > 1 else columns[:2]
    console.print(output.table(shown, [row[: len(shown)] for row in rows], right=shown[1:]))
    for result in results.values():
        console.print(f"{result.folder}: {MODEL}, {MEASUREMENTS} and {SUMMARY}", soft_wrap=True, markup=False)


def _figures(result: Result) -> dict[str, float]:
    """Return what tells most of the last version, by the words that people read."""
    last = result.versions[-1].number
    figures = dict(result.scores().get(last, {}))
    at_sites = spreads(result.measurements).get(last, {})
    for name in headlines(at_sites):
        figures |= {f"{name} (mean of sites)": at_sites[name].mean, f"{name} (worst site)": at_sites[name].worst}
    moved = result.outcomes
    figures["megabytes down"] = sum(outcome.download_bytes for outcome in moved) / 1e6
    figures["megabytes up"] = sum(outcome.upload_bytes for outcome in moved) / 1e6
    return figures


def _row(name: str, found: Sequence[float]) -> tuple[str | None, ...]:
    deviation = _deviation(found)
    told = None if deviation is None else f"{deviation:.4f}"
    return (name.replace("_", " "), *(f"{value:.4f}" for value in found), f"{fmean(found):.4f}", told)


def _deviation(found: Sequence[float]) -> float | None:
    """Return the standard deviation of a sample; None of one."""
    return stdev(found) if len(found) > 1 else None
