"""Robust rules: what hostile workers do to the mean and cannot do to them, and the arithmetic by hand."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from math import isnan
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from pydantic import TypeAdapter, ValidationError

from tessera.shared.aggregation.mean import Normalization, average
from tessera.shared.aggregation.robust import (
    FEW_SENDERS,
    ByGram,
    CentredClipping,
    GeometricMedian,
    Guard,
    Mean,
    Median,
    MultiKrum,
    Robust,
    RobustRule,
    TrimmedMean,
    gram_of,
    guarded,
)
from tessera.shared.aggregation.server_optimizer import Momentum
from tessera.shared.api.runs import RunSpec
from tessera.shared.methods.base import (
    CoordinatorHalf,
    MethodSettings,
    MethodSpec,
    RunInfo,
    State,
    UnsupportedRun,
    Update,
)
from tessera.shared.methods.registry import coordinator_half, methods
from tessera.shared.model.blocks import Block
from tessera.shared.rounds.planning import initial_state, warnings_of
from tessera.shared.rounds.server_step import merge
from tessera.shared.run_settings import ClientPrivacy, Training
from tessera.shared.tensors.lazy import CHUNK, Array, ArrayTensor, StretchedStep, Tensor, to_array
from tessera.shared.updates.update_file import TrainedBlock, read_update, write_update
from tests.support.federation import small_model, values

FAULTY = 2
RULES: tuple[Guard, ...] = tuple(
    kind(attackers=FAULTY) for kind in (Median, TrimmedMean, CentredClipping, MultiKrum, GeometricMedian)
)
EVERY_RULE = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.rule)


def stepped(
    rule: RobustRule, base: Array, sent: Sequence[Array], normalization: Normalization = "participants"
) -> Array:
    senders = [{"w": ArrayTensor(array)} for array in sent]
    moved, few = guarded(rule, {"w": ArrayTensor(base)}, senders, normalization)
    assert few == []
    return to_array(moved["w"])


# ---------------------------------------------------------------- attacks


SIZE = 3000
RNG = np.random.default_rng(7)
BASE = RNG.normal(size=SIZE).astype(np.float32)
COMMON = RNG.normal(size=SIZE).astype(np.float32)
"""Where honest workers agree to go."""
HONEST = [BASE + COMMON + RNG.normal(scale=0.2, size=SIZE).astype(np.float32) for _ in range(7)]
SPREAD = float(np.mean([np.linalg.norm(value - np.mean(HONEST, axis=0)) for value in HONEST]))
"""How far an honest worker is from the mean of the honest."""

ATTACKS: dict[str, Callable[[np.random.Generator], Array]] = {
    "sign flip": lambda _: BASE - COMMON,
    "scaled": lambda _: BASE + np.float32(1e4) * COMMON,
    "noise": lambda rng: BASE + rng.normal(scale=10, size=SIZE).astype(np.float32),
    "not a number": lambda _: np.full(SIZE, np.nan, np.float32),
    "overflow": lambda _: np.full(SIZE, 3e38, np.float32),
}


@pytest.mark.parametrize("attack", ATTACKS)
@EVERY_RULE
def test_two_attackers_of_nine_move_the_mean_and_not_the_rule(rule: Guard, attack: str) -> None:
    rng = np.random.default_rng(3)
    sent = [*HONEST, *(ATTACKS[attack](rng) for _ in range(FAULTY))]
    wanted = np.mean(HONEST, axis=0)
    with np.errstate(over="ignore", invalid="ignore"):
        astray = float(np.linalg.norm(stepped(Mean(), BASE, sent).astype(np.float64) - wanted))
    assert isnan(astray) or astray > 2 * SPREAD
    # No further than an honest worker is by itself.
    assert np.linalg.norm(stepped(rule, BASE, sent) - wanted) < SPREAD


@EVERY_RULE
def test_a_rule_that_is_not_attacked_is_near_the_mean(rule: Guard) -> None:
    wanted = np.mean(HONEST, axis=0)
    assert np.linalg.norm(stepped(rule, BASE, HONEST) - wanted) < 0.6 * SPREAD


@pytest.mark.parametrize(
    ("rule", "breaks_at"),
    [
        (Median(), 5),
        (TrimmedMean(attackers=2), 3),
        (CentredClipping(), 5),
        (MultiKrum(attackers=3), 5),
        (GeometricMedian(), 5),
    ],
    ids=lambda value: getattr(value, "rule", value),
)
def test_each_rule_bears_as_many_of_nine_as_its_docstring_says_and_no_more(rule: Guard, breaks_at: int) -> None:
    def pulled(hostile: int) -> float:
        # All hostile workers send the same, which Krum is fooled by first.
        sent = [*HONEST[:4], *HONEST[: 5 - hostile], *[BASE + np.float32(1e6)] * hostile]
        return float(np.linalg.norm(stepped(rule, BASE, sent) - np.mean(HONEST, axis=0)))

    borne = FAULTY if isinstance(rule, TrimmedMean) else (3 if isinstance(rule, MultiKrum) else 4)
    # At four of nine clipping is still pulled by some radii: bounded, however far the attackers go.
    assert pulled(borne) < (1 if borne < 4 else 8) * np.linalg.norm(COMMON)
    assert pulled(breaks_at) > 100 * np.linalg.norm(COMMON)


def test_clipping_at_a_norm_bounds_any_majority() -> None:
    rule = CentredClipping(norm=0.5, iterations=2)
    sent = [np.full(4, 1e6, np.float32)] * 5
    # Twice by 0.5 along (1, 1, 1, 1) / 2.
    np.testing.assert_allclose(stepped(rule, np.zeros(4, np.float32), sent), 0.5, rtol=1e-6)


def flipped_labels(rule: RobustRule, claimed: int) -> float:
    """Test accuracy of logistic regression after ten rounds of nine sites, three of which learn 1 - y and claim so
    many examples for each honest one."""
    rng = np.random.default_rng(0)
    truth = rng.normal(size=20)
    sites = [rng.normal(size=(80, 20)) for _ in range(9)]
    half = CoordinatorHalf(MethodSettings(), RunInfo((), rounds=10, robust=rule))
    state = State(0, {"w": ArrayTensor(np.zeros(20, np.float32))})
    for _ in range(10):
        updates = []
        for place, x in enumerate(sites):
            hostile = place >= 6
            y = (x @ truth > 0) ^ hostile
            w = to_array(state.model["w"]).astype(np.float64)
            for _ in range(5):
                w -= 0.5 * x.T @ (1 / (1 + np.exp(-x @ w)) - y) / len(x)
            sent: dict[str, Tensor] = {"w": ArrayTensor(w.astype(np.float32))}
            updates.append(Update(f"{place}/w", claimed * 80 if hostile else 80, sent))
        state = half.merge(state, updates)
        state = State(state.round, {"w": ArrayTensor(to_array(state.model["w"]))}, scalars=state.scalars)
    x = rng.normal(size=(1000, 20))
    return float(np.mean((x @ to_array(state.model["w"]) > 0) == (x @ truth > 0)))


@pytest.mark.parametrize("kind", [type(rule) for rule in RULES])
def test_flipped_labels_spoil_the_mean_and_not_the_rule(kind: type[Guard]) -> None:
    assert flipped_labels(Mean(), claimed=10) < 0.2
    assert flipped_labels(kind(attackers=3), claimed=10) > 0.85


# ---------------------------------------------------------------- by hand


def test_the_median_and_the_trimmed_mean_by_hand() -> None:
    base = np.zeros(2, np.float32)
    sent = [np.array(row, np.float32) for row in ([1, 10], [2, 30], [4, 20], [100, -50])]
    # Of 1 2 4 100 the middle two are 2 and 4; of -50 10 20 30 they are 10 and 20.
    np.testing.assert_array_equal(stepped(Median(), base, sent), [3, 15])
    np.testing.assert_array_equal(stepped(TrimmedMean(attackers=1), base, sent), [3, 15])
    # With a fifth of 5 and 0: 1 2 4 5 100 -> (2 + 4 + 5) / 3; -50 0 10 20 30 -> 10.
    more = [*sent, np.array([5, 0], np.float32)]
    np.testing.assert_array_equal(stepped(Median(), base, more), [4, 10])
    np.testing.assert_allclose(stepped(TrimmedMean(attackers=1), base, more), [11 / 3, 10], rtol=1e-7)


def test_clipping_by_hand() -> None:
    sent = [np.array([value], np.float32) for value in (1.0, 2.0, 9.0)]
    base = np.zeros(1, np.float32)
    # Distances from 0 are 1, 2, 9 and their median 2: (1 + 2 + 2) / 3.
    np.testing.assert_allclose(stepped(CentredClipping(iterations=1), base, sent), [5 / 3], rtol=1e-6)
    # From 5/3: -2/3, 1/3, 22/3 with the median 2/3: 5/3 + (-2/3 + 1/3 + 2/3) / 3 = 16/9.
    np.testing.assert_allclose(stepped(CentredClipping(iterations=2), base, sent), [16 / 9], rtol=1e-6)


def test_multi_krum_by_hand() -> None:
    sent = [np.array([value], np.float32) for value in (0.0, 1.0, 2.0, 3.0, 50.0)]
    # n - f - 2 = 2 neighbours: sums of squares are 5, 2, 2, 5, 47^2 + 48^2; the two lowest are those at 1 and 2.
    np.testing.assert_allclose(stepped(MultiKrum(attackers=1), np.zeros(1, np.float32), sent), [1.5], rtol=1e-6)


def test_the_geometric_median_has_no_pull_left() -> None:
    rng = np.random.default_rng(1)
    sent = rng.normal(size=(6, 40)).astype(np.float32)
    found = stepped(GeometricMedian(iterations=200), np.zeros(40, np.float32), list(sent)).astype(np.float64)
    pulls = (sent - found) / np.linalg.norm(sent - found, axis=1)[:, None]
    assert np.linalg.norm(pulls.sum(axis=0)) < 1e-4
    # Where more than half are at one place, it is there.
    same = [np.full(3, 2, np.float32)] * 3 + [np.full(3, 50, np.float32)] * 2
    np.testing.assert_allclose(stepped(GeometricMedian(attackers=2), np.zeros(3, np.float32), same), 2, rtol=1e-5)


ROWS = hnp.arrays(np.float32, (7, 5), elements=st.floats(-100, 100, width=32))


@given(sent=ROWS)
def test_elementwise_rules_agree_with_whole_arrays_of_float64(sent: Array) -> None:
    base = np.linspace(-1, 1, 5, dtype=np.float32)
    steps = sent.astype(np.float64) - base
    for rule, wanted in (
        (Median(), np.median(steps, axis=0)),
        (TrimmedMean(attackers=2), np.sort(steps, axis=0)[2:5].mean(axis=0)),
    ):
        np.testing.assert_allclose(stepped(rule, base, list(sent)), base + wanted, rtol=1e-5, atol=1e-5)


@given(sent=ROWS)
def test_weights_add_the_steps_up_that_they_belong_to(sent: Array) -> None:
    base = np.zeros(5, np.float32)
    gram = sent.astype(np.float64) @ sent.T.astype(np.float64)
    for rule in RULES:
        if isinstance(rule, ByGram):
            found = stepped(rule, base, list(sent))
            weights = rule.weights(gram_of([ArrayTensor(row) for row in sent]), rule.attackers)
            np.testing.assert_allclose(found, weights @ sent, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(gram_of([ArrayTensor(row) for row in sent]), gram, rtol=1e-4, atol=1e-2)


# ---------------------------------------------------------------- what must hold for any rule


@EVERY_RULE
def test_what_nobody_changed_keeps_its_bits(rule: Guard) -> None:
    base = np.array([-0.0, 0.0, 1e-40, -3.5], np.float32)
    assert stepped(rule, base, [base] * 7).tobytes() == base.tobytes()


@EVERY_RULE
def test_several_chunks_of_any_type_come_out_as_one_would(rule: Guard) -> None:
    rng = np.random.default_rng(5)
    sent = [np.tile(rng.normal(size=8).astype(np.float32), CHUNK // 8 + 4) for _ in range(7)]
    base = np.zeros(sent[0].shape, np.float32)
    whole = stepped(rule, base, sent)
    # Each element repeats every eight, so the rules cannot tell one chunk from the next but by the sums' last bits.
    np.testing.assert_allclose(
        whole, np.tile(stepped(rule, base[:8], [row[:8] for row in sent]), CHUNK // 8 + 4), 1e-3
    )


@EVERY_RULE
def test_what_is_sent_as_differences_is_guarded_too(rule: Guard) -> None:
    rng = np.random.default_rng(2)
    base = rng.normal(size=(30, 40)).astype(np.float32)
    block = Block(tensor="w", role="mlp", shape=base.shape, dtype="F32")
    sent, plain = [], []
    for codec in ("delta", "delta+int8", "delta+topk=0.25", "bits", "raw", "delta+bf16", "delta+int4"):
        value = base + np.float32(1e-2) * rng.normal(size=base.shape).astype(np.float32)
        file = io.BytesIO()
        write_update(file, codec, [TrainedBlock(block, ArrayTensor(value), ArrayTensor(base))])
        data = file.getvalue()
        bases = {"w": ArrayTensor(base)}
        update = read_update(lambda data=data: io.BytesIO(data), len(data), {"w": block}, bases)  # type: ignore[misc]
        sent.append(update)
        plain.append(to_array(update["w"]))
    moved, _ = guarded(rule, {"w": ArrayTensor(base)}, sent, "participants")
    np.testing.assert_allclose(to_array(moved["w"]), stepped(rule, base, plain), rtol=0, atol=1e-5)


@EVERY_RULE
def test_weights_that_workers_state_do_not_count(rule: Guard) -> None:
    half = CoordinatorHalf(MethodSettings(), RunInfo((), rounds=1, robust=rule))
    state = State(0, {"w": ArrayTensor(BASE)})
    bits = set()
    for claimed in (1, 1_000_000):
        updates = [Update(f"{i}", claimed if i else 1, {"w": ArrayTensor(v)}) for i, v in enumerate(HONEST)]
        bits.add(to_array(half.merge(state, updates).model["w"]).tobytes())
    assert len(bits) == 1


def test_the_neutral_rule_is_the_mean_by_examples_to_the_bit() -> None:
    assert TypeAdapter(Robust).validate_python({"rule": "mean"}).neutral
    state = State(0, {"w": ArrayTensor(BASE)})
    updates = [Update(f"{i}", 1 + i, {"w": ArrayTensor(v)}) for i, v in enumerate(HONEST)]
    plain = average(state.model, [(float(u.examples), u.blocks) for u in updates], "participants")
    for facts in (RunInfo((), rounds=1), RunInfo((), rounds=1, robust=Mean())):
        found = CoordinatorHalf(MethodSettings(), facts).merge(state, updates)
        assert to_array(found.model["w"]).tobytes() == to_array(plain["w"]).tobytes()
        assert found.scalars == {}


# ---------------------------------------------------------------- partial uploads


def scalars(**sent: float) -> dict[str, Tensor]:
    return {name: ArrayTensor(np.array([value], np.float32)) for name, value in sent.items()}


def test_each_block_is_ruled_over_those_who_sent_it() -> None:
    senders = [
        scalars(all=1, some=5),
        scalars(all=2, some=6),
        scalars(all=3, some=7),
        scalars(all=90),
        scalars(all=0),
    ]
    moved, few = guarded(Median(), scalars(all=0, some=0, none=0), senders, "participants")
    # All: 0 1 2 3 90. Some: 5 6 7, of those three; were absent zero, it would be 5.
    assert {name: float(to_array(tensor)[0]) for name, tensor in moved.items()} == {"all": 2, "some": 6}
    assert few == []
    damped, _ = guarded(Median(), scalars(all=0, some=0, none=0), senders, "cohort")
    # Three of the five sent it.
    assert float(to_array(damped["some"])[0]) == pytest.approx(6 * 3 / 5)


@EVERY_RULE
def test_colluders_on_an_unpopular_block_do_not_own_it(rule: Guard) -> None:
    """Layer-wise choice lets the f of a cohort of many be all who send one layer."""
    honest: list[Mapping[str, Tensor]] = [scalars(popular=1.0) for _ in range(8)]
    colluders: list[Mapping[str, Tensor]] = [scalars(popular=1.0, rare=1e6) for _ in range(FAULTY)]
    model = scalars(popular=0.0, rare=0.5)
    owned = average(model, [(1.0, blocks) for blocks in (*honest, *colluders)], "participants")
    assert float(to_array(owned["rare"])[0]) == 1e6
    moved, few = guarded(rule, model, [*honest, *colluders], "participants")
    assert few == ["rare"]
    assert set(moved) == {"popular"}
    assert float(to_array(moved["popular"])[0]) == pytest.approx(1)
    # So many honest workers as the rule asks for take it back.
    joined = [scalars(popular=1.0, rare=0.6 + 0.01 * i) for i in range(rule.least - FAULTY)]
    taken, few = guarded(rule, model, [*honest, *joined, *colluders], "participants")
    assert few == []
    assert 0.4 < float(to_array(taken["rare"])[0]) < 0.8


def spec(**change: object) -> RunSpec:
    digest = f"sha256:{'0' * 64}"
    wanted = {"name": "t", "method": {"name": "fedavg"}, "model": digest, "version": digest, "dataset": "d"}
    return RunSpec.model_validate({**wanted, "rounds": 2, **change})


def test_blocks_with_too_few_senders_are_counted_and_warned_of() -> None:
    model = small_model()
    asked = spec(robust={"rule": "median"}, cohort={"size": 5, "quorum": 3})
    half = CoordinatorHalf(MethodSettings(), RunInfo(model.blocks, rounds=2, robust=asked.robust))
    names = list(values(model))
    state = State(0, {name: ArrayTensor(value) for name, value in values(model).items()})
    sent: list[list[str]] = [names, names, names[:4]]
    updates = [Update(str(i), 1, {n: state.model[n] for n in those}) for i, those in enumerate(sent)]
    after = half.merge(state, updates)
    assert after.scalars == {FEW_SENDERS: 2}
    assert all(after.model[name] is state.model[name] for name in names[4:])
    (warning,) = warnings_of(asked, model, after)
    assert warning.startswith("some blocks stayed as they were, sent by fewer than the 3 sites that median takes")
    assert warnings_of(asked, model, half.merge(state, updates[:1] * 3)) == ()


# ---------------------------------------------------------------- beside methods and optimizers


def halves() -> dict[str, CoordinatorHalf]:
    facts = RunInfo(small_model().blocks, rounds=3, robust=Median(), training=Training(optimizer="sgd"))
    return {name: coordinator_half(MethodSpec(name=name), facts) for name in methods()}


def test_a_method_is_guarded_or_refused() -> None:
    refused = set()
    start = values(small_model())
    state = State(0, {name: ArrayTensor(value) for name, value in start.items()})
    for name, half in halves().items():
        try:
            half.check_merge("robust")
        except UnsupportedRun:
            refused.add(name)
            continue
        metrics = {"effective_steps": 2.0}
        steps = [1.0, 1.0, 1.0, 1.0, 1e6]
        updates = [
            Update(str(i), 10, {n: ArrayTensor(v + np.float32(step)) for n, v in start.items()}, metrics)
            for i, step in enumerate(steps)
        ]
        updates[-1] = Update("4", 10, updates[-1].blocks, {"effective_steps": 1000.0})
        merged = half.merge(state, updates)
        for block, tensor in merged.model.items():
            assert np.abs(to_array(tensor) - start[block]).max() < 2, (name, block)
    assert refused == {"scaffold", "feddyn", "fedproto"}


class Own(CoordinatorHalf[MethodSettings]):
    def merge(self, state: State, updates: Sequence[Update]) -> State:
        return state.advanced(dict(updates[0].blocks))


class Saying(CoordinatorHalf[MethodSettings]):
    def check_merge(self, guard: str) -> None:
        """All is guarded."""


class OwnOfSaying(Saying):
    merge = Own.merge


class SayingOwn(Own):
    check_merge = Saying.check_merge


GUARDS: dict[str, dict[str, Any]] = {
    "robust": {"robust": Median()},
    "client_privacy": {"client_privacy": ClientPrivacy(epsilon=8, delta=1e-5, clip_norm=1)},
    "secure_sums": {"secure_sums": True},
}


@pytest.mark.parametrize("guard", GUARDS)
@pytest.mark.parametrize("half", [Own, OwnOfSaying])
def test_a_method_that_merges_by_itself_and_does_not_say_is_refused(half: type[Any], guard: str) -> None:
    initial_state(half(MethodSettings(), RunInfo((), rounds=1)), State(0, {}))
    with pytest.raises(UnsupportedRun, match=f"does not say that {guard} guards all of it"):
        initial_state(half(MethodSettings(), RunInfo((), rounds=1, **GUARDS[guard])), State(0, {}))
    initial_state(SayingOwn(MethodSettings(), RunInfo((), rounds=1, **GUARDS[guard])), State(0, {}))


@EVERY_RULE
def test_a_server_optimizer_steps_along_what_the_rule_made(rule: Guard) -> None:
    half = CoordinatorHalf(MethodSettings(), RunInfo((), rounds=1, robust=rule))
    state = State(0, {"w": ArrayTensor(BASE)})
    updates = [Update(str(i), 1, {"w": ArrayTensor(value)}) for i, value in enumerate(HONEST)]
    plain = to_array(half.merge(state, updates).model["w"])
    halved = merge(half, Momentum(learning_rate=0.5), state, updates)
    np.testing.assert_allclose(to_array(halved.model["w"]) - BASE, (plain - BASE) / 2, rtol=1e-4, atol=1e-6)


def test_stretched_steps_are_ruled_as_they_are_stretched() -> None:
    base = ArrayTensor(np.zeros(1, np.float32))
    sent = [{"w": StretchedStep(base, ArrayTensor(np.array([v], np.float32)), 2.0)} for v in (1, 2, 3, 4, 99)]
    for rule in RULES[:2]:
        moved, _ = guarded(rule, {"w": base}, sent, "participants")
        assert float(to_array(moved["w"])[0]) == 6.0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"robust": {"rule": "median"}, "normalization": "inverse-probability", "cohort": {"quorum": 3}},
            "divide by",
        ),
        (
            {"robust": {"rule": "median", "attackers": 2}, "cohort": {"quorum": 4}},
            "needs updates of at least 5 sites; cohort.quorum is 4",
        ),
        ({"robust": {"rule": "multi-krum"}, "cohort": {"quorum": 4}}, "cohort.quorum is 4. Raise it to 5."),
        ({"robust": {"rule": "median", "trim": 1}}, "trim"),
        ({"robust": {"rule": "mode"}}, "does not match any of the expected tags"),
        ({"robust": {"rule": "median", "attackers": 0}}, "greater than 0"),
    ],
)
def test_what_a_rule_cannot_do_is_refused_with_the_run(change: dict[str, object], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        spec(**change)
