"""What several processes on one PostgreSQL rely on: turns, one clock, locks that end with who held them, notices."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import URL, create_engine, event, func, make_url, select
from sqlalchemy.exc import DBAPIError

from tessera.coordinator.db import audit
from tessera.coordinator.db import engine as module
from tessera.coordinator.db.engine import DATABASE_AWAY, Database, UnknownDatabase
from tessera.coordinator.db.tables import AnnouncedRow, AuditRow, RunRow, UploadRow
from tessera.coordinator.notify.wakeup import BATCH, CONDUCTOR, PostgresWakeups, serving_name
from tests.support import databases
from tests.support.cli import forked
from tests.support.coordinator import LiveCoordinator, until
from tests.support.raw import announced
from tests.support.storage import add_run


@pytest.fixture(scope="module", autouse=True)
def database_kind() -> Iterator[str]:
    """All tests here are about PostgreSQL, except where the environment rules that out."""
    if databases.CHOSEN == "sqlite":
        pytest.skip("TESSERA_TEST_DATABASE rules PostgreSQL out")
    with databases.running_on("postgresql"):
        yield "postgresql"


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[list[Database]]:
    """One database, opened by three as by three processes."""
    opened = [Database(databases.url_in(tmp_path)) for _ in range(3)]
    yield opened
    for database in opened:
        database.close()


def restarted(database: Database) -> None:
    """Ends all other connections to the database, as a restart of the server does."""
    with database.engine.connect() as connection:
        connection.exec_driver_sql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )


def test_writers_of_several_processes_take_turns_and_none_reads_what_another_is_about_to_change(
    shared: list[Database],
) -> None:
    with shared[0].transaction() as session:
        add_run(session)

    def count(database: Database) -> None:
        for _ in range(20):
            with database.transaction() as session:
                run = session.get_one(RunRow, "run")
                run.model_bytes += 1

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(count, shared * 2))
    with shared[0].snapshot() as session:
        assert session.scalar(select(RunRow.model_bytes)) == 6 * 20


def test_sites_that_announce_at_several_coordinators_at_once_keep_to_their_quota_and_the_audit_is_whole(
    tmp_path: Path,
) -> None:
    """Eight threads, each with twenty uploads of a site that may announce fifty, at one of two coordinators."""
    each_bytes, most, threads, wishes = 1000, 50, 8, 20
    barrier = threading.Barrier(threads)
    limits = {"site_bytes_per_day": most * each_bytes}
    with LiveCoordinator(tmp_path, **limits) as one, LiveCoordinator(tmp_path, **limits) as other:
        replicas = [one, other] * (threads // 2)
        tokens = [one.token("site", site) for site in "ab"]
        clients = [
            replica.bare({"Authorization": f"Bearer {tokens[number % 4 // 2]}"})
            for number, replica in enumerate(replicas)
        ]
        admins = [one.client(), other.client()]

        def announce(number: int) -> Counter[tuple[int, int]]:
            answers: Counter[tuple[int, int]] = Counter()
            barrier.wait()
            for wish in range(wishes):
                headers = announced(f"{number} {wish}".encode(), each_bytes)
                answers[number % 4 // 2, clients[number].post("/v1/uploads", headers=headers).status_code] += 1
                if wish % 10 == 0:
                    # What is entered in the audit, between announcements that are not.
                    admins[number % 2].create_site(f"site-{number}-{wish}")
            return answers

        with ThreadPoolExecutor(threads) as pool:
            answers = sum(pool.map(announce, range(threads)), Counter())
        over = threads // 2 * wishes - most
        assert answers == {(site, status): n for site in (0, 1) for status, n in ((201, most), (429, over))}
        with one.services.database.snapshot() as session:
            counted = session.execute(
                select(AnnouncedRow.site_id, func.sum(AnnouncedRow.bytes)).group_by(AnnouncedRow.site_id)
            ).all()
            assert [total for _, total in counted] == [most * each_bytes] * 2
            assert session.scalar(select(func.count()).select_from(UploadRow)) == 2 * most
            created = select(func.count()).where(AuditRow.action == "site.create", AuditRow.actor != "test")
            assert session.scalar(created) == threads * 2
            assert audit.broken_at(session) is None


def test_a_reader_sees_one_moment_and_writes_nothing(shared: list[Database]) -> None:
    reading, writing, _ = shared
    with reading.snapshot() as session:
        before = session.scalars(select(RunRow.id)).all()
        with writing.transaction() as other:
            add_run(other)
        assert session.scalars(select(RunRow.id)).all() == before == []
        with pytest.raises(DBAPIError, match="read-only"):
            session.connection().exec_driver_sql("DELETE FROM runs")


def test_a_writer_that_stands_still_loses_its_turn_and_what_it_wrote(
    shared: list[Database], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with shared[0].transaction():
        pass  # it keeps its connection, which may be idle for longer than the next one
    paused = Database(databases.url_in(tmp_path))

    def stand_still() -> None:
        with paused.transaction() as session:
            add_run(session, "lost")
            # If it waited for longer than it may, it would fail.
            with shared[0].transaction() as other:
                add_run(other, "kept")

    with monkeypatch.context() as patch:
        patch.setattr(module, "IDLE_SECONDS", 1)
        with pytest.raises(DATABASE_AWAY):
            stand_still()
    with shared[1].snapshot() as session:
        assert session.scalars(select(RunRow.id)).all() == ["kept"]
    # The connection that was ended is not handed out again.
    with paused.transaction() as session:
        add_run(session, "later")
    paused.close()


def test_whoever_waits_too_long_for_a_turn_is_told_so(
    shared: list[Database], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "TURN_SECONDS", 1)
    hasty = Database(databases.url_in(tmp_path))
    with shared[0].transaction() as session:
        add_run(session)
        with pytest.raises(DATABASE_AWAY, match="lock timeout"), hasty.transaction() as waiting:
            add_run(waiting)
    hasty.close()


def test_a_thread_that_waits_too_long_for_another_one_is_told_so(
    shared: list[Database], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TURN_SECONDS", 1)

    def write() -> None:
        with shared[0].transaction() as session:
            add_run(session)

    with ThreadPoolExecutor(1) as pool, shared[0].transaction():
        assert isinstance(pool.submit(write).exception(timeout=30), DATABASE_AWAY)
    # The next one has its turn.
    write()


def test_threads_that_send_signals_at_once_share_two_connections(shared: list[Database]) -> None:
    threads, opened = 8, []
    barrier = threading.Barrier(threads)
    event.listen(shared[0]._aside, "connect", lambda *_: opened.append(1))

    def send(_: int) -> None:
        barrier.wait()
        for _ in range(10):
            shared[0].tell("signals", "")

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(send, range(threads)))
    assert len(opened) <= 2


def test_a_server_that_was_restarted_is_found_again(shared: list[Database]) -> None:
    for database in shared:
        with database.transaction(), database.snapshot():
            pass
    restarted(shared[0])
    for number, database in enumerate(shared):
        with database.transaction() as session:
            add_run(session, f"run{number}")
        assert_same_time(database, shared[0])


def assert_same_time(one: Database, other: Database) -> None:
    """Both clocks are within half a second, however long this process is paused between the two looks."""
    assert one.now() - 0.5 <= other.now() <= one.now() + 0.5


@contextmanager
def over_tcp(url: URL) -> Iterator[URL]:
    """The same database by TCP: the tests' own server listens on a Unix socket alone."""
    folder = url.query.get("host")
    if folder is None:
        yield url
        return
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_UNIX) as server:

        def relay() -> None:
            client, _ = listener.accept()
            with client:
                server.connect(f"{folder}/.s.PGSQL.{url.port or 5432}")
                back = threading.Thread(target=pass_on, args=(server, client), daemon=True)
                back.start()
                pass_on(client, server)
                back.join()

        def pass_on(source: socket.socket, sink: socket.socket) -> None:
            with suppress(OSError):
                while piece := source.recv(1 << 16):
                    sink.sendall(piece)
                sink.shutdown(socket.SHUT_WR)

        relaying = threading.Thread(target=relay, daemon=True)
        relaying.start()
        yield url.set(host="127.0.0.1", port=listener.getsockname()[1], query={})
        relaying.join()


