"""Sparse weighted averaging, by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from shared.averaging import Divide, average
from shared.methods.contract import State
from shared.tensors import ArrayTensor, Tensor, to_array

Senders = Sequence[tuple[float, Mapping[str, Tensor]]]


def filled(**values_: float) -> dict[str, Tensor]:
    return {name: ArrayTensor(np.full(2, value, np.float32)) for name, value in values_.items()}


def merged(start: Mapping[str, Tensor], senders: Senders, divide: Divide) -> dict[str, float]:
    return {name: float(to_array(tensor)[0]) for name, tensor in average(start, senders, divide).items()}


START = filled(both=1.0, one=1.0, none=1.0)
UPDATES: Senders = [(10.0, filled(both=2.0)), (30.0, filled(both=4.0, one=3.0))]


def test_each_block_is_averaged_over_those_who_sent_it() -> None:
    # both: (10 * 2 + 30 * 4) / 40 = 3.5; one: only b sent it, so 3; none: nobody.
    assert merged(START, UPDATES, "participants") == {"both": 3.5, "one": 3.0}


def test_over_the_cohort_a_rare_block_moves_less() -> None:
    # Of one, b alone sent a step of 2, with 30 of the 40 examples: 1 + 30 * 2 / 40 = 2.5
    assert merged(START, UPDATES, "cohort") == {"both": 3.5, "one": 2.5}


def test_a_block_that_nobody_sent_stays_the_very_same_tensor() -> None:
    state = State(4, START, memory=filled(m=1), numbers={"n": 1.0})
    after = state.advanced(average(state.model, UPDATES, "participants"))
    assert after.model["none"] is START["none"]
    assert (after.round, after.memory, after.numbers) == (5, state.memory, state.numbers)


def test_without_updates_nothing_moves() -> None:
    assert merged(START, [], "cohort") == {}
