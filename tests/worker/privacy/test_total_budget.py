"""The budget of all data sets of a site together."""

from __future__ import annotations

import json
import math
from pathlib import Path
from threading import Thread
from typing import Any, cast

import pytest
import torch
from typer.testing import CliRunner

from tessera.shared.run_settings import Budget, Unit
from tessera.worker.cli.worker import app
from tessera.worker.governance.policy import Allowance, Policy, PolicyViolation
from tessera.worker.privacy import accountant
from tessera.worker.privacy.account import PrivacyAccount
from tessera.worker.privacy.accountant import admits, least_budget
from tessera.worker.settings import read_settings
from tessera.worker.state.blob_cache import Cache
from tessera.worker.state.hash_chain import TaskRef
from tessera.worker.state.privacy_ledger import ExactUse, Ledger, NoisySteps
from tessera.worker.state.vault import Vault
from tessera.worker.stores import ledger_of
from tessera.worker.task.runner import TaskRunner
from tessera.worker.training.setup import TrainingSetup
from tests.support.runner import task_runner
from tests.worker.cli.test_ledger import config as config  # noqa: PLC0414  (a fixture)
from tests.worker.governance.test_policy import private
from tests.worker.governance.test_policy import task as plain_task
from tests.worker.privacy.test_private_task import PRIVACY, spent
from tests.worker.privacy.test_private_task import task as task_of

STEPS = NoisySteps(noise_multiplier=2.0, sampling_rate=0.2, steps=20)
TOTAL = Allowance(epsilon=4.0, delta=1e-5)


def a_runner(folder: Path, policy: Policy) -> TaskRunner:
    # No task runs, so nothing asks a coordinator.
    setup, cache = TrainingSetup(torch.device("cpu")), Cache(folder / "cache", 1 << 20)
    return task_runner(
        cast("Any", None), {}, setup, Vault(folder / "vault"), cache, folder, policy=policy, ledger=Ledger(folder)
    )


def spend(folder: Path, dataset: str, unit: Unit = "example", steps: NoisySteps = STEPS) -> None:
    with Ledger(folder).page(dataset) as page:
        page.spend(TaskRef("other", "other", 1, "t", 1), 40, PRIVACY, [steps], unit=unit)


def task_under(folder: Path, total: Allowance = TOTAL) -> PrivacyAccount:
    """A task on the data set `wards`, whose run has epsilon 3."""
    return PrivacyAccount(task_of(rounds=1), PRIVACY, 40, Ledger(folder), None, total=total)


def test_what_runs_spent_of_other_data_sets_counts(tmp_path: Path) -> None:
    task_under(tmp_path / "alone").begin(steps=5)
    spend(tmp_path, "clinics")
    spend(tmp_path, "archive")
    with pytest.raises(
        PolicyViolation, match=r"bring all data sets together to an epsilon of \d\.?\d* at"
    ) as refused:
        task_under(tmp_path)
    assert refused.value.rule == "max_total_privacy"
    assert spent(tmp_path) == []


def test_the_sum_is_that_of_one_data_set_with_all_the_events(tmp_path: Path) -> None:
    spend(tmp_path, "clinics")
    spend(tmp_path, "archive")
    task_under(tmp_path, Allowance(epsilon=20.0, delta=1e-5)).begin(steps=5)
    (own,) = spent(tmp_path)
    enough = least_budget([STEPS, STEPS, own], 1e-5)
    for folder, epsilon, admitted in (("more", 1.001 * enough, True), ("less", 0.97 * enough, False)):
        for dataset in ("clinics", "archive"):
            spend(tmp_path / folder, dataset)
        total = Allowance(epsilon=epsilon, delta=1e-5)
        if admitted:
            task_under(tmp_path / folder, total)
            continue
        with pytest.raises(PolicyViolation):
            task_under(tmp_path / folder, total)


def test_a_ledger_counts_once_for_all_names_that_share_it(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, shared={"wards": "people", "clinics": "people"})
    spend(tmp_path, "people")
    assert ledger.elsewhere("wards") == ledger.elsewhere("clinics") == ()
    assert len(ledger.read("wards")) == 1
    assert len(ledger.elsewhere("archive")) == 1


def test_what_was_taken_back_elsewhere_does_not_count(tmp_path: Path) -> None:
    spend(tmp_path, "clinics")
    with Ledger(tmp_path).page("clinics") as page:
        page.void(TaskRef("other", "other", 1, "t", 1), [page.entries[0].seq])
    assert Ledger(tmp_path).elsewhere("wards") == ()


