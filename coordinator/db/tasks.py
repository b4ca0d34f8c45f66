"""Workers' writes to tasks: claim, renew, report. Each write carries the fencing token (invariant I4)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from sqlalchemy import Row, Select, exists, func, select, update
from sqlalchemy import bindparam as given
from sqlalchemy.orm import Session, aliased, object_session

from tessera.coordinator.db.snapshots import spec_in, terms_of
from tessera.coordinator.db.tables import RoundRow, RunRow, SiteRow, StudyMemberRow, TaskRow, VersionRow, WorkerRow
from tessera.coordinator.db.transitions import move_task
from tessera.coordinator.domain.acceptance import refusal
from tessera.coordinator.domain.eligibility import RunTerms, withheld_reason
from tessera.shared.api.runs import RunSpec
from tessera.shared.api.secure_sums import HELPER_KINDS, HelperReport, SumTask
from tessera.shared.api.tasks import (
    Claim,
    EvaluationResult,
    Progress,
    Receipt,
    Release,
    ReportResult,
    Submission,
    Task,
)
from tessera.shared.api.versions import VersionRef
from tessera.shared.methods.base import Plan
from tessera.shared.problems import Conflict, Fault, Invalid, NotFound, StaleVersion, Withheld, problem_from
from tessera.shared.rounds.planning import dataset_of, task_of
from tessera.shared.schema import ACCEPTED, MAX_WITHHELD

MAX_RELEASES = 20
"""Times that a task can be given back. Each adds two entries to the audit chain, which nothing removes: a worker that
claimed and gave back without end would make it too long to be verified."""


@dataclass(frozen=True)
class LoadedTask:
    """A task and the rows around it, loaded once per request."""

    task: TaskRow
    worker: WorkerRow
    site: str
    round: RoundRow | None
    version: VersionRef
    changes: int
    """The number of changes of its run's settings."""

    @cached_property
    def terms(self) -> RunTerms:
        """The run's terms; read them while the record's session is open."""
        session = object_session(self.task)
        assert session is not None  # noqa: S101 (for the types)
        return terms_of(session, self.task.run_id, self.changes)

    @cached_property
    def spec(self) -> RunSpec:
        """The run's settings, of a round those that it opened with; read them while the session is open."""
        return spec_in(self.terms.spec, self.round)

    @property
    def plan(self) -> Plan:
        return Plan.model_validate(self.task.plan)

    @property
    def number(self) -> int:
        """The number of the task's round; outside a round, of its version."""
        if self.round:
            return self.round.number
        # A helper's task is about the round after its version, and so is a rehearsal.
        return self.task.version_number + (self.task.kind in (*HELPER_KINDS, "rehearse"))

    @property
    def declared_examples(self) -> int:
        """The examples that the worker declared for the task's data set."""
        held_out = self.task.held_out
        dataset = dataset_of(self.spec, self.task.kind, held_out=held_out)
        examples: int = self.worker.declared.get("held_out" if held_out else "datasets", {}).get(dataset, 0)
        return examples

    def require_lease(self, token: int) -> None:
        """Raise LeaseLost, TaskCancelled or RoundClosed unless the token holds this task."""
        because = problem_from(self.task.problem) if self.task.problem else None
        problem = refusal(self.task.state, self.round.state if self.round else None, token, self.task.token, because)
        if problem:
            raise problem


RECORDS = (
    select(TaskRow, WorkerRow, SiteRow.name, RoundRow, VersionRow.number, VersionRow.digest, RunRow.changes)
    .join(WorkerRow, WorkerRow.id == TaskRow.worker_id)
    .join(SiteRow, SiteRow.id == WorkerRow.site_id)
    .join(VersionRow, (VersionRow.run_id == TaskRow.run_id) & (VersionRow.number == TaskRow.version_number))
    .join(RunRow, RunRow.id == TaskRow.run_id)
    .outerjoin(RoundRow, RoundRow.id == TaskRow.round_id)
)
"""Tasks with the rows around them, for `record_of`."""

_BY_ID = RECORDS.where(TaskRow.id == given("id"))
_OWN_ROWS = select(TaskRow, RoundRow).outerjoin(RoundRow, RoundRow.id == TaskRow.round_id)
_OWN_ROWS_BY_ID = _OWN_ROWS.where(TaskRow.id == given("id"))

