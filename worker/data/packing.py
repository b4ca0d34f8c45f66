"""Packing: several documents one after another in a row, for causal language models.

Positions begin at 0 in each document, and there is no attention mask: transformers then lets no document see another
(`find_packed_sequence_indices` in its `masking_utils`). An all-ones mask would let them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tessera.shared.model.dataset_schema import IDS
from tessera.worker.data.cells import AT_ONCE
from tessera.worker.data.dataset import LABELS, Dataset, RowsOnDisk, schema_of
from tessera.worker.data.readers.tokens import MASK
from tessera.worker.errors import DataError
from tessera.worker.model.forward import IGNORED

POSITIONS = "position_ids"


@dataclass(frozen=True)
class PackedRows:
    """The function that reads one of the inputs of packed rows, int64 [rows, width]."""

    documents: Dataset
    starts: NDArray[np.int64]
    """The first document of each row, and the number of all documents, [rows + 1]."""
    width: int
    name: str

    def __call__(self, places: Sequence[int]) -> Tensor:
        documents = [np.arange(self.starts[place], self.starts[place + 1]) for place in places]
        index = torch.from_numpy(np.concatenate(documents))
        ids, labels = (self.documents.inputs[name][index] for name in (IDS, LABELS))
        real = _real(self.documents, index)
        padding = self.documents.padding
        rows = torch.full((len(places), self.width), padding.values[IDS] if padding and self.name == IDS else IGNORED)
        if self.name == POSITIONS:
            # What follows the last document of a row is like a document too.
            rows[:] = torch.arange(self.width)
        place, of_row = 0, np.repeat(np.arange(len(places)), [len(each) for each in documents])
        for number, row in enumerate(of_row.tolist()):
            place = 0 if number == 0 or row != of_row[number - 1] else place
            tokens = ids[number][real[number]]
            end = place + len(tokens)
            if self.name == IDS:
                rows[row, place:end] = tokens
            elif self.name == POSITIONS:
                rows[row, place:] = torch.arange(self.width - place)
                rows[row, end:] = torch.arange(self.width - end)
            else:
                # A row's token predicts the next one, and no document the beginning of another.
                rows[row, place + 1 : end] = labels[number][real[number]][1:]
            place = end
        return rows


def _real(documents: Dataset, index: Tensor) -> Tensor:
    """Return which positions of documents hold a token and no padding, bool [documents, width].

    Labels do not show it: they may leave out a question, which the answer needs.
    """
    if MASK in documents.inputs:
        return documents.inputs[MASK][index] != 0
    ids, labels = (documents.inputs[name][index] for name in (IDS, LABELS))
    # A text may contain the padding's token, often its last one, which then has a label.
    assert documents.padding is not None  # noqa: S101  (as `packed` requires)
    known = (ids != documents.padding.values[IDS]) | (labels != IGNORED)
    return known.flip(1).cummax(dim=1).values.flip(1)


def packed(dataset: Dataset) -> Dataset:
    """Return a causal language model's documents, and the held-out ones, in rows of their maximal length.

    Rows are filled in the documents' order; a document is never in two rows. Rows have `input_ids`, `position_ids`
    and `labels`, int64 [rows, width] each. Raises DataError.
    """
    if dataset.padding is None or dataset.texts is not None:
        raise DataError("pack: the documents are not tokens yet")
    width = dataset.padding.width
    starts, filled = [0], 0
    for first in range(0, dataset.examples, AT_ONCE):
        index = torch.arange(first, min(first + AT_ONCE, dataset.examples))
        lengths = _real(dataset, index).sum(dim=1)
        for document, length in enumerate(lengths.tolist(), first):
            if filled + length > width:
                starts.append(document)
                filled = 0
            filled += length
    rows = np.array([*starts, dataset.examples])
    # What rows are made of alone, since a process of another device gets it.
    needed = (IDS, LABELS, MASK)
    documents = Dataset(
        {name: tensor for name, tensor in dataset.tensors.items() if name in needed},
        padding=dataset.padding,
        on_disk={name: stored for name, stored in dataset.on_disk.items() if name in needed},
    )
    on_disk = {
        name: RowsOnDisk(PackedRows(documents, rows, width, name), torch.arange(len(starts)), (width,), torch.int64)
        for name in (IDS, POSITIONS, LABELS)
    }
    made = Dataset(
        {},
        report=dataset.report,
        schema=schema_of(on_disk, dict.fromkeys(on_disk, (width,))),
        on_disk=on_disk,
        held_out=dataset.held_out and packed(dataset.held_out),
    )
    return made if dataset.on_disk else replace(made.in_memory(), held_out=made.held_out)
