"""Figures of a classifier: from counts they are what scikit-learn computes from every label and score."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, f1_score, roc_auc_score

from tessera.shared.api.class_counts import ALL, SCORE_BINS, SCORE_EDGES, ClassCounts, ScoreCounts, sum_of
from tessera.shared.api.runs import Measurement
from tessera.shared.metrics.classification import FigureTables, auroc, figures_of, flat, group_figures, share
from tessera.shared.tensors.lazy import Array


def drawn(seed: int, labels: int, classes: int, scale: float = 2.0) -> tuple[Array, Array]:
    """True classes int64 [labels], and the probabilities of a classifier, float64 [labels, classes]."""
    random = np.random.default_rng(seed)
    true = random.integers(0, classes, labels)
    logits = random.normal(size=(labels, classes)) * scale
    logits[np.arange(labels), true] += scale
    shares = np.exp(logits - logits.max(1, keepdims=True))
    return true, shares / shares.sum(1, keepdims=True)


def counted(true: Array, shares: Array) -> ScoreCounts:
    classes = shares.shape[1]
    confusion = np.zeros((classes, classes), int)
    np.add.at(confusion, (true, shares.argmax(1)), 1)
    scores = np.zeros((2, classes, SCORE_BINS), int)
    for k in range(classes):
        bins = np.searchsorted(SCORE_EDGES, shares[:, k], side="right")
        np.add.at(scores, ((true != k).astype(int), k, bins), 1)
    return ScoreCounts(confusion=confusion.tolist(), positives=scores[0].tolist(), negatives=scores[1].tolist())


@given(st.integers(0, 1000), st.integers(20, 200), st.integers(2, 5), st.sampled_from([0.1, 2.0, 20.0]))
def test_figures_of_counts_are_those_of_all_labels(seed: int, labels: int, classes: int, scale: float) -> None:
    true, shares = drawn(seed, labels, classes, scale)
    found = figures_of(counted(true, shares))
    predicted = shares.argmax(1)
    assert found.figures["accuracy"].value == pytest.approx(np.mean(predicted == true))
    assert found.figures["macro_f1"].value == pytest.approx(f1_score(true, predicted, average="macro"))
    for k, each in enumerate(found.classes):
        if not 0 < each.labels < labels:
            assert "auroc" not in each.figures
            continue
        area, precision = each.figures["auroc"], each.figures["auprc"]
        # The bound by binning holds, whatever the scores are.
        assert abs(area.value - roc_auc_score(true == k, shares[:, k])) <= area.error + 1e-9
        assert abs(precision.value - average_precision_score(true == k, shares[:, k])) <= precision.error + 1e-9
        for figure in each.figures.values():
            assert 0 <= figure.value <= 1
            if figure.low is not None and figure.high is not None:
                assert 0 <= figure.low <= figure.high <= 1


def test_sensitivity_at_a_specificity_is_reached_by_a_threshold() -> None:
    true, shares = drawn(1, 500, 2)
    found = figures_of(counted(true, shares), specificity=(0.5, 0.9, 0.99)).classes[1].figures
    for level in (0.5, 0.9, 0.99):
        reached = [
            np.mean(shares[true == 1, 1] >= edge)
            for edge in SCORE_EDGES
            if np.mean(shares[true == 0, 1] < edge) >= level
        ]
        assert found[f"sensitivity_at_{level:g}"].value == pytest.approx(max(reached))


def test_intervals_are_those_of_the_sources() -> None:
    # Wilson's of 81 of 263, as in Newcombe 1998, Stat Med 17:857, table I; and of none.
    assert share(81, 263)[1:3] == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert share(0, 20)[1:3] == pytest.approx((0.0, 0.1611), abs=5e-5)
    # An area of 1 is not certain.
    low, high = auroc(np.array([0, 20]), np.array([20, 0]))[1:3]
    assert low is not None
    assert (0.8 < low < 1, high) == (True, pytest.approx(1.0))


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    truth = figures_of(counted(*drawn(0, 20_000, 2)), draws=0)
    areas = [figures_of(counted(*drawn(seed, 40, 2))) for seed in range(1, 101)]
    for name in ("auroc", "auprc", "f1", "recall"):
        expected = truth.classes[1].figures[name].value
        covered = sum(
            each.low is not None and each.high is not None and each.low <= expected <= each.high
            for each in (one.classes[1].figures[name] for one in areas)
        )
        assert covered >= 90, name


def test_the_largest_counts_that_a_site_may_send_take_no_longer() -> None:
    many = (1 << 40) - 1
    histogram = [many, *[0] * (SCORE_BINS - 1)]
    counts = ScoreCounts(confusion=[[many, 0], [0, many]], positives=[histogram] * 2, negatives=[histogram[::-1]] * 2)
    assert all(math.isfinite(value) for _, value in flat(figures_of(counts, specificity=(0.9,))))


def test_counts_of_other_labels_in_one_record_are_refused() -> None:
    good = counted(*drawn(0, 20, 2)).model_dump()
    for name, value in (("confusion", [[1, 2], [3, 4]]), ("positives", good["negatives"]), ("confusion", [[1]])):
        with pytest.raises(ValueError, match="validation error"):
            ScoreCounts.model_validate({**good, name: value})


def measured(site: str, version: int = 0, *, held_out: bool = True, **groups: ScoreCounts) -> Measurement:
    labels = sum(sum(each.labels) for each in groups.values())
    return Measurement(
        version=version, dataset="d", worker=f"{site}/w", held_out=held_out, examples=labels, metrics={},
        subgroup_counts=groups,
    )  # fmt: skip


def test_sites_and_subgroups_are_pooled_by_their_counts() -> None:
    parts = [counted(*drawn(seed, 50, 3)) for seed in range(4)]
    sent = [measured("a", f=parts[0], m=parts[1]), measured("b", f=parts[2], other=parts[3])]
    found = {(one.site, one.subgroup): one.found for one in group_figures(sent)}
    assert found[None, ALL] == figures_of(sum_of(parts))
    assert found[None, "f"] == figures_of(sum_of([parts[0], parts[2]]))
    assert found["b", "other"] == figures_of(parts[3])
    assert set(found) == {(None, n) for n in (ALL, "f", "m", "other")} | {
        ("a", ALL), ("a", "f"), ("a", "m"), ("b", ALL), ("b", "f"), ("b", "other"),
    }  # fmt: skip
    # Sites whose models have other classes are never added up.
    unlike = [*sent, measured("c", all=counted(*drawn(5, 50, 2)))]
    assert {one.site for one in group_figures(unlike)} == {"a", "b", "c"}


def test_tables_name_classes_and_parts() -> None:
    found = list(group_figures([measured("a", f=counted(*drawn(0, 50, 2)), m=counted(*drawn(1, 50, 2)))]))
    tables = FigureTables.of(found, "sex", ["benign"])
    alike = FigureTables.of(found, "sex", ["same", "same"])
    assert tables is not None
    assert alike is not None
    assert [row[0] for row in alike.classes] == ["class", "same", "same"]
    assert [row[0] for row in tables.classes] == ["class", "benign", "1"]
    assert [row[0] for row in tables.parts] == ["", "all", "sex f", "sex m", "a", "a, sex f", "a, sex m"]
    assert {len(row) for row in tables.classes} == {len(tables.classes[0])}


def test_edges_of_scores_rise_and_counts_by_class_stay_as_they_were() -> None:
    assert all(low < high for low, high in pairwise((0.0, *SCORE_EDGES, 1.0)))
    assert "confusion" not in ClassCounts.model_fields
