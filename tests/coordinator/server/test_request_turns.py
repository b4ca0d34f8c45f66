"""Connections, requests and probes begin in turns of the event loop, whatever becomes of one."""

from __future__ import annotations

import asyncio
import gc
import socket
import struct
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

from tessera.coordinator.server.connections import BEGUN_AT_ONCE, PROBE, Server, Turns
from tessera.coordinator.server.http_limits import configuration
from tessera.coordinator.settings import CoordinatorSettings
from tests.support.coordinator import LiveCoordinator, until
from tests.support.raw import connected, head


def test_a_request_that_fails_to_begin_keeps_no_other_waiting() -> None:
    async def begun() -> list[int]:
        turns, begun = Turns(), list[int]()
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)

        def fail() -> None:
            raise MemoryError

        for number in range(2 * BEGUN_AT_ONCE):
            turns.begin(fail if number == 3 else lambda number=number: begun.append(number))
        for _ in range(8):
            await asyncio.sleep(0)
        turns.begin(lambda: begun.append(99))
        await asyncio.sleep(0)
        return begun

    assert asyncio.run(begun()) == [*(n for n in range(2 * BEGUN_AT_ONCE) if n != 3), 99]


def test_a_burst_does_not_begin_in_one_turn_of_the_loop() -> None:
    async def begun() -> list[int]:
        turns, begun, counts = Turns(), list[int](), list[int]()
        for number in range(3 * BEGUN_AT_ONCE):
            turns.begin(lambda number=number: begun.append(number))
        for _ in range(3):
            await asyncio.sleep(0)
            counts.append(len(begun))
        return counts

    assert asyncio.run(begun()) == [BEGUN_AT_ONCE, 2 * BEGUN_AT_ONCE, 3 * BEGUN_AT_ONCE]


async def serve(app: Callable[..., Any], listener: socket.socket, is_done: Callable[[], bool]) -> Server:
    server = Server(configuration(app, CoordinatorSettings()))
    serving = asyncio.create_task(server.serve([listener]))
    async with asyncio.timeout(20):
        while not is_done():
            await asyncio.sleep(0.01)
    server.should_exit = True
    await serving
    return server


def noting(asked: list[str], then: Callable[[], None] = lambda: None) -> Callable[..., Any]:
    """An application that notes what it is asked."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        asked.append(scope["path"])
        then()
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    return app


def connect(clients: ExitStack, listener: socket.socket, path: str = "", **headers: str) -> socket.socket:
    client = clients.enter_context(socket.create_connection(listener.getsockname()))
    client.sendall(head("GET", path, headers) if path else b"")
    return client


@pytest.mark.parametrize(("others", "path"), [("/other", PROBE), (PROBE, "/imitated")])
def test_neither_probes_nor_other_connections_wait_for_all_of_the_other_kind(others: str, path: str) -> None:
    asked: list[str] = []
    with socket.create_server(("127.0.0.1", 0), backlog=200) as listener, ExitStack() as clients:
        for each in [others] * 100 + [path]:
            connect(clients, listener, each, Connection="close")
        server = asyncio.run(serve(noting(asked), listener, lambda: len(asked) == 101))
    # The first may begin in the turns in which the others are accepted.
    assert path in asked[: 3 * BEGUN_AT_ONCE]
    assert server.config.limiter.total == 0


def test_a_request_on_an_open_connection_does_not_wait_for_new_connections() -> None:
    asked: list[str] = []
    with socket.create_server(("127.0.0.1", 0), backlog=200) as listener, ExitStack() as clients:
        worker = connect(clients, listener, "/first")

        def then() -> None:
            if asked == ["/first"]:
                for _ in range(100):
                    connect(clients, listener, "/stranger")
            elif len(asked) == 2:
                # Most of the strangers' connections are accepted, and wait.
                worker.sendall(head("GET", "/second", {}))

        asyncio.run(serve(noting(asked, then), listener, lambda: len(asked) == 102))
    assert "/second" in asked[:50]


def test_a_connection_that_was_reset_before_it_began_is_counted_no_longer() -> None:
    asked: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as clients:
        with connect(clients, listener, "/reset") as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connect(clients, listener, "/next", Connection="close")
        server = asyncio.run(serve(noting(asked), listener, lambda: "/next" in asked))
    assert (server.config.limiter.total, server.config.limiter._by_address) == (0, {})


def test_a_stop_does_not_wait_for_connections_that_begin_after_it() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=200) as listener, ExitStack() as clients:
        for _ in range(100):
            connect(clients, listener)

        async def stop() -> int:
            server = Server(configuration(noting([]), CoordinatorSettings(header_timeout_seconds=1000)))
            server.config.timeout_graceful_shutdown = None
            server.config.load()
            server.lifespan = server.config.lifespan_class(server.config)
            await server.startup([listener])
            while not server.config.limiter.total:
                await asyncio.sleep(0)
            server.should_exit = True
            async with asyncio.timeout(20):
                await server.shutdown()
            return server.config.limiter.total

        assert asyncio.run(stop()) == 0


def test_connections_wait_while_no_file_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tessera.coordinator.server.connections.PAUSE_SECONDS", 0.01)
    tries, answered = 0, False

    class Listener(socket.socket):
        def accept(self) -> tuple[socket.socket, Any]:
            nonlocal tries
            tries += 1
            if tries <= 3:
                raise OSError(24, "Too many open files")
            return super().accept()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal answered
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})
        answered = True

    with Listener() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with socket.create_connection(listener.getsockname()) as client:
            client.sendall(head("GET", "/", {"Connection": "close"}))
            server = asyncio.run(serve(app, listener, lambda: answered))
            assert client.recv(65536).startswith(b"HTTP/1.1 204")
    assert server.config.limiter.total == 0


def test_connections_leave_nothing_to_the_garbage_collector(coordinator: LiveCoordinator) -> None:
    """Collecting what 2,000 of them left stopped the process for 60 ms."""
    connections = coordinator._server.server_state.connections
    until(lambda: not connections)
    gc.collect()
    gc.disable()
    try:
        with connected(coordinator) as raw:
            raw.sendall(
                head("POST", "/v1/runs", {"Content-Type": "application/json", "Content-Length": "1000"}) + b" "
            )
            assert raw.recv(65536).startswith(b"HTTP/1.1 401")
            (left,) = map(weakref.ref, connections)
        until(lambda: left() is None)
    finally:
        gc.enable()
