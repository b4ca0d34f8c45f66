"""The limit: the same bytes over the same HTTP between as many processes, and one pass of multiply-add over them.

The server is uvicorn with one ASGI function: what is downloaded lies in its memory, and what is uploaded is added
into one array as it comes in, piece by piece, and kept nowhere. The clients speak HTTP through http.client. No hash,
no codec, no file, no database.
"""

from __future__ import annotations

import http.client
import ssl
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, Self

import numpy as np
import uvicorn

from benchmarks.federation import free_port
from benchmarks.measuring import await_true, forget_peak, peak_bytes, processor_seconds
from benchmarks.network import HOST, Certificates
from benchmarks.rounds.sides import Turn
from tessera.examples.processes import ROOT, Processes

PIECE_BYTES = 1 << 20

Message = dict[str, Any]


@dataclass
class Bare:
    folder: Path
    workers: int
    down_bytes: int
    """What each client downloads."""
    up_bytes: int
    """What each client uploads."""
    certificates: Certificates | None = None
    name: str = "bare loop"
    may_fail: bool = False

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True)
        self._processes = Processes(self.folder, ROOT)
        self._clients: list[subprocess.Popen[str]] = []
        port = free_port()
        try:
            certificates = self.certificates
            files = [str(certificates.server), str(certificates.key)] if certificates else []
            command = [sys.executable, "-m", __name__, "serve", str(port), str(self.down_bytes), *files]
            self._processes.start("bare", command, {})
            await_true(lambda: self._answers(port), 30, "the bare server answers")
            for _ in range(self.workers):
                command = [sys.executable, "-m", __name__, "ask", str(port), str(self.up_bytes)]
                if certificates:
                    command.append(str(certificates.ca))
                self._clients.append(
                    subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
                )
            for client in self._clients:
                _line(client)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _answers(self, port: int) -> bool:
        self._processes.check()
        ca = self.certificates.ca if self.certificates else None
        connection = _connection(port, ca, timeout=5)
        try:
            connection.request("HEAD", "/")
            return connection.getresponse().status == http.client.OK
        except OSError:
            return False
        finally:
            connection.close()

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, at: TracebackType | None
    ) -> None:
        for client in self._clients:
            client.communicate()
        self._processes.stop()

    def turn(self, rounds: int) -> Turn:
        server = self._processes.pid("bare")
        pids = [client.pid for client in self._clients]
        for pid in (server, *pids):
            forget_peak(pid)
        first = self._round()
        before = processor_seconds([server]), processor_seconds(pids)
        seconds = tuple(self._round() for _ in range(rounds))
        return Turn(
            first_seconds=first,
            seconds=seconds,
            server_processor=(processor_seconds([server]) - before[0]) / rounds,
            client_processor=(processor_seconds(pids) - before[1]) / rounds,
            server_peak=peak_bytes(server),
            client_peak=max(map(peak_bytes, pids)),
            received=float(self.up_bytes * self.workers),
            sent=float(self.down_bytes * self.workers),
        )

    def _round(self) -> float:
        began = perf_counter()
        for client in self._clients:
            _tell(client)
        for client in self._clients:
            _line(client)
        return perf_counter() - began


def _tell(client: subprocess.Popen[str]) -> None:
    if client.stdin:
        client.stdin.write("go\n")
        client.stdin.flush()


def _line(client: subprocess.Popen[str]) -> None:
    if not (client.stdout and client.stdout.readline()):
        raise RuntimeError(f"a client of the bare loop ended with {client.wait()}")


# ---------------------------------------------------------------- its two programs


Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


def _connection(port: int, ca: Path | None, timeout: float) -> http.client.HTTPConnection:
    if ca is None:
        return http.client.HTTPConnection(HOST, port, timeout=timeout)
    context = ssl.create_default_context(cafile=ca)
    return http.client.HTTPSConnection(HOST, port, timeout=timeout, context=context)


def serve(port: int, down_bytes: int, certificate: Path | None = None, key: Path | None = None) -> None:
    payload = memoryview(np.random.default_rng(0).bytes(down_bytes))
    total = np.zeros(PIECE_BYTES // 4, np.float32)
    scratch = np.empty_like(total)

    def add(piece: memoryview) -> None:
        values = np.frombuffer(piece, np.float32, len(piece) // 4)
        weighted = np.multiply(values, np.float32(0.25), out=scratch[: values.size])
        total[: values.size] += weighted

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        await send({"type": "http.response.start", "status": 200, "headers": [_length_of(scope, down_bytes)]})
        if scope["method"] == "GET":
            for start in range(0, down_bytes, PIECE_BYTES):
                body = bytes(payload[start : start + PIECE_BYTES])
                await send({"type": "http.response.body", "body": body, "more_body": start + len(body) < down_bytes})
            return
        held, more = bytearray(), scope["method"] == "PUT"
        while more:
            message = await receive()
            more = message["type"] == "http.request" and message.get("more_body", False)
            held += message.get("body", b"")
            if len(held) >= PIECE_BYTES or not more:
                for start in range(0, len(held), PIECE_BYTES):
                    add(memoryview(bytes(held[start : start + PIECE_BYTES])))
                held.clear()
        await send({"type": "http.response.body", "body": b""})

    with np.errstate(all="ignore"):
        # Connections stay between turns, however long the other sides' take.
        config = uvicorn.Config(app, HOST, port, log_config=None, access_log=False, lifespan="off")
        config.timeout_keep_alive = 3600
        config.ssl_certfile, config.ssl_keyfile = certificate, key
        uvicorn.Server(config).run()


def _length_of(scope: Message, down_bytes: int) -> tuple[bytes, bytes]:
    return b"content-length", str(down_bytes if scope["method"] == "GET" else 0).encode()


def ask(port: int, up_bytes: int, ca: Path | None = None) -> None:
    """A download and an upload for each line that comes in, with a line out when they are done."""
    # Random bits, as encoded weights nearly are, except that those which are no numbers would be slow to add.
    payload = np.random.default_rng(1).random(up_bytes // 4 + 1, np.float32).view(np.uint8).data[:up_bytes]
    buffer = bytearray(PIECE_BYTES)
    connection = _connection(port, ca, timeout=3600)
    print("ready", flush=True)
    for _ in sys.stdin:
        connection.request("GET", "/")
        answer = connection.getresponse()
        while answer.readinto(buffer):
            pass
        connection.request("PUT", "/", body=payload, headers={"Content-Length": str(up_bytes)})
        connection.getresponse().read()
        print("done", flush=True)


if __name__ == "__main__":
    program, port, nbytes, *files = sys.argv[1:]
    act = serve if program == "serve" else ask
    act(int(port), int(nbytes), *map(Path, files))
