"""Garbage collection of merged updates, of versions beyond those to keep, and of unreferenced bytes.

A blob's row is removed first, in a transaction that checks again that nothing refers to it, and its file after the
commit. A file written since then, because the same bytes were uploaded again, is kept by its age. A crash leaves at
worst a file without a row, which the next pass removes.
"""

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import structlog
from sqlalchemy import ColumnElement, delete, exists, select, update
from sqlalchemy.orm import Session, aliased

from tessera.coordinator.blobs.store import Blobs
from tessera.coordinator.blobs.uploads import Uploads
from tessera.coordinator.db import audit
from tessera.coordinator.db.engine import DATABASE_AWAY, Database, log_away
from tessera.coordinator.db.snapshots import central_due, latest_due
from tessera.coordinator.db.tables import (
    BlobRow,
    DifferenceRow,
    IdempotencyRow,
    RoundRow,
    RunBlobRow,
    RunRow,
    TaskRow,
    UploadRow,
    VersionRow,
    WorkerRow,
)
from tessera.coordinator.domain.lifecycle import LIVE_RUN
from tessera.shared.api.runs import RunSpec
from tessera.shared.api.versions import VersionRef
from tessera.shared.rounds.versions import States

AT_A_TIME = 500
"""Rows removed in one transaction, so that no writer waits for long."""

ACTOR = "retention"

ANSWERS_SECONDS = 7 * 86_400.0
"""Time to keep the response to an idempotent request for its repetitions."""

UNMERGED = (TaskRow.kind == "train") & (TaskRow.state == "accepted")
"""Updates that are neither merged nor left out yet."""

_KEPT = TaskRow.state.in_(("merged", "left_out")) & exists().where(
    RunRow.id == TaskRow.run_id, RunRow.spec["keep_updates"].as_string() == "run"
)
"""Updates that a run keeps for merging again."""

_LATER = aliased(TaskRow)
_HERE, _THERE = aliased(WorkerRow), aliased(WorkerRow)
_REMEMBERED = (
    (TaskRow.state == "merged")
    & exists().where(
        RunRow.id == TaskRow.run_id,
        RunRow.state.in_(LIVE_RUN),
        RunRow.spec[("cohort", "memory")].as_boolean(),
    )
    & ~exists().where(
        _LATER.run_id == TaskRow.run_id,
        _LATER.state == "merged",
        _LATER.merged_in > TaskRow.merged_in,
        _HERE.id == TaskRow.worker_id,
        _THERE.id == _LATER.worker_id,
        _HERE.site_id == _THERE.site_id,
    )
)
"""The latest merged update of each site of a live run with `cohort.memory`."""

log = structlog.get_logger()


@dataclass
class RemovalCounts:
    """The numbers of things that a pass removed."""

    updates: int = 0
    blobs: int = 0
    bytes: int = 0
    versions: int = 0
    uploads: int = 0
    strays: int = 0
    """Files of the store without a row, and of the staging folder without an unfinished upload."""

    def __bool__(self) -> bool:
        return any(vars(self).values())


