"""The values of the model from which a round's exact sums were, by which later rounds know of it"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("rounds", sa.Column("sum_values", sa.String(), nullable=True))
    op.create_index("ix_rounds_sum_values", "rounds", ["sum_values"])


def downgrade() -> None:
    op.drop_index("ix_rounds_sum_values", "rounds")
    op.drop_column("rounds", "sum_values")
