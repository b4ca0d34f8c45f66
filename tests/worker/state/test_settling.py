"""Privacy is reserved before a task trains, taken back if nothing left, and unbounded where no noise covers it."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch

from tessera.shared.api.runs import Training
from tessera.shared.api.tasks import Task
from tessera.shared.methods.base import MethodSpec
from tessera.shared.problems import LeaseLost
from tessera.shared.run_settings import Privacy
from tessera.shared.schema import MAX_NUMBER
from tessera.worker.data.dataset import Dataset
from tessera.worker.governance.airlock import Airlock, UpdateWithheld
from tessera.worker.governance.policy import Allowance, Policy, PolicyViolation
from tessera.worker.privacy.private_task import PrivateTask
from tessera.worker.state.audit import Audit, heads_of
from tessera.worker.state.blob_cache import Cache
from tessera.worker.state.hash_chain import Chain, TaskRef
from tessera.worker.state.privacy_ledger import Exact, Ledger, LedgerEntry, NoisySteps
from tessera.worker.state.vault import Vault
from tessera.worker.task.runner import TaskRunner
from tessera.worker.training.progress import Report
from tessera.worker.training.setup import TrainingSetup
from tests.support.coordinator import LiveCoordinator
from tests.support.federation import ScriptedWorker, start_run
from tests.support.tasks import PLAIN, untrained
from tests.worker.privacy.test_private_task import PRIVACY, private_task, spent
from tests.worker.privacy.test_private_task import task as task_of

CPU = torch.device("cpu")
KEY = b"k" * 64
VIT = {**PLAIN.config, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}


class SiteWithRun:
    """A task runner at a coordinator, with a run that it takes part in."""

    def __init__(self, coordinator: LiveCoordinator, folder: Path, privacy: Privacy | None) -> None:
        self.worker = ScriptedWorker(coordinator.client("site", "a"), datasets={"data": 24})
        self.ledger = Ledger(folder / "ledger", KEY)
        self.audit = Audit(folder / "audit", "w", KEY)
        generator = torch.Generator().manual_seed(5)
        pixels = torch.randn(24, 1, 8, 8, generator=generator)
        data = Dataset({"pixel_values": pixels, "labels": torch.randint(0, 3, (24,), generator=generator)})
        cache = Cache(folder / "cache", 1 << 24)
        given = (self.worker.client, {"data": data}, TrainingSetup(CPU), Vault(folder / "vault"), cache, folder)
        self.runner = TaskRunner(*given, ledger=self.ledger, audit=self.audit)
        self.worker.enrol()
        document, start = untrained(VIT, "image-classification", seed=1)
        training = Training(batch_size=8, learning_rate=0.01)
        start_run(
            coordinator.client(), document, start, rounds=2, method=MethodSpec(name="fedavg"), training=training,
            privacy=privacy,
        )  # fmt: skip

    def is_cut_off(self, task: Task) -> None:
        """Does a task that loses its lease after the first step."""
        report = Report()

        def check() -> None:
            if report.step:
                raise LeaseLost("another has it")

        with pytest.raises(LeaseLost):
            self.runner.run(task, check, report)

    def events(self) -> list[object]:
        return [event for entry in self.ledger.read("data") for event in entry.events]


# ---------------------------------------------------------------- reserve and settle


def test_a_coordinator_that_drops_leases_burns_no_budget(coordinator: LiveCoordinator, tmp_path: Path) -> None:
    site = SiteWithRun(coordinator, tmp_path, PRIVACY)
    task = site.worker.take()
    for _ in range(3):
        site.is_cut_off(task)
    assert site.events() == []
    site.runner.run(task, lambda: None, Report())
    (paid,) = site.events()
    assert isinstance(paid, NoisySteps)
    # What left is known to the site's audit, and by its digest to the coordinator.
    left = next(entry for entry in site.audit.read() if entry.action == "update.leave")
    assert heads_of(left)["data"].entries == len((tmp_path / "ledger" / "data.jsonl").read_bytes().splitlines())
    (shown,) = (view for view in site.worker.client.tasks() if view.id == task.id)
    assert shown.audit_head == left.digest


def test_an_update_that_a_person_withholds_burns_no_budget(coordinator: LiveCoordinator, tmp_path: Path) -> None:
    site = SiteWithRun(coordinator, tmp_path, PRIVACY)
    airlock = Airlock(tmp_path / "airlock", pause=0.0)
    airlock.waits = lambda: airlock.decide(airlock.held()[0].id, "withhold", "ann") and None
    with pytest.raises(UpdateWithheld):
        replace(site.runner, airlock=airlock).run(site.worker.take(), lambda: None, Report())
    assert site.events() == []


def test_a_failure_that_may_depend_on_what_was_computed_stays_spent(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    site = SiteWithRun(coordinator, tmp_path, PRIVACY)
    runner = replace(site.runner, policy=Policy(max_upload_bytes=1))
    with pytest.raises(PolicyViolation, match="max_upload_bytes"):
        runner.run(site.worker.take(), lambda: None, Report())
    assert len(site.events()) == 1


@pytest.mark.parametrize("rule", ["max_task_seconds", "max_minutes_per_day"])
def test_a_task_whose_time_was_up_stays_spent(coordinator: LiveCoordinator, tmp_path: Path, rule: str) -> None:
    # An example that fails costs more time, so a coordinator that learns of the end would learn of the example.
    site = SiteWithRun(coordinator, tmp_path, PRIVACY)
    report = Report()

    def check() -> None:
        if report.step:
            raise PolicyViolation(rule, "the time is up")

    with pytest.raises(PolicyViolation, match=rule):
        site.runner.run(site.worker.take(), check, report)
    (paid,) = site.events()
    assert isinstance(paid, NoisySteps)


def _leave_and_die(folder: Path) -> None:
    private_task(folder, token=1).begin(steps=5)
    leaving = private_task(folder, token=2)
    leaving.begin(steps=5)
    leaving.leave()
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_killed_process_reserved_stays_spent(tmp_path: Path) -> None:
    site = multiprocessing.get_context("fork").Process(target=_leave_and_die, args=(tmp_path,))
    site.start()
    site.join()
    assert site.exitcode == -signal.SIGKILL
    assert len(spent(tmp_path)) == 2


def test_what_may_have_left_is_not_taken_back(tmp_path: Path) -> None:
    private = private_task(tmp_path)
    private.begin(steps=5)
    private.leave()
    private.void()
    assert len(spent(tmp_path)) == 1


def test_a_try_under_a_token_that_was_used_before_takes_back_its_own_noise_alone(tmp_path: Path) -> None:
    # A coordinator may give two tries the same token; of the first one something left.
    first, second = private_task(tmp_path), private_task(tmp_path)
    first.begin(steps=5)
    first.leave()
    second.begin(steps=5)
    second.void()
    second.void()
    assert len(spent(tmp_path)) == 1


# ---------------------------------------------------------------- a week


def weekly(folder: Path, most: Allowance, **more: object) -> PrivateTask:
    asked = task_of(**more)
    assert asked.privacy
    return PrivateTask(asked, asked.privacy, 40, Ledger(folder), None, weekly=most)


def test_a_week_holds_so_much_over_all_runs_and_the_next_one_anew(tmp_path: Path) -> None:
    most = Allowance(epsilon=2.0, delta=1e-5)
    for number in range(1, 5):
        weekly(tmp_path / "once", Allowance(epsilon=3.2, delta=1e-5), round=number).begin(steps=5)
    # A round of a run with epsilon 3 takes about 1.4 of it.
    weekly(tmp_path, most, run="run-1").begin(steps=5)
    with pytest.raises(PolicyViolation, match=r"within seven days .* allows 2$") as refusal:
        weekly(tmp_path, most, run="run-2")
    assert refusal.value.rule == "max_weekly_privacy"
    # Of what was spent eight days ago, nothing counts any more.
    days_pass(tmp_path, 8)
    weekly(tmp_path, most, run="run-9").begin(steps=5)


def test_a_week_begins_when_an_update_leaves_and_not_when_its_privacy_was_reserved(tmp_path: Path) -> None:
    most = Allowance(epsilon=2.0, delta=1e-5)
    held = weekly(tmp_path, most, run="run-1")
    held.begin(steps=5)
    # A person releases it in the airlock a week later, within the five minutes for which the reservation counts.
    days_pass(tmp_path, 7 - 5 / 1440)
    held.leave()
    (entry,) = Ledger(tmp_path).read("wards")
    assert datetime.now(UTC) - entry.at < timedelta(days=1)
    days_pass(tmp_path, 5 / 1440)
    with pytest.raises(PolicyViolation, match="within seven days"):
        weekly(tmp_path, most, run="run-2")
    assert len(spent(tmp_path)) == 1
    days_pass(tmp_path, 7)
    weekly(tmp_path, most, run="run-2")


def test_an_update_does_not_leave_in_a_week_that_others_have_used_up(tmp_path: Path) -> None:
    most = Allowance(epsilon=2.0, delta=1e-5)
    held, other = weekly(tmp_path, most, run="run-1"), weekly(tmp_path, most, run="run-2")
    held.begin(steps=5)
    days_pass(tmp_path, 8)
    other.begin(steps=5)
    other.leave()
    days_pass(tmp_path, 1)
    with pytest.raises(PolicyViolation, match="within seven days") as refusal:
        held.leave()
    assert refusal.value.rule == "max_weekly_privacy"
    # It may a week later.
    days_pass(tmp_path, 7)
    held.leave()
    assert len(spent(tmp_path)) == 2


def days_pass(folder: Path, days: float) -> None:
    """Make each line of a ledger that many days older."""
    path = folder / "wards.jsonl"
    entries = Chain(path, LedgerEntry).read()
    path.unlink(missing_ok=True)
    for entry in entries:
        Chain(path, LedgerEntry).append(
            lambda _, previous, entry=entry: entry.model_copy(
                update={"previous": previous, "at": entry.at - timedelta(days=days)}
            )
        )


# ---------------------------------------------------------------- what no noise covers


def test_training_without_privacy_is_written_down_before_anything_of_it_leaves(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    site = SiteWithRun(coordinator, tmp_path, None)
    task = site.worker.take()
    site.is_cut_off(task)  # as kill -9 would: nothing is written after the first step
    assert site.events() == [Exact(use="training")]
    site.runner.run(task, lambda: None, Report())
    # One entry a run, however many rounds.
    assert site.events() == [Exact(use="training")]


def test_a_budget_set_after_training_without_privacy_is_refused_until_the_site_acknowledges_it(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    site = SiteWithRun(coordinator, tmp_path, None)
    site.runner.run(site.worker.take(), lambda: None, Report())
    private = task_of(dataset="data")
    assert private.privacy
    budget = Allowance(epsilon=8.0, delta=1e-5)
    with pytest.raises(
        PolicyViolation, match=r"unbounded since 2\d{3}-\d\d-\d\d \(training without noise, run 'test'"
    ) as refusal:
        PrivateTask(private, private.privacy, 24, site.ledger, budget)
    assert "acknowledge_exact = true" in refusal.value.remedy
    runner = replace(site.runner, allowances={"data": budget})
    assert runner.spent() == {"data": math.inf}
    assert runner.policy.advertised_policy(runner.allowances, 0, runner.spent()).spent == {"data": MAX_NUMBER}
    acknowledged = budget.model_copy(update={"acknowledge_exact": True})
    PrivateTask(private, private.privacy, 24, site.ledger, acknowledged).begin(steps=3)
    assert 0 < replace(runner, allowances={"data": acknowledged}).spent()["data"] <= 8.0


def test_a_run_without_noise_writes_a_line_a_day(tmp_path: Path) -> None:
    for days in (0, 0.9, 0.2, 0.9):
        days_pass(tmp_path, days)
        with Ledger(tmp_path).page("wards") as page:
            page.exact(TaskRef.of(task_of()), 40, "training")
    assert spent(tmp_path) == 2 * [Exact(use="training")]


def test_an_uncovered_choice_is_written_down_when_the_data_are_looked_at(tmp_path: Path) -> None:
    uncovered = private_task(tmp_path, privacy=PRIVACY.model_copy(update={"selection": "uncovered"}))
    watched = uncovered.watched([])
    assert spent(tmp_path) == []
    list(watched)
    assert spent(tmp_path) == [Exact(use="choice")]


def test_figures_are_covered_by_a_budget_s_own_leave_and_training_is_not(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    with ledger.page("wards") as page:
        page.exact(TaskRef.of(task_of()), 10, "evaluation")
    entries = ledger.read("wards")
    Allowance(epsilon=1.0, delta=1e-5, evaluations=True).check_exact("'wards'", entries)
    with pytest.raises(PolicyViolation, match="evaluation without noise"):
        Allowance(epsilon=1.0, delta=1e-5).check_exact("'wards'", entries)
    with ledger.page("wards") as page:
        page.exact(TaskRef.of(task_of()), 40, "training")
    with pytest.raises(PolicyViolation, match="training without noise"):
        Allowance(epsilon=1.0, delta=1e-5, evaluations=True).check_exact("'wards'", ledger.read("wards"))
