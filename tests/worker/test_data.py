"""Data sets: every example once, sites' shares disjoint and together everything, wrong options named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from worker.data import DataError, Dataset, load
from worker.data.partition import dirichlet

DIGITS = 1797


def pixels_of(dataset: Dataset) -> set[bytes]:
    return {image.numpy().tobytes() for image in dataset.tensors["pixel_values"]}


def shard(index: int, **more: object) -> Dataset:
    return load("digits", {"shards": {"count": 3, "index": index, "alpha": 0.3, "seed": 7, **more}})


def test_batches_give_every_example_once_in_an_order_drawn_from_the_generator() -> None:
    dataset = Dataset({"labels": torch.arange(10)})
    orders = [
        torch.cat([batch["labels"] for batch in dataset.batches(4, torch.Generator().manual_seed(seed))])
        for seed in (1, 1, 2)
    ]
    assert orders[0].tolist() == orders[1].tolist() != orders[2].tolist()
    assert sorted(orders[2].tolist()) == list(range(10))
    assert [len(batch["labels"]) for batch in dataset.batches(4)] == [4, 4, 2]


def test_no_batch_size_means_all_at_once_in_the_stored_order() -> None:
    (batch,) = Dataset({"labels": torch.arange(10)}).batches(None)
    assert batch["labels"].tolist() == list(range(10))


def test_tensors_that_differ_in_their_number_of_examples_are_refused() -> None:
    with pytest.raises(DataError, match="same leading size"):
        Dataset({"labels": torch.arange(3), "input_ids": torch.zeros(4, 2)})


def test_digits_are_scaled_images_with_a_stratified_fifth_held_out() -> None:
    train, test = load("digits", {}), load("digits", {"part": "test"})
    images = train.tensors["pixel_values"]
    assert images.shape == (1437, 1, 8, 8)
    assert images.dtype == torch.float32
    assert (float(images.min()), float(images.max())) == (-1.0, 1.0)
    assert train.examples + test.examples == DIGITS
    assert min(torch.bincount(test.tensors["labels"])) >= 34  # a tenth of 360, in proportion


def test_digit_shards_are_disjoint_and_together_the_training_part() -> None:
    shards = [shard(index) for index in range(3)]
    together = torch.cat([each.tensors["pixel_values"] for each in shards])
    whole = load("digits", {}).tensors["pixel_values"]
    assert len(together) == len(whole)
    assert sorted(map(bytes, together.numpy())) == sorted(map(bytes, whole.numpy()))


def test_the_same_shard_is_the_same_every_time_and_another_seed_gives_another() -> None:
    assert pixels_of(shard(1)) == pixels_of(shard(1))
    assert pixels_of(shard(1)) != pixels_of(shard(1, seed=8))


def test_dirichlet_covers_every_row_once_and_leaves_no_site_empty() -> None:
    labels = np.repeat(np.arange(3), 5)
    shards = dirichlet(labels, count=12, alpha=0.01, seed=0)
    assert sorted(np.concatenate(shards).tolist()) == list(range(15))
    assert min(map(len, shards)) >= 1


def test_a_small_alpha_skews_labels_more_than_a_large_one() -> None:
    labels = np.repeat(np.arange(10), 100)

    def largest_share(alpha: float) -> float:
        counts = [np.bincount(labels[rows], minlength=10) for rows in dirichlet(labels, 5, alpha, seed=3)]
        return float(np.mean([count.max() / count.sum() for count in counts]))

    assert largest_share(1000.0) < 0.15 < 0.25 < largest_share(0.1)


def test_more_sites_than_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot be divided among 4 sites"):
        dirichlet(np.arange(3), count=4, alpha=1.0, seed=0)


def test_arrays_are_read_under_their_own_names(tmp_path: Path) -> None:
    file = tmp_path / "notes.safetensors"
    save_file({"input_ids": torch.arange(12).reshape(4, 3), "labels": torch.tensor([0, 1, 1, 0])}, file)
    dataset = load("arrays", {"file": str(file)})
    (batch,) = dataset.batches(None)
    assert batch["input_ids"][3].tolist() == [9, 10, 11]
    assert dataset.examples == 4


def test_arrays_without_labels_are_refused_by_the_files_name(tmp_path: Path) -> None:
    file = tmp_path / "notes.safetensors"
    save_file({"input_ids": torch.zeros(4, 3)}, file)
    with pytest.raises(DataError, match=r"notes\.safetensors.*no tensor 'labels'"):
        load("arrays", {"file": str(file)})


@pytest.mark.parametrize(
    ("kind", "options", "told"),
    [
        ("digits", {"prat": "train"}, "prat"),
        ("digits", {"part": "test", "shards": {"count": 2, "index": 0}}, "not divided"),
        ("digits", {"shards": {"count": 2, "index": 2}}, "index 2 is not below count 2"),
        ("arrays", {"file": "/nowhere/at.all"}, "/nowhere/at.all"),
        ("pictures", {}, "no 'pictures'; installed are arrays, digits"),
    ],
)
def test_wrong_options_are_named(kind: str, options: dict[str, object], told: str) -> None:
    with pytest.raises(DataError, match=told):
        load(kind, options)
