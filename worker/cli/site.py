"""What `tessera audit` needs of a worker's settings."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import typer

from tessera.shared.api.tasks import TaskView
from tessera.shared.cli.render.output import complain
from tessera.shared.client.client import Client
from tessera.worker.settings import SettingsError, WorkerSettings, read_settings, tls_of, token_of
from tessera.worker.state.audit import SiteAuditEntry
from tessera.worker.state.hash_chain import ChainError
from tessera.worker.stores import audit_key_of, audit_of, ledger_of


@dataclass(frozen=True)
class SiteRecords:
    settings: WorkerSettings

    def entries(self) -> tuple[SiteAuditEntry, ...]:
        """Return the site's own chain. Raises ChainError."""
        return audit_of(self.settings).read()

    @property
    def worker(self) -> str:
        return self.settings.name

    def checked(self) -> tuple[SiteAuditEntry, ...]:
        """Return the same, if it is under the site's key. Raises ChainError."""
        return audit_of(self.settings).check()

    def ledger_faults(self, entries: Iterable[SiteAuditEntry]) -> list[str]:
        """Return what is wrong with the ledgers, beside what the chain says of how far they had come."""
        ledger = ledger_of(self.settings)
        ledger.expect(audit_of(self.settings).ledger_heads(entries))
        found = []
        all_of_them = [(ledger, name) for name in self.settings.datasets]
        all_of_them += [(ledger.by_name, name) for name in ledger.besides(self.settings.datasets)]
        for each, name in all_of_them:
            try:
                each.check(name)
            except ChainError as fault:
                found.append(str(fault))
        return found

    def tasks(self) -> Iterator[TaskView]:
        """Yield what the coordinator says of the site's tasks. Raises Problem."""
        with Client(self.settings.url, token_of(self.settings), verify=tls_of(self.settings)) as client:
            yield from client.tasks()


def site_of(config: Path) -> SiteRecords:
    try:
        settings = read_settings(config)
        audit_key_of(settings)
        return SiteRecords(settings)
    except SettingsError as fault:
        complain(str(fault))
        raise typer.Exit(2) from fault
