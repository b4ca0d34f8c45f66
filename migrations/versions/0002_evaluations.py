"""Evaluations at sites and their further tries; what a version tells"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

BEFORE = sa.text("kind = 'evaluate'")
STANDING = "kind = 'evaluate' and state in ('offered', 'leased', 'lapsed', 'accepted')"
CENTRAL = sa.text(f"not held_out and {STANDING}")
HELD_OUT = sa.text(f"held_out and {STANDING}")

# Two conductors of the version before could each ask a worker of their own. Of a version's standing evaluations the
# one that is done stays, else any: what is not wanted twice is cancelled.
ONE_EACH = """
update tasks set state = 'cancelled'
where kind = 'evaluate' and state in ('offered', 'leased', 'lapsed', 'accepted') and exists (
    select 1 from tasks as other
    where other.kind = 'evaluate' and other.state in ('offered', 'leased', 'lapsed', 'accepted')
    and other.run_id = tasks.run_id and other.version_number = tasks.version_number and (
        (other.state = 'accepted' and tasks.state <> 'accepted')
        or ((other.state = 'accepted') = (tasks.state = 'accepted') and other.id < tasks.id)
    )
)
"""


def upgrade() -> None:
    op.execute(ONE_EACH)
    with op.batch_alter_table("tasks", schema=None) as batch_op:
        batch_op.add_column(sa.Column("held_out", sa.Boolean(), server_default=sa.false(), nullable=False))
        batch_op.drop_index("uq_tasks_evaluation", sqlite_where=BEFORE, postgresql_where=BEFORE)
        batch_op.create_index(
            "uq_tasks_central",
            ["run_id", "version_number"],
            unique=True,
            sqlite_where=CENTRAL,
            postgresql_where=CENTRAL,
        )
        batch_op.create_index(
            "uq_tasks_held_out",
            ["run_id", "version_number", "worker_id"],
            unique=True,
            sqlite_where=HELD_OUT,
            postgresql_where=HELD_OUT,
        )

    with op.batch_alter_table("versions", schema=None) as batch_op:
        batch_op.add_column(sa.Column("numbers", sa.JSON(), server_default="{}", nullable=False))
        batch_op.add_column(sa.Column("warnings", sa.JSON(), server_default="[]", nullable=False))


def downgrade() -> None:
    with op.batch_alter_table("versions", schema=None) as batch_op:
        batch_op.drop_column("warnings")
        batch_op.drop_column("numbers")

    # The schema before knows one evaluation of a version by each worker, and none at sites.
    op.execute("delete from tasks where kind = 'evaluate' and (held_out or state in ('failed', 'cancelled'))")
    with op.batch_alter_table("tasks", schema=None) as batch_op:
        batch_op.drop_index("uq_tasks_held_out", sqlite_where=HELD_OUT, postgresql_where=HELD_OUT)
        batch_op.drop_index("uq_tasks_central", sqlite_where=CENTRAL, postgresql_where=CENTRAL)
        batch_op.drop_column("held_out")
    with op.batch_alter_table("tasks", schema=None) as batch_op:
        batch_op.create_index(
            "uq_tasks_evaluation",
            ["run_id", "version_number", "worker_id"],
            unique=True,
            sqlite_where=BEFORE,
            postgresql_where=BEFORE,
        )
