"""Runs on packed data sets: what trains, and what is refused before any data are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tessera.shared.api.runs import Evaluation, Privacy, Training
from tessera.shared.api.tasks import Task
from tessera.shared.methods.base import MethodSpec
from tessera.shared.model.preprocessing import FileRef, read_files
from tessera.worker.agent import Agent
from tessera.worker.governance.policy import Policy
from tessera.worker.settings import WorkerSettings
from tessera.worker.stores import ledger_of
from tessera.worker.task.heartbeat import Stop
from tests.support.coordinator import LiveCoordinator, until
from tests.support.federation import start_run
from tests.support.pretrained import plain_tokenizer
from tests.support.tasks import untrained

WORDS = ("the", "cat", "dog", "sat", "ran")
LLAMA = {
    "model_type": "llama", "vocab_size": 7, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 8, "max_position_embeddings": 16,
}  # fmt: skip
BERT = {
    "model_type": "bert", "vocab_size": 7, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 8, "is_decoder": True,
}  # fmt: skip


def worked(
    coordinator: LiveCoordinator,
    folder: Path,
    config: dict[str, Any],
    *,
    own: bool = False,
    measures: bool = False,
    policy: Policy = Policy(),  # noqa: B008  (it is frozen)
    **spec: Any,
) -> tuple[Any, WorkerSettings]:
    """The task of a run on six documents, which make four rows, after a worker was given it; with `measures` it
    measures a version."""
    client = coordinator.client()
    files = plain_tokenizer(folder / "plain", WORDS)
    refs = {}
    for name, raw in read_files(files).items():
        refs[name] = FileRef(digest=client.put_bytes(raw), nbytes=len(raw))
    document, start = untrained(config, "causal-lm", seed=0, preprocessing=refs)
    texts = ("the cat sat", "dog ran", "the dog", "cat cat sat the", "ran the dog sat the cat ran", "sat ran")
    (folder / "notes.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    notes = {
        "kind": "text", "file": str(folder / "notes.jsonl"), "head": "causal-lm", "max_length": 8, "pack": True,
        "tokenizer": str(files) if own else "run",
    }  # fmt: skip
    given: dict[str, Any] = {"dataset": "notes", **spec}
    if measures:
        notes["use"] = "evaluate"
        given = {"dataset": "wards", "evaluation": Evaluation(dataset="notes"), **spec}
    settings = WorkerSettings(
        url=coordinator.url, token=coordinator.token("site", "a"), name="w", state_dir=folder / "state", threads=1,
        poll_seconds=5, datasets={"notes": notes}, policy=policy,
    )  # fmt: skip
    agent = Agent(settings, Stop())
    plain = Training(optimizer="sgd", learning_rate=0.1, weight_decay=0.0, batch_size=2)
    start_run(client, document, start, training=plain, **given)
    task: Task = until(agent._next)
    agent._run_task(task)
    agent.close()
    return client.task(task.id), settings


@pytest.mark.parametrize(
    "own", [True, pytest.param(False, marks=pytest.mark.long)], ids=["the site's tokenizer", "the run's"]
)
def test_a_run_counts_rows_as_its_examples(coordinator: LiveCoordinator, tmp_path: Path, *, own: bool) -> None:
    task, _ = worked(coordinator, tmp_path, LLAMA, own=own)
    assert task.problem is None
    assert task.examples == 4


def test_documents_are_measured_one_by_one_where_one_example_moves_a_figure_by_a_step(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    policy = Policy(figures="rounded", min_evaluation_examples=1)
    task, _ = worked(coordinator, tmp_path, LLAMA, own=True, measures=True, policy=policy)
    assert (task.kind, task.problem, task.examples) == ("evaluate", None, 6)
    assert set(task.metrics) == {"accuracy", "loss"}


@pytest.mark.parametrize(
    ("config", "spec", "said"),
    [
        (LLAMA, {"method": MethodSpec(name="moon")}, "trains by the method moon, which compares or measures rows"),
        (LLAMA, {"privacy": Privacy(clip_norm=1.0, epsilon=8.0, delta=1e-2)}, "trains under differential privacy"),
        (BERT, {}, "the model lets a document see the others of its row"),
    ],
    ids=["moon", "privacy", "bert"],
)
def test_what_needs_a_row_for_each_text_is_refused_before_data_are_read(
    coordinator: LiveCoordinator, tmp_path: Path, config: dict[str, Any], spec: dict[str, Any], said: str
) -> None:
    task, settings = worked(coordinator, tmp_path, config, own=True, **spec)
    assert task.problem is not None
    assert task.problem.detail.startswith("packed-texts: the data set 'notes' is packed (pack = true), and ")
    assert said in task.problem.detail
    assert "pack = false" in task.problem.remedy
    assert ledger_of(settings).read("notes") == ()
