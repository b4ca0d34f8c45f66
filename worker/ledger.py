"""What runs have spent of each data set's privacy: an append-only file per data set, written before it is spent.

Each line is one task's entry, chained to the one before (`worker.chain`). A crash can leave half a line at the end;
its task had not begun to train.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from shared.blocks import Frozen
from shared.privacy import Budget
from shared.wire import Label, Task
from worker.chain import Chain, ChainError, Held, Link

LEDGER_FOLDER = "ledger"
"""What the folder of ledgers is called beside a worker's other state."""


class LedgerError(ChainError):
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


class Entry(Link):
    """What one task, at one try, was allowed to spend."""

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


class Page:
    """One data set's entries, held against every other process. Use `Ledger.page`."""

    def __init__(self, held: Held[Entry], dataset: str) -> None:
        self._held = held
        self._dataset = dataset

    @property
    def entries(self) -> tuple[Entry, ...]:
        return self._held.entries

    def spend(self, task: Task, examples: int, target: Budget, events: Sequence[Event]) -> Entry:
        """Adds an entry, which is on disk when this returns."""
        return self._held.append(
            lambda seq, previous: Entry(
                seq=seq,
                at=datetime.now(UTC),
                previous=previous,
                dataset=self._dataset,
                examples=examples,
                run=task.run,
                run_name=task.run_name,
                round=task.round,
                task=task.id,
                token=task.token,
                target=Budget(epsilon=target.epsilon, delta=target.delta),
                events=tuple(events),
            )
        )


class Ledger:
    """The ledgers of a worker's data sets, one file each in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._spent: dict[str, tuple[tuple[int, int, float], float]] = {}

    def read(self, dataset: str) -> tuple[Entry, ...]:
        """The data set's entries, oldest first; none if nothing was ever spent. Raises LedgerError."""
        return self._chain(dataset).read()

    def spent(self, dataset: str, delta: float) -> float:
        """The epsilon at `delta` of all that was ever spent, worked out anew if something was since the last time.

        Raises LedgerError, OSError, and ImportError without the extra `privacy`.
        """
        path = self._path(dataset)
        if not path.exists():
            return 0.0
        seen = (path.stat().st_mtime_ns, path.stat().st_size, delta)
        if dataset not in self._spent or self._spent[dataset][0] != seen:
            self._spent[dataset] = seen, epsilon_of(self.read(dataset), delta)
        return self._spent[dataset][1]

    @contextmanager
    def page(self, dataset: str) -> Iterator[Page]:
        """The data set's entries, to judge and add to while no other process can. Raises LedgerError."""
        with self._chain(dataset).held() as held:
            yield Page(held, dataset)

    def _chain(self, dataset: str) -> Chain[Entry]:
        return Chain(self._path(dataset), Entry, LedgerError)

    def _path(self, dataset: str) -> Path:
        # A data set's name is a label, which cannot be a path.
        return self._folder / f"{dataset}.jsonl"


def epsilon_of(entries: Iterable[Entry], delta: float) -> float:
    """What the entries together cost at `delta`. Raises ImportError without the extra `privacy`."""
    events = [event for entry in entries for event in entry.events]
    if not events:
        return 0.0
    found: float = importlib.import_module("worker.accounting").epsilon(events, delta)
    return found
