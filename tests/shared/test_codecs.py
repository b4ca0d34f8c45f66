"""Codecs: every bit comes back, and no bytes unpack to more than their block."""

from __future__ import annotations

import io
import struct
import tracemalloc
from itertools import permutations

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from shared import codecs
from shared.blocks import NUMPY_DTYPES, Block, DType
from shared.codecs import CodecError
from shared.tensors import CHUNK, ArrayTensor, as_bytes, to_array

CODECS = ["raw", "delta", "shuffle", "zstd", "delta+shuffle", "delta+zstd", "shuffle+zstd", codecs.LOSSLESS]
DTYPES: list[DType] = ["F64", "F32", "F16", "BF16"]
ANY_CODEC = pytest.mark.parametrize("codec", CODECS)
ANY_DTYPE = pytest.mark.parametrize("dtype", DTYPES)


def block_of(array: np.ndarray, dtype: DType) -> Block:
    return Block(tensor="w", role="other", shape=array.shape, dtype=dtype)


def encoded(codec: str, value: np.ndarray, base: np.ndarray, dtype: DType = "F32") -> bytes:
    return b"".join(
        bytes(piece) for piece in codecs.encode(codec, ArrayTensor(value, dtype), ArrayTensor(base, dtype))
    )


def decoded(codec: str, data: bytes, base: np.ndarray, dtype: DType = "F32") -> np.ndarray:
    block = block_of(base, dtype)
    pieces = codecs.decode(codec, block, ArrayTensor(base, dtype), io.BytesIO(data), len(data))
    return np.concatenate(list(pieces)).reshape(base.shape)


def bits(rng: np.random.Generator, count: int, dtype: DType) -> np.ndarray:
    """Every kind of bit pattern: NaN with payloads, infinities, negative zeros, denormals."""
    kind = NUMPY_DTYPES[dtype]
    special = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, np.finfo(np.float16).tiny / 8], np.float64)
    drawn = np.frombuffer(rng.bytes(count * kind.itemsize), dtype=kind)
    return np.concatenate([special.astype(kind), drawn])[:count]


@ANY_CODEC
@ANY_DTYPE
def test_every_bit_pattern_comes_back(codec: str, dtype: DType) -> None:
    rng = np.random.default_rng(0)
    value, base = bits(rng, 1001, dtype), bits(rng, 1001, dtype)[::-1].copy()
    back = decoded(codec, encoded(codec, value, base, dtype), base, dtype)
    assert back.dtype == NUMPY_DTYPES[dtype]
    assert bytes(as_bytes(back)) == bytes(as_bytes(value))


@ANY_CODEC
@pytest.mark.parametrize("size", [1, CHUNK - 1, CHUNK, CHUNK + 1])
def test_sizes_around_a_chunk_come_back(codec: str, size: int) -> None:
    base = np.linspace(-1, 1, size, dtype=np.float32)
    value = base * np.float32(1.001)
    assert decoded(codec, encoded(codec, value, base), base).tobytes() == value.tobytes()


@given(data=st.data(), dtype=st.sampled_from(DTYPES), codec=st.sampled_from(CODECS))
def test_any_bytes_at_all_come_back(data: st.DataObject, dtype: DType, codec: str) -> None:
    width = NUMPY_DTYPES[dtype].itemsize
    count = data.draw(st.integers(1, 40))
    raw = st.binary(min_size=count * width, max_size=count * width)
    value, base = (np.frombuffer(data.draw(raw), dtype=NUMPY_DTYPES[dtype]) for _ in range(2))
    back = decoded(codec, encoded(codec, value, base, dtype), base, dtype)
    assert bytes(as_bytes(back)) == bytes(as_bytes(value))


def test_a_lightly_trained_block_travels_in_less_than_its_size() -> None:
    base = np.random.default_rng(0).normal(size=10_000).astype(np.float32)
    trained = base * np.float32(1.0001)
    assert codecs.worthwhile(codecs.LOSSLESS, ArrayTensor(trained), ArrayTensor(base)) == codecs.LOSSLESS
    assert len(encoded(codecs.LOSSLESS, trained, base)) < 0.7 * base.nbytes


def test_a_codec_that_does_not_pay_is_left_out() -> None:
    rng = np.random.default_rng(0)
    noise = np.frombuffer(rng.bytes(4000), np.float32)
    assert codecs.worthwhile("zstd", ArrayTensor(noise), ArrayTensor(noise)) == "raw"


@ANY_CODEC
def test_incompressible_data_stays_within_the_bound_that_the_reader_sets(codec: str) -> None:
    noise = np.frombuffer(np.random.default_rng(0).bytes(4 * (CHUNK + 7)), np.float32)
    assert len(encoded(codec, noise, np.zeros_like(noise))) <= codecs.longest(noise.nbytes)