@pytest.mark.parametrize("unit", ["example", "group"])
def test_exact_uses_of_other_data_sets_have_to_be_acknowledged(tmp_path: Path, unit: Unit) -> None:
    with Ledger(tmp_path).page("clinics") as page:
        page.exact(TaskRef("other", "other", 1, "t", 1), 40, "training")
    assert Ledger(tmp_path).elsewhere("wards")[0].events == (ExactUse(use="training"),)
    with pytest.raises(PolicyViolation, match="the privacy loss of all data sets together is unbounded") as refused:
        task_under(tmp_path, TOTAL.model_copy(update={"unit": unit}))
    assert refused.value.rule == "acknowledge_exact"
    task_under(tmp_path, TOTAL.model_copy(update={"acknowledge_exact": True}))


@pytest.mark.parametrize("rule", ["max_total_privacy", "max_weekly_privacy"])
def test_a_budget_of_the_site_refuses_what_it_does_not_cover(rule: str) -> None:
    policy = Policy.model_validate({rule: TOTAL})
    policy.check_task(plain_task(privacy=private()), ("train",))
    for asked in (plain_task(), plain_task(privacy=private(selection="uncovered")), plain_task(kind="evaluate")):
        with pytest.raises(PolicyViolation, match="this site has a budget") as refused:
            policy.check_task(asked, ("train", "evaluate"))
        assert refused.value.rule == rule


@pytest.mark.parametrize("rule", ["max_total_privacy", "max_weekly_privacy"])
def test_a_site_with_a_budget_is_measured_only_if_the_budget_allows_it(tmp_path: Path, rule: str) -> None:
    allowing = TOTAL.model_copy(update={"evaluations": True})
    assert not a_runner(tmp_path, Policy.model_validate({rule: TOTAL})).may_measure("wards", 100)
    assert a_runner(tmp_path, Policy.model_validate({rule: allowing})).may_measure("wards", 100)
    Policy.model_validate({rule: allowing}).check_task(plain_task(kind="evaluate"), ("evaluate",))


def test_two_tasks_at_once_on_two_data_sets_do_not_both_get_what_is_left(tmp_path: Path) -> None:
    total = Allowance(epsilon=4.0, delta=1e-5)
    tasks = [
        PrivacyAccount(task_of(rounds=1, dataset=name), PRIVACY, 40, Ledger(tmp_path), None, total=total)
        for name in ("wards", "clinics")
    ]
    refused: list[PolicyViolation] = []

    def begin(task: PrivacyAccount) -> None:
        try:
            task.begin(steps=5)
        except PolicyViolation as violation:
            refused.append(violation)

    threads = [Thread(target=begin, args=(task,)) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [violation.rule for violation in refused] == ["max_total_privacy"]
    assert len(Ledger(tmp_path).read("wards")) + len(Ledger(tmp_path).read("clinics")) == 1


def test_the_ledger_shows_the_sum_of_all_data_sets(config: Path) -> None:
    # Of two data sets, one of which the settings do not have any more, under the site's key.
    for name in ("wards", "removed"):
        with ledger_of(read_settings(config)).page(name) as page:
            page.spend(TaskRef("other", "other", 1, "t", 1), 40, PRIVACY, [STEPS])
    config.write_text(config.read_text() + "\n[policy]\nmax_total_privacy = { epsilon = 9.0, delta = 1e-5 }\n")
    shown = json.loads(CliRunner().invoke(app, ["ledger", "--config", str(config), "--json"]).stdout)
    assert (shown["all data sets"]["budget"], shown["all data sets"]["runs"]) == (9.0, [])
    assert shown["all data sets"]["epsilon"] == least_budget([STEPS, STEPS], 1e-5)


def test_the_spending_of_all_data_sets_is_reported(tmp_path: Path) -> None:
    for name in ("wards", "clinics"):
        spend(tmp_path, name)
    runner = a_runner(tmp_path, Policy(max_total_privacy=Allowance(epsilon=20.0, delta=1e-5)))
    assert runner.total_spent() == least_budget([STEPS, STEPS], 1e-5)
    spend(tmp_path, "archive")
    assert runner.total_spent() == least_budget([STEPS, STEPS, STEPS], 1e-5)
    assert a_runner(tmp_path, Policy()).total_spent() is None
    with Ledger(tmp_path).page("clinics") as page:
        page.exact(TaskRef("other", "other", 1, "t", 1), 40, "training")
    assert runner.total_spent() == math.inf


def test_an_event_more_is_judged_by_one_divergence_more() -> None:
    # A thousand events of as many settings: what judging them costs is the divergences that are not known yet.
    events = [NoisySteps(noise_multiplier=2 + n / 64, sampling_rate=0.05, steps=1 + n) for n in range(1000)]
    budget, divergences = Budget(epsilon=3.0, delta=1e-5), accountant._divergences
    before = divergences.cache_info().misses
    admits(events[:-1], budget)
    # The grid of noise multipliers makes one of some that are nearly alike.
    assert divergences.cache_info().misses - before <= 999
    before = divergences.cache_info().misses
    admits(events, budget)
    assert divergences.cache_info().misses - before <= 1
