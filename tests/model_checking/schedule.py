"""Who goes on next, what time it is, and who dies: all of it from one seed.

A fiber is one request, one worker or one conductor. It runs until a point where others could be faster (around every
transaction, fsync and rename, and wherever it waits), and then the dice say whose turn it is. One turn is one step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from random import Random

from greenlet import getcurrent, greenlet

EPOCH = 1_800_000_000.0


class Crash(BaseException):
    """The process that this fiber belongs to is gone. Nothing may catch it, and nothing more is done."""


@dataclass
class Process:
    """What dies at once: a coordinator or a worker, from its start to its end."""

    name: str
    revive: Callable[[], object] | None = None
    """Starts its successor."""
    alive: bool = True


@dataclass(eq=False)
class Fiber:
    process: Process
    label: str
    greenlet: greenlet
    ready_at: float
    wrote: set[str] = field(default_factory=set)
    """The tables that it has changed: what a refused request must not have."""
    fault: BaseException | None = None


@dataclass(frozen=True)
class Faults:
    """How often things go wrong: chances from 0 to 1, and seconds."""

    lost: float = 0.04
    unheard: float = 0.04
    repeated: float = 0.06
    delayed: float = 0.15
    longest_delay: float = 20.0
    partitioned: float = 0.01
    crash: float = 0.004
    power_cut: float = 0.4
    """Of the crashes of a coordinator."""
    stalled: float = 0.08
    """At a point: the machine is busy elsewhere, and the world goes on."""
    longest_stall: float = 15.0
    jump: float = 0.0005
    longest_jump: float = 40.0


NONE = Faults(*(0.0,) * len(fields(Faults)))


class Schedule:
    """Every fiber, the dice and the clock."""

    def __init__(self, seed: int, faults: Faults) -> None:
        self.dice = Random(seed)
        self.faults = faults
        self.at = EPOCH
        """True time, by which workers count durations."""
        self.offset = 0.0
        """By how much the machine's clock, which judges deadlines, has jumped."""
        self.jumps = 0
        self.steps = 0
        self.points = 0
        self.crash_at: int | None = None
        """The point, counted from 1, at which its process dies, whatever the dice say."""
        self.on_crash: Callable[[Process], None] = lambda process: None
        self.on_point: Callable[[str], None] = lambda what: None
        self.writing = False
        """Within a transaction that writes there is no other: nobody else gets a turn."""
        self.fibers: list[Fiber] = []
        self.home = getcurrent()
        self.current: Fiber | None = None
        self._trace = hashlib.sha256()

    def now(self) -> float:
        return self.at + self.offset

    @property
    def trace(self) -> str:
        """What happened, in short: equal for equal seeds."""
        return self._trace.hexdigest()[:16]

    # ------------------------------------------------------------ from the outside

    def spawn(self, process: Process, label: str, work: Callable[[], object], after: float = 0.0) -> Fiber:
        def run() -> None:
            try:
                work()
            except Crash:
                pass
            except BaseException as fault:  # noqa: BLE001 (whatever it is, the simulation reports it)
                fiber.fault = fault

        fiber = Fiber(process, label, greenlet(run, parent=self.home), self.at + after)
        self.fibers.append(fiber)
        return fiber

    def step(self) -> Fiber:
        """Gives one fiber its turn."""
        while self.bury():
            pass
        ready = [fiber for fiber in self.fibers if fiber.ready_at <= self.at]
        if not ready:
            self.at = min(fiber.ready_at for fiber in self.fibers)
            ready = [fiber for fiber in self.fibers if fiber.ready_at <= self.at]
        if self.dice.random() < self.faults.jump:
            self.offset += self.dice.uniform(-1, 1) * self.faults.longest_jump
            self.jumps += 1
        fiber = ready[self.dice.randrange(len(ready))]
        self.steps += 1
        self._trace.update(f"{self.at:.6f} {self.offset:.6f} {fiber.process.name} {fiber.label}\n".encode())
        self.current = fiber
        fiber.greenlet.switch()
        self.current = None
        if fiber.fault:
            raise fiber.fault
        self.fibers = [fiber for fiber in self.fibers if not fiber.greenlet.dead]
        return fiber

    def kill(self, process: Process) -> None:
        """kill -9: none of its fibers does anything more."""
        process.alive = False
        self._trace.update(f"end of {process.name}\n".encode())
        self.on_crash(process)

    def bury(self) -> bool:
        """Unwinds what belongs to dead processes, outside of every fiber; whether there was any."""
        dead = [fiber for fiber in self.fibers if not fiber.process.alive]
        for fiber in dead:
            self.current = fiber
            # One that never began has nothing to unwind.
            if fiber.greenlet:
                fiber.greenlet.throw(Crash)
            self.current = None
            self.fibers.remove(fiber)
        return bool(dead)

    # ------------------------------------------------------------ from within a fiber

    def sleep(self, seconds: float) -> None:
        """Waits for so long, or until another fiber wakes this one."""
        assert self.current
        self.current.ready_at = self.at + seconds
        self.home.switch()

    def wake(self, fiber: Fiber) -> None:
        fiber.ready_at = min(fiber.ready_at, self.at)

    def point(self, what: str, *, turn: bool = True) -> None:
        """A moment at which the process may die and, unless it holds the database or wants no turn, others go on."""
        fiber = self.current
        if fiber is None:
            return
        if not fiber.process.alive:
            raise Crash
        fiber.label = what
        self.points += 1
        self.on_point(what)
        if self.points == self.crash_at or self.dice.random() < self.faults.crash:
            self.kill(fiber.process)
            raise Crash
        if turn and not self.writing:
            stalled = self.dice.random() < self.faults.stalled
            self.sleep(self.dice.uniform(0, self.faults.longest_stall) if stalled else 0)
