"""The coordinator's own commands, but with times of retention that no administrator may set, and remembering few
blobs: what is to be seen of a week is to be seen in minutes, and what a process remembers is at its bound before the
looking begins."""

from __future__ import annotations

from pydantic import Field, PositiveFloat

from coordinator import cli
from coordinator.settings import Settings
from coordinator.storage import blobs


class Brief(Settings):
    keep_updates_seconds: PositiveFloat = Field(default=1.0)
    keep_unused_seconds: PositiveFloat = Field(default=1.0)


if __name__ == "__main__":
    cli.Settings = Brief  # type: ignore[misc]  # the one name that its commands read settings by
    blobs.ROWS_KEPT = blobs.SOUND_KEPT = 64
    cli.app()
