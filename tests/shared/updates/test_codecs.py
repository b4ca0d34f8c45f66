"""Codecs: every bit comes back, and no bytes unpack to more than their block."""

from __future__ import annotations

import io
import struct
import tracemalloc
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tessera.shared.model.blocks import Block
from tessera.shared.tensors.dtypes import NUMPY_DTYPES, DType
from tessera.shared.tensors.lazy import CHUNK, ArrayTensor, as_bytes, to_array
from tessera.shared.updates.codecs import pipeline
from tessera.shared.updates.codecs.stage import CodecError
from tessera.shared.updates.update_file import TrainedBlock

CODECS = ["raw", "bits", "shuffle", "zstd", "bits+shuffle", "bits+zstd", "shuffle+zstd", pipeline.LOSSLESS]
LOSSY = [
    "delta", "delta+shuffle+zstd", "delta+bf16", "delta+bf16+shuffle+zstd", "delta+fp16", "delta+int8",
    "delta+int8+zstd", "delta+int4", "delta+topk=0.01", "delta+topk=0.25+shuffle+zstd",
]  # fmt: skip
DTYPES: list[DType] = ["F64", "F32", "F16", "BF16"]
ANY_CODEC = pytest.mark.parametrize("codec", CODECS)
ANY_DTYPE = pytest.mark.parametrize("dtype", DTYPES)


def block_of(array: np.ndarray, dtype: DType) -> Block:
    return Block(tensor="w", role="other", shape=array.shape, dtype=dtype)


def change_of(value: np.ndarray, base: np.ndarray, dtype: DType = "F32") -> TrainedBlock:
    return TrainedBlock(block_of(base, dtype), ArrayTensor(value, dtype), ArrayTensor(base, dtype))


def encoded(codec: str, value: np.ndarray, base: np.ndarray, dtype: DType = "F32") -> bytes:
    dice = np.random.default_rng(0)
    return b"".join(bytes(piece) for piece in pipeline.encode(codec, change_of(value, base, dtype), dice))


def decoded(codec: str, data: bytes, base: np.ndarray, dtype: DType = "F32") -> np.ndarray:
    block = block_of(base, dtype)
    pieces = pipeline.decode(codec, block, ArrayTensor(base, dtype), io.BytesIO(data), len(data))
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
    assert pipeline.worthwhile(pipeline.LOSSLESS, change_of(trained, base)) == pipeline.LOSSLESS
    assert len(encoded(pipeline.LOSSLESS, trained, base)) < 0.7 * base.nbytes


def test_a_codec_that_does_not_pay_is_left_out() -> None:
    rng = np.random.default_rng(0)
    noise = np.frombuffer(rng.bytes(4000), np.float32)
    assert pipeline.worthwhile("zstd", change_of(noise, noise)) == "raw"


def test_a_codec_is_judged_by_the_start_of_a_block() -> None:
    base = np.zeros(2 * CHUNK, np.float32)
    noise = np.frombuffer(np.random.default_rng(0).bytes(base.nbytes), np.float32).copy()
    noise[: pipeline.PROBE] = 0
    assert pipeline.worthwhile("zstd", change_of(noise, base)) == "zstd"
    noise[: pipeline.PROBE] = noise[-pipeline.PROBE :]
    assert pipeline.worthwhile("zstd", change_of(noise, base)) == "raw"


@pytest.mark.parametrize("codec", [*CODECS, *LOSSY])
@pytest.mark.parametrize("dtype", ["F32", "BF16", "F64"])
def test_incompressible_data_stays_within_the_bound_that_the_reader_sets(codec: str, dtype: DType) -> None:
    noise = np.random.default_rng(0).normal(size=CHUNK + 7).astype(NUMPY_DTYPES[dtype])
    assert len(encoded(codec, noise, np.zeros_like(noise), dtype)) <= pipeline.longest(codec, block_of(noise, dtype))


# ---------------------------------------------------------------- codecs that round


