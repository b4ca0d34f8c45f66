"""When a round is expected to end."""

from __future__ import annotations

import pytest

from tessera.shared.metrics.eta import TaskPace, expected_end


def test_a_round_ends_about_when_rounds_before_it_did_and_its_slowest_worker_will() -> None:
    half = TaskPace(over=False, phase="training", done=0.5)
    # Half of training is half of all, by which 30 s are 60; as much as the rounds before say, 100, together 80.
    assert expected_end(0.0, 30.0, 1e9, [90.0, 100.0, 300.0], [TaskPace(over=True), half]) == pytest.approx(80.0)
    assert expected_end(0.0, 30.0, 1e9, [], [half]) is None
    # One that had other things to do first is no slower for it.
    late = TaskPace(over=False, began_at=290.0, phase="training", done=0.5)
    assert expected_end(0.0, 300.0, 1e9, [310.0], [late, TaskPace(over=True)]) == pytest.approx(310.0)
    assert expected_end(0.0, 30.0, 1e9, [100.0], [TaskPace(over=False)]) == 100.0
    assert expected_end(0.0, 30.0, 70.0, [100.0], []) == 70.0
    assert expected_end(0.0, 300.0, 1e9, [100.0], []) == 300.0
