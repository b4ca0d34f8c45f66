"""Who holds a version gets the next one as their difference."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sqlalchemy import select

from tessera.coordinator.blobs import version_diffs
from tessera.coordinator.db.tables import BlobRow, DifferenceRow
from tessera.shared.api.runs import Run, Training
from tessera.shared.client.client import Client
from tessera.shared.methods.base import MethodSpec
from tessera.shared.tensors.lazy import ArrayTensor, to_array
from tessera.shared.updates.codecs.pipeline import LOSSLESS, RAW
from tessera.shared.updates.update_file import read_update, write_update
from tessera.worker.state.blob_cache import Cache
from tessera.worker.state.vault import Vault
from tessera.worker.task import fetch
from tessera.worker.task.runner import TaskRunner
from tessera.worker.training.progress import Report
from tessera.worker.training.setup import TrainingSetup
from tests.simulation.test_simulation import images
from tests.support.coordinator import LiveCoordinator, refusing, until
from tests.support.federation import ScriptedWorker, difference_of, small_model, start_run, values
from tests.support.runner import task_runner
from tests.support.tasks import CPU, VIT, untrained

MODEL = small_model(64)
WIDE = {**VIT, "hidden_size": 64, "intermediate_size": 256}


def committed(coordinator: LiveCoordinator, rounds: int, **spec: Any) -> tuple[Run, Client]:
    """A run of so many rounds that are over, and the client of the site that took part."""
    client, site = coordinator.client(), coordinator.client("site", "a")
    worker = ScriptedWorker(site).enrol()
    run = start_run(client, MODEL, values(MODEL), rounds=rounds, **spec)
    for _ in range(rounds):
        worker.train(worker.take(), step=1e-3)
    until(lambda: client.run(run.id).state == "completed")
    return client.run(run.id), site


def manifests(client: Client, run: Run) -> list[Any]:
    return [client.manifest(version.digest) for version in client.versions(run.id)]


def test_the_difference_makes_the_later_version_of_the_earlier_one_bit_for_bit(coordinator: LiveCoordinator) -> None:
    run, site = committed(coordinator, 2)
    client = coordinator.client()
    found = difference_of(site, run.id, 2, 0)
    assert found is not None
    data = site.read_blob(found.digest)
    first, _, last = manifests(client, run)
    start = values(MODEL)
    tensors = read_update(
        lambda: io.BytesIO(data), len(data), MODEL.by_name, {name: ArrayTensor(v) for name, v in start.items()}
    )
    assert set(tensors) == set(last.changed(first)) == set(MODEL.by_name)
    for name, tensor in tensors.items():
        assert to_array(tensor).tobytes() == client.read_blob(last.blocks[name])
    assert found.nbytes == len(data) < 0.75 * MODEL.nbytes


@pytest.mark.parametrize(("since", "at_most"), [(1, 0.3), (0, 0.75)])
def test_versions_with_rounded_steps_differ_in_8_bits_from_the_ones_before(
    coordinator: LiveCoordinator, since: int, at_most: float
) -> None:
    run, site = committed(coordinator, 2, download_codec="int8")
    client = coordinator.client()
    found = difference_of(site, run.id, 2, since)
    assert found is not None
    data, documents = site.read_blob(found.digest), manifests(client, run)
    base = {name: ArrayTensor(block_at(client, documents[since], name)) for name in MODEL.by_name}
    tensors = read_update(lambda: io.BytesIO(data), len(data), MODEL.by_name, base)
    for name, tensor in tensors.items():
        assert to_array(tensor).tobytes() == client.read_blob(documents[2].blocks[name])
    assert len(data) < at_most * MODEL.nbytes


def block_at(client: Client, manifest: Any, name: str) -> Any:
    return np.frombuffer(client.read_blob(manifest.blocks[name]), np.float32).reshape(MODEL.by_name[name].shape)


def test_its_bytes_come_at_once_and_in_parts_where_they_are_asked_for(one_round: tuple[Run, Client]) -> None:
    run, site = one_round
    found = difference_of(site, run.id, 1, 0)
    assert found
    data, file = site.read_blob(found.digest), io.BytesIO()
    assert site.copy_difference(run.id, 1, 0, file, found.nbytes + 1)
    assert file.getvalue() == data
    rest = io.BytesIO(data[:7])
    rest.seek(7)
    assert site.copy_difference(run.id, 1, 0, rest, found.nbytes + 1)
    assert rest.getvalue() == data
    assert not site.copy_difference(run.id, 1, 0, io.BytesIO(), found.nbytes)
    assert not site.copy_difference(run.id, 2, 0, io.BytesIO(), found.nbytes + 1)


@pytest.fixture(scope="module")
def one_round(standing: LiveCoordinator) -> tuple[Run, Client]:
    """A run of one round on the module's coordinator, for tests that change nothing."""
    return committed(standing, 1)


def test_a_viewer_has_no_difference_computed(coordinator: LiveCoordinator) -> None:
    run, _ = committed(coordinator, 1)
    with refusing("forbidden"):
        coordinator.client("viewer").copy_difference(run.id, 1, 0, io.BytesIO(), 1 << 20)
    with refusing("forbidden"):
        difference_of(coordinator.client("viewer"), run.id, 1, 0)
    with coordinator.services.database.snapshot() as session:
        assert session.scalars(select(DifferenceRow)).all() == []


