"""The best version of a run, and what differs between runs, from literals."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest

from tessera.shared.api.runs import Measurement
from tessera.shared.metrics.comparison import History, best_version, compare
from tests.support import literals
from tests.support.literals import AT, round_of, run_of, view_of


def measured(version: int, site: str | None, examples: int = 10, **metrics: float) -> Measurement:
    """Return one evaluation: at a site, or on central data."""
    return literals.measured(f"{site or 'lab'}/w", version, examples, held_out=site is not None, **metrics)


@pytest.mark.parametrize(
    ("measurements", "expected"),
    [
        pytest.param([], None, id="nothing was evaluated"),
        pytest.param([measured(1, "a", speed=3.0)], None, id="no main score"),
        pytest.param([measured(1, "a", accuracy=0.5), measured(2, "a", accuracy=0.9)], 2, id="higher accuracy"),
        pytest.param([measured(1, "a", loss=0.5), measured(2, "a", loss=0.9)], 1, id="lower loss"),
        pytest.param([measured(n, "a", accuracy=0.5, loss=1.0 - n) for n in (1, 2)], 1, id="the earliest of equals"),
        pytest.param(
            [measured(1, None, accuracy=0.6), measured(2, None, accuracy=0.5), measured(2, "a", accuracy=0.9)],
            1,
            id="central data before sites",
        ),
        pytest.param(
            [measured(1, "a", accuracy=0.5), measured(1, "b", accuracy=0.9), measured(2, "a", accuracy=0.6)],
            2,
            id="better at the site that both have, with a lower mean",
        ),
        # By its own numbers alone, each site would weigh version 2 otherwise: .4 * 90 + .9 * 10 < .5 * 10 + .5 * 90.
        pytest.param(
            [
                measured(1, "a", 10, accuracy=0.5),
                measured(1, "b", 90, accuracy=0.3),
                measured(2, "a", 90, accuracy=0.4),
                measured(2, "b", 10, accuracy=0.9),
            ],
            1,
            id="the same weights for both versions",
        ),
        # (0.8 * 10 + 0.2 * 90) / 100 = 0.26 < 0.5
        pytest.param(
            [
                measured(1, "a", accuracy=0.5),
                measured(1, "b", 90, accuracy=0.5),
                measured(2, "a", accuracy=0.8),
                measured(2, "b", 90, accuracy=0.2),
            ],
            1,
            id="each example counts alike",
        ),
    ],
)
def test_the_best_version_has_the_best_main_score(measurements: list[Measurement], expected: int | None) -> None:
    best = best_version(measurements)
    assert (best.number if best else None) == expected


def test_a_site_that_left_does_not_keep_the_untrained_version_the_best() -> None:
    found = [measured(0, site, accuracy=0.325) for site in "abcde"]
    found += [measured(n, site, accuracy=min(1.0, 0.6 + n / 10)) for n in range(1, 9) for site in "abcd"]
    best = best_version(found)
    assert best is not None
    assert (best.number, best.value, best.sites, best.of_sites) == (4, 1.0, ("a", "b", "c", "d"), 5)
    assert best.where == "at 4 of 5 sites: a, b, c, d"


def test_a_site_that_joined_late_does_not_lift_a_worse_version() -> None:
    found = [measured(1, "a", accuracy=0.8), measured(2, "a", accuracy=0.7), measured(2, "easy", accuracy=1.0)]
    best = best_version(found)
    assert best is not None
    assert (best.number, best.value, best.sites, best.of_sites) == (1, 0.8, ("a",), 2)


def test_versions_without_a_site_in_common_do_not_stay_at_the_first() -> None:
    found = [measured(0, "a", accuracy=0.9), measured(1, "b", accuracy=0.2), measured(2, "b", accuracy=0.4)]
    best = best_version(found)
    assert best is not None
    assert (best.number, best.sites) == (2, ("b",))
    visit = [measured(1, "a", accuracy=0.5), measured(1, "b", accuracy=0.5), measured(2, "c", accuracy=0.9)]
    assert (best_version(visit) or best).number == 1


def test_a_worker_that_is_away_does_not_change_the_score_of_its_site() -> None:
    def of(version: int, worker: str, accuracy: float) -> Measurement:
        return measured(version, "a", accuracy=accuracy).model_copy(update={"worker": worker})

    # The hard data set's worker is away for version 2, which is worse on the other one's.
    best = best_version([of(1, "a/hard", 0.1), of(1, "a/easy", 0.9), of(2, "a/easy", 0.8)])
    assert best is not None
    assert best.number == 1
    # A worker that took another's place is the same site.
    moved = best_version([of(1, "a/old", 0.6), of(2, "a/new", 0.5)])
    assert (moved.number if moved else None) == 1


def test_a_run_of_own_models_is_measured_by_these_at_the_sites_that_have_one() -> None:
    found = [measured(0, site, accuracy=0.5) for site in "abc"]
    found += [measured(1, "a", accuracy=0.4, personal_accuracy=0.8), measured(1, "b", accuracy=0.4)]
    found += [measured(2, site, accuracy=0.3, personal_accuracy=0.7) for site in "ab"]
    found += [measured(n, None, accuracy=0.9 - n / 10) for n in range(3)]
    best = best_version(found)
    assert best is not None
    assert (best.number, best.metric, best.value, best.sites) == (1, "personal_accuracy", 0.8, ("a",))
    assert (best_version(found, metric="accuracy") or best).number == 0


def test_one_site_that_reports_an_own_model_does_not_decide_how_a_run_is_measured() -> None:
    found = [measured(n, site, accuracy=n / 10) for n in (1, 2) for site in "abc"]
    found[0] = measured(1, "a", accuracy=0.1, personal_accuracy=1.0)
    best = best_version(found)
    assert best is not None
    assert (best.number, best.metric) == (2, "accuracy")


def test_runs_of_own_models_and_of_versions_are_compared_at_the_same_sites() -> None:
    fedavg = [measured(n, site, accuracy=0.6) for n in (0, 1) for site in "ab"]
    fedavg += [measured(n, None, accuracy=0.9) for n in (0, 1)]
    local = [measured(0, site, accuracy=0.1) for site in "ab"]
    local += [measured(1, site, accuracy=0.1, personal_accuracy=0.8) for site in "ab"]
    found = compare([history("fedavg", [], measurements=fedavg), history("local", [], measurements=local)])
    assert (found.metric, found.runs[0].scores, found.runs[1].scores) == ("accuracy", {0: 0.6, 1: 0.6}, {1: 0.8})
    assert [(run.best.number, run.best.value) for run in found.runs if run.best] == [(0, 0.6), (1, 0.8)]
    assert any("local: measured by the sites' own models" in warning for warning in found.warnings)


def test_best_versions_over_different_sites_are_compared_with_a_warning() -> None:
    runs = [history(name, [], measurements=[measured(0, name, accuracy=0.5)]) for name in "ab"]
    (warning,) = compare(runs).warnings
    assert warning.endswith("not comparable: a at 1 of 1 site: a; b at 1 of 1 site: b")


def test_the_best_of_some_versions_is_one_of_them() -> None:
    found = [measured(n, "a", accuracy=n / 10) for n in (1, 2, 3)]
    best = best_version(found, among=[1, 2, 7])
    assert best
    assert (best.number, best.metric, best.value) == (2, "accuracy", 0.2)


def test_the_best_of_thousands_of_evaluations_is_found_in_few_calls_each() -> None:
    """A page of 500 versions took 27 calls for each of its evaluations, and 170 ms."""
    every = [
        measured(version, f"site-{(7 * version + 13 * site) % 50}/w", accuracy=(31 * version + 17 * site) % 97 / 97)
        for version in range(500)
        for site in range(5)
    ]
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        best_version(every)
    finally:
        sys.setprofile(before)
    assert calls < 20 * len(every)


def history(
    name: str, made: Sequence[tuple[int | None, int, float]], *, measurements: Any = (), **spec: Any
) -> History:
    """Return a run that made rounds of (version, uploaded bytes, seconds)."""
    attempts = [
        round_of(
            view_of("a/w", "merged", upload_bytes=count, download_bytes=1), number=number, version=version,
            state="abandoned" if version is None else "committed", closed_at=AT + timedelta(seconds=seconds),
        )
        for number, (version, count, seconds) in enumerate(made, 1)
    ]  # fmt: skip
    run = run_of(name, "completed", 2, f"{name}-0123456789", **{"rounds": 2, **spec})
    return History.of(run, attempts, measurements)


def test_bytes_and_seconds_are_totals_with_those_of_abandoned_attempts() -> None:
    one = history("one", [(1, 100, 2.0), (None, 50, 3.0), (2, 100, 2.0)])
    other = history("other", [(1, 10, 1.0)], measurements=[measured(0, "a", loss=3.0), measured(1, "a", loss=2.0)])
    found = compare([one, other])
    # Each attempt downloads one byte: 101, then 101 + 51 + 101.
    assert found.runs[0].bytes == {0: 0, 1: 101, 2: 253}
    assert found.runs[0].seconds == {0: 0.0, 1: 2.0, 2: 7.0}
    assert (found.metric, found.runs[0].scores, found.runs[1].scores) == ("loss", {}, {0: 3.0, 1: 2.0})
    assert found.versions == [0, 1, 2]


def test_settings_that_differ_are_named_by_their_paths() -> None:
    frozen = {"name": "fedfrozen", "settings": {"warmup_rounds": 3}}
    found = compare([history("a", []), history("a", [], method=frozen, dataset="other"), history("c", [], rounds=2)])
    assert found.settings == {
        "method.name": ("fedavg", "fedfrozen", "fedavg"),
        "method.settings.warmup_rounds": (None, 3, None),
        "dataset": ("data", "other", "data"),
    }
    assert [run.name for run in found.runs] == ["a (a-012345)", "a (a-012345)", "c"]
    assert len(found.warnings) == 1
    assert compare([history("a", []), history("b", [], rounds=3)]).warnings == ()


def test_runs_are_compared_by_their_best_versions_of_the_metric_that_is_named() -> None:
    found = [measured(1, "a", accuracy=0.9, f1=0.2, loss=0.3), measured(2, "a", accuracy=0.8, f1=0.6, loss=0.4)]
    runs = [history("one", [], measurements=found), history("other", [], measurements=found[:1])]

    def best(metric: str | None) -> list[tuple[int, str, float] | None]:
        compared = compare(runs, metric).runs
        return [(run.best.number, run.best.metric, run.best.value) if run.best else None for run in compared]

    assert best("f1") == [(2, "f1", 0.6), (1, "f1", 0.2)]
    assert best("loss") == [(1, "loss", 0.3), (1, "loss", 0.3)]
    assert best(None) == [(1, "accuracy", 0.9), (1, "accuracy", 0.9)]
