"""The conductor as a process of its own: killed, left behind, started apart, and told at once."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from sqlalchemy import select

from tessera.coordinator.db.engine import Database, DatabaseInUse
from tessera.coordinator.db.tables import RoundRow
from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import Run
from tessera.shared.client.client import Client
from tessera.shared.methods.base import MethodSpec
from tessera.shared.rounds.client_privacy import NOISE, Noise, derived_key
from tessera.shared.run_settings import ClientPrivacy
from tests.support import databases
from tests.support.coordinator import refused, until
from tests.support.federation import ScriptedWorker, small_model, start_run, values
from tests.support.processes import CoordinatorProcess, Process
from tests.support.raw import PART, announced, answer, head

Keep = Callable[[Process], Process]

HELD = """
import time
from pathlib import Path
from tessera.shared.methods.base import CoordinatorHalf, Method, MethodSettings, State

HERE = Path(__file__).parent


class HeldCoordinator(CoordinatorHalf[MethodSettings]):
    def merge(self, state, updates):
        with (HERE / "begun").open("a") as file:
            file.write("x")
        while (HERE / "hold").exists():
            time.sleep(0.01)
        return super().merge(state, updates)

    def check_merge(self, guard):
        pass


METHOD = Method("held", coordinator=HeldCoordinator, source="a test")
"""


@pytest.fixture
def held(tmp_path: Path) -> Iterator[tuple[CoordinatorProcess, Path]]:
    """A coordinator with a method whose merge waits as long as there is a file `hold` beside it."""
    methods = tmp_path / "methods"
    methods.mkdir()
    (methods / "held.py").write_text(HELD)
    with CoordinatorProcess(tmp_path / "coordinator", methods=methods) as coordinator:
        yield coordinator, methods


def run_of_one(
    coordinator: CoordinatorProcess, method: str = "fedavg", rounds: int = 1, **spec: Any
) -> tuple[Run, ScriptedWorker]:
    model = small_model()
    wanted = {"cohort": Cohort(size=1), "method": MethodSpec(name=method), "rounds": rounds, **spec}
    run = start_run(coordinator.admin(), model, values(model), **wanted)
    return run, ScriptedWorker(coordinator.site("a"), methods=(method,))


def completed(client: Client, run: Run, version: int) -> Any:
    found = client.run(run.id)
    return found.state == "completed" and found.version.number == version


def test_a_conductor_that_is_killed_in_mid_merge_is_replaced_and_requests_never_waited_for_it(
    held: tuple[CoordinatorProcess, Path],
) -> None:
    coordinator, folder = held
    run, worker = run_of_one(coordinator, "held")
    (folder / "hold").touch()
    worker.train(worker.take())
    until((folder / "begun").exists)
    client = coordinator.admin()
    assert [round_.state for round_ in client.rounds(run.id)] == ["merging"]

    first = coordinator.conductor()
    first.kill()
    until(lambda: (folder / "begun").read_text() == "xx")
    assert coordinator.conductor().pid != first.pid
    (folder / "hold").unlink()

    until(lambda: completed(client, run, 1))
    start = values(small_model())["head.weight"]
    digest = client.manifest(client.run(run.id).version.digest).blocks["head.weight"]
    np.testing.assert_allclose(np.frombuffer(client.read_blob(digest), "<f4"), start.reshape(-1) + 1, rtol=1e-6)


def test_a_noisy_merge_that_is_killed_is_repeated_with_the_same_noise(held: tuple[CoordinatorProcess, Path]) -> None:
    coordinator, folder = held
    terms = ClientPrivacy(epsilon=1.0, delta=1e-5, clip_norm=1.0)
    run, worker = run_of_one(coordinator, "held", normalization="cohort", client_privacy=terms)
    (folder / "hold").touch()
    worker.train(worker.take())
    until((folder / "begun").exists)
    key = noise_key(coordinator)
    coordinator.conductor().kill()
    until(lambda: (folder / "begun").read_text() == "xx")
    assert noise_key(coordinator) == key
    (folder / "hold").unlink()

    client = coordinator.admin()
    until(lambda: completed(client, run, 1))
    assert noise_key(coordinator) is None
    base, step = values(small_model())["head.weight"], 1.0 / np.sqrt(136)
    deviation = list(client.versions(run.id))[-1].scalars[NOISE]
    noise = next(Noise(base.shape, derived_key(key or b"", "block/head.weight"), deviation).chunks())
    digest = client.manifest(client.run(run.id).version.digest).blocks["head.weight"]
    moved = np.frombuffer(client.read_blob(digest), "<f4") - base.reshape(-1)
    # All values moved by 1, clipped to one over the root of their number; the noise is on a grid.
    np.testing.assert_allclose(moved, step - noise, atol=deviation / 512)


def noise_key(coordinator: CoordinatorProcess) -> bytes | None:
    """The key of the only round's noise."""
    database = Database(databases.url_in(coordinator.folder))
    try:
        with database.snapshot() as session:
            return session.scalars(select(RoundRow.noise_key)).one()
    finally:
        database.close()


