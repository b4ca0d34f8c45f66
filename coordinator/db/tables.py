"""The tables. What must not be, the schema forbids; the reason stands above each constraint.

Instants are seconds since 1970 by the database's clock, so that they compare alike on every database.
A column that came later has a default in the schema, so that the version before can still write its rows.
"""

import json
import uuid
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    ForeignKey,
    Index,
    LargeBinary,
    MetaData,
    String,
    UniqueConstraint,
    false,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, validates

from tessera.shared.tensors.lazy import digest_of


def new_id() -> str:
    return uuid.uuid4().hex


NAMES = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    "pk": "pk_%(table_name)s",
}


class Table(DeclarativeBase):
    metadata = MetaData(naming_convention=NAMES)
    # Sizes and seeds outgrow 32 bits.
    type_annotation_map = {dict[str, Any]: JSON, list[str]: JSON, str: String, int: BigInteger}


def _partial_index(name: str, *columns: str, where: str, unique: bool = False) -> Index:
    """Return an index on the rows that meet a condition."""
    return Index(name, *columns, unique=unique, sqlite_where=text(where), postgresql_where=text(where))


class SiteRow(Table):
    __tablename__ = "sites"

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    created_at: Mapped[float]
    # Since when none of its tokens is admitted, and none of its workers chosen.
    suspended_at: Mapped[float | None]


class TokenRow(Table):
    """A caller's token. Only a hash of the secret is stored."""

    __tablename__ = "tokens"

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    role: Mapped[str]
    secret_hash: Mapped[str] = mapped_column(unique=True)
    site_id: Mapped[str | None] = mapped_column(ForeignKey("sites.id"))
    created_at: Mapped[float]
    expires_at: Mapped[float | None]
    revoked_at: Mapped[float | None]
    # The secret before this one, and until when it is admitted too.
    previous_hash: Mapped[str | None] = mapped_column(index=True)
    previous_until: Mapped[float | None]
    # Of an enrolment token: how many workers it may yet admit.
    uses_left: Mapped[int | None]


