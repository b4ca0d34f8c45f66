"""Notices of what needs a person"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "notices",
        sa.Column("channel", sa.String(), nullable=False),
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("content", sa.JSON(), nullable=False),
        sa.Column("seen_at", sa.Double(), nullable=False),
        sa.Column("attempts", sa.BigInteger(), nullable=False),
        sa.Column("due_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("channel", "key", name="pk_notices"),
    )


def downgrade() -> None:
    op.drop_table("notices")
