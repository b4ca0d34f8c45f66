"""Private training on images in files, read by loaders and changed at random: one example's influence is bounded."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from tessera.shared.model.selectors import EVERYTHING
from tessera.shared.privacy.noise import NoiseSource
from tessera.worker.data import loaders as module
from tessera.worker.data.dataset import Dataset
from tessera.worker.data.groups import Groups
from tessera.worker.data.loaders import LoaderProcesses
from tessera.worker.data.readers.pictures import PixelReader
from tessera.worker.data.registry import load
from tessera.worker.privacy.dp_sgd import Mechanism, NoisyGradients
from tessera.worker.privacy.pieces import GroupSampling
from tessera.worker.privacy.sampling import sampling
from tessera.worker.training.batches import ReadableBatches
from tessera.worker.training.freeze import Freeze
from tests.support.scans import write_scans
from tests.worker.data.test_loaders import pids
from tests.worker.privacy.test_private_task import difference, gradients_of, images, length, trainer_of, work_on

COUNT = 40
CHANGES = {"horizontal_flip": 0.5, "crop": [0.3, 1.0]}


@pytest.fixture
def scans(tmp_path: Path) -> Path:
    return write_scans(tmp_path / "scans", COUNT, classes=3, shape=(8, 8))


def pictures_of(data: Dataset) -> Any:
    assert data.on_disk
    assert isinstance(data.on_disk.transform, PixelReader)
    return data.on_disk.transform.pictures


def opened(folder: Path, loaders: LoaderProcesses | None = None, **options: Any) -> Dataset:
    given = {"folder": str(folder), "size": 8, "channels": 1, "in_memory": False, **options}
    return load("images", given, loaders=loaders)


def sums(data: Dataset, rows: torch.Tensor, **training: Any) -> list[torch.Tensor]:
    noisy, _ = gradients_of(trainer_of(work_on(), **training), EVERYTHING, data)
    found = noisy.sums(rows)
    noisy.close()
    return found


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("training", "count"),
    [
        pytest.param({}, 2, id="as they are"),
        # Each loader imports for seconds what changes images.
        pytest.param({"augmentation": CHANGES}, 1, id="changed"),
        pytest.param({"augmentation": CHANGES}, 2, marks=pytest.mark.long, id="changed by two"),
    ],
)
def test_samples_read_by_loaders_have_the_bits_of_those_read_by_the_worker(
    scans: Path, processes: LoaderProcesses, training: dict[str, Any], count: int
) -> None:
    processes.count = count
    rows = torch.randperm(COUNT, generator=torch.Generator().manual_seed(1))
    expected = sums(opened(scans), rows, **training)
    assert same(sums(opened(scans, processes), rows, **training), expected)
    assert processes._loader is not None
    assert same(sums(opened(scans, in_memory=True), rows, **training), expected)
    # An empty sample reads nothing.
    assert length(sums(opened(scans, processes), rows[:0], **training)) == 0


def test_image_that_cannot_be_read_any_more_counts_as_zero_with_loaders_too(
    scans: Path, processes: LoaderProcesses
) -> None:
    data, rows = opened(scans, processes), torch.arange(COUNT)
    (scans / "1" / "01.png").unlink()
    gone = next(place for place in range(COUNT) if pictures_of(data)[place].name == "01.png")
    expected = sums(data, rows[rows != gone])
    assert length(expected) > 0.1
    assert difference(sums(data, rows), expected) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("by_loaders", [True, False])
def test_image_that_cannot_be_read_any_more_is_an_empty_batch_of_a_choice(
    scans: Path, processes: LoaderProcesses, by_loaders: bool
) -> None:
    data = opened(scans, processes if by_loaders else None)
    whole = list(ReadableBatches(data, 16, torch.device("cpu")))
    assert [len(batch["labels"]) for batch in whole] == [16, 16, 8]
    gone = pictures_of(data)[20]
    gone.unlink()
    found = list(ReadableBatches(data, 16, torch.device("cpu")))
    # The second batch is read one by one.
    assert [len(batch["labels"]) if batch else 0 for batch in found] == [16, *[1] * 4, 0, *[1] * 11, 8]
    kept = torch.cat([batch["pixel_values"] for batch in found if batch])
    images = torch.cat([batch["pixel_values"] for batch in whole])
    assert torch.equal(kept, images[torch.arange(COUNT) != 20])


def test_groups_read_by_loaders_have_the_bits_of_those_read_by_the_worker(
    scans: Path, processes: LoaderProcesses
) -> None:
    groups = Groups.of([b"%d" % (row % 3) for row in range(COUNT)])
    found = []
    for data in (opened(scans, None), opened(scans, processes)):
        trainer = trainer_of(work_on())
        freeze = Freeze(trainer.context.model, EVERYTHING.resolve(trainer.context.blocks))
        how, dice = Mechanism(sampling(3, 2), 0.5, 1.0), NoiseSource(bytes(32))
        noisy = NoisyGradients(trainer, freeze, data, how, dice, GroupSampling(groups, most=COUNT))
        # The first group fits into a piece, and then none does.
        for held in (COUNT // 3, 2):
            noisy._at_once = held
            found.append(noisy.sums(torch.arange(3)))
        noisy.close()
    assert same(found[0], found[2])
    assert same(found[1], found[3])


def test_loader_that_ends_fails_no_step(scans: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.2)
    processes = LoaderProcesses(1)
    noisy, _ = gradients_of(trainer_of(work_on()), EVERYTHING, opened(scans, processes))
    rows = torch.arange(COUNT)
    expected = noisy.sums(rows)
    for loader in pids(processes):
        os.kill(loader, signal.SIGKILL)
    with capture_logs() as logs:
        found = noisy.sums(rows)
        again = noisy.sums(rows)
    noisy.close()
    processes.close()
    assert same(found, expected)
    assert same(again, expected)
    # A loader that was killed between two steps is replaced; one that ends while it reads is not used again.
    assert {line["event"] for line in logs} <= {"loaders-not-used"}


# ---------------------------------------------------------------- augmentation


def test_one_changed_image_moves_the_sum_by_no_more_than_the_clip_norm() -> None:
    noisy, _ = gradients_of(trainer_of(work_on(), augmentation=CHANGES), EVERYTHING, images(), clip=1.0)
    whole = torch.arange(8)
    together = noisy.sums(whole)
    moved = [difference(together, noisy.sums(whole[whole != row])) for row in range(8)]
    noisy.close()
    assert max(moved) <= 1.0 + 1e-4
    assert max(moved) > 0.1


def test_change_of_an_image_is_the_same_alone_as_in_any_sample_or_part() -> None:
    noisy, _ = gradients_of(trainer_of(work_on(), augmentation=CHANGES), EVERYTHING, images())
    together = noisy.sums(torch.tensor([3, 8, 30]))
    alone = [noisy.sums(torch.tensor([row])) for row in (8, 30, 3)]
    noisy._at_once = 1
    apart = noisy.sums(torch.tensor([3, 8, 30]))
    noisy.close()
    assert difference(together, [sum(each) for each in zip(*alone, strict=True)]) == pytest.approx(0, abs=1e-6)  # type: ignore[misc]
    assert difference(together, apart) == pytest.approx(0, abs=1e-6)


def test_each_step_changes_images_by_a_seed_from_the_secret_noise() -> None:
    noisy, _ = gradients_of(trainer_of(work_on(), augmentation=CHANGES), EVERYTHING, images())
    seeds = []
    for _ in range(2):
        _, drawn = noisy._noise_source.state
        noisy.fill()
        assert noisy._augmentation is not None
        seeds.append(noisy._augmentation.seed)
        # The sample, and then the seed.
        assert noisy._noise_source.state[1] > drawn + len(images().tensors["labels"])
    noisy.close()
    assert seeds[0] != seeds[1]
    assert min(seeds) > 1 << 40


def test_without_changes_no_seed_is_drawn() -> None:
    found = []
    for training in ({}, {"augmentation": {"horizontal_flip": 1.0}}):
        noisy, _ = gradients_of(trainer_of(work_on(), **training), EVERYTHING, images())
        noisy.fill()
        found.append(noisy._noise_source.state[1])
        noisy.close()
    assert found[1] == found[0] + 1
