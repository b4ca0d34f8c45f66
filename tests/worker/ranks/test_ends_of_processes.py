"""A group whose processes are killed: the task fails with a reason, and nothing is left."""

from __future__ import annotations

import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest

from tessera.shared.api.tasks import Task
from tessera.worker.ranks import session
from tessera.worker.ranks.messages import RESULT_FILE, Ended, receive
from tessera.worker.ranks.stages import FOLDER, DeviceStages
from tessera.worker.simulation import Stalled
from tessera.worker.task.runner import TaskRunner
from tessera.worker.training.progress import Check, Report
from tests.support.coordinator import until
from tests.support.paths import ROOT
from tests.worker.ranks.test_equal_results import CPU, Case, divided

ENDLESS = Case("fedavg", examples=10_000, training={"batch_size": 1, "steps": 1_000_000})
"""The most epochs that a policy allows: it takes an hour."""


def processes(state: Path, *modules: str) -> list[psutil.Process]:
    """The processes of the group in a state folder that run one of these modules of the ranks' package."""
    wanted = [f"tessera.worker.ranks.{module}" for module in modules or ("rank", "launcher")]
    commands = {process: " ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])}
    return [
        process
        for process, line in commands.items()
        if str(state) in line and any(module in line for module in wanted)
    ]


def trains(state: Path) -> bool:
    """Whether a task was handed over to a group, whose ranks have begun to find each other."""
    return all(any((state / FOLDER).glob(f"*/{name}")) for name in ("task-*", "store"))


def nothing_left(state: Path) -> bool:
    return not processes(state) and not list((state / FOLDER).glob("*"))


def test_only_ranks_listen_and_only_on_the_loopback_interface(
    fresh_stages: DeviceStages, monkeypatch: pytest.MonkeyPatch
) -> None:
    divided(Case("fedavg", training={"steps": 1}), fresh_stages, monkeypatch)
    assert fresh_stages._session
    launcher = psutil.Process(fresh_stages._session._launcher.pid)
    ranks = launcher.children()
    assert len(ranks) == 2
    assert launcher.net_connections("all") == []
    found = [connection for rank in ranks for connection in rank.net_connections("inet")]
    assert {psutil.CONN_LISTEN, psutil.CONN_ESTABLISHED} == {connection.status for connection in found}
    assert {connection.laddr.ip for connection in found} == {"127.0.0.1"}
    fresh_stages.close()
    assert not any(process.is_running() for process in (launcher, *ranks))
    assert list(fresh_stages.folder.glob("*")) == []


@pytest.mark.long
@pytest.mark.parametrize("victim", ["rank", "launcher"])
def test_task_fails_when_a_rank_or_the_launcher_is_killed(
    victim: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = DeviceStages((CPU, CPU), tmp_path, threads=1)

    ended = threading.Event()

    def kill() -> None:
        """Kill one process of each group that trains: a round is attempted several times."""
        while not ended.wait(0.1):
            if trains(tmp_path) and (found := processes(tmp_path, victim)):
                found[-1].kill()
                until(lambda: ended.is_set() or not trains(tmp_path))

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        with pytest.raises(Stalled, match="ranks-ended: the process of rank"):
            divided(ENDLESS, stages, monkeypatch)
    finally:
        ended.set()
        killer.join()
    until(lambda: nothing_left(tmp_path), 10)
    # The next task gets a new group.
    assert divided(Case("fedavg"), stages, monkeypatch).versions
    stages.close()
    assert nothing_left(tmp_path)


@pytest.mark.long
def test_nothing_is_left_of_an_idle_group_whose_launcher_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = DeviceStages((CPU, CPU), tmp_path, threads=1)
    divided(Case("fedavg", training={"steps": 1}), stages, monkeypatch)
    processes(tmp_path, "launcher")[0].kill()
    until(lambda: nothing_left(tmp_path), 10)
    stages.close()


def test_a_launcher_whose_agent_has_ended_already_removes_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "group"
    folder.mkdir()
    another = "0"
    subprocess.run([sys.executable, "-m", "tessera.worker.ranks.launcher", another, str(folder), "2"], check=False)
    assert not folder.exists()


class BlockingRunner(TaskRunner):
    """A runner whose group cannot write its result, whose name is taken by a folder."""

    def run(self, task: Task, check: Check, report: Report) -> None:
        def blocking() -> None:
            assert isinstance(self.ranks, DeviceStages)
            for group in self.ranks.folder.glob("*"):
                (group / RESULT_FILE / "taken").mkdir(parents=True, exist_ok=True)

        super().run(task, blocking, report)


def test_no_rank_ends_a_task_before_its_result_is_written(
    fresh_stages: DeviceStages, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults: dict[Connection, BaseException | None] = {}

    def watched(connection: Connection) -> Any:
        message = receive(connection)
        if isinstance(message, Ended):
            faults[connection] = message.fault
        if isinstance(message, Ended) and message.fault:
            # The agent reads no message of the others any more.
            assert fresh_stages._session
            for other in fresh_stages._session._connections:
                while other not in faults:
                    watched(other)
        return message

    monkeypatch.setattr(session, "receive", watched)
    with pytest.raises(Stalled, match="IsADirectoryError"):
        divided(Case("fedavg", training={"steps": 1}), fresh_stages, monkeypatch, BlockingRunner)
    assert len(faults) % 2 == 0
    assert all(faults.values())


@pytest.mark.long
def test_a_result_that_cannot_be_written_fails_the_task_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stages = DeviceStages((CPU, CPU), tmp_path, threads=1)
    with pytest.raises(Stalled, match="failed: IsADirectoryError in a rank"):
        divided(Case("fedavg", training={"steps": 1}), stages, monkeypatch, BlockingRunner)
    stages.close()
    assert "IsADirectoryError: [Errno 21] Is a directory" in capfd.readouterr().out
    assert nothing_left(tmp_path)


AGENT = """
import sys
from pathlib import Path
import pytest
from tessera.worker.ranks.stages import DeviceStages
from tests.worker.ranks.test_equal_results import CPU, divided
from tests.worker.ranks.test_ends_of_processes import ENDLESS
divided(ENDLESS, DeviceStages((CPU, CPU), Path(sys.argv[1]), threads=1), pytest.MonkeyPatch())
"""


@pytest.mark.long
def test_nothing_is_left_when_the_agent_is_killed(tmp_path: Path) -> None:
    agent = subprocess.Popen([sys.executable, "-c", AGENT, str(tmp_path)], cwd=ROOT)
    try:
        until(lambda: trains(tmp_path), 120)
        assert len(processes(tmp_path)) == 3
    finally:
        agent.kill()
        agent.wait()
    until(lambda: nothing_left(tmp_path), 10)
