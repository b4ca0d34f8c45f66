"""Snapshot, decide, act: the one place that moves rounds.

It keeps nothing that matters in memory, so it may be killed at any moment: what was committed stands, and the next
look at the tables says what is still to be done.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path

import structlog
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session
from structlog.contextvars import bound_contextvars

from tessera.coordinator.blobs.store import Blobs
from tessera.coordinator.db import rounds
from tessera.coordinator.db.engine import DATABASE_AWAY, Database
from tessera.coordinator.db.rounds import ACTOR
from tessera.coordinator.db.snapshots import (
    candidates,
    central_due,
    evaluators,
    invitation,
    live_workers,
    remembering,
    run_snapshot,
    runs_to_decide,
    sites_due,
)
from tessera.coordinator.db.tables import RoundRow, RunRow, TaskRow, VersionRow
from tessera.coordinator.db.transitions import move_run, move_task
from tessera.coordinator.db.workers import note_seen
from tessera.coordinator.domain import decide as todo
from tessera.coordinator.domain.decide import Action, Patience, decide
from tessera.coordinator.domain.eligibility import Invitation, refused_model, refused_plan
from tessera.coordinator.domain.lifecycle import LIVE_RUN
from tessera.coordinator.domain.snapshot import Due, RunSnapshot
from tessera.coordinator.domain.workers import Member, ids, sites_of
from tessera.coordinator.limits.disk import Room, is_full
from tessera.coordinator.notify.long_poll import Presence
from tessera.shared.api.runs import RunSpec
from tessera.shared.api.versions import VersionRef
from tessera.shared.methods.base import Plan, State
from tessera.shared.methods.registry import coordinator_half
from tessera.shared.model.spec import Model
from tessera.shared.problems import Conflict, StoreAway, StoreFull
from tessera.shared.rounds.aggregate import Aggregation, norm_scores, observed, outlying
from tessera.shared.rounds.planning import plan_round, run_facts, warnings_of
from tessera.shared.rounds.versions import States
from tessera.shared.telemetry import spans
from tessera.shared.telemetry.trace_ids import Attributes, trace_of, traceparent_of

log = structlog.get_logger()

REFUSED_SECONDS = 5.0
"""How long a round waits after too few workers would have done what was planned for them."""

FULL_SECONDS = 10.0
"""How long merges wait when the disk has no room for one."""


class TooFewWilling(Conflict):
    """A round cannot open because sites would refuse what it asks."""


class Conductor:
    """Moves every live run on, when called and at every tick."""

    def __init__(
        self,
        database: Database,
        blobs: Blobs,
        states: States,
        aggregation: Aggregation,
        presence: Presence,
        room: Room,
        *,
        patience: Patience,
        live_seconds: float,
        tick_seconds: float,
        alive_file: Path | None = None,
        notify: Callable[[Sequence[str]], None],
    ) -> None:
        self._database = database
        self._blobs = blobs
        self._states = states
        self._aggregation = aggregation
        self._presence = presence
        self._room = room
        self._patience = patience
        self._live_seconds = live_seconds
        self._tick_seconds = tick_seconds
        self._alive_file = alive_file
        self._notify = notify
        # Forgetting it costs one more try.
        self._failed: dict[tuple[str, Action], float] = {}
        self._refused_until: dict[str, float] = {}
        self._merging = threading.Lock()
        self._full_until = 0.0
        self._began_at = database.now()
        self._called = threading.Event()
        self._ended = threading.Event()

    def call(self) -> None:
        """Something happened: look at once rather than at the next tick."""
        self._called.set()

    def end(self) -> None:
        """Stops `conduct` after the action in hand."""
        self._ended.set()
        self._called.set()

    def conduct(self) -> None:
        """Works until `end`."""
        while not self._ended.is_set():
            self._called.wait(self._tick_seconds)
            self._called.clear()
            try:
                if self._alive_file:
                    self._alive_file.touch()
                self.step()
            except Exception:  # the loop outlives a database that is away for a while
                log.exception("conductor.step_failed")

    def step(self) -> None:
        """Looks at every run until none has anything to be done."""
        self._note_presence()
        while not self._ended.is_set() and self._pass():
            pass

    def _pass(self) -> bool:
        """One look at every run; whether anything was done."""
        with self._database.snapshot() as session:
            live = live_workers(session, self._database.now() - self._live_seconds)
            run_ids = runs_to_decide(session)
        acted = False
        for run_id in run_ids:
            # Before the look: an update that came between the two would be late by a deadline that it met.
            now = self._database.now()
            snapshot = self._look(run_id, live)
            if snapshot is None:
                continue
            for action in decide(snapshot, now, self._patience):
                # What failed is tried again when the run was resumed, not at every tick.
                if self._failed.get((run_id, action)) == snapshot.idle_since:
                    continue
                if isinstance(action, todo.Open) and self._database.now() < self._refused_until.get(run_id, 0.0):
                    continue
                if isinstance(action, todo.Merge):
                    self._merge_aside(snapshot, action)
                else:
                    acted |= self._try(snapshot, action)
        return acted

    def _merge_aside(self, run: RunSnapshot, action: todo.Merge) -> None:
        """Merges in a thread of its own, one round at a time, while leases and deadlines are still looked after.
        A round that another conductor merges is left to it; should that one fall silent, a later look takes over.

        A daemon: a merge that is cut off by the end of the process is done again by the next.
        """
        if self._full_until <= self._database.now() and self._merging.acquire(blocking=False):
            threading.Thread(target=self._merge_and_call, args=(run, action), name="merge", daemon=True).start()

    def _merge_and_call(self, run: RunSnapshot, action: todo.Merge) -> None:
        try:
            with self._database.alone(f"merging {run.id}") as alone:
                if alone:
                    self._try(run, action)
        except DATABASE_AWAY:
            alone = False
            log.exception("conductor.merge_failed", run=run.id)
        finally:
            self._merging.release()
        if alone:
            self.call()

    def _look(self, run_id: str, live: Sequence[Member]) -> RunSnapshot | None:
        """A run as it is. One that this version cannot read pauses, and the others go on."""
        try:
            with self._database.snapshot() as session:
                return run_snapshot(session, run_id, live, absent_are_gone=self._settled())
        except ValueError as fault:
            if self._halt(run_id, f"this version of the coordinator cannot read the run: {fault}"):
                log.exception("conductor.run_not_readable", run=run_id)
            return None

    def _settled(self) -> bool:
        """Whether who was live before this process began has had the time to be heard of by it."""
        return self._database.now() - self._began_at > self._live_seconds

    def _try(self, run: RunSnapshot, action: Action) -> bool:
        """Does one action, unless another process was faster or the run cannot go on."""
        if not isinstance(action, todo.Open | todo.Close | todo.Merge | todo.Abandon):
            return self._do(run.id, action, run.idle_since)
        with bound_contextvars(trace=trace_of(run.id, run.version + 1)):
            return self._do(run.id, action, run.idle_since, traceparent_of(run.id, run.version + 1))

    def _do(self, run_id: str, action: Action, idle_since: float, round_: str | None = None) -> bool:
        """The same; `round_` names the trace of the round that the action moves."""
        try:
            with spans.span(type(action).__name__.lower(), parent=round_) if round_ else nullcontext():
                self._act(run_id, action)
        except TooFewWilling as refusal:
            log.info("conductor.too_few_willing", run=run_id, action=str(action), detail=refusal.detail)
            self._refused_until[run_id] = self._database.now() + REFUSED_SECONDS
            return False
        except (Conflict, IntegrityError) as conflict:
            log.info("conductor.overtaken", run=run_id, action=str(action), detail=str(conflict))
            return False
        except Exception as fault:  # a method is anybody's code, and one that fails must not hold up other runs
            if isinstance(fault, StoreFull) or is_full(fault):
                # No fault of this run either: it waits until there is room.
                log.warning("conductor.disk_full", run=run_id, action=str(action), detail=str(fault))
                self._full_until = self._database.now() + FULL_SECONDS
                return False
            if isinstance(fault, StoreAway):
                # Nor of this one. It has said so in the log already; the next tick tries again.
                return False
            if isinstance(fault, DATABASE_AWAY):
                # No fault of this run. The next tick tries again.
                raise
            log.exception("conductor.action_failed", run=run_id, action=str(action))
            self._failed[run_id, action] = idle_since
            return self._halt(run_id, f"{type(action).__name__.lower()} failed: {fault}")
        log.info("conductor.acted", run=run_id, action=str(action))
        if spans.on() and isinstance(action, todo.Merge | todo.Abandon):
            self._tell_round(action.round)
        return True

    def _tell_round(self, round_id: str) -> None:
        """Records a round that is over, which is what all that was done for it has named as its parent."""
        with self._database.snapshot() as session:
            row = session.get_one(RoundRow, round_id)
        itself = traceparent_of(row.run_id, row.number)
        lasted = {"began_at": row.opened_at, "ended_at": row.closed_at or row.opened_at}
        about: Attributes = {
            "tessera.run": row.run_id,
            "tessera.round": row.number,
            "tessera.attempt": row.attempt,
        }
        if row.state == "committed":
            spans.root("round", itself=itself, **lasted, attributes=about)
        else:
            # Another attempt may yet be the round.
            spans.past("abandoned", parent=itself, **lasted, attributes=about)

    def _halt(self, run_id: str, reason: str) -> bool:
        """A run that cannot be moved on pauses with its reason, so that a person sees it and the others go on."""
        try:
            with self._database.transaction() as session:
                move_run(session, self._database.now(), ACTOR, run_id, "pause", reason[:2000])
        except Conflict:
            return False
        return True

    def _note_presence(self) -> None:
        if seen := self._presence.take():
            with self._database.transaction() as session:
                note_seen(session, seen)

    # ------------------------------------------------------------ actions

    def _act(self, run_id: str, action: Action) -> None:
        match action:
            case todo.Merge(round_id):
                invited, base = self._base(run_id)
                self._notify(self._merge(run_id, round_id, invited, base))
                # Beside the next round, which need not wait for it.
                self._score(run_id, round_id, invited.spec, base)
                return
            case todo.Open(number):
                woken = self._open(run_id, number)
            case _:
                with self._database.transaction() as session:
                    woken = self._record(session, self._database.now(), run_id, action)
        self._notify(woken)

    def _record(self, session: Session, now: float, run_id: str, action: Action) -> list[str]:
        """The actions that need no more than the tables; returns the workers who now have something to do."""
        match action:
            case todo.Lapse(task_id, token):
                task = session.get_one(TaskRow, task_id)
                _require(task.token == token and (task.lease_expires_at or 0) <= now, "the lease was renewed")
                move_task(session, now, ACTOR, task, "lapse")
            case todo.Offer(task_id):
                task = session.get_one(TaskRow, task_id)
                move_task(session, now, ACTOR, task, "offer")
                return [task.worker_id]
            case todo.Close(round_id, reason):
                rounds.close_round(session, now, session.get_one(RoundRow, round_id), reason)
            case todo.Abandon(round_id, reason):
                rounds.abandon_round(session, now, session.get_one(RoundRow, round_id), reason)
            case todo.Evaluate(due):
                return [self._offer_evaluation(session, now, session.get_one(RunRow, run_id), due)]
            case todo.CancelEvaluations():
                rounds.cancel_tasks(session, now, rounds.evaluations_of(session, run_id))
            case todo.Pause(reason):
                move_run(session, now, ACTOR, run_id, "pause", reason)
            case todo.Complete():
                move_run(session, now, ACTOR, run_id, "complete")
                rounds.cancel_tasks(session, now, rounds.evaluations_of(session, run_id))
        return []

    def _open(self, run_id: str, number: int) -> list[str]:
        """Opens a round of its own accord: the first one, or one that could not open when the last was committed."""
        invited, base = self._base(run_id)
        spec = invited.spec
        _require(base.number + 1 == number, "the run has moved on")
        model = self._states.model(spec.model)
        state = self._states.load(model, self._states.manifest(base.digest), base.number)
        willing = self._willing(run_id, invited, self._live())
        _require(len(sites_of(willing)) >= spec.cohort.quorum, "too few sites are live")
        plans = _planned(spec, model, state, willing)
        with self._database.transaction() as session:
            run = session.get_one(RunRow, run_id)
            _require(run.state == "running" and run.version_number == base.number, "the run has moved on")
            _require(self._all_live(session, plans), "a worker that was planned for is no longer live")
            return self._open_in(session, run, willing, plans)

    def _all_live(self, session: Session, plans: Mapping[str, Plan]) -> bool:
        """Whether all who were planned for are still there: planning and waiting for a turn take their time."""
        return plans.keys() <= {
            worker.name for worker in live_workers(session, self._database.now() - self._live_seconds)
        }

    def _live(self) -> list[Member]:
        with self._database.snapshot() as session:
            return live_workers(session, self._database.now() - self._live_seconds)

    def _willing(self, run_id: str, invited: Invitation, live: Sequence[Member]) -> list[Member]:
        """Who could take part in a round, each with what decides who does for its site."""
        with self._database.snapshot() as session:
            return remembering(session, run_id, candidates(session, invited, live))

    def _base(self, run_id: str) -> tuple[Invitation, VersionRef]:
        """What a run asks for, and its latest version."""
        with self._database.snapshot() as session:
            run = session.get_one(RunRow, run_id)
            version = session.get_one(VersionRow, (run_id, run.version_number))
            return invitation(session, run), VersionRef(number=version.number, digest=version.digest)

    def _open_in(
        self, session: Session, run: RunRow, willing: Sequence[Member], plans: Mapping[str, Plan]
    ) -> list[str]:
        """Opens the next round; a method that plans nothing ends the run. Returns the workers that were asked."""
        now = self._database.now()
        if not plans:
            move_run(session, now, ACTOR, run.id, "complete", "the method planned nothing more")
            return []
        return rounds.open_round(session, now, run, willing, plans)

    def _offer_evaluation(self, session: Session, now: float, run: RunRow, due: Due) -> str:
        """Offers a version to the site that is named, or to the central worker that was least often asked in vain."""
        invited = invitation(session, run)
        live = live_workers(session, now - self._live_seconds)
        if due.worker is None:
            still = central_due(session, run, invited.spec, ids(live) if self._settled() else None)
            able = evaluators(invited, live)
        else:
            still = sites_due(session, run, invited, live)
            able = [worker for worker in live if worker.id == due.worker]
        _require(due in still, "the version is no longer to be evaluated, or not by this worker")
        _require(bool(able), "no worker that could evaluate is live")
        tries = rounds.tries_by_worker(session, run.id, due.version)
        worker = min(able, key=lambda member: tries[member.id])
        rounds.offer_evaluation(session, now, run, due, worker)
        return worker.id

    def _merge(self, run_id: str, round_id: str, invited: Invitation, base: VersionRef) -> list[str]:
        """Merges and plans outside of any transaction, then commits version, round and next round in one (I3)."""
        spec = invited.spec
        self._room.require(self._states.model(spec.model).nbytes)
        with self._database.snapshot() as session:
            _require(session.get_one(RoundRow, round_id).state == "merging", "the round was merged already")
            accepted = rounds.accepted_updates(session, round_id)
            bounds = rounds.bounds_in_force(session.get_one(RunRow, run_id))
        manifest, new, merged = self._aggregation.merge(spec, bounds, base, accepted)
        made = VersionRef(number=base.number + 1, digest=new[-1].digest)
        model = self._states.model(spec.model)
        state = self._states.load(model, manifest, made.number)
        half = coordinator_half(spec.method, run_facts(spec, model))
        warnings = warnings_of(spec, model, state, bounds, outlying(half, bounds, accepted))
        live = self._live()
        willing = self._willing(run_id, invited, live)
        # If its cohort is not all here, a later look opens the next round.
        plans = None
        if made.number < spec.rounds and len(sites_of(willing)) >= (spec.cohort.size or spec.cohort.quorum):
            # A method that cannot plan fails at the next look too, which pauses the run with the reason. What was
            # merged is committed all the same.
            with suppress(Exception):
                plans = _planned(spec, model, state, willing)
        with self._database.transaction() as session:
            now = self._database.now()
            self._blobs.record(session, now, new)
            run = session.get_one(RunRow, run_id)
            _require(run.version_number == base.number, "the round was merged already")
            _require(run.state in LIVE_RUN, f"the run was {run.state} meanwhile")
            round_ = session.get_one(RoundRow, round_id)
            for warning in rounds.commit_round(session, now, run, round_, made, manifest, warnings, merged):
                log.warning("version.warning", run=run_id, number=made.number, warning=warning)
            rounds.note_scores(session, round_id, norm_scores(half, bounds, accepted))
            if run.bounds is not None:
                run.bounds = observed(half, bounds, accepted).model_dump()
            # Before the next round is offered: a site measures its own model as this round left it.
            woken = rounds.offer_at_sites(session, now, run, live)
            if run.state != "running" or plans is None or not self._all_live(session, plans):
                return woken
            with spans.span("open", parent=traceparent_of(run.id, made.number + 1)):
                return [*woken, *self._open_in(session, run, willing, plans)]

    def _score(self, run_id: str, round_id: str, spec: RunSpec, base: VersionRef) -> None:
        """Notes how far each worker's update is from what they were merged to. A process that ends before it has
        done so leaves this round without."""
        with self._database.snapshot() as session:
            accepted = rounds.accepted_updates(session, round_id)
            bounds = rounds.bounds_in_force(session.get_one(RunRow, run_id))
        if found := self._aggregation.scores(spec, bounds, base, accepted):
            with self._database.transaction() as session:
                rounds.note_scores(session, round_id, found)


def _planned(spec: RunSpec, model: Model, state: State, willing: Sequence[Member]) -> Mapping[str, Plan]:
    """Plans for those whose sites would send what is planned for them, as far as they show their policies.

    Raises SelectorError for a plan of what is not there, before any worker hears of it, and TooFewWilling.
    """
    refused = {worker.name: found for worker in willing if (found := refused_model(worker.mirror, model))}
    while True:
        willing = [worker for worker in willing if worker.name not in refused]
        if (sites := len(sites_of(willing))) < spec.cohort.quorum:
            said = "; ".join(f"{name}: {found.rule}: {found.detail}" for name, found in sorted(refused.items())[:4])
            raise TooFewWilling(f"{sites} sites would do what the round asks: {said}")
        plans = plan_round(spec, model, state, [worker.participant(spec.dataset) for worker in willing])
        planned = [worker for worker in willing if worker.name in plans]
        more = {w.name: found for w in planned if (found := refused_plan(w.mirror, model, plans[w.name]))}
        if not more:
            return plans
        refused |= more


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Conflict(otherwise)
