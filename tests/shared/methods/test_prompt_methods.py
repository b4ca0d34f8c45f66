"""Methods of prompts and LoRA: the blocks that they train, send and keep, and their arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from tessera.shared.methods.base import LocalResult, MethodSpec, State, UnsupportedRun, Update
from tessera.shared.methods.fedotp import Transport, transport_plan
from tessera.shared.methods.registry import check, coordinator_half, worker_half
from tessera.shared.model.spec import Prompts
from tessera.shared.rounds.planning import initial_state
from tessera.shared.tensors.lazy import Array, ArrayTensor, to_array
from tessera.simulation import Conditions, Result, Weights, simulate
from tessera.worker.model.block_map import block_table, named_tensors
from tessera.worker.model.build import instantiate, read_block
from tessera.worker.model.prompts import prompts_of
from tessera.worker.privacy.bounded_figures import disclosed
from tessera.worker.training.context import LocalTaskContext
from tessera.worker.training.randomness import seed_everything
from tests.support.duals import dual, pairs
from tests.support.tasks import ADAPTED, DEEP, PLAIN, PROMPTED, Subject, one_task

SGD = {"optimizer": "sgd", "weight_decay": 0.0, "learning_rate": 0.05}
PROMPTS = {"prompts.vision", "prompts.text"}
LOCAL = {"local.vision", "local.text"}
FUSION = {f"fusion.{tower}.{part}" for tower in ("vision", "text") for part in ("query", "key", "value", "output")}
BARE = replace(PROMPTED, prompts=Prompts(vision=2, text=2))
TEXT_ONLY = replace(PROMPTED, prompts=Prompts(text=2))


def trained(method: str, subject: Subject = PROMPTED, **more: Any) -> tuple[LocalTaskContext, LocalResult]:
    settings = more.pop("settings", None)
    return one_task(method, settings, subject=subject, **{**SGD, **more})


def start_of(subject: Subject) -> dict[str, Array]:
    return {name: tensor.detach().numpy() for name, tensor in subject.model().named_parameters()}


def moved(context: LocalTaskContext, subject: Subject) -> set[str]:
    start, now = start_of(subject), dict(context.model.named_parameters())
    return {name for name, values in start.items() if not np.array_equal(now[name].detach().numpy(), values)}


def start(method: str, subject: Subject, **settings: Any) -> State:
    facts = subject.facts(optimizer="sgd")
    return initial_state(coordinator_half(MethodSpec(name=method, settings=settings), facts), State(0, {}))


# ---------------------------------------------------------------- PromptFL


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {"prompts.text"}),
        pytest.param({"modalities": ["vision"]}, {"prompts.vision"}, marks=pytest.mark.long),
        ({"modalities": ["text", "vision"]}, PROMPTS),
    ],
)
def test_promptfl_trains_and_sends_the_prompts_that_it_is_set_to_and_keeps_nothing(
    settings: dict[str, Any], expected: set[str]
) -> None:
    context, result = trained("promptfl", settings=settings)
    assert set(result.upload) == moved(context, PROMPTED) == expected
    assert not result.keep


def test_a_step_of_promptfl_is_the_gradient_of_the_cross_entropy_over_the_classes() -> None:
    _, result = trained("promptfl", batch_size=None)
    model = PROMPTED.model()
    batch = next(PROMPTED.data().batches(None))
    labels = batch.pop("labels")
    scores = model(**batch).logits_per_image.log_softmax(dim=1)  # [images, classes]
    loss = -scores[torch.arange(len(labels)), labels].mean()
    text = model.get_parameter("prompts.text")
    (gradient,) = torch.autograd.grad(loss, [text])
    np.testing.assert_allclose(result.upload["prompts.text"], (text - 0.05 * gradient).detach().numpy(), atol=1e-6)


@pytest.mark.parametrize("method", ["promptfl", "pfeddc"])
def test_a_model_without_prompts_is_refused_with_the_command_that_makes_one(method: str) -> None:
    with pytest.raises(
        UnsupportedRun, match=r"model has no .*prompts: create it with `tessera model init .*--text-prompts N"
    ):
        start(method, PLAIN)
    with pytest.raises(UnsupportedRun, match=r"model has no vision prompts: .*--vision-prompts N`"):
        start(method, TEXT_ONLY, modalities=["text", "vision"])


# ---------------------------------------------------------------- pFedDC


def test_heads_that_do_not_divide_the_prompts_are_refused_when_the_run_is_made() -> None:
    with pytest.raises(UnsupportedRun, match=r"width 16 do not divide among 3 heads: set fusion\.heads"):
        start("pfeddc", BARE, fusion={"heads": 3})
    start("pfeddc", BARE, fusion={"heads": 3, "kind": "mean"})


def test_pfeddc_sends_global_prompts_and_keeps_local_ones_and_the_fusion() -> None:
    context, result = trained("pfeddc")
    assert set(result.upload) == moved(context, PROMPTED) == PROMPTS
    assert set(result.keep) == LOCAL | FUSION
    assert {block.name for block in context.private} == LOCAL | FUSION


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"fusion": {"asks": "local"}},
        {"fusion": {"kind": "mean"}},
        {"local_start": "random"},
        {"share": "nothing"},
        {"share": "prompts-and-fusion", "fusion": {"heads": 2}},
    ],
)
def test_a_site_that_has_kept_nothing_starts_at_the_global_prompts_bit_for_bit(settings: dict[str, Any]) -> None:
    context = prepared(settings)
    batch = next(PROMPTED.data().batches(8))
    with torch.no_grad():
        expected = (
            LocalTaskContext(PROMPTED.model(), "contrastive", context.plan, context.blocks).forward(batch).logits
        )
        found = context.forward(batch).logits
        context.close()
        closed = context.forward(batch).logits
    assert expected is not None
    assert found is not None
    assert closed is not None
    assert torch.equal(found, expected)
    assert torch.equal(closed, expected)


def prepared(settings: Mapping[str, Any], vault: Mapping[str, Array] | None = None) -> LocalTaskContext:
    """A site's work for pFedDC just before training."""
    return ready("pfeddc", settings, vault)


