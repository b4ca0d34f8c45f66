"""Wakeups between the processes of one coordinator.

A process that serves wakes the conductors after a change, for its run; a conductor wakes every process that serves
when workers have a task. With SQLite they are datagrams to sockets in a folder of the machine, with PostgreSQL its
notifications.
A wakeup carries nothing that the tables do not; a lost one costs a tick.
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
from typing import Self

import structlog

from tessera.coordinator.db.engine import DATABASE_AWAY, Database

CONDUCTOR = "conductor"
SERVING = "serving-"
_CONDUCTING, _SERVING = "tessera_conducting", "tessera_serving"
BATCH = 200
"""Workers of one message: PostgreSQL permits 8,000 bytes."""
MESSAGE_BYTES = 1 << 16
MAX_UNREAD = 10
"""Unread datagrams after which Linux may drop further ones (`net.unix.max_dgram_qlen`)."""
SEND_SECONDS = 1
"""Time that the conductor waits for a process that does not read its socket."""

MAX_ADDRESS_LENGTH = 100
"""Bytes of a socket's address; Linux permits 107, other systems fewer."""

log = structlog.get_logger()


class SocketWakeups:
    """Wakeups by datagrams to the sockets in a folder. A name is unique among this machine's live listeners."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder

    def wake_conductor(self, run_ids: Sequence[str] = ()) -> None:
        with suppress(OSError), _datagrams() as sender, self._address(CONDUCTOR) as address:
            sender.sendto(json.dumps(run_ids).encode(), socket.MSG_DONTWAIT, address)

    def wake_workers(self, worker_ids: Sequence[str]) -> None:
        batches = _batches(worker_ids)
        for path in self._folder.glob(f"{SERVING}*") if batches else ():
            try:
                with _datagrams() as sender, self._address(path.name) as address:
                    for batch in batches:
                        sender.sendto(batch.encode(), address)
            except ConnectionRefusedError:
                # Left by a process that was killed.
                path.unlink(missing_ok=True)
            except OSError as fault:
                log.warning("bell.not_heard", name=path.name, detail=str(fault))

    def listener(self, name: str) -> WakeupListener:
        path = self._folder / name
        path.unlink(missing_ok=True)
        listening = _datagrams()
        with self._address(name) as address:
            listening.bind(address)
        return WakeupListener(listening, lambda: path.unlink(missing_ok=True))

    @contextmanager
    def _address(self, name: str) -> Iterator[str]:
        """Yield a socket's address, by a descriptor of the folder if the path is too long for one."""
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
    """Wakeups by notifications of PostgreSQL, which reach every machine."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def wake_conductor(self, run_ids: Sequence[str] = ()) -> None:
        self._send(_CONDUCTING, json.dumps(run_ids))

    def wake_workers(self, worker_ids: Sequence[str]) -> None:
        for batch in _batches(worker_ids):
            self._send(_SERVING, batch)

    def _send(self, channel: str, message: str) -> None:
        try:
            self._database.tell(channel, message)
        except DATABASE_AWAY as fault:
            # The change was committed: the next tick finds it.
            log.warning("bell.not_rung", channel=channel, detail=str(fault))

    def listener(self, name: str) -> WakeupListener:
        channel = _CONDUCTING if name == CONDUCTOR else _SERVING
        ended = threading.Event()
        listening, sender = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        arguments = (self._database, channel, sender, ended)
        threading.Thread(target=_forward, args=arguments, name=channel, daemon=True).start()
        return WakeupListener(listening, ended.set)


WakeupChannel = SocketWakeups | PostgresWakeups


def _forward(database: Database, channel: str, sender: socket.socket, ended: threading.Event) -> None:
    with sender:
        for message in database.heard(channel, ended):
            # A listener with unread wakeups, or one that is gone, needs no further one.
            with suppress(OSError):
                sender.send(message.encode() or b"[]", socket.MSG_DONTWAIT)


def _batches(worker_ids: Sequence[str]) -> list[str]:
    return [json.dumps(worker_ids[start : start + BATCH]) for start in range(0, len(worker_ids), BATCH)]


def _datagrams() -> socket.socket:
    created = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    created.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", SEND_SECONDS, 0))
    return created


def serving_name() -> str:
    """Return a unique listener name for a process that serves."""
    return SERVING + uuid.uuid4().hex


class WakeupListener:
    """A socket that receives wakeups until the end of `with`."""

    def __init__(self, listening: socket.socket, close: Callable[[], object]) -> None:
        self.socket = listening
        self._close = close

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *fault: object) -> None:
        self.socket.close()
        self._close()

    def wait(self) -> list[str]:
        """Wait for a wakeup; return the runs that all unread ones name. None stands for all runs: if one names none,
        or one was perhaps lost."""
        messages = [self.socket.recv(MESSAGE_BYTES), *self._unread()]
        named: list[list[str]] = [json.loads(message) for message in messages]
        every = all(named) and len(named) < MAX_UNREAD
        return [run for message in named for run in message] if every else []

    def received(self) -> list[str]:
        """Return the workers of all unread wakeups, without waiting."""
        return [worker for message in self._unread() for worker in json.loads(message)]

    def _unread(self) -> Iterator[bytes]:
        with suppress(BlockingIOError):
            while True:
                yield self.socket.recv(MESSAGE_BYTES, socket.MSG_DONTWAIT)
