"""A worker's live values, and the hours in which it called"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("workers", sa.Column("live_values", sa.JSON(), nullable=False, server_default="{}"))
    op.add_column("workers", sa.Column("seen_hour", sa.BigInteger(), nullable=False, server_default="0"))
    op.add_column("workers", sa.Column("seen_hours", sa.BigInteger(), nullable=False, server_default="0"))


def downgrade() -> None:
    for column in ("seen_hours", "seen_hour", "live_values"):
        op.drop_column("workers", column)
