"""Runs that protect groups of examples, over HTTP: what is reported, and what is refused before any data are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tessera.shared.api.runs import Privacy, Training
from tessera.shared.api.tasks import Task, TaskView
from tessera.worker.agent import Agent
from tessera.worker.settings import WorkerSettings
from tessera.worker.stores import ledger_of
from tessera.worker.task.heartbeat import Stop
from tests.support.coordinator import LiveCoordinator, until
from tests.support.federation import start_run
from tests.support.pretrained import plain_tokenizer
from tests.support.tasks import untrained
from tests.worker.task.test_packed_runs import LLAMA, WORDS

PATIENTS = ["ann", "bob", "ann", "cid", "ann", "bob"]
GROUPS = Privacy(clip_norm=1.0, epsilon=8.0, delta=1e-2, unit="group", max_per_group=2)


def agent_of(
    coordinator: LiveCoordinator, folder: Path, patients: list[Any] = PATIENTS, *, named: bool = True, **more: Any
) -> tuple[Agent, WorkerSettings]:
    """A worker with a text of each patient."""
    rows = [{"text": " ".join(WORDS[: 2 + number % 3]), "patient": name} for number, name in enumerate(patients)]
    (folder / "notes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    notes = {
        "kind": "text", "file": str(folder / "notes.jsonl"), "head": "causal-lm", "max_length": 8,
        "tokenizer": str(plain_tokenizer(folder / "plain", WORDS)), **({"group": "patient"} if named else {}),
    }  # fmt: skip
    settings = WorkerSettings(
        url=coordinator.url, token=coordinator.token("site", "a"), name="w", state_dir=folder / "state", threads=1,
        poll_seconds=5, datasets={"notes": notes}, **more,
    )  # fmt: skip
    return Agent(settings, Stop()), settings


def worked(coordinator: LiveCoordinator, agent: Agent, privacy: Privacy = GROUPS) -> TaskView:
    """The task of a run, after the worker was given it."""
    document, start = untrained(LLAMA, "causal-lm", seed=0)
    plain = Training(optimizer="sgd", learning_rate=0.1, weight_decay=0.0, batch_size=2)
    client = coordinator.client()
    start_run(client, document, start, dataset="notes", training=plain, privacy=privacy)
    task: Task = until(agent._next)
    agent._run_task(task)
    agent.close()
    return client.task(task.id)


def test_a_run_of_groups_reports_their_number_and_their_epsilon(coordinator: LiveCoordinator, tmp_path: Path) -> None:
    agent, settings = agent_of(coordinator, tmp_path)
    assert agent._claim.datasets == {"notes": 6}
    task = worked(coordinator, agent)
    assert (task.problem, task.examples) == (None, 3)
    assert 0 < task.metrics["epsilon"] <= 8.0
    (entry,) = ledger_of(settings).read("notes")
    assert (entry.unit, entry.examples) == ("group", 3)
    # Three groups, two a step: two steps.
    assert [(event.sampling_rate, event.steps) for event in entry.events] == [(2 / 3, 2)]


def test_a_worker_whose_site_requires_groups_declares_their_number(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    budget = {"epsilon": 20.0, "delta": 1e-2, "unit": "group"}
    agent, _ = agent_of(coordinator, tmp_path, privacy=budget)
    assert agent._claim.datasets == {"notes": 3}
    task = worked(coordinator, agent)
    assert (task.problem, task.examples) == (None, 3)


@pytest.mark.parametrize(
    ("patients", "named", "said"),
    [(PATIENTS, False, "no example has a group"), ([*PATIENTS, ""], True, "not every example has a group")],
    ids=["no column", "an empty cell"],
)
def test_a_data_set_without_groups_is_refused_before_data_are_read(
    coordinator: LiveCoordinator, tmp_path: Path, patients: list[Any], named: bool, said: str
) -> None:
    agent, settings = agent_of(coordinator, tmp_path, patients, named=named)
    task = worked(coordinator, agent)
    assert task.problem is not None
    assert task.problem.detail == (
        f"policy-violation: group: the run protects groups of examples (privacy.unit), and in 'notes' {said}"
    )
    assert ledger_of(settings).read("notes") == ()
