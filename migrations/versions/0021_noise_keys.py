"""The key of each live round's noise, for runs with client-level privacy"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("rounds", sa.Column("noise_key", sa.LargeBinary()))


def downgrade() -> None:
    op.drop_column("rounds", "noise_key")
