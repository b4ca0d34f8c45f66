"""Backups of a coordinator at work, and what is found wrong with one that is damaged."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import partial
from io import StringIO
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO, cast

import pytest
import typer
from sqlalchemy import delete, event, update
from sqlalchemy.exc import OperationalError

from tessera.coordinator.blobs.store import Blobs
from tessera.coordinator.cli import _copying
from tessera.coordinator.db import engine as engine_module
from tessera.coordinator.db.engine import Database
from tessera.coordinator.db.tables import AuditRow, BlobRow, RunBlobRow, RunRow
from tessera.coordinator.maintenance import backup
from tessera.coordinator.maintenance.backup import BackupNotFound, BackupRunning, CopyCounts, DatabaseNotEmpty
from tessera.shared.api.runs import Run
from tessera.shared.methods.base import MethodSpec
from tessera.shared.problems import StoreSpoilt
from tessera.shared.run_settings import Privacy
from tessera.shared.tensors.lazy import digest_of
from tests.coordinator.maintenance.test_retention import MODEL, START, at_rest, exported, play, played
from tests.support import databases
from tests.support.coordinator import Clock, LiveCoordinator, until
from tests.support.federation import ScriptedWorker, start_run
from tests.support.storage import blobs_in


def saved(live: LiveCoordinator, folder: Path) -> backup.CopyCounts:
    return backup.back_up(live.services.database, live.services.blobs, folder)


def faults(live: LiveCoordinator) -> list[str]:
    services = live.services
    return list(backup.verify(services.database, services.blobs, services.states))


def begun(live: LiveCoordinator) -> Run:
    """A run with its first version, which is all that it ever has."""
    return start_run(live.client(), MODEL, START, dataset="none")


def test_a_restore_pauses_the_runs_that_their_sites_would_refuse_and_says_how_they_go_on(tmp_path: Path) -> None:
    bound: dict[str, dict[str, Any]] = {
        "private": {"privacy": Privacy(epsilon=8.0, delta=1e-5, clip_norm=1.0)},
        "kept": {"method": MethodSpec(name="fedper")},
        "lossy": {"codec": "delta+int8"},
        "plain": {},
    }
    with LiveCoordinator(tmp_path / "one") as live:
        for name, more in bound.items():
            start_run(live.client(), MODEL, START, dataset="none", name=name, **more)
        saved(live, tmp_path / "backup")
    with LiveCoordinator(tmp_path / "two") as other:
        backup.restore(tmp_path / "backup", other.services.database, other.services.blobs)
        found = {run.spec.name: run for run in other.client().runs()}
        assert {name for name, run in found.items() if run.state == "paused"} == {"private", "kept", "lossy"}
        assert "`tessera worker adopt --run NAME` at each of them" in str(found["private"].reason)
        assert faults(other) == []


def test_a_restored_coordinator_is_the_same_and_goes_on(tmp_path: Path) -> None:
    with LiveCoordinator(tmp_path / "one", inline_bytes=100) as live:
        client, run, worker, _ = played(live, 1)
        whole = [exported(client, run, number) for number in range(2)]
        audit = list(client.audit())
        copied = saved(live, tmp_path / "backup")
        assert copied.blobs > 0
    with LiveCoordinator(tmp_path / "two", inline_bytes=100) as other:
        restored = backup.restore(tmp_path / "backup", other.services.database, other.services.blobs)
        assert (restored.rows, restored.blobs) == (copied.rows, copied.blobs)
        assert not faults(other)
        # Its tokens are good here too: only where it listens has changed.
        client = other.client()
        assert [exported(client, run, number) for number in range(2)] == whole
        assert list(client.audit())[: len(audit)] == audit
        ScriptedWorker(other.client("site", "b"), instance=worker.instance).enrol()
        until(lambda: client.round(run.id, 2).state == "open")


def test_the_second_backup_into_a_folder_copies_what_is_new(tmp_path: Path) -> None:
    with LiveCoordinator(tmp_path / "one", inline_bytes=1) as live:
        client, run, worker, _ = played(live, 1)
        first = saved(live, tmp_path / "backup")
        assert not saved(live, tmp_path / "backup").blobs
        play(client, worker, run, 2)
        assert 0 < saved(live, tmp_path / "backup").blobs < first.blobs
    with LiveCoordinator(tmp_path / "two", inline_bytes=1) as other:
        backup.restore(tmp_path / "backup", other.services.database, other.services.blobs)
        assert exported(other.client(), run, 2)
        assert not faults(other)


def test_blobs_that_the_coordinator_removed_go_from_the_next_backup(tmp_path: Path) -> None:
    clock, folder = Clock(), tmp_path / "backup"
    with LiveCoordinator(tmp_path / "one", clock=clock, inline_bytes=1) as live:
        _, _, _, updates = played(live, 1)
        saved(live, folder)
        before = {path.name for path in folder.glob("blobs/*/*")}
        clock.advance(3601)
        assert live.services.retention.collect().updates == 1
        saved(live, folder)
        after = {path.name for path in folder.glob("blobs/*/*")}
        assert before - after == {update.removeprefix("sha256:") for update in updates}
        assert after == {path.name for path in Path(live.settings.blob_url).glob("*/*")}


def test_a_damaged_blob_of_a_backup_is_copied_again_on_request(tmp_path: Path) -> None:
    with closing(Database(databases.url_in(tmp_path / "one"))) as database:
        blobs, folder = blobs_in(tmp_path / "one", database, 1), tmp_path / "backup"
        blobs.save([b"some bytes"])
        backup.back_up(database, blobs, folder)
        (file,) = folder.glob("blobs/*/*")
        file.write_bytes(b"other byte")
        assert backup.back_up(database, blobs, folder).blobs == 0
        assert backup.back_up(database, blobs, folder, verifying=True).blobs == 1
        assert file.read_bytes() == b"some bytes"


def test_a_backup_that_is_cut_off_leaves_the_one_before_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LiveCoordinator(tmp_path / "one", inline_bytes=1) as live:
        begun(live)
        saved(live, tmp_path / "backup")
        before = (tmp_path / "backup" / "tessera.db").read_bytes()
        live.client().put_bytes(b"after the first backup")

        def cut(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(backup, "_copy_rows", cut)
        with pytest.raises(KeyboardInterrupt):
            saved(live, tmp_path / "backup")
        assert (tmp_path / "backup" / "tessera.db").read_bytes() == before
        assert sorted(path.name for path in (tmp_path / "backup").iterdir()) == ["blobs", "lock", "tessera.db"]


KILLED = """
import sys
from pathlib import Path
from tessera.coordinator.blobs.store import Blobs
from tessera.coordinator.db.engine import Database
from tessera.coordinator.maintenance import backup
work, url, place, folder = sys.argv[1:]
database = Database(url)
blobs = Blobs(database, place + "/blobs", Path(place) / "staging", 1, 1 << 16)
def stop(*_):
    print("begun", flush=True)
    sys.stdin.read()
