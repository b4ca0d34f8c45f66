"""How the processes of one coordinator wake each other at once.

Datagrams in a folder of the machine: whoever serves rings for the conductor when something happened, and the
conductor rings at everyone who serves for workers that have something to do. A bell says nothing that the tables do
not; one that is lost, or was rung on another machine, costs a tick.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

import structlog

CONDUCTOR = "conductor"
SERVING = "serving-"
BATCH = 256
"""Workers that one datagram is about."""
SEND_SECONDS = 1
"""How long the conductor waits for a process that does not listen."""

LONGEST_ADDRESS = 100
"""Bytes; Linux takes 107, others less."""

log = structlog.get_logger()


class Bells:
    """A folder of bells."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder

    def call(self) -> None:
        """Rings for the conductor. If it has not come to the last few rings yet, it needs no further one."""
        with suppress(OSError), _datagrams() as sender, self._addressed(CONDUCTOR) as address:
            sender.sendto(b"", socket.MSG_DONTWAIT, address)

    def wake(self, worker_ids: Sequence[str]) -> None:
        """Rings for workers, wherever they wait."""
        batches = [worker_ids[start : start + BATCH] for start in range(0, len(worker_ids), BATCH)]
        for path in self._folder.glob(f"{SERVING}*") if batches else ():
            try:
                with _datagrams() as sender, self._addressed(path.name) as address:
                    for batch in batches:
                        sender.sendto(json.dumps(batch).encode(), address)
            except ConnectionRefusedError:
                # Left by a process that was killed.
                path.unlink(missing_ok=True)
            except OSError as fault:
                log.warning("bell.not_heard", name=path.name, detail=str(fault))

    def hung_up(self, name: str) -> Bell:
        """A bell under this name, which nobody else alive has."""
        path = self._folder / name
        path.unlink(missing_ok=True)
        listening = _datagrams()
        with self._addressed(name) as address:
            listening.bind(address)
        return Bell(listening, path)

    @contextmanager
    def _addressed(self, name: str) -> Iterator[str]:
        """A bell's address, which may not be as long as a path may."""
        direct = self._folder / name
        if len(os.fsencode(direct)) < LONGEST_ADDRESS:
            yield str(direct)
            return
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            yield f"/proc/self/fd/{folder}/{name}"
        finally:
            os.close(folder)


def _datagrams() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", SEND_SECONDS, 0))
    return made


def own_name() -> str:
    """A name under which one process that serves is woken."""
    return SERVING + uuid.uuid4().hex


class Bell:
    """What is listened to, until the end of `with`."""

    def __init__(self, listening: socket.socket, path: Path) -> None:
        self.socket = listening
        self._path = path

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *fault: object) -> None:
        self.socket.close()
        self._path.unlink(missing_ok=True)

    def wait(self) -> None:
        """Until it is rung. All rings so far count as one."""
        self.socket.recv(1)
        with suppress(BlockingIOError):
            while True:
                self.socket.recv(1, socket.MSG_DONTWAIT)

    def rung_for(self) -> list[str]:
        """The workers that it was rung for since the last time; does not wait."""
        found: list[str] = []
        with suppress(BlockingIOError):
            while True:
                found += json.loads(self.socket.recv(1 << 16, socket.MSG_DONTWAIT))
        return found
