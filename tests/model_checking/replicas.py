"""Coordinators: the real services over one SQLite file and one folder of blobs, each a process that may die.

What is replaced is what must be virtual: time, threads, random names, and waiting for the disk. A model of the disk
says what a power cut leaves: of a file's bytes those that were flushed, of a folder's names those that were.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self
from unittest.mock import patch

from sqlalchemy import event
from sqlalchemy.orm import Session

from tessera.coordinator import services as services_module
from tessera.coordinator.blobs import store as blobs_module
from tessera.coordinator.blobs import uploads as uploads_module
from tessera.coordinator.conductor import conductor
from tessera.coordinator.services import Services, assemble
from tessera.coordinator.settings import CoordinatorSettings
from tessera.shared.client.transport import Unreachable
from tessera.shared.problems import Problem
from tessera.shared.rounds.versions import States
from tessera.worker.state import atomic_files
from tests.model_checking.schedule import NONE, Crash, Process, Schedule
from tests.support.coordinator import ROOMY

RESTART_SECONDS = 3.0
COLLECT_SECONDS = 20.0
ANSWER_SECONDS = 5.0
"""How long a caller waits for an answer."""


class Disk:
    """Which of the bytes and names under a folder would survive a power cut."""

    def __init__(self, blobs: Path, staging: Path) -> None:
        self._blobs = blobs
        self._staging = staging
        self._flushed: set[int] = set()
        self._names: set[Path] = set()

    def flush(self, path: Path) -> None:
        if path.is_dir():
            self._names |= set(path.iterdir())
        else:
            self._flushed.add(path.stat().st_ino)

    def cut(self, chance: Callable[[], bool]) -> None:
        """Without power. What was not flushed may be there all the same, as disks are."""
        files = sorted(
            path for folder in (self._blobs, self._staging) for path in folder.rglob("*") if path.is_file()
        )
        for path in files:
            if not self._named(path) and chance():
                os.unlink(path)  # noqa: PTH108 (Path.unlink is a dying process's, and does nothing)
            elif path.stat().st_ino not in self._flushed and chance():
                with path.open("r+b") as file:
                    file.truncate(path.stat().st_size // 2)

    def _named(self, path: Path) -> bool:
        return path in self._names and (path.parent == self._blobs or path.parent in self._names)


@dataclass
class Replica:
    """One coordinator's place. `process` and `services` are new after each start."""

    name: str
    process: Process
    services: Services | None = None
    starts: int = 0


@dataclass
class Reply:
    done: bool = False
    value: Any = None
    problem: Problem | None = None
    broken: bool = False


class Inline:
    """An executor that does the work at once, in the fiber that asks."""

    def __init__(self, *arguments: object, **named: object) -> None:
        pass

    def submit(self, work: Callable[..., Any], *arguments: object) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(work(*arguments))
        return done

    def shutdown(self, **named: object) -> None:
        """There is nothing to wait for."""


class AtOnce:
    """Shares of threads, of which there are none: whoever asks does the work."""

    def __init__(self, name: str, threads: int) -> None:
        pass

    async def run(self, owner: str, work: Callable[..., Any], *arguments: object, **named: object) -> Any:
        return work(*arguments, **named)

    run_to_end = run

    def close(self) -> None:
        """There is nothing to end."""


class Timeouts:
    """Senders here are never silent, only cut off."""

    def __init__(self, seconds: float) -> None:
        pass

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *fault: object) -> None:
        pass

    def reschedule(self, when: float) -> None:
        pass

    def expired(self) -> bool:
        return False


def driven(steps: Any) -> Any:
    """The result of a coroutine that waits for nothing but points."""
    try:
        steps.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("a coroutine waited for what is not simulated")


