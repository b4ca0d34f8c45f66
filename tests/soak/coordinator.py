"""The coordinator's own commands, but with times of retention that no administrator may set, and remembering few
blobs: what is to be seen of a week is to be seen in minutes, and what a process remembers is at its bound before the
looking begins."""

from __future__ import annotations

from pydantic import Field, PositiveFloat

from tessera.coordinator import cli
from tessera.coordinator.blobs import store
from tessera.coordinator.settings import CoordinatorSettings


class Brief(CoordinatorSettings):
    keep_updates_seconds: PositiveFloat = Field(default=1.0)
    keep_unused_seconds: PositiveFloat = Field(default=1.0)


if __name__ == "__main__":
    cli.CoordinatorSettings = Brief  # type: ignore[misc]  # the one name that its commands read settings by
    store.ROWS_KEPT = store.SOUND_KEPT = 64
    cli.app()
