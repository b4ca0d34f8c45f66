"""The field's names for columns, states and keys

Coordinators of the version before cannot work on this schema: stop them first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

COLUMNS = {("tasks", "numbers"): "metrics", ("tasks", "leases"): "attempts", ("versions", "numbers"): "scalars"}
COHORT = {"enough": "target_updates", "tries": "max_attempts", "task_tries": "max_task_attempts"}
SPEC = {"divide": "normalization"}
PLAN = {"memory": "server_state", "numbers": "scalars"}
PROGRESS = {"of_bytes": "total_bytes"}
DECLARED = {"mirror": "advertised_policy"}
UNIQUE = {
    "uq_tasks_central": (["run_id", "version_number"], "not held_out"),
    "uq_tasks_held_out": (["run_id", "version_number", "worker_id"], "held_out"),
}
EVALUATION = "kind = 'evaluate' and state in ('offered', 'leased', '{}', 'accepted')"
ROWS = 500


def upgrade() -> None:
    for (table, old), new in COLUMNS.items():
        op.execute(f"alter table {table} rename column {old} to {new}")
    _rename_state("lapsed", "expired")
    _rewrite(lambda names: names)


def downgrade() -> None:
    _rewrite(lambda names: {new: old for old, new in names.items()})
    _rename_state("expired", "lapsed")
    for (table, old), new in COLUMNS.items():
        op.execute(f"alter table {table} rename column {new} to {old}")


def _rename_state(before: str, after: str) -> None:
    for name in UNIQUE:
        op.drop_index(name, "tasks")
    tasks = sa.table("tasks", sa.column("state"))
    op.execute(tasks.update().where(tasks.c.state == before).values(state=after))
    for name, (columns, which) in UNIQUE.items():
        where = sa.text(f"{which} and {EVALUATION.format(after)}")
        op.create_index(name, "tasks", columns, unique=True, sqlite_where=where, postgresql_where=where)


def _rewrite(way: Callable[[dict[str, str]], dict[str, str]]) -> None:
    def spec(given: Any) -> Any:
        given = _renamed(given, way(SPEC))
        return given | {"cohort": _renamed(given["cohort"], way(COHORT))} if "cohort" in given else given

    _each("runs", ["id"], "spec", spec)
    _each(
        "idempotency",
        ["owner", "key"],
        "body",
        lambda body: body | ({"spec": spec(body["spec"])} if "spec" in body else {}),
    )
    _each("tasks", ["id"], "plan", lambda plan: _renamed(plan, way(PLAN)))
    _each("tasks", ["id"], "progress", lambda progress: _renamed(progress, way(PROGRESS)))
    # Without a digest it is read anew, until its worker declares it again.
    _each("workers", ["id"], "declared", lambda declared: _renamed(declared, way(DECLARED)), declared_digest="")


def _renamed(given: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names.get(key, key): value for key, value in given.items()}


def _each(table: str, key: list[str], column: str, change: Callable[[Any], Any], **also: str) -> None:
    """Change a column of JSON in every row, some rows at a time."""
    columns = [*(sa.column(name, sa.String) for name in [*key, *also]), sa.column(column, sa.JSON)]
    rows = sa.table(table, *columns)
    names = [rows.c[name] for name in key]
    connection, last = op.get_bind(), None
    while True:
        query = sa.select(*names, rows.c[column]).order_by(*names).limit(ROWS)
        if last is not None:
            query = query.where(sa.tuple_(*names) > sa.tuple_(*last))
        found = connection.execute(query).all()
        for *at, value in found:
            if value and (new := change(value)) != value:
                same = [name == part for name, part in zip(names, at, strict=True)]
                connection.execute(rows.update().where(*same).values({column: new, **also}))
        if len(found) < ROWS:
            return
        last = found[-1][: len(key)]
