"""FedFrozen's two stages, its control, and the rule that ends a warm-up, with the arithmetic written out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from tessera.shared.aggregation.drift import BUCKETS, agreement
from tessera.shared.methods.base import (
    CoordinatorHalf,
    LocalResult,
    MethodSpec,
    Participant,
    RunInfo,
    State,
    UnsupportedRun,
    Update,
)
from tessera.shared.methods.fedfrozen import FedFrozenSettings, judged, observed
from tessera.shared.methods.registry import coordinator_half, worker_half
from tessera.shared.model.blocks import Block, Role
from tessera.shared.rounds.planning import initial_state
from tessera.shared.run_settings import Privacy
from tessera.shared.tensors.lazy import CHUNK, Array, ArrayTensor, to_array
from tessera.simulation import Conditions, Result, Weights, simulate
from tessera.worker.data.dataset import Dataset
from tessera.worker.training.context import LocalTaskContext
from tests.support.tasks import PLAIN, images, one_task, untrained

ROLES: tuple[Role, ...] = ("query", "key", "value", "output", "mlp", "head")
BLOCKS = tuple(Block(tensor=role, role=role, shape=(2,), dtype="F32") for role in ROLES)
ROUNDS = 20
START = State(0, {block.name: ArrayTensor(np.full(2, 1.0, "f4")) for block in BLOCKS})
WORKER = Participant("a/w", 1)


def half_with(**settings: Any) -> CoordinatorHalf[Any]:
    return coordinator_half(MethodSpec(name="fedfrozen", settings=settings), RunInfo(BLOCKS, ROUNDS))


def updates(state: State, *steps: Sequence[float], names: Sequence[str] = ROLES) -> list[Update]:
    """One update per step, of equal weight, that moves each of the named blocks by that step."""
    return [
        Update(f"{i}/w", 1, {name: ArrayTensor(to_array(state.model[name]) + np.array(step, "f4")) for name in names})
        for i, step in enumerate(steps)
    ]


def settled(state: State) -> State:
    """The state as it is after its version was stored and read again, with numbers that went through JSON."""
    return State(
        state.round,
        {name: ArrayTensor(to_array(tensor), tensor.dtype) for name, tensor in state.model.items()},
        {name: ArrayTensor(to_array(tensor), tensor.dtype) for name, tensor in state.server_state.items()},
        json.loads(json.dumps(dict(state.scalars), allow_nan=False)),
    )


def trained(half: CoordinatorHalf[Any], state: State) -> set[str]:
    return {block.role for block in half.plan_for(state, WORKER).train.resolve(BLOCKS)}


# ---------------------------------------------------------------- stages and scopes


@pytest.mark.parametrize(
    ("scope", "roles"),
    [
        ("all_but_v", set(ROLES) - {"value"}),
        ("attn_qko", {"query", "key", "output", "head"}),
        ("qk_head", {"query", "key", "head"}),
        ("qk_only", {"query", "key"}),
    ],
)
def test_the_control_freezes_the_value_blocks_instead(scope: str, roles: set[str]) -> None:
    half = half_with(freeze="value", scope=scope, warmup_rounds=1)
    assert trained(half, START) == set(ROLES)
    assert trained(half, State(1, START.model)) == roles


def test_a_scope_that_is_left_out_trains_all_but_what_is_frozen() -> None:
    assert FedFrozenSettings().scope == "all_but_qk"
    assert FedFrozenSettings(freeze="value").scope == "all_but_v"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"freeze": "value", "scope": "all_but_qk"}, "one of all_but_v, attn_qko, qk_head, qk_only; not all_but_qk"),
        ({"scope": "qk_only"}, "one of all_but_qk, attn_vo, v_head, v_only; not qk_only"),
        ({"least_warmup_rounds": 9, "most_warmup_rounds": 8}, "most_warmup_rounds is 8, below"),
        ({"warmup_rounds": "soon"}, "warmup_rounds"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        FedFrozenSettings.model_validate(settings)


@pytest.mark.parametrize(("freeze", "still"), [("query_key", {"query", "key"}), ("value", {"value"})])
def test_what_is_frozen_stays_the_very_tensor_that_it_was(freeze: str, still: set[str]) -> None:
    half = half_with(freeze=freeze, warmup_rounds=0)
    rest = [role for role in ROLES if role not in still]
    after = half.merge(START, updates(START, (1, 0), (0, 1), names=rest))
    assert {name for name in ROLES if after.model[name] is START.model[name]} == still


# ---------------------------------------------------------------- what the coordinator sees


def test_movement_disagreement_and_noise_are_those_of_the_weighted_mean() -> None:
    model = {"q": ArrayTensor(np.array([3.0, 4.0], "f4"))}
    senders = [
        (1.0, {"q": ArrayTensor(np.array([7.0, 4.0], "f4"))}),
        (3.0, {"q": ArrayTensor(np.array([3, 8], "f4"))}),
    ]
    seen = agreement(model, ["q"], senders)
    # Steps (4, 0) and (0, 4) with shares 1/4 and 3/4: the mean step is (1, 3), and they are apart from it by (3, -3)
    # and (-1, 1). Both shares squared sum to 10/16.
    assert seen.senders == 2
    assert seen.size == 9 + 16
    assert seen.movement == 1 + 9
    assert seen.disagreement == 18 / 4 + 2 * 3 / 4
    assert seen.noise == pytest.approx(6 * (10 / 16) / (6 / 16))


def test_noise_is_the_movement_of_clients_that_have_nothing_in_common() -> None:
    rng, weights = np.random.default_rng(0), [1.0, 2.0, 5.0]
    seen = [
        agreement(
            {"q": ArrayTensor(np.zeros(50, "f4"))},
            ["q"],
            [(weight, {"q": ArrayTensor(rng.normal(size=50).astype("f4"))}) for weight in weights],
        )
        for _ in range(400)
    ]
    movement, noise = (np.mean([getattr(one, name) for one in seen]) for name in ("movement", "noise"))
    # Each of 50 entries of the mean has the variance (1 + 4 + 25) / 64.
    assert movement == pytest.approx(50 * 30 / 64, rel=0.02)
    assert noise == pytest.approx(movement, rel=0.02)


def test_blocks_are_read_chunk_by_chunk_and_the_order_of_updates_changes_rounding_only() -> None:
    rng, size = np.random.default_rng(1), CHUNK + 1000
    base = rng.normal(size=size).astype("f4")
    steps = rng.normal(size=(3, size)).astype("f4") * 1e-3
    senders = [(w, {"q": ArrayTensor(base + step)}) for w, step in zip((1.0, 2.0, 4.0), steps, strict=True)]
    seen = [agreement({"q": ArrayTensor(base)}, ["q"], order) for order in permutations(senders)]
    moved = [(base + step).astype("f8") - base for step in steps]
    mean = (moved[0] + 2 * moved[1] + 4 * moved[2]) / 7
    assert seen[0].movement == pytest.approx(mean @ mean, rel=1e-9)
    apart = sum(w / 7 * ((step - mean) @ (step - mean)) for w, step in zip((1, 2, 4), moved, strict=True))
    assert seen[0].disagreement == pytest.approx(apart, rel=1e-9)
    for other in seen[1:]:
        assert other.movement == pytest.approx(seen[0].movement, rel=1e-12)
        np.testing.assert_allclose(other.sketch, seen[0].sketch, atol=1e-12)


@pytest.mark.parametrize("spread", ["everywhere", pytest.param("one column", marks=pytest.mark.long)])
def test_the_inner_product_of_two_sketches_is_nearly_that_of_the_steps(spread: str) -> None:
    rng, shape = np.random.default_rng(2), (1024, 4096)
    steps = rng.normal(size=(2, *shape)).astype("f4")
    steps[1] += steps[0]
    if spread == "one column":
        # As with outlying features: were there as many buckets as columns, all would fall into one.
        steps[:, :, 1:] = 0
    seen = [
        agreement({"q": ArrayTensor(np.zeros(shape, "f4"))}, ["q"], [(1.0, {"q": ArrayTensor(step)})])
        for step in steps
    ]
    exact = float(np.sum(steps[0] * steps[1], dtype="f8"))
    lengths = float(np.linalg.norm(steps[0]) * np.linalg.norm(steps[1]))
    assert abs(float(seen[0].sketch @ seen[1].sketch) - exact) < 5 / np.sqrt(BUCKETS) * lengths


# ---------------------------------------------------------------- the rule


def seen_of(*steps: tuple[float, float], block: str = "query") -> Any:
    senders = [(float(u.examples), u.blocks) for u in updates(START, *steps, names=[block])]
    return agreement(START.model, [block], senders)


def test_progress_is_the_part_of_a_step_that_goes_on_with_the_last_one() -> None:
    first, second = seen_of((2, 1), (2, -1)), seen_of((2, 0), (-1, 3))
    scalars = observed({}, first, None)
    # The block is (1, 1), the steps' mean (2, 0); both are 1 apart from it, and two equal senders have N - 1 = 1.
    assert scalars == {
        "warmup.movement": pytest.approx(2 / 2**0.5),
        "warmup.disagreement": pytest.approx(1 / 2**0.5),
        "warmup.noise": 1.0,
    }
    scalars |= observed(scalars, second, first.sketch)
    # The mean is (0.5, 1.5), of which (2, 0) has 1; both are (1.5, -1.5) apart, so that the noise is 4.5.
    assert scalars["warmup.progress"] == 1.0
    assert scalars["warmup.won"] == 1.0
    assert scalars["warmup.persistence"] == pytest.approx(1 / (2 * 2.5**0.5))
    assert scalars["warmup.noise"] == pytest.approx(1 + 0.3 * (4.5 - 1))
    scalars |= observed(scalars, seen_of((-4, 0), (-4, 0)), second.sketch)
    # A step back is no progress, and takes nothing from what was won.
    assert scalars["warmup.progress"] == pytest.approx(1 + 0.3 * (-2 - 1))
    assert scalars["warmup.won"] == 1.0


def test_a_round_with_one_client_tells_how_far_it_went_and_judges_nothing() -> None:
    scalars = {"warmup.noise": 1.0, "warmup.progress": 2.0, "warmup.won": 3.0, "warmup.quiet_rounds": 2.0}
    assert observed(scalars, seen_of((3, 4)), np.ones(BUCKETS)) == {"warmup.movement": pytest.approx(5 / 2**0.5)}


@pytest.mark.parametrize(
    ("progress", "noise", "won", "quiet"),
    [
        (0.9, 1.0, 91.0, 1.0),  # 0.9 <= 1 and 0.9 * 10 <= 0.1 * 91
        (0.9, 1.0, 89.0, 0.0),  # ten more rounds like this one would add more than a tenth
        (1.1, 1.0, 999.0, 0.0),  # the clients still agree
        (-0.5, 1.0, 0.0, 1.0),  # rounds go to and fro, and there never was progress
        (0.0, 0.0, 0.0, 1.0),  # nothing moves
    ],
)
def test_a_round_calls_for_the_end_if_progress_is_lost_in_noise_and_little_is_left_to_win(
    progress: float, noise: float, won: float, quiet: float
) -> None:
    scalars = {"warmup.progress": progress, "warmup.noise": noise, "warmup.won": won}
    judgement = judged(scalars, FedFrozenSettings(signal=1.0, gain=0.1), rounds_left=10)
    assert judgement["warmup.quiet_rounds"] == quiet


def test_the_ratios_of_the_rule_are_told_for_each_version() -> None:
    judgement = judged({"warmup.progress": -4.0, "warmup.noise": 1.0, "warmup.won": 20.0}, FedFrozenSettings(), 10)
    assert judgement == {"warmup.signal": -2.0, "warmup.to_win": -2.0, "warmup.quiet_rounds": 1.0}


AUTO = {"warmup_rounds": "auto", "least_warmup_rounds": 2, "patience": 2}
ONWARD = ((1.0, 0.1), (1.0, -0.1))
TO, FRO = ((1.0, 0.5), (0.2, -0.5)), ((-1.0, 0.5), (-0.2, -0.5))


def run(half: CoordinatorHalf[Any], rounds: Sequence[Sequence[Sequence[float]]]) -> list[State]:
    """The states of a run in which each round's workers take these steps, on the blocks that they are asked for."""
    states = [START]
    for steps in rounds:
        state = states[-1]
        names = [block.name for block in half.plan_for(state, WORKER).upload.resolve(BLOCKS)]
        states.append(settled(half.merge(state, updates(state, *steps, names=names))))
    return states


