"""Guarded writes: each is one UPDATE that must match a row in a state that its event may start from."""

from typing import Any

from sqlalchemy import ColumnElement, update
from sqlalchemy.orm import Session
from sqlalchemy.orm.attributes import set_committed_value

from tessera.coordinator.db import audit
from tessera.coordinator.db.tables import RoundRow, RunRow, TaskRow
from tessera.coordinator.domain.lifecycle import ROUND, RUN, TASK, Lifecycle, Move
from tessera.shared.problems import Conflict

_Movable = RunRow | RoundRow | TaskRow


def move_run(session: Session, now: float, actor: str, run_id: str, event: str, reason: str | None = None) -> None:
    """Raise Conflict if the run is in no state from which `event` starts."""
    values = {"reason": reason, "revision": RunRow.revision + 1, "updated_at": now}
    if event == "resume":
        values["resumed_at"] = now
    _move(session, RunRow, RUN, event, RunRow.id == run_id, values)
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
    _move(session, RoundRow, ROUND, event, RoundRow.id == round_.id, values)
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
    same = (TaskRow.id == task.id) & (TaskRow.token == task.token)
    _move(session, TaskRow, TASK, event, same, values)
    token, update_digest = values.get("token", task.token), values.get("update_digest")
    about = {"worker": task.worker_id, "token": token, "update": update_digest}
    if head := values.get("audit_head"):
        about["audit_head"] = head
    audit.record(session, now, actor, f"task.{event}", task.id, run_id=task.run_id, **about)
    _note(task, {"state": TASK[event].target, **values})


def move_tasks(session: Session, event: str, which: ColumnElement[bool], **values: Any) -> int:
    """Move those of these tasks that are in a state from which `event` starts; return how many there were.

    For what follows from the end of their round, whose entry in the audit says so.
    """
    return _update(session, TaskRow, TASK[event], which, values)


def _move(
    session: Session,
    table: type[_Movable],
    lifecycle: Lifecycle,
    event: str,
    which: ColumnElement[bool],
    values: dict[str, Any],
) -> None:
    move = lifecycle[event]
    if _update(session, table, move, which, values) != 1:
        kind = table.__tablename__[:-1]
        raise Conflict(f"this {kind} is not in a state to {event}; that starts from {', '.join(move.sources)}")


def _note(row: RoundRow | TaskRow, values: dict[str, Any]) -> None:
    """Give a row in memory what was written, instead of reading it again."""
    for name, value in values.items():
        set_committed_value(row, name, value)


def _update(
    session: Session, table: type[_Movable], move: Move, which: ColumnElement[bool], values: dict[str, Any]
) -> int:
    """Return the number of rows that were in a source state of the move."""
    statement = update(table).where(which, table.state.in_(move.sources)).values(state=move.target, **values)
    # mypy does not know that an UPDATE's result counts its rows.
    return session.execute(statement.execution_options(synchronize_session=False)).rowcount  # type: ignore[attr-defined, no-any-return]