def ready(method: str, settings: Mapping[str, Any], vault: Mapping[str, Array] | None = None) -> LocalTaskContext:
    """A site's work just before training."""
    facts = PROMPTED.facts(optimizer="sgd")
    chosen = MethodSpec(name=method, settings=dict(settings))
    plan = coordinator_half(chosen, facts).plan_for(State(0, {}), None)  # type: ignore[arg-type]
    context = LocalTaskContext(PROMPTED.model(), "contrastive", plan, facts.blocks, dict(vault or {}))
    half = worker_half(chosen, facts)
    seed_everything(0)
    context.restore(half.private())
    half.setup(context)
    return context


def inserted(context: LocalTaskContext) -> Tensor:
    """The prompts that go into the text tower, [tokens, width]."""
    tokens = prompts_of(context.model)
    assert tokens is not None
    found = tokens.tokens("text")
    assert found is not None
    return found.detach()


def test_all_of_it_learns_together_from_the_second_step_on() -> None:
    # The fusion's output projection starts at zero: its inputs have a gradient once it has moved.
    start = {block.name: context.read(block) for context in [prepared({})] for block in context.private}
    for epochs, still in ((1, LOCAL | {name for name in FUSION if not name.endswith("output")}), (2, set())):
        _, result = trained("pfeddc", batch_size=None, epochs=epochs)
        assert {name for name in start if np.array_equal(result.keep[name], start[name])} == still


def test_a_site_goes_on_with_what_it_kept_and_not_with_the_global_prompts_of_now() -> None:
    _, first = trained("pfeddc", epochs=3)
    context = prepared({}, first.keep)
    assert {block.name for block in context.private} == set(first.keep)
    assert all(np.array_equal(context.read(block), first.keep[block.name]) for block in context.private)
    assert not np.array_equal(first.keep["local.text"], start_of(PROMPTED)["prompts.text"])


@pytest.mark.parametrize(("asks", "size"), [("global", 1.0), ("global", 0.02), ("local", 1.0)])
def test_the_fused_prompt_is_the_formula(asks: str, size: float) -> None:
    rng = np.random.default_rng(0)
    keep = {block.name: rng.normal(size=block.shape, scale=0.25).astype("f4") for block in prepared({}).private}
    keep["local.text"] *= 4 * size
    context = prepared({"fusion": {"heads": 1, "asks": asks}}, keep)
    tokens = prompts_of(context.model)
    assert tokens is not None
    shared, own = tokens.get_parameter("text"), torch.from_numpy(keep["local.text"])
    shared.data.normal_().mul_(size)
    query, key, value, output = (
        torch.from_numpy(keep[f"fusion.text.{part}"]) for part in ("query", "key", "value", "output")
    )

    def normalised(tokens: Tensor) -> Tensor:
        return (tokens - tokens.mean(dim=1, keepdim=True)) / tokens.std(dim=1, keepdim=True, correction=0)

    def below(values: Tensor, most: Tensor) -> Tensor:
        return values * most.norm() / (most.norm() ** 2 + values.norm() ** 2) ** 0.5

    asking, answering = (shared, own) if asks == "global" else (own, shared)
    queries, answers = normalised(asking), normalised(answering)
    scores = (queries @ query.T) @ (answers @ key.T).T / 16**0.5
    found = scores.softmax(dim=1) @ (answers @ value.T) @ output.T
    alike = found.mean(dim=0).expand(2, 16)
    added = below((found - alike) + below(alike, found - alike), asking)
    torch.testing.assert_close(inserted(context), (asking + added).detach(), rtol=1e-4, atol=1e-5 * size)


