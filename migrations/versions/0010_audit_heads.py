"""What a site's own audit had as its last entry when a result left"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("tasks", sa.Column("audit_head", sa.String(), nullable=True))


def downgrade() -> None:
    op.drop_column("tasks", "audit_head")
