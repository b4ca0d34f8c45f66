"""The rows that a caller may read. A row of another study looks to the caller as if it were not there, and takes the
same statements, so that ids, counts and times reveal nothing of it."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import cast

from sqlalchemy import ColumnElement, Select, event, false, select
from sqlalchemy.orm import ORMExecuteState, Session, with_loader_criteria
from sqlalchemy.orm.interfaces import ORMOption

from tessera.coordinator.db.engine import Database
from tessera.coordinator.db.studies import CallerSession, MemberKind, memberships, sites_of_studies, study_names
from tessera.coordinator.db.tables import (
    AuditRow,
    DifferenceRow,
    EnrolmentRow,
    RoundRow,
    RunBlobRow,
    RunRow,
    SiteRow,
    Table,
    TaskRow,
    UploadRow,
    VersionRow,
    WorkerRow,
)
from tessera.coordinator.domain.principal import Principal
from tessera.shared.near_names import did_you_mean
from tessera.shared.problems import Fault, Invalid, NotFound

AT_A_TIME = 1_000
"""Digests in one query; databases bound the number of parameters."""

OF_RUNS = (VersionRow, RoundRow, TaskRow, RunBlobRow, DifferenceRow, AuditRow)
"""Tables with rows of runs."""


def readable_studies(session: Session, caller: Principal) -> frozenset[str] | None:
    """Return the studies whose runs and sites the caller may read; None for all studies that there are."""
    if caller.role == "admin":
        return None
    if caller.site_id is not None:
        return frozenset(memberships(session, "site", caller.site_id))
    kind: MemberKind = "person" if caller.is_person else "token"
    own = memberships(session, kind, caller.name if caller.is_person else caller.token_id)
    return None if own == study_names(session) else frozenset(own)


@contextmanager
def reading(database: Database, caller: Principal) -> Iterator[CallerSession]:
    """Yield a session that reads a snapshot, and finds only the rows that the caller may read, in any query."""
    with database.snapshot_for(CallerSession) as session:
        session.studies = readable_studies(session, caller)
        session.criteria = () if session.studies is None else _criteria(session.studies, caller)
        yield session


@event.listens_for(CallerSession, "do_orm_execute")
def _restrict(state: ORMExecuteState) -> None:
    # Loads of columns and relationships are of rows that were found, and have the criteria of that query.
    criteria = cast("CallerSession", state.session).criteria
    if criteria and state.is_select and not (state.is_column_load or state.is_relationship_load):
        state.statement = state.statement.options(*criteria)


def _criteria(studies: Collection[str], caller: Principal) -> list[ORMOption]:
    """Return the conditions on each table's rows for a caller who reads the runs and sites of some studies."""
    runs, sites = _readable_runs(studies, caller), _readable_sites(studies, caller)
    conditions: dict[type[Table], ColumnElement[bool]] = {
        RunRow: RunRow.id.in_(runs) if caller.site_id else RunRow.study.in_(studies),
        **{table: table.run_id.in_(runs) for table in OF_RUNS},
        SiteRow: SiteRow.id.in_(sites),
        WorkerRow: WorkerRow.site_id.in_(sites),
        UploadRow: UploadRow.owner == caller.owner,
        EnrolmentRow: false(),
    }
    return [with_loader_criteria(table, which, include_aliases=True) for table, which in conditions.items()]


def _readable_runs(studies: Collection[str], caller: Principal) -> Select[str]:
    """Return the runs of these studies; for a site, those in which it has had a task."""
    # Of tables: the criteria do not apply to their own conditions.
    run, task, worker = (table.__table__.c for table in (RunRow, TaskRow, WorkerRow))
    runs = select(run.id).where(run.study.in_(studies))
    if caller.site_id is None:
        return runs
    workers = select(worker.id).where(worker.site_id == caller.site_id)
    return runs.where(run.id.in_(select(task.run_id).where(task.worker_id.in_(workers))))


def _readable_sites(studies: Collection[str], caller: Principal) -> Select[str]:
    if caller.site_id is None:
        return sites_of_studies(studies)
    return select(SiteRow.__table__.c.id).where(SiteRow.__table__.c.id == caller.site_id)


def find_run(session: Session, caller: Principal, run_id: str) -> RunRow:
    """Return a run, to be changed. Raise NotFound if the caller may not read it."""
    own, row = readable_studies(session, caller), session.get(RunRow, run_id)
    if row is None or (own is not None and row.study not in own):
        raise NotFound(f"there is no run {run_id}")
    return row


def require_study(session: Session, caller: Principal, study: str) -> None:
    """Raise Invalid unless the caller may start runs of the study. One of others and one that does not exist get the
    same words."""
    own = readable_studies(session, caller)
    if own is None:
        own = frozenset(study_names(session))
    if study not in own:
        fault = Fault(pointer="/study", detail=f"there is no study {study!r}{did_you_mean(study, own)}")
        raise Invalid("the run's study does not exist", errors=[fault], remedy="Name one of your studies.")


def readable_blobs(session: CallerSession, caller: Principal, digests: Collection[str]) -> set[str]:
    """Return the digests that the caller may read or name: of blobs of its runs, and, except for sites, of its own
    uploads. An administrator may read all uploads but those of sites. No caller can read an
    update, which is neither."""
    wanted = sorted(set(digests))
    found: set[str] = set()
    for start in range(0, len(wanted), AT_A_TIME):
        some = wanted[start : start + AT_A_TIME]
        found.update(session.scalars(select(RunBlobRow.digest).where(RunBlobRow.digest.in_(some))))
        if caller.site_id is None:
            own = UploadRow.owner.not_like("site:%") if caller.role == "admin" else UploadRow.owner == caller.owner
            found.update(
                session.scalars(select(UploadRow.digest).where(own, UploadRow.complete, UploadRow.digest.in_(some)))
            )
    return found
