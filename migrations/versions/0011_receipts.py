"""Which accepted updates were merged, and which were left out"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

# Names are those of the tables at this step, and not of the code that may have moved on.
MERGED = """
    UPDATE tasks SET state = 'merged' WHERE kind = 'train' AND state = 'accepted'
    AND round_id IN (SELECT id FROM rounds WHERE state = 'committed')
    AND CAST(numbers AS TEXT) NOT LIKE '%"anomaly.left_out"%'
"""
LEFT_OUT = """
    UPDATE tasks SET state = 'left_out' WHERE kind = 'train' AND state = 'accepted'
    AND round_id IN (SELECT id FROM rounds WHERE state IN ('committed', 'abandoned'))
"""
ACCEPTED = "UPDATE tasks SET state = 'accepted' WHERE state IN ('merged', 'left_out')"


def upgrade() -> None:
    op.add_column("tasks", sa.Column("unmerged", sa.JSON(), server_default="[]", nullable=False))
    op.create_index("ix_tasks_receipt", "tasks", ["worker_id", "run_id", "created_at"])
    op.execute(sa.text(MERGED))
    op.execute(sa.text(LEFT_OUT))


def downgrade() -> None:
    op.execute(sa.text(ACCEPTED))
    op.drop_index("ix_tasks_receipt", "tasks")
    op.drop_column("tasks", "unmerged")
