"""Server optimizers, against the formulas of their paper worked out by hand and in whole float64 arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from pydantic import TypeAdapter, ValidationError

from tessera.shared.aggregation.server_optimizer import (
    Adagrad,
    Adam,
    Momentum,
    NoOptimizer,
    OptimizerRule,
    ServerOptimizer,
    Yogi,
)
from tessera.shared.methods.base import (
    CoordinatorHalf,
    MethodSettings,
    MethodSpec,
    RunInfo,
    State,
    UnsupportedRun,
    Update,
)
from tessera.shared.methods.registry import coordinator_half
from tessera.shared.model.blocks import Block
from tessera.shared.rounds.planning import initial_state
from tessera.shared.rounds.server_step import merge
from tessera.shared.run_settings import Training
from tessera.shared.tensors.dtypes import DType
from tessera.shared.tensors.lazy import Array, ArrayTensor, Tensor, as_bytes, to_array

OPTIMIZERS = [Momentum(learning_rate=0.5), Momentum(momentum=0.9), Adam(), Yogi(), Adagrad(), Adagrad(beta1=0.9)]
EVERY = pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)


def block(name: str, values: Array, dtype: DType = "F32") -> Block:
    return Block(tensor=name, role="mlp", shape=values.shape, dtype=dtype)


def fedavg(model: Mapping[str, Tensor]) -> CoordinatorHalf[MethodSettings]:
    blocks = tuple(Block(tensor=n, role="mlp", shape=t.shape, dtype=t.dtype) for n, t in model.items())
    return CoordinatorHalf(MethodSettings(), RunInfo(blocks, rounds=9))


def after(optimizer: OptimizerRule, state: State, *sent: Mapping[str, Tensor]) -> State:
    """The state after one more round of FedAvg, its tensors in memory."""
    updates = [Update(f"{index}/w", 1, blocks) for index, blocks in enumerate(sent)]
    merged = merge(fedavg(state.model), optimizer, state, updates)
    held = {name: ArrayTensor(to_array(tensor), tensor.dtype) for name, tensor in merged.server_state.items()}
    model = {
        name: tensor if tensor is state.model[name] else ArrayTensor(to_array(tensor), tensor.dtype)
        for name, tensor in merged.model.items()
    }
    return replace(merged, model=model, server_state=held)


def one(value: float) -> dict[str, Tensor]:
    return {"w": ArrayTensor(np.array([value], np.float64), "F64")}


def rounds(optimizer: OptimizerRule, *merged: float) -> tuple[list[float], State]:
    """The value of a block that starts at 1 and is merged to base + step in each round, after each."""
    state, values = State(0, one(1.0)), []
    for step in merged:
        base = float(to_array(state.model["w"])[0])
        state = after(optimizer, state, one(base + step))
        values.append(float(to_array(state.model["w"])[0]))
    return values, state


def test_sgd_with_momentum_adds_up_what_rounds_came_to() -> None:
    values, state = rounds(Momentum(learning_rate=0.5, momentum=0.9), 0.2, 0.1)
    # g = -0.2: m = -0.2, w = 1 + 0.5 * 0.2 = 1.1; g = -0.1: m = -0.9 * 0.2 - 0.1 = -0.28, w = 1.1 + 0.14 = 1.24
    np.testing.assert_allclose(values, [1.1, 1.24], rtol=1e-12)
    np.testing.assert_allclose(to_array(state.server_state["server/m/w"]), [-0.28], rtol=1e-12)


def test_adam_is_the_paper_s_without_bias_correction() -> None:
    optimizer = Adam(learning_rate=0.1, beta1=0.9, beta2=0.99, tau=0.001)
    values, state = rounds(optimizer, 0.2)
    # m = 0.1 * -0.2 = -0.02; v = 0.99 * 1e-6 + 0.01 * 0.04 = 4.0099e-4; w = 1 + 0.1 * 0.02 / (0.0200247 + 0.001)
    np.testing.assert_allclose(values, [1 + 0.002 / 0.021024735], rtol=1e-8)
    np.testing.assert_allclose(to_array(state.server_state["server/v/w"]), [4.0099e-4], rtol=1e-12)
    # m = -0.018 - 0.01 = -0.028; v = 0.99 * 4.0099e-4 + 0.01 * 0.01 = 4.969801e-4
    (_, second), state = rounds(optimizer, 0.2, 0.1)
    np.testing.assert_allclose(to_array(state.server_state["server/m/w"]), [-0.028], rtol=1e-12)
    np.testing.assert_allclose(to_array(state.server_state["server/v/w"]), [4.969801e-4], rtol=1e-12)
    assert second == pytest.approx(values[0] + 0.1 * 0.028 / (4.969801e-4**0.5 + 0.001), rel=1e-12)


def test_yogi_moves_its_second_moment_by_the_sign_of_the_difference() -> None:
    optimizer = Yogi(tau=0.1, beta2=0.9)
    # v = 0.01; g^2 = 0.04 is larger, so v = 0.01 + 0.1 * 0.04 = 0.014; then g^2 = 0.0001 is smaller: v = 0.01399
    _, state = rounds(optimizer, 0.2)
    np.testing.assert_allclose(to_array(state.server_state["server/v/w"]), [0.014], rtol=1e-12)
    _, state = rounds(optimizer, 0.2, 0.01)
    np.testing.assert_allclose(to_array(state.server_state["server/v/w"]), [0.01399], rtol=1e-12)


def test_adagrad_adds_squares_up_and_has_no_momentum() -> None:
    values, state = rounds(Adagrad(learning_rate=0.1, tau=0.1), 0.2, -0.1)
    # v = 0.01 + 0.04 = 0.05: w = 1 + 0.1 * 0.2 / (0.2236068 + 0.1)
    # v = 0.06: w = that - 0.1 * 0.1 / (0.2449490 + 0.1)
    first = 1 + 0.02 / 0.3236068
    np.testing.assert_allclose(values, [first, first - 0.01 / 0.3449490], rtol=1e-8)
    assert set(state.server_state) == {"server/v/w"}


@given(data=st.data(), optimizer=st.sampled_from(OPTIMIZERS))
def test_three_rounds_agree_with_whole_arrays_of_float64(data: st.DataObject, optimizer: OptimizerRule) -> None:
    rows = hnp.arrays(np.float32, 6, elements=st.floats(-2, 2, width=32))
    start, *sent = (data.draw(rows) for _ in range(4))
    state = State(0, {"w": ArrayTensor(start)})
    w, m, v = start.astype(np.float64), np.zeros(6), np.full(6, 1e-6)
    for values in sent:
        g = w - values
        w, m, v = oracle(optimizer, w, m, v, g)
        state = after(optimizer, state, {"w": ArrayTensor(values)})
        w = w.astype(np.float32).astype(np.float64)
        np.testing.assert_allclose(to_array(state.model["w"]), w, rtol=1e-5, atol=2e-6)


def oracle(optimizer: OptimizerRule, w: Array, m: Array, v: Array, g: Array) -> tuple[Array, Array, Array]:
    match optimizer:
        case Momentum(learning_rate=rate, momentum=beta):
            m = beta * m + g
            return w - rate * m, m, v
        case Adam(beta1=b1, beta2=b2):
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        case Yogi(beta1=b1, beta2=b2):
            m, v = b1 * m + (1 - b1) * g, v - (1 - b2) * g**2 * np.sign(v - g**2)
        case Adagrad(beta1=b1):
            m, v = b1 * m + (1 - b1) * g, v + g**2
    return w - 1e-3 * m / (np.sqrt(v) + 1e-3), m, v


@pytest.mark.parametrize("optimizer", [NoOptimizer(), Momentum(), Momentum(learning_rate=1.0, momentum=0.0)], ids=str)
def test_neutral_settings_leave_the_mean_as_it_is_to_the_bit_and_remember_nothing(optimizer: OptimizerRule) -> None:
    rng = np.random.default_rng(0)
    model = {"w": ArrayTensor(rng.normal(size=1000).astype(np.float32))}
    sent = [{"w": ArrayTensor(rng.normal(size=1000).astype(np.float32))} for _ in range(3)]
    state = after(optimizer, State(0, model), *sent)
    plain = fedavg(model).merge(State(0, model), [Update(f"{i}/w", 1, blocks) for i, blocks in enumerate(sent)])
    assert to_array(state.model["w"]).tobytes() == to_array(plain.model["w"]).tobytes()
    assert state.server_state == {}


@EVERY
def test_a_block_that_nobody_sent_keeps_its_value_and_its_moments(optimizer: OptimizerRule) -> None:
    state = State(0, {"a": ArrayTensor(np.ones(3, np.float32)), "b": ArrayTensor(np.ones(3, np.float32))})
    two = {name: ArrayTensor(np.full(3, 2, np.float32)) for name in "ab"}
    first = after(optimizer, state, two)
    second = after(optimizer, first, {"a": two["a"]})
    assert second.model["b"] is first.model["b"]
    for name in (name for name in first.server_state if name.endswith("/b")):
        np.testing.assert_array_equal(to_array(second.server_state[name]), to_array(first.server_state[name]))
    assert (to_array(second.model["a"]) != to_array(first.model["a"])).all()


@EVERY
@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16"])
def test_what_is_merged_to_where_it_was_stays_bit_for_bit(optimizer: OptimizerRule, dtype: DType) -> None:
    base = ArrayTensor(
        np.array([0.0, -0.0, 1e-7, -3.3]).astype(to_array(ArrayTensor(np.ones(1), dtype)).dtype), dtype
    )
    state = after(optimizer, State(0, {"w": base}), {"w": base}, {"w": base})
    moved = state.model["w"]
    assert moved.dtype == dtype
    assert bytes(as_bytes(to_array(moved))) == bytes(as_bytes(base.values))
    assert {tensor.dtype for tensor in state.server_state.values()} <= {"F64" if dtype == "F64" else "F32"}


def test_in_bfloat16_the_gradient_is_not_rounded_before_the_step() -> None:
    base = ArrayTensor(to_array(ArrayTensor(np.ones(1), "BF16")), "BF16")
    up = ArrayTensor(to_array(ArrayTensor(np.array([1 + 2**-7]), "BF16")), "BF16")
    # The mean of 1, 1, 1 and 1 + 2^-7 is 1 + 2^-9, which bfloat16 rounds to 1; ten times that step is 1 + 10 * 2^-9,
    # of which the nearest bfloat16 is 1 + 2 * 2^-7.
    state = after(
        Momentum(learning_rate=10.0), State(0, {"w": base}), {"w": base}, {"w": base}, {"w": base}, {"w": up}
    )
    assert float(to_array(state.model["w"])[0]) == 1 + 2 * 2**-7


class Remembering(CoordinatorHalf[MethodSettings]):
    """FedAvg that remembers a tensor under a name."""

    name = "c/w"

    def merge(self, state: State, updates: Sequence[Update]) -> State:
        assert not any(name.startswith("server/") for name in state.server_state)
        return replace(super().merge(state, updates), server_state={self.name: ArrayTensor(np.ones(1, np.float32))})


def test_a_method_s_own_memory_lives_beside_the_moments_and_sees_nothing_of_them() -> None:
    half = Remembering(MethodSettings(), RunInfo((), rounds=9))
    state = State(0, one(1.0))
    for _ in range(2):
        state = merge(half, Adam(), state, [Update("a/w", 1, one(2.0))])
        assert set(state.server_state) == {"c/w", "server/m/w", "server/v/w"}


def test_a_method_whose_memory_is_named_like_moments_is_refused() -> None:
    half = Remembering(MethodSettings(), RunInfo((), rounds=9))
    half.name = "server/m/w"
    with pytest.raises(ValueError, match=r"names that are kept for others: \['server/m/w'\]"):
        merge(half, NoOptimizer(), State(0, one(1.0)), [Update("a/w", 1, one(2.0))])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"kind": "none"}, NoOptimizer()),
        ({"kind": "sgd", "momentum": 0.9}, Momentum(momentum=0.9)),
        ({"kind": "adam"}, Adam(learning_rate=1e-3, beta1=0.9, beta2=0.99, tau=1e-3)),
        ({"kind": "yogi", "tau": 0.01}, Yogi(tau=0.01)),
        ({"kind": "adagrad"}, Adagrad(beta1=0.0)),
    ],
)
def test_settings_are_told_apart_by_their_kind(settings: dict[str, Any], expected: OptimizerRule) -> None:
    adapter: TypeAdapter[OptimizerRule] = TypeAdapter(ServerOptimizer)
    assert adapter.validate_python(settings) == expected
    assert adapter.validate_json(expected.model_dump_json()) == expected


@pytest.mark.parametrize(
    "settings", [{}, {"kind": "sgd", "tau": 1}, {"kind": "adam", "momentum": 0.9}, {"kind": "adam", "tau": 0}]
)
def test_settings_of_another_kind_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(ServerOptimizer).validate_python(settings)


# ---------------------------------------------------------------- with each method that scales or adds steps

TUNED = (
    NoOptimizer(), Momentum(learning_rate=0.5), Momentum(momentum=0.9), Adam(learning_rate=0.1),
    Yogi(learning_rate=0.1), Adagrad(learning_rate=0.5),
)  # fmt: skip
RATE, ALPHA = 0.05, 0.1
CURVATURES = np.array([[1.0, 0.2], [0.3, 1.5], [2.0, 0.6]])  # [sites, entries]
MINIMA = np.array([[4.0, 1.0], [6.0, 3.5], [2.0, 4.0]])
STEPS = {"fednova": (2, 5, 9)}


def joint_loss(w: Array) -> float:
    return float((CURVATURES * (w - MINIMA) ** 2).sum())


@pytest.mark.parametrize("optimizer", TUNED, ids=str)
@pytest.mark.parametrize("method", ["fedavg", "fednova", "scaffold", "feddyn"])
def test_a_method_ends_below_its_start_under_each_server_optimizer_or_is_refused(
    method: str, optimizer: OptimizerRule
) -> None:
    """Three sites with quadratic losses, in float64, and the local steps of each method's paper."""
    training = Training(optimizer="sgd", learning_rate=RATE, weight_decay=0, batch_size=1)
    settings = {"alpha": ALPHA} if method == "feddyn" else {}
    facts = RunInfo((), rounds=60, training=training, server_optimizer=optimizer)
    half = coordinator_half(MethodSpec(name=method, settings=settings), facts)
    state = State(0, {"w": ArrayTensor(np.zeros(2), "F64")})
    if method == "feddyn" and not optimizer.neutral:
        with pytest.raises(UnsupportedRun, match="leave the latter out"):
            initial_state(half, state)
        return
    state, kept, start = initial_state(half, state), np.zeros((3, 2)), joint_loss(np.zeros(2))
    for _ in range(60):
        base = to_array(state.model["w"])
        server = to_array(state.server_state["control/w"]) if "control/w" in state.server_state else np.zeros(2)
        updates = []
        for site, steps in enumerate(STEPS.get(method, (5, 5, 5))):
            w = base.copy()
            for _step in range(steps):
                gradient = CURVATURES[site] * (w - MINIMA[site])
                if method == "scaffold":
                    gradient += server - kept[site]
                if method == "feddyn":
                    gradient += kept[site] + ALPHA * (w - base)
                w -= RATE * gradient
            if method == "scaffold":
                kept[site] += (base - w) / (steps * RATE) - server
            if method == "feddyn":
                kept[site] += ALPHA * (w - base)
            metrics = {"fednova": "effective_steps", "scaffold": "steps"}
            sent = {"w": ArrayTensor(w, "F64")}
            updates.append(Update(f"{site}", 5, sent, {metrics[method]: float(steps)} if method in metrics else {}))
        merged = merge(half, optimizer, state, updates)
        state = replace(
            merged,
            model={n: ArrayTensor(to_array(t), "F64") for n, t in merged.model.items()},
            server_state={n: ArrayTensor(to_array(t), t.dtype) for n, t in merged.server_state.items()},
        )
    best = joint_loss((CURVATURES * MINIMA).sum(0) / CURVATURES.sum(0))
    assert joint_loss(to_array(state.model["w"])) - best < 0.2 * (start - best)
