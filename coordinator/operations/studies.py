"""Studies and their members, as administrators manage them."""

from sqlalchemy import select
from sqlalchemy.orm import Session

from tessera.coordinator.db import studies
from tessera.coordinator.db.tables import SiteRow, StudyMemberRow, StudyRow, TokenRow, find
from tessera.coordinator.db.views import view_of
from tessera.coordinator.db.workers import workers_of
from tessera.coordinator.domain.principal import Principal
from tessera.coordinator.operations.idempotency import once
from tessera.coordinator.services import Services
from tessera.shared.api.admin import Study, StudyMember, StudySpec
from tessera.shared.problems import Conflict, NotFound
from tessera.shared.schema import DEFAULT_STUDY, Page


def create_study(services: Services, caller: Principal, spec: StudySpec, key: str | None = None) -> Study:
    """Create a study without members. With a `key`, repeating the request returns the same study. Raise Conflict if
    its name is taken."""
    with services.database.transaction() as session:
        now = services.database.now()

        def create() -> Study:
            row = studies.create_study(session, now, caller.actor, spec.name, spec.purpose)
            return view_of(Study, row, members=())

        return once(session, now, caller, key, spec, Study, create)


def list_studies(services: Services, caller: Principal) -> Page[Study]:
    """Return the studies that the caller reads, without their members."""
    with services.reading(caller) as session:
        rows = session.scalars(select(StudyRow).order_by(StudyRow.name)).all()
        found = [Study(name=DEFAULT_STUDY), *(view_of(Study, row, members=()) for row in rows)]
        own = session.studies
    return Page(items=tuple(one for one in found if own is None or one.name in own))


def get_study(services: Services, caller: Principal, name: str) -> Study:
    """Return a study with its sites, and for administrators its tokens and people. Raise NotFound if the caller does
    not read it."""
    with services.reading(caller) as session:
        if session.studies is not None and name not in session.studies:
            raise NotFound(f"there is no study {name}")
        return _study(session, name, with_people=caller.role == "admin")


def _study(session: Session, name: str, *, with_people: bool = True) -> Study:
    row = studies.find_study(session, name)
    here = (StudyMemberRow.study == name) & StudyMemberRow.left_at.is_(None)
    kinds = ("site", "token", "person") if with_people else ("site",)
    rows = session.execute(
        select(StudyMemberRow.kind, StudyMemberRow.member, SiteRow.name, TokenRow.name)
        .outerjoin(SiteRow, SiteRow.id == StudyMemberRow.member)
        .outerjoin(TokenRow, TokenRow.id == StudyMemberRow.member)
        .where(here, StudyMemberRow.kind.in_(kinds))
        .order_by(StudyMemberRow.kind, SiteRow.name, TokenRow.name, StudyMemberRow.member)
    )
    members = tuple(StudyMember(kind=kind, member=id_, name=site or token or id_) for kind, id_, site, token in rows)
    return view_of(Study, row, members=members) if row else Study(name=name, members=members)


def add_member(services: Services, caller: Principal, name: str, member: StudyMember) -> Study:
    """Add a site, token or person to a study. Repeating it changes nothing. Raise NotFound, and Conflict for a token
    whose role has no studies."""
    return _change(services, caller, name, member, leaves=False)


def remove_member(services: Services, caller: Principal, name: str, member: StudyMember) -> Study:
    """Remove a member from a study, and cancel a site's open tasks in its runs. Repeating it changes nothing. Raise
    NotFound."""
    return _change(services, caller, name, member, leaves=True)


def _change(services: Services, caller: Principal, name: str, member: StudyMember, *, leaves: bool) -> Study:
    with services.database.transaction() as session:
        studies.find_study(session, name)
        id_ = _id_of(services, session, member)
        change = studies.remove_member if leaves else studies.add_member
        change(session, services.database.now(), caller.actor, name, member.kind, id_)
        study = _study(session, name)
        waiting = workers_of(session, id_) if member.kind == "site" else []
    services.wake_workers(waiting)
    services.wake_conductor()
    return study


def _id_of(services: Services, session: Session, member: StudyMember) -> str:
    """Return the member's id. Raise NotFound, and Conflict for a token whose role has no studies."""
    if member.kind == "site":
        return find(session, SiteRow, member.member).id
    if member.kind == "token":
        token = find(session, TokenRow, member.member)
        if token.role not in ("orchestrator", "viewer"):
            reason = "an administrator reads all studies" if token.role == "admin" else "its site is a member"
            raise Conflict(f"token {token.name!r} has role {token.role}: {reason}", remedy="Add no such token.")
        return token.id
    issuer = services.settings.oidc_issuer
    if issuer is None:
        raise NotFound(f"there is no person {member.member}: no OpenID provider is set", remedy="Add a token.")
    return member.member if "#" in member.member else f"{issuer}#{member.member}"
