"""A worker's settings file while the worker runs: of what changes in it, the policy and the budgets are taken up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tessera.worker.settings import Settings, parsed_settings, raw_settings

SETTLED_SECONDS = 1.0
"""Half of a file may allow more than the whole: one that changed is read once it has stayed the same for so long."""


class SettingsFile:
    """The file at `path`, with the `settings` that it held when it was opened. Raises SettingsError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = raw_settings(path)
        self.settings = parsed_settings(path, self._read)

    def reread(self, sleep: Callable[[float], None]) -> Settings | None:
        """What the file says now, or None if nothing in it changed. Raises SettingsError for as long as it cannot be
        used."""
        raw = raw_settings(self._path)
        if raw == self._read:
            return None
        while True:
            sleep(SETTLED_SECONDS)
            raw, before = raw_settings(self._path), raw
            if raw == before:
                break
        settings = parsed_settings(self._path, raw)
        self._read = raw
        return settings


def taken_up(running: Settings, told: Settings) -> Settings:
    """The settings of a running worker with what it heeds of others without a restart."""
    datasets = {
        name: source.model_copy(update={"privacy": told.datasets[name].privacy}) if name in told.datasets else source
        for name, source in running.datasets.items()
    }
    return running.model_copy(update={"policy": told.policy, "privacy": told.privacy, "datasets": datasets})


def differing(one: Settings, other: Settings) -> set[str]:
    """The names of the settings, and of the data sets, in which they differ."""
    names = {name for name in Settings.model_fields if getattr(one, name) != getattr(other, name)} - {"datasets"}
    sources = {*one.datasets, *other.datasets}
    return names | {f"datasets.{name}" for name in sources if one.datasets.get(name) != other.datasets.get(name)}
