"""Augmentation: each image is changed by itself, alike however it is read, and in training alone."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CLIPImageProcessorPil

from tessera.shared.run_settings import Augmentation
from tessera.worker.data.augmentation import SeededAugmentation
from tessera.worker.data.dataset import Dataset
from tessera.worker.data.image_transforms import OPERATIONS, transform
from tessera.worker.data.loaders import LoaderProcesses
from tessera.worker.data.registry import load
from tessera.worker.training.batches import Batches
from tests.support.scans import write_scans

CPU = torch.device("cpu")
COUNT = 11
EVERYTHING = Augmentation(
    crop=(0.3, 1.0), crop_padding=1, horizontal_flip=0.5, vertical_flip=0.5, brightness=0.3, contrast=0.3,
    saturation=0.3, hue=0.1, rand_augment=2,
)  # fmt: skip


def ramp(channels: int = 3, height: int = 6, width: int = 8) -> torch.Tensor:
    """An image of which no two pixels are alike, float32 [1, channels, height, width]."""
    count = channels * height * width
    return torch.arange(count, dtype=torch.float32).reshape(1, channels, height, width) / (count - 1)


def changed(image: torch.Tensor, seed: int = 1, **settings: Any) -> torch.Tensor:
    return transform(image, Augmentation.model_validate(settings), [seed])


# ---------------------------------------------------------------- each change


def test_flips_mirror_each_axis_with_their_probability() -> None:
    image = ramp()
    assert torch.equal(changed(image, horizontal_flip=1), image.flip(-1))
    assert torch.equal(changed(image, vertical_flip=1), image.flip(-2))
    found = transform(image.expand(400, -1, -1, -1), Augmentation(horizontal_flip=0.25), range(400))
    share = sum(torch.equal(each, image[0].flip(-1)) for each in found) / 400
    # Of 400 draws with a probability of 1/4, the standard deviation is 0.022.
    assert 0.15 < share < 0.35


def test_crop_of_the_whole_is_the_image_and_a_smaller_one_is_a_part_of_it_enlarged() -> None:
    image = ramp(1, 8, 8)
    assert torch.equal(changed(image, crop=[1.0, 1.0], crop_aspect=[1.0, 1.0]), image)
    # A quarter of the area has four rows, of eight that are 8 / 63 apart.
    part = changed(image, crop=[0.25, 0.25], crop_aspect=[1.0, 1.0])
    assert part.shape == image.shape
    assert float(part.max() - part.min()) == pytest.approx((3 * 8 + 3) / 63, abs=0.02)
    # No part of such an aspect has this area, so it is one from the middle.
    assert changed(image, crop=[1.0, 1.0], crop_aspect=[3.0, 3.0]).shape == image.shape


def test_padding_moves_the_image_and_leaves_black_at_its_edge() -> None:
    image = torch.ones(1, 1, 5, 5)
    found = torch.stack([changed(image, seed, crop_padding=2) for seed in range(40)])
    sums = found.flatten(1).sum(dim=1)
    # Moved by at most two rows and columns, of which none, some or most of the image is left.
    assert {9.0, 25.0} <= set(sums.tolist()) <= {9.0, 12.0, 15.0, 16.0, 20.0, 25.0}


def test_colours_change_within_their_limits() -> None:
    image = torch.full((1, 3, 2, 2), 0.5)
    image[:, 0] = 0.6
    bright = torch.stack([changed(image, seed, brightness=0.2)[0, 0, 0, 0] for seed in range(50)])
    assert 0.48 <= float(bright.min()) < 0.53 < 0.67 < float(bright.max()) <= 0.72 + 1e-6
    grey = changed(image, saturation=1, contrast=0)
    assert torch.allclose(grey.mean(dim=1, keepdim=True), grey, atol=0.2)
    assert torch.equal(changed(ramp(1), saturation=1, hue=0.5), ramp(1))
    assert not torch.equal(changed(ramp(), hue=0.5), ramp())
    assert torch.allclose(changed(ramp(), contrast=1).mean(dim=(-1, -2)).mean(), torch.tensor(0.5), atol=0.1)


@pytest.mark.parametrize("channels", [1, 3])
def test_every_operation_of_randaugment_keeps_shape_and_range(channels: int) -> None:
    image = ramp(channels)
    different = 0
    for place in range(len(OPERATIONS)):
        for strength in (0.0, 0.3, 1.0):
            for seed in (0, 1):
                # Of one operation, so that its number decides what is drawn.
                found = OPERATIONS[place](image, strength, np_random(seed))
                assert found.shape == image.shape
                assert 0 <= float(found.min()) <= float(found.max()) <= 1 + 1e-6
                different += not torch.allclose(found, image, atol=1e-3)
    assert different > len(OPERATIONS)


def np_random(seed: int) -> Any:
    import random  # noqa: PLC0415

    return random.Random(seed)


def test_same_seed_changes_an_image_alike_whatever_else_is_in_the_batch_and_for_any_number_of_threads() -> None:
    images = torch.rand(4, 3, 64, 300, generator=torch.Generator().manual_seed(2))
    seeds = [3, 9, 3, 4]
    together = transform(images, EVERYTHING, seeds)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        for place, seed in enumerate(seeds):
            assert torch.equal(transform(images[place : place + 1], EVERYTHING, [seed])[0], together[place])
    finally:
        torch.set_num_threads(threads)
    assert not torch.equal(transform(images[:1], EVERYTHING, [9])[0], together[0])


# ---------------------------------------------------------------- however the data are read


@pytest.fixture
def scans(tmp_path: Path) -> Path:
    return write_scans(tmp_path / "scans", COUNT)


def opened(folder: Path, loaders: LoaderProcesses | None = None, **options: Any) -> Dataset:
    size = {} if "processor" in options else {"size": 8, "mean": [0.4, 0.5, 0.3], "std": [0.2, 0.3, 0.25]}
    return load("images", {"folder": str(folder), "in_memory": False, **size, **options}, loaders=loaders)


def pixels(dataset: Dataset, size: int = 4, seed: int = 7, *, number: int = 0, skip: int = 0) -> list[torch.Tensor]:
    changes = SeededAugmentation(EVERYTHING, seed)
    batches = Batches(dataset, size, CPU, torch.Generator().manual_seed(3), augmentation=changes)
    return [batch["pixel_values"] for batch in batches.of_pass(0, number, skip)]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# Each loader imports for seconds what changes images.
@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.long)])
def test_augmented_pixels_are_the_same_in_memory_by_a_thread_and_by_loaders(
    scans: Path, processes: LoaderProcesses, tmp_path: Path, count: int
) -> None:
    CLIPImageProcessorPil(
        size={"height": 8, "width": 8}, do_center_crop=False, image_mean=[0.4, 0.5, 0.3], image_std=[0.2, 0.3, 0.25]
    ).save_pretrained(tmp_path / "clip")
    state = torch.random.get_rng_state()
    for options in ({}, {"processor": str(tmp_path / "clip")}):
        kept = pixels(opened(scans, in_memory=True, **options))
        assert same(kept, pixels(opened(scans, **options)))
        assert not same(kept, pixels(opened(scans, **options), number=1))
        assert not same(kept, pixels(opened(scans, **options), seed=8))
        assert same(kept[1:], pixels(opened(scans, **options), skip=1))
    processes.count = count
    assert same(pixels(opened(scans)), pixels(opened(scans, processes)))
    assert torch.equal(torch.random.get_rng_state(), state)


def test_processor_and_size_give_the_same_augmented_pixels_of_the_same_numbers(scans: Path, tmp_path: Path) -> None:
    CLIPImageProcessorPil(
        size={"height": 8, "width": 8}, do_center_crop=False, image_mean=[0.4, 0.5, 0.3], image_std=[0.2, 0.3, 0.25]
    ).save_pretrained(tmp_path / "clip")
    for one, other in zip(
        pixels(opened(scans)), pixels(opened(scans, processor=str(tmp_path / "clip"))), strict=True
    ):
        assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("ranks", [2, 3])
def test_each_rank_has_the_augmented_rows_that_one_process_has(scans: Path, ranks: int) -> None:
    dataset = opened(scans)
    whole = pixels(dataset)
    for rank in range(ranks):
        share = pixels(replace(dataset, share=(rank, ranks)))
        assert same(share, [batch[rank::ranks] for batch in whole])


def test_data_set_is_read_as_it_is_where_nothing_trains(scans: Path) -> None:
    dataset = opened(scans)
    plain = [batch["pixel_values"] for batch in dataset.batches(4, torch.Generator().manual_seed(3))]
    batches = Batches(dataset, 4, CPU, torch.Generator().manual_seed(3))
    assert same(plain, [batch["pixel_values"] for batch in batches])
    assert not same(plain, pixels(dataset))


def test_values_that_are_not_known_to_be_bytes_are_moved_and_not_recoloured() -> None:
    values = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(0)) * 100
    dataset = Dataset({"pixel_values": values, "labels": torch.arange(5)})
    moves = Augmentation(horizontal_flip=1.0, vertical_flip=1.0)
    assert dataset.info.augmentation_misfit(moves) is None
    (batch,) = Batches(dataset, None, CPU, augmentation=SeededAugmentation(moves, 0))
    assert torch.equal(batch["pixel_values"], values.flip(-1, -2))
    assert "black and white is not known, which hue, rand_augment need" in str(
        dataset.info.augmentation_misfit(Augmentation(hue=0.1, rand_augment=1))
    )


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"input_ids": torch.zeros(2, 4, dtype=torch.int64)}, "it has no pixel_values: leave"),
        ({"pixel_values": torch.zeros(2, 16, 48)}, r"float32 \[16, 48\], not images"),
        ({"pixel_values": torch.zeros(2, 4, 8, 8)}, r"float32 \[4, 8, 8\], not images"),
        ({"pixel_values": torch.zeros(2, 3, 8, 8, dtype=torch.uint8)}, r"uint8 \[3, 8, 8\], not images"),
    ],
)
def test_inputs_that_are_not_images_are_named(tensors: dict[str, torch.Tensor], said: str) -> None:
    import re  # noqa: PLC0415

    found = Dataset({**tensors, "labels": torch.arange(2)}).info.augmentation_misfit(EVERYTHING)
    assert re.search(said, str(found))


LIGHT = """
import sys
import tessera.worker.data.loaders, tessera.worker.data.readers.pictures
heavy = {"transformers", "datasets", "pandas", "kornia", "pyarrow", "sklearn"}.intersection(sys.modules)
assert not heavy, heavy
"""


def test_loaders_import_no_library_that_they_may_not_need() -> None:
    subprocess.run([sys.executable, "-c", LIGHT], check=True)
