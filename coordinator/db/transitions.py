"""New tasks, and guarded writes: each is one UPDATE that must match a row in a state which its event starts from."""

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from sqlalchemy import ColumnElement, String, Update, func, select, update
from sqlalchemy import bindparam as given
from sqlalchemy.orm import Session
from sqlalchemy.orm.attributes import set_committed_value

from tessera.coordinator.db import audit
from tessera.coordinator.db.tables import RoundRow, RunRow, TaskRow, WorkerRow, new_id
from tessera.coordinator.domain.lifecycle import ROUND, RUN, TASK, Lifecycle, Move
from tessera.shared.api.secure_sums import HELPER_KINDS
from tessera.shared.methods.base import Plan
from tessera.shared.problems import Conflict, Problem, WorkerFailed

ACTOR = "conductor"

_OPEN_TASKS = (
    select(TaskRow).where(TaskRow.state.in_(TASK["cancel"].sources)).order_by(TaskRow.created_at, TaskRow.id)
)
_Movable = RunRow | RoundRow | TaskRow


def move_run(session: Session, now: float, actor: str, run_id: str, event: str, reason: str | None = None) -> None:
    """Raise Conflict if the run is in no state from which `event` starts."""
    values = {"reason": reason, "updated_at": now}
    if event == "resume":
        values["resumed_at"] = now
    _move(session, RunRow, RUN, event, {"id": run_id}, values)
    audit.record(session, now, actor, f"run.{event}", run_id, run_id=run_id, reason=reason)


def move_round(
    session: Session, now: float, actor: str, round_: RoundRow, event: str, reason: str | None, **detail: Any
) -> None:
    """Move a round; `round_` then has the new values. The audit has `detail` too.

    Raises Conflict if it is in no state from which `event` starts.
    """
    values: dict[str, Any] = {"reason": reason}
    if event != "close":
        values["closed_at"] = now
    _move(session, RoundRow, ROUND, event, {"id": round_.id}, values)
    about = {"number": round_.number, "reason": reason, **detail}
    audit.record(session, now, actor, f"round.{event}", round_.id, run_id=round_.run_id, **about)
    _note(round_, {"state": ROUND[event].target, **values})


def move_task(
    session: Session, now: float, actor: str, task: TaskRow, event: str, columns: dict[str, Any] | None = None
) -> None:
    """Move a task that still has the token that `task` was read with; `task` then has the new values.

    Raises Conflict if it has another, or is in no state from which `event` starts.
    """
    values = columns or {}
    _move(session, TaskRow, TASK, event, {"id": task.id, "token": task.token}, values)
    token, update_digest = values.get("token", task.token), values.get("update_digest")
    about = {"worker": task.worker_id, "token": token, "update": update_digest}
    if head := values.get("audit_head"):
        about["audit_head"] = head
    audit.record(session, now, actor, f"task.{event}", task.id, run_id=task.run_id, **about)
    _note(task, {"state": TASK[event].target, **values})
    _count(session, task, event)


def _count(session: Session, task: TaskRow, event: str) -> None:
    """Add what happened to a task to the totals of its worker and its run, which pages read instead of all tasks."""
    if event not in _COUNTED:
        return
    head = {"head": task.audit_head} if event == "accept" else {}
    session.connection().execute(_COUNTED[event], {"worker": task.worker_id, **head})
    if event == "accept" and task.kind in ("train", "evaluate"):
        update_, down = int(task.kind == "train"), task.download_bytes
        moved = {
            "updates": update_,
            "fetches": int(down > 0),
            "upload_bytes": task.upload_bytes,
            "download_bytes": down,
        }
        moved |= {"evaluation_bytes": 0 if update_ else down}
        session.connection().execute(_TRAFFIC, {"run": task.run_id, **{_MORE + name: n for name, n in moved.items()}})


def move_back(session: Session, now: float, run: RunRow) -> None:
    """Move a run's resumption, its latest rounds and its helpers' tasks back by the same time, to end at `now`: which
    came first, and what is left of a deadline, stays."""
    latest = (RoundRow.run_id == run.id) & (RoundRow.number >= run.version_number)
    times = RoundRow.opened_at, RoundRow.closed_at
    last = session.execute(select(*map(func.max, times)).where(latest)).one()
    ahead = max(run.resumed_at, *(at or 0.0 for at in last)) - now
    run.resumed_at -= ahead
    moved = {column: column - ahead for column in (*times, RoundRow.deadline_at)}
    session.execute(update(RoundRow).where(latest).values(moved))
    helpers = (TaskRow.run_id == run.id) & TaskRow.kind.in_(HELPER_KINDS)
    helpers &= TaskRow.version_number >= run.version_number
    session.execute(update(TaskRow).where(helpers).values(created_at=TaskRow.created_at - ahead))


