"""The privacy that runs have spent of each data set: a hash chain per data set, written before it is spent.

Noise is reserved before a task trains, and stays spent unless the process that reserved it knows that nothing left:
then the entry is void. Uses without noise are recorded as exact, with infinite epsilon.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from tessera.shared.run_settings import Budget, Unit
from tessera.shared.schema import Label, Value
from tessera.worker.state.database import StateDatabase
from tessera.worker.state.hash_chain import (
    Chain,
    ChainError,
    Head,
    Link,
    LockedChain,
    TaskRef,
    derived,
    head_of,
    missing,
)

CHAINS = "ledger "
"""The beginning of the names of ledgers' chains."""

LIMITED = '"limited":true'
"""A ledger with this text is `limited`. Names of others cannot contain it: JSON escapes quotation marks."""

SKETCHED = 1024
"""Most hashes in a sketch."""

MOVED = '"moved":"'
"""A ledger with this text was moved into another."""

EXACT_EVERY = timedelta(days=1)
"""A run's exact use is written down again if its last line is older."""


class LedgerError(ChainError):
    """A ledger is not reliable; the message names the entry and the reason. Spending stops until it is repaired."""


class NoisySteps(Value):
    """`steps` sums of clipped gradients of examples or groups, each of a Poisson sample, with Gaussian noise of
    `noise_multiplier` times the most that one of them moves a sum: the clip norm, times the root of the number of
    parts if these are clipped apart."""

    kind: Literal["noisy-steps"] = "noisy-steps"
    noise_multiplier: float = Field(gt=0)
    sampling_rate: float = Field(gt=0, le=1)
    steps: PositiveInt


class _ZeroConcentrated(Value):
    rho: float = Field(gt=0)
    """The loss in zCDP (Bun and Steinke 2016, arXiv 1605.02065)."""


class NoisyChoice(_ZeroConcentrated):
    """A choice of some out of many by noisy scores."""

    kind: Literal["noisy-choice"] = "noisy-choice"


class NoisyFigures(_ZeroConcentrated):
    """The figures of one evaluation, from sums with noise."""

    kind: Literal["noisy-figures"] = "noisy-figures"


Use = Literal["training", "choice", "evaluation", "description", "attack", "lost"]
"""The kind of exact use: training; a choice of blocks by the data; evaluation on held-out examples; or all uses in a
lost ledger."""


class ExactUse(Value):
    """A use of the data without noise: no epsilon bounds its privacy loss. A run has one line a day for each use."""

    kind: Literal["exact"] = "exact"
    use: Use


Noisy = NoisySteps | NoisyChoice | NoisyFigures
Event = Annotated[Noisy | ExactUse, Field(discriminator="kind")]
"""One use of a mechanism on a data set."""


@dataclass(frozen=True)
class OneInGroup:
    """Noisy steps of groups, as one example of a group sees them: with another example in its place, or none, its
    group's clipped gradient becomes any other, so that the sum moves by up to two clip norms."""

    steps: NoisySteps


Cost = Event | OneInGroup
"""A use of a mechanism, as it counts for the unit that a budget protects."""

OF_EXAMPLES: Literal["training of examples"] = "training of examples"
UnboundedUse = Use | Literal["training of examples"]
"""A use that a budget does not bound: an exact one; or, for a budget of groups, one that protects single examples."""


