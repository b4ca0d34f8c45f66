"""Which blobs a caller has to do with. To all others, a blob is not there: its name must tell nothing."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.storage.identity import Principal
from coordinator.storage.tables import RunBlobRow, TaskRow, UploadRow, WorkerRow

AT_A_TIME = 1_000
"""Digests in one query; databases bound the number of parameters."""


def within_reach(session: Session, caller: Principal, digests: Collection[str]) -> set[str]:
    """Those of the digests that the caller may read or name.

    A site reads the blobs of runs that it has had a task in. Others read those of all runs, and what was sent by any
    but a site. An update is neither, so nobody reads one.
    """
    wanted = sorted(set(digests))
    found: set[str] = set()
    for start in range(0, len(wanted), AT_A_TIME):
        found |= _reached(session, caller, wanted[start : start + AT_A_TIME])
    return found


def _reached(session: Session, caller: Principal, digests: list[str]) -> set[str]:
    of_runs = select(RunBlobRow.digest).where(RunBlobRow.digest.in_(digests))
    if caller.site_id is not None:
        of_runs = (
            of_runs.join(TaskRow, TaskRow.run_id == RunBlobRow.run_id)
            .join(WorkerRow, WorkerRow.id == TaskRow.worker_id)
            .where(WorkerRow.site_id == caller.site_id)
        )
        return set(session.scalars(of_runs))
    not_of_sites = UploadRow.owner.not_like("site:%") & UploadRow.complete & UploadRow.digest.in_(digests)
    return {*session.scalars(of_runs), *session.scalars(select(UploadRow.digest).where(not_of_sites))}
