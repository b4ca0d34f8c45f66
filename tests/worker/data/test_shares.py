"""The ranks' rows of each batch, which are those of the whole batch, each once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tessera.worker.data.dataset import Dataset
from tests.support.tables import on_disk

EXAMPLES = 10


def read(places: Sequence[int]) -> Tensor:
    return torch.stack([torch.full((2,), float(place)) for place in places])


def dataset() -> Dataset:
    return on_disk({"labels": torch.arange(EXAMPLES)}, read, (2,), first=100)


def order() -> torch.Generator:
    return torch.Generator().manual_seed(1)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_each_row_of_a_batch_is_one_rank_s_and_some_ranks_have_none(ranks: int) -> None:
    shares = [[*replace(dataset(), share=(rank, ranks)).batches(4, order())] for rank in range(ranks)]
    for number, batch in enumerate(dataset().batches(4, order())):
        parts = [share[number] for share in shares]
        rows = [row for part in parts for row in part["labels"].tolist()]
        assert sorted(rows) == sorted(batch["labels"].tolist())
        for rank, part in enumerate(parts):
            assert part["labels"].tolist() == batch["labels"].tolist()[rank::ranks]
            assert part["pixel_values"].shape == (len(part["labels"]), 2)
            assert part["pixel_values"][:, 0].tolist() == [row + 100.0 for row in part["labels"].tolist()]