@pytest.mark.parametrize("asks", ["global", "local"])
def test_after_training_attention_depends_on_what_asks_and_does_not_drown_the_global_prompts(asks: str) -> None:
    subject = replace(PROMPTED, prompts=Prompts(vision=4, text=4))
    settings = {"fusion": {"asks": asks}}
    context, result = one_task("pfeddc", settings, subject=subject, epochs=10, learning_rate=0.01)
    tokens, start = prompts_of(context.model), start_of(subject)
    assert tokens is not None
    for tower in ("vision", "text"):
        shared, own = tokens.get_parameter(tower), torch.from_numpy(result.keep[f"local.{tower}"])
        fused = tokens.tokens(tower)  # type: ignore[arg-type]
        assert fused is not None
        asking = shared if asks == "global" else own
        added = (fused - asking).detach()
        by_token = added - added.mean(dim=0)
        assert by_token.square().sum() > 0.2 * added.square().sum()
        assert 0.05 * asking.norm() < added.norm() <= (1 + 1e-6) * asking.norm()
        assert (own - torch.from_numpy(start[f"prompts.{tower}"])).norm() > 0.05 * own.norm()


def version_after(*results: LocalResult, state: State | None = None) -> tuple[State, Sequence[str]]:
    """The version that pFedDC merges of sites' results, and its warnings."""
    half = coordinator_half(MethodSpec(name="pfeddc"), PROMPTED.facts())
    state = state or State(0, {name: ArrayTensor(values) for name, values in start_of(PROMPTED).items()})
    sent = [
        Update(str(at), 8, {name: ArrayTensor(values) for name, values in each.upload.items()}, each.metrics)
        for at, each in enumerate(results)
    ]
    merged = half.merge(state, sent)
    return merged, half.warnings(merged)


def test_a_fusion_that_adds_nothing_and_local_prompts_that_drift_away_are_warned_of_and_healthy_sites_are_not() -> (
    None
):
    _, healthy = trained("pfeddc")
    # Without values, the output projection has no gradient either.
    nothing = {name: np.zeros_like(values) for name, values in healthy.keep.items() if name in FUSION}
    far = {"local.vision": 20 * healthy.keep["local.vision"]}
    (_, collapsed), (_, drifted) = (trained("pfeddc", vault=vault) for vault in (nothing, far))
    assert version_after(healthy, healthy)[1] == []
    state, warnings = version_after(healthy, collapsed, collapsed)
    assert state.scalars["fused.text"] == 0.0
    assert state.scalars["silent.text"] == pytest.approx(2 / 3)
    assert [each.partition(" adds")[0] for each in warnings] == [
        f"attention collapse: at 67% of the sites the fusion of {tower} prompts" for tower in ("vision", "text")
    ]
    (warning,) = version_after(healthy, drifted)[1]
    assert warning.startswith("domain overfitting: at 50% of the sites the local vision prompts are over 5 times")
    # A later version without the sites' metrics, as under privacy, repeats none of it.
    unsaid = replace(healthy, metrics=disclosed(healthy.metrics))
    assert (unsaid.metrics, version_after(unsaid, state=state)[1]) == ({}, [])


def test_the_signatures_are_lengths_relative_to_the_global_prompts() -> None:
    for asks in ("global", "local"):
        context, result = trained("pfeddc", settings={"fusion": {"asks": asks}})
        shared, local = result.upload["prompts.text"], result.keep["local.text"]
        added = inserted(context).numpy() - (shared if asks == "global" else local)
        norms = [float(np.sqrt(np.square(each).sum())) for each in (added, local - shared, shared)]
        assert result.metrics["fused.text"] == pytest.approx(norms[0] / norms[2], rel=1e-5)
        assert result.metrics["local_distance.text"] == pytest.approx(norms[1] / norms[2], rel=1e-5)
    _, result = trained("pfeddc", settings={"fusion": {"kind": "mean"}})
    assert result.metrics.keys() == {"local_distance.vision", "local_distance.text"}