class EnrolmentRow(Table):
    """A worker that asks to be admitted. Its secret stays where it was made; here is the hash that its token is to
    have."""

    __tablename__ = "enrolments"
    __table_args__ = (
        # An administrator admits by code alone, so no two that wait have the same;
        _partial_index("uq_enrolments_code", "code", where="state = 'pending'", unique=True),
        # and who asks again, because an answer was lost, waits only once.
        _partial_index("uq_enrolments_secret", "secret_hash", where="state = 'pending'", unique=True),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    code: Mapped[str]
    secret_hash: Mapped[str] = mapped_column(index=True)
    state: Mapped[str]
    # As the worker names it; its site need not exist before it is admitted.
    site: Mapped[str]
    worker: Mapped[str]
    device: Mapped[str]
    version: Mapped[str]
    address: Mapped[str]
    created_at: Mapped[float]
    expires_at: Mapped[float]


class SessionRow(Table):
    """A session of the dashboard and the token that it was started with; it ends with the token at the latest."""

    __tablename__ = "sessions"

    # A hash of what the browser holds.
    id: Mapped[str] = mapped_column(primary_key=True)
    token_id: Mapped[str] = mapped_column(ForeignKey("tokens.id"))
    created_at: Mapped[float]
    expires_at: Mapped[float] = mapped_column(index=True)


class PersonSessionRow(Table):
    """Whom the OpenID provider has vouched for, signed in to the page."""

    __tablename__ = "person_sessions"

    id: Mapped[str] = mapped_column(primary_key=True)
    person: Mapped[str]
    role: Mapped[str]
    created_at: Mapped[float]
    expires_at: Mapped[float] = mapped_column(index=True)


class WorkerRow(Table):
    __tablename__ = "workers"
    # A worker is known by its site and name, so that a restarted process is the worker that it was.
    __table_args__ = (UniqueConstraint("site_id", "name"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    site_id: Mapped[str] = mapped_column(ForeignKey("sites.id"))
    name: Mapped[str]
    declared: Mapped[dict[str, Any]]
    # By which what was declared is known without being read. Empty where an earlier version wrote the row.
    declared_digest: Mapped[str] = mapped_column(server_default="")
    created_at: Mapped[float]
    last_seen_at: Mapped[float] = mapped_column(index=True)

    @validates("declared")
    def _digested(self, _: str, declared: dict[str, Any]) -> dict[str, Any]:
        self.declared_digest = digest_of(declared_text(declared).encode())
        return declared


WORKER_NAME = SiteRow.name + "/" + WorkerRow.name
"""`site/worker`, in queries that join both tables."""


def declared_text(declared: dict[str, Any]) -> str:
    """Return what a worker declared, in the one form that its digest is of."""
    return json.dumps(declared, sort_keys=True, separators=(",", ":"))


class RunRow(Table):
    __tablename__ = "runs"

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    state: Mapped[str] = mapped_column(index=True)
    reason: Mapped[str | None]
    spec: Mapped[dict[str, Any]]
    model_bytes: Mapped[int]
    version_number: Mapped[int]
    revision: Mapped[int]
    created_at: Mapped[float]
    # When it was created or last resumed: attempts that failed before then are forgiven.
    resumed_at: Mapped[float]
    updated_at: Mapped[float]
    # Who created it, and so may steer it. Runs from before this was noted have none.
    owner: Mapped[str | None]
    # How much one site may count for, fixed when the first round opened. Runs that began before this was noted have
    # none, and keep to the numbers in their spec.
    bounds: Mapped[dict[str, Any] | None]


class VersionRow(Table):
    """An immutable global state; `digest` names the blob that holds its manifest."""

    __tablename__ = "versions"

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    # One version a number: two conductors that merge the same round cannot both commit.
    number: Mapped[int] = mapped_column(primary_key=True)
    digest: Mapped[str]
    # What the method tells of it. The numbers are in the manifest too; here a page of versions reads no blob.
    scalars: Mapped[dict[str, Any]] = mapped_column(server_default="{}")
    warnings: Mapped[list[str]] = mapped_column(server_default="[]")
    created_at: Mapped[float]
    # Since when its blocks are no longer kept, except where another version has them too.
    retired_at: Mapped[float | None]


class RoundRow(Table):
    """One attempt at a round. Round n turns version n-1 into version n."""

    __tablename__ = "rounds"
    __table_args__ = (
        UniqueConstraint("run_id", "number", "attempt"),
        # A run has one live round at most, whoever opens it.
        _partial_index("uq_rounds_live", "run_id", where="state in ('open', 'merging')", unique=True),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"))
    number: Mapped[int]
    attempt: Mapped[int]
    state: Mapped[str]
    stage: Mapped[str]
    opened_at: Mapped[float]
    deadline_at: Mapped[float]
    closed_at: Mapped[float | None]
    reason: Mapped[str | None]


EVALUATION = "kind = 'evaluate' and state in ('offered', 'leased', 'expired', 'accepted')"
"""An evaluation that is done or may still be."""


UPDATE = "kind = 'train' and state in ('offered', 'leased', 'expired', 'accepted', 'merged')"
"""A task whose update counts or still may."""


class TaskRow(Table):
    __tablename__ = "tasks"
    __table_args__ = (
        # A worker has one task a round,
        UniqueConstraint("round_id", "worker_id"),
        # and one update that counts from each version, in whichever round it was asked for (invariant I1).
        _partial_index("uq_tasks_update", "run_id", "version_number", "worker_id", where=UPDATE, unique=True),
        # A version is evaluated once on the central data set, by whichever worker,
        _partial_index(
            "uq_tasks_central", "run_id", "version_number", where=f"not held_out and {EVALUATION}", unique=True
        ),
        # and once by each worker on what it holds out. One that failed does not stand in the way of another try.
        _partial_index(
            "uq_tasks_held_out",
            "run_id",
            "version_number",
            "worker_id",
            where=f"held_out and {EVALUATION}",
            unique=True,
        ),
        Index("ix_tasks_claim", "worker_id", "state", "kind", "created_at"),
        Index("ix_tasks_run_id_kind", "run_id", "kind"),
        Index("ix_tasks_merged_in", "run_id", "merged_in"),
        # From the end, where a worker's last accepted update of a run is.
        Index("ix_tasks_receipt", "worker_id", "run_id", "created_at"),
        # What is looked at again and again while people watch: who is at work, what failed, what was moved.
        _partial_index("ix_tasks_leased", "run_id", where="state = 'leased'"),
        _partial_index("ix_tasks_faulty", "created_at", where="state in ('failed', 'rejected')"),
        Index("ix_tasks_moved", "run_id", "kind", "state", "round_id", "upload_bytes", "download_bytes"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"))
    round_id: Mapped[str | None] = mapped_column(ForeignKey("rounds.id"))
    worker_id: Mapped[str] = mapped_column(ForeignKey("workers.id"))
    kind: Mapped[str]
    # Whether an evaluation is to be on what the worker holds out of the run's data set.
    held_out: Mapped[bool] = mapped_column(default=False, server_default=false())
    state: Mapped[str] = mapped_column(default="offered")
    version_number: Mapped[int]
    seed: Mapped[int]
    plan: Mapped[dict[str, Any]]
    # The fencing token: it grows with every lease, and every report must show the present one.
    token: Mapped[int] = mapped_column(default=0)
    # Tries so far, those of the task that failed before it included.
    attempts: Mapped[int] = mapped_column(default=0)
    instance: Mapped[str | None]
    lease_expires_at: Mapped[float | None]
    created_at: Mapped[float]
    update_digest: Mapped[str | None] = mapped_column(index=True)
    # The last entry of the site's own audit as its worker sent this. The site finds by it what its chain has lost.
    audit_head: Mapped[str | None]
    upload_bytes: Mapped[int] = mapped_column(default=0)
    download_bytes: Mapped[int] = mapped_column(default=0)
    examples: Mapped[int | None]
    metrics: Mapped[dict[str, Any]] = mapped_column(default=dict)
    # How far its worker is, as it says itself; of the latest lease.
    progress: Mapped[dict[str, Any]] = mapped_column(server_default="{}")
    # Of which layers the update that was accepted holds blocks.
    layers: Mapped[list[str]] = mapped_column(server_default="[]")
    # The version that takes the accepted update in, set when a round closes. The state says what became of it there.
    merged_in: Mapped[int | None]
    # The blocks of the merged update that stayed as they were in the version.
    unmerged: Mapped[list[str]] = mapped_column(server_default="[]")
    problem: Mapped[dict[str, Any] | None]


class BlobRow(Table):
    """Bytes under their digest. Small ones are here; of the others this row is the proof that they are stored."""

    __tablename__ = "blobs"

    digest: Mapped[str] = mapped_column(primary_key=True)
    size: Mapped[int]
    inline: Mapped[bytes | None] = mapped_column(LargeBinary)
    created_at: Mapped[float]


class RunBlobRow(Table):
    """A blob of a run's model or versions: the run's workers may fetch it, and it must be kept."""

    __tablename__ = "run_blobs"

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    digest: Mapped[str] = mapped_column(ForeignKey("blobs.digest"), primary_key=True, index=True)


class DifferenceRow(Table):
    """The difference between two versions of a run, which a worker that has the earlier may fetch in place of blocks
    of the later. Computed at the first request."""

    __tablename__ = "differences"

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    since: Mapped[int] = mapped_column(primary_key=True)
    digest: Mapped[str] = mapped_column(ForeignKey("blobs.digest"))


class UploadRow(Table):
    """An announced blob. How much of it is here is the length of its staging file."""

    __tablename__ = "uploads"
    __table_args__ = (
        # Announcing the same bytes again goes on with the same upload.
        UniqueConstraint("owner", "digest"),
        # What a quota counts.
        _partial_index("ix_uploads_unfinished", "owner", where="not complete"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    owner: Mapped[str]
    digest: Mapped[str] = mapped_column(index=True)
    length: Mapped[int]
    complete: Mapped[bool]
    # When it was announced last, or handed in.
    created_at: Mapped[float]


class AnnouncedRow(Table):
    """Bytes that a site announced in each hour of the last day, for its quota: uploads may be removed sooner."""

    __tablename__ = "announced"

    site_id: Mapped[str] = mapped_column(ForeignKey("sites.id"), primary_key=True)
    # Hours since 1970.
    hour: Mapped[int] = mapped_column(primary_key=True)
    bytes: Mapped[int]


class IdempotencyRow(Table):
    """The first answer to a creating request, kept for its repeats."""

    __tablename__ = "idempotency"

    owner: Mapped[str] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    fingerprint: Mapped[str]
    body: Mapped[dict[str, Any]]
    created_at: Mapped[float]


class AuditRow(Table):
    """Every change of state, chained: each entry's digest covers the one before."""

    __tablename__ = "audit"
    __table_args__ = (Index("ix_audit_run_id_seq", "run_id", "seq"), Index("ix_audit_subject", "subject"))

    seq: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    at: Mapped[float]
    actor: Mapped[str]
    action: Mapped[str]
    subject: Mapped[str]
    run_id: Mapped[str | None]
    detail: Mapped[dict[str, Any]]
    previous: Mapped[str]
    digest: Mapped[str]
