"""Totals of each run's traffic and of each worker's reports, and indexes for lists of failures and rounds"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None

FAULTY = sa.text("state in ('failed', 'rejected')")
OTHERS = sa.text("state in ('open', 'merging', 'abandoned')")
COLUMNS: dict[str, dict[str, type[sa.types.TypeEngine[Any]]]] = {
    "runs": {
        "updates": sa.BigInteger,
        "fetches": sa.BigInteger,
        "upload_bytes": sa.BigInteger,
        "download_bytes": sa.Double,
        "evaluation_bytes": sa.Double,
    },
    "workers": {"accepted": sa.BigInteger, "faulty": sa.BigInteger},
}
# Reports that the code before accepts after this step are not counted.
TRAFFIC = """
    UPDATE runs SET updates = moved.updates, fetches = moved.fetches, upload_bytes = moved.up,
        download_bytes = moved.down, evaluation_bytes = moved.evaluated
    FROM (
        SELECT run_id, sum(CASE WHEN kind = 'train' THEN 1 ELSE 0 END) AS updates,
            sum(CASE WHEN download_bytes > 0 THEN 1 ELSE 0 END) AS fetches, sum(upload_bytes) AS up,
            sum(CAST(download_bytes AS FLOAT)) AS down,
            sum(CASE WHEN kind = 'train' THEN 0.0 ELSE CAST(download_bytes AS FLOAT) END) AS evaluated
        FROM tasks WHERE kind IN ('train', 'evaluate') AND state IN ('accepted', 'merged', 'left_out')
        GROUP BY run_id
    ) AS moved WHERE moved.run_id = runs.id
"""
REPORTS = """
    UPDATE workers SET accepted = ended.accepted, faulty = ended.faulty
    FROM (
        SELECT worker_id, sum(CASE WHEN state IN ('accepted', 'merged', 'left_out') THEN 1 ELSE 0 END) AS accepted,
            sum(CASE WHEN state IN ('failed', 'rejected') THEN 1 ELSE 0 END) AS faulty
        FROM tasks GROUP BY worker_id
    ) AS ended WHERE ended.worker_id = workers.id
"""


def upgrade() -> None:
    for table, columns in COLUMNS.items():
        for name, kind in columns.items():
            op.add_column(table, sa.Column(name, kind(), server_default="0", nullable=False))
    op.execute(sa.text(TRAFFIC))
    op.execute(sa.text(REPORTS))
    op.create_index("ix_runs_created_at_id", "runs", ["created_at", "id"])
    op.create_index("ix_runs_updated_at_id", "runs", ["updated_at", "id"])
    _partial("ix_rounds_others", "rounds", ["state", "opened_at"], OTHERS)
    op.create_index("ix_tasks_worker_id_created_at_id", "tasks", ["worker_id", "created_at", "id"])
    op.drop_index("ix_tasks_faulty", "tasks")
    _partial("ix_tasks_faulty", "tasks", ["created_at", "id"], FAULTY)
    _partial("ix_tasks_faulty_leases", "tasks", ["state", "lease_expires_at"], FAULTY)
    # The index of open tasks has these too.
    op.drop_index("ix_tasks_leased", "tasks")


def downgrade() -> None:
    _partial("ix_tasks_leased", "tasks", ["run_id"], sa.text("state = 'leased'"))
    op.drop_index("ix_tasks_faulty_leases", "tasks")
    op.drop_index("ix_tasks_faulty", "tasks")
    _partial("ix_tasks_faulty", "tasks", ["created_at"], FAULTY)
    op.drop_index("ix_tasks_worker_id_created_at_id", "tasks")
    op.drop_index("ix_rounds_others", "rounds")
    op.drop_index("ix_runs_updated_at_id", "runs")
    op.drop_index("ix_runs_created_at_id", "runs")
    for table, columns in COLUMNS.items():
        for name in columns:
            op.drop_column(table, name)


def _partial(name: str, table: str, columns: list[str], where: sa.TextClause) -> None:
    op.create_index(name, table, columns, sqlite_where=where, postgresql_where=where)
