"""Runs whose versions answer questions, at sites and at a central evaluator, over HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import Evaluation, Measurement, Training
from tessera.shared.metrics.site_spread import spreads
from tessera.shared.model.preprocessing import FileRef, read_files
from tessera.worker.agent import Agent
from tessera.worker.data.dataset import Dataset
from tessera.worker.data.partition.division import key_of_seed
from tessera.worker.data.registry import load
from tessera.worker.governance.policy import Policy
from tessera.worker.model.build import instantiate
from tessera.worker.settings import WorkerSettings
from tessera.worker.task.heartbeat import Stop
from tests.support.chat_templates import CHATML, chat_tokenizer
from tests.support.coordinator import LiveCoordinator, until
from tests.support.federation import start_run
from tests.support.tasks import untrained
from tests.worker.scores.test_answers import LLAMA, scores

SIZES = {"a": 12, "b": 30}


def questions(folder: Path, count: int) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    rows = [{"question": f"is {n} odd?", "choices": ["yes", "no"], "answer": 1 - n % 2} for n in range(count)]
    (folder / "asked.jsonl").write_text("\n".join(map(json.dumps, rows)))
    # A packed row has several questions, so answers are scored without packing.
    return {"file": str(folder / "asked.jsonl"), "tokenizer": "run", "max_length": 64, "pack": True}


@contextmanager
def working(coordinator: LiveCoordinator, folder: Path, policy: Policy) -> Iterator[None]:
    """Two sites that hold questions out, and one with a central test set."""
    key = folder / "held-out.key"
    key.write_text(key_of_seed(0).hex())
    stops, threads = [], []
    for site in ("a", "b", "exam"):
        chats = {"kind": "chat", **questions(folder / site, SIZES.get(site, 20))}
        used = {"exam": {**chats, "use": "evaluate"}} if site == "exam" else {"asked": {**chats, "held_out": 0.5}}
        settings = WorkerSettings(
            url=coordinator.url, token=coordinator.token("site", site), name=f"worker-{site}", threads=1,
            state_dir=folder / site / "state", poll_seconds=5, datasets=used, held_out_key_file=key, policy=policy,
        )  # fmt: skip
        stops.append(Stop())
        threads.append(threading.Thread(target=Agent(settings, stops[-1]).run))
        threads[-1].start()
    try:
        yield
    finally:
        for stop, thread in zip(stops, threads, strict=True):
            stop.request()
            thread.join()


def measurements(
    coordinator: LiveCoordinator, folder: Path, policy: Policy, evaluation: Evaluation
) -> dict[str, Measurement]:
    """What each site measures of the version before training."""
    client = coordinator.client()
    files = read_files(chat_tokenizer(folder / "own", CHATML))
    refs = {name: FileRef(digest=client.put_bytes(raw), nbytes=len(raw)) for name, raw in files.items()}
    document, start = untrained(LLAMA, "causal-lm", seed=3, preprocessing=refs)
    with working(coordinator, folder, policy):
        run = start_run(
            client, document, start, dataset="asked", rounds=1, cohort=Cohort(size=2, quorum=2),
            training=Training(optimizer="sgd", learning_rate=0.5, batch_size=4), evaluation=evaluation,
        )  # fmt: skip
        until(lambda: client.run(run.id).state != "running")
    assert client.run(run.id).state == "completed"
    return {found.site: found for found in client.measurements(run.id) if found.version == 0}


def held_out(folder: Path, site: str) -> Dataset:
    given = {**questions(folder / site, SIZES[site]), "tokenizer": str(folder / "own"), "pack": False}
    dataset = load("chat", given, held_out=0.5, key=key_of_seed(0)).held_out
    assert dataset is not None
    return dataset


def test_sites_and_a_central_evaluator_score_answers(coordinator: LiveCoordinator, tmp_path: Path) -> None:
    evaluation = Evaluation(sites=True, dataset="exam", max_new_tokens=4)
    found = measurements(coordinator, tmp_path, Policy(min_evaluation_examples=2), evaluation)
    assert sorted(found) == ["a", "b", "exam"]
    model = instantiate(LLAMA, "causal-lm", seed=3)
    right = {}
    for site in SIZES:
        questions_held = held_out(tmp_path, site)
        expected = scores(questions_held, model, max_new_tokens=4)
        right[site] = expected["choice_accuracy"] * questions_held.examples
        one = found[site]
        assert one.examples == questions_held.examples
        assert one.metrics["choice_accuracy"] == pytest.approx(right[site] / one.examples, abs=5e-4)
        for name in ("exact_match", "rouge_l"):
            assert one.metrics[name] == pytest.approx(expected[name], abs=5e-4)
        # The same chats have several tokens of answers each.
        assert one.labels > one.examples
        assert one.metrics["answer_log_likelihood"] == pytest.approx(
            -one.metrics["loss"] * one.labels / one.examples, rel=5e-3
        )
    # Each question counts alike, not each token.
    over = spreads(found.values())[0]["choice_accuracy"]
    assert over.weighted_mean == pytest.approx(
        sum(right.values()) / sum(found[site].examples for site in SIZES), abs=1e-3
    )
    assert 0 <= found["exam"].metrics["choice_accuracy"] <= 1
    assert found["exam"].examples == 20