def test_no_conductor_outlives_a_coordinator_that_is_killed(live: CoordinatorProcess) -> None:
    conductor = live.conductor()
    live.kill()
    until(lambda: not conductor.is_running() or conductor.status() == psutil.STATUS_ZOMBIE)
    live.start()
    assert live.conductor().pid != conductor.pid


def test_a_conductor_that_is_stopped_does_not_look_as_if_it_conducted(live: CoordinatorProcess) -> None:
    def conducts() -> bool:
        answer: bool = httpx.get(f"{live.url}/healthz/ready").json()["conducts"]
        return answer

    conductor = live.conductor()
    conductor.suspend()
    # The state of a stopped process changes a moment after the signal.
    until(lambda: conductor.status() == psutil.STATUS_STOPPED)
    os.utime(live.folder / "staging" / "conductor", (0, 0))
    assert not conducts()
    conductor.resume()
    until(conducts)


def test_told_to_stop_both_end(live: CoordinatorProcess) -> None:
    conductor = live.conductor()
    assert live.process.terminate() in (0, -signal.SIGTERM)
    until(lambda: not conductor.is_running())
    assert not live.process.said("conductor.died")


def test_told_to_stop_in_the_midst_of_everything_it_ends_soon_and_nothing_is_lost(
    held: tuple[CoordinatorProcess, Path],
) -> None:
    coordinator, folder = held
    run, worker = run_of_one(coordinator, "held")
    (folder / "hold").touch()
    worker.train(worker.take())
    until((folder / "begun").exists)
    data = bytes(range(256)) * 20_000
    token = coordinator.site_token("b")
    waiting = ScriptedWorker(coordinator.client(token))
    with (
        ThreadPoolExecutor() as pool,
        socket.create_connection(("127.0.0.1", coordinator.port)) as raw,
        httpx.Client(base_url=coordinator.url, headers={"Authorization": f"Bearer {token}"}) as http,
    ):
        claim = pool.submit(waiting.claim, 60)
        location = http.post("/v1/uploads", headers=announced(data)).headers["Location"]
        part = {**PART, "Upload-Offset": "0", "Content-Length": str(len(data))}
        raw.sendall(head("PATCH", location, {**dict(http.headers), **part}) + data[:3_000_000])

        def offset() -> int:
            return int(http.head(location).headers["Upload-Offset"])

        arrived = until(lambda: offset() >= 2 << 20 and offset())
        until(lambda: any(worker.site == "b" for worker in coordinator.admin().workers()))

        assert coordinator.process.terminate() in (0, -signal.SIGTERM)
        assert claim.result() is None
        cut = answer(raw)
        assert "stopping" in refused(cut, 503, "unavailable").detail
        assert cut.headers["Retry-After"] == "1"
        assert not coordinator.process.said("Traceback")

        (folder / "hold").unlink()
        coordinator.start()
        # All that it said had come is there, and the rest is all that is still to be sent.
        kept = offset()
        assert arrived <= kept <= 3_000_000
        rest = http.patch(location, headers={**PART, "Upload-Offset": str(kept)}, content=data[kept:])
        assert rest.headers["Upload-Complete"] == "?1"
    until(lambda: completed(coordinator.admin(), run, 1))
    assert (folder / "begun").read_text() == "xx"
    assert waiting.claim(0) is None


