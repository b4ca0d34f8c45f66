"""Trust in the values of a kept model: only in those that nothing may have written."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tessera.worker.model.block_map import named_tensors
from tessera.worker.model.build import memory_of, read_block
from tessera.worker.model.held_values import SAMPLES, HeldValues
from tests.support.tasks import EACH_METHOD, one_task, subject_of

NAME, CONTENT = "weight", ("sha256:1",)


def held(tensor: Tensor) -> HeldValues:
    found = HeldValues()
    found.note(NAME, tensor, CONTENT)
    return found


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.arange(1, 1 + int(np.prod(shape)), dtype=torch.float32).reshape(shape))


@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (10 * SAMPLES + 1,)])
def test_what_was_written_is_trusted_until_another_block_is_asked_for(shape: tuple[int, ...]) -> None:
    tensor = parameter(*shape)
    found = held(tensor)
    assert found.has(NAME, tensor, CONTENT)
    assert not found.has(NAME, tensor, ("sha256:2",))
    assert not found.has(NAME, tensor, (*CONTENT, "sha256:2"))
    assert not found.has("bias", tensor, CONTENT)
    assert not HeldValues().has(NAME, tensor, CONTENT)


def _in_place(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.mul_(1.5)


def _one_value(tensor: Tensor) -> None:
    tensor.detach()[1] = 7


def _data(tensor: Tensor) -> None:
    tensor.data.add_(1)


def _other_memory(tensor: Tensor) -> None:
    tensor.data = tensor.data.clone()


def _numpy(tensor: Tensor) -> None:
    tensor.detach().numpy()[...] *= 2


def _an_optimizer(tensor: Tensor) -> None:
    tensor.grad = torch.ones_like(tensor)
    torch.optim.SGD([tensor], lr=0.1).step()


def _a_fused_optimizer(tensor: Tensor) -> None:
    tensor.grad = torch.ones_like(tensor)
    torch.optim.AdamW([tensor], lr=0.1, fused=True).step()


WRITES = [_in_place, _one_value, _data, _other_memory, _numpy, _an_optimizer, _a_fused_optimizer]


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_a_tensor_that_was_written_is_not_trusted(write: Callable[[Tensor], None]) -> None:
    tensor = parameter(40, 30)
    found = held(tensor)
    write(tensor)
    assert not found.has(NAME, tensor, CONTENT)


def test_a_tensor_in_place_of_another_is_not_trusted() -> None:
    tensor = parameter(4)
    assert not held(tensor).has(NAME, nn.Parameter(tensor.detach()), CONTENT)


def test_buffers_and_tensors_that_are_not_contiguous_are_never_trusted() -> None:
    for tensor in (torch.ones(4), nn.Parameter(torch.ones(4, 3).T)):
        assert not held(tensor).has(NAME, tensor, CONTENT)


def test_what_is_forgotten_is_not_trusted() -> None:
    tensor = parameter(4)
    found = held(tensor)
    found.forget(["bias", NAME])
    assert not found.has(NAME, tensor, CONTENT)


def test_a_tensor_without_values_is_trusted_as_long_as_it_is_the_same() -> None:
    tensor = nn.Parameter(torch.empty(4, 4, device="meta"))
    assert held(tensor).has(NAME, tensor, CONTENT)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_block_s_memory_is_the_tensor_s(dtype: torch.dtype) -> None:
    subject = subject_of("fedavg")
    block, tensors = subject.document().blocks[0], named_tensors(subject.model().to(dtype))
    block = block.model_copy(
        update={"dtype": {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}[str(dtype)[6:]]}
    )
    memory = memory_of(tensors, block)
    assert memory is not None
    memory[...] = 3
    assert (tensors[block.tensor] == 3).all()
    np.testing.assert_array_equal(memory, read_block(tensors, block))


def bytes_of(tensors: Mapping[str, Tensor]) -> dict[str, bytes]:
    return {name: tensor.detach().clone().numpy().tobytes() for name, tensor in tensors.items()}


@EACH_METHOD
def test_after_a_task_of_any_method_all_that_is_trusted_has_the_bits_that_were_written(method: str) -> None:
    before: dict[str, bytes] = {}
    kept = HeldValues()

    def written(model: nn.Module) -> HeldValues:
        tensors = named_tensors(model)
        before.update(bytes_of(tensors))
        for name, tensor in tensors.items():
            kept.note(name, tensor, CONTENT)
        return kept

    context, result = one_task(method, subject=subject_of(method), written=written, optimizer="sgd")
    context.close()
    tensors = named_tensors(context.model)
    after = bytes_of(tensors)
    trusted = {name for name in before if kept.has(name, tensors[name], CONTENT)}
    assert {name for name in trusted if after[name] != before[name]} == set()
    # A method changes the blocks that it trains: only these are written again.
    sent = {block.tensor for block in context.blocks if block.name in result.upload}
    assert not trusted & sent
