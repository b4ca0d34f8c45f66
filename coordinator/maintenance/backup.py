"""Backup of a coordinator into a folder, and restore, for every kind of database and blob store.

    folder/tessera.db     every table, as a SQLite file; created last, by a rename
    folder/blobs/ab/...   every blob that is not stored in a table, under its digest
    folder/lock           locked by the backup that is running

A second backup into the same folder copies only new blobs, and removes those that its tables no longer name. The
folder has the form of a coordinator's own data and is read and written by the same code.
"""

import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection, create_engine, exists, insert, select
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from tessera.coordinator.blobs.object_store import key_of
from tessera.coordinator.blobs.staging import lock
from tessera.coordinator.blobs.store import PIECE_BYTES, Blobs, flush
from tessera.coordinator.db import audit
from tessera.coordinator.db.engine import SCHEMA_FAULTS, Database
from tessera.coordinator.db.tables import BlobRow, RoundRow, RunRow, Table, TaskRow, VersionRow
from tessera.coordinator.db.transitions import move_run
from tessera.shared.api.runs import RunSpec
from tessera.shared.api.versions import Manifest
from tessera.shared.methods.registry import keeps_nothing
from tessera.shared.model.spec import Model
from tessera.shared.privacy.noise import secret_key
from tessera.shared.problems import NotFound, Problem, StoreAway, StoreSpoilt
from tessera.shared.rounds.blob_store import StoredBlob
from tessera.shared.rounds.versions import States
from tessera.shared.updates.codecs import pipeline

NAME = "tessera.db"
PARTIAL = ".partial-"
ROWS = 500
"""Rows in memory at a time."""


class DatabaseNotEmpty(RuntimeError):
    """The target of a restore has rows."""


class BackupNotFound(RuntimeError):
    """The folder holds no backup."""


class BackupRunning(RuntimeError):
    """Another backup into the folder is running."""


@dataclass
class CopyCounts:
    rows: int = 0
    blobs: int = 0
    """Copied blobs, without those that the target had."""
    bytes: int = 0


def back_up(database: Database, blobs: Blobs, folder: Path, *, verifying: bool = False) -> CopyCounts:
    """Copy everything into the folder while the coordinator runs; if verifying, also what is damaged there.

    Raises StoreSpoilt for a corrupt blob, and BackupRunning.
    """
    copied = CopyCounts()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _only_backup(folder), tempfile.TemporaryDirectory(prefix=PARTIAL, dir=folder) as partial:
        with _opened(Path(partial), folder / "blobs") as (target, kept):
            # Most blobs first, so that few may be removed between the copy of the rows and their own.
            with database.snapshot() as session:
                stored = _stored(session)
            if verifying:
                _remove_damaged(stored, kept)
            _copy_blobs(database, stored, blobs, kept, copied)
            while not _copy_consistently(database, blobs, target, kept, copied):
                pass
            with target.snapshot() as session:
                named = {blob.digest for blob in _stored(session)}
        _complete(Path(partial) / NAME)
        (Path(partial) / NAME).replace(folder / NAME)
        flush(folder)
        # The previous database named them.
        for digests in kept.listed(math.inf, ROWS):
            for digest in set(digests) - named:
                (folder / "blobs" / key_of(digest)).unlink()
    return copied


def _copy_consistently(database: Database, blobs: Blobs, target: Database, kept: Blobs, copied: CopyCounts) -> bool:
    """Copy all rows at one instant, and the blobs that they name. Copy no rows and return False if a blob was removed
    meanwhile."""
    with target.transaction() as session:
        with database.snapshot() as source:
            database.permit_idling(source)
            rows = _copy_rows(source.connection(), session)
        if not _copy_blobs(database, _stored(session), blobs, kept, copied):
            session.rollback()
            return False
    copied.rows = rows
    return True


def restore(folder: Path, database: Database, blobs: Blobs) -> CopyCounts:
    """Copy a backup into the blob store and into an empty database at head, in one transaction after all blobs.

    Raises BackupNotFound, DatabaseNotEmpty, and StoreSpoilt for a blob of the backup with other bytes than its name.
    """
    if not (folder / NAME).is_file():
        raise BackupNotFound(f"{folder} holds no {NAME}; give the folder that 'backup' wrote")
    copied = CopyCounts()
    # In this process's own folder, which others remove if it is killed: the copy has the hashes of tokens.
    with tempfile.TemporaryDirectory(dir=blobs.unfinished.path().parent) as partial:
        # The copy of an older version's backup is migrated to head; the backup stays as it is.
        shutil.copy(folder / NAME, Path(partial) / NAME)
        with _connected(Path(partial) / NAME) as connection:
            if MigrationContext.configure(connection).get_current_revision() is None:
                raise BackupNotFound(f"{folder / NAME} holds no tables: the backup is damaged, give another folder")
        with _opened(Path(partial), folder / "blobs") as (saved, kept), saved.snapshot() as source:
            with database.snapshot() as session:
                _require_empty(session)
            _copy_blobs(saved, _stored(source), kept, blobs, copied)
            with database.transaction() as session:
                _require_empty(session)
                copied.rows = _copy_rows(source.connection(), session)
                _renew_noise_keys(session)
                _pause_runs(session, database.now())
    return copied


