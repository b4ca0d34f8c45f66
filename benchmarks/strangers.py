"""What callers without a token cost a coordinator: `python -m benchmarks.strangers [--connections 2000]`.

Each scene holds so many connections with requests whose bodies stop short of their end, and sends a byte to each
every few seconds. Measured are the memory of the serving process, an upload right after the connections have closed,
and how long `/healthz/live` takes meanwhile. Then bodies of empty lists: the processor time that one costs.
"""

from __future__ import annotations

import argparse
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep

import httpx
import psutil

from benchmarks.federation import Federation
from benchmarks.idle import allow_open_files
from benchmarks.measuring import MIB, OUT, Results, forget_peak, own_peak_bytes, processor_seconds
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


def opened(port: int, path: str, body_bytes: int, count: int) -> list[socket.socket]:
    """Connections, each with its request sent as far as the system takes it at once."""
    whole, held = request(path, body_bytes) + b" " * (body_bytes - 100), []
    for _ in range(count):
        connection = socket.create_connection((HOST, port))
        connection.setblocking(False)
        held.append(connection)
        with suppress(OSError):
            connection.send(whole)
    return held


def trickle(connections: list[socket.socket], seconds: float) -> None:
    """Send a byte by each connection now and then, as long as they stand."""
    end = monotonic() + seconds
    while monotonic() < end:
        for connection in connections:
            with suppress(OSError):
                connection.send(b" ")
        sleep(BYTE_SECONDS)


@contextmanager
def probed(url: str) -> Iterator[list[float]]:
    """The seconds that each look at whether the coordinator lives took within the block."""
    took: list[float] = []
    ended = threading.Event()

    def look() -> None:
        with httpx.Client(base_url=url, timeout=60) as client:
            while not ended.wait(PROBE_SECONDS):
                began = monotonic()
                client.get("/healthz/live").raise_for_status()
                took.append(monotonic() - began)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield took
    finally:
        ended.set()
        thread.join()


def hold(results: Results, federation: Federation, scene: str, count: int, seconds: float) -> None:
    (path, body_bytes), process = SCENES[scene], psutil.Process(federation.coordinator_pid)
    before = process.memory_info().rss
    forget_peak(process.pid)
    with probed(federation.url) as took:
        connections = opened(federation.port, path, body_bytes, count)
        trickle(connections, seconds)
        peak = own_peak_bytes(process.pid) - before
        for connection in connections:
            connection.close()
    began = monotonic()
    federation.admin.put_bytes(scene.encode() * 5_000)
    results.add(
        scene=scene,
        connections=count,
        peak_MiB=peak / MIB,
        after_MiB=(process.memory_info().rss - before) / MIB,
        live_ms_median=1e3 * sorted(took)[len(took) // 2],
        live_ms_max=1e3 * max(took),
        upload_s=monotonic() - began,
    )
    results.aim(f"{scene}: memory of {count} connections", peak / MIB, MOST_MIB, " MiB")
    results.aim(f"{scene}: /healthz/live", 1e3 * max(took), MOST_LIVE_MS, " ms")


def lists(results: Results, federation: Federation, count: int) -> None:
    pid = federation.coordinator_pid
    for path in ("/v1/enrolments", "/v1/tasks/claim"):
        whole = request(path, len(LISTS)) + LISTS
        with probed(federation.url) as took:
            spent = processor_seconds([pid])
            for _ in range(count):
                with socket.create_connection((HOST, federation.port)) as connection, suppress(OSError):
                    connection.sendall(whole)
                    connection.recv(1 << 16)
            each = 1e3 * (processor_seconds([pid]) - spent) / count
        results.add(scene=f"1 MiB of empty lists to {path}", cpu_ms=each, live_ms_max=1e3 * max(took))
        results.aim(f"a body of empty lists to {path}", each, MOST_BODY_MS, " ms")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=CONNECTIONS)
    parser.add_argument("--quick", action="store_true", help="a few connections only, to see that it works")
    parser.add_argument("--out", type=Path, default=OUT, help="the folder that the results are written to")
    given = parser.parse_args(arguments)
    count, seconds = (20, 1.0) if given.quick else (given.connections, HOLD_SECONDS)
    allow_open_files()
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
