"""Two that serve and two that conduct on one PostgreSQL, of which one each is killed at a time: the same bits as from
one coordinator on SQLite (invariants I5, I6 and I7)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import Run
from tessera.shared.client.client import Client
from tessera.shared.problems import Conflict
from tests.support import databases
from tests.support.coordinator import until
from tests.support.federation import ScriptedWorker, small_model, start_run, values
from tests.support.processes import CoordinatorProcess, Process
from tests.support.turns import by_turns

WORKERS, COHORT, ROUNDS = 8, 5, 6

Keep = Callable[[Process], Process]


@contextmanager
def client_of(urls: Sequence[str], token: str) -> Iterator[Client]:
    client = by_turns(Client(urls[0], token, patience_seconds=60), urls)
    yield client
    client.close()


def work(urls: Sequence[str], token: str, examples: int, known: threading.Event, ended: threading.Event) -> None:
    """Trains whatever it is given, by a step that only the task's seed tells."""
    with client_of(urls, token) as client:
        worker = ScriptedWorker(client, datasets={"data": examples}).enrol()
        known.set()
        while not ended.is_set():
            if task := worker.claim(2):
                try:
                    worker.train(task, task.seed % 1000 / 1000)
                except Conflict:
                    # Its lease ran out while this machine was busy; there will be another.
                    continue


@contextmanager
def at_work(admin: Client, tokens: Sequence[str], urls: Sequence[str]) -> Iterator[Run]:
    """A run with all its workers, who were known before it began: so each round draws from the same."""
    ended, known = threading.Event(), [threading.Event() for _ in tokens]
    threads = [
        threading.Thread(target=work, args=(urls, token, 10 + number, known[number], ended))
        for number, token in enumerate(tokens)
    ]
    for thread in threads:
        thread.start()
    try:
        until(lambda: all(event.is_set() for event in known))
        model = small_model(width=64)
        yield start_run(admin, model, values(model), cohort=Cohort(size=COHORT, quorum=COHORT), rounds=ROUNDS)
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def await_version(admin: Client, run: Run, number: int) -> None:
    def reached() -> bool:
        found = admin.run(run.id)
        assert found.state in ("running", "completed"), found.reason
        return found.version.number >= number

    until(reached, seconds=100)


def sites(coordinator: CoordinatorProcess) -> list[str]:
    return [coordinator.site_token(f"site-{number}") for number in range(WORKERS)]


def on_sqlite(folder: Path) -> str:
    with CoordinatorProcess(folder) as coordinator:
        admin = coordinator.admin()
        with at_work(admin, sites(coordinator), [coordinator.url]) as run:
            await_version(admin, run, ROUNDS)
        return admin.run(run.id).version.digest


def on_postgresql(folder: Path, running: Keep) -> str:
    common = {
        "database_url": databases.url_in(folder),
        "blob_url": folder / "blobs",
        "staging_dir": folder / "staging",
        # Blocks and updates are files, as they are of models of some size.
        "inline_bytes": 1024,
    }
    folder.mkdir()
    with ExitStack() as stack:
        both = (CoordinatorProcess(folder / name, "--no-conduct", **common) for name in ("one", "two"))
        servers = [stack.enter_context(server) for server in both]

        def conductor(number: int) -> Process:
            return running(servers[number].beside(f"conductor-{number}", "tessera.coordinator", "conduct"))

        conductors = [conductor(0), conductor(1)]
        urls = [server.url for server in servers]
        admin = stack.enter_context(client_of(urls, (servers[0].folder / "admin.token").read_text().strip()))
        with at_work(admin, sites(servers[0]), urls) as run:
            await_version(admin, run, 1)
            servers[0].kill()
            conductors[0].kill()
            # The others go on alone,
            await_version(admin, run, 3)
            servers[0].start()
            conductors[0] = conductor(0)
            until(lambda: conductors[0].said("coordinator.conducting"))
            # and then the first without them.
            servers[1].kill()
            conductors[1].kill()
            await_version(admin, run, ROUNDS)
        committed = [round_.number for round_ in admin.rounds(run.id) if round_.state == "committed"]
        assert committed == list(range(1, ROUNDS + 1))
        return admin.run(run.id).version.digest


@pytest.mark.long
@pytest.mark.timeout(300)
def test_replicas_that_are_killed_by_turns_come_to_the_bits_of_one_coordinator_on_sqlite(
    tmp_path: Path, running: Keep
) -> None:
    if databases.CHOSEN == "sqlite":
        pytest.skip("TESSERA_TEST_DATABASE rules PostgreSQL out")
    with databases.running_on("sqlite"):
        alone = on_sqlite(tmp_path / "sqlite")
    with databases.running_on("postgresql"):
        several = on_postgresql(tmp_path / "postgresql", running)
    assert several == alone
