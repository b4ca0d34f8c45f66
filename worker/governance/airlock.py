"""Finished updates held until a person at the site releases them.

Each update is a file, and a row with its summary, its task and, later, the decision. The worker goes on with other
tasks meanwhile. Only the exact bytes released leave. A restarted worker continues to hold its updates once the
coordinator offers it the same task again.
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from pydantic import JsonValue

from tessera.shared.api.tasks import Task
from tessera.shared.methods.base import EXTRA
from tessera.shared.model.blocks import Block
from tessera.shared.run_settings import Privacy, Unit
from tessera.shared.schema import Digest, Value
from tessera.shared.tensors.lazy import digest_of
from tessera.worker.state.atomic_files import sync_names
from tessera.worker.state.database import StateDatabase
from tessera.worker.state.hash_chain import TaskRef

AIRLOCK_FOLDER = "airlock"
"""Name of the folder of held files in the worker's state directory."""

OF_A_LEASE = {
    "token", "lease_seconds", "receipt", "audit_head", "inline_blobs", "inline_bytes", "stream_bytes",
}  # fmt: skip
"""Fields of a task that another lease of the same task may change."""

LOOK_SECONDS = 0.25


class AirlockError(ValueError):
    """An unknown update, or one that was already decided."""


class UpdateWithheld(Exception):
    """An update that a person at the site withheld; `by` is who."""

    def __init__(self, reason: str, by: str = "") -> None:
        super().__init__(reason)
        self.by = by


class BlockOut(Value):
    """Size and norm of one block of a held update."""

    nbytes: int
    """Encoded size in the file."""
    norm: float
    """The l2 norm of its difference from the version, before coding."""


class Summary(Value):
    """Content of a held update, for the person who decides."""

    id: str
    task: str
    run: str
    run_name: str
    orchestrator: str | None
    round: int
    dataset: str
    examples: int
    held_at: datetime
    update: Digest
    nbytes: int
    norm: float
    blocks: dict[str, BlockOut]
    metrics: dict[str, float]
    """Metrics submitted with the update."""
    withheld: dict[str, int] = {}
    """The number of rows of each extra array that are zero because they are over too few examples."""
    epsilon: float | None
    """Privacy loss per `unit` of all the run's updates including this one; None without differential privacy."""
    delta: float | None = None
    """The delta at which epsilon holds; None without differential privacy."""
    unit: Unit | None = None
    """The unit that epsilon protects; None without differential privacy."""
    covers_choice: bool = True
    """False if epsilon does not cover what the choice of blocks reveals."""


class ReleaseDecision(Value):
    """A person's decision on the update with this digest."""

    update: Digest
    verdict: Literal["release", "withhold"]
    by: str
    at: datetime
    reason: str = ""


class HeldTask(Value):
    """The facts, beside the summary, that a worker needs to send a held update, also after a restart."""

    work: Digest
    """Of the task without the fields of its lease: another lease of the same work has the same."""
    blocks: tuple[Block, ...]
    """The worker's own block table of the model."""
    envelope: str | None = None
    """Of a masked update."""
    download_bytes: int = 0
    checkpoint: str = ""
    """The digest of the key under which the ledger has the reserved privacy."""
    private: dict[str, JsonValue] | None = None
    """The progress of a private task, without its noise."""


