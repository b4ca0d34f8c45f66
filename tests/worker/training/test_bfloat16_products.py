"""Products of bfloat16 matrices on a CPU without instructions for them, beside float32."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from tessera.shared.methods.base import MethodSpec, Phase, Plan, RunInfo
from tessera.shared.methods.registry import worker_half
from tessera.shared.model.selectors import EVERYTHING
from tessera.shared.run_settings import Training
from tessera.worker.data.dataset import Dataset
from tessera.worker.model.block_map import block_table
from tessera.worker.model.build import instantiate
from tessera.worker.training.context import LocalTaskContext
from tessera.worker.training.optimization import bfloat16_products as products
from tessera.worker.training.optimization.bfloat16_products import InFloat32
from tessera.worker.training.setup import TrainingSetup
from tessera.worker.training.trainer import Trainer
from tests.support.tasks import CPU

HALF = torch.bfloat16
BERT = {
    "model_type": "bert", "vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
VIT = {
    "model_type": "vit", "image_size": 8, "patch_size": 4, "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_channels": 1,
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2", "vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 20,
    "pad_token_id": 0, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
}  # fmt: skip
MULTIPLY = ("mm", "mv", "dot", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward", "flash_attention")
"""Parts of the names of torch's products, forward and backward."""


class Multiplied(TorchDispatchMode):
    """Collects the dtypes in which torch multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(name in str(function) for name in MULTIPLY):
            self.dtypes |= {each.dtype for each in args if isinstance(each, Tensor)}
        return function(*args, **(kwargs or {}))


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize(
    ("multiply", "shapes"),
    [
        (functional.linear, [(5, 3, 8), (4, 8), (4,)]),
        (functional.linear, [(5, 8), (4, 8)]),
        (functional.linear, [(8,), (4, 8), (4,)]),
        (torch.addmm, [(4,), (5, 8), (8, 4)]),
        (torch.addmm, [(5, 4), (5, 8), (8, 4)]),
        (torch.baddbmm, [(2, 5, 4), (2, 5, 8), (2, 8, 4)]),
        (torch.matmul, [(2, 3, 5, 8), (2, 3, 8, 4)]),
        (torch.mm, [(5, 8), (8, 4)]),
        (torch.bmm, [(2, 5, 8), (2, 8, 4)]),
        (lambda left, right: left @ right, [(5, 8), (8, 4)]),
        (lambda left, right: left.matmul(right), [(5, 8), (8, 4)]),
        (lambda given, weight: functional.linear(input=given, weight=weight), [(5, 8), (4, 8)]),
        (functional.linear, [(5, 8), (8,)]),
        (lambda left, right: functional.conv2d(left, right, stride=2), [(2, 3, 8, 8), (4, 3, 2, 2)]),
        (functional.scaled_dot_product_attention, [(2, 2, 5, 8), (2, 2, 7, 8), (2, 2, 7, 6)]),
    ],
)
def test_a_product_and_its_gradients_are_those_of_rounded_operands(
    multiply: Callable[..., Tensor], shapes: list[tuple[int, ...]], autocast: bool
) -> None:
    dtype = torch.float32 if autocast else HALF
    given = [random(*shape).to(dtype).requires_grad_() for shape in shapes]
    with Multiplied() as found:
        with torch.autocast("cpu", dtype=HALF, enabled=autocast), InFloat32():
            output = multiply(*given)
        (output.float() * random(*output.shape)).sum().backward()
    assert output.dtype is HALF
    assert found.dtypes == {torch.float32}
    exact = [each.detach().to(HALF).float().requires_grad_() for each in given]
    expected = multiply(*exact)
    (expected * random(*output.shape)).sum().backward()
    torch.testing.assert_close(output.float(), expected, rtol=0.01, atol=0.01)
    for ours, theirs in zip(given, exact, strict=True):
        assert ours.grad is not None
        assert ours.grad.dtype is dtype
        torch.testing.assert_close(ours.grad.float(), theirs.grad, rtol=0.02, atol=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_products_are_left_alone(dtype: torch.dtype) -> None:
    left, right = random(5, 8).to(dtype), random(8, 4).to(dtype)
    expected = left @ right
    with InFloat32():
        assert torch.equal(left @ right, expected)
        assert (torch.arange(4) @ torch.arange(4)).item() == 14


def test_a_product_into_a_given_tensor_is_written_there() -> None:
    left, right, output = random(5, 8).to(HALF), random(8, 4).to(HALF), torch.zeros(5, 4, dtype=HALF)
    with InFloat32():
        torch.mm(left, right, out=output)
    torch.testing.assert_close(output.float(), left.float() @ right.float(), rtol=0.01, atol=0.01)


def test_a_layer_keeps_its_own_weights_and_its_input_in_bfloat16_for_the_backward_pass() -> None:
    layer, kept = nn.Linear(8, 4), list[Tensor]()

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    keeping = torch.autograd.graph.saved_tensors_hooks(note, lambda each: each)
    with keeping, torch.autocast("cpu", dtype=HALF), InFloat32():
        layer(random(5, 8).requires_grad_())
    given, *own = kept
    assert given.dtype is HALF
    assert [each.data_ptr() for each in own] == [layer.weight.data_ptr(), layer.bias.data_ptr()]


def test_a_frozen_layer_computes_no_gradient_of_its_weights() -> None:
    layer, given = nn.Linear(8, 4).requires_grad_(requires_grad=False), random(5, 8).requires_grad_()
    with Multiplied() as found, torch.autocast("cpu", dtype=HALF), InFloat32():
        layer(given).sum().backward()
    assert found.dtypes == {torch.float32}
    assert given.grad is not None
    assert layer.weight.grad is None


def test_gradients_of_each_example_can_be_batched() -> None:
    layer, given = nn.Linear(8, 4), random(5, 8)
    values = {name: each.detach() for name, each in layer.named_parameters()}

    def loss(values: dict[str, Tensor], example: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=HALF), InFloat32():
            return functional_call(layer, values, (example[None],)).float().square().sum()

    batched = vmap(grad(loss), in_dims=(None, 0))(values, given)
    for index, example in enumerate(given):
        for name, alone in grad(loss)(values, example).items():
            torch.testing.assert_close(batched[name][index], alone, rtol=0.01, atol=0.01)


def words() -> Dataset:
    ids = torch.randint(0, 50, (4, 9), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    return Dataset({"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([0, 1, 1, 0])})


def images() -> Dataset:
    return Dataset({"pixel_values": random(4, 1, 8, 8), "labels": torch.tensor([0, 1, 1, 0])})


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(
    ("config", "head", "data"),
    [
        (BERT, "text-classification", words),
        pytest.param(GPT2, "text-classification", words, marks=pytest.mark.long),
        (VIT, "image-classification", images),
    ],
)
def test_a_task_multiplies_in_float32_and_moves_as_one_in_float32(
    config: dict[str, Any], head: Any, data: Callable[[], Dataset], again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No test can take its instructions from a CPU that has them.
    monkeypatch.setattr(products, "is_native", lambda: False)
    given, moves = data(), list[Tensor]()
    settings = {"optimizer": "sgd", "learning_rate": 0.1, "weight_decay": 0, "gradient_checkpointing": again}
    for precision in ("float32", "bfloat16"):
        model = instantiate(config, head, seed=0)
        before = weights(model)
        context = LocalTaskContext(model, head, Plan(), block_table(model))
        training = Training.model_validate({**settings, "precision": precision})
        half = worker_half(MethodSpec(name="fedavg"), RunInfo(tuple(context.blocks), rounds=1, training=training))
        watch: AbstractContextManager[Any] = Multiplied() if precision == "bfloat16" else nullcontext()
        with watch as found:
            Trainer(half, context, training, TrainingSetup(CPU), lambda: None).train([Phase(EVERYTHING)], given, 0)
        moves.append(weights(model) - before)
    exact, rough = moves
    assert found.dtypes == {torch.float32}
    assert 0 < float((exact - rough).norm()) < 0.03 * float(exact.norm())


def weights(model: nn.Module) -> Tensor:
    return torch.cat([each.detach().flatten() for each in model.parameters()])