# After a lost response, the process gets the same task again.
_HELD = (TaskRow.state == "leased") & (TaskRow.instance == given("instance"))
_OPEN_TO = (TaskRow.worker_id == given("worker")) & (_HELD | (TaskRow.state == "offered"))
_OPEN_TO &= TaskRow.id.not_in(given("holding", expanding=True))
# No task of a study reaches a site that left it, such as a helper's, which is offered again.
_OPEN_TO &= (
    exists()
    .where(StudyMemberRow.kind == "site", StudyMemberRow.left_at.is_(None))
    .where(WorkerRow.id == TaskRow.worker_id, StudyMemberRow.member == WorkerRow.site_id)
    .where(RunRow.id == TaskRow.run_id, StudyMemberRow.study == RunRow.study)
    .correlate(TaskRow)
)
_CLAIMABLE = (
    RECORDS.where(_OPEN_TO)
    .order_by(_HELD.desc(), TaskRow.held_out.desc(), TaskRow.created_at.asc(), TaskRow.id.asc())
    .limit(1)
)
_IS_CLAIMABLE = select(TaskRow.id).where(_OPEN_TO).limit(1)


def record_of(row: Row[TaskRow, WorkerRow, str, RoundRow, int, str, int]) -> LoadedTask:
    task, worker, site, round_, number, digest, changes = row
    return LoadedTask(task, worker, site, round_, VersionRef(number=number, digest=digest), changes)


def find_task(session: Session, task_id: str, site_id: str | None) -> LoadedTask:
    """Load a task. Raise NotFound if there is no such task, or if it is another site's."""
    row = session.execute(_BY_ID, {"id": task_id}).one_or_none()
    if row is None or (site_id is not None and row[1].site_id != site_id):
        raise NotFound(f"there is no task {task_id}")
    return record_of(row)


def reload(session: Session, record: LoadedTask) -> LoadedTask:
    """Load a task again in another session: its own row and its round's."""
    task, round_ = session.execute(_OWN_ROWS_BY_ID, {"id": record.task.id}).one()
    return replace(record, task=task, round=round_)


def withhold(session: Session, now: float, actor: str, worker_id: str, claim: Claim) -> None:
    """Withdraw a worker's offered tasks of runs that its site has not approved: rounds do not wait for them. A
    helper's tasks stay, since no other site can do them."""
    offered = (TaskRow.worker_id == worker_id) & (TaskRow.state == "offered") & TaskRow.run_id.in_(claim.withheld)
    offered &= TaskRow.kind.not_in(HELPER_KINDS)
    declared = {"withheld": claim.withheld, "withheld_terms": claim.withheld_terms}
    for task in session.scalars(select(TaskRow).where(offered)).all() if claim.withheld else ():
        if reason := withheld_reason(terms_of(session, task.run_id), declared):
            move_task(session, now, actor, task, "withhold", {"problem": Withheld(reason).json()})


def note_withheld(record: LoadedTask, reason: str) -> None:
    """Record that a worker withholds itself from a run, as its next claim will: the next round must not select it."""
    worker, run = record.worker, record.task.run_id
    reasons = {**worker.declared.get("withheld", {}), run: reason[:300]}
    former = {name: terms for name, terms in worker.declared.get("withheld_terms", {}).items() if name != run}
    withheld = {"withheld": dict(list(reasons.items())[-MAX_WITHHELD:]), "withheld_terms": former}
    worker.declared = {**worker.declared, **withheld}


def claimable(session: Session, worker_id: str, instance: str, holding: Sequence[str] = ()) -> LoadedTask | None:
    """Return the task that this process of the worker has already, or else the oldest that is offered to the worker.
    Tasks whose finished update it is `holding` are left out.

    A site's own evaluation comes before training, which would change its state.
    """
    row = session.execute(_CLAIMABLE, {"worker": worker_id, "instance": instance, "holding": holding}).first()
    return record_of(row) if row else None


def is_claimable(session: Session, worker_id: str, instance: str, holding: Sequence[str] = ()) -> bool:
    """Return True if `claimable` finds a task."""
    given_here = {"worker": worker_id, "instance": instance, "holding": holding}
    return session.scalars(_IS_CLAIMABLE, given_here).first() is not None


