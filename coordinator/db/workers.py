"""Sites and their workers."""

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import (
    BigInteger,
    Float,
    Integer,
    String,
    Text,
    bindparam,
    case,
    cast,
    exists,
    func,
    or_,
    select,
    update,
)
from sqlalchemy.orm import Session

from tessera.coordinator.db import audit
from tessera.coordinator.db.studies import join
from tessera.coordinator.db.tables import SiteRow, TokenRow, WorkerRow, declared_text, new_id
from tessera.coordinator.domain.eligibility import policy_of
from tessera.coordinator.limits.cache import LruCache
from tessera.shared.api.tasks import Claim, LiveValues
from tessera.shared.near_names import did_you_mean
from tessera.shared.problems import Conflict, Fault, NameInUse, QuotaExceeded
from tessera.shared.schema import DEFAULT_STUDY, MAX_CLAIM_BYTES
from tessera.shared.tensors.lazy import digest_of

KEPT = 1 << 16
KEPT_BYTES = 32 << 20
"""Limits on the declarations that are kept parsed."""
AT_A_TIME = 500

DECLARED = {
    "kinds",
    "datasets",
    "held_out",
    "schemas",
    "methods",
    "augments",
    "device",
    "version",
    "resources",
    "site_keys",
    "advertised_policy",
    "withheld",
    "withheld_terms",
    "state_id",
    "started_at",
}
"""Fields of a claim that are stored: those that decide which tasks the worker may have, its platform and identity."""

FORGOTTEN_SECONDS = 30 * 86_400.0
"""Time after its last request for which a worker's name counts against its site's limit: some sites give each process
a new name."""

DECLARED_SHARE = 4_096
"""Average bytes that each worker of a site may declare: live workers' declarations are cached in parsed form."""

HOUR_SECONDS = 3600.0
UPTIME_HOURS = 48
"""Hours for which it is known whether a worker called."""

TOO_MANY_SECONDS = 600.0
"""Retry-After for a site with too many workers."""


def create_site(
    session: Session, now: float, actor: str, name: str, studies: Sequence[str] = (DEFAULT_STUDY,)
) -> SiteRow:
    """Create a site as a member of these studies. Raise Conflict if its name is taken, and Invalid for a study that
    does not exist."""
    if session.scalar(select(exists().where(SiteRow.name == name))):
        raise Conflict(f"there is a site {name!r} already", remedy="Use it, or choose another name.")
    row = SiteRow(id=new_id(), name=name, created_at=now)
    session.add(row)
    join(session, "site", row.id, studies)
    audit.reserve(session, [name])
    audit.record(session, now, actor, "site.create", row.id, name=name, studies=[*studies])
    return row


def no_site(session: Session, name: str) -> Fault:
    """Return the fault of a request that names an unknown site."""
    near = did_you_mean(name, session.scalars(select(SiteRow.name)))
    return Fault(pointer="/site", detail=f"there is no site {name!r}{near}")


def workers_of(session: Session, site_id: str | None) -> list[str]:
    """Return the ids of a site's workers."""
    return list(session.scalars(select(WorkerRow.id).where(WorkerRow.site_id == site_id)))


def enrolled(session: Session, site_id: str, claim: Claim) -> str | None:
    """Return the id of the claiming worker if it is known and its declaration is unchanged."""
    row = session.execute(_DECLARATION, {"site": site_id, "name": claim.worker}).one_or_none()
    declaration = _declared(claim)
    digest = digest_of(declared_text(declaration).encode())
    if row is None or row.declared_digest == digest:
        return row and row.id
    # A newer version of the coordinator beside this one stores more, which this one must not replace by less.
    stored = session.execute(select(WorkerRow.declared).where(WorkerRow.id == row.id)).scalar_one()
    return row.id if {**stored, **declaration} == stored else None


_DECLARATION = select(WorkerRow.id, WorkerRow.declared_digest).where(
    WorkerRow.site_id == bindparam("site"), WorkerRow.name == bindparam("name")
)


