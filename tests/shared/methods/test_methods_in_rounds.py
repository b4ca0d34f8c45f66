"""What must hold for every method over several rounds: interruptions, absences, and a federation of one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from tessera.shared.api.runs import RunSpec
from tessera.shared.api.versions import VersionRef
from tessera.shared.methods.base import MethodSpec, Participant, Plan, State
from tessera.shared.methods.registry import coordinator_half, methods
from tessera.shared.model.spec import Lora, Model, Prompts
from tessera.shared.problems import Invalid
from tessera.shared.rounds.planning import begun, plans_of, run_facts, task_of
from tessera.shared.tensors.lazy import ArrayTensor
from tessera.simulation import Conditions, Result, Weights, simulate
from tessera.worker.data.dataset import Dataset
from tessera.worker.model.block_map import block_table, named_tensors
from tessera.worker.model.build import read_block
from tessera.worker.task.environment import facts_of
from tests.support.task_document import NO_DIGEST
from tests.support.tasks import (
    ADAPTED,
    DEEP,
    EACH_METHOD,
    FEW_METHODS,
    PLAIN,
    PROMPTED,
    Subject,
    fetched,
    one_task,
    subject_of,
)
from tests.support.variants import variants

ROUNDS = 3


@cache
def start_of(method: str) -> Weights:
    subject = subject_of(method)
    model = subject.model()
    blocks, tensors = block_table(model), named_tensors(model)
    document = Model(
        config=subject.config, head=subject.head, blocks=blocks, prompts=subject.prompts, lora=subject.lora
    )
    return Weights(document, {block.name: read_block(tensors, block) for block in blocks})


def sites_of(method: str, count: int) -> Mapping[str, Dataset]:
    whole = subject_of(method).data()
    rows = torch.arange(whole.examples).tensor_split(count)
    return {name: whole.rows(part) for name, part in zip("abc", rows, strict=False)}


def run(
    method: str, sites: int = 3, out: Path | None = None, until: int | None = None, **away: tuple[int, ...]
) -> Result:
    spec = {
        "name": "contract",
        "method": {"name": method},
        "rounds": ROUNDS,
        "seed": 3,
        # Some methods take no other optimizer.
        "training": {"optimizer": "sgd", "learning_rate": 0.05, "batch_size": 8},
    }
    data = sites_of(method, sites)
    return simulate(spec, start_of(method), data, out=out, until=until, conditions=Conditions(away=away))


def digests(result: Result) -> list[str]:
    return [version.digest for version in result.versions]


# In short, tests/simulation/test_simulation.py shows the same of the methods that remember most.
@pytest.mark.long
@pytest.mark.parametrize("method", sorted(methods()))
def test_a_run_that_is_stopped_and_resumed_ends_with_the_same_bits(method: str, tmp_path: Path) -> None:
    whole = run(method)
    run(method, out=tmp_path / "run", until=2)
    resumed = run(method, out=tmp_path / "run")
    assert digests(resumed) == digests(whole)
    assert len(whole.versions) == ROUNDS + 1
    for site in "abc":
        kept, expected = resumed.kept(site), whole.kept(site)
        assert {name: values.tobytes() for name, values in kept.items()} == {
            name: values.tobytes() for name, values in expected.items()
        }


@EACH_METHOD
def test_a_worker_that_missed_a_round_takes_part_again(method: str) -> None:
    result = run(method, b=(2,))
    took_part = {attempt.number: {task.worker for task in attempt.tasks} for attempt in result.rounds}
    assert [("b/worker" in took_part[number]) for number in (1, 2, 3)] == [True, False, True]
    assert all(task.state == "merged" for attempt in result.rounds for task in attempt.tasks)
    assert len(result.versions) == ROUNDS + 1


@FEW_METHODS
def test_a_federation_of_one_goes_through_all_its_rounds(method: str) -> None:
    result = run(method, sites=1)
    assert len(result.versions) == ROUNDS + 1
    assert all(task.state == "merged" for attempt in result.rounds for task in attempt.tasks)


# ---------------------------------------------------------------- models with adapters or prompts

TEXT_PROMPTED = replace(PROMPTED, prompts=Prompts(text=2))
DIGEST = f"sha256:{'0' * 64}"


def spec_of(
    method: str, settings: Mapping[str, Any] | None = None, run: Mapping[str, Any] | None = None, **training: Any
) -> RunSpec:
    chosen = {"name": method, "settings": settings or {}}
    sgd = {"optimizer": "sgd", "learning_rate": 0.05, "batch_size": 8, **training}
    run = {"name": "r", "model": DIGEST, "version": DIGEST, "dataset": "d", "rounds": 6, **(run or {})}
    return RunSpec.model_validate({**run, "method": chosen, "training": sgd})


def refusal(spec: RunSpec, subject: Subject) -> str:
    """Why the run of the model is refused; empty if it begins."""
    first = {b.name: ArrayTensor(np.zeros(b.shape, np.float32)) for b in subject.blocks}
    try:
        begun(spec, subject.document(), State(0, first))
    except Invalid as refused:
        return "; ".join(f"{fault.pointer}: {fault.detail}" for fault in refused.errors)
    return ""


def one_round(spec: RunSpec, subject: Subject, round_number: int = 0) -> tuple[set[str], set[str]]:
    """The blocks that move at a site in a round of the run, and those that it sends."""
    half = coordinator_half(spec.method, run_facts(spec, subject.document()))
    first = {b.name: ArrayTensor(np.zeros(b.shape, np.float32)) for b in subject.blocks}
    state = half.start(State(round_number, first))
    (plan,) = plans_of(half, state, [Participant("a/w", 24)], Random(0)).values()
    sgd: dict[str, Any] = {
        "server_state": fetched(state, plan),
        "optimizer": "sgd",
        "full_fine_tuning": spec.training.full_fine_tuning,
    }
    context, result = one_task(
        spec.method.name, spec.method.settings, subject=subject, plan=plan, round_number=round_number, **sgd
    )
    start = named_tensors(subject.model())
    moved = {b.name for b in context.blocks if not np.array_equal(context.read(b), read_block(start, b))}
    return moved, set(result.upload)


def names(subject: Subject, *roles: str) -> set[str]:
    return {block.name for block in subject.blocks if block.role in roles}


@pytest.mark.parametrize(
    ("subject", "roles"),
    [
        (ADAPTED, ("adapter", "head")),
        pytest.param(TEXT_PROMPTED, ("prompt",), marks=pytest.mark.long),
        (DEEP, ("prompt",)),
    ],
)
@pytest.mark.parametrize("method", sorted(methods()))
def test_no_method_trains_or_sends_the_base_of_a_model_with_adapters_or_prompts(
    method: str, subject: Subject, roles: tuple[str, ...]
) -> None:
    spec = spec_of(method)
    if said := refusal(spec, subject):
        assert any(remedy in said for remedy in ("full_fine_tuning", "model init", "choose", "prompts")), said
        return
    moved, sent = one_round(spec, subject)
    assert moved
    assert moved | sent <= names(subject, *roles)


@pytest.mark.parametrize(
    "method", variants(["fedavg", "fedprox", "scaffold", "ditto", "moon", "fednova", "local"], {"scaffold", "ditto"})
)
def test_a_method_of_the_whole_model_moves_what_lora_moves_beside_adapters(method: str) -> None:
    expected, _ = one_round(spec_of("lora"), ADAPTED)
    moved, sent = one_round(spec_of(method), ADAPTED)
    assert moved == expected == names(ADAPTED, "adapter", "head")
    assert sent == (set() if method == "local" else expected)


def test_local_moves_what_promptfl_moves_and_keeps_nothing_else() -> None:
    expected, _ = one_round(spec_of("promptfl"), TEXT_PROMPTED)
    assert one_round(spec_of("local"), TEXT_PROMPTED) == (expected, set())
    _, result = one_task("local", subject=TEXT_PROMPTED, optimizer="sgd")
    assert set(result.keep) == expected == {"prompts.text"}


def test_full_fine_tuning_trains_the_base_beside_its_adapters() -> None:
    moved, sent = one_round(spec_of("fedavg", full_fine_tuning=True), ADAPTED)
    assert moved >= names(ADAPTED, "query", "value", "mlp", "adapter", "head")
    assert sent == {block.name for block in ADAPTED.blocks}


def test_private_b_factors_are_fedsa_lora() -> None:
    spec = spec_of("fedper", {"private": [{"names": ["*.lora_B.*"]}]})
    assert not refusal(spec, ADAPTED)
    moved, sent = one_round(spec, ADAPTED)
    a_factors = {name for name in names(ADAPTED, "adapter") if ".lora_A." in name}
    assert (moved, sent) == (names(ADAPTED, "adapter", "head"), a_factors | names(ADAPTED, "head"))


def test_fedfrozen_freezes_the_adapters_of_queries_and_keys() -> None:
    spec = spec_of("fedfrozen", {"warmup_rounds": 2})
    assert one_round(spec, ADAPTED)[0] == names(ADAPTED, "adapter", "head")
    moved, sent = one_round(spec, ADAPTED, 2)
    of_values = {block.name for block in ADAPTED.blocks if block.adapts == ("value",)}
    assert moved == sent == of_values | names(ADAPTED, "head")


def test_safl_chooses_among_the_layers_adapters() -> None:
    moved, sent = one_round(spec_of("safl", {"layers": 1, "score": "last"}), ADAPTED)
    of_layer = {block.name for block in ADAPTED.blocks if block.role == "adapter" and block.layer == 1}
    assert moved == sent == of_layer | names(ADAPTED, "head")


VALUES_ADAPTED = replace(ADAPTED, lora=Lora(rank=2, alpha=4, roles=("value",)))


@pytest.mark.parametrize(
    ("method", "settings", "subject", "said"),
    [
        ("fedbn", {}, ADAPTED, "method.settings.private.*only adapter and head"),
        ("fedper", {}, TEXT_PROMPTED, "method.settings.private.*only prompt blocks"),
        ("fedrep", {"private": [{"roles": ["adapter", "head"]}]}, ADAPTED, "nothing is left to send"),
        ("fedbabu", {"tune": "head"}, TEXT_PROMPTED, "fine-tunes the part 'head'"),
        ("fedfrozen", {}, VALUES_ADAPTED, "nothing that the method then freezes.*beside no query or key matrix"),
        ("fedfrozen", {"freeze": "value", "scope": "qk_only"}, VALUES_ADAPTED, "trains scope 'qk_only'"),
        ("fedfrozen", {}, TEXT_PROMPTED, "nothing that the method then freezes.*beside no query or key matrix"),
        ("safl", {"within": ["mlp"]}, ADAPTED, "no layers that SAFL can choose.*full_fine_tuning"),
        ("moon", {}, TEXT_PROMPTED, "contrasts images"),
    ],
)
def test_a_method_whose_own_blocks_are_frozen_beside_adapters_or_prompts_is_refused(
    method: str, settings: Mapping[str, Any], subject: Subject, said: str
) -> None:
    assert re.search(said, found := refusal(spec_of(method, settings), subject)), found
    assert not re.search(said, refusal(spec_of(method, settings, full_fine_tuning=True), subject))


@pytest.mark.parametrize(("method", "subject"), [("fedavg", PLAIN), ("lora", ADAPTED), ("promptfl", TEXT_PROMPTED)])
def test_full_fine_tuning_that_changes_nothing_is_refused(method: str, subject: Subject) -> None:
    assert re.search("leave (it|the setting) out", refusal(spec_of(method, full_fine_tuning=True), subject))


def test_a_worker_sends_no_base_that_a_coordinator_asks_for_against_the_run() -> None:
    context, result = one_task("fedavg", subject=ADAPTED, plan=Plan(), optimizer="sgd")
    assert set(result.upload) == names(ADAPTED, "adapter", "head")
    assert context.plan.upload.resolve(context.blocks) == tuple(context.blocks)


@pytest.mark.parametrize("method", ["fedavg", "lora", "local"])
def test_a_head_in_an_external_base_stays_as_it_is(method: str) -> None:
    base = {b.name: DIGEST for b in ADAPTED.blocks if b.role != "adapter"}
    model = ADAPTED.document().model_copy(update={"external": base})
    spec = spec_of(method)
    half = coordinator_half(spec.method, run_facts(spec, model))
    first = State(0, {name: ArrayTensor(np.zeros(1, np.float32)) for name in names(ADAPTED, "adapter")})
    assert begun(spec, model, first).round == 0
    (plan,) = plans_of(half, State(0, {}), [Participant("a/w", 24)], Random(0)).values()
    assert {block.name for block in plan.train.resolve(model.blocks)} == names(ADAPTED, "adapter")
    with pytest.raises(Invalid, match="train_head"):
        begun(spec_of("lora", {"train_head": True}), model, first)


# ---------------------------------------------------------------- settings of all methods

LOSSY = ("delta+bf16", "delta+fp16", "delta+int8+zstd", "delta+int4+zstd", "delta+topk=0.05+zstd", "delta+lowrank=2")


@pytest.mark.parametrize(("method", "off"), [("scaffold", "strength"), ("feddyn", "alpha")])
@pytest.mark.parametrize(
    "run", [*({"codec": codec} for codec in LOSSY), {"upload_budget": 1000}, {"upload_seconds": 1.0}], ids=str
)
def test_no_mean_of_what_sites_keep_is_computed_from_rounded_steps(
    method: str, off: str, run: Mapping[str, Any]
) -> None:
    assert f"{next(iter(run))} rounds those that the coordinator reads" in refusal(spec_of(method, {}, run), PLAIN)
    assert not refusal(spec_of(method, {off: 0}, run), PLAIN)
    assert not refusal(spec_of(method, {}, {"codec": "bits+zstd"}), PLAIN)


def test_both_halves_know_the_scale_of_adapters() -> None:
    model, spec, version = ADAPTED.document(), spec_of("lora"), VersionRef(number=0, digest=NO_DIGEST)
    order: Any = {"task_id": "t", "token": 1, "kind": "train", "held_out": False, "run": "r", "number": 1, "seed": 0}
    task = task_of(spec, Plan(), version, **order, lease_seconds=60.0)
    at_the_site = facts_of(task, model)
    known = run_facts(spec, model)
    assert (at_the_site.lora, at_the_site.head) == (known.lora, known.head) == (ADAPTED.lora, ADAPTED.head)


SENT = {"codec": "delta+int8+zstd"}
PRIVATE = {"epsilon": 8.0, "delta": 1e-5, "clip_norm": 1.0}


@pytest.mark.parametrize(
    ("method", "settings", "run", "training", "pointer"),
    [
        ("fedavg", {}, {}, {"optimizer": "adamw", "momentum": 0.9}, "/training/momentum"),
        ("fedavg", {}, {}, {"betas": [0.8, 0.9]}, "/training/betas"),
        ("fedavg", {}, {}, {"weight_decay": 0, "decay_norms_and_biases": False}, "/training/decay_norms_and_biases"),
        ("fedavg", {}, {"privacy": {**PRIVATE, "selections": 3}}, {}, "/privacy/selections"),
        ("fedavg", {}, {"privacy": {**PRIVATE, "selection": "noisy"}}, {}, "/privacy/selection"),
        ("safl", {"score": "random"}, {"privacy": {**PRIVATE, "selection": "noisy"}}, {}, "privacy on nothing"),
        ("fedavg", {}, {"cohort": {"size": 3, "target_updates": 3}}, {}, "/cohort/target_updates"),
        ("fedavg", {}, {"cohort": {"sites": ["a", "b"], "target_updates": 4}}, {}, "/cohort/target_updates"),
        ("fedfrozen", {"warmup_rounds": 2, "patience": 5}, {}, {}, "/method/settings/patience"),
        ("fedfrozen", {"gain": 0.2}, {}, {}, "/method/settings/gain"),
        ("fedfrozen", {"warmup_rounds": 0, "signals": True}, {}, {}, "/method/settings/signals"),
        ("fedfrozen", {"warmup_rounds": 6}, {}, {}, "lower warmup_rounds, or raise rounds"),
        ("fedfrozen", {"warmup_rounds": "auto", "least_warmup_rounds": 9}, {}, {}, "lower least_warmup_rounds"),
        ("safl", {"score": "random", "profile_every": 3}, {}, {}, "/method/settings/profile_every"),
        ("safl", {"score": "last", "tokens": {"where": "last"}}, {}, {}, "/method/settings/tokens"),
        ("safl", {"prune_by": "magnitude"}, {}, {}, "/method/settings/prune_by"),
        ("safl", {"score": "fixed", "fixed": ["*.0"], "layers": 1}, {}, {}, "/method/settings/layers"),
        ("moon", {"mu": 0, "temperature": 0.1}, {}, {}, "/method/settings/temperature"),
        ("fedbabu", {"tune": "head", "tune_epochs": 0}, {}, {}, "/method/settings/tune"),
        ("scaffold", {"strength": 0, "population": 4}, {}, {}, "/method/settings/population"),
        ("feddyn", {"alpha": 0, "population": 4}, {}, {}, "/method/settings/population"),
        ("local", {}, SENT, {}, "sends no blocks, so that codec would"),
        ("local", {}, {"signals": {"drift": True}}, {}, "sends no blocks, so that signals would"),
        ("fedavg", {}, {"signals": {"every": 2}}, {}, "or set drift to true"),
        (
            "local",
            {},
            {"server_optimizer": {"kind": "adam"}, "upload_budget": 9},
            {},
            "upload_budget, server_optimizer",
        ),
        ("local", {}, {"robust": {"rule": "median"}, "cohort": {"quorum": 3}}, {}, "robust would"),
    ],
)
def test_a_setting_that_would_have_no_effect_is_refused_with_its_remedy(
    method: str, settings: dict[str, Any], run: dict[str, Any], training: dict[str, Any], pointer: str
) -> None:
    assert pointer in (said := refusal(spec_of(method, settings, run, **training), PLAIN)), said
    assert any(remedy in said.lower() for remedy in ("leave it out", "leave them out", "lower")), said


def test_a_target_that_ends_rounds_early_is_taken() -> None:
    assert not refusal(spec_of("fedavg", run={"cohort": {"size": 3, "target_updates": 2}}), PLAIN)
    assert not refusal(spec_of("fedavg", run={"cohort": {"target_updates": 9}}), PLAIN)


@pytest.mark.parametrize(("subject", "settings"), [(ADAPTED, {}), (PLAIN, {"within": ["mlp"]})])
def test_safl_prunes_no_rows_by_the_attention_of_heads_that_they_are_not_of(
    subject: Subject, settings: dict[str, Any]
) -> None:
    pruned = {"prune": 0.25, "score": "random", **settings}
    assert "set prune_by to magnitude" in refusal(spec_of("safl", pruned), subject)
    assert not refusal(spec_of("safl", {**pruned, "prune_by": "magnitude"}), subject)
    assert not refusal(spec_of("safl", {"prune": 0.25}), PLAIN)


def test_an_alpha_that_makes_feddyn_diverge_is_warned_of_at_creation() -> None:
    def said(alpha: float, state: State) -> str:
        facts = run_facts(spec_of("feddyn"), PLAIN.document())  # a learning rate of 0.05
        chosen = MethodSpec(name="feddyn", settings={"alpha": alpha})
        return "".join(coordinator_half(chosen, facts).warnings(state))

    first = State(0, {})
    assert "Lower alpha to at most 40" in said(50, first)
    assert not said(30, first)
    assert not said(50, State(1, {}))


def test_a_rate_of_blocks_that_are_frozen_beside_adapters_is_refused() -> None:
    assert "/training/rates: sets one for query blocks" in refusal(spec_of("fedavg", rates={"query": 2.0}), ADAPTED)
    assert not refusal(spec_of("fedavg", rates={"adapter": 2.0}), ADAPTED)
    assert not refusal(spec_of("fedavg", rates={"query": 2.0}, full_fine_tuning=True), ADAPTED)


@pytest.mark.parametrize("fusion", [{"kind": "mean", "heads": 4}, {"kind": "concat", "asks": "local"}])
def test_a_setting_of_attention_is_refused_where_nothing_attends(fusion: dict[str, Any]) -> None:
    said = refusal(spec_of("pfeddc", {"fusion": fusion}), replace(PROMPTED, prompts=Prompts(vision=2, text=2)))
    assert "/method/settings/fusion/" in said
    nothing = spec_of("pfeddc", {"share": "nothing", "fusion": {"kind": "mean"}}, SENT)
    assert "sends no blocks" in refusal(nothing, replace(PROMPTED, prompts=Prompts(vision=2, text=2)))


@pytest.mark.parametrize("method", sorted(methods()))
def test_no_default_is_refused_for_having_no_effect(method: str) -> None:
    spec = spec_of(method)
    written = spec.model_copy(update={"method": MethodSpec.model_validate(
        {"name": method, "settings": methods()[method].settings().model_dump(mode="json")}
    ), "rounds": 9})  # fmt: skip
    assert not refusal(RunSpec.model_validate_json(written.model_dump_json()), subject_of(method))


def test_a_default_warm_up_of_the_whole_run_is_warned_of() -> None:
    facts = run_facts(spec_of("fedfrozen", run={"rounds": 5}), PLAIN.document())
    assert "nothing is ever frozen" in coordinator_half(MethodSpec(name="fedfrozen"), facts).warnings(State(0, {}))[0]
    assert not coordinator_half(MethodSpec(name="fedfrozen"), replace(facts, rounds=6)).warnings(State(0, {}))
