"""Runs that a person has to approve: what is asked, on which terms, and what was decided."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tessera.shared.api.runs import Training
from tessera.shared.api.secure_sums import SumTask
from tessera.shared.api.tasks import Task
from tessera.shared.api.versions import VersionRef
from tessera.shared.methods.base import MethodSpec, Plan
from tessera.shared.run_settings import ClientPrivacy
from tessera.shared.tensors.lazy import digest_of
from tessera.worker.governance import approvals
from tessera.worker.governance.approvals import ApprovalDecision, Inbox, InboxError, Request, Unapproved
from tessera.worker.governance.run_history import TaskStatement
from tessera.worker.state.database import StateDatabase, StateError
from tests.support.task_document import task_of

DIGEST = f"sha256:{'0' * 64}"
NOON = datetime(2026, 11, 23, 12, tzinfo=UTC)


class Asking:
    """An inbox whose clock stands still until it is told to move."""

    def __init__(self, folder: Path) -> None:
        self.now, self.folder, self.trains = NOON, folder, True
        self.inbox = Inbox(folder, lambda: self.now)

    def require(self, asked: Task) -> None:
        def request(terms: str) -> Request:
            return Request(
                run=asked.run, run_name=asked.run_name, terms=terms, orchestrator="trial", dataset=asked.dataset,
                examples=10, worker="w", asked_at=self.now, summary="Trains.", live_terms={"rounds": asked.rounds},
                repeats_model=TaskStatement.of(asked).repeats_model,
            )  # fmt: skip

        self.inbox.require(TaskStatement.of(asked), request, trains=self.trains)

    def code(self, asked: Task) -> str | None:
        try:
            self.require(asked)
        except Unapproved as unapproved:
            return unapproved.code
        return None

    def decide(self, named: str, **more: object) -> None:
        given = {"approved": True, "by": "ann", "at": self.now, **more}
        self.inbox.decide(self.inbox.find(named), ApprovalDecision.model_validate(given))


@pytest.fixture
def asking(tmp_path: Path) -> Asking:
    return Asking(tmp_path)


def task(run: str = "r1", **more: object) -> Task:
    return task_of(run=run, run_name=f"name-{run}", **{"orchestrator": "trial", **more})


def test_nothing_is_done_for_a_run_until_somebody_approves_it(asking: Asking) -> None:
    assert asking.code(task()) == "awaiting-approval"
    assert asking.inbox.withheld() == {"r1": "awaiting-approval: a person at the site has to approve the run"}
    asking.decide("r1")
    assert asking.code(task()) is None
    assert asking.inbox.withheld() == {}
    assert asking.code(task("r2")) == "awaiting-approval"


def test_an_approval_is_of_the_terms_that_were_shown(asking: Asking) -> None:
    asking.code(task())
    asking.decide("name-r1")
    assert asking.code(task(round=2, plan=Plan(stage="later"), version=VersionRef(number=1, digest=DIGEST))) is None
    for changed in (
        task(training=Training(epochs=9)),
        task(training=Training(steps=9)),
        task(training=Training(schedule="cosine")),
        task(method=MethodSpec(name="fedprox")),
        task(dataset="clinics"),
        task(orchestrator="somebody else"),
        task(study="stroke"),
        task(secure_sums={"helpers": ["a", "b", "c"], "quorum": 5}),
        task(secure_sums={"helpers": ["a", "b", "c"], "quorum": 3}),
        task(secure_sums={"helpers": ["a", "b", "d"], "quorum": 5}),
    ):
        assert TaskStatement.of(changed).terms_digest() != TaskStatement.of(task()).terms_digest()
        assert asking.code(changed) == "awaiting-approval"
    # What is approved is done, if it is offered; the run as a whole waits for a person.
    assert asking.code(task()) is None
    assert set(asking.inbox.withheld()) == {"r1"}


def test_an_approval_of_an_attack_is_of_one_version(asking: Asking) -> None:
    attacks = [task(kind="attack", version=VersionRef(number=0, digest=digest_of(raw))) for raw in (b"one", b"other")]
    asking.code(attacks[0])
    asking.decide("r1")
    assert [asking.code(each) for each in attacks] == [None, "awaiting-approval"]


def test_what_was_not_shown_is_not_decided(asking: Asking) -> None:
    asking.code(task())
    shown = asking.inbox.find("r1")
    # While a person reads it, the run asks again.
    asking.code(task(training=Training(epochs=9)))
    asking.inbox.decide(shown, ApprovalDecision(approved=True, by="ann", at=NOON))
    assert asking.code(task()) is None
    assert asking.code(task(training=Training(epochs=9))) == "awaiting-approval"


def test_one_request_of_several_is_named_by_its_terms(asking: Asking) -> None:
    asking.code(task())
    (first,) = asking.inbox.find("r1")
    assert asking.inbox.find_one("r1") == first
    asking.code(task(training=Training(epochs=9)))
    for terms in ("", "x"):
        with pytest.raises(InboxError, match=rf"{first.terms[:16]} \(awaiting-approval\).* name one with --terms"):
            asking.inbox.find_one("r1", terms)
    assert asking.inbox.find_one("name-r1", first.shown_terms) == first
    # So it is if the approval of one has ended: which one a person means cannot be known.
    asking.inbox.decide([first], ApprovalDecision(approved=True, by="ann", at=NOON, until=NOON))
    with pytest.raises(InboxError, match="approval-ended"):
        asking.inbox.find_one("r1")
    # While it lasts, the other alone is open.
    for approved in (True, False):
        asking.inbox.decide([first], ApprovalDecision(approved=approved, by="ann", at=NOON))
        assert asking.inbox.find_one("r1").decision is None


def test_terms_whose_digest_begins_as_that_of_approved_ones_are_not_approved(asking: Asking, tmp_path: Path) -> None:
    asking.code(task())
    asking.decide("r1")
    terms = TaskStatement.of(task()).terms_digest()
    change = "UPDATE requests SET request = replace(request, ?, ?)"
    StateDatabase.of(tmp_path).write(change, terms, terms[:16] + "0" * 48)
    with pytest.raises(InboxError, match="a request on other terms"):
        asking.code(task())


def test_an_approval_may_end(asking: Asking) -> None:
    asking.code(task())
    asking.decide("r1", until=NOON + timedelta(hours=1))
    assert asking.code(task()) is None
    asking.now += timedelta(hours=1)
    assert asking.code(task()) == "approval-ended"
    assert asking.inbox.withheld() == {"r1": "approval-ended: the approval was until 2026-11-23 13:00 UTC"}
    asking.decide("r1")
    assert asking.code(task()) is None


def test_what_is_declined_says_why_and_may_be_approved_later(asking: Asking) -> None:
    asking.code(task())
    asking.decide("r1", approved=False, reason="no ethics vote yet")
    assert asking.code(task()) == "declined"
    assert asking.inbox.withheld() == {"r1": "declined: no ethics vote yet"}
    asking.decide("r1")
    assert asking.code(task()) is None


def test_the_workers_of_a_site_ask_once(asking: Asking, tmp_path: Path) -> None:
    asking.code(task())
    second = Asking(tmp_path)
    second.now += timedelta(days=1)
    second.code(task())
    (request,) = second.inbox.requests()
    assert request.asked_at == NOON
    asking.decide("r1")
    assert second.code(task()) is None


def test_a_name_that_could_be_two_runs_decides_nothing(asking: Asking) -> None:
    asking.code(task("r1"))
    asking.code(task("r2"))
    with pytest.raises(InboxError, match="matches the runs r1, r2"):
        asking.decide("r")
    with pytest.raises(InboxError, match="no run 'x' has requested approval here"):
        asking.decide("x")
    with pytest.raises(InboxError):
        asking.decide("")
    assert set(asking.inbox.withheld()) == {"r1", "r2"}


def test_a_request_that_cannot_be_read_is_no_approval(asking: Asking, tmp_path: Path) -> None:
    asking.code(task())
    StateDatabase.of(tmp_path).write("UPDATE requests SET request = '{}'")
    with pytest.raises(StateError, match="a row was changed, and is no Request"):
        asking.code(task())


def test_approvals_of_earlier_releases_stay_valid() -> None:
    known = "b56db733bc8a6aaa95a6ba55d988527b6639f084c7692d78128efde5819eeff2"
    assert TaskStatement.of(task_of()).terms_digest() == known


def test_an_approval_of_masked_updates_is_none_of_updates_that_can_be_read(asking: Asking) -> None:
    sums = {"helpers": ["a", "b", "c"], "quorum": 5}
    masked = task(secure_sums=sums, sums=SumTask(terms=DIGEST))
    asking.code(masked)
    asking.decide("r1")
    assert asking.code(masked) is None
    assert asking.code(task(kind="evaluate", held_out=True, secure_sums=sums)) is None
    for changed in (task(), task(secure_sums=sums, sums=SumTask(terms=DIGEST), describe=True)):
        assert asking.code(changed) == "awaiting-approval"


def test_an_approval_covers_the_client_privacy_that_was_shown(asking: Asking) -> None:
    private = task(client_privacy=ClientPrivacy(epsilon=1.0, delta=1e-5, clip_norm=1.0))
    asking.code(private)
    asking.decide("r1")
    assert asking.code(private) is None
    for changed in (task(client_privacy=ClientPrivacy(epsilon=9.0, delta=1e-5, clip_norm=1.0)), task()):
        assert asking.code(changed) == "awaiting-approval"


def test_a_run_that_measures_before_it_trains_asks_once(asking: Asking) -> None:
    measuring = task(kind="evaluate", held_out=True)
    assert asking.code(measuring) == "awaiting-approval"
    assert asking.code(task()) == "awaiting-approval"
    (asked,) = asking.inbox.find("r1")
    assert asked.terms == TaskStatement.of(task()).terms_digest()
    asking.decide("r1")
    assert asking.code(measuring) is asking.code(task()) is None
    asking.decide("r1", approved=False)
    assert asking.code(measuring) == asking.code(task()) == "declined"


def test_a_run_that_asked_on_approved_terms_too_is_withheld_on_the_others_alone(asking: Asking) -> None:
    """Also on those whose approval has ended. A declined run is withheld whatever becomes of it."""
    asking.code(task(rounds=1))
    assert (set(asking.inbox.withheld()), asking.inbox.withheld_terms()) == ({"r1"}, {})
    asking.decide("r1", until=NOON + timedelta(hours=1))
    for rounds in (2, 3):
        asking.now += timedelta(minutes=1)
        assert asking.code(task(rounds=rounds)) == "awaiting-approval"
    assert asking.inbox.withheld_terms() == {"r1": ({"rounds": 2}, {"rounds": 3})}
    asking.now += timedelta(hours=1)
    assert asking.inbox.withheld_terms() == {"r1": ({"rounds": 1}, {"rounds": 2}, {"rounds": 3})}
    asking.decide("r1", approved=False, reason="too long")
    assert (set(asking.inbox.withheld()), asking.inbox.withheld_terms()) == ({"r1"}, {})


def test_to_let_a_run_measure_is_not_to_let_it_train(asking: Asking) -> None:
    """The approval was given while the worker trained for no run."""
    measuring = task(kind="evaluate", held_out=True)
    asking.trains = False
    asking.code(measuring)
    asking.decide("r1")
    assert asking.code(measuring) is None
    asking.trains = True
    assert asking.code(measuring) is None
    assert asking.code(task()) == "awaiting-approval"
    assert set(asking.inbox.withheld()) == {"r1"}


def test_to_let_a_run_train_is_to_let_it_measure_on_what_is_held_out_of_the_same(asking: Asking) -> None:
    asking.code(task())
    asking.decide("r1")
    assert asking.code(task(kind="evaluate", held_out=True)) is None
    assert asking.code(task(kind="evaluate", dataset="clinics")) == "awaiting-approval"


def test_an_inbox_full_of_undecided_requests_takes_no_more_until_some_are_decided(
    asking: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(approvals, "MAX_UNDECIDED", 2)
    for run in ("r1", "r2"):
        asking.code(task(run))
    with pytest.raises(Unapproved, match=r"2 requests await a decision.*: a person there has to approve or decline"):
        asking.require(task("r3"))
    assert len(asking.inbox.requests()) == 2
    # What was asked before may be decided, which makes room.
    asking.decide("r1")
    assert asking.code(task("r1")) is None
    assert asking.code(task("r3")) == "awaiting-approval"
    assert set(asking.inbox.withheld()) == {"r2", "r3"}


def test_updates_from_a_model_enter_a_second_sum_only_if_a_person_allows_it(asking: Asking) -> None:
    """Also at a site that approves no other run, and not because one was asked for before that."""
    sums = {"helpers": ["a", "b", "c"], "quorum": 5}
    repeating = task("r2", secure_sums={**sums, "repeat_model": True}, sums=SumTask(terms=DIGEST))
    asking.code(task("r1"))
    asking.inbox = Inbox(asking.folder, lambda: asking.now, every_run=False)
    assert asking.code(task("r1", secure_sums=sums, sums=SumTask(terms=DIGEST))) is None
    assert asking.code(repeating) == "awaiting-approval"
    assert set(asking.inbox.withheld()) == {"r2"}
    asking.decide("r2")
    assert asking.code(repeating) is None
