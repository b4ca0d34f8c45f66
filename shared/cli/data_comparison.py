"""`tessera data compare`: the sites' data together, before a run."""

from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from tessera.shared.cli.connection import CaBundle, Connection, TokenFile, TokenText, Url
from tessera.shared.client.client import DEFAULT_URL
from tessera.shared.client.data_descriptions import compare_data
from tessera.shared.metrics.data_comparison import CountTable, DataAnswers
from tessera.shared.problems import Invalid
from tessera.shared.schema import DEFAULT_STUDY
from tessera.shared.terminal import output
from tessera.shared.terminal.output import AsJson


def compare(
    dataset: Annotated[str, typer.Argument(help="The sites' name of the data set.")],
    url: Url = DEFAULT_URL,
    token: TokenText = None,
    token_file: TokenFile = None,
    ca_bundle: CaBundle = None,
    study: Annotated[str, typer.Option(help="The study whose sites to ask.")] = DEFAULT_STUDY,
    sums: Annotated[
        str | None,
        typer.Option(
            "--secure-sums", help="Sites, with commas, that open secure sums: only totals over sites are learned."
        ),
    ] = None,
    quorum: Annotated[int | None, typer.Option(help="The fewest sites of a secure sum, by default 5.", min=3)] = None,
    repeat: Annotated[
        bool,
        typer.Option("--repeat", help="Ask for another sum of the same data set, if people at the sites allow it."),
    ] = False,
    wait: Annotated[float, typer.Option(help="Seconds to wait for the sites.", min=1)] = 600.0,
    as_json: AsJson = False,
) -> None:
    """Ask each site to describe a data set, and show what would go wrong in training on them.

    Sites send rounded counts of subjects (patients, where the data set has a group), and none below their minimum.
    Exit code 1 if no site answered.
    """
    with Connection(url, token, token_file, ca_bundle).client() as client:
        helpers = [name.strip() for name in sums.split(",") if name.strip()] if sums else []
        if not helpers and (quorum or repeat or sums is not None):
            remedy = "Name the helpers, as in --secure-sums north,south,west, or leave the options out."
            raise Invalid("--quorum and --repeat are for --secure-sums, which names no site", remedy=remedy)
        run, answers = compare_data(client, dataset, study, wait, helpers, quorum or 5, repeat=repeat)
    if as_json:
        sites = {site: each.model_dump(mode="json") for site, each in answers.found.items()}
        totals = {"totals": answers.summed.totals} if answers.summed else {}
        about = {"run": run.id, "sites": sites, "silent": dict(answers.silent), "faults": answers.faults}
        output.print_json({**about, **totals})
    else:
        _print(answers)
    if not (answers.found or answers.summed):
        raise typer.Exit(1)


def _print(answers: DataAnswers) -> None:
    for one in answers.tables:
        output.out().print(_table(one, answers))
    for sentence in answers.faults:
        output.out().print(escape(f"- {sentence}."), soft_wrap=True)
    if answers.summed:
        output.note(f"{answers.meaning}.")
    if answers.found:
        output.note(f"{answers.meaning}. A site shows none below its minimum, and examples of these count nowhere.")
        if not answers.faults:
            output.out().print("The sites' data agree in everything that was compared.")


def _table(one: CountTable, answers: DataAnswers) -> Table:
    columns = (one.title, *one.sites, "together")
    rows: list[tuple[object, ...]] = [
        (cell, *(answers.shown(site, counts[site]) for site in one.sites), one.total(cell))
        for cell, counts in one.rows.items()
    ]
    rows.append(("all", *map(one.of_site, one.sites), one.whole))
    return output.table(columns, rows, right=columns[1:])
