"""The pure rules over a million events, and that faults in them are found there."""

from __future__ import annotations

import pytest

from tests.model_checking.rules import rehearse
from tests.mutants.planted import FAULTS, hunt_in_rules

MILLION = 1_000_000
SEEDS = 8


# In short, an eighth of them.
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, SEEDS))])
def test_a_million_events_break_no_invariant(seed: int) -> None:
    done = rehearse(seed, MILLION // SEEDS)
    assert done.steps == MILLION // SEEDS
    assert min(done.ended.values()) > 5


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.in_rules])
def test_a_fault_in_the_rules_is_found(name: str) -> None:
    assert hunt_in_rules(name)
