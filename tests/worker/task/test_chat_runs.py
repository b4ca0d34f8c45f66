"""Runs on chats: with the template of the run's model, with adapters over HTTP, and under differential privacy."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import Training
from tessera.shared.methods.base import MethodSpec, Plan
from tessera.shared.model.preprocessing import FileRef, read_files
from tessera.shared.model.spec import Lora
from tessera.simulation import Weights, simulate
from tessera.worker.agent import Agent
from tessera.worker.data.dataset import Dataset
from tessera.worker.data.registry import load
from tessera.worker.errors import DataError, TaskFailure
from tessera.worker.model.block_map import block_table
from tessera.worker.model.build import instantiate
from tessera.worker.model.sandbox import Sandbox
from tessera.worker.privacy.bounded_figures import BoundedSums, bounded_sums
from tessera.worker.settings import WorkerSettings
from tessera.worker.task.heartbeat import Stop
from tessera.worker.training.context import LocalTaskContext
from tessera.worker.training.ranks import OneRank
from tests.support.chat_templates import CHATML, TEMPLATES, chat_tokenizer
from tests.support.coordinator import LiveCoordinator, until
from tests.support.federation import start_run
from tests.support.tasks import untrained
from tests.worker.task.test_run_tokenizer import tokens

LLAMA = {
    "model_type": "llama", "vocab_size": 400, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 16, "max_position_embeddings": 64,
}  # fmt: skip
PAIRS = [("the dose?", "100 mg"), ("a day?", "yes, a day"), ("thank you", "thank you"), ("who?", ""), ("what?", "no")]


def file(folder: Path, pairs: list[tuple[str, str]] = PAIRS) -> str:
    folder.mkdir(exist_ok=True)
    rows = [json.dumps({"instruction": asked, "output": answer}) for asked, answer in pairs]
    (folder / "chats.jsonl").write_text("\n".join(rows))
    return str(folder / "chats.jsonl")


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_run_s_template_makes_the_tokens_that_it_makes_of_a_site(tmp_path: Path, name: str) -> None:
    own = chat_tokenizer(tmp_path / "own", TEMPLATES[name])
    options = {"file": file(tmp_path), "max_length": 40}
    site, run = (load("chat", {**options, "tokenizer": tokenizer}) for tokenizer in (str(own), "run"))
    assert run.report.unanswered == [3]
    made = tokens(tmp_path, run, read_files(own), embeddings=400, sandbox=Sandbox())
    assert made.examples == site.examples == 4
    for tensor in ("input_ids", "labels"):
        assert torch.equal(made.tensors[tensor], site.tensors[tensor])
    assert made.report.shown == site.report.shown


def test_a_run_s_hostile_template_fails_the_task_without_a_word_of_the_chats(tmp_path: Path) -> None:
    own = chat_tokenizer(tmp_path / "own", "{{ raise_exception(messages[0].content) }}")
    dataset = load("chat", {"file": file(tmp_path, [("secretword", "a")]), "tokenizer": "run"})
    with pytest.raises(TaskFailure, match="cannot convert the texts of this site") as refused:
        tokens(tmp_path, dataset, read_files(own), embeddings=400, sandbox=Sandbox())
    assert refused.value.code == "tokenizer-mismatch"
    assert "secretword" not in str(refused.value)
    cause = refused.value.__context__
    assert isinstance(cause, DataError)
    assert "secretword" in str(cause)


def test_no_template_changes_the_number_of_examples_of_rounded_figures(tmp_path: Path) -> None:
    """This one cuts off the answers of chats with a certain word."""
    template = "{% if 'day' in messages[0].content %}" + "the dose " * 40 + "{% endif %}" + CHATML
    files = read_files(chat_tokenizer(tmp_path / "own", template))
    dataset = load("chat", {"file": file(tmp_path), "tokenizer": "run", "max_length": 40})
    cut, whole = (tokens(tmp_path, dataset, files, embeddings=400, rounds=rounds) for rounds in (False, True))
    assert (cut.examples, whole.examples) == (3, 4)
    assert cut.report.cut_answers == whole.report.cut_answers == [1]
    model = instantiate(LLAMA, "causal-lm", seed=0)
    context = LocalTaskContext(model, "causal-lm", Plan(), block_table(model))
    of_cut, of_whole = (
        bounded_sums(context, each, torch.device("cpu"), lambda: None, OneRank()) for each in (cut, whole)
    )
    # The cut one is wrong, with the largest loss.
    assert (of_cut.misses, of_whole.misses) == (0, 1)
    assert isinstance(of_cut, BoundedSums)
    assert isinstance(of_whole, BoundedSums)
    assert torch.equal(of_cut.right_and_loss, of_whole.right_and_loss)
    every = load("chat", {"file": file(tmp_path, PAIRS[1:2]), "tokenizer": "run", "max_length": 40})
    assert tokens(tmp_path, every, files, embeddings=400, rounds=True).examples == 1


def test_a_run_without_a_chat_template_is_named_with_its_remedy(tmp_path: Path) -> None:
    files = read_files(chat_tokenizer(tmp_path / "own", None))
    with pytest.raises(TaskFailure, match="no chat template, which the chats of this site need") as refused:
        tokens(tmp_path, load("chat", {"file": file(tmp_path), "tokenizer": "run"}), files, embeddings=400)
    assert refused.value.code == "no-chat-template"
    texts = tmp_path / "texts.csv"
    texts.write_text("prompt,completion\na,b\n")
    plain = load("chat", {"file": str(texts), "tokenizer": "run"})
    assert tokens(tmp_path, plain, files, embeddings=400).examples == 1


def test_two_sites_train_adapters_on_chats(coordinator: LiveCoordinator, tmp_path: Path) -> None:
    client = coordinator.client()
    files = read_files(chat_tokenizer(tmp_path / "own", CHATML))
    refs = {name: FileRef(digest=client.put_bytes(raw), nbytes=len(raw)) for name, raw in files.items()}
    document, start = untrained(LLAMA, "causal-lm", preprocessing=refs, lora=Lora(rank=2, alpha=4))
    stops, threads = [], []
    for site in ("a", "b"):
        notes = {"kind": "chat", "file": file(tmp_path / site), "tokenizer": "run", "max_length": 40}
        settings = WorkerSettings(
            url=coordinator.url, token=coordinator.token("site", site), name=f"worker-{site}", threads=1,
            state_dir=tmp_path / site / "state", poll_seconds=5, datasets={"notes": notes},
        )  # fmt: skip
        stops.append(Stop())
        threads.append(threading.Thread(target=Agent(settings, stops[-1]).run))
        threads[-1].start()
    plain = Training(optimizer="sgd", learning_rate=0.5, weight_decay=0.0, batch_size=2, epochs=2)
    run = start_run(
        client, document, start, dataset="notes", training=plain, method=MethodSpec(name="lora"),
        cohort=Cohort(size=2, quorum=2),
    )  # fmt: skip
    try:
        until(lambda: client.run(run.id).state != "running")
    finally:
        for stop, thread in zip(stops, threads, strict=True):
            stop.request()
            thread.join()
    assert client.run(run.id).state == "completed"
    # The row without an answer is no example.
    tasks = [task for made in client.rounds(run.id) for task in made.tasks]
    found = [(task.state, task.problem, task.examples) for task in tasks]
    assert found == [("merged", None, 4)] * 2
    first, last = (client.manifest(version.digest).blocks for version in client.versions(run.id))
    changed = {name for name in first if first[name] != last[name]}
    # The method `lora` trains the head too.
    assert {block.role for block in document.blocks if block.name in changed} == {"adapter", "head"}


def private(dataset: Dataset, clip_norm: float) -> dict[str, np.ndarray]:
    weights = Weights.of(instantiate(LLAMA, "causal-lm", seed=0), LLAMA, "causal-lm")
    spec = {
        "method": {"name": "fedavg"}, "rounds": 1, "training": {"batch_size": 4, "steps": 1, "optimizer": "sgd"},
        "privacy": {"epsilon": 8.0, "delta": 1e-2, "clip_norm": clip_norm},
    }  # fmt: skip
    result = simulate(spec, weights, {"a": dataset})
    (task,) = (task for made in result.rounds for task in made.tasks)
    assert task.state == "merged"
    assert task.metrics["epsilon"] > 0
    return {name: values - weights.values[name] for name, values in result.arrays().items()}


def test_chats_train_under_privacy_with_the_site_s_own_tokenizer(tmp_path: Path) -> None:
    own = str(chat_tokenizer(tmp_path / "own", CHATML))
    dataset = load("chat", {"file": file(tmp_path), "tokenizer": own, "max_length": 40})
    small, large = (private(dataset, clip_norm) for clip_norm in (1e-3, 1e-2))
    # The noise, and what is left of gradients, grow with the bound.
    norms = [np.sqrt(sum(np.square(each).sum() for each in change.values())) for change in (small, large)]
    assert 0 < norms[0] < norms[1]
    # No shape tells how long the longest chat is.
    assert {tuple(tensor.shape[1:]) for tensor in dataset.padded().tensors.values()} == {(40,)}