@dataclass(frozen=True)
class Retention:
    """Garbage collection, once or in a thread beside the conductor. Safe in several processes at once."""

    database: Database
    blobs: Blobs
    states: States
    uploads: Uploads
    updates_seconds: float
    """Time to keep an update after the end of its round."""
    unused_seconds: float
    """Time to keep unreferenced bytes: longer than any merge or upload takes."""
    versions: int | None
    """Number of a run's latest versions to keep besides its first; all if None."""
    every_seconds: float
    _ended: threading.Event = field(default_factory=threading.Event)

    def start(self, *, sweep_only: bool = False) -> None:
        """Collect garbage, or only sweep, at an interval in a daemon thread; the next pass finishes an
        interrupted pass."""
        work = self.sweep if sweep_only else self.collect
        threading.Thread(target=self._work, args=(work,), name="housekeeping", daemon=True).start()

    def end(self) -> None:
        self._ended.set()

    def _work(self, work: Callable[[], object]) -> None:
        while not self._ended.wait(self.every_seconds):
            try:
                work()
            except DATABASE_AWAY as fault:
                log_away(fault)
            except Exception:  # the next pass may find the store back
                log.exception("housekeeping.failed")

    def sweep(self) -> int:
        """Remove old files of ended uploads from the staging folder, which this process may share with no other."""
        return self.uploads.sweep(self.database.now() - self.unused_seconds)

    def collect(self) -> RemovalCounts:
        """Remove everything that need not be kept; return the counts of removed things."""
        freed = RemovalCounts()
        if self.database.schema() != "current":
            # A newer version may refer to blobs that seem unused.
            return freed
        now = self.database.now()
        unused_before, merged_before = now - self.unused_seconds, now - self.updates_seconds
        if keep := self.versions:
            with self.database.snapshot() as session:
                runs = session.scalars(select(RunRow.id).where(RunRow.version_number > keep)).all()
            freed.versions = sum(self._retire(now, run_id, keep) for run_id in runs)
        with self.database.snapshot() as session:
            abandoned = ~UploadRow.complete & (UploadRow.created_at < unused_before)
            uploads = session.scalars(select(UploadRow.id).where(abandoned)).all()
        freed.uploads = sum(self.uploads.forget(upload_id, unused_before) for upload_id in uploads)
        ended = exists().where(TaskRow.update_digest == BlobRow.digest, _over(merged_before))
        self._remove(ended, merged_before, freed)
        freed.updates = freed.blobs
        self._remove(BlobRow.created_at < unused_before, unused_before, freed)
        freed.strays = self.sweep()
        for digest in self._strays(unused_before):
            freed.strays += self.blobs.discard(digest, unused_before)
        with self.database.transaction() as session:
            session.execute(delete(IdempotencyRow).where(IdempotencyRow.created_at < now - ANSWERS_SECONDS))
        if freed:
            log.info("retention.freed", **vars(freed))
        return freed

    # ------------------------------------------------------------ blobs

    def remove(self, digests: Collection[str]) -> None:
        """Remove the unreferenced ones of these blobs at once."""
        if digests:
            self._remove(BlobRow.digest.in_(digests), self.database.now(), RemovalCounts())

    def _remove(self, which: ColumnElement[bool], before: float, freed: RemovalCounts) -> None:
        """Remove the unreferenced ones of these blobs."""
        while True:
            with self.database.transaction() as session:
                unused = select(BlobRow.digest).where(which, _unreferenced(before)).limit(AT_A_TIME)
                digests = session.scalars(unused).all()
                stale = UploadRow.digest.in_(digests) & UploadRow.complete & (UploadRow.created_at < before)
                session.execute(delete(UploadRow).where(stale))
                # Checked again: one may have been announced since. From here on a new announcement finds no upload.
                gone = session.execute(
                    delete(BlobRow)
                    .where(BlobRow.digest.in_(digests), _unreferenced(before))
                    .returning(BlobRow.digest, BlobRow.size)
                ).all()
            for digest, size in gone:
                self.blobs.discard(digest, before)
                freed.bytes += size
            freed.blobs += len(gone)
            if len(digests) < AT_A_TIME:
                return

    def _strays(self, before: float) -> Iterator[str]:
        """Yield older files of the store without a row."""
        for digests in self.blobs.listed(before, AT_A_TIME):
            with self.database.snapshot() as session:
                known = set(session.scalars(select(BlobRow.digest).where(BlobRow.digest.in_(digests))))
            yield from sorted(set(digests) - known)

    # ------------------------------------------------------------ versions

    def _retire(self, now: float, run_id: str, keep: int) -> int:
        """Release the blocks of a run's older versions. Their manifests and evaluations stay."""
        with self.database.snapshot() as session:
            old, kept = self._divided(session, run_id, keep)
        if not old:
            return 0
        # Manifests never change, and a run may have many: they are read outside of any transaction.
        unused = self._blobs_of(old) - self._blobs_of(kept)
        with self.database.snapshot() as session:
            later = set.union(*self._divided(session, run_id, keep)) - old - kept
        unused -= self._blobs_of(later)
        with self.database.transaction() as session:
            old_now, kept_now = self._divided(session, run_id, keep)
            if not (old <= old_now and old_now | kept_now <= old | kept | later):
                # The run moved on while the last manifests were read: the next pass tries again.
                return 0
            # Manifests are kept: later ones may be written as differences from them.
            unused -= set(session.scalars(select(VersionRow.digest).where(VersionRow.run_id == run_id)))
            numbers = sorted(version.number for version in old)
            session.execute(
                update(VersionRow)
                .where(VersionRow.run_id == run_id, VersionRow.number.in_(numbers))
                .values(retired_at=now)
            )
            audit.record(session, now, ACTOR, "version.retire", run_id, run_id=run_id, numbers=numbers)
            unused |= _forget_differences(session, run_id, numbers)
            digests = sorted(unused)
            for start in range(0, len(digests), AT_A_TIME):
                some = RunBlobRow.digest.in_(digests[start : start + AT_A_TIME])
                session.execute(delete(RunBlobRow).where(RunBlobRow.run_id == run_id, some))
            return len(numbers)

    def _divided(self, session: Session, run_id: str, keep: int) -> tuple[set[VersionRef], set[VersionRef]]:
        """Return a run's versions with blocks: those that are needed no longer, and the others."""
        run = session.get_one(RunRow, run_id)
        needed = self._needed(session, run, keep)
        rows = session.execute(
            select(VersionRow.number, VersionRow.digest).where(
                VersionRow.run_id == run_id, VersionRow.retired_at.is_(None)
            )
        )
        stored = {VersionRef(number=number, digest=digest) for number, digest in rows}
        kept = {version for version in stored if version.number in needed}
        return stored - kept, kept

    def _blobs_of(self, versions: Iterable[VersionRef]) -> set[str]:
        return {blob for version in versions for blob in self.states.manifest(version.digest).digests}

    def _needed(self, session: Session, run: RunRow, keep: int) -> set[int]:
        """Return the first version, the latest, the versions of open tasks and of unmerged or remembered updates, and
        the versions to evaluate."""
        live = TaskRow.state.in_(("offered", "leased", "expired")) | UNMERGED | _REMEMBERED
        in_tasks = session.scalars(select(TaskRow.version_number).where(TaskRow.run_id == run.id, live))
        spec = RunSpec.model_validate(run.spec)
        # However many: the evaluators may be away. Versions of an ended run are not evaluated any more.
        pending = central_due(session, run, spec, None, most=None) if run.state in LIVE_RUN else ()
        # A site that comes later still measures it.
        at_sites = {latest_due(run, spec)} if spec.evaluation and spec.evaluation.sites else set()
        # The terms of the next secure sums take their scales from its last step.
        before = {run.version_number - 1} if spec.secure_sums else set()
        latest = range(run.version_number - keep + 1, run.version_number + 1)
        return {0, *latest, *before, *in_tasks, *at_sites, *(evaluation.version for evaluation in pending)}


