"""A group whose processes are killed: the task fails with a reason, and nothing is left."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from structlog.testing import capture_logs

from tessera.shared.api.tasks import Task
from tessera.simulation import Stalled
from tessera.worker.data.dataset import Dataset
from tessera.worker.errors import HiddenFailure
from tessera.worker.executor import executor as executor_module
from tessera.worker.executor.executor import FOLDER, ProcessExecutor
from tessera.worker.executor.folder import RESULT_ARRAYS, UNEXPLAINED, WAKE
from tessera.worker.executor.launcher import LocalLauncher, RankSettings
from tessera.worker.executor.rank import _failure
from tessera.worker.task.runner import TaskRunner
from tessera.worker.training.progress import Check, Report
from tests.support.coordinator import until
from tests.support.paths import ROOT
from tests.support.tasks import images
from tests.worker.executor.conftest import InMemory, on_cpus
from tests.worker.executor.test_equal_results import Case, divided

ENDLESS = Case("fedavg", examples=10_000, training={"batch_size": 1, "steps": 1_000_000})
"""The most epochs that a policy allows: it takes an hour."""


def processes(state: Path, *modules: str) -> list[psutil.Process]:
    """The processes of the group in a state folder that run one of these modules of the ranks' package."""
    wanted = [f"tessera.worker.executor.{module}" for module in modules or ("rank", "supervisor")]
    commands = {process: " ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])}
    return [
        process
        for process, line in commands.items()
        if str(state) in line and any(module in line for module in wanted)
    ]


def trains(state: Path) -> bool:
    """Whether a task was handed over to a group, whose ranks have begun to find each other."""
    return all(any((state / FOLDER).glob(name)) for name in ("*/task-*", "*/store"))


def nothing_left(state: Path) -> bool:
    """Whether no process is left, and no folder of processes. Later ones may use mapped data sets."""
    return not processes(state) and not list((state / FOLDER).glob("*/"))


def test_only_ranks_listen_and_only_on_the_loopback_interface(
    fresh_executor: ProcessExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    divided(Case("fedavg", training={"steps": 1}), fresh_executor, monkeypatch)
    assert fresh_executor._launcher._started
    supervisor = psutil.Process(fresh_executor._launcher._started[0].pid)
    ranks = supervisor.children()
    assert len(ranks) == 2
    assert supervisor.net_connections("all") == []
    found = [connection for rank in ranks for connection in rank.net_connections("inet")]
    assert {psutil.CONN_LISTEN, psutil.CONN_ESTABLISHED} == {connection.status for connection in found}
    assert {connection.laddr.ip for connection in found} == {"127.0.0.1"}
    fresh_executor.close()
    assert not any(process.is_running() for process in (supervisor, *ranks))
    assert list(fresh_executor.folder.glob("*")) == []


@pytest.mark.long
@pytest.mark.usefixtures("_whole")
@pytest.mark.parametrize("victim", ["rank", "supervisor"])
def test_task_fails_when_a_rank_or_the_supervisor_is_killed(
    victim: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = on_cpus(2, tmp_path)

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
        with pytest.raises(Stalled, match="executor-ended: a process"):
            divided(ENDLESS, executor, monkeypatch)
    finally:
        ended.set()
        killer.join()
    until(lambda: nothing_left(tmp_path), 10)
    # The next task gets a new group.
    assert divided(Case("fedavg"), executor, monkeypatch).versions
    executor.close()
    assert nothing_left(tmp_path)


@pytest.mark.long
@pytest.mark.usefixtures("_whole")
def test_nothing_is_left_of_an_idle_group_whose_supervisor_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = on_cpus(2, tmp_path)
    divided(Case("fedavg", training={"steps": 1}), executor, monkeypatch)
    processes(tmp_path, "supervisor")[0].kill()
    until(lambda: nothing_left(tmp_path), 10)
    executor.close()


def supervise_for_another_agent(folder: Path) -> None:
    command = [sys.executable, "-m", "tessera.worker.executor.supervisor", "0", str(folder), "0"]
    subprocess.run(command, check=False)


def test_a_supervisor_whose_agent_has_ended_already_removes_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / FOLDER / "group"
    folder.mkdir(parents=True)
    supervise_for_another_agent(folder)
    assert not folder.parent.exists()


def test_a_supervisor_that_ends_late_removes_nothing_of_the_next_agent(tmp_path: Path) -> None:
    # Which removes the folders of the agent before it when it starts.
    theirs = tmp_path / FOLDER / "next" / "settings.json"
    theirs.parent.mkdir(parents=True)
    theirs.touch()
    supervise_for_another_agent(tmp_path / FOLDER / "group")
    assert theirs.exists()


class OfFailedGpu(Dataset):
    """A data set with which the GPU fails."""

    def order(self, *_: Any) -> Any:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")


def test_a_rank_whose_gpu_failed_gives_way_to_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = on_cpus(1, tmp_path)
    failing = Case("fedavg", data=lambda count: OfFailedGpu(images(count).tensors))
    with pytest.raises(Stalled, match="the GPU stopped at a token, a position or a label"):
        divided(failing, executor, monkeypatch)
    assert executor._launcher._started
    first = executor._launcher._started[0]
    until(lambda: first.poll() is not None)
    shutil.rmtree(executor.folder)
    assert divided(Case("fedavg"), executor, monkeypatch).versions
    assert executor._launcher._started[0] is not first
    executor.close()


def test_the_end_of_a_process_after_a_hidden_failure_of_its_gpu_is_hidden_too() -> None:
    hidden = HiddenFailure("AcceleratorError")
    hidden.__cause__ = torch.AcceleratorError("CUDA error: unknown error")
    record = _failure(hidden)
    # Of that code the agent reports the end of the process.
    assert record.hidden
    assert record.code != UNEXPLAINED


def test_idle_processes_that_grow_are_replaced_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = on_cpus(1, tmp_path)
    divided(Case("fedavg"), executor, monkeypatch)
    assert executor._launcher._started
    first = executor._launcher._started[0]
    monkeypatch.setattr(executor_module, "SETTLED_SECONDS", 0)
    executor.idle()
    assert executor._launcher._started[0] is first
    used = executor.memory_bytes()
    assert used > 50 << 20
    # As if the first task had left far less.
    monkeypatch.setattr(executor_module, "GROWTH_BYTES", 0)
    monkeypatch.setattr(executor_module, "GROWTH", 0.5)
    with capture_logs() as logs:
        executor.idle()
    (line,) = [line for line in logs if line["event"] == "executor-replaced"]
    assert line["times"] == 1
    assert line["memory_bytes"] > 50 << 20
    assert first.poll() is not None
    assert executor._launcher._started[0] is not first
    executor.close()


def test_an_agent_with_many_open_files_is_woken(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < 1200:
        pytest.skip("this user may open no more files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    launcher, files = LocalLauncher(RankSettings(devices=("cpu",)), tmp_path / "home"), [os.dup(2)]
    try:
        while files[-1] < 1024:
            files.append(os.dup(2))
        (launcher.home() / WAKE).write_bytes(b"x")
        assert launcher._started
        launcher.wait(launcher._started[0], 3600)
    finally:
        launcher.close()
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class BlockingRunner(TaskRunner):
    """A runner whose group cannot write its result, whose name is taken by a folder."""

    def run(self, task: Task, check: Check, report: Report) -> None:
        def blocking() -> None:
            assert isinstance(self.executor, InMemory)
            if report.phase != "training":
                return
            for folder in self.executor.ranks.folder.glob("*/task-*"):
                (folder / RESULT_ARRAYS / "taken").mkdir(parents=True, exist_ok=True)

        super().run(task, blocking, report)


def test_a_result_that_cannot_be_written_fails_the_task_with_its_reason(
    fresh_executor: ProcessExecutor, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Stalled, match="failed: IsADirectoryError; the worker's own log"):
        divided(Case("fedavg", training={"steps": 1}), fresh_executor, monkeypatch, BlockingRunner)
    fresh_executor.close()
    assert "IsADirectoryError: [Errno 21] Is a directory" in capfd.readouterr().out


AGENT = """
import sys
from pathlib import Path
from typing import Any
import pytest
from tests.worker.executor.conftest import InMemory, on_cpus
from tests.worker.executor.test_equal_results import divided
from tests.worker.executor.test_ends_of_processes import ENDLESS
divided(ENDLESS, on_cpus(2, Path(sys.argv[1])), pytest.MonkeyPatch())
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
    until(lambda: nothing_left(tmp_path) and not (tmp_path / FOLDER).exists(), 10)
