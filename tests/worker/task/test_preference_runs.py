"""Runs that learn preferences over HTTP: in each round they compare with the run's first version."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.coordinator.operations.remerge import remerge
from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import Evaluation, Run, RunSpec, Training
from tessera.shared.client.client import Client
from tessera.shared.methods.base import REFERENCE, MethodSpec, State
from tessera.shared.model.preprocessing import FileRef, read_files
from tessera.shared.model.spec import Lora
from tessera.shared.problems import Invalid
from tessera.shared.rounds.planning import begun
from tessera.shared.tensors.lazy import ArrayTensor, Tensor, from_bytes
from tessera.simulation import Weights
from tessera.worker.agent import Agent
from tessera.worker.data.dataset import Dataset
from tessera.worker.settings import WorkerSettings
from tessera.worker.task.heartbeat import Stop
from tests.support.coordinator import LiveCoordinator, until
from tests.support.federation import ScriptedWorker, start_run
from tests.support.task_document import NO_DIGEST
from tests.support.tasks import untrained
from tests.worker.executor.test_equal_results import distance
from tests.worker.executor.test_preferences_in_ranks import (
    BETA,
    LLAMA,
    LORA,
    PAIRS,
    RATE,
    ROUNDS,
    STEPS,
    built,
    moved,
    pairs,
    trained,
    values_of,
)

TRAINING = Training(
    loss="dpo", dpo_beta=BETA, optimizer="sgd", learning_rate=RATE, weight_decay=0.0, batch_size=None, steps=STEPS
)
SITES = {"a": PAIRS, "b": PAIRS[:3]}
Values = Mapping[str, np.ndarray]


@contextmanager
def working(coordinator: LiveCoordinator, folder: Path, site: str) -> Iterator[None]:
    chats = {"kind": "chat", "file": str(folder / site / "pairs.jsonl"), "tokenizer": "run", "max_length": 64}
    settings = WorkerSettings(
        url=coordinator.url, token=coordinator.token("site", site), name=f"worker-{site}", threads=1,
        state_dir=folder / site / "state", poll_seconds=5, datasets={"pairs": chats},
    )  # fmt: skip
    stop = Stop()
    thread = threading.Thread(target=Agent(settings, stop).run)
    thread.start()
    try:
        yield
    finally:
        stop.request()
        thread.join()


def started(client: Client, folder: Path, *, zero: bool, **spec: Any) -> tuple[Run, Weights]:
    files = read_files(folder / "a" / "tokenizer")
    refs = {name: FileRef(digest=client.put_bytes(raw), nbytes=len(raw)) for name, raw in files.items()}
    document, values = untrained(LLAMA, "causal-lm", seed=1, preprocessing=refs, lora=LORA)
    start = Weights(document, values)
    start = start if zero else moved(start)
    given = {"dataset": "pairs", "training": TRAINING, "rounds": ROUNDS, "codec": "raw", **spec}
    return start_run(client, document, start.values, **given), start


def own(start: Weights, values: Values, dataset: Dataset) -> dict[str, np.ndarray]:
    """The blocks after a site's steps, by a plain loop whose reference is the start."""
    model = built(Weights(start.model, values))
    trained(model, built(start), dataset)
    return values_of(model)


def mean(start: Weights, values: Values, data: Mapping[str, Dataset], sites: Sequence[str]) -> dict[str, np.ndarray]:
    """The next version."""
    each = [own(start, values, data[site]) for site in sites]
    sizes = [len(SITES[site]) for site in sites]
    found = {name: np.average([values[name] for values in each], axis=0, weights=sizes) for name in values}
    return {name: values.astype(np.float32) for name, values in found.items()}


@pytest.fixture
def data(tmp_path: Path) -> dict[str, Dataset]:
    for site in SITES:
        (tmp_path / site).mkdir()
    return {site: pairs(tmp_path / site, answers) for site, answers in SITES.items()}


def require_equal(client: Client, run: Run, expected: Values, start: Weights) -> None:
    """The run's last version is the expected one."""
    blobs = client.manifest(list(client.versions(run.id))[-1].digest).blocks
    found = {
        block.name: from_bytes(client.read_blob(blobs[block.name]), block.dtype).reshape(block.shape)
        for block in start.model.blocks
    }
    assert distance(found, expected) < 1e-5 * distance(expected, start.values)


def test_two_sites_compare_with_the_base_in_each_round(
    coordinator: LiveCoordinator, tmp_path: Path, data: dict[str, Dataset]
) -> None:
    client = coordinator.client()
    with working(coordinator, tmp_path, "a"), working(coordinator, tmp_path, "b"):
        run, start = started(client, tmp_path, zero=True, cohort=Cohort(size=2, quorum=2))
        until(lambda: client.run(run.id).state != "running")
    assert client.run(run.id).state == "completed"
    assert [task.problem for made in client.rounds(run.id) for task in made.tasks] == [None] * 2 * ROUNDS
    expected: Values = start.values
    other: Values = start.values
    for _ in range(ROUNDS):
        expected = mean(start, expected, data, ("a", "b"))
        # As if each round's start were its reference.
        other = mean(Weights(start.model, other), other, data, ("a", "b"))
    # Ten times the difference that is allowed below.
    assert distance(other, expected) > 1e-4 * distance(expected, start.values)
    require_equal(client, run, expected, start)
    # Nothing is stored of adapters that are zero.
    assert not any(client.manifest(version.digest).server_state for version in client.versions(run.id))


