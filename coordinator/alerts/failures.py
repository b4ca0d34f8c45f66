"""Failed tasks and rejected updates, grouped by their reason."""

from collections.abc import Iterable
from dataclasses import dataclass

from sqlalchemy import ColumnElement, tuple_
from sqlalchemy.orm import Session, defer

from tessera.coordinator.db import views
from tessera.coordinator.db.tables import WORKER_NAME, RunRow, TaskRow, one_of, select_tasks
from tessera.shared.api.tasks import TaskView

FAULTS = ("failed", "rejected")


@dataclass(frozen=True)
class FailedTasks:
    """Tasks of a run that failed for the same reason, newest first."""

    run: str
    """The run's name."""
    code: str
    tasks: list[TaskView]

    @property
    def workers(self) -> list[str]:
        return sorted({task.worker for task in self.tasks})


def alike(failures: Iterable[tuple[TaskView, str]]) -> list[FailedTasks]:
    """Group failures by run, state and code; the group with the newest one is first."""
    groups: dict[tuple[str, str, str], FailedTasks] = {}
    for task, run in failures:
        code = task.problem.code if task.problem else "no reason given"
        groups.setdefault((task.run, task.state, code), FailedTasks(run, code, [])).tasks.append(task)
    return list(groups.values())


def failed_tasks(
    session: Session, most: int, *which: ColumnElement[bool], after: str = ""
) -> tuple[list[tuple[TaskView, str]], str | None]:
    """Return failed tasks under these conditions with the names of their runs, newest first, and the id of the last
    if there are more. With `after`, a task's id, return older ones only."""
    query = (
        select_tasks(TaskRow, RunRow.name, WORKER_NAME)
        .join(RunRow, RunRow.id == TaskRow.run_id)
        # A task's plan is slow to decode.
        .options(defer(TaskRow.plan))
        .where(one_of(TaskRow.state, *FAULTS), *which)
        .order_by(TaskRow.created_at.desc(), TaskRow.id.desc())
        .limit(most + 1)
    )
    if after and (last := session.get(TaskRow, after)):
        # All tasks of a round have the same instant.
        query = query.where(tuple_(TaskRow.created_at, TaskRow.id) < tuple_(last.created_at, last.id))
    rows = session.execute(query).all()
    failures = [
        (views.task_view(task, worker, task.version_number + (task.kind == "train")), name)
        for task, name, worker in rows[:most]
    ]
    return failures, rows[most - 1][0].id if len(rows) > most else None
