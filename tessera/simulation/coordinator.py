"""The coordinator of a simulation: its tables, operations and actions, for one process, without HTTP and audit.

Its tables are a SQLite file beside the blobs. Commits survive the death of the process, but no power cut.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from sqlalchemy import Engine, create_engine, event, func, select, update
from sqlalchemy.orm import Session
from sqlalchemy.pool import StaticPool

from tessera.coordinator.auth.permissions import reading
from tessera.coordinator.blobs.store import Blobs
from tessera.coordinator.conductor.actions import Actions
from tessera.coordinator.conductor.liveness import Liveness
from tessera.coordinator.conductor.round_actions import RoundActions
from tessera.coordinator.conductor.secure_sums import SecureRounds
from tessera.coordinator.db import helper_tasks, tasks, versions, views
from tessera.coordinator.db.audit import UNAUDITED
from tessera.coordinator.db.engine import Database, insert_missing, insert_or_update, lower
from tessera.coordinator.db.snapshots import live_workers, run_snapshot
from tessera.coordinator.db.tables import (
    WORKER_NAME,
    RoundRow,
    RunBlobRow,
    RunRow,
    SiteRow,
    Table,
    TaskRow,
    UploadRow,
    VersionRow,
    WorkerRow,
    new_id,
    select_tasks,
)
from tessera.coordinator.db.workers import create_site, enrol
from tessera.coordinator.domain.decide import Action
from tessera.coordinator.domain.principal import Principal
from tessera.coordinator.domain.round_moves import Ask, Close, Merge, Open
from tessera.coordinator.domain.snapshot import RunSnapshot
from tessera.coordinator.domain.workers import LiveWorker
from tessera.coordinator.limits.disk import DiskSpace
from tessera.coordinator.operations import runs
from tessera.coordinator.operations import tasks as operations
from tessera.coordinator.services import Services
from tessera.shared.api.runs import Bounds, Measurement, Round, Run, RunSpec
from tessera.shared.api.tasks import Claim, EvaluationResult, Failure, Submission, Task, TaskView
from tessera.shared.api.versions import Version
from tessera.shared.rounds.aggregate import Aggregation, NextVersion
from tessera.shared.rounds.client_privacy import simulated_key
from tessera.shared.rounds.planning import bounds_of
from tessera.shared.rounds.secure_sums import Sums
from tessera.shared.rounds.validation import Inspector
from tessera.shared.rounds.versions import States
from tessera.shared.schema import ACCEPTED
from tessera.shared.secure_sums.messages import Terms
from tessera.simulation.blob_folder import Folder
from tessera.simulation.profiles import BEGIN, VirtualClock
from tessera.simulation.virtual_sites import worker_of
from tessera.worker.task.environment import MAX_INLINE

ORCHESTRATOR = Principal(token_id="simulation", name="simulation", role="admin", site_id=None)  # noqa: S106 (none)
RUN = "simulation"
"""The id of the only run."""
EVALUATOR = "evaluator"
"""The site that holds the central data set, and does not train; and the name of its worker."""
INSTANCE = "0" * 32
INLINE_BYTES = 256 << 20
"""The limit of all updates of a round that are in memory."""
MAX_WORKERS = 2
"""Workers of a site: its own, and perhaps the central evaluator."""
SHOWN_SECONDS = 3600.0
"""The length of a lease as a virtual worker sees it."""
LONGEST_SECONDS = float(1 << 30)
"""The lease of a virtual worker that answers: it would renew a shorter one."""


class PrivateDatabase(Database):
    """A database that only this process uses, by one connection. It writes no audit, and does not wait for disks."""

    def _sqlite(self) -> Engine:
        engine = create_engine(self.url, poolclass=StaticPool, connect_args={"check_same_thread": False})

        @event.listens_for(engine, "connect")
        def _connected(connection: Any, record: object) -> None:  # noqa: ARG001 (the event's signature)
            connection.isolation_level = None
            # Its blobs are files without rows.
            for pragma in ("locking_mode=EXCLUSIVE", "journal_mode=WAL", "synchronous=OFF", "foreign_keys=OFF"):
                connection.execute(f"PRAGMA {pragma}")
            connection.create_function("lower", 1, lower, deterministic=True)

        return engine

    @contextmanager
    def transaction(self) -> Iterator[Session]:
        with Session(self.engine, info={UNAUDITED: True}) as session, session.begin():
            yield session


class VirtualLiveness(Liveness):
    """The virtual workers that are there."""

    def __init__(self, database: Database) -> None:
        super().__init__(database, liveness_seconds=LONGEST_SECONDS)
        self._all: list[LiveWorker] | None = None
        self.absent: set[str] = set()
        """The names of the workers that are not there."""

    def changed(self) -> None:
        """Read the declarations again at the next look."""
        self._all = None

    def workers(self, session: Session) -> list[LiveWorker]:
        if self._all is None:
            self._all = live_workers(session, 0.0)
        return [worker for worker in self._all if worker.name not in self.absent]

    def is_settled(self) -> bool:
        return True


class UnmaskedRounds(SecureRounds):
    """Rounds with secure sums whose updates have no masks, so that no helper opens them."""

    def _abandoned(self, terms: Terms, sites: set[str]) -> dict[str, Any]:
        return {}

    def sums(self, run_id: str, round_id: str) -> Sums | None:
        with self.database.snapshot() as session:
            round_ = session.get_one(RoundRow, round_id)
            if round_.sum_terms is None:
                return None
            envelopes = helper_tasks.envelopes(session, run_id, round_.number)
        return Sums(Terms.model_validate_json(self.blobs.read(round_.sum_terms)), envelopes, ())


class SeededAggregation(Aggregation):
    """An aggregation whose noise follows from the run's seed, so that a simulation is reproducible."""

    def merge(self, spec: RunSpec, bounds: Bounds, current: Any, *rest: Any) -> NextVersion:
        accepted, sums, _, *more = rest
        key = simulated_key(spec.seed, current.number + 1)
        return super().merge(spec, bounds, current, accepted, sums, key, *more)


