"""Withdrawal of a site: its tasks stop, and its updates, figures and names are erased. Versions stay.

All rows change in one transaction, and files are removed after it. Repeating the request removes those that a killed
one left.
"""

import math
import re
from functools import partial
from itertools import islice
from typing import Any

from sqlalchemy import ColumnElement, Text, cast, delete, exists, func, select, update
from sqlalchemy.orm import InstrumentedAttribute, Session

from tessera.coordinator.db import audit, rounds, workers
from tessera.coordinator.db.snapshots import terms_of
from tessera.coordinator.db.studies import find_study, memberships, remove_member
from tessera.coordinator.db.tables import (
    AUDIT_SINK,
    AnnouncedRow,
    AuditKeyRow,
    BlobRow,
    DifferenceRow,
    EnrolmentRow,
    IdempotencyRow,
    NoticeRow,
    RoundRow,
    RunBlobRow,
    RunRow,
    SessionRow,
    SiteRow,
    StudyMemberRow,
    TaskRow,
    TokenRow,
    UploadRow,
    VersionRow,
    WorkerRow,
    find,
    one_of,
)
from tessera.coordinator.db.transitions import cancel_tasks, move_task
from tessera.coordinator.domain.lifecycle import LIVE_ROUND, LIVE_RUN
from tessera.coordinator.domain.principal import Principal
from tessera.coordinator.services import Services
from tessera.shared.api.admin import InfluencedRun, Withdrawal
from tessera.shared.api.audit_chain import mapped
from tessera.shared.api.secure_sums import HELPER_KINDS

ERASED: dict[str, Any] = {
    "examples": None,
    "metrics": {},
    "class_counts": None,
    "progress": {},
    "layers": [],
    "unmerged": [],
    "sums": None,
    "statement": None,
    "problem": None,
    "audit_head": None,
    "instance": None,
}
"""The columns of a task that came from its site. The others say into which version it was merged."""

AT_A_TIME = 500
"""Digests in one statement."""

UNDECLARED = {"kinds": [], "datasets": {}, "device": ""}


def withdraw(services: Services, caller: Principal, site_id: str, study: str | None = None) -> Withdrawal:
    """Withdraw a site: cancel its tasks, revoke its tokens, and erase its updates, figures, declarations and names,
    and the key of its pseudonyms in the audit. If the site is in other studies than `study` too, only end its
    membership there, cancel its tasks, and erase their updates and figures. Repeating it changes nothing. Raise
    NotFound, and SchemaMismatch beside a newer version, which may have more of the site."""
    services.database.require_head()
    with services.database.transaction() as session:
        now, site = services.database.now(), find(session, SiteRow, site_id)
        theirs, uploads = workers.workers_of(session, site_id), list[str]()
        own: ColumnElement[bool] = TaskRow.worker_id.in_(theirs)
        now_in = memberships(session, "site", site_id)
        if study is not None and now_in - {study}:
            own &= TaskRow.run_id.in_(select(RunRow.id).where(RunRow.study == study))
            find_study(session, study)
            remove_member(session, now, caller.actor, study, "site", site_id)
            if study in now_in:
                audit.record(session, now, caller.actor, "site.withdraw", site.id, name=site.name, study=study)
                _end_tasks(session, now, caller.actor, own)
                uploads = _erase_uploads(session, site_id, own)
        elif site.withdrawn_at is None:
            audit.record(session, now, caller.actor, "site.withdraw", site.id, name=site.name)
            _end_tasks(session, now, caller.actor, own)
            uploads = _erase_site(session, now, site)
        left = _erase_blobs(session, own, uploads)
        influenced, name = _influenced(session, own), site.name
    services.wake_workers(theirs)
    services.wake_conductor()
    for digest in left:
        services.blobs.discard(digest, math.inf)
    services.uploads.sweep(math.inf)
    services.database.vacuum()
    return Withdrawal(id=site_id, name=name, runs=influenced)


def _end_tasks(session: Session, now: float, actor: str, own: ColumnElement[bool]) -> None:
    """Cancel a site's open tasks, leave its updates out that are not merged yet, and erase the figures of all its
    tasks."""
    live = select(RoundRow).where(one_of(RoundRow.state, *LIVE_ROUND))
    for round_ in session.scalars(live).all():
        assigned = (TaskRow.run_id == round_.run_id) & (TaskRow.merged_in == round_.number)
        # A merge in progress, and a secure sum, have the update already.
        has_it = assigned if round_.state == "merging" else (TaskRow.round_id == round_.id)
        if (round_.state == "merging" or round_.sum_terms) and session.scalar(select(exists().where(own, has_it))):
            run = session.get_one(RunRow, round_.run_id)
            cohort = terms_of(session, run.id, run.changes).spec.cohort if run.state in LIVE_RUN else None
            if cohort and cohort.buffers:
                session.execute(update(TaskRow).where(assigned).values(merged_in=None))
            rounds.abandon_round(session, now, round_, "a site of it has withdrawn", cohort)
    for task in session.scalars(
        select(TaskRow).where(own, TaskRow.kind == "train", TaskRow.state == "accepted")
    ).all():
        move_task(session, now, actor, task, "leave_out")
    cancel_tasks(session, now, own, {})
    session.execute(delete(TaskRow).where(own, TaskRow.kind.not_in(("train", *HELPER_KINDS))))
    session.execute(update(TaskRow).where(own).values(ERASED))


