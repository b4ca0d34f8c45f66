"""Many small sums computed as one: the same bits as each alone."""

from __future__ import annotations

import numpy as np
import pytest

from tessera.shared.tensors.bundles import bundled, bundles
from tessera.shared.tensors.dtypes import NUMPY_DTYPES, DType
from tessera.shared.tensors.lazy import CHUNK, PIECE, Array, ArrayTensor, SteppedTensor, Tensor, mean_step

SHAPES = ((3, 5), (7,), (1,), (16, 4))


def values(dice: np.random.Generator, shape: tuple[int, ...], dtype: DType) -> ArrayTensor:
    return ArrayTensor(dice.standard_normal(shape).astype(NUMPY_DTYPES[dtype]), dtype)


def sums(senders: int, dtype: DType = "F32", shapes: tuple[tuple[int, ...], ...] = SHAPES) -> list[SteppedTensor]:
    """A mean of each block over these senders of different weights."""
    dice = np.random.default_rng(0)
    return [
        mean_step(values(dice, shape, dtype), [(float(n + 1), values(dice, shape, dtype)) for n in range(senders)])
        for shape in shapes
    ]


def flat(tensor: Tensor) -> Array:
    return np.concatenate(list(tensor.chunks()))


@pytest.mark.parametrize("dtype", ["F32", "F64", "BF16", "F16"])
@pytest.mark.parametrize("senders", [1, 2, 9])
def test_a_bundle_has_the_bits_of_its_tensors(senders: int, dtype: DType) -> None:
    alone = sums(senders, dtype)
    assert bundles([[tensor] for tensor in alone]) == [[0, 1, 2, 3]]
    expected = b"".join(flat(tensor).tobytes() for tensor in alone)
    assert flat(bundled(alone)).tobytes() == expected


def test_only_small_sums_over_the_same_weights_and_types_are_bundled() -> None:
    two, three, wide = sums(2), sums(3), sums(2, "F64")
    large = sums(2, shapes=((PIECE + 1,),))
    groups: list[list[Tensor]] = [[two[0]], [three[0]], [wide[0]], [large[0]], [two[0].step], [two[1]], [three[1]]]
    assert bundles(groups) == [[0, 5], [1, 6], [2], [3], [4]]
    # Tensors that share a source are computed in lockstep as they are.
    assert bundles([[two[0], two[1]], [two[2]]]) == [[0], [1]]


def test_a_bundle_is_one_chunk_at_most() -> None:
    count = CHUNK // PIECE + 1
    alone = sums(1, shapes=((PIECE,),) * count)
    assert bundles([[tensor] for tensor in alone]) == [list(range(count - 1)), [count - 1]]