class LedgerEntry(Link):
    """The privacy reserved for one attempt at a task, or spent by it when it leaves; or, with `voids` alone, the
    entries that were not used."""

    dataset: Label
    examples: NonNegativeInt = 0
    """The number of examples, or of groups if these are the unit."""
    unit: Unit = "example"
    """The unit that the events protect."""
    run: str = ""
    run_name: str = ""
    round: int = 0
    task: str = ""
    token: int = 0
    target: Budget | None = None
    """The budget of the whole run, or of the figures of one evaluation; None for uses without noise."""
    events: tuple[Event, ...] = ()
    voids: tuple[NonNegativeInt, ...] = ()
    """The numbers of entries that were not used, or that this entry replaces."""
    checkpoint: str = ""
    """The digest of the key under which a checkpoint of this attempt resumes without a second charge."""
    sketch: tuple[NonNegativeInt, ...] = ()
    """A sample of keyed hashes of all examples that were ever used under this name (`worker.data.overlap`)."""
    limited: bool = False
    """True if the worker that wrote the entry limits what runs may spend under this name."""
    moved: Label | None = None
    """The ledger that now has what this one had: of data sets that share it."""


class LedgerPage:
    """One data set's entries, locked against other processes. Use `Ledger.page`."""

    def __init__(self, held: LockedChain[LedgerEntry], dataset: str) -> None:
        self._held = held
        self._dataset = dataset

    @property
    def entries(self) -> tuple[LedgerEntry, ...]:
        """The entries that are not void."""
        return counting(self._held.entries)

    @property
    def head(self) -> Head | None:
        return head_of(self._held.entries)

    def spend(
        self,
        task: TaskRef,
        examples: int,
        target: Budget,
        events: Sequence[Event],
        checkpoint: str = "",
        unit: Unit = "example",
        replaces: Collection[int] = (),
    ) -> LedgerEntry:
        """Reserve what the events cost. The entry is on disk when the page is left, and counts until it is voided.

        It counts in place of the entries `replaces`, at the present time.
        """
        given = {"examples": examples, "unit": unit, "events": tuple(events), "checkpoint": checkpoint}
        target, voids = Budget(epsilon=target.epsilon, delta=target.delta), tuple(sorted(replaces))
        return self._add(task, target=target, voids=voids, **given)

    def void(self, task: TaskRef, seqs: Collection[int]) -> LedgerEntry:
        """Void entries of this task that were not used."""
        return self._add(task, voids=tuple(sorted(seqs)))

    @property
    def sketch(self) -> tuple[int, ...]:
        """The latest sketch."""
        return _latest_sketch(self._held.entries)

    @property
    def limited(self) -> bool:
        """True if a worker has used the data set under a limit."""
        return any(entry.limited for entry in self._held.entries)

    def know(self, task: TaskRef, examples: int, sketch: tuple[int, ...], *, limited: bool) -> None:
        """Record a sketch of the examples, and that a limit applies to them, if either is new.

        A name stays limited: another worker that shares the ledger may still have the limit.
        """
        limited = limited or self.limited
        if (sketch, limited) != (self.sketch, self.limited):
            self._add(task, examples=examples, sketch=sketch, limited=limited)

    def exact(self, task: TaskRef, examples: int, use: Use) -> None:
        """Write down that a run uses the data without noise, unless a line of the last day says so."""
        event, since = ExactUse(use=use), datetime.now(UTC) - EXACT_EVERY
        if not any(
            entry.run == task.run and entry.at > since and event in entry.events for entry in self._held.entries
        ):
            self._add(task, examples=examples, events=(event,))

    def _add(self, task: TaskRef, **given: Any) -> LedgerEntry:
        return self._held.append(
            lambda seq, previous: LedgerEntry(
                seq=seq, at=datetime.now(UTC), previous=previous, dataset=self._dataset, **task._asdict(), **given
            )
        )


