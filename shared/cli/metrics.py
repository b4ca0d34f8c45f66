"""`tessera run metrics`: export of a run's metrics as CSV, Parquet or to MLflow."""

import io
from pathlib import Path
from typing import Annotated

import typer

from tessera.shared.api.runs import Run
from tessera.shared.cli.connection import RunNamed, client_of
from tessera.shared.client.export import in_place_of
from tessera.shared.client.lookup import find_run
from tessera.shared.metrics.extras import extra
from tessera.shared.metrics.rows import MetricRow, rows_of, write_csv
from tessera.shared.terminal import output
from tessera.shared.terminal.output import AsJson, Reach


def metrics(
    ctx: typer.Context,
    run: RunNamed,
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="Write comma-separated values here.")] = None,
    parquet: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a Parquet file here.")] = None,
    mlflow: Annotated[
        str | None, typer.Option(metavar="URI", help="Add to this MLflow store, e.g. sqlite:///mlflow.db.")
    ] = None,
    experiment: Annotated[str, typer.Option(metavar="NAME", help="The MLflow experiment to add to.")] = "tessera",
    reach: Reach = None,
    as_json: AsJson = False,
) -> None:
    """Write all metrics of a run, one value per row; to stdout as comma-separated values by default."""
    client = client_of(ctx)
    found = find_run(client, run)
    measurements = client.measurements(found.id, counts=True)
    rows = list(rows_of(found, client.rounds(found.id), client.versions(found.id), measurements, reach or ()))
    written = _write(found, rows, csv, parquet, mlflow, experiment)
    if as_json:
        output.print_json({"run": found.id, **(written or {"rows": [row._asdict() for row in rows]})})
    elif written:
        output.out().print(f"{len(rows)} rows to {', '.join(written.values())}", soft_wrap=True, markup=False)
    else:
        text = io.StringIO()
        write_csv(rows, text)
        typer.echo(text.getvalue(), nl=False)


def _write(
    run: Run, rows: list[MetricRow], csv: Path | None, parquet: Path | None, mlflow: str | None, experiment: str
) -> dict[str, str]:
    """Return the destinations by format."""
    written: dict[str, str] = {}
    if csv:
        with in_place_of(csv) as partial:
            with partial.open("w", encoding="utf-8", newline="") as file:
                write_csv(rows, file)
            partial.replace(csv)
        written["csv"] = str(csv)
    if parquet:
        module = extra("parquet_file")
        with in_place_of(parquet) as partial:
            module.write(rows, partial)
            partial.replace(parquet)
        written["parquet"] = str(parquet)
    if mlflow:
        written["mlflow"] = f"{mlflow} as run {extra('mlflow_store').write(rows, run, mlflow, experiment)}"
    return written
