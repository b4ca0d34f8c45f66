"""Changes of the settings of live runs"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0027"
down_revision = "0026"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("runs", sa.Column("changes", sa.BigInteger(), nullable=False, server_default="0"))
    op.add_column("rounds", sa.Column("opened_with", sa.JSON(), nullable=False, server_default="{}"))


def downgrade() -> None:
    op.drop_column("rounds", "opened_with")
    op.drop_column("runs", "changes")