def steps(rng: np.random.Generator, count: int) -> np.ndarray:
    """Differences of every size that training makes, whole runs of zeros, and some that float16 cannot hold."""
    sizes = 10.0 ** rng.uniform(-12, 0, size=count)
    sizes[rng.random(count) < 0.1] = 0
    sizes[:: max(1, count // 7)] = 1e5
    sizes[count // 2 : count // 2 + 300] = 0
    return (sizes * rng.choice([-1, 1], size=count)).astype(np.float32)


def stage_bound(stage: Any, values: np.ndarray, base: np.ndarray) -> np.ndarray:
    """How far off each element may come out of a stage (docs/codecs.md), float64; 0 if it is lossless."""
    size = np.abs(values.astype(np.float64))
    match stage.name:
        case "delta":
            # Each of its two sums is rounded to the precision of its result.
            precision = max(
                float(np.finfo("f4").eps), 2.0 ** -{"bfloat16": 7, "float16": 10}.get(base.dtype.name, 23)
            )
            return precision * (size + np.abs(base.astype(np.float64))) + np.finfo("f4").smallest_subnormal
        case "bf16":
            # Half a unit in the last of 8 places; of denormal numbers half the smallest.
            return size * 2.0**-8 + 2.0**-134
        case "fp16":
            # Half a unit in the last of 11 places, or half the smallest denormal number; all that is beyond 65504.
            return np.maximum(size * 2.0**-11 + 2.0**-25, size - 65504)
        case "int8" | "int4":
            # One step of the element's block.
            blocks = np.pad(np.abs(values), (0, -values.size % stage.block)).reshape(-1, stage.block)
            scales = (blocks.max(axis=1) / np.float32(stage.levels)).astype(np.float64)
            return np.repeat(scales, stage.block)[: values.size] * (1 + 2.0**-20) + np.finfo("f4").tiny
        case "topk":
            # What is left out is no larger than what is kept; what is kept is rounded to bfloat16.
            runs = [size[start : start + 65_536] for start in range(0, size.size, 65_536)]
            kept = [np.sort(run)[-max(1, round(stage.share * run.size))] for run in runs]
            least = np.concatenate([np.full(run.size, value) for run, value in zip(runs, kept, strict=True)])
            return np.maximum(np.minimum(size, least), size * 2.0**-8 + 2.0**-134)
    assert stage.lossless
    return np.zeros(values.size)


def bound_of(codec: str, values: np.ndarray, base: np.ndarray) -> np.ndarray:
    """What the stages may be off by, summed up over the row: `delta`, and at most one behind it that rounds."""
    delta, *behind = pipeline.parse(codec).line
    step = delta.encode(values, base, np.random.default_rng(0))
    most = stage_bound(behind[0], step, base) if behind else np.zeros(values.size)
    # What delta adds to the version is off by that much already, and its own rounding grows with it.
    return most + stage_bound(delta, np.abs(values.astype(np.float64)) + most, base)


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("size", [1, 63, 257, 65_537, CHUNK + 1])
@pytest.mark.parametrize("dtype", ["F32", "F64", "BF16"])
def test_no_element_is_further_off_than_the_bound_of_its_stage(codec: str, size: int, dtype: DType) -> None:
    rng = np.random.default_rng(size)
    base = rng.normal(size=size).astype(NUMPY_DTYPES[dtype])
    value = (base.astype(np.float64) + steps(rng, size)).astype(NUMPY_DTYPES[dtype])
    back = decoded(codec, encoded(codec, value, base, dtype), base, dtype)
    off = np.abs(back.astype(np.float64) - value.astype(np.float64))
    for start in range(0, size, CHUNK):
        part = slice(start, start + CHUNK)
        assert (off[part] <= bound_of(codec, value[part], base[part])).all()


@pytest.mark.parametrize("codec", LOSSY)
def test_what_did_not_change_comes_back_bit_for_bit(codec: str) -> None:
    base = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    base[3] = -0.0
    value = base.copy()
    value[::2] += 1
    assert (decoded(codec, encoded(codec, value, base), base)[1::2] == base[1::2]).all()
    assert decoded(codec, encoded(codec, base, base), base).tobytes() == (base + np.float32(0)).tobytes()


@pytest.mark.parametrize("codec", ["delta+int8", "delta+int4"])
def test_rounding_is_right_in_the_mean(codec: str) -> None:
    base = np.zeros(256, np.float32)
    value = np.linspace(-1, 1, 256, dtype=np.float32)
    change, dice = change_of(value, base), np.random.default_rng(0)
    total = np.zeros(256)
    for _ in range(400):
        data = b"".join(bytes(piece) for piece in pipeline.encode(codec, change, dice))
        total += decoded(codec, data, base)
    step = 1 / pipeline.parse(codec).line[1].levels  # type: ignore[attr-defined]
    # Five standard errors of the mean of 400 roundings, each off by half a step at most in the square mean.
    assert np.abs(total / 400 - value).max() < 5 * 0.5 * step / 20


def test_the_same_dice_give_the_same_bytes() -> None:
    base, value = np.zeros(1000, np.float32), np.random.default_rng(0).normal(size=1000).astype(np.float32)

    def once(seed: int) -> bytes:
        dice = np.random.default_rng(seed)
        return b"".join(bytes(p) for p in pipeline.encode("delta+int8", change_of(value, base), dice))

    assert once(1) == once(1) != once(2)


@pytest.mark.parametrize(
    ("codec", "most"),
    [("delta+bf16", 0.501), ("delta+int8", 0.26), ("delta+int4", 0.142), ("delta+topk=0.01", 0.0101)],
)
def test_a_codec_of_fixed_size_has_that_size(codec: str, most: float) -> None:
    base, value = np.zeros(2 * CHUNK + 5, np.float32), np.ones(2 * CHUNK + 5, np.float32)
    assert len(encoded(codec, value, base)) < most * value.nbytes


def test_the_largest_differences_are_the_ones_that_are_kept() -> None:
    base = np.zeros(100_000, np.float32)
    value = np.random.default_rng(0).permutation(100_000).astype(np.float32)
    back = decoded("delta+topk=0.01", encoded("delta+topk=0.01", value, base), base)
    for run in (slice(0, 65_536), slice(65_536, None)):
        kept = back[run] != 0
        assert kept.sum() == round(0.01 * len(value[run]))
        assert value[run][kept].min() > value[run][~kept].max()


@pytest.mark.parametrize("shape", [(300, 200), (200, 30, 10), (700, 401)])
@pytest.mark.parametrize("codec", ["delta+lowrank=4", "delta+lowrank=4+bf16+shuffle+zstd", "delta+lowrank=4+int8"])
def test_a_matrix_of_low_rank_comes_back_but_for_rounding(codec: str, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    rows, columns = shape[0], int(np.prod(shape[1:]))
    value = (rng.normal(size=(rows, 3)) @ rng.normal(size=(3, columns))).astype(np.float32).reshape(shape)
    base = np.zeros(shape, np.float32)
    data = encoded(codec, value, base)
    assert len(data) < 0.1 * value.nbytes
    off = np.linalg.norm(decoded(codec, data, base) - value) / np.linalg.norm(value)
    assert off < (1e-5 if codec == "delta+lowrank=4" else 0.02)


def test_no_product_of_two_thin_matrices_is_much_nearer_than_ours() -> None:
    rng = np.random.default_rng(0)
    value = rng.normal(size=(300, 200)).astype(np.float32)
    best = np.sqrt((np.linalg.svd(value, compute_uv=False)[16:] ** 2).sum())
    back = decoded("delta+lowrank=16", encoded("delta+lowrank=16", value, np.zeros_like(value)), np.zeros_like(value))
    assert best <= np.linalg.norm(back - value) < 1.05 * best < np.linalg.norm(value)


def test_what_low_rank_is_of_no_use_to_goes_without() -> None:
    assert pipeline.suited("delta+lowrank=4+int8", block_of(np.zeros(9000, np.float32), "F32")) == "delta+int8"
    assert pipeline.suited("delta+lowrank=4", block_of(np.zeros((8, 8), np.float32), "F32")) == "delta"
    assert pipeline.suited("delta+lowrank=4", block_of(np.zeros((80, 80), np.float32), "F32")) == "delta+lowrank=4"


@pytest.mark.parametrize("codec", ["delta+int8+zstd", "delta+bf16+shuffle+zstd", "delta+topk=0.25+shuffle+zstd"])
def test_a_rounding_stage_stays_where_compression_does_not_pay(codec: str) -> None:
    noise = np.frombuffer(np.random.default_rng(0).bytes(40_000), np.int32).astype(np.float32)
    change = change_of(noise, np.zeros_like(noise))
    chosen = pipeline.worthwhile(codec, change)
    assert chosen in (codec, "+".join(codec.split("+")[:2]))
    assert pipeline.worthwhile("delta+int8+zstd", change) == "delta+int8"


@pytest.mark.parametrize(
    ("places", "told"), [([0, 0], "not in order"), ([5, 3], "not in order"), ([0, 100], "beyond the end")]
)
def test_places_that_are_none_are_refused(places: list[int], told: str) -> None:
    piece = np.array([*places, 0, 0], np.uint16).tobytes()
    with pytest.raises(CodecError, match=told):
        decoded("delta+topk=0.02", framed(piece), ZEROS)


# ---------------------------------------------------------------- which codecs there are


@pytest.mark.parametrize(
    ("codec", "told"),
    [(codec, "it can be bf16, bits, .*, raw, shuffle") for codec in ("", "gzip", "bits+gzip", "bits+", "quantized")]
    + [("raw+zstd", "'raw'.; it can be bf16, bits, .*, lowrank, shuffle"), ("RAW", "did you mean `raw`")]
    + [("topk:0.01", "did you mean `topk`"), ("delta+int9", "did you mean `int.`")],
)
def test_an_unknown_stage_is_named_with_the_nearest_or_those_there_are(codec: str, told: str) -> None:
    with pytest.raises(CodecError, match=told):
        pipeline.parse(codec)


def test_stages_that_cannot_follow_each_other_are_refused_before_any_byte_is_read() -> None:
    names = ["bits", "delta", "shuffle", "zstd", "int8"]
    rows = ["+".join(row) for count in (1, 2, 3) for row in permutations(names, count)]
    may_stand = {*CODECS, *LOSSY, "delta+zstd", "delta+shuffle", "delta+int8+shuffle"}
    for codec in set(rows) - may_stand:
        with pytest.raises(CodecError, match=r"cannot follow|comes first|put (delta|it)"):
            pipeline.parse(codec)


@pytest.mark.parametrize(
    "codec",
    ["delta+topk", "delta+topk=", "delta+topk=0", "delta+topk=nan", "delta+topk=0.3", "delta+topk=-1",
     "delta+topk=1e-400", "delta+lowrank", "delta+lowrank=0", "delta+lowrank=1.5", "delta+lowrank=129",
     "delta+lowrank=99999999", "delta+int8=3", "bits=", "delta+lowrank=²"],
)  # fmt: skip
def test_a_parameter_that_is_none_is_named(codec: str) -> None:
    with pytest.raises(CodecError, match=r"takes (no parameter|a share up to 0.25|a rank up to 128)"):
        pipeline.parse(codec)


@pytest.mark.parametrize("codec", ["lowrank=4", "bits+lowrank=4", "delta+int8+lowrank=4", "lowrank=4+delta"])
def test_low_rank_stands_behind_differences_only(codec: str) -> None:
    with pytest.raises(CodecError, match=r"comes second|put (delta|it)|comes first"):
        pipeline.parse(codec)


@pytest.mark.parametrize("codec", ["zstd+zstd", "+".join(["shuffle"] * 200)])
def test_no_stage_comes_twice(codec: str) -> None:
    with pytest.raises(CodecError, match="names a stage twice"):
        pipeline.parse(codec)


# ---------------------------------------------------------------- bytes that are not what they say


ZEROS = np.zeros(100, dtype=np.float32)


def framed(piece: bytes) -> bytes:
    return struct.pack("<I", len(piece)) + piece


@pytest.mark.parametrize("codec", ["bits", "delta", "shuffle", "bits+shuffle"])
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
    # The window and the length of level 19 in a tenth of its time.
    parameters = zstandard.ZstdCompressionParameters(
        window_log=23, compression_level=1, write_content_size=states_its_size
    )
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj(
        size=1 << 30 if states_its_size else -1
    )
    bomb = b"".join(packer.compress(bytes(1 << 20)) for _ in range(1024)) + packer.flush()
    tracemalloc.start()
    with pytest.raises(CodecError, match=r"claims \d+ bytes|unpacks to more|not a zstd frame"):
        decoded(pipeline.LOSSLESS, framed(bomb), ZEROS)
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
        list(pipeline.encode("raw", TrainedBlock(block_of(to_array(one), "F32"), two, one)))
    assert to_array(one).size == CHUNK


def test_a_chunk_that_claims_the_whole_block_is_refused_before_it_is_read() -> None:
    large = Block(tensor="t", role="mlp", shape=(4 * CHUNK,), dtype="F32")
    base = ArrayTensor(np.zeros(large.shape, np.float32))
    claims = struct.pack("<I", 4 * large.numel) + bytes(4 * large.numel)
    with pytest.raises(CodecError, match="claims"):
        next(pipeline.decode("zstd", large, base, io.BytesIO(claims), len(claims)))


# ---------------------------------------------------------------- many small blocks at once


def small_changes(dtype: DType) -> list[TrainedBlock]:
    """Blocks that compress, blocks that do not, and one of a single element."""
    dice = np.random.default_rng(3)
    changes = []
    for count, moved in ((700, True), (700, False), (1, True), (64, True), (900, False)):
        base = bits(dice, count, dtype)
        value = base.copy() if moved else bits(dice, count, dtype)
        changes.append(change_of(value, base, dtype))
    return changes


@ANY_DTYPE
@ANY_CODEC
def test_blocks_are_tried_together_as_each_alone(codec: str, dtype: DType) -> None:
    changes = small_changes(dtype)
    together = [
        (chosen, first if first is None else first.tobytes()) for chosen, first in pipeline.trials(codec, changes)
    ]
    alone = [pipeline.trial(codec, change) for change in changes]
    assert together == [(chosen, first if first is None else first.tobytes()) for chosen, first in alone]
    # A block that a trial encoded need not be encoded again.
    for change, (chosen, first) in zip(changes, alone, strict=True):
        again, at_once = (b"".join(map(bytes, pipeline.encode(chosen, change, whole=each))) for each in (None, first))
        assert at_once == again


def test_a_trial_encodes_no_more_than_its_probe() -> None:
    base = np.arange(pipeline.PROBE + 1, dtype=np.float32)
    assert pipeline.trial(pipeline.LOSSLESS, change_of(base + 1, base)) == (pipeline.LOSSLESS, None)
    assert pipeline.trial(pipeline.LOSSLESS, change_of(base[:-1] + 1, base[:-1]))[1] is not None


@ANY_DTYPE
@ANY_CODEC
def test_blocks_are_decoded_together_as_each_alone(codec: str, dtype: DType) -> None:
    changes = small_changes(dtype)
    starts = [np.concatenate(list(change.base.chunks())) for change in changes]
    pieces = [b"".join(map(bytes, pipeline.encode(codec, change))) for change in changes]
    counts = [start.size for start in starts]
    found = pipeline.decode_group(codec, dtype, counts, pieces, starts)
    assert [values.tobytes() for values in found] == [next(change.values()).tobytes() for change in changes]


@pytest.mark.parametrize("broken", [b"", b"\x00", b"\x00\x00\x00\x00", b"\x02\x00\x00\x00\x00"])
def test_a_group_with_a_block_that_is_cut_off_is_refused(broken: bytes) -> None:
    (change, *_) = small_changes("F32")
    start = np.concatenate(list(change.base.chunks()))
    good = b"".join(map(bytes, pipeline.encode(pipeline.LOSSLESS, change)))
    with pytest.raises(CodecError):
        pipeline.decode_group(pipeline.LOSSLESS, "F32", [start.size] * 2, [good, broken], [start] * 2)
