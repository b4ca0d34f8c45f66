"""Scores against numbers worked out by hand, on a real model whose answers are set."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from sklearn.metrics import f1_score
from torch import Tensor
from transformers import PreTrainedModel

from tessera.shared.methods.base import Plan, TaskContext
from tessera.shared.model.spec import Head, Prompts
from tessera.worker.data.dataset import Dataset
from tessera.worker.errors import TrainingDiverged
from tessera.worker.model.build import instantiate
from tessera.worker.training.batches import Batches
from tessera.worker.training.context import LocalTaskContext
from tessera.worker.training.evaluate import PredictionCounts, evaluate
from tessera.worker.training.progress import Report, rounded
from tests.support.tasks import PLAIN

VIT = {**PLAIN.config, "hidden_size": 8, "num_hidden_layers": 1, "intermediate_size": 8}
GPT2 = {
    "model_type": "gpt2", "vocab_size": 4, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2,
    "bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
CLIP = {
    "model_type": "clip", "projection_dim": 8,
    "text_config": {"vocab_size": 10, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
                    "num_attention_heads": 2, "max_position_embeddings": 8, "bos_token_id": 0, "eos_token_id": 9,
                    "pad_token_id": 1},
    "vision_config": {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
                      "image_size": 8, "patch_size": 4, "num_channels": 3},
}  # fmt: skip


def of_classes(found: PredictionCounts) -> dict[str, float]:
    counts = found.by_class()
    assert counts
    return counts.scores()


def scores(model: PreTrainedModel, head: Head, dataset: Dataset, size: int | None = 2) -> dict[str, float]:
    return evaluate(model, head, Batches(dataset, size, torch.device("cpu")), lambda: None)


def calibration_error(confidence: torch.Tensor, correct: torch.Tensor) -> float:
    found = PredictionCounts()
    found.add(correct.long(), torch.ones_like(correct, dtype=torch.int64), confidence, 2)
    return of_classes(found)["calibration_error"]


def always(label: int, logit: float = math.log(2)) -> PreTrainedModel:
    """An image classifier that gives one label twice the odds of each other one, whatever it sees."""
    model = instantiate(VIT, "image-classification")
    with torch.no_grad():
        model.classifier.weight.zero_()
        model.classifier.bias.copy_(torch.eye(3)[label] * logit)
    return model


def test_accuracy_macro_f1_and_loss_are_those_worked_out_by_hand() -> None:
    data = Dataset({"pixel_values": torch.zeros(5, 1, 8, 8), "labels": torch.tensor([0, 0, 0, 1, 2])})
    found = scores(always(0), "image-classification", data)
    assert found["accuracy"] == pytest.approx(3 / 5)
    # Class 0: precision 3/5, recall 1, F1 = 2*(3/5)/(8/5) = 3/4. Classes 1 and 2: never predicted, so 0.
    assert found["macro_f1"] == pytest.approx((3 / 4 + 0 + 0) / 3)
    # The softmax of (ln 2, 0, 0) is (1/2, 1/4, 1/4).
    assert found["loss"] == pytest.approx((3 * math.log(2) + 2 * math.log(4)) / 5)
    # It is right 3 times of 5 and always gives that 1/2: one bin, a gap of 3/5 - 1/2.
    assert found["calibration_error"] == pytest.approx(1 / 10)


@pytest.mark.parametrize("classes", [2, 5, 1000])
def test_macro_f1_is_that_of_scikit_learn(classes: int) -> None:
    dice = torch.Generator().manual_seed(classes)
    # Not every class occurs, and some only among the predicted or only among the true.
    predicted, true = (torch.randint(low, classes, (300,), generator=dice) for low in (0, 1))
    wanted = f1_score(true.numpy(), predicted.numpy(), average="macro", zero_division=0.0)
    found = PredictionCounts()
    found.add(predicted, true, torch.ones(300), classes)
    assert of_classes(found)["macro_f1"] == pytest.approx(wanted, rel=1e-12)


def test_the_batch_size_does_not_change_the_scores() -> None:
    data = Dataset({"pixel_values": torch.randn(5, 1, 8, 8), "labels": torch.tensor([0, 0, 0, 1, 2])})
    whole = scores(always(1), "image-classification", data, None)
    assert scores(always(1), "image-classification", data, 2) == pytest.approx(whole)


def test_a_language_model_is_scored_on_the_words_that_follow_and_not_on_padding() -> None:
    model = instantiate(GPT2, "causal-lm")
    with torch.no_grad():
        model.lm_head.weight.zero_()  # all four words alike: the first, 0, is the one predicted
    words = torch.tensor([[3, 0, 0, 1], [3, 0, 2, 2]])
    labels = torch.tensor([[3, 0, 0, 1], [3, 0, -100, -100]])
    found = scores(model, "causal-lm", Dataset({"input_ids": words, "labels": labels}), size=1)
    assert found["accuracy"] == pytest.approx(3 / 4)  # of 0, 0, 1 and 0
    assert found["loss"] == pytest.approx(math.log(4))
    assert found["calibration_error"] == pytest.approx(3 / 4 - 1 / 4)


SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
WORDS = {"vocab_size": 20, "bos_token_id": 0, "eos_token_id": 3, "pad_token_id": 1}
PADDED: dict[str, tuple[dict[str, Any], Head]] = {
    "bert": ({**SMALL, **WORDS}, "text-classification"),
    "bert words": ({**SMALL, **WORDS}, "token-classification"),
    "roberta": ({**SMALL, **WORDS}, "text-classification"),
    "xlnet": ({**WORDS, "d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 16}, "text-classification"),
    "gpt2 classes": ({**GPT2, **WORDS, "n_positions": 32}, "text-classification"),
    "gpt2": ({**GPT2, **WORDS, "n_positions": 32}, "causal-lm"),
    "llama": ({**SMALL, **WORDS}, "causal-lm"),
    "llama classes": ({**SMALL, **WORDS}, "text-classification"),
    "bloom": ({**WORDS, "hidden_size": 16, "n_layer": 1, "n_head": 2}, "causal-lm"),
    "opt": ({**SMALL, **WORDS, "ffn_dim": 16, "word_embed_proj_dim": 16}, "causal-lm"),
    "t5 classes": (
        {**WORDS, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 1},
        "text-classification",
    ),
}


@pytest.mark.parametrize("family", PADDED)
def test_scores_of_a_text_do_not_depend_on_the_padding_of_its_batch(family: str) -> None:
    config, head = PADDED[family]
    model = instantiate({"model_type": family.split(maxsplit=1)[0], **config}, head, seed=1)
    found = []
    for gap in (0, 7):
        rows = torch.tensor([[0, 5, 9, 7, 12, 3], [0, 6, 8, 3, 1, 1]])
        ids = torch.nn.functional.pad(rows, (0, gap), value=1)
        labels = torch.tensor([0, 1])
        if head != "text-classification":
            labels = torch.where(ids == 1, -100, ids % 2 if head == "token-classification" else ids)
        tensors = {"input_ids": ids, "attention_mask": (ids != 1).long(), "labels": labels}
        found.append(scores(model, head, Dataset(tensors)))
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_a_contrastive_model_is_scored_on_each_image_s_logits_over_the_texts() -> None:
    model = instantiate(CLIP, "contrastive")
    data = Dataset(
        {"pixel_values": torch.randn(3, 3, 8, 8), "labels": torch.tensor([0, 1, 1])},
        common={"input_ids": torch.tensor([[1, 2, 9], [3, 4, 9]])},
    )
    found = scores(model, "contrastive", data)
    with torch.no_grad():
        logits = model(**data.common, pixel_values=data.tensors["pixel_values"]).logits_per_image  # [3, 2]
    sure, predicted = logits.softmax(dim=-1).max(dim=-1)
    assert found["accuracy"] == pytest.approx(float((predicted == torch.tensor([0, 1, 1])).float().mean()))
    assert found["loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(logits, data.tensors["labels"])))
    assert found["calibration_error"] == pytest.approx(calibration_error(sure, predicted == data.tensors["labels"]))


def test_the_texts_of_a_contrastive_model_are_computed_once_for_all_batches_of_an_evaluation() -> None:
    model = instantiate(CLIP, "contrastive")
    images, texts = torch.randn(5, 3, 8, 8), torch.tensor([[1, 2, 9], [3, 4, 9]])
    data = Dataset({"pixel_values": images, "labels": torch.arange(5) % 2}, common={"input_ids": texts})
    whole, read = scores(model, "contrastive", data, None), list[int]()
    with model.text_model.encoder.register_forward_hook(lambda *_: read.append(1)):
        assert scores(model, "contrastive", data, 2) == pytest.approx(whole)
        assert len(read) == 1
        with torch.no_grad():
            for parameter in model.text_model.parameters():
                parameter.normal_()
        assert "forward" not in vars(model.text_model)
        # Other weights have other texts.
        assert scores(model, "contrastive", data, 2) != pytest.approx(whole)
        assert len(read) == 2


def test_texts_with_several_prompts_are_each_computed_once() -> None:
    model = instantiate(CLIP, "contrastive", seed=0, prompts=Prompts(text=2))
    texts = torch.tensor([[1, 2, 9], [3, 4, 9]])
    data = Dataset(
        {"pixel_values": torch.randn(5, 3, 8, 8), "labels": torch.arange(5) % 2}, common={"input_ids": texts}
    )
    plain = scores(model, "contrastive", data)

    def by_other_prompts(context: TaskContext, inputs: Mapping[str, Tensor], output: Any) -> Any:
        others = context.text_features(inputs, lambda prompts: prompts + 1)
        output.logits_per_image = output.logits_per_image + 10 * output.image_embeds @ others.T
        return output

    context, read = LocalTaskContext(model, "contrastive", Plan(), ()), list[int]()
    context.replace_output(by_other_prompts)
    with model.text_model.encoder.register_forward_hook(lambda *_: read.append(1)):
        whole = scores(model, "contrastive", data, None)
        assert len(read) == 2
        assert scores(model, "contrastive", data, 2) == pytest.approx(whole, rel=1e-4)
        assert len(read) == 4
    assert whole["loss"] != pytest.approx(plain["loss"], rel=1e-3)


def test_texts_of_each_example_are_computed_in_each_batch() -> None:
    model = instantiate(CLIP, "contrastive")
    # As many texts as images in a batch, each image's own.
    tensors = {"pixel_values": torch.randn(4, 3, 8, 8), "input_ids": torch.tensor([[1, 2, 9], [3, 4, 9]] * 2)}
    tensors["input_ids"][2:, 0] += 4
    data = Dataset({**tensors, "labels": torch.tensor([0, 1, 0, 1])})
    with torch.no_grad():
        batches = [{name: tensor[rows] for name, tensor in tensors.items()} for rows in (slice(2), slice(2, 4))]
        losses = [
            torch.nn.functional.cross_entropy(model(**batch).logits_per_image, torch.tensor([0, 1]))
            for batch in batches
        ]
    assert scores(model, "contrastive", data, 2)["loss"] == pytest.approx(float(sum(losses)) / 2)


def test_the_calibration_error_weighs_each_bin_s_gap_by_its_share() -> None:
    # Of fifteen bins .70 and .72 share the eleventh, (10/15, 11/15]; 1 is in the last, and .2 in the third.
    confidence = torch.tensor([0.70, 0.72, 1.0, 0.2], dtype=torch.float64)
    correct = torch.tensor([True, False, True, False])
    expected = 2 / 4 * abs(1 / 2 - 0.71) + 1 / 4 * abs(1 - 1) + 1 / 4 * abs(0 - 0.2)
    assert calibration_error(confidence, correct) == pytest.approx(expected)


def test_opposite_errors_cancel_within_a_bin_and_not_between_bins() -> None:
    within = calibration_error(torch.tensor([0.5, 0.5]), torch.tensor([True, False]))
    between = calibration_error(torch.tensor([0.5, 0.9]), torch.tensor([True, False]))
    assert within == pytest.approx(0)
    assert between == pytest.approx(0.5 * 0.5 + 0.5 * 0.9)


def test_a_confidence_that_rounding_took_above_one_is_in_the_last_bin() -> None:
    assert calibration_error(torch.tensor([1 + 1e-6]), torch.tensor([True])) == pytest.approx(0, abs=1e-5)


def test_evaluation_leaves_the_weights_alone_and_makes_no_gradients() -> None:
    model = always(2)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    data = Dataset({"pixel_values": torch.randn(3, 1, 8, 8), "labels": torch.tensor([0, 1, 2])})
    assert scores(model, "image-classification", data) == scores(model, "image-classification", data)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert not model.training


def test_a_version_whose_loss_is_no_number_is_reported() -> None:
    data = Dataset({"pixel_values": torch.full((2, 1, 8, 8), torch.nan), "labels": torch.tensor([0, 1])})
    with pytest.raises(TrainingDiverged, match="loss on this data is nan"):
        scores(instantiate(VIT, "image-classification"), "image-classification", data)


def test_figures_leave_a_site_with_three_digits() -> None:
    assert [rounded(figure) for figure in (0.123456, 2.3176862, 1234.5, 0.0, -0.99951)] == [
        0.123, 2.32, 1230.0, 0.0, -1.0,
    ]  # fmt: skip
    report = Report(phase="training")
    report.loss = 2.3176862
    assert report.progress().loss == 2.32


@pytest.mark.parametrize("family", ["bert", "bert words", "gpt2", "llama"])
def test_the_loss_of_each_text_is_noted_and_none_for_a_text_without_labels(family: str) -> None:
    config, head = PADDED[family]
    model = instantiate({"model_type": family.split(maxsplit=1)[0], **config}, head, seed=1)
    ids = torch.tensor([[0, 5, 9, 7, 12, 3], [0, 6, 8, 3, 1, 1], [0, 4, 3, 1, 1, 1]])
    labels = torch.tensor([0, 1, -100])
    if head != "text-classification":
        labels = torch.where((ids == 1) | (labels == -100)[:, None], -100, ids % 2 if family == "bert words" else ids)
    data = Dataset({"input_ids": ids, "attention_mask": (ids != 1).long(), "labels": labels})
    found = PredictionCounts(examples=3)
    evaluate(model, head, Batches(data, 2, torch.device("cpu")), lambda: None, scores=found)
    alone = [scores(model, head, data.rows(torch.tensor([place])), size=1)["loss"] for place in (0, 1)]
    assert found.losses.tolist() == pytest.approx([*alone, math.nan], rel=1e-5, nan_ok=True)
