"""What workers do to tasks: claim, renew, report. Each write shows the fencing token (invariant I4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from tessera.coordinator.db import audit
from tessera.coordinator.db.tables import RoundRow, RunRow, TaskRow, VersionRow, WorkerRow
from tessera.coordinator.db.transitions import move_task
from tessera.coordinator.domain.acceptance import refusal
from tessera.shared.api.runs import RunSpec
from tessera.shared.api.tasks import Evaluated, Progress, Receipt, Submission, Task
from tessera.shared.api.versions import VersionRef
from tessera.shared.methods.base import Plan
from tessera.shared.problems import NotFound, Problem, Withheld, problem_from
from tessera.shared.rounds.planning import dataset_of, task_of
from tessera.shared.schema import ACCEPTED, MOST_WITHHELD


@dataclass(frozen=True)
class Held:
    """A task with what is around it."""

    task: TaskRow
    round: RoundRow | None
    run: RunRow
    version: VersionRef
    declared: int
    """The examples that the worker said it holds of the task's data set."""

    @property
    def spec(self) -> RunSpec:
        return RunSpec.model_validate(self.run.spec)

    @property
    def plan(self) -> Plan:
        return Plan.model_validate(self.task.plan)

    def require(self, token: int) -> None:
        """Raises LeaseLost, TaskCancelled or RoundClosed unless the token holds this task."""
        problem = refusal(self.task.state, self.round.state if self.round else None, token, self.task.token)
        if problem:
            raise problem


def held(session: Session, task_id: str, site_id: str | None) -> Held:
    """Raises NotFound if there is no such task, or if it is another site's."""
    task = session.get(TaskRow, task_id)
    worker = session.get(WorkerRow, task.worker_id) if task else None
    if task is None or worker is None or (site_id is not None and worker.site_id != site_id):
        raise NotFound(f"there is no task {task_id}")
    run = session.get_one(RunRow, task.run_id)
    round_ = session.get(RoundRow, task.round_id) if task.round_id else None
    version = session.get_one(VersionRow, (task.run_id, task.version_number))
    dataset = dataset_of(RunSpec.model_validate(run.spec), task.kind, held_out=task.held_out)
    declared = worker.declared.get("held_out" if task.held_out else "datasets", {}).get(dataset, 0)
    return Held(task, round_, run, VersionRef(number=version.number, digest=version.digest), declared)


def withhold(session: Session, now: float, actor: str, worker_id: str, withheld: Mapping[str, str]) -> None:
    """Takes back what is offered to a worker of runs that its site has not agreed to: rounds do not wait for it."""
    offered = (TaskRow.worker_id == worker_id) & (TaskRow.state == "offered") & TaskRow.run_id.in_(withheld)
    for task in session.scalars(select(TaskRow).where(offered)).all() if withheld else ():
        move_task(session, now, actor, task, "withhold", {"problem": Withheld(withheld[task.run_id]).json()})


def claimable(session: Session, worker_id: str, instance: str) -> TaskRow | None:
    """The task that this process of the worker holds already, or else the oldest that is offered to the worker.

    What a site measures of its own comes before training, which would change it.
    """
    # An answer that was lost on its way is given again rather than left to lapse.
    again = (TaskRow.state == "leased") & (TaskRow.instance == instance)
    order = (again.desc(), TaskRow.held_out.desc(), TaskRow.created_at, TaskRow.id)
    open_to = (TaskRow.worker_id == worker_id) & (again | (TaskRow.state == "offered"))
    return session.scalars(select(TaskRow).where(open_to).order_by(*order).limit(1)).first()


def has_begun_another(session: Session, task: TaskRow) -> bool:
    """Whether the worker was given another task on the same version, and so has what it needs of it."""
    made = session.get_one(VersionRow, (task.run_id, task.version_number)).created_at
    # Along an index, and not through all that the worker ever did.
    lately = TaskRow.state.in_(("leased", *ACCEPTED)) & TaskRow.kind.in_(("train", "evaluate"))
    of_worker = (TaskRow.worker_id == task.worker_id) & lately & (TaskRow.created_at >= made)
    same = (TaskRow.run_id == task.run_id) & (TaskRow.version_number == task.version_number) & (TaskRow.id != task.id)
    return session.scalars(select(TaskRow.id).where(of_worker, same).limit(1)).first() is not None


def offered_to(session: Session, worker_ids: Sequence[str]) -> list[str]:
    """Those of the workers that have a task to claim."""
    asked = TaskRow.worker_id.in_(worker_ids)
    return list(session.scalars(select(TaskRow.worker_id).where(TaskRow.state == "offered", asked).distinct()))


def lease(session: Session, now: float, actor: str, task: TaskRow, instance: str, seconds: float) -> None:
    """Gives the task to this process. Raises Conflict if another was faster."""
    if task.state == "leased":
        _renew(session, task.id, task.token, now + seconds)
    else:
        values = {
            "token": task.token + 1,
            "leases": task.leases + 1,
            "instance": instance,
            "lease_expires_at": now + seconds,
            "progress": {},
        }
        move_task(session, now, actor, task, "lease", values)
    session.refresh(task)


