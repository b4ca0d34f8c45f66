"""Large bodies, in whose way neither httpx nor h11 stands: kept connections, early answers, files."""

from __future__ import annotations

import io
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tessera.shared.client.bulk import PIECE_BYTES, FilePart
from tessera.shared.client.transport import HttpTransport, IntermediaryFault, Unreachable

DATA = bytes(range(256)) * 4_100
"""1,049,600 bytes: more than one piece, and not a multiple of one."""

EMPTY = b"HTTP/1.1 204 No Content\r\n\r\n"


@contextmanager
def serving(talk: Callable[[int, socket.socket], None]) -> Iterator[HttpTransport]:
    """A transport to a server that talks, in a thread, to each of its connections, of which it is told the number."""
    listener = socket.create_server(("127.0.0.1", 0))
    talks: list[threading.Thread] = []

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            talks.append(threading.Thread(target=spoken, args=(len(talks), connection)))
            talks[-1].start()

    def spoken(number: int, connection: socket.socket) -> None:
        with connection:
            talk(number, connection)

    accepting = threading.Thread(target=accept)
    accepting.start()
    transport = HttpTransport(
        f"http://127.0.0.1:{listener.getsockname()[1]}", "t", patience_seconds=0, answer_seconds=20
    )
    try:
        yield transport
    finally:
        transport.close()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        accepting.join()
        for thread in talks:
            thread.join()


def head_of(connection: socket.socket) -> bytes:
    """The head of the next request; nothing at the connection's end."""
    head = b""
    while not head.endswith(b"\r\n\r\n") and (byte := connection.recv(1)):
        head += byte
    return head


def answer(body: bytes, head: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def read(transport: HttpTransport) -> bytes:
    with transport.stream("/v1/blobs/x", {}) as response:
        return b"".join(response.iter_raw())


def test_one_connection_serves_all_downloads_in_turn() -> None:
    numbers: list[int] = []

    def talk(number: int, connection: socket.socket) -> None:
        while head_of(connection):
            numbers.append(number)
            connection.sendall(answer(DATA))

    with serving(talk) as transport:
        assert [read(transport) == DATA for _ in range(3)] == [True, True, True]
    assert numbers == [0, 0, 0]


def test_two_downloads_at_once_have_a_connection_each() -> None:
    def talk(_: int, connection: socket.socket) -> None:
        while head_of(connection):
            connection.sendall(answer(DATA))

    with serving(talk) as transport, transport.stream("/v1/blobs/x", {}) as first:
        assert read(transport) == DATA
        assert b"".join(first.iter_raw()) == DATA


def test_a_connection_that_the_server_closed_while_idle_is_replaced() -> None:
    closed = threading.Event()

    def talk(_: int, connection: socket.socket) -> None:
        head_of(connection)
        connection.sendall(answer(DATA))
        connection.close()
        closed.set()

    with serving(talk) as transport:
        assert read(transport) == DATA
        assert closed.wait(20)
        assert read(transport) == DATA


def test_a_body_of_unknown_length_is_read_to_its_last_chunk() -> None:
    def talk(_: int, connection: socket.socket) -> None:
        while head_of(connection):
            chunk = f"{len(DATA):x}\r\n".encode() + DATA + b"\r\n0\r\n\r\n"
            connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk)

    with serving(talk) as transport:
        assert [read(transport) == DATA for _ in range(2)] == [True, True]


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200 OK\r\n", b"rubbish\r\n\r\n", answer(DATA)[:-1]])
def test_an_answer_that_ends_too_early_or_is_none_is_unreachable(sent: bytes) -> None:
    def talk(_: int, connection: socket.socket) -> None:
        head_of(connection)
        connection.sendall(sent)

    with serving(talk) as transport, pytest.raises(Unreachable):
        read(transport)


def test_a_silent_server_is_given_up_after_the_limit_of_an_answer() -> None:
    def talk(_: int, connection: socket.socket) -> None:
        head_of(connection)
        connection.recv(1)

    with serving(talk) as whole, impatient(whole, 0.05) as transport, pytest.raises(Unreachable, match="too long"):
        read(transport)


@contextmanager
def impatient(other: HttpTransport, answer_seconds: float) -> Iterator[HttpTransport]:
    transport = HttpTransport(str(other._http.base_url), "t", patience_seconds=0, answer_seconds=answer_seconds)
    try:
        yield transport
    finally:
        transport.close()


def received(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (piece := connection.recv(count - len(data))):
        data += piece
    return data


@pytest.mark.parametrize("on_disk", [True, False])
def test_a_part_of_a_file_is_sent_as_it_is_behind_a_head(tmp_path: Path, on_disk: bool) -> None:
    bodies, moved = [], list[int]()

    def talk(_: int, connection: socket.socket) -> None:
        while head := head_of(connection):
            assert f"content-length: {len(DATA) - 4}".encode() in head.lower()
            bodies.append(received(connection, len(DATA) - 4))
            connection.sendall(EMPTY)

    (tmp_path / "file").write_bytes(DATA)
    with (tmp_path / "file").open("rb") if on_disk else io.BytesIO(DATA) as file, serving(talk) as transport:
        for _ in range(2):
            part = FilePart(file, 7, len(DATA) - 7, moved.append, b"[]\n")
            transport.send_file("PATCH", "/v1/uploads/u", {}, part)
    assert bodies == [b"[]\n" + DATA[7:]] * 2
    assert sum(moved) == 2 * (len(DATA) - 7)
    assert max(moved) == PIECE_BYTES


def test_a_refusal_sent_before_the_body_was_read_is_understood(tmp_path: Path) -> None:
    def talk(_: int, connection: socket.socket) -> None:
        head_of(connection)
        connection.sendall(answer(b"too large", "413 Content Too Large"))
        connection.shutdown(socket.SHUT_WR)
        # Read on, so that no reset overtakes the answer.
        while connection.recv(PIECE_BYTES):
            pass

    (tmp_path / "file").write_bytes(DATA)
    with (
        (tmp_path / "file").open("rb") as file,
        serving(talk) as transport,
        pytest.raises(IntermediaryFault, match="413"),
    ):
        transport.send_file("PATCH", "/v1/uploads/u", {}, FilePart(file, 0, len(DATA)))


def test_a_file_that_became_shorter_is_an_upload_that_broke_off(tmp_path: Path) -> None:
    def talk(_: int, connection: socket.socket) -> None:
        head_of(connection)
        received(connection, len(DATA))

    (tmp_path / "file").write_bytes(DATA[:-1])
    with (tmp_path / "file").open("rb") as file, serving(talk) as transport, pytest.raises(Unreachable):
        transport.send_file("PATCH", "/v1/uploads/u", {}, FilePart(file, 0, len(DATA)))


def test_small_requests_have_a_connection_of_their_own() -> None:
    asked: list[tuple[int, bytes]] = []

    def talk(number: int, connection: socket.socket) -> None:
        while head := head_of(connection):
            asked.append((number, head.split()[1]))
            connection.sendall(answer(b"{}"))

    with serving(talk) as transport:
        for _ in range(2):
            assert transport.request("GET", "/v1/runs").content == b"{}"
            assert read(transport) == b"{}"
    assert asked == [(0, b"/v1/runs"), (1, b"/v1/blobs/x")] * 2
