"""How far tasks are, which layers updates held, and who is signed in to the page"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

LEASED = sa.text("state = 'leased'")
FAULTY = sa.text("state in ('failed', 'rejected')")


def upgrade() -> None:
    op.add_column("tasks", sa.Column("progress", sa.JSON(), server_default="{}", nullable=False))
    op.add_column("tasks", sa.Column("layers", sa.JSON(), server_default="[]", nullable=False))
    op.create_index("ix_tasks_leased", "tasks", ["run_id"], sqlite_where=LEASED, postgresql_where=LEASED)
    op.create_index("ix_tasks_faulty", "tasks", ["created_at"], sqlite_where=FAULTY, postgresql_where=FAULTY)
    op.create_index(
        "ix_tasks_moved", "tasks", ["run_id", "kind", "state", "round_id", "upload_bytes", "download_bytes"]
    )
    op.drop_index("ix_tasks_claim", "tasks")
    op.create_index("ix_tasks_claim", "tasks", ["worker_id", "state", "kind", "created_at"])
    op.create_index("ix_audit_run_id_seq", "audit", ["run_id", "seq"])
    op.create_index("ix_audit_subject", "audit", ["subject"])
    op.drop_index("ix_audit_run_id", "audit")
    op.create_table(
        "sessions",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("token_id", sa.String(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["token_id"], ["tokens.id"], name=op.f("fk_sessions_token_id_tokens")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_sessions")),
    )
    op.create_index(op.f("ix_sessions_expires_at"), "sessions", ["expires_at"])


def downgrade() -> None:
    op.drop_table("sessions")
    op.create_index("ix_audit_run_id", "audit", ["run_id"])
    op.drop_index("ix_audit_subject", "audit")
    op.drop_index("ix_audit_run_id_seq", "audit")
    op.drop_index("ix_tasks_claim", "tasks")
    op.create_index("ix_tasks_claim", "tasks", ["worker_id", "state"])
    for name in ("ix_tasks_moved", "ix_tasks_faulty", "ix_tasks_leased"):
        op.drop_index(name, "tasks")
    op.drop_column("tasks", "layers")
    op.drop_column("tasks", "progress")
