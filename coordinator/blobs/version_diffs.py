"""Exact differences between versions of a run, each computed on its first request and stored.

A difference is an update from the earlier version, smaller than the changed blocks. A worker that has the earlier
version computes the later one from it and checks each block's digest.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from tessera.coordinator.auth.permissions import reading
from tessera.coordinator.blobs.store import Blobs
from tessera.coordinator.db.engine import Database
from tessera.coordinator.db.tables import BlobRow, DifferenceRow, RunBlobRow, RunRow, VersionRow
from tessera.coordinator.domain.principal import Principal
from tessera.coordinator.limits.disk import DiskSpace
from tessera.coordinator.limits.thread_pool import FairThreadPool, KeyedLocks
from tessera.shared.api.runs import RunSpec
from tessera.shared.problems import NotFound
from tessera.shared.rounds.versions import States
from tessera.shared.updates.codecs.pipeline import LOSSLESS
from tessera.shared.updates.rounded_steps import write_difference
from tessera.shared.updates.update_file import TrainedBlock, write_update

FURTHEST = 8
"""Most versions that a difference spans; a worker further behind fetches the blocks."""

KEPT_MODELS = 2
"""Bytes of a run's stored differences, as a multiple of its model's. Beyond, the oldest versions lose theirs."""


@dataclass(frozen=True)
class Differences:
    database: Database
    blobs: Blobs
    states: States
    disk: DiskSpace
    threads: FairThreadPool
    """For the computation, in which the callers take turns."""
    remove: Callable[[Collection[str]], None]
    """Removes blobs that nothing refers to any more."""
    _locks: KeyedLocks = field(default_factory=KeyedLocks)

    async def find(self, caller: Principal, run_id: str, number: int, since: int) -> str:
        """Return the digest of the difference from version `since` to `number`.

        Raises NotFound for versions that are missing, not readable by the caller, or too far apart, and if the disk
        is full.
        """
        if not 0 < number - since <= FURTHEST:
            missing = f"there is no difference between versions {since} and {number}"
            raise NotFound(missing, remedy="Fetch the blocks.")
        # Concurrent requests wait here without a thread while one computes it.
        async with self._locks.hold(f"{run_id} {number} {since}"):
            return await self.threads.run(caller.owner, self._find, caller, run_id, number, since)

    def _find(self, caller: Principal, run_id: str, number: int, since: int) -> str:
        with reading(self.database, caller) as session:
            digests = _kept(session, run_id, since, number)
            if stored := session.get(DifferenceRow, (run_id, number, since)):
                return stored.digest
            run = session.get_one(RunRow, run_id)
            spec, most_bytes = RunSpec.model_validate(run.spec), KEPT_MODELS * run.model_bytes
        earlier, later = map(self.states.manifest, digests)
        model = self.states.model(spec.model)
        blocks, tensor = [model.by_name[name] for name in later.changed(earlier)], self.states.tensor
        if not self.disk.has(sum(block.nbytes for block in blocks)):
            raise NotFound(
                f"the disk has no space for the difference of {number} and {since}", remedy="Fetch the blocks."
            )
        changes = [TrainedBlock(block, tensor(block, later), tensor(block, earlier)) for block in blocks]
        with self.blobs.file() as file:
            if spec.download_codec == "int8":
                write_difference(file, changes)
            else:
                write_update(file, LOSSLESS, changes)
            blob = self.blobs.keep(file)
        with self.database.transaction() as session:
            # Retirement forgets the differences that it finds: one that is stored after it would stay for good.
            _kept(session, run_id, since, number)
            self.blobs.record(session, self.database.now(), [blob])
            # Another process may have stored the same meanwhile.
            session.merge(DifferenceRow(run_id=run_id, number=number, since=since, digest=blob.digest))
            session.merge(RunBlobRow(run_id=run_id, digest=blob.digest))
            dropped = _drop_oldest(session, run_id, blob.digest, most_bytes)
        self.remove(dropped)
        return blob.digest


def _drop_oldest(session: Session, run_id: str, new: str, most_bytes: int) -> set[str]:
    """Forget a run's differences of its oldest versions beyond `most_bytes`, but not the `new` one; return their
    blobs. A worker that still fetches one has it computed again."""
    rows = session.execute(
        select(DifferenceRow, BlobRow.size)
        .join(BlobRow, BlobRow.digest == DifferenceRow.digest)
        .where(DifferenceRow.run_id == run_id)
        .order_by(DifferenceRow.digest == new, DifferenceRow.number, DifferenceRow.since)
    ).all()
    sizes = {row.digest: size for row, size in rows}
    dropped = set[str]()
    for row, _ in rows:
        if sum(sizes.values()) <= most_bytes or row.digest == new:
            break
        sizes.pop(row.digest, 0)
        dropped.add(row.digest)
    for table in (DifferenceRow, RunBlobRow):
        session.execute(delete(table).where(table.run_id == run_id, table.digest.in_(dropped)))
    return dropped


def _kept(session: Session, run_id: str, since: int, number: int) -> list[str]:
    """Return the digests of two versions that are not retired. Raises NotFound."""
    rows = [session.get(VersionRow, (run_id, wanted)) for wanted in (since, number)]
    digests = [row.digest for row in rows if row and row.retired_at is None]
    if len(digests) < len(rows):
        raise _not_kept(run_id, since, number)
    return digests


def _not_kept(run_id: str, since: int, number: int) -> NotFound:
    # The same words for another's run: they must not tell that it is there.
    return NotFound(f"run {run_id} has no versions {since} and {number}", remedy="Fetch the blocks.")
