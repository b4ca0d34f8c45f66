"""Sparse weighted averaging, by hand."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from shared.averaging import average
from shared.methods.contract import Divide, State, Update
from shared.tensors import ArrayTensor, Tensor, to_array


def filled(**values_: float) -> dict[str, Tensor]:
    return {name: ArrayTensor(np.full(2, value, np.float32)) for name, value in values_.items()}


def merged(start: Mapping[str, Tensor], updates: list[Update], divide: Divide) -> dict[str, float]:
    state = average(State(4, start, memory=filled(m=1), numbers={"n": 1.0}), updates, divide)
    assert state.round == 5
    assert state.numbers == {"n": 1.0}
    assert set(state.memory) == {"m"}
    return {name: float(to_array(tensor)[0]) for name, tensor in state.model.items()}


START = filled(both=1.0, one=1.0, none=1.0)
UPDATES = [Update("a/w", 10, filled(both=2.0)), Update("b/w", 30, filled(both=4.0, one=3.0))]


def test_each_block_is_averaged_over_those_who_sent_it() -> None:
    # both: (10 * 2 + 30 * 4) / 40 = 3.5; one: only b sent it, so 3; none: as it was.
    assert merged(START, UPDATES, "participants") == {"both": 3.5, "one": 3.0, "none": 1.0}


def test_over_the_cohort_a_rare_block_moves_less() -> None:
    # Of one, b alone sent a step of 2, with 30 of the 40 examples: 1 + 30 * 2 / 40 = 2.5
    assert merged(START, UPDATES, "cohort") == {"both": 3.5, "one": 2.5, "none": 1.0}


def test_a_block_that_nobody_sent_is_the_very_same_tensor() -> None:
    state = average(State(0, START), UPDATES, "participants")
    assert state.model["none"] is START["none"]


def test_without_updates_nothing_moves() -> None:
    assert merged(START, [], "cohort") == {"both": 1.0, "one": 1.0, "none": 1.0}