def known_to_worker(session: Session, task: TaskRow) -> tuple[str | None, bool]:
    """Return the digest of the version before the task's, and whether the worker had another task on the task's
    version, and so has its blocks."""
    about = {"id": task.id, "worker": task.worker_id, "run": task.run_id, "number": task.version_number}
    digest, has_another = session.execute(_KNOWN_TO_WORKER, about).one()
    return digest, has_another


def _known_to_worker() -> Select[str | None, bool]:
    this, before = aliased(VersionRow), aliased(VersionRow)
    of_worker = (TaskRow.worker_id == given("worker")) & (TaskRow.run_id == given("run"))
    of_worker &= TaskRow.state.in_(("leased", *ACCEPTED)) & TaskRow.kind.in_(("train", "evaluate"))
    joined = (before.run_id == this.run_id) & (before.number == this.number - 1)
    has_another = exists().where(of_worker, TaskRow.version_number == given("number"), TaskRow.id != given("id"))
    rows = select(before.digest, has_another).select_from(this).outerjoin(before, joined)
    return rows.where(this.run_id == given("run"), this.number == given("number"))


_KNOWN_TO_WORKER = _known_to_worker()


def is_waited_for(session: Session, task: TaskRow, spec: RunSpec) -> bool:
    """Return True if nothing is to be decided yet about a task whose report was accepted: the round waits for updates
    that are still made. So no look of the conductor at a cohort of thousands follows each of them."""
    cohort = spec.cohort
    # In a run that buffers updates, the worker may evaluate a version before it trains again.
    if task.kind != "train" or (cohort.buffers and spec.evaluation):
        return False
    # The worker of a late update is asked again at once, for the latest version.
    if task.version_number != session.scalar(_LATEST, {"run": task.run_id}):
        return False
    if session.scalar(_OTHERS, {"id": task.id, "run": task.run_id}) is None:
        return False
    return cohort.enough is None or session.scalars(_CAME, {"run": task.run_id}).one() < cohort.enough


_LATEST = select(RunRow.version_number).where(RunRow.id == given("run"))
# Of the run, by whose index they are few rows: tasks of its earlier rounds ended, unless it buffers updates.
_OF_RUN = (TaskRow.run_id == given("run")) & (TaskRow.kind == "train")
_OTHERS = select(TaskRow.id).where(_OF_RUN, TaskRow.state == "leased", TaskRow.id != given("id")).limit(1)
# Sites, as `decide` counts them.
_CAME = (
    select(func.count(WorkerRow.site_id.distinct()))
    .join_from(TaskRow, WorkerRow)
    .where(_OF_RUN, TaskRow.state == "accepted", TaskRow.merged_in.is_(None))
)


def offered_to(session: Session, worker_ids: Sequence[str]) -> list[str]:
    """Return the ids among `worker_ids` of workers that have an offered task."""
    offered = (TaskRow.state == "offered") & TaskRow.worker_id.in_(worker_ids)
    return list(session.scalars(select(TaskRow.worker_id).where(offered).distinct()))


def lease(session: Session, now: float, actor: str, task: TaskRow, instance: str, seconds: float) -> None:
    """Lease the task to this process. Raise Conflict if another was faster."""
    if task.state == "leased":
        renew(session, task, now + seconds)
    else:
        values: dict[str, Any] = {
            "token": task.token + 1,
            "attempts": task.attempts + 1,
            "instance": instance,
            "lease_expires_at": now + seconds,
            "progress": {},
            # Why an earlier lease was given back.
            **({"problem": None} if task.problem else {}),
        }
        move_task(session, now, actor, task, "lease", values)


def renew(session: Session, task: TaskRow, expires_at: float, progress: Progress | None = None) -> None:
    """Extend the lease of a task."""
    same = (TaskRow.id == task.id) & (TaskRow.token == task.token) & (TaskRow.state == "leased")
    reported = {"progress": progress.model_dump(mode="json", exclude_none=True)} if progress else {}
    session.execute(update(TaskRow).where(same).values(lease_expires_at=expires_at, **reported))


def require_kind(
    record: LoadedTask,
    report: Submission | EvaluationResult | ReportResult | HelperReport,
    *kinds: str,
) -> None:
    """Raise a problem unless the report is about the task under its lease, of one of these kinds."""
    record.require_lease(report.token)
    if record.task.kind not in kinds:
        raise Conflict(f"this is a task to {record.task.kind}, not to {' or '.join(kinds)}")


