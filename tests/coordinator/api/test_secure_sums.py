"""Secure sums over HTTP: a coordinator that sums what it cannot read, and sites that keep to the rules or do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from sqlalchemy import select
from structlog.testing import capture_logs

from tessera.coordinator.blobs.store import Blobs
from tessera.coordinator.conductor.failures import REFUSED_SECONDS
from tessera.coordinator.db.tables import RoundRow, TaskRow
from tessera.shared.api.admin import StudyMember
from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import Run, RunPatch
from tessera.shared.api.secure_sums import HelperReport, SecureSums
from tessera.shared.api.tasks import Failure
from tessera.shared.model.blocks import Block
from tessera.shared.problems import Conflict
from tessera.shared.rounds.blob_store import StoredBlob
from tessera.shared.run_settings import ClientPrivacy
from tessera.shared.secure_sums.errors import SumRefused
from tessera.shared.secure_sums.keys import SigningKey
from tessera.shared.tensors.lazy import as_bytes
from tessera.worker.governance.run_history import RunHistory
from tests.support.coordinator import Clock, LiveCoordinator, refusing, until
from tests.support.federation import ScriptedWorker, small_model, start_run, values
from tests.support.secure_sums import Federation, SecretSite

NAMES = ("site-00", "site-01", "site-02")
WEIGHTS = (2, 2, 1)
"""In exact sums, by the sites' own settings."""
NOISE = {"epsilon": 1000.0, "delta": 1e-5, "clip_norm": 0.5}


class Ring:
    """Three sites that are all helpers, and their run."""

    def __init__(self, live: LiveCoordinator, rounds: int = 1, **changed: Any) -> None:
        self.live, self.model = live, small_model(16)
        self.start = values(self.model)
        self.federation = Federation(3, 3)
        known = dict(zip(NAMES, WEIGHTS, strict=True))
        self.sites = [SecretSite(name, live.client("site", name), self.federation, known[name]) for name in NAMES]
        for site in self.sites:
            site.worker.enrol()
        self.admin = live.client()
        self.run = start_run(self.admin, self.model, self.start, **settings(rounds, **changed))

    def now(self) -> Run:
        return self.admin.run(self.run.id)

    def values(self, number: int) -> dict[str, np.ndarray]:
        versions = {version.number: version.digest for version in self.admin.versions(self.run.id)}
        digests = self.admin.manifest(versions[number]).blocks
        return {b.name: self._read(digests[b.name], b) for b in self.model.blocks}

    def help(self, number: int = 1) -> None:
        """Do the tasks of all helpers, until the sum of this round is open: not each of them is needed for that."""
        for site in self.sites:
            assert site.help("agree").state == "accepted"
        self.open(number)

    def complete(self, step: float | None = None) -> None:
        """Have all sites train, if a step is given, and all helpers help, until the run is completed."""
        for site in self.sites if step is not None else ():
            site.train(step)
        self.help()
        until(lambda: self.now().state == "completed")

    @property
    def clock(self) -> Clock:
        return cast("Clock", self.live._clock)

    def abandon(self) -> None:
        """Have all helpers sign that the sums of the last attempt are never opened, so that another can open."""
        for site in self.sites:
            assert site.help("abandon").state == "accepted"
        self.clock.advance(REFUSED_SECONDS)

    def open(self, number: int = 1) -> None:
        """Do the tasks of helpers that sum up masks."""

        def is_open() -> bool:
            for site in self.sites:
                # The next round's training is left for later.
                if (task := site.worker.claim(0)) and task.kind != "train":
                    site.client.submit_helper_report(task.id, site.report(task))
            return self.now().version.number == number

        until(is_open)

    def _read(self, digest: str, block: Block) -> np.ndarray:
        return np.frombuffer(self.admin.read_blob(digest), "<f4").reshape(block.shape)


def settings(rounds: int = 1, **changed: Any) -> dict[str, Any]:
    sums = SecureSums(helpers=NAMES, quorum=3)
    return {"rounds": rounds, "cohort": Cohort(size=3, quorum=3), "secure_sums": sums, **changed}


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[Ring]:
    with LiveCoordinator(tmp_path / "coordinator") as live:
        yield Ring(live)


