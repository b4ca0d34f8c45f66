"""Figures over sites against numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import f1_score

from tessera.shared.api.class_counts import ClassCounts
from tessera.shared.api.runs import Measurement
from tessera.shared.metrics.comparison import main_score
from tessera.shared.metrics.site_spread import Score, scores_by_site, scores_by_version, spread, spreads
from tessera.shared.schema import MAX_NUMBER
from tests.support import literals


def measured(worker: str, examples: int, *, version: int = 1, held_out: bool = True, **metrics: float) -> Measurement:
    return literals.measured(worker, version, examples, held_out=held_out, **metrics)


def test_mean_worst_and_deviation_are_those_worked_out_by_hand() -> None:
    found = spread([Score("a", 10, 0.9), Score("b", 30, 0.5), Score("c", 60, 0.7)])
    assert (found.sites, found.worst, found.worst_site) == (3, 0.5, "b")
    assert found.mean == pytest.approx((0.9 + 0.5 + 0.7) / 3)
    assert found.weighted_mean == pytest.approx((10 * 0.9 + 30 * 0.5 + 60 * 0.7) / 100)
    # The mean is .7; the squared distances from it are .04, .04 and 0.
    assert found.deviation == pytest.approx((0.08 / 3) ** 0.5)
    assert found.worst_decile is None


def test_the_worst_decile_is_the_mean_of_the_worst_tenth_rounded_up() -> None:
    ten = [Score(f"s{i}", 1, i / 10) for i in range(10)]
    assert spread(ten).worst_decile == pytest.approx(0.0)
    # Of eleven, the worst two.
    assert spread([*ten, Score("s10", 1, 1.0)]).worst_decile == pytest.approx((0.0 + 0.1) / 2)
    assert spread(ten, better_low=True).worst_decile == pytest.approx(0.9)


def test_two_scores_of_a_site_or_none_at_all_are_refused() -> None:
    with pytest.raises(ValueError, match="one score a site"):
        spread([Score("a", 1, 0.0), Score("a", 1, 1.0)])
    with pytest.raises(ValueError, match="one score a site"):
        spread([])


def test_the_workers_of_a_site_count_as_one_site() -> None:
    found = spreads(
        [measured("a/1", 10, accuracy=0.5), measured("a/2", 30, accuracy=0.9), measured("b/1", 10, accuracy=0.6)]
    )
    accuracy = found[1]["accuracy"]
    # Site a: (10 * .5 + 30 * .9) / 40 = .8, of 40 examples.
    assert (accuracy.sites, accuracy.worst_site) == (2, "b")
    assert accuracy.mean == pytest.approx((0.8 + 0.6) / 2)
    assert accuracy.weighted_mean == pytest.approx((40 * 0.8 + 10 * 0.6) / 50)


def test_a_site_s_line_is_that_of_all_its_workers() -> None:
    found = [
        measured("a/1", 10, accuracy=0.5),
        measured("a/2", 30, accuracy=0.9),
        measured("b/1", 10, accuracy=0.6),
        measured("b/1", 10, version=2, loss=1.0),
        measured("c/1", 10, held_out=False, accuracy=0.1),
    ]
    # Site a: (10 * .5 + 30 * .9) / 40 = .8, whichever of its workers was first.
    assert scores_by_site(found, "accuracy") == {"a": {1: pytest.approx(0.8)}, "b": {1: 0.6}}
    assert scores_by_site(found[::-1], "accuracy") == scores_by_site(found, "accuracy")


def test_each_version_and_number_has_figures_of_its_own() -> None:
    found = spreads(
        [
            measured("a/1", 1, version=0, loss=2.0),
            measured("a/1", 1, version=1, loss=1.0, personal_loss=0.5),
            measured("b/1", 1, version=1, loss=3.0),
        ]
    )
    assert {version: sorted(names) for version, names in found.items()} == {0: ["loss"], 1: ["loss", "personal_loss"]}
    assert found[1]["loss"].worst_site == "b"
    assert found[1]["personal_loss"].sites == 1


def test_names_that_are_not_wanted_are_not_computed() -> None:
    found = [measured("a/1", 1, loss=1.0, accuracy=0.5, invented=1.0), measured("b/1", 1, loss=3.0)]
    assert spreads(found, ("loss", "personal_loss")) == {1: {"loss": spreads(found)[1]["loss"]}}
    assert spreads(found, ("personal_loss",)) == {}
    assert scores_by_version(found, ("loss", "macro_f1")) == {1: {"loss": 2.0}}


def test_the_largest_numbers_that_sites_may_report_have_figures_too() -> None:
    most = (1 << 40) - 1
    found = spreads([measured(name, most, loss=value * MAX_NUMBER) for name, value in (("a/w", 1), ("b/w", -1))])
    assert (found[1]["loss"].mean, found[1]["loss"].deviation) == (0.0, MAX_NUMBER)


def test_texts_of_unequal_lengths_count_by_their_labels() -> None:
    # 100 texts of 5 labels at one site, 100 of 500 at the other.
    found = [
        measured(site, 100, labels=100.0 * length, loss=value)
        for site, length, value in (("a/1", 5, 0.9), ("b/1", 500, 0.5))
    ]
    pooled = (500 * 0.9 + 50_000 * 0.5) / 50_500
    assert scores_by_version(found) == {1: {"loss": pytest.approx(pooled)}}
    assert spreads(found)[1]["loss"].weighted_mean == pytest.approx(pooled)
    assert spreads(found)[1].keys() == {"loss"}


def test_a_mean_over_sites_that_is_no_score_of_all_examples_has_another_name() -> None:
    found = [measured("a/1", 10, macro_f1=0.2), measured("b/1", 90, macro_f1=0.4)]
    assert scores_by_version(found) == {1: {"macro_f1 (mean of sites)": pytest.approx(0.3)}}
    central = [measured("a/1", 10, held_out=False, macro_f1=0.2)]
    assert scores_by_version(central) == {1: {"macro_f1": 0.2}}


def counted(true: np.ndarray, predicted: np.ndarray) -> ClassCounts:
    """Return the counts over ten classes of predictions with a confidence of .65 each."""
    of_class = (np.bincount(each, minlength=10) for each in (true, predicted, true[true == predicted]))
    labels, predictions, hits = (each.tolist() for each in of_class)
    in_bin = (np.arange(15) == 9).astype(int)
    return ClassCounts(
        labels=labels,
        predictions=predictions,
        hits=hits,
        bin_predictions=(in_bin * len(true)).tolist(),
        bin_hits=(in_bin * sum(hits)).tolist(),
        bin_confidence=(0.65 * in_bin * len(true)).tolist(),
    )


def skewed() -> list[tuple[np.ndarray, np.ndarray]]:
    """Return true and predicted labels of eight sites with two of ten classes each, about 70 % of them right."""
    dice = np.random.default_rng(0)
    sites = []
    for number in range(8):
        true = dice.choice([number, (number + 1) % 10], 200)
        sites.append((true, np.where(dice.random(200) < 0.7, true, dice.integers(0, 10, 200))))
    return sites


def test_predictions_at_sites_of_unlike_classes_have_the_macro_f1_of_all_their_examples_if_all_send_counts() -> None:
    sites = skewed()
    all_true, all_predicted = map(np.concatenate, zip(*sites, strict=True))
    right = f1_score(all_true, all_predicted, average="macro")
    own = [f1_score(true, predicted, average="macro") for true, predicted in sites]
    gaps = [abs(0.65 - (true == predicted).mean()) for true, predicted in sites]
    found = [
        measured(f"s{i}/w", 200, macro_f1=f1, calibration_error=gap, personal_macro_f1=f1).model_copy(
            update={"class_counts": counted(*site)}
        )
        for i, (site, f1, gap) in enumerate(zip(sites, own, gaps, strict=True))
    ]
    assert scores_by_version(found) == {
        1: {
            "macro_f1": pytest.approx(right),
            "calibration_error": pytest.approx(abs(0.65 - (all_true == all_predicted).mean())),
            "personal_macro_f1 (mean of sites)": pytest.approx(np.mean(own)),
        }
    }
    assert right > np.mean(own) + 0.3
    score = main_score(found, "macro_f1")
    assert score
    assert (score.title, score.values[1]) == ("macro_f1", pytest.approx(right))

    ignoring = [
        one.model_copy(update={"class_counts": counts.model_copy(update={"ignored": (3,)})})
        for one in found
        if (counts := one.class_counts)
    ]
    labels = [place for place in range(10) if place != 3]
    without = f1_score(all_true, all_predicted, average="macro", labels=labels)
    assert scores_by_version(ignoring)[1]["macro_f1"] == pytest.approx(without)
    # A site of whose counts other classes are left out is not added to the others.
    assert "macro_f1 (mean of sites)" in scores_by_version([*found[:-1], ignoring[-1]])[1]

    silent = [*found[:-1], found[-1].model_copy(update={"class_counts": None})]
    assert scores_by_version(silent)[1]["macro_f1 (mean of sites)"] == pytest.approx(np.mean(own))
    # One site that sends none in a later version makes all versions comparable by the mean.
    later = [one.model_copy(update={"version": 2}) for one in silent]
    score = main_score([*found, *later], "macro_f1")
    mean = pytest.approx(np.mean(own))
    assert score
    assert (score.title, score.values[1], score.values[2]) == ("macro_f1 (mean of sites)", mean, mean)
