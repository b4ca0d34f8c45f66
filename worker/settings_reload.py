"""Changes to the settings file of a running worker: the policy and the budgets apply without a restart."""

from collections.abc import Callable
from pathlib import Path

from tessera.worker.settings import WorkerSettings, parsed_settings, raw_settings

SETTLED_SECONDS = 1.0
"""Half of a file may allow more than the whole: changed settings, or a changed opt-out list, are read once they have
stayed the same for that long."""


class SettingsFile:
    """The file at `path`, with the `settings` that it held when it was opened. Raises SettingsError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = raw_settings(path)
        self.settings = parsed_settings(path, self._read)

    def reread(
        self, sleep: Callable[[float], None], check: Callable[[WorkerSettings], object] = lambda _: None
    ) -> WorkerSettings | None:
        """Return the settings in the file, or None if it has not changed. Raises SettingsError while it is invalid,
        also by `check`."""
        raw = raw_settings(self._path)
        if raw == self._read:
            return None
        while True:
            sleep(SETTLED_SECONDS)
            raw, before = raw_settings(self._path), raw
            if raw == before:
                break
        settings = parsed_settings(self._path, raw)
        check(settings)
        self._read = raw
        return settings


def reloaded(running: WorkerSettings, new: WorkerSettings) -> WorkerSettings:
    """Return the settings of a running worker with the new policy and budgets, which need no restart."""
    datasets = {
        name: source.model_copy(update={"privacy": new.datasets[name].privacy}) if name in new.datasets else source
        for name, source in running.datasets.items()
    }
    return running.model_copy(update={"policy": new.policy, "privacy": new.privacy, "datasets": datasets})


def differing(one: WorkerSettings, other: WorkerSettings) -> set[str]:
    """Return the names of the settings, and of the data sets, in which they differ."""
    names = {name for name in WorkerSettings.model_fields if getattr(one, name) != getattr(other, name)} - {
        "datasets"
    }
    sources = {*one.datasets, *other.datasets}
    return names | {f"datasets.{name}" for name in sources if one.datasets.get(name) != other.datasets.get(name)}
