"""Exact differences between versions of a run, each computed on its first request and stored.

A difference is an update from the earlier version, smaller than the changed blocks. A worker that has the earlier
version computes the later one from it and checks each block's digest.
"""

import asyncio
from dataclasses import dataclass, field
from typing import BinaryIO
from weakref import WeakValueDictionary

from anyio import to_thread

from tessera.coordinator.auth.permissions import readable_blobs
from tessera.coordinator.blobs.store import Blobs
from tessera.coordinator.db.engine import Database
from tessera.coordinator.db.tables import BlobRow, DifferenceRow, RunBlobRow, RunRow, VersionRow
from tessera.coordinator.domain.principal import Principal
from tessera.shared.api.runs import RunSpec
from tessera.shared.api.versions import Difference, Manifest
from tessera.shared.model.spec import Model
from tessera.shared.problems import NotFound
from tessera.shared.rounds.versions import States
from tessera.shared.updates.codecs.pipeline import LOSSLESS
from tessera.shared.updates.update_file import TrainedBlock, write_update

FURTHEST = 8
"""Most versions that a difference spans; a worker further behind fetches the blocks."""


@dataclass(frozen=True)
class Differences:
    database: Database
    blobs: Blobs
    states: States
    _locks: WeakValueDictionary[tuple[str, int, int], asyncio.Lock] = field(default_factory=WeakValueDictionary)

    async def find(self, caller: Principal, run_id: str, number: int, since: int) -> Difference:
        """Return the difference from version `since` to `number`.

        Raises NotFound for versions that are missing, not readable by the caller, or too far apart.
        """
        if not 0 < number - since <= FURTHEST:
            raise NotFound(
                f"there is no difference between versions {since} and {number}", remedy="Fetch the blocks."
            )
        # Concurrent requests wait here without a thread while one computes it.
        lock = self._locks.setdefault((run_id, number, since), asyncio.Lock())
        async with lock:
            return await to_thread.run_sync(self._find, caller, run_id, number, since)

    def _find(self, caller: Principal, run_id: str, number: int, since: int) -> Difference:
        with self.database.snapshot() as session:
            rows = [session.get(VersionRow, (run_id, wanted)) for wanted in (since, number)]
            digests = [row.digest for row in rows if row and row.retired_at is None]
            if len(digests) < 2 or readable_blobs(session, caller, digests) != set(digests):
                raise NotFound(f"run {run_id} has no versions {since} and {number}")
            if stored := session.get(DifferenceRow, (run_id, number, since)):
                return Difference(digest=stored.digest, nbytes=session.get_one(BlobRow, stored.digest).size)
            spec = RunSpec.model_validate(session.get_one(RunRow, run_id).spec)
        earlier, later = map(self.states.manifest, digests)
        with self.blobs.file() as file:
            write_difference(file, self.states, self.states.model(spec.model), earlier, later)
            blob = self.blobs.keep(file)
        with self.database.transaction() as session:
            self.blobs.record(session, self.database.now(), [blob])
            # Another process may have stored the same meanwhile.
            session.merge(DifferenceRow(run_id=run_id, number=number, since=since, digest=blob.digest))
            session.merge(RunBlobRow(run_id=run_id, digest=blob.digest))
        return Difference(digest=blob.digest, nbytes=blob.size)


def write_difference(file: BinaryIO, states: States, model: Model, since: Manifest, later: Manifest) -> None:
    """Write it as an update from the earlier version to the later one. `file` must be seekable."""
    blocks = [model.by_name[name] for name in later.changed(since)]
    changes = [TrainedBlock(block, states.tensor(block, later), states.tensor(block, since)) for block in blocks]
    write_update(file, LOSSLESS, changes)