class _Uploads:
    """Receives updates without a record of the upload, and without a quota."""

    def __init__(self) -> None:
        self.quota = self

    def enter(self, *about: object, **more: object) -> None:
        """Do nothing: an accepted task names its update."""

    def note_bytes(self, *about: object) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class LeasedTask:
    """A task as its worker receives it, with facts for the simulation."""

    task: Task
    worker: str
    attempt: int
    """Of its round; 0 for an evaluation."""
    examples: int
    """That its worker declared."""
    leased_at: float
    is_silent: bool
    """Its worker never answers."""

    @property
    def trains(self) -> bool:
        return self.task.kind == "train"


class VirtualCoordinator:
    """A coordinator with one run. Its operations are those behind the API, called without a network."""

    def __init__(
        self, folder: Path, clock: VirtualClock, blobs: Folder, states: States, inspector: Inspector
    ) -> None:
        self.clock = clock
        self.database = PrivateDatabase(f"sqlite:///{folder}/coordinator.db", clock)
        Table.metadata.create_all(self.database.engine)
        self.states, self.blobs = states, blobs
        self.liveness = VirtualLiveness(self.database)
        store = cast("Blobs", blobs)
        secure = UnmaskedRounds(self.database, store, states, self.liveness)
        room = cast("DiskSpace", SimpleNamespace(require=lambda _: None))
        aggregation = SeededAggregation(states, inspector)
        self.rounds = RoundActions(self.database, store, states, aggregation, room, self.liveness, secure)
        self.actions = Actions(self.database, store, states, self.liveness, secure)
        self.is_due = True
        """Whether something happened after which there may be something to decide."""
        # The parts that the operations on tasks and runs use.
        self._services = cast(
            "Services",
            SimpleNamespace(
                database=self.database,
                blobs=blobs,
                states=states,
                inspector=inspector,
                uploads=_Uploads(),
                memory=SimpleNamespace(require=lambda: None),
                settings=SimpleNamespace(submission_bytes=MAX_INLINE),
                wake_conductor=lambda *_: self.look(),
                change_feed=SimpleNamespace(notify=lambda: None),
                reading=partial(reading, self.database),
            ),
        )
        self._workers: dict[str, tuple[str, Principal]] = {}
        """Each worker's id and site, by its name."""
        self._names: dict[str, str] = {}
        """Each worker's name, by its id."""
        self.run_id = ""
        self.spec: RunSpec | None = None
        self._read()

    def close(self) -> None:
        self.database.close()

    def look(self) -> None:
        """Note that there may be something to decide."""
        self.is_due = True

    # ------------------------------------------------------------ the run and its workers

    def _read(self) -> None:
        """Read the run, its workers and the present instant, if the simulation was begun before."""
        with self.database.snapshot() as session:
            run = session.scalars(select(RunRow)).one_or_none()
            if run is None or run.id != RUN:
                # A process that was killed at its beginning may have left it.
                return
            self.run_id, self.spec = run.id, RunSpec.model_validate(run.spec)
            self._know_workers(session)
            ended = func.max(TaskRow.lease_expires_at)
            leased = session.scalar(select(ended).where(TaskRow.state == "leased")) or 0.0
            instants = (
                run.updated_at,
                session.scalar(select(func.max(RoundRow.opened_at))),
                session.scalar(select(func.max(RoundRow.closed_at))),
                session.scalar(select(ended).where(TaskRow.state.in_((*ACCEPTED, "failed", "rejected")))),
                # Leases differ in length, but a worker that falls silent was leased no later than another.
                leased - LONGEST_SECONDS,
            )
        self.clock.at = max(at for at in instants if at is not None)

    def _know_workers(self, session: Session) -> None:
        rows = session.execute(select(WorkerRow.id, WorkerRow.name, SiteRow).join(SiteRow))
        self._workers = {
            f"{site.name}/{name}": (id_, Principal(token_id="", name=site.name, role="site", site_id=site.id))
            for id_, name, site in rows
        }
        self._names = {id_: name for name, (id_, _) in self._workers.items()}

    def begin(self, spec: RunSpec, sites: Iterable[str], start: Iterable[str]) -> None:
        """Create the run and its sites, in one step. `start` has the digests of the model and its first version."""
        with self.database.transaction() as session:
            for site in sites:
                if session.scalar(select(SiteRow.id).where(SiteRow.name == site)) is None:
                    create_site(session, self.clock(), "", site)
            about = {"owner": ORCHESTRATOR.owner, "length": 0, "complete": True, "created_at": self.clock()}
            insert_missing(
                session, UploadRow, [{"id": new_id(), "digest": digest, **about} for digest in sorted(set(start))]
            )
        # With a key: a process that was killed before the next statement left the same run.
        drawn = runs.create_run(self._services, ORCHESTRATOR, spec, key=RUN).id
        with self.database.transaction() as session:
            # Before the first round opens, which would fix the bounds of a run among strangers.
            session.get_one(RunRow, drawn).bounds = bounds_of(spec, (), simulated=True).model_dump()
            session.flush()
            # Sites sign the run's id, so that it is the same in each simulation.
            for table, column in ((RunRow, "id"), (VersionRow, "run_id"), (RunBlobRow, "run_id")):
                session.execute(update(table).where(getattr(table, column) == drawn).values({column: RUN}))
        self.run_id, self.spec = RUN, spec

    def declare(self, claims: Iterable[tuple[str, Claim]]) -> None:
        """Store the declarations of workers, each with the name of its site."""
        with self.database.transaction() as session:
            ids = dict(iter(session.execute(select(SiteRow.name, SiteRow.id))))
            for site, claim in claims:
                enrol(session, self.clock(), ids[site], claim, MAX_WORKERS, LONGEST_SECONDS)
            session.flush()
            self._know_workers(session)
        self.liveness.changed()
        self.look()

    # ------------------------------------------------------------ the conductor's part

    def snapshot(self) -> RunSnapshot:
        """Return the run at this moment. Its sums need no helpers."""
        with self.database.snapshot() as session:
            found = run_snapshot(session, self.run_id, self.liveness.workers(session), absent_are_gone=True)
        open_ = found.round and replace(found.round, sums=None)
        return replace(found, round=open_, abandoning=())

    def do(self, action: Action) -> None:
        """Do an action of the conductor. Raises Conflict, TooFewWilling, and the exceptions of a method's code."""
        match action:
            case Open(number):
                self.rounds.open(self.run_id, number)
            case Ask(number):
                self.rounds.open(self.run_id, number, again=True)
            case Close(round_id, reason):
                self.rounds.close(round_id, reason)
            case Merge(round_id):
                self.rounds.merge(self.run_id, round_id, self.look)
            case _:
                self.actions.do(self.run_id, action)
        self.look()

    # ------------------------------------------------------------ the workers' part

    def progress(self) -> tuple[str, int]:
        """Return the run's state, and the number of its latest version."""
        query = select(RunRow.state, RunRow.version_number).where(RunRow.id == self.run_id)
        with self.database.snapshot() as session:
            state, number = session.execute(query).one()
        return state, number

    def offered(self) -> set[str]:
        """Return the names of the workers with an offered task."""
        query = select(TaskRow.worker_id).where(TaskRow.run_id == self.run_id, TaskRow.state == "offered")
        with self.database.snapshot() as session:
            return {self._names[worker] for worker in session.scalars(query)}

    def leased(self) -> list[LeasedTask]:
        """Return the tasks that are leased."""
        query = tasks.RECORDS.where(TaskRow.run_id == self.run_id, TaskRow.state == "leased").order_by(TaskRow.id)
        with self.database.snapshot() as session:
            return [self._leased(session, tasks.record_of(row), 1) for row in session.execute(query).all()]

    def leased_ids(self) -> set[str]:
        query = select(TaskRow.id).where(TaskRow.run_id == self.run_id, TaskRow.state == "leased")
        with self.database.snapshot() as session:
            return set(session.scalars(query))

    def claim(
        self, workers: Sequence[str], cohort: int, seconds: Callable[[str, int, int, int], float]
    ) -> list[LeasedTask]:
        """Lease the next task of each of these workers that has one, in one transaction. `seconds` returns the length
        of a lease, from the worker, its round's number and attempt, and the number of earlier leases."""
        found = []
        with self.database.transaction() as session:
            now = self.clock()
            for name in workers:
                worker_id, caller = self._workers[name]
                if (record := tasks.claimable(session, worker_id, INSTANCE)) is None:
                    continue
                about = (
                    name,
                    record.round.number if record.round else 0,
                    record.round.attempt if record.round else 0,
                )
                lasts = seconds(*about, record.task.attempts)
                tasks.lease(session, now, caller.actor, record.task, INSTANCE, lasts)
                found.append(self._leased(session, record, cohort))
        return found

    def _leased(self, session: Session, record: tasks.LoadedTask, cohort: int) -> LeasedTask:
        row = record.task
        inline = min(MAX_INLINE, INLINE_BYTES // max(cohort, 1))
        task = tasks.task_message(session, record, SHOWN_SECONDS, inline_bytes=inline)
        attempt = record.round.attempt if record.round else 0
        worker = f"{record.site}/{record.worker.name}"
        leased_at = (row.lease_expires_at or 0.0) - LONGEST_SECONDS
        # The lease of a silent worker is shorter.
        return LeasedTask(task, worker, attempt, record.declared_examples, leased_at, is_silent=leased_at < BEGIN)

    def unfinished(self) -> list[tuple[str, int, int, int, bool]]:
        """Return the training tasks that were leased and have not ended: the worker, the round's number and attempt,
        the number of leases, and whether the task is leased."""
        query = (
            select(WORKER_NAME, RoundRow.number, RoundRow.attempt, TaskRow.attempts, TaskRow.state == "leased")
            .join_from(TaskRow, WorkerRow)
            .join(SiteRow)
            .join(RoundRow, RoundRow.id == TaskRow.round_id)
            .where(TaskRow.run_id == self.run_id, TaskRow.state.in_(("offered", "leased", "expired")))
            .where(TaskRow.attempts > 0)
        )
        with self.database.snapshot() as session:
            return [tuple(row) for row in session.execute(query)]  # type: ignore[misc]  # as the query has them

    def asked(self, number: int, attempt: int) -> list[str]:
        """Return the names of the workers of a round, in order."""
        query = (
            select_tasks(WORKER_NAME)
            .join(RoundRow, RoundRow.id == TaskRow.round_id)
            .where(TaskRow.run_id == self.run_id, RoundRow.number == number, RoundRow.attempt == attempt)
            .where(TaskRow.kind == "train")
        )
        with self.database.snapshot() as session:
            return sorted(session.scalars(query))

    def there(self) -> set[str]:
        """Return the sites that may take part in the run, and are there."""
        with self.database.snapshot() as session:
            live = self.liveness.workers(session)
        asked = self.spec.cohort.sites if self.spec else None
        return {w.site for w in live if "train" in w.declared["kinds"] and (asked is None or w.site in asked)}

    def submit(self, worker: str, task: str, report: Submission) -> TaskView:
        """Validate and accept an update. Raises InvalidUpdate, and Conflict if the task was cancelled meanwhile."""
        caller = self._workers[worker][1]
        if report.data is None:
            row = {"id": new_id(), "owner": caller.owner, "digest": report.update}
            state = {"length": self.blobs.size(report.update), "complete": True, "created_at": self.clock()}
            with self.database.transaction() as session:
                insert_or_update(session, UploadRow, ("owner", "digest"), {**row, **state}, state)
        return operations.submit_update(self._services, caller, task, report)

    def submit_evaluation(self, worker: str, task: str, report: EvaluationResult) -> None:
        operations.submit_evaluation(self._services, self._workers[worker][1], task, report)

    def fail(self, worker: str, task: str, failure: Failure) -> None:
        operations.fail(self._services, self._workers[worker][1], task, failure)

    def task(self, task: str, worker: str | None = None) -> TaskView:
        """Return a task as a site sees it. Raises NotFound."""
        with self.database.snapshot() as session:
            record = tasks.find_task(session, task, None)
            view = views.task_view(record.task, f"{record.site}/{record.worker.name}", record.number)
        return views.task_for_site(view)

    def counted(self) -> dict[str, str]:
        """Return the last accepted task of each worker, by the worker's name."""
        query = (
            select(TaskRow.worker_id, TaskRow.id)
            .where(TaskRow.run_id == self.run_id, TaskRow.state.in_(ACCEPTED))
            # At one instant, the evaluation of a version follows the training for it.
            .order_by(TaskRow.lease_expires_at, TaskRow.version_number)
        )
        with self.database.snapshot() as session:
            return {self._names[worker]: task for worker, task in session.execute(query)}

    # ------------------------------------------------------------ what is known of the run

    def run(self) -> Run:
        with self.database.snapshot() as session:
            return views.run_view(session, session.get_one(RunRow, self.run_id))

    def versions(self, since: int = 0) -> list[Version]:
        query = select(VersionRow).where(VersionRow.run_id == self.run_id, VersionRow.number >= since)
        with self.database.snapshot() as session:
            rows = session.scalars(query.order_by(VersionRow.number))
            return [views.view_of(Version, row) for row in rows]

    def ended_rounds(self, since: int = 0) -> list[Round]:
        """Return the attempts that have ended at each round from this number on, in order."""
        which = (RoundRow.run_id == self.run_id) & RoundRow.state.in_(("committed", "abandoned"))
        query = select(RoundRow).where(which, RoundRow.number >= since).options(views.WITH_TASKS)
        with self.database.snapshot() as session:
            rows = session.scalars(query.order_by(RoundRow.number, RoundRow.attempt))
            return [views.round_view(row) for row in rows]

    def measurements(self, since: int = 0) -> list[Measurement]:
        """Return the measurements from a version on: of sites by their names, then the central ones."""
        assert self.spec  # noqa: S101 (for the types)
        query = views.WITH_COUNTS.where(TaskRow.run_id == self.run_id, TaskRow.version_number >= since)
        with self.database.snapshot() as session:
            found = [views.measurement_view(row, self.spec, counts=True) for row in session.execute(query)]
        central = worker_of(EVALUATOR)
        found = [one if one.held_out else one.model_copy(update={"worker": central}) for one in found]
        return sorted(found, key=lambda one: (one.version, not one.held_out, one.worker))

    def failed_evaluations(self) -> list[TaskView]:
        """Return the last failed evaluation of each version by a worker that has not measured it."""
        query = tasks.RECORDS.where(TaskRow.run_id == self.run_id, TaskRow.kind == "evaluate")
        with self.database.snapshot() as session:
            rows = [tasks.record_of(row) for row in session.execute(query.order_by(TaskRow.created_at))]
            found = {(r.task.version_number, f"{r.site}/{r.worker.name}", r.task.held_out): r for r in rows}
            return [
                views.task_view(record.task, worker if at_site else worker_of(EVALUATOR), number)
                for (number, worker, at_site), record in sorted(found.items())
                if record.task.state == "failed"
            ]

    def open_updates(self) -> tuple[set[str], int | None]:
        """Return the updates and terms that a merge may still read, and the oldest version that tasks need."""
        open_ = TaskRow.state.in_(("offered", "leased")) | ((TaskRow.state == "accepted") & (TaskRow.kind == "train"))
        query = select(TaskRow.update_digest, TaskRow.version_number).where(TaskRow.run_id == self.run_id, open_)
        terms = select(RoundRow.sum_terms).where(
            RoundRow.run_id == self.run_id, RoundRow.state.in_(("open", "merging"))
        )
        with self.database.snapshot() as session:
            rows = [(digest, number) for digest, number in session.execute(query)]
            if self.spec and self.spec.cohort.memory:
                latest = versions.latest_updates(session, self.run_id, self.spec.rounds + 1)
                rows += [(update.digest, update.base.number) for update in latest]
            used = {digest for digest, _ in rows if digest} | {digest for digest in session.scalars(terms) if digest}
        return used, min((number for _, number in rows), default=None)
