"""Terms of secure sums, and what senders and helpers signed"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("rounds", sa.Column("sum_terms", sa.String(), nullable=True))
    op.add_column("tasks", sa.Column("sums", sa.JSON(), nullable=True))
    op.add_column("tasks", sa.Column("statement", sa.JSON(), nullable=True))


def downgrade() -> None:
    op.drop_column("tasks", "statement")
    op.drop_column("tasks", "sums")
    op.drop_column("rounds", "sum_terms")