def move_tasks(
    session: Session, event: str, which: ColumnElement[bool], parameters: Mapping[str, Any], **values: Any
) -> int:
    """Move the tasks that meet a condition and are in a state from which `event` starts; return their number. The
    condition is one of a module, with `parameters` for its parameters.

    For what follows from the end of their round, whose entry in the audit says so.
    """
    session.flush()
    return session.connection().execute(_tasks_statement(event, which), {**values, **parameters}).rowcount


def cancel_tasks(
    session: Session,
    now: float,
    which: ColumnElement[bool],
    parameters: Mapping[str, Any],
    because: Problem | None = None,
) -> None:
    """Cancel the open tasks that a condition selects; `parameters` are the values of its parameters, and `because`
    is the problem that their workers get."""
    columns = {"problem": because.json()} if because else None
    for task in session.scalars(_OPEN_TASKS.where(which), parameters).all():
        move_task(session, now, ACTOR, task, "cancel", columns)


def new_task(session: Session, now: float, run: RunRow, worker_id: str, plan: Plan, **columns: Any) -> TaskRow:
    """Offer a task to a worker, from the run's latest version unless `columns` has another; return its row."""
    about = {"run_id": run.id, "worker_id": worker_id, "version_number": run.version_number, **columns}
    task = TaskRow(id=new_id(), created_at=now, plan=plan.model_dump(mode="json"), **about)
    session.add(task)
    return task


def _move(
    session: Session,
    table: type[_Movable],
    lifecycle: Lifecycle,
    event: str,
    which: Mapping[str, Any],
    values: Mapping[str, Any],
) -> None:
    move = lifecycle[event]
    session.flush()
    same = {_OLD + name: value for name, value in which.items()}
    if session.connection().execute(_statement(table, move, tuple(which)), {**values, **same}).rowcount != 1:
        kind = table.__tablename__[:-1]
        raise Conflict(f"this {kind} is not in a state to {event}; that starts from {', '.join(move.sources)}")


def _note(row: RoundRow | TaskRow, values: dict[str, Any]) -> None:
    """Give a row in memory what was written, instead of reading it again."""
    for name, value in values.items():
        set_committed_value(row, name, value)


@cache
def _tasks_statement(event: str, which: ColumnElement[bool]) -> Update:
    move = TASK[event]
    return update(TaskRow).where(which, TaskRow.state.in_(move.sources)).values(state=move.target)


_OLD = "old_"
_MORE = "more_"
_RUN, _WORKER = RunRow.__table__.c, WorkerRow.__table__.c
_MOVED = ("updates", "fetches", "upload_bytes", "download_bytes", "evaluation_bytes")
_TRAFFIC = (
    update(RunRow)
    .where(_RUN.id == given("run"))
    .values({name: _RUN[name] + given(_MORE + name, type_=_RUN[name].type) for name in _MOVED})
)
_REPORTED = update(WorkerRow).where(_WORKER.id == given("worker"))
_ACCEPTED = _REPORTED.values(
    accepted=_WORKER.accepted + 1, audit_head=func.coalesce(given("head", type_=String), _WORKER.audit_head)
)
_FAULTY = _REPORTED.values(faulty=_WORKER.faulty + 1)
_COUNTED = {"accept": _ACCEPTED, "fail": _FAULTY, "reject": _FAULTY}


@cache
def _statement(table: type[_Movable], move: Move, which: tuple[str, ...]) -> Update:
    """Return the UPDATE of the row with these values, to be given under the columns' names behind `old_`. The other
    values given are its new ones.

    Built once for each event, as constants of modules are: building a statement takes longer than
    executing it.
    """
    columns = table.__table__.c
    counted = {"revision": columns.revision + 1} if table is RunRow else {}
    same = (columns[name] == given(_OLD + name) for name in which)
    return update(table).where(*same, columns.state.in_(move.sources)).values(state=move.target, **counted)


def code_of(problem: Mapping[str, Any]) -> str:
    """Return a problem's code, or that of the worker whose words it has."""
    if problem["code"] != WorkerFailed.code:
        return str(problem["code"])
    code = str(problem["detail"]).partition(":")[0]
    return code if re.fullmatch(r"[a-z0-9-]{1,64}", code) else WorkerFailed.code
