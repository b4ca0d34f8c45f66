"""Batches of texts without the padding that all of them have in common."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tessera.shared.methods.base import Plan
from tessera.shared.model.spec import Head
from tessera.worker.data.dataset import Dataset, Padding
from tessera.worker.model.block_map import block_table
from tessera.worker.model.build import instantiate
from tessera.worker.training.batches import Batches
from tessera.worker.training.context import LocalTaskContext
from tessera.worker.training.evaluate import evaluate
from tessera.worker.training.optimization.trimming import is_trimmable, trimmed
from tests.support.tasks import CPU
from tests.worker.training.test_trainer import train

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
BERT: dict[str, Any] = {"model_type": "bert", "vocab_size": 20, "max_position_embeddings": 64, **SIZES}
BERT |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
FAMILIES: dict[str, tuple[dict[str, Any], Head]] = {
    "bert": (BERT, "text-classification"),
    "tags": (BERT, "token-classification"),
    "gpt2": (
        {"model_type": "gpt2", "vocab_size": 20, "n_positions": 64, "n_embd": 16, "n_layer": 1, "n_head": 2,
         "pad_token_id": 0, "eos_token_id": 1, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        "causal-lm",
    ),
    "llama": ({"model_type": "llama", "vocab_size": 20, "pad_token_id": 0, **SIZES}, "text-classification"),
    "bart": (
        {"model_type": "bart", "vocab_size": 20, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1,
         "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16,
         "max_position_embeddings": 64, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
         "decoder_start_token_id": 2, "dropout": 0.0},
        "text-classification",
    ),
}  # fmt: skip
CONVBERT: dict[str, Any] = {**BERT, "model_type": "convbert", "embedding_size": 16, "conv_kernel_size": 3}
LONG_ROPE: dict[str, Any] = {
    "model_type": "phi3", "vocab_size": 20, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, **SIZES,
    "max_position_embeddings": 128, "original_max_position_embeddings": 16,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4},
}  # fmt: skip
BIG_BIRD: dict[str, Any] = {
    **BERT, "model_type": "big_bird", "attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 1,
    "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
PADDING = Padding(64, {"input_ids": 0, "attention_mask": 0})


def texts(head: Head = "text-classification", lengths: tuple[int, ...] = (5, 9, 30, 3, 12, 7, 2, 6)) -> Dataset:
    """Texts of these lengths, padded to the longest."""
    dice, width = torch.Generator().manual_seed(2), max(lengths)
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    words = torch.randint(2, 20, mask.shape, generator=dice) * mask
    words[torch.arange(len(lengths)), torch.tensor(lengths) - 1] = 1  # the end of a text
    by_token = words.masked_fill(mask == 0, -100)
    by_token = by_token.where(by_token < 0, by_token if head == "causal-lm" else by_token % 2)
    labels = torch.arange(len(lengths)) % 2 if head == "text-classification" else by_token
    return Dataset({"input_ids": words, "attention_mask": mask, "labels": labels}, padding=PADDING)


def context_of(config: dict[str, Any], head: Head) -> LocalTaskContext:
    model = instantiate(config, head, seed=1)
    return LocalTaskContext(model, head, Plan(), () if config is CONVBERT else block_table(model))


def of_large_weights(config: dict[str, Any]) -> LocalTaskContext:
    """A classifier whose logits depend on its whole input, as a trained classifier's do."""
    context = context_of(config, "text-classification")
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in context.model.parameters():
            parameter.normal_(std=0.3)
    return context


