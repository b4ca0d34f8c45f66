"""`tessera run compare`: several runs side by side, and the settings in which they differ."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Annotated, TypeVar

import typer
from rich.table import Table

from tessera.shared import units
from tessera.shared.cli.connection import client_of
from tessera.shared.client.lookup import find_run
from tessera.shared.client.run_comparison import compare_runs
from tessera.shared.client.run_versions import described
from tessera.shared.metrics.comparison import RunComparison, setting_text
from tessera.shared.terminal import output
from tessera.shared.terminal.output import AsJson, Reach

T = TypeVar("T")


def compare(
    ctx: typer.Context,
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Two runs or more, by id or name.")],
    metric: Annotated[
        str | None,
        typer.Option(
            help="The score to compare; by default the main score: accuracy, else loss, of own models if any."
        ),
    ] = None,
    reach: Reach = None,
    as_json: AsJson = False,
) -> None:
    """Compare runs: scores, bytes and seconds by version, the cost of a score, and the settings that differ."""
    client = client_of(ctx)
    found = compare_runs(client, [find_run(client, named) for named in runs], metric, reach or ())
    if as_json:
        output.print_json(asdict(found))
        return
    console = output.out()
    for table in tables(found):
        console.print(table)
        console.print()
    for warning in found.warnings:
        output.note(f"warning: {warning}")


def tables(found: RunComparison) -> Iterator[Table]:
    """Yield the tables of a comparison: the runs, the settings that differ, and a table by version for each of score,
    bytes and seconds."""
    columns = ("run", "id", "state", "version", "best version", "bytes", "seconds")
    rows = [
        (
            run.name,
            run.id,
            run.state,
            run.version,
            described(run.best) if run.best else None,
            units.size(_last(run.bytes)),
            output.seconds(_last(run.seconds)),
        )
        for run in found.runs
    ]
    yield output.table(columns, rows, right=("version", "bytes", "seconds"))
    names = [run.name for run in found.runs]
    if found.settings:
        shown = [
            (name, *(None if value is None else setting_text(value) for value in values))
            for name, values in found.settings.items()
        ]
        yield output.table(("settings that differ", *names), shown)
    if measured := [run for run in found.runs if run.convergence]:
        shown = [(run.name, *fact) for run in measured if run.convergence for fact in run.convergence.facts()]
        yield output.table(("run", "to reach", "took"), shown)
    if found.metric:
        yield _by_version(
            found, found.title or found.metric, [map(output.share, _at(found, run.scores)) for run in found.runs]
        )
    yield _by_version(found, "bytes so far", [map(units.size, _at(found, run.bytes)) for run in found.runs])
    yield _by_version(found, "seconds so far", [map(output.seconds, _at(found, run.seconds)) for run in found.runs])


def _at(found: RunComparison, values: Mapping[int, T]) -> Iterator[T | None]:
    return (values.get(number) for number in found.versions)


def _last(values: Mapping[int, T]) -> T | None:
    return values[max(values)] if values else None


def _by_version(found: RunComparison, title: str, columns: Iterable[Iterable[str | None]]) -> Table:
    names = [run.name for run in found.runs]
    table = output.table(("version", *names), zip(found.versions, *columns, strict=True), right=("version", *names))
    table.title, table.title_justify, table.title_style = title, "left", "bold"
    return table
