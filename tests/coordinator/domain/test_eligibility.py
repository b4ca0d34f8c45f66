"""What workers say of themselves, held against what a run asks; and the same judged by the site's own policy."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from pydantic import ValidationError

from tessera.coordinator.domain.eligibility import (
    RunTerms,
    misfit,
    objections,
    policy_of,
    policy_warnings,
    refused_model,
    refused_plan,
    refused_plans,
    unsuited,
)
from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import RunSpec, Training
from tessera.shared.api.secure_sums import SecureSums
from tessera.shared.api.tasks import AdvertisedPolicy, Task
from tessera.shared.api.versions import VersionRef
from tessera.shared.methods.base import ExtraArray, MethodSpec, Plan
from tessera.shared.model.blocks import Block
from tessera.shared.model.selectors import matcher, roles
from tessera.shared.rounds.client_privacy import noise_share, noise_terms
from tessera.shared.run_settings import Budget, ClientPrivacy, Privacy, UnitBudget
from tessera.shared.schedule import local_epochs
from tessera.worker.governance.policy import Allowance, Policy, PolicyViolation
from tests.support.federation import small_model

DIGEST = f"sha256:{'0' * 64}"
MODEL = small_model()
PRIVATE = Privacy(epsilon=4.0, delta=1e-6, clip_norm=1.0)
UNCOVERED = PRIVATE.model_copy(update={"selection": "uncovered"})
SUMS = {"secure_sums": SecureSums(helpers=("a", "b", "c")), "cohort": Cohort(quorum=5)}
NOISE = {
    "client_privacy": ClientPrivacy(epsilon=4.0, delta=1e-6, clip_norm=1.0, expected_sites=5),
    "normalization": "cohort",
}
OF_SITE = {"require_client_privacy": {"epsilon": 4.0, "delta": 1e-6}}
WEEKLY = {"max_weekly_privacy": {"epsilon": 1.0, "delta": 1e-6}}


def invited(orchestrator: str | None = "trial", run: str | None = "r", **spec: Any) -> RunTerms:
    given = {"name": "demo", "method": MethodSpec(name="fedavg"), "dataset": "wards", "rounds": 2, **spec}
    return RunTerms(RunSpec(model=DIGEST, version=DIGEST, **given), MODEL.nbytes, orchestrator, run)


def declared(advertised_policy: AdvertisedPolicy | None = None, **more: Any) -> dict[str, Any]:
    given = {
        "kinds": ["train"], "datasets": {"wards": 100}, "methods": ["fedavg"],
        "site_keys": {"site": "a"}, **more,
    }  # fmt: skip
    return {**given, "advertised_policy": advertised_policy.model_dump(mode="json")} if advertised_policy else given


def rules(invitation: RunTerms, site: str = "a", **said: Any) -> list[str]:
    return [found.rule for found in objections(invitation, site, declared(**said))]


def test_a_worker_that_has_all_it_takes_has_no_objection() -> None:
    assert rules(invited()) == []
    assert rules(invited(), advertised_policy=Policy().advertised_policy({}, 60)) == []


@pytest.mark.parametrize(
    ("spec", "said", "rule"),
    [
        ({"cohort": Cohort(sites=("b",))}, {}, "not-invited"),
        ({}, {"kinds": ["evaluate"]}, "kinds"),
        ({}, {"methods": ["fedprox"]}, "methods"),
        ({}, {"datasets": {"other": 5}}, "datasets"),
        ({}, {"withheld": {"r": "declined: not ours"}}, "withheld"),
    ],
)
def test_what_a_worker_lacks_is_named(spec: dict[str, Any], said: dict[str, Any], rule: str) -> None:
    assert rules(invited(**spec), **said) == [rule]


def test_a_worker_without_kornia_is_offered_no_run_that_changes_images() -> None:
    run = invited(training=Training.model_validate({"augmentation": {"horizontal_flip": 0.5}}))
    (found,) = objections(run, "a", declared())
    said = "it cannot change images: have the site run pip install 'tessera-fl[augmentation]'"
    assert found.detail == f"{said}, or leave out training.augmentation"
    assert rules(run, augments=True) == []


def test_only_the_run_that_is_named_is_withheld() -> None:
    assert rules(invited(run="s"), withheld={"r": "declined: not ours"}) == []


def test_a_run_that_is_withheld_on_some_terms_is_offered_once_they_have_changed() -> None:
    said = {"withheld": {"r": "awaiting-approval"}}
    said["withheld_terms"] = {"r": [{"rounds": n, "quorum": 1, "deadline_seconds": 3600} for n in (3, 4)]}  # type: ignore[dict-item]
    assert rules(invited(rounds=3), **said) == rules(invited(rounds=4), **said) == ["withheld"]
    assert rules(invited(rounds=2), **said) == rules(invited(rounds=3, cohort=Cohort(quorum=2)), **said) == []


@pytest.mark.parametrize(
    ("policy", "spec", "orchestrator"),
    [
        ({"orchestrators": ["trial"]}, {}, "other"),
        ({"orchestrators": ["trial"]}, {}, None),
        ({"studies": ["stroke"]}, {}, "trial"),
        ({"studies": ["default"]}, {"study": "stroke"}, "trial"),
        ({"max_epochs": 2}, {"training": Training(epochs=3)}, "trial"),
        # Four steps are an epoch of 100 examples.
        ({"max_epochs": 2}, {"training": Training(steps=9)}, "trial"),
        ({"max_batch": 10}, {"training": Training(batch_size=11)}, "trial"),
        ({"max_batch": 10}, {"training": Training(batch_size=None)}, "trial"),
        ({"min_batch": 30}, {"training": Training(steps=3, batch_size=29)}, "trial"),
        ({}, {**SUMS, "training": Training(steps=6, batch_size=15)}, "trial"),
        ({"require_privacy": {"epsilon": 4}}, {}, "trial"),
        ({"require_privacy": {"epsilon": 3}}, {"privacy": PRIVATE}, "trial"),
        ({"require_privacy": {"epsilon": 4, "delta": 1e-7}}, {"privacy": PRIVATE}, "trial"),
        ({"require_secure_sums": True}, {}, "trial"),
        (OF_SITE, {}, "trial"),
        # The coordinator adds the noise, which no site can verify.
        (OF_SITE, NOISE, "trial"),
        (OF_SITE, SUMS, "trial"),
        ({"require_client_privacy": {"epsilon": 3.9, "delta": 1e-6}}, {**SUMS, **NOISE}, "trial"),
        ({"require_client_privacy": {"epsilon": 4.0, "delta": 1e-7}}, {**SUMS, **NOISE}, "trial"),
        (WEEKLY, {}, "trial"),
        (WEEKLY, {"privacy": UNCOVERED}, "trial"),
        ({"max_weekly_privacy": {"epsilon": 9.0, "delta": 1e-6, "unit": "group"}}, {"privacy": PRIVATE}, "trial"),
    ],
)
def test_the_mirror_objects_to_what_the_policy_refuses_by_the_same_rule(
    policy: dict[str, Any], spec: dict[str, Any], orchestrator: str | None
) -> None:
    site = Policy.model_validate(policy)
    invitation = invited(orchestrator, **spec)
    with pytest.raises(PolicyViolation) as violation:
        judge(site, invitation)
    assert rules(invitation, advertised_policy=site.advertised_policy({}, 0)) == [violation.value.rule]


@pytest.mark.parametrize(
    ("policy", "spec"),
    [
        (
            {"orchestrators": ["trial"], "max_epochs": 3, "max_batch": 64},
            {"training": Training(epochs=3, batch_size=64)},
        ),
        ({"max_epochs": 2}, {"training": Training(steps=8)}),
        # Large batches, or each example.
        ({"min_batch": 30}, {"training": Training(steps=1, batch_size=30)}),
        ({"min_batch": 30}, {"training": Training(steps=4, batch_size=29)}),
        ({}, {"training": Training(steps=1, batch_size=1)}),
        ({}, {**SUMS, "training": Training(steps=1, batch_size=16)}),
        ({}, {**SUMS, "training": Training(steps=7, batch_size=15)}),
        ({"require_privacy": {"epsilon": 4, "delta": 1e-6}}, {"privacy": PRIVATE}),
        ({"require_secure_sums": True}, SUMS),
        ({"require_secure_sums": True, **OF_SITE}, {**SUMS, **NOISE}),
        # A week's spending depends on when the run trains: the worker alone judges it.
        (WEEKLY, {"privacy": PRIVATE}),
    ],
)
def test_the_mirror_lets_pass_what_the_policy_lets_pass(policy: dict[str, Any], spec: dict[str, Any]) -> None:
    site = Policy.model_validate(policy)
    judge(site, invited(**spec))
    assert rules(invited(**spec), advertised_policy=site.advertised_policy({}, 0)) == []


def judge(site: Policy, invitation: RunTerms) -> None:
    """As the worker does."""
    spec = invitation.spec
    task = Task(
        id="t", token=1, kind="train", run="r", run_name="demo", round=1, rounds=2, seed=0, method=spec.method,
        plan=Plan(), dataset="wards", training=spec.training, privacy=spec.privacy, codec="raw",
        normalization="participants", model=DIGEST, version=VersionRef(number=0, digest=DIGEST), lease_seconds=60.0,
        orchestrator=invitation.orchestrator, study=spec.study,
    )  # fmt: skip
    site.check_task(task, ("train",))
    site.check_work(task.training, 100, in_exact_sum=spec.has_exact_sums)
    if spec.secure_sums is None:
        site.check_unmasked()
    elif site.require_client_privacy:
        quorum = spec.secure_sums.quorum
        noise = noise_terms(spec, noise_share(spec, 100, quorum)) if spec.client_privacy else None
        site.require_client_privacy.check(noise, quorum)
    site.check_batch(spec.training.batch_size, 100)
    site.check_epochs(local_epochs(spec.training, 100))


def test_a_data_set_with_a_budget_is_for_runs_with_privacy_that_covers_all() -> None:
    advertised_policy = Policy().advertised_policy({"wards": Allowance(epsilon=8, delta=1e-6)}, 0)
    assert advertised_policy.budgets == {"wards": UnitBudget(epsilon=8, delta=1e-6)}
    assert rules(invited(), advertised_policy=advertised_policy) == ["privacy"]
    assert rules(invited(privacy=UNCOVERED), advertised_policy=advertised_policy) == ["privacy"]
    assert rules(invited(privacy=PRIVATE), advertised_policy=advertised_policy) == []


def test_what_may_end_a_workers_part_is_told_beforehand() -> None:
    budgets = {"wards": Allowance(epsilon=2.5, delta=1e-6)}
    run = invited(privacy=PRIVATE.model_copy(update={"epsilon": 2.4}), rounds=10)

    def told(site: Policy, spent: float, upload_bytes: int = 100) -> dict[str, str]:
        advertised_policy = site.advertised_policy(budgets, 0, {"wards": spent})
        return {one.rule: one.detail for one in policy_warnings(run, advertised_policy, upload_bytes)}

    assert told(Policy(), 0) == {}
    assert told(Policy(), 0.1) == {}
    both = "with the 2.4 of runs before, the run would spend an epsilon of about 3.49, and its site allows 2.5"
    assert told(Policy(), 2.4) == {"privacy": both}
    site = Policy(max_upload_bytes=99, max_run_upload_bytes=999, airlock=True, hours=("Sat 10:00-12:00",))
    assert told(site, 0).keys() == {"max_upload_bytes", "max_run_upload_bytes", "airlock", "hours"}
    assert told(site, 0, 99).keys() == {"airlock", "hours"}
    for spent in (2.5, math.inf):
        assert rules(run, advertised_policy=Policy().advertised_policy(budgets, 0, {"wards": spent})) == ["privacy"]


def test_a_budget_of_all_data_sets_is_judged_like_that_of_one() -> None:
    site = Policy(max_total_privacy=Allowance(epsilon=5.0, delta=1e-6))
    fresh, used, over = (site.advertised_policy({}, 0, None, spent) for spent in (0.0, 4.0, math.inf))
    assert (fresh.max_total_privacy, fresh.total_spent) == (UnitBudget(epsilon=5.0, delta=1e-6), None)
    assert rules(invited(), advertised_policy=fresh) == ["max_total_privacy"]
    run = invited(privacy=PRIVATE)
    assert rules(run, advertised_policy=fresh) == rules(run, advertised_policy=used) == []
    assert policy_warnings(run, fresh, 0) == []
    (warning,) = policy_warnings(run, used, 0)
    assert warning.rule == "max_total_privacy"
    assert warning.detail.startswith("with the 4 of runs before, the run would spend an epsilon of about 5.")
    assert warning.detail.endswith(", and its site allows 5 over all data sets")
    (refused,) = objections(run, "a", declared(over))
    assert (refused.rule, refused.detail) == (
        "max_total_privacy", "runs have spent its site's privacy budget of all data sets: epsilon 5",
    )  # fmt: skip


def test_blocks_that_would_have_to_leave_are_named() -> None:
    advertised_policy = Policy(never_send=("head*",), may_send=roles("value", "head")).advertised_policy({}, 0)
    assert refused_plan(advertised_policy, MODEL, Plan(upload=roles("value"))) is None
    never, may = (refused_plan(advertised_policy, MODEL, Plan(upload=roles(role))) for role in ("head", "key"))
    assert never
    assert (never.rule, never.detail) == ("never_send", "these blocks never leave it: head.weight")
    assert may
    assert (may.rule, may.detail) == ("may_send", "these blocks may not leave it: layer.0.qkv.weight#key")


def test_a_site_that_sends_no_exact_figures_is_not_asked_for_arrays_of_them() -> None:
    plan = Plan(upload=roles("value"), extra=(ExtraArray(name="means", shape=(2, 3)),))
    rounded = Policy(figures="rounded").advertised_policy({}, 0)
    found = refused_plan(rounded, MODEL, plan)
    assert found
    assert (found.rule, found.detail) == ("figures", "exact figures do not leave it: extra/means")
    assert refused_plan(rounded, MODEL, plan, private=True) is None
    assert refused_plan(rounded, MODEL, Plan(upload=roles("value"))) is None
    assert refused_plan(Policy().advertised_policy({}, 0), MODEL, plan) is None
    for policy in (Policy(never_send=("extra/*",)), Policy(may_send=roles("value"))):
        refused = refused_plan(policy.advertised_policy({}, 0), MODEL, plan)
        assert refused
        assert refused.detail.endswith("leave it: extra/means")


def test_a_site_whose_rule_keeps_back_no_block_is_not_planned_for() -> None:
    misspelt = Policy(never_send=("haed*",)).advertised_policy({}, 0)
    found = refused_plan(misspelt, MODEL, Plan(upload=roles("value")))
    assert found
    assert found.rule == "never_send"
    assert "no block called 'haed*', so that this rule protects nothing; did you mean `*head*`?" in found.detail
    optional = Policy(never_send_if_present=("haed*", "*head*")).advertised_policy({}, 0)
    assert refused_plan(optional, MODEL, Plan(upload=roles("value"))) is None
    assert refused_plan(optional, MODEL, Plan(upload=roles("head"))) is not None


@pytest.mark.parametrize(
    ("shown", "told"),
    [
        ({"never_send": ["x"] * 40, "never_send_if_present": ["y"] * 24}, "65 patterns and conditions together"),
        ({"may_send": {"exclude": [{"names": ["z"] * 63}]}}, "65 patterns and conditions together"),
        ({"may_send": {"include": [{"names": ["*a"] * 64}]}}, "65 patterns and conditions together"),
        ({"never_send": ["*a" * 9]}, "more than 8 stars"),
        ({"may_send": {"include": [{"names": ["*a" * 9]}]}}, "more than 8 stars"),
        ({"never_send": ["x" * 257]}, "at most 256 characters"),
    ],
)
def test_a_policy_whose_patterns_would_hold_up_planning_is_refused(shown: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        AdvertisedPolicy.model_validate(shown)
    if "x" * 257 not in shown.get("never_send", ()):
        # The worker says so before it claims.
        with pytest.raises(ValidationError, match=told):
            Policy.model_validate(shown)
    # One that the previous version stored ends no planning.
    assert policy_of({"advertised_policy": shown}) is None


def test_a_policy_is_judged_once_for_the_same_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    compared, real = Counter[str](), AdvertisedPolicy.withholds

    def counting(policy: AdvertisedPolicy, block: Block) -> bool:
        compared[block.name] += 1
        return real(policy, block)

    monkeypatch.setattr(AdvertisedPolicy, "withholds", counting)
    policies = {name: AdvertisedPolicy(never_send=("head*",)) for name in "abc"}
    spec, plans = invited().spec, dict.fromkeys("abc", Plan(upload=roles("head")))
    for _ in range(3):
        assert refused_plans(spec, MODEL, plans, policies).keys() == policies.keys()
    assert compared == {"head.weight": 3}
    assert not refused_plans(spec, MODEL, dict.fromkeys("abc", Plan(upload=roles("value"))), policies)


def test_a_pattern_is_compiled_when_it_is_declared() -> None:
    AdvertisedPolicy(never_send=("*declared-just-now*",))
    before = matcher.cache_info().misses
    assert matcher("*declared-just-now*")("a-declared-just-now-b")
    assert matcher.cache_info().misses == before


def test_a_model_of_another_type_or_size_is_objected_to() -> None:
    assert refused_model(Policy(models=("bert",)).advertised_policy({}, 0), MODEL) is None
    found = refused_model(Policy(models=("vit",)).advertised_policy({}, 0), MODEL)
    assert found
    assert (found.rule, found.detail) == ("models", "it takes no models of type bert")
    small = Policy(max_model_bytes=MODEL.nbytes - 1).advertised_policy({}, 0)
    assert rules(invited(), advertised_policy=small) == ["max_model_bytes"]


def test_a_mirror_shows_no_path_and_is_read_back_as_it_was() -> None:
    advertised_policy = Policy(hours=("Mon-Fri 19:00-07:00",), approve_runs=True).advertised_policy({}, 60)
    assert policy_of(declared(advertised_policy=advertised_policy)) == advertised_policy
    assert policy_of(declared()) is None
    assert not {"state_dir", "token"} & set(AdvertisedPolicy.model_fields)


def test_rules_that_a_version_before_does_not_know_are_passed_over_by_it() -> None:
    site = Policy.model_validate({"require_secure_sums": True, **OF_SITE, **WEEKLY})
    shown = site.advertised_policy({}, 0)
    assert shown.require_client_privacy == Budget(epsilon=4.0, delta=1e-6)
    assert shown.max_weekly_privacy == UnitBudget(epsilon=1.0, delta=1e-6)
    # A reader passes over fields that it does not know, and such a worker claims none of these.
    later = {**shown.model_dump(mode="json", exclude_defaults=True), "require_later": True}
    assert AdvertisedPolicy.model_validate(later) == shown
    assert rules(invited(), advertised_policy=AdvertisedPolicy()) == []


def test_texts_that_may_be_too_long_are_an_objection_only_where_they_are_padded() -> None:
    positions = Block(tensor="embeddings.position_embeddings.weight", role="embedding", shape=(128, 4), dtype="F32")
    model = MODEL.model_copy(update={"blocks": (*MODEL.blocks, positions)})
    said = declared(schemas={"wards": {"inputs": {"input_ids": {"dtype": "int64", "shape": [512]}}}})

    def unread(_: object) -> str | None:
        raise AssertionError("no worker declares a vocabulary")

    found = misfit(invited().spec, said, model, unread, padded=True)
    assert found is not None
    said_of_it = "max_length 512 is more than the 128 tokens that the model takes: set it to 128 or less"
    assert found.detail == f"its data set wards: {said_of_it}"
    assert unsuited(invited().spec, said, model, unread) is None
    assert unsuited(invited(privacy=PRIVATE).spec, said, model, unread) == found
    assert unsuited(invited(privacy=PRIVATE).spec, declared(), model, unread) is None


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({}, None),
        ({"privacy": PRIVATE}, "counts as not private"),
        (SUMS, "counts as not private"),
        (
            {"method": MethodSpec(name="scaffold")},
            "the method scaffold corrects gradients, which a site's own script",
        ),
        # Not installed here: the worker judges.
        ({"method": MethodSpec(name="unknown")}, None),
        ({"method": MethodSpec(name="fedprox", settings={"mu": -1})}, None),
    ],
)
def test_a_worker_with_a_script_of_its_own_objects_to_what_no_script_can_do(
    spec: dict[str, Any], said: str | None
) -> None:
    scripted = declared(
        AdvertisedPolicy(own_script=True), methods=[spec.get("method", MethodSpec(name="fedavg")).name]
    )
    details = [each.detail for each in objections(invited(**spec), "a", scripted) if each.rule == "executor"]
    assert len(details) == (said is not None)
    assert all(said in detail for detail in details if said)
