"""The processes: two that serve, two that conduct, workers behind lines, and a PostgreSQL server."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from sqlalchemy import make_url

from tessera.coordinator.settings import CoordinatorSettings
from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import Run
from tessera.shared.client.client import Client
from tests.chaos.network import Line
from tests.support.coordinator import until
from tests.support.databases import patiently, postgresql
from tests.support.federation import small_model, start_run, values
from tests.support.histories import Log, RecordingClient
from tests.support.processes import CoordinatorProcess, Process
from tests.support.turns import by_turns

SERVERS, CONDUCTORS, WORKERS = 2, 2, 4
MODEL = small_model(width=192)
"""Updates of some 1.6 MB, long enough to be cut off in the middle."""

PATIENT = {"max_attempts": 100, "max_task_attempts": 100, "deadline_seconds": 3600.0}
"""Nothing of a run is given up because of faults: what it comes to must be what it comes to without them."""


class PostgreSQL:
    """A server that can crash."""

    def __init__(self, folder: Path) -> None:
        self._server = postgresql(folder)
        url = make_url(self._server.get_uri()).set(drivername="postgresql+psycopg")
        self.url = url.render_as_string(hide_password=False)

    def crash(self) -> None:
        """Ends at once, without a last checkpoint."""
        if pid := self._server.get_pid():
            os.kill(pid, signal.SIGQUIT)
            until(lambda: not Path(f"/proc/{pid}").exists())

    def start(self) -> None:
        patiently(self._server.ensure_postgres_running)

    def close(self) -> None:
        self._server.cleanup()


@dataclass
class Federation:
    folder: Path
    seed: int
    settings: dict[str, Any] = field(default_factory=dict)
    servers: list[CoordinatorProcess] = field(default_factory=list)
    conductors: list[Process] = field(default_factory=list)
    workers: list[Process] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    database: PostgreSQL | None = None
    skews: dict[int, float] = field(default_factory=lambda: dict.fromkeys(range(WORKERS), 0.0))
    """By how many seconds a worker's clock is wrong."""
    down: set[tuple[str, int]] = field(default_factory=set)
    """What was killed, and is not to be started again yet."""
    revived: Counter[str] = field(default_factory=Counter)
    """How often what ended of itself was started again, as a service manager does: a coordinator that finds no
    database as it starts ends and says so."""

    @property
    def history(self) -> Path:
        return self.folder / "history"

    def services_settings(self) -> CoordinatorSettings:
        return CoordinatorSettings(**self.settings)

    def start_conductor(self, number: int) -> Process:
        return self.servers[0].beside(f"conductor-{number}", "tessera.coordinator", "conduct")

    def start_worker(self, number: int) -> Process:
        given = {
            "urls": [line.url for line in self.lines] or [server.url for server in self.servers],
            "token": self._tokens[number],
            "site": f"site-{number}",
            "examples": 10 + number,
            "history": str(self.history),
            "skew": self.skews[number],
        }
        return Process(self.folder, f"worker-{number}", ["tests.chaos.worker", json.dumps(given)])

    def start(self, group: str, number: int) -> None:
        """One process more, whether or not it will be able to work."""
        if group == "server":
            self.servers[number].launch()
        elif group == "conductor":
            self.conductors[number] = self.start_conductor(number)
        else:
            self.workers[number] = self.start_worker(number)

    def process(self, group: str, number: int) -> Process:
        found = {"server": [server.process for server in self.servers], "conductor": self.conductors}
        return found.get(group, self.workers)[number]

    def supervise(self, ended: threading.Event) -> None:
        """Starts again what has ended of itself, until it is told to end."""
        everybody = [("server", n) for n in range(SERVERS)] + [("conductor", n) for n in range(CONDUCTORS)]
        everybody += [("worker", n) for n in range(WORKERS)]
        while not ended.wait(0.3):
            for group, number in everybody:
                if (group, number) not in self.down and self.process(group, number).popen.poll() is not None:
                    self.revived[group] += 1
                    self.start(group, number)

    def enrol(self) -> None:
        """Makes the sites and starts their workers; returns once all are known, so that no round begins with some."""
        self.history.mkdir()
        self._tokens = [self.servers[0].site_token(f"site-{number}") for number in range(WORKERS)]
        self.workers = [self.start_worker(number) for number in range(WORKERS)]
        admin = self.admin()
        until(lambda: sum(worker.live for worker in admin.workers()) == WORKERS, 60)
        admin.close()

    def admin(self) -> Client:
        token = (self.servers[0].folder / "admin.token").read_text().strip()
        log = Log(path=self.history / f"orchestrator-{os.getpid()}-{threading.get_ident()}.jsonl")
        urls = [server.url for server in self.servers]
        return by_turns(RecordingClient(urls[0], token, log, "orchestrator", patience_seconds=600), urls)

    def begin(self, admin: Client, number: int, rounds: int) -> Run:
        """A run that is the same whenever it has this seed and number."""
        seed = self.seed + number
        cohort = Cohort.model_validate({"size": WORKERS, "quorum": WORKERS, **PATIENT})
        return start_run(admin, MODEL, values(MODEL, seed), cohort=cohort, rounds=rounds, seed=seed)


@contextmanager
def stormy(folder: Path, seed: int) -> Iterator[Federation]:
    """Two of everything, on PostgreSQL, behind lines."""
    folder.mkdir(parents=True)
    federation = Federation(folder, seed)
    with ExitStack() as stack:
        federation.database = PostgreSQL(folder / "postgresql")
        stack.callback(federation.database.close)
        federation.settings = {
            "database_url": federation.database.url,
            "blob_url": str(folder / "blobs"),
            "staging_dir": folder / "staging",
            "inline_bytes": 4096,
            "lease_seconds": 8.0,
            "liveness_seconds": 600.0,
        }
        for number in range(SERVERS):
            server = CoordinatorProcess(folder / f"server-{number}", "--no-conduct", **federation.settings)
            federation.servers.append(stack.enter_context(server))
        stack.callback(lambda: _end([*federation.conductors, *federation.workers]))
        federation.conductors = [federation.start_conductor(number) for number in range(CONDUCTORS)]
        federation.lines = [Line(server.port, Random(seed)) for server in federation.servers]
        for line in federation.lines:
            stack.callback(line.close)
        federation.enrol()
        ended = threading.Event()
        supervisor = threading.Thread(target=federation.supervise, args=(ended,))
        supervisor.start()
        try:
            yield federation
        finally:
            ended.set()
            supervisor.join()


@contextmanager
def calm(folder: Path, seed: int) -> Iterator[Federation]:
    """One coordinator on SQLite, and nothing in between."""
    federation = Federation(folder, seed)
    with CoordinatorProcess(folder, inline_bytes=4096) as server, ExitStack() as stack:
        federation.servers = [server]
        stack.callback(lambda: _end(federation.workers))
        federation.enrol()
        yield federation


def _end(processes: Sequence[Process]) -> None:
    for process in processes:
        process.popen.send_signal(signal.SIGCONT)
        process.kill()
