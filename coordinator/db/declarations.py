"""Declarations of live workers, parsed once for each text.

Each pass over the runs needs all of them, several times a second, and they rarely change. The cache is keyed by the
text's digest, so no entry can be out of date.
"""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from tessera.coordinator.db.tables import WorkerRow, declared_text
from tessera.coordinator.domain.eligibility import policy_of
from tessera.coordinator.limits.cache import LruCache

KEPT = 1 << 16
KEPT_BYTES = 32 << 20
AT_A_TIME = 500


class Declarations:
    """The latest that were asked for, up to KEPT_BYTES of text. For any thread."""

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