@pytest.mark.parametrize("asks", ["global", "local"])
def test_the_plain_fusion_is_the_papers_attention_without_normalisation_or_bounds(asks: str) -> None:
    settings = {"fusion": {"kind": "plain", "heads": 1, "asks": asks}, "local_start": "random"}
    context = prepared(settings)
    own = {block.name: torch.from_numpy(context.read(block)) for block in context.private}
    shared, local = torch.from_numpy(start_of(PROMPTED)["prompts.text"]), own["local.text"]
    query, key, value, output = (own[f"fusion.text.{part}"] for part in ("query", "key", "value", "output"))
    assert bool(output.any())
    queries, answers = (shared, local) if asks == "global" else (local, shared)
    attended = ((queries @ query.T) @ (answers @ key.T).T / 4).softmax(dim=1) @ (answers @ value.T) @ output.T
    torch.testing.assert_close(inserted(context), queries + attended)
    # It adds something to a single token too.
    start("pfeddc", replace(PROMPTED, prompts=Prompts(vision=2, text=1)), fusion={"kind": "plain"})
    with pytest.raises(UnsupportedRun, match=r"width 16 do not divide among 3 heads"):
        start("pfeddc", BARE, fusion={"heads": 3, "kind": "plain"})


def test_what_stays_at_the_site_has_a_learning_rate_of_its_own() -> None:
    outputs = {name for name in FUSION if name.endswith("output")}
    (_, alike), (_, faster) = (
        trained("pfeddc", settings=settings, batch_size=None) for settings in ({}, {"private_learning_rate": 0.5})
    )
    assert all(np.array_equal(alike.upload[name], faster.upload[name]) for name in PROMPTS)
    for name in outputs:
        # A first step of plain SGD, from zero, at ten times the run's rate of 0.05.
        np.testing.assert_allclose(faster.keep[name], 10 * alike.keep[name], rtol=1e-5, atol=1e-9)


def test_a_fusion_that_was_kept_in_an_older_form_is_left_and_begun_anew() -> None:
    _, now = trained("pfeddc")
    rng = np.random.default_rng(0)
    part = "fusion.text.attention"
    older = {f"{part}.in_proj_weight": rng.normal(size=(48, 16)), f"{part}.in_proj_bias": rng.normal(size=48)}
    kept = {name: values for name, values in now.keep.items() if name in LOCAL}
    context = prepared({}, {**kept, **{name: values.astype("f4") for name, values in older.items()}})
    tokens = prompts_of(context.model)
    assert tokens is not None
    assert {block.name for block in context.private} == LOCAL | FUSION
    assert torch.equal(tokens.tokens("text"), tokens.get_parameter("text"))  # type: ignore[arg-type]


def test_a_single_prompt_token_leaves_attention_nothing_to_choose_from() -> None:
    single = replace(PROMPTED, prompts=Prompts(vision=2, text=1))
    with pytest.raises(UnsupportedRun, match=r"prompts\.text is a single token.*fusion\.kind"):
        start("pfeddc", single)
    start("pfeddc", single, modalities=["vision"])
    start("pfeddc", single, fusion={"kind": "mean"})


def test_without_a_federation_the_global_prompts_stay_at_the_site_too() -> None:
    context, result = trained("pfeddc", settings={"share": "nothing"})
    assert not result.upload
    assert set(result.keep) == PROMPTS | LOCAL | FUSION
    again = prepared({"share": "nothing"}, result.keep)
    assert moved(again, PROMPTED) == PROMPTS == moved(context, PROMPTED)
    assert all(np.array_equal(again.read(b), result.keep[b.name]) for b in again.blocks if b.name in PROMPTS)


def test_a_shared_fusion_is_sent_and_local_prompts_are_kept() -> None:
    settings = {"share": "prompts-and-fusion", "fusion": {"heads": 2}}
    context, result = trained("pfeddc", settings=settings, epochs=2)
    assert set(result.upload) == moved(context, PROMPTED) == PROMPTS | {f"prompts.{name}" for name in FUSION}
    assert set(result.keep) == LOCAL
    with pytest.raises(UnsupportedRun, match=r"no fusion to share: .*--prompt-fusion global"):
        start("pfeddc", BARE, share="prompts-and-fusion")
    with pytest.raises(UnsupportedRun, match=r"heads=2.*heads=4"):
        prepared({**settings, "fusion": {"heads": 4}})


@pytest.mark.parametrize(("kind", "tokens"), [("mean", 2), ("concat", 4), ("random-attention", 2)])
def test_other_fusions_have_nothing_to_learn_but_prompts(kind: str, tokens: int) -> None:
    settings = {"fusion": {"kind": kind}}
    _, result = trained("pfeddc", settings=settings)
    assert set(result.keep) == LOCAL
    put_in = prompts_of(prepared(settings).model)
    assert put_in is not None
    assert len(put_in.tokens("text")) == tokens  # type: ignore[arg-type]


