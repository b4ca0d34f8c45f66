"""An attack tells what a site trained on from what it held out: how well, and what the site lets leave of it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tessera.shared.api.membership import LOSS_BINS, LOSS_EDGES, MembershipCounts
from tessera.shared.api.runs import Evaluation, Run, RunSpec, SiteReport, Training
from tessera.shared.client.previews import attack_of
from tessera.shared.metrics.membership import MembershipFigures, membership_figures
from tessera.shared.run_settings import Budget
from tessera.worker.data.dataset import Dataset
from tessera.worker.errors import TaskFailure
from tessera.worker.governance.airlock import Airlock
from tessera.worker.governance.approvals import Inbox, Unapproved
from tessera.worker.governance.described_data import Answers, DescribedData
from tessera.worker.governance.disclosure import DisclosureRule
from tessera.worker.governance.policy import Allowance, Policy, PolicyViolation, PrivacyFloor
from tessera.worker.governance.run_history import RunHistory
from tessera.worker.privacy.disclosed_counts import counts_along
from tessera.worker.state.audit import Audit
from tessera.worker.state.blob_cache import Cache
from tessera.worker.state.database import StateDatabase
from tessera.worker.state.privacy_ledger import ExactUse, Ledger
from tessera.worker.state.vault import Vault
from tessera.worker.task.runner import TaskRunner
from tessera.worker.training.progress import Report
from tessera.worker.training.setup import TrainingSetup
from tests.support.coordinator import LiveCoordinator, until
from tests.support.federation import ScriptedWorker, start_run
from tests.support.runner import task_runner
from tests.support.tasks import CPU, VIT, images, untrained

MEMBERS, OTHERS = 180, 120
MEMORISES = Training(optimizer="adamw", learning_rate=0.01, batch_size=30, epochs=60)
"""The labels are random: nothing but the examples themselves can be learned."""


def pictures(groups: int | None = None) -> Dataset:
    whole = images(MEMBERS + OTHERS)
    if groups:
        names = [f"patient {place // groups}".encode() for place in range(whole.examples)]
        whole = replace(whole, groups=names)
    return split(MEMBERS, whole)


def split(members: int, whole: Dataset | None = None) -> Dataset:
    whole = whole or images(MEMBERS + OTHERS)
    rows = torch.arange(whole.examples)
    return replace(whole.rows(rows[:members]), held_out=whole.rows(rows[members:]))


def counts(members: Mapping[int, int], others: Mapping[int, int], *, known: bool = True) -> MembershipCounts:
    of_members, of_others = (tuple(each.get(place, 0) for place in range(LOSS_BINS)) for each in (members, others))
    return MembershipCounts(unit="example", minimum=10, step=5, members=of_members, others=of_others, known=known)


def interval(found: MembershipFigures) -> tuple[float, float]:
    _, low, high, _ = found.figures["auroc"]
    assert low is not None
    assert high is not None
    return low, high


class Site:
    """A worker with the pictures, and a runner of its tasks."""

    def __init__(self, coordinator: LiveCoordinator, folder: Path, data: Dataset, **rules: Any) -> None:
        self.admin, self.folder, self.data, self.rules = coordinator.client(), folder, data, rules
        self.worker = ScriptedWorker(
            coordinator.client("site", "a"),
            kinds=("train", "evaluate", "attack"),
            datasets={"data": MEMBERS},
            held_out={"data": OTHERS},
        ).enrol()
        self.ledger, self.audit = Ledger(folder), Audit(folder, "w")

    def runner(self, **rules: Any) -> TaskRunner:
        history, described = RunHistory(self.folder, "w"), DescribedData(self.folder)
        given = {"history": history, "described": described, "ledger": self.ledger, "audit": self.audit}
        return task_runner(
            self.worker.client, {"data": self.data}, TrainingSetup(CPU), Vault(self.folder / "vault"),
            Cache(self.folder / "cache", 1 << 24), self.folder, **{**given, **self.rules, **rules},
        )  # fmt: skip

    def train(self) -> Run:
        """A run of one round, whose versions the site measures."""
        document, start = untrained(VIT, "image-classification")
        run = start_run(self.admin, document, start, training=MEMORISES, evaluation=Evaluation(sites=True))
        runner = self.runner()
        for _ in ("version 0", "round 1", "version 1"):
            runner.run(self.worker.take(), lambda: None, Report())
        until(lambda: self.admin.run(run.id).state == "completed")
        return self.admin.run(run.id)

    def ask(self, run: Run, version: int | None = None, **spec: Any) -> Run:
        """An attack on a version of a run."""
        versions = {one.number: one.digest for one in self.admin.versions(run.id)}
        number = run.version.number if version is None else version
        asked = attack_of(run.spec.model_copy(update={"version": versions[number]}))
        return self.admin.create_run(RunSpec.model_validate({**asked.model_dump(mode="json"), **spec}))

    def attack(self, run: Run, version: int | None = None, **rules: Any) -> SiteReport:
        asked = self.ask(run, version)
        self.runner(**rules).run(self.worker.take(), lambda: None, Report())
        (report,) = self.admin.reports(asked.id)
        return report


def test_a_model_that_memorised_its_examples_is_told_from_one_that_did_not_train(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    site = Site(coordinator, tmp_path, pictures())
    run = site.train()
    before = len(site.ledger.read("data"))
    trained, untrained = site.attack(run), site.attack(run, 0)
    (pooled, alone) = membership_figures([trained])
    assert replace(alone, where=pooled.where) == pooled
    assert pooled.known
    assert (pooled.units, alone.where) == (("example",), "a")
    # Rounded.
    assert pooled.members == pytest.approx(MEMBERS, rel=0.1)
    assert pooled.others == pytest.approx(OTHERS, rel=0.1)
    low, _ = interval(pooled)
    assert low > 0.65
    assert pooled.figures["tpr_at_0.1"].value > 0.2
    # 120 others do not show one of a hundred.
    assert "tpr_at_0.01" not in pooled.figures
    assert "an attacker who has both picks the right one" in pooled.sentence
    (guess, _) = membership_figures([untrained])
    low, high = interval(guess)
    assert low < 0.5 < high
    assert not guess.known
    assert guess.sentence.endswith("That the model was trained on these members is assumed.")
    assert trained.membership
    (left, _) = [entry for entry in site.audit.read() if "membership" in entry.detail]
    assert left.detail["membership"] == trained.membership.model_dump(mode="json")
    lines = site.ledger.read("data")[before:]
    assert [entry.events for entry in lines] == [(ExactUse(use="attack"),)] * 2


def test_patients_are_counted_and_not_their_images(coordinator: LiveCoordinator, tmp_path: Path) -> None:
    site = Site(coordinator, tmp_path, pictures(groups=2))
    (found, _) = membership_figures([site.attack(site.train())])
    # 90 and 60 patients, rounded.
    assert (found.units, found.members, found.others) == (
        ("group",),
        pytest.approx(90, abs=15),
        pytest.approx(60, abs=15),
    )
    assert interval(found)[0] > 0.6


def test_the_same_version_is_answered_alike_however_often_a_coordinator_asks(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    site = Site(coordinator, tmp_path, pictures(), policy=Policy(max_attacks=8))
    run = site.train()
    first = site.attack(run).membership
    # One picture more. Its difference would show the loss of this picture.
    (extra,) = (images(MEMBERS + OTHERS + 1).rows(torch.tensor([MEMBERS + OTHERS])),)
    tensors = {name: torch.cat([each, extra.tensors[name]]) for name, each in site.data.tensors.items()}
    site.data = replace(site.data, tensors=tensors)
    for _ in range(6):
        assert site.attack(run).membership == first
    # Nor is another version compared on the changed data.
    site.ask(run, 0)
    task = site.worker.take()
    with pytest.raises(PolicyViolation, match="too few subjects"):
        site.runner().run(task, lambda: None, Report())
    site.data = pictures()
    site.runner().run(task, lambda: None, Report())
    site.ask(run)
    with pytest.raises(PolicyViolation, match="attacked 8 times"):
        site.runner().run(site.worker.take(), lambda: None, Report())


def test_a_subject_that_is_held_out_now_has_changed(coordinator: LiveCoordinator, tmp_path: Path) -> None:
    """Otherwise two versions with the same losses, one before and one after, would be compared by it alone."""
    site = Site(coordinator, tmp_path, split(MEMBERS), history=None)
    for seed in (0, 1):
        start_run(site.admin, *untrained(VIT, "image-classification", seed=seed), rounds=0, membership_attack=True)
    site.runner().run(site.worker.take(), lambda: None, Report())
    site.data, task = split(MEMBERS - 1), site.worker.take()
    with pytest.raises(PolicyViolation, match="too few subjects"):
        site.runner().run(task, lambda: None, Report())
    site.data = split(MEMBERS - 90)
    site.runner().run(task, lambda: None, Report())
    (report,) = site.admin.reports(task.run)
    assert report.membership
    assert sum(report.membership.members) < sum(report.membership.others)


def test_the_same_weights_under_another_model_are_another_question(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    site = Site(coordinator, tmp_path, pictures(), history=None)
    document, start = untrained(VIT, "image-classification")
    found = []
    for config in (VIT, {**VIT, "layer_norm_eps": 10.0}):
        run = start_run(
            site.admin, document.model_copy(update={"config": config}), start, rounds=0, membership_attack=True
        )
        site.runner().run(site.worker.take(), lambda: None, Report())
        found.append(site.admin.reports(run.id)[0].membership)
    assert found[0] != found[1]


def test_a_hostile_coordinator_that_asks_1000_times_compares_no_two_data_sets(tmp_path: Path) -> None:
    """It asks about one version and another while subjects come and go. The answers it gets are all of one data set,
    so that no two of them differ by a few subjects."""
    StateDatabase.of(tmp_path, durable=False)
    described, rule, random = DescribedData(tmp_path), DisclosureRule(), np.random.default_rng(0)
    kind, subjects = Answers(MembershipCounts, "max_attacks", 1000, "attacked"), np.arange(40, dtype=np.uint64)
    got: dict[str, set[int]] = {}
    for _ in range(1000):
        come, go = random.integers(0, 5, 2)
        now = np.concatenate([subjects[go:], 100 + subjects[:come]])
        # Counts that tell all data sets apart.
        made = partial(counts, {int(come * 10 + go): 10}, {})
        version = str(random.integers(0, 20))
        with suppress(PolicyViolation):
            found = described.answer(kind, "data", version, np.stack([now, now], axis=1), rule, made)
            got.setdefault(version, set()).add(found.members.index(10))
    assert len(set.union(*got.values())) == 1
    assert len(got) > 1


def test_versions_of_its_choice_halve_one_subjects_value_until_max_attacks(tmp_path: Path) -> None:
    """Each lets twelve subjects score low, and one more whose value is below a threshold: thirteen leave as fifteen,
    and twelve as ten. Only the limit ends it, as the documentation says."""
    described, rule, most = DescribedData(tmp_path), DisclosureRule(), Policy().max_attacks
    kind, subjects = Answers(MembershipCounts, "max_attacks", most, "attacked"), np.arange(40, dtype=np.uint64)
    digests, value, low, high = np.stack([subjects, subjects], axis=1), 0.3, 0.0, 1.0

    def ask(threshold: float) -> int:
        cells = np.where(subjects < 12 + (value < threshold), 0, LOSS_BINS - 1)
        made = partial(counts, dict(enumerate(counts_along(cells, LOSS_BINS, rule).tolist())), {})
        return described.answer(kind, "data", str(threshold), digests, rule, made).members[0]

    for _ in range(most):
        middle = (low + high) / 2
        low, high = (low, middle) if ask(middle) == 15 else (middle, high)
    assert (low, high) == (0.28125, 0.3125)
    with pytest.raises(PolicyViolation, match="attacked 5 times"):
        ask(0.3)


@given(cells=st.lists(st.integers(0, 30), max_size=200), least=st.integers(10, 25), step=st.integers(5, 12))
def test_no_count_is_of_fewer_subjects_than_the_minimum_and_none_is_lost(
    cells: list[int], least: int, step: int
) -> None:
    rule = DisclosureRule(least, step)
    shown = counts_along(np.array(cells, np.int64), 31, rule)
    assert all(count >= rule.minimum and count % step == 0 for count in shown[shown > 0])
    # So a cell that shows zero may be empty: these subjects would be shown alike.
    assert np.array_equal(counts_along(np.repeat(np.arange(31), shown), 31, rule), shown)
    # Each is moved by rounding alone.
    assert abs(shown.sum() - (len(cells) if len(cells) >= rule.minimum else 0)) <= step / 2 * len(shown.nonzero()[0])


@pytest.mark.parametrize(
    "rules",
    [
        {"policy": Policy(require_secure_sums=True)},
        {"policy": Policy(figures_privacy=Budget(epsilon=1, delta=1e-6))},
        {"policy": Policy(require_privacy=PrivacyFloor(epsilon=1, evaluations=True))},
        {"allowances": {"data": Allowance(epsilon=1, delta=1e-6, evaluations=True)}},
        {"kinds": ("train", "evaluate")},
    ],
    ids=["sums", "noise", "privacy", "budget", "kinds"],
)
def test_exact_losses_do_not_leave_a_site_with_a_rule_of_privacy(
    coordinator: LiveCoordinator, tmp_path: Path, rules: dict[str, Any]
) -> None:
    site = Site(coordinator, tmp_path, pictures())
    run = start_run(site.admin, *untrained(VIT, "image-classification"), rounds=0, membership_attack=True)
    with pytest.raises(PolicyViolation, match=r"^(attack|kinds): "):
        site.runner(**rules).run(site.worker.take(), lambda: None, Report())
    assert run.state == "running"
    assert not site.ledger.read("data")


def test_a_site_that_trained_in_no_run_measures_nothing(coordinator: LiveCoordinator, tmp_path: Path) -> None:
    site = Site(coordinator, tmp_path, pictures())
    start_run(site.admin, *untrained(VIT, "image-classification"), rounds=0, membership_attack=True)
    with pytest.raises(TaskFailure, match="no run has trained on the data set 'data' here"):
        site.runner().run(site.worker.take(), lambda: None, Report())


def test_a_model_of_numbers_is_attacked_by_its_squared_errors(coordinator: LiveCoordinator, tmp_path: Path) -> None:
    whole = images(MEMBERS + OTHERS)
    whole = replace(whole, tensors={**whole.tensors, "labels": whole.tensors["labels"].float()})
    site = Site(coordinator, tmp_path, split(MEMBERS, whole), history=None)
    model = untrained({**VIT, "num_labels": 1}, "image-classification")
    run = start_run(site.admin, *model, rounds=0, membership_attack=True)
    site.runner().run(site.worker.take(), lambda: None, Report())
    (report,) = site.admin.reports(run.id)
    assert report.membership


def test_no_odd_example_fails_a_version_that_was_crafted_for_it(coordinator: LiveCoordinator, tmp_path: Path) -> None:
    """A large weight lets the images that have a property overflow, so that a failure would tell of one of them."""
    document, start = untrained(VIT, "image-classification")
    (weight,) = [name for name in start if name.endswith("patch_embeddings.projection.weight")]
    start[weight] = np.full_like(start[weight], 4e18)
    site = Site(coordinator, tmp_path, pictures(), history=None, described=None)
    pixels = site.data.tensors["pixel_values"].clamp(-3, 3)
    for pixel in (3.0, 30.0):
        pixels[0] = pixel
        site.data = replace(site.data, tensors={**site.data.tensors, "pixel_values": pixels.clone()})
        run = start_run(site.admin, document, start, rounds=0, membership_attack=True)
        site.runner().run(site.worker.take(), lambda: None, Report())
        (report,) = site.admin.reports(run.id)
        assert report.membership


@pytest.mark.parametrize("figures", ["exact", "rounded"])
def test_a_failure_at_one_example_has_no_cause_and_is_counted(
    coordinator: LiveCoordinator, tmp_path: Path, figures: Any
) -> None:
    data = pictures()
    # The model has no such class.
    labels = data.tensors["labels"].clone()
    labels[7] = 99
    data = replace(data, tensors={**data.tensors, "labels": labels})
    site = Site(coordinator, tmp_path, data, history=None, policy=Policy(max_attacks=2, figures=figures))
    for _ in range(2):
        start_run(site.admin, *untrained(VIT, "image-classification"), rounds=0, membership_attack=True)
        with pytest.raises(TaskFailure, match=r"^this site has no figures of the version; its own log has more$"):
            site.runner().run(site.worker.take(), lambda: None, Report())
    start_run(site.admin, *untrained(VIT, "image-classification"), rounds=0, membership_attack=True)
    with pytest.raises(PolicyViolation, match="attacked 2 times"):
        site.runner().run(site.worker.take(), lambda: None, Report())


def test_an_attack_waits_for_approval_and_for_release(coordinator: LiveCoordinator, tmp_path: Path) -> None:
    site = Site(coordinator, tmp_path, pictures())
    run = site.train()
    asked = site.ask(run)
    inbox, task = Inbox(tmp_path / "inbox"), site.worker.take()
    with pytest.raises(Unapproved):
        site.runner(inbox=inbox).run(task, lambda: None, Report())
    (request,) = inbox.requests()
    assert "Computes its loss of 180 training and 120 held-out examples. Sends to orchestrator" in request.summary
    airlock = Airlock(tmp_path / "airlock")
    runner = site.runner(airlock=airlock)
    held = runner.run(task, lambda: None, Report())
    assert held
    assert sorted(held.summary.metrics) == ["members", "others"]
    (before,) = site.admin.reports(asked.id)
    assert before.membership is None
    # The same worker, after it was killed.
    again = runner.run(task, lambda: None, Report())
    assert again
    airlock.decide(again.summary.id, "release", "Kim")
    again.wait(lambda: None)
    again.send(runner, lambda: None)
    (after,) = site.admin.reports(asked.id)
    assert after.membership
    assert after.membership.figures == held.summary.metrics


def test_sites_that_only_assume_their_members_do_not_hide_the_others() -> None:
    knows, assumes = counts({10: 100}, {20: 100}), counts({15: 500}, {15: 500}, known=False)
    reports = [
        SiteReport(site=name, worker=f"{name}/w", state="accepted", membership=each)
        for name, each in {"a": knows, "b": assumes}.items()
    ]
    found = {one.where: one.figures["auroc"].value for one in membership_figures(reports)}
    assert found == {"1 of 2 sites": 1.0, "a": 1.0, "b": 0.5}
    (pooled, _) = membership_figures(reports[1:])
    assert not pooled.known


def test_too_few_subjects_have_no_figure() -> None:
    found = MembershipFigures.of("a", [counts({7: 100}, {5: 20, 6: 25})])
    assert found.figures == {}
    assert found.sentence.startswith("a: too few subjects")
    assert len(LOSS_EDGES) + 1 == LOSS_BINS
