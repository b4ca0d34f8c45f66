"""A site's records, which `tessera audit` reads with a worker's settings."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tessera.shared.api.tasks import TaskView
from tessera.shared.client.client import Client
from tessera.worker.cli.exits import BAD_SETTINGS, exits
from tessera.worker.settings import SettingsError, WorkerSettings, read_settings, tls_of, token_of
from tessera.worker.state.audit import Audit, SiteAuditEntry
from tessera.worker.state.hash_chain import ChainError
from tessera.worker.stores import audit_of, ledger_of


@dataclass(frozen=True)
class SiteRecords:
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
                each.check(name)
            except ChainError as fault:
                faults.append(str(fault))
        return faults

    def tasks(self) -> Iterator[TaskView]:
        """Yield the coordinator's view of the site's tasks. Raises Problem."""
        with Client(self.settings.url, token_of(self.settings), verify=tls_of(self.settings)) as client:
            yield from client.tasks()


def site_of(config: Path) -> SiteRecords:
    """Return the records of a settings file's site. Exits with 2 on invalid settings."""
    with exits({BAD_SETTINGS: (SettingsError,)}):
        settings = read_settings(config)
        return SiteRecords(settings, audit_of(settings))
