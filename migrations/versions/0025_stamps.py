"""The state of a blob's file when its bytes were last known to match its digest"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("blobs", sa.Column("stamp", sa.String(), nullable=True))


def downgrade() -> None:
    op.drop_column("blobs", "stamp")
