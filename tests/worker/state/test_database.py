"""A worker's database: a killed process, a full disk and a damaged file lose nothing that was committed."""

from __future__ import annotations

import multiprocessing
import shutil
import sqlite3
import time
from contextlib import closing
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

import pytest

from tessera.shared.client.client import Client
from tessera.worker.bootstrap import runner_of
from tessera.worker.doctor import _state
from tessera.worker.faults.disk import Disk, is_of_disk
from tessera.worker.governance.run_history import RunHistory
from tessera.worker.settings import SettingsError, WorkerSettings
from tessera.worker.state import database
from tessera.worker.state.atomic_files import sweep
from tessera.worker.state.audit import Audit
from tessera.worker.state.database import DATABASE_FILE, StateDatabase, StateError
from tessera.worker.state.hash_chain import TaskRef
from tessera.worker.state.privacy_ledger import Ledger
from tessera.worker.stores import ledger_of, state_id_of
from tests.support.in_process import in_process
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


def _dying(folder: Path, within: bool) -> BaseProcess:
    """Return a process that has spent, and waits."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_dies, args=(folder, theirs, within))
    process.start()
    ours.recv()
    return process


def _kill(process: BaseProcess) -> None:
    process.kill()
    process.join()


@pytest.mark.parametrize("within", [True, False])
def test_a_killed_worker_leaves_a_whole_ledger(tmp_path: Path, journal: str, within: bool) -> None:
    spend(Ledger(tmp_path), token=1)
    assert StateDatabase.of(tmp_path).check() == journal
    _kill(_dying(tmp_path, within))
    assert [entry.token for entry in Ledger(tmp_path).read("wards")] == [1] if within else [1, 2]
    spend(Ledger(tmp_path), token=3)
    assert [entry.token for entry in Ledger(tmp_path).read("wards")] == ([1, 3] if within else [1, 2, 3])
    assert StateDatabase.of(tmp_path).check() == journal


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


def test_a_child_that_is_forked_within_a_transaction_does_not_use_the_file(tmp_path: Path) -> None:
    """Its SQLite would take the locks of the parent for its own."""
    ledger, (ours, theirs) = Ledger(tmp_path), multiprocessing.Pipe()

    def child() -> None:
        try:
            spend(ledger)
        except StateError as refused:
            theirs.send(str(refused))

    with ledger.page("wards"):
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        assert "was in use when this process was forked" in ours.recv()
        process.join()
    spend(ledger)
    assert len(ledger.read("wards")) == 1


def test_a_connection_of_the_parent_does_not_lend_its_locks_to_a_forked_child(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    spend(ledger)
    process = _dying(tmp_path, within=False)
    # The last connection of the parent would remove the log that the child still writes to.
    del ledger
    assert (tmp_path / f"{DATABASE_FILE}-wal").exists()
    _kill(process)
    assert len(Ledger(tmp_path).read("wards")) == 2


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


def test_the_journal_of_a_removed_database_does_not_enter_a_new_one(tmp_path: Path) -> None:
    _kill(_dying(tmp_path, within=False))
    (tmp_path / DATABASE_FILE).unlink()
    for act in (lambda: Ledger(tmp_path).read("wards"), lambda: spend(Ledger(tmp_path))):
        with pytest.raises(
            StateError, match=r"state\.db-wal is left of a database that is gone.*remove .*state\.db and"
        ):
            act()
    assert not (tmp_path / DATABASE_FILE).exists()


@pytest.mark.parametrize("replaced", [True, False])
def test_a_file_that_is_replaced_within_a_transaction_is_named(tmp_path: Path, replaced: bool) -> None:
    ledger = Ledger(tmp_path)
    spend(ledger)

    def spend_on_a_lost_file() -> None:
        with ledger.page("wards"):
            if replaced:
                shutil.copy(tmp_path / DATABASE_FILE, tmp_path / "copy")
                (tmp_path / "copy").replace(tmp_path / DATABASE_FILE)
            else:
                (tmp_path / DATABASE_FILE).unlink()
            # Reads within the transaction still see its file.
            assert len(ledger.read("wards")) == 1
            spend(ledger, token=2)

    with pytest.raises(StateError, match="was removed or replaced while it was in use"):
        spend_on_a_lost_file()


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE entries SET entry = cast(x'7bff7d' AS TEXT)",
        "UPDATE entries SET entry = cast(entry AS BLOB)",
        "UPDATE entries SET digest = cast(digest AS BLOB)",
        "UPDATE entries SET digest = char(233)",
        "DROP TABLE entries",
    ],
)
def test_damage_within_the_pages_is_a_fault_of_the_state(tmp_path: Path, damage: str) -> None:
    """SQLite has no checksums: it finds the file intact."""
    spend(Ledger(tmp_path))
    with closing(sqlite3.connect(tmp_path / DATABASE_FILE)) as connection:
        connection.execute(damage)
        connection.commit()
    with pytest.raises(StateError, match=r"is damaged|no entry of such a chain"):
        Ledger(tmp_path).read("wards")
    with pytest.raises(StateError, match=r"is damaged|no entry of such a chain"):
        spend(Ledger(tmp_path))


def test_a_database_that_cannot_be_used_is_a_fault_of_the_settings_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "state" / DATABASE_FILE).mkdir(parents=True)
    with pytest.raises(SettingsError, match=r"state_dir: .*state\.db") as refused:
        state_id_of(settings(tmp_path))
    assert is_of_disk(refused.value)


def test_an_empty_file_in_place_of_the_database_is_damage(tmp_path: Path) -> None:
    (tmp_path / DATABASE_FILE).touch()
    with pytest.raises(StateError, match=r"is damaged.*put back the newest copy"):
        spend(Ledger(tmp_path))


@pytest.mark.parametrize(
    "file", [f"{'0a' * 16}.json", f"{'0a' * 16}.{'b' * 16}.json", "sums/ab.json", "measured/w.json"]
)
def test_a_shared_history_of_an_earlier_format_is_not_taken_for_an_empty_one(tmp_path: Path, file: str) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("{}")
    with pytest.raises(StateError, match="earlier format"):
        RunHistory(tmp_path, "w").measured("wards")


@pytest.mark.parametrize("file", ["ledger/wards.jsonl", "audit/audit.jsonl", "runs/r.json"])
def test_the_state_of_an_earlier_format_is_not_taken_for_an_empty_one(tmp_path: Path, file: str) -> None:
    path = tmp_path / "state" / file
    path.parent.mkdir(parents=True)
    path.write_text("{}\n")
    here = settings(tmp_path)
    with pytest.raises(SettingsError, match=r"is of an earlier format.*would count as nothing"):
        runner_of(cast("Client", None), here, in_process(here))
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
        runner_of(cast("Client", None), here, in_process(here))
    (finding,) = _state(here)
    assert (finding.verdict, "put back the newest copy" in str(finding)) == ("fail", True)


def test_doctor_names_the_journal(tmp_path: Path, journal: str) -> None:
    here = settings(tmp_path)
    spend(Ledger(here.state_dir))
    (finding,) = _state(here)
    assert finding.verdict == ("ok" if journal == "wal" else "warn")
    assert ("rollback journal" in finding.detail) == (journal == "delete")


def test_a_full_database_pauses_the_worker_and_keeps_what_was_committed(tmp_path: Path) -> None:
    audit, full = Audit(tmp_path, "w"), StateDatabase.of(tmp_path)
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
