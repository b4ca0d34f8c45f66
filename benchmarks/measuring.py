"""What every benchmark of costs shares: processor time and memory of processes, medians, tables, a file of results.

Ratios are to be trusted, not seconds: what is compared is measured in one run, in turns, and the medians are taken.
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic, sleep
from types import TracebackType
from typing import Self

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


def resident_bytes(pids: Iterable[int]) -> int:
    """What these processes and their descendants hold now; what they share counts once for each."""
    total = 0
    for process in _with_descendants(pids):
        with suppress(psutil.Error):
            total += process.memory_info().rss
    return total


def proportional_bytes(pids: Iterable[int]) -> int:
    """What these processes and their descendants hold now; what they share counts once (Pss)."""
    total = 0
    for process in _with_descendants(pids):
        with suppress(psutil.Error, OSError):
            lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
            total += next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0) * 1024
    return total


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
    return sum(_peak(process.pid) for process in _with_descendants([pid]))


def _peak(pid: int) -> int:
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
    """Returns once the condition holds. Raises TimeoutError saying `what` did not come."""
    give_up_at = monotonic() + seconds
    while not condition():
        if monotonic() > give_up_at:
            raise TimeoutError(f"{what}: not within {seconds:.0f} s")
        sleep(every_seconds)


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

    def add(self, **cells: Cell) -> None:
        """A row, which is shown at once too: a later one may fail."""
        self.rows.append(cells)
        print("  ".join(f"{name} {_shown(cell)}" for name, cell in cells.items() if cell is not None), flush=True)

    def aim(self, what: str, value: float, limit: float, unit: str = "") -> None:
        self.targets.append(Target(what, value, limit, unit))

    def show(self) -> None:
        print(f"\n{self.name}: {self.about}\n")
        print(table(self.rows))
        for line in (*self.notes, *map(str, self.targets)):
            print(line)

    def write(self, folder: Path = OUT) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        found = {
            "name": self.name,
            "about": self.about,
            "machine": machine(),
            "rows": self.rows,
            "targets": [{**vars(target), "met": target.met} for target in self.targets],
            "notes": self.notes,
        }
        path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        return path

    def finish(self, folder: Path) -> None:
        self.show()
        print(f"written to {self.write(folder)}")


def machine() -> dict[str, Cell]:
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": os.cpu_count(),
        "load_1min": os.getloadavg()[0],
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


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
