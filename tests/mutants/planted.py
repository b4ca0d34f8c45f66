"""Faults planted into the real code, one at a time: each must be found, or the simulation is not to be trusted."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any, Literal
from unittest.mock import patch

from sqlalchemy import select, update

from tessera.coordinator.blobs import store as blobs
from tessera.coordinator.blobs import uploads
from tessera.coordinator.conductor import actions, liveness, round_actions
from tessera.coordinator.db import round_tasks, rounds, snapshots, tasks, transitions, versions
from tessera.coordinator.db.tables import AuditRow, RoundRow, SiteRow, TaskRow, select_tasks
from tessera.coordinator.domain import acceptance, decide, lifecycle
from tessera.coordinator.domain.lifecycle import Move
from tessera.coordinator.domain.round_moves import Close
from tessera.coordinator.maintenance import garbage_collection
from tessera.coordinator.operations import runs as run_operations
from tessera.coordinator.operations import tasks as task_operations
from tessera.shared.api.cohort import Cohort
from tessera.shared.api.tasks import Lease
from tessera.shared.problems import RoundClosed, TaskCancelled
from tessera.shared.rounds import aggregate as aggregation
from tessera.shared.rounds import validation as inspection
from tessera.shared.tensors.lazy import itself
from tessera.worker.state import vault
from tests.model_checking import rules
from tests.model_checking.federation import Shape, Violated, simulate
from tests.model_checking.replicas import World
from tests.model_checking.rules import rehearse
from tests.model_checking.schedule import Crash, Schedule

Change = tuple[Any, str, Any]

# As they are before anything is planted.
REFUSAL = acceptance.refusal
ASSIGNED = versions.assigned_updates
ABANDON = rounds.abandon_round
CLOSE = rounds.close_round
LEASE = tasks.lease
LIVE = snapshots.live_workers
MOVE = transitions._move
ROUND = decide._end_of
RECORD = transitions.audit.record
SETTLE = tasks.settle
STAGE = vault.Vault.stage
FIND = tasks.find_task
AT_WORK = snapshots.sites_at_work
COMMIT = rounds.commit_round
UPDATE = aggregation.Aggregation._update
HEARTBEAT = task_operations.heartbeat
NEW_TASK = round_tasks.new_task
BUFFERED = decide.buffered
OLDEST = Cohort.oldest_base
OF_ROUND = TaskRow.round_id.in_(select(RoundRow.id).where(RoundRow.state == "merging"))


def no_token(state: str, round_state: str | None, shown: int, token: int, *because: Any) -> Any:
    return REFUSAL(state, round_state, token, token, *because)


def same_token(session: Any, now: float, actor: str, task: TaskRow, instance: str, seconds: float) -> None:
    token = task.token
    LEASE(session, now, actor, task, instance, seconds)
    task.token = max(token, 1)
    session.flush()


def unguarded(session: Any, table: Any, table_of: Any, event: str, which: Any, values: Any) -> None:
    every = tuple({state for move in table_of.values() for state in (*move.sources, move.target)})
    MOVE(session, table, {event: Move(every, table_of[event].target)}, event, which, values)


def any_state(state: str, round_state: str | None, shown: int, token: int, *because: Any) -> Any:
    return None if state == "cancelled" and shown == token else REFUSAL(state, round_state, shown, token)


def acknowledged_first(serving: Any, caller: Any, judged: Any, columns: Any, *rest: Any) -> Any:
    """Answers, and writes a moment later."""
    schedule = SCHEDULES[-1]

    def later() -> None:
        schedule.sleep(0.5)
        with serving.database.transaction() as session:
            record, token = tasks.reload(session, judged), judged.task.token
            if record.task.state == "leased" and record.task.token == token:
                tasks.settle(session, serving.database.now(), caller.actor, record, token, "accept", columns)

    schedule.spawn(schedule.current.process, "later", later)
    return task_operations.get_task(serving, caller, judged.task.id)


def unflushed(self: Any, path: Any, digest: str) -> None:
    final = self._path(digest)
    final.parent.mkdir(parents=True, exist_ok=True)
    path.replace(final)


def table_first(self: Any, upload: Any, file: Any, hexadecimal: str) -> None:
    """Enters a blob in the table before it has its name."""
    path = self._path(upload.id)
    if f"sha256:{hexadecimal}" != upload.digest:
        path.unlink()
        raise uploads._mismatch(upload.digest, f"sha256:{hexadecimal}")
    if upload.length <= self.blobs.inline_bytes:
        self._complete(upload, self.blobs.adopt(path, upload.digest, upload.length))
        return
    self._complete(upload, uploads.StoredBlob(upload.digest, upload.length))
    self.blobs.adopt(path, upload.digest, upload.length)


def unverified(self: Any, upload: Any, file: Any, hexadecimal: str) -> None:
    self._complete(upload, self.blobs.adopt(self._path(upload.id), upload.digest, upload.length))


def taken_as_they_are(self: Any, upload: Any, data: bytes) -> None:
    if not upload.complete:
        self._complete(upload, replace(self.blobs.put([data]), digest=upload.digest))


def in_two_transactions(session: Any, now: float, run: Any, round_: Any, made: Any) -> Any:
    """The version, and then the round's end and the run's number."""
    version = made.ref
    news = versions.add_version(session, now, run.id, version, made.manifest, made.warnings)
    session.flush()
    session.connection().exec_driver_sql("COMMIT")
    session.connection().exec_driver_sql("BEGIN IMMEDIATE")
    schedule = SCHEDULES[-1]
    if schedule.current and schedule.dice.random() < 0.3:
        schedule.kill(schedule.current.process)
        raise Crash
    rounds.move_round(session, now, rounds.ACTOR, round_, "commit", round_.reason)
    rounds.move_tasks(session, "merge", TaskRow.merged_in == version.number, {})
    run.version_number, run.revision, run.updated_at = version.number, run.revision + 1, now
    session.flush()
    return news


def unmeasured(self: Any, digest: str, model: Any, manifest: Any, plan: Any, max_norm: Any, data: Any = None) -> Any:
    return {}, tuple(self.open(digest, model, manifest, plan, data))


def leaking(session: Any, now: float, round_: Any, *about: Any) -> None:
    """Assigns what earlier attempts at the round had accepted, too."""
    CLOSE(session, now, round_, *about)
    attempts = (TaskRow.run_id == round_.run_id) & (TaskRow.version_number == round_.number - 1)
    accepted = TaskRow.state.in_(("accepted", "left_out"))
    session.execute(update(TaskRow).where(attempts, accepted).values(merged_in=round_.number))


def by_arrival(session: Any, run_id: str, number: int) -> Any:
    seq = select(AuditRow.subject).where(AuditRow.action == "task.accept").order_by(AuditRow.seq)
    accepted = TaskRow.state.in_(("accepted", "merged"))
    digests = select(TaskRow.id, TaskRow.update_digest).where(TaskRow.run_id == run_id, accepted)
    of_task = dict(session.execute(digests).all())
    order = [of_task[task] for task in session.scalars(seq) if task in of_task]
    return sorted(ASSIGNED(session, run_id, number), key=lambda one: order.index(one.digest))


def twice(session: Any, run_id: str, number: int) -> Any:
    found = ASSIGNED(session, run_id, number)
    return [*found, replace(found[0], worker=f"{found[0].worker}-again")]


def one_lost(session: Any, run_id: str, number: int) -> Any:
    found = ASSIGNED(session, run_id, number)
    return found[:-1] if len(found) > 1 else found


def of_latest(session: Any, run_id: str, number: int) -> Any:
    """Opens each update as if it had started from the version before."""
    base = versions.latest_version(session, run_id)
    return [replace(entry, base=base, since=()) for entry in ASSIGNED(session, run_id, number)]


def undamped(session: Any, run_id: str, number: int) -> Any:
    return [replace(entry, since=()) for entry in ASSIGNED(session, run_id, number)]


def without_late(session: Any, run_id: str, number: int) -> Any:
    found = ASSIGNED(session, run_id, number)
    return [entry for entry in found if not entry.since] or found


def counted_again(session: Any, now: float, round_: Any, *about: Any) -> None:
    """Assigns the updates of the version before, too."""
    CLOSE(session, now, round_, *about)
    before = (TaskRow.run_id == round_.run_id) & (TaskRow.merged_in == round_.number - 1)
    session.execute(update(TaskRow).where(before).values(merged_in=round_.number, state="accepted"))


def weighed_by_arrival(session: Any, run_id: str, number: int) -> Any:
    """Gives the first to come the weight of the first by name."""
    found = by_arrival(session, run_id, number)
    weights = [one.examples for one in sorted(found, key=lambda one: one.worker)]
    return [replace(one, examples=weight) for one, weight in zip(found, weights, strict=True)]


def forgets_sent(session: Any, run_id: str, *about: Any) -> Any:
    """Takes a site whose update waits for idle."""
    waits = (TaskRow.run_id == run_id) & (TaskRow.state == "accepted") & TaskRow.merged_in.is_(None)
    sent = set(session.scalars(select_tasks(SiteRow.name).where(waits)))
    return {site: counts for site, counts in AT_WORK(session, run_id, *about).items() if site not in sent}


def of_latest_alone(self: Any, session: Any, run: Any, keep: int) -> set[int]:
    return set(range(run.version_number - keep + 1, run.version_number + 1))


def joins_late(session: Any, now: float, run: Any, *about: Any) -> Any:
    """Counts what came during the merge as merged."""
    news = COMMIT(session, now, run, *about)
    waits = (TaskRow.run_id == run.id) & (TaskRow.state == "accepted") & TaskRow.merged_in.is_(None)
    session.execute(update(TaskRow).where(waits).values(merged_in=run.version_number, state="merged"))
    return news


def normalised(self: Any, entry: Any, *about: Any) -> Any:
    """Lets a late update weigh less, so that the sum of weights is smaller too."""
    made = UPDATE(self, replace(entry, since=()), *about)
    return replace(made, examples=made.examples / sqrt(1 + len(entry.since)))


def by_version(self: Any, entry: Any) -> Any:
    return Counter({name: len(entry.since) for name in self.states.manifest(entry.base.digest).blocks})


def all_cancelled(session: Any, now: float, round_: Any, *about: Any) -> None:
    round_tasks.cancel_tasks(session, now, round_tasks._OF_RUN, {"run": round_.run_id})


def untold(serving: Any, caller: Any, task_id: str, request: Any) -> Any:
    try:
        return HEARTBEAT(serving, caller, task_id, request)
    except (TaskCancelled, RoundClosed):
        return Lease(lease_seconds=serving.settings.lease_seconds)


def of_version_before(session: Any, now: float, run: Any, *about: Any, **columns: Any) -> Any:
    return NEW_TASK(session, now, run, *about, **columns, version_number=max(0, run.version_number - 1))


def too_few(round_: Any, run: Any, now: float, *sites: Any) -> Any:
    found = BUFFERED(round_, run, now, *sites)
    return [Close(round_.id, "the deadline came")] if now >= round_.deadline_at else found


def of_open_rounds(state: str, round_state: str | None, *about: Any) -> Any:
    is_over = state == "leased" and round_state in ("merging", "committed", "abandoned")
    return RoundClosed("the round that asked for it is over") if is_over else REFUSAL(state, round_state, *about)


def emptied(session: Any, now: float, round_: Any, reason: str, *cohort: Any) -> None:
    ABANDON(session, now, round_, reason)


def one_less(round_: Any, run: Any, *more: Any) -> Any:
    cohort = run.cohort.model_copy(update={"quorum": run.cohort.quorum - 1})
    return ROUND(round_, replace(run, cohort=cohort), *more)


def endless(round_: Any, run: Any, now: float) -> Any:
    return ROUND(replace(round_, deadline_at=now + 1), run, now)


def lapse_unseen(session: Any, now: float, task_id: str, token: int) -> None:
    actions.move_task(session, now, actions.ACTOR, session.get_one(TaskRow, task_id), "expire")


def kept_at_once(self: Any, *arguments: Any) -> Any:
    staged = STAGE(self, *arguments)
    staged.commit()

    class Done:
        accept = discard = staticmethod(lambda: None)

    return Done()


def kept_when_accepted(self: Any) -> Any:
    self.commit()
    return self


def unaudited(session: Any, now: float, actor: str, action: str, subject: str, **detail: Any) -> None:
    if action != "task.expire":
        RECORD(session, now, actor, action, subject, **detail)


def of_any_site(session: Any, task_id: str, site_id: str | None) -> Any:
    return FIND(session, task_id, None)


def everything_swept(self: Any) -> int:
    """Takes what is not in the table yet for what is not needed."""
    with self._database.snapshot() as session:
        known = set(session.scalars(select(blobs.BlobRow.digest)))
    left = [path for path in self._root.rglob("*") if path.is_file() and f"sha256:{path.name}" not in known]
    for path in left:
        path.unlink()
    return len(left)


def writes_first(session: Any, now: float, actor: str, record: Any, token: int, event: str, columns: Any) -> None:
    """Notes the report, and then looks whether it may."""
    record.task.examples = columns.get("examples")
    session.flush()
    session.connection().exec_driver_sql("COMMIT")
    session.connection().exec_driver_sql("BEGIN IMMEDIATE")
    SETTLE(session, now, actor, record, token, event, columns)


def unchecked_report(record: Any, report: Any, kind: str) -> None:
    record.require_lease(report.token)


@dataclass(frozen=True)
class Fault:
    """A change of the code, or of the schema, that the simulation has to find."""

    changes: tuple[Change, ...] = ()
    without: tuple[str, ...] = ()
    """Indexes that the schema lacks."""
    in_rules: Change | None = None
    """The same change for the rules alone, which find it too."""
    seed: int = 0
    """The seed that shows the fault, to save time only: a change of the code may move it to another."""
    planted_in: Literal["make test", "make test-long", "make mutants"] = "make mutants"
    hidden: bool = False
    """Whether forty federations do not show it."""
    buffered: bool = False
    """Whether it is looked for in runs that buffer updates."""


def _sourced(event: str, *more: str) -> Mapping[str, Move]:
    move = lifecycle.TASK[event]
    return {**lifecycle.TASK, event: Move((*move.sources, *more), move.target)}


WITHOUT_CANCELLING = {**lifecycle.TASK, "cancel": Move(("offered", "leased"), "cancelled")}
FROM_MERGING = {**lifecycle.ROUND, "close": Move(("open", "merging", "abandoned"), "merging")}

FAULTS: dict[str, Fault] = {
    "the token is not checked": Fault(((tasks, "refusal", no_token),), in_rules=(rules, "refusal", no_token), seed=6),
    "a new lease has the old token": Fault(((tasks, "lease", same_token),), planted_in="make test"),
    "no index keeps a run to one live round": Fault(
        without=("uq_rounds_live", "uq_tasks_update"), seed=1, planted_in="make test-long"
    ),
    "a write does not look at the state it starts from": Fault(((transitions, "_move", unguarded),), seed=5),
    "an answer is given before the commit": Fault(
        ((task_operations, "_accept", acknowledged_first),), planted_in="make test"
    ),
    "a file is not flushed before its rename": Fault(
        ((blobs.Blobs, "move", unflushed),), seed=1, planted_in="make test-long"
    ),
    "a folder is not flushed after a rename": Fault(
        ((blobs.Blobs, "flush_names", lambda self, digests: None),), seed=3, planted_in="make test"
    ),
    "a blob is in the table before it has its name": Fault(
        ((uploads.Uploads, "_finish", table_first),), seed=1, planted_in="make test-long"
    ),
    "a round is committed in two transactions": Fault(
        ((rounds, "commit_round", in_two_transactions),), seed=2, planted_in="make test"
    ),
    "leases do not run out": Fault(
        ((decide, "_leases", lambda *arguments: iter(())),), seed=1, planted_in="make test-long"
    ),
    # A renewal must fall between a look and the write that follows from it.
    "a lapse is entered though the lease was renewed": Fault(((actions, "expire", lapse_unseen),), hidden=True),
    "a cancelled task is accepted": Fault(
        ((tasks, "refusal", any_state), (transitions, "TASK", _sourced("accept", "cancelled"))),
        in_rules=(rules, "refusal", any_state),
        seed=1,
        planted_in="make test-long",
    ),
    "an update leaks into the next attempt": Fault(((rounds, "close_round", leaking),), seed=80),
    "the quorum is off by one": Fault(
        ((decide, "_end_of", one_less),), in_rules=(decide, "_end_of", one_less), seed=3, planted_in="make test-long"
    ),
    "updates are merged in the order of arrival": Fault(
        (
            (versions, "assigned_updates", by_arrival),
            (aggregation, "sorted", lambda entries, key: list(entries)),
        ),
        seed=1,
    ),
    "an update counts twice": Fault(((versions, "assigned_updates", twice),), seed=1),
    "an accepted update is left out": Fault(
        ((versions, "assigned_updates", one_lost),), seed=1, planted_in="make test-long"
    ),
    "a repeated report is not recognised": Fault(
        ((tasks, "was_accepted", lambda *arguments: False),), planted_in="make test"
    ),
    "a repeated creation creates again": Fault(((run_operations, "once", lambda *arguments: arguments[-1]()),)),
    "digests are not verified": Fault(
        ((uploads.Uploads, "_finish", unverified), (uploads.Uploads, "keep", taken_as_they_are)), seed=21
    ),
    "the vault keeps before the submission is accepted": Fault(
        ((vault.Vault, "stage", kept_at_once),), seed=1, planted_in="make test-long"
    ),
    "the vault keeps before the update is merged": Fault(
        ((vault.StagedTensors, "accept", kept_when_accepted),), seed=11, planted_in="make test-long"
    ),
    "whoever was ever here is present": Fault(
        ((liveness, "live_workers", lambda session, since: LIVE(session, 0)),), seed=8
    ),
    "a lapse is not audited": Fault(((transitions.audit, "record", unaudited),), seed=1, planted_in="make test-long"),
    "the tasks of a closed round live on": Fault(
        ((round_tasks, "cancel_tasks", lambda *arguments: None),),
        in_rules=(rules, "TASK", WITHOUT_CANCELLING),
        seed=2,
        planted_in="make test-long",
    ),
    "an abandoned round closes": Fault(in_rules=(rules, "ROUND", FROM_MERGING)),
    "a round never reaches its deadline": Fault(((decide, "_end_of", endless),), seed=25),
    "a site reaches the tasks of others": Fault(((tasks, "find_task", of_any_site),), planted_in="make test"),
    "what is not finite is taken": Fault(((inspection.Inspector, "checked", unmeasured),)),
    "the sweep takes blobs that are being made": Fault(((blobs.Blobs, "sweep", everything_swept),), seed=19),
    "a report on another version, or of any weight, is taken": Fault(
        ((tasks, "require_report", unchecked_report),), seed=16
    ),
    "a refused report leaves a trace": Fault(((tasks, "settle", writes_first),), seed=5),
    "a late update is opened against the latest version": Fault(
        ((versions, "assigned_updates", of_latest),), buffered=True
    ),
    "a late update weighs as much as others": Fault(((versions, "assigned_updates", undamped),), buffered=True),
    "a late update is assigned and not merged": Fault(
        ((versions, "assigned_updates", without_late),), buffered=True, planted_in="make test-long"
    ),
    "an update counts in two versions": Fault(((rounds, "close_round", counted_again),), buffered=True),
    "a task that is too old goes on": Fault(
        ((rounds, "cancel_obsolete", lambda *arguments: None),), buffered=True, planted_in="make test-long"
    ),
    "a site at work is asked again": Fault(
        (
            (round_actions, "sites_at_work", lambda *arguments: {}),
            (snapshots, "sites_at_work", lambda *arguments: {}),
        ),
        buffered=True,
    ),
    "an abandoned attempt loses the buffer": Fault(
        ((actions.rounds, "abandon_round", emptied),), buffered=True, planted_in="make test-long"
    ),
    "a buffer without enough updates stands still": Fault(
        ((decide, "buffered", lambda *arguments: iter(())),), buffered=True, planted_in="make test-long"
    ),
    "a site whose update waits is asked again, and no index prevents it": Fault(
        ((round_actions, "sites_at_work", forgets_sent), (snapshots, "sites_at_work", forgets_sent)),
        without=("uq_tasks_update",),
        buffered=True,
        planted_in="make test-long",
    ),
    "updates weigh by who came first": Fault(
        ((versions, "assigned_updates", weighed_by_arrival),), buffered=True, planted_in="make test-long"
    ),
    "a version is removed that a task starts from": Fault(
        ((garbage_collection.Retention, "_needed", of_latest_alone),), buffered=True, planted_in="make test-long"
    ),
    "a late update is never assigned": Fault(
        ((rounds, "ASSIGN", round_tasks.ASSIGN.where(OF_ROUND)),), buffered=True, planted_in="make test"
    ),
    "an update that comes during a merge counts as merged": Fault(
        ((rounds, "commit_round", joins_late),), buffered=True, planted_in="make test-long"
    ),
    "normalisation cancels staleness": Fault(
        ((aggregation.Aggregation, "_update", normalised),), buffered=True, planted_in="make test-long"
    ),
    "a late update brings back what it started from": Fault(
        ((aggregation, "RebasedTensor", lambda present, sent: itself(sent)),),
        buffered=True,
        planted_in="make test-long",
    ),
    "a late update moves a frozen block": Fault(
        ((aggregation, "_without", lambda late, frozen: late),), buffered=True, planted_in="make test"
    ),
    "staleness counts versions that left a block alone": Fault(
        ((aggregation.Aggregation, "_changes", by_version),), seed=7, buffered=True, planted_in="make test-long"
    ),
    "a late update weighs too little": Fault(
        ((Cohort, "staleness_weight", lambda self, changes: 1 / (1 + changes)),),
        buffered=True,
        planted_in="make test-long",
    ),
    "each version ends the work that goes on": Fault(
        ((rounds, "cancel_obsolete", all_cancelled),), buffered=True, planted_in="make test-long"
    ),
    "a heartbeat does not say that its task has ended": Fault(
        ((task_operations, "heartbeat", untold),), buffered=True, planted_in="make test-long"
    ),
    "a site is asked from the version before the latest": Fault(
        ((round_tasks, "new_task", of_version_before),), buffered=True, planted_in="make test-long"
    ),
    "the limit of staleness is off by one": Fault(
        ((Cohort, "oldest_base", lambda self, number: OLDEST(self, number) - 1),),
        buffered=True,
        planted_in="make test-long",
    ),
    "the end of a run leaves updates without an outcome": Fault(
        (
            (rounds, "end_training", lambda *arguments: None),
            (round_tasks, "end_training", lambda *arguments: None),
        ),
        buffered=True,
        planted_in="make test-long",
    ),
    "a deadline closes a buffer without a quorum": Fault(
        ((decide, "buffered", too_few),), buffered=True, planted_in="make test-long"
    ),
    "a silent site is asked in an open round": Fault(
        ((liveness, "live_workers", lambda session, since: LIVE(session, 0)),),
        buffered=True,
        planted_in="make test-long",
    ),
    "an update is refused once the round that asked for it is over": Fault(
        ((tasks, "refusal", of_open_rounds),), buffered=True, planted_in="make test"
    ),
}

SEEDS = 40
"""Federations in which a fault is looked for."""


SCHEDULES: list[Schedule] = []
"""The schedules of the federations with a planted fault: some faults need to know whose turn it is."""


@contextmanager
def planted(fault: Fault) -> Iterator[None]:
    with ExitStack() as stack:
        for where, name, what in fault.changes:
            # A module that has no name of its own for a builtin gets one.
            stack.enter_context(patch.object(where, name, what, create=name == "sorted"))
        started = World.__post_init__

        def noted(world: World) -> None:
            started(world)
            SCHEDULES.append(world.schedule)
            with closing(sqlite3.connect(world.folder / "tessera.db")) as raw:
                for index in fault.without:
                    raw.execute(f"DROP INDEX {index}")

        stack.enter_context(patch.object(World, "__post_init__", noted))
        yield
        SCHEDULES.clear()


def hunt(name: str) -> str | None:
    """Return how the simulation finds a fault; None if it stays hidden."""
    with planted(FAULTS[name]):
        for seed in range(FAULTS[name].seed, FAULTS[name].seed + SEEDS):
            try:
                simulate(seed, shape=Shape.buffered(seed) if FAULTS[name].buffered else None)
            except Violated as violated:
                return str(violated)
    return None


def hunt_in_rules(name: str) -> str | None:
    """Return how the rules alone find a fault; None if it stays hidden."""
    change = FAULTS[name].in_rules
    assert change
    with patch.object(*change):
        try:
            rehearse(0, 200_000)
        except Violated as violated:
            return str(violated)
    return None