def test_the_warm_up_goes_on_while_clients_go_on_together_and_ends_when_they_go_to_and_fro() -> None:
    half = half_with(**AUTO)
    states = run(half, [*[ONWARD] * 5, *[FRO, TO] * 3])
    # Query and key count together, which doubles all. A step onward after another is a progress of 2 (1 * 1, twice),
    # one back after it of -1.2 (-0.6 * 1, twice), and then of -0.72. Smoothed over versions 5 to 9:
    #   progress  2     2 - 0.3 * 3.2 = 1.04   1.04 - 0.3 * 1.76 = 0.512   0.512 - 0.3 * 1.232 = 0.1424   -0.1163
    #   noise     0.02  0.02 + 0.3 * 0.8 = 0.26   0.428   0.5456   0.628
    # From version 8 on progress is lost; but the 12 rounds that are left would still add 12 * 0.1424 to the 8 won
    # until then, more than a tenth. So version 9 is the first to call for the end, and 10 the second.
    assert states[8].scalars["warmup.progress"] == pytest.approx(0.1424, abs=1e-5)
    assert states[8].scalars["warmup.noise"] == pytest.approx(0.5456, abs=1e-5)
    assert states[8].scalars["warmup.to_win"] == pytest.approx(12 * 0.1424 / 8, abs=1e-4)
    quiet = [state.scalars.get("warmup.quiet_rounds") for state in states]
    assert quiet == [None, None, 0, 0, 0, 0, 0, 0, 0, 1, 2, None]
    assert [half.plan_for(state, WORKER).stage for state in states] == ["warm-up"] * 10 + ["frozen"] * 2


