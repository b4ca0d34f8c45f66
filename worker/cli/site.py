"""What `tessera audit` needs of a worker's settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import typer

from shared.cli.output import complain
from shared.client import Client
from shared.wire import TaskView
from worker.audit import Entry
from worker.settings import Settings, SettingsError, audit_of, read_settings, tls_of, token_of


@dataclass(frozen=True)
class Site:
    settings: Settings

    def entries(self) -> tuple[Entry, ...]:
        """The site's own chain. Raises ChainError."""
        return audit_of(self.settings).read()

    def tasks(self) -> Iterator[TaskView]:
        """What the coordinator says of the site's tasks. Raises Problem."""
        with Client(self.settings.url, token_of(self.settings), verify=tls_of(self.settings)) as client:
            yield from client.tasks()


def site_of(config: Path) -> Site:
    try:
        return Site(read_settings(config))
    except SettingsError as fault:
        complain(str(fault))
        raise typer.Exit(2) from fault
