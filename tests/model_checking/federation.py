"""One federation from one seed: a storm in which everything goes wrong, then calm in which it must come to an end."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import structlog

from tessera.coordinator.db.studies import join
from tessera.coordinator.db.tables import SiteRow
from tessera.shared.methods.base import MethodSpec
from tests.model_checking.actors import POLITE, Intruder, Manners, Orchestrator, Worker
from tests.model_checking.invariants import Violated, Watch
from tests.model_checking.replicas import World
from tests.model_checking.schedule import NONE, Faults, Schedule
from tests.support import databases
from tests.support.histories import Log
from tests.support.storage import migrated

SITES = ("a", "b", "c", "d")
STORM_STEPS = 1500
CALM_STEPS = 12_000
"""Within which every run must end once nothing goes wrong any more."""
FEDAVG = MethodSpec(name="fedavg")

# In memory where there is such a folder: nothing here outlives a power cut that is not simulated.
FOLDER = Path("/dev/shm") if Path("/dev/shm").is_dir() else None


@dataclass(frozen=True)
class Outcome:
    """How a federation went that broke no invariant."""

    seed: int
    steps: int
    changes: int
    state: str
    versions: int
    trace: str
    points: int
    digest: str


@cache
def template() -> Path:
    """An empty database with the sites in it, to be copied."""
    folder = Path(tempfile.mkdtemp(prefix="tessera-simulation-", dir=FOLDER))
    with databases.running_on("sqlite"):
        database = migrated(folder)
    with database.transaction() as session:
        session.add_all(SiteRow(id=name, name=name, created_at=0.0) for name in SITES)
        for name in SITES:
            join(session, "site", name, ["default"])
        join(session, "token", "orchestrator", ["default"])
    # The last connection that closes puts everything into the one file.
    database.close()
    atexit.register(shutil.rmtree, folder)
    return folder / "tessera.db"


@contextmanager
def workplace() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="tessera-simulation-", dir=FOLDER))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@dataclass(frozen=True)
class Shape:
    """Who takes part in what."""

    workers: int
    replicas: int = 1
    rounds: int = 2
    quorum: int | None = None
    """All workers if left out."""
    size: int | None = None
    target_updates: int | None = None
    mode: str = "barrier"
    max_staleness: int = 10
    method: MethodSpec = FEDAVG
    away: int = 0
    """How many workers leave for good once nothing goes wrong any more."""
    keep_versions: int | None = None
    memory: bool = False
    max_updates_per_site: int | None = None
    adaptive_deadline: bool = False
    tries: int = 20
    max_task_attempts: int = 100
    evaluates: bool = False
    codec: str = "bits+shuffle+zstd"
    server_optimizer: Mapping[str, Any] = field(default_factory=lambda: {"kind": "none"})
    inline_bytes: int = 200
    inline_updates: tuple[bool, ...] = (False,) * len(SITES)
    """Whose updates come with their submission."""
    cohort_wait_seconds: float = 0.0
    tick_seconds: float = 1.0
    whims: int = 0
    """How often the orchestrator interferes."""

    @classmethod
    def drawn(cls, dice: Random) -> Shape:
        workers = dice.choice((2, 3, 4))
        quorum = dice.randint(1, workers)
        replicas, rounds = dice.choice((1, 2)), dice.randint(2, 4)
        size = dice.choice((None, workers, max(quorum, workers - 1)))
        target_updates = dice.choice((None, None, quorum))
        return cls(
            workers=workers,
            replicas=replicas,
            rounds=rounds,
            quorum=quorum,
            size=size,
            # A target of the whole cohort is refused.
            target_updates=None if target_updates == size else target_updates,
            tries=dice.choice((2, 20)),
            max_task_attempts=dice.choice((1, 3)),
            evaluates=dice.random() < 0.4,
            codec=dice.choice(("raw", "bits+shuffle+zstd")),
            inline_bytes=dice.choice((8, 200, 65_536)),
            inline_updates=tuple(dice.random() < 0.5 for _ in SITES),
            cohort_wait_seconds=dice.choice((0.0, 10.0)),
            tick_seconds=dice.choice((1.0, 5.0)),
            whims=dice.randrange(4),
        )

    @classmethod
    def buffered(cls, seed: int) -> Shape:
        """A run that buffers updates, of several versions in which some come late."""
        dice = Random(seed)
        drawn = cls.drawn(dice)
        rounds, most = dice.randint(3, 8), dice.choice((1, 2, 10))
        quorum = drawn.quorum or drawn.workers
        target = dice.choice((quorum, quorum, dice.randint(quorum, drawn.workers)))
        freezes = MethodSpec(name="fedfrozen", settings={"warmup_rounds": dice.randint(1, 2), "scope": "v_head"})
        return replace(
            drawn,
            mode="buffer",
            rounds=rounds,
            max_staleness=most,
            target_updates=target,
            size=None,
            method=dice.choice((FEDAVG, freezes)),
            away=dice.choice((0, drawn.workers - quorum)),
            keep_versions=dice.choice((None, 1)),
        )

    @classmethod
    def remembering(cls, seed: int) -> Shape:
        """The same with a memory of each site's latest update, and perhaps a cap of updates per site."""
        most = Random(f"cap {seed}").choice((None, 2, 5))
        return replace(cls.buffered(seed), method=FEDAVG, memory=True, max_updates_per_site=most)

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "inline_bytes": self.inline_bytes,
            "lease_seconds": 30.0,
            "liveness_seconds": 45.0,
            "cohort_wait_seconds": self.cohort_wait_seconds,
            "tick_seconds": self.tick_seconds,
            "evaluation_seconds": 100.0,
            "keep_versions": self.keep_versions,
            # Files have the machine's time, and not the virtual one.
            "keep_unused_seconds": 1e9,
        }

    def spec(self, seed: int) -> dict[str, Any]:
        return {
            "name": "simulated",
            "method": self.method,
            "dataset": "data",
            "rounds": self.rounds,
            "seed": seed,
            "codec": self.codec,
            "server_optimizer": self.server_optimizer,
            "cohort": {
                "size": self.size,
                "quorum": self.quorum or self.workers,
                "target_updates": self.target_updates,
                **({"mode": self.mode, "max_staleness": self.max_staleness} if self.mode == "buffer" else {}),
                **({"memory": True, "staleness": "none"} if self.memory else {}),
                "max_updates_per_site": self.max_updates_per_site,
                "deadline_seconds": 150.0,
                "adaptive_deadline": self.adaptive_deadline,
                "max_attempts": self.tries,
                "max_task_attempts": self.max_task_attempts,
            },
            **({"evaluation": {"sites": True}} if self.evaluates else {}),
        }


