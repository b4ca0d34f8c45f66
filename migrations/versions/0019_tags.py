"""Tags and a note of each run"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("runs", sa.Column("tags", sa.JSON(), nullable=False, server_default="[]"))
    op.add_column("runs", sa.Column("note", sa.String(), nullable=False, server_default=""))


def downgrade() -> None:
    op.drop_column("runs", "note")
    op.drop_column("runs", "tags")
