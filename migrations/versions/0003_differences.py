"""Differences between versions"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "differences",
        sa.Column("run_id", sa.String(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("since", sa.BigInteger(), nullable=False),
        sa.Column("digest", sa.String(), nullable=False),
        sa.ForeignKeyConstraint(["digest"], ["blobs.digest"], name=op.f("fk_differences_digest_blobs")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_differences_run_id_runs")),
        sa.PrimaryKeyConstraint("run_id", "number", "since", name=op.f("pk_differences")),
    )


def downgrade() -> None:
    op.drop_table("differences")
