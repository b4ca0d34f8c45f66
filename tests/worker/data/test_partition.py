"""Partitions: whatever the scheme, every row is at one site and none is left empty; what cannot be is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from tessera.worker.data.dataset import Dataset
from tessera.worker.data.partition.division import divide, part_of
from tessera.worker.data.partition.schemes import (
    Partition,
    Scheme,
    SitePartition,
    dirichlet,
    domains,
    iid,
    quantity,
    shards,
)
from tessera.worker.errors import DataError

PARTITION: TypeAdapter[Scheme] = TypeAdapter(Partition)
PART: TypeAdapter[Scheme] = TypeAdapter(SitePartition)

ALPHAS = st.floats(1e-3, 1e3)
SEEDS = st.integers(0, 2**32 - 1)
LABELS = st.lists(st.integers(0, 5), min_size=1, max_size=60).map(np.array)


def scheme(name: str, **settings: Any) -> Scheme:
    return PARTITION.validate_python({"scheme": name, **settings})


def is_partition(parts: list[np.ndarray], count: int, rows: int) -> bool:
    """Whether these are `count` disjoint sets, none of them empty, ascending, and together all rows."""
    ascending = all((np.diff(part) > 0).all() and len(part) for part in parts)
    return len(parts) == count and ascending and sorted(np.concatenate(parts).tolist()) == list(range(rows))


def counts(labels: np.ndarray, parts: list[np.ndarray]) -> list[list[int]]:
    return [np.bincount(labels[part], minlength=labels.max() + 1).tolist() for part in parts]


# ---------------------------------------------------------------- every scheme


@given(data=st.data(), labels=LABELS, count=st.integers(1, 12), seed=SEEDS)
@pytest.mark.parametrize(
    ("name", "drawn"),
    [
        ("iid", {}),
        ("dirichlet", {"alpha": ALPHAS}),
        ("shards", {"each": st.integers(1, 4)}),
        ("quantity", {"alpha": ALPHAS}),
        ("domain", {}),
        ("domain", {"alpha": ALPHAS}),
        ("domain", {"label_alpha": ALPHAS}),
        ("shift", {"alpha": ALPHAS}),
    ],
)
def test_every_row_is_at_one_site_the_same_each_time_or_the_division_is_refused(
    name: str,
    drawn: dict[str, st.SearchStrategy[Any]],
    data: st.DataObject,
    labels: np.ndarray,
    count: int,
    seed: int,
) -> None:
    settings = {key: data.draw(values, key) for key, values in drawn.items()}
    wanted = scheme(name, count=count, seed=seed, **settings)
    dataset = Dataset({"labels": torch.from_numpy(labels)}, domains=torch.from_numpy(labels[::-1] % 3))
    try:
        parts = wanted.rows(dataset)
    except ValueError as refusal:
        assert "cannot" in str(refusal)  # noqa: PT017  (a refusal is one of two right answers here)
        return
    assert is_partition(parts, count, len(labels))
    assert [part.tolist() for part in wanted.rows(dataset)] == [part.tolist() for part in parts]


@pytest.mark.parametrize(
    ("divided", "told"),
    [
        (lambda: iid(3, 4, 0), "3 rows cannot be divided among 4 sites"),
        (lambda: dirichlet(np.arange(3), 4, 1.0, 0), "3 rows cannot be divided among 4 sites"),
        (lambda: shards(np.arange(7), 4, 2, 0), "7 rows cannot be cut into 4 x 2 shards"),
        (lambda: quantity(3, 4, 1.0, 0), "3 rows cannot be divided among 4 sites"),
        (lambda: domains(np.arange(3), 2, 0), "2 sites with one domain each cannot have 3 domains"),
        (lambda: domains(np.array([0, 1, 1]), 3, 0), "1 rows cannot be divided among 2 sites"),
    ],
)
def test_what_cannot_be_divided_is_refused_with_its_figures(divided: Callable[[], object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        divided()


# ---------------------------------------------------------------- each by itself


def test_iid_sites_have_as_many_rows_as_one_another() -> None:
    assert sorted(map(len, iid(11, 3, seed=0))) == [3, 4, 4]


def test_a_small_alpha_skews_labels_more_than_a_large_one() -> None:
    labels = np.repeat(np.arange(10), 100)

    def largest_share(alpha: float) -> float:
        found = [np.bincount(labels[rows], minlength=10) for rows in dirichlet(labels, 5, alpha, seed=3)]
        return float(np.mean([count.max() / count.sum() for count in found]))

    assert largest_share(1000.0) < 0.15 < 0.25 < largest_share(0.1)


def test_two_shards_of_equal_classes_are_at_most_two_classes_a_site() -> None:
    labels = np.tile(np.arange(10), 20)  # 10 classes of 20, so that 5 x 4 shards are 10 rows and half a class each
    found = counts(labels, shards(labels, count=10, each=2, seed=1))
    assert all(sum(row) == 20 and set(row) <= {0, 10, 20} for row in found)


def test_quantity_skews_sizes_and_not_labels() -> None:
    labels = np.tile(np.arange(2), 5000)
    parts = quantity(10_000, 4, alpha=0.5, seed=2)
    sizes = sorted(map(len, parts))
    assert sizes[-1] > 3 * sizes[0]
    largest = max(parts, key=len)
    assert np.mean(labels[largest]) == pytest.approx(0.5, abs=0.05)


def test_domains_are_dealt_in_turn_and_shared_by_sites_a_whole_turn_apart() -> None:
    domain = np.repeat([3, 7], [6, 4])
    parts = domains(domain, 4, seed=0)
    assert [set(domain[part].tolist()) for part in parts] == [{3}, {7}, {3}, {7}]
    assert [len(part) for part in parts] == [3, 2, 3, 2]


# ---------------------------------------------------------------- as settings


def tagged(rows: int = 40) -> Dataset:
    """Rows that can be told apart: images 2 x 2 that hold the row's number, ten labels, two domains."""
    numbers = torch.arange(rows)
    pixels = numbers.float()[:, None, None, None].expand(-1, 1, 2, 2).clone()
    return Dataset({"pixel_values": pixels, "labels": numbers % 10}, domains=numbers % 2)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("iid", {}),
        ("dirichlet", {"alpha": 0.1}),
        ("shards", {}),
        ("quantity", {"alpha": 0.5}),
        ("domain", {}),
        ("domain", {"alpha": 0.5}),
        ("domain", {"label_alpha": 0.5}),
    ],
)
def test_a_sites_part_is_its_place_in_the_division_of_all(name: str, settings: dict[str, Any]) -> None:
    whole = tagged()
    parts = divide(whole, scheme(name, count=4, seed=3, **settings))
    held = [part.tensors["pixel_values"][:, 0, 0, 0].int().tolist() for part in parts]
    assert sorted(row for rows in held for row in rows) == list(range(40))
    mine = part_of(whole, scheme(name, count=4, seed=3, **settings), 2)
    assert mine.tensors["labels"].tolist() == [row % 10 for row in held[2]]
    assert mine.domains is not None
    assert mine.domains.tolist() == [row % 2 for row in held[2]]


