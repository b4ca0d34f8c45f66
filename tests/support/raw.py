"""Connections as a hostile or a very slow peer has them, byte by byte."""

from __future__ import annotations

import base64
import hashlib
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from urllib.parse import urlsplit

import httpx

from tests.support.coordinator import LiveCoordinator
from tests.support.processes import CoordinatorProcess

PART = {"Content-Type": "application/partial-upload"}


@contextmanager
def connected(
    live: LiveCoordinator | CoordinatorProcess, receive_bytes: int | None = None
) -> Iterator[socket.socket]:
    """A connection to a coordinator; `receive_bytes` bounds what the system takes in for it unasked."""
    address = urlsplit(live.url)
    with socket.socket() as raw:
        if receive_bytes is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        raw.settimeout(20)
        raw.connect((address.hostname, address.port))
        yield raw


def head(method: str, path: str, headers: Mapping[str, str]) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: test", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode()


def announced(data: bytes, length: int | None = None, *, complete: bool = False) -> dict[str, str]:
    """The headers that announce a blob, perhaps with a length that it has not."""
    digest = base64.b64encode(hashlib.sha256(data).digest()).decode()
    return {
        "Upload-Length": str(len(data) if length is None else length),
        "Upload-Complete": f"?{int(complete)}",
        "Repr-Digest": f"sha-256=:{digest}:",
    }


def rest(raw: socket.socket) -> bytes:
    """All that comes until the other side closes or breaks the connection."""
    received = bytearray()
    try:
        while piece := raw.recv(65536):
            received += piece
    except ConnectionResetError:
        pass
    return bytes(received)


def answer(raw: socket.socket) -> httpx.Response:
    """The answer that comes until the other side closes the connection."""
    return parsed(rest(raw))


def parsed(received: bytes) -> httpx.Response:
    top, _, content = received.partition(b"\r\n\r\n")
    status, *lines = top.decode().split("\r\n")
    headers = [tuple(line.split(": ", 1)) for line in lines]
    return httpx.Response(int(status.split()[1]), headers=dict(headers), content=content)


def trickle(raw: socket.socket, data: bytes, pause_seconds: float) -> None:
    """Sends byte by byte, until it is cut off."""
    for byte in data:
        try:
            raw.sendall(bytes([byte]))
        except OSError:
            return
        time.sleep(pause_seconds)
