"""The progress of a simulation in small, atomically written files, from which a killed simulation resumes."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, JsonValue

from tessera.shared.api.runs import Measurement, Round
from tessera.shared.api.tasks import TaskView
from tessera.shared.api.versions import Version, VersionRef
from tessera.shared.methods.base import Plan
from tessera.shared.problems import Fault, Invalid
from tessera.shared.rounds.aggregate import Accepted
from tessera.shared.schema import Message
from tessera.worker.state.atomic_files import sweep, written_whole

M = TypeVar("M", bound=BaseModel)


class CommittedVersion(Message):
    """A version, and every attempt at the round that produced it; the first version has none."""

    version: Version
    attempts: tuple[Round, ...] = ()


class Reported(Message):
    """An accepted update of a round that is not committed yet, with its task and plan."""

    view: TaskView
    update: str
    plan: Plan

    def accepted(self, site: str, base: VersionRef) -> Accepted:
        view = self.view
        return Accepted(site, view.worker, self.update, view.examples or 0, view.metrics, self.plan, base)


class MeasuredVersion(Message):
    """The measurements of a version."""

    measurements: tuple[Measurement, ...]


class Records:
    """The files under a folder. The constructor removes incomplete files that a killed process left."""

    def __init__(self, folder: Path) -> None:
        for kind in ("versions", "measurements", "open"):
            (folder / kind).mkdir(parents=True, exist_ok=True)
            sweep(folder / kind)
        self._folder = folder

    def claim(self, identity: Mapping[str, JsonValue]) -> None:
        """Record which simulation this folder holds. Raises Invalid with each setting that differs from before."""
        file = self._folder / "simulation.json"
        if not file.exists():
            _write(file, json.dumps(identity, indent=1, sort_keys=True))
            return
        before = json.loads(file.read_text(encoding="utf-8"))
        if faults := [
            Fault(pointer=pointer, detail=f"was {_short(was)} and is {_short(now)}")
            for pointer, was, now in _differences("", before, json.loads(json.dumps(identity)))
        ]:
            raise Invalid(
                f"{self._folder} holds a simulation with other settings",
                errors=faults,
                remedy="Choose another folder, or remove this one to start again.",
            )

    def committed(self) -> list[CommittedVersion]:
        """Return every version so far, in order."""
        return [_read(CommittedVersion, file) for file in sorted((self._folder / "versions").glob("*.json"))]

    def commit(self, entry: CommittedVersion) -> None:
        """Record a version, from which a simulation then resumes."""
        _write(self._folder / "versions" / f"{entry.version.number:07}.json", entry.model_dump_json())

    def accepted(self, task: str) -> Reported | None:
        file = self._folder / "open" / f"{task}.json"
        return _read(Reported, file) if file.exists() else None

    def accept(self, reported: Reported) -> None:
        _write(self._folder / "open" / f"{reported.view.id}.json", reported.model_dump_json())

    def accepted_updates(self) -> set[str]:
        """Return the digests of all updates of the round that is not committed yet."""
        return {_read(Reported, file).update for file in (self._folder / "open").glob("*.json")}

    def forget_accepted(self) -> None:
        """Delete the reports of the round that is over."""
        shutil.rmtree(self._folder / "open")
        (self._folder / "open").mkdir()

    def measured(self, version: int) -> tuple[Measurement, ...] | None:
        """Return the measurements of a version; None if it was not measured."""
        file = self._measurements(version)
        return _read(MeasuredVersion, file).measurements if file.exists() else None

    def measure(self, version: int, measurements: Sequence[Measurement]) -> None:
        _write(self._measurements(version), MeasuredVersion(measurements=tuple(measurements)).model_dump_json())

    def _measurements(self, version: int) -> Path:
        return self._folder / "measurements" / f"{version:07}.json"


def _write(path: Path, text: str) -> None:
    with written_whole(path, durable=False) as file:
        file.write(text.encode())


def _read(kind: type[M], file: Path) -> M:
    return kind.model_validate_json(file.read_bytes())


def _differences(pointer: str, before: Any, now: Any) -> list[tuple[str, Any, Any]]:
    if isinstance(before, dict) and isinstance(now, dict):
        keys = sorted({*before, *now})
        return [d for key in keys for d in _differences(f"{pointer}/{key}", before.get(key), now.get(key))]
    return [] if before == now else [(pointer, before, now)]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
