"""Gradient checkpointing: less is kept, and every bit is the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tessera.shared.methods.base import MethodSpec, Phase, Plan, RunInfo, UnsupportedRun
from tessera.shared.methods.registry import worker_half
from tessera.shared.model.selectors import EVERYTHING, Selector, roles
from tessera.shared.model.spec import Lora
from tessera.shared.run_settings import Training
from tessera.worker.executor.stages.run_cache import structure_of
from tessera.worker.model.block_map import block_table
from tessera.worker.model.build import instantiate
from tessera.worker.training.context import LocalTaskContext
from tessera.worker.training.optimization.recomputation import recomputed
from tessera.worker.training.randomness import seed_everything
from tessera.worker.training.setup import TrainingSetup
from tessera.worker.training.trainer import Trainer
from tests.support.tasks import CPU, NORMALISED, PLAIN, VIT, images, one_task


def trained(train: Selector, *, again: bool, **more: Any) -> tuple[dict[str, Tensor], int]:
    """The weights after three steps with dropout, and the number of passes through the first layer."""
    model = instantiate({**VIT, "hidden_dropout_prob": 0.3}, "image-classification", seed=1, **more)
    passes: list[int] = []
    layers = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    layers[0].layernorm_before.register_forward_hook(lambda *_: passes.append(1))
    context = LocalTaskContext(model, "image-classification", Plan(), block_table(model))
    training = Training(batch_size=8, learning_rate=0.05, gradient_checkpointing=again)
    half = worker_half(MethodSpec(name="fedavg"), RunInfo(tuple(context.blocks), rounds=1, training=training))
    seed_everything(3)
    Trainer(half, context, training, TrainingSetup(CPU), lambda: None).train([Phase(train)], images(24), 0)
    assert not model.is_activation_checkpointing
    return {name: tensor.detach() for name, tensor in model.named_parameters()}, len(passes)


@pytest.mark.parametrize(
    ("train", "more"), [(EVERYTHING, {}), (roles("adapter", "head"), {"lora": Lora(rank=2, alpha=4)})]
)
def test_layers_are_computed_again_and_no_bit_changes(train: Selector, more: dict[str, Any]) -> None:
    (kept, once), (computed, twice) = (trained(train, again=again, **more) for again in (False, True))
    assert (once, twice) == (3, 6)
    assert all(torch.equal(kept[name], values) for name, values in computed.items())


def test_layers_that_are_computed_again_move_their_running_statistics_once() -> None:
    kept, computed = (
        one_task("fedavg", subject=NORMALISED, gradient_checkpointing=again)[1].upload for again in (False, True)
    )
    assert all(values.tobytes() == computed[name].tobytes() for name, values in kept.items())


def test_a_model_without_such_layers_is_refused() -> None:
    model = PLAIN.model()
    model.supports_gradient_checkpointing = False
    expected = r"gradient_checkpointing is true, but a model of the type 'vit'"
    with pytest.raises(UnsupportedRun, match=expected), recomputed(model):
        pass


def test_no_hook_is_added_that_would_keep_a_model_from_being_used_again() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = instantiate({"model_type": "llama", "vocab_size": 20, **sizes}, "causal-lm")
    before = structure_of(model)
    with recomputed(model):
        assert structure_of(model) == before
    assert structure_of(model) == before
