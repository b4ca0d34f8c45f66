"""What a quota counts, without reading all uploads"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("ix_uploads_owner_created_at", "uploads", ["owner", "created_at"])
    op.create_index(
        "ix_uploads_unfinished",
        "uploads",
        ["owner"],
        sqlite_where=sa.text("not complete"),
        postgresql_where=sa.text("not complete"),
    )


def downgrade() -> None:
    op.drop_index("ix_uploads_unfinished", "uploads")
    op.drop_index("ix_uploads_owner_created_at", "uploads")