RESTORED = (
    "the coordinator was restored from a backup, and sites may have sent later rounds: run `tessera worker adopt "
    "--run NAME` at each of them, then resume; a method that keeps tensors at the sites needs a new run"
)


def _pause_runs(session: Session, now: float) -> None:
    """Pause the live runs that their workers may refuse from here on: those whose repeated rounds would show more
    than privacy or sums let through, or find a later state at the sites. The others go on by themselves."""
    for run in session.scalars(select(RunRow).where(RunRow.state == "running")).all():
        spec = RunSpec.model_validate(run.spec)
        covered = spec.privacy or spec.client_privacy or spec.secure_sums
        lossless = pipeline.parse(spec.codec).lossless and not (spec.upload_budget or spec.upload_seconds)
        if covered or spec.training.keep_moments or not (lossless and keeps_nothing(spec.method)):
            move_run(session, now, "restore", run.id, "pause", RESTORED)


def _renew_noise_keys(session: Session) -> None:
    """Give open rounds new keys of client-level privacy.

    The round may have ended since the backup with other updates: with the same noise, the difference of the two
    versions would have none. The updates of a closed round are fixed: its merge is repeated with the same noise.
    """
    with_key = (RoundRow.state == "open") & RoundRow.noise_key.is_not(None)
    for round_ in session.scalars(select(RoundRow).where(with_key)):
        round_.noise_key = secret_key()


def verify(database: Database, blobs: Blobs, states: States) -> Iterator[str]:
    """Hash all blobs, read all versions and check the audit chain; yield each fault as a sentence. Raises StoreAway.

    No snapshot is open while blobs are read, which takes long.
    """
    with database.snapshot() as session:
        broken = audit.broken_at(session)
        runs = session.scalars(select(RunRow.id).order_by(RunRow.id)).all()
    if broken is not None:
        yield f"the audit chain breaks at entry {broken}"
    yield from _faulty_blobs(database, blobs)
    for run_id in runs:
        yield from _faulty_versions(database, run_id, blobs, states)
    lost = (
        select(TaskRow.id, TaskRow.update_digest)
        .where(TaskRow.kind == "train", TaskRow.state == "accepted", TaskRow.update_digest.is_not(None))
        .where(~exists().where(BlobRow.digest == TaskRow.update_digest))
    )
    with database.snapshot() as session:
        tasks = session.execute(lost).all()
    for task_id, digest in tasks:
        yield f"task {task_id}: its accepted update {digest} is not stored"


def _faulty_blobs(database: Database, blobs: Blobs) -> Iterator[str]:
    last = ""
    while True:
        page = select(BlobRow.digest, BlobRow.size, BlobRow.inline).where(BlobRow.digest > last)
        with database.snapshot() as session:
            rows = session.execute(page.order_by(BlobRow.digest).limit(ROWS)).all()
        for digest, size, inline in rows:
            try:
                blobs.rehash(StoredBlob(digest, size, inline))
            except StoreSpoilt as fault:
                if not _was_removed(database, digest):
                    yield fault.detail
            except OSError as fault:
                yield f"blob {digest} cannot be read: {fault.strerror}"
        if len(rows) < ROWS:
            return
        last = rows[-1].digest


def _faulty_versions(database: Database, run_id: str, blobs: Blobs, states: States) -> Iterator[str]:
    of_run = select(VersionRow).where(VersionRow.run_id == run_id).order_by(VersionRow.number)
    with database.snapshot() as session:
        spec = session.get_one(RunRow, run_id).spec
        versions = session.scalars(of_run).all()
    try:
        model = states.model(RunSpec.model_validate(spec).model)
    except StoreAway:
        raise
    except (Problem, ValueError, OSError) as fault:
        yield f"run {run_id}: its model cannot be read: {fault}"
        return
    for version in versions:
        here = f"run {run_id}, version {version.number}"
        try:
            manifest = states.manifest(version.digest)
        except StoreAway:
            raise
        except (Problem, ValueError, OSError) as fault:
            yield f"{here}: its manifest cannot be read: {fault}"
            continue
        faults = list(_faulty_blocks(model, manifest, blobs)) if version.retired_at is None else []
        # It may have been retired meanwhile.
        if faults and not _is_retired(database, run_id, version.number):
            yield from (f"{here}: block {fault}" for fault in faults)


