"""Methods against client drift, in short, on a problem whose minimum is known: see `benchmarks.convex`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks.convex import ARMS, OBJECTIVES, PREFIX, Arm, Problem, Scenario, install, main, run, scenarios
from tessera.shared.methods.registry import methods

BY_NAME = {arm.name: arm for arm in ARMS}
STATEFUL = [BY_NAME["scaffold"], BY_NAME["feddyn alpha=1.0"]]


@pytest.fixture(autouse=True, scope="module")
def _head_only() -> Iterator[None]:
    install(methods())
    yield
    for name in [name for name in methods() if name.startswith(PREFIX)]:
        del methods()[name]


@pytest.fixture(scope="module")
def problem() -> Problem:
    return Problem.draw()


def named(arm: Arm) -> str:
    return arm.name


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_at_the_minimum_the_sites_gradients_cancel(problem: Problem, objective: str) -> None:
    weights = OBJECTIVES[objective]
    least = problem.minimum(weights)
    assert np.abs(sum(weight * problem.gradient(site, least) for site, weight in weights.items())).max() < 1e-12
    assert all(np.abs(problem.gradient(site, least)).max() > 0.05 for site in weights)


# Some tens of rounds of a whole federation, 2 to 4 s of CPU each: fewer do not tell a slow method from a wrong one.
# In short, tests/shared/methods/test_global_methods.py shows the same of three sites.
@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "scenario", "rounds"),
    [
        ("scaffold", "2 of 4 drawn", 40),
        ("scaffold", "one away 4 of 5", 30),
        ("scaffold weigh=examples", "2 of 4 drawn", 30),
        ("feddyn alpha=1.0", "2 of 4 drawn", 45),
    ],
)
def test_whoever_is_away_the_minimum_is_reached(problem: Problem, name: str, scenario: str, rounds: int) -> None:
    arm = BY_NAME[name]
    found = run(problem, arm, scenarios(arm, rounds)[scenario], rounds)
    assert found.error < 0.01
    assert found.invariant is not None
    assert found.invariant < 1e-6


def test_without_a_correction_the_sites_drift_decides(problem: Problem) -> None:
    found = run(problem, BY_NAME["fedavg"], scenarios(BY_NAME["fedavg"], 10)["all"], 10)
    assert found.paper is not None
    assert found.error == pytest.approx(found.paper, rel=1e-4)
    assert found.error > 0.3


# In short, tests/shared/methods/test_receipts_in_rounds.py shows this and the next of a small transformer.
@pytest.mark.long
@pytest.mark.parametrize("arm", STATEFUL, ids=named)
def test_after_abandoned_attempts_a_site_keeps_what_the_server_counts(problem: Problem, arm: Arm) -> None:
    found = run(problem, arm, scenarios(arm, 5)["attempts abandoned"], 5)
    assert found.abandoned > 0
    assert found.invariant is not None
    assert found.invariant < 1e-6


@pytest.mark.long
@pytest.mark.parametrize("arm", STATEFUL, ids=named)
def test_a_site_that_was_left_out_keeps_what_the_server_counts(problem: Problem, arm: Arm) -> None:
    found = run(problem, arm, Scenario({"max_norm_of_median": 1.01}), 5)
    assert found.left_out > 0
    assert found.invariant is not None
    assert found.invariant < 1e-6


def test_the_command_prints_and_writes_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["fednova", "--rounds", "1", "--out", str(tmp_path)])
    written = json.loads((tmp_path / "convex.json").read_text())
    assert [row["scenario"] for row in written["rows"]] == [*scenarios(BY_NAME["fednova"], 1)]
    assert "objective equal: the mean of the sites' losses" in capsys.readouterr().out
