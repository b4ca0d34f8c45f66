"""Each baseline over real HTTP: two agents, two rounds, and the bytes that crossed."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import cos, pi
from pathlib import Path
from typing import Any

import pytest

from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import Round, Training
from tessera.shared.api.versions import Manifest
from tessera.shared.methods.base import MethodSpec
from tessera.shared.model.spec import Model
from tessera.shared.updates.safetensors_file import read_header
from tessera.worker.agent import Agent
from tessera.worker.settings import WorkerSettings
from tessera.worker.task import fetch
from tessera.worker.task.heartbeat import Stop
from tests.support.chain_rows import audit_in
from tests.support.coordinator import LiveCoordinator, until
from tests.support.federation import start_run
from tests.support.tasks import DIGITS_VIT, untrained

VIT = {**DIGITS_VIT, "hidden_size": 64, "intermediate_size": 64}
HEAD = {"classifier.weight", "classifier.bias"}
HEADERS = 20_000
"""More bytes than headers and manifests take, and far fewer than the model."""


@dataclass(frozen=True)
class Finished:
    """A run that was completed: its model, its versions, its rounds, and what site a has kept."""

    model: Model
    manifests: list[Manifest]
    rounds: list[Round]
    vault: set[str]
    left: list[Mapping[str, Any]]
    """What the audit of site a says of the updates that left, oldest first."""


@pytest.fixture(autouse=True)
def _blocks_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not made out of differences, so that bytes are those of the blocks."""
    monkeypatch.setattr(fetch, "MIN_DIFFERENCE_BYTES", 1 << 40)


@dataclass(frozen=True)
class Field:
    coordinator: LiveCoordinator
    folder: Path

    def run(
        self, method: str, settings: dict[str, Any] | None = None, *, sends: bool = True, **training: Any
    ) -> Finished:
        document, start = untrained(VIT, "image-classification", seed=1)
        plain = Training.model_validate(
            {"optimizer": "sgd", "learning_rate": 0.1, "weight_decay": 0.0, "batch_size": 64, **training}
        )
        client = self.coordinator.client()
        run = start_run(
            client,
            document,
            start,
            method=MethodSpec(name=method, settings=settings or {}),
            dataset="digits",
            rounds=2,
            training=plain,
            cohort=Cohort(size=2, quorum=2, max_attempts=1, max_task_attempts=1),
            # Uncompressed, so that bytes are those of the blocks.
            **({"codec": "raw"} if sends else {}),
        )
        until(lambda: client.run(run.id).state != "running", seconds=60)
        assert client.run(run.id).state == "completed", client.run(run.id).reason
        path = self.folder / "a" / "vault" / run.id / "current.safetensors"
        kept = set()
        if path.exists():
            with path.open("rb") as file:
                kept = set(read_header(file, path.stat().st_size).entries)
        manifests = [client.manifest(version.digest) for version in client.versions(run.id)]
        entries = [entry for entry in audit_in(self.folder / "a").read() if entry.run == run.id]
        left = [entry.detail for entry in entries if entry.action == "update.leave"]
        return Finished(document, manifests, list(client.rounds(run.id)), kept, left)


@pytest.fixture(scope="module")
def field(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Field]:
    """A coordinator, and agents of the sites a and b with an eighth of the digits each."""
    folder = tmp_path_factory.mktemp("field")
    with LiveCoordinator(folder) as coordinator:
        stops, threads = [Stop(), Stop()], []
        for index, site in enumerate("ab"):
            digits = {"kind": "digits", "part": {"scheme": "iid", "count": 8, "index": index}}
            settings = WorkerSettings(
                url=coordinator.url, token=coordinator.token("site", site), name="w", state_dir=folder / site,
                datasets={"digits": digits}, threads=1, poll_seconds=1,
            )  # fmt: skip
            threads.append(threading.Thread(target=Agent(settings, stops[index]).run))
        for thread in threads:
            thread.start()
        yield Field(coordinator, folder)
        for stop, thread in zip(stops, threads, strict=True):
            stop.request()
            thread.join()


def prefixed(prefix: str, model: Model) -> set[str]:
    return {prefix + name for name in model.by_name}


def test_scaffold_sends_one_model_up_and_fetches_two(field: Field) -> None:
    done = field.run("scaffold")
    nbytes = done.model.nbytes
    assert nbytes > 5 * HEADERS
    assert set(done.manifests[1].server_state) == {"members"} | prefixed("control/", done.model)
    assert done.vault == prefixed("control/", done.model)
    for number, round_ in enumerate(done.rounds):
        for task in round_.tasks:
            assert nbytes < task.upload_bytes < nbytes + HEADERS
            if number == 1:
                assert 2 * nbytes < task.download_bytes < 2 * nbytes + HEADERS
            assert task.metrics["steps"] >= 1