def test_differences_of_a_run_do_not_fill_the_disk(coordinator: LiveCoordinator) -> None:
    run, site = committed(coordinator, 4)

    def stored() -> dict[str, int]:
        with coordinator.services.database.snapshot() as session:
            return dict(session.execute(select(BlobRow.digest, BlobRow.size)).all())

    before = stored().keys()
    for number, since in [(4, 3), *((n, s) for n in range(1, 5) for s in range(n))]:
        found = difference_of(site, run.id, number, since)
        # One that is dropped is computed again.
        assert found
        assert len(site.read_blob(found.digest)) == found.nbytes
        made = {digest: size for digest, size in stored().items() if digest not in before}
        assert 0 < sum(made.values()) <= version_diffs.KEPT_MODELS * MODEL.nbytes
    # The ones that workers need most are still there.
    assert found.digest in made
    assert difference_of(site, run.id, 4, 3).digest in made  # type: ignore[union-attr]


def test_no_difference_is_computed_on_a_full_disk(coordinator: LiveCoordinator) -> None:
    run, site = committed(coordinator, 1)
    coordinator.services.disk._reserve_bytes = 1 << 60
    # The worker fetches the blocks instead.
    assert difference_of(site, run.id, 1, 0) is None


def test_however_many_ask_it_is_made_once(coordinator: LiveCoordinator) -> None:
    run, site = committed(coordinator, 1)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: difference_of(site, run.id, 1, 0), range(8)))
    assert len({one.digest for one in found if one}) == 1
    with coordinator.services.database.snapshot() as session:
        assert len(session.scalars(select(DifferenceRow)).all()) == 1


def test_one_whose_versions_retire_while_it_is_made_is_not_stored(
    coordinator: LiveCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, site = committed(coordinator, 3)
    retention = replace(coordinator.services.retention, versions=1)

    def overtaken(*arguments: Any) -> Any:
        assert retention.collect().versions == 2
        return write_update(*arguments)

    monkeypatch.setattr(version_diffs, "write_update", overtaken)
    assert not site.copy_difference(run.id, 2, 1, io.BytesIO(), 1 << 20)
    with coordinator.services.database.snapshot() as session:
        assert session.scalars(select(DifferenceRow)).all() == []


@pytest.mark.parametrize(("number", "since"), [(1, 1), (1, 2), (2, 1), (100, 1)])
def test_there_is_none_of_versions_that_are_not_there_or_too_far_apart(
    one_round: tuple[Run, Client], number: int, since: int
) -> None:
    run, site = one_round
    assert difference_of(site, run.id, number, since) is None


def test_another_site_sees_none(standing: LiveCoordinator, one_round: tuple[Run, Client]) -> None:
    run, site = one_round
    found = difference_of(site, run.id, 1, 0)
    other = standing.client("site", "b")
    assert found
    assert difference_of(other, run.id, 1, 0) is None
    assert not other.copy_difference(run.id, 1, 0, io.BytesIO(), found.nbytes + 1)
    with refusing("not-found"):
        other.read_blob(found.digest)


# ---------------------------------------------------------------- at a worker


def runner_and_run(coordinator: LiveCoordinator, folder: Path, **spec: Any) -> tuple[TaskRunner, ScriptedWorker, Run]:
    worker = ScriptedWorker(coordinator.client("site", "a"), datasets={"data": 16})
    cache = Cache(folder / "cache", 1 << 24)
    runner = task_runner(
        worker.client, {"data": images(0)}, TrainingSetup(CPU), Vault(folder / "vault"), cache, folder
    )
    worker.enrol()
    document, start = untrained(WIDE, "image-classification", seed=0)
    training = Training(optimizer="sgd", momentum=0, learning_rate=0.01, batch_size=8)
    client = coordinator.client()
    return (
        runner,
        worker,
        start_run(client, document, start, rounds=2, method=MethodSpec(name="fedavg"), training=training, **spec),
    )


def do(runner: TaskRunner, worker: ScriptedWorker) -> int:
    """Does the next task; the bytes that were fetched for it."""
    report = Report()
    runner.run(worker.take(), lambda: None, report)
    return report.download_bytes


@pytest.fixture
def _however_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "MIN_DIFFERENCE_BYTES", 1)


@pytest.mark.usefixtures("_however_small")
@pytest.mark.parametrize(("codec", "at_most"), [("lossless", 0.85), ("int8", 0.4)])
def test_a_worker_makes_what_it_can_and_comes_to_the_same(
    coordinator: LiveCoordinator, tmp_path: Path, codec: str, at_most: float
) -> None:
    torch.set_num_threads(1)
    client = coordinator.client()
    made = []
    for sent in (RAW, LOSSLESS):
        runner, worker, run = runner_and_run(coordinator, tmp_path / sent, codec=sent, download_codec=codec)
        fetched = [do(runner, worker) for _ in range(2)]
        until(lambda run=run: client.run(run.id).state == "completed")
        made.append((client.run(run.id).version.digest, fetched))
    (same, whole), (digest, differences) = made
    assert digest == same
    assert whole[0] == differences[0]
    manifest = len(client.read_blob(same))
    for difference, blocks in zip(differences[1:], whole[1:], strict=True):
        assert difference - manifest < at_most * (blocks - manifest)


@pytest.mark.usefixtures("_however_small")
@pytest.mark.parametrize("spoils", ["bytes", pytest.param("absent", marks=pytest.mark.long)])
def test_a_difference_that_is_of_no_use_is_done_without(
    coordinator: LiveCoordinator, tmp_path: Path, spoils: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = coordinator.client()
    runner, worker, run = runner_and_run(coordinator, tmp_path)
    do(runner, worker)

    def spoilt(run_id: str, number: int, since: int, file: Any, *_: Any) -> bool:
        if spoils == "bytes":
            client.copy_blob(next(iter(client.versions(run_id))).digest, file)
        return spoils == "bytes"

    monkeypatch.setattr(worker.client, "copy_difference", spoilt)
    do(runner, worker)
    until(lambda: client.run(run.id).state == "completed")
