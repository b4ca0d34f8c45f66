"""Scores of several labels, of targets and of entities, beside those of scikit-learn and seqeval."""

from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from sklearn.metrics import f1_score, mean_absolute_error, r2_score, roc_auc_score
from torch import Tensor

from tessera.shared.api.class_counts import (
    SCORE_EDGES,
    ClassCounts,
    Counts,
    EntityCounts,
    GroupCounts,
    LabelCounts,
    LabelScores,
    NumberSums,
    can_pool,
    counts_of,
    pooled,
    sum_of,
)
from tessera.shared.metrics.classification import figures_of, flat
from tessera.shared.model.dataset_schema import MULTI_LABEL, REGRESSION
from tessera.worker.data.dataset import Dataset
from tessera.worker.data.groups import Subgroups
from tessera.worker.executor.stages.evaluate import _rounded
from tessera.worker.model.build import instantiate
from tessera.worker.training.batches import Batches
from tessera.worker.training.evaluate import PredictionCounts, evaluate
from tessera.worker.training.tallies import EntityTally, LabelTally, NumberTally, entities, overlaps, tags_of
from tests.worker.executor.test_equal_results import BERT

CPU = torch.device("cpu")
EXAMPLES = 60
TAGS = ["O", "B-drug", "I-drug", "B-dose", "I-dose"]


def data(labels: Tensor) -> Dataset:
    ids = torch.randint(1, 20, (EXAMPLES, 8), generator=torch.Generator().manual_seed(4))
    return Dataset({"input_ids": ids, "labels": labels})


def several(labels: int = 3) -> Tensor:
    return (torch.rand(EXAMPLES, labels, generator=torch.Generator().manual_seed(2)) < 0.4).float()


def measured(config: dict[str, object], labels: Tensor, size: int = 7) -> tuple[dict[str, float], Counts, np.ndarray]:
    model = instantiate({**config, "initializer_range": 0.9}, "text-classification", seed=1)
    found = PredictionCounts()
    scores = evaluate(model, "text-classification", Batches(data(labels), size, CPU), lambda: None, scores=found)
    with torch.no_grad():
        logits = model(input_ids=data(labels).tensors["input_ids"]).logits.double().numpy()
    counts = found.by_class()
    assert counts
    return scores, counts, logits


def test_scores_of_several_labels_are_those_of_scikit_learn() -> None:
    labels = several()
    scores, counts, logits = measured(BERT | {"problem_type": MULTI_LABEL}, labels)
    true, made = labels.numpy(), logits > 0
    assert scores["micro_f1"] == pytest.approx(f1_score(true, made, average="micro"))
    assert scores["macro_f1"] == pytest.approx(f1_score(true, made, average="macro"))
    assert isinstance(counts, LabelCounts)
    f1 = f1_score(true, made, average=None)
    of_each = zip(counts.labels, counts.predictions, counts.hits, strict=True)
    assert [2 * hits / (a + b) for a, b, hits in of_each] == pytest.approx(list(f1))
    # Within the bins of scores, of a quarter of a logit.
    assert scores["macro_auroc"] == pytest.approx(roc_auc_score(true, logits, average="macro"), abs=0.03)
    assert "accuracy" not in scores
    assert "labels" not in scores


