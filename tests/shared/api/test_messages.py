"""Messages: strict where people write them, tolerant where programs one version apart do."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from tessera.shared.api.admin import TokenSpec
from tessera.shared.api.class_counts import LabelCounts, LabelScores, NumberSums
from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import RunSpec
from tessera.shared.api.tasks import Claim, EvaluationResult, Submission
from tessera.shared.api.versions import Manifest
from tessera.shared.methods.base import MethodSpec
from tessera.shared.schema import MAX_NUMBER, canonical
from tessera.shared.updates.codecs import pipeline

DIGEST = f"sha256:{'0' * 64}"
SPEC = {"name": "r", "method": {"name": "fedavg"}, "model": DIGEST, "version": DIGEST, "dataset": "d", "rounds": 1}
SUBMISSION = {"token": 1, "version": DIGEST, "update": DIGEST, "examples": 1}


def test_a_run_s_defaults_are_lossless_and_take_all_workers() -> None:
    spec = RunSpec.model_validate(SPEC)
    assert spec.codec == pipeline.LOSSLESS
    assert (spec.cohort.size, spec.cohort.quorum, spec.normalization) == (None, 1, "participants")


@pytest.mark.parametrize(
    "change",
    [
        {"round": 1},
        {"cohort": {"sise": 2}},
        {"training": {"lr": 1}},
        {"rounds": 0},
        {"seed": 1 << 53},
        {"name": "a/b"},
        {"name": "../x"},
        {"model": "sha256:xyz"},
        {"model": DIGEST.upper()},
        {"codec": "gzip"},
        {"codec": "zstd+delta"},
        {"normalization": "nobody"},
        {"max_update_norm": 0},
        {"max_update_norm": float("nan")},
        {"cohort": {"deadline_seconds": float("inf")}},
        {"training": {"learning_rate": 0}},
    ],
)
def test_a_run_that_cannot_be_meant_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        RunSpec.model_validate(SPEC | change)


def test_a_quorum_must_fit_into_its_cohort() -> None:
    assert Cohort(size=3, quorum=3).quorum == 3
    with pytest.raises(ValidationError, match="a quorum of 4 cannot come from a cohort of 3"):
        Cohort(size=3, quorum=4)


PRIVACY = {"epsilon": 3, "delta": 1e-5, "clip_norm": 1}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"training": {"precision": "float16"}}, "use bfloat16"),
        ({"training": {"gradient_checkpointing": True}}, "leave it out"),
        ({"evaluation": {"dataset": "d"}}, "exact figures of the examples of 'd'"),
        ({"privacy": PRIVACY | {"delta": 0.1}}, "less than 0.1"),
        ({"privacy": PRIVACY | {"epsilon": 0}}, "greater than 0"),
        ({"privacy": {"epsilon": 3, "delta": 1e-5}}, "Field required"),
        ({"privacy": PRIVACY | {"selection": "free"}}, "'refused', 'noisy' or 'uncovered'"),
    ],
)
def test_a_run_that_cannot_be_private_is_refused(change: dict[str, object], why: str) -> None:
    assert RunSpec.model_validate(SPEC | {"privacy": PRIVACY, "evaluation": {"dataset": "e", "sites": True}}).privacy
    with pytest.raises(ValidationError, match=why):
        RunSpec.model_validate(SPEC | {"privacy": PRIVACY} | change)


def test_messages_between_programs_pass_over_what_they_do_not_know() -> None:
    assert Submission.model_validate(SUBMISSION | {"from_the_future": 1}).token == 1


@pytest.mark.parametrize(
    "change",
    [
        {"examples": 0},
        {"examples": 1 << 40},
        {"examples": 1.5},
        {"metrics": {"loss": float("nan")}},
        {"metrics": {str(i): 0 for i in range(4097)}},
        {"metrics": {"x" * 65: 0}},
        {"download_bytes": -1},
        {"download_bytes": 1 << 63},
    ],
)
def test_a_submission_s_numbers_are_bounded(change: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Submission.model_validate(SUBMISSION | change)


@pytest.mark.parametrize(
    "field", [{"worker": "a/b"}, {"instance": "short"}, {"datasets": {"d": -1}}, {"datasets": {"d": 1 << 40}}]
)
def test_what_a_worker_says_of_itself_is_bounded(field: dict[str, object]) -> None:
    claim = {"worker": "w", "instance": "0" * 32, "datasets": {"d": 1}}
    assert Claim.model_validate(claim).kinds == ("train",)
    with pytest.raises(ValidationError):
        Claim.model_validate(claim | field)


@pytest.mark.parametrize(("role", "site"), [("site", None), ("admin", "a"), ("viewer", "a")])
def test_a_token_names_a_site_if_and_only_if_it_is_a_site_s(role: str, site: str | None) -> None:
    with pytest.raises(ValidationError, match="names its site"):
        TokenSpec.model_validate({"name": "t", "role": role, "site": site})


def test_equal_values_have_one_canonical_form() -> None:
    one = Manifest(blocks={"a": DIGEST, "b": DIGEST}, scalars={"x": 1.0})
    other = Manifest(scalars={"x": 1}, blocks={"b": DIGEST, "a": DIGEST})
    assert canonical(one) == canonical(other)
    assert canonical(
        one
    ) == b'{"blocks":{"a":"%s","b":"%s"},"format":2,"root":null,"scalars":{"x":1.0},"server_state":{}}' % (
        (DIGEST.encode(),) * 2
    )


def test_a_value_cannot_be_changed() -> None:
    chosen = MethodSpec(name="fedavg")
    with pytest.raises(ValidationError, match="frozen"):
        chosen.name = "other"  # type: ignore[misc]


@pytest.mark.parametrize("labels", [0.0, -1.0, 1.5, float(1 << 40)])
def test_a_site_cannot_weigh_its_scores_by_a_count_that_is_none(labels: float) -> None:
    assert EvaluationResult.model_validate(SUBMISSION | {"metrics": {"labels": 5.0}}).metrics == {"labels": 5.0}
    with pytest.raises(ValidationError, match="the number of scored labels"):
        EvaluationResult.model_validate(SUBMISSION | {"metrics": {"labels": labels}})


@pytest.mark.parametrize("message", [Submission, EvaluationResult])
@pytest.mark.parametrize(
    "metrics",
    [{"loss": 1.7e308}, {"loss": -1.7e308}, {"loss": float("nan")}, {"": 1.0}, {"x" * 65: 1.0}, {"\x1b[2J": 1.0}],
)
def test_numbers_that_nobody_could_sum_and_names_that_nobody_could_print_are_refused(
    message: type[Submission | EvaluationResult], metrics: dict[str, float]
) -> None:
    assert message.model_validate(SUBMISSION | {"metrics": {"loss": MAX_NUMBER}}).metrics["loss"] == 1e100
    with pytest.raises(ValidationError):
        message.model_validate(SUBMISSION | {"metrics": metrics})


COUNTS = {
    "labels": [3, 2],
    "predictions": [4, 1],
    "hits": [3, 1],
    "bin_predictions": [0] * 14 + [5],
    "bin_hits": [0] * 14 + [4],
    "bin_confidence": [0.0] * 14 + [4.9],
}


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"labels": [3, 3]}, "different sums"),
        ({"predictions": [5, 1]}, "different sums"),
        ({"bin_predictions": [1] * 14 + [5]}, "different sums"),
        ({"hits": [2, 1]}, "different sums"),
        ({"hits": [2, 2]}, "more hits than"),
        ({"predictions": [2, 3]}, "more hits than"),
        ({"bin_hits": [4] + [0] * 14}, "more hits than"),
        ({"bin_confidence": [0.0] * 14 + [5.1]}, "confidence above one"),
        ({"labels": [3, 2, 0]}, "different numbers of classes"),
        ({"labels": [3.5, 1.5]}, "labels.0"),
        ({"labels": [6, -1]}, "labels.1"),
        ({"hits": [0] * 1001}, "at most 1000"),
        ({"bin_hits": [4]}, "at least 15"),
    ],
)
def test_a_site_cannot_pool_counts_that_are_of_no_predictions(change: dict[str, object], what: str) -> None:
    result = {**SUBMISSION, "examples": 5, "metrics": {}, "class_counts": COUNTS}
    assert EvaluationResult.model_validate(result).class_counts
    with pytest.raises(ValidationError, match=what):
        EvaluationResult.model_validate(result | {"class_counts": COUNTS | change})


def test_counts_of_labels_and_sums_of_targets_are_of_the_examples_that_were_scored() -> None:
    result = {**SUBMISSION, "examples": 5, "metrics": {}}
    labels = {"examples": 5, "labels": [2, 1], "predictions": [1, 3], "hits": [1, 0]}
    sums = {"examples": 5, "absolute": 3.5, "squared": 2.0, "targets": -1.0, "spread": 5.0}
    scores = {"positives": [[1] + [0] * 63] * 2, "negatives": [[4] + [0] * 63] * 2}
    for counts, kind in ((labels, LabelCounts), (sums, NumberSums)):
        found = EvaluationResult.model_validate(result | {"class_counts": counts})
        assert isinstance(found.class_counts, kind)
        with pytest.raises(ValidationError, match="class_counts has 5 labels, of 4 that were scored"):
            EvaluationResult.model_validate(result | {"examples": 4, "class_counts": counts})
    for counts, of_group in ((scores, LabelScores), (sums, NumberSums)):
        found = EvaluationResult.model_validate(result | {"subgroup_counts": {"all": counts}})
        assert isinstance(found.subgroup_counts["all"], of_group)
        with pytest.raises(ValidationError, match="subgroup_counts has more labels"):
            EvaluationResult.model_validate(result | {"subgroup_counts": {"f": counts, "m": counts}})


def test_a_site_cannot_pool_more_labels_than_it_says_were_scored() -> None:
    result = {**SUBMISSION, "examples": 7, "metrics": {"labels": 5.0}, "class_counts": COUNTS}
    assert EvaluationResult.model_validate(result).class_counts
    with pytest.raises(ValidationError, match="class_counts has 5 labels, of 7 that were scored"):
        EvaluationResult.model_validate(result | {"metrics": {}})
