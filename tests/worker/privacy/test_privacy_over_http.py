"""Privacy over real HTTP: what leaves, what is refused and told, and what the site writes down."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tessera.coordinator.db import snapshots
from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import Evaluation, Run, Training
from tessera.shared.api.tasks import TaskView
from tessera.shared.client.client import Client
from tessera.shared.methods.base import MethodSpec
from tessera.shared.run_settings import Privacy
from tessera.worker.agent import Agent
from tessera.worker.governance.policy import Policy
from tessera.worker.privacy.account import PrivacyAccount
from tessera.worker.privacy.accountant import epsilon
from tessera.worker.privacy.private_task import PrivateTask
from tessera.worker.settings import WorkerSettings
from tessera.worker.state.privacy_ledger import NoisySteps
from tessera.worker.task.heartbeat import Stop
from tests.support.chain_rows import ledger_in
from tests.support.cli import process
from tests.support.coordinator import LiveCoordinator, until
from tests.support.datafiles import eighth_of_digits, key_file
from tests.support.federation import start_run
from tests.support.in_process import in_process
from tests.support.tasks import DIGITS_VIT, untrained

VIT = {**DIGITS_VIT, "num_hidden_layers": 2}
PRIVACY = Privacy(epsilon=4.0, delta=1e-5, clip_norm=1.0)


@contextmanager
def site(
    coordinator: LiveCoordinator,
    folder: Path,
    *,
    executes: bool = False,
    name: str = "a",
    resources: dict[str, float] | None = None,
    **source: Any,
) -> Iterator[None]:
    """A worker with an eighth of the digits, held under a name of its own. It may execute its tasks itself."""
    digits = eighth_of_digits(folder / "data", held_out=0.2) if "part" not in source else {"kind": "digits"}
    settings = WorkerSettings(
        url=coordinator.url, token=coordinator.token("site", name), name="w", state_dir=folder / name,
        datasets={"digits": {**digits, **source}}, threads=1, poll_seconds=1,
        resources=resources or {}, held_out_key_file=key_file(folder / "data"),
    )  # fmt: skip
    stop = Stop()
    agent = Agent(settings, stop, executor=in_process(settings) if executes else None)
    thread = threading.Thread(target=agent.run)
    thread.start()
    try:
        yield
    finally:
        stop.request()
        thread.join()


def ended(client: Client, **spec: Any) -> Run:
    document, start = untrained(VIT, "image-classification", seed=1)
    given = {
        "dataset": "digits", "rounds": 2, "training": Training(batch_size=32, learning_rate=0.01),
        "cohort": Cohort(size=1, max_attempts=1, max_task_attempts=1),
    }  # fmt: skip
    run = start_run(client, document, start, **{**given, **spec})
    until(lambda: client.run(run.id).state != "running", seconds=60)
    return client.run(run.id)


def tasks_of(client: Client, run: Run) -> list[TaskView]:
    return [task for round_ in client.rounds(run.id) for task in round_.tasks]


@pytest.mark.usefixtures("fine_grid")
def test_a_private_run_keeps_its_target_and_tells_nothing_but_steps(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    client = coordinator.client()
    with site(coordinator, tmp_path, privacy={"epsilon": 4.3, "delta": 1e-5}):
        run = ended(client, privacy=PRIVACY, method=MethodSpec(name="fednova"))
        assert run.state == "completed", run.reason
        first, second = tasks_of(client, run)
        # 147 of the 180 images train, in 5 steps an epoch. The norm is what the coordinator makes of the update.
        for task in (first, second):
            assert set(task.metrics) == {"effective_steps", "epsilon", "update_norm"}
            assert task.metrics["effective_steps"] == 5.0
        entries = ledger_in(tmp_path / "a").read("digits")
        assert [(entry.run, entry.round, entry.examples) for entry in entries] == [(run.id, 1, 147), (run.id, 2, 147)]
        events = [event for entry in entries for event in entry.events]
        assert [event.steps for event in events if isinstance(event, NoisySteps)] == [5, 5]
        assert 0.98 * 4.0 < epsilon(events, 1e-5) <= 4.0
        assert 0 < first.metrics["epsilon"] < second.metrics["epsilon"] == epsilon(events, 1e-5)
        # Nothing of the budget is left for another run.
        refused = ended(client, name="again", privacy=PRIVACY)
        assert refused.state != "completed"
        (task,) = tasks_of(client, refused)
        assert task.problem
        assert task.problem.detail.startswith("policy-violation: privacy: this task would bring")
        assert "the site allows 4.3" in task.problem.detail
        (prospect,) = client.preview_run(refused.spec).workers
        assert [said.rule for said in prospect.warnings] == ["privacy"]
        assert "of runs before" in prospect.warnings[0].detail
        assert ledger_in(tmp_path / "a").read("digits") == entries


@pytest.mark.parametrize("lies", [False, True])
def test_a_capped_run_spends_its_epsilon_in_as_many_trainings_and_the_site_does_no_more(
    coordinator: LiveCoordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lies: bool
) -> None:
    if lies:
        monkeypatch.setattr(snapshots, "sites_done", lambda *_: set())
    client = coordinator.client()
    cohort = Cohort(mode="buffer", max_updates_per_site=2, max_attempts=1, max_task_attempts=1)
    with site(coordinator, tmp_path):
        run = ended(client, privacy=PRIVACY, rounds=9, cohort=cohort)
        entries = ledger_in(tmp_path / "a").read("digits")
    assert (run.state, run.version.number) == ("paused", 2)
    events = [event for entry in entries for event in entry.events]
    assert [entry.round for entry in entries] == [1, 2]
    # All of the target: the noise is for two trainings, and not for nine.
    assert 0.95 * PRIVACY.epsilon < epsilon(events, PRIVACY.delta) <= PRIVACY.epsilon
    refused = [task.problem.detail for task in tasks_of(client, run) if task.problem]
    if lies:
        assert "max_updates_per_site: " in refused[0]
    else:
        assert not refused
        assert "as many as cohort.max_updates_per_site allows" in (run.reason or "")


@pytest.mark.long
@pytest.mark.usefixtures("fine_grid")
def test_of_fitted_work_the_ledger_has_the_steps_of_the_plan(coordinator: LiveCoordinator, tmp_path: Path) -> None:
    client, planned = coordinator.client(), {"a": 8, "b": 4}
    with (
        site(coordinator, tmp_path, resources={"seconds_per_step": 1.0}),
        site(coordinator, tmp_path, name="b", resources={"seconds_per_step": 2.0}),
    ):
        run = ended(client, privacy=PRIVACY, cohort=Cohort(size=2, quorum=2, max_attempts=1, work="fitted"))
    assert run.state == "completed", run.reason
    tasks = tasks_of(client, run)
    # Both have 5 steps an epoch, and declare 5 s and 10 s for it: 7.5 s are 8 and 4 steps, whatever the time was.
    assert [(task.worker, task.metrics["effective_steps"]) for task in tasks] == [("a/w", 8.0), ("b/w", 4.0)] * 2
    for name, steps in planned.items():
        events = [event for entry in ledger_in(tmp_path / name).read("digits") for event in entry.events]
        assert [event.steps for event in events if isinstance(event, NoisySteps)] == [steps] * 2
        assert 0.98 * 4.0 < epsilon(events, 1e-5) <= 4.0


def test_a_run_without_privacy_may_not_train_on_data_that_have_a_budget(
    coordinator: LiveCoordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As a coordinator has it that does not heed what it is shown.
    monkeypatch.setattr(Policy, "advertised_policy", lambda *_: None)
    client = coordinator.client()
    with site(coordinator, tmp_path, privacy={"epsilon": 4.0, "delta": 1e-5}):
        run = ended(client)
    (task,) = tasks_of(client, run)
    assert run.state != "completed"
    assert task.problem
    expected = "privacy: the data set 'digits' has a budget, but the run has no differential privacy"
    assert expected in task.problem.detail
    assert ledger_in(tmp_path / "a").read("digits") == ()


def test_a_worker_without_what_privacy_needs_says_what_to_install(
    coordinator: LiveCoordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tessera.worker.privacy.account", None)
    client = coordinator.client()
    with site(coordinator, tmp_path):
        run = ended(client, privacy=PRIVACY)
    (task,) = tasks_of(client, run)
    assert task.problem
    assert "pip install 'tessera-fl[privacy]'" in task.problem.detail


LOADED = """
import sys, tessera.worker.agent, tessera.worker.cli.worker
print(set(sys.argv[1:]) & set(sys.modules))
import tessera.worker.data.registry
tessera.worker.data.registry.load("digits", {})
print("datasets" in sys.modules)
"""


@pytest.mark.long
def test_a_worker_does_not_load_what_only_some_tasks_or_other_kinds_of_data_need() -> None:
    """Nor libraries that a model loads with transformers. Forked processes have both."""
    some = ("opacus", "dp_accounting", "peft", "datasets", "sklearn", "pandas")
    assert process(LOADED, *some, command=(sys.executable, "-c")).stdout == "set()\nFalse\n"


@pytest.mark.parametrize("allowed", [False, True])
def test_a_data_set_with_a_budget_is_measured_only_if_its_site_says_so(
    coordinator: LiveCoordinator, tmp_path: Path, allowed: bool
) -> None:
    client = coordinator.client()
    with site(coordinator, tmp_path, privacy={"epsilon": 4.3, "delta": 1e-5, "evaluations": allowed}):
        run = ended(client, rounds=1, privacy=PRIVACY, evaluation=Evaluation(sites=True))
        assert run.state == "completed", run.reason
        measured = list(client.measurements(run.id))
        assert bool(measured) == allowed


def test_a_private_run_does_not_train_on_a_part_that_depends_on_all_examples(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    client = coordinator.client()
    with site(coordinator, tmp_path, part={"scheme": "iid", "count": 8, "index": 0}):
        run = ended(client, privacy=PRIVACY)
    (task,) = tasks_of(client, run)
    assert task.problem
    assert "policy-violation: part: 'digits' is one part of a partition" in task.problem.detail
    assert ledger_in(tmp_path / "a").read("digits") == ()


def test_safl_chooses_by_noisy_sums_that_are_paid_for(coordinator: LiveCoordinator, tmp_path: Path) -> None:
    client = coordinator.client()
    privacy = PRIVACY.model_copy(update={"selection": "noisy"})
    with site(coordinator, tmp_path):
        run = ended(client, privacy=privacy, method=MethodSpec(name="safl", settings={"layers": 1}))
        assert run.state == "completed", run.reason
    kinds = [event.kind for entry in ledger_in(tmp_path / "a").read("digits") for event in entry.events]
    assert kinds == ["noisy-choice", "noisy-steps"] * 2
    events = [event for entry in ledger_in(tmp_path / "a").read("digits") for event in entry.events]
    assert epsilon(events, 1e-5) <= 4.0
    assert all("score" not in name for task in tasks_of(client, run) for name in task.metrics)


def test_the_noise_is_removed_before_anything_leaves(
    coordinator: LiveCoordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, vault = coordinator.client(), tmp_path / "a" / "vault"
    begun: list[int] = []
    leaving: list[int] = []

    def checkpoints() -> int:
        return len(list(vault.glob("*/checkpoint-*")))

    phase, leave = PrivateTask.phase, PrivacyAccount.leave
    monkeypatch.setattr(PrivateTask, "phase", lambda *given: begun.append(checkpoints()) or phase(*given))
    monkeypatch.setattr(PrivacyAccount, "leave", lambda own: leaving.append(checkpoints()) or leave(own))
    with site(coordinator, tmp_path, executes=True):
        run = ended(client, privacy=PRIVACY, rounds=1)
    assert run.state == "completed"
    # The first checkpoint is written with the charge, before the first step.
    assert (begun, leaving) == ([1], [0])
