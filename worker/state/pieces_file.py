"""A file in memory made of pieces that others own, so that large arrays are read as a file without a copy of them."""

import io
from bisect import bisect_right
from typing import BinaryIO, cast


class PiecesFile(io.RawIOBase):
    """The pieces that were written, one after the other, to be read from any place."""

    def __init__(self) -> None:
        self._pieces: list[memoryview] = []
        self._ends: list[int] = []
        self._at = 0

    @property
    def nbytes(self) -> int:
        return self._ends[-1] if self._ends else 0

    def write(self, data: bytes | memoryview, /) -> int:  # type: ignore[override]  # any buffer has bytes to take
        """Append a piece, of which no copy is made: it must not change any more."""
        piece = memoryview(data)
        self._pieces.append(piece)
        self._ends.append(self.nbytes + piece.nbytes)
        return piece.nbytes

    def opened(self) -> BinaryIO:
        """Return another file over the same pieces, at its start."""
        file = PiecesFile()
        file._pieces, file._ends = self._pieces, self._ends
        return cast("BinaryIO", file)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.nbytes}[whence]
        self._at = max(0, start + offset)
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # as above
        out, got = memoryview(buffer), 0
        while got < len(out) and self._at < self.nbytes:
            place = bisect_right(self._ends, self._at)
            piece = self._pieces[place]
            start = self._at - (self._ends[place] - piece.nbytes)
            part = piece[start : start + len(out) - got]
            out[got : got + len(part)] = part
            got += len(part)
            self._at += len(part)
        return got