def test_an_mlp_that_fuses_is_kept_as_attention_is() -> None:
    settings = {"fusion": {"kind": "mlp"}}
    _, result = trained("pfeddc", settings=settings)
    fusion = {f"fusion.{tower}.{name}" for tower in ("vision", "text") for name in ("hidden", "output")}
    assert set(result.keep) == LOCAL | fusion
    again = prepared(settings, result.keep)
    assert all(np.array_equal(again.read(b), result.keep[b.name]) for b in again.private)
    with pytest.raises(UnsupportedRun, match=r"prompts\.text is a single token.*fusion\.kind"):
        start("pfeddc", replace(PROMPTED, prompts=Prompts(vision=2, text=1)), fusion={"kind": "mlp"})


def test_without_one_towers_prompts_the_others_are_all_that_trains() -> None:
    for subject, settings in ((TEXT_ONLY, {}), (PROMPTED, {"modalities": ["text"]})):
        context, result = trained("pfeddc", subject, settings=settings)
        assert set(result.upload) == moved(context, subject) == {"prompts.text"}
        assert set(result.keep) == {name for name in LOCAL | FUSION if ".text" in name}


def test_local_prompts_may_start_as_noise() -> None:
    context = prepared({"local_start": "random"})
    local = next(context.read(block) for block in context.private if block.name == "local.text")
    assert not np.array_equal(local, start_of(PROMPTED)["prompts.text"])
    assert 0.01 < local.std() < 0.04


def test_what_stays_here_never_takes_the_place_of_a_part_of_the_model() -> None:
    context = prepared({})
    with pytest.raises(ValueError, match="already has a module 'text_model'"):
        context.add_private("text_model", torch.nn.Linear(2, 2))


# ---------------------------------------------------------------- in a federation


BOTH_TOWERS = {"modalities": ["vision", "text"]}
TWO_HEADS = {"fusion": {"heads": 2}}


def federation(method: str, settings: dict[str, Any], subject: Subject, rounds: int = 2, **away: Any) -> Result:
    """A run of sites a and b, each with half of the data, with the sites' rounds of absence."""
    model, whole = subject.model(), subject.data()
    blocks, tensors = block_table(model), named_tensors(model)
    start = {block.name: read_block(tensors, block) for block in blocks}
    spec = {
        "name": "prompts", "rounds": rounds, "seed": 3, "method": {"name": method, "settings": settings},
        "training": {"learning_rate": 0.01, "batch_size": 4},
    }  # fmt: skip
    rows = torch.arange(whole.examples).tensor_split(2)
    data = {name: whole.rows(part) for name, part in zip("ab", rows, strict=True)}
    return simulate(spec, Weights(subject.document(), start), data, conditions=Conditions(away=away))


@pytest.mark.parametrize(
    ("family", "method", "settings", "kept"),
    [
        pytest.param("dinov2+bert", "promptfl", BOTH_TOWERS, set(), marks=pytest.mark.long),
        ("vit+bert", "pfeddc", TWO_HEADS, LOCAL | FUSION),
        pytest.param("vit+bert", "promptfl", BOTH_TOWERS, set(), marks=pytest.mark.long),
        pytest.param("dinov2+bert", "pfeddc", TWO_HEADS, LOCAL | FUSION, marks=pytest.mark.long),
    ],
)
def test_the_prompts_of_a_pair_of_towers_are_learnt_in_a_federation(
    family: str, method: str, settings: dict[str, Any], kept: set[str]
) -> None:
    subject = replace(PROMPTED, config=dual(family), data=lambda: pairs(family))
    result = federation(method, settings, subject)
    first, last = start_of(subject), result.arrays()
    assert {name for name in first if not np.array_equal(first[name], last[name])} == PROMPTS
    assert all(set(result.kept(site)) == kept for site in "ab")


@pytest.mark.parametrize(
    ("method", "settings", "kept"),
    [
        pytest.param("fedpgp", {"rank": 1}, {"local.u", "local.v"}, marks=pytest.mark.long),
        ("fedotp", {}, {"local.text"}),
    ],
)
def test_a_site_that_joins_late_has_prompts_of_its_own_and_no_version_holds_them(
    method: str, settings: dict[str, Any], kept: set[str]
) -> None:
    result = federation(method, settings, PROMPTED, rounds=3, b=(1,))
    assert [len(attempt.tasks) for attempt in result.rounds] == [1, 2, 2]
    own = {site: result.kept(site) for site in "ab"}
    assert set(own["a"]) == set(own["b"]) == kept
    assert all(not np.array_equal(own["a"][name], own["b"][name]) for name in kept)
    first, last = start_of(PROMPTED), result.arrays()
    assert first.keys() == last.keys()
    assert {name for name in first if not np.array_equal(first[name], last[name])} == {"prompts.text"}


