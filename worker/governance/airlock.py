"""Finished updates that a person looks at before they leave.

Each lies in a folder of its own: the file as it would leave, what is in it, and, once a person has decided, what.
Only the process that made it sends it, and only the very bytes that were released: should it be killed, nothing
leaves, and the next one clears the folder.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError, model_validator

from tessera.shared import renamed_keys
from tessera.shared.schema import Digest, Frozen, canonical
from tessera.worker.state.atomic_files import written_whole
from tessera.worker.state.hash_chain import TaskRef

AIRLOCK_FOLDER = "airlock"
"""What the folder is called beside a worker's other state."""

UPDATE_FILE = "update.safetensors"
SUMMARY_FILE = "summary.json"
DECISION_FILE = "decision.json"

LOOK_SECONDS = 0.25


class AirlockError(ValueError):
    """There is no such update, or it was decided already."""


class UpdateWithheld(Exception):
    """A person at the site decided that an update does not leave."""


class BlockOut(Frozen):
    """One block as it would leave."""

    nbytes: int
    """As it is written in the file."""
    norm: float
    """The l2 norm of its difference from the version, before coding."""


class Summary(Frozen):
    """What an update that is held would tell."""

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
    """What goes along with it."""
    epsilon: float | None
    """What all of the run's updates tell of one example with this one; None without differential privacy."""

    @model_validator(mode="before")
    @classmethod
    def _of_a_version_before(cls, given: Any) -> Any:
        return renamed_keys.read_old(given, renamed_keys.AIRLOCK)


class ReleaseDecision(Frozen):
    update: Digest
    verdict: Literal["release", "withhold"]
    by: str
    at: datetime
    reason: str = ""


class Airlock:
    """The updates that wait in `folder`, which belongs to one worker."""

    def __init__(
        self, folder: Path, clock: Callable[[], datetime] = lambda: datetime.now(UTC), pause: float = LOOK_SECONDS
    ) -> None:
        self._folder = folder
        self._clock = clock
        self._pause = pause
        self.waits: Callable[[], None] = lambda: None
        """Called again and again while it waits."""

    def clear(self) -> None:
        """Remove what a process that was killed held: its lease is lost, and nobody would send it."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def hold(self, path: Path, summary: Summary, check: Callable[[], None]) -> ReleaseDecision:
        """Wait until a person has released the file. Raises UpdateWithheld, and whatever `check` raises."""
        place = self._folder / summary.id
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            shutil.copyfile(path, place / UPDATE_FILE)
            # What has a summary is whole.
            with written_whole(place / SUMMARY_FILE) as file:
                file.write(canonical(summary))
            decision = self._awaited(place, summary, check)
        finally:
            shutil.rmtree(place, ignore_errors=True)
        if decision.verdict == "withhold":
            raise UpdateWithheld(decision.reason or "a person at the site withheld the update")
        return decision

    def _awaited(self, place: Path, summary: Summary, check: Callable[[], None]) -> ReleaseDecision:
        while True:
            check()
            decision = _decision(place)
            if decision and decision.update == summary.update:
                return decision
            self.waits()
            time.sleep(self._pause)

    def held(self) -> list[Summary]:
        """Return what waits, oldest first."""
        found = []
        for path in self._folder.glob(f"*/{SUMMARY_FILE}"):
            try:
                found.append(Summary.model_validate_json(path.read_bytes()))
            except FileNotFoundError:
                continue
        return sorted(found, key=lambda summary: (summary.held_at, summary.id))

    def path(self, held: Summary) -> Path:
        """Return the file as it would leave."""
        return self._folder / held.id / UPDATE_FILE

    def decide(self, named: str, verdict: Literal["release", "withhold"], by: str, reason: str = "") -> Summary:
        """Enter a decision on the update with this id, or the only one whose id begins so. Raises AirlockError."""
        found = [summary for summary in self.held() if named and summary.id.startswith(named)]
        if len(found) != 1:
            count = "none" if not found else str(len(found))
            raise AirlockError(f"of the updates that wait {count} begin with {named!r}")
        held = found[0]
        if _decision(self._folder / held.id):
            raise AirlockError(f"the update {held.id} was decided already")
        decision = ReleaseDecision(update=held.update, verdict=verdict, by=by, at=self._clock(), reason=reason[:200])
        with written_whole(self._folder / held.id / DECISION_FILE) as file:
            file.write(canonical(decision))
        return held


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
) -> Summary:
    return Summary(
        # A task is tried under one token after the other, and each try is another update.
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
        norm=sum(block.norm**2 for block in blocks.values()) ** 0.5,
        blocks=dict(blocks),
        metrics=dict(metrics),
        epsilon=epsilon,
    )


def _decision(place: Path) -> ReleaseDecision | None:
    try:
        return ReleaseDecision.model_validate_json((place / DECISION_FILE).read_bytes())
    except (FileNotFoundError, ValidationError):
        return None
