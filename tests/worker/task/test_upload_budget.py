"""An update keeps to its budget, header and all, with no more error than it must."""

from __future__ import annotations

import io

import numpy as np
import pytest

from tessera.shared.model.blocks import Block
from tessera.shared.tensors.lazy import ArrayTensor, to_array
from tessera.shared.updates.codecs.pipeline import LOSSLESS
from tessera.shared.updates.update_file import EncodedTensor, TrainedBlock, read_update
from tessera.worker.task.upload_budget import OverBudget, write_within


def change(name: str, size: float, shape: tuple[int, ...] = (400, 300)) -> TrainedBlock:
    """A block whose differences are of this size."""
    rng = np.random.default_rng(len(name))
    base = rng.normal(size=shape).astype(np.float32)
    value = base + size * rng.normal(size=shape).astype(np.float32)
    return TrainedBlock(
        Block(tensor=name, role="mlp", shape=shape, dtype="F32"), ArrayTensor(value), ArrayTensor(base)
    )


CHANGES = [change("small", 1e-4), change("large", 1e-2), change("vector", 1e-3, (500,)), change("third", 1e-3)]
WHOLE = sum(each.block.nbytes for each in CHANGES)


def written(budget: int, codec: str = LOSSLESS) -> tuple[bytes, dict[str, EncodedTensor]]:
    file = io.BytesIO()
    write_within(file, codec, CHANGES, budget)
    data = file.getvalue()
    asked = {each.block.name: each.block for each in CHANGES}
    return data, read_update(lambda: io.BytesIO(data), len(data), asked, {c.block.name: c.base for c in CHANGES})


def error(sent: dict[str, EncodedTensor]) -> float:
    missed = sum(np.square(to_array(sent[c.block.name]) - to_array(c.value)).sum() for c in CHANGES)
    whole = sum(np.square(to_array(c.base) - to_array(c.value)).sum() for c in CHANGES)
    return float(np.sqrt(missed / whole))


def test_what_fits_is_sent_by_the_run_s_codec() -> None:
    data, sent = written(WHOLE)
    assert {tensor.codec for tensor in sent.values()} <= {LOSSLESS, "raw"}
    assert error(sent) == 0
    assert len(data) < WHOLE


@pytest.mark.parametrize("share", [0.9, 0.5, 0.3, 0.2, 0.12, 0.05])
def test_an_update_keeps_to_its_budget_and_uses_most_of_it(share: float) -> None:
    budget = int(share * WHOLE)
    data, sent = written(budget)
    assert len(data) <= budget
    assert len(sent) == len(CHANGES)
    if share in (0.5, 0.3, 0.2):
        assert len(data) > 0.6 * budget


def test_one_byte_too_many_is_too_many() -> None:
    fits = len(written(WHOLE // 3)[0])
    assert len(written(fits - 1)[0]) < fits


def test_the_smaller_the_budget_the_larger_the_error() -> None:
    errors = [error(written(int(share * WHOLE))[1]) for share in (0.9, 0.5, 0.3, 0.2, 0.12, 0.05)]
    assert errors == sorted(errors)
    assert errors[1] < 0.004
    assert errors[2] < 0.012


def test_blocks_that_move_least_are_sent_least_exactly() -> None:
    _, sent = written(int(0.2 * WHOLE))
    nbytes = {name: tensor.nbytes for name, tensor in sent.items()}
    assert nbytes["small"] <= nbytes["third"] <= nbytes["large"]
    assert nbytes["small"] < nbytes["large"]


def test_a_budget_that_nothing_keeps_to_is_refused_with_what_it_would_take() -> None:
    with pytest.raises(OverBudget, match=r"needs about \d+ bytes even with the smallest codecs; 900 are allowed"):
        written(900)


def test_a_codec_for_whole_matrices_is_measured_on_them() -> None:
    data, sent = written(int(0.5 * WHOLE), "delta+lowrank=4+bf16")
    assert {name: tensor.codec for name, tensor in sent.items()}["large"] == "delta+lowrank=4+bf16"
    assert len(data) < 0.05 * WHOLE
