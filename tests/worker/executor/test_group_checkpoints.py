"""A group that is killed in the middle of a task ends it with the same bits as one that was left alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
from structlog.testing import capture_logs

from tessera.shared.api.tasks import Task
from tessera.simulation import Stalled
from tessera.worker.state.atomic_files import TEMPORARY
from tessera.worker.state.checkpoints import Checkpoints
from tessera.worker.state.privacy_ledger import Ledger
from tessera.worker.task.runner import TaskRunner
from tessera.worker.training.progress import Check, Report
from tests.support.tasks import VIT
from tests.worker.executor.conftest import on_cpus
from tests.worker.executor.test_ends_of_processes import nothing_left, processes
from tests.worker.executor.test_equal_results import Case, divided

KILLED_AT = 3
"""The step after which a process is killed."""
STEPS = 7
"""The second pass over 33 examples has begun."""

pytestmark = pytest.mark.usefixtures("_whole")

PLAIN = Case("fedavg", config={**VIT, "hidden_dropout_prob": 0.1}, training={"steps": STEPS, "optimizer": "adamw"})
ENDLESS = replace(PLAIN, examples=10_000, training={"batch_size": 1, "steps": 1_000_000})
"""A task that does not end before its ranks are killed, however fast they are."""
CASES = {
    "dropout": PLAIN,
    "two phases": Case("ditto", training={"steps": STEPS}),
    "privacy": Case("fedavg", spec={"privacy": {"epsilon": 3.0, "delta": 1e-3, "clip_norm": 1.0}}),
}


class AgentKilled(BaseException):
    """Stands for the end of the agent's process."""


class KilledRunner(TaskRunner):
    """A runner whose group loses a process in the middle of its task, once for each of `kills`."""

    kills: ClassVar[list[Callable[[], None]]] = []

    def run(self, task: Task, check: Check, report: Report) -> None:
        def killing() -> None:
            if report.phase == "training" and report.step >= KILLED_AT and self.kills:
                self.kills.pop()()
            check()

        super().run(task, killing, report)


def final(
    case: Case,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    seconds: float,
    *kills: Callable[[], None],
    ranks: int = 2,
) -> dict[str, bytes]:
    """Return the end of a run whose worker writes a checkpoint at this interval in seconds."""
    KilledRunner.kills = list(kills)
    executor = on_cpus(ranks, folder)
    ledger, vault = Ledger(folder / "ledger"), folder / "checkpoints"
    vault.mkdir(parents=True, exist_ok=True)

    def runner(**given: Any) -> TaskRunner:
        kept: dict[str, Any] = {"checkpoints": Checkpoints(vault), "checkpoint_seconds": seconds}
        return KilledRunner(**given, **kept, ledger=ledger)

    try:
        result = divided(case, executor, monkeypatch, runner)
    finally:
        executor.close()
    assert nothing_left(folder)
    assert [path for path in vault.rglob("*") if path.is_file()] == []
    return {name: values.tobytes() for name, values in result.arrays().items()}


def kill(folder: Path, module: str) -> None:
    # They may be ending already: the agent notices the end of the supervisor alone.
    for process in processes(folder, module)[-1:]:
        process.kill()
    # As of a rank that is killed while it writes a checkpoint.
    for run in (folder / "checkpoints").glob("*/"):
        (run / f"half{TEMPORARY}").touch()


def end_agent() -> None:
    raise AgentKilled


def charges(folder: Path) -> list[str]:
    ledger = Ledger(folder / "ledger")
    entries = [entry for name in ledger.besides([]) for entry in ledger.by_name.read(name)]
    return [event.kind for entry in entries for event in entry.events]


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_a_killed_rank_changes_no_bit(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    undisturbed = final(CASES[case], one, monkeypatch, 1000.0)
    with capture_logs() as logs:
        assert final(CASES[case], two, monkeypatch, 0.0, partial(kill, two, "rank")) == undisturbed
    assert [line["event"] for line in logs].count("executor-restarted") == 1
    assert charges(two) == charges(one)


@pytest.mark.long
@pytest.mark.parametrize("case", ["dropout", "privacy"])
def test_a_killed_supervisor_and_agent_change_no_bit(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    undisturbed = final(CASES[case], one, monkeypatch, 1000.0)
    with pytest.raises(AgentKilled):
        final(CASES[case], two, monkeypatch, 0.0, end_agent, partial(kill, two, "supervisor"))
    assert len(list(two.glob("checkpoints/*/checkpoint-*"))) == 1
    with capture_logs() as logs:
        assert final(CASES[case], two, monkeypatch, 0.0) == undisturbed
    assert "checkpoint-removed" not in [line["event"] for line in logs]
    assert charges(two) == charges(one)


@pytest.mark.long
def test_another_number_of_devices_removes_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AgentKilled):
        final(PLAIN, tmp_path, monkeypatch, 0.0, end_agent)
    with capture_logs() as logs:
        final(PLAIN, tmp_path, monkeypatch, 1000.0, ranks=3)
    assert [line["event"] for line in logs].count("checkpoint-removed") == 1


@pytest.mark.long
def test_a_task_that_ends_its_ranks_before_the_next_checkpoint_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Stalled, match="executor-ended"):
        final(ENDLESS, tmp_path, monkeypatch, 1000.0, *[partial(kill, tmp_path, "rank")] * 3)