# ---------------------------------------------------------------- FedPGP

OWN_TERM = {"local.u", "local.v"}


def test_fedpgp_sends_global_text_prompts_and_keeps_its_own_term() -> None:
    context, result = trained("fedpgp", settings={"rank": 1}, epochs=2)
    assert set(result.upload) == moved(context, PROMPTED) == {"prompts.text"}
    assert set(result.keep) == {block.name for block in context.private} == OWN_TERM
    assert {name: values.shape for name, values in result.keep.items()} == {"local.u": (2, 1), "local.v": (1, 16)}


def test_a_new_site_of_fedpgp_starts_at_the_global_prompts_bit_for_bit_and_goes_on_with_its_own() -> None:
    batch = next(PROMPTED.data().batches(8))
    context = ready("fedpgp", {"rank": 1})
    _, result = trained("fedpgp", settings={"rank": 1}, epochs=3)
    with torch.no_grad():
        plain = LocalTaskContext(PROMPTED.model(), "contrastive", context.plan, context.blocks).forward(batch).logits
        assert torch.equal(context.forward(batch).logits, plain)  # type: ignore[arg-type]
        again = ready("fedpgp", {"rank": 1}, result.keep)
        assert all(np.array_equal(again.read(block), result.keep[block.name]) for block in again.private)
        assert not torch.equal(again.forward(batch).logits, plain)  # type: ignore[arg-type]
        again.close()
        assert torch.equal(again.forward(batch).logits, plain)  # type: ignore[arg-type]


def test_the_loss_of_fedpgp_is_the_formula() -> None:
    rng = np.random.default_rng(0)
    keep = {"local.u": rng.normal(size=(2, 1)), "local.v": rng.normal(size=(1, 16), scale=0.1)}
    vault = {name: values.astype("f4") for name, values in keep.items()}
    context = ready("fedpgp", {"rank": 1}, vault)
    half = worker_half(
        MethodSpec(name="fedpgp", settings={"rank": 1, "mu": 0.7, "temperature": 0.2}), PROMPTED.facts()
    )
    batch = next(PROMPTED.data().batches(None))
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    own = PROMPTED.model()
    text = own.get_parameter("prompts.text")
    plain = instantiate(PROMPTED.config, "contrastive", seed=1)
    with torch.no_grad():
        z_g, z_c = own(**inputs).text_embeds, plain(**inputs).text_embeds
        text.add_(torch.from_numpy(vault["local.u"] @ vault["local.v"]))
        output = own(**inputs)
        cross_entropy = torch.nn.functional.cross_entropy(output.logits_per_image, batch["labels"])
        cosine = torch.nn.functional.cosine_similarity
        near, far = (torch.exp(cosine(z_g, other) / 0.2) for other in (z_c, output.text_embeds))
        expected = cross_entropy + 0.7 * -torch.log(near / (near + far)).mean()
        torch.testing.assert_close(half.loss(context, batch), expected)


def test_fedpgp_without_its_contrast_takes_the_first_step_of_promptfl_bit_for_bit() -> None:
    (_, plain), (_, without), (_, drawn) = (
        trained(method, settings=settings, batch_size=None)
        for method, settings in (("promptfl", {}), ("fedpgp", {"rank": 1, "mu": 0}), ("fedpgp", {"rank": 1}))
    )
    assert np.array_equal(plain.upload["prompts.text"], without.upload["prompts.text"])
    assert not np.array_equal(plain.upload["prompts.text"], drawn.upload["prompts.text"])


def test_fedpgp_is_refused_without_text_prompts_and_warns_of_a_rank_that_is_not_low() -> None:
    with pytest.raises(UnsupportedRun, match=r"model has no text prompts: create it with .*--text-prompts N"):
        start("fedpgp", replace(PROMPTED, prompts=Prompts(vision=2)))
    facts = PROMPTED.facts()
    for rank, warned in ((1, False), (2, True)):
        half = coordinator_half(MethodSpec(name="fedpgp", settings={"rank": rank}), facts)
        said = half.warnings(State(0, {}))
        assert bool(said) == warned
    assert "rank is 2 and prompts.text 2 x 16" in said[0]


# ---------------------------------------------------------------- FedOTP


def test_fedotp_sends_global_text_prompts_and_keeps_its_own() -> None:
    context, result = trained("fedotp", epochs=2)
    assert set(result.upload) == moved(context, PROMPTED) == {"prompts.text"}
    assert set(result.keep) == {block.name for block in context.private} == {"local.text"}
    fresh = ready("fedotp", {})
    (own,) = fresh.private
    assert not np.array_equal(result.keep["local.text"], fresh.read(own))
    assert not np.array_equal(fresh.read(own), start_of(PROMPTED)["prompts.text"])


