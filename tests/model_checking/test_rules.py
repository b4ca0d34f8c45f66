"""The pure rules over a million events, and that faults in them are found there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tessera.coordinator.domain import decide, lifecycle
from tessera.coordinator.domain.lifecycle import Move
from tests.model_checking import planted, rules
from tests.model_checking.invariants import Violated
from tests.model_checking.rules import rehearse

MILLION = 1_000_000
SEEDS = 8


# In short, an eighth of them.
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, SEEDS))])
def test_a_million_events_break_no_invariant(seed: int) -> None:
    done = rehearse(seed, MILLION // SEEDS)
    assert done.steps == MILLION // SEEDS
    assert min(done.ended.values()) > 5


def _without_cancelling() -> dict[str, Move]:
    return {**lifecycle.TASK, "cancel": Move(("offered", "leased"), "cancelled")}


def _from_merging() -> dict[str, Move]:
    return {**lifecycle.ROUND, "close": Move(("open", "merging", "abandoned"), "merging")}


FAULTS: dict[str, tuple[Any, str, Callable[..., Any] | dict[str, Move]]] = {
    "the token is not checked": (rules, "refusal", planted.no_token),
    "a cancelled task may be reported on": (rules, "refusal", planted.any_state),
    "the quorum is off by one": (decide, "_end_of", planted.one_less),
    "an expired task of a closed round lives on": (rules, "TASK", _without_cancelling()),
    "an abandoned round closes": (rules, "ROUND", _from_merging()),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_rules_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*FAULTS[name])
    with pytest.raises(Violated):
        rehearse(0, 200_000)
