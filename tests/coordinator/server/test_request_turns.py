"""Requests begin in turns of the event loop, whatever becomes of one of them."""

from __future__ import annotations

import asyncio

import pytest

from tessera.coordinator.server.connections import REQUESTS_AT_ONCE, ConnectionLimiter, RequestTurns, TLSHandshake
from tessera.coordinator.settings import CoordinatorSettings


def test_a_request_that_fails_to_begin_keeps_no_other_waiting() -> None:
    async def begun() -> list[int]:
        turns, begun = RequestTurns(), list[int]()
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)

        def fail() -> None:
            raise MemoryError

        for number in range(2 * REQUESTS_AT_ONCE):
            turns.begin(fail if number == 3 else lambda number=number: begun.append(number))
        for _ in range(8):
            await asyncio.sleep(0)
        turns.begin(lambda: begun.append(99))
        await asyncio.sleep(0)
        return begun

    assert asyncio.run(begun()) == [*(n for n in range(2 * REQUESTS_AT_ONCE) if n != 3), 99]


def test_a_connection_without_a_file_left_is_not_counted_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(_: int) -> int:
        raise OSError(24, "Too many open files")

    async def counted() -> tuple[int, bytes]:
        limiter = ConnectionLimiter(CoordinatorSettings())
        config = type("Config", (), {"tls": None})()
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: TLSHandshake(limiter, asyncio.Protocol, config),  # type: ignore[arg-type]
            "127.0.0.1",
            0,
        )
        monkeypatch.setattr("os.dup", none_left)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        try:
            got = await reader.read()
        except ConnectionError:
            got = b""
        writer.close()
        server.close()
        return limiter.total, got

    assert asyncio.run(counted()) == (0, b"")
