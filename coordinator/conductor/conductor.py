"""The loop that moves rounds. For the run that a wakeup names, and for each run at every tick:

    look      read a snapshot of the run: its round, its tasks, who is live
    decide    name the actions that are due (`domain.decide`, a pure function)
    act       do each: a round opens, closes and is merged in `round_actions`, the rest is in `actions`

and again, until nothing is due. It may be killed at any moment: what was committed stands, and the next look finds
what is left to do. A merge may take long, so it runs in a thread, and leases and deadlines go on.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import structlog

from tessera.coordinator.conductor.actions import Actions
from tessera.coordinator.conductor.failures import ActionFailures
from tessera.coordinator.conductor.liveness import Liveness, TooFewWilling
from tessera.coordinator.conductor.round_actions import RoundActions
from tessera.coordinator.conductor.round_spans import in_trace, record_round
from tessera.coordinator.conductor.wakeups import ConductorWakeups
from tessera.coordinator.db.engine import DATABASE_AWAY, Database, log_away
from tessera.coordinator.db.snapshots import run_snapshot, runs_to_decide
from tessera.coordinator.domain.decide import Action, decide
from tessera.coordinator.domain.round_moves import Adopt, Ask, Close, Merge, Open
from tessera.coordinator.domain.snapshot import RunSnapshot, Timeouts
from tessera.coordinator.domain.sum_helpers import Pause
from tessera.coordinator.domain.workers import LiveWorker
from tessera.coordinator.notify.long_poll import LastSeen
from tessera.shared.problems import Conflict

log = structlog.get_logger()

LAST_SECONDS = 1.0
"""Time that a conductor that ends leaves to a merge."""


@dataclass(eq=False)
class Conductor:
    """Moves every live run on."""

    database: Database
    liveness: Liveness
    rounds: RoundActions
    actions: Actions
    failures: ActionFailures
    wakeups: ConductorWakeups
    presence: LastSeen
    timeouts: Timeouts
    notify: Callable[[Sequence[str]], None]
    """Wakes workers."""
    _merging: threading.Lock = field(default_factory=threading.Lock)
    # Runs whose merge waits for the merge in progress.
    _behind: set[str] = field(default_factory=set)

    def conduct(self) -> None:
        """Work until the wakeups end."""
        for named in self.wakeups.looks():
            try:
                self.step(named)
            except DATABASE_AWAY as fault:
                log_away(fault)
            except Exception:  # the loop outlives what is wrong with a step
                log.exception("conductor.step_failed")
        # A small merge ends by itself; the next process repeats a long one.
        if self._merging.acquire(timeout=LAST_SECONDS):
            self._merging.release()

    def step(self, named: Iterable[str] | None = None) -> None:
        """Advance these runs, or every run, until none has anything to be done."""
        self.presence.store(self.database)
        while not self.wakeups.ended.is_set():
            self.wakeups.show_alive()
            with self.database.snapshot() as session:
                live = self.liveness.workers(session)
                run_ids = runs_to_decide(session) if named is None else named
            self.liveness.looked(live)
            if not (named := [run_id for run_id in run_ids if self._advance(run_id, live)]):
                return

    def _advance(self, run_id: str, live: Sequence[LiveWorker]) -> bool:
        """Do what is due in a run at one look; return True if anything was done."""
        # Before the look: an update that came between the two would be late by a deadline that it met.
        now = self.database.now()
        if (run := self._look(run_id, live)) is None:
            return False
        acted = False
        for action in decide(run, now, self.timeouts):
            if self.failures.put_off(run, action):
                continue
            if isinstance(action, Merge):
                self._merge_aside(run, action)
            else:
                acted |= self._act(run, action)
        return acted

    def _look(self, run_id: str, live: Sequence[LiveWorker]) -> RunSnapshot | None:
        """Return a snapshot of a run. One that no version here can read pauses, and the others go on."""
        try:
            with self.database.snapshot() as session:
                return run_snapshot(session, run_id, live, absent_are_gone=self.liveness.is_settled())
        except ValueError as fault:
            if not self.failures.leave(run_id, fault) and self._pause(run_id, f"the run cannot be read: {fault}"):
                log.exception("conductor.run_not_readable", run=run_id)
            return None

    def _act(self, run: RunSnapshot, action: Action) -> bool:
        """Do an action, in one transaction; return True if anything was done. A run that fails by itself pauses."""
        with in_trace(run, action) as span:
            try:
                with span:
                    self.notify(self._do(run.id, action))
            except Exception as fault:  # noqa: BLE001 (a method is anybody's code, and must not hold up other runs)
                if isinstance(fault, TooFewWilling):
                    self.notify(fault.asked)
                own = self.failures.note(run, action, fault)
                return own and self._pause(run.id, f"{type(action).__name__.lower()} failed: {fault}")
            log.info("conductor.acted", run=run.id, action=str(action))
            record_round(self.database, action)
            return True

    def _do(self, run_id: str, action: Action) -> Sequence[str]:
        """Do an action; return the workers who now have something to do."""
        match action:
            case Open(number):
                return self.rounds.open(run_id, number)
            case Ask(number):
                return self.rounds.open(run_id, number, again=True)
            case Adopt():
                return self.actions.adopt(run_id)
            case Close(round_id, reason):
                self.rounds.close(round_id, reason)
                return ()
            case Merge(round_id):
                self.rounds.merge(run_id, round_id, lambda: self.wakeups.call(run_id))
                return ()
            case _:
                return self.actions.do(run_id, action)

    def _merge_aside(self, run: RunSnapshot, action: Merge) -> None:
        """Merge a round in a daemon thread: one at a time, and then look at the runs that waited for it."""
        self._behind.add(run.id)
        if self._merging.acquire(blocking=False):
            self._behind.discard(run.id)
            threading.Thread(target=self._merge, args=(run, action), name="merge", daemon=True).start()

    def _merge(self, run: RunSnapshot, action: Merge) -> None:
        """Merge a round, unless another conductor does: should that one fall silent, a later look takes over."""
        try:
            with self.database.alone(f"merging {run.id}") as alone:
                if alone:
                    self._act(run, action)
        except DATABASE_AWAY as fault:
            log_away(fault, run=run.id)
        finally:
            self._merging.release()
            # A copy: a look may take its own run out meanwhile.
            for run_id in tuple(self._behind):
                self._behind.discard(run_id)
                self.wakeups.call(run_id)

    def _pause(self, run_id: str, reason: str) -> bool:
        """Pause a run that cannot go on, with the reason, so that a person sees it and the others go on."""
        try:
            self.actions.do(run_id, Pause(reason[:2000]))
        except Conflict:
            return False
        return True
