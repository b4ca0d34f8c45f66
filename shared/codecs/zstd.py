"""Zstandard at level 1, which on byte planes of floats is both faster and smaller than higher levels.

Decoding reads a stream up to the size that the block's shape gives: the size a frame states of itself is not
believed, since the one-shot call allocates it before it reads a byte.
"""

from __future__ import annotations

import numpy as np
import zstandard

from shared.codecs.stage import U8, CodecError, Layout, Stage
from shared.tensors import Array, as_bytes

MAX_WINDOW_BYTES = 1 << 23


class Zstd(Stage):
    name = "zstd"

    def layout(self, layout: Layout) -> Layout:
        return Layout(-1, U8)

    def encode(self, values: Array, base: Array, dice: np.random.Generator) -> Array:
        packed = zstandard.ZstdCompressor(level=1).compress(as_bytes(values))
        return np.frombuffer(packed, dtype=np.uint8)

    def decode(self, encoded: Array, layout: Layout, base: Array) -> Array:
        expected = layout.nbytes
        unpacker = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
        try:
            with unpacker.stream_reader(as_bytes(encoded), read_across_frames=False) as stream:
                data = stream.read(expected)
                more = stream.read(1)
        except zstandard.ZstdError as fault:
            raise CodecError(f"not a zstd frame: {fault}") from None
        if len(data) != expected or more:
            raise CodecError(f"a chunk of {expected} bytes unpacks to {'more' if more else len(data)}")
        return np.frombuffer(data, dtype=layout.dtype)


STAGE = Zstd
