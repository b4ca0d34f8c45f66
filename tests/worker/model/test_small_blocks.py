"""Many small blocks at once: the bits are those of one block after the other."""

import numpy as np
import pytest
import torch
from torch import Tensor

from tessera.shared.model.blocks import Block, TensorSlice
from tessera.shared.tensors.dtypes import DType
from tessera.shared.tensors.lazy import PIECE
from tessera.worker.errors import ModelMismatch
from tessera.worker.model.build import read_block
from tessera.worker.model.small_blocks import read_blocks, write_blocks

KINDS: dict[DType, torch.dtype] = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16}
KINDS["BF16"] = torch.bfloat16


def tensors() -> dict[str, Tensor]:
    """Tensors of every kind, of any layout in memory."""
    made: dict[str, Tensor] = {"large": torch.randn(PIECE + 1), "turned": torch.randn(5, 3).T}
    for kind, dtype in KINDS.items():
        made |= {f"{kind}.scalar": torch.randn(()).to(dtype), f"{kind}.matrix": torch.randn(3, 4).to(dtype)}
    return made


def blocks_of(given: dict[str, Tensor]) -> list[Block]:
    names = {dtype: kind for kind, dtype in KINDS.items()}
    return [
        Block(tensor=name, role="other", shape=tuple(tensor.shape), dtype=names[tensor.dtype])
        for name, tensor in given.items()
    ]


def test_blocks_are_read_as_one_by_one() -> None:
    given = tensors()
    part = TensorSlice(label="query", axis=0, spans=((1, 3),))
    blocks = [*blocks_of(given), Block(tensor="F32.matrix", part=part, role="query", shape=(2, 4), dtype="F32")]
    read = read_blocks(given, blocks)
    assert list(read) == [block.name for block in blocks]
    for block in blocks:
        expected, found = read_block(given, block), read[block.name]
        assert (found.shape, found.dtype, found.tobytes()) == (expected.shape, expected.dtype, expected.tobytes())


def test_what_was_read_does_not_change_with_the_model() -> None:
    given = {"a": torch.ones(3), "b": torch.ones(2, 2)}
    read = read_blocks(given, blocks_of(given))
    given["a"].add_(1)
    assert [values.sum() for values in read.values()] == [3.0, 4.0]


def test_blocks_are_written_as_they_were_read() -> None:
    given = tensors()
    blocks = blocks_of(given)
    data = [(block, read_block(given, block).tobytes()) for block in blocks]
    empty = {name: torch.zeros_like(tensor) for name, tensor in given.items()}
    assert write_blocks(empty, data)
    assert all(torch.equal(empty[name], tensor) for name, tensor in given.items())
    assert write_blocks({}, [])


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["F64.matrix", "BF16.scalar", "large"])
def test_values_that_are_not_finite_are_noticed(name: str, wrong: float) -> None:
    given = tensors()
    given[name].view(-1)[-1] = wrong
    assert not write_blocks(given, [(block, read_block(given, block).tobytes()) for block in blocks_of(given)])


def test_a_block_that_the_model_lacks_is_named() -> None:
    given = {"a": torch.ones(3)}
    wrong = [Block(tensor="a", role="other", shape=(2,), dtype="F32")]
    with pytest.raises(ModelMismatch, match="a: F32"):
        read_blocks(given, wrong)
    with pytest.raises(ModelMismatch, match="a: F32"):
        write_blocks(given, [(wrong[0], np.ones(2, np.float32).tobytes())])