def test_a_site_of_fedotp_goes_on_with_its_own_prompts_and_leaves_the_model_as_it_was() -> None:
    batch = next(PROMPTED.data().batches(8))
    _, result = trained("fedotp", epochs=3)
    context = ready("fedotp", {}, result.keep)
    with torch.no_grad():
        assert all(np.array_equal(context.read(block), result.keep[block.name]) for block in context.private)
        plain = LocalTaskContext(PROMPTED.model(), "contrastive", context.plan, context.blocks).forward(batch).logits
        assert not torch.equal(context.forward(batch).logits, plain)  # type: ignore[arg-type]
        context.close()
        assert torch.equal(context.forward(batch).logits, plain)  # type: ignore[arg-type]


def test_both_prompts_of_fedotp_learn_alike_where_they_start_alike_and_apart_where_not() -> None:
    _, alike = trained("fedotp", settings={"local_start": "global"}, batch_size=None)
    np.testing.assert_allclose(alike.upload["prompts.text"], alike.keep["local.text"], atol=1e-6)
    _, apart = trained("fedotp", batch_size=None)
    assert np.abs(apart.upload["prompts.text"] - apart.keep["local.text"]).max() > 0.01


def test_a_logit_of_fedotp_is_the_similarity_that_its_plan_carries() -> None:
    context, batch = ready("fedotp", {"transport": {"mass": 0.7, "iterations": 20}}), next(PROMPTED.data().batches(8))
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    plain, own = PROMPTED.model(), PROMPTED.model()
    (local,) = context.private
    with torch.no_grad():
        own.get_parameter("prompts.text").copy_(torch.from_numpy(context.read(local)))
        output = plain(**inputs)
        texts = torch.stack([output.text_embeds, own(**inputs).text_embeds])  # [prompts, classes, width]
        patches = context.patch_features(output)
        found = context.forward(batch).logits
        assert found is not None
        for label in range(3):
            similarities = patches @ texts[:, label].T  # [images, patches, prompts]
            plan = transport_plan(1 - similarities, Transport(mass=0.7, iterations=20))
            expected = plain.get_parameter("logit_scale").exp() * (plan * similarities).sum(dim=(1, 2))
            torch.testing.assert_close(found[:, label], expected, rtol=1e-4, atol=1e-5)


def test_fedotp_learns_the_classes_of_its_site() -> None:
    batch = next(PROMPTED.data().batches(None))

    def loss(vault: Mapping[str, Array], **settings: Any) -> float:
        context, _ = trained("fedotp", vault=vault, settings=settings, learning_rate=1e-9)
        with torch.no_grad():
            return float(context.forward(batch).loss)

    _, result = trained("fedotp", epochs=6, learning_rate=0.5)
    untrained, trained_once = loss({}), loss(result.keep)
    assert trained_once < untrained


def test_fedotp_is_refused_for_a_model_without_text_prompts_or_features_of_patches() -> None:
    with pytest.raises(UnsupportedRun, match=r"model has no text prompts: create it with .*--text-prompts N"):
        start("fedotp", replace(PROMPTED, prompts=Prompts(vision=2)))
    with pytest.raises(UnsupportedRun, match=r"no features of patches.*choose a CLIP .*promptfl or fedpgp"):
        start("fedotp", replace(PROMPTED, config=dual("siglip"), prompts=Prompts(text=2)))
    for wrong in ({"mass": 0}, {"mass": 1.1}, {"regularization": 0}, {"iterations": 0}):
        with pytest.raises(ValidationError):
            check(MethodSpec(name="fedotp", settings={"transport": wrong}))


# ---------------------------------------------------------------- FedVPT


@pytest.mark.parametrize("modalities", [["vision"], ["text"], ["vision", "text"]])
def test_fedvpt_trains_and_sends_the_prompts_of_every_layer_and_keeps_nothing(modalities: list[str]) -> None:
    context, result = trained("fedvpt", DEEP, settings={"modalities": modalities})
    expected = {f"prompts.{part}{modality}" for part in ("", "deep.") for modality in modalities}
    assert set(result.upload) == moved(context, DEEP) == expected
    assert not result.keep


def test_a_step_of_fedvpt_is_the_gradient_of_the_cross_entropy_over_the_classes() -> None:
    _, result = trained("fedvpt", DEEP, batch_size=None)
    model = DEEP.model()
    batch = next(DEEP.data().batches(None))
    labels = batch.pop("labels")
    loss = torch.nn.functional.cross_entropy(model(**batch).logits_per_image, labels)
    for name in ("prompts.vision", "prompts.deep.vision"):
        own = model.get_parameter(name)
        (gradient,) = torch.autograd.grad(loss, [own], retain_graph=True)
        np.testing.assert_allclose(result.upload[name], (own - 0.05 * gradient).detach().numpy(), atol=1e-6)


