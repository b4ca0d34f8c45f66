"""Workers that ask to be admitted, secrets that replace others, suspended sites, owners of runs"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

COLUMNS = {
    ("sites", "suspended_at"): sa.Double,
    ("tokens", "previous_hash"): sa.String,
    ("tokens", "previous_until"): sa.Double,
    ("tokens", "uses_left"): sa.BigInteger,
    ("runs", "owner"): sa.String,
}


def upgrade() -> None:
    for (table, name), kind in COLUMNS.items():
        op.add_column(table, sa.Column(name, kind(), nullable=True))
    op.create_index(op.f("ix_tokens_previous_hash"), "tokens", ["previous_hash"])
    op.create_table(
        "enrolments",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("code", sa.String(), nullable=False),
        sa.Column("secret_hash", sa.String(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("site", sa.String(), nullable=False),
        sa.Column("worker", sa.String(), nullable=False),
        sa.Column("device", sa.String(), nullable=False),
        sa.Column("version", sa.String(), nullable=False),
        sa.Column("address", sa.String(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_enrolments")),
    )
    op.create_index(op.f("ix_enrolments_secret_hash"), "enrolments", ["secret_hash"])
    pending = sa.text("state = 'pending'")
    for name, column in (("code", "code"), ("secret", "secret_hash")):
        op.create_index(
            f"uq_enrolments_{name}",
            "enrolments",
            [column],
            unique=True,
            sqlite_where=pending,
            postgresql_where=pending,
        )


def downgrade() -> None:
    op.drop_table("enrolments")
    op.drop_index(op.f("ix_tokens_previous_hash"), "tokens")
    for table, name in COLUMNS:
        # Not in a batch: other tables refer to these, and must not be without them for a moment.
        op.drop_column(table, name)
