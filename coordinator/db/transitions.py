"""Guarded writes: each is one UPDATE that must match a row in a state that its event may start from."""

from typing import Any

from sqlalchemy import ColumnElement, update
from sqlalchemy.orm import Session

from tessera.coordinator.db import audit
from tessera.coordinator.db.tables import RoundRow, RunRow, TaskRow
from tessera.coordinator.domain.lifecycle import ROUND, RUN, TASK, Lifecycle
from tessera.shared.problems import Conflict


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
    """Raise Conflict if the round is in no state from which `event` starts. The audit has `detail` too."""
    values: dict[str, Any] = {"reason": reason}
    if event != "close":
        values["closed_at"] = now
    _move(session, RoundRow, ROUND, event, RoundRow.id == round_.id, values)
    about = {"number": round_.number, "reason": reason, **detail}
    audit.record(session, now, actor, f"round.{event}", round_.id, run_id=round_.run_id, **about)


def move_task(
    session: Session,
    now: float,
    actor: str,
    task: TaskRow,
    event: str,
    values: dict[str, Any] | None = None,
) -> None:
    """Move a task that still has the token that `task` was read with.

    Raises Conflict if it has another, or is in no state from which `event` starts.
    """
    same = (TaskRow.id == task.id) & (TaskRow.token == task.token)
    _move(session, TaskRow, TASK, event, same, values or {})
    audit.record(
        session,
        now,
        actor,
        f"task.{event}",
        task.id,
        run_id=task.run_id,
        worker=task.worker_id,
        token=(values or {}).get("token", task.token),
        update=(values or {}).get("update_digest"),
        **({"audit_head": head} if (head := (values or {}).get("audit_head")) else {}),
    )


def move_tasks(session: Session, event: str, which: ColumnElement[bool], **values: Any) -> int:
    """Move those of these tasks that are in a state from which `event` starts; return how many there were.

    For what follows from the end of their round, whose entry in the audit says so.
    """
    move = TASK[event]
    statement = update(TaskRow).where(which, TaskRow.state.in_(move.sources)).values(state=move.target, **values)
    moved: int = session.execute(statement.execution_options(synchronize_session=False)).rowcount  # type: ignore[attr-defined]
    return moved


def _move(
    session: Session,
    table: type[RunRow | RoundRow | TaskRow],
    lifecycle: Lifecycle,
    event: str,
    which: ColumnElement[bool],
    values: dict[str, Any],
) -> None:
    move = lifecycle[event]
    statement = (
        update(table)
        .where(which, table.state.in_(move.sources))
        .values(state=move.target, **values)
        .execution_options(synchronize_session=False)
    )
    # mypy does not know that an UPDATE's result counts its rows.
    if session.execute(statement).rowcount != 1:  # type: ignore[attr-defined]
        kind = table.__tablename__[:-1]
        raise Conflict(f"this {kind} is not in a state to {event}; that starts from {', '.join(move.sources)}")