class Ledger:
    """The ledgers of a worker's data sets in the database of a `folder`, under the site's `key`.

    `shared` gives the name of a ledger to data sets that do not have one of their own name.
    """

    def __init__(
        self,
        folder: Path,
        key: bytes = b"",
        shared: Mapping[str, str] | None = None,
        *,
        durable: bool = True,
    ) -> None:
        self._folder = folder
        self._database = StateDatabase.of(folder, durable=durable)
        self._key = key
        self._shared = shared or {}
        self._seen: dict[str, tuple[Head | None, tuple[LedgerEntry, ...]]] = {}
        self._latest: dict[str, Head] = {}
        self._expected: dict[str, Head] = {}

    def read(self, dataset: str) -> tuple[LedgerEntry, ...]:
        """Return the data set's entries that count, oldest first; none if there are none. Raises LedgerError if
        nothing may be spent of the data set."""
        return counting(self._judged(dataset, self._chain(dataset).read()))

    def latest(self, dataset: str) -> tuple[LedgerEntry, ...]:
        """Return the same as `read`, from memory if nothing was added. Raises LedgerError, OSError."""
        head = self._chain(dataset).head()
        if dataset not in self._seen or self._seen[dataset][0] != head:
            self._seen[dataset] = head, self.read(dataset)
        return self._seen[dataset][1]

    def latest_of_all(self) -> tuple[LedgerEntry, ...]:
        """Return the entries of all ledgers in the folder, as `latest` does. Raises LedgerError, OSError."""
        return tuple(entry for name in self.besides(()) for entry in self.by_name.latest(name))

    @contextmanager
    def page(self, dataset: str) -> Iterator[LedgerPage]:
        """Hold the data set's entries, to judge and add to while no other process adds to a ledger in the folder.
        Added entries are on disk when the block has ended. Raises LedgerError."""
        with self._chain(dataset).held() as held:
            self._judged(dataset, held.entries)
            page = LedgerPage(held, self.name(dataset))
            yield page
        if page.head:
            self._latest[dataset] = page.head

    def elsewhere(self, dataset: str) -> tuple[LedgerEntry, ...]:
        """Return the entries that count in the folder's other ledgers. Raises LedgerError as `read` does."""
        return tuple(entry for ledger, name in self.others([dataset]) for entry in ledger.read(name))

    def name(self, dataset: str) -> str:
        """Return the name of the data set's ledger."""
        return self._shared.get(dataset, dataset)

    # ------------------------------------------------------------ the same examples under other names

    @property
    def hash_key(self) -> bytes:
        """The key by which examples are hashed."""
        return derived(self._key, "examples")

    def besides(self, datasets: Iterable[str]) -> list[str]:
        """Return the names of the ledgers in the folder that are of none of these data sets."""
        return sorted(self._names() - self._names(MOVED) - set(map(self.name, datasets)))

    def limited(self) -> set[str]:
        """Return the names of the ledgers in the folder whose data sets a worker has used under a limit.

        A ledger that is not reliable may be one of them; `sketches` of it raises LedgerError.
        """
        return self._names(LIMITED)

    def sketches(self, names: Iterable[str]) -> dict[str, tuple[int, ...]]:
        """Return the sketches of the ledgers of these names. Raises LedgerError."""
        return {name: _latest_sketch(self._named(name).read()) for name in names}

    @cached_property
    def by_name(self) -> Ledger:
        """The same ledgers, each under its own name alone: those that no data set here has."""
        return Ledger(self._folder, self._key)

    # ------------------------------------------------------------ rollback

    def leaving(self, dataset: str) -> Head | None:
        """Return the ledger's head when this process last had its page. Reject older copies from then on."""
        head = self._latest.get(dataset)
        if head:
            self.expect({dataset: head})
        return head

    def expect(self, heads: Mapping[str, Head]) -> None:
        """Reject from now on ledgers that do not contain these heads."""
        self._expected |= heads

    def lost(self, datasets: Collection[str]) -> list[str]:
        """Return the data sets, besides these, whose head is in no ledger of the folder. `read` of one raises.

        A data set that was removed from the settings may have shared a ledger of another name.
        """
        return [name for name, head in self._expected.items() if name not in datasets and not self._has(name, head)]

    def others(self, datasets: Collection[str]) -> list[tuple[Ledger, str]]:
        """Return the names of all other ledgers, lost ones included, each with its `Ledger`."""
        lost = self.lost(datasets)
        there = [name for name in self.besides(datasets) if name not in lost]
        return [*((self, name) for name in lost), *((self.by_name, name) for name in there)]

    def _has(self, dataset: str, head: Head) -> bool:
        """Return True if a readable ledger in the folder contains the head. The data set's own is read first."""
        own = self.name(dataset)
        for name in (own, *sorted(self._names() - {own})):
            with suppress(LedgerError):
                if not missing(self._named(name).read(), head):
                    return True
        return False

    def adopt(self, dataset: str) -> Head | None:
        """Accept a ledger under a lost key, cut off, or gone; and move what was spent under the data
        set's own name into a ledger that it now shares.

        The privacy spent is unknown from then on. Returns its new head, or None if it was in order. Raises
        LedgerError for entries that do not follow each other.
        """
        if not self._is_apart(dataset):
            return self._adopt(dataset)
        before = self.by_name
        if known := self._expected.pop(dataset, None):
            before.expect({dataset: known})
        before.adopt(dataset)
        self._adopt(dataset)
        self._expected[dataset] = self._move(dataset)
        return self._expected[dataset]

    def _is_apart(self, dataset: str) -> bool:
        """Return True if the data set has a ledger under its own name beside a shared ledger."""
        return self.name(dataset) != dataset and dataset in self._names() - self._names(MOVED)

    def _move(self, dataset: str) -> Head:
        """Move the entries that count under the data set's own name into the shared ledger. Return its new head."""
        name = self.name(dataset)
        with self._named(dataset).held() as own, self._named(name).held() as shared:

            def add(entry: LedgerEntry) -> None:
                shared.append(
                    lambda seq, previous: entry.model_copy(
                        update={"seq": seq, "previous": previous, "dataset": name, "voids": (), "adopts": None}
                    )
                )

            for entry in counting(own.entries):
                add(entry)
            hashes = {*_latest_sketch(own.entries), *_latest_sketch(shared.entries)}
            limited = any(entry.limited for chain in (own, shared) for entry in chain.entries)
            now = datetime.now(UTC)
            about = LedgerEntry(
                seq=0, at=now, previous="", dataset=name, sketch=tuple(sorted(hashes)[:SKETCHED]), limited=limited
            )
            add(about)
            own.append(
                lambda seq, previous: LedgerEntry(seq=seq, at=now, previous=previous, dataset=dataset, moved=name)
            )
            last = shared.entries[-1]
            return Head(entries=last.seq + 1, digest=last.digest)

    def _adopt(self, dataset: str) -> Head | None:
        chain = self._chain(dataset)

        def entry(seq: int, previous: str, adopts: str | None = None, *, lost: bool) -> LedgerEntry:
            events = (ExactUse(use="lost"),) if lost else ()
            name = self.name(dataset)
            return LedgerEntry(
                seq=seq, at=datetime.now(UTC), previous=previous, dataset=name, adopts=adopts, events=events
            )

        known = self._expected.pop(dataset, None)
        try:
            before = chain.read()
            lost = known is not None and missing(before, known)
        except LedgerError:
            lost = True
        adopted = chain.adopt(lambda seq, previous, adopts: entry(seq, previous, adopts, lost=lost))
        if lost and adopted is None:
            adopted = chain.append(lambda seq, previous: entry(seq, previous, lost=True))
        if adopted is None:
            if known:
                self._expected[dataset] = known
            return None
        self._expected[dataset] = Head(entries=adopted.seq + 1, digest=adopted.digest)
        return self._expected[dataset]

    def _judged(self, dataset: str, entries: tuple[LedgerEntry, ...]) -> tuple[LedgerEntry, ...]:
        if moved := next((entry.moved for entry in entries if entry.moved), None):
            raise LedgerError(
                f"{self._where(dataset)} was moved into the ledger {moved!r}: set the data set's `ledger` to it again"
            )
        if dataset in self._expected and self._is_apart(dataset):
            raise LedgerError(
                f"the ledger {self.name(dataset)!r} lacks what was spent under the name {dataset!r} alone: "
                "`tessera worker adopt --config FILE` moves it there"
            )
        for other, known in self._expected.items():
            shares = self.name(other) == self.name(dataset) and not self._is_apart(other)
            if shares and missing(entries, known):
                raise LedgerError(
                    f"{self._where(dataset)} has {len(entries)} entries, and not those {known.entries} that it had "
                    "when something last left: it was cut off, removed, or is an older copy. Put back the newest "
                    "copy; if there is none, `tessera worker adopt --config FILE` goes on with an unknown "
                    "spending"
                )
        return entries

    def _names(self, text: str = "") -> set[str]:
        """Return the names of the ledgers that have an entry with this text."""
        query = "SELECT DISTINCT chain FROM entries WHERE chain GLOB ? AND instr(entry, ?)"
        return {chain.removeprefix(CHAINS) for (chain,) in self._database.rows(query, f"{CHAINS}*", text)}

    def _chain(self, dataset: str) -> Chain[LedgerEntry]:
        return self._named(self.name(dataset))

    def _named(self, name: str) -> Chain[LedgerEntry]:
        return Chain(self._database, f"{CHAINS}{name}", LedgerEntry, LedgerError, key=self._key)

    def _where(self, dataset: str) -> str:
        return f"{self._database.path}, {CHAINS}{self.name(dataset)}"