# ---------------------------------------------------------------- which codecs there are


@pytest.mark.parametrize("codec", ["", "gzip", "delta+gzip", "delta+", "raw+zstd", "RAW"])
def test_an_unknown_stage_is_named_with_those_there_are(codec: str) -> None:
    with pytest.raises(CodecError, match="there are raw, delta, shuffle, zstd"):
        codecs.stages(codec)


def test_stages_that_cannot_follow_each_other_are_refused_before_any_byte_is_read() -> None:
    rows = ["+".join(names) for count in (1, 2, 3) for names in permutations(["delta", "shuffle", "zstd"], count)]
    for codec in set(rows) - set(CODECS):
        with pytest.raises(CodecError, match=r"cannot follow|comes first"):
            codecs.stages(codec)


@pytest.mark.parametrize("codec", ["zstd+zstd", "+".join(["shuffle"] * 200)])
def test_no_stage_comes_twice(codec: str) -> None:
    with pytest.raises(CodecError, match="names a stage twice"):
        codecs.stages(codec)


# ---------------------------------------------------------------- bytes that are not what they say


ZEROS = np.zeros(100, dtype=np.float32)


def framed(piece: bytes) -> bytes:
    return struct.pack("<I", len(piece)) + piece


@pytest.mark.parametrize("codec", ["delta", "shuffle", "delta+shuffle"])
@pytest.mark.parametrize("size", [0, 1, 4, 399, 401, 404, 800])
def test_a_chunk_of_another_size_is_refused(codec: str, size: int) -> None:
    with pytest.raises(CodecError, match=f"has {size} bytes, not 400"):
        decoded(codec, framed(bytes(size)), ZEROS)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "claims 4 bytes where 0 are left"),
        (b"\x01\x00", "claims 4 bytes where 2 are left"),
        (struct.pack("<I", 2**32 - 1) + b"x", "claims 4294967295 bytes where 1 are left"),
        (framed(zstandard.compress(bytes(400)))[:-3], "are left"),
        (framed(zstandard.compress(bytes(400))[:-3]), "unpacks to|not a zstd frame"),
        (framed(b"not zstd"), "not a zstd frame"),
        (framed(zstandard.compress(bytes(399))), "unpacks to 399"),
        (framed(zstandard.compress(bytes(401))), "unpacks to more"),
        (framed(zstandard.compress(bytes(400))) + b"tail", "4 bytes are left over"),
    ],
)
def test_broken_zstd_is_refused_with_what_is_wrong(data: bytes, message: str) -> None:
    with pytest.raises(CodecError, match=message):
        decoded("zstd", data, ZEROS)


def test_raw_bytes_must_be_exactly_the_block() -> None:
    for size in (0, 399, 401):
        with pytest.raises(CodecError):
            decoded("raw", bytes(size), ZEROS)


@pytest.mark.parametrize("states_its_size", [True, False])
def test_a_frame_that_unpacks_to_a_gigabyte_costs_no_more_than_its_block(states_its_size: bool) -> None:
    packer = zstandard.ZstdCompressor(level=19, write_content_size=states_its_size).compressobj(
        size=1 << 30 if states_its_size else -1
    )
    bomb = b"".join(packer.compress(bytes(1 << 20)) for _ in range(1024)) + packer.flush()
    tracemalloc.start()
    with pytest.raises(CodecError, match=r"claims \d+ bytes|unpacks to more|not a zstd frame"):
        decoded(codecs.LOSSLESS, framed(bomb), ZEROS)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 4 << 20


@given(data=st.binary(max_size=600), codec=st.sampled_from(CODECS))
def test_any_bytes_give_the_block_or_a_codec_error(data: bytes, codec: str) -> None:
    try:
        back = decoded(codec, data, ZEROS)
    except CodecError:
        return
    assert back.shape == ZEROS.shape


def test_a_tensor_of_another_number_of_chunks_is_not_encoded() -> None:
    one, two = ArrayTensor(np.zeros(CHUNK, np.float32)), ArrayTensor(np.zeros(CHUNK + 1, np.float32))
    with pytest.raises(ValueError, match="shorter"):
        list(codecs.encode("raw", two, one))
    assert to_array(one).size == CHUNK


def test_a_chunk_that_claims_the_whole_block_is_refused_before_it_is_read() -> None:
    large = Block(tensor="t", role="mlp", shape=(4 * CHUNK,), dtype="F32")
    base = ArrayTensor(np.zeros(large.shape, np.float32))
    claims = struct.pack("<I", 4 * large.numel) + bytes(4 * large.numel)
    with pytest.raises(CodecError, match="claims"):
        next(codecs.decode("zstd", large, base, io.BytesIO(claims), len(claims)))
