"""Texts as tokens in a file, of which a batch reads its own rows.

A safetensors file: `tokens`, int32 [tokens of all texts, columns], and `lengths`, int32 [texts]. The columns are
`input_ids`, and what else does not follow from the lengths.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tessera.shared.model.dataset_schema import IDS

MASK = "attention_mask"
DEFAULTS = {MASK: 1, "token_type_ids": 0}
"""The usual values of columns, which are then left out."""
HEADER_BYTES = 4096
"""The header is written last, with counts that are known then, so room is left for it."""


@dataclass(frozen=True)
class Piece:
    """Some texts as tokens."""

    lengths: NDArray[np.int64]  # [texts]
    columns: Mapping[str, NDArray[np.int64]]  # [tokens of all texts] each


class TokenFile:
    """The tokens of texts, mapped from a file."""

    def __init__(self, stored: mmap.mmap) -> None:
        """Read the header and the lengths. Raises ValueError, LookupError and struct.error for a damaged file."""
        (size,) = struct.unpack("<Q", stored[:8])
        header = json.loads(stored[8 : 8 + size])
        self.about: dict[str, Any] = json.loads(header["__metadata__"]["about"])
        """The notes of the writer, `columns`, and `longest`, in tokens."""
        self._map = stored
        begin, end = (8 + size + place for place in header["tokens"]["data_offsets"])
        self._tokens = np.frombuffer(stored, "<i4", (end - begin) // 4, begin).reshape(header["tokens"]["shape"])
        lengths = np.frombuffer(stored, "<i4", header["lengths"]["shape"][0], end)
        self._starts = np.concatenate([[0], lengths.cumsum(dtype=np.int64)])

    def __reduce__(self) -> tuple[type[TokenFile], tuple[mmap.mmap]]:
        """Have another process map the file itself. Fails for an anonymous one."""
        return TokenFile, (self._map,)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def rows(self, places: Sequence[int]) -> tuple[NDArray[np.int64], dict[str, NDArray[np.int64]]]:
        """Return the lengths of these texts, and their tokens, one text after another, by column."""
        parts = [self._tokens[self._starts[place] : self._starts[place + 1]] for place in places]
        tokens = np.concatenate(parts).astype(np.int64)  # [tokens, columns]
        # Pages that were read would count as this process's memory until they are needed elsewhere.
        self._map.madvise(mmap.MADV_DONTNEED)
        lengths = np.array([len(part) for part in parts], np.int64)
        return lengths, dict(zip(self.about["columns"], tokens.T, strict=True))


@dataclass(frozen=True)
class TokenRows:
    """The function that reads one of the model's inputs, int64 [texts, width], padded."""

    tokens: TokenFile
    check: Callable[[], None]
    """A function that raises DataError if the tokens are no longer those of the table."""
    name: str
    column: str | None
    """The column of the values; None for a mask of the tokens that are not padding."""
    padding: int
    width: int

    def __call__(self, places: Sequence[int]) -> Tensor:
        self.check()
        lengths, columns = self.tokens.rows(places)
        real = np.arange(self.width) < lengths[:, None]
        rows = np.full(real.shape, self.padding, np.int64)
        rows[real] = 1 if self.column is None else columns[self.column]
        return torch.from_numpy(rows)


def write_tokens(
    file: BinaryIO, pieces: Callable[[], Iterable[Piece]], about: Callable[[], Mapping[str, object]]
) -> None:
    """Write texts as tokens. `about` returns notes for the header, at the end.

    `pieces` is called again if texts turn out to have a column that is usually left out.
    """
    columns: list[str] = []
    while (found := _written(file, pieces(), columns, about)) is not None:
        columns = found


def _written(
    file: BinaryIO, pieces: Iterable[Piece], more: list[str], about: Callable[[], Mapping[str, object]]
) -> list[str] | None:
    """Write the file with these columns beside the others. If they do not suffice, return those that do."""
    file.seek(8 + HEADER_BYTES)
    file.truncate()
    lengths, columns = [], []
    for piece in pieces:
        for name, usual in DEFAULTS.items():
            if name in piece.columns and name not in more and (piece.columns[name] != usual).any():
                return [*more, name]
        columns = [IDS, *more, *sorted(piece.columns.keys() - DEFAULTS.keys() - {IDS})]
        file.write(np.stack([piece.columns[name] for name in columns], axis=1).astype("<i4").tobytes())
        lengths.append(piece.lengths.astype("<i4"))
    counts = np.concatenate(lengths)
    total, texts = int(counts.sum(dtype=np.int64)), len(counts)
    file.write(counts.tobytes())
    size = 4 * total * len(columns)
    noted = {**about(), "columns": columns, "longest": int(counts.max())}
    header = {
        "__metadata__": {"about": json.dumps(noted)},
        "tokens": {"dtype": "I32", "shape": [total, len(columns)], "data_offsets": [0, size]},
        "lengths": {"dtype": "I32", "shape": [texts], "data_offsets": [size, size + 4 * texts]},
    }
    file.seek(0)
    file.write(struct.pack("<Q", HEADER_BYTES) + json.dumps(header).encode().ljust(HEADER_BYTES))
    return None