def test_once_frozen_nothing_is_measured_and_what_was_measured_stays_with_its_version() -> None:
    *_, last, frozen = run(half_with(**AUTO), [*[ONWARD] * 5, *[FRO, TO] * 3])
    assert set(last.server_state) == {"warmup/step"}
    assert last.scalars["frozen_from"] == 10
    assert "warmup.signal" in last.scalars
    assert frozen.scalars == {"frozen_from": 10.0}
    assert not frozen.server_state
    np.testing.assert_array_equal(to_array(frozen.model["query"]), to_array(last.model["query"]))


@pytest.mark.parametrize("sent", [("key", "value"), ("value",), ()])
def test_a_frozen_block_that_no_update_contains_counts_for_nothing_in_the_signals(sent: Sequence[str]) -> None:
    half = half_with(**AUTO)
    after = half.merge(START, updates(START, *ONWARD, names=sent))
    # The mean step is (1, 0), of blocks (1, 1).
    assert after.scalars["warmup.movement"] == pytest.approx(0.5**0.5 if "key" in sent else 0.0)
    # A block has the same place in every sketch, whichever others were sent.
    whole = agreement(START.model, ["query", "key"], [(1.0, {"key": ArrayTensor(np.array([2.0, 1.0], "f4"))})] * 2)
    if "key" in sent:
        np.testing.assert_allclose(to_array(after.server_state["warmup/step"]), whole.sketch)


