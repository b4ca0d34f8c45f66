"""The tables of states: nothing unreachable, nothing that leaves an end."""

from __future__ import annotations

from typing import get_args

import pytest

from tessera.coordinator.domain.lifecycle import LIVE_ROUND, LIVE_RUN, ROUND, RUN, TASK, Lifecycle, diagram
from tessera.shared.schema import RoundState, RunState, TaskState

STATES = {
    "run": (RUN, "running", set(get_args(RunState))),
    "round": (ROUND, "open", set(get_args(RoundState))),
    "task": (TASK, "offered", set(get_args(TaskState))),
}
ENDS = {
    "run": {"completed", "cancelled"},
    "round": {"committed", "abandoned"},
    "task": {"merged", "left_out", "rejected", "failed", "cancelled"},
}


def reachable(lifecycle: Lifecycle, start: str) -> set[str]:
    found = {start}
    while more := {m.target for m in lifecycle.values() if found & set(m.sources)} - found:
        found |= more
    return found


@pytest.mark.parametrize("kind", STATES)
def test_every_state_of_the_api_is_reachable_and_there_is_no_other(kind: str) -> None:
    lifecycle, start, states = STATES[kind]
    assert reachable(lifecycle, start) == states
    assert {source for move in lifecycle.values() for source in move.sources} <= states


@pytest.mark.parametrize("kind", STATES)
def test_nothing_leaves_a_final_state(kind: str) -> None:
    lifecycle, _, states = STATES[kind]
    left = {source for move in lifecycle.values() for source in move.sources}
    assert states - left == ENDS[kind]


def test_a_task_is_reported_on_while_it_is_leased_and_counts_once_it_is_accepted() -> None:
    sources = {event: TASK[event].sources for event in ("accept", "reject", "fail", "release", "merge", "leave_out")}
    assert set(sources.values()) == {("leased",), ("accepted",)}
    assert [event for event, states in sources.items() if states == ("accepted",)] == ["merge", "leave_out"]


def test_what_is_called_live_is_what_is_not_final() -> None:
    assert set(LIVE_RUN) == STATES["run"][2] - ENDS["run"]
    assert set(LIVE_ROUND) == STATES["round"][2] - ENDS["round"]


@pytest.mark.parametrize("kind", STATES)
def test_the_diagram_has_one_arrow_for_each_source_of_each_event(kind: str) -> None:
    lifecycle = STATES[kind][0]
    drawn = diagram(kind, lifecycle).splitlines()
    arrows = {line.strip() for line in drawn if "-->" in line}
    assert arrows == {f"{s} --> {move.target}: {event}" for event, move in lifecycle.items() for s in move.sources}
