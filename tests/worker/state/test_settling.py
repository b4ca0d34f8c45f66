"""Privacy is reserved before a task trains, taken back before its first step alone, and unbounded where no noise
covers it."""

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
from tessera.shared.api.secure_sums import SumTask
from tessera.shared.api.tasks import Task
from tessera.shared.methods.base import MethodSpec
from tessera.shared.problems import LeaseLost
from tessera.shared.run_settings import Privacy
from tessera.shared.schema import MAX_NUMBER
from tessera.worker.data.dataset import Dataset
from tessera.worker.governance.airlock import Airlock, HeldTask, UpdateWithheld
from tessera.worker.governance.policy import Allowance, Policy, PolicyViolation
from tessera.worker.privacy.account import PrivacyAccount
from tessera.worker.privacy.accountant import epsilon
from tessera.worker.state.audit import Audit, heads_of
from tessera.worker.state.blob_cache import Cache
from tessera.worker.state.checkpoints import Checkpoints
from tessera.worker.state.database import StateDatabase
from tessera.worker.state.hash_chain import Chain, TaskRef
from tessera.worker.state.privacy_ledger import ExactUse, Ledger, LedgerEntry, NoisySteps
from tessera.worker.state.vault import Vault
from tessera.worker.task.heartbeat import Stopped
from tessera.worker.task.runner import TaskRunner
from tessera.worker.training.progress import Report
from tessera.worker.training.setup import TrainingSetup
from tests.support.chain_rows import ChainRows
from tests.support.coordinator import LiveCoordinator
from tests.support.federation import ScriptedWorker, start_run
from tests.support.runner import task_runner
from tests.support.tasks import PLAIN, untrained
from tests.worker.privacy.test_private_task import PRIVACY, account, spent
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
        self.runner = task_runner(*given, ledger=self.ledger, audit=self.audit)
        self.worker.enrol()
        document, start = untrained(VIT, "image-classification", seed=1)
        training = Training(batch_size=8, learning_rate=0.01)
        start_run(
            coordinator.client(), document, start, rounds=2, method=MethodSpec(name="fedavg"), training=training,
            privacy=privacy,
        )  # fmt: skip

    def is_cut_off(self, task: Task, runner: TaskRunner | None = None, step: int = 1) -> None:
        """Does a task that loses its lease after a step, or before the first one."""
        report = Report()

        def check() -> None:
            if report.steps and report.step >= step:
                raise LeaseLost("another has it")

        with pytest.raises(LeaseLost):
            (runner or self.runner).run(task, check, report)

    def resuming(self, folder: Path) -> TaskRunner:
        """The runner of a process that starts now and writes checkpoints."""
        return replace(self.runner, checkpoints=Checkpoints(folder / "vault"), checkpoint_seconds=600.0)

    def events(self) -> list[object]:
        return [event for entry in self.ledger.read("data") for event in entry.events]


# ---------------------------------------------------------------- reserve and settle


