"""Permissions on runs and blobs. A caller without permission gets "not found", so that ids reveal nothing."""

from collections.abc import Collection

from sqlalchemy import Select, select
from sqlalchemy.orm import Session

from tessera.coordinator.db.tables import RunBlobRow, RunRow, TaskRow, UploadRow, WorkerRow
from tessera.coordinator.domain.principal import Principal
from tessera.shared.problems import NotFound

AT_A_TIME = 1_000
"""Digests in one query; databases bound the number of parameters."""


def runs_of(site_id: str) -> Select[str]:
    """Return the runs in which a site has had a task."""
    return (
        select(TaskRow.run_id).join(WorkerRow, WorkerRow.id == TaskRow.worker_id).where(WorkerRow.site_id == site_id)
    )


def run_within_reach(session: Session, caller: Principal, run_id: str) -> RunRow:
    """Return a run. Raise NotFound if there is none, or the caller is a site that takes no part in it."""
    query = select(RunRow).where(RunRow.id == run_id)
    if caller.site_id is not None:
        query = query.where(RunRow.id.in_(runs_of(caller.site_id)))
    row = session.scalars(query).one_or_none()
    if row is None:
        raise NotFound(f"there is no run {run_id}")
    return row


def readable_blobs(session: Session, caller: Principal, digests: Collection[str]) -> set[str]:
    """Return the digests that the caller may read or name.

    A site may read the blobs of runs in which it has had a task. Others may read those of all runs, and blobs that
    were not uploaded by a site. An update is neither, so no caller can read one.
    """
    wanted = sorted(set(digests))
    found: set[str] = set()
    for start in range(0, len(wanted), AT_A_TIME):
        found |= _reached(session, caller, wanted[start : start + AT_A_TIME])
    return found


def _reached(session: Session, caller: Principal, digests: list[str]) -> set[str]:
    of_runs = select(RunBlobRow.digest).where(RunBlobRow.digest.in_(digests))
    if caller.site_id is not None:
        return set(session.scalars(of_runs.where(RunBlobRow.run_id.in_(runs_of(caller.site_id)))))
    not_of_sites = UploadRow.owner.not_like("site:%") & UploadRow.complete & UploadRow.digest.in_(digests)
    return {*session.scalars(of_runs), *session.scalars(select(UploadRow.digest).where(not_of_sites))}