def renew(
    session: Session,
    now: float,
    task_id: str,
    site_id: str | None,
    token: int,
    seconds: float,
    progress: Progress | None = None,
) -> None:
    """Raises LeaseLost, TaskCancelled or RoundClosed."""
    held(session, task_id, site_id).require(token)
    _renew(session, task_id, token, now + seconds, progress)


def _renew(session: Session, task_id: str, token: int, expires_at: float, progress: Progress | None = None) -> None:
    same = (TaskRow.id == task_id) & (TaskRow.token == token) & (TaskRow.state == "leased")
    told = {"progress": progress.model_dump(mode="json", exclude_none=True)} if progress else {}
    session.execute(update(TaskRow).where(same).values(lease_expires_at=expires_at, **told))


def release(session: Session, now: float, actor: str, entry: Held, token: int) -> None:
    """Back to be offered at once; a lease given up in good order is not counted as a try."""
    entry.require(token)
    move_task(session, now, actor, entry.task, "release", {"leases": entry.task.leases - 1, "lease_expires_at": None})


def fail(session: Session, now: float, actor: str, entry: Held, token: int, problem: Problem) -> None:
    """A task that its site has not agreed to is over, and no failure."""
    entry.require(token)
    event = "withhold" if isinstance(problem, Withheld) else "fail"
    move_task(session, now, actor, entry.task, event, {"problem": problem.json()})
    if isinstance(problem, Withheld):
        # As its next claim will say: until then the next round could ask it again.
        worker = session.get_one(WorkerRow, entry.task.worker_id)
        withheld = {**worker.declared.get("withheld", {}), entry.task.run_id: problem.detail[:300]}
        worker.declared = {**worker.declared, "withheld": dict(list(withheld.items())[-MOST_WITHHELD:])}


def reject(session: Session, now: float, actor: str, entry: Held, report: Submission, problem: Problem) -> None:
    entry.require(report.token)
    values = {"problem": problem.json(), "update_digest": report.update, "audit_head": report.audit_head}
    move_task(session, now, actor, entry.task, "reject", values)


def accept(
    session: Session,
    now: float,
    actor: str,
    entry: Held,
    report: Submission | Evaluated,
    upload_bytes: int,
    numbers: dict[str, float],
    layers: Sequence[str] = (),
) -> None:
    """The report counts from here on, and only once (invariant I1)."""
    entry.require(report.token)
    values = {
        "examples": report.examples,
        "numbers": numbers,
        "layers": list(layers),
        "download_bytes": report.download_bytes,
        "upload_bytes": upload_bytes,
        "update_digest": report.update if isinstance(report, Submission) else None,
        "audit_head": report.audit_head,
    }
    move_task(session, now, actor, entry.task, "accept", values)


def was_released(entry: Held, token: int) -> bool:
    """Whether this release took place before, and only the answer was lost."""
    return entry.task.state == "offered" and entry.task.token == token > 0


def was_failed(entry: Held, token: int) -> bool:
    """Whether this failure was entered before, and only the answer was lost."""
    over = entry.task.state == "failed" or (entry.task.state == "cancelled" and entry.task.problem is not None)
    return over and entry.task.token == token


def rejection(entry: Held, report: Submission) -> Problem | None:
    """The problem that this very report was rejected with before, if it was."""
    task = entry.task
    same = (task.token, task.update_digest) == (report.token, report.update)
    return problem_from(task.problem) if task.state == "rejected" and same and task.problem else None


def was_accepted(entry: Held, report: Submission | Evaluated) -> bool:
    """Whether this very report was accepted before, and only the answer was lost."""
    same_update = not isinstance(report, Submission) or entry.task.update_digest == report.update
    return entry.task.state in ACCEPTED and entry.task.token == report.token and same_update


def last_receipt(session: Session, task: TaskRow) -> Receipt | None:
    """What became of the last update of this run that was accepted from the task's worker.

    One is enough: a worker settles it before it trains for the run again.
    """
    own = (TaskRow.worker_id == task.worker_id) & (TaskRow.run_id == task.run_id)
    accepted = own & (TaskRow.kind == "train") & TaskRow.state.in_(ACCEPTED)
    columns = select(TaskRow.id.label("task"), TaskRow.token, TaskRow.state, TaskRow.unmerged)
    latest = columns.where(accepted).order_by(TaskRow.created_at.desc(), TaskRow.id.desc()).limit(1)
    row = session.execute(latest).first()
    return Receipt.model_validate(dict(row._mapping)) if row else None  # noqa: SLF001 (SQLAlchemy's public name)


def task_message(session: Session, entry: Held, lease_seconds: float, inline_bytes: int) -> Task:
    """What the worker is told."""
    task, spec = entry.task, entry.spec
    return task_of(
        spec,
        entry.plan,
        entry.version,
        task_id=task.id,
        token=task.token,
        kind=task.kind,
        held_out=task.held_out,
        run=task.run_id,
        number=entry.round.number if entry.round else task.version_number,
        seed=task.seed,
        lease_seconds=lease_seconds,
        inline_bytes=inline_bytes,
        orchestrator=audit.creator_of(session, task.run_id),
        receipt=last_receipt(session, task),
    )