def test_a_lease_that_is_lost_before_the_first_step_costs_no_budget(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    site = SiteWithRun(coordinator, tmp_path, PRIVACY)
    task = site.worker.take()
    for _ in range(2):
        site.is_cut_off(task, step=0)
    assert site.events() == []
    site.runner.run(task, lambda: None, Report())
    (paid,) = site.events()
    assert isinstance(paid, NoisySteps)
    # What left is known to the site's audit, and by its digest to the coordinator.
    left = next(entry for entry in site.audit.read() if entry.action == "update.leave")
    assert heads_of(left)["data"].entries == len(
        (ChainRows(tmp_path / "ledger", "ledger data")).read_bytes().splitlines()
    )
    (shown,) = (view for view in site.worker.client.tasks() if view.id == task.id)
    assert shown.audit_head == left.digest


def test_a_coordinator_that_drops_leases_pays_for_the_task_that_it_observed_and_once(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    # How long the task took until its end depends on the examples.
    site = SiteWithRun(coordinator, tmp_path, PRIVACY)
    task = site.worker.take()
    for _ in range(2):
        site.is_cut_off(task, site.resuming(tmp_path))
        assert len(site.events()) == 1
    # A resumed task began before: what ends it before its next step takes nothing back.
    site.is_cut_off(task, site.resuming(tmp_path), step=0)
    site.resuming(tmp_path).run(task, lambda: None, Report())
    (paid,) = site.events()
    assert isinstance(paid, NoisySteps)


def test_tasks_that_a_coordinator_ends_use_up_no_more_than_the_run_s_target(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    site = SiteWithRun(coordinator, tmp_path, PRIVACY)
    task = site.worker.take()
    for _ in range(3):
        site.is_cut_off(task)  # without checkpoints, each begins anew
    paid = [event for event in site.events() if isinstance(event, NoisySteps)]
    assert len(paid) == 3
    assert epsilon(paid, PRIVACY.delta) <= PRIVACY.epsilon


def test_an_update_that_a_person_withholds_stays_spent(coordinator: LiveCoordinator, tmp_path: Path) -> None:
    # They saw its noisy norms.
    site = SiteWithRun(coordinator, tmp_path, PRIVACY)
    airlock = Airlock(tmp_path, pause=0.0)
    held = replace(site.runner, airlock=airlock).run(site.worker.take(), lambda: None, Report())
    assert held
    airlock.decide(held.summary.id, "withhold", "ann")
    with pytest.raises(UpdateWithheld):
        held.wait(lambda: None)
    assert len(site.events()) == 1


def test_a_held_update_of_a_killed_process_is_sent_by_the_next_one_and_charged_once(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    site = SiteWithRun(coordinator, tmp_path, PRIVACY)
    airlock, task = Airlock(tmp_path, pause=0.0), site.worker.take()
    held = replace(site.resuming(tmp_path), airlock=airlock).run(task, lambda: None, Report())
    assert held
    airlock.decide(held.summary.id, "release", "ann")
    # Nothing in memory is left; the next one has other settings of the lease.
    runner = replace(site.resuming(tmp_path), airlock=Airlock(tmp_path))
    report = Report()
    again = runner.run(task.model_copy(update={"inline_bytes": 0}), lambda: None, report)
    assert again
    assert report.progress().phase == "held"
    assert (again.summary, report.metrics) == (held.summary, held.summary.metrics)
    (stored,) = StateDatabase.of(tmp_path).documents(HeldTask, "SELECT task FROM held")
    assert stored.private
    assert "noise_key" not in stored.private
    again.wait(lambda: None)
    again.send(runner, lambda: None)
    assert site.worker.client.task(task.id).update == held.summary.update
    assert len(site.events()) == 1
    # Had the answer been lost, a third lease would not be charged either.
    runner.run(task, lambda: None, Report())
    assert len(site.events()) == 1
    assert [entry.action for entry in site.audit.read()].count("update.hold") == 1


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
    account(folder, token=1).begin(steps=5)
    leaving = account(folder, token=2)
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
    private = account(tmp_path)
    private.begin(steps=5)
    private.leave()
    private.void()
    assert len(spent(tmp_path)) == 1


def test_a_try_under_a_token_that_was_used_before_takes_back_its_own_noise_alone(tmp_path: Path) -> None:
    # A coordinator may give two tries the same token; of the first one something left.
    first, second = account(tmp_path), account(tmp_path)
    first.begin(steps=5)
    first.leave()
    second.begin(steps=5)
    second.void()
    second.void()
    assert len(spent(tmp_path)) == 1


# ---------------------------------------------------------------- when a task ends

QUANTUM = 64.0


class Watch:
    """A clock by which each step takes `seconds`, and whose sleep costs no time."""

    def __init__(self, seconds: float) -> None:
        self.report = Report()
        self._seconds = seconds
        self._steps, self._slept = 0, 0.0

    def on(self, runner: TaskRunner) -> TaskRunner:
        return replace(runner, duration_quantum_seconds=QUANTUM, clock=lambda: self.lasted, sleep=self.sleep)

    def sleep(self, seconds: float) -> None:
        self._slept += seconds

    @property
    def lasted(self) -> float:
        self._steps = max(self._steps, self.report.step)
        return self._seconds * self._steps + self._slept


@pytest.mark.parametrize("end", ["accepted", "failed", "dropped", "out of time"])
def test_a_private_task_ends_at_a_multiple_of_the_quantum_however_long_its_steps_take(
    coordinator: LiveCoordinator, tmp_path: Path, end: str
) -> None:
    site = SiteWithRun(coordinator, tmp_path, PRIVACY)
    site.runner = replace(site.runner, policy=Policy(max_upload_bytes=1)) if end == "failed" else site.runner
    task = site.worker.take()
    for seconds, lasted in ((0.1, 64.0), (20.0, 64.0), (35.0, 128.0))[-1 if end == "accepted" else 0 :]:
        watch = Watch(seconds)

        def check(watch: Watch = watch) -> None:
            if watch.report.step == 2 and end in ("dropped", "out of time"):
                raise LeaseLost("gone") if end == "dropped" else PolicyViolation("max_task_seconds", "it is up")

        run = lambda: watch.on(site.runner).run(task, check, watch.report)  # noqa: B023, E731
        if end == "accepted":
            run()
        else:
            with pytest.raises((PolicyViolation, LeaseLost)):
                run()
        assert watch.lasted == pytest.approx(lasted)


def test_a_task_without_privacy_and_a_stop_by_the_site_do_not_wait(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    watch = Watch(1.0)
    site = SiteWithRun(coordinator, tmp_path, None)
    task = site.worker.take()
    watch.on(site.runner).run(task, lambda: None, watch.report)
    assert watch.lasted < QUANTUM
    assert watch.report.phase_seconds()
    private = task.model_copy(update={"privacy": PRIVACY})
    watch = Watch(1.0)

    def stopped() -> None:
        if watch.report.step == 2:
            raise Stopped

    with pytest.raises(Stopped):
        watch.on(site.runner).run(private, stopped, watch.report)
    assert watch.lasted < QUANTUM


class Killed(BaseException):
    """Stands for the end of the process."""


@pytest.mark.parametrize("end", [Killed, Stopped])
def test_a_worker_that_ends_during_the_wait_resumes_submits_and_is_charged_once(
    coordinator: LiveCoordinator, tmp_path: Path, end: type[BaseException]
) -> None:
    site = SiteWithRun(coordinator, tmp_path, PRIVACY)
    task, watch = site.worker.take(), Watch(1.0)

    def during_the_wait(_: float) -> None:
        assert watch.report.progress().activity == "training (private: no progress)"
        raise end

    with pytest.raises(end):
        replace(watch.on(site.resuming(tmp_path)), sleep=during_the_wait).run(task, lambda: None, watch.report)
    assert not [entry for entry in site.audit.read() if entry.action == "update.leave"]
    watch = Watch(1.0)
    watch.on(site.resuming(tmp_path)).run(task, lambda: None, watch.report)
    assert watch.lasted == pytest.approx(QUANTUM)
    assert len(site.events()) == 1
    assert site.worker.client.task(task.id).state == "accepted"


def test_what_may_reveal_nothing_of_an_example(coordinator: LiveCoordinator, tmp_path: Path) -> None:
    site = SiteWithRun(coordinator, tmp_path, None)
    runner, plain = site.runner, site.worker.take()
    masked = plain.model_copy(update={"sums": SumTask(terms=f"sha256:{'0' * 64}")})
    figures = plain.model_copy(update={"kind": "evaluate", "held_out": True})
    limited = replace(runner, allowances={"data": Allowance(epsilon=1.0, delta=1e-5, evaluations=True)})
    assert not any(map(runner.hides, (plain, figures)))
    assert all(map(runner.hides, (masked, plain.model_copy(update={"privacy": PRIVACY}))))
    assert runner.hides(figures.model_copy(update={"privacy": PRIVACY}))
    assert limited.hides(figures)
    # A helper uses no examples.
    assert not runner.hides(masked.model_copy(update={"kind": "agree"}))


# ---------------------------------------------------------------- a week


def weekly(folder: Path, most: Allowance, **more: object) -> PrivacyAccount:
    asked = task_of(**more)
    assert asked.privacy
    return PrivacyAccount(asked, asked.privacy, 40, Ledger(folder), None, weekly=most)


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
    """Make each entry of a ledger that many days older."""
    chain = Chain(StateDatabase.of(folder), "ledger wards", LedgerEntry)
    entries = chain.read()
    ChainRows(folder, chain.name).unlink()
    for entry in entries:
        chain.append(
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
    assert site.events() == [ExactUse(use="training")]
    site.runner.run(task, lambda: None, Report())
    # One entry a run, however many rounds.
    assert site.events() == [ExactUse(use="training")]


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
        PrivacyAccount(private, private.privacy, 24, site.ledger, budget)
    assert "acknowledge_exact = true" in refusal.value.remedy
    runner = replace(site.runner, allowances={"data": budget})
    assert runner.spent() == {"data": math.inf}
    assert runner.policy.advertised_policy(runner.allowances, 0, runner.spent()).spent == {"data": MAX_NUMBER}
    acknowledged = budget.model_copy(update={"acknowledge_exact": True})
    PrivacyAccount(private, private.privacy, 24, site.ledger, acknowledged).begin(steps=3)
    assert 0 < replace(runner, allowances={"data": acknowledged}).spent()["data"] <= 8.0


def test_a_run_without_noise_writes_a_line_a_day(tmp_path: Path) -> None:
    for days in (0, 0.9, 0.2, 0.9):
        days_pass(tmp_path, days)
        with Ledger(tmp_path).page("wards") as page:
            page.exact(TaskRef.of(task_of()), 40, "training")
    assert spent(tmp_path) == 2 * [ExactUse(use="training")]


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