@pytest.mark.parametrize(("own", "seconds"), [({}, 30), ({"tcp_user_timeout": "7000"}, 7)], ids=["default", "own"])
def test_a_connection_ends_soon_after_the_server_s_machine_has_vanished(
    tmp_path: Path, own: dict[str, str], seconds: int
) -> None:
    with over_tcp(make_url(databases.url_in(tmp_path))) as url:
        wanted = url.update_query_dict(own).render_as_string(hide_password=False)
        with closing(Database(wanted)) as database, database.engine.connect() as connection:
            driver: Any = connection.connection.dbapi_connection
            with socket.socket(fileno=os.dup(driver.pgconn.socket)) as raw:
                names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
                found = [raw.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in names]
    assert found == [10, 10, 2, seconds * 1000]


def test_the_clock_is_the_server_s_however_wrong_the_machine_s_is(
    shared: list[Database], monkeypatch: pytest.MonkeyPatch
) -> None:
    with shared[0].engine.connect() as connection:
        now = float(connection.exec_driver_sql("SELECT extract(epoch FROM clock_timestamp())").scalar_one())
    monkeypatch.setattr(time, "time", lambda: now + 3600)
    monkeypatch.setattr(time, "time_ns", lambda: int((now + 3600) * 1e9))
    assert 0 <= shared[0].now() - now < 1800
    assert_same_time(shared[0], shared[1])


