"""`tessera audit`: verify, export and compare the audit chains of the coordinator and of a site.

Without `--config` a command reads the coordinator's chain over the API, which needs no torch.
"""

import csv
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from tessera.shared.api.admin import AuditEntry
from tessera.shared.api.audit_chain import first_broken
from tessera.shared.cli.connection import client_of, connect
from tessera.shared.lazy_import import load
from tessera.shared.terminal.output import AsJson, note, out, print_json, table
from tessera.shared.version import install_line
from tessera.worker.cli.exits import BAD_SETTINGS, ConfigFile, Errors, exits, fail
from tessera.worker.governance.audit_compare import Discrepancy, compare
from tessera.worker.state.audit import Audit, SiteAuditEntry
from tessera.worker.state.database import StateError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    callback=connect,
    help="Verify, export and compare the audit chains of the coordinator and of a site.",
)

UNREADABLE: Errors = {1: (StateError, OSError)}

SiteConfig = Annotated[
    Path | None,
    typer.Option("--config", help="A worker's settings: use its site's chain instead of the coordinator's."),
]


@app.command()
def verify(
    ctx: typer.Context,
    config: SiteConfig = None,
    file: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="A file that `export --lines` wrote of a site's chain, or that the coordinator's sink has received.",
        ),
    ] = None,
    key_file: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="The file with the site's audit key, for a --file of a site's chain.",
        ),
    ] = None,
    head: Annotated[
        str | None, typer.Option(help="The last digest, as stored elsewhere: detects entries cut off since.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Verify a chain from its beginning, and print its last digest, to be stored elsewhere.

    For a site, also verify that its ledgers have all entries that the chain records.

    Exit code 0: the chain holds, 1: it does not.
    """
    if key_file and not file:
        raise typer.BadParameter("it is the key of a --file", param_hint="'--key-file'")
    fault, digests = _verified_file(file, key_file) if file else _verified(ctx, config)
    if fault is None and head is not None and head not in digests:
        fault = f"no entry has the digest {head}: the chain was cut off, or written again from the start"
    last = digests[-1] if digests else None
    if as_json:
        print_json({"holds": fault is None, "entries": len(digests), "head": last, "fault": fault})
    elif fault is None:
        note(f"{len(digests)} entries, all of them intact; store this digest of the last one elsewhere:")
        out().print(last or "none")
    if fault is not None:
        fail(fault, 1)


def _verified(ctx: typer.Context, config: Path | None) -> tuple[str | None, Sequence[str]]:
    """Return a chain's fault, if it has one, and the digests of its entries."""
    if config is None:
        return _verified_entries(list(client_of(ctx).audit()))
    site = _site(config)
    try:
        chain: tuple[SiteAuditEntry, ...] = site.audit.read()
        return "; ".join(site.ledger_faults(chain)) or None, [entry.digest for entry in chain]
    except (StateError, OSError) as fault:
        return str(fault), []


def _verified_entries(entries: Sequence[AuditEntry]) -> tuple[str | None, Sequence[str]]:
    broken = first_broken(entries)
    fault = None if broken is None else f"entry {broken} of the coordinator's chain was changed after it was chained"
    return fault, [entry.digest for entry in entries]


def _verified_file(file: Path, key_file: Path | None) -> tuple[str | None, Sequence[str]]:
    """Verify a file that `export --lines` or a sink wrote, and return the same as `_verified`."""
    try:
        if key_file is None:
            # A sink may have an entry twice.
            lines = dict.fromkeys(file.read_bytes().splitlines())
            try:
                return _verified_entries([AuditEntry.model_validate_json(line) for line in lines])
            except ValueError:
                return f"{file} has no entries of a coordinator; for those of a site, give --key-file", []
        chain = Audit(file.parent, "", bytes.fromhex(key_file.read_text(encoding="ascii"))).chain
        entries = chain.read_lines(file.read_bytes().splitlines(), str(file))
    except ValueError as fault:
        return str(fault), []
    return None, [entry.digest for entry in entries]


@app.command()
def export(
    ctx: typer.Context,
    config: SiteConfig = None,
    lines: Annotated[
        bool,
        typer.Option(
            "--lines", help="With --config: JSON lines with everything that digests cover, for verify --file."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print a whole chain, as CSV, as a JSON array, or as lines that can be verified without the site."""
    if lines:
        if config is None:
            raise typer.BadParameter("name a site's settings with --config", param_hint="'--lines'")
        with exits(UNREADABLE):
            content = b"".join(_site(config).audit.chain.lines())
        sys.stdout.buffer.write(content)
        return
    with exits(UNREADABLE):
        rows = [_row(entry) for entry in (client_of(ctx).audit() if config is None else _site(config).audit.read())]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    writer = csv.DictWriter(sys.stdout, _COLUMNS)
    writer.writeheader()
    writer.writerows({**row, "detail": json.dumps(row["detail"], sort_keys=True)} for row in rows)


_COLUMNS = (
    "seq", "at", "actor", "action", "run", "run_name", "round", "subject", "token", "detail", "previous", "digest",
)  # fmt: skip


def _row(entry: SiteAuditEntry | AuditEntry) -> dict[str, Any]:
    """Return an entry by column. A site's actor is its worker, and its subject is a task."""
    names = {"actor": "worker", "subject": "task"} if isinstance(entry, SiteAuditEntry) else {}
    row = {column: getattr(entry, names.get(column, column), None) for column in _COLUMNS}
    return {**row, "at": entry.at.isoformat()}


@app.command("compare")
def compare_chains(config: ConfigFile, as_json: AsJson = False) -> None:
    """Compare a site's chain with the results that the coordinator counts for the site.

    Exit code 0: they agree, 1: they do not, and each difference is listed.
    """
    site = _site(config)
    with exits(UNREADABLE):
        entries = site.audit.read()
        found = compare(entries, site.tasks(), site.settings.name)
        lost = [Discrepancy("ledger-rolled-back", "", "", 0, fault) for fault in site.ledger_faults(entries)]
    found = replace(found, differences=(*found.differences, *lost))
    if as_json:
        print_json(asdict(found))
    else:
        note(f"{found.agreed} results are the same on both sides")
        if found.earlier:
            note(f"{found.earlier} accepted results are older than this chain, or of workers with another chain")
        if found.differences:
            rows = [(one.kind, one.run, one.round, one.task, one.detail) for one in found.differences]
            out().print(table(("difference", "run", "round", "task", "detail"), rows, right=("round",)))
    if found.differences:
        raise typer.Exit(1)


def _site(config: Path) -> Any:
    """Return the records of a settings file's site. Only this needs the worker's packages."""
    try:
        site_of = load("tessera.worker.cli.site").site_of
    except ImportError as fault:
        fail(
            f"a site's chain can only be read where its worker is installed ({fault}): " + install_line("worker"),
            BAD_SETTINGS,
        )
    return site_of(config)