def test_the_auroc_of_a_label_is_exact_but_for_pairs_in_a_bin() -> None:
    dice = torch.Generator().manual_seed(6)
    true = several(2)
    # Scores in the middles of bins: no pair of different scores is in one.
    edges = torch.tensor([0.0, *SCORE_EDGES, 1.0])
    middles = (edges[1:] + edges[:-1]) / 2
    logits = middles[torch.randint(0, len(middles), (EXAMPLES, 2), generator=dice)].double().logit()
    tally = LabelTally(1, 2)
    tally.add(logits, true, torch.zeros(EXAMPLES, dtype=torch.int64))
    found = tally.whole()
    assert isinstance(found, LabelScores)
    figures = figures_of(found)
    for place, each in enumerate(figures.classes):
        wanted = roc_auc_score(true[:, place].numpy(), logits[:, place].numpy())
        assert each.figures["auroc"].value == pytest.approx(wanted, abs=1e-12)
        f1 = f1_score(true[:, place].numpy(), logits[:, place].numpy() > 0)
        assert each.figures["f1"].value == pytest.approx(f1)
        assert each.figures["f1"].low is not None
        assert each.figures["f1"].low < f1 < (each.figures["f1"].high or 0)
        assert each.labels == int(true[:, place].sum())
    assert figures.figures["micro_f1"].value == pytest.approx(
        f1_score(true.numpy(), (logits > 0).numpy(), average="micro")
    )
    assert {"macro_f1", "macro_auroc", "macro_auprc", "recall.1", "auroc.0.error"} <= dict(flat(figures)).keys()


def test_scores_of_targets_are_those_of_scikit_learn_in_the_unit_of_the_targets() -> None:
    targets = torch.randn(EXAMPLES, generator=torch.Generator().manual_seed(3))
    scale = {"problem_type": REGRESSION, "num_labels": 1, "target_mean": 50.0, "target_deviation": 4.0}
    scores, counts, outputs = measured(BERT | scale, targets)
    true, made = 50 + 4 * targets.double().numpy(), 50 + 4 * outputs[:, 0]
    assert scores["mae"] == pytest.approx(mean_absolute_error(true, made), rel=1e-5)
    assert scores["r2"] == pytest.approx(r2_score(true, made), rel=1e-5)
    assert scores["loss"] == pytest.approx(float(np.square(true - made).mean()) / 16, rel=1e-5)
    assert isinstance(counts, NumberSums)
    assert figures_of(counts).figures["mae"].value == scores["mae"]
    # Equal targets have no spread that a model could explain.
    assert "r2" not in measured(BERT | scale, torch.full((EXAMPLES,), 0.3))[0]


def drawn() -> tuple[list[list[int]], list[list[int]]]:
    dice = random.Random(5)
    true = [[dice.choice(TAGS) for _ in range(dice.randint(1, 12))] for _ in range(40)]
    made = [[tag if dice.random() < 0.7 else dice.choice(TAGS) for tag in row] for row in true]
    return tuple([[TAGS.index(tag) for tag in row] for row in rows] for rows in (true, made))  # type: ignore[return-value]


def counted(true: list[list[int]], made: list[list[int]], names: list[str] = TAGS) -> EntityCounts:
    tags = tags_of(names)
    assert tags
    tally = EntityTally(1, tags)
    for right, found in zip(true, made, strict=True):
        rows = torch.tensor([found, right])
        tally.add(rows[:1], rows[1:], torch.ones(1, len(right), dtype=torch.bool), torch.zeros(1, dtype=torch.int64))
    return tally.total()


def test_the_f1_of_entities_is_that_of_seqeval() -> None:
    found = counted(*drawn())
    # seqeval 1.2.2: f1_score(true, made), and classification_report(true, made, output_dict=True) of the same tags.
    assert found.scores()["entity_f1"] == pytest.approx(0.7446808510638298, rel=1e-12)
    drug, dose = found.f1(1), found.f1(3)
    assert drug
    assert dose
    assert (drug[0], dose[0]) == pytest.approx((0.7605633802816901, 0.7239263803680983), rel=1e-12)
    assert (found.labels[1], found.labels[3], sum(found.labels)) == (111, 81, 192)