def test_a_site_that_joins_later_compares_with_the_first_version_too(
    coordinator: LiveCoordinator, tmp_path: Path, data: dict[str, Dataset]
) -> None:
    client = coordinator.client()
    plain = ScriptedWorker(coordinator.client("site", "a"), "worker-a", datasets={"pairs": len(PAIRS)}).enrol()
    run, start = started(client, tmp_path, zero=False, cohort=Cohort(quorum=1), keep_updates="run")
    expected: Values = start.values
    task = plain.take()
    with working(coordinator, tmp_path, "b"):
        until(lambda: len(list(client.workers())) == 2)
        for number in range(1, ROUNDS + 1):
            assert task.round == number
            mine = own(start, plain.fetch(task), data["a"])
            plain.submit(task, plain.upload(task, {name: mine[name] for name in mine if "lora_" in name}))
            expected = mean(start, expected, data, ("a",) if number == 1 else ("a", "b"))
            if number < ROUNDS:
                task = plain.take()
        until(lambda: client.run(run.id).state != "running")
    merged = [sorted(task.worker for task in made.tasks if task.state == "merged") for made in client.rounds(run.id)]
    assert sorted(merged) == [["a/worker-a"], *[["a/worker-a", "b/worker-b"]] * (ROUNDS - 1)]
    require_equal(client, run, expected, start)
    first, *later = (client.manifest(version.digest) for version in client.versions(run.id))
    kept = {name: entry.digest for name, entry in first.server_state.items()}
    assert kept == {REFERENCE + name: digest for name, digest in first.blocks.items() if "lora_" in name}
    # Merged again without the second site, the run keeps the reference of its first version.
    again = remerge(coordinator.services, run.id, "b").digests
    for manifest in (*later, *map(client.manifest, again)):
        assert {name: entry.digest for name, entry in manifest.server_state.items()} == kept


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"training": {"full_fine_tuning": True}}, "trains the base"),
    ({"training": {"label_smoothing": 0.1}}, "changes a loss of labels"),
    ({"method": MethodSpec(name="lora", settings={"average": "residual"})}, "changes the base"),
    ({"method": MethodSpec(name="lora", settings={"train_head": True})}, "frozen by training.loss"),
    ({"method": MethodSpec(name="moon")}, "compares or measures rows of one text each"),
    # The version would be its own reference.
    ({"rounds": 0, "evaluation": Evaluation(sites=True)}, "set rounds to 1 or more"),
    ({"evaluation": Evaluation(sites=True, max_new_tokens=4)}, "scores generated answers"),
    ({"training": {"loss": None, "dpo_beta": 0.2}}, "set loss to"),
]


def test_a_run_without_the_base_as_its_reference_is_refused(
    coordinator: LiveCoordinator, tmp_path: Path, data: dict[str, Dataset]
) -> None:
    client = coordinator.client()
    for spec, said in REFUSED:
        given = dict(spec)
        if changed := given.pop("training", None):
            given["training"] = Training.model_validate({**TRAINING.model_dump(), **changed})
        with pytest.raises(Invalid) as refused:
            started(client, tmp_path, zero=True, **given)
        assert said in " ".join(fault.detail for fault in refused.value.errors), said


def test_adapters_of_several_ranks_begin_with_zero(coordinator: LiveCoordinator) -> None:
    client, mixed = coordinator.client(), Lora(rank=4, alpha=4, ranks=(2, 4))
    document, values = untrained(LLAMA, "causal-lm", lora=mixed)
    given = {"dataset": "pairs", "training": TRAINING, "method": MethodSpec(name="lora")}
    assert start_run(client, document, values, **given).state == "running"
    with pytest.raises(Invalid) as refused:
        start_run(client, document, moved(Weights(document, values)).values, **given)
    assert "create the model with one rank" in refused.value.errors[0].detail


def spec_of(method: str) -> RunSpec:
    return RunSpec(
        name="pairs", model=NO_DIGEST, version=NO_DIGEST, rounds=ROUNDS, dataset="pairs", training=TRAINING,
        method=MethodSpec(name=method),
    )  # fmt: skip


def test_a_run_from_another_run_s_version_has_a_new_reference() -> None:
    document, values = untrained(LLAMA, "causal-lm", lora=LORA)
    first = moved(Weights(document, values))
    last = moved(first)

    def tensors(weights: Weights) -> dict[str, Tensor]:
        return {name: ArrayTensor(each) for name, each in weights.values.items()}

    # The last version of a run that began with `first`.
    kept = {REFERENCE + name: each for name, each in tensors(first).items() if "lora_" in name}
    given = State(0, tensors(last), kept)
    spec = spec_of("fedavg")
    found = begun(spec, document, given).server_state
    assert found == {REFERENCE + name: each for name, each in given.model.items() if "lora_" in name}
    plain = spec.model_copy(update={"training": Training()})
    zero = State(0, tensors(Weights(document, values)), kept)
    assert not begun(plain, document, given).server_state
    assert not begun(spec, document, zero).server_state


def test_the_remedy_of_a_method_that_trains_the_head_alone_can_be_followed() -> None:
    document, values = untrained(LLAMA, "causal-lm", lora=LORA)
    state = State(0, {name: ArrayTensor(each) for name, each in values.items()})
    spec = spec_of("fedper")
    with pytest.raises(Invalid) as refused:
        begun(spec, document, state)
    assert "or leave out training.loss" in refused.value.errors[0].detail
    begun(spec.model_copy(update={"training": Training()}), document, state)


def test_a_training_without_preferences_has_the_same_digest_as_before() -> None:
    assert not {"loss", "dpo_beta"} & Training().model_dump(mode="json").keys()
