"""The conductor as a process of its own: killed, left behind, started apart, and told at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from shared.client import Client
from shared.methods import Chosen
from shared.wire import Cohort, Run
from tests.support.coordinator import until
from tests.support.federation import ScriptedWorker, small_model, start_run, values
from tests.support.processes import CoordinatorProcess, Process

Keep = Callable[[Process], Process]

HELD = """
import time
from pathlib import Path
from shared.methods.contract import CoordinatorHalf, Method, MethodSettings, State, WorkerHalf

HERE = Path(__file__).parent


class HeldCoordinator(CoordinatorHalf[MethodSettings]):
    def merge(self, state, updates):
        with (HERE / "begun").open("a") as file:
            file.write("x")
        while (HERE / "hold").exists():
            time.sleep(0.01)
        return super().merge(state, updates)


METHOD = Method("held", MethodSettings, HeldCoordinator, WorkerHalf[MethodSettings], "nobody")
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
    coordinator: CoordinatorProcess, method: str = "fedavg", rounds: int = 1
) -> tuple[Run, ScriptedWorker]:
    model = small_model()
    chosen = Chosen(name=method)
    run = start_run(coordinator.admin(), model, values(model), cohort=Cohort(size=1), method=chosen, rounds=rounds)
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


def test_no_conductor_outlives_a_coordinator_that_is_killed(live: CoordinatorProcess) -> None:
    conductor = live.conductor()
    live.kill()
    until(lambda: not conductor.is_running() or conductor.status() == psutil.STATUS_ZOMBIE)
    live.start()
    assert live.conductor().pid != conductor.pid


def test_told_to_stop_both_end(live: CoordinatorProcess) -> None:
    conductor = live.conductor()
    assert live.process.terminate() in (0, -signal.SIGTERM)
    until(lambda: not conductor.is_running())
    assert not live.process.said("conductor.died")


def test_bells_alone_move_rounds_on_where_no_tick_comes(tmp_path: Path, running: Keep) -> None:
    # Ten minutes pass between two looks that nobody asked for.
    with CoordinatorProcess(tmp_path / "coordinator", "--no-conduct", tick_seconds=600) as coordinator:
        assert psutil.Process(coordinator.process.pid).children() == []
        running(coordinator.beside("conductor", "coordinator", "conduct"))
        run, worker = run_of_one(coordinator, rounds=3)
        worker.enrol()
        for _ in range(3):
            worker.train(worker.take(wait_seconds=20))
        until(lambda: completed(coordinator.admin(), run, 3))


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
            worker.train(worker.take(wait_seconds=20))
        until(lambda: completed(coordinator.admin(), run, 2))


def test_a_conductor_that_waits_for_its_turn_takes_it(live: CoordinatorProcess, running: Keep) -> None:
    conductor = live.conductor()
    # As the child of a coordinator that was killed a moment ago may still be there when the next one starts.
    os.kill(conductor.pid, signal.SIGSTOP)
    live.kill()
    live.start()
    assert not live.process.log.read_text().endswith("coordinator.conducting")
    os.kill(conductor.pid, signal.SIGKILL)
    run, worker = run_of_one(live)
    worker.train(worker.take(wait_seconds=20))
    until(lambda: completed(live.admin(), run, 1))
