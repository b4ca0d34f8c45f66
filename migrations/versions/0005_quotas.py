"""What quotas count"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "announced",
        sa.Column("site_id", sa.String(), nullable=False),
        sa.Column("hour", sa.BigInteger(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["site_id"], ["sites.id"], name=op.f("fk_announced_site_id_sites")),
        sa.PrimaryKeyConstraint("site_id", "hour", name=op.f("pk_announced")),
    )
    op.create_index(
        "ix_uploads_unfinished",
        "uploads",
        ["owner"],
        sqlite_where=sa.text("not complete"),
        postgresql_where=sa.text("not complete"),
    )


def downgrade() -> None:
    op.drop_index("ix_uploads_unfinished", "uploads")
    op.drop_table("announced")
