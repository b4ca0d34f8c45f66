"""What every benchmark of costs shares: processor time and memory of processes, medians, tables, a file of results.

Ratios are to be trusted, not seconds: what is compared is measured in one run, in turns, and the medians are taken.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic, perf_counter, sleep
from types import TracebackType
from typing import Self

import numpy as np
import psutil

OUT = Path("bench-output")
MIB = 1 << 20

Cell = str | int | float | None
Row = Mapping[str, Cell]


def median(values: Iterable[float]) -> float:
    """Their median; not a number if there are none."""
    found = list(values)
    return statistics.median(found) if found else float("nan")


def processor_seconds(pids: Iterable[int]) -> float:
    """What these processes and their descendants have computed, with those that ended and were waited for."""
    total = 0.0
    for process in _with_descendants(pids):
        with suppress(psutil.Error):
            spent = process.cpu_times()
            total += spent.user + spent.system + spent.children_user + spent.children_system
    return total


def faulted_bytes(pids: Iterable[int]) -> int:
    """Return the bytes of memory that the kernel has mapped for these processes, page by page as they touched them.

    Minor page faults, of which one may map several pages of a file that is in memory.
    """
    found = 0
    for pid in pids:
        with suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
            found += int(fields[7]) * mmap.PAGESIZE
    return found


def resident_bytes(pids: Iterable[int]) -> int:
    """What these processes and their descendants hold now; what they share counts once for each."""
    total = 0
    for process in _with_descendants(pids):
        with suppress(psutil.Error):
            total += process.memory_info().rss
    return total


def proportional_bytes(pids: Iterable[int], line: str = "Pss:") -> int:
    """What these processes and their descendants hold now; what they share counts once (Pss)."""
    total = 0
    for process in _with_descendants(pids):
        with suppress(psutil.Error, OSError):
            lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
            total += next((int(each.split()[1]) for each in lines if each.startswith(line)), 0) * 1024
    return total


def anonymous_bytes(pids: Iterable[int]) -> int:
    """The same of their anonymous memory, which no file backs."""
    return proportional_bytes(pids, "Pss_Anon:")


def _with_descendants(pids: Iterable[int]) -> Iterable[psutil.Process]:
    for pid in pids:
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            yield process
            yield from process.children(recursive=True)


def forget_peak(pid: int) -> None:
    """Lets the kernel count the peaks of a process and its descendants from here on."""
    for process in _with_descendants([pid]):
        Path(f"/proc/{process.pid}/clear_refs").write_text("5", encoding="ascii")


def peak_bytes(pid: int) -> int:
    """The most memory that a process has held since its start, or since `forget_peak` (VmHWM), and each of its
    descendants: no less than the most that they held at one time."""
    return sum(own_peak_bytes(process.pid) for process in _with_descendants([pid]))


def own_peak_bytes(pid: int) -> int:
    """The same of a process alone."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    # A process that has ended and was not waited for yet holds no memory, and its status has no such line.
    return next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")), 0) * 1024


@dataclass
class PeakMemory:
    """The most that groups of processes, with their descendants, hold at one time. Used with `with`; looks now and
    again, so that it may miss a peak of a few milliseconds."""

    groups: Mapping[str, Sequence[int]]
    every_seconds: float = 0.05
    measure: Callable[[Iterable[int]], int] = resident_bytes
    peaks: dict[str, int] = field(default_factory=dict)

    def __enter__(self) -> Self:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, at: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            for name, pids in self.groups.items():
                self.peaks[name] = max(self.peaks.get(name, 0), self.measure(pids))
            if self._ended.wait(self.every_seconds):
                return


def await_true(condition: Callable[[], object], seconds: float, what: str, every_seconds: float = 0.02) -> None:
    """Wait until the condition holds. Raises TimeoutError saying that `what` did not come."""
    give_up_at = monotonic() + seconds
    while not condition():
        if monotonic() > give_up_at:
            raise TimeoutError(f"timed out after {seconds:.0f} s: {what}")
        sleep(every_seconds)


