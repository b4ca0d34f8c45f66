"""An index for sums of bytes by run and by version, of updates and of evaluations"""

from __future__ import annotations

from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

BEFORE = ["run_id", "kind", "state", "round_id", "upload_bytes", "download_bytes"]
AFTER = ["run_id", "kind", "version_number", "state", "upload_bytes", "download_bytes"]


def upgrade() -> None:
    _index(AFTER)


def downgrade() -> None:
    _index(BEFORE)


def _index(columns: list[str]) -> None:
    op.drop_index("ix_tasks_moved", "tasks")
    op.create_index("ix_tasks_moved", "tasks", columns)
