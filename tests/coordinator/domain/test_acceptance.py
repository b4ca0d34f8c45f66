"""Whether a report still counts: the table of task state, round state and token."""

from __future__ import annotations

from typing import get_args

import pytest

from tessera.coordinator.domain.acceptance import refusal
from tessera.shared.schema import RoundState, TaskState

ROUND_STATES = (*get_args(RoundState), None)


@pytest.mark.parametrize(
    ("state", "round_state", "code"),
    [
        ("offered", "open", "lease-lost"),
        ("expired", "open", "lease-lost"),
        ("accepted", "open", "lease-lost"),
        ("merged", "committed", "lease-lost"),
        ("left_out", "abandoned", "lease-lost"),
        ("rejected", "open", "lease-lost"),
        ("failed", "open", "lease-lost"),
        ("cancelled", "merging", "round-closed"),
        ("cancelled", "committed", "round-closed"),
        ("cancelled", "abandoned", "task-cancelled"),
        ("cancelled", "open", "task-cancelled"),
        ("cancelled", None, "task-cancelled"),
    ],
)
def test_each_other_state_has_its_own_refusal(state: str, round_state: str | None, code: str) -> None:
    problem = refusal(state, round_state, shown_token=3, token=3)
    assert problem is not None
    assert (problem.code, problem.status) == (code, 409)


@pytest.mark.parametrize("shown", [0, 2, 4])
def test_another_token_is_refused_and_both_are_named(shown: int) -> None:
    problem = refusal("leased", "open", shown_token=shown, token=3)
    assert problem is not None
    assert problem.code == "lease-lost"
    assert "token 3" in problem.detail
    assert f"token {shown}" in problem.detail


def test_only_a_leased_task_with_its_present_token_is_ever_heard() -> None:
    heard = {
        (state, shown, token)
        for state in get_args(TaskState)
        for round_state in ROUND_STATES
        for shown in (1, 2)
        for token in (1, 2)
        if refusal(state, round_state, shown, token) is None
    }
    assert heard == {("leased", 1, 1), ("leased", 2, 2)}
