"""Studies and their members, and sessions that find the rows of some studies alone."""

from collections.abc import Iterable, Sequence
from typing import Literal

from sqlalchemy import ColumnElement, Select, select, true
from sqlalchemy.orm import Session
from sqlalchemy.orm.interfaces import ORMOption

from tessera.coordinator.db import audit
from tessera.coordinator.db.engine import insert_or_update
from tessera.coordinator.db.tables import RunRow, SiteRow, StudyMemberRow, StudyRow, TaskRow, WorkerRow
from tessera.coordinator.db.transitions import cancel_tasks
from tessera.shared.near_names import did_you_mean
from tessera.shared.problems import Conflict, Fault, Invalid, NotFound
from tessera.shared.schema import DEFAULT_STUDY

MemberKind = Literal["site", "token", "person"]


class CallerSession(Session):
    """A session whose queries find only the rows that its caller may read. `auth.permissions.reading` opens it."""

    studies: frozenset[str] | None = frozenset()
    """The caller's studies; None if these are all studies."""
    criteria: Sequence[ORMOption] = ()
    """The conditions that each query gets."""


def _limits(session: Session) -> frozenset[str] | None:
    """Return the studies whose rows the session finds; None for all."""
    return session.studies if isinstance(session, CallerSession) else None


def reads_all(session: Session) -> bool:
    """Return True if queries of the session find the rows of all studies."""
    return _limits(session) is None


def sites_of_studies(studies: Iterable[str], *, present: bool = False) -> Select[str]:
    """Return the ids of the sites of these studies; unless `present`, of former ones too, which their tasks name."""
    sites = select(StudyMemberRow.member).where(StudyMemberRow.kind == "site", StudyMemberRow.study.in_(studies))
    return sites.where(StudyMemberRow.left_at.is_(None)) if present else sites


def is_present(session: Session) -> ColumnElement[bool]:
    """Return the condition that a site is in a study that the session reads, and not a former member."""
    studies = _limits(session)
    return true() if studies is None else SiteRow.id.in_(sites_of_studies(studies, present=True))


def shared_sites(session: Session) -> set[str]:
    """Return the ids of the sites that are also in a study that the session does not read."""
    if (studies := _limits(session)) is None:
        return set()
    elsewhere = (StudyMemberRow.kind == "site") & StudyMemberRow.study.not_in(studies)
    return set(session.scalars(select(StudyMemberRow.member).where(elsewhere, StudyMemberRow.left_at.is_(None))))


def study_names(session: Session) -> set[str]:
    return {DEFAULT_STUDY, *session.scalars(select(StudyRow.name))}


def require_studies(session: Session, studies: Iterable[str]) -> None:
    """Raise Invalid if one of the studies does not exist."""
    known = study_names(session)
    for study in studies:
        if study not in known:
            fault = Fault(pointer="/studies", detail=f"there is no study {study!r}{did_you_mean(study, known)}")
            raise Invalid(
                "the study does not exist", errors=[fault], remedy="Create it: `tessera admin study create`."
            )


def create_study(session: Session, now: float, actor: str, name: str, purpose: str) -> StudyRow:
    """Create a study. Raise Conflict if its name is taken."""
    if name in study_names(session):
        raise Conflict(f"there is a study {name!r} already", remedy="Use it, or choose another name.")
    row = StudyRow(name=name, purpose=purpose, created_at=now)
    session.add(row)
    audit.record(session, now, actor, "study.create", name, purpose=purpose)
    return row


def find_study(session: Session, name: str) -> StudyRow | None:
    """Return a study's row, or None for `default`. Raise NotFound if there is no such study."""
    row = session.get(StudyRow, name)
    if row is None and name != DEFAULT_STUDY:
        raise NotFound(f"there is no study {name}")
    return row


def join(session: Session, kind: MemberKind, member: str, studies: Sequence[str]) -> None:
    """Make a site, token or person a member of these studies. Raise Invalid for a study that does not exist."""
    require_studies(session, studies)
    for study in studies:
        row = {"kind": kind, "member": member, "study": study, "left_at": None}
        insert_or_update(session, StudyMemberRow, ("kind", "member", "study"), row, {"left_at": None})


def memberships(session: Session, kind: MemberKind, member: str) -> set[str]:
    """Return the studies of a member. A person without a row is a member of the study `default`."""
    which = (StudyMemberRow.kind == kind) & (StudyMemberRow.member == member)
    rows = session.execute(select(StudyMemberRow.study, StudyMemberRow.left_at).where(which)).all()
    without = {DEFAULT_STUDY} if kind == "person" and not rows else set()
    return without | {study for study, left_at in rows if left_at is None}


def add_member(session: Session, now: float, actor: str, study: str, kind: MemberKind, member: str) -> None:
    """Add a member to a study. Repeating it changes nothing. It leaves no other study by this."""
    before = memberships(session, kind, member)
    if study not in before:
        # A person without a row would leave `default` with the first.
        join(session, kind, member, [study, *before])
        audit.record(session, now, actor, "study.add", study, kind=kind, member=member)


def remove_member(session: Session, now: float, actor: str, study: str, kind: MemberKind, member: str) -> None:
    """Remove a member from a study, and cancel a site's open tasks in its runs. Repeating it changes nothing."""
    if study not in memberships(session, kind, member):
        return
    row = {"kind": kind, "member": member, "study": study, "left_at": now}
    insert_or_update(session, StudyMemberRow, ("kind", "member", "study"), row, {"left_at": now})
    audit.record(session, now, actor, "study.remove", study, kind=kind, member=member)
    if kind == "site":
        workers = select(WorkerRow.id).where(WorkerRow.site_id == member)
        runs = select(RunRow.id).where(RunRow.study == study)
        cancel_tasks(session, now, TaskRow.worker_id.in_(workers) & TaskRow.run_id.in_(runs), {})