def test_bells_alone_move_rounds_on_where_no_tick_comes(tmp_path: Path, running: Keep) -> None:
    # Ten minutes pass between two looks that nobody asked for.
    with CoordinatorProcess(tmp_path / "coordinator", "--no-conduct", tick_seconds=600) as coordinator:
        assert psutil.Process(coordinator.process.pid).children() == []
        running(coordinator.beside("conductor", "tessera.coordinator", "conduct"))
        run, worker = run_of_one(coordinator, rounds=3)
        worker.enrol()
        for _ in range(3):
            task = worker.claim(60)
            assert task, "no bell was heard"
            worker.train(task)
        until(lambda: completed(coordinator.admin(), run, 3))


def test_a_coordinator_without_a_conductor_sweeps_its_own_staging_folder(tmp_path: Path) -> None:
    options = {"gc_interval_seconds": 0.1}
    with CoordinatorProcess(tmp_path / "coordinator", "--no-conduct", **options) as coordinator:
        http = httpx.Client(
            base_url=coordinator.url, headers={"Authorization": f"Bearer {coordinator.site_token('a')}"}
        )
        with http:
            location = http.post("/v1/uploads", headers=announced(b"unfinished")).headers["Location"]
            assert http.patch(location, headers={**PART, "Upload-Offset": "0"}, content=b"unf").status_code == 204
        staging = coordinator.folder / "staging"
        (unfinished,) = staging.glob("upload-*")
        # As of an upload that a conductor with a staging folder of its own has forgotten.
        forgotten = staging / f"upload-{'0' * 32}"
        forgotten.write_bytes(b"forgotten")
        for path in (unfinished, forgotten):
            os.utime(path, (1, 1))
        until(lambda: not forgotten.exists())
        assert unfinished.read_bytes() == b"unf"


@pytest.mark.skipif(databases.on != "sqlite", reason="bells hang in a folder beside SQLite alone")
def test_where_no_bell_is_heard_ticks_move_rounds_on(tmp_path: Path) -> None:
    with CoordinatorProcess(tmp_path / "coordinator", tick_seconds=0.2) as coordinator:
        coordinator.conductor()
        bells = coordinator.folder / "staging" / "bells"
        until(lambda: len(list(bells.iterdir())) == 2)
        for bell in bells.iterdir():
            bell.unlink()
        run, worker = run_of_one(coordinator, rounds=2)
        worker.enrol()
        for _ in range(2):
            worker.train(worker.take())
        until(lambda: completed(coordinator.admin(), run, 2))


@pytest.mark.skipif(databases.on != "sqlite", reason="on PostgreSQL any number may conduct")
def test_a_conductor_that_waits_for_its_turn_takes_it(live: CoordinatorProcess) -> None:
    # As one whose parent was killed a moment ago may still be there when the next coordinator starts.
    live.kill()
    earlier = Database(f"sqlite:///{live.folder}/tessera.db")
    until(lambda: took_over(earlier))
    conducting = live.process.log.read_text().count("coordinator.conducting")
    live.start()
    live.conductor()
    run, worker = run_of_one(live)
    assert worker.claim(2) is None
    assert live.process.log.read_text().count("coordinator.conducting") == conducting
    earlier.close()
    worker.train(worker.take())
    until(lambda: completed(live.admin(), run, 1))


def took_over(database: Database) -> bool:
    try:
        database.hold("conduct")
    except DatabaseInUse:
        return False
    return True