def test_overlapping_entities_of_a_type_count_as_partly_found() -> None:
    # True: drug at 0 to 2, dose at 4. Made: drug at 1 to 3, drug at 4 (another type), dose at 6.
    true = [1, 2, 2, 0, 3, 0, 0]
    made = [0, 1, 2, 2, 1, 0, 3]
    found = counted([true], [made])
    # Of three made one overlaps, of two true one is overlapped: 2 * 1/3 * 1/2 / (1/3 + 1/2) = 2/5.
    assert found.scores() == {"entity_f1": 0.0, "entity_partial_f1": pytest.approx(2 / 5)}
    assert found.f1(1) == (0.0, pytest.approx(2 * (1 / 2) * 1 / (1 / 2 + 1)))
    assert counted([[0, 0]], [[0, 0]]).scores() == {}
    assert counted([[1, 2]], [[0, 0]]).scores() == {"entity_f1": 0.0, "entity_partial_f1": 0.0}


def test_an_entity_begins_where_its_type_changes_and_classes_of_other_schemes_have_none() -> None:
    tags = tags_of(TAGS)
    assert tags
    # I-drug, B-drug, I-dose, I-dose, O, I-drug
    assert entities([2, 1, 4, 4, 0, 2], tags) == [(1, 0, 1), (1, 1, 2), (3, 2, 4), (1, 5, 6)]
    assert [*overlaps([(1, 0, 2)], [(1, 0, 2), (3, 0, 2)])] == [[1], [1, 3], [1], [1], [1]]
    assert tags_of(["I-drug", "O"]) == [("I", 0), ("O", -1)]
    for names in (["O"], ["B-drug", "I-drug"], ["O", "drug"], ["O", "B-"], ["O", "B-drug", "E-drug"]):
        assert tags_of(names) is None


def test_classes_without_names_are_of_no_entities() -> None:
    config = instantiate(BERT | {"id2label": {"0": "O", "2": "B-drug"}}, "token-classification", seed=1).config
    found = PredictionCounts()
    found.prepare(config, "token-classification", torch.zeros(1, 2, dtype=torch.int64))
    assert found.entities is None


def test_words_of_texts_are_measured_by_their_entities_and_subgroups() -> None:
    config = {
        **BERT,
        "num_labels": 5,
        "id2label": {str(n): name for n, name in enumerate(TAGS)},
        "initializer_range": 0.9,
    }
    model = instantiate(config, "token-classification", seed=1)
    labels = torch.randint(0, 5, (EXAMPLES, 8), generator=torch.Generator().manual_seed(9))
    labels[:, 0], labels[3] = -100, -100
    texts = data(labels)
    groups = Subgroups(("f", "m"), torch.arange(EXAMPLES) % 2)
    found = PredictionCounts(groups)
    scores = evaluate(model, "token-classification", Batches(texts, 7, CPU), lambda: None, scores=found)
    with torch.no_grad():
        made = model(input_ids=texts.tensors["input_ids"]).logits.argmax(-1)
    rows = [row for row in range(EXAMPLES) if row != 3]
    whole = counted(labels[rows, 1:].tolist(), made[rows, 1:].tolist())
    assert {name: scores[name] for name in ("entity_f1", "entity_partial_f1")} == whole.scores()
    by_group = found.by_subgroup()
    assert (
        sum_of(
            [
                one.entities
                for one in by_group.values()
                if not isinstance(one, NumberSums | LabelScores) and one.entities
            ]
        )
        == whole
    )
    figures = figures_of(by_group["f"])
    assert by_group["f"].entities is not None  # type: ignore[union-attr]
    assert figures.figures["entity_f1"].value == by_group["f"].entities.scores()["entity_f1"]  # type: ignore[union-attr]
    assert "entity_partial_f1" in figures.classes[1].figures
    assert "entity_f1" not in figures.classes[2].figures


