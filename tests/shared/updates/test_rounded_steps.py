"""Steps of versions in 8 bits: unbiased, the same whenever they are read, and exact in a difference."""

from __future__ import annotations

import io

import numpy as np
import pytest

from tessera.shared.model.blocks import Block
from tessera.shared.tensors.lazy import CHUNK, Array, ArrayTensor, Tensor, to_array
from tessera.shared.updates.codecs import pipeline
from tessera.shared.updates.rounded_steps import CODEC, LEAST_ELEMENTS, RoundedStep, rounded, write_difference
from tessera.shared.updates.update_file import EncodedTensor, TrainedBlock, read_update

SIZE = CHUNK + 777


def values(size: int, scale: float, seed: int = 0) -> Array:
    return (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)


def version(start: Array, moved: Array, seed: int = 1) -> Array:
    return to_array(RoundedStep(ArrayTensor(start), ArrayTensor(moved), seed))


def sent(start: Array, value: Array) -> tuple[EncodedTensor, int]:
    """A block as a difference brings it, and the difference's bytes."""
    block, base = Block(tensor="t", role="other", shape=start.shape, dtype="F32"), ArrayTensor(start)
    file = io.BytesIO()
    write_difference(file, [TrainedBlock(block, ArrayTensor(value), base)])
    data = file.getvalue()
    return read_update(lambda: io.BytesIO(data), len(data), {"t": block}, {"t": base})["t"], len(data)


@pytest.mark.parametrize("weight", [1e-6, 0.02, 1.0, 100.0])
@pytest.mark.parametrize("step", [1e-2, 1e-4, 1e-6, 1e-8, 1e-42])
def test_a_difference_in_8_bits_has_the_bits_of_the_version(weight: float, step: float) -> None:
    start = values(SIZE, weight)
    value = version(start, start + values(SIZE, step, 1))
    found, nbytes = sent(start, value)
    assert to_array(found).tobytes() == value.tobytes()
    assert found.codec == CODEC
    assert nbytes < 0.26 * start.nbytes


def test_rounding_has_no_bias_and_little_error() -> None:
    start, step = np.zeros(SIZE, np.float32), values(SIZE, 1e-3, 1)
    found = np.stack([version(start, step, seed) for seed in range(16)]).astype(np.float64)
    error = np.linalg.norm(found[0] - step) / np.linalg.norm(step)
    assert error < 0.016
    # The mean of 16 independent errors is a quarter of one.
    assert np.linalg.norm(found.mean(axis=0) - step) / np.linalg.norm(step) == pytest.approx(error / 4, rel=0.02)


def test_no_element_moves_by_a_64th_of_the_largest_step_beside_it() -> None:
    start, step = np.zeros(SIZE, np.float32), values(SIZE, 1e-3, 1)
    wrong = np.abs(version(start, step) - step)
    for at in range(0, SIZE, 256):
        assert wrong[at : at + 256].max() < np.abs(step[at : at + 256]).max() / 63


def test_each_reading_gives_the_same_bits_and_another_seed_others() -> None:
    start = values(SIZE, 0.02)
    tensor = RoundedStep(ArrayTensor(start), ArrayTensor(start + values(SIZE, 1e-4, 1)), 7)
    assert to_array(tensor).tobytes() == to_array(tensor).tobytes()
    assert to_array(tensor).tobytes() != version(start, to_array(tensor.moved), 8).tobytes()


def test_a_block_that_did_not_change_keeps_its_bits() -> None:
    start = values(SIZE, 0.02)
    start[::3] = -0.0
    assert version(start, start.copy()).tobytes() == start.tobytes()


def test_negative_zeros_beside_a_change_are_sent_exactly() -> None:
    start, moved = np.full(SIZE, -0.0, np.float32), np.full(SIZE, -0.0, np.float32)
    moved[5] = 1e-3
    value = version(start, moved)
    found, _ = sent(start, value)
    assert to_array(found).tobytes() == value.tobytes()


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_left_and_sent_lossless(wrong: float) -> None:
    start = values(SIZE, 0.02)
    moved = start + values(SIZE, 1e-4, 1)
    moved[100] = wrong
    value = version(start, moved)
    found, _ = sent(start, value)
    assert to_array(found).tobytes() == value.tobytes()
    assert value[:CHUNK].tobytes() == moved[:CHUNK].tobytes()


def test_a_step_that_was_not_rounded_is_sent_lossless() -> None:
    start = values(SIZE, 0.02)
    value = start + values(SIZE, 1e-4, 1)
    found, _ = sent(start, value)
    assert to_array(found).tobytes() == value.tobytes()
    assert pipeline.parse(found.codec).lossless


def test_only_large_float32_blocks_that_changed_are_rounded() -> None:
    large = ArrayTensor(values(LEAST_ELEMENTS, 1.0))
    before: dict[str, Tensor] = {
        "large": large,
        "same": large,
        "small": ArrayTensor(values(LEAST_ELEMENTS - 1, 1.0)),
        "half": ArrayTensor(large.values.astype(np.float16), "F16"),
    }
    after: dict[str, Tensor] = {name: ArrayTensor(to_array(t), t.dtype) for name, t in before.items()}
    after["same"] = large
    found = rounded(before, after, 0)
    assert isinstance(found["large"], RoundedStep)
    assert all(found[name] is after[name] for name in ("same", "small", "half"))
