"""Zstandard with a small search for matches, of which byte planes of floats have few: Huffman codes save the bytes.

On such planes it is faster than level 1, which is both faster and smaller than higher levels.

Decoding reads a stream up to the size that the block's shape gives. The size in a frame's header is not trusted: the
one-shot call allocates it before it reads a byte.
"""

import threading
from contextlib import suppress

import numpy as np
import zstandard

from tessera.shared.tensors.lazy import Array, as_bytes
from tessera.shared.updates.codecs.stage import U8, ArrayLayout, CodecError, Stage

MAX_WINDOW_BYTES = 1 << 23

PARAMETERS = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST, window_log=20, hash_log=10, min_match=7
)
"""Matches of seven bytes and more, from a table of 1,024 places. With 64, sparse updates grow by 5 %."""


class _Contexts(threading.local):
    """The contexts of a thread, kept because making them takes longer than a small block."""

    def __init__(self) -> None:
        self.packer = zstandard.ZstdCompressor(compression_params=PARAMETERS)
        self.unpacker = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)


_contexts = _Contexts()


class Zstd(Stage):
    name = "zstd"

    def layout(self, layout: ArrayLayout) -> ArrayLayout:
        return ArrayLayout(-1, U8)

    def encode(self, values: Array, base: Array, rng: np.random.Generator) -> Array:
        return np.frombuffer(_contexts.packer.compress(as_bytes(values)), dtype=np.uint8)

    def decode(self, encoded: Array, layout: ArrayLayout, base: Array) -> Array:
        expected, data_bytes = layout.nbytes, as_bytes(encoded)
        unpacker = _contexts.unpacker
        try:
            frame = zstandard.get_frame_parameters(data_bytes)
            if frame.window_size > MAX_WINDOW_BYTES:
                raise CodecError("zstd-window", f"a zstd frame needs a window of more than {MAX_WINDOW_BYTES} bytes")
            if frame.content_size == expected:
                # At once is faster, and allocates no more. Frames that this refuses, the stream below accepts or
                # names.
                with suppress(zstandard.ZstdError):
                    return np.frombuffer(unpacker.decompress(data_bytes, allow_extra_data=False), layout.dtype)
            # Across frames, to detect bytes after the first: they are too much data, or not a frame.
            with unpacker.stream_reader(data_bytes, read_across_frames=True) as stream:
                data = stream.read(expected)
                more = stream.read(1)
        except zstandard.ZstdError as fault:
            raise CodecError("zstd-invalid", f"not a zstd frame: {fault}") from None
        if more:
            raise CodecError("zstd-too-much", f"a chunk of {expected} bytes unpacks to more")
        if len(data) != expected:
            raise CodecError("zstd-too-little", f"a chunk of {expected} bytes unpacks to {len(data)}")
        return np.frombuffer(data, dtype=layout.dtype)


STAGES = (Zstd,)
