"""What one example can change of an evaluation's rounded sums, for each kind of head, on real models."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import pytest
import torch
from torch import Tensor

from tessera.shared.methods.base import Plan, UnsupportedRun
from tessera.shared.model.spec import Head
from tessera.shared.privacy.noise import NoiseSource
from tessera.worker.data.dataset import Dataset, Padding
from tessera.worker.errors import DataError, InputMismatch
from tessera.worker.model.block_map import block_table
from tessera.worker.model.build import instantiate
from tessera.worker.privacy.bounded_figures import SQUARES, BoundedSums, bounded_sums
from tessera.worker.privacy.bounded_numbers import FARTHEST, STEP, FigureNoise, LabelSums, Leaving, TargetSums
from tessera.worker.training.context import LocalTaskContext
from tessera.worker.training.ranks import OneRank
from tests.support.duals import dual, pairs
from tests.support.tables import on_disk
from tests.support.tasks import PLAIN

Change = Callable[[dict[str, Tensor]], object]
"""A change of one example's inputs, in place."""

EXAMPLES, PLACE, TOKENS = 12, 5, 6
MANY = 10_000
"""So many examples that all sums leave."""
SMALL: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
WORDS: dict[str, Any] = {"vocab_size": 20, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BERT: dict[str, Any] = {"model_type": "bert", "max_position_embeddings": 8, **SMALL, **WORDS}
T5: dict[str, Any] = {
    "model_type": "t5", "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, **WORDS,
    "decoder_start_token_id": 0,
}  # fmt: skip
VIT: dict[str, Any] = {**PLAIN.config, **SMALL}
CONFIGS: dict[Head, dict[str, Any]] = {
    "image-classification": VIT,
    "text-classification": {**BERT, "num_labels": 3},
    "token-classification": {**BERT, "num_labels": 3},
    "masked-lm": BERT,
    "causal-lm": {"model_type": "gpt2", "n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 2, **WORDS},
    "seq2seq-lm": T5,
    "contrastive": dual("clip"),
}
SEQUENCES = ("token-classification", "masked-lm", "causal-lm", "seq2seq-lm")


def context_of(head: Head, scale: float = 30.0) -> LocalTaskContext:
    """A version whose logits a coordinator has made extreme."""
    model = instantiate(CONFIGS[head], head, seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    return LocalTaskContext(model, head, Plan(), block_table(model))


def data_of(head: Head) -> Dataset:
    dice = torch.Generator().manual_seed(0)
    if head == "contrastive":
        return pairs("clip", EXAMPLES)
    if head == "image-classification":
        images = torch.randn(EXAMPLES, 1, 8, 8, generator=dice)
        return Dataset({"pixel_values": images, "labels": torch.arange(EXAMPLES) % 3})
    ids = torch.randint(3, 20, (EXAMPLES, TOKENS), generator=dice)
    classes = 20 if head.endswith("lm") else 3
    shape = (EXAMPLES, TOKENS) if head in SEQUENCES else (EXAMPLES,)
    labels = torch.randint(0, classes, shape, generator=dice)
    tensors = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    by_token = {"input_ids": 0, "attention_mask": 0} | ({"labels": -100} if head in SEQUENCES else {})
    return Dataset(tensors, padding=Padding(8, by_token))


def with_one(data: Dataset, change: Change) -> Dataset:
    tensors = {name: tensor.clone() for name, tensor in data.tensors.items()}
    change({name: tensor[PLACE] for name, tensor in tensors.items()})
    return Dataset(tensors, data.common, padding=data.padding)


def replacements(head: Head) -> dict[str, Change]:
    main = "pixel_values" if head in ("image-classification", "contrastive") else "input_ids"

    def put(name: str, value: float) -> Change:
        return lambda row: row[name].fill_(value)

    found = {f"label {value}": put("labels", value) for value in (0, 1, 2, 99, -7, -100)}
    values = [math.nan, math.inf, 3e38, -1e30] if main == "pixel_values" else [3, 19, 0, 20, -1]
    found |= {f"{main} {value}": put(main, value) for value in values}
    if head in SEQUENCES:
        found["one label"] = lambda row: row["labels"][1:-1].fill_(-100)
        found["shorter"] = lambda row: [row[name][3:].fill_(0) for name in ("input_ids", "attention_mask")]
    return found


def sums_of(context: LocalTaskContext, data: Dataset) -> BoundedSums:
    return bounded_sums(context, data, torch.device("cpu"), lambda: None, OneRank())


def units(sums: BoundedSums) -> dict[str, tuple[Tensor, float]]:
    """Each sum before rounding, and the most that replacing one example may change it."""
    right, loss = sums.right_and_loss
    return {
        "right": (right, 1),
        "loss": (loss + sums.misses * sums.clip, sums.clip),
        "gaps": (sums.gaps.abs().sum(), 2),
        "by_class": (sums.by_class, 1),
    }


@pytest.mark.parametrize("head", CONFIGS)
def test_replacing_one_example_moves_no_value_by_more_than_a_step(head: Head) -> None:
    context, data = context_of(head), data_of(head)
    before = sums_of(context, data)
    for what, change in replacements(head).items():
        after = sums_of(context, with_one(data, change))
        for name, (value, most) in units(after).items():
            was = units(before)[name][0]
            assert bool(((value - was).abs() <= most * (1 + 1e-9)).all()), (what, name)
            # By which noise is measured.
            assert float(((value - was) / most).square().sum()) <= SQUARES[name] * (1 + 1e-9), (what, name)
            moved = (after.rounded(MANY)[name] - before.rounded(MANY)[name]).abs()
            assert bool((moved <= STEP * most * (1 + 1e-9)).all()), (what, name)
        assert all(math.isfinite(figure) for figure in after.figures(EXAMPLES).values()), what


def test_no_sum_leaves_with_less_noise_than_all_that_leave_together_need() -> None:
    sums, rho = BoundedSums(100), 0.005
    for examples, squares in ((100, 2), (4_999, 3), (5_000, 9)):
        # Replacing one example moves what leaves by the root of this many squares.
        needed = math.sqrt(squares / (2 * rho))
        drawn = [sums.rounded(examples, FigureNoise(rho, NoiseSource(bytes([draw] * 32)))) for draw in range(200)]
        for name, most in (("right", 1.0), ("loss", sums.clip), ("gaps", 2.0), ("by_class", 1.0)):
            found = [(each[name] / most).flatten() for each in drawn if name in each]
            if found:
                # Rounding to steps adds a twelfth of a step's square to the variance.
                deviation = (torch.cat(found).square().mean() - STEP**2 / 12).sqrt()
                assert deviation == pytest.approx(needed, rel=0.2), (examples, name)
        assert ("gaps" in drawn[0], "by_class" in drawn[0]) == (squares > 2, squares > 3)
        figures = sums.figures(examples, FigureNoise(rho, NoiseSource(bytes(32))))
        assert all(0 <= figures[name] <= 1 for name in figures if name != "loss")


@pytest.mark.parametrize("head", ["text-classification", "masked-lm"])
def test_each_example_passes_alone_and_of_one_length_so_that_no_other_changes_by_rounding(head: Head) -> None:
    context, shapes = context_of(head), list[torch.Size]()
    embeddings = context.model.get_input_embeddings()
    with embeddings.register_forward_hook(lambda _, inputs, __: shapes.append(inputs[0].shape)):
        sums_of(context, data_of(head))
    assert set(shapes) == {torch.Size([1, 8])}


def crafted(row: float, bias: tuple[float, float] = (0.0, 0.0)) -> LocalTaskContext:
    """A version that gives word 19 away, with the same answer for all other texts."""
    model = instantiate({**BERT, "num_labels": 2}, "text-classification", seed=1)
    with torch.no_grad():
        model.get_parameter("bert.embeddings.word_embeddings.weight")[19] = row
        model.get_parameter("classifier.bias").copy_(torch.tensor(bias))
    return LocalTaskContext(model, "text-classification", Plan(), block_table(model))


def patients(count: int, word: int, label: int) -> Dataset:
    ids = torch.full((count, TOKENS), 3)
    ids[PLACE] = word
    labels = torch.arange(count) % 2
    labels[PLACE] = label
    return Dataset({"input_ids": ids, "labels": labels})


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_crafted_version_s_loss_does_not_tell_an_example_or_its_label(sign: float) -> None:
    context = crafted(1e4)
    with torch.no_grad():
        context.model.get_parameter("classifier.weight").mul_(sign * 1e5)
    without = sums_of(context, patients(60, 3, 0)).figures(60)
    step = STEP * 2 * math.log(2) / 60
    for label in (0, 1):
        found = sums_of(context, patients(60, 19, label)).figures(60)
        assert abs(found["loss"] - without["loss"]) <= step * (1 + 1e-9)
        assert found["loss"] <= 2 * math.log(2)


def test_a_confidence_near_the_accuracy_does_not_tell_one_label_by_the_calibration_error() -> None:
    # Of 200 texts 100 or 99 have label 0, and the version is as sure of it as their share: the error is the distance.
    context = crafted(0.0, (0.0, 1e-3))
    with torch.no_grad():
        context.model.get_parameter("classifier.weight").zero_()
    found = [sums_of(context, patients(200, 3, label)).figures(200) for label in (0, 1)]
    assert found[0] == found[1]
    assert found[0]["accuracy"] == 0.5
    assert found[0]["calibration_error"] == 0.0


def test_figures_follow_from_rounded_sums() -> None:
    sums = BoundedSums(2)
    for place in range(400):
        sums.add(torch.tensor([[0.0, math.log(3)]]), torch.tensor([int(place < 304)]))
    found = sums.figures(400)
    # 304 of 400 are right: 305 by steps of 5.
    assert found["accuracy"] == 305 / 400
    # A loss of ln(4/3) for 304 and ln 4 for 96, by steps of 10 ln 2 = 6.93.
    loss, step = 304 * math.log(4 / 3) + 96 * math.log(4), 10 * math.log(2)
    assert found["loss"] == pytest.approx(round(loss / step) * step / 400)
    # It is .75 sure of each: |300 - 304|, by steps of 10.
    assert found["calibration_error"] == 0.0
    # Class 1: 305 right of 400 predictions and 305 labels. Class 0 has 95 labels, and is never predicted.
    assert found["macro_f1"] == pytest.approx((2 * 305 / (400 + 305) + 0) / 2)
    assert sums.figures(400, ignored=(0,)) == {**found, "macro_f1": pytest.approx(2 * 305 / (400 + 305))}


def test_figures_of_few_examples_are_the_accuracy_and_the_loss_alone() -> None:
    sums = BoundedSums(3)
    for _ in range(40):
        sums.add(torch.zeros(1, 3), torch.tensor([0]))
    assert sums.figures(40) == {"accuracy": 1.0, "loss": pytest.approx(math.log(3), abs=0.14)}


def test_an_example_with_many_labels_counts_as_one() -> None:
    sums = BoundedSums(2)
    sums.add(torch.tensor([[0.0, 9.0]] * 600), torch.tensor([1] * 450 + [0] * 150))
    assert sums.right_and_loss[0] == pytest.approx(0.75)
    assert sums.by_class.sum(dim=1).tolist() == pytest.approx([0.75, 1, 1])


def test_an_example_that_cannot_be_read_is_wrong_and_fails_nothing() -> None:
    context, data = context_of("image-classification"), data_of("image-classification")
    images = data.tensors["pixel_values"]

    def read(places: Any) -> Tensor:
        if PLACE in places:
            raise DataError("a file is gone")
        return images[torch.tensor(places)]

    found = sums_of(context, on_disk({"labels": data.tensors["labels"]}, read, (1, 8, 8)))
    whole = sums_of(context, data)
    assert found.misses == 1
    assert 0 <= float(whole.right_and_loss[0] - found.right_and_loss[0]) <= 1


def test_a_model_of_several_numbers_has_no_bound_and_so_no_figures() -> None:
    model = instantiate({**VIT, "num_labels": 2, "problem_type": "regression"}, "image-classification", seed=1)
    context = LocalTaskContext(model, "image-classification", Plan(), block_table(model))
    data = Dataset({"pixel_values": torch.zeros(4, 1, 8, 8), "labels": torch.zeros(4, 2)})
    with pytest.raises(UnsupportedRun, match="no figures: they leave rounded here"):
        sums_of(context, data)


SCALE = {"problem_type": "regression", "num_labels": 1, "target_mean": 50.0, "target_deviation": 4.0}
TAGS = {str(place): name for place, name in enumerate(("O", "B-drug", "I-drug"))}
FURTHER: dict[str, tuple[Head, dict[str, Any], Callable[[Dataset], Tensor]]] = {
    "several labels": (
        "text-classification",
        {"problem_type": "multi_label_classification", "num_labels": 3},
        lambda data: (data.tensors["input_ids"][:, :3] % 2).float(),
    ),
    "targets": ("text-classification", SCALE, lambda data: (data.tensors["input_ids"][:, 0] - 11) / 4),
    "entities": ("token-classification", {"num_labels": 3, "id2label": TAGS}, lambda data: data.tensors["labels"]),
}


def leaving_of(found: object) -> dict[str, Leaving]:
    if isinstance(found, LabelSums | TargetSums):
        return found.leaving(MANY)
    assert isinstance(found, BoundedSums)
    return {"entities": Leaving(found.entities, 1.0, SQUARES["entities"])}


@pytest.mark.parametrize("task", FURTHER)
def test_replacing_one_example_moves_no_sum_of_further_tasks_by_more_than_a_step(task: str) -> None:
    head, config, labels = FURTHER[task]
    model = instantiate({**BERT, **config}, head, seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(30)
    context, data = LocalTaskContext(model, head, Plan(), block_table(model)), data_of(head)
    data = Dataset({**data.tensors, "labels": labels(data)}, padding=data.padding)
    before = sums_of(context, data)
    changes = replacements(head)
    if data.tensors["labels"].is_floating_point():
        values = (math.nan, math.inf, -math.inf, 3e38, -7.0, 0.0, 1.0)
        changes |= {f"target {value}": lambda row, value=value: row["labels"].fill_(value) for value in values}
    for what, change in changes.items():
        after = sums_of(context, with_one(data, change))
        for name, (sums, most, squares) in {name: astuple(each) for name, each in leaving_of(after).items()}.items():
            moved = ((sums - leaving_of(before)[name].sums) / most).abs()
            assert bool((moved <= 1 + 1e-9).all()), (what, name)
            assert float(moved.square().sum()) <= squares * (1 + 1e-9), (what, name)
        for noise in (None, FigureNoise(0.01, NoiseSource(bytes(32)))):
            assert all(math.isfinite(figure) for figure in after.figures(MANY, noise).values()), what


def test_figures_of_several_labels_follow_from_rounded_sums() -> None:
    sums = LabelSums(2)
    logits = torch.tensor([[9.0, -9.0]] * 60 + [[9.0, 9.0]] * 40)
    sums.add(logits, torch.tensor([[1.0, 0.0]] * 50 + [[0.0, 1.0]] * 50))
    found = sums.figures(100)
    # Label 0: 50 hits, 100 predictions, 50 examples. Label 1: 40 hits, 40 predictions, 50 examples.
    assert found["macro_f1"] == pytest.approx((2 * 50 / 150 + 2 * 40 / 90) / 2)
    # Half of the sums: 45, 70 and 50, all of them multiples of 5.
    assert found["micro_f1"] == pytest.approx(2 * 45 / 120)
    assert set(sums.figures(99)) == {"loss", "micro_f1"}
    assert sums.figures(100, ignored=(1,))["macro_f1"] == pytest.approx(2 * 50 / 150)


def test_figures_of_targets_follow_from_rounded_sums_in_their_unit() -> None:
    sums = TargetSums(deviation=4.0)
    targets = torch.tensor([-1.0, 1.0] * 500)
    sums.add((targets + 0.3)[:, None], targets)
    sums.add(torch.tensor([[math.nan]]), torch.tensor([100.0]))
    found = sums.figures(1000)
    step = STEP * FARTHEST
    # Errors of .3, and one of 3 deviations, by steps of 15; 4 is the unit.
    assert found["mae"] == pytest.approx(4 * round((300 + 3) / step) * step / 1000)
    squared, spread = round((90 + 9) / 45) * 45, round(1009 / 45) * 45
    assert found["loss"] == pytest.approx(squared / 1000)
    assert found["r2"] == pytest.approx(1 - squared / spread)
    assert set(sums.figures(999)) == {"loss", "mae"}


def test_a_text_with_many_entities_counts_as_one() -> None:
    sums = BoundedSums(3, [("O", -1), ("B", 1), ("I", 1)])
    sums.add(torch.eye(3)[torch.tensor([1, 2, 0, 1, 1, 0])] * 9, torch.tensor([1, 2, 0, 1, 0, 0]))
    # Two true, three predicted, two hits, two overlapped and two overlapping: over three.
    assert sums.entities.tolist() == pytest.approx([2 / 3, 1, 2 / 3, 2 / 3, 2 / 3])


def test_texts_longer_than_a_model_takes_are_refused_whatever_the_texts_are() -> None:
    context, data = context_of("text-classification"), data_of("text-classification")
    wide = Dataset(data.tensors, padding=Padding(9, {"input_ids": 0, "attention_mask": 0}))
    with pytest.raises(InputMismatch, match="max_length"):
        sums_of(context, wide)