def test_the_clock_is_compared_again_and_an_answer_that_was_held_up_counts_for_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    local, asked = [1000.0], []

    def ask() -> float:
        """The server's clock shows 5,000 more; the first answer takes a minute to be heard of."""
        asked.append(local[0])
        answer = 5000.0 + local[0]
        local[0] += 60.0 if len(asked) == 1 else 0.002
        return answer

    monkeypatch.setattr(time, "monotonic", lambda: local[0])
    clock = module._RemoteClock(ask)
    assert clock() == pytest.approx(5000.0 + local[0], abs=0.002)
    assert len(asked) == 2
    local[0] += module.CLOCK_SECONDS - 1
    clock()
    assert len(asked) == 2
    local[0] += 2
    clock()
    assert len(asked) == 3


def test_one_process_alone_is_at_a_piece_of_work_and_another_when_it_has_ended(shared: list[Database]) -> None:
    one, other, _ = shared
    with one.alone("merging a") as first, other.alone("merging a") as second, other.alone("merging b") as elsewhere:
        assert (first, second, elsewhere) == (True, False, True)
    with other.alone("merging a") as again:
        assert again


WORKING = """
import sys, time
from tessera.coordinator.db.engine import Database
with Database(sys.argv[1]).alone("merging") as alone:
    print(alone, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "paused"])
def test_the_work_of_a_process_that_is_killed_or_paused_is_another_s(
    shared: list[Database], sent: signal.Signals, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "working.py"
    script.write_text(f"from tessera.coordinator.db import engine\nengine.DUTY_SECONDS = 6\n{WORKING}")
    command = [sys.executable, str(script), databases.url_in(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == "True\n"
            # It goes on telling PostgreSQL that it is alive.
            first = until(lambda: alive_at(shared[0]))
            until(lambda: alive_at(shared[0]) != first)
            assert not free(shared[0])
            os.kill(process.pid, sent)
            until(lambda: free(shared[0]))
        finally:
            process.kill()


def alive_at(database: Database) -> object:
    """Return the time of the last sign of life that PostgreSQL has of the process that works."""
    query = (
        "SELECT state_change FROM pg_stat_activity JOIN pg_locks USING (pid) WHERE locktype = 'advisory' "
        "AND datname = current_database() AND pid <> pg_backend_pid()"
    )
    with database.engine.connect() as connection:
        return connection.exec_driver_sql(query).scalar()


def free(database: Database) -> bool:
    with database.alone("merging") as alone:
        return alone


def test_all_who_serve_and_all_who_conduct_hear_what_is_rung_anywhere(shared: list[Database]) -> None:
    workers = [f"{index:032}" for index in range(2 * BATCH + 1)]
    bells = [PostgresWakeups(database) for database in shared]
    with (
        bells[0].listener(serving_name()) as serving,
        bells[1].listener(serving_name()) as other,
        bells[1].listener(CONDUCTOR) as conducting,
        bells[2].listener(CONDUCTOR) as second,
    ):
        # Each is told once that it listens now.
        for bell in (serving, other):
            assert bell.socket.recv(1 << 16) == b"[]"
        conducting.wait()
        second.wait()
        bells[2].wake_workers(workers)
        for bell in (serving, other):
            heard: list[str] = []
            while len(heard) < len(workers):
                heard += json.loads(bell.socket.recv(1 << 16))
            assert heard == workers
        bells[0].wake_conductor()
        conducting.wait()
        second.wait()


def test_after_the_server_was_restarted_bells_are_heard_again(shared: list[Database]) -> None:
    bells = PostgresWakeups(shared[0])
    with bells.listener(CONDUCTOR) as bell:
        bell.wait()
        restarted(shared[1])
        # What may have been missed counts as a ring.
        bell.wait()
        bells.wake_conductor()
        bell.wait()


def test_a_bell_that_cannot_be_rung_is_no_failure(shared: list[Database]) -> None:
    nowhere = Database("postgresql://nobody@127.0.0.1:1/none")
    PostgresWakeups(nowhere).wake_conductor()
    PostgresWakeups(nowhere).wake_workers(["w"])
    nowhere.close()


def test_a_database_of_another_kind_is_refused() -> None:
    with pytest.raises(UnknownDatabase, match="in SQLite or PostgreSQL, and not in mysql"):
        Database("mysql://root@127.0.0.1/tessera")


def test_waiting_writers_of_one_process_wait_with_one_connection(tmp_path: Path, shared: list[Database]) -> None:
    narrow = Database(databases.url_in(tmp_path), connections=2)
    done: list[int] = []

    def write(number: int) -> None:
        with narrow.transaction() as session, narrow.snapshot() as reader:
            session.scalars(select(RunRow.id)).all()
            reader.scalars(select(RunRow.id)).all()
            done.append(number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(30)]
    with shared[0].transaction() as session:
        add_run(session)
        for thread in threads:
            thread.start()
        time.sleep(0.2)
        with narrow.snapshot() as reader:
            reader.scalars(select(RunRow.id)).all()
        assert done == []
    for thread in threads:
        thread.join()
    assert sorted(done) == list(range(30))
    narrow.close()


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1"])
def test_a_database_in_another_encoding_is_refused_with_the_statement_that_creates_one(encoding: str) -> None:
    server = databases.server()
    name = f"tessera_{uuid.uuid4().hex}"

    def migrated(database: str) -> subprocess.CompletedProcess[str]:
        url = server.set(database=database).render_as_string(hide_password=False)
        return forked("migrate", module="tessera.coordinator", TESSERA_DATABASE_URL=url)

    engine = create_engine(server, isolation_level="AUTOCOMMIT")
    with closing(engine.connect()) as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name} TEMPLATE template0 ENCODING '{encoding}' LOCALE 'C'")
        try:
            refused = migrated(name)
            assert refused.returncode == 2
            assert "Traceback" not in refused.stderr
            [create] = re.findall("CREATE DATABASE tessera[^;]*", refused.stderr.replace("\n", " "))
            connection.exec_driver_sql(create.replace("tessera", f"{name}_utf8"))
            assert migrated(f"{name}_utf8").returncode == 0
        finally:
            for made in (name, f"{name}_utf8"):
                connection.exec_driver_sql(f"DROP DATABASE IF EXISTS {made} WITH (FORCE)")
    engine.dispose()
