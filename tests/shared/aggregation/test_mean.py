"""Sparse weighted averaging, by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tessera.shared.aggregation.mean import Normalization, average
from tessera.shared.methods.base import State
from tessera.shared.tensors.lazy import ArrayTensor, Tensor, to_array

Senders = Sequence[tuple[float, Mapping[str, Tensor]]]


def filled(**values_: float) -> dict[str, Tensor]:
    return {name: ArrayTensor(np.full(2, value, np.float32)) for name, value in values_.items()}


def merged(
    start: Mapping[str, Tensor],
    senders: Senders,
    normalization: Normalization,
    inclusion: Callable[[str], float] = lambda _: 1.0,
) -> dict[str, float]:
    return {
        name: float(to_array(tensor)[0]) for name, tensor in average(start, senders, normalization, inclusion).items()
    }


START = filled(both=1.0, one=1.0, none=1.0)
UPDATES: Senders = [(10.0, filled(both=2.0)), (30.0, filled(both=4.0, one=3.0))]


def test_each_block_is_averaged_over_those_who_sent_it() -> None:
    # both: (10 * 2 + 30 * 4) / 40 = 3.5; one: only b sent it, so 3; none: nobody.
    assert merged(START, UPDATES, "participants") == {"both": 3.5, "one": 3.0}


def test_over_the_cohort_a_rare_block_moves_less() -> None:
    # Of one, b alone sent a step of 2, with 30 of the 40 examples: 1 + 30 * 2 / 40 = 2.5
    assert merged(START, UPDATES, "cohort") == {"both": 3.5, "one": 2.5}


def test_a_block_that_nobody_sent_stays_the_very_same_tensor() -> None:
    state = State(4, START, server_state=filled(m=1), scalars={"n": 1.0})
    after = state.advanced(average(state.model, UPDATES, "participants"))
    assert after.model["none"] is START["none"]
    assert (after.round, after.server_state, after.scalars) == (5, state.server_state, state.scalars)


def test_a_block_with_a_weight_of_its_own_counts_by_that() -> None:
    # both: (10 * 2 + 30 * 4) / 40 = 3.5; one: 5 of b's 30 examples: a step of 2 over these 5, or over all 40.
    weights = [{}, {"one": 5.0}]
    means = {
        d: {name: float(to_array(t)[0]) for name, t in average(START, UPDATES, d, weights=weights).items()}
        for d in DIVIDES
    }
    assert means["participants"] == {"both": 3.5, "one": 3.0}
    assert means["cohort"] == means["inverse-probability"] == {"both": 3.5, "one": 1 + 5 * 2 / 40}


def test_a_region_counts_as_its_sites_would() -> None:
    # x, y and z have 10, 20 and 30 examples; y and z are a region, of which z alone sent `one`.
    x, y, z = filled(both=2.0), filled(both=3.0), filled(both=5.0, one=4.0)
    flat: Senders = [(10.0, {**x, **filled(one=2.0)}), (20.0, y), (30.0, z)]
    region = average(START, [(20.0, y), (30.0, z)], "participants")
    nested: Senders = [flat[0], (50.0, region)]
    for divided in ("participants", "cohort"):
        mean = average(START, nested, divided, weights=[{}, {"one": 30.0}])
        assert {name: float(to_array(tensor)[0]) for name, tensor in mean.items()} == pytest.approx(
            merged(START, flat, divided), rel=1e-6
        )


def test_without_updates_nothing_moves() -> None:
    assert merged(START, [], "cohort") == {}


def test_by_inverse_probability_a_rare_block_moves_as_if_all_had_sent_it() -> None:
    # Of one, b alone sent a step of 2, with 30 of the 40 examples, and half of the time: 1 + 30 * 2 / (0.5 * 40) = 4
    chances = {"both": 1.0, "one": 0.5}.__getitem__
    assert merged(START, UPDATES, "inverse-probability", chances) == {"both": 3.5, "one": 4.0}


@pytest.mark.parametrize("chance", [0.0, -0.5, 1.5, float("nan")])
def test_a_chance_that_is_none_is_refused_for_a_block_that_was_sent(chance: float) -> None:
    with pytest.raises(ValueError, match="'both' was sent"):
        merged(START, UPDATES, "inverse-probability", lambda _: chance)


# ---------------------------------------------------------------- what must hold for any updates


DIVIDES: tuple[Normalization, ...] = ("participants", "cohort", "inverse-probability")
EVERY_DIVIDE = pytest.mark.parametrize("normalization", DIVIDES)
ROW = hnp.arrays(np.float32, 4, elements=st.floats(-1e3, 1e3, width=32))
WEIGHTS = st.integers(1, 1000).map(float)
FULL = st.lists(st.tuples(WEIGHTS, st.fixed_dictionaries({"a": ROW, "b": ROW})), min_size=1, max_size=5)
PARTIAL = st.lists(st.tuples(WEIGHTS, st.dictionaries(st.sampled_from("abc"), ROW)), min_size=1, max_size=5)
BASE = {name: np.linspace(-1, 1, 4, dtype=np.float32) for name in "abc"}
CHANCES = {"a": 0.25, "b": 0.5, "c": 1.0}

# A step of up to five senders, each of up to 2000, over a chance of a quarter, in float32 (docs/decisions/0019).
ROUNDING = 4 * 2e3 * 2.0**-20

Rows = Sequence[tuple[float, Mapping[str, np.ndarray]]]


def averaged(
    senders: Rows, normalization: Normalization, chances: Mapping[str, float] = CHANCES
) -> dict[str, np.ndarray]:
    base = {name: ArrayTensor(values) for name, values in BASE.items()}
    sent = [(weight, {name: ArrayTensor(row) for name, row in rows.items()}) for weight, rows in senders]
    return {
        name: to_array(tensor) for name, tensor in average(base, sent, normalization, chances.__getitem__).items()
    }


@given(senders=FULL)
def test_where_all_send_all_the_three_are_fedavg_to_the_bit(senders: Rows) -> None:
    plain = averaged(senders, "participants")
    for normalization in ("cohort", "inverse-probability"):
        same = averaged(senders, normalization, dict.fromkeys("abc", 1.0))
        assert {name: row.tobytes() for name, row in same.items()} == {n: r.tobytes() for n, r in plain.items()}
    total = sum(weight for weight, _ in senders)
    for name in "ab":
        oracle = sum(weight * rows[name].astype(np.float64) for weight, rows in senders) / total
        np.testing.assert_allclose(plain[name], oracle, rtol=1e-6, atol=ROUNDING)


@EVERY_DIVIDE
@given(senders=PARTIAL)
def test_every_average_is_that_of_whole_arrays_of_float64(normalization: Normalization, senders: Rows) -> None:
    found = averaged(senders, normalization)
    accepted = sum(weight for weight, _ in senders)
    for name in "abc":
        those = [(weight, rows[name]) for weight, rows in senders if name in rows]
        assert (name in found) == bool(those)
        if those:
            over = {
                "participants": sum(weight for weight, _ in those),
                "cohort": accepted,
                "inverse-probability": CHANCES[name] * accepted,
            }[normalization]
            start = BASE[name].astype(np.float64)
            oracle = start + sum(weight * (row.astype(np.float64) - start) for weight, row in those) / over
            np.testing.assert_allclose(found[name], oracle, rtol=1e-6, atol=ROUNDING)


@EVERY_DIVIDE
@given(senders=PARTIAL, data=st.data())
def test_order_does_not_matter_nor_does_dividing_a_worker_in_two(
    normalization: Normalization, senders: Rows, data: st.DataObject
) -> None:
    whole = averaged(senders, normalization)
    shuffled = data.draw(st.permutations(senders))
    halves = [(weight / 2, rows) for weight, rows in senders for _ in range(2)]
    for other in (averaged(shuffled, normalization), averaged(halves, normalization)):
        assert other.keys() == whole.keys()
        for name in whole:
            np.testing.assert_allclose(other[name], whole[name], rtol=1e-6, atol=ROUNDING)


@EVERY_DIVIDE
def test_what_nobody_sent_is_not_there_to_be_changed(normalization: Normalization) -> None:
    assert set(averaged([(3.0, {"a": BASE["a"] + 1}), (1.0, {})], normalization)) == {"a"}


def test_by_inverse_probability_the_mean_over_all_selections_is_the_full_average() -> None:
    # Three workers send a block with a chance of 1/4 each: the mean over the 8 outcomes, weighed by their chances,
    # is the step that they would have made had all three sent it.
    rng, chance = np.random.default_rng(0), 0.25
    rows = [(weight, rng.normal(size=4).astype(np.float32)) for weight in (10.0, 30.0, 5.0)]
    expected = np.zeros(4)
    for sends in product((True, False), repeat=3):
        probability = np.prod([chance if sent else 1 - chance for sent in sends])
        senders = [(w, {"a": row} if sent else {}) for (w, row), sent in zip(rows, sends, strict=True)]
        expected += probability * averaged(senders, "inverse-probability").get("a", BASE["a"])
    full = averaged([(weight, {"a": row}) for weight, row in rows], "participants")["a"]
    np.testing.assert_allclose(expected, full, rtol=1e-6, atol=1e-7)