def test_a_mix_of_domains_gives_a_site_both() -> None:
    parts = divide(tagged(200), scheme("domain", count=3, alpha=100.0))
    assert all(part.domains is not None and part.domains.unique().tolist() == [0, 1] for part in parts)


def test_sites_that_share_a_domain_may_differ_in_labels() -> None:
    def classes(**settings: float) -> list[int]:
        parts = divide(tagged(2000), scheme("domain", count=4, **settings))
        return [len(part.tensors["labels"].unique()) for part in parts]

    # Each domain has the five odd or the five even digits.
    assert classes() == [5, 5, 5, 5]
    assert min(classes(label_alpha=0.05)) < 5


def test_shifted_sites_see_turned_inverted_and_noisy_images() -> None:
    corner = torch.tensor([[[[0.0, 1.0], [2.0, 5.0]]]])
    whole = Dataset({"pixel_values": corner.repeat(8, 1, 1, 1), "labels": torch.zeros(8, dtype=torch.int64)})
    parts = divide(whole, scheme("shift", count=8, seed=1))
    seen = [part.tensors["pixel_values"][0, 0].tolist() for part in parts]
    assert seen[0] == seen[4] == [[0, 1], [2, 5]]
    assert seen[1] == seen[5] == [[1, 5], [0, 2]]  # a quarter turn counter-clockwise
    assert seen[2] == seen[6] == [[5, 4], [3, 0]]  # each value from 0 + 5
    assert seen[3] not in (seen[0], seen[7])  # the noise of one site is not another's
    again = part_of(whole, scheme("shift", count=8, seed=1), 3)
    assert again.tensors["pixel_values"][0, 0].tolist() == seen[3]
    noise = torch.tensor(seen[3]) - corner[0, 0]
    assert 0 < float(noise.abs().max()) < 5 * 0.5


def test_shift_divides_by_label_too_if_asked() -> None:
    parts = divide(tagged(200), scheme("shift", count=4, alpha=0.05, distortions=[{}]))
    assert min(len(part.tensors["labels"].unique()) for part in parts) < 10
    assert sum(part.examples for part in parts) == 200


@pytest.mark.parametrize(
    ("name", "settings", "tensors", "told"),
    [
        ("dirichlet", {}, {"labels": torch.zeros(8, 3)}, r"part: scheme dirichlet needs one class"),
        ("domain", {}, {"labels": torch.arange(8)}, r"part: scheme domain needs the domain of each example"),
        ("shift", {}, {"labels": torch.arange(8)}, r"part: scheme shift changes images"),
        (
            "shift",
            {},
            {"pixel_values": torch.zeros(8, 1, 2, 3), "labels": torch.arange(8)},
            r"part: images of 2 x 3 do not keep their shape",
        ),
        ("iid", {"count": 9}, {"labels": torch.arange(8)}, r"part: 8 rows cannot be divided among 9 sites"),
    ],
)
def test_a_data_set_that_does_not_suit_the_scheme_is_refused(
    name: str, settings: dict[str, Any], tensors: dict[str, torch.Tensor], told: str
) -> None:
    with pytest.raises(DataError, match=told):
        divide(Dataset(tensors), scheme(name, **{"count": 2, **settings}))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"scheme": "random"}, "'iid', 'dirichlet', 'shards', 'quantity', 'domain', 'shift'"),
        ({"scheme": "iid", "alpha": 1.0}, "alpha"),
        ({"scheme": "dirichlet", "alpha": 0}, "greater than 0"),
        ({"scheme": "dirichlet", "index": 4}, "index 4 is not below count 4"),
        ({"scheme": "domain", "alpha": 1, "label_alpha": 1, "index": 0}, "give one of them"),
        ({"scheme": "iid"}, "give this site's part, from 0 to 3"),
    ],
)
def test_wrong_settings_of_a_part_are_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        PART.validate_python({"count": 4, **settings})