def _faulty_blocks(model: Model, manifest: Manifest, blobs: Blobs) -> Iterator[str]:
    for block in model.stored:
        try:
            nbytes = blobs.size(manifest.blocks[block.name])
        except (NotFound, KeyError):
            yield f"{block.name} is not stored"
        else:
            if nbytes != block.nbytes:
                yield f"{block.name} has {nbytes} bytes, not {block.nbytes}"


def _is_retired(database: Database, run_id: str, number: int) -> bool:
    with database.snapshot() as session:
        return session.get_one(VersionRow, (run_id, number)).retired_at is not None


def _was_removed(database: Database, digest: str) -> bool:
    """Return True if garbage collection has removed a blob whose row was read before."""
    with database.snapshot() as session:
        return session.get(BlobRow, digest) is None


# ---------------------------------------------------------------- copying


@contextmanager
def _only_backup(folder: Path) -> Iterator[None]:
    """Lock the folder, and remove what killed backups left in it. Raises BackupRunning."""
    descriptor = lock(folder, os.O_CREAT)
    if descriptor is None:
        raise BackupRunning(f"another backup into {folder} is running; wait for its end, or give another folder")
    try:
        for partial in folder.glob(f"{PARTIAL}*"):
            shutil.rmtree(partial)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _opened(folder: Path, blob_folder: Path) -> Iterator[tuple[Database, Blobs]]:
    """Yield a backup's database at head, and its blobs."""
    blob_folder.mkdir(parents=True, exist_ok=True)
    with closing(Database(f"sqlite:///{folder / NAME}")) as database:
        if (schema := database.schema()) not in ("current", "behind"):
            raise BackupNotFound(
                f"the schema of this backup {SCHEMA_FAULTS[schema][0]}; restore it with the version that made it"
            )
        database.migrate()
        yield database, Blobs(database, str(blob_folder), folder / "staging", 0, PIECE_BYTES)


def _complete(file: Path) -> None:
    """Move what SQLite keeps beside a closed database into its file. Raises OperationalError if the disk is full.

    Closing a database does the same, but ignores that it failed.
    """
    with _connected(file) as connection:
        connection.exec_driver_sql("PRAGMA journal_mode=DELETE")


def _connected(file: Path) -> Connection:
    return create_engine(f"sqlite:///{file}", poolclass=NullPool).connect()


def _stored(session: Session) -> list[StoredBlob]:
    """Return the blobs that are not stored in a table."""
    rows = session.execute(select(BlobRow.digest, BlobRow.size).where(BlobRow.inline.is_(None)))
    return [StoredBlob(digest, size) for digest, size in rows]


def _copy_rows(source: Connection, target: Session) -> int:
    """Copy all rows; return their number."""
    count = 0
    for table in Table.metadata.sorted_tables:
        with closing(source.execute(select(table), execution_options={"yield_per": ROWS})) as rows:
            for some in rows.mappings().partitions():
                target.execute(insert(table), [dict(row) for row in some])
                count += len(some)
    return count


def _copy_blobs(
    database: Database, stored: Iterable[StoredBlob], blobs: Blobs, target: Blobs, copied: CopyCounts
) -> bool:
    """Copy the blobs that the target lacks; return True if all were still there. `database` is that of the source."""
    complete = True
    with target.batch() as batch:
        for blob in stored:
            if blob in target:
                continue
            try:
                with blobs.open(blob.digest) as file, batch.writer() as writer:
                    while piece := file.read(PIECE_BYTES):
                        writer.write(piece)
                    written = writer.finish()
            except (NotFound, StoreSpoilt, FileNotFoundError):
                if not _was_removed(database, blob.digest):
                    raise
                complete = False
                continue
            if written.digest != blob.digest:
                raise StoreSpoilt(f"blob {blob.digest} no longer has the bytes of its name")
            copied.blobs += 1
            copied.bytes += blob.size
    return complete


def _remove_damaged(stored: Iterable[StoredBlob], kept: Blobs) -> None:
    """Hash those of these blobs that the backup has, and remove the damaged ones, so that they are copied again."""
    for blob in stored:
        if blob in kept:
            try:
                kept.rehash(blob)
            except (StoreSpoilt, OSError):
                kept.discard(blob.digest, math.inf)


def _require_empty(session: Session) -> None:
    for table in Table.metadata.sorted_tables:
        if session.execute(select(table).limit(1)).first() is not None:
            raise DatabaseNotEmpty(
                f"the database is not empty: it has {table.name}. Name an empty one in TESSERA_DATABASE_URL and run "
                "'tessera coordinator migrate'."
            )