def _latest_sketch(entries: Sequence[LedgerEntry]) -> tuple[int, ...]:
    return next((entry.sketch for entry in reversed(entries) if entry.sketch), ())


def counting(entries: Iterable[LedgerEntry]) -> tuple[LedgerEntry, ...]:
    """Return the entries that spend privacy, without the voided ones."""
    entries = tuple(entries)
    void = {seq for entry in entries for seq in entry.voids}
    return tuple(entry for entry in entries if entry.events and entry.seq not in void)


def unbounded_in(
    entries: Iterable[LedgerEntry], unit: Unit = "example"
) -> tuple[tuple[LedgerEntry, UnboundedUse], ...]:
    """Return the uses whose privacy loss no budget of this unit bounds, oldest first, each with its entry."""
    return tuple(
        (entry, event.use if isinstance(event, ExactUse) else OF_EXAMPLES)
        for entry in entries
        for event in entry.events
        if isinstance(event, ExactUse) or (unit, entry.unit) == ("group", "example")
    )


def noisy_in(entries: Iterable[LedgerEntry], unit: Unit = "example") -> list[Cost]:
    """Return the costs to a unit of the uses with noise, except for the uses in `unbounded_in`."""
    return [
        cost
        for entry in entries
        for event in entry.events
        if not isinstance(event, ExactUse)
        for cost in costs_of(event, entry.unit, unit)
    ]


def costs_of(event: Noisy, of: Unit, unit: Unit) -> list[Cost]:
    """Return an event's privacy costs for one `unit`; empty if `unit` is larger than the unit `of` that it
    protects."""
    if of == unit:
        return [event]
    if unit == "group":
        return []
    if isinstance(event, NoisySteps):
        return [OneInGroup(event)]
    # A distance of two is four times the zCDP (Bun and Steinke 2016, arXiv 1605.02065, proposition 1.9).
    return [event.model_copy(update={"rho": 4 * event.rho})]


def of_training(entries: Iterable[LedgerEntry]) -> list[LedgerEntry]:
    """Return the entries that count for a run's target: all but evaluations, on whose examples it does not train."""
    return [entry for entry in entries if not any(isinstance(event, NoisyFigures) for event in entry.events)]


def unit_of(entries: Iterable[LedgerEntry]) -> Unit:
    """Return the unit in which all uses with noise are bounded: groups if all of them protect groups."""
    units = {entry.unit for entry in entries if entry.target}
    return "group" if units == {"group"} else "example"
