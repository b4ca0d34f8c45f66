"""SAFL: what is chosen, what is sent, what is remembered, and what people are told."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from tessera.shared.aggregation.mean import average
from tessera.shared.methods.base import (
    CoordinatorHalf,
    LocalResult,
    MethodSpec,
    Participant,
    Plan,
    RunInfo,
    State,
    UnsupportedRun,
    Update,
)
from tessera.shared.methods.layer_choice import Candidates
from tessera.shared.methods.registry import coordinator_half, worker_half
from tessera.shared.methods.safl import beyond_the_sink, copies_in_training, pruned
from tessera.shared.methods.safl_settings import SAFLSettings
from tessera.shared.metrics.selections import Choices, selection_scalars
from tessera.shared.model.attention_stats import ByHead, LayerAttention, TaskTokens
from tessera.shared.model.blocks import Block, layers_of
from tessera.shared.model.spec import Head, Prompts
from tessera.shared.rounds.planning import initial_state
from tessera.shared.run_settings import Privacy, Training
from tessera.shared.tensors.lazy import Array, ArrayTensor, to_array
from tessera.shared.updates.codecs import pipeline
from tessera.shared.updates.update_file import TrainedBlock
from tessera.worker.data.dataset import Dataset
from tessera.worker.model.block_map import block_table
from tessera.worker.model.build import instantiate
from tessera.worker.training.batches import Batches
from tessera.worker.training.context import LocalTaskContext, largest
from tessera.worker.training.randomness import seed_everything
from tessera.worker.training.setup import TrainingSetup
from tessera.worker.training.trainer import Trainer
from tests.shared.metrics.test_selections import picked
from tests.support.duals import CLASSES, dual, pairs
from tests.support.tasks import CPU, VIT, images

SIX = {**VIT, "num_hidden_layers": 6}
BLOCKS = block_table(instantiate(SIX, "image-classification", seed=1))
LAYERS = [layer.name for layer in layers_of(BLOCKS)]
LAYER_BYTES = layers_of(BLOCKS)[0].nbytes
ALWAYS = {"classifier.weight", "classifier.bias", "vit.layernorm.weight", "vit.layernorm.bias"}
ALWAYS_BYTES = sum(block.nbytes for block in BLOCKS if block.name in ALWAYS)
TRAINING = Training(batch_size=8, learning_rate=0.05)
T5 = {
    "model_type": "t5", "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_decoder_layers": 2,
    "num_heads": 2, "vocab_size": 30, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
COHORT = [Participant(name, 24) for name in ("a/w", "b/w", "c/w")]


def coordinator(divide: Any = "participants", **settings: Any) -> CoordinatorHalf[SAFLSettings]:
    facts = RunInfo(BLOCKS, rounds=10, normalization=divide, training=TRAINING)
    return coordinator_half(MethodSpec(name="safl", settings=settings), facts)


def values(seed: int = 0) -> dict[str, ArrayTensor]:
    rng = np.random.default_rng(seed)
    return {b.name: ArrayTensor(rng.normal(size=b.shape).astype("f4")) for b in BLOCKS}


def state(number: int = 0, **metrics: float) -> State:
    return State(number, values(), scalars={name.replace("_at_", "."): value for name, value in metrics.items()})


def scored(number: int = 1) -> State:
    """A version after a profile round in which layers 4, 1 and 3 had the largest mean scores, in this order."""
    means = dict(zip(range(6), (0.1, 0.4, 0.2, 0.3, 0.5, 0.0), strict=True))
    return State(number, values(), scalars={f"score.{layer}": score for layer, score in means.items()})


def layers_in(names: Any) -> set[int]:
    found = {name for name in names if ".layers." in name}
    return {int(name.split(".layers.")[1].split(".")[0]) for name in found}


def asked(plan: Plan) -> set[int]:
    return layers_in(block.name for block in plan.upload.resolve(BLOCKS))


def plans(half: CoordinatorHalf[Any], at: State, seed: int = 1) -> dict[str, Plan]:
    return dict(half.plan(at, COHORT, Random(seed)))


@dataclass
class Watched(LocalTaskContext):
    """Notes each time that the site's data are looked at."""

    looks: list[str] = field(default_factory=list)

    def attention(self, batches: Any, tokens: TaskTokens) -> Any:
        self.looks.append("attention")
        return super().attention(batches, tokens)


@dataclass(frozen=True)
class Done:
    plan: Plan
    context: Watched
    result: LocalResult
    start: Mapping[str, Array]

    @property
    def layers(self) -> set[int]:
        return layers_in(self.result.upload)


def task(
    at: State | None = None,
    vault: Mapping[str, Array] | None = None,
    worker: Participant | None = None,
    sharpness: float = 1.0,
    **settings: Any,
) -> Done:
    """One worker's task on the six-layer ViT, from the plan to the harvest. Its queries and keys are scaled."""
    half, at = coordinator(**settings), at or state()
    plan = half.plan(half.start(at), [worker or COHORT[0]], Random(3))["a/w"]
    model = instantiate(SIX, "image-classification", seed=1)
    for name, parameter in model.named_parameters():
        parameter.data *= sharpness if ("q_proj" in name or "k_proj" in name) else 1.0
    context = Watched(model, "image-classification", plan, BLOCKS, dict(vault or {}))
    start = {block.name: context.read(block) for block in BLOCKS}
    facts = RunInfo(BLOCKS, rounds=10, training=TRAINING)
    worker = worker_half(MethodSpec(name="safl", settings=settings), facts)
    seed_everything(0)
    selected = worker.select(context, Batches(images(), TRAINING.batch_size, CPU))
    stats = Trainer(worker, context, TRAINING, TrainingSetup(CPU), lambda: None).train(
        worker.phases(context, selected), images(), 0
    )
    return Done(plan, context, worker.collect(context, selected, stats), start)


def sent(*layers: int, worker: str = "a/w", examples: int = 10, **metrics: float) -> Update:
    names = [b.name for b in BLOCKS if b.layer in layers and ".layers." in b.name]
    told = {name.replace("_at_", "."): value for name, value in metrics.items()}
    return Update(worker, examples, {name: values(9)[name] for name in names}, told)


# ---------------------------------------------------------------- how many


@pytest.mark.parametrize(
    ("settings", "count"),
    [({}, 2), ({"layers": 3}, 3), ({"share": 0.5}, 3), ({"share": 0.01}, 1), ({"share": 1.0}, 6)],
)
def test_k_is_a_number_or_a_share_and_a_third_if_nothing_is_said(settings: dict[str, Any], count: int) -> None:
    assert all(plan.scalars["layers"] == count for plan in plans(coordinator(**settings), state()).values())


def test_of_24_layers_8_are_chosen_by_default() -> None:
    model = instantiate({**VIT, "num_hidden_layers": 24}, "image-classification")
    half = coordinator_half(MethodSpec(name="safl"), RunInfo(block_table(model), rounds=1))
    assert half.plan_for(state(), COHORT[0]).scalars["layers"] == 8


def test_a_budget_of_bytes_counts_what_always_trains() -> None:
    for count in (1, 2, 3):
        budget = ALWAYS_BYTES + count * LAYER_BYTES
        for nbytes, k in ((budget, count), (budget - 1, count - 1)):
            if k:
                assert plans(coordinator(upload_bytes=nbytes), state())["a/w"].scalars["layers"] == k