def enrol(
    session: Session, now: float, site_id: str, claim: Claim, most_workers: int, liveness_seconds: float
) -> tuple[str, int]:
    """Store a worker's declaration; return the worker's id and the stored bytes.

    Raises NameInUse if it would replace another live worker's, and QuotaExceeded for too many names, and if the
    declarations of all workers of the site are too long.
    """
    declaration = _declared(claim)
    length = len(declared_text(declaration))
    row = _worker(session, site_id, claim.worker)
    if row is not None and not _continues(row, claim):
        require_silent(session, now, site_id, claim.worker, liveness_seconds)
    others = (WorkerRow.site_id == site_id) & (WorkerRow.name != claim.worker)
    others &= WorkerRow.last_seen_at >= now - FORGOTTEN_SECONDS
    names, declared = session.execute(
        select(func.count(), func.coalesce(func.sum(func.length(cast(WorkerRow.declared, Text))), 0)).where(others)
    ).one()
    if row is None and names >= most_workers:
        raise QuotaExceeded(
            f"{names} workers of this site were heard of within {FORGOTTEN_SECONDS / 86400:g} days "
            "(setting max_workers_per_site)",
            remedy="Use the names of workers that there are, or have an administrator allow more.",
            retry_after_seconds=TOO_MANY_SECONDS,
        )
    # One worker may exceed its share, but all together may not.
    if declared + length > (most := max(most_workers * DECLARED_SHARE, MAX_CLAIM_BYTES)):
        raise QuotaExceeded(
            f"the workers of this site declare {declared} bytes, and {length} more would be over {most} "
            f"({DECLARED_SHARE} for each of max_workers_per_site)",
            remedy="Shorten the lists in their policies.",
            retry_after_seconds=TOO_MANY_SECONDS,
        )
    if row is None:
        row = WorkerRow(id=new_id(), site_id=site_id, name=claim.worker, created_at=now)
        session.add(row)
    row.declared = declaration
    row.last_seen_at = now
    # The chain is kept forever, and declarations may be long: it contains their digest.
    actor = f"site:{audit.pseudonym_of(session, session.get_one(SiteRow, site_id).name)}"
    audit.record(session, now, actor, "worker.enrol", row.id, declared=row.declared_digest)
    return row.id, length


def require_silent(session: Session, now: float, site_id: str, name: str, liveness_seconds: float) -> None:
    """Raise NameInUse if a worker of this name is live. One whose token was revoked is not."""
    row = _worker(session, site_id, name)
    if row is None or row.revoked or now - row.last_seen_at > liveness_seconds:
        return
    silent = max(0.0, now - row.last_seen_at)
    raise NameInUse(
        f"another worker of this site is called {name}, and sent a request {silent:.0f} s ago",
        retry_after_seconds=liveness_seconds - silent + 1,
    )


def _continues(row: WorkerRow, claim: Claim) -> bool:
    """Return True if a claim is by the stored worker: the process itself, or a later one in its state folder.

    An earlier process in the folder must be one in a copy of it. If a worker names no folder, its successor cannot be
    distinguished from another worker.
    """
    state_id, started_at = row.declared.get("state_id"), row.declared.get("started_at", 0.0)
    return state_id is None or (claim.state_id == state_id and claim.started_at >= started_at)


