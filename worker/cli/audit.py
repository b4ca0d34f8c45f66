"""`tessera audit`: verify, export and compare the audit chains of the coordinator and of a site.

Without `--config` a command is about the coordinator's chain, over the API, and needs no torch here.
"""

import csv
import importlib
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from tessera.shared.api.admin import AuditEntry
from tessera.shared.api.audit_chain import first_broken
from tessera.shared.cli.connection import client_of, connect
from tessera.shared.cli.render.output import AsJson, complain, note, out, print_json, table
from tessera.worker.governance.audit_compare import Comparison, Discrepancy, compare
from tessera.worker.state.audit import SiteAuditEntry
from tessera.worker.state.hash_chain import ChainError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    callback=connect,
    help="Verify, export and compare what coordinator and site wrote down.",
)

BAD_SETTINGS = 2

ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="A worker's settings: its site's chain, not the coordinator's.")
]


@app.command()
def verify(
    ctx: typer.Context,
    config: ConfigFile = None,
    head: Annotated[
        str | None, typer.Option(help="The last digest as it was kept elsewhere: finds what was cut off since.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Follow a chain from its beginning, and print its last digest, to be kept elsewhere.

    Of a site, its ledgers are followed too: each must have come as far as the chain says.

    Exit code 0: it holds, 1: it does not.
    """
    fault, digests = _followed(ctx, config)
    if fault is None and head is not None and head not in digests:
        fault = f"no entry has the digest {head}: the chain was cut off, or written anew"
    last = digests[-1] if digests else None
    if as_json:
        print_json({"holds": fault is None, "entries": len(digests), "head": last, "fault": fault})
    elif fault is None:
        note(f"{len(digests)} entries, each as it was chained; keep this digest of the last one elsewhere:")
        out().print(last or "none")
    if fault is not None:
        complain(fault)
        raise typer.Exit(1)


def _followed(ctx: typer.Context, config: Path | None) -> tuple[str | None, Sequence[str]]:
    """Return what is wrong with a chain, if anything, and the digests of its entries."""
    if config is not None:
        site = _site(config)
        try:
            chain: tuple[SiteAuditEntry, ...] = site.checked()
        except ChainError as broken_chain:
            return str(broken_chain), []
        return "; ".join(site.ledger_faults(chain)) or None, [entry.digest for entry in chain]
    entries = list(client_of(ctx).audit())
    broken = first_broken(entries)
    fault = None if broken is None else f"entry {broken} of the coordinator's chain is not what was chained there"
    return fault, [entry.digest for entry in entries]


@app.command()
def export(ctx: typer.Context, config: ConfigFile = None, as_json: AsJson = False) -> None:
    """Print a whole chain: as CSV, or as a JSON array."""
    rows = [_row(entry) for entry in _entries(ctx, config)]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    writer = csv.DictWriter(sys.stdout, _COLUMNS)
    writer.writeheader()
    writer.writerows({**row, "detail": json.dumps(row["detail"], sort_keys=True)} for row in rows)


_COLUMNS = ("seq", "at", "actor", "action", "run", "round", "subject", "token", "detail", "previous", "digest")


def _entries(ctx: typer.Context, config: Path | None) -> Iterable[SiteAuditEntry | AuditEntry]:
    if config is None:
        return client_of(ctx).audit()
    try:
        found: tuple[SiteAuditEntry, ...] = _site(config).entries()
    except ChainError as fault:
        complain(str(fault))
        raise typer.Exit(1) from fault
    return found


def _row(entry: SiteAuditEntry | AuditEntry) -> dict[str, Any]:
    of: dict[str, object]
    if isinstance(entry, AuditEntry):
        who, of = entry.actor, {"subject": entry.subject, "round": None, "token": None}
    else:
        who, of = entry.worker, {"subject": entry.task, "round": entry.round, "token": entry.token}
    return {
        "seq": entry.seq,
        "at": entry.at.isoformat(),
        "actor": who,
        "action": entry.action,
        "run": entry.run,
        **of,
        "detail": entry.detail,
        "previous": entry.previous,
        "digest": entry.digest,
    }


@app.command("compare")
def compare_chains(
    config: Annotated[Path, typer.Option("--config", help="The worker's settings, as TOML.")], as_json: AsJson = False
) -> None:
    """Compare what a site wrote down with what the coordinator says that it counts of it.

    Exit code 0: they agree, 1: they do not, each difference is named.
    """
    site = _site(config)
    try:
        entries = site.checked()
        found = compare(entries, site.tasks(), site.worker)
    except ChainError as fault:
        complain(str(fault))
        raise typer.Exit(1) from fault
    lost = [Discrepancy("ledger-rolled-back", "", "", 0, fault) for fault in site.ledger_faults(entries)]
    found = replace(found, differences=(*found.differences, *lost))
    if as_json:
        print_json(asdict(found))
    else:
        _tell(found)
    if found.differences:
        raise typer.Exit(1)


def _tell(found: Comparison) -> None:
    note(f"{found.agreed} results are the same on both sides")
    if found.earlier:
        note(f"{found.earlier} accepted results are from before this chain began, or of workers with another")
    if found.differences:
        rows = [(one.kind, one.run, one.round, one.task, one.detail) for one in found.differences]
        out().print(table(("difference", "run", "round", "task", "detail"), rows, right=("round",)))


def _site(config: Path) -> Any:
    """Return the site that a settings file is about. What reads these settings needs the worker's part."""
    try:
        module = importlib.import_module("tessera.worker.cli.site")
    except ImportError as fault:
        complain(f"a site's chain is read where its worker is installed ({fault}): install tessera[worker]")
        raise typer.Exit(BAD_SETTINGS) from fault
    return module.site_of(config)