def _forget_differences(session: Session, run_id: str, numbers: Sequence[int]) -> set[str]:
    """Remove the differences to or from these versions; return their blobs."""
    to_or_from = DifferenceRow.number.in_(numbers) | DifferenceRow.since.in_(numbers)
    forgotten = delete(DifferenceRow).where(DifferenceRow.run_id == run_id, to_or_from)
    return set(session.scalars(forgotten.returning(DifferenceRow.digest)))


def _unreferenced(before: float) -> ColumnElement[bool]:
    """Select blobs of no run that are not being uploaded, were not announced since, and are updates of no live or
    later round."""
    wanted = ~UploadRow.complete | (UploadRow.created_at >= before)
    recent = (UploadRow.digest == BlobRow.digest) & wanted
    needed = (TaskRow.update_digest == BlobRow.digest) & ~_over(before)
    return (
        ~exists().where(RunBlobRow.digest == BlobRow.digest)
        & ~exists().where(DifferenceRow.digest == BlobRow.digest)
        & ~exists().where(recent)
        & ~exists().where(needed)
    )


def _over(before: float) -> ColumnElement[bool]:
    """Select merged or left-out updates of rounds that ended before this instant, and their mask sums."""
    ended = RoundRow.state.in_(("committed", "abandoned")) & (RoundRow.closed_at < before)
    of_round = (RoundRow.run_id == TaskRow.run_id) & (RoundRow.number == TaskRow.version_number + 1)
    live = exists().where(of_round, ~ended)
    opened = (TaskRow.kind == "open") & exists().where(of_round, ended) & ~live
    merging = (RoundRow.run_id == TaskRow.run_id) & (RoundRow.number == TaskRow.merged_in)
    # An update that started from an earlier version is merged by a later round than its own.
    is_merged = exists().where(merging, ended) & ~exists().where(merging, ~ended)
    asked = TaskRow.merged_in.is_(None) & exists().where(RoundRow.id == TaskRow.round_id, ended)
    return ~UNMERGED & ~_KEPT & ~_REMEMBERED & (is_merged | asked | opened)