def note_seen(session: Session, now: float, seen: dict[str, tuple[float, str]]) -> None:
    """Store the instants at which workers were last seen, and the tokens that they showed.

    A stored instant after `now` is of a clock that has stepped back since. It would keep the worker live, with the
    token of then, until the clock is there again.
    """
    if not seen:
        return
    worker, at, token = (
        bindparam("worker", type_=String),
        bindparam("at", type_=Float),
        bindparam("token", type_=String),
    )
    hour = bindparam("hour", type_=BigInteger)
    later = or_(WorkerRow.last_seen_at <= at, WorkerRow.last_seen_at > now, WorkerRow.last_seen_at.is_(None))
    # A shift by 64 or more is not defined.
    since, kept = hour - WorkerRow.seen_hour, (1 << UPTIME_HOURS) - 1
    # PostgreSQL shifts by an INTEGER alone.
    shifted = WorkerRow.seen_hours.bitwise_lshift(cast(since, Integer)).bitwise_and(kept).bitwise_or(1)
    hours = case((since.between(0, UPTIME_HOURS), shifted), else_=1)
    values = {"last_seen_at": at, "token_id": token, "seen_hour": hour, "seen_hours": hours}
    # On the connection, one statement serves all workers; the session would compile one for each.
    session.connection().execute(
        update(WorkerRow).where(WorkerRow.id == worker, later).values(values),
        [
            {"worker": worker_id, "at": when, "token": token_id, "hour": int(when // HOUR_SECONDS)}
            for worker_id, (when, token_id) in seen.items()
        ],
    )
    session.connection().execute(update(WorkerRow).where(WorkerRow.last_seen_at > now).values(last_seen_at=now))


def note_live(session: Session, worker_id: str, now: float, live: LiveValues) -> None:
    """Store a worker's live values in place of the earlier ones."""
    values = {**live.model_dump(mode="json", exclude_defaults=True), "at": now}
    session.execute(update(WorkerRow).where(WorkerRow.id == worker_id).values(live_values=values))


def note_used(session: Session, used: dict[str, float]) -> None:
    """Store the instants at which tokens were last used."""
    token, at = bindparam("token", type_=String), bindparam("at", type_=Float)
    session.connection().execute(
        update(TokenRow).where(TokenRow.id == token).values(last_used_at=at),
        [{"token": token_id, "at": when} for token_id, when in used.items()],
    )


def _worker(session: Session, site_id: str, name: str) -> WorkerRow | None:
    which = (WorkerRow.site_id == site_id) & (WorkerRow.name == name)
    return session.scalars(select(WorkerRow).where(which)).one_or_none()


def _declared(claim: Claim) -> dict[str, Any]:
    return claim.model_dump(mode="json", include=DECLARED)


class Declarations:
    """The latest declarations that were asked for, up to KEPT_BYTES of text, each parsed once. For any thread.

    Each pass over the runs needs all of live workers, several times a second, and they rarely change. The cache is
    keyed by the text's digest, so no entry can be out of date.
    """

    def __init__(self) -> None:
        # Each with the length of its text.
        self._kept: LruCache[tuple[dict[str, Any], int]] = LruCache(KEPT, KEPT_BYTES, lambda kept: kept[1])

    def of(self, session: Session, workers: Mapping[str, str]) -> dict[str, dict[str, Any]]:
        """Return the declaration of each worker, by its id; `workers` has the digests."""
        known = {worker_id: self._kept.get(digest) for worker_id, digest in workers.items()}
        declarations = {worker_id: kept[0] for worker_id, kept in known.items() if kept}
        # One of several equal declarations is read; one without a digest is read each time.
        missing = [worker_id for worker_id in workers if worker_id not in declarations]
        lacking = {workers[worker_id] or worker_id: worker_id for worker_id in missing}
        read, ids = {}, list(lacking.values())
        for start in range(0, len(ids), AT_A_TIME):
            some = WorkerRow.id.in_(ids[start : start + AT_A_TIME])
            for worker_id, declared in session.execute(select(WorkerRow.id, WorkerRow.declared).where(some)):
                digest = workers[worker_id]
                read[digest or worker_id] = self._keep(digest, declared)
        return declarations | {worker_id: read[workers[worker_id] or worker_id] for worker_id in missing}

    def _keep(self, digest: str, declared: dict[str, Any]) -> dict[str, Any]:
        length = len(declared_text(declared))
        # Each run is compared with it, so the advertised policy is read here.
        declared = {**declared, "advertised_policy": policy_of(declared)}
        if digest:
            self._kept.keep(digest, (declared, length))
        return declared
