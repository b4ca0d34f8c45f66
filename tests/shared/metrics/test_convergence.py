"""Rounds, time and bytes until a score, and jitter: arithmetic that is worked out by hand."""

from __future__ import annotations

from datetime import timedelta
from statistics import stdev

import pytest

from tessera.shared.api.runs import Measurement, Round, Run
from tessera.shared.metrics.comparison import History, compare
from tessera.shared.metrics.convergence import Curve, RoundCost
from tessera.shared.metrics.rows import rows_of
from tessera.shared.problems import Invalid
from tests.support.literals import AT, measured, round_of, run_of, view_of


def a_run(name: str = "n") -> Run:
    return run_of(name, "completed", 3, ident=name, rounds=3)


def attempt(number: int, at: float, version: int | None, attempt: int = 1) -> Round:
    """Return an attempt of 2 s that one worker took part in: 10 bytes down, 1 up."""
    opened = AT + timedelta(seconds=at)
    return round_of(
        view_of("a/w", download_bytes=10, upload_bytes=1), number=number, attempt=attempt, version=version,
        state="committed" if version else "abandoned", opened_at=opened, closed_at=opened + timedelta(seconds=2),
    )  # fmt: skip


def scored(version: int, score: float, metric: str = "accuracy") -> Measurement:
    return measured("lab/w", version, held_out=False, **{metric: score})


# The second round was tried twice; the run was paused before the third.
ROUNDS = [attempt(1, 5, 1), attempt(2, 8, None), attempt(2, 20, 2, attempt=2), attempt(3, 1000, 3)]


def test_the_cost_of_a_score_includes_abandoned_attempts_and_waiting() -> None:
    found = History.of(a_run(), ROUNDS, [scored(0, 0.1), scored(1, 0.5), scored(2, 0.8), scored(3, 0.7)])
    costs = found.convergence([0.5, 0.6, 0.05])
    assert costs
    half, more, first = costs.reached
    assert (half.rounds, half.seconds, half.download_bytes, half.upload_bytes, half.bytes) == (1, 7.0, 10, 1, 11)
    assert (more.rounds, more.seconds, more.download_bytes, more.upload_bytes, more.bytes) == (2, 22.0, 30, 3, 33)
    assert (first.reached, first.rounds, first.bytes) == (True, 0, 0)
    assert "wall time since the run's start" in dict(costs.facts())["accuracy 0.6 or more"]


def test_the_time_of_a_simulation_leaves_out_the_night_between_a_stop_and_its_resumption() -> None:
    found = History.of(a_run(), ROUNDS, [scored(3, 0.7)], "rounds").convergence([0.7])
    assert found
    assert found.reached[0].seconds == 8.0
    assert "simulated time in rounds" in dict(found.facts())["accuracy 0.7 or more"]


def test_a_score_that_was_never_reached_is_said_in_every_form() -> None:
    measurements = [scored(1, 0.5), scored(2, 0.8)]
    found = History.of(a_run(), ROUNDS, measurements).convergence([0.9])
    assert found
    assert not found.reached[0].reached
    assert dict(found.facts())["accuracy 0.9 or more"] == "never up to version 2; the best is 0.8"
    rows = {row.metric: row.value for row in rows_of(a_run(), ROUNDS, [], measurements, [0.9])}
    assert rows["accuracy.to_0.9.reached"] == 0
    assert "accuracy.to_0.9.rounds" not in rows


def test_a_loss_is_reached_from_above_and_its_shares_lie_above_the_best() -> None:
    found = History.of(a_run(), ROUNDS, [scored(n, 1.0 - 0.1 * n, "loss") for n in range(4)]).convergence()
    assert found
    assert [one.score for one in found.reached] == pytest.approx([0.7 / 0.9, 0.7 / 0.95])
    assert [one.rounds for one in found.reached] == [3, 3]
    assert [name.rpartition(" ")[2] for name, _ in found.facts()][:2] == ["less", "less"]


@pytest.mark.parametrize("metric", ["accuracy", "loss"])
def test_a_share_of_a_negative_best_value_is_easier_to_reach_than_the_best(metric: str) -> None:
    found = History.of(a_run(), ROUNDS, [scored(1, -0.5, metric)]).convergence()
    assert found
    assert all(one.reached for one in found.reached)


def test_jitter_says_of_which_versions_it_is() -> None:
    scores = [0.1, 0.2, 0.7, 0.8, 0.6, 0.9, 0.7]
    costs = [RoundCost(n, 0, 0, 1.0, float(n)) for n in range(1, 13)]
    curve = Curve.of("accuracy", "accuracy", dict(zip(range(0, 13, 2), scores, strict=True)), costs)
    assert curve
    found = curve.convergence()
    assert (found.jitter, found.jitter_versions) == (pytest.approx(stdev(scores[-5:])), (4, 6, 8, 10, 12))
    assert "last 5 measured versions (4 to 12)" in dict(found.facts())["jitter of accuracy"]
    alone = Curve("accuracy", "accuracy", curve.points[:1]).convergence([0.5])
    assert alone.jitter is None
    assert "fewer than two" in dict(alone.facts())["jitter of accuracy"]


def test_a_worse_run_is_not_first_to_its_own_lower_best() -> None:
    good = History.of(a_run("good"), ROUNDS, [scored(1, 0.5), scored(2, 0.79), scored(3, 0.8)])
    poor = History.of(a_run("poor"), ROUNDS, [scored(1, 0.4), scored(2, 0.4)])
    one, other = (run.convergence for run in compare([good, poor]).runs)
    assert one
    assert other
    assert (
        [each.score for each in other.reached] == [each.score for each in one.reached] == pytest.approx([0.72, 0.76])
    )
    assert [each.rounds for each in one.reached] == [2, 2]
    assert [each.reached for each in other.reached] == [False, False]


def test_a_version_whose_round_was_not_read_yet_has_no_cost() -> None:
    found = History.of(a_run(), ROUNDS[:1], [scored(1, 0.5), scored(2, 0.9)]).convergence([0.9])
    assert found
    assert (found.last, found.reached[0].reached) == (1, False)


def test_a_score_that_is_no_number_is_refused() -> None:
    with pytest.raises(Invalid, match="nan is no score"):
        History.of(a_run(), ROUNDS, [scored(1, 0.5)]).convergence([float("nan")])
