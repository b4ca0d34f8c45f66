"""A worker's database: a killed process, a full disk and a damaged file lose nothing that was committed."""

from __future__ import annotations

import multiprocessing
import sqlite3
import time
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import pytest

from tessera.shared.client.client import Client
from tessera.worker.bootstrap import runner_of
from tessera.worker.doctor import _state
from tessera.worker.faults.disk import Disk
from tessera.worker.settings import SettingsError, WorkerSettings
from tessera.worker.state import database
from tessera.worker.state.atomic_files import sweep
from tessera.worker.state.audit import Audit
from tessera.worker.state.database import DATABASE_FILE, Database, StateError
from tessera.worker.state.hash_chain import TaskRef
from tessera.worker.state.privacy_ledger import Ledger
from tessera.worker.stores import ledger_of
from tests.support.task_document import task_of
from tests.worker.state.test_privacy_ledger import STEPS, TARGET, spend

JOURNALS = ("wal", "delete")


@pytest.fixture(params=JOURNALS)
def journal(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The journal mode, with this machine's file system taken for one of the network for the second."""
    if request.param == "delete":
        monkeypatch.setattr(database, "NETWORK", {database.file_system(tmp_path)})
    return str(request.param)


def settings(folder: Path) -> WorkerSettings:
    given: dict[str, Any] = {"url": "http://127.0.0.1:9", "token": "t", "name": "w", "state_dir": folder / "state"}
    return WorkerSettings(datasets={"wards": {"kind": "digits"}}, **given)


def _dies(folder: Path, line: Connection, within: bool) -> None:
    """Spend, and wait to be killed: within the transaction, or after it."""
    with Ledger(folder).page("wards") as page:
        page.spend(TaskRef.of(task_of(token=2)), 100, TARGET, [STEPS])
        if within:
            line.send("spent")
            time.sleep(1000)
    line.send("on disk")
    time.sleep(1000)


@pytest.mark.parametrize("within", [True, False])
def test_a_killed_worker_leaves_a_whole_ledger(tmp_path: Path, journal: str, within: bool) -> None:
    spend(Ledger(tmp_path), token=1)
    assert Database.of(tmp_path).check() == journal
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_dies, args=(tmp_path, theirs, within))
    process.start()
    ours.recv()
    process.kill()
    process.join()
    assert [entry.token for entry in Ledger(tmp_path).read("wards")] == [1] if within else [1, 2]
    spend(Ledger(tmp_path), token=3)
    assert [entry.token for entry in Ledger(tmp_path).read("wards")] == ([1, 3] if within else [1, 2, 3])
    assert Database.of(tmp_path).check() == journal


def test_a_killed_worker_that_created_its_database_leaves_none_or_a_whole_one(tmp_path: Path) -> None:
    for milliseconds in range(0, 40, 4):
        folder = tmp_path / str(milliseconds)
        process = multiprocessing.get_context("fork").Process(target=spend, args=(Ledger(folder),))
        process.start()
        time.sleep(milliseconds / 1000)
        process.kill()
        process.join()
        spend(Ledger(folder))
        assert len(Ledger(folder).read("wards")) in (1, 2)
        sweep(folder)
        assert {path.name.removesuffix("-wal").removesuffix("-shm") for path in folder.iterdir()} == {DATABASE_FILE}


def test_stores_that_a_forked_process_inherits_have_a_connection_of_its_own(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    spend(ledger)
    process = multiprocessing.get_context("fork").Process(target=spend, args=(ledger,))
    process.start()
    process.join()
    spend(ledger)
    assert [entry.seq for entry in ledger.read("wards")] == [0, 1, 2]


def test_a_transaction_that_fails_leaves_nothing(tmp_path: Path) -> None:
    audit, ledger = Audit(tmp_path, "w"), Ledger(tmp_path)

    def fail() -> None:
        with ledger.page("wards") as page:
            page.spend(TaskRef.of(task_of()), 100, TARGET, [STEPS])
            audit.record("task.start")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert (ledger.read("wards"), audit.read()) == ((), ())


def test_a_database_is_its_owner_s_alone(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "state")
    spend(ledger)
    assert (tmp_path / "state").stat().st_mode & 0o077 == 0
    files = list((tmp_path / "state").iterdir())
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert DATABASE_FILE in {path.name for path in files}


@pytest.mark.parametrize("file", ["ledger/wards.jsonl", "audit/audit.jsonl", "runs/r.json"])
def test_the_state_of_an_earlier_format_is_not_taken_for_an_empty_one(tmp_path: Path, file: str) -> None:
    path = tmp_path / "state" / file
    path.parent.mkdir(parents=True)
    path.write_text("{}\n")
    with pytest.raises(SettingsError, match=r"is of an earlier format.*would count as nothing"):
        runner_of(cast("Client", None), settings(tmp_path))
    with pytest.raises(StateError, match="earlier format"):
        spend(Ledger(tmp_path / "state"))


def test_a_database_of_another_version_is_refused(tmp_path: Path) -> None:
    spend(Ledger(tmp_path))
    with closing(sqlite3.connect(tmp_path / DATABASE_FILE)) as connection:
        connection.execute("PRAGMA user_version = 99")
    with pytest.raises(StateError, match="has the format 99, and this version of Tessera uses"):
        Ledger(tmp_path).read("wards")


@pytest.mark.parametrize("damage", ["content", "no database"])
def test_a_damaged_database_stops_the_worker_with_the_remedy(tmp_path: Path, damage: str) -> None:
    here = settings(tmp_path)
    ledger = ledger_of(here)
    for _ in range(20):
        spend(ledger)
    del ledger
    file = here.state_dir / DATABASE_FILE
    content = bytearray(file.read_bytes())
    at = len(content) // 2 if damage == "content" else 0
    content[at : at + 4096] = b"\xff" * 4096
    file.write_bytes(content)
    with pytest.raises(SettingsError, match=r"is damaged.*put back the newest copy.*tessera worker adopt"):
        runner_of(cast("Client", None), here)
    (finding,) = _state(here)
    assert (finding.verdict, "put back the newest copy" in str(finding)) == ("fail", True)


def test_doctor_names_the_journal(tmp_path: Path, journal: str) -> None:
    here = settings(tmp_path)
    spend(Ledger(here.state_dir))
    (finding,) = _state(here)
    assert finding.verdict == ("ok" if journal == "wal" else "warn")
    assert ("rollback journal" in finding.detail) == (journal == "delete")


def test_a_full_database_pauses_the_worker_and_keeps_what_was_committed(tmp_path: Path) -> None:
    audit, full = Audit(tmp_path, "w"), Database.of(tmp_path)
    audit.record("worker.start")
    ((pages,),) = full.rows("PRAGMA page_count")
    full.rows(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(OSError, match="No space left on device") as refused:
        audit.record("task.fail", None, detail="x" * 100_000)
    assert (Disk([tmp_path]).note(refused.value) or "").startswith(f"{tmp_path}: No space left on device")
    full.rows("PRAGMA max_page_count = 1000000")
    audit.record("worker.stop")
    assert [entry.action for entry in audit.read()] == ["worker.start", "worker.stop"]


def test_a_lock_that_another_process_keeps_pauses_the_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "WAIT_SECONDS", 0.01)
    spend(Ledger(tmp_path))
    with closing(sqlite3.connect(tmp_path / DATABASE_FILE)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(OSError, match="another process has written to it for") as refused:
            spend(Ledger(tmp_path))
    assert Disk([tmp_path]).note(refused.value)
