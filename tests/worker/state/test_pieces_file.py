"""A file of pieces reads as their bytes would, from any place and in portions of any size."""

from __future__ import annotations

import io

import numpy as np
import pytest

from tessera.worker.state.pieces_file import PiecesFile

PIECES = (b"ab", b"", b"cdefg", b"h", bytes(range(100)))
WHOLE = b"".join(PIECES)


def of_pieces(*pieces: bytes) -> PiecesFile:
    file = PiecesFile()
    assert [file.write(piece) for piece in pieces] == [len(piece) for piece in pieces]
    return file


@pytest.mark.parametrize("count", [1, 2, 3, 7, len(WHOLE), 1000])
def test_portions_of_any_size_are_those_of_the_bytes(count: int) -> None:
    file, like = of_pieces(*PIECES), io.BytesIO(WHOLE)
    while portion := like.read(count):
        assert file.read(count) == portion
        assert file.tell() == like.tell()
    assert file.read(count) == b""


@pytest.mark.parametrize(("offset", "whence"), [(0, 0), (5, 0), (-3, 2), (0, 2), (1000, 0)])
def test_a_file_is_read_from_any_place(offset: int, whence: int) -> None:
    file, like = of_pieces(*PIECES), io.BytesIO(WHOLE)
    assert file.seek(offset, whence) == like.seek(offset, whence)
    assert file.read() == like.read()


def test_each_opened_file_has_a_place_of_its_own_and_may_be_closed() -> None:
    file = of_pieces(*PIECES)
    with file.opened() as first:
        assert first.read(3) == WHOLE[:3]
    with file.opened() as second:
        assert second.read() == WHOLE
    assert file.nbytes == len(WHOLE)


def test_an_array_is_not_copied() -> None:
    values, file = np.arange(4, dtype=np.uint8), PiecesFile()
    file.write(values.data)
    values[0] = 9
    assert file.read() == bytes([9, 1, 2, 3])


def test_a_file_without_pieces_is_empty() -> None:
    assert (PiecesFile().read(), of_pieces(b"").read(), PiecesFile().nbytes) == (b"", b"", 0)
