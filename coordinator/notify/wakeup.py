"""How the processes of one coordinator wake each other at once.

Whoever serves rings for the conductors when something happened, and a conductor rings at everyone who serves for
workers that have something to do. Beside SQLite, by datagrams in a folder of the machine; on PostgreSQL, by its
notifications. A bell says nothing that the tables do not; one that is lost costs a tick.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol, Self

import structlog

from tessera.coordinator.db.engine import DATABASE_AWAY, Database

CONDUCTOR = "conductor"
SERVING = "serving-"
_CONDUCTING, _SERVING = "tessera_conducting", "tessera_serving"
BATCH = 200
"""Workers that one ring is about: PostgreSQL takes 8,000 bytes."""
SEND_SECONDS = 1
"""How long the conductor waits for a process that does not listen."""

MAX_ADDRESS_LENGTH = 100
"""Bytes; Linux takes 107, others less."""

log = structlog.get_logger()


class WakeupChannel(Protocol):
    def call(self) -> None:
        """Ring for the conductors. One that has not come to its last few rings yet needs no further one."""

    def wake(self, worker_ids: Sequence[str]) -> None:
        """Ring for workers, wherever they wait."""

    def hung_up(self, name: str) -> WakeupListener:
        """Return a bell under this name, which nobody else alive on this machine has."""


class FolderBells:
    """A folder of bells."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder

    def call(self) -> None:
        with suppress(OSError), _datagrams() as sender, self._addressed(CONDUCTOR) as address:
            sender.sendto(b"", socket.MSG_DONTWAIT, address)

    def wake(self, worker_ids: Sequence[str]) -> None:
        batches = _batches(worker_ids)
        for path in self._folder.glob(f"{SERVING}*") if batches else ():
            try:
                with _datagrams() as sender, self._addressed(path.name) as address:
                    for batch in batches:
                        sender.sendto(batch.encode(), address)
            except ConnectionRefusedError:
                # Left by a process that was killed.
                path.unlink(missing_ok=True)
            except OSError as fault:
                log.warning("bell.not_heard", name=path.name, detail=str(fault))

    def hung_up(self, name: str) -> WakeupListener:
        path = self._folder / name
        path.unlink(missing_ok=True)
        listening = _datagrams()
        with self._addressed(name) as address:
            listening.bind(address)
        return WakeupListener(listening, lambda: path.unlink(missing_ok=True))

    @contextmanager
    def _addressed(self, name: str) -> Iterator[str]:
        """Yield a bell's address, which may not be as long as a path may."""
        direct = self._folder / name
        if len(os.fsencode(direct)) < MAX_ADDRESS_LENGTH:
            yield str(direct)
            return
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            yield f"/proc/self/fd/{folder}/{name}"
        finally:
            os.close(folder)


class PostgresWakeups:
    """Bells by notifications of PostgreSQL, which reach every machine."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def call(self) -> None:
        self._tell(_CONDUCTING, "")

    def wake(self, worker_ids: Sequence[str]) -> None:
        for batch in _batches(worker_ids):
            self._tell(_SERVING, batch)

    def _tell(self, channel: str, message: str) -> None:
        try:
            self._database.tell(channel, message)
        except DATABASE_AWAY as fault:
            # What it is about was committed: the next tick finds it.
            log.warning("bell.not_rung", channel=channel, detail=str(fault))

    def hung_up(self, name: str) -> WakeupListener:
        channel = _CONDUCTING if name == CONDUCTOR else _SERVING
        ended = threading.Event()
        listening, ringing = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        threading.Thread(
            target=_pass_on, args=(self._database, channel, ringing, ended), name=channel, daemon=True
        ).start()
        return WakeupListener(listening, ended.set)


def _pass_on(database: Database, channel: str, ringing: socket.socket, ended: threading.Event) -> None:
    with ringing:
        for message in database.heard(channel, ended):
            # Whoever has not come to the rings before, or is gone, needs no further one.
            with suppress(OSError):
                ringing.send(message.encode() or b"[]", socket.MSG_DONTWAIT)


def _batches(worker_ids: Sequence[str]) -> list[str]:
    return [json.dumps(worker_ids[start : start + BATCH]) for start in range(0, len(worker_ids), BATCH)]


def _datagrams() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", SEND_SECONDS, 0))
    return made


def own_name() -> str:
    """Return a name under which one process that serves is woken."""
    return SERVING + uuid.uuid4().hex


class WakeupListener:
    """What is listened to, until the end of `with`."""

    def __init__(self, listening: socket.socket, take_down: Callable[[], object]) -> None:
        self.socket = listening
        self._take_down = take_down

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *fault: object) -> None:
        self.socket.close()
        self._take_down()

    def wait(self) -> None:
        """Until it is rung. All rings so far count as one."""
        self.socket.recv(1)
        with suppress(BlockingIOError):
            while True:
                self.socket.recv(1, socket.MSG_DONTWAIT)

    def rung_for(self) -> list[str]:
        """Return the workers that it was rung for since the last time; does not wait."""
        found: list[str] = []
        with suppress(BlockingIOError):
            while True:
                found += json.loads(self.socket.recv(1 << 16, socket.MSG_DONTWAIT))
        return found
