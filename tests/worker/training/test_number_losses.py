"""Losses and gradients beside those of a plain loop: several labels of an example, targets of a regression, and the
classes of words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss
from transformers import PreTrainedModel

from tessera.shared.methods.base import UnsupportedRun
from tessera.shared.model.dataset_schema import MULTI_LABEL, REGRESSION
from tessera.shared.model.spec import Head
from tessera.worker.data.dataset import Dataset
from tessera.worker.model.build import instantiate
from tessera.worker.model.forward import forward, losses
from tessera.worker.training.optimization.micro_batch import pieces_of
from tests.support.tasks import VIT
from tests.worker.executor.test_equal_results import BERT

EXAMPLES = 7
SEVERAL = {"num_labels": 3, "problem_type": MULTI_LABEL}
NUMBER = {"num_labels": 1, "problem_type": REGRESSION}
XLNET = {
    "model_type": "xlnet", "vocab_size": 20, "d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 16, "dropout": 0.0,
    "summary_last_dropout": 0.0, "pad_token_id": 0,
}  # fmt: skip
CASES: dict[str, tuple[dict[str, Any], Head]] = {
    "several labels of texts": (BERT | SEVERAL, "text-classification"),
    "several labels of texts of as many tokens": (XLNET | SEVERAL, "text-classification"),
    "several labels of images": (VIT | SEVERAL, "image-classification"),
    "targets of texts": (BERT | NUMBER, "text-classification"),
    "targets of images": (VIT | NUMBER, "image-classification"),
    "tags of words": (BERT, "token-classification"),
}


def batch_of(case: str, dtype: torch.dtype) -> dict[str, Tensor]:
    config, head = CASES[case]
    dice = torch.Generator().manual_seed(7)
    tokens = 3 if case.endswith("as many tokens") else 8
    ids = torch.randint(1, 20, (EXAMPLES, tokens), generator=dice)
    lengths = 1 + torch.arange(EXAMPLES)[:, None] % tokens
    mask = (torch.arange(tokens) < lengths).long()
    inputs = {"input_ids": ids * mask, "attention_mask": mask}
    if head == "image-classification":
        inputs = {"pixel_values": torch.randn(EXAMPLES, 1, 8, 8, generator=dice).to(dtype)}
    if head == "token-classification":
        return inputs | {"labels": (ids % 3).masked_fill(mask == 0, -100)}
    if config["num_labels"] == 1:
        return inputs | {"labels": torch.randn(EXAMPLES, generator=dice)}
    return inputs | {"labels": torch.randint(0, 2, (EXAMPLES, 3), generator=dice).float()}


def plain_loss(model: PreTrainedModel, head: Head, batch: dict[str, Tensor]) -> Tensor:
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    if model.config.model_type == "xlnet":
        # It reads the last place of a row, where the text has to end.
        order = inputs["attention_mask"].argsort(dim=1, stable=True)
        inputs = {name: tensor.gather(1, order) for name, tensor in inputs.items()}
    logits, labels = model(**inputs).logits, batch["labels"]
    if head == "token-classification":
        return cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    if model.config.num_labels == 1:
        return mse_loss(logits[:, 0], labels.to(logits.dtype))
    return binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))


def gradients(model: nn.Module) -> Tensor:
    found = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
    model.zero_grad()
    return found


@pytest.mark.parametrize("size", [None, 2])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-6), (torch.float32, 1e-5)])
@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_those_of_a_plain_loop(
    case: str, dtype: torch.dtype, error: float, size: int | None
) -> None:
    config, head = CASES[case]
    model, batch = instantiate(config, head, seed=1).to(dtype), batch_of(case, dtype)
    plain = plain_loss(model, head, batch)
    plain.backward()  # type: ignore[no-untyped-call]
    wanted = gradients(model)
    loss = torch.zeros((), dtype=dtype)
    for piece, share in pieces_of(batch, batch["labels"], size, head):
        part = forward(model, head, piece).loss * share
        part.backward()  # type: ignore[no-untyped-call]
        loss += part.detach()
    assert float(loss) == pytest.approx(float(plain.detach()), rel=error)
    assert float((gradients(model) - wanted).norm() / wanted.norm()) < error


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("tags")])
def test_each_example_has_the_loss_that_it_has_alone(case: str) -> None:
    config, head = CASES[case]
    model, batch = instantiate(config, head, seed=1), batch_of(case, torch.float32)
    found = losses(forward(model, head, batch), head, batch["labels"])
    rows = [{name: tensor[[row]] for name, tensor in batch.items()} for row in range(EXAMPLES)]
    alone = [plain_loss(model, head, row).item() for row in rows]
    assert found.tolist() == pytest.approx(alone, rel=1e-5)
    assert found.mean().item() == pytest.approx(forward(model, head, batch).loss.item(), rel=1e-6)


def test_weights_of_16_bits_learn_from_labels_in_float32() -> None:
    model, batch = (
        instantiate(BERT | NUMBER, "text-classification", seed=1).bfloat16(),
        batch_of("targets of texts", torch.float32),
    )
    found = forward(model, "text-classification", batch).loss
    assert found.dtype == torch.float32
    found.backward()  # type: ignore[no-untyped-call]
    assert gradients(model).isfinite().all()


def test_a_model_with_other_outputs_than_labels_is_refused() -> None:
    model, batch = (
        instantiate(BERT | SEVERAL | {"num_labels": 4}, "text-classification"),
        batch_of("several labels of texts", torch.float32),
    )
    with pytest.raises(ValueError, match=r"the model has 4 outputs, and labels are \[3\]"):
        forward(model, "text-classification", batch)


def test_numbers_for_each_word_have_no_loss_of_an_example() -> None:
    model, batch = instantiate(BERT, "token-classification"), batch_of("tags of words", torch.float32)
    output = forward(model, "token-classification", batch)
    with pytest.raises(UnsupportedRun, match=r"labels of torch\.float32"):
        losses(output, "token-classification", batch["labels"].float())


def test_standardised_targets_keep_their_place_in_memory_without_a_scale() -> None:
    data = Dataset(batch_of("targets of texts", torch.float32))
    assert data.standardised(0.0, 1.0) is data
    classes = Dataset(batch_of("tags of words", torch.float32))
    assert classes.standardised(5.0, 2.0) is classes
