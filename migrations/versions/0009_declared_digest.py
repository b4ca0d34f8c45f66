"""What workers declared is known by its digest"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("workers", sa.Column("declared_digest", sa.String(), server_default="", nullable=False))


def downgrade() -> None:
    op.drop_column("workers", "declared_digest")