def test_a_warm_up_of_a_fixed_length_measures_only_if_asked() -> None:
    asked, plain = (
        run(half_with(warmup_rounds=3, signals=signals), [*[ONWARD] * 3, TO]) for signals in (True, False)
    )
    for states in (asked, plain):
        assert [state.scalars.get("frozen_from") for state in states] == [None, None, None, 3, 3]
    assert asked[2].scalars["warmup.persistence"] == pytest.approx(1.0)
    assert [(dict(state.scalars), dict(state.server_state)) for state in plain[:3]] == [({}, {})] * 3


def test_a_scope_with_the_head_is_refused_where_the_head_is_tied_to_the_embeddings() -> None:
    headless = tuple(block for block in BLOCKS if block.role != "head")
    half = coordinator_half(MethodSpec(name="fedfrozen", settings={"scope": "v_head"}), RunInfo(headless, ROUNDS))
    with pytest.raises(UnsupportedRun, match=r"tied to the token embeddings\. Choose scope all_but_qk or v_only"):
        initial_state(half, START)


def test_adapters_that_do_not_name_their_matrix_are_refused() -> None:
    block = Block(tensor="query.lora_A", role="adapter", shape=(2,), dtype="F32")
    half = coordinator_half(MethodSpec(name="fedfrozen"), RunInfo((*BLOCKS, block), ROUNDS))
    with pytest.raises(UnsupportedRun, match="create the model again"):
        initial_state(half, START)


