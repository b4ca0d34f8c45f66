"""The tables. Constraints forbid invalid rows; a comment above each gives the reason.

Instants are seconds since 1970 by the database's clock, so that every database compares them alike. A column that is
added later has a default in the schema, so that the previous version can still insert rows.
"""

import json
import uuid
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import (
    JSON,
    BigInteger,
    ColumnElement,
    ForeignKey,
    Index,
    LargeBinary,
    MetaData,
    ScalarSelect,
    Select,
    String,
    UniqueConstraint,
    bindparam,
    case,
    exists,
    false,
    func,
    select,
    text,
)
from sqlalchemy.orm import (
    DeclarativeBase,
    InstrumentedAttribute,
    Mapped,
    Session,
    column_property,
    mapped_column,
    relationship,
    validates,
)

from tessera.shared.problems import NotFound
from tessera.shared.schema import ACCEPTED, DEFAULT_STUDY
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


R = TypeVar("R", bound=Table)


def find(session: Session, table: type[R], row_id: str) -> R:
    """Return the row with this id. Raise NotFound."""
    row = session.get(table, row_id)
    if row is None:
        raise NotFound(f"there is no {table.__tablename__[:-1]} {row_id}")
    return row


def _partial_index(name: str, *columns: str, where: str, unique: bool = False) -> Index:
    """Return an index on the rows that meet a condition."""
    return Index(name, *columns, unique=unique, sqlite_where=text(where), postgresql_where=text(where))


def one_of(column: InstrumentedAttribute[str], *values: str) -> ColumnElement[bool]:
    """Return a condition with the values in the SQL's text, which must be all those of a partial index: SQLite proves
    that it applies from the text alone, not from bound parameters or some of the values."""
    return column.in_(bindparam("values", values, unique=True, expanding=True, literal_execute=True))


class SiteRow(Table):
    __tablename__ = "sites"

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    created_at: Mapped[float]
    # From this instant on its tokens are refused and its workers are not selected.
    suspended_at: Mapped[float | None]
    # From this instant on it has no name, token or figure here, and is never resumed.
    withdrawn_at: Mapped[float | None]


class StudyRow(Table):
    """A study: runs and their participants, apart from other studies. The study `default` always exists,
    without a row."""

    __tablename__ = "studies"

    name: Mapped[str] = mapped_column(primary_key=True)
    purpose: Mapped[str]
    created_at: Mapped[float]


class StudyMemberRow(Table):
    """A site, token or person in a study. A former member keeps its row, so that the names of its sites stay readable
    in the study's runs, and no person without a row becomes a member of the study `default` again."""

    __tablename__ = "study_members"

    kind: Mapped[str] = mapped_column(primary_key=True)
    # The id of a site or token; a person as `issuer#subject`.
    member: Mapped[str] = mapped_column(primary_key=True)
    study: Mapped[str] = mapped_column(primary_key=True)
    left_at: Mapped[float | None]


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
    # The previous secret, and the end of its grace period.
    previous_hash: Mapped[str | None] = mapped_column(index=True)
    previous_until: Mapped[float | None]
    # The number of workers that an enrolment token may still admit.
    uses_left: Mapped[int | None]
    # To within a minute; see `Poller`.
    last_used_at: Mapped[float | None]