@pytest.mark.parametrize(
    ("config", "labels"),
    [
        (BERT | {"problem_type": MULTI_LABEL}, several()),
        (BERT | {"problem_type": REGRESSION, "num_labels": 1}, several()[:, 0] * 3 - 1),
    ],
    ids=["several labels", "targets"],
)
def test_counts_of_sites_add_up_to_those_of_all_examples(config: dict[str, object], labels: Tensor) -> None:
    model = instantiate(config, "text-classification", seed=1)

    def counts(rows: Tensor) -> tuple[Counts, dict[str, GroupCounts]]:
        found = PredictionCounts(Subgroups(("f", "m"), torch.arange(len(rows)) % 2))
        part = data(labels).rows(rows)
        evaluate(model, "text-classification", Batches(part, 7, CPU), lambda: None, scores=found)
        whole = found.by_class()
        assert whole
        return whole, found.by_subgroup()

    everything, groups = counts(torch.arange(EXAMPLES))
    one, two = (counts(rows)[0] for rows in torch.arange(EXAMPLES).split(20)[:2])
    three = counts(torch.arange(40, EXAMPLES))[0]
    # They travel as JSON.
    sites = [TypeAdapter[Counts](Counts).validate_json(each.model_dump_json()) for each in (one, two, three)]
    assert [type(each) for each in sites] == [type(everything)] * 3
    assert [counts_of(json.loads(each.model_dump_json())) for each in sites] == sites
    summed = pooled(sites)
    assert summed
    assert summed.total == EXAMPLES
    assert summed.scores() == pytest.approx(everything.scores())
    assert sum_of([*groups.values()]).total == EXAMPLES
    other = ClassCounts.model_construct(labels=(1, 2), ignored=())
    assert not can_pool([one, other])
    assert not can_pool([one, None])


def test_rounded_sums_of_targets_far_from_zero_still_tell_how_much_is_explained() -> None:
    drawing, sites, errors, spread = np.random.default_rng(0), [], 0.0, []
    for mean in (128.7, 131.9, 140.3):
        targets, made = drawing.normal(mean, 5, 357), drawing.normal(mean, 5, 357)
        tally = NumberTally(1, 1.0)
        tally.add(torch.from_numpy(made)[:, None], torch.from_numpy(targets), torch.zeros(357, dtype=torch.int64))
        sites.append(_rounded(tally.total()))
        errors += float(np.square(made - targets).sum())
        spread += targets.tolist()
    whole = pooled(sites)
    assert whole
    expected = 1 - errors / (np.var(spread) * len(spread))
    assert whole.scores()["r2"] == pytest.approx(expected, abs=0.02)


def test_impossible_counts_are_refused() -> None:
    good = {"examples": 5, "labels": (2, 1), "predictions": (1, 3), "hits": (1, 0)}
    for change in ({"hits": (2, 0)}, {"labels": (2, 1, 0)}, {"labels": (2, 3)}, {"examples": 2}):
        LabelCounts.model_validate(good)
        with pytest.raises(ValidationError):
            LabelCounts.model_validate(good | change)
    entity = {"labels": (3, 0), "predictions": (2, 0), "hits": (1, 0), "overlapped": (2, 0), "overlapping": (1, 0)}
    for change in ({"hits": (2, 0)}, {"overlapped": (4, 0)}, {"overlapping": (3, 0)}, {"labels": (3,)}):
        EntityCounts.model_validate(entity)
        with pytest.raises(ValidationError):
            EntityCounts.model_validate(entity | change)
    words = {
        "labels": (5, 0, 0),
        "predictions": (5, 0, 0),
        "hits": (5, 0, 0),
        "bin_predictions": (5, *[0] * 14),
        "bin_hits": (5, *[0] * 14),
        "bin_confidence": (5.0, *[0.0] * 14),
    }
    # Counts of several sites add up by class.
    with pytest.raises(ValidationError, match="entities are of 2 classes, of 3"):
        ClassCounts.model_validate(words | {"entities": entity})
    far = NumberSums(examples=5, absolute=1, squared=1e100, targets=0, spread=1e-300)
    assert far.scores() == {"mae": 0.2}
    for value in (-1.0, math.nan, 1e101):
        with pytest.raises(ValidationError):
            NumberSums.model_validate(
                {"examples": 5, "absolute": value, "squared": 1.0, "targets": 0.0, "spread": 5.0}
            )