def require_report(record: LoadedTask, report: Submission | EvaluationResult, kind: str) -> None:
    """Raise a problem unless the report is about the task under its lease, of this kind, and within its bounds."""
    require_kind(record, report, kind)
    if report.examples > (declared := record.declared_examples):
        # The count is the update's weight: it may not exceed what was declared before the cohort was chosen.
        fault = Fault(pointer="/examples", detail=f"{report.examples} examples; the worker declared {declared}")
        raise Invalid("the report counts more examples than the worker declared", errors=[fault])
    if report.version != record.version.digest:
        raise StaleVersion(f"the task starts from {record.version.digest}; the report is about {report.version}")


def settle(
    session: Session, now: float, actor: str, record: LoadedTask, token: int, event: str, columns: dict[str, Any]
) -> None:
    """Move a task by a report of its worker, which counts only once (invariant I1), and end its lease.

    Raise LeaseLost, TaskCancelled or RoundClosed unless the token holds the task.
    """
    record.require_lease(token)
    move_task(session, now, actor, record.task, event, {"lease_expires_at": now, **columns})


def was_released(record: LoadedTask, token: int) -> bool:
    """Return True if this release took place before, and only the response was lost."""
    return record.task.state == "offered" and record.task.token == token > 0


def require_releases_left(record: LoadedTask, request: Release) -> None:
    """Raise Conflict if the task was given back `MAX_RELEASES` times, and a problem unless the request holds it."""
    record.require_lease(request.token)
    # Each lease raises the token, and counts as an attempt unless it was given back.
    if record.task.token - record.task.attempts >= MAX_RELEASES:
        raise Conflict(
            f"the task was given back {MAX_RELEASES} times, as often as it may be",
            remedy="Let its lease expire; the task is then offered again while it has attempts left.",
        )


def was_failed(record: LoadedTask, token: int) -> bool:
    """Return True if this failure was recorded before, and only the response was lost."""
    task = record.task
    over = task.state == "failed" or (task.state == "cancelled" and task.problem is not None)
    return over and task.token == token


def was_accepted(record: LoadedTask, token: int, digest: str | None = None) -> bool:
    """Return True if this very report was accepted before, and only the response was lost.

    `digest`: of its update, if it has one.
    """
    task = record.task
    return task.state in ACCEPTED and task.token == token and digest in (None, task.update_digest)


def last_receipt(session: Session, task: TaskRow) -> Receipt | None:
    """Return the receipt of the worker's last accepted update in the task's run.

    One is enough: a worker settles it before it trains for the run again.
    """
    row = session.execute(_LAST_RECEIPT, {"worker": task.worker_id, "run": task.run_id}).first()
    return Receipt.model_validate(dict(row._mapping)) if row else None  # noqa: SLF001 (SQLAlchemy's public name)


_LAST_RECEIPT = (
    select(TaskRow.id.label("task"), TaskRow.token, TaskRow.state, TaskRow.unmerged)
    .join(RoundRow, RoundRow.id == TaskRow.round_id)
    .where(TaskRow.worker_id == given("worker"), TaskRow.run_id == given("run"))
    .where(TaskRow.kind == "train", TaskRow.state.in_(ACCEPTED))
    # Not by time, since a clock may be set back.
    .order_by(TaskRow.version_number.desc(), RoundRow.attempt.desc())
    .limit(1)
)


def task_message(session: Session, record: LoadedTask, lease_seconds: float, **limits: int) -> Task:
    """Return the task as its worker receives it, with these limits on bytes."""
    task = record.task
    return task_of(
        record.spec.trained,
        record.plan,
        record.version,
        task_id=task.id,
        token=task.token,
        kind=task.kind,
        held_out=task.held_out,
        run=task.run_id,
        number=record.number,
        seed=task.seed,
        lease_seconds=lease_seconds,
        **limits,
        orchestrator=record.terms.orchestrator,
        receipt=last_receipt(session, task),
        sums=sum_task(record),
    )


def sum_task(record: LoadedTask) -> SumTask | None:
    """Return the subject of a task of a run with secure sums; None for other tasks."""
    if record.task.sums is not None:
        return SumTask.model_validate(record.task.sums)
    terms = record.round.sum_terms if record.round else None
    return SumTask(terms=terms) if terms else None
