"""Indexes for the conductor's frequent queries, which read only tasks that are not over"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None

OPEN = sa.text("state in ('offered', 'leased')")


def upgrade() -> None:
    op.create_index("ix_tasks_open", "tasks", ["run_id", "state"], sqlite_where=OPEN, postgresql_where=OPEN)
    op.create_index("ix_tasks_run_id_kind_state", "tasks", ["run_id", "kind", "state"])
    # The new index begins with its columns.
    op.drop_index("ix_tasks_run_id_kind", "tasks")


def downgrade() -> None:
    op.create_index("ix_tasks_run_id_kind", "tasks", ["run_id", "kind"])
    op.drop_index("ix_tasks_run_id_kind_state", "tasks")
    op.drop_index("ix_tasks_open", "tasks")
