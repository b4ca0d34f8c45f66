"""A table of counts comes back as exact totals, whatever sites weigh."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

from tessera.shared.api.descriptions import TableName
from tessera.shared.rounds.count_table import BLOCK, CountTable
from tessera.shared.rounds.secure_sums import Precision, exponent_of
from tessera.shared.secure_sums.errors import SumRefused
from tessera.shared.secure_sums.masked_update import Rounding
from tessera.shared.secure_sums.messages import RingBlock, Terms
from tessera.shared.tensors.lazy import Array, ArrayTensor

TABLE = CountTable("wards")


def terms(senders: int, max_weight: int) -> Terms:
    start = ArrayTensor(TABLE.values)
    exponent = exponent_of(start, start, Precision.of(32, senders))
    found: Any = Terms.model_construct(
        bits=32,
        max_senders=senders,
        max_weight=max_weight,
        blocks={BLOCK.name: RingBlock(elements=BLOCK.numel, exponent=exponent)},
    )
    return found


def opened(about: Terms, tables: list[Array], weights: list[int]) -> bytes:
    """The version that a round commits: the mean of the steps as integers, as the sites round them."""
    total = np.zeros(BLOCK.shape, np.int64)
    for number, (table, weight) in enumerate(zip(tables, weights, strict=True)):
        rounding = Rounding.of(about, BLOCK.name, weight)
        scratch = np.empty((2, BLOCK.numel), np.float32)
        codes = rounding.round(table - TABLE.values, np.random.default_rng(number), scratch)
        total += codes.astype(np.int64)
    step = total * 2.0 ** about.blocks[BLOCK.name].exponent * about.max_weight / sum(weights)
    return (TABLE.values + step).astype("<f4").tobytes()


@pytest.mark.parametrize("senders", [3, 8, 100, 1024])
def test_totals_are_the_sums_of_what_each_site_shows(senders: int) -> None:
    draw = Random(senders)
    weights = [draw.randint(1, 40) for _ in range(senders)]
    counts: list[dict[TableName, tuple[int, ...]]] = [
        {"classes": tuple(5 * draw.randint(0, 900) for _ in range(7)), "words": (0, 5 * draw.randint(2, 90))}
        for _ in range(senders)
    ]
    about = terms(senders, max(weights))
    tables = [TABLE.counted(each, about, weight) for each, weight in zip(counts, weights, strict=True)]
    found = TABLE.totals(opened(about, tables, weights), senders)
    assert found["classes"] == tuple(sum(each["classes"][place] for each in counts) for place in range(7))
    assert found["words"] == (0, sum(each["words"][1] for each in counts))
    assert found["pixels"] == found["tokens"] == ()


@pytest.mark.parametrize("senders", [3, 100, 1024])
def test_each_site_has_room_for_half_a_million_subjects_of_a_class_and_more_are_refused(senders: int) -> None:
    about = terms(senders, 9)
    TABLE.counted({"classes": (500_000,)}, about, 1)
    with pytest.raises(SumRefused, match="the most that the sum has room for"):
        TABLE.counted({"classes": (10**9,)}, about, 9)


def test_data_sets_have_tables_of_their_own() -> None:
    assert not np.array_equal(CountTable("beds").values, TABLE.values)
