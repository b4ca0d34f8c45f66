"""Which version took an update in, and one update that counts of each worker from each version"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

# Names are those of the tables at this step, and not of the code that may have moved on.
TAKEN_IN = """
    UPDATE tasks SET merged_in = version_number + 1
    WHERE kind = 'train' AND state IN ('accepted', 'merged', 'left_out')
    AND round_id IN (SELECT id FROM rounds WHERE state IN ('merging', 'committed'))
"""
UPDATE = sa.text("kind = 'train' and state in ('offered', 'leased', 'expired', 'accepted', 'merged')")


def upgrade() -> None:
    op.add_column("tasks", sa.Column("merged_in", sa.BigInteger(), nullable=True))
    op.execute(sa.text(TAKEN_IN))
    op.create_index("ix_tasks_merged_in", "tasks", ["run_id", "merged_in"])
    op.create_index(
        "uq_tasks_update",
        "tasks",
        ["run_id", "version_number", "worker_id"],
        unique=True,
        sqlite_where=UPDATE,
        postgresql_where=UPDATE,
    )


def downgrade() -> None:
    op.drop_index("uq_tasks_update", "tasks")
    op.drop_index("ix_tasks_merged_in", "tasks")
    op.drop_column("tasks", "merged_in")
