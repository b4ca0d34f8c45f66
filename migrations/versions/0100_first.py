"""The schema of 0.1.0"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

# Revisions sort by their names. Those before this one are of databases older than 0.1.0, which are refused.
revision = "0100"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "audit_keys",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("key", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_audit_keys"),
    )
    op.create_table(
        "audit",
        sa.Column("seq", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("actor", sa.String(), nullable=False),
        sa.Column("action", sa.String(), nullable=False),
        sa.Column("subject", sa.String(), nullable=False),
        sa.Column("run_id", sa.String()),
        sa.Column("detail", sa.JSON(), nullable=False),
        sa.Column("previous", sa.String(), nullable=False),
        sa.Column("digest", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("seq", name="pk_audit"),
    )
    op.create_index("ix_audit_run_id_seq", "audit", ["run_id", "seq"])
    op.create_index("ix_audit_subject", "audit", ["subject"])
    op.create_table(
        "blobs",
        sa.Column("digest", sa.String(), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("inline", sa.LargeBinary()),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("stamp", sa.String()),
        sa.PrimaryKeyConstraint("digest", name="pk_blobs"),
    )
    op.create_table(
        "enrolments",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("code", sa.String(), nullable=False),
        sa.Column("secret_hash", sa.String(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("site", sa.String(), nullable=False),
        sa.Column("worker", sa.String(), nullable=False),
        sa.Column("device", sa.String(), nullable=False),
        sa.Column("version", sa.String(), nullable=False),
        sa.Column("address", sa.String(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_enrolments"),
    )
    op.create_index("ix_enrolments_secret_hash", "enrolments", ["secret_hash"])
    _partial_index("uq_enrolments_code", "enrolments", ["code"], unique=True, where="state = 'pending'")
    _partial_index("uq_enrolments_secret", "enrolments", ["secret_hash"], unique=True, where="state = 'pending'")
    op.create_table(
        "idempotency",
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("fingerprint", sa.String(), nullable=False),
        sa.Column("body", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("owner", "key", name="pk_idempotency"),
    )
    op.create_table(
        "notices",
        sa.Column("channel", sa.String(), nullable=False),
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("content", sa.JSON(), nullable=False),
        sa.Column("seen_at", sa.Double(), nullable=False),
        sa.Column("attempts", sa.BigInteger(), nullable=False),
        sa.Column("due_at", sa.Double()),
        sa.PrimaryKeyConstraint("channel", "key", name="pk_notices"),
    )
    op.create_table(
        "person_sessions",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("person", sa.String(), nullable=False),
        sa.Column("role", sa.String(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_person_sessions"),
    )
    op.create_index("ix_person_sessions_expires_at", "person_sessions", ["expires_at"])
    op.create_table(
        "studies",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("purpose", sa.String(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_studies"),
    )
    op.create_table(
        "study_members",
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("member", sa.String(), nullable=False),
        sa.Column("study", sa.String(), nullable=False),
        sa.Column("left_at", sa.Double()),
        sa.PrimaryKeyConstraint("kind", "member", "study", name="pk_study_members"),
    )
    op.create_table(
        "runs",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("study", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("reason", sa.String()),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("changes", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("model_bytes", sa.BigInteger(), nullable=False),
        sa.Column("version_number", sa.BigInteger(), nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("resumed_at", sa.Double(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.Column("owner", sa.String()),
        sa.Column("bounds", sa.JSON()),
        sa.Column("tags", sa.JSON(), server_default="[]", nullable=False),
        sa.Column("note", sa.String(), server_default="", nullable=False),
        sa.Column("updates", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("fetches", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("upload_bytes", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("download_bytes", sa.Double(), server_default="0", nullable=False),
        sa.Column("evaluation_bytes", sa.Double(), server_default="0", nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_runs"),
    )
    op.create_index("ix_runs_created_at_id", "runs", ["created_at", "id"])
    op.create_index("ix_runs_study_created_at_id", "runs", ["study", "created_at", "id"])
    op.create_index("ix_runs_state", "runs", ["state"])
    op.create_index("ix_runs_updated_at_id", "runs", ["updated_at", "id"])
    op.create_table(
        "sites",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("suspended_at", sa.Double()),
        sa.Column("withdrawn_at", sa.Double()),
        sa.PrimaryKeyConstraint("id", name="pk_sites"),
        sa.UniqueConstraint("name", name="uq_sites_name"),
    )
    op.create_table(
        "uploads",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("digest", sa.String(), nullable=False),
        sa.Column("length", sa.BigInteger(), nullable=False),
        sa.Column("complete", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_uploads"),
        sa.UniqueConstraint("owner", "digest", name="uq_uploads_owner_digest"),
    )
    op.create_index("ix_uploads_digest", "uploads", ["digest"])
    _partial_index("ix_uploads_unfinished", "uploads", ["owner"], where="not complete")
    op.create_table(
        "announced",
        sa.Column("site_id", sa.String(), nullable=False),
        sa.Column("hour", sa.BigInteger(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["site_id"], ["sites.id"], name="fk_announced_site_id"),
        sa.PrimaryKeyConstraint("site_id", "hour", name="pk_announced"),
    )
    op.create_table(
        "differences",
        sa.Column("run_id", sa.String(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("since", sa.BigInteger(), nullable=False),
        sa.Column("digest", sa.String(), nullable=False),
        sa.ForeignKeyConstraint(["digest"], ["blobs.digest"], name="fk_differences_digest"),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_differences_run_id"),
        sa.PrimaryKeyConstraint("run_id", "number", "since", name="pk_differences"),
    )
    op.create_table(
        "rounds",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("run_id", sa.String(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("stage", sa.String(), nullable=False),
        sa.Column("opened_at", sa.Double(), nullable=False),
        sa.Column("deadline_at", sa.Double(), nullable=False),
        sa.Column("opened_with", sa.JSON(), server_default="{}", nullable=False),
        sa.Column("closed_at", sa.Double()),
        sa.Column("reason", sa.String()),
        sa.Column("noise_key", sa.LargeBinary()),
        sa.Column("sum_terms", sa.String()),
        sa.Column("sum_values", sa.String()),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_rounds_run_id"),
        sa.PrimaryKeyConstraint("id", name="pk_rounds"),
        sa.UniqueConstraint("run_id", "number", "attempt", name="uq_rounds_run_id_number_attempt"),
    )
    _partial_index(
        "ix_rounds_others", "rounds", ["state", "opened_at"], where="state in ('open', 'merging', 'abandoned')"
    )
    op.create_index("ix_rounds_sum_values", "rounds", ["sum_values"])
    _partial_index("uq_rounds_live", "rounds", ["run_id"], unique=True, where="state in ('open', 'merging')")
    op.create_table(
        "run_blobs",
        sa.Column("run_id", sa.String(), nullable=False),
        sa.Column("digest", sa.String(), nullable=False),
        sa.ForeignKeyConstraint(["digest"], ["blobs.digest"], name="fk_run_blobs_digest"),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_run_blobs_run_id"),
        sa.PrimaryKeyConstraint("run_id", "digest", name="pk_run_blobs"),
    )
    op.create_index("ix_run_blobs_digest", "run_blobs", ["digest"])
    op.create_table(
        "tokens",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("role", sa.String(), nullable=False),
        sa.Column("secret_hash", sa.String(), nullable=False),
        sa.Column("site_id", sa.String()),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double()),
        sa.Column("revoked_at", sa.Double()),
        sa.Column("previous_hash", sa.String()),
        sa.Column("previous_until", sa.Double()),
        sa.Column("uses_left", sa.BigInteger()),
        sa.Column("last_used_at", sa.Double()),
        sa.ForeignKeyConstraint(["site_id"], ["sites.id"], name="fk_tokens_site_id"),
        sa.PrimaryKeyConstraint("id", name="pk_tokens"),
        sa.UniqueConstraint("secret_hash", name="uq_tokens_secret_hash"),
    )
    op.create_index("ix_tokens_previous_hash", "tokens", ["previous_hash"])
    op.create_table(
        "versions",
        sa.Column("run_id", sa.String(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("digest", sa.String(), nullable=False),
        sa.Column("scalars", sa.JSON(), server_default="{}", nullable=False),
        sa.Column("warnings", sa.JSON(), server_default="[]", nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("retired_at", sa.Double()),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_versions_run_id"),
        sa.PrimaryKeyConstraint("run_id", "number", name="pk_versions"),
    )
    op.create_table(
        "workers",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("site_id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("declared", sa.JSON(), nullable=False),
        sa.Column("declared_digest", sa.String(), server_default="", nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("last_seen_at", sa.Double(), nullable=False),
        sa.Column("token_id", sa.String()),
        sa.Column("audit_head", sa.String()),
        sa.Column("live_values", sa.JSON(), server_default="{}", nullable=False),
        sa.Column("accepted", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("faulty", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("seen_hour", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("seen_hours", sa.BigInteger(), server_default="0", nullable=False),
        sa.ForeignKeyConstraint(["site_id"], ["sites.id"], name="fk_workers_site_id"),
        sa.PrimaryKeyConstraint("id", name="pk_workers"),
        sa.UniqueConstraint("site_id", "name", name="uq_workers_site_id_name"),
    )
    op.create_index("ix_workers_last_seen_at", "workers", ["last_seen_at"])
    op.create_table(
        "sessions",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("token_id", sa.String(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["token_id"], ["tokens.id"], name="fk_sessions_token_id"),
        sa.PrimaryKeyConstraint("id", name="pk_sessions"),
    )
    op.create_index("ix_sessions_expires_at", "sessions", ["expires_at"])
    op.create_table(
        "tasks",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("run_id", sa.String(), nullable=False),
        sa.Column("round_id", sa.String()),
        sa.Column("worker_id", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("held_out", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("version_number", sa.BigInteger(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("plan", sa.JSON(), nullable=False),
        sa.Column("token", sa.BigInteger(), nullable=False),
        sa.Column("attempts", sa.BigInteger(), nullable=False),
        sa.Column("instance", sa.String()),
        sa.Column("lease_expires_at", sa.Double()),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("update_digest", sa.String()),
        sa.Column("audit_head", sa.String()),
        sa.Column("upload_bytes", sa.BigInteger(), nullable=False),
        sa.Column("download_bytes", sa.BigInteger(), nullable=False),
        sa.Column("examples", sa.BigInteger()),
        sa.Column("metrics", sa.JSON(), nullable=False),
        sa.Column("class_counts", sa.JSON()),
        sa.Column("report", sa.JSON()),
        sa.Column("subgroup_counts", sa.JSON()),
        sa.Column("progress", sa.JSON(), server_default="{}", nullable=False),
        sa.Column("layers", sa.JSON(), server_default="[]", nullable=False),
        sa.Column("merged_in", sa.BigInteger()),
        sa.Column("unmerged", sa.JSON(), server_default="[]", nullable=False),
        sa.Column("sums", sa.JSON()),
        sa.Column("statement", sa.JSON()),
        sa.Column("problem", sa.JSON()),
        sa.ForeignKeyConstraint(["round_id"], ["rounds.id"], name="fk_tasks_round_id"),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_tasks_run_id"),
        sa.ForeignKeyConstraint(["worker_id"], ["workers.id"], name="fk_tasks_worker_id"),
        sa.PrimaryKeyConstraint("id", name="pk_tasks"),
        sa.UniqueConstraint("round_id", "worker_id", name="uq_tasks_round_id_worker_id"),
    )
    op.create_index("ix_tasks_claim", "tasks", ["worker_id", "state", "kind", "created_at"])
    _partial_index("ix_tasks_faulty", "tasks", ["created_at", "id"], where="state in ('failed', 'rejected')")
    _partial_index(
        "ix_tasks_faulty_leases", "tasks", ["state", "lease_expires_at"], where="state in ('failed', 'rejected')"
    )
    op.create_index("ix_tasks_merged_in", "tasks", ["run_id", "merged_in"])
    op.create_index(
        "ix_tasks_moved", "tasks", ["run_id", "kind", "version_number", "state", "upload_bytes", "download_bytes"]
    )
    _partial_index("ix_tasks_open", "tasks", ["run_id", "state"], where="state in ('offered', 'leased')")
    op.create_index("ix_tasks_receipt", "tasks", ["worker_id", "run_id", "version_number"])
    op.create_index("ix_tasks_run_id_kind_state", "tasks", ["run_id", "kind", "state"])
    op.create_index("ix_tasks_update_digest", "tasks", ["update_digest"])
    op.create_index("ix_tasks_worker_id_created_at_id", "tasks", ["worker_id", "created_at", "id"])
    _partial_index(
        "uq_tasks_central",
        "tasks",
        ["run_id", "version_number"],
        unique=True,
        where="not held_out and kind = 'evaluate' and state in ('offered', 'leased', 'expired', 'accepted')",
    )
    _partial_index(
        "uq_tasks_held_out",
        "tasks",
        ["run_id", "version_number", "worker_id"],
        unique=True,
        where="held_out and kind = 'evaluate' and state in ('offered', 'leased', 'expired', 'accepted')",
    )
    _partial_index(
        "uq_tasks_report",
        "tasks",
        ["run_id", "worker_id"],
        where="kind in ('describe', 'rehearse', 'attack') and state in ('offered', 'leased', 'expired', 'accepted')",
        unique=True,
    )
    _partial_index(
        "uq_tasks_update",
        "tasks",
        ["run_id", "version_number", "worker_id"],
        unique=True,
        where="kind = 'train' and state in ('offered', 'leased', 'expired', 'accepted', 'merged')",
    )


def _partial_index(name: str, table: str, columns: list[str], *, where: str, unique: bool = False) -> None:
    op.create_index(name, table, columns, unique=unique, sqlite_where=sa.text(where), postgresql_where=sa.text(where))
