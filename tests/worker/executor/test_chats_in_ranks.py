"""Chats train as a plain loop does on the same rows: in one process, in pieces of a batch, and on two ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from tessera.shared.api.runs import Training
from tessera.shared.model.preprocessing import FileRef, read_files
from tessera.worker.agent import Agent
from tessera.worker.data.dataset import Dataset
from tessera.worker.data.registry import load
from tessera.worker.executor.executor import ProcessExecutor
from tessera.worker.model.block_map import block_table, named_tensors
from tessera.worker.model.build import instantiate, read_block
from tessera.worker.model.forward import IGNORED
from tessera.worker.settings import WorkerSettings
from tessera.worker.task.heartbeat import Stop
from tests.support.chat_templates import CHATML, chat_tokenizer
from tests.support.coordinator import LiveCoordinator, until
from tests.support.federation import exported, start_run
from tests.support.tasks import untrained
from tests.worker.executor.test_equal_results import Case, distance, divided, model_of

LLAMA = {
    "model_type": "llama", "vocab_size": 400, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 16, "max_position_embeddings": 64,
}  # fmt: skip
RATE, STEPS = 0.05, 3
ANSWERS = ("100 mg", "a day, doctor", "the dose of aspirin is 100 mg a day", "yes", "no")


def chats(folder: Path) -> Dataset:
    """Five chats whose answers have different numbers of tokens."""
    rows = [{"prompt": [{"role": "user", "content": "what?"}], "completion": [{"role": "assistant", "content": text}]}
            for text in ANSWERS]  # fmt: skip
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return load("chat", {
        "file": str(folder / "chats.jsonl"), "tokenizer": str(chat_tokenizer(folder / "tokenizer", CHATML)),
        "max_length": 64,
    })  # fmt: skip


def trained(dataset: Dataset) -> dict[str, np.ndarray]:
    """The blocks after steps over all rows, each chat by itself without padding."""
    model = instantiate(LLAMA, "causal-lm", seed=1)
    every = [dataset.tensors[name] for name in ("input_ids", "labels", "attention_mask")]
    for _ in range(STEPS):
        model.zero_grad()
        losses = []
        for row, marks, mask in zip(*every, strict=True):
            ids, labels = row[mask == 1], marks[mask == 1]
            places = (labels != IGNORED).nonzero().flatten()
            logits = model(input_ids=ids[None]).logits[0]
            losses.append(cross_entropy(logits[places - 1], ids[places], reduction="none"))
        torch.cat(losses).mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(RATE * parameter.grad)
    tensors = named_tensors(model)
    return {block.name: read_block(tensors, block) for block in block_table(model)}


@pytest.mark.parametrize("pieces", [{}, {"micro_batch": 2}], ids=["whole", "in pieces"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_chats_train_as_in_a_plain_loop(
    tmp_path: Path, executor: ProcessExecutor, monkeypatch: pytest.MonkeyPatch, ranks: int, pieces: dict[str, Any]
) -> None:
    dataset = chats(tmp_path)
    training = {"batch_size": None, "steps": STEPS, "learning_rate": RATE, "weight_decay": 0.0}
    case = Case("fedavg", config=LLAMA, head="causal-lm", data=lambda _: replace(dataset), training=training)
    # Ranks keep the size of a run's pieces, and simulated runs have one name.
    executor.close()
    found = divided(case, executor if ranks == 2 else None, monkeypatch, **pieces).arrays()
    expected, start = trained(dataset), model_of(LLAMA, "causal-lm").values
    assert distance(found, expected) < 1e-5 * distance(expected, start)


def test_two_ranks_train_on_chats_with_the_template_of_the_run(coordinator: LiveCoordinator, tmp_path: Path) -> None:
    client, dataset = coordinator.client(), chats(tmp_path)
    files = read_files(tmp_path / "tokenizer")
    refs = {name: FileRef(digest=client.put_bytes(raw), nbytes=len(raw)) for name, raw in files.items()}
    document, start = untrained(LLAMA, "causal-lm", seed=1, preprocessing=refs)
    notes = {"kind": "chat", "file": str(tmp_path / "chats.jsonl"), "tokenizer": "run", "max_length": 64}
    settings = WorkerSettings(
        url=coordinator.url, token=coordinator.token("site", "a"), name="w", state_dir=tmp_path / "state", threads=1,
        device="cpu", devices=2, poll_seconds=5, datasets={"notes": notes},
    )  # fmt: skip
    plain = Training(optimizer="sgd", learning_rate=RATE, weight_decay=0.0, batch_size=8, steps=STEPS)
    run, agent = start_run(client, document, start, dataset="notes", training=plain), Agent(settings, Stop())
    try:
        agent._run_task(until(agent._next))
        until(lambda: client.run(run.id).state == "completed")
    finally:
        agent.close()
    (task,) = (task for made in client.rounds(run.id) for task in made.tasks)
    assert (task.state, task.examples) == ("merged", len(ANSWERS))
    expected = trained(dataset)
    assert distance(exported(client, run), expected) < 1e-5 * distance(expected, start)
