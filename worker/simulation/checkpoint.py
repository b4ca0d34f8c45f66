"""The progress of a simulation in small, atomically written files, from which a killed simulation resumes."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self, TypeVar

from pydantic import BaseModel, JsonValue

from tessera.shared.api.runs import Measurement, Round
from tessera.shared.api.tasks import TaskView
from tessera.shared.api.versions import Version, VersionRef
from tessera.shared.methods.base import Plan
from tessera.shared.problems import Fault, Invalid
from tessera.shared.rounds.aggregate import AcceptedUpdate
from tessera.shared.schema import Message
from tessera.worker.state.atomic_files import sweep, written_whole

SETTINGS = "simulation.json"
"""The file with the settings that determine a simulation's results."""
SHOWN = 20
"""Most differences that a refusal lists."""

M = TypeVar("M", bound=BaseModel)


class CommittedVersion(Message):
    """A version, and every attempt at the round that produced it; the first version has none."""

    version: Version
    attempts: tuple[Round, ...] = ()


class AcceptedReport(Message):
    """An accepted update of a round that is not committed yet, with its task and plan."""

    view: TaskView
    update: str
    plan: Plan
    inline_bytes: int = 0
    """Size of the update if it was small: it then follows the report."""
    held: tuple[str, ...] = ()
    """The blobs that the worker holds after the task."""
    envelope: str | None = None
    """For a secure sum, what the site signed, as JSON."""

    def accepted(self, site: str, base: VersionRef) -> AcceptedUpdate:
        view = self.view
        examples = view.examples or 0
        return AcceptedUpdate(site, view.worker, self.update, examples, view.metrics, self.plan, base, view.layers)


@dataclass(frozen=True)
class UpdateEntry:
    """An accepted update, and its bytes if it was small."""

    reported: AcceptedReport
    data: bytes = b""


class MeasuredVersion(Message):
    """The measurements of a version, and the tasks that failed to measure it."""

    measurements: tuple[Measurement, ...] = ()
    failed: tuple[TaskView, ...] = ()

    @classmethod
    def of(cls, outcomes: Sequence[Measurement | TaskView]) -> Self:
        measurements = tuple(one for one in outcomes if isinstance(one, Measurement))
        return cls(measurements=measurements, failed=tuple(one for one in outcomes if isinstance(one, TaskView)))


class RoundJournal:
    """The accepted updates of the round that is not committed yet, in one file that grows by one entry for each.

    The constructor drops an incomplete entry that a killed process left.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[str, UpdateEntry] = {}
        if path.exists():
            with path.open("rb+") as file:
                for end, held in _entries(file):
                    self._found[held.reported.view.id] = held
                    complete = end
                file.truncate(complete if self._found else 0)

    def get(self, task: str) -> UpdateEntry | None:
        return self._found.get(task)

    def all(self) -> list[UpdateEntry]:
        return list(self._found.values())

    def add(self, held: UpdateEntry) -> None:
        # In one call, so that a killed process leaves an incomplete entry at most at the end.
        with self._path.open("ab", buffering=0) as file:
            file.write(held.reported.model_dump_json(exclude_defaults=True).encode() + b"\n" + held.data)
        self._found[held.reported.view.id] = held

    def clear(self) -> None:
        self._path.unlink(missing_ok=True)
        self._found.clear()


def _entries(file: BinaryIO) -> Iterator[tuple[int, UpdateEntry]]:
    """Yield each complete entry of an open round, and where it ends."""
    while (line := file.readline()).endswith(b"\n"):
        reported = AcceptedReport.model_validate_json(line)
        data = file.read(reported.inline_bytes)
        if len(data) < reported.inline_bytes:
            return
        yield file.tell(), UpdateEntry(reported, data)


class RecordFolder:
    """The files under a folder. The constructor removes incomplete files that a killed process left."""

    def __init__(self, folder: Path) -> None:
        for kind in ("versions", "measurements"):
            (folder / kind).mkdir(parents=True, exist_ok=True)
            sweep(folder / kind)
        self._folder = folder
        self.open = RoundJournal(folder / "open-round")

    def claim(self, identity: Mapping[str, JsonValue]) -> None:
        """Record which simulation this folder holds. Raises Invalid with the first inputs that differ from before."""
        claim(self._folder / SETTINGS, identity, "a simulation")

    def committed(self) -> list[CommittedVersion]:
        """Return every version so far, in order."""
        return [_read(CommittedVersion, file) for file in sorted((self._folder / "versions").glob("*.json"))]

    def commit(self, entry: CommittedVersion) -> None:
        """Record a version, from which a simulation then resumes."""
        _write(self._folder / "versions" / f"{entry.version.number:07}.json", entry.model_dump_json())

    def downloads(self) -> dict[str, frozenset[str]]:
        """Return the blobs that each worker holds, by the worker's name."""
        file = self._folder / "downloads.json"
        stored = json.loads(file.read_bytes()) if file.exists() else {"sets": [], "workers": {}}
        sets = [frozenset(digests) for digests in stored["sets"]]
        held = {worker: sets[place] for worker, place in stored["workers"].items()}
        return held | {one.reported.view.worker: frozenset(one.reported.held) for one in self.open.all()}

    def keep_downloads(self, held: Mapping[str, frozenset[str]]) -> None:
        """Record the blobs that each worker holds. Most hold the same."""
        places: dict[frozenset[str], int] = {}
        workers = {worker: places.setdefault(digests, len(places)) for worker, digests in held.items()}
        _write(self._folder / "downloads.json", json.dumps({"sets": list(map(sorted, places)), "workers": workers}))

    def measured(self, version: int) -> MeasuredVersion | None:
        """Return the measurements of a version; None if its tasks have not been done."""
        file = self._measurements(version)
        return _read(MeasuredVersion, file) if file.exists() else None

    def measure(self, version: int, measured: MeasuredVersion) -> None:
        _write(self._measurements(version), measured.model_dump_json())

    def _measurements(self, version: int) -> Path:
        return self._folder / "measurements" / f"{version:07}.json"


def claim(file: Path, identity: Mapping[str, Any], what: str) -> None:
    """Record in a file which inputs its folder belongs to. Raises Invalid with the first that differ from before."""
    if not file.exists():
        _write(file, json.dumps(identity, indent=1, sort_keys=True))
        return
    before = json.loads(file.read_text(encoding="utf-8"))
    if faults := [
        Fault(pointer=pointer, detail=f"was {shortened(was)} and is {shortened(now)}")
        for pointer, was, now in differences("", before, json.loads(json.dumps(identity)))
    ]:
        more = f", the first {SHOWN} of {len(faults)}" if len(faults) > SHOWN else ""
        raise Invalid(
            f"{file.parent} holds {what} with other settings or data{more}",
            errors=faults[:SHOWN],
            remedy="Choose another folder, or remove this one to start again.",
        )


def _write(path: Path, text: str) -> None:
    with written_whole(path, durable=False) as file:
        file.write(text.encode())


def _read(kind: type[M], file: Path) -> M:
    return kind.model_validate_json(file.read_bytes())


def differences(pointer: str, before: Any, now: Any) -> list[tuple[str, Any, Any]]:
    """Return the differences between two documents, each under its pointer: the value before and now."""
    if isinstance(before, dict) and isinstance(now, dict):
        keys = sorted({*before, *now})
        return [d for key in keys for d in differences(f"{pointer}/{key}", before.get(key), now.get(key))]
    return [] if before == now else [(pointer, before, now)]


def shortened(value: Any) -> str:
    """Return a setting as JSON of at most 60 characters."""
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