def widths(context: LocalTaskContext) -> list[int]:
    """Record the width of each batch that the model reads from now on."""
    seen: list[int] = []
    context.model.register_forward_pre_hook(
        lambda _module, _args, given: seen.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    return seen


@pytest.mark.parametrize("family", FAMILIES)
def test_training_without_common_padding_is_the_same(family: str) -> None:
    config, head = FAMILIES[family]
    data, values = texts(head), []
    for given in (data, replace(data, padding=None)):
        context = context_of(config, head)
        seen = widths(context)
        stats = train(context, data=given, batch_size=2, epochs=1, optimizer="sgd")
        values.append(({block.name: torch.tensor(context.read(block)) for block in context.blocks}, stats.loss))
        # Four batches, after the two passes that compare the logits with and without padding.
        assert len(seen) == (6 if given.padding else 4)
        assert (sum(seen[-4:]) < 4 * 30) == (given.padding is not None)
        assert all(width % 8 == 0 or width == 30 for width in seen)
    (short, loss), (whole, padded_loss) = values
    assert loss == pytest.approx(padded_loss, rel=1e-5)
    for name, tensor in whole.items():
        torch.testing.assert_close(short[name], tensor, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_without_common_padding_are_the_same(family: str) -> None:
    config, head = FAMILIES[family]
    context, data = context_of(config, head), texts(head)
    assert is_trimmable(context, data)
    found = []
    for trims in (True, False):
        seen = widths(context)
        found.append(evaluate(context.model, head, Batches(data, 2, CPU, trims=trims), lambda: None))
        assert (sum(seen) < 4 * 30) == trims
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_padding_of_all_texts_of_a_batch_is_cut_to_a_multiple_of_eight() -> None:
    batch = dict(texts(lengths=(5, 9, 30)).tensors)
    assert trimmed(batch, PADDING)["input_ids"].shape == (3, 30)
    two: dict[str, Tensor] = {name: tensor[:2] for name, tensor in batch.items()}
    short = trimmed(two, PADDING)
    assert short["input_ids"].tolist() == two["input_ids"][:, :16].tolist()
    assert short["attention_mask"].shape == (2, 16)
    assert short["labels"] is two["labels"]
    # A text of no tokens, as an empty one is for some tokenizers.
    assert trimmed({**two, "attention_mask": torch.zeros(2, 30)}, PADDING)["input_ids"].shape == (2, 8)
    # A tensor with a value for each token, and no known padding, keeps them all.
    assert trimmed({**two, "boxes": torch.zeros(2, 30, 4)}, PADDING)["input_ids"].shape == (2, 30)
    assert trimmed({**two, "labels": torch.ones(2, 30)}, PADDING)["input_ids"].shape == (2, 30)


@pytest.mark.parametrize("config", [LONG_ROPE, BIG_BIRD], ids=["phi3", "big_bird"])
def test_models_that_compute_short_texts_in_another_way_keep_the_padding(config: dict[str, Any]) -> None:
    context, data = of_large_weights(config), texts(lengths=(3, 5, 12, 96))
    before = [type(module) for module in context.model.modules()]
    assert not is_trimmable(context, data)
    assert [type(module) for module in context.model.modules()] == before


def test_texts_keep_their_padding_where_it_may_matter() -> None:
    context, data = context_of(BERT, "text-classification"), texts()
    assert is_trimmable(context, data)
    assert not is_trimmable(context, replace(data, padding=None))
    assert not is_trimmable(context, texts(lengths=(3, 8)))
    without = {name: tensor for name, tensor in data.tensors.items() if name != "attention_mask"}
    assert not is_trimmable(context, replace(data, tensors=without))
    # Its convolutions reach from a text's last words into its padding.
    assert not is_trimmable(of_large_weights(CONVBERT), data)
    # Weights of 16 bits round too much to compare.
    assert not is_trimmable(context_of({**BERT, "dtype": "bfloat16"}, "text-classification"), data)
    assert not is_trimmable(context, replace(data, padding=Padding(64, {"input_ids": 20, "attention_mask": 0})))
    # A head of zeros gives every text the same logits.
    with torch.no_grad():
        for parameter in context.model.classifier.parameters():
            parameter.zero_()
    assert not is_trimmable(context, data)
    # The width of a private task's texts does not tell the longest one.
    assert not is_trimmable(context, data.padded())
