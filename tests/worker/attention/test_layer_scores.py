"""Gradient scores of layers, held against autograd spelt out."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel, PreTrainedModel

from tessera.shared.model.blocks import Block
from tessera.worker.attention.layer_scores import fisher, gradient_norms
from tessera.worker.model.block_map import block_table
from tessera.worker.model.build import instantiate
from tessera.worker.model.forward import forward
from tests.support.duals import dual, pairs
from tests.support.tasks import VIT, images

GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 8, "vocab_size": 20}


@pytest.fixture
def model() -> PreTrainedModel:
    return instantiate({**VIT, "hidden_dropout_prob": 0.3}, "image-classification", seed=3).eval()


def batches(count: int, size: int) -> list[dict[str, Tensor]]:
    return list(images(count).batches(size))


def gradients_of(model: PreTrainedModel, batch: Mapping[str, Tensor], layer: int) -> list[Tensor]:
    parameters = [p for name, p in model.named_parameters() if f"layers.{layer}." in name]
    return list(torch.autograd.grad(model(**batch).loss, parameters))


def test_the_norm_is_of_the_gradient_of_the_mean_loss_over_all_batches(model: PreTrainedModel) -> None:
    [whole] = batches(10, 10)
    found = gradient_norms(model, block_table(model), batches(10, 4), lambda batch: model(**batch).loss)
    assert list(found) == ["vit.layers.0", "vit.layers.1"]
    for layer, name in enumerate(found):
        want = sum(g.square().sum() for g in gradients_of(model, whole, layer)).sqrt()
        assert found[name] == pytest.approx(want.item(), rel=1e-4)


def test_gradients_of_weights_in_16_bits_are_summed_in_float32() -> None:
    # In bfloat16, 256 + 1 is 256.
    layer, batches = torch.nn.Linear(2, 2, bias=False, dtype=torch.bfloat16), [{"labels": torch.zeros(1)}] * 512
    block = Block(tensor="weight", role="mlp", layer=0, shape=(2, 2), dtype="BF16")
    found = gradient_norms(layer, [block], batches, lambda _: layer.weight.sum())
    assert [*found.values()] == [2.0]  # the norm of four ones


def test_the_fisher_trace_is_the_mean_of_the_squared_norms_of_single_examples(model: PreTrainedModel) -> None:
    [whole] = batches(6, 6)
    found = fisher(
        model, block_table(model), batches(6, 4), lambda batch: model(**batch).loss, "image-classification"
    )
    for layer, name in enumerate(found):
        squares = [
            sum(g.square().sum() for g in gradients_of(model, {k: v[i : i + 1] for k, v in whole.items()}, layer))
            for i in range(6)
        ]
        assert found[name] == pytest.approx((sum(squares) / 6).item(), rel=1e-4)


def test_only_the_blocks_given_count_and_of_a_fused_matrix_only_their_rows() -> None:
    model = instantiate(GPT2, "causal-lm", seed=1).eval()
    batch = {"input_ids": torch.arange(6)[None], "labels": torch.arange(6)[None]}
    values = [block for block in block_table(model) if block.role == "value"]
    found = gradient_norms(model, values, [batch], lambda batch: forward(model, "causal-lm", batch).loss)
    weight, bias = model.transformer.h[1].attn.c_attn.weight, model.transformer.h[1].attn.c_attn.bias
    of_weight, of_bias = torch.autograd.grad(model(**batch).loss, [weight, bias])
    want = (of_weight[:, 32:].square().sum() + of_bias[32:].square().sum()).sqrt()
    assert found["transformer.h.1"] == pytest.approx(want.item(), rel=1e-4)


def test_the_classes_of_a_contrastive_model_are_no_examples() -> None:
    config = {
        "text_config": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
                        "vocab_size": 20, "max_position_embeddings": 8},
        "vision_config": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                          "intermediate_size": 16, "image_size": 8, "patch_size": 4},
        "projection_dim": 8,
    }  # fmt: skip
    torch.manual_seed(0)
    model = AutoModel.from_config(AutoConfig.for_model("clip", **config)).eval()
    # Three images and three classes: nothing fails if the classes are taken apart as well.
    batch = {
        "pixel_values": torch.randn(3, 3, 8, 8),
        "labels": torch.tensor([0, 2, 1]),
        "input_ids": torch.randint(3, 20, (3, 5)),
    }
    blocks: tuple[Block, ...] = block_table(model)

    def loss(batch: Mapping[str, Tensor]) -> Tensor:
        return forward(model, "contrastive", batch).loss

    found = fisher(model, blocks, [batch], loss, "contrastive")
    singles = [
        {**batch, "pixel_values": batch["pixel_values"][i : i + 1], "labels": batch["labels"][i : i + 1]}
        for i in range(3)
    ]
    norms = [gradient_norms(model, blocks, [single], loss) for single in singles]
    for name, trace in found.items():
        assert trace == pytest.approx(sum(norm[name] ** 2 for norm in norms) / 3, rel=1e-4)


def test_what_a_tower_is_told_of_each_image_goes_with_the_image() -> None:
    model = instantiate(dual("siglip2"), "contrastive", seed=3)
    blocks, dataset = block_table(model), pairs("siglip2", 3)

    def loss(batch: Mapping[str, Tensor]) -> Tensor:
        return forward(model, "contrastive", batch).loss

    found = fisher(model, blocks, dataset.batches(None), loss, "contrastive")
    norms = [gradient_norms(model, blocks, [single], loss) for single in dataset.batches(1)]
    for name, trace in found.items():
        assert trace == pytest.approx(sum(norm[name] ** 2 for norm in norms) / 3, rel=1e-4)


def test_the_model_is_left_as_it_was(model: PreTrainedModel) -> None:
    model.train()
    model.classifier.requires_grad_(requires_grad=False)
    state, needs = torch.get_rng_state(), [p.requires_grad for p in model.parameters()]
    gradient_norms(model, block_table(model), batches(4, 2), lambda batch: model(**batch).loss)
    assert model.training
    assert [p.requires_grad for p in model.parameters()] == needs
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
