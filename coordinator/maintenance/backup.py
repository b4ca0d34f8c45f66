"""Backup of a coordinator into a folder, and restore, for every kind of database and blob store.

    folder/tessera.db     every table, as a SQLite file; created last, by a rename
    folder/blobs/ab/...   every blob that is not stored in a table, under its digest

A second backup into the same folder copies only new blobs. The folder has the form of a coordinator's own data and is
read and written by the same code.
"""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from alembic import command
from sqlalchemy import Connection, insert, select
from sqlalchemy.orm import Session

from tessera.coordinator.blobs.store import PIECE_BYTES, Blobs
from tessera.coordinator.db import audit
from tessera.coordinator.db.engine import Database, alembic_config
from tessera.coordinator.db.tables import BlobRow, RunRow, Table, TaskRow, VersionRow
from tessera.shared.api.runs import RunSpec
from tessera.shared.problems import NotFound, Problem, StoreSpoilt
from tessera.shared.rounds.blob_store import Stored
from tessera.shared.rounds.versions import States

NAME = "tessera.db"
ROWS = 500
"""Rows in memory at a time."""


class DatabaseNotEmpty(RuntimeError):
    """The target of a restore has rows."""


class BackupNotFound(RuntimeError):
    """The folder holds no backup."""


@dataclass
class CopyCounts:
    rows: int = 0
    blobs: int = 0
    """Copied blobs, without those that the target had."""
    bytes: int = 0


def back_up(database: Database, blobs: Blobs, folder: Path) -> CopyCounts:
    """Copy everything into the folder while the coordinator runs. Raises StoreSpoilt for a corrupt blob."""
    copied = CopyCounts()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder) as partial:
        with _opened(Path(partial), folder / "blobs") as (target, kept):
            # Most blobs first, so that the second pass is short: few blobs are removed before their copy.
            with database.snapshot() as session:
                _copy_blobs(session.connection(), blobs, kept, copied)
            with _snapshot(database) as source, target.transaction() as session:
                _copy_rows(source, session, copied)
                _copy_blobs(source, blobs, kept, copied)
        (Path(partial) / NAME).replace(folder / NAME)
    return copied


def restore(folder: Path, database: Database, blobs: Blobs) -> CopyCounts:
    """Copy a backup into the blob store and into an empty database at head, in one transaction after all blobs.

    Raises BackupNotFound, DatabaseNotEmpty, and StoreSpoilt for a blob of the backup with other bytes than its name.
    """
    if not (folder / NAME).is_file():
        raise BackupNotFound(f"{folder} holds no {NAME}; give the folder that 'backup' wrote")
    copied = CopyCounts()
    with tempfile.TemporaryDirectory(prefix="restore-", dir=blobs.staging_dir) as partial:
        # The copy of an older version's backup is migrated to head; the folder stays as it is.
        shutil.copy(folder / NAME, Path(partial) / NAME)
        with _opened(Path(partial), folder / "blobs") as (saved, kept), saved.snapshot() as source:
            with database.snapshot() as session:
                _require_empty(session)
            _copy_blobs(source.connection(), kept, blobs, copied)
            with database.transaction() as session:
                _require_empty(session)
                _copy_rows(source.connection(), session, copied)
    return copied


def verify(database: Database, blobs: Blobs, states: States) -> Iterator[str]:
    """Hash all blobs, read all versions and check the audit chain; yield each fault as a sentence."""
    with database.snapshot() as session:
        if (broken := audit.broken_at(session)) is not None:
            yield f"the audit chain breaks at entry {broken}"
        with closing(session.scalars(select(BlobRow).execution_options(yield_per=ROWS))) as rows:
            for row in rows:
                try:
                    blobs.rehash(Stored(row.digest, row.size, row.inline))
                except StoreSpoilt as fault:
                    yield fault.detail
        for run in session.scalars(select(RunRow)).all():
            yield from _faulty_versions(session, run, blobs, states)
        for task in session.scalars(select(TaskRow).where(TaskRow.kind == "train", TaskRow.state == "accepted")):
            if task.update_digest and session.get(BlobRow, task.update_digest) is None:
                yield f"task {task.id}: its accepted update {task.update_digest} is not stored"


def _faulty_versions(session: Session, run: RunRow, blobs: Blobs, states: States) -> Iterator[str]:
    try:
        model = states.model(RunSpec.model_validate(run.spec).model)
    except (Problem, ValueError) as fault:
        yield f"run {run.id}: its model cannot be read: {fault}"
        return
    for version in session.scalars(select(VersionRow).where(VersionRow.run_id == run.id)).all():
        here = f"run {run.id}, version {version.number}"
        try:
            manifest = states.manifest(version.digest)
        except (Problem, ValueError) as fault:
            yield f"{here}: its manifest cannot be read: {fault}"
            continue
        for block in model.stored if version.retired_at is None else ():
            try:
                nbytes = blobs.size(manifest.blocks[block.name])
            except (NotFound, KeyError):
                yield f"{here}: block {block.name} is not stored"
            else:
                if nbytes != block.nbytes:
                    yield f"{here}: block {block.name} has {nbytes} bytes, not {block.nbytes}"


# ---------------------------------------------------------------- copying


@contextmanager
def _opened(folder: Path, blob_folder: Path) -> Iterator[tuple[Database, Blobs]]:
    """Yield a backup's database at head, and its blobs. Closing the database completes its file."""
    blob_folder.mkdir(parents=True, exist_ok=True)
    with closing(Database(f"sqlite:///{folder / NAME}")) as database:
        with database.engine.begin() as connection:
            command.upgrade(alembic_config(connection), "head")
        yield database, Blobs(database, str(blob_folder), folder / "staging", 0, PIECE_BYTES)


@contextmanager
def _snapshot(database: Database) -> Iterator[Connection]:
    """Yield a connection whose reads all see the database at one instant."""
    if database.url.get_backend_name() == "sqlite":
        with database.snapshot() as session:
            yield session.connection()
    else:
        with database.engine.connect().execution_options(isolation_level="REPEATABLE READ") as connection:
            yield connection


def _copy_rows(source: Connection, target: Session, copied: CopyCounts) -> None:
    for table in Table.metadata.sorted_tables:
        with closing(source.execute(select(table), execution_options={"yield_per": ROWS})) as rows:
            for some in rows.mappings().partitions():
                target.execute(insert(table), [dict(row) for row in some])
                copied.rows += len(some)


def _copy_blobs(source: Connection, blobs: Blobs, target: Blobs, copied: CopyCounts) -> None:
    """Copy the blobs that are not stored in a table and that the target lacks."""
    stored = select(BlobRow.digest, BlobRow.size).where(BlobRow.inline.is_(None))
    with target.batch() as batch:
        for digest, size in source.execute(stored).all():
            if Stored(digest, size) in target:
                continue
            with blobs.open(digest) as file, batch.writer() as writer:
                while piece := file.read(PIECE_BYTES):
                    writer.write(piece)
                written = writer.finish()
            if written.digest != digest:
                raise StoreSpoilt(f"blob {digest} no longer has the bytes of its name")
            copied.blobs += 1
            copied.bytes += size


def _require_empty(session: Session) -> None:
    for table in Table.metadata.sorted_tables:
        if session.execute(select(table).limit(1)).first() is not None:
            raise DatabaseNotEmpty(
                f"the database is not empty: it has {table.name}. Name an empty one in TESSERA_DATABASE_URL and run "
                "'tessera coordinator migrate'."
            )
