"""Chunked arithmetic, against the same sums in one piece of float64.

A sum of steps runs in float32 (docs/decisions/0019): what it may be off by is `ROUNDING` times the largest step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar
from weakref import finalize

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tessera.shared.tensors.dtypes import NUMPY_DTYPES, DType
from tessera.shared.tensors.lazy import (
    CHUNK,
    PIECE,
    ArrayTensor,
    ComputedTensor,
    ScaledCodes,
    SparseElements,
    Steps,
    StretchedStep,
    Tensor,
    as_bytes,
    chunk_counts,
    digest_of,
    from_bytes,
    lockstep,
    mean_step,
    related,
    squares,
    to_array,
    weighted_steps,
)

FLOATS = st.floats(-1e6, 1e6, width=32)
ROWS = hnp.arrays(np.float32, (3, 5), elements=FLOATS)
SENDERS = st.lists(st.tuples(st.integers(1, 1000), ROWS), min_size=1, max_size=4)
ROUNDING = 2.0**-20
"""Eight roundings of 2^-24 each, and their sum, are more than those that a step of four senders goes through."""
ANY_DTYPE = pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16"])


@given(base=ROWS, senders=SENDERS)
def test_the_mean_step_is_the_weighted_mean(base: np.ndarray, senders: list[tuple[int, np.ndarray]]) -> None:
    merged = to_array(mean_step(ArrayTensor(base), [(w, ArrayTensor(a)) for w, a in senders]))
    total = sum(weight for weight, _ in senders)
    oracle = sum(weight * array.astype(np.float64) for weight, array in senders) / total
    np.testing.assert_allclose(merged, oracle, rtol=2**-23, atol=2e6 * ROUNDING)


@given(base=ROWS, senders=SENDERS, absent=st.integers(0, 1000))
def test_a_step_over_the_whole_cohort_is_damped_by_the_share_that_sent(
    base: np.ndarray, senders: list[tuple[int, np.ndarray]], absent: int
) -> None:
    total = sum(weight for weight, _ in senders) + absent
    merged = to_array(mean_step(ArrayTensor(base), [(w, ArrayTensor(a)) for w, a in senders], whole=total))
    start = base.astype(np.float64)
    oracle = start + sum(w * (a.astype(np.float64) - start) for w, a in senders) / total
    np.testing.assert_allclose(merged, oracle, rtol=2**-23, atol=2e6 * ROUNDING)


def test_small_steps_are_averaged_to_the_last_bit_or_its_neighbour() -> None:
    # As after local training: steps of a thousandth of a weight. Differences of near floats are exact (Sterbenz), so
    # that the one rounding which counts is that of the result.
    rng = np.random.default_rng(0)
    base = rng.normal(scale=0.02, size=100_000).astype(np.float32)
    sent = [base + rng.normal(scale=2e-5, size=base.size).astype(np.float32) for _ in range(10)]
    merged = to_array(mean_step(ArrayTensor(base), [(1 + i, ArrayTensor(row)) for i, row in enumerate(sent)]))
    oracle = np.average(np.array(sent, np.float64), axis=0, weights=range(1, 11)).astype(np.float32)
    assert (merged == oracle).mean() > 0.99
    neighbour = np.spacing(np.maximum(np.abs(base), np.abs(oracle)))
    assert (np.abs(merged - oracle) <= neighbour + 2e-4 * ROUNDING).all()


def test_a_sum_of_steps_is_this_row_of_operations_on_every_machine() -> None:
    base, first, second = (np.random.default_rng(seed).normal(size=9).astype(np.float32) for seed in range(3))
    one, three = np.float32(-0.25), np.float32(-0.75)
    total = (np.float32(0) + (first - base) * one) + (second - base) * three
    merged = to_array(mean_step(ArrayTensor(base), [(1, ArrayTensor(first)), (3, ArrayTensor(second))]))
    assert merged.tobytes() == (base - total).tobytes()


def test_a_block_of_float64_is_summed_in_float64() -> None:
    base, step = np.ones(3), np.full(3, 1e-12)
    merged = to_array(mean_step(ArrayTensor(base, "F64"), [(1, ArrayTensor(base + step, "F64"))] * 3))
    np.testing.assert_allclose(merged - base, step, rtol=1e-3)


def test_the_mean_step_of_two_is_what_a_pocket_calculator_says() -> None:
    base, light, heavy = (ArrayTensor(np.full(2, v, np.float32)) for v in (1.0, 2.0, 4.0))
    # (10 * 2 + 30 * 4) / 40 = 3.5; over a cohort of 80: 1 + (10 * 1 + 30 * 3) / 80 = 2.25
    np.testing.assert_array_equal(to_array(mean_step(base, [(10, light), (30, heavy)])), [3.5, 3.5])
    np.testing.assert_array_equal(to_array(mean_step(base, [(10, light), (30, heavy)], whole=80)), [2.25, 2.25])


@ANY_DTYPE
def test_what_no_sender_changed_comes_out_bit_for_bit(dtype: DType) -> None:
    kind = NUMPY_DTYPES[dtype]
    base = np.array([0.0, -0.0, 1e-7, -3.3, 65000.0], dtype=kind)
    senders = [(weight, ArrayTensor(base.copy(), dtype)) for weight in (1, 3, 7)]
    merged = to_array(mean_step(ArrayTensor(base, dtype), senders))
    assert merged.dtype == kind
    assert bytes(as_bytes(merged)) == bytes(as_bytes(base))


@given(base=hnp.arrays(np.float32, 8, elements=st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_no_finite_block_is_moved_by_senders_that_leave_it(base: np.ndarray) -> None:
    merged = to_array(mean_step(ArrayTensor(base), [(3, ArrayTensor(base)), (4, ArrayTensor(base))], whole=9))
    assert merged.tobytes() == base.tobytes()


@given(senders=st.permutations([(1 + 7 * i, float(i) / 3) for i in range(5)]))
def test_the_order_of_the_senders_moves_the_mean_by_no_more_than_rounding(senders: list[tuple[int, float]]) -> None:
    base = ArrayTensor(np.linspace(-1, 1, 50, dtype=np.float32))
    moved = [(weight, ArrayTensor(to_array(base) + np.float32(step))) for weight, step in senders]
    ordered = to_array(mean_step(base, sorted_by(moved)))
    np.testing.assert_allclose(to_array(mean_step(base, moved)), ordered, rtol=0, atol=2 * ROUNDING)


def sorted_by(senders: list[tuple[int, ArrayTensor]]) -> list[tuple[int, ArrayTensor]]:
    return sorted(senders, key=lambda sender: sender[0])


@pytest.mark.parametrize("weight", [0, -1])
def test_weights_must_be_positive(weight: int) -> None:
    one = ArrayTensor(np.ones(1, np.float32))
    with pytest.raises(ValueError, match="weights must be positive"):
        mean_step(one, [(1, one), (weight, one)])


def test_shapes_must_agree_even_if_the_sizes_do() -> None:
    with pytest.raises(ValueError, match="shapes differ"):
        mean_step(ArrayTensor(np.ones((2, 3))), [(1, ArrayTensor(np.ones((3, 2))))])


@pytest.mark.parametrize("size", [1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5])
def test_a_tensor_streams_in_chunks_and_comes_together_again(size: int) -> None:
    values = np.arange(size, dtype=np.float32)
    tensor = ArrayTensor(values)
    assert [chunk.size for chunk in tensor.chunks()] == list(chunk_counts(size))
    assert sum(chunk_counts(size)) == size
    assert max(chunk_counts(size)) <= CHUNK
    np.testing.assert_array_equal(to_array(tensor), values)


def test_the_mean_is_computed_across_chunk_boundaries() -> None:
    values = np.arange(CHUNK + 3, dtype=np.float32)
    merged = mean_step(ArrayTensor(np.zeros_like(values)), [(1, ArrayTensor(values)), (1, ArrayTensor(3 * values))])
    # (v + 3 v) / 2 = 2 v
    np.testing.assert_array_equal(to_array(merged), 2 * values)


@ANY_DTYPE
def test_bytes_are_little_endian_and_come_back_as_they_were(dtype: DType) -> None:
    one = np.array([1.0, -2.0], dtype=NUMPY_DTYPES[dtype])
    written = bytes(as_bytes(one))
    first = {"F64": "000000000000f03f", "F32": "0000803f", "F16": "003c", "BF16": "803f"}[dtype]
    assert written.hex().startswith(first)
    np.testing.assert_array_equal(from_bytes(written, dtype), one)


def test_a_digest_names_the_bytes() -> None:
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert digest_of(b"") == f"sha256:{empty}"


# ---------------------------------------------------------------- tensors that arrive as differences


@dataclass(frozen=True)
class Sent:
    """A tensor of which only the differences can be read."""

    found: Sequence[np.ndarray | Steps]
    shape: tuple[int, ...]
    dtype: DType = "F32"
    sent_as_steps: bool = True
    reads: list[int] = field(default_factory=list)

    def steps(self) -> Iterator[np.ndarray | Steps]:
        self.reads.append(1)
        yield from self.found

    def chunks(self) -> Iterator[np.ndarray]:
        raise AssertionError("the base would be added, only to be taken off again")


SIZE = CHUNK + 300
BASE = np.random.default_rng(5).normal(size=SIZE).astype(np.float32)
DIFFERENCES = np.random.default_rng(6).normal(scale=1e-3, size=SIZE).astype(np.float32)
CODES = np.random.default_rng(7).integers(-127, 128, SIZE).astype(np.int8)
SCALES = np.random.default_rng(8).random(-(-SIZE // 256)).astype(np.float32)
PLACES = np.array([0, 3, 250])


def halves(values: np.ndarray, at: int = CHUNK) -> list[np.ndarray]:
    return [values[:at], values[at:]]


def sparse_chunks() -> tuple[list[Steps], np.ndarray]:
    values = DIFFERENCES[:3]
    whole = np.zeros(SIZE, np.float32)
    whole[PLACES], whole[CHUNK + PLACES] = values, values
    return [SparseElements(CHUNK, PLACES, values), SparseElements(SIZE - CHUNK, PLACES, values)], whole


WAYS: dict[str, tuple[Sequence[np.ndarray | Steps], np.ndarray]] = {
    "float32": (halves(DIFFERENCES), DIFFERENCES),
    "bfloat16": (halves(DIFFERENCES.astype(NUMPY_DTYPES["BF16"])), DIFFERENCES.astype(NUMPY_DTYPES["BF16"])),
    "scaled": (
        [
            ScaledCodes(codes, scales, 256)
            for codes, scales in zip(halves(CODES), halves(SCALES, CHUNK // 256), strict=True)
        ],
        CODES * np.repeat(SCALES, 256)[:SIZE],
    ),
    "sparse": sparse_chunks(),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_was_sent_as_differences_is_added_without_the_base(way: str) -> None:
    found, differences = WAYS[way]
    sender, other = Sent(found, (SIZE,)), ArrayTensor(BASE + np.float32(0.5))
    merged = to_array(mean_step(ArrayTensor(BASE), [(1, sender), (3, other)]))
    oracle = BASE + (differences.astype(np.float64) + 3 * 0.5) / 4
    np.testing.assert_allclose(merged, oracle, rtol=2**-23, atol=128 * ROUNDING)
    assert sender.reads == [1]


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16"])
def test_differences_of_zero_leave_every_bit_whatever_their_sign(dtype: DType) -> None:
    base = ArrayTensor(np.array([0.0, -0.0, -3.3, 1e-7], dtype=NUMPY_DTYPES[dtype]), dtype)
    minus = np.full(4, -0.0, np.float32)
    ways: list[np.ndarray | Steps] = [
        minus,
        ScaledCodes(np.zeros(4, np.int8), np.ones(1, np.float32), 256),
        SparseElements(4, np.array([0, 1]), minus[:2]),
    ]
    merged = to_array(mean_step(base, [(1, Sent([way], (4,), dtype)) for way in ways]))
    assert bytes(as_bytes(merged)) == bytes(as_bytes(base.values))


def test_several_sums_of_the_same_differences_read_them_once() -> None:
    sender, base = Sent([DIFFERENCES[:4]], (4,)), ArrayTensor(BASE[:4])
    tensors = [mean_step(base, [(1, sender)]), weighted_steps(base, [(-2.0, sender)])]
    assert related(tensors) == [tensors]
    ((merged, total),) = lockstep(tensors)
    np.testing.assert_allclose(merged, BASE[:4] + DIFFERENCES[:4], rtol=2**-23)
    np.testing.assert_array_equal(total, -2 * DIFFERENCES[:4])
    assert sender.reads == [1]


def test_what_may_be_sent_as_differences_but_was_not_is_read_as_it_is() -> None:
    base = ArrayTensor(BASE[:4])

    class AsValues(Sent):
        def chunks(self) -> Iterator[np.ndarray]:
            yield from self.found  # type: ignore[misc]

    sender = AsValues([BASE[:4] + 1], (4,), sent_as_steps=False)
    np.testing.assert_array_equal(to_array(mean_step(base, [(1, sender)])), BASE[:4] + 1)


def test_what_is_stretched_goes_further_the_same_way() -> None:
    base, end = ArrayTensor(np.ones(3, np.float32)), ArrayTensor(np.full(3, 2, np.float32))
    # 1 + 2.5 * (2 - 1) = 3.5, and stretched twice 1 + 0.5 * 2.5 * (2 - 1) = 2.25
    np.testing.assert_array_equal(to_array(StretchedStep(base, end, 2.5)), [3.5, 3.5, 3.5])
    twice = StretchedStep(base, StretchedStep(base, end, 2.5), 0.5)
    for found in (twice, mean_step(base, [(7, twice)])):
        np.testing.assert_array_equal(to_array(found), [2.25, 2.25, 2.25])


class Counted(ArrayTensor):
    """A tensor that counts how often it is read."""

    reads = 0

    def chunks(self) -> Iterator[np.ndarray]:
        object.__setattr__(self, "reads", self.reads + 1)
        return super().chunks()


def added(*sources: Tensor, calls: list[int] | None = None) -> ComputedTensor:
    def add(parts: Sequence[np.ndarray]) -> np.ndarray:
        if calls is not None:
            calls.append(len(parts[0]))
        return np.sum(parts, axis=0)

    return ComputedTensor(sources[0].shape, "F32", sources, add)


def test_in_lockstep_what_several_need_is_read_and_computed_once_a_chunk() -> None:
    values = np.arange(2 * CHUNK + 1, dtype=np.float32)
    source, calls = Counted(values), list[int]()
    double = added(source, source, calls=calls)
    outputs = [added(double, source), double, added(double, double)]
    read = [np.concatenate(chunks) for chunks in zip(*lockstep(outputs), strict=True)]
    for found, factor in zip(read, (3, 2, 4), strict=True):
        np.testing.assert_array_equal(found, factor * values)
    assert source.reads == 1
    # Each element once, in pieces that stay in a cache.
    assert sum(calls) == values.size
    assert max(calls) == PIECE


def test_each_of_several_outputs_can_be_read_alone() -> None:
    double = added(source := ArrayTensor(np.ones(3, np.float32)), source)
    np.testing.assert_array_equal(to_array(added(double, source)), [3, 3, 3])
    np.testing.assert_array_equal(to_array(double), [2, 2, 2])


def test_in_lockstep_sizes_must_agree() -> None:
    short, long = (ArrayTensor(np.ones(size, np.float32)) for size in (3, CHUNK + 1))
    with pytest.raises(ValueError, match=r"different sizes.*\[3, 262145\]"):
        list(lockstep([long, short]))


class Watched(ArrayTensor):
    """A tensor that counts the chunks of its class that are in memory."""

    alive: ClassVar[list[int]] = []
    most: ClassVar[int] = 0

    def chunks(self) -> Iterator[np.ndarray]:
        return map(self._copied, super().chunks())

    @classmethod
    def _copied(cls, chunk: np.ndarray) -> np.ndarray:
        copied: np.ndarray = chunk.copy()
        cls.alive.append(id(copied))
        cls.most = max(cls.most, len(cls.alive))
        finalize(copied, cls.alive.remove, id(copied))
        return copied


def test_a_sum_holds_a_chunk_of_one_sender_and_the_next_however_many_there_are() -> None:
    base, values = ArrayTensor(np.zeros(CHUNK + 5, np.float32)), np.ones(CHUNK + 5, np.float32)
    merged = to_array(mean_step(base, [(1.0, Watched(values)) for _ in range(20)]))
    np.testing.assert_allclose(merged, values, rtol=1e-6)
    assert Watched.most == 2


def test_a_tensor_with_more_elements_than_its_shape_is_an_error() -> None:
    class Longer(ArrayTensor):
        def chunks(self) -> Iterator[np.ndarray]:
            yield from (self.values, self.values)

    base, sender = ArrayTensor(np.zeros(3, np.float32)), Longer(np.ones(3, np.float32))
    with pytest.raises(ValueError, match="more chunks"):
        to_array(mean_step(base, [(1.0, sender), (1.0, sender)]))


def test_what_shares_a_source_however_deep_is_grouped() -> None:
    a, b, c, d = (ArrayTensor(np.ones(1, np.float32)) for _ in range(4))
    on_a, on_b, deep, on_c = added(a), added(b), added(added(a), d), added(c)
    assert related([on_a, on_b, deep, on_c]) == [[on_a, deep], [on_b], [on_c]]
    # One that needs both brings two groups together; a tensor that is another's source belongs to it.
    assert related([on_a, on_b, added(a, b), c, on_c])[0][:2] == [on_a, on_b]
    assert [len(group) for group in related([on_a, on_b, added(a, b), c, on_c])] == [3, 2]


def test_squares_are_summed_in_one_row_and_in_many_and_beyond_float32() -> None:
    dice = np.random.default_rng(0)
    for size in (0, 1, 4095, 4096, 4097, 100_000):
        steps = dice.standard_normal(size).astype(np.float32)
        assert squares(steps) == pytest.approx(float((steps.astype(np.float64) ** 2).sum()), rel=1e-6)
    assert squares(np.array([3e38, 3e38], np.float32)) == pytest.approx(1.8e77, rel=1e-6)
    assert math.isinf(squares(np.array([np.inf, 1], np.float32)))
    assert math.isnan(squares(np.array([np.nan, 1], np.float32)))