def test_an_adapter_is_frozen_with_its_matrix_and_else_trains_with_it() -> None:
    adapters = (
        Block(tensor="query.A", role="adapter", adapts=("query",), shape=(2,), dtype="F32"),
        Block(tensor="value.A", role="adapter", adapts=("value",), shape=(2,), dtype="F32"),
        Block(tensor="mlp.A", role="adapter", adapts=("mlp",), shape=(2,), dtype="F32"),
        Block(tensor="fused.A", role="adapter", adapts=("query", "key", "value"), shape=(2,), dtype="F32"),
    )
    table = (*BLOCKS, *adapters)

    def trains(**settings: str) -> set[str]:
        half = coordinator_half(
            MethodSpec(name="fedfrozen", settings={"warmup_rounds": 0, **settings}), RunInfo(table, ROUNDS)
        )
        plan = half.plan_for(START, WORKER)
        assert plan.upload == plan.train
        return {block.name for block in plan.train.resolve(table) if block.role == "adapter"}

    assert trains(scope="all_but_qk") == {"value.A", "mlp.A"}
    assert trains(scope="v_only") == {"value.A"}
    assert trains(freeze="value", scope="all_but_v") == {"query.A", "mlp.A"}


def test_the_warm_up_is_no_shorter_than_the_least_and_no_longer_than_the_most() -> None:
    restless = [TO, FRO] * 5
    assert run(half_with(**AUTO), restless)[-1].scalars["frozen_from"] == 3
    assert run(half_with(**{**AUTO, "least_warmup_rounds": 7}), restless)[-1].scalars["frozen_from"] == 7
    assert run(half_with(**AUTO, most_warmup_rounds=4), [ONWARD] * 6)[-1].scalars["frozen_from"] == 4


def test_a_round_with_one_client_neither_ends_a_warm_up_nor_begins_the_count_anew() -> None:
    alone = ((5.0, 5.0),)
    states = run(half_with(**AUTO), [TO, FRO, alone, alone, TO])
    assert [state.scalars.get("warmup.quiet_rounds") for state in states] == [None, None, 1, 1, 1, 2]
    assert states[-1].scalars["frozen_from"] == 5


def test_a_run_of_one_worker_is_merged_and_said_never_to_freeze() -> None:
    half = half_with(**AUTO)
    states = run(half, [((1.0, 1.0),)] * 10)
    assert "frozen_from" not in states[-1].scalars
    assert half.warnings(states[9]) == ()
    (warning,) = half.warnings(states[10])
    assert warning.startswith("still warming up after 10 of 20 rounds: no round had updates from two workers")