class Airlock:
    """The updates held in the database of a worker's `folder`, and the files in its subfolder."""

    def __init__(
        self, folder: Path, clock: Callable[[], datetime] = lambda: datetime.now(UTC), pause: float = LOOK_SECONDS
    ) -> None:
        self._folder = folder / AIRLOCK_FOLDER
        self._database = StateDatabase.of(folder)
        self._clock = clock
        self._pause = pause

    def hold(self, path: Path, summary: Summary, task: HeldTask) -> Path:
        """Move a finished update into the folder, and return its new path. It is on disk when this returns."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        place = self.path(summary)
        try:
            with path.open("rb") as file:
                os.fsync(file.fileno())
            path.rename(place)
            sync_names(self._folder)
            self._database.write(
                "INSERT OR REPLACE INTO held (id, summary, task) VALUES (?, ?, ?)",
                summary.id, summary.model_dump_json(), task.model_dump_json(),
            )  # fmt: skip
        except BaseException:
            place.unlink(missing_ok=True)
            raise
        return place

    def sweep(self) -> None:
        """Remove the files that a killed process had moved here, and not recorded."""
        known = {self.path(summary) for summary in self.held()}
        for path in self._folder.glob("*"):
            if path not in known:
                path.unlink()

    def note(self, summary: Summary, task: HeldTask) -> None:
        """Replace what is stored of a held update's task."""
        self._database.write("UPDATE held SET task = ? WHERE id = ?", task.model_dump_json(), summary.id)

    def find(self, task: Task) -> tuple[Summary, HeldTask] | None:
        """Return the held update of a task that was leased again, and what is stored of the task."""
        for summary in self.held():
            stored = self._database.document(HeldTask, "SELECT task FROM held WHERE id = ?", summary.id)
            if stored and (summary.task, stored.work) == (task.id, work_of(task)):
                return summary, stored
        return None

    def wait(self, summary: Summary, check: Callable[[], None]) -> ReleaseDecision:
        """Wait until a person releases the update. Raises UpdateWithheld and the exceptions of `check`."""
        while True:
            check()
            if decision := self.decision(summary):
                break
            if not self.path(summary).exists():
                raise UpdateWithheld("its file was removed from the airlock")
            time.sleep(self._pause)
        if decision.verdict == "withhold":
            raise UpdateWithheld(decision.reason or "a person at the site withheld the update", decision.by)
        return decision

    def remove(self, summary: Summary) -> None:
        """Remove an update that was sent, or is no longer wanted."""
        self._database.write("DELETE FROM held WHERE id = ?", summary.id)
        self.path(summary).unlink(missing_ok=True)

    def held(self) -> list[Summary]:
        """Return the held updates, oldest first."""
        summaries = self._database.documents(Summary, "SELECT summary FROM held")
        return sorted(summaries, key=lambda summary: (summary.held_at, summary.id))

    def path(self, held: Summary) -> Path:
        """Return the path of the held file."""
        return self._folder / f"{held.id}.safetensors"

    def decision(self, held: Summary) -> ReleaseDecision | None:
        """Return the decision on a held update, if there is one on these bytes."""
        found = self._decision(held)
        return found if found and found.update == held.update else None

    def decide(self, named: str, verdict: Literal["release", "withhold"], by: str, reason: str = "") -> Summary:
        """Record a decision on the update with this id or unique id prefix. Raises AirlockError."""
        matches = [summary for summary in self.held() if named and summary.id.startswith(named)]
        if len(matches) != 1:
            raise AirlockError(f"{len(matches) or 'no'} held updates have an id beginning with {named!r}")
        held = matches[0]
        decision = ReleaseDecision(update=held.update, verdict=verdict, by=by, at=self._clock(), reason=reason[:200])
        with self._database.writing() as connection:
            if self._decision(held):
                raise AirlockError(f"the update {held.id} was already decided")
            decide = "UPDATE held SET decision = ? WHERE id = ?"
            if not connection.execute(decide, (decision.model_dump_json(), held.id)).rowcount:
                raise AirlockError(f"the update {held.id} was removed meanwhile: the coordinator ended its task")
        return held

    def _decision(self, held: Summary) -> ReleaseDecision | None:
        query = "SELECT decision FROM held WHERE id = ? AND decision IS NOT NULL"
        return self._database.document(ReleaseDecision, query, held.id)


def work_of(task: Task) -> Digest:
    """Return the digest of a task without the fields of its lease."""
    fields = task.model_dump(mode="json", exclude=OF_A_LEASE)
    return digest_of(json.dumps(fields, sort_keys=True).encode())


def summary_of(
    about: TaskRef,
    *,
    orchestrator: str | None,
    dataset: str,
    examples: int,
    held_at: datetime,
    update: Digest,
    nbytes: int,
    blocks: Mapping[str, BlockOut],
    metrics: Mapping[str, float],
    epsilon: float | None,
    privacy: Privacy | None = None,
    withheld: Mapping[str, int] = MappingProxyType({}),
) -> Summary:
    return Summary(
        # Each attempt at a task has another token and makes another update.
        id=f"{about.task[:12]}-{about.token}",
        task=about.task,
        run=about.run,
        run_name=about.run_name,
        orchestrator=orchestrator,
        round=about.round,
        dataset=dataset,
        examples=examples,
        held_at=held_at,
        update=update,
        nbytes=nbytes,
        norm=sum(block.norm**2 for name, block in blocks.items() if not name.startswith(EXTRA)) ** 0.5,
        blocks=dict(blocks),
        metrics=dict(metrics),
        withheld=dict(withheld),
        epsilon=epsilon,
        delta=privacy.delta if privacy else None,
        unit=privacy.unit if privacy else None,
        covers_choice=privacy is None or privacy.selection != "uncovered",
    )