backup._copy_rows = stop
if work == "back_up":
    backup.back_up(database, blobs, Path(folder))
else:
    backup.restore(Path(folder), database, blobs)
"""


@pytest.mark.parametrize("work", ["back_up", "restore"])
def test_what_a_killed_backup_or_restore_leaves_is_removed(tmp_path: Path, work: str) -> None:
    one, two, folder = tmp_path / "one", tmp_path / "two", tmp_path / "backup"
    with closing(Database(databases.url_in(one))) as database, closing(Database(databases.url_in(two))) as other:
        source, target = blobs_in(one, database), blobs_in(two, other)
        backup.back_up(database, source, folder)
        place, url = (one, database.url) if work == "back_up" else (two, other.url)
        arguments = (work, url.render_as_string(hide_password=False), str(place), str(folder))
        command = [sys.executable, "-c", KILLED, *arguments]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout
            assert process.stdout.readline() == b"begun\n"
            (left,) = [file for file in tmp_path.rglob("tessera.db") if file.parent not in (one, two, folder)]
            assert target.sweep() == 0
            if work == "back_up":
                with pytest.raises(BackupRunning, match="wait for its end"):
                    backup.back_up(database, source, folder)
            process.kill()
        assert left.exists()
        if work == "back_up":
            backup.back_up(database, source, folder)
        else:
            assert target.sweep() == 1
        assert not left.parent.exists()


def test_a_backup_whose_rows_cannot_reach_its_file_leaves_the_one_before(tmp_path: Path) -> None:
    with LiveCoordinator(tmp_path / "one", inline_bytes=1) as live, ExitStack() as readers:
        begun(live)
        saved(live, tmp_path / "backup")
        before = (tmp_path / "backup" / "tessera.db").read_bytes()
        live.client().put_bytes(b"after the first backup")

        def read(_: str) -> None:
            # SQLite keeps the rows beside the file while another connection reads it, as it does on a full disk.
            for file in (tmp_path / "backup").glob("*/tessera.db"):
                reader = readers.enter_context(closing(sqlite3.connect(file, isolation_level=None)))
                reader.execute("BEGIN")
                reader.execute("SELECT * FROM runs")

        watched = cast("Blobs", Watched(live.services.blobs, read))
        with pytest.raises(OperationalError, match="locked"):
            backup.back_up(live.services.database, watched, tmp_path / "backup")
        assert (tmp_path / "backup" / "tessera.db").read_bytes() == before


def test_a_backup_goes_into_an_empty_database_only(tmp_path: Path) -> None:
    with LiveCoordinator(tmp_path / "one") as live:
        begun(live)
        saved(live, tmp_path / "backup")
        with pytest.raises(DatabaseNotEmpty, match="TESSERA_DATABASE_URL"):
            backup.restore(tmp_path / "backup", live.services.database, live.services.blobs)
        with pytest.raises(BackupNotFound, match=r"tessera\.db"):
            backup.restore(tmp_path, live.services.database, live.services.blobs)


def test_an_empty_file_is_no_backup(tmp_path: Path) -> None:
    (tmp_path / "backup").mkdir()
    (tmp_path / "backup" / "tessera.db").touch()
    refused = pytest.raises(BackupNotFound, match=r"tessera\.db holds no tables")
    with LiveCoordinator(tmp_path / "one") as live, refused:
        backup.restore(tmp_path / "backup", live.services.database, live.services.blobs)


def test_a_backup_on_another_disk_is_restored(tmp_path: Path) -> None:
    elsewhere = Path("/dev/shm")
    if not elsewhere.is_dir() or elsewhere.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("this machine has one file system only")
    with LiveCoordinator(tmp_path / "one", inline_bytes=1) as live, TemporaryDirectory(dir=elsewhere) as folder:
        run = begun(live)
        copied = saved(live, Path(folder))
        with LiveCoordinator(tmp_path / "two", inline_bytes=1) as other:
            restored = backup.restore(Path(folder), other.services.database, other.services.blobs)
            assert (restored.rows, restored.blobs) == (copied.rows, copied.blobs)
            assert exported(other.client(), run, 0)


def test_a_spoilt_backup_is_refused_whole(tmp_path: Path) -> None:
    with LiveCoordinator(tmp_path / "one", inline_bytes=1) as live:
        begun(live)
        saved(live, tmp_path / "backup")
    some = next((tmp_path / "backup" / "blobs").glob("*/*"))
    some.write_bytes(bytes(byte ^ 1 for byte in some.read_bytes()))
    (tmp_path / "two").mkdir()
    with LiveCoordinator(tmp_path / "two", inline_bytes=1) as other:
        with pytest.raises(StoreSpoilt, match=some.name):
            backup.restore(tmp_path / "backup", other.services.database, other.services.blobs)
        assert not list(other.client().runs())


@pytest.mark.parametrize(("revision", "fault"), [("0027", "is older than Tessera 0.1.0"), ("9999", "is of a newer")])
def test_a_backup_of_a_schema_that_cannot_be_upgraded_is_refused(tmp_path: Path, revision: str, fault: str) -> None:
    with LiveCoordinator(tmp_path / "one") as live:
        saved(live, tmp_path / "backup")
        with sqlite3.connect(tmp_path / "backup" / "tessera.db") as connection:
            connection.execute("UPDATE alembic_version SET version_num = ?", (revision,))
        with pytest.raises(backup.BackupNotFound, match=f"{fault}.*; restore it with the version that made it"):
            backup.restore(tmp_path / "backup", live.services.database, live.services.blobs)


# ---------------------------------------------------------------- beside a coordinator at work


@dataclass
class Watched:
    """A blob store; before each blob is read, something else happens."""

    blobs: Blobs
    before: Callable[[str], None]

    def open(self, digest: str) -> BinaryIO:
        self.before(digest)
        return self.blobs.open(digest)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.blobs, name)


@contextmanager
def other_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Database]:
    """The database of a coordinator as another process has it, which waits for its turn to write for a second."""
    with monkeypatch.context() as patch, closing(Database(databases.url_in(folder))) as database:
        patch.setattr(engine_module, "TURN_SECONDS", 1)
        yield database


@pytest.mark.both_databases
def test_a_backup_that_takes_long_has_no_transaction_open_and_holds_up_no_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LiveCoordinator(tmp_path / "one", inline_bytes=1) as live:
        begun(live)
    with at_rest(live) as services, other_process(tmp_path / "one", monkeypatch) as other:
        notes: list[str] = []

        def meanwhile(digest: str) -> None:
            databases.end_idle_transactions(other)
            late = services.blobs.put([digest.encode()])
            with other.transaction() as session:
                session.execute(update(RunRow).values(note=digest))
                services.blobs.record(session, other.now(), [late])
            notes.append(digest)

        slow = cast("Blobs", Watched(services.blobs, meanwhile))
        backup.back_up(services.database, slow, tmp_path / "backup")
    (tmp_path / "two").mkdir()
    with LiveCoordinator(tmp_path / "two", inline_bytes=1) as restored:
        backup.restore(tmp_path / "backup", restored.services.database, restored.services.blobs)
        # What came while the first blobs were copied was copied with the rows.
        assert notes[-1] != next(iter(restored.client().runs())).note in notes
        assert not faults(restored)


@pytest.mark.both_databases
def test_a_slow_folder_does_not_end_the_snapshot_of_the_rows(tmp_path: Path) -> None:
    limits = list[str]()
    with closing(Database(databases.url_in(tmp_path / "one"))) as database:
        blobs = blobs_in(tmp_path / "one", database)

        def note(connection: Any, cursor: Any, statement: str, *_: object) -> None:
            # Rows are read while others are inserted into the folder, which may take long.
            if connection.dialect.name == "postgresql" and statement.rstrip().endswith("FROM tokens"):
                with connection.connection.cursor() as other:
                    other.execute("SHOW idle_in_transaction_session_timeout")
                    limits.extend(other.fetchone())

        event.listen(database.engine, "before_cursor_execute", note)
        backup.back_up(database, blobs, tmp_path / "backup")
        assert limits == ([] if database.is_sqlite else ["0"])


def test_what_is_removed_during_a_backup_is_not_in_it(tmp_path: Path) -> None:
    clock, added, removed = Clock(), [b"during the second pass", b"during the first pass"], list[int]()
    with LiveCoordinator(tmp_path / "one", clock=clock, inline_bytes=1) as live:
        client, run = live.client(), begun(live)
        last = client.put_bytes(added.pop())

        def meanwhile(digest: str) -> None:
            nonlocal last
            if digest == last or not removed:
                clock.advance(86_401)
                removed.append(live.services.retention.collect().blobs)
                last = client.put_bytes(added.pop()) if added else ""

        busy = cast("Blobs", Watched(live.services.blobs, meanwhile))
        backup.back_up(live.services.database, busy, tmp_path / "backup")
        assert removed == [1, 1]
        whole = exported(client, run, 0)
    (tmp_path / "two").mkdir()
    with LiveCoordinator(tmp_path / "two", inline_bytes=1) as restored:
        backup.restore(tmp_path / "backup", restored.services.database, restored.services.blobs)
        assert exported(restored.client(), run, 0) == whole
        assert not faults(restored)


@pytest.mark.both_databases
def test_verify_has_no_transaction_open_while_it_takes_its_time(tmp_path: Path) -> None:
    with LiveCoordinator(tmp_path, inline_bytes=1) as live:
        begun(live)
        expected = [spoil_a_file(live), lose_a_row(live)]
    with at_rest(live) as services, closing(Database(databases.url_in(tmp_path))) as other:
        found = []
        for fault in backup.verify(services.database, services.blobs, services.states):
            databases.end_idle_transactions(other)
            found.append(fault)
    assert all(any(each in fault for fault in found) for each in expected)


def test_what_is_removed_while_verify_runs_is_no_fault(tmp_path: Path) -> None:
    # No blob of the run comes after it.
    unused = next(data for n in count() if digest_of(data := str(n).encode()) > "sha256:fff")
    clock = Clock()
    with LiveCoordinator(tmp_path, clock=clock, inline_bytes=1) as live:
        client, _ = live.client(), begun(live)
        files = set(Path(live.settings.blob_url).glob("*/*"))
        digest = client.put_bytes(unused)
        for path in files:
            path.write_bytes(b"rot")
        found = []
        for fault in backup.verify(live.services.database, live.services.blobs, live.services.states):
            if not found:
                clock.advance(86_401)
                assert live.services.retention.collect().blobs == 1
            found.append(fault)
    assert found
    assert not any(digest in fault for fault in found)


# ---------------------------------------------------------------- verify


def spoil_a_file(live: LiveCoordinator) -> str:
    path = next(Path(live.settings.blob_url).glob("*/*"))
    path.write_bytes(b"rot")
    return f"blob sha256:{path.name} no longer has the bytes of its name"


def lose_a_file(live: LiveCoordinator) -> str:
    path = next(Path(live.settings.blob_url).glob("*/*"))
    path.unlink()
    return f"blob sha256:{path.name} is missing from the store"


def make_a_file_unreadable(live: LiveCoordinator) -> str:
    path = next(Path(live.settings.blob_url).glob("*/*"))
    path.unlink()
    path.mkdir()
    return f"blob sha256:{path.name} cannot be read: Is a directory"


def lose_a_row(live: LiveCoordinator) -> str:
    run = next(iter(live.client().runs()))
    manifest = live.services.states.manifest(run.version.digest)
    name, digest = next(iter(manifest.blocks.items()))
    with live.services.database.transaction() as session:
        session.execute(delete(RunBlobRow).where(RunBlobRow.digest == digest))
        session.execute(delete(BlobRow).where(BlobRow.digest == digest))
    return f"version {run.version.number}: block {name} is not stored"


def rewrite_history(live: LiveCoordinator) -> str:
    with live.services.database.transaction() as session:
        session.execute(update(AuditRow).where(AuditRow.seq == 2).values(actor="nobody"))
    return "the audit chain breaks at entry 2"


@pytest.mark.parametrize("damage", [spoil_a_file, lose_a_file, make_a_file_unreadable, lose_a_row, rewrite_history])
def test_every_damage_is_found_and_named(tmp_path: Path, damage: Callable[[LiveCoordinator], str]) -> None:
    with LiveCoordinator(tmp_path, inline_bytes=1) as live:
        begun(live)
        assert not faults(live)
        expected = damage(live)
    # As another process sees it, which has nothing at hand.
    with LiveCoordinator(tmp_path, inline_bytes=1) as live:
        assert any(expected in fault for fault in faults(live)), faults(live)


def test_a_failing_backup_names_its_folder_and_no_page_of_a_library(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    fault = OperationalError("INSERT", {}, sqlite3.OperationalError("database or disk is full"))
    folder = tmp_path / "file" / "backup"
    for work in (folder.mkdir, partial(_raise, fault)):
        with pytest.raises(typer.Exit), redirect_stderr(StringIO()) as said:
            _copying("backed up", folder, work, as_json=False)
        assert str(folder) in said.getvalue()
        assert "sqlalche.me" not in said.getvalue()
        assert "Errno" not in said.getvalue()


def _raise(fault: Exception) -> CopyCounts:
    raise fault