def test_a_warm_up_that_its_rule_has_not_ended_by_half_time_is_said_so() -> None:
    half = half_with(**AUTO)
    states = run(half, [ONWARD] * 10)
    assert "still getting somewhere" in half.warnings(states[10])[0]
    assert half_with(warmup_rounds=15).warnings(states[10]) == ()


# ---------------------------------------------------------------- a lower rate in place of the freeze

FUSED = replace(
    PLAIN, config={"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 16}, head="causal-lm"
)
SGD: dict[str, Any] = {"optimizer": "sgd", "weight_decay": 0.0, "batch_size": None}


def test_a_lower_rate_shortens_the_steps_of_queries_and_keys_alone_and_freezes_none() -> None:
    settings = {"warmup_rounds": 3, "lower_rate": 0.25}
    start = {name: values.detach().numpy() for name, values in PLAIN.model().named_parameters()}
    (_, whole), (_, warm), (_, slowed) = (
        one_task(method, of, round_number=number, **SGD)
        for method, of, number in (("fedavg", {}, 5), ("fedfrozen", settings, 2), ("fedfrozen", settings, 3))
    )
    assert slowed.upload.keys() == whole.upload.keys()
    assert all(np.array_equal(warm.upload[name], values) for name, values in whole.upload.items())
    roles = {block.name: block.role for block in PLAIN.blocks}
    for name, values in slowed.upload.items():
        share = 0.25 if roles[name] in ("query", "key") else 1.0
        np.testing.assert_allclose(values - start[name], share * (whole.upload[name] - start[name]), atol=1e-6)
    (_, adam), (_, less) = (
        one_task("fedfrozen", {**settings, **more}, round_number=3, optimizer="adamw")
        for more in ({}, {"scope": "v_head"})
    )
    assert {roles[name] for name in less.upload} == {"query", "key", "value", "head"}
    assert all(np.isfinite(values).all() for values in adam.upload.values())


def test_a_lower_rate_is_refused_where_queries_are_rows_of_a_matrix_with_others() -> None:
    def started(**settings: Any) -> State:
        facts = FUSED.facts()
        half = coordinator_half(MethodSpec(name="fedfrozen", settings=settings), facts)
        return initial_state(half, State(0, {}))

    started(warmup_rounds=2)
    with pytest.raises(UnsupportedRun, match=r"lower_rate is for whole tensors, and .*c_attn.*leave lower_rate out"):
        started(warmup_rounds=2, lower_rate=0.5)


# ---------------------------------------------------------------- kernel drift


def attention_of(values: Mapping[str, Array], data: Dataset) -> list[Tensor]:
    """The attention of each layer, by transformers itself."""
    model = PLAIN.model()
    model.set_attn_implementation("eager")
    for name, tensor in model.named_parameters():
        tensor.data.copy_(torch.from_numpy(values[name]))
    with torch.no_grad():
        found: list[Tensor] = list(model.eval()(data.tensors["pixel_values"][:20], output_attentions=True).attentions)
    return found


def drifting(scope: str, **more: Any) -> Result:
    settings = {"warmup_rounds": 1, "kernel_drift": True, "scope": scope}
    spec = {
        "rounds": 4, "method": {"name": "fedfrozen", "settings": settings},
        "training": {"learning_rate": 0.05, "batch_size": 4}, **more,
    }  # fmt: skip
    model = Weights(*untrained(PLAIN.config, "image-classification", seed=1))
    sites = {"a": images(24), "b": images(21), "c": images(9)}
    conditions = Conditions(keep_versions="all", away={"b": (2,)})
    return simulate(spec, model, sites, conditions=conditions)


def test_kernel_drift_is_the_l1_distance_of_attention_since_the_switch() -> None:
    result = drifting("all_but_qk")
    before, *after = (attention_of(result.arrays(number), images(24)) for number in (1, 2, 3))
    found = [
        {name: value for name, value in version.scalars.items() if name.startswith("kernel_drift.")}
        for version in result.versions
    ]
    # A site measures the version that it starts from. Site b, which was away at the switch, has nothing to compare,
    # and site c fewer examples than its policy asks for.
    assert found[:3] == [{}, {}, {"kernel_drift.0": 0.0, "kernel_drift.1": 0.0}]
    for told, now in zip(found[3:], after, strict=True):
        for layer in range(2):
            distance = (now[layer] - before[layer]).abs().sum() / before[layer].sum()
            assert told[f"kernel_drift.{layer}"] == pytest.approx(float(distance), rel=6e-3, abs=1e-6)
            assert distance > 0
    assert {name for name in result.kept("a") if name.startswith("kernel/")} == {
        "kernel/0", "kernel/1", "kernel/probes",
    }  # fmt: skip
    assert not result.kept("b")
    assert not result.kept("c")


def test_a_kernel_whose_inputs_stay_as_they_are_does_not_drift_and_measuring_changes_no_bit() -> None:
    frozen = drifting("v_only")
    assert frozen.versions[-1].scalars["kernel_drift.0"] == pytest.approx(0.0, abs=1e-6)
    assert frozen.versions[-1].scalars["kernel_drift.1"] > 1e-4
    method = {"name": "fedfrozen", "settings": {"warmup_rounds": 1, "scope": "v_only"}}
    plain, measured = drifting("v_only", method=method).arrays(), frozen.arrays()
    assert all(np.array_equal(plain[name], measured[name]) for name in plain)


def test_other_probes_than_at_the_switch_are_not_compared_with_it() -> None:
    spec = MethodSpec(name="fedfrozen", settings={"warmup_rounds": 0, "kernel_drift": True})
    half = coordinator_half(spec, PLAIN.facts())

    def measured(number: int, vault: Mapping[str, Array], data: Dataset) -> LocalResult:
        plan = half.plan_for(State(number, {}), WORKER)
        context = LocalTaskContext(PLAIN.model(), "image-classification", plan, PLAIN.blocks, vault)
        return worker_half(spec, PLAIN.facts()).measure(context, next(data.batches(8)))

    first = measured(0, {}, images())
    assert set(first.metrics.values()) == {0.0}
    told = measured(3, first.keep, images()).metrics
    assert told == first.metrics
    # Two such sites and one that lies about its drift, and its examples.
    claimed = [told, told, dict.fromkeys(told, 1.9)]
    sent = [Update(str(at), 10**at, {}, metrics) for at, metrics in enumerate(claimed)]
    assert {half.merge(State(3, {}), sent).scalars[name] for name in told} == {0.0}
    other = Dataset({**images().tensors, "pixel_values": images().tensors["pixel_values"] + 1})
    for vault, data in ((first.keep, other), ({}, images())):
        assert measured(3, vault, data) == LocalResult({})


def test_probes_pass_through_the_model_one_by_one_from_the_warm_up_on() -> None:
    # A batch of them might not fit into memory, and attention that cannot be measured would fail a long run late.
    spec = MethodSpec(name="fedfrozen", settings={"warmup_rounds": 1, "kernel_drift": True})
    plan = coordinator_half(spec, PLAIN.facts()).plan_for(State(0, {}), WORKER)
    model, seen = PLAIN.model(), list[int]()
    model.register_forward_pre_hook(lambda _, __, given: seen.append(len(given["pixel_values"])), with_kwargs=True)
    context = LocalTaskContext(model, "image-classification", plan, PLAIN.blocks, {})
    assert worker_half(spec, PLAIN.facts()).measure(context, next(images().batches(8))) == LocalResult({})
    assert seen == [1] * 8


def test_kernel_drift_is_refused_where_the_metrics_of_examples_are_not_sent() -> None:
    privacy = Privacy(epsilon=1.0, delta=1e-5, clip_norm=1.0)
    facts = replace(PLAIN.facts(), privacy=privacy)
    half = coordinator_half(MethodSpec(name="fedfrozen", settings={"kernel_drift": True}), facts)
    with pytest.raises(UnsupportedRun, match="neither differential privacy nor secure_sums lets it send"):
        initial_state(half, State(0, {}))