def _erase_uploads(session: Session, site_id: str, own: ColumnElement[bool]) -> list[str]:
    """Delete the site's uploads of these tasks' updates. Return their digests."""
    sent = select(TaskRow.update_digest).where(own, TaskRow.update_digest.is_not(None))
    these = (UploadRow.owner == f"site:{site_id}") & UploadRow.digest.in_(sent)
    return list(session.scalars(delete(UploadRow).where(these).returning(UploadRow.digest)))


def _erase_site(session: Session, now: float, site: SiteRow) -> list[str]:
    """Revoke the site's tokens, and delete or blank the rows about it. Return the digests of its uploads."""
    owner, alias = f"site:{site.id}", f"withdrawn-{site.id[:8]}"
    site.suspended_at, site.withdrawn_at = site.suspended_at or now, now
    tokens = session.scalars(select(TokenRow).where(TokenRow.site_id == site.id)).all()
    for token in tokens:
        token.revoked_at, token.previous_hash = token.revoked_at or now, None
        token.name = f"withdrawn-{token.id[:8]}"
    session.execute(delete(SessionRow).where(SessionRow.token_id.in_([token.id for token in tokens])))
    uploads = list(session.scalars(delete(UploadRow).where(UploadRow.owner == owner).returning(UploadRow.digest)))
    answers = (IdempotencyRow.owner == owner) | _mentions(IdempotencyRow.body, site.name)
    session.execute(delete(IdempotencyRow).where(answers))
    session.execute(delete(AnnouncedRow).where(AnnouncedRow.site_id == site.id))
    session.execute(delete(EnrolmentRow).where(EnrolmentRow.site == site.name))
    # As former members, so that its studies still show its tasks.
    here = (StudyMemberRow.kind == "site") & (StudyMemberRow.member == site.id) & StudyMemberRow.left_at.is_(None)
    session.execute(update(StudyMemberRow).where(here).values(left_at=now))
    session.execute(delete(AuditKeyRow).where(AuditKeyRow.name == site.name))
    for worker in session.scalars(select(WorkerRow).where(WorkerRow.site_id == site.id)):
        worker.name, worker.declared, worker.live_values = worker.id[:8], UNDECLARED, {}
        worker.audit_head, worker.seen_hours = None, 0
    # A notice of a condition that is still there is written again, without the site. A sink's next attempt replaces
    # the reason of the last, and without its cursor it would send the whole audit again.
    notices = NoticeRow.channel != AUDIT_SINK
    session.execute(delete(NoticeRow).where(notices, _mentions(NoticeRow.content, site.name)))
    word = re.compile(rf"(?<![A-Za-z0-9._-]){re.escape(site.name)}(?![A-Za-z0-9_-]|\.[A-Za-z0-9_-])(?:/[\w.-]*\w)?")
    rename = partial(mapped, partial(word.sub, alias))
    for column in (RunRow.reason, RoundRow.reason, VersionRow.warnings):
        for row in session.scalars(select(column.class_).where(_mentions(column, site.name))):
            setattr(row, column.key, rename(getattr(row, column.key)))
    for task in session.scalars(select(TaskRow).where(_mentions(TaskRow.problem, site.name))):
        task.problem = task.problem and {**task.problem, "detail": rename(task.problem["detail"])}
    for run in session.scalars(select(RunRow).where(_mentions(RunRow.spec, site.name))):
        # Only where sites are named: a data set may have the same name.
        cohort = run.spec["cohort"]
        named = {name: rename(cohort[name]) for name in ("sites", "require") if name in cohort}
        spec = {**run.spec, "cohort": {**cohort, **named}}
        if sums := spec["secure_sums"]:
            spec["secure_sums"] = {**sums, "helpers": rename(sums["helpers"])}
        run.spec, run.changes = spec, run.changes + (spec != run.spec)
    site.name = alias
    session.flush()
    return uploads


def _mentions(column: InstrumentedAttribute[Any], name: str) -> Any:
    return cast(column, Text).contains(name, autoescape=True)


def _erase_blobs(session: Session, own: ColumnElement[bool], uploads: list[str]) -> list[str]:
    """Delete the rows of blobs that only these tasks and uploads sent; return the digests of all without a row."""
    others = (TaskRow.update_digest == BlobRow.digest) & ~own
    unused = ~exists().where(others)
    for table in (RunBlobRow, DifferenceRow, UploadRow):
        unused &= ~exists().where(table.digest == BlobRow.digest)
    sent = {*uploads, *session.scalars(select(TaskRow.update_digest).where(own, TaskRow.update_digest.is_not(None)))}
    left = set[str]()
    digests = iter(sorted(sent))
    while some := list(islice(digests, AT_A_TIME)):
        these = BlobRow.digest.in_(some)
        session.execute(delete(BlobRow).where(these, unused).execution_options(synchronize_session=False))
        left |= {*some} - {*session.scalars(select(BlobRow.digest).where(these))}
    return sorted(left)


def _influenced(session: Session, own: ColumnElement[bool]) -> list[InfluencedRun]:
    """Return the runs into whose versions an update of these tasks was merged, with the first such version."""
    merged = own & (TaskRow.state == "merged")
    first = select(RunRow.id, RunRow.name, func.min(TaskRow.merged_in)).join(TaskRow, TaskRow.run_id == RunRow.id)
    rows = session.execute(first.where(merged).group_by(RunRow.id, RunRow.name).order_by(RunRow.id))
    return [InfluencedRun(run=run, name=name, first_version=number) for run, name, number in rows]