def stored_bytes(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_a_helper_that_leaves_the_study_gets_no_task_of_its_sums(ring: Ring) -> None:
    for site in ring.sites:
        site.train(1.0)
    for site in ring.sites:
        assert site.help("agree").state == "accepted"
    left = ring.sites.pop()
    site_id = next(site.id for site in ring.admin.sites() if site.name == NAMES[2])
    ring.admin.remove_from_study("default", StudyMember(kind="site", member=site_id))
    # The two others suffice to open the sum.
    ring.open()
    assert left.worker.claim(0) is None


def test_the_version_moves_by_the_mean_of_the_sites_own_weights_and_no_unmasked_update_is_ever_stored(
    ring: Ring, tmp_path: Path
) -> None:
    for site, step, examples in zip(ring.sites, (1.0, 2.5, 4.0), (1, 10, 5), strict=True):
        view = site.train(step, examples)
        assert (view.state, view.metrics) == ("accepted", {})
    ring.complete()
    for name, value in ring.values(1).items():
        np.testing.assert_allclose(value - ring.start[name], 2.2, atol=1e-4)
    stored = stored_bytes(tmp_path / "coordinator")
    for step in (1.0, 2.5, 4.0):
        for array in ring.start.values():
            assert bytes(as_bytes(array + np.float32(step)))[:64] not in stored
        assert np.full(16, step, "<f4").tobytes() not in stored
    outcomes = [task.state for round_ in ring.admin.rounds(ring.run.id) for task in round_.tasks]
    assert outcomes == ["merged"] * 3


def test_a_sum_with_noise_of_the_sites_is_bounded_over_all_blocks_and_its_epsilon_is_shown(tmp_path: Path) -> None:
    with LiveCoordinator(tmp_path / "coordinator") as live:
        ring = Ring(live, client_privacy=NOISE, normalization="cohort")
        first = ring.sites[0].worker.take()
        terms = ring.sites[0].terms(first)
        assert terms.noise is not None
        # With three helpers, one may collude.
        assert (terms.noise.honest_sites, terms.noise.rounds, terms.max_weight) == (2, 1, 1)
        assert first.client_privacy == ClientPrivacy(**NOISE, honest_sites=2)
        ring.sites[0].client.submit(first.id, ring.sites[0].submission(first, 100.0, 7))
        for site in ring.sites[1:]:
            site.train(100.0)
        assert ring.now().client_epsilon == 0
        ring.help()
        moved = np.concatenate([(value - ring.start[name]).ravel() for name, value in ring.values(1).items()])
        # The noise has a length of about a tenth of this.
        assert 0.8 * NOISE["clip_norm"] < np.linalg.norm(moved) < 1.2 * NOISE["clip_norm"]
        assert np.ptp(moved) > 0
        assert 999 < (ring.now().client_epsilon or 0) <= 1000


def test_a_round_opens_again_however_long_ago_the_version_before_the_last_was_made(tmp_path: Path) -> None:
    clock = Clock()
    with LiveCoordinator(tmp_path / "coordinator", clock=clock, inline_bytes=1, keep_versions=1) as live:
        ring = Ring(live, rounds=4)
        for number in (1, 2, 3):
            for site in ring.sites:
                site.train(float(number))
            ring.help(number)
        until(lambda: any(made.number == 4 for made in ring.admin.rounds(ring.run.id)))
        clock.advance(2 * 86_400)
        assert live.services.retention.collect().versions
        live.services.retention.collect()
        # No worker came for two days, and the conductor abandoned the round.
        for site in ring.sites:
            site.worker.enrol()
        ring.abandon()
        until(lambda: ring.admin.round(ring.run.id, 4).attempt == 2 or ring.now().state == "paused")
        assert ring.now().reason is None


@pytest.fixture
def timed(tmp_path: Path) -> Iterator[Ring]:
    with LiveCoordinator(tmp_path / "coordinator", clock=Clock()) as live:
        yield Ring(live)


def another(ring: Ring, **sums: Any) -> Run:
    """Start a second run from the model of the first, after the cohort has called."""
    for site in ring.sites:
        site.worker.enrol()
    changed = {"secure_sums": SecureSums(helpers=NAMES, quorum=3, **sums), "name": "second"}
    ring.run = start_run(ring.admin, ring.model, ring.start, **settings(**changed))
    return ring.run


def reason_of(ring: Ring) -> str:
    until(lambda: ring.now().state == "paused")
    return ring.now().reason or ""


def test_sites_send_again_once_helpers_have_signed_that_an_abandoned_attempt_is_never_opened(
    timed: Ring, tmp_path: Path
) -> None:
    first, *others = timed.sites
    history = RunHistory(tmp_path / "runs", "w")
    task = first.worker.take()
    former = first.terms(task)
    history.add_sum(former)
    first.client.submit(task.id, first.submission(task, 1.0))
    lost = others[0].worker.take()
    others[0].client.fail(lost.id, Failure(token=lost.token, code="failed", detail="no"))
    timed.abandon()
    task = first.worker.take()
    later = first.terms(task)
    assert (later.attempt, set(later.abandoned)) == (2, {former.digest})
    history.add_sum(later)
    first.client.submit(task.id, first.submission(task, 1.0))
    for site in others:
        site.train(1.0)
    timed.complete()


def test_a_cancelled_run_whose_sums_were_not_opened_does_not_spoil_its_model(timed: Ring) -> None:
    timed.sites[0].train(1.0)
    timed.admin.set_run_state(timed.run.id, "cancelled")
    another(timed)
    timed.abandon()
    timed.complete(1.0)


def test_a_second_run_from_a_model_pauses_with_the_reason_unless_it_says_that_it_repeats_it(timed: Ring) -> None:
    timed.complete(1.0)
    another(timed)
    said = "round 1 of run test had sums from a model with the same values. A site sends updates from one model into"
    assert said in reason_of(timed)
    another(timed, repeat_model=True)
    timed.complete(2.0)


def test_a_round_that_changed_no_value_pauses_the_run_with_the_reason(tmp_path: Path) -> None:
    with LiveCoordinator(tmp_path / "coordinator") as live:
        ring = Ring(live, rounds=2)
        for site in ring.sites:
            site.train(0.0)
        ring.help()
        assert "round 1 of run test had sums from a model with the same values" in reason_of(ring)


def test_a_signed_set_is_not_abandoned_and_the_run_says_so(timed: Ring) -> None:
    for site in timed.sites:
        site.train(1.0)
    assert timed.sites[0].help("agree").state == "accepted"
    timed.admin.set_run_state(timed.run.id, "cancelled")
    another(timed)
    task = timed.sites[0].worker.take()
    with pytest.raises(SumRefused, match="already-agreed"):
        timed.sites[0].report(task)
    # A signature of another helper does not stand in for it.
    theirs = timed.sites[1].report(timed.sites[1].worker.take())
    with refusing("invalid"):
        timed.sites[0].client.submit_helper_report(task.id, theirs.model_copy(update={"token": task.token}))
    timed.sites[0].client.fail(task.id, Failure(token=task.token, code="secure_sums", detail="already-agreed"))
    timed.clock.advance(REFUSED_SECONDS)
    assert "['site-00'] do not sign that the sums of round 1 of run test are never opened" in reason_of(timed)


def test_a_round_key_that_no_one_needs_is_not_drawn(tmp_path: Path) -> None:
    with LiveCoordinator(tmp_path / "coordinator") as live:
        ring = Ring(live, client_privacy=NOISE, normalization="cohort")
        ring.sites[0].worker.take()
        with live.services.database.snapshot() as session:
            assert list(session.scalars(select(RoundRow.noise_key))) == [None]


def test_an_update_whose_envelope_is_not_about_it_is_rejected(ring: Ring) -> None:
    site, other = ring.sites[:2]
    task = site.worker.take()
    right, foreign = site.submission(task, 1.0), other.submission(other.worker.take(), 1.0)
    with refusing("invalid-update", match="envelope"):
        site.client.submit(task.id, right.model_copy(update={"envelope": foreign.envelope}))
    assert site.client.task(task.id).state == "rejected"


def test_an_envelope_under_another_key_than_its_worker_declares_is_rejected(ring: Ring) -> None:
    """A site that lost its keys would otherwise have helpers refuse the set of all senders."""
    site = ring.sites[0]
    task = site.worker.take()
    ring.federation.identities[site.site] = SigningKey.new()
    with refusing("invalid-update", match="under another key than its worker declares"):
        site.client.submit(task.id, site.submission(task, 1.0))


def test_a_helper_s_tasks_go_to_the_worker_that_has_its_key(ring: Ring) -> None:
    site = ring.sites[0]
    for site_worker in ring.sites:
        site_worker.train(1.0)
    for name in ("a", "z"):
        ScriptedWorker(site.client, name=name).enrol()
    ring.complete()


def test_two_conductors_that_ask_helpers_at_once_ask_each_once(ring: Ring) -> None:
    """A helper asked twice would count twice, and masks opened twice be subtracted twice."""
    for site in ring.sites[:2]:
        site.train(1.0)
    # A paused run takes updates, and its helpers are not asked.
    ring.admin.patch_run(ring.run.id, RunPatch(state="paused"))
    ring.sites[2].train(1.0)
    until(lambda: next(iter(ring.admin.rounds(ring.run.id))).state == "merging")
    with ring.live.services.database.snapshot() as session:
        round_id = session.scalars(select(RoundRow.id)).one()
    secure = ring.live.services.conductor.actions.secure

    def first() -> None:
        assert len(secure.ask(ring.run.id, round_id, "agree")) == 3

    overtaken = replace(secure, blobs=cast("Blobs", Overtaken(secure.blobs, first)))
    with pytest.raises(Conflict, match="changed meanwhile"):
        overtaken.ask(ring.run.id, round_id, "agree")
    ring.admin.patch_run(ring.run.id, RunPatch(state="running"))
    ring.complete()


@dataclass
class Overtaken:
    """The blob store of a conductor that another one overtakes while it stores something."""

    blobs: Blobs
    first: Callable[[], None]

    def put(self, pieces: Sequence[bytes]) -> StoredBlob:
        stored = self.blobs.put(pieces)
        self.first()
        return stored

    def __getattr__(self, name: str) -> Any:
        return getattr(self.blobs, name)


def test_helpers_that_are_gone_are_waited_for_without_a_word_at_every_look(tmp_path: Path) -> None:
    clock = Clock()
    with LiveCoordinator(tmp_path / "coordinator", clock=clock) as live:
        ring = Ring(live)
        for site in ring.sites:
            site.train(1.0)
        *others, last = ring.sites
        for site in others:
            site.help("agree")
        task = last.worker.take()
        # Before the helpers are gone, nothing may be asked of them.
        ring.admin.set_run_state(ring.run.id, "paused")
        last.client.submit_helper_report(task.id, last.report(task))
        with capture_logs() as logs:
            clock.advance(live.settings.liveness_seconds + 1)
            ring.admin.set_run_state(ring.run.id, "running")
            until(lambda: "conductor.too_few_willing" in {line["event"] for line in logs})
        assert [line["event"] for line in logs].count("conductor.too_few_willing") == 1
        for site in ring.sites:
            site.worker.enrol()
        clock.advance(REFUSED_SECONDS)
        ring.open()
        until(lambda: ring.now().state == "completed")


def test_a_helper_s_report_that_is_not_what_its_task_asks_for_is_refused(ring: Ring) -> None:
    for site in ring.sites:
        site.train(1.0)
    first, second, third = ring.sites
    task = first.worker.take()
    right, foreign = first.report(task), second.report(second.worker.take())
    assert right.agreement is not None
    assert foreign.agreement is not None
    theirs = foreign.agreement.model_copy(update={"helper": 0})
    wrong = (
        HelperReport(token=task.token),
        HelperReport(token=task.token, mask_sums=first.client.put_bytes(b"masks")),
        HelperReport(token=task.token, agreement=right.agreement.model_copy(update={"helper": 1})),
        HelperReport(token=task.token, agreement=right.agreement.model_copy(update={"helper": 99})),
        HelperReport(token=task.token, agreement=right.agreement.model_copy(update={"senders": ring.run.spec.model})),
        HelperReport(token=task.token, agreement=theirs),
        # Another helper's own signature would count twice.
        HelperReport(token=task.token, agreement=foreign.agreement),
    )
    for report in wrong:
        with refusing("invalid"):
            first.client.submit_helper_report(task.id, report)
    for _ in range(2):  # the first answer may be lost
        assert first.client.submit_helper_report(task.id, right).state == "accepted"
    assert third.help("agree").state == "accepted"
    assert ring.now().version.number == 0


@pytest.mark.parametrize("code", ["failed", "awaiting-approval"])
def test_a_run_whose_helpers_refuse_pauses_with_the_reason_and_asks_them_again_when_resumed(
    ring: Ring, code: str
) -> None:
    for site in ring.sites:
        site.train(1.0)
    refusing_site = ring.sites[0].worker
    task = refusing_site.take()
    refusing_site.client.fail(task.id, Failure(token=task.token, code=code, detail="no"))
    until(lambda: ring.now().state == "paused")
    assert "did not sign" in (ring.now().reason or "")
    with ring.live.services.database.snapshot() as session:
        workers = session.scalars(select(TaskRow.worker_id).where(TaskRow.kind == "agree")).all()
    # Each was asked once.
    assert len(workers) == len(set(workers)) == 3
    ring.admin.patch_run(ring.run.id, RunPatch(state="running"))
    ring.complete()


def test_a_helper_whose_site_withholds_the_run_keeps_its_task(ring: Ring) -> None:
    for site in ring.sites:
        site.train(1.0)
    helper = ring.sites[0].worker
    task = helper.take()
    assert helper.client.release(task.id, task.token).state == "offered"
    helper.withheld = {ring.run.id: "its approval has ended"}
    again = helper.take()
    assert (again.id, again.token) == (task.id, task.token + 1)
    ring.complete()


def test_a_round_does_not_open_without_helpers_that_have_declared_keys(tmp_path: Path) -> None:
    with LiveCoordinator(tmp_path / "coordinator") as live:
        federation, model = Federation(3, 3), small_model()
        sites = [SecretSite(name, live.client("site", name), federation) for name in NAMES]
        for site in sites:
            site.worker.site_keys = None
            site.worker.enrol()
        preview_of = start_run(live.client(), model, values(model), **settings())
        reasons = live.client().preview_run(preview_of.spec).workers
        assert {one.rule for worker in reasons for one in worker.ineligibilities} == {"secure_sums"}
        assert all(site.worker.claim(0) is None for site in sites)


@pytest.mark.parametrize(
    "changed",
    [
        {"robust": {"rule": "median"}, "cohort": Cohort(size=5, quorum=5)},
        {"normalization": "inverse-probability"},
        {"codec": "raw"},
        {"client_privacy": {**NOISE, "clip_quantile": 0.5}, "normalization": "cohort"},
        {"client_privacy": {**NOISE, "honest_sites": 4}, "normalization": "cohort"},
        {"upload_budget": 1000},
        {"upload_seconds": 10},
        {"max_update_norm": 1.0},
        {"max_norm_of_median": 3.0},
        {"cohort": Cohort(size=3, quorum=2)},
        {"cohort": Cohort(size=3, quorum=3, workers_per_site=2)},
        {"cohort": Cohort(size=3, quorum=3, sites=("site-00", "site-01", "elsewhere"))},
        {"secure_sums": {"helpers": ["a", "b"], "quorum": 3}},
        {"secure_sums": {"helpers": ["a", "b", "a"], "quorum": 3}},
        {"secure_sums": {"helpers": list(NAMES), "quorum": 2}},
        # Without effect: sites weigh by their own settings, and no norm is known.
        {"max_examples": 40},
        {"max_examples": "unlimited"},
    ],
    ids=str,
)
def test_settings_that_need_single_updates_are_refused(standing: LiveCoordinator, changed: dict[str, Any]) -> None:
    model = small_model()
    with pytest.raises(ValueError, match=r"secure_sums|helpers|quorum"):
        start_run(standing.client(), model, values(model), **settings(**changed))


@pytest.mark.parametrize(
    "method",
    [
        {"name": "fednova"},
        {"name": "scaffold"},
        {"name": "feddyn"},
        {"name": "fedfrozen", "settings": {"warmup_rounds": "auto"}},
        {"name": "safl", "settings": {"score": "random"}},
        {"name": "safl", "settings": {"score": "random", "chooser": "consensus", "memory_share": 0.5}},
        {"name": "local"},
    ],
    ids=str,
)
def test_a_method_that_merges_more_than_the_mean_is_refused(
    standing: LiveCoordinator, method: dict[str, Any]
) -> None:
    model = small_model()
    with refusing("invalid", match="method"):
        start_run(standing.client(), model, values(model), **settings(method=method))
