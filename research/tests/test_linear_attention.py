"""What FedFrozen's simulation states exactly, and that its short form runs. Nothing here looks at a clock."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from linear_attention import report, theory
from linear_attention.__main__ import main
from linear_attention.curves import Setting, curves, lengths
from linear_attention.federation import FrozenStage, Schedule, cohorts
from linear_attention.problem import (
    CLIENTS,
    RATES,
    Kernel,
    Problem,
    Weights,
    draw,
    flat,
    gradients,
    moments,
    profile_gradient,
)
from tests.paths import variants

BOTH = pytest.mark.parametrize("kernel", variants(["linear", "softmax"], {"softmax"}))


def differences(objective: Callable[[np.ndarray], float], at: np.ndarray, step: float) -> np.ndarray:
    """The central differences of a function at a point, one for each of its elements."""
    found = np.empty_like(at)
    for place in np.ndindex(at.shape):
        moved = np.zeros_like(at)
        moved[place] = step
        found[place] = (objective(at + moved) - objective(at - moved)) / (2 * step)
    return found


def gradient(problem: Problem, here: Weights, name: str) -> np.ndarray:
    """The objective's gradient by one of the weights, by central differences."""

    def objective(matrix: np.ndarray) -> float:
        there = here._replace(**{name: matrix})
        return moments(problem, there.query, there.key).objective(there.value)

    return differences(objective, getattr(here, name), 1e-6)


@BOTH
def test_gradients_are_those_of_central_differences(kernel: Kernel) -> None:
    problem, rng = draw(kernel, 0.5, 0), np.random.default_rng(3)
    here = Weights(*(matrix + 0.3 * rng.normal(size=matrix.shape) for matrix in problem.start))
    for client in range(problem.clients):
        alone = problem.of(np.array([client]))
        for name, (exact,) in gradients(alone, here)._asdict().items():
            assert np.linalg.norm(gradient(alone, here, name) - exact) < 1e-6 * np.linalg.norm(exact)


@BOTH
def test_the_gradient_of_the_profile_is_that_of_central_differences(kernel: Kernel) -> None:
    problem = draw(kernel, 0.5, 0)
    query, key, _ = problem.start
    exact = profile_gradient(problem, query, key)

    def profile(phi: np.ndarray) -> float:
        halves = phi[: query.size].reshape(query.shape), phi[query.size :].reshape(key.shape)
        return moments(problem, *halves).profile()

    assert np.linalg.norm(differences(profile, flat(query, key), 1e-5) - exact) < 1e-8 * np.linalg.norm(exact)


@BOTH
@pytest.mark.parametrize("local_steps", variants([1, 10, 50], {1, 10}))
def test_the_frozen_stage_is_the_affine_map(kernel: Kernel, local_steps: int) -> None:
    for delta in (0.0, 0.75):
        assert theory.affine_error(draw(kernel, delta, 1), RATES[kernel], local_steps) < 1e-13


@BOTH
def test_rounds_of_some_clients_are_affine_maps_too(kernel: Kernel) -> None:
    problem = draw(kernel, 0.5, 0)
    query, key, value = problem.start
    stage = FrozenStage.of(problem, query, key, RATES[kernel], 5)
    everybody, half = (Schedule(RATES[kernel], 5, cohorts(12, CLIENTS, size, 0)) for size in (CLIENTS, CLIENTS // 2))
    one_by_one = value
    for _ in range(12):
        one_by_one = stage.keeps.mean(axis=0) @ one_by_one + stage.adds.mean(axis=0)
    np.testing.assert_allclose(stage.after(value, everybody, 0), one_by_one, rtol=1e-12)
    first = half.cohorts[11]
    np.testing.assert_allclose(
        stage.after(value, half, 11), stage.keeps[first].mean(axis=0) @ value + stage.adds[first].mean(axis=0)
    )


@BOTH
def test_its_drift_is_what_the_formula_says_while_steps_are_small(kernel: Kernel) -> None:
    for delta in (0.25, 0.75):
        for seed in range(3):
            small, twice = (theory.drift(draw(kernel, delta, seed), product / 10, 10) for product in (0.01, 0.02))
            assert small.error < 0.01
            assert small.cosine > 0.9999
            # The formula is the first term of a series in rate * E, so that its error grows in proportion.
            assert twice.error == pytest.approx(2 * small.error, rel=0.05)


def test_the_frozen_stage_does_not_drift_where_clients_differ_in_their_targets_alone() -> None:
    assert theory.drift_of_equal_inputs(delta=0.75, seed=0, rate=0.05, local_steps=50) < 1e-12


@BOTH
@pytest.mark.parametrize("delta", [0.0, 0.5])
def test_the_warm_up_descends_on_the_profile_while_steps_are_small(kernel: Kernel, delta: float) -> None:
    rounds = theory.descents(draw(kernel, delta, 0), RATES[kernel], local_steps=1, rounds=40)
    assert rounds[-1].after < rounds[0].before
    assert not any(one.rose for one in rounds)
    assert not any(one.broke_its_bound for one in rounds)


@BOTH
def test_the_excess_is_bias_drift_and_value_and_one_local_step_does_not_drift(kernel: Kernel) -> None:
    settings = [Setting("rounds", local_steps, 12, CLIENTS, control_lengths=(12,)) for local_steps in (1, 8)]
    one, eight = curves(kernel, 0.5, 0, settings)
    for curve in (one, eight):
        assert [point.length for point in curve.points] == lengths(12)
        for point in curve.points:
            assert point.excess == pytest.approx(point.bias + point.drift + point.value, abs=1e-12)
            assert point.excess >= 0
        # Frozen after the last round, it does not matter what is frozen.
        assert curve.control[0].excess == pytest.approx(curve.never.excess, abs=1e-12)
    assert all(abs(point.drift) < 1e-12 for point in one.points)
    assert any(abs(point.drift) > 1e-4 for point in eight.points)


def test_the_value_matrix_that_is_best_for_a_kernel_has_no_gradient() -> None:
    under = moments(draw("linear", 0.5, 0), *draw("linear", 0.5, 0).start[:2])
    best = under.best_value()
    np.testing.assert_allclose((under.curvature @ best - under.slope).mean(axis=0), 0, atol=1e-14)
    assert under.profile() == under.objective(best) < under.objective(best + 0.01)


def test_what_diverges_is_told_as_diverged() -> None:
    # This seed's clients differ so much that fifty steps of this size diverge at once.
    settings = [Setting("rounds", local_steps, 6, CLIENTS, control_lengths=(3,)) for local_steps in (1, 50)]
    with np.errstate(over="ignore", invalid="ignore"):
        found = curves("linear", 0.75, 5, settings)
    assert all(np.isfinite(point.excess) for point in found[0].points)
    assert [point.length for point in found[1].points if np.isfinite(point.excess)] == [0]
    for section in (report.excesses, report.parts, report.controls, report.rule):
        assert any("diverged" in line for line in section(found))


@pytest.mark.long
def test_the_short_form_prints_its_tables_and_writes_runs_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["--quick", "--seeds", "1", "--jobs", "1", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    for said in ("affine map", "Its drift", "descent on the profile", "What the excess is made of", "the rule ends"):
        assert said in printed
    with (tmp_path / "runs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["kernel"] for row in rows} == {"linear", "softmax"}
    assert {row["run"] for row in rows} == {"fixed", "auto", "value frozen"}
    assert {row["budget"] for row in rows} == {"rounds", "steps", "cohort"}
    assert (tmp_path / "curves.png").stat().st_size > 10_000
