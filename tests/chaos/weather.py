"""The faults, drawn by one seed: what is done to whom, and for how long."""

from __future__ import annotations

import resource
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random

import psutil

from tests.chaos.federation import CONDUCTORS, SERVERS, WORKERS, Federation
from tests.support.processes import Process

FULL_BYTES = 4096
"""Of a file, what a process may write whose disk is full."""

Undo = Callable[[], object]


@dataclass
class Weather:
    """Faults in a thread of its own, several at a time, never two at one target."""

    federation: Federation
    seed: int
    count: int
    pause_seconds: float = 0.5
    """Between the beginnings of two faults, in the mean."""
    told: Callable[[str], object] = print
    happened: Counter[str] = field(default_factory=Counter)
    faults: list[BaseException] = field(default_factory=list)
    """Of the weather itself: a process that could not be started again."""

    def __post_init__(self) -> None:
        self._dice = Random(self.seed)
        self._busy: set[tuple[str, int]] = set()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._blow, daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def over(self) -> bool:
        return not self._thread.is_alive()

    def join(self) -> None:
        self._thread.join()

    def _blow(self) -> None:
        began = time.monotonic()
        undone: list[threading.Thread] = []
        while sum(self.happened.values()) < self.count:
            time.sleep(self._dice.expovariate(1 / self.pause_seconds))
            kind = self._dice.choice(list(KINDS))
            group, number, apply = KINDS[kind]
            target = (group, self._dice.randrange(number))
            seconds = self._dice.uniform(0.1, 3.0)
            with self._lock:
                if target in self._busy:
                    continue
                self._busy.add(target)
            self.happened[kind] += 1
            self.told(f"{time.monotonic() - began:7.1f} s  {kind}, {group} {target[1]}, for {seconds:.1f} s")
            thread = threading.Thread(target=self._suffer, args=(target, apply, seconds), daemon=True)
            thread.start()
            undone.append(thread)
        for thread in undone:
            thread.join()

    def _suffer(self, target: tuple[str, int], apply: Callable[[Federation, int], Undo], seconds: float) -> None:
        try:
            undo = apply(self.federation, target[1])
            time.sleep(seconds)
            undo()
        except BaseException as fault:  # noqa: BLE001 (raised by whoever joins)
            self.faults.append(fault)
        finally:
            with self._lock:
                self._busy.discard(target)


def kill(federation: Federation, group: str, number: int) -> Undo:
    federation.down.add((group, number))
    federation.process(group, number).kill()

    def again() -> None:
        federation.start(group, number)
        federation.down.discard((group, number))

    return again


def skew_worker(federation: Federation, number: int) -> Undo:
    """Its clock is an hour wrong from here on, one way or the other."""
    undo = kill(federation, "worker", number)
    federation.skews[number] = 3600.0 if number % 2 else -3600.0
    return undo


def stop(process: Process) -> Undo:
    """As a machine that is suspended."""
    process.popen.send_signal(signal.SIGSTOP)
    return lambda: process.popen.send_signal(signal.SIGCONT)


def fill_disk(process: Process) -> Undo:
    """No file of this process grows: every write beyond its first few kilobytes fails, as on a full disk."""
    found = psutil.Process(process.pid)
    found.rlimit(resource.RLIMIT_FSIZE, (FULL_BYTES, resource.RLIM_INFINITY))

    def undo() -> None:
        # It may have ended of itself for want of room, and the next one has all of it.
        with suppress(psutil.NoSuchProcess):
            found.rlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    return undo


def cut_line(federation: Federation, number: int) -> Undo:
    federation.lines[number].cut()
    return lambda: None


def slow_line(federation: Federation, number: int) -> Undo:
    federation.lines[number].delay_seconds = 0.05
    return lambda: setattr(federation.lines[number], "delay_seconds", 0.0)


def dead_line(federation: Federation, number: int) -> Undo:
    federation.lines[number].dead = True
    federation.lines[number].cut()
    return lambda: setattr(federation.lines[number], "dead", False)


def noisy_line(federation: Federation, number: int) -> Undo:
    federation.lines[number].noisy += 1
    return lambda: setattr(federation.lines[number], "noisy", 0)


def crash_database(federation: Federation, number: int) -> Undo:
    assert federation.database
    federation.database.crash()
    return federation.database.start


KINDS: Mapping[str, tuple[str, int, Callable[[Federation, int], Undo]]] = {
    "kill -9 of a server": ("server", SERVERS, lambda f, n: kill(f, "server", n)),
    "kill -9 of a conductor": ("conductor", CONDUCTORS, lambda f, n: kill(f, "conductor", n)),
    "kill -9 of a worker": ("worker", WORKERS, lambda f, n: kill(f, "worker", n)),
    "a worker's clock jumps": ("worker", WORKERS, skew_worker),
    "a server stands still": ("server", SERVERS, lambda f, n: stop(f.servers[n].process)),
    "a conductor stands still": ("conductor", CONDUCTORS, lambda f, n: stop(f.conductors[n])),
    "a worker stands still": ("worker", WORKERS, lambda f, n: stop(f.workers[n])),
    "a server's disk is full": ("server", SERVERS, lambda f, n: fill_disk(f.servers[n].process)),
    "a conductor's disk is full": ("conductor", CONDUCTORS, lambda f, n: fill_disk(f.conductors[n])),
    "connections are cut": ("line", SERVERS, cut_line),
    "a line is slow": ("line", SERVERS, slow_line),
    "a line is dead": ("line", SERVERS, dead_line),
    "a line changes bytes": ("line", SERVERS, noisy_line),
    "the database crashes": ("database", 1, crash_database),
}
"""By name: what kind of target, how many of these there are, and what is done to one."""
