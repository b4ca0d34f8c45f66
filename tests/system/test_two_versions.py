"""A coordinator is replaced by a newer version, process by process, while it trains with workers of both versions, as
a rolling upgrade with Helm does it: all models are those that one version alone comes to."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from tessera.shared.api.cohort import Cohort
from tessera.shared.client.client import Client
from tests.support import databases, newer_version
from tests.support.coordinator import until
from tests.support.federation import small_model, start_run, values
from tests.support.processes import CoordinatorProcess, Process
from tests.support.turns import by_turns

WORKERS, COHORT = 8, 5

Keep = Callable[[Process], Process]


class Pod:
    """A process that serves and one that conducts, of one version."""

    def __init__(self, folder: Path, tree: Path | None, keep: Keep, settings: dict[str, Any]) -> None:
        self.server = CoordinatorProcess(folder, "--no-conduct", **settings)
        self.server.tree = tree
        self.url = self.server.url
        self._keep = keep
        self._starts = 0

    def start(self) -> None:
        """Returns once it serves and conducts."""
        self.server.start()
        self._keep(self.server.process)
        self._starts += 1
        self.conductor = self._keep(self.server.beside("conductor", "tessera.coordinator", "conduct"))
        until(lambda: self._conducting() == self._starts)

    def kill(self) -> None:
        self.server.kill()
        self.conductor.kill()

    @contextmanager
    def ended(self) -> Iterator[None]:
        """Ends it after what is within."""
        yield
        self.server.__exit__()
        self.conductor.kill()

    def stop(self) -> None:
        # The server ends by the signal that it was sent, once it has answered.
        assert self.server.process.terminate() in (0, -signal.SIGTERM)
        assert self.conductor.terminate() == 0

    def _conducting(self) -> int:
        """How often its conductor began."""
        return self.conductor.log.read_text().count("coordinator.conducting")

    @property
    def logs(self) -> list[Path]:
        return [*self.server.folder.glob("*.log")]


class Federation:
    """A database, workers of both versions, and a run of `rounds` rounds."""

    def __init__(self, folder: Path, keep: Keep, newer: Path | None, rounds: int) -> None:
        folder.mkdir()
        settings = {
            "database_url": databases.url_in(folder),
            "blob_url": folder / "blobs",
            "staging_dir": folder / "staging",
            # Blocks and updates are files, as they are of models of some size.
            "inline_bytes": 1024,
        }
        self.folder, self.keep, self.rounds = folder, keep, rounds
        self.old, self.new = Pod(folder / "old", None, keep, settings), Pod(folder / "new", newer, keep, settings)
        self.workers: list[Process] = []

    @contextmanager
    def begun(self, trees: Sequence[Path | None]) -> Iterator[None]:
        """The old version serves, and the run begins once the workers are known. They have these trees by turns."""
        self.old.start()
        urls, count = [self.old.url, self.new.url], len(trees)
        self.admin = by_turns(Client(urls[0], self._admin_token(), patience_seconds=120), urls)
        with self.old.ended(), closing(self.admin):
            tokens = [self.old.server.site_token(f"site-{number}") for number in range(WORKERS)]
            for place, tree in enumerate(trees):
                (self.folder / f"workers-{place}").mkdir()
                own = ",".join(f"{number}={tokens[number]}" for number in range(place, WORKERS, count))
                program = ["tests.support.steady_worker", ",".join(urls), own]
                self.workers.append(
                    self.keep(Process(self.folder / f"workers-{place}", "workers", program, tree=tree))
                )
            until(lambda: len(list(self.admin.workers())) == WORKERS)
            model = small_model(width=64)
            cohort = Cohort(size=COHORT, quorum=COHORT)
            self.run = start_run(self.admin, model, values(model), cohort=cohort, rounds=self.rounds)
            yield
            for worker in self.workers:
                worker.kill()

    def _admin_token(self) -> str:
        return (self.old.server.folder / "admin.token").read_text().strip()

    def await_version(self, number: int) -> None:
        def reached() -> bool:
            found = self.admin.run(self.run.id)
            assert found.state in ("running", "completed"), found.reason
            return found.version.number >= number

        until(reached, seconds=150)

    def digests(self) -> list[str]:
        self.await_version(self.rounds)
        return [version.digest for version in self.admin.versions(self.run.id)]

    def faults(self) -> list[str]:
        """The lines of the logs of all processes that tell of an error, or are no log's."""
        logs = [log for pod in (self.old, self.new) for log in pod.logs] + [worker.log for worker in self.workers]
        return [line for log in logs for line in log.read_text().splitlines() if _is_fault(line)]


def _is_fault(line: str) -> bool:
    if line.startswith("{"):
        return json.loads(line)["level"] in ("error", "critical")
    # `migrate` says so.
    return not line.endswith("is up to date")


def rows(url: str) -> list[int]:
    """The numbers of updates that came to the older version, and to the newer, which the latter noted twice; and how
    often a worker's declaration was stored."""
    counts = (
        "tasks WHERE state = 'merged' AND novelty IS NULL",
        "tasks WHERE novelty = id",
        "novelties",
        "audit WHERE action = 'worker.enrol'",
    )
    engine = create_engine(url)
    with engine.connect() as connection:
        found = [connection.execute(text(f"SELECT count(*) FROM {which}")).scalar_one() for which in counts]
    engine.dispose()
    return found


def alone(folder: Path, running: Keep, rounds: int) -> list[str]:
    """The digests of the versions that one version comes to."""
    federation = Federation(folder, running, None, rounds)
    with federation.begun([None]):
        return federation.digests()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_two_versions_on_one_database_come_to_the_bits_of_one(tmp_path: Path, running: Keep) -> None:
    if databases.CHOSEN == "sqlite":
        pytest.skip("TESSERA_TEST_DATABASE rules PostgreSQL out")
    rounds = 30
    newer = newer_version.make(tmp_path / "newer")
    with databases.running_on("postgresql"), ExitStack() as stack:
        expected = alone(tmp_path / "alone", running, rounds)
        both = Federation(tmp_path / "both", running, newer, rounds)
        old, new = both.old, both.new
        stack.enter_context(both.begun([None, newer]))
        both.await_version(4)
        migration = running(new.server.beside("migration", "tessera.coordinator", "migrate"))
        assert migration.popen.wait(120) == 0, migration.log.read_text()
        # The old version goes on alone on the newer schema,
        both.await_version(7)
        new.start()
        # and beside the newer one.
        both.await_version(12)
        old.kill()
        both.await_version(15)
        # A pod that is started again, among rows that the newer version wrote.
        old.start()
        both.await_version(18)
        new.kill()
        both.await_version(21)
        new.start()
        both.await_version(25)
        old.stop()
        assert both.digests() == expected
        new.stop()
        assert both.faults() == []
        of_old, of_new, noted, declared = rows(databases.url_in(both.folder))
        assert of_old >= COHORT * 7
        assert noted >= of_new > 0
        # First by the older version, and once by the newer, however often they take turns.
        assert declared <= 2 * WORKERS
