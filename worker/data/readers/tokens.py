"""Texts as tokens in a file of Arrow rows, of which a batch reads its own.

Each text is a list of int32 in each of the tokenizer's columns: `input_ids`, and others, which are null where all of
a batch's texts have the usual value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from tessera.shared.model.dataset_schema import IDS
from tessera.worker.data.readers.arrow_rows import ArrowRows

MASK = "attention_mask"
USUAL = {MASK: 1, "token_type_ids": 0}
"""The usual values of columns."""


@dataclass(frozen=True)
class TokenBatch:
    """Some texts as tokens."""

    lengths: NDArray[np.int64]  # [texts]
    columns: Mapping[str, NDArray[np.int64]]  # [tokens of all texts] each


def token_batches(pieces: Iterable[TokenBatch], notes: dict[str, Any]) -> Iterator[pa.RecordBatch]:
    """Yield texts as rows. Note the `columns` with unusual values, and the `longest` text, in tokens."""
    columns, longest = {IDS}, 0
    for piece in pieces:
        offsets = pa.array(np.append(0, piece.lengths.cumsum()), pa.int32())
        cells = {}
        for name, values in piece.columns.items():
            cells[name] = pa.ListArray.from_arrays(offsets, pa.array(values, pa.int32()))
            if name in USUAL and (values == USUAL[name]).all():
                cells[name] = pa.nulls(len(piece.lengths), cells[name].type)
            else:
                columns.add(name)
        longest = max(longest, int(piece.lengths.max()))
        notes.update(columns=sorted(columns), longest=longest)
        yield pa.record_batch(cells)


@dataclass(frozen=True)
class TokenRows:
    """The transform of texts as tokens to the model's inputs, int64 [texts, width] each, padded."""

    tokens: ArrowRows
    check: Callable[[], None]
    """A function that raises DataError if the tokens are no longer those of the table."""
    columns: Mapping[str, str]
    """The column of each input."""
    padding: Mapping[str, int]
    width: int
    pairs: bool = False
    """True if an example is two texts, one after the other: the inputs are then [examples, 2, width]."""

    def __call__(self, places: Sequence[int]) -> dict[str, Tensor]:
        self.check()
        chosen = np.array(places, np.int64)
        chosen = np.stack([2 * chosen, 2 * chosen + 1], axis=1).flatten() if self.pairs else chosen
        lists = {column: self.tokens.lists(column, chosen) for column in {IDS, *self.columns.values()}}
        lengths = [0 if each is None else len(each) for each in lists[IDS]]
        real = np.arange(self.width) < np.array(lengths)[:, None]
        rows = {}
        for name, column in self.columns.items():
            values = [
                np.full(length, USUAL[column]) if each is None else each
                for each, length in zip(lists[column], lengths, strict=True)
            ]
            rows[name] = np.full(real.shape, self.padding[name], np.int64)
            rows[name][real] = np.concatenate(values)
        self.tokens.release()
        shape = (len(places), 2, self.width) if self.pairs else real.shape
        return {name: torch.from_numpy(values).view(shape) for name, values in rows.items()}
