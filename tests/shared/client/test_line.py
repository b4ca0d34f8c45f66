"""The rate of a line: by the times of both ends, and over real sockets. Nothing depends on the machine's speed."""

from __future__ import annotations

import hashlib
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tessera.shared.client.client import Client
from tessera.shared.client.line import MEASURED_BYTES, LineRate, ThreadTimes, reported_seconds
from tests.shared.client.test_bulk import answer, head_of
from tests.support.coordinator import LiveCoordinator

MIB = MEASURED_BYTES
DATA = bytes(range(256)) * (2 * MIB // 256)


def rate(*transfers: tuple[int, ThreadTimes, float | None]) -> float | None:
    line = LineRate()
    for nbytes, times, waited in transfers:
        line.note(nbytes, times, waited)
    return line.seconds_per_byte


@pytest.mark.parametrize(
    ("times", "waited", "line_seconds"),
    [
        # Of 10 s, 1 computing and 2 waiting for a processor: the other 7 are the line's,
        (ThreadTimes(10, 1, 2), None, 7),
        # all of them, as the other end waited too;
        (ThreadTimes(10, 1, 2), 10.0, 7),
        # it had to wait for at least 7 + 8 - 10 of them while this end waited;
        (ThreadTimes(10, 1, 2), 8.0, 5),
        # it was the limit itself, and did not wait;
        (ThreadTimes(10, 1, 2), 0.0, 0),
        # both ends were busy in turns.
        (ThreadTimes(10, 3, 3), 6.0, 0),
        # A coordinator that lies about its wait.
        (ThreadTimes(10, 1, 2), 1e9, 7),
        (ThreadTimes(10, 1, 2), -5.0, 0),
        # A clock that is read in between.
        (ThreadTimes(1, 1, 1), None, 0),
        (ThreadTimes(0, 0, 0), 0.0, 0),
    ],
)
def test_a_line_is_the_limit_while_both_ends_wait(
    times: ThreadTimes, waited: float | None, line_seconds: float
) -> None:
    assert rate((2 * MIB, times, waited)) == pytest.approx(line_seconds / (2 * MIB))


def test_a_line_is_unmeasured_before_a_large_transfer() -> None:
    assert rate() is None
    assert rate((MIB - 1, ThreadTimes(1, 0, 0), None), (0, ThreadTimes(1, 0, 0), None)) is None


def test_one_transfer_of_five_that_is_disturbed_changes_little() -> None:
    steady = (MIB, ThreadTimes(2, 0, 0), None)
    assert rate(*[steady] * 4, (MIB, ThreadTimes(900, 0, 0), None)) == 2 / MIB


def test_a_line_that_changes_is_measured_again() -> None:
    before, after = ((MIB, ThreadTimes(seconds, 0, 0), None) for seconds in (1, 8))
    assert rate(*[before] * 9, *[after] * 3) == 8 / MIB


def test_a_sleeping_thread_is_blocked_and_not_computing() -> None:
    before = ThreadTimes.now()
    time.sleep(0.05)
    spent = ThreadTimes.now().since(before)
    assert spent.passed >= 0.05
    assert 0 < spent.blocked <= spent.passed
    assert spent.contention >= 1


def test_a_computing_thread_is_not_blocked_for_its_whole_time() -> None:
    before = ThreadTimes.now()
    hashlib.sha256(bytes(1 << 22)).digest()
    spent = ThreadTimes.now().since(before)
    assert spent.computed > 0
    assert spent.blocked < spent.passed


@pytest.mark.parametrize(("computed", "queued", "expected"), [(1, 0, 1), (1, 3, 4), (0, 1, 1), (0, 0, 1)])
def test_contention_is_the_time_of_a_second_of_computing(computed: float, queued: float, expected: float) -> None:
    assert ThreadTimes(9, computed, queued).contention == expected


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, None),
        ("", None),
        ("1.5", 1.5),
        ("nan", None),
        ("inf", None),
        ("-2", -2.0),
        ("1,5", None),
        ("x" * 99, None),
    ],
)
def test_only_finite_numbers_of_a_header_count(header: str | None, seconds: float | None) -> None:
    assert reported_seconds(header) == seconds


# ---------------------------------------------------------------- over sockets


def test_transfers_with_a_real_coordinator_are_measured_each_way(coordinator: LiveCoordinator) -> None:
    client = coordinator.client("orchestrator")
    assert client.upload_line is client.download_line is None
    digest = client.put_bytes(DATA)
    assert client.upload_line is not None
    assert client.download_line is None
    assert client.read_blob(digest) == DATA
    assert client.download_line is not None


def test_before_the_first_upload_a_download_stands_for_it(coordinator: LiveCoordinator) -> None:
    digest = coordinator.client("orchestrator").put_bytes(DATA)
    client = coordinator.client("orchestrator")
    client.read_blob(digest)
    assert client.upload_line == client.download_line is not None


def asleep(thread: int, looks: int = 5) -> None:
    """Returns once a thread of this process was found asleep so many times in a row."""
    found = 0
    while found < looks:
        state = Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()[0]
        found = found + 1 if state == "S" else 0
        time.sleep(0.01)


def uploaded(headers: str, before_answer: Callable[[], None] = lambda: None) -> Client:
    """A client that has sent `DATA` to a server that answers with these headers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for _ in range(2):
                connection, _ = listener.accept()
                with connection:
                    talk(connection)

        def talk(connection: socket.socket) -> None:
            while head := head_of(connection):
                if head.startswith(b"POST"):
                    connection.sendall(answer(b"", "201 Created\r\nLocation: /v1/uploads/a"))
                elif head.startswith(b"HEAD"):
                    connection.sendall(answer(b"", "204 No Content\r\nUpload-Offset: 0"))
                    return
                else:
                    left = len(DATA)
                    while left:
                        left -= len(connection.recv(min(left, 1 << 16)))
                    before_answer()
                    connection.sendall(answer(b"", f"204 No Content{headers}"))
                    return

        serving = threading.Thread(target=serve)
        serving.start()
        with Client(f"http://127.0.0.1:{listener.getsockname()[1]}", "token") as client:
            client.put_bytes(DATA)
            serving.join()
            return client


def test_a_wait_that_the_other_end_does_not_explain_is_the_lines() -> None:
    sender = threading.get_native_id()
    line = uploaded("", lambda: asleep(sender)).upload_line
    assert line is not None
    assert line > 0


def test_a_wait_for_the_coordinators_processor_is_not_the_lines() -> None:
    sender = threading.get_native_id()
    assert uploaded("\r\nUpload-Waited: 0", lambda: asleep(sender)).upload_line == 0


@pytest.mark.parametrize("lie", ["nan", "-inf", "1e400", "zero", "9" * 500])
def test_a_coordinator_that_lies_about_its_wait_is_believed_nothing(lie: str) -> None:
    line = uploaded(f"\r\nUpload-Waited: {lie}").upload_line
    assert line is not None
    assert 0 <= line < 1
