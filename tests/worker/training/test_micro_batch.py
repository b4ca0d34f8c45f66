"""Batches that are trained in pieces: the step is that of the whole batch, whatever the pieces' numbers of labels."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tessera.shared.methods.base import MethodSpec, Phase, Plan, RunInfo, UnsupportedRun
from tessera.shared.methods.registry import worker_half
from tessera.shared.model.blocks import Block
from tessera.shared.model.selectors import EVERYTHING
from tessera.shared.model.spec import Head, Model
from tessera.shared.run_settings import Training
from tessera.worker.compute import MicroBatch
from tessera.worker.data.dataset import Dataset
from tessera.worker.model.block_map import block_table
from tessera.worker.model.build import instantiate
from tessera.worker.model.forward import IGNORED, objective_of
from tessera.worker.training.context import LocalTaskContext
from tessera.worker.training.optimization.micro_batch import pieces_of, require_divisible
from tessera.worker.training.setup import TrainingSetup
from tessera.worker.training.trainer import Trainer
from tests.support.variants import variants

CPU = torch.device("cpu")
EXAMPLES = 11
DICE = torch.Generator()

BERT = {
    "model_type": "bert", "vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 8, "num_labels": 3, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "intermediate_size": 24, "max_position_embeddings": 8,
}  # fmt: skip
TOWER = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
CLIP = {
    "model_type": "clip", "projection_dim": 8,
    "text_config": {**TOWER, "vocab_size": 20, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    "vision_config": {**TOWER, "image_size": 8, "patch_size": 4, "num_channels": 1},
}  # fmt: skip


def drawn(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=DICE.manual_seed(3))


def ragged(labels: Tensor) -> Tensor:
    """The labels [examples, positions], of which the first example counts in one place and each further in more; the
    fourth has none at all."""
    positions = torch.arange(labels.shape[1])
    counted = (positions <= 1 + torch.arange(len(labels))[:, None] % labels.shape[1]) & (positions > 0)
    counted[3] = False
    return labels.where(counted, torch.tensor(IGNORED))


def texts(labels: Tensor) -> Dataset:
    return Dataset({"input_ids": drawn(20, EXAMPLES, 8), "labels": labels})


CASES: dict[str, tuple[dict[str, object], Head, Dataset]] = {
    "classes": (BERT, "text-classification", texts(drawn(3, EXAMPLES))),
    "classes of some": (
        BERT,
        "text-classification",
        # Four of the eleven have none.
        texts(drawn(3, EXAMPLES).where(torch.arange(EXAMPLES) % 3 > 0, torch.tensor(IGNORED))),
    ),
    "labels of tokens": (BERT, "token-classification", texts(ragged(drawn(3, EXAMPLES, 8)))),
    "continuations": (LLAMA, "causal-lm", texts(ragged(drawn(20, EXAMPLES, 8)))),
    "texts of classes": (
        CLIP,
        "contrastive",
        Dataset(
            {
                "pixel_values": torch.randn(EXAMPLES, 1, 8, 8, generator=DICE.manual_seed(4)),
                "labels": drawn(3, EXAMPLES),
            },
            common={"input_ids": torch.tensor([[1, 5, 2], [1, 6, 2], [1, 7, 2]])},
        ),
    ),
}


def trained(
    case: str,
    micro_batch: int | None,
    method: str = "fedavg",
    settings: dict[str, float] | None = None,
    further: nn.Module | None = None,
    **more: Any,
) -> tuple[dict[str, Tensor], float]:
    """The weights after three steps, the second on a smaller batch; and the loss."""
    config, head, data = CASES[case]
    model = instantiate(config, head, seed=1)
    if further:
        model.add_module("further", further)
    training = Training(batch_size=7, steps=3, optimizer="sgd", learning_rate=0.5, max_gradient_norm=5.0, **more)
    table = block_table(model)
    objective = objective_of(training, Model(config=config, head=head, blocks=table), CPU)
    context = LocalTaskContext(model, head, Plan(), table, objective=objective)
    facts = RunInfo(tuple(context.blocks), rounds=1, training=training)
    half = worker_half(MethodSpec(name=method, settings=settings or {}), facts)
    half.setup(context)
    trainer = Trainer(half, context, training, TrainingSetup(CPU, micro_batch), lambda: None)
    stats = trainer.train([Phase(EVERYTHING)], data, 0)
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}, stats.loss


@pytest.mark.parametrize("size", variants([1, 3, 7], {3}))
@pytest.mark.parametrize("case", CASES)
def test_pieces_make_the_step_of_the_whole_batch(case: str, size: int) -> None:
    (whole, loss), (pieces, told) = trained(case, None), trained(case, size)
    assert told == pytest.approx(loss, rel=1e-5)
    for name, values in whole.items():
        assert torch.allclose(pieces[name], values, rtol=1e-4, atol=1e-5), name
    if size == 7:
        assert all(torch.equal(pieces[name], values) for name, values in whole.items())


@pytest.mark.parametrize("size", variants([1, 3], {3}))
@pytest.mark.parametrize(
    ("case", "training"),
    [
        ("classes", {"class_weights": (0.2, 1.0, 5.0)}),
        ("labels of tokens", {"class_weights": (0.2, 1.0, 5.0), "label_smoothing": 0.1}),
        ("continuations", {"label_smoothing": 0.1}),
    ],
)
def test_pieces_of_a_weighted_or_smoothed_batch_make_its_step(case: str, training: dict[str, Any], size: int) -> None:
    (whole, loss), (pieces, told) = trained(case, None, **training), trained(case, size, **training)
    assert told == pytest.approx(loss, rel=1e-5)
    for name, values in whole.items():
        assert torch.allclose(pieces[name], values, rtol=1e-4, atol=1e-5), name


def test_a_term_of_the_loss_that_reads_no_example_counts_once() -> None:
    settings = {"mu": 2.0}
    (whole, loss), (pieces, told) = (trained("labels of tokens", size, "fedprox", settings) for size in (None, 2))
    assert told == pytest.approx(loss, rel=1e-5)
    assert all(torch.allclose(pieces[name], values, rtol=1e-4, atol=1e-5) for name, values in whole.items())


def test_a_batch_without_any_label_is_not_computed_whole() -> None:
    labels = torch.full((5, 8), IGNORED)
    pieces = pieces_of({"labels": labels}, labels, 2, "token-classification")
    assert [(len(piece["labels"]), share) for piece, share in pieces] == [(2, 0.4), (2, 0.4), (1, 0.2)]


def test_losses_that_do_not_add_up_are_refused_and_say_which_batch_would_do() -> None:
    with pytest.raises(UnsupportedRun, match=r"by this method .* training\.batch_size of at most 2"):
        trained("labels of tokens", 2, "moon")
    with pytest.raises(UnsupportedRun, match="several labels or none"):
        trained("classes of some", 2, "moon")
    trained("labels of tokens", 7, "moon")
    trained("classes", 2, "moon")
    with pytest.raises(UnsupportedRun, match="or classes have weights"):
        trained("classes", 2, "moon", class_weights=(1.0, 2.0, 3.0))


def test_batch_normalisation_is_refused() -> None:
    with pytest.raises(UnsupportedRun, match=r"batch normalisation.* training\.batch_size of at most 2"):
        trained("classes", 2, further=nn.BatchNorm1d(2))
    trained("classes", 7, further=nn.BatchNorm1d(2))


@pytest.mark.parametrize(
    ("tensor", "size", "batch", "is_refused"),
    [
        ("norm.running_mean", 8, 9, True),
        ("norm.running_mean", 8, None, True),  # all 11 examples
        ("norm.running_mean", 8, 8, False),
        ("norm.running_mean", 11, 32, False),
        ("norm.running_mean", "auto", 9, False),
        ("norm.weight", 8, 9, False),
    ],
)
def test_batch_normalisation_is_refused_by_the_table_of_blocks(
    tensor: str, size: MicroBatch, batch: int | None, *, is_refused: bool
) -> None:
    block, training = Block(tensor=tensor, role="norm", shape=(2,), dtype="F32"), Training(batch_size=batch)
    half = worker_half(MethodSpec(name="fedavg"), RunInfo((block,), rounds=1, training=training))
    _, _, data = CASES["classes"]
    with pytest.raises(UnsupportedRun, match="batch normalisation") if is_refused else nullcontext():
        require_divisible(half, [block], data.info, training, size)
