"""A site's records, which `tessera audit` reads with a worker's settings, and `tessera worker report` on them."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from tessera.shared.api.tasks import TaskView
from tessera.shared.client.client import Client
from tessera.shared.terminal.output import AsJson, note, print_json
from tessera.worker.cli.exits import BAD_SETTINGS, ConfigFile, exits
from tessera.worker.governance.departures import as_csv, as_html, block_names, departures
from tessera.worker.settings import SettingsError, WorkerSettings, read_settings, tls_of, token_of
from tessera.worker.state.atomic_files import written_whole
from tessera.worker.state.audit import Audit, SiteAuditEntry
from tessera.worker.state.database import StateError
from tessera.worker.stores import audit_of, ledger_of


@dataclass(frozen=True)
class SiteChain:
    """The settings of a site's worker, and the site's own chain."""

    settings: WorkerSettings
    audit: Audit

    def ledger_faults(self, entries: Iterable[SiteAuditEntry]) -> list[str]:
        """Return the faults of the ledgers, also of those that lack entries that the chain records."""
        ledger = ledger_of(self.settings)
        ledger.expect(self.audit.ledger_heads(entries))
        ledgers = [(ledger, name) for name in self.settings.datasets]
        faults = []
        for each, name in [*ledgers, *ledger.others(self.settings.datasets)]:
            try:
                each.read(name)
            except StateError as fault:
                faults.append(str(fault))
        return faults

    def tasks(self) -> Iterator[TaskView]:
        """Yield the coordinator's view of the site's tasks. Raises Problem."""
        with Client(self.settings.url, token_of(self.settings), verify=tls_of(self.settings)) as client:
            yield from client.tasks()


def site_of(config: Path) -> SiteChain:
    """Return the records of a settings file's site. Exits with 2 on invalid settings."""
    with exits({BAD_SETTINGS: (SettingsError,)}):
        settings = read_settings(config)
        return SiteChain(settings, audit_of(settings))


def report(
    config: ConfigFile,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Where to write it: .html for a page, .csv for a table."),
    ] = None,
    since: Annotated[
        datetime | None, typer.Option("--from", formats=["%Y-%m-%d"], help="The first day, in UTC.")
    ] = None,
    until: Annotated[
        datetime | None, typer.Option("--until", formats=["%Y-%m-%d"], help="The last day, in UTC.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Report what left the site, when and to whom, from the site's audit: a row for each departure, and totals.

    Exit code 0: written, 1: the audit is not intact, or the file cannot be written, 2: invalid settings.
    """
    kind = out.suffix.lower() if out else ""
    if kind not in (".html", ".csv") and not (as_json and out is None):
        raise typer.BadParameter("name a file that ends in .html or .csv", param_hint="'--out'")
    if since and until and until < since:
        raise typer.BadParameter("the last day is before the first", param_hint="'--until'")
    site = site_of(config)
    with exits({1: (StateError, OSError)}):
        entries = site.audit.read()
        found = departures(entries, since.date() if since else None, until.date() if until else None)
        head = entries[-1].digest if entries else "none"
        period = f"from {since:%Y-%m-%d}" if since else "from its beginning"
        period += f" until {until:%Y-%m-%d}" if until else " until now"
        if out:
            workers = ", ".join(sorted({entry.worker for entry in entries} | {site.settings.name}))
            about = {"site": f"worker {workers}", "period": period, "head": head}
            page = (
                as_html(found, block_names(entries), about, datetime.now(UTC)) if kind == ".html" else as_csv(found)
            )
            with written_whole(out) as file:
                file.write(page.encode())
    if as_json:
        print_json({"departures": [asdict(one) for one in found], "head": head})
    note(f"{len(found)} departures {period}{f', in {out}' if out else ''}; the audit's last digest is {head}")