class EnrolmentRow(Table):
    """A worker's request for admission. The worker keeps its secret; its token will have this hash."""

    __tablename__ = "enrolments"
    __table_args__ = (
        # An administrator approves by code alone, so pending enrolments have distinct codes.
        _partial_index("uq_enrolments_code", "code", where="state = 'pending'", unique=True),
        # A worker that repeats its request after a lost response has one pending enrolment.
        _partial_index("uq_enrolments_secret", "secret_hash", where="state = 'pending'", unique=True),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    code: Mapped[str]
    secret_hash: Mapped[str] = mapped_column(index=True)
    state: Mapped[str]
    # As the worker reports it; the site may not exist before the approval.
    site: Mapped[str]
    worker: Mapped[str]
    device: Mapped[str]
    version: Mapped[str]
    address: Mapped[str]
    created_at: Mapped[float]
    expires_at: Mapped[float]


class SessionRow(Table):
    """A dashboard session that began with a token; it ends with the token at the latest."""

    __tablename__ = "sessions"

    # The hash of the secret in the browser's cookie.
    id: Mapped[str] = mapped_column(primary_key=True)
    token_id: Mapped[str] = mapped_column(ForeignKey("tokens.id"))
    created_at: Mapped[float]
    expires_at: Mapped[float] = mapped_column(index=True)


class PersonSessionRow(Table):
    """A dashboard session of a person who signed in at the OpenID provider."""

    __tablename__ = "person_sessions"

    id: Mapped[str] = mapped_column(primary_key=True)
    person: Mapped[str]
    role: Mapped[str]
    created_at: Mapped[float]
    expires_at: Mapped[float] = mapped_column(index=True)


class WorkerRow(Table):
    __tablename__ = "workers"
    # Site and name identify a worker, so that a restarted process remains the same worker.
    __table_args__ = (UniqueConstraint("site_id", "name"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    site_id: Mapped[str] = mapped_column(ForeignKey("sites.id"))
    name: Mapped[str]
    declared: Mapped[dict[str, Any]]
    # Identifies the declaration without reading it.
    declared_digest: Mapped[str] = mapped_column(server_default="")
    created_at: Mapped[float]
    last_seen_at: Mapped[float] = mapped_column(index=True)
    # The token of its last request.
    token_id: Mapped[str | None] = mapped_column()
    # That of its last accepted report; not by the instants of its tasks, since a clock may be set back.
    audit_head: Mapped[str | None]
    # The `LiveValues` of its last heartbeat with any, and the instant `at` of that; only its own page reads them.
    live_values: Mapped[dict[str, Any]] = mapped_column(server_default="{}", deferred=True)
    # Its accepted reports, and its failures and rejected updates; counted by `transitions`.
    accepted: Mapped[int] = mapped_column(server_default="0")
    faulty: Mapped[int] = mapped_column(server_default="0")
    # The last hour (since 1970) in which it called; and a bit for each hour in which it did, bit 0 for that hour.
    seen_hour: Mapped[int] = mapped_column(server_default="0", deferred=True)
    seen_hours: Mapped[int] = mapped_column(server_default="0", deferred=True)
    revoked: Mapped[bool] = column_property(
        exists().where(TokenRow.id == token_id, TokenRow.revoked_at.is_not(None)).correlate_except(TokenRow)
    )

    @validates("declared")
    def _digested(self, _: str, declared: dict[str, Any]) -> dict[str, Any]:
        self.declared_digest = digest_of(declared_text(declared).encode())
        return declared


WORKER_NAME = SiteRow.name + "/" + WorkerRow.name
"""`site/worker`, in queries that join both tables."""


def declared_text(declared: dict[str, Any]) -> str:
    """Return a worker's declaration in the form over which its digest is computed."""
    return json.dumps(declared, sort_keys=True, separators=(",", ":"))


class RunRow(Table):
    __tablename__ = "runs"
    # The lists of runs, read from their ends.
    __table_args__ = (
        Index("ix_runs_created_at_id", "created_at", "id"),
        Index("ix_runs_study_created_at_id", "study", "created_at", "id"),
        Index("ix_runs_updated_at_id", "updated_at", "id"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    study: Mapped[str] = mapped_column(default=DEFAULT_STUDY)
    name: Mapped[str]
    state: Mapped[str] = mapped_column(index=True)
    reason: Mapped[str | None]
    spec: Mapped[dict[str, Any]]
    # The number of changes of `spec`, by which a process knows whether the settings that it parsed still hold.
    changes: Mapped[int] = mapped_column(server_default="0")
    model_bytes: Mapped[int]
    version_number: Mapped[int]
    revision: Mapped[int]
    created_at: Mapped[float]
    # Creation or last resumption: attempts that failed before it do not count.
    resumed_at: Mapped[float]
    updated_at: Mapped[float]
    # The creator, who may pause, resume and cancel it.
    owner: Mapped[str | None]
    # The limits on one site's influence, fixed when the first round opened; None before.
    bounds: Mapped[dict[str, Any] | None]
    tags: Mapped[list[str]] = mapped_column(server_default="[]")
    note: Mapped[str] = mapped_column(server_default="")
    # The traffic of accepted updates and evaluations, counted by `transitions`: the numbers of updates and of tasks
    # that fetched anything, and bytes. Sites report downloads, which may add up to more than an integer holds.
    updates: Mapped[int] = mapped_column(server_default="0")
    fetches: Mapped[int] = mapped_column(server_default="0")
    upload_bytes: Mapped[int] = mapped_column(server_default="0")
    download_bytes: Mapped[float] = mapped_column(server_default="0")
    evaluation_bytes: Mapped[float] = mapped_column(server_default="0")


class VersionRow(Table):
    """An immutable global state; `digest` names the blob that holds its manifest."""

    __tablename__ = "versions"

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    # Unique, so that two conductors that merge the same round cannot both commit.
    number: Mapped[int] = mapped_column(primary_key=True)
    digest: Mapped[str]
    # The method's metrics, also in the manifest; here, so that listing versions reads no blob.
    scalars: Mapped[dict[str, Any]] = mapped_column(server_default="{}")
    warnings: Mapped[list[str]] = mapped_column(server_default="[]")
    created_at: Mapped[float]
    # From this instant on its blocks are not kept, unless another version has them too.
    retired_at: Mapped[float | None]


RUNS = select(RunRow, VersionRow).outerjoin(
    VersionRow, (VersionRow.run_id == RunRow.id) & (VersionRow.number == RunRow.version_number)
)
"""Runs with their latest versions, which `views.run_view` then finds in the session instead of reading each. Each run
has one, but SQLite would begin an inner join with all versions."""


class RoundRow(Table):
    """One attempt at a round. Round n turns version n-1 into version n."""

    __tablename__ = "rounds"
    __table_args__ = (
        UniqueConstraint("run_id", "number", "attempt"),
        # A run has at most one live round, even if two conductors open one.
        _partial_index("uq_rounds_live", "run_id", where="state in ('open', 'merging')", unique=True),
        # The few that are not committed: counted by state, and the latest of a state.
        _partial_index("ix_rounds_others", "state", "opened_at", where="state in ('open', 'merging', 'abandoned')"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"))
    number: Mapped[int]
    attempt: Mapped[int]
    state: Mapped[str]
    stage: Mapped[str]
    opened_at: Mapped[float]
    deadline_at: Mapped[float]
    # The settings of the run that were changed since it opened, as it opened with them: its sites agreed to these.
    opened_with: Mapped[dict[str, Any]] = mapped_column(server_default="{}")
    closed_at: Mapped[float | None]
    reason: Mapped[str | None]
    # The secret of client-level privacy, from which a repeated merge draws the same noise; None once the round ended.
    noise_key: Mapped[bytes | None] = mapped_column(deferred=True)
    # The blob of the terms of the round's secure sums; None for a round without.
    sum_terms: Mapped[str | None]
    # The values of the model that its sites train from, if the sums are exact: their updates go into no other sum.
    sum_values: Mapped[str | None] = mapped_column(index=True)
    # Loaded by `views.WITH_TASKS` alone.
    task_rows: Mapped[list["TaskRow"]] = relationship(viewonly=True, lazy="raise")
    if TYPE_CHECKING:
        # Accepted updates of its version, whichever rounds asked for them; read by `views.WITH_TASKS` alone.
        updates: Mapped[int]


EVALUATION = "kind = 'evaluate' and state in ('offered', 'leased', 'expired', 'accepted')"
"""An evaluation that is done or may still be."""


REPORT = "kind in ('describe', 'rehearse', 'attack') and state in ('offered', 'leased', 'expired', 'accepted')"
"""A site's report to a run without rounds that is done or may still be."""


UPDATE = "kind = 'train' and state in ('offered', 'leased', 'expired', 'accepted', 'merged')"
"""A task whose update counts or still may."""


FAULTY = "state in ('failed', 'rejected')"


class TaskRow(Table):
    __tablename__ = "tasks"
    __table_args__ = (
        # A worker has at most one task per round.
        UniqueConstraint("round_id", "worker_id"),
        # At most one update per worker and base version counts, in any round (invariant I1).
        _partial_index("uq_tasks_update", "run_id", "version_number", "worker_id", where=UPDATE, unique=True),
        # A version is evaluated once on the central data set, by any worker.
        _partial_index(
            "uq_tasks_central", "run_id", "version_number", where=f"not held_out and {EVALUATION}", unique=True
        ),
        # It is evaluated once by each worker on held-out examples. A failed evaluation does not prevent another.
        _partial_index(
            "uq_tasks_held_out",
            "run_id",
            "version_number",
            "worker_id",
            where=f"held_out and {EVALUATION}",
            unique=True,
        ),
        # A worker reports once to a run without rounds.
        _partial_index("uq_tasks_report", "run_id", "worker_id", where=REPORT, unique=True),
        Index("ix_tasks_claim", "worker_id", "state", "kind", "created_at"),
        Index("ix_tasks_run_id_kind_state", "run_id", "kind", "state"),
        Index("ix_tasks_merged_in", "run_id", "merged_in"),
        # Read from their ends, for the worker's latest tasks, and its last accepted update in a run.
        Index("ix_tasks_worker_id_created_at_id", "worker_id", "created_at", "id"),
        Index("ix_tasks_receipt", "worker_id", "run_id", "version_number"),
        # Read at every look of the conductor; with the state, as SQLite prefers an index that has all columns.
        _partial_index("ix_tasks_open", "run_id", "state", where="state in ('offered', 'leased')"),
        # The dashboard's frequent queries: failures by their creation and by the end of their lease, traffic.
        _partial_index("ix_tasks_faulty", "created_at", "id", where=FAULTY),
        _partial_index("ix_tasks_faulty_leases", "state", "lease_expires_at", where=FAULTY),
        Index("ix_tasks_moved", "run_id", "kind", "version_number", "state", "upload_bytes", "download_bytes"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"))
    round_id: Mapped[str | None] = mapped_column(ForeignKey("rounds.id"))
    worker_id: Mapped[str] = mapped_column(ForeignKey("workers.id"))
    kind: Mapped[str]
    # Whether an evaluation uses the worker's held-out examples.
    held_out: Mapped[bool] = mapped_column(default=False, server_default=false())
    state: Mapped[str] = mapped_column(default="offered")
    version_number: Mapped[int]
    seed: Mapped[int]
    plan: Mapped[dict[str, Any]]
    # The fencing token: it grows with every lease, and every report must carry the current one.
    token: Mapped[int] = mapped_column(default=0)
    # Attempts so far, including those of the failed task that this one replaces.
    attempts: Mapped[int] = mapped_column(default=0)
    instance: Mapped[str | None]
    lease_expires_at: Mapped[float | None]
    created_at: Mapped[float]
    update_digest: Mapped[str | None] = mapped_column(index=True)
    # The last entry of the site's own audit chain at this report, with which the site can detect lost entries.
    audit_head: Mapped[str | None]
    upload_bytes: Mapped[int] = mapped_column(default=0)
    download_bytes: Mapped[int] = mapped_column(default=0)
    examples: Mapped[int | None]
    metrics: Mapped[dict[str, Any]] = mapped_column(default=dict)
    # Counts of predictions by class, which a site may send with the metrics of an evaluation.
    class_counts: Mapped[dict[str, Any] | None]
    # The description of a site's data.
    report: Mapped[dict[str, Any] | None]
    # Confusion matrices and binned scores by subgroup, likewise. They are long: only what shows them loads them.
    subgroup_counts: Mapped[dict[str, Any] | None]
    # Progress that the worker reports under the current lease.
    progress: Mapped[dict[str, Any]] = mapped_column(server_default="{}")
    # Layers of the accepted update's blocks.
    layers: Mapped[list[str]] = mapped_column(server_default="[]")
    # The version to which the closing round assigned the accepted update. The state says whether it was merged.
    merged_in: Mapped[int | None]
    # Blocks of the merged update that the version did not take.
    unmerged: Mapped[list[str]] = mapped_column(server_default="[]")
    # The subject of a helper's task.
    sums: Mapped[dict[str, Any] | None]
    # The worker's signed statement: an update's envelope, or a helper's agreement.
    statement: Mapped[dict[str, Any] | None]
    problem: Mapped[dict[str, Any] | None]
    worker_name: Mapped[str] = column_property(
        select(WORKER_NAME)
        .where(WorkerRow.id == worker_id, SiteRow.id == WorkerRow.site_id)
        .correlate_except(WorkerRow, SiteRow)
        .scalar_subquery(),
        deferred=True,
    )


def _updates(*which: ColumnElement[bool]) -> ScalarSelect[int]:
    found = select(func.count()).select_from(TaskRow).where(TaskRow.kind == "train", *which)
    return found.correlate(RoundRow).scalar_subquery()


_SAME_RUN, _ACCEPTED = TaskRow.run_id == RoundRow.run_id, TaskRow.state.in_(ACCEPTED)
_WAITS = _updates(_SAME_RUN, TaskRow.state == "accepted", TaskRow.merged_in.is_(None))
_LOST = _updates(TaskRow.round_id == RoundRow.id, _ACCEPTED, TaskRow.merged_in.is_(None))
_TAKEN = _updates(_SAME_RUN, TaskRow.merged_in == RoundRow.number, _ACCEPTED)
# A case for each state: an index serves each.
RoundRow.updates = column_property(
    case((RoundRow.state == "open", _WAITS), (RoundRow.state == "abandoned", _LOST), else_=_TAKEN), deferred=True
)


def select_tasks(*columns: Any) -> Select[Any]:
    """Select columns of tasks, of their workers and of the workers' sites."""
    return select(*columns).join_from(TaskRow, WorkerRow).join(SiteRow)


IS_LEASED = one_of(TaskRow.state, "offered", "leased") & (TaskRow.state == "leased")


class BlobRow(Table):
    """A stored blob. Small blobs are inline; of the others only this record is here."""

    __tablename__ = "blobs"

    digest: Mapped[str] = mapped_column(primary_key=True)
    size: Mapped[int]
    inline: Mapped[bytes | None] = mapped_column(LargeBinary)
    created_at: Mapped[float]
    stamp: Mapped[str | None]
    """The state of its file, or the tag of its object, when its bytes were last known to match its digest."""


class RunBlobRow(Table):
    """A blob of a run's model or versions: the run's workers may fetch it, and it must be kept."""

    __tablename__ = "run_blobs"

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    digest: Mapped[str] = mapped_column(ForeignKey("blobs.digest"), primary_key=True, index=True)


class DifferenceRow(Table):
    """The difference between two versions of a run, which a worker with the earlier one may fetch in place of blocks
    of the later one. Computed at the first request."""

    __tablename__ = "differences"

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    since: Mapped[int] = mapped_column(primary_key=True)
    digest: Mapped[str] = mapped_column(ForeignKey("blobs.digest"))


class UploadRow(Table):
    """An announced blob. The length of its staging file is the number of bytes received."""

    __tablename__ = "uploads"
    __table_args__ = (
        # Announcing the same bytes again resumes the upload.
        UniqueConstraint("owner", "digest"),
        # Read by quotas.
        _partial_index("ix_uploads_unfinished", "owner", where="not complete"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    owner: Mapped[str]
    digest: Mapped[str] = mapped_column(index=True)
    length: Mapped[int]
    complete: Mapped[bool]
    # The last announcement, or the submission.
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


AUDIT_SINK = "audit"
"""The channel of notices under which each sink of the audit has its last acknowledged entry."""


class NoticeRow(Table):
    """A notice of a condition that needs a person, by one channel; kept while the condition lasts."""

    __tablename__ = "notices"

    # The process that inserts it has seen the condition first, so that each channel sends one notice of it.
    channel: Mapped[str] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    content: Mapped[dict[str, Any]]
    # When the condition was last there, within some minutes.
    seen_at: Mapped[float]
    attempts: Mapped[int]
    # The next attempt, also if the attempt in progress dies. None if there is no next attempt.
    due_at: Mapped[float | None]


class AuditKeyRow(Table):
    """The key of the pseudonyms by which the audit names a site; erased when the site withdraws."""

    __tablename__ = "audit_keys"

    # A name of a site, which a run or a declined enrolment may give before there is such a site.
    name: Mapped[str] = mapped_column(primary_key=True)
    key: Mapped[bytes]


class AuditRow(Table):
    """Every change of state, chained: each entry's digest covers the entry before."""

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
