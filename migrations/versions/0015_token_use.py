"""When a token was last used, and which token a worker shows"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("tokens", sa.Column("last_used_at", sa.Double(), nullable=True))
    op.add_column("workers", sa.Column("token_id", sa.String(), nullable=True))


def downgrade() -> None:
    op.drop_column("workers", "token_id")
    op.drop_column("tokens", "last_used_at")
