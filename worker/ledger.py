"""What runs have spent of each data set's privacy: an append-only file per data set, written before it is spent.

Each line is one task's entry with its digest, and names the digest of the one before, so that a line that was
changed, taken out of the middle or put in between is noticed. What was cut off at the end is not: keep copies
elsewhere. A crash can leave half a line at the end; its task had not begun to train, and the next entry takes its
place.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, BinaryIO, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, ValidationError

from shared.blocks import Frozen
from shared.privacy import Budget
from shared.wire import Label, Task, canonical

LEDGER_FOLDER = "ledger"
"""What the folder of ledgers is called beside a worker's other state."""

BEGINNING = "0" * 64
"""The digest that the first entry names as the one before it."""


class LedgerError(ValueError):
    """A ledger cannot be relied on; says which line and why. Nothing may be spent until a person has looked."""


class NoisySteps(Frozen):
    """`steps` sums of clipped gradients, each of a Poisson sample, with Gaussian noise of
    `noise_multiplier` times the clip norm."""

    kind: Literal["noisy-steps"] = "noisy-steps"
    noise_multiplier: float = Field(gt=0)
    sampling_rate: float = Field(gt=0, le=1)
    steps: PositiveInt


class NoisyChoice(Frozen):
    """A choice of some out of many by noisy scores, `rho`-zCDP as a whole."""

    kind: Literal["noisy-choice"] = "noisy-choice"
    rho: float = Field(gt=0)


Event = Annotated[NoisySteps | NoisyChoice, Field(discriminator="kind")]
"""One use of a mechanism on a data set."""


class Entry(Frozen):
    """What one task, at one try, was allowed to spend."""

    seq: NonNegativeInt
    at: datetime
    dataset: Label
    examples: PositiveInt
    run: str
    run_name: str
    round: int
    task: str
    token: int
    target: Budget
    """What the run as a whole may spend."""
    events: tuple[Event, ...]
    previous: str
    """The digest of the entry before this one."""

    @property
    def digest(self) -> str:
        return hashlib.sha256(canonical(self)).hexdigest()

    def line(self) -> bytes:
        return canonical(_Line(entry=self, digest=self.digest)) + b"\n"


class _Line(Frozen):
    entry: Entry
    digest: str


class Page:
    """One data set's entries, held against every other process. Use `Ledger.page`."""

    def __init__(self, file: BinaryIO, dataset: str, entries: Sequence[Entry]) -> None:
        self._file = file
        self._dataset = dataset
        self.entries = tuple(entries)

    def spend(self, task: Task, examples: int, target: Budget, events: Sequence[Event]) -> Entry:
        """Adds an entry, which is on disk when this returns."""
        entry = Entry(
            seq=len(self.entries),
            at=datetime.now(UTC),
            dataset=self._dataset,
            examples=examples,
            run=task.run,
            run_name=task.run_name,
            round=task.round,
            task=task.id,
            token=task.token,
            target=Budget(epsilon=target.epsilon, delta=target.delta),
            events=tuple(events),
            previous=self.entries[-1].digest if self.entries else BEGINNING,
        )
        self._file.write(entry.line())
        self._file.flush()
        os.fsync(self._file.fileno())
        self.entries = (*self.entries, entry)
        return entry


class Ledger:
    """The ledgers of a worker's data sets, one file each in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, dataset: str) -> tuple[Entry, ...]:
        """The data set's entries, oldest first; none if nothing was ever spent. Raises LedgerError."""
        path = self._path(dataset)
        return _entries(path, path.read_bytes())[0] if path.exists() else ()

    @contextmanager
    def page(self, dataset: str) -> Iterator[Page]:
        """The data set's entries, to judge and add to while no other process can. Raises LedgerError."""
        path = self._path(dataset)
        self._create(path)
        with path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            entries, length = _entries(path, file.read())
            file.truncate(length)
            file.seek(length)
            yield Page(file, dataset, entries)

    def _path(self, dataset: str) -> Path:
        # A data set's name is a label, which cannot be a path.
        return self._folder / f"{dataset}.jsonl"

    def _create(self, path: Path) -> None:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _entries(path: Path, content: bytes) -> tuple[tuple[Entry, ...], int]:
    """The entries of a file, and how many bytes they take: what follows is half a line."""
    length = content.rfind(b"\n") + 1
    entries: list[Entry] = []
    previous = BEGINNING
    for number, line in enumerate(content[:length].splitlines(keepends=True), start=1):
        try:
            entry = _Line.model_validate_json(line).entry
        except ValidationError as fault:
            raise LedgerError(f"{path}, line {number}: this is no entry of a ledger") from fault
        if entry.line() != line or entry.previous != previous or entry.seq != number - 1:
            raise LedgerError(f"{path}, line {number}: this was changed, or did not come after the line before it")
        entries.append(entry)
        previous = entry.digest
    return tuple(entries), length
