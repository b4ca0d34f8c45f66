"""A migrated database and a blob folder, without a server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import event
from sqlalchemy.orm import Session

from tessera.coordinator.blobs.staging import LOCK
from tessera.coordinator.blobs.store import Blobs
from tessera.coordinator.db.engine import Database
from tessera.coordinator.db.studies import join
from tessera.coordinator.db.tables import RoundRow, RunRow, SiteRow, TaskRow, VersionRow, WorkerRow
from tests.support.databases import url_in

NOW = 1000.0


def migrated(folder: Path, clock: Callable[[], float] = lambda: NOW) -> Database:
    return Database(url_in(folder), clock)


@contextmanager
def statements(database: Database) -> Iterator[list[str]]:
    """What the database is asked meanwhile."""
    seen: list[str] = []

    def note(connection: object, cursor: object, statement: str, *more: object) -> None:
        seen.append(statement)

    event.listen(database.engine, "before_cursor_execute", note)
    yield seen
    event.remove(database.engine, "before_cursor_execute", note)


def blobs_in(folder: Path, database: Database, inline_bytes: int = 100) -> Blobs:
    folder.mkdir(parents=True, exist_ok=True)
    return Blobs(database, str(folder / "blobs"), folder / "staging", inline_bytes, readahead_bytes=1 << 16)


def unfinished(blobs: Blobs) -> list[Path]:
    """What lies in the staging folder, without its locks."""
    return [path for path in blobs.staging_dir.rglob("*") if path.is_file() and path.name != LOCK]


def add_run(session: Session, run_id: str = "run", state: str = "running") -> RunRow:
    run = RunRow(
        id=run_id,
        name=run_id,
        state=state,
        spec={},
        model_bytes=0,
        version_number=0,
        revision=1,
        created_at=NOW,
        resumed_at=NOW,
        updated_at=NOW,
    )
    session.add(run)
    session.flush()
    session.add(VersionRow(run_id=run_id, number=0, digest=f"sha256:{'0' * 64}", created_at=NOW))
    session.flush()
    return run


def add_round(
    session: Session, run_id: str = "run", number: int = 1, attempt: int = 1, state: str = "open"
) -> RoundRow:
    row = RoundRow(
        id=f"{run_id}-{number}-{attempt}",
        run_id=run_id,
        number=number,
        attempt=attempt,
        state=state,
        stage="train",
        opened_at=NOW,
        deadline_at=NOW + 100,
    )
    session.add(row)
    session.flush()
    return row


def add_worker(session: Session, name: str = "w") -> WorkerRow:
    if session.get(SiteRow, "site") is None:
        session.add(SiteRow(id="site", name="site", created_at=NOW))
        join(session, "site", "site", ["default"])
    row = WorkerRow(id=name, site_id="site", name=name, declared={}, created_at=NOW, last_seen_at=NOW)
    session.add(row)
    session.flush()
    return row


def add_task(
    session: Session, task_id: str, worker_id: str = "w", state: str = "offered", **fields: object
) -> TaskRow:
    values: dict[str, object] = {
        "run_id": "run",
        "round_id": "run-1-1",
        "kind": "train",
        "version_number": 0,
        "seed": 0,
        "plan": {},
        "token": 1,
        "attempts": 1,
        "created_at": NOW,
        "upload_bytes": 0,
        "download_bytes": 0,
        "metrics": {},
    }
    row = TaskRow(id=task_id, worker_id=worker_id, state=state, **{**values, **fields})
    session.add(row)
    session.flush()
    return row