@dataclass
class World:
    """One federation's machines and network."""

    schedule: Schedule
    folder: Path
    template: Path
    settings: dict[str, Any]
    replicas: list[Replica] = field(default_factory=list)
    cut_off: dict[str, float] = field(default_factory=dict)
    """Until when a worker is on the other side of a partition."""
    after_request: Callable[[str, Problem | None, set[str]], None] = lambda label, problem, wrote: None
    after_step: Callable[[float], None] = lambda began_at: None
    after_start: Callable[[bool], None] = lambda power_cut: None
    after_report: Callable[..., None] = lambda *report, **about: None
    holds: Callable[[str, int], bool] = lambda task, token: False
    is_over: Callable[[str], bool] = lambda task: False
    after_heartbeat: Callable[[str, bool], None] = lambda task, over: None

    def __post_init__(self) -> None:
        for name in ("blobs", "staging"):
            (self.folder / name).mkdir(parents=True)
        shutil.copy(self.template, self.folder / "tessera.db")
        self.disk = Disk(self.folder / "blobs", self.folder / "staging")
        self.schedule.on_crash = self._crashed

    # ------------------------------------------------------------ coordinators

    def start(self, count: int) -> None:
        for number in range(count):
            self.replicas.append(Replica(f"coordinator-{number}", Process(f"coordinator-{number}")))
            self._start(self.replicas[-1])

    def _start(self, replica: Replica) -> None:
        replica.process = Process(replica.name)
        replica.starts += 1
        (self.folder / "staging").mkdir(exist_ok=True)
        settings = CoordinatorSettings(
            database_url=f"sqlite:///{self.folder}/tessera.db",
            blob_url=str(self.folder / "blobs"),
            # As on machines of their own: what starts sweeps its staging folder.
            staging_dir=self.folder / "staging" / replica.name,
            **ROOMY,
            **self.settings,
        )
        replica.services = services = assemble(settings, self.schedule.now)
        self._instrument(services)
        services.blobs.sweep()
        self.schedule.spawn(replica.process, "conductor", lambda: self._conduct(replica))
        if settings.keep_versions:
            self.schedule.spawn(replica.process, "retention", lambda: self._collect(services))

    def _collect(self, services: Services) -> None:
        while True:
            self.schedule.sleep(COLLECT_SECONDS)
            services.retention.collect()

    def _conduct(self, replica: Replica) -> None:
        services = replica.services
        assert services
        while True:
            began_at, jumps = self.schedule.now(), self.schedule.jumps
            services.conductor.step()
            # Between two jumps of the clock nobody knows what was due.
            if jumps == self.schedule.jumps:
                self.after_step(began_at)
            self.schedule.sleep(services.settings.tick_seconds)

    def _instrument(self, services: Services) -> None:
        """Makes points of transactions and looks, and leaves it to the disk's model what is durable."""
        schedule, database = self.schedule, services.database
        event.listen(database.engine, "connect", lambda raw, _: raw.execute("PRAGMA synchronous=OFF"))
        writing, reading = database.transaction, database.snapshot

        @contextmanager
        def transaction() -> Iterator[Session]:
            schedule.point("transaction")
            try:
                with writing() as session:
                    schedule.writing = True
                    yield session
                    session.flush()
                    schedule.point("commit")
            finally:
                schedule.writing = False
            schedule.point("committed")

        @contextmanager
        def snapshot() -> Iterator[Session]:
            schedule.point("look")
            with reading() as session:
                yield session

        database.transaction, database.snapshot = transaction, snapshot  # type: ignore[method-assign]

    def _crashed(self, process: Process) -> None:
        replica = next((one for one in self.replicas if one.process is process), None)
        if replica is None:
            if process.revive:
                delay = self.schedule.dice.uniform(0, 4 * RESTART_SECONDS)
                self.schedule.spawn(Process("machine"), "start", process.revive, after=delay)
            return
        if replica.services:
            replica.services.blobs.unfinished.abandon()
        schedule = self.schedule
        power_cut = schedule.dice.random() < schedule.faults.power_cut

        def restart() -> None:
            self._start(replica)
            self.after_start(power_cut)

        if power_cut:
            # All coordinators are on one machine's disk, so all of them lose power.
            for other in self.replicas:
                if other is not replica and other.process.alive:
                    faults, schedule.faults = schedule.faults, NONE
                    schedule.kill(other.process)
                    schedule.faults = faults
            self.disk.cut(lambda: schedule.dice.random() < 0.5)
        if replica.services:
            replica.services.database.close()
            replica.services = None
        schedule.spawn(Process("machine"), "start", restart, after=RESTART_SECONDS)

    # ------------------------------------------------------------ network

    def call(self, caller: str, label: str, request: Callable[[Services], Any]) -> Any:
        """What the request answers. Raises the problem that refuses it, and Unreachable if no answer comes."""
        schedule, dice, faults = self.schedule, self.schedule.dice, self.schedule.faults
        if dice.random() < faults.partitioned:
            self.cut_off[caller] = schedule.at + dice.uniform(1, 60)
        lost = dice.random() < faults.lost or self.cut_off.get(caller, 0) > schedule.at
        unheard = dice.random() < faults.unheard
        delay = dice.uniform(0, faults.longest_delay) if dice.random() < faults.delayed else 0.0
        waiting = schedule.current
        assert waiting
        reply = Reply()
        replica = dice.choice(self.replicas)
        if not lost:
            self._deliver(replica, label, request, reply, waiting, delay)
            if dice.random() < faults.repeated:
                late = delay + dice.uniform(0, faults.longest_delay)
                self._deliver(dice.choice(self.replicas), label, request, Reply(), None, late)
        deadline = schedule.at + ANSWER_SECONDS
        while not (reply.done or reply.broken) and schedule.at < deadline:
            schedule.sleep(deadline - schedule.at)
        if not waiting.process.alive:
            raise Crash
        if not reply.done or unheard:
            raise Unreachable(f"no answer to {label}")
        if reply.problem:
            raise reply.problem
        return reply.value

    def _deliver(
        self,
        replica: Replica,
        label: str,
        request: Callable[[Services], Any],
        reply: Reply,
        waiting: Any,
        delay: float,
    ) -> None:
        schedule = self.schedule

        def arrive() -> None:
            fiber = schedule.current
            assert fiber
            try:
                if replica.services is None:
                    return
                fiber.process = replica.process
                problem = None
                try:
                    reply.value = request(replica.services)
                except Problem as refusal:
                    problem = reply.problem = refusal
                self.after_request(label, problem, fiber.wrote)
                reply.done = True
            finally:
                reply.broken = not reply.done
                if waiting:
                    schedule.wake(waiting)

        schedule.spawn(Process("network"), label, arrive, delay)

    # ------------------------------------------------------------ what is virtual

    @contextmanager
    def virtual(self) -> Iterator[None]:
        """Within it, threads are fibers, names come from the dice, and flushes and renames are points."""
        schedule, disk = self.schedule, self.disk
        replace, unlink = Path.replace, Path.unlink

        class FiberThread:
            def __init__(self, target: Callable[..., object], args: tuple[object, ...], **named: object) -> None:
                self.work = lambda: target(*args)

            def start(self) -> None:
                assert schedule.current
                schedule.spawn(schedule.current.process, "merge", self.work)

        def flush(path: Path) -> None:
            schedule.point("fsync")
            disk.flush(path)
            schedule.point("synced")

        def renamed(path: Path, target: Path) -> Path:
            schedule.point("rename")
            made = replace(path, target)
            schedule.point("renamed")
            return made

        def removed(path: Path, missing_ok: bool = False) -> None:
            # What a process would tidy up on its way out, a killed one does not.
            if schedule.current and not schedule.current.process.alive:
                raise Crash
            unlink(path, missing_ok=missing_ok)

        def new_id() -> uuid.UUID:
            return uuid.UUID(int=schedule.dice.getrandbits(128), version=4)

        async_io = SimpleNamespace(
            timeout=Timeouts,
            get_running_loop=lambda: SimpleNamespace(time=schedule.now),
            CancelledError=asyncio.CancelledError,
            ensure_future=lambda steps: steps,
            shield=lambda steps: steps,
        )
        threads = SimpleNamespace(Thread=FiberThread, Lock=threading.Lock)
        with ExitStack() as stack:
            for where, name, virtual in (
                (conductor, "threading", threads),
                (services_module, "States", lambda blobs, threads: States(blobs)),
                (services_module, "FairThreadPool", AtOnce),
                (blobs_module, "ThreadPoolExecutor", Inline),
                (blobs_module, "flush", flush),
                (uploads_module, "asyncio", async_io),
                (atomic_files, "uuid4", new_id),
                (uuid, "uuid4", new_id),
                (Path, "replace", renamed),
                (Path, "unlink", removed),
            ):
                stack.enter_context(patch.object(where, name, virtual))
            yield