def test_a_budget_too_small_for_a_layer_is_refused_with_what_one_needs() -> None:
    with pytest.raises(UnsupportedRun, match=f"has {ALWAYS_BYTES + LAYER_BYTES}"):
        coordinator(upload_bytes=ALWAYS_BYTES + LAYER_BYTES - 1).start(state())


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"layers": 1, "share": 0.5}, "give one of layers"),
        ({"score": "fixed"}, "give fixed if"),
        ({"fixed": ["x"]}, "give fixed if"),
        ({"score": "sink-corrected"}, "the sink itself"),
        ({"score": "random", "chooser": "vote"}, "set chooser to consensus"),
        ({"votes_by": "examples"}, "set chooser to vote"),
        ({"score": "random", "explore": 0.1}, "explore acts on a choice by data, .* set score to attention"),
        ({"score": "last", "smoothing": 0.5}, "smoothing acts on a choice by data"),
        ({"score": "fixed", "fixed": ["*.1"], "hysteresis": 0.5}, "hysteresis acts on a choice by data"),
        ({"score": "random", "explore_after": 9}, "explore_after acts on a choice by data"),
        ({"explore_after": 9, "pick_every": 4}, "leave out one of them"),
        ({"score": "first", "pick_every": 4}, "leave out pick_every, or set score to random"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        SAFLSettings.model_validate(wrong)


def test_more_layers_than_there_are_and_names_of_none_are_refused() -> None:
    with pytest.raises(UnsupportedRun, match="of 6 layers, 7"):
        coordinator(layers=7).start(state())
    with pytest.raises(UnsupportedRun, match=r"no layer is called \*\.6; there are vit\.layers\.0"):
        coordinator(score="fixed", fixed=["*.1", "*.6"]).start(state())


def test_a_slow_or_small_worker_trains_fewer_layers_and_the_others_the_same() -> None:
    half = coordinator(layers=4, upload_seconds=10, memory_share=0.5)
    model_bytes = sum(block.nbytes for block in BLOCKS)
    two = ALWAYS_BYTES + 2 * LAYER_BYTES
    cohort = [
        Participant("fast", 1, {"upload_bytes_per_second": 1e9, "memory_bytes": 1e12}),
        Participant("says nothing", 1),
        Participant("slow", 1, {"upload_bytes_per_second": two / 10}),
        # AdamW: of what trains a gradient and two moments, beside the model, in half of the memory.
        Participant("small", 1, {"memory_bytes": 2 * (model_bytes + 3 * two)}),
        Participant("tiny", 1, {"memory_bytes": 100}),
    ]
    found = {name: plan.scalars["layers"] for name, plan in half.plan(state(), cohort, Random(1)).items()}
    assert found == {"fast": 4, "says nothing": 4, "slow": 2, "small": 2, "tiny": 0}


def test_a_worker_without_room_still_trains_a_layer_if_nothing_trains_anyway() -> None:
    half = coordinator(upload_seconds=1, always=[])
    plan = half.plan_for(state(), Participant("tiny", 1, {"upload_bytes_per_second": 1}))
    assert plan.scalars["layers"] == 1


def test_a_worker_that_is_given_no_layer_looks_at_nothing_and_sends_what_always_trains() -> None:
    half = coordinator(upload_seconds=1)
    plan = half.plan_for(state(), Participant("tiny", 1, {"upload_bytes_per_second": 1}))
    context = Watched(instantiate(SIX, "image-classification"), "image-classification", plan, BLOCKS)
    worker = worker_half(MethodSpec(name="safl", settings={"upload_seconds": 1}), half.run)
    selected = worker.select(context, Batches(images(), 8, CPU))
    assert {block.name for block in BLOCKS if selected.holds(block)} == ALWAYS
    assert not context.looks


@pytest.mark.parametrize(
    ("training", "copies"),
    [({"optimizer": "adamw"}, 3), ({"optimizer": "sgd"}, 1), ({"optimizer": "sgd", "momentum": 0.9}, 2)],
)
def test_an_optimizer_keeps_so_many_copies_of_what_trains(training: dict[str, Any], copies: int) -> None:
    assert copies_in_training(Training.model_validate(training)) == copies


# ---------------------------------------------------------------- which, by a worker's own data


def test_a_worker_trains_and_sends_the_layers_with_the_largest_mass_and_what_always_trains() -> None:
    done = task(layers=2)
    fresh = LocalTaskContext(
        instantiate(SIX, "image-classification", seed=1), "image-classification", done.plan, BLOCKS
    )
    attention = fresh.attention([*islice(Batches(images(), 8, CPU), 4)], TaskTokens())
    ranked = sorted(LAYERS, key=lambda name: -attention[name].mass.mean())
    assert done.layers == layers_in(f"{name}." for name in ranked[:2])
    wanted = {b.name for b in BLOCKS if b.layer in done.layers and ".layers." in b.name} | ALWAYS
    assert set(done.result.upload) == wanted
    for block in BLOCKS:
        same = np.array_equal(done.context.read(block), done.start[block.name])
        # A key's bias moves no probability, so its gradient is zero.
        assert same == (block.name not in wanted) or "k_proj.bias" in block.name, block.name


def test_the_sink_corrected_score_is_the_share_of_what_the_first_token_leaves() -> None:
    layer = LayerAttention(np.array([0.1, 0.2, 0.5]), np.array([0.5, 0.0, 1.0]), np.zeros(1), 1.0)
    np.testing.assert_allclose(beyond_the_sink(layer), [0.2, 0.2, 1.0])
    assert len(task(layers=2, score="sink-corrected", tokens={"where": "last"}).layers) == 2


@pytest.mark.parametrize("score", ["gradient-norm", "fisher"])
def test_gradient_scores_choose_the_layers_whose_gradient_is_largest(score: str) -> None:
    done = task(layers=2, score=score, profile_batches=1)
    model = instantiate(SIX, "image-classification", seed=1).eval()
    batch = next(iter(images().batches(8)))
    rows = [batch] if score == "gradient-norm" else [{k: v[i : i + 1] for k, v in batch.items()} for i in range(8)]
    squares: Counter[int] = Counter()
    for row in rows:
        model.zero_grad()
        model(**row).loss.backward()
        for name, parameter in model.named_parameters():
            if ".layers." in name and parameter.grad is not None:
                squares[int(name.split(".")[2])] += float(parameter.grad.square().sum())
    assert done.layers == {layer for layer, _ in squares.most_common(2)}
    assert not done.context.looks


def test_only_some_roles_of_a_chosen_layer_train_if_the_run_says_so() -> None:
    done = task(layers=2, within=["value", "output"], always=[])
    roles = {block.name: block.role for block in BLOCKS}
    assert {roles[name] for name in done.result.upload} == {"value", "output"}


# ---------------------------------------------------------------- which, by controls


def test_first_last_and_fixed_layers_are_named_in_the_plan_and_nobody_looks_at_data() -> None:
    wanted: dict[str, tuple[dict[str, Any], set[int]]] = {
        "first": ({"layers": 2}, {0, 1}),
        "last": ({"layers": 2}, {4, 5}),
        "fixed": ({"fixed": ["*.1", "vit.layers.4"]}, {1, 4}),
    }
    for score, (settings, layers) in wanted.items():
        done = task(score=score, **settings)
        assert asked(done.plan) == done.layers == layers
        assert not done.context.looks


def test_random_layers_differ_by_worker_and_by_draw_and_are_of_the_given_number() -> None:
    half = coordinator(score="random", layers=2)
    draws = [asked(plan) for seed in range(8) for plan in plans(half, state(), seed).values()]
    assert all(len(draw) == 2 for draw in draws)
    assert len({frozenset(draw) for draw in draws}) > 5
    assert plans(half, state(), 1) == plans(half, state(), 1)


def test_random_layers_by_consensus_are_the_same_for_all() -> None:
    half = coordinator(score="random", layers=2, chooser="consensus")
    for seed in range(4):
        assert len({frozenset(asked(plan)) for plan in plans(half, state(), seed).values()}) == 1


# ---------------------------------------------------------------- averaging over random choices


def test_random_layers_are_included_with_probability_k_over_l() -> None:
    half = coordinator("inverse-probability", score="random", layers=2)
    initial_state(half, state())
    chances = {half.inclusion_probability(block) for block in BLOCKS if block.layer is not None}
    assert chances == {2 / 6}
    assert {half.inclusion_probability(block) for block in BLOCKS if block.name in ALWAYS} == {1.0}


def test_over_all_random_choices_the_inverse_probability_step_is_the_full_one() -> None:
    half = coordinator("inverse-probability", score="random", layers=2)
    block = next(block for block in BLOCKS if block.layer == 3)
    before, after = {block.name: ArrayTensor(np.zeros(block.shape, "f4"))}, values(4)[block.name]
    steps, draws = np.zeros(block.shape), 800
    for seed in range(draws):
        plan = half.plan(state(), COHORT[:1], Random(seed))["a/w"]
        senders = [(10.0, {block.name: after} if plan.upload.holds(block) else {})]
        moved = average(before, senders, "inverse-probability", lambda _: half.inclusion_probability(block))
        steps += sum(to_array(tensor) for tensor in moved.values())
    # The picks are binomial: their number has a standard deviation of 5 % here.
    np.testing.assert_allclose(steps / draws, after.values, rtol=0.15, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"score": "attention"}, "is unknown: set score to random"),
        ({"score": "fisher"}, "is unknown: set score to random"),
        ({"score": "random", "prune": 0.5}, "leave out prune"),
        ({"score": "random", "upload_seconds": 5.0}, "upload_seconds"),
        ({"score": "random", "memory_share": 0.5}, "memory_share"),
        ({"score": "random", "pick_every": 3}, "differs by round: leave it out"),
    ],
)
def test_inverse_probability_is_refused_where_nobody_knows_the_law(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(UnsupportedRun, match=why):
        initial_state(coordinator("inverse-probability", **settings), state())


def test_layers_that_are_always_chosen_are_always_included() -> None:
    initial_state(half := coordinator("inverse-probability", score="last", layers=2), state())
    assert {half.inclusion_probability(block) for block in BLOCKS if block.layer == 5} == {1.0}


# ---------------------------------------------------------------- several stacks


def stacked(*sizes: int) -> Candidates:
    blocks = [
        Block(tensor=f"{stack}.{i}.q.weight", role="query", layer=i, shape=(2,), dtype="F32")
        for stack, size in zip("ab", sizes, strict=True)
        for i in range(size)
    ]
    return SAFLSettings().candidates(blocks)


def test_each_stack_gives_its_share_of_the_layers() -> None:
    # Ranks lie at (rank + 1/2) / size: of 12 and 6 layers, two of the first for one of the second.
    both = stacked(12, 6)
    assert [both.quotas(k) for k in (0, 1, 2, 3, 6, 9, 18)] == [
        [0, 0], [1, 0], [1, 1], [2, 1], [4, 2], [6, 3], [12, 6],
    ]  # fmt: skip
    assert stacked(2, 2).quotas(1) == [1, 0]


def test_layers_of_two_stacks_are_ranked_within_their_own() -> None:
    both = stacked(2, 2)
    chosen = both.top({"a.0": 0.9, "a.1": 0.8, "b.0": 0.1, "b.1": 0.2}, 2)
    assert [layer.name for layer in chosen] == ["a.0", "b.1"]
    assert both.labels == {"a.0": "0.0", "a.1": "0.1", "b.0": "1.0", "b.1": "1.1"}


def test_a_layer_without_attention_is_no_candidate_for_attention_and_one_for_gradients() -> None:
    blocks = [
        Block(tensor="h.0.q.weight", role="query", layer=0, shape=(2,), dtype="F32"),
        Block(tensor="h.1.mlp.weight", role="mlp", layer=1, shape=(2,), dtype="F32"),
    ]
    assert [layer.index for layer in SAFLSettings().candidates(blocks).layers] == [0]
    assert [layer.index for layer in SAFLSettings(score="fisher").candidates(blocks).layers] == [0, 1]


# ---------------------------------------------------------------- consensus


def test_consensus_begins_with_a_round_that_trains_and_sends_nothing_but_scores() -> None:
    done = task(chooser="consensus", layers=2)
    assert done.plan.stage == "profile"
    assert not done.result.upload
    assert {name for name in done.result.metrics if name.startswith("score.")} == {f"score.{i}" for i in range(6)}
    assert all(np.array_equal(done.context.read(b), done.start[b.name]) for b in BLOCKS)
    coordinator(chooser="consensus").check(done.plan, 24, done.result.metrics)


def test_consensus_weighs_reported_scores_by_examples_and_all_train_the_best() -> None:
    half = coordinator(chooser="consensus", layers=2)
    updates = [
        sent(worker="a/w", examples=30, **{f"score_at_{i}": s for i, s in enumerate((0.1, 0.9, 0.2, 0.3, 0.0, 0.4))}),
        sent(worker="b/w", examples=10, **{f"score_at_{i}": s for i, s in enumerate((0.9, 0.1, 0.2, 0.7, 0.0, 0.4))}),
    ]
    after = half.merge(state(), updates)
    # (30 x 0.1 + 10 x 0.9) / 40 and so on.
    means = [after.scalars[f"score.{i}"] for i in range(6)]
    np.testing.assert_allclose(means, [0.3, 0.7, 0.2, 0.4, 0.0, 0.4])
    assert [asked(plan) for plan in plans(half, after).values()] == [{1, 3}] * 3


def test_consensus_asks_for_fewer_of_the_same_layers_where_a_worker_is_slow() -> None:
    half = coordinator(chooser="consensus", layers=3, upload_seconds=1)
    slow = Participant("slow", 1, {"upload_bytes_per_second": ALWAYS_BYTES + LAYER_BYTES})
    found = half.plan(scored(), [COHORT[0], slow], Random(1))
    assert {name: asked(plan) for name, plan in found.items()} == {"a/w": {1, 3, 4}, "slow": {4}}


def test_scores_are_measured_anew_every_so_many_rounds() -> None:
    half = coordinator(chooser="consensus", profile_every=3)
    due = [plans(half, scored(number))["a/w"].scalars["profile"] for number in range(1, 8)]
    assert due == [0, 0, 1, 0, 0, 1, 0]
    told = task(scored(3), chooser="consensus", profile_every=3).result.metrics
    assert set(told) == {"score_spread", *(f"{what}.{i}" for what in ("score", "entropy") for i in range(6))}
    assert not task(scored(4), chooser="consensus", profile_every=3).context.looks


@pytest.mark.parametrize("score", [None, float("nan"), -0.1, 1.1])
def test_a_score_that_is_missing_or_impossible_is_refused(score: float | None) -> None:
    half = coordinator(chooser="consensus")
    plan = plans(half, scored(1))["a/w"]
    metrics = dict.fromkeys((f"score.{i}" for i in range(6)), 0.5)
    half.check(plan, 24, metrics)
    wrong = {name: value for name, value in {**metrics, "score.2": score}.items() if value is not None}
    with pytest.raises(ValueError, match=r"the score of vit\.layers\.2 is"):
        half.check(plan, 24, wrong)


# ---------------------------------------------------------------- every n rounds, by each worker


def test_a_choice_stands_until_the_worker_profiles_again() -> None:
    settings = {"layers": 2, "profile_every": 3}
    first = task(state(0), **settings)
    kept = first.result.keep
    second = task(state(1), vault=kept, **settings)
    assert (first.context.looks, second.context.looks) == (["attention"], [])
    assert second.layers == first.layers
    np.testing.assert_array_equal(second.result.keep["safl/chosen"], kept["safl/chosen"])
    assert task(state(3), vault=kept, **settings).context.looks == ["attention"]


def test_a_worker_that_missed_the_profile_round_or_is_given_another_k_profiles_at_once() -> None:
    assert task(state(1), layers=2, profile_every=3).context.looks == ["attention"]
    other = {"safl/chosen": np.array([0, 1, 2])}
    assert task(state(1), vault=other, layers=2, profile_every=3).context.looks == ["attention"]


def test_a_choice_ends_with_its_rounds_although_the_worker_missed_the_profile_round() -> None:
    settings = {"layers": 2, "profile_every": 3}
    kept = task(state(0), **settings).result.keep
    assert not task(state(2), vault=kept, **settings).context.looks
    late = task(state(4), vault=kept, **settings)
    assert late.context.looks == ["attention"]
    assert not task(state(5), vault=late.result.keep, **settings).context.looks


def test_a_worker_that_has_no_room_any_more_leaves_its_old_choice_alone_and_keeps_it() -> None:
    settings = {"layers": 2, "profile_every": 3, "upload_seconds": 1.0}
    kept = {"safl/chosen": np.array([1, 4])}
    poor = Participant("a/w", 24, {"upload_bytes_per_second": 1.0})
    done = task(state(1), vault=kept, worker=poor, **settings)
    assert (done.layers, done.context.looks) == (set(), [])
    np.testing.assert_array_equal(done.result.keep["safl/chosen"], [1, 4])


def test_nothing_is_kept_where_every_round_is_profiled() -> None:
    assert not task(layers=2).result.keep


# ---------------------------------------------------------------- layers that no score chooses


def test_every_layer_is_sent_within_so_many_rounds_whatever_attention_says() -> None:
    settings = {"layers": 2, "pick_every": 4, "starved_after": 3}
    at, sent_in = state(), list[set[int]]()
    for _ in range(6):
        done = task(at, **settings)
        sent_in.append(done.layers)
        at = coordinator(**settings).merge(at, [sent(*done.layers)])
        assert coordinator(**settings).warnings(at) == []
    assert all(len(layers) == 2 for layers in sent_in)
    assert all(set().union(*sent_in[first : first + 4]) == set(range(6)) for first in range(3))


def test_drawn_layers_are_in_the_plan_and_the_worker_fills_the_other_places_by_its_scores() -> None:
    plain, drawn = task(layers=3), task(state(2), layers=3, pick_every=6)
    assert {name for name in drawn.plan.scalars if name.startswith("drawn")} == {"drawn.3"}
    assert 3 in drawn.layers
    # The two best of the three, of which one may be the drawn layer itself.
    assert len(drawn.layers & plain.layers) >= 2
    assert len(drawn.layers) == 3


def test_worker_whose_places_are_all_drawn_looks_at_nothing() -> None:
    done = task(layers=1, pick_every=6)
    assert done.layers == {1}
    assert not done.context.looks
    # The heads' masses are needed whatever trains.
    assert task(layers=1, pick_every=6, prune=0.5).context.looks == ["attention"]


def waited() -> State:
    """A version after round 5, whose layers 0 to 5 were last in an update of round 1, 5, 5, 0, 1 and 2."""
    scores = {f"score.{layer}": 6.0 - layer for layer in range(6)}
    picks = {f"last_pick.{layer}": float(number) for layer, number in enumerate((1, 5, 5, 0, 1, 2))}
    return State(5, values(), scalars={**scores, **picks})


def test_layers_that_no_update_had_for_long_enough_are_tried_by_all_sites() -> None:
    # Before round 6, layers 3, 0 and 4 were in none of the last 4 updates; layer 5 was in none of the last 3.
    half = coordinator(layers=3, explore_after=4)
    assert [plan.scalars for plan in plans(half, waited()).values()] == [
        {"profile": 1.0, "layers": 3.0, "drawn.0": 1.0, "drawn.3": 1.0, "drawn.4": 1.0}
    ] * 3
    assert "drawn.5" in plans(coordinator(layers=4, explore_after=3), waited())["a/w"].scalars
    common = coordinator(chooser="consensus", layers=3, explore_after=5)
    # Only layer 3 has waited for 5 rounds; the scores choose 0 and 1.
    assert [asked(plan) for plan in plans(common, waited()).values()] == [{0, 1, 3}] * 3


def test_attention_that_never_changes_leaves_no_layer_out() -> None:
    settings = {"layers": 2, "explore_after": 3, "starved_after": 2}
    at, sent_in = state(), list[set[int]]()
    for _ in range(7):
        done = task(at, **settings)
        sent_in.append(done.layers)
        at = coordinator(**settings).merge(at, [sent(*done.layers)])
        assert coordinator(**settings).warnings(at) == []
    favourites = sent_in[0]
    # The four other layers are due together after 3 rounds, take two rounds, and leave the next to the favourites.
    assert sent_in[:3] == [favourites] * 3
    assert sent_in[3] | sent_in[4] == set(range(6)) - favourites
    assert sent_in[5:] == [favourites] * 2


def test_layer_that_no_site_could_train_in_its_round_is_tried_in_the_next_one_too() -> None:
    half = coordinator(layers=1, explore_after=6)
    before = State(6, values(), scalars={"last_pick.2": 5.0, "last_pick.3": 6.0})

    def tried(at: State, seed: int = 1) -> set[str]:
        return {name for plan in plans(half, at, seed).values() for name in plan.scalars if name.startswith("drawn")}

    assert tried(before) == {"drawn.0"}
    # An abandoned attempt changes no version, so that the next one tries the same, whatever it draws.
    assert tried(before, seed=2) == {"drawn.0"}
    # The round's only update comes from a worker without room for a layer.
    missed = half.merge(before, [sent()])
    assert tried(missed) == {"drawn.0"}
    assert tried(half.merge(missed, [sent(0)])) == {"drawn.1"}


def test_round_of_all_layers_has_none_to_try() -> None:
    plain, half = coordinator(layers=6), coordinator(layers=6, explore_after=1)
    initial_state(half, state())
    at = half.merge(state(), [sent(*range(6))])
    assert plans(half, at) == plans(plain, at)


def test_fewer_rounds_than_let_a_score_choose_are_refused() -> None:
    initial_state(coordinator(layers=2, explore_after=3), state())
    with pytest.raises(UnsupportedRun, match=r"explore_after is 2, .* raise explore_after to 3"):
        initial_state(coordinator(layers=2, explore_after=2), state())


def test_explored_layers_differ_by_worker_and_are_the_same_in_a_repeated_attempt() -> None:
    half = coordinator(layers=2, explore=0.9)
    draws = [
        frozenset(name for name in plan.scalars if name.startswith("drawn"))
        for seed in range(8)
        for plan in plans(half, state(), seed).values()
    ]
    assert len(set(draws)) > 5
    assert plans(half, state(), 1) == plans(half, state(), 1)


@pytest.mark.parametrize("chooser", ["consensus", "vote"])
def test_common_choice_is_explored_alike_by_all(chooser: str) -> None:
    half = coordinator(chooser=chooser, layers=2, explore=0.9, pick_every=6)
    found = [plans(half, replace(voted(2), round=2), seed) for seed in range(6)]
    assert all(len({frozenset(asked(plan)) for plan in each.values()}) == 1 for each in found)
    # Round 3 trains layer 3 by the calendar.
    assert all(3 in asked(each["a/w"]) and len(asked(each["a/w"])) == 2 for each in found)
    assert len({frozenset(asked(each["a/w"])) for each in found}) > 2


def test_random_layers_under_a_calendar_are_of_the_given_number() -> None:
    half = coordinator(score="random", layers=2, pick_every=3)
    for number in range(3):
        for plan in plans(half, state(number)).values():
            assert asked(plan) == {(number + 1) % 3, (number + 1) % 3 + 3}


def test_calendar_that_does_not_fit_into_a_round_is_refused() -> None:
    with pytest.raises(UnsupportedRun, match="raise pick_every to 3"):
        initial_state(coordinator(layers=2, pick_every=2), state())


def test_slow_worker_takes_no_more_drawn_layers_than_it_has_room_for() -> None:
    half = coordinator(layers=4, pick_every=2, upload_seconds=1.0)
    poor = Participant("a/w", 24, {"upload_bytes_per_second": ALWAYS_BYTES + LAYER_BYTES})
    plan = half.plan(state(), [poor], Random(1))["a/w"]
    assert plan.scalars == {"profile": 1.0, "layers": 1.0, "drawn.1": 1.0}
    assert half.largest_update(plan) == ALWAYS_BYTES + LAYER_BYTES


def test_drawn_layers_train_within_roles_and_budget() -> None:
    settings = {"upload_bytes": ALWAYS_BYTES + 2 * LAYER_BYTES, "pick_every": 3, "within": ["value", "output"]}
    half, done = coordinator(**settings), task(**settings)
    roles = {block.name: block.role for block in BLOCKS}
    assert {roles[name] for name in set(done.result.upload) - ALWAYS} == {"value", "output"}
    assert {1, 4} <= done.layers
    assert sum(array.nbytes for array in done.result.upload.values()) <= half.largest_update(done.plan)


def test_under_secure_sums_random_layers_keep_a_calendar_and_votes_are_refused() -> None:
    facts = RunInfo(BLOCKS, rounds=10, training=TRAINING, secure_sums=True)
    chosen = {"score": "random", "chooser": "consensus", "layers": 2, "pick_every": 3}
    half = coordinator_half(MethodSpec(name="safl", settings=chosen), facts)
    initial_state(half, state())
    assert [asked(plan) for plan in plans(half, state()).values()] == [{1, 4}] * 3
    after = half.merge(state(), [sent(1, 4, worker="sum")])
    assert [after.scalars.get(f"last_pick.{layer}", 0) for layer in range(6)] == [0, 1, 0, 0, 1, 0]
    with pytest.raises(UnsupportedRun, match="set score to one that reads no data"):
        initial_state(coordinator_half(MethodSpec(name="safl", settings={"chooser": "vote"}), facts), state())


# ---------------------------------------------------------------- steadier choices of a worker


def profiled(scores: list[float], monkeypatch: pytest.MonkeyPatch, **about: Any) -> Done:
    """Return a task whose layers have these scores by gradient norm."""
    norms = dict(zip(LAYERS, scores, strict=True))
    monkeypatch.setattr(LocalTaskContext, "gradient_norms", lambda *_: norms)
    return task(score="gradient-norm", layers=2, **about)


def test_scores_of_a_worker_are_an_exponential_mean_over_its_own_profiles(monkeypatch: pytest.MonkeyPatch) -> None:
    first = profiled([4, 2, 1, 1, 1, 0], monkeypatch, smoothing=0.5)
    assert first.layers == {0, 1}
    second = profiled([0, 0, 2, 5, 0, 0], monkeypatch, smoothing=0.5, vault=first.result.keep)
    # Half of each: 2, 1, 1.5, 3, 0.5, 0.
    np.testing.assert_allclose(second.result.keep["safl/scores"], [2, 1, 1.5, 3, 0.5, 0])
    assert second.layers == {0, 3}
    # The same task again, from the same vault, gives the same; a site that missed rounds goes on from its own last.
    again = profiled([0, 0, 2, 5, 0, 0], monkeypatch, smoothing=0.5, vault=first.result.keep, at=state(7))
    np.testing.assert_array_equal(again.result.keep["safl/scores"], second.result.keep["safl/scores"])


def test_chosen_layers_of_a_worker_keep_their_places_by_the_hysteresis(monkeypatch: pytest.MonkeyPatch) -> None:
    first = profiled([4, 2, 1, 1, 1, 0], monkeypatch, hysteresis=0.5)
    assert first.layers == {0, 1}
    near = profiled([4, 2, 1, 2.9, 1, 0], monkeypatch, hysteresis=0.5, vault=first.result.keep)
    assert near.layers == {0, 1}
    far = profiled([4, 2, 1, 3.1, 1, 0], monkeypatch, hysteresis=0.5, vault=near.result.keep)
    assert far.layers == {0, 3}
    assert profiled([4, 2, 1, 2.9, 1, 0], monkeypatch, vault=first.result.keep).layers == {0, 3}


def test_explored_layers_do_not_hold_places(monkeypatch: pytest.MonkeyPatch) -> None:
    first = profiled([4, 2, 1, 1, 1, 0], monkeypatch, hysteresis=0.5, pick_every=6, at=state(4))
    assert first.layers == {0, 5}
    np.testing.assert_array_equal(first.result.keep["safl/chosen"], [0, 1])


# ---------------------------------------------------------------- votes


def voted(number: int = 1) -> State:
    """A version after a round in which layer 4 had most votes, then 1 and 3 alike."""
    shares = dict(zip(range(6), (0.0, 1 / 3, 0.0, 1 / 3, 1.0, 1 / 3), strict=True))
    scores = {f"score.{layer}": share for layer, share in shares.items()}
    return State(number, values(), scalars={**scores, **{f"vote.{layer}": share for layer, share in shares.items()}})


def test_vote_begins_with_a_round_that_sends_nothing_but_ballots() -> None:
    done = task(chooser="vote", layers=2)
    assert done.plan.stage == "profile"
    assert not done.result.upload
    votes = {name: value for name, value in done.result.metrics.items() if name.startswith("vote.")}
    assert set(votes) == {f"vote.{layer}" for layer in range(6)}
    assert {int(name[5:]) for name, vote in votes.items() if vote} == task(layers=2).layers
    assert not any(name.startswith("score.") for name in done.result.metrics)
    coordinator(chooser="vote", layers=2).check(done.plan, 24, done.result.metrics)


def test_all_train_the_elected_layers_and_vote_again() -> None:
    half = coordinator(chooser="vote", layers=2)
    assert [asked(plan) for plan in plans(half, voted()).values()] == [{1, 4}] * 3
    done = task(voted(), chooser="vote", layers=2)
    assert done.layers == {1, 4}
    assert sum(value for name, value in done.result.metrics.items() if name.startswith("vote.")) == 2
    assert not {"safl/chosen", "safl/scores"} & set(done.result.keep)


def test_slow_worker_trains_the_first_of_the_elected_layers_and_has_a_whole_ballot() -> None:
    settings = {"chooser": "vote", "layers": 2, "upload_seconds": 1.0}
    poor = Participant("a/w", 24, {"upload_bytes_per_second": ALWAYS_BYTES + LAYER_BYTES})
    done = task(voted(), worker=poor, **settings)
    assert done.layers == {4}
    coordinator(**settings).check(done.plan, 24, done.result.metrics)


@pytest.mark.parametrize(("chooser", "kind"), [("vote", "vote"), ("consensus", "score")])
def test_report_that_no_plan_asked_for_is_checked_as_any_other(chooser: str, kind: str) -> None:
    """A site that sent a huge number in a round without profiles would decide alone."""
    half = coordinator(chooser=chooser, layers=2, profile_every=3)
    plan = plans(half, voted(1))["a/w"]
    assert not plan.scalars["profile"]
    half.check(plan, 24, {})
    half.check(plan, 24, {f"{kind}.{layer}": float(layer < 2) for layer in range(6)})
    with pytest.raises(ValueError, match=r"must be 0 or 1|must be a number from 0 to 1"):
        half.check(plan, 24, {f"{kind}.0": 1000.0})


def test_ballot_with_too_many_votes_is_rejected() -> None:
    half = coordinator(chooser="vote", layers=2)
    plan = plans(half, voted())["a/w"]
    with pytest.raises(ValueError, match="6 votes"):
        half.check(plan, 24, {f"vote.{layer}": 1.0 for layer in range(6)})
    with pytest.raises(ValueError, match="is None"):
        half.check(plan, 24, {})


def test_between_elections_no_ballot_is_asked_for() -> None:
    settings = {"chooser": "vote", "layers": 2, "profile_every": 3}
    done = task(voted(4), **settings)
    assert not done.context.looks
    coordinator(**settings).check(done.plan, 24, done.result.metrics)
    after = coordinator(**settings).merge(voted(4), [sent(1, 4)])
    assert after.scalars["vote.4"] == 1.0


def test_votes_of_a_round_elect_the_layers_of_the_next() -> None:
    half = coordinator(chooser="vote", layers=2, votes_by="examples")
    updates = [
        sent(worker=name, examples=examples, **{f"vote_at_{i}": float(i in layers) for i in range(6)})
        for name, examples, layers in (("a/w", 10, {2, 3}), ("b/w", 20, {2, 3}), ("liar/w", 10**9, {0, 1}))
    ]
    after = half.merge(state(), updates)
    assert [after.scalars[f"vote.{i}"] for i in range(6)] == [0.4, 0.4, 0.6, 0.6, 0, 0]
    assert [asked(plan) for plan in plans(half, after).values()] == [{2, 3}] * 3


# ---------------------------------------------------------------- pruning


def test_rows_of_the_smallest_change_get_their_old_value_back() -> None:
    before = np.zeros((4, 2), np.float32)
    after = np.array([[3, 0], [0, 1], [2, 2], [0.5, 0]], np.float32)
    # Squared changes are 9, 1, 8 and 1/4; half of four rows is two.
    np.testing.assert_array_equal(pruned(before, after, 0.5, None), [[3, 0], [0, 0], [2, 2], [0, 0]])
    np.testing.assert_array_equal(pruned(before, after, 0.49, None), [[3, 0], [0, 1], [2, 2], [0, 0]])
    assert after[1, 1] == 1


def test_rows_of_the_heads_with_the_least_mass_come_first_whatever_their_change() -> None:
    before, after = np.zeros((4, 1), np.float32), np.array([[9], [1], [8], [7]], np.float32)
    heads = ByHead(0, np.array([0.2, 0.2, 0.1, 0.1]))
    # Both rows of the second head, and of the first the one that changed less.
    np.testing.assert_array_equal(pruned(before, after, 0.75, heads).ravel(), [9, 0, 0, 0])


def test_of_an_output_projection_columns_are_pruned() -> None:
    before, after = np.zeros((2, 4), np.float32), np.ones((2, 4), np.float32)
    found = pruned(before, after, 0.5, ByHead(1, np.array([0.1, 0.1, 0.2, 0.2])))
    np.testing.assert_array_equal(found, [[0, 0, 1, 1], [0, 0, 1, 1]])
    assert found.shape == (2, 4)


@pytest.mark.parametrize("prune_by", ["attention", "magnitude"])
def test_so_large_a_share_of_each_matrix_in_a_layer_stays_as_it_was(prune_by: str) -> None:
    done = task(layers=2, prune=0.375, prune_by=prune_by)
    by_name = {block.name: block for block in BLOCKS}
    for name, array in done.result.upload.items():
        axis = 1 if prune_by == "attention" and "attention.o_proj.weight" in name else 0
        moved = (np.moveaxis(array != done.start[name], axis, 0)).reshape(array.shape[axis], -1).any(1)
        if ".layers." in name and array.ndim > 1:
            assert (~moved).sum() == int(0.375 * array.shape[axis]), by_name[name]
        elif "k_proj.bias" not in name:
            assert moved.any(), name


def test_by_attention_it_is_the_head_of_the_least_mass_that_is_pruned() -> None:
    done = task(layers=1, prune=0.5)
    [layer] = done.layers
    fresh = LocalTaskContext(
        instantiate(SIX, "image-classification", seed=1), "image-classification", done.plan, BLOCKS
    )
    heads = fresh.attention(list(islice(Batches(images(), 8, CPU), 4)), TaskTokens())[f"vit.layers.{layer}"].heads
    name = f"vit.layers.{layer}.attention.q_proj.weight"
    moved = (done.result.upload[name] != done.start[name]).any(1)  # two heads of eight rows
    kept = int(heads.argmax())
    assert moved[8 * kept : 8 * kept + 8].all()
    assert moved.sum() == 8


def test_pruned_rows_cost_almost_nothing_on_the_wire() -> None:
    rng = np.random.default_rng(0)
    before = rng.normal(size=(768, 768)).astype(np.float32)
    after = before + 1e-4 * rng.normal(size=before.shape).astype(np.float32)

    def nbytes(values: Array) -> int:
        block = Block(tensor="w", role="mlp", shape=before.shape, dtype="F32")
        encoded = pipeline.encode(pipeline.LOSSLESS, TrainedBlock(block, ArrayTensor(values), ArrayTensor(before)))
        return sum(len(part) for part in encoded)

    whole, half = nbytes(after), nbytes(pruned(before, after, 0.5, None))
    columns = nbytes(pruned(before, after, 0.5, ByHead(1, np.repeat(np.arange(12) / 100, 64))))
    assert half < 0.51 * whole
    assert columns < 0.53 * whole


def test_heads_are_remembered_between_profiles_for_pruning() -> None:
    settings = {"layers": 1, "prune": 0.5, "profile_every": 2}
    first = task(state(0), **settings)
    second = task(state(1), vault=first.result.keep, **settings)
    assert not second.context.looks
    for name, array in first.result.upload.items():
        np.testing.assert_array_equal(second.result.upload[name], array)


def test_the_controls_are_pruned_by_attention_too_which_is_then_measured() -> None:
    done = task(score="last", layers=2, prune=0.5)
    assert done.context.looks == ["attention"]
    assert not task(score="last", layers=2, prune=0.5, prune_by="magnitude").context.looks


# ---------------------------------------------------------------- what is remembered, and told to people


def test_picks_are_counted_by_layer_and_the_last_is_dated() -> None:
    half = coordinator()
    after = half.merge(half.merge(state(), [sent(0, 2), sent(2, worker="b/w")]), [sent(5)])
    picks = {layer: after.scalars[f"picks.{layer}"] for layer in range(6)}
    assert picks == {0: 1, 1: 0, 2: 2, 3: 0, 4: 0, 5: 1}
    assert {name: value for name, value in after.scalars.items() if name.startswith("last_pick")} == {
        "last_pick.0": 1, "last_pick.2": 1, "last_pick.5": 2,
    }  # fmt: skip


def test_a_layer_that_nobody_picks_for_long_is_told_of_by_name() -> None:
    half, at = coordinator(starved_after=3), state()
    for _ in range(3):
        at = half.merge(at, [sent(0, 1, 2, 3)])
    [warning] = half.warnings(at)
    assert warning.startswith("layer starvation: vit.layers.4, vit.layers.5 are in no update of the last 3 rounds")
    assert half.warnings(half.merge(at, [sent(4, 5)])) == []


def test_layers_that_somebody_left_out_on_purpose_are_no_news() -> None:
    half, at = coordinator(score="last", layers=1, starved_after=1), state()
    assert half.warnings(half.merge(at, [sent(5)])) == []


def test_a_head_tied_to_the_embeddings_is_named_before_the_first_round() -> None:
    headless = tuple(block for block in BLOCKS if block.role != "head")
    half = coordinator_half(MethodSpec(name="safl"), RunInfo(headless, rounds=10))
    (warning,) = half.warnings(State(0, {}))
    assert "tied to the token embeddings" in warning
    assert coordinator_half(MethodSpec(name="safl"), RunInfo(BLOCKS, rounds=10)).warnings(State(0, {})) == []


def test_attention_to_single_tokens_is_named_by_layer() -> None:
    half = coordinator(collapsed_below=0.2)
    metrics = {f"entropy_at_{layer}": 0.9 for layer in range(6)}
    calm = half.merge(state(), [sent(0, **metrics)])
    assert half.warnings(calm) == []
    low = [sent(0, worker=name, **{**metrics, "entropy_at_3": entropy}) for name, entropy in (("a", 0.1), ("b", 0.2))]
    [warning] = half.warnings(half.merge(calm, low))
    assert warning.startswith("peaked attention: vit.layers.3 is below an entropy of 0.2 (vit.layers.3 at 0.150)")


@pytest.mark.parametrize(
    ("sharpness", "score", "warned"),
    [(0.0, "attention", True), (20.0, "attention", False), (20.0, "gradient-norm", False)],
)
def test_choice_by_attention_that_is_uniform_is_named_a_collapse(sharpness: float, score: str, warned: bool) -> None:
    half = coordinator(layers=2, score=score)
    metrics = task(layers=2, score=score, sharpness=sharpness).result.metrics
    found = half.warnings(half.merge(state(), [replace(sent(0), metrics=metrics)]))
    assert [text.split(":")[0] for text in found] == ["attention collapse"] * warned
    assert all("differ by less than 5% of their mean and heads attend to all tokens alike" in text for text in found)


def test_converged_scores_are_warned_of_whatever_one_site_claims() -> None:
    half = coordinator()
    sharp = {f"entropy_at_{layer}": 0.5 for layer in range(6)}
    calm = half.merge(state(), [sent(0, score_spread=0.4, **sharp)])
    assert half.warnings(calm) == []
    # A number that cannot be true counts for nothing, and one that can, of many examples, for one site of three.
    spreads = {"a": 0.0, "b": 1e90, "c": 0.01, "d": 6.0}
    equal = [
        sent(0, worker=name, examples=1 + 10_000 * (name == "d"), score_spread=spread, **sharp)
        for name, spread in spreads.items()
    ]
    [warning] = half.warnings(half.merge(calm, equal))
    assert warning.startswith("attention collapse: the layers' scores differ by less than 5% of their mean, so that")


@pytest.mark.parametrize(
    ("now", "named"),
    [
        (picked(a="pq", b="rs", c="tu"), ["aggregation mismatch"]),
        (picked(a="pq", b="pr", c="pt"), ["aggregation mismatch"]),
        (picked(a="pqr", b="pqr", c="pqt"), []),
        # A single site mismatches no other.
        (picked(a="pqrs"), []),
    ],
)
def test_layers_of_one_sender_each_are_warned_of(now: Choices, named: list[str]) -> None:
    found = coordinator().warnings(replace(state(), scalars=selection_scalars([], now)))
    assert [text.split(":")[0] for text in found] == named


@pytest.mark.parametrize(
    ("before", "score", "named"),
    [
        ("pqrstuvw", "attention", ["unstable selection"]),
        ("pqrxyzab", "attention", []),
        # Random layers change on purpose.
        ("pqrstuvw", "random", []),
    ],
)
def test_turnover_above_three_layers_is_warned_of(before: str, score: str, named: list[str]) -> None:
    scalars = selection_scalars([picked(a=before, b=before)], picked(a="pqrxyzab", b="pqrxyzab"))
    found = coordinator(score=score).warnings(replace(state(), scalars=scalars))
    assert [text.split(":")[0] for text in found] == named


def test_a_worker_tells_each_layers_entropy_and_under_its_own_choice_no_score() -> None:
    metrics = task(layers=2).result.metrics
    assert set(metrics) == {"score_spread", *(f"entropy.{layer}" for layer in range(6))}
    assert all(0.9 < metrics[f"entropy.{layer}"] <= 1 for layer in range(6))


def test_a_layer_that_two_of_three_sent_is_averaged_over_those_two() -> None:
    before, half = state(), coordinator()
    name = next(b.name for b in BLOCKS if b.layer == 2)
    one, two = values(5)[name], values(6)[name]
    updates = [Update("a", 10, {name: one}), Update("b", 30, {name: two}), Update("c", 20, {})]
    after = half.merge(before, updates).model
    start = before.model[name].values
    want = start + (10 * (one.values - start) + 30 * (two.values - start)) / 40
    np.testing.assert_allclose(to_array(after[name]), want, rtol=1e-5, atol=1e-6)
    others = [other for other in after if other != name]
    assert all(after[other] is before.model[other] for other in others)


# ---------------------------------------------------------------- under differential privacy


def under(selection: Any, **settings: Any) -> CoordinatorHalf[SAFLSettings]:
    privacy = Privacy(epsilon=1, delta=1e-3, clip_norm=1, selection=selection)
    return coordinator_half(
        MethodSpec(name="safl", settings=settings), RunInfo(BLOCKS, 10, training=TRAINING, privacy=privacy)
    )


@pytest.mark.parametrize(
    ("selection", "settings", "why"),
    [
        ("refused", {}, "does not cover"),
        ("refused", {"score": "random", "prune": 0.5}, "does not cover"),
        ("noisy", {"chooser": "consensus"}, "set chooser to worker"),
        ("uncovered", {"chooser": "consensus"}, "set chooser to worker"),
        ("noisy", {"chooser": "vote"}, "set chooser to worker"),
        ("noisy", {"smoothing": 0.5}, "leave out smoothing; hysteresis"),
        ("noisy", {"score": "gradient-norm"}, "without bound"),
        ("noisy", {"score": "fisher"}, "without bound"),
        ("noisy", {"prune": 0.5}, "set prune_by to magnitude"),
    ],
)
def test_what_the_runs_privacy_does_not_cover_is_refused_on_both_sides(
    selection: Any, settings: dict[str, Any], why: str
) -> None:
    half = under(selection, **settings)
    with pytest.raises(UnsupportedRun, match=why):
        initial_state(half, state())
    worker = worker_half(MethodSpec(name="safl", settings=settings), half.run)
    context = LocalTaskContext(instantiate(SIX, "image-classification"), "image-classification", Plan(), BLOCKS)
    with pytest.raises(UnsupportedRun, match=why):
        worker.select(context, Unseen())


class Unseen:
    """Batches that nobody may look at."""

    def __iter__(self) -> Any:
        raise AssertionError("somebody looked")


@pytest.mark.parametrize(
    ("selection", "settings"),
    [
        ("noisy", {}),
        ("noisy", {"prune": 0.5, "prune_by": "magnitude"}),
        ("noisy", {"explore": 0.2, "pick_every": 6, "hysteresis": 0.5}),
        ("noisy", {"explore_after": 6}),
        ("uncovered", {"smoothing": 0.5}),
        ("uncovered", {"score": "fisher", "prune": 0.5}),
        ("refused", {"score": "random", "prune": 0.5, "prune_by": "magnitude"}),
        ("refused", {"score": "last"}),
    ],
)
def test_what_is_covered_or_said_not_to_be_is_run(selection: Any, settings: dict[str, Any]) -> None:
    initial_state(under(selection, **settings), state())


def noting(tables: list[Array]) -> Callable[[Array, int, int | None], list[int]]:
    """Return a choice of the largest, which notes the scores that it is given."""

    def choose_top(scores: Array, count: int, _picks: int | None) -> list[int]:
        tables.append(scores)
        return largest(scores, count)

    return choose_top


def test_a_noisy_choice_is_by_all_of_the_examples_so_that_one_more_only_adds() -> None:
    half = under("noisy", layers=2, profile_batches=1)
    worker = worker_half(MethodSpec(name="safl", settings={"layers": 2, "profile_batches": 1}), half.run)
    tables: list[Array] = []
    plan = half.plan_for(state(), COHORT[0])
    model = instantiate(SIX, "image-classification")
    context = LocalTaskContext(model, "image-classification", plan, BLOCKS, choose_top=noting(tables))
    for dataset in (images(21).rows(torch.arange(20)), images(21)):
        worker.select(context, Batches(dataset, 8, CPU))
    fewer, more = tables
    # What one example brings is between 0 and 1, and does not depend on the others.
    assert more.shape == (21, 6)
    assert ((more >= 0) & (more <= 1)).all()
    np.testing.assert_allclose(fewer, more[:20], atol=1e-6)


def test_a_noisy_choice_among_layers_of_which_only_some_read_examples_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    half = under("noisy", layers=2)
    worker = worker_half(MethodSpec(name="safl", settings={"layers": 2}), half.run)
    context = LocalTaskContext(
        instantiate(SIX, "image-classification"), "image-classification", half.plan_for(state(), COHORT[0]), BLOCKS
    )
    measured = context.attention(Batches(images(8), 8, CPU), TaskTokens())
    first = next(iter(measured))
    told = {**measured, first: replace(measured[first], per_example=False)}
    monkeypatch.setattr(context, "attention", lambda *_: told)
    with pytest.raises(UnsupportedRun, match=f"{re.escape(first)}.*which no noise covers"):
        worker.select(context, Batches(images(8), 8, CPU))


@pytest.mark.parametrize("prompts", [None, Prompts(vision=2, text=2)])
def test_noise_is_for_layers_that_read_examples_and_not_for_those_that_read_the_names_of_classes(
    prompts: Prompts | None,
) -> None:
    model = instantiate(dual("clip"), "contrastive", seed=1, prompts=prompts)
    blocks, tables = block_table(model), list[Array]()
    privacy = Privacy(epsilon=1, delta=1e-3, clip_norm=1, selection="noisy")
    training = TRAINING.model_copy(update={"full_fine_tuning": prompts is not None})
    facts = RunInfo(blocks, 10, training=training, privacy=privacy)
    chosen = MethodSpec(name="safl", settings={"share": 0.5, "always": []})
    plan = coordinator_half(chosen, facts).plan_for(state(), COHORT[0])
    context = LocalTaskContext(model, "contrastive", plan, blocks, choose_top=noting(tables))
    # As many images as there are classes, so that their numbers do not tell them apart.
    count, size = len(CLASSES), model.config.vision_config.image_size
    batch = {"pixel_values": torch.randn(count, 3, size, size), "labels": torch.arange(count), "input_ids": CLASSES}
    selected = worker_half(chosen, facts).select(context, [batch])
    [table] = tables
    assert table.shape == (count, model.config.vision_config.num_hidden_layers)
    assert {block.tensor.split("_")[0] for block in blocks if selected.holds(block)} == {"text", "vision"}


def test_hysteresis_of_a_noisy_choice_keeps_each_score_within_the_noise() -> None:
    settings = {"layers": 2, "hysteresis": 0.25}
    half, tables = under("noisy", **settings), list[Array]()
    plan = half.plan_for(state(), COHORT[0])
    for vault in ({}, {"safl/chosen": np.array([5, 0])}):
        model = instantiate(SIX, "image-classification", seed=1)
        context = LocalTaskContext(
            model, "image-classification", plan, BLOCKS, dict(vault), choose_top=noting(tables)
        )
        worker_half(MethodSpec(name="safl", settings=settings), half.run).select(context, Batches(images(), 8, CPU))
    fresh, held = tables
    # The layers that hold a place come first, with their scores; the others' are divided by 1.25, never multiplied.
    np.testing.assert_allclose(held, fresh[:, [0, 5, 1, 2, 3, 4]] * np.array([1.25, 1.25, 1, 1, 1, 1]), rtol=1e-12)
    assert held.max() <= 1


def test_noisy_choice_whose_places_are_all_drawn_reads_nothing() -> None:
    settings = {"layers": 1, "pick_every": 6}
    half = under("noisy", **settings)
    plan = half.plan_for(state(), COHORT[0])
    model = instantiate(SIX, "image-classification", seed=1)
    context = LocalTaskContext(model, "image-classification", plan, BLOCKS)
    selected = worker_half(MethodSpec(name="safl", settings=settings), half.run).select(context, Unseen())
    assert layers_in(block.name for block in BLOCKS if selected.holds(block)) == {1}


@pytest.mark.parametrize(("model_type", "layers", "picks"), [("t5", 2, [(1, 2), (1, 2)]), ("clip", 1, [(0, 0)])])
def test_a_choice_from_several_stacks_is_one_choice(model_type: str, layers: int, picks: list[Any]) -> None:
    # Both of T5's stacks read examples; of CLIP's one layer the text tower comes first, and none is left for images.
    head: Head = "seq2seq-lm" if model_type == "t5" else "contrastive"
    words = torch.arange(2, 26).reshape(4, 6)
    dataset = Dataset({"input_ids": words, "labels": words}) if model_type == "t5" else pairs("clip", 4)
    model = instantiate(T5 if model_type == "t5" else dual("clip"), head, seed=1)
    blocks, told = block_table(model), []

    def choose_top(scores: Array, count: int, picks: int | None) -> list[int]:
        told.append((count, picks))
        return largest(scores, count)

    facts = RunInfo(blocks, 10, training=TRAINING)
    chosen = MethodSpec(name="safl", settings={"layers": layers})
    plan = coordinator_half(chosen, facts).plan_for(state(), COHORT[0])
    context = LocalTaskContext(model, head, plan, blocks, choose_top=choose_top)
    selected = worker_half(chosen, facts).select(context, Batches(dataset, 4, CPU))
    assert told == picks
    assert len({layer.name for layer in layers_of(filter(selected.holds, blocks))}) == layers
