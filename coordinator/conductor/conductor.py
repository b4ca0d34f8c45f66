"""The loop that moves rounds. For the run that a wakeup names, and for each run at every tick:

    look      a snapshot of the run: its round, its tasks, who is live
    decide    what is to be done now (`domain.decide`, a pure function)
    act       open a round, expire a lease, close, abandon, offer an evaluation, end the run (`actions`)
    merge     a round, in a thread of its own: commits the version and opens the next round (`merge`)

Closing a round and merging it are two transactions, since a merge may take long and others must know that the round
takes no more updates. A round with small updates is closed in the transaction that commits its version.

It keeps nothing that matters in memory, so it may be killed at any moment: what was committed stands, and the next
look at the tables says what is still to be done.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import structlog
from sqlalchemy.exc import IntegrityError
from structlog.contextvars import bound_contextvars

from tessera.coordinator.conductor.actions import Actions
from tessera.coordinator.conductor.liveness import Liveness, TooFewWilling
from tessera.coordinator.conductor.merge import RoundMerger
from tessera.coordinator.db.engine import DATABASE_AWAY, Database, log_away
from tessera.coordinator.db.snapshots import run_snapshot, runs_to_decide
from tessera.coordinator.db.tables import RoundRow
from tessera.coordinator.db.workers import note_seen
from tessera.coordinator.domain import decide as todo
from tessera.coordinator.domain.decide import Action, Timeouts, decide
from tessera.coordinator.domain.snapshot import RunSnapshot
from tessera.coordinator.domain.workers import LiveWorker
from tessera.coordinator.limits.disk import is_full, is_unusable
from tessera.coordinator.notify.long_poll import LastSeen
from tessera.shared.problems import Conflict, StoreAway, StoreFull
from tessera.shared.telemetry import spans
from tessera.shared.telemetry.trace_ids import trace_of, traceparent_of

log = structlog.get_logger()

REFUSED_SECONDS = 5.0
"""Delay before a round is planned again, or its helpers asked again, after too few would take part."""

LAST_SECONDS = 1.0
"""Time that a conductor that ends leaves to a merge."""

SMALL_BYTES = 1 << 20
"""Most bytes of accepted updates that are merged before their round is closed."""

FULL_SECONDS = 10.0
"""Delay of merges, and of closing rounds, after the disk was full."""


@dataclass(eq=False)
class Conductor:
    """Moves every live run on, when called and at every tick."""

    database: Database
    liveness: Liveness
    actions: Actions
    merger: RoundMerger
    presence: LastSeen
    patience: Timeouts
    tick_seconds: float
    heartbeat_file: Path
    notify: Callable[[Sequence[str]], None]
    # Forgetting it costs one more try.
    _failed: dict[tuple[str, Action], float] = field(default_factory=dict)
    _refused_at: dict[str, float] = field(default_factory=dict)
    _full_at: float = 0.0
    _merging: threading.Lock = field(default_factory=threading.Lock)
    _merged_run: str | None = None
    # Runs to look at when the merge in progress ends: those that wait for it.
    _behind: set[str] = field(default_factory=set)
    _called: threading.Event = field(default_factory=threading.Event)
    # The runs that were named since the last look; None for all.
    _named: set[str] | None = field(default_factory=set)
    _naming: threading.Lock = field(default_factory=threading.Lock)
    _ended: threading.Event = field(default_factory=threading.Event)

    def call(self, *run_ids: str) -> None:
        """Wake the loop: look at these runs, or at all if none is named, at once rather than at the next tick."""
        with self._naming:
            self._named = {*self._named, *run_ids} if run_ids and self._named is not None else None
        self._called.set()

    def end(self) -> None:
        """Stop `conduct` after the action in hand."""
        self._ended.set()
        self._called.set()

    def conduct(self) -> None:
        """Work until `end`."""
        due_at = time.monotonic() + self.tick_seconds
        while not self._ended.is_set():
            self._called.wait(max(0.0, due_at - time.monotonic()))
            self._called.clear()
            with self._naming:
                named, self._named = self._named, set()
            # However many wakeups come between two ticks.
            if named is None or time.monotonic() >= due_at:
                named, due_at = None, time.monotonic() + self.tick_seconds
            self._note_alive()
            try:
                self.step(named)
            except DATABASE_AWAY as fault:
                log_away(fault)
            except Exception:  # the loop outlives what is wrong with a step
                log.exception("conductor.step_failed")
        # A small merge ends by itself; the next process repeats a long one.
        if self._merging.acquire(timeout=LAST_SECONDS):
            self._merging.release()

    def _note_alive(self) -> None:
        try:
            self.heartbeat_file.touch()
        except OSError as fault:
            log.warning("conductor.heartbeat_failed", detail=str(fault))

    def step(self, named: Iterable[str] | None = None) -> None:
        """Look at these runs, or at every run, until none has anything to be done."""
        if seen := self.presence.take():
            with self.database.transaction() as session:
                note_seen(session, self.database.now(), seen)
        while not self._ended.is_set() and (named := self._pass(named)):
            pass

    def _pass(self, named: Iterable[str] | None) -> list[str]:
        """Look at these runs, or at every run, once; return the runs for which anything was done."""
        # A step makes one pass after another while there is work.
        self._note_alive()
        with self.database.snapshot() as session:
            live = self.liveness.workers(session)
            run_ids = runs_to_decide(session) if named is None else named
        self.liveness.looked(live)
        acted = []
        for run_id in run_ids:
            # Before the look: an update that came between the two would be late by a deadline that it met.
            now = self.database.now()
            run = self._look(run_id, live)
            if run is None:
                continue
            for action in decide(run, now, self.patience):
                if self._is_put_off(run, action):
                    continue
                if not self._merge_aside(run, action) and self._try(run, action):
                    acted.append(run_id)
        return list(dict.fromkeys(acted))

    def _look(self, run_id: str, live: Sequence[LiveWorker]) -> RunSnapshot | None:
        """Return a snapshot of a run. One that this version cannot read pauses, and the others go on."""
        try:
            with self.database.snapshot() as session:
                return run_snapshot(session, run_id, live, absent_are_gone=self.liveness.is_settled())
        except ValueError as fault:
            if self._halt(run_id, f"this version of the coordinator cannot read the run: {fault}"):
                log.exception("conductor.run_not_readable", run=run_id)
            return None

    def _is_put_off(self, run: RunSnapshot, action: Action) -> bool:
        """Return whether the action failed before and is not due again yet."""
        # What failed is tried again when the run was resumed, not at every tick.
        if self._failed.get((run.id, action)) == run.idle_since:
            return True
        refused = self._refused_at.get(run.id, 0.0), REFUSED_SECONDS
        full = self._full_at, FULL_SECONDS
        delays = {
            todo.Open: refused,
            todo.AskHelpers: refused,
            todo.Merge: full,
            # It may merge too.
            todo.Close: full,
        }
        failed_at, delay = delays.get(type(action), (0.0, 0.0))
        # A clock that stepped back ends the delay.
        return 0 <= self.database.now() - failed_at < delay

    def _merge_aside(self, run: RunSnapshot, action: Action) -> bool:
        """Merge a round in a daemon thread, so that leases and deadlines go on; the next process repeats it.

        A round with small updates is closed there too. Return False for an action that this thread does itself.
        """
        small = run.round is not None and run.round.update_bytes <= SMALL_BYTES
        # Helpers have to open secure sums first.
        closes = isinstance(action, todo.Close) and small and not (run.round and run.round.sums)
        if not (closes or isinstance(action, todo.Merge)):
            return False
        with self._naming:
            self._behind.add(run.id)
        if self._merging.acquire(blocking=False):
            self._merged_run = run.id
            threading.Thread(target=self._merge_and_call, args=(run, action), name="merge", daemon=True).start()
            return True
        # A round that is to close does not wait for the merge of another run.
        return not closes or self._merged_run == run.id

    def _merge_and_call(self, run: RunSnapshot, action: todo.Close | todo.Merge) -> None:
        """Merge a round, unless another conductor does: should that one fall silent, a later look takes over."""
        try:
            with self.database.alone(f"merging {run.id}") as alone:
                # The look may be older than a merge that has just ended.
                if alone and self.merger.is_due(action.round, closing=isinstance(action, todo.Close)):
                    self._try(run, action, aside=True)
        except DATABASE_AWAY as fault:
            alone = False
            log_away(fault, run=run.id)
        finally:
            self._merging.release()
        if alone:
            with self._naming:
                behind, self._behind = self._behind, set()
            self.call(run.id, *behind)

    def _try(self, run: RunSnapshot, action: Action, *, aside: bool = False) -> bool:
        """Do an action, as a part of its round's trace if it moves one; return whether anything was done. In the
        thread of merges (`aside`), closing a round merges it too."""
        if not isinstance(action, todo.Open | todo.Close | todo.Merge | todo.Abandon):
            return self._do(run, action, nullcontext())
        parent = traceparent_of(run.id, run.version + 1)
        with bound_contextvars(trace=trace_of(run.id, run.version + 1)):
            if aside and isinstance(action, todo.Close) and self._merges_at_once(run, action, parent):
                return True
            return self._do(run, action, spans.span(_name(action), parent=parent))

    def _merges_at_once(self, run: RunSnapshot, action: todo.Close, parent: str) -> bool:
        """Close and merge a round in one transaction; return whether that worked.

        Otherwise the round has to be closed first. Merging it then fails in the same way, and is handled.
        """
        about = {"run": run.id, "action": str(action)}
        try:
            with spans.span("merge", parent=parent):
                self.merger.merge(run.id, action.round, self.notify, closing=action.reason)
        except Exception as fault:  # a method is anybody's code
            if isinstance(fault, DATABASE_AWAY) and not is_full(fault):
                raise
            log.info("conductor.closes_first", **about, detail=str(fault))
            return False
        log.info("conductor.acted", **about)
        if spans.on():
            self._record_round(action.round)
        return True

    def _do(self, run: RunSnapshot, action: Action, span: AbstractContextManager[None]) -> bool:
        """Do an action; note when to try it again if it failed, and pause the run if that is the run's own fault."""
        about = {"run": run.id, "action": str(action)}
        try:
            with span:
                if isinstance(action, todo.Merge):
                    self.merger.merge(run.id, action.round, self.notify)
                else:
                    self.notify(self.actions.do(run.id, action))
        except TooFewWilling as refusal:
            log.info("conductor.too_few_willing", **about, detail=refusal.detail)
            self._refused_at[run.id] = self.database.now()
            self.notify(refusal.asked)
            return False
        except (Conflict, IntegrityError) as conflict:
            log.info("conductor.overtaken", **about, detail=str(conflict))
            return False
        except Exception as fault:  # a method is anybody's code, and one that fails must not hold up other runs
            if isinstance(fault, StoreFull) or is_full(fault) or is_unusable(fault):
                # No fault of this run either: it waits until there is room, or the files can be used.
                event = "files_unusable" if is_unusable(fault) else "disk_full"
                log.warning(f"conductor.{event}", **about, detail=str(fault))
                self._full_at = self.database.now()
                return False
            if isinstance(fault, StoreAway):
                # Nor of this one. It has said so in the log already; the next tick tries again.
                return False
            if isinstance(fault, DATABASE_AWAY):
                # No fault of this run. The next tick tries again.
                raise
            log.exception("conductor.action_failed", **about)
            self._failed[run.id, action] = run.idle_since
            return self._halt(run.id, f"{_name(action)} failed: {fault}")
        log.info("conductor.acted", **about)
        if spans.on() and isinstance(action, todo.Merge | todo.Abandon):
            self._record_round(action.round)
        return True

    def _halt(self, run_id: str, reason: str) -> bool:
        """Pause a run that cannot go on, with the reason, so that a person sees it and the others go on."""
        try:
            self.actions.do(run_id, todo.Pause(reason[:2000]))
        except Conflict:
            return False
        return True

    def _record_round(self, round_id: str) -> None:
        """Record the span of a round that has ended, which is the parent of all spans of its actions."""
        with self.database.snapshot() as session:
            row = session.get_one(RoundRow, round_id)
        itself = traceparent_of(row.run_id, row.number)
        place: dict[str, str | int] = {"tessera.run": row.run_id, "tessera.round": row.number}
        about = place | {"tessera.attempt": row.attempt}
        # After an abandoned attempt, another may yet be the round.
        over = row.state == "committed"
        name, ended_at = "round" if over else "abandoned", row.closed_at or row.opened_at
        spans.past(name, itself, row.opened_at, ended_at, about, is_parent=not over)


def _name(action: Action) -> str:
    return type(action).__name__.lower()
