"""What callers without a token cost a coordinator: `python -m benchmarks.strangers [--connections 2000]`.

Each scene holds so many connections with requests whose bodies stop short of their end, and sends a byte to each
every few seconds. Measured are the memory of the serving process, an upload right after the connections have closed,
and how long `/healthz/live` takes meanwhile. Then bodies of empty lists: the processor time that one costs.

The connections and the probe have a process each, so that neither waits for the other's interpreter. `late_ms_max` is
how much later than asked the probe's process woke: what the machine itself adds to `live_ms_max`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import psutil

from benchmarks.federation import Federation
from benchmarks.idle import allow_open_files
from benchmarks.measuring import MIB, OUT, Results, forget_peak, median, own_peak_bytes, processor_seconds
from benchmarks.network import HOST

CONNECTIONS = 2_000
HOLD_SECONDS = 8.0
BYTE_SECONDS = 4.0
PROBE_SECONDS = 0.02
MOST_MIB, MOST_LIVE_MS, MOST_BODY_MS = 50, 100, 5
LISTS = b"[" + b"[]," * 349_000 + b"[]]"

SCENES = {
    "no body is wanted of a stranger": ("/v1/runs", (1 << 20) - 1),
    "too long": ("/v1/enrolments", (1 << 20) - 1),
    "as long as may be": ("/v1/enrolments", 64 << 10),
    "short": ("/v1/enrolments", 1_000),
    "a form": ("/page/sign-in", 64 << 10),
}
"""A path, and the length that is announced; one byte of it never comes."""


def request(path: str, body_bytes: int) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\nSec-Fetch-Site: same-origin\r\n"
    )
    return f"{head}Content-Length: {body_bytes}\r\n\r\n".encode()


def connect(port: int, path: str, body_bytes: int, count: int, seconds: float, pipe: Connection) -> None:
    """Open connections, each with its request sent as far as the system takes it at once; send a byte by each now and
    then, as long as it stands; then close them once told to."""
    allow_open_files()
    whole, held = request(path, body_bytes) + b" " * (body_bytes - 100), []
    for _ in range(count):
        connection = socket.create_connection((HOST, port))
        connection.setblocking(False)
        held.append(connection)
        with suppress(OSError):
            connection.send(whole)
    end = monotonic() + seconds
    while monotonic() < end:
        for connection in held:
            with suppress(OSError):
                connection.send(b" ")
        sleep(BYTE_SECONDS)
    pipe.send(None)
    pipe.recv()


def probe(port: int, pipe: Connection) -> None:
    """Ask whether the coordinator lives, until told to end; then send the seconds of each answer, and those by which
    each wait before one was too long."""
    took, late = [], []
    whole = f"GET /healthz/live HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode()
    with socket.create_connection((HOST, port)) as connection:
        began = monotonic()
        while not pipe.poll(PROBE_SECONDS):
            woken = monotonic()
            connection.sendall(whole)
            if b" 204 " not in (answer := connection.recv(1 << 16)):
                raise RuntimeError(f"the probe got {answer!r}")
            late.append(woken - began - PROBE_SECONDS)
            began = monotonic()
            took.append(began - woken)
            if len(took) == 1:
                pipe.send(None)
    pipe.send((took, late))


@contextmanager
def process(run: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
    """A process that runs this, and what is sent to it and received from it."""
    processes = multiprocessing.get_context("spawn")
    ours, its = processes.Pipe()
    started = processes.Process(target=run, args=(*arguments, its))
    started.start()
    its.close()
    try:
        yield ours
    finally:
        ours.close()
        started.join()


@contextmanager
def probed(port: int) -> Iterator[dict[str, float]]:
    """Milliseconds of the probes within the block, once it has ended."""
    found: dict[str, float] = {}
    with process(probe, port) as probing:
        probing.recv()
        yield found
        probing.send(None)
        took, late = probing.recv()
        found |= {
            "live_ms_median": 1e3 * median(took),
            "live_ms_max": 1e3 * max(took),
            "late_ms_max": 1e3 * max(late),
        }


def hold(results: Results, federation: Federation, scene: str, count: int, seconds: float) -> None:
    (path, body_bytes), server = SCENES[scene], psutil.Process(federation.coordinator_pid)
    before, spent = server.memory_info().rss, processor_seconds([server.pid])
    forget_peak(server.pid)
    with (
        probed(federation.port) as probes,
        process(connect, federation.port, path, body_bytes, count, seconds) as strangers,
    ):
        strangers.recv()
        peak, spent = own_peak_bytes(server.pid) - before, processor_seconds([server.pid]) - spent
        strangers.send(None)
    began = monotonic()
    federation.admin.put_bytes(scene.encode() * 5_000)
    results.add(
        scene=scene,
        connections=count,
        peak_MiB=peak / MIB,
        after_MiB=(server.memory_info().rss - before) / MIB,
        **probes,
        upload_s=monotonic() - began,
        cpu_ms=1e3 * spent / count,
    )
    results.aim(f"{scene}: memory of {count} connections", peak / MIB, MOST_MIB, " MiB")
    results.aim(f"{scene}: /healthz/live", probes["live_ms_max"], MOST_LIVE_MS, " ms")


def lists(results: Results, federation: Federation, count: int) -> None:
    pid = federation.coordinator_pid
    for path in ("/v1/enrolments", "/v1/tasks/claim"):
        whole = request(path, len(LISTS)) + LISTS
        with probed(federation.port) as probes:
            spent = processor_seconds([pid])
            for _ in range(count):
                with socket.create_connection((HOST, federation.port)) as connection, suppress(OSError):
                    connection.sendall(whole)
                    connection.recv(1 << 16)
            each = 1e3 * (processor_seconds([pid]) - spent) / count
        results.add(scene=f"1 MiB of empty lists to {path}", **probes, cpu_ms=each)
        results.aim(f"a body of empty lists to {path}", each, MOST_BODY_MS, " ms")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=CONNECTIONS)
    parser.add_argument("--quick", action="store_true", help="a few connections only, to see that it works")
    parser.add_argument("--out", type=Path, default=OUT, help="the folder that the results are written to")
    given = parser.parse_args(arguments)
    count, seconds = (20, 1.0) if given.quick else (given.connections, HOLD_SECONDS)
    results = Results("strangers", "what callers without a token cost a coordinator")
    for scene in (*SCENES, None):
        with tempfile.TemporaryDirectory() as folder, Federation(Path(folder), disk_reserve_bytes=0) as federation:
            federation.admin.put_bytes(b"warm" * 50_000)
            if scene:
                hold(results, federation, scene, count, seconds)
            else:
                lists(results, federation, count // 20)
    results.finish(given.out)


if __name__ == "__main__":
    main()