def apart(module: str, *options: str) -> dict[str, float]:
    """Run a benchmark's module with these options in a process of its own, and return the figures that it prints."""
    done = subprocess.run([sys.executable, "-m", module, *options], stdout=subprocess.PIPE, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def failure(fault: Exception) -> str:
    """Return the first line of what an exception says, for a cell."""
    return (str(fault).strip() or type(fault).__name__).splitlines()[0][:200]


# ---------------------------------------------------------------- the machine


PIECE_BYTES = 1 << 20
TRIES = 3


def machine() -> dict[str, Cell]:
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": os.cpu_count(),
        "load_1min": os.getloadavg()[0],
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def machine_speeds(nbytes: int = 1 << 30) -> dict[str, float]:
    """Return what this machine does now, in GB/s: memory touched for the first time and again, in pages of 4 KiB,
    a copy, sha-256, a file written into the page cache, and a TCP connection on loopback.

    Figures of two machines, or of two hours of one, differ by these.
    """
    memory = mmap.mmap(-1, nbytes)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    pages = np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE]
    first, again = (_seconds(lambda: pages.fill(1)) for _ in range(2))
    source = np.ones(nbytes // 4, np.uint8)
    sink = np.empty_like(source)
    seconds = {
        "copy": lambda: np.copyto(sink, source),
        "sha256": lambda: hashlib.sha256(source.data),
        "new_file": lambda: _write_file(source),
        "loopback": lambda: _send_over_loopback(source),
    }
    best = {name: min(_seconds(act) for _ in range(TRIES)) for name, act in seconds.items()}
    return {
        "first_touch_GB_s": nbytes / first / 1e9,
        "touch_again_GB_s": nbytes / again / 1e9,
        **{f"{name}_GB_s": source.nbytes / spent / 1e9 for name, spent in best.items()},
    }


def _seconds(act: Callable[[], object]) -> float:
    began = perf_counter()
    act()
    return perf_counter() - began


def _write_file(data: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
    with tempfile.TemporaryFile() as file:
        for start in range(0, data.size, PIECE_BYTES):
            file.write(data[start : start + PIECE_BYTES].data)


def _send_over_loopback(data: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as sender,
        listener.accept()[0] as receiver,
    ):
        sending = threading.Thread(target=sender.sendall, args=(data.data,))
        sending.start()
        left, buffer = data.size, bytearray(PIECE_BYTES)
        while left:
            left -= receiver.recv_into(buffer)
        sending.join()


# ---------------------------------------------------------------- targets and results


@dataclass(frozen=True)
class Target:
    """What a figure was meant to be at most."""

    what: str
    value: float
    limit: float
    unit: str = ""

    @property
    def met(self) -> bool:
        return self.value <= self.limit

    def __str__(self) -> str:
        verdict = "met" if self.met else "MISSED"
        return f"{verdict:6}  {self.what}: {_shown(self.value)}{self.unit}, at most {_shown(self.limit)}{self.unit}"


@dataclass
class Results:
    """One benchmark's rows and targets; printed, and written as JSON beside what the machine was."""

    name: str
    about: str
    rows: list[dict[str, Cell]] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    speeds: dict[str, float] = field(default_factory=dict)
    """Of the machine, measured in the same run."""
    out: Path | None = None
    """A folder that each row is written to at once."""

    def add(self, **cells: Cell) -> None:
        """Add a row, and show and write it at once: a later one may fail."""
        self.rows.append(cells)
        if self.out:
            self.write(self.out)
        print("  ".join(f"{name} {_shown(cell)}" for name, cell in cells.items() if cell is not None), flush=True)

    def aim(self, what: str, value: float, limit: float, unit: str = "") -> None:
        self.targets.append(Target(what, value, limit, unit))

    def show(self) -> None:
        print(f"\n{self.name}: {self.about}\n")
        print(table(self.rows))
        speeds = "  ".join(f"{name} {_shown(speed)}" for name, speed in self.speeds.items())
        for line in (*self.notes, *([f"machine: {speeds}"] if speeds else []), *map(str, self.targets)):
            print(line)

    def write(self, folder: Path = OUT) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        found = {
            "name": self.name,
            "about": self.about,
            "machine": {**machine(), **self.speeds},
            "rows": self.rows,
            "targets": [{**vars(target), "met": target.met} for target in self.targets],
            "notes": self.notes,
        }
        path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        return path

    def finish(self, folder: Path) -> None:
        self.show()
        print(f"written to {self.write(folder)}")


def table(rows: Sequence[Row]) -> str:
    """Rows as aligned text; the columns are those of any row, in the order of their first mention."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns, *([_shown(row.get(name)) for name in columns] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    numeric = [any(isinstance(row.get(name), int | float) for row in rows) for name in columns]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in lines
    )


def _shown(cell: Cell) -> str:
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):
        return "-"
    if isinstance(cell, float):
        return f"{cell:.0f}" if abs(cell) >= 100 else f"{cell:.3g}"
    return str(cell)
