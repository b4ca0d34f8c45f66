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
from tessera.worker.data.dataset import LABELS, Dataset, Padding, Rows, TableOnDisk, schema_of
from tessera.worker.data.readers.tokens import MASK
from tessera.worker.errors import DataError
from tessera.worker.model.forward import IGNORED

POSITIONS = "position_ids"


@dataclass(frozen=True)
class PackedRows:
    """The transform of documents to the inputs of packed rows, int64 [rows, width] each."""

    documents: Dataset
    starts: NDArray[np.int64]
    """The first document of each row, and the number of all documents, [rows + 1]."""
    width: int

    def __call__(self, places: Sequence[int]) -> dict[str, Tensor]:
        documents = [np.arange(self.starts[place], self.starts[place + 1]) for place in places]
        read = self.documents.read(torch.from_numpy(np.concatenate(documents)))
        real, shape = _real(self.documents.padding, read), (len(places), self.width)
        padding = self.documents.padding
        ids = torch.full(shape, padding.values[IDS] if padding else 0)
        labels = torch.full(shape, IGNORED)
        # The padding after a row's last document counts as another document.
        positions = torch.arange(self.width).repeat(len(places), 1)
        place, of_row = 0, np.repeat(np.arange(len(places)), [len(each) for each in documents])
        for number, row in enumerate(of_row.tolist()):
            place = 0 if number == 0 or row != of_row[number - 1] else place
            tokens = read[IDS][number][real[number]]
            end = place + len(tokens)
            ids[row, place:end] = tokens
            positions[row, place:] = torch.arange(self.width - place)
            positions[row, end:] = torch.arange(self.width - end)
            # A row's token predicts the next one, and no document the beginning of another.
            labels[row, place + 1 : end] = read[LABELS][number][real[number]][1:]
            place = end
        return {IDS: ids, POSITIONS: positions, LABELS: labels}


def _real(padding: Padding | None, documents: Rows) -> Tensor:
    """Return the mask of positions that hold a token of a document rather than padding, bool [documents, width].

    Labels do not show it: they may leave out a question, which the answer needs.
    """
    if MASK in documents:
        return documents[MASK] != 0
    # A text may contain the padding's token, often its last one, which then has a label.
    assert padding is not None  # noqa: S101  (as `packed` requires)
    known = (documents[IDS] != padding.values[IDS]) | (documents[LABELS] != IGNORED)
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
        lengths = _real(dataset.padding, dataset.read(index)).sum(dim=1)
        for document, length in enumerate(lengths.tolist(), first):
            if filled + length > width:
                starts.append(document)
                filled = 0
            filled += length
    rows = np.array([*starts, dataset.examples])
    # Tokens alone: processes of other devices get the whole table.
    documents = Dataset(dataset.tensors, padding=dataset.padding, on_disk=dataset.on_disk)
    kinds = dict.fromkeys((IDS, POSITIONS, LABELS), ((width,), torch.int64))
    table = TableOnDisk(PackedRows(documents, rows, width), torch.arange(len(starts)), kinds)
    made = Dataset({}, report=dataset.report, on_disk=table, held_out=dataset.held_out and packed(dataset.held_out))
    made = replace(made, schema=schema_of(made.inputs, dict.fromkeys(made.inputs, (width,))))
    return made if dataset.on_disk else replace(made.in_memory(), held_out=made.held_out)
