"""Views of rounds with their tasks, in a number of statements that does not depend on the number of rounds."""

from sqlalchemy.orm import selectinload, undefer

from tessera.coordinator.db.tables import RoundRow, TaskRow
from tessera.coordinator.db.views import task_view, view_of
from tessera.shared.api.runs import Round

WITH_TASKS = selectinload(RoundRow.task_rows).options(undefer(TaskRow.worker_name))
"""The option of a query whose rounds are for `round_view`."""


def round_view(row: RoundRow) -> Round:
    """Return the view of a round that was read `WITH_TASKS`."""
    tasks = [task_view(task, task.worker_name, row.number) for task in row.task_rows]
    return view_of(
        Round,
        row,
        run=row.run_id,
        version=row.number if row.state == "committed" else None,
        tasks=sorted(tasks, key=lambda task: task.worker),
    )