class Federation:
    """Everybody who takes part, put together by the dice of one seed unless a shape is given."""

    def __init__(self, seed: int, folder: Path, faults: Faults, manners: Manners, shape: Shape | None = None) -> None:
        self.seed = seed
        self.schedule = Schedule(seed, faults)
        dice = self.schedule.dice
        self.shape = shape = shape or Shape.drawn(dice)
        self.world = World(self.schedule, folder, template(), shape.settings)
        self.log = Log(clock=lambda: self.schedule.at)
        examples = {site: 10 + 7 * place for place, site in enumerate(SITES)}
        self.workers = [
            Worker(
                self.world,
                site,
                examples[site],
                self.log,
                inline,
                manners,
                shape.evaluates,
                rests=shape.mode == "buffer",
            )
            for site, inline in zip(SITES[: shape.workers], shape.inline_updates, strict=False)
        ]
        spec = shape.spec(dice.randrange(1 << 30))
        self.orchestrator = Orchestrator(self.world, spec, self.log, shape.whims, cancels=0.15)
        self.watch = Watch(self.world, examples)
        self.intruder = Intruder(self.world, self._known)
        hooks = ("after_request", "after_report", "after_step", "after_start", "after_heartbeat", "is_over", "holds")
        for name in hooks:
            setattr(self.world, name, getattr(self.watch, name))

    def _known(self) -> list[tuple[str, int]]:
        return [(key, row["token"]) for key, row in self.watch.rows("tasks").items()]

    def run(self, storm_steps: int, calm_steps: int = CALM_STEPS) -> Outcome:
        """Raises Violated, with the seed and how to see it again."""
        try:
            with self.world.virtual():
                self._begin()
                if storm_steps:
                    self._weather(storm_steps, lambda: self._over() and self.orchestrator.settled)
                    self._calm()
                self._weather(calm_steps, self._over)
            self._judge(calm_steps)
        except Violated as fault:
            buffered = " --buffered" if self.shape.mode == "buffer" else ""
            again = f"python -m tests.model_checking --seed {self.seed} --federations 1{buffered}"
            fault.add_note(f"seed {self.seed}, step {self.schedule.steps}; again: {again}")
            raise
        run = next(iter(self.watch.rows("runs").values()))
        last = max(self.watch.rows("versions").values(), key=lambda row: row["number"])
        return Outcome(
            self.seed,
            self.schedule.steps,
            self.watch.changes,
            run["state"],
            run["version_number"],
            self.schedule.trace,
            self.schedule.points,
            last["digest"],
        )

    def close(self) -> None:
        self.watch.close()
        for replica in self.world.replicas:
            replica.process.alive = False
        self.schedule.bury()
        for fiber in self.schedule.fibers:
            fiber.process.alive = False
        self.schedule.bury()
        for replica in self.world.replicas:
            if replica.services:
                replica.services.database.close()

    def _begin(self) -> None:
        self.world.start(self.shape.replicas)
        for worker in self.workers:
            worker.start(after=self.schedule.dice.uniform(0, 10))
        self.orchestrator.start()
        self.intruder.start()

    def _weather(self, steps: int, ended: Callable[[], bool]) -> None:
        for _ in range(steps):
            self.watch.look(self.schedule.step())
            if self.intruder.admitted:
                raise Violated(f"sites: {self.intruder.admitted[0]}")
            if self.schedule.steps % 50 == 0:
                if self.orchestrator.settled and self._state() == "paused":
                    self.orchestrator.resume()
                if ended():
                    return

    def _calm(self) -> None:
        self.schedule.faults = NONE
        self.watch.is_calm = True
        self.world.cut_off.clear()
        for place, worker in enumerate(self.workers):
            worker.manners = POLITE
            if place < len(self.workers) - self.shape.away:
                worker.start()
            else:
                worker.leave()

    def _state(self) -> str:
        return next((row["state"] for row in self.watch.rows("runs").values()), "not there")

    def _over(self) -> bool:
        done = any("max_updates_per_site" in (row["reason"] or "") for row in self.watch.rows("runs").values())
        return self._state() in ("completed", "cancelled", "failed") or (self._state() == "paused" and done)

    def _judge(self, calm_steps: int) -> None:
        """Once all is over: what everybody remembers agrees with the tables."""
        if not self._over():
            raise Violated(f"I14: after {calm_steps} calm steps the run is {self._state()}")
        if (runs := len(self.watch.rows("runs"))) != 1:
            raise Violated(f"I13: one wish made {runs} runs")
        if findings := self.watch.findings(self.log):
            raise Violated(f"history: {findings[0].kind}: {findings[0].detail}")
        for worker in self.workers:
            for vault in worker.vaults:
                for run in self.watch.rows("runs"):
                    self._judge_kept(worker, vault.load(run))

    def _judge_kept(self, worker: Worker, kept: dict[str, Any]) -> None:
        if not kept:
            return
        task, token = kept["task"].tobytes().decode(), int(kept["token"][0])
        row = self.watch.rows("tasks")[task]
        if (row["state"], row["token"]) != ("merged", token):
            state = f"{row['state']} under token {row['token']}"
            raise Violated(
                f"vault: {worker.name} keeps what came of task {task} under token {token}, which is {state}"
            )


def simulate(
    seed: int,
    *,
    storm_steps: int = STORM_STEPS,
    faults: Faults | None = None,
    manners: Manners | None = None,
    shape: Shape | None = None,
) -> Outcome:
    """One federation from its begin to its end. Raises Violated."""
    structlog.configure(processors=[structlog.processors.KeyValueRenderer()], logger_factory=Silence)
    with workplace() as folder:
        federation = Federation(seed, folder, faults or Faults(), manners or Manners(), shape)
        try:
            return federation.run(storm_steps)
        finally:
            federation.close()


class Silence:
    """A logger of what is simulated: many thousand lines a second would be read by nobody."""

    def __init__(self, *arguments: object) -> None:
        pass

    def msg(self, *arguments: object, **named: object) -> None:
        pass

    debug = info = warning = error = exception = critical = msg