def test_feddyn_sends_and_fetches_one_model(field: Field) -> None:
    done = field.run("feddyn", {"alpha": 0.1}, optimizer="adamw", learning_rate=1e-3)
    assert set(done.manifests[1].server_state) == {"members"} | prefixed("gradient/", done.model)
    assert done.vault == prefixed("gradient/", done.model)
    for task in done.rounds[1].tasks:
        assert task.upload_bytes < done.model.nbytes + HEADERS
        assert task.download_bytes < done.model.nbytes + HEADERS


@pytest.mark.parametrize(
    ("method", "prefix"), [pytest.param("moon", "previous/", marks=pytest.mark.long), ("ditto", "own/")]
)
def test_what_a_site_keeps_for_itself_is_not_sent(field: Field, method: str, prefix: str) -> None:
    done = field.run(method)
    assert done.vault == prefixed(prefix, done.model)
    assert all(task.upload_bytes < done.model.nbytes + HEADERS for round_ in done.rounds for task in round_.tasks)
    assert done.manifests[-1].server_state == {}


def test_fednova_tells_how_much_work_is_behind_an_update(field: Field) -> None:
    done = field.run("fednova", epochs=2)
    assert all(task.metrics["effective_steps"] >= 2 for task in done.rounds[0].tasks)
    assert done.vault == set()


@pytest.mark.parametrize("method", [pytest.param("scaffold", marks=pytest.mark.long), "fednova"])
def test_a_round_of_steps_follows_the_schedule(field: Field, method: str) -> None:
    done = field.run(method, steps=3, schedule="cosine", warmup=0.25)
    # A warm-up over a quarter of six steps: 1/6 and 2/6 of the run are 2/3 of the rate and all of it; then it falls.
    falling = [cos(pi / 2 * (step / 6 - 0.25) / 0.75) ** 2 for step in range(2, 6)]
    effective = {1: 2 / 3 + 1 + falling[0], 2: sum(falling[1:])}
    for round_ in done.rounds:
        for task in round_.tasks:
            expected = {
                "scaffold": {"steps": 3.0},
                "fednova": {"effective_steps": pytest.approx(effective[round_.number])},
            }
            assert expected[method].items() <= task.metrics.items()


# `test_personal_methods` shows the same of the methods' halves alone.
@pytest.mark.long
def test_fedbabu_s_head_keeps_its_digest(field: Field) -> None:
    done = field.run("fedbabu")
    same = {name for name, digest in done.manifests[0].blocks.items() if done.manifests[-1].blocks[name] == digest}
    assert same == HEAD


@pytest.mark.long
def test_fedbn_s_norms_keep_their_digests_and_stay_in_the_vault(field: Field) -> None:
    done = field.run("fedbn")
    norms = {block.name for block in done.model.blocks if block.role == "norm"}
    same = {name for name, digest in done.manifests[0].blocks.items() if done.manifests[-1].blocks[name] == digest}
    assert same == norms == done.vault


def test_local_sends_no_block_and_moves_no_version(field: Field) -> None:
    done = field.run("local", sends=False)
    assert all(manifest == done.manifests[0] for manifest in done.manifests)
    assert all(task.upload_bytes < 200 for round_ in done.rounds for task in round_.tasks)
    assert done.vault == set(done.model.by_name)
    # From the second round on there is nothing to fetch either.
    assert all(task.download_bytes == 0 for task in done.rounds[1].tasks)


def test_fedproto_sends_prototypes_alone_and_none_of_few_examples(field: Field) -> None:
    done = field.run("fedproto", {"lam": 0.1}, sends=False)
    first, *_, last = done.manifests
    assert last.blocks == first.blocks
    assert last.server_state["prototypes"].digest != first.server_state["prototypes"].digest
    assert done.vault == set(done.model.by_name)
    # 10 x 64 and 10 values of four bytes, and a header.
    arrays = 4 * (10 * 64 + 10)
    for round_ in done.rounds:
        assert all(0 < task.upload_bytes < arrays + 500 for task in round_.tasks)
    assert all(task.download_bytes < arrays + HEADERS for task in done.rounds[1].tasks)
    for detail in done.left:
        assert detail["blocks"] == 2
        assert detail["sent"] == "no blocks and the arrays extra/prototypes, extra/counts"
        # Of an eighth of the digits, some classes have fewer than 20 examples.
        assert detail["withheld"]["extra/prototypes"] == detail["withheld"]["extra/counts"] > 0
    assert not any("withheld" in name for round_ in done.rounds for task in round_.tasks for name in task.metrics)
