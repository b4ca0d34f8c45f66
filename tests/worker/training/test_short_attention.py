"""Attention over few keys in bfloat16 on the CPU, beside torch's fused call."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as fused
from torch.utils._python_dispatch import TorchDispatchMode

from tessera.shared.methods.base import MethodSpec, Phase, Plan, RunInfo
from tessera.shared.methods.registry import worker_half
from tessera.shared.model.selectors import EVERYTHING
from tessera.shared.run_settings import Training
from tessera.worker.data.dataset import Dataset
from tessera.worker.model.block_map import block_table
from tessera.worker.model.build import instantiate
from tessera.worker.training.context import LocalTaskContext
from tessera.worker.training.optimization import precision as precisions
from tessera.worker.training.optimization.precision import autocast
from tessera.worker.training.optimization.short_attention import MOST_KEYS, attention, short_attention
from tessera.worker.training.setup import TrainingSetup
from tessera.worker.training.trainer import Trainer
from tests.support.tasks import CPU

Precision = Literal["float32", "bfloat16", "float16"]
GPU = torch.device("cuda")
BERT = {
    "model_type": "bert", "vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 200, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


def parts(queries: int = 5, keys: int = 7, heads: int = 4, key_heads: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(3, heads, queries, 6, generator=generator),
        torch.randn(3, key_heads, keys, 6, generator=generator),
        torch.randn(3, key_heads, keys, 8, generator=generator),
    )


SEEN = torch.rand(3, 1, 5, 7, generator=torch.Generator().manual_seed(2)) > 0.4
SEEN[..., 0] = True


@pytest.fixture(autouse=True)
def _has_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same on all CPUs."""
    monkeypatch.setattr(precisions, "multiplies_bfloat16", lambda: True)


def test_a_cpu_without_instructions_for_bfloat16_computes_a_run_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    model, words = instantiate(BERT, "text-classification", seed=0), torch.randint(0, 50, (2, 9))
    exact, half = model(input_ids=words).logits, Training(precision="bfloat16")
    with autocast(half, CPU):
        assert not torch.equal(model(input_ids=words).logits, exact)
    monkeypatch.setattr(precisions, "multiplies_bfloat16", lambda: False)
    with autocast(half, CPU), short_attention(half, CPU), Fused() as found:
        assert torch.equal(model(input_ids=words).logits, exact)
    assert found.count == 2


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ({}, {}),
        ({}, {"attn_mask": SEEN}),
        ({}, {"attn_mask": SEEN[:1, :, :1]}),
        ({}, {"attn_mask": torch.randn(1, 4, 5, 7, generator=torch.Generator().manual_seed(3))}),
        ({}, {"is_causal": True}),
        ({"queries": 7, "keys": 5}, {"is_causal": True}),
        ({}, {"scale": 0.3}),
        ({"key_heads": 2}, {"enable_gqa": True}),
    ],
)
def test_it_has_the_fused_call_s_values_and_gradients(shape: dict[str, int], options: dict[str, Any]) -> None:
    given = parts(**shape)
    made = []
    for function in (attention, fused):
        inputs = [each.clone().requires_grad_() for each in given]
        output = function(*inputs, **options)
        output.sin().sum().backward()
        made.append([output, *(each.grad for each in inputs)])
    for ours, theirs in zip(*made, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_dropout_leaves_out_its_share_of_probabilities_and_keeps_their_mean() -> None:
    query, key = torch.zeros(1, 1, 4000, 2), torch.zeros(1, 1, 10, 2)
    kept = attention(query, key, torch.ones(1, 1, 10, 1), dropout_p=0.25)
    counts = (kept * 0.75 * 10).round()  # of kept keys
    assert float(counts.mean()) == pytest.approx(7.5, abs=0.15)
    assert len(counts.unique()) > 3


def test_padding_that_sees_no_key_has_finite_gradients() -> None:
    query, key, value = (each.requires_grad_() for each in parts())
    attention(query, key, value, attn_mask=torch.zeros(3, 1, 5, 7, dtype=torch.bool)).sum().backward()
    assert all(bool(each.grad.isfinite().all()) for each in (query, key, value) if each.grad is not None)


class Fused(TorchDispatchMode):
    """Counts the fused kernel's forward passes."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "flash_attention_for_cpu" in str(function) and "backward" not in str(function)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("precision", "device", "keys", "trains", "fused_layers"),
    [
        ("bfloat16", CPU, 9, True, 0),
        ("float16", CPU, MOST_KEYS, True, 0),
        ("bfloat16", CPU, MOST_KEYS + 1, True, 2),
        ("bfloat16", CPU, 9, False, 2),
        ("float32", CPU, 9, True, 2),
        ("bfloat16", GPU, 9, True, 2),
    ],
)
def test_it_takes_the_place_of_the_fused_call_where_that_is_slow(
    precision: Precision,
    device: torch.device,
    keys: int,
    trains: bool,
    fused_layers: int,
) -> None:
    model = instantiate(BERT, "text-classification", seed=0)
    training, words = Training(precision=precision), torch.randint(0, 50, (2, keys))
    # The model is on the CPU also where a GPU is named.
    with Fused() as found, autocast(training, CPU), torch.set_grad_enabled(trains):
        with short_attention(training, device):
            model(input_ids=words)
        assert found.count == fused_layers
        # Outside the block nothing is changed.
        model(input_ids=words)
    assert found.count == fused_layers + 2


@pytest.mark.parametrize("again", [False, True])
def test_a_task_in_bfloat16_has_gradients_near_those_of_float32(again: bool) -> None:
    words = torch.randint(0, 50, (4, 9), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(words)
    mask[0, 5:] = 0
    data = Dataset({"input_ids": words, "attention_mask": mask, "labels": torch.tensor([0, 1, 1, 0])})
    steps, passes = [], []
    both: tuple[Precision, ...] = ("float32", "bfloat16")
    for precision in both:
        model = instantiate(BERT, "text-classification", seed=0)
        before = weights(model)
        context = LocalTaskContext(model, "text-classification", Plan(), block_table(model))
        training = Training(
            optimizer="sgd", learning_rate=0.1, weight_decay=0, precision=precision, gradient_checkpointing=again
        )
        half = worker_half(MethodSpec(name="fedavg"), RunInfo(tuple(context.blocks), rounds=1, training=training))
        with Fused() as found:
            Trainer(half, context, training, TrainingSetup(CPU), lambda: None).train([Phase(EVERYTHING)], data, 0)
        steps.append(weights(model) - before)
        passes.append(found.count)
    exact, rough = steps
    assert passes == [4 if again else 2, 0]
    assert 0 < float((exact - rough).norm()) < 0.02 * float(exact.norm())


def weights(model: torch.nn.Module) -> Tensor:
    return torch.cat([each.detach().flatten() for each in model.parameters()])
