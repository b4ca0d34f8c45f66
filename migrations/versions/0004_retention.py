"""Retired versions; finding what refers to an update"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("versions", sa.Column("retired_at", sa.Double(), nullable=True))
    op.create_index(op.f("ix_tasks_update_digest"), "tasks", ["update_digest"])
    op.create_index(op.f("ix_uploads_digest"), "uploads", ["digest"])


def downgrade() -> None:
    op.drop_index(op.f("ix_uploads_digest"), "uploads")
    op.drop_index(op.f("ix_tasks_update_digest"), "tasks")
    with op.batch_alter_table("versions", schema=None) as batch_op:
        batch_op.drop_column("retired_at")
