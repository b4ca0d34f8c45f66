"""What a site's rules for examples and for groups make of runs that protect the one or the other."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pydantic import ValidationError

from tessera.coordinator.domain.eligibility import policy_warnings
from tessera.shared.api.tasks import AdvertisedPolicy
from tessera.shared.run_settings import UnitBudget
from tessera.worker.governance.descriptions import policy_in_words
from tessera.worker.governance.policy import Allowance, Policy, PolicyViolation, PrivacyFloor
from tessera.worker.privacy.budgets import SiteLimits
from tessera.worker.state.privacy_ledger import (
    ExactUse,
    LedgerEntry,
    NoisyChoice,
    NoisySteps,
    OneInGroup,
    noisy_in,
    unbounded_in,
    unit_of,
)
from tests.coordinator.domain.test_eligibility import invited, rules
from tests.worker.governance.test_policy import private, task

STEPS = NoisySteps(noise_multiplier=1.5, sampling_rate=0.1, steps=10)
CHOICE = NoisyChoice(rho=0.01)
GROUPS = private(unit="group")
EXAMPLES = private()


def entry(unit: str, *events: Any) -> LedgerEntry:
    target = {"epsilon": 3.0, "delta": 1e-5}
    return LedgerEntry.model_validate(
        {"seq": 0, "at": datetime(2026, 11, 22, tzinfo=UTC), "previous": "", "dataset": "wards", "unit": unit,
         "target": target, "events": events, "run": "r", "run_name": "demo"}
    )  # fmt: skip


def before(days: float, unit: str, *events: Any) -> LedgerEntry:
    """An entry of that many days ago."""
    return entry(unit, *events).model_copy(update={"at": datetime.now(UTC) - timedelta(days=days)})


# ---------------------------------------------------------------- a run's settings


def test_a_run_protects_examples_unless_it_says_otherwise() -> None:
    assert (EXAMPLES.unit, EXAMPLES.examples_per_unit) == ("example", 1)
    assert (GROUPS.examples_per_unit, private(unit="group", max_per_group=3).examples_per_unit) == (8, 3)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_per_group": 4}, 'max_per_group is 4, but unit is "example": set unit to "group", or leave'),
        ({"unit": "group", "max_per_group": 0}, "greater than 0"),
        ({"unit": "group", "max_per_group": 1025}, "less than or equal to 1024"),
        ({"unit": "patient"}, "'example' or 'group'"),
    ],
)
def test_settings_of_groups_that_make_no_sense_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        private(**given)


# ---------------------------------------------------------------- a site's rules


def test_a_bound_for_groups_gives_a_weaker_one_for_examples_and_none_the_other_way() -> None:
    bound = UnitBudget(epsilon=1.0, delta=1e-6, unit="group")
    of_example = bound.in_unit("example")
    assert of_example is not None
    assert of_example.epsilon == 2.0
    assert of_example.delta == pytest.approx(1e-6 * (1 + math.e))
    assert UnitBudget(epsilon=1.0, delta=1e-6).in_unit("group") is None
    assert bound.in_unit("group") == bound
    assert UnitBudget(epsilon=800.0, delta=1e-6, unit="group").in_unit("example") is None


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (
            Policy(require_privacy=PrivacyFloor(epsilon=4.0, delta=1e-5, unit="group")),
            "no bound follows for each group; this site requires epsilon 4 at",
        ),
        (
            Policy(max_weekly_privacy=Allowance(epsilon=1.0, delta=1e-6, unit="group")),
            "max_weekly_privacy: this site has a budget for each group",
        ),
    ],
    ids=["floor", "weekly limit"],
)
def test_a_site_with_a_rule_for_groups_takes_no_run_that_protects_examples(policy: Policy, said: str) -> None:
    policy.check_task(task(privacy=GROUPS), ("train",))
    with pytest.raises(PolicyViolation, match=said):
        policy.check_task(task(privacy=EXAMPLES), ("train",))


def test_a_site_that_requires_groups_invites_no_run_that_protects_examples() -> None:
    floor = PrivacyFloor(epsilon=4.0, delta=1e-5, unit="group")
    advertised = Policy(require_privacy=floor).advertised_policy({}, 0)
    assert rules(invited(privacy=GROUPS), advertised_policy=advertised) == []
    assert rules(invited(privacy=EXAMPLES), advertised_policy=advertised) == ["require_privacy"]


def test_a_site_that_requires_privacy_of_examples_counts_what_follows_from_groups() -> None:
    for epsilon, passes in ((2.0, True), (2.1, False)):
        policy = Policy(require_privacy=PrivacyFloor(epsilon=4.0, delta=1e-4))
        run = private(unit="group", epsilon=epsilon)
        assert rules(invited(privacy=run), advertised_policy=policy.advertised_policy({}, 0)) == (
            [] if passes else ["require_privacy"]
        )
        if passes:
            policy.check_task(task(privacy=run), ("train",))
            continue
        with pytest.raises(
            PolicyViolation, match=r"for each group, from which epsilon 4\.2 at delta 9\.2e-06 follows"
        ):
            policy.check_task(task(privacy=run), ("train",))


def test_a_budget_of_groups_takes_no_run_that_protects_examples() -> None:
    budget = Allowance(epsilon=8.0, delta=1e-5, unit="group")
    budget.check(task(privacy=GROUPS))
    with pytest.raises(PolicyViolation, match=r"a budget for each group, and .* needs privacy.unit = 'group'"):
        budget.check(task(privacy=EXAMPLES))
    advertised = Policy().advertised_policy({"wards": budget}, 0)
    assert advertised.budgets["wards"].unit == "group"
    assert rules(invited(privacy=EXAMPLES), advertised_policy=advertised) == ["privacy"]


def test_a_preview_counts_a_run_of_groups_four_times_for_a_budget_of_examples() -> None:
    # In zCDP: of epsilon 1 at half of the budget's delta, four times as much is an epsilon of about 2.
    run = invited(privacy=private(unit="group", epsilon=1.0, delta=5e-6))
    for epsilon, unit, warns in ((2.2, "example", False), (1.8, "example", True), (1.1, "group", False)):
        budget = UnitBudget(epsilon=epsilon, delta=1e-5, unit=unit)  # type: ignore[arg-type]
        found = policy_warnings(run, AdvertisedPolicy(budgets={"wards": budget}), 0)
        assert [warning.rule for warning in found] == (["privacy"] if warns else [])


def test_a_weekly_limit_of_groups_waits_until_noise_for_examples_is_a_week_old() -> None:
    limits = SiteLimits("wards", "group", weekly=Allowance(epsilon=9.0, delta=1e-5, unit="group"))
    early, late = before(8, "example", STEPS), before(6, "example", STEPS)
    limits.judge([early], [STEPS], [])
    with pytest.raises(PolicyViolation, match=r"within seven days is unbounded .* noise for single examples"):
        limits.judge([early, late], [STEPS], [])


@pytest.mark.parametrize("use", ["training", "choice", "lost", "evaluation"])
def test_a_weekly_limit_waits_until_the_last_use_without_noise_is_a_week_old(use: str) -> None:
    week = Allowance(epsilon=9.0, delta=1e-5)
    limits = SiteLimits("wards", "example", weekly=week)
    # A run writes its exact uses down once a day: the last of them may be a day younger than its line.
    limits.judge([before(8, "example", ExactUse(use=use))], [STEPS], [])
    with pytest.raises(PolicyViolation, match=rf"within seven days is unbounded since .*\({use} without") as no:
        limits.judge([before(7.9, "example", ExactUse(use=use))], [STEPS], [])
    assert "eight days old" in no.value.remedy
    acknowledging = week.model_copy(update={"acknowledge_exact": True})
    SiteLimits("wards", "example", weekly=acknowledging).judge([before(1, "example", ExactUse(use=use))], [STEPS], [])


def test_a_weekly_limit_that_allows_evaluations_does_not_wait_for_them() -> None:
    limits = SiteLimits("wards", "example", weekly=Allowance(epsilon=9.0, delta=1e-5, evaluations=True))
    limits.judge([before(1, "example", ExactUse(use="evaluation"))], [STEPS], [])


def test_a_slow_clock_dates_no_use_before_the_one_that_it_followed() -> None:
    limits = SiteLimits("wards", "example", weekly=Allowance(epsilon=9.0, delta=1e-5))
    slow, old = before(2000, "example", ExactUse(use="training")), before(9, "example", STEPS)
    limits.judge([old, slow, before(6, "example", STEPS)], [STEPS], [])
    with pytest.raises(PolicyViolation, match="within seven days is unbounded"):
        limits.judge([old, before(6, "example", STEPS), slow], [STEPS], [])
    # A fast clock dates its own line alone.
    limits.judge([before(-2000, "example", STEPS), old, slow], [STEPS], [])


def test_a_batch_of_groups_counts_the_examples_that_it_may_have() -> None:
    policy = Policy(max_batch=24)
    policy.check_batch(3, 100, 8)
    policy.check_batch(None, 3, 8)
    with pytest.raises(PolicyViolation, match="a batch of 32 is more than the 24 allowed"):
        policy.check_batch(4, 100, 8)


@pytest.mark.parametrize(
    ("given", "sentences"),
    [
        (
            {"require_privacy": PrivacyFloor(epsilon=4.0, delta=1e-5, unit="group")},
            ["Runs that train need privacy: at most epsilon 4 at delta 1e-05 for each group."],
        ),
        (
            {"max_total_privacy": Allowance(epsilon=9.0, delta=1e-5, unit="group"), "require_secure_sums": True},
            [
                "On all data sets together, all runs may spend epsilon 9 at delta 1e-05 for each group.",
                "Updates leave only under masks, in runs with secure sums.",
                "Runs that train need differential privacy.",
            ],
        ),
        (
            {"max_weekly_privacy": Allowance(epsilon=1, delta=0.01)},
            [
                (
                    "On each data set, all runs together may spend epsilon 1 at delta 0.01 for each example in any "
                    "seven days."
                ),
                "Runs that train need differential privacy.",
            ],
        ),
        ({}, ["Runs need no differential privacy, except on data sets with a budget."]),
    ],
)
def test_the_policy_in_words_has_each_privacy_rule_and_no_other(given: dict[str, Any], sentences: list[str]) -> None:
    said = list(policy_in_words(Policy.model_validate(given)))
    assert set(sentences) <= set(said)
    assert given or not [one for one in said if "all data sets" in one or "mask" in one]


# ---------------------------------------------------------------- one ledger, two units


def test_noise_for_groups_counts_for_an_example_as_more() -> None:
    entries = [entry("example", STEPS), entry("group", CHOICE, STEPS)]
    assert noisy_in(entries) == [STEPS, NoisyChoice(rho=0.04), OneInGroup(STEPS)]
    assert unbounded_in(entries) == ()
    assert unit_of(entries) == "example"
    assert unit_of(entries[1:]) == "group"


def test_noise_for_examples_bounds_no_group() -> None:
    entries = [entry("group", STEPS), entry("example", CHOICE, STEPS), entry("example", ExactUse(use="evaluation"))]
    assert noisy_in(entries, "group") == [STEPS]
    uses = [use for _, use in unbounded_in(entries, "group")]
    assert uses == ["training of examples", "training of examples", "evaluation"]


def test_a_budget_of_groups_holds_after_training_of_examples_only_if_the_site_acknowledges_it() -> None:
    entries = [entry("group", STEPS), entry("example", STEPS)]
    with pytest.raises(
        PolicyViolation, match=r"unbounded since 2026-11-22 \(with noise for single examples, run 'demo'"
    ):
        Allowance(epsilon=8.0, delta=1e-5, unit="group").check_exact("'wards'", entries)
    Allowance(epsilon=8.0, delta=1e-5, unit="group", acknowledge_exact=True).check_exact("'wards'", entries)
    Allowance(epsilon=8.0, delta=1e-5).check_exact("'wards'", entries)
