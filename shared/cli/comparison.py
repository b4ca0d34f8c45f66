"""`tessera run compare`: several runs side by side, and the settings in which they differ."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, TypeVar

import typer
from rich.table import Table

from tessera.shared.api.runs import Run
from tessera.shared.cli.connection import client_of, find_run
from tessera.shared.cli.render import output
from tessera.shared.cli.render.output import AsJson, Reach
from tessera.shared.cli.versions import described
from tessera.shared.client.client import Client
from tessera.shared.metrics.comparison import Comparison, History, setting_text
from tessera.shared.metrics.comparison import compare as compared
from tessera.shared.problems import Invalid

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


def compare_runs(
    client: Client, runs: Sequence[Run], metric: str | None = None, reach: Sequence[float] = ()
) -> Comparison:
    """Compare two runs or more. Raises Invalid for fewer, and for a metric that no run has."""
    if len({run.id for run in runs}) < max(2, len(runs)):
        named = ", ".join(run.spec.name for run in runs)
        raise Invalid(
            f"a comparison needs two or more different runs, not {named or 'none'}",
            remedy="Name each run once; `tessera run list` lists them.",
        )
    histories = [History.of(run, client.rounds(run.id), client.measurements(run.id)) for run in runs]
    if metric:
        known = {name for history in histories for one in history.measurements for name in one.metrics}
        if metric not in known:
            raise Invalid(
                f"none of these runs has the score {metric!r}",
                remedy=f"Measured were: {', '.join(sorted(known))}." if known else "None of them was evaluated.",
            )
    return compared(histories, metric, reach)


def tables(found: Comparison) -> Iterator[Table]:
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
            output.size(_last(run.bytes)),
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
    yield _by_version(found, "bytes so far", [map(output.size, _at(found, run.bytes)) for run in found.runs])
    yield _by_version(found, "seconds so far", [map(output.seconds, _at(found, run.seconds)) for run in found.runs])


def _at(found: Comparison, values: Mapping[int, T]) -> Iterator[T | None]:
    return (values.get(number) for number in found.versions)


def _last(values: Mapping[int, T]) -> T | None:
    return values[max(values)] if values else None


def _by_version(found: Comparison, title: str, columns: Iterable[Iterable[str | None]]) -> Table:
    names = [run.name for run in found.runs]
    table = output.table(("version", *names), zip(found.versions, *columns, strict=True), right=("version", *names))
    table.title, table.title_justify, table.title_style = title, "left", "bold"
    return table
