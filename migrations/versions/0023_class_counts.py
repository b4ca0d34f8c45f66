"""Counts of predictions by class, which a site may send with an evaluation"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("tasks", sa.Column("class_counts", sa.JSON(), nullable=True))


def downgrade() -> None:
    op.drop_column("tasks", "class_counts")
