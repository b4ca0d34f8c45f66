"""Which server moves bulk bytes for least: `python -m benchmarks.servers [--megabytes 100] [--clients 4]`.

Each sends a file to several clients at once and hashes and writes what they upload, by the same application
(`app.py`), in turns: uvicorn as the coordinator runs it, Granian with the bytes through the application and with the
file left to the server, and sendfile by hand, which is the limit. Seconds are a server's processor time for each GB.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np

from benchmarks.federation import free_port
from benchmarks.measuring import MIB, OUT, Results, await_true, forget_peak, median, peak_bytes, processor_seconds
from benchmarks.rivals.environments import python
from examples.processes import Processes, end_by_interrupt

APP = "benchmarks.servers.app:app"
PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class Arm:
    """A server, and how it is started at a port."""

    name: str
    command: Callable[[int], Sequence[str]]
    send: str = "pieces"


def _uvicorn(port: int) -> Sequence[str]:
    return sys.executable, "-m", "uvicorn", APP, "--port", str(port), "--no-access-log", "--log-level", "warning"


def _granian(port: int) -> Sequence[str]:
    command = (str(python("granian")), "-m", "granian", "--interface", "asgi", "--port", str(port), "--workers", "1")
    return (*command, "--no-access-log", "--log-level", "warning", APP)


def _by_hand(port: int) -> Sequence[str]:
    return sys.executable, "-m", "benchmarks.servers.sendfile", str(port)


ARMS = (
    Arm("uvicorn", _uvicorn),
    Arm("granian", _granian),
    Arm("granian, file left to it", _granian, "path"),
    Arm("sendfile by hand", _by_hand),
)


@dataclass(frozen=True)
class PortInUseError:
    """One direction, all clients at once."""

    seconds: float
    processor: float
    peak: int


class Running:
    """A server that was started."""

    def __init__(self, arm: Arm, folder: Path, file: Path, stack: ExitStack) -> None:
        processes = Processes(folder)
        stack.callback(processes.stop)
        self.port = free_port()
        settings = {"TESSERA_BENCH_FILE": str(file), "TESSERA_BENCH_SEND": arm.send}
        processes.start(arm.name, arm.command(self.port), settings)
        await_true(self._answers, 30, f"{arm.name} answers", 0.1)
        self.pid = processes.pid(arm.name)

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("PUT", "/", body=b"x")
            return connection.getresponse().read().decode() == hashlib.sha256(b"x").hexdigest()
        except OSError:
            return False
        finally:
            connection.close()

    def turn(self, clients: int, each: Callable[[http.client.HTTPConnection], None]) -> PortInUseError:
        forget_peak(self.pid)
        connections = [http.client.HTTPConnection("127.0.0.1", self.port, timeout=120) for _ in range(clients)]
        faults: list[BaseException] = []

        def one(connection: http.client.HTTPConnection) -> None:
            try:
                each(connection)
            except BaseException as fault:  # noqa: BLE001 (raised below, by the thread that asked)
                faults.append(fault)

        threads = [threading.Thread(target=one, args=(connection,)) for connection in connections]
        before, began = processor_seconds([self.pid]), perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        taken = PortInUseError(perf_counter() - began, processor_seconds([self.pid]) - before, peak_bytes(self.pid))
        for connection in connections:
            connection.close()
        if faults:
            raise faults[0]
        return taken


def download(size: int) -> Callable[[http.client.HTTPConnection], None]:
    def ask(connection: http.client.HTTPConnection) -> None:
        connection.request("GET", "/")
        answer, buffer, came = connection.getresponse(), bytearray(PIECE_BYTES), 0
        while count := answer.readinto(buffer):
            came += count
        if came != size:
            raise OSError(f"{came} of {size} bytes came")

    return ask


def upload(payload: memoryview) -> Callable[[http.client.HTTPConnection], None]:
    digest = hashlib.sha256(payload).hexdigest()

    def send(connection: http.client.HTTPConnection) -> None:
        connection.request("PUT", "/", body=payload, headers={"Content-Length": str(len(payload))})
        if connection.getresponse().read().decode() != digest:
            raise OSError("other bytes came than were sent")

    return send


def measure(
    folder: Path, megabytes: float, clients: int, turns: int
) -> Mapping[str, Mapping[str, list[PortInUseError]]]:
    """By server and direction, what each turn took."""
    payload = np.random.default_rng(0).bytes(int(megabytes * 1e6))
    file = folder / "payload"
    file.write_bytes(payload)
    ways = {"down": download(len(payload)), "up": upload(memoryview(payload))}
    found: dict[str, dict[str, list[PortInUseError]]] = {arm.name: {way: [] for way in ways} for arm in ARMS}
    with ExitStack() as stack:
        running = {arm.name: Running(arm, folder, file, stack) for arm in ARMS}
        for turn in range(turns + 1):
            for name, server in running.items():
                for way, each in ways.items():
                    taken = server.turn(clients, each)
                    # The first of each is not counted: code and pages are read in.
                    if turn:
                        found[name][way].append(taken)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.servers", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--megabytes", type=float, default=100)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, default=OUT, help="a folder for the results")
    given = parser.parse_args()
    end_by_interrupt()
    gigabytes = given.clients * given.megabytes / 1e3
    results = Results("servers", f"{given.clients} x {given.megabytes:g} MB at once, medians of {given.turns} turns")
    with tempfile.TemporaryDirectory(prefix="tessera-servers-") as folder:
        found = measure(Path(folder), given.megabytes, given.clients, given.turns)
    for name, ways in found.items():
        cells: dict[str, float] = {}
        for way, taken in ways.items():
            cells[f"{way}_cpu_s_per_GB"] = median(each.processor for each in taken) / gigabytes
            cells[f"{way}_GB_per_s"] = gigabytes / median(each.seconds for each in taken)
        peak = max(each.peak for taken in ways.values() for each in taken)
        results.add(server=name, **cells, peak_MiB=peak / MIB)
    results.finish(given.out)


if __name__ == "__main__":
    main()
