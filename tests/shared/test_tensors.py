"""Chunked arithmetic, against the same sums in one piece of float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from shared.blocks import NUMPY_DTYPES, DType
from shared.tensors import (
    CHUNK,
    PIECE,
    ArrayTensor,
    Computed,
    Tensor,
    as_bytes,
    chunk_counts,
    digest_of,
    from_bytes,
    lockstep,
    mean_step,
    related,
    to_array,
)

FLOATS = st.floats(-1e6, 1e6, width=32)
ROWS = hnp.arrays(np.float32, (3, 5), elements=FLOATS)
SENDERS = st.lists(st.tuples(st.integers(1, 1000), ROWS), min_size=1, max_size=4)
ANY_DTYPE = pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16"])


@given(base=ROWS, senders=SENDERS)
def test_the_mean_step_is_the_weighted_mean_in_float64(
    base: np.ndarray, senders: list[tuple[int, np.ndarray]]
) -> None:
    merged = to_array(mean_step(ArrayTensor(base), [(w, ArrayTensor(a)) for w, a in senders]))
    total = sum(weight for weight, _ in senders)
    oracle = sum(weight * array.astype(np.float64) for weight, array in senders) / total
    # One rounding to float32, and float64's own at the size of the largest number summed.
    np.testing.assert_allclose(merged, oracle, rtol=2**-23, atol=1e6 * 2**-48)


@given(base=ROWS, senders=SENDERS, absent=st.integers(0, 1000))
def test_a_step_over_the_whole_cohort_is_damped_by_the_share_that_sent(
    base: np.ndarray, senders: list[tuple[int, np.ndarray]], absent: int
) -> None:
    total = sum(weight for weight, _ in senders) + absent
    merged = to_array(mean_step(ArrayTensor(base), [(w, ArrayTensor(a)) for w, a in senders], whole=total))
    start = base.astype(np.float64)
    oracle = start + sum(w * (a.astype(np.float64) - start) for w, a in senders) / total
    np.testing.assert_allclose(merged, oracle, rtol=2**-23, atol=1e6 * 2**-48)


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
def test_the_order_of_the_senders_moves_the_mean_by_no_bit_of_float32(senders: list[tuple[int, float]]) -> None:
    base = ArrayTensor(np.linspace(-1, 1, 50, dtype=np.float32))
    moved = [(weight, ArrayTensor(to_array(base) + np.float32(step))) for weight, step in senders]
    assert to_array(mean_step(base, moved)).tobytes() == to_array(mean_step(base, sorted_by(moved))).tobytes()


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


class Counted(ArrayTensor):
    """A tensor that counts how often it is read."""

    reads = 0

    def chunks(self) -> Iterator[np.ndarray]:
        object.__setattr__(self, "reads", self.reads + 1)
        return super().chunks()


def added(*sources: Tensor, calls: list[int] | None = None) -> Computed:
    def add(parts: Sequence[np.ndarray]) -> np.ndarray:
        if calls is not None:
            calls.append(len(parts[0]))
        return np.sum(parts, axis=0)

    return Computed(sources[0].shape, "F32", sources, add)


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
    with pytest.raises(ValueError, match="shorter"):
        list(lockstep([long, short]))


def test_what_shares_a_source_however_deep_is_grouped() -> None:
    a, b, c, d = (ArrayTensor(np.ones(1, np.float32)) for _ in range(4))
    on_a, on_b, deep, on_c = added(a), added(b), added(added(a), d), added(c)
    assert related([on_a, on_b, deep, on_c]) == [[on_a, deep], [on_b], [on_c]]
    # One that needs both brings two groups together; a tensor that is another's source belongs to it.
    assert related([on_a, on_b, added(a, b), c, on_c])[0][:2] == [on_a, on_b]
    assert [len(group) for group in related([on_a, on_b, added(a, b), c, on_c])] == [3, 2]
