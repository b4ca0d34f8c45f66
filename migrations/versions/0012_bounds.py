"""How much one site may count for in a run"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("runs", sa.Column("bounds", sa.JSON(), nullable=True))


def downgrade() -> None:
    op.drop_column("runs", "bounds")