def test_deep_prompts_and_methods_that_do_not_go_together_are_refused_with_the_remedy() -> None:
    with pytest.raises(
        UnsupportedRun, match=r"no deep vision prompts: .*--vision-prompts N --prompt-depth D.*promptfl"
    ):
        start("fedvpt", PROMPTED)
    for method in ("promptfl", "pfeddc", "fedpgp"):
        with pytest.raises(UnsupportedRun, match=r"deep .*text prompts, which this method does not train: .* fedvpt"):
            start(method, DEEP)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("fedvpt", {"modalities": ["vision", "text"]}),
        pytest.param("fedpgp", {"rank": 1}, marks=pytest.mark.long),
        ("fedotp", {}),
    ],
)
def test_layers_that_are_computed_again_change_no_bit_of_the_prompts(method: str, settings: dict[str, Any]) -> None:
    subject = DEEP if method == "fedvpt" else PROMPTED
    kept, again = (
        trained(method, subject, settings=settings, gradient_checkpointing=chosen)[1] for chosen in (False, True)
    )
    for before, after in ((kept.upload, again.upload), (kept.keep, again.keep)):
        assert {name: values.tobytes() for name, values in before.items()} == {
            name: values.tobytes() for name, values in after.items()
        }


# ---------------------------------------------------------------- LoRA


def merged(harvests: list[LocalResult], freeze_a: bool) -> Mapping[str, Any]:
    facts = ADAPTED.facts()
    half = coordinator_half(MethodSpec(name="lora", settings={"freeze_a": freeze_a}), facts)
    first = State(0, {name: ArrayTensor(values) for name, values in start_of(ADAPTED).items()})
    updates = [
        Update(f"{index}/w", 10 * (index + 1), {name: ArrayTensor(values) for name, values in each.upload.items()})
        for index, each in enumerate(harvests)
    ]
    return half.merge(half.start(first), updates).model


def product(values: Mapping[str, Array], matrix: str) -> Array:
    """B A of an adapter, float64 [outputs, inputs]."""
    a, b = (np.asarray(values[f"{matrix}.lora_{half}.default.weight"], np.float64) for half in "AB")
    return b @ a


@pytest.mark.parametrize("freeze_a", [False, True])
def test_only_with_a_frozen_is_the_mean_of_the_products_the_product_of_the_means(freeze_a: bool) -> None:
    harvests = [
        trained("lora", ADAPTED, settings={"freeze_a": freeze_a}, epochs=4, batch_size=size, learning_rate=0.5)[1]
        for size in (4, 6, 24)
    ]
    start, version = start_of(ADAPTED), {n: to_array(t) for n, t in merged(harvests, freeze_a).items()}
    matrices = {name.partition(".lora_")[0] for name in harvests[0].upload if ".lora_" in name}
    assert len(matrices) == 4  # queries and values of two layers
    for matrix in matrices:
        # Weighted by examples: 10, 20 and 30 of 60.
        exact = sum(
            (w / 60) * product({**start, **h.upload}, matrix) for w, h in zip((10, 20, 30), harvests, strict=True)
        )
        assert np.allclose(product(version, matrix), exact, rtol=1e-5, atol=1e-7) == freeze_a


@pytest.mark.parametrize(
    ("settings", "sent"),
    [
        ({}, {"lora_A", "lora_B", "classifier"}),
        ({"freeze_a": True}, {"lora_B", "classifier"}),
        ({"train_head": False}, {"lora_A", "lora_B"}),
    ],
)
def test_lora_trains_and_sends_adapters_and_the_head_and_nothing_else(
    settings: dict[str, Any], sent: set[str]
) -> None:
    context, result = trained("lora", ADAPTED, settings=settings, learning_rate=0.5)
    assert set(result.upload) == moved(context, ADAPTED)
    kinds = {next(kind for kind in ("lora_A", "lora_B", "classifier") if kind in name) for name in result.upload}
    assert kinds == sent
    assert not result.keep


def test_a_model_without_adapters_is_refused_with_the_command_that_makes_one() -> None:
    with pytest.raises(UnsupportedRun, match="no adapters: create it with `tessera model init --lora-rank N`"):
        start("lora", PLAIN)


def test_the_same_seed_makes_the_same_model_with_or_without_prompts() -> None:
    plain = dict(instantiate(PROMPTED.config, PROMPTED.head, seed=1).named_parameters())
    there = start_of(PROMPTED)
    assert all(np.array_equal(there[name], tensor.detach().numpy()) for name, tensor in plain.items())
