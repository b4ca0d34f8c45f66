"""Every rule of `decide`, with literals: what is seen, and what is to be done about it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.coordinator.domain.decide import (
    Abandon,
    CancelEvaluations,
    Close,
    Complete,
    Evaluate,
    Merge,
    Open,
    decide,
)
from tessera.coordinator.domain.leases import Expire, MoveBack, Offer, Shorten
from tessera.coordinator.domain.lifecycle import LIVE_RUN
from tessera.coordinator.domain.snapshot import (
    PendingEvaluation,
    RoundSnapshot,
    RunSnapshot,
    SumsSnapshot,
    TaskSnapshot,
    Timeouts,
)
from tessera.coordinator.domain.sum_helpers import AskHelpers, Pause
from tessera.shared.api.runs import Cohort
from tessera.shared.schema import RunState, TaskState

NOW = 1000.0
PATIENCE = Timeouts(cohort_wait_seconds=30, evaluation_seconds=600, lease_seconds=60)


def task(
    state: str, name: str = "t", *, attempts: int = 1, expires_at: float | None = NOW + 60, site: str | None = None
) -> TaskSnapshot:
    """A task of a worker that is a site's only one, unless `site` says whose else it is."""
    return TaskSnapshot(name, site or name, state, token=attempts, attempts=attempts, lease_expires_at=expires_at)


def a_round(*states: str, state: str = "open", deadline_at: float = NOW + 100) -> RoundSnapshot:
    tasks = tuple(task(s, f"t{i}") for i, s in enumerate(states))
    return RoundSnapshot("r", 1, state, deadline_at, tasks)


def run(**facts: Any) -> RunSnapshot:
    """A run between rounds, changed just now, with nobody there."""
    blank = RunSnapshot(
        id="run",
        state="running",
        rounds=3,
        version=0,
        cohort=Cohort(quorum=2),
        round=None,
        abandoned=0,
        eligible=0,
        idle_since=NOW,
        evaluations=(),
        unevaluated=(),
        evaluators=0,
    )
    return replace(blank, **facts)


def decided(snapshot: RunSnapshot, now: float = NOW) -> list[object]:
    return list(decide(snapshot, now, PATIENCE))


# ---------------------------------------------------------------- secure sums


def helpers(*states: str, present: bool = True) -> tuple[TaskSnapshot, ...]:
    return tuple(replace(task(state, f"h{n}"), present=present) for n, state in enumerate(states))


def summing(agree: tuple[str, ...] = (), openings: tuple[TaskSnapshot, ...] = (), **facts: Any) -> RunSnapshot:
    """A closed round with four helpers, three of whom must sign."""
    sums = SumsSnapshot(4, 3, helpers(*agree), openings, is_open=facts.pop("is_open", False))
    return run(round=replace(a_round("accepted", "accepted", state="merging"), sums=sums), **facts)


ALL_SIGNED = ("accepted",) * 4


@pytest.mark.parametrize(
    ("seen", "to_do"),
    [
        (summing(), [AskHelpers("r", "agree")]),
        (summing(("accepted", "leased")), [AskHelpers("r", "agree")]),
        (summing(("accepted", "accepted", "leased", "offered")), []),
        (summing(("accepted", "accepted", "failed", "offered")), []),
        (summing(("accepted", "accepted", "accepted", "offered")), [AskHelpers("r", "open")]),
        (summing(("accepted", "accepted", "accepted", "failed")), [AskHelpers("r", "open")]),
        (
            summing(("accepted", "accepted", "failed", "failed")),
            [Pause("2 helpers did not sign the senders of round 1: see their tasks")],
        ),
        (summing(ALL_SIGNED, helpers("leased", "accepted")), []),
        (summing(ALL_SIGNED, helpers("offered", "accepted")), []),
        (summing(ALL_SIGNED, helpers("offered", "accepted", present=False)), [AskHelpers("r", "open")]),
        (summing(ALL_SIGNED, helpers("failed", "accepted")), [AskHelpers("r", "open")]),
        (summing(ALL_SIGNED, helpers("accepted", "accepted"), is_open=True), [Merge("r")]),
        (summing(state="paused"), []),
        (summing(("accepted", "accepted", "failed", "failed"), state="paused"), []),
    ],
)
def test_a_closed_round_is_merged_once_enough_helpers_have_signed_and_opened_it(
    seen: RunSnapshot, to_do: list[object]
) -> None:
    assert decided(seen) == to_do


def test_helpers_get_their_tasks_again_without_a_limit_of_attempts() -> None:
    lapsed = replace(task("leased", "h0", attempts=99, expires_at=NOW), site="north")
    lost = task("expired", "h1", attempts=99)
    sums = SumsSnapshot(4, 3, (lapsed, lost, *helpers("accepted", "accepted")))
    closed = replace(a_round("accepted", state="merging"), sums=sums)
    assert decided(run(round=closed)) == [Expire("h0", 99), Offer("h1")]
    assert decided(run(round=closed, state="paused")) == [Expire("h0", 99), Offer("h1")]


def test_helpers_are_asked_without_a_limit_to_sign_that_an_attempt_is_never_opened() -> None:
    asked = (task("leased", "h0", attempts=99, expires_at=NOW), task("expired", "h1", attempts=99), task("leased"))
    assert decided(run(abandoning=asked)) == [Expire("h0", 99), Offer("h1")]
    assert decided(run(abandoning=asked, state="cancelled")) == [CancelEvaluations()]


def test_a_cancelled_run_s_sums_are_not_opened() -> None:
    assert decided(summing(ALL_SIGNED, state="cancelled")) == [Abandon("r", "the run was cancelled")]


# ---------------------------------------------------------------- leases


def test_a_lease_lapses_at_the_moment_it_expires_and_not_before() -> None:
    live = replace(
        a_round("leased", "leased"), tasks=(task("leased", "t", attempts=2, expires_at=NOW), task("leased", "u"))
    )
    assert decided(run(round=live)) == [Expire("t", token=2)]
    assert decided(run(round=live), NOW - 0.001) == []


def test_a_lapsed_task_is_offered_again_while_it_has_tries_left() -> None:
    cohort = Cohort(quorum=1, max_task_attempts=3)
    live = replace(a_round(), tasks=(task("expired", "second", attempts=2), task("expired", "last", attempts=3)))
    assert decided(run(round=live, cohort=cohort)) == [Offer("second")]


def test_an_evaluation_s_lease_lapses_and_is_offered_again_too() -> None:
    pending = (task("leased", "slow", expires_at=NOW - 1), task("expired", "lost"))
    assert decided(run(evaluations=pending)) == [Expire("slow", 1), Offer("lost")]


def test_leases_of_a_round_that_is_being_merged_are_left_alone() -> None:
    live = replace(a_round(state="merging"), tasks=(task("leased", expires_at=NOW - 1),))
    assert decided(run(round=live)) == [Merge("r")]


# ---------------------------------------------------------------- the round in progress


def test_an_open_round_waits_while_more_may_come_before_the_deadline() -> None:
    assert decided(run(round=a_round("accepted", "accepted", "leased"))) == []
    assert decided(run(round=a_round("accepted", "offered"))) == []


def test_a_round_closes_at_its_deadline_if_the_quorum_is_there() -> None:
    live = a_round("accepted", "accepted", "leased", deadline_at=NOW)
    assert decided(run(round=live)) == [Close("r", "the deadline came")]
    assert decided(run(round=live), NOW - 0.001) == []


def test_a_round_closes_early_once_all_its_tasks_have_ended() -> None:
    ended = a_round("accepted", "accepted", "failed", "rejected")
    assert decided(run(round=ended)) == [Close("r", "all tasks ended")]


def test_a_round_closes_early_once_enough_updates_are_in() -> None:
    cohort = Cohort(size=4, quorum=1, target_updates=2)
    assert decided(run(cohort=cohort, round=a_round("accepted", "leased", "leased", "leased"))) == []
    closed = decided(run(cohort=cohort, round=a_round("accepted", "accepted", "leased", "offered")))
    assert closed == [Close("r", "2 updates are enough")]


def of_sites(*tasks: tuple[str, str]) -> RoundSnapshot:
    """A round of workers given by their sites and how far they are."""
    return replace(a_round(), tasks=tuple(task(s, f"t{i}", site=site) for i, (site, s) in enumerate(tasks)))


def test_many_updates_of_one_site_are_no_quorum() -> None:
    live = of_sites(("a", "accepted"), ("a", "accepted"), ("a", "accepted"), ("b", "failed"))
    assert decided(run(round=live)) == [Abandon("r", "1 of 2 updates came and no more can come; the quorum is 2")]
    # Nor can those of it that may yet come make one.
    live = of_sites(("a", "accepted"), ("a", "leased"), ("b", "failed"))
    assert decided(run(round=live)) == [Abandon("r", "1 of 2 updates came and no more can come; the quorum is 2")]


def test_many_updates_of_one_site_are_not_enough() -> None:
    cohort = Cohort(quorum=1, target_updates=2)
    assert decided(run(cohort=cohort, round=of_sites(("a", "accepted"), ("a", "accepted"), ("b", "leased")))) == []


def test_a_site_counts_once_one_of_its_workers_has_delivered_and_its_others_are_awaited() -> None:
    live = of_sites(("a", "accepted"), ("a", "leased"), ("b", "accepted"))
    assert decided(run(round=live)) == []
    assert Close("r", "the deadline came") in decided(run(round=live), NOW + 100)
    live = of_sites(("a", "accepted"), ("a", "failed"), ("b", "accepted"))
    assert decided(run(round=live)) == [Close("r", "all tasks ended")]


def test_enough_never_undercuts_the_quorum() -> None:
    cohort = Cohort(size=4, quorum=3, target_updates=1)
    assert decided(run(cohort=cohort, round=a_round("accepted", "accepted", "leased", "leased"))) == []


def test_a_round_is_abandoned_at_its_deadline_without_a_quorum() -> None:
    live = a_round("accepted", "leased", "offered", deadline_at=NOW)
    cause = "1 of 3 updates came by the deadline; the quorum is 2"
    assert decided(run(round=live)) == [Abandon("r", cause)]


def test_a_round_is_abandoned_as_soon_as_its_quorum_is_out_of_reach() -> None:
    live = a_round("accepted", "failed", "rejected")
    assert decided(run(round=live)) == [Abandon("r", "1 of 3 updates came and no more can come; the quorum is 2")]
    # One accepted and one under way could make two, but not three.
    assert decided(run(round=a_round("accepted", "leased", "failed"))) == []
    out_of_reach = decided(run(round=a_round("accepted", "leased", "failed"), cohort=Cohort(quorum=3)))
    assert [type(action) for action in out_of_reach] == [Abandon]


def test_a_lapsed_task_counts_as_possible_only_while_it_has_tries_left() -> None:
    cohort = Cohort(quorum=1, max_task_attempts=2)
    may_come = replace(a_round(), tasks=(task("expired", attempts=1),))
    spent = replace(a_round(), tasks=(task("expired", attempts=2),))
    assert decided(run(cohort=cohort, round=may_come)) == [Offer("t")]
    assert [type(action) for action in decided(run(cohort=cohort, round=spent))] == [Abandon]


def test_a_closed_round_is_merged_even_if_the_run_is_paused() -> None:
    assert decided(run(state="paused", round=a_round("accepted", state="merging"))) == [Merge("r")]


# ---------------------------------------------------------------- between rounds


def test_the_next_round_opens_at_once_when_the_full_cohort_is_there() -> None:
    wanted = Cohort(size=3, quorum=2)
    assert decided(run(cohort=wanted, version=1, eligible=3)) == [Open(2)]


def test_a_round_gathers_for_a_while_once_there_is_a_quorum() -> None:
    wanted = Cohort(size=3, quorum=2)
    gathering = run(cohort=wanted, eligible=2, idle_since=NOW)
    assert decided(gathering, NOW + 29.999) == []
    assert decided(gathering, NOW + 30) == [Open(1)]


def test_no_round_opens_below_the_quorum_however_long_it_waits() -> None:
    assert decided(run(cohort=Cohort(size=3, quorum=2), eligible=1), NOW + 1e9) == []


@pytest.mark.parametrize("state", ["running", "paused"])
def test_a_clock_that_is_set_back_stops_no_run_until_it_has_caught_up(state: str) -> None:
    again = run(state=state, cohort=Cohort(size=3, quorum=2), eligible=3, abandoned=1, idle_since=NOW)
    assert decide(again, NOW, PATIENCE) == []
    assert decide(again, NOW - 61, PATIENCE) == [MoveBack()]


def test_without_a_cohort_size_whoever_may_still_come_is_given_the_time_to() -> None:
    gathering = run(cohort=Cohort(quorum=2), eligible=2, idle_since=NOW)
    assert decided(gathering, NOW + 29.999) == []
    assert decided(gathering, NOW + 30) == [Open(1)]
    assert decided(run(cohort=Cohort(quorum=2), eligible=1), NOW + 99) == []


def test_a_run_that_goes_on_waits_for_no_further_sites() -> None:
    going = run(cohort=Cohort(quorum=2), version=1, eligible=2, goes_on=True)
    assert decided(going) == [Open(2)]
    assert decided(replace(going, eligible=1), NOW + 99) == []
    # Of a cohort with a size, all are known.
    assert decided(replace(going, cohort=Cohort(size=3, quorum=2))) == []


def test_a_task_whose_worker_is_gone_is_not_waited_for() -> None:
    gone = replace(task("offered", "t1"), present=False)
    left = replace(a_round("accepted"), tasks=(task("accepted", "t0"), gone))
    assert decided(run(cohort=Cohort(quorum=1), round=left)) == [Close("r", "all tasks ended")]
    # It is waited for while it may be at work.
    held = replace(left, tasks=(task("accepted", "t0"), replace(task("leased", "t1"), present=False)))
    assert decided(run(cohort=Cohort(quorum=1), round=held)) == []


def test_a_round_is_tried_again_and_then_the_run_pauses_with_a_reason() -> None:
    cohort = Cohort(quorum=2, max_attempts=3)
    assert decided(run(cohort=cohort, version=4, rounds=9, abandoned=2, eligible=2), NOW + 30) == [Open(5)]
    because = "1 of 2 updates came (b/w: disk-full)"
    paused = run(cohort=cohort, version=4, rounds=9, abandoned=3, abandoned_because=because, eligible=2)
    assert decided(paused) == [Pause(f"round 5 was abandoned 3 times, at last because {because}")]


@pytest.mark.parametrize(("abandoned", "seconds"), [(1, 1), (2, 10), (3, 60), (9, 60)])
def test_a_fault_that_lasts_some_seconds_does_not_use_up_all_attempts(abandoned: int, seconds: float) -> None:
    cohort = Cohort(size=2, quorum=2, max_attempts=10)
    failed = run(cohort=cohort, version=4, rounds=9, abandoned=abandoned, eligible=2)
    assert decided(failed, NOW + seconds - 0.1) == []
    assert decided(failed, NOW + seconds) == [Open(5)]


def test_a_clock_that_is_set_back_does_not_keep_a_dead_worker_s_lease() -> None:
    live = replace(a_round(), tasks=(task("leased", expires_at=NOW + 3600),))
    assert decided(run(cohort=Cohort(quorum=1), round=live)) == [Shorten("t", 1, NOW + 60)]
    # The clock of the process that renews leases may be a little ahead.
    live = replace(a_round(), tasks=(task("leased", expires_at=NOW + 61),))
    assert decided(run(cohort=Cohort(quorum=1), round=live)) == []


def test_a_run_completes_after_its_last_round() -> None:
    assert decided(run(version=3, rounds=3, eligible=9)) == [Complete()]


@pytest.mark.parametrize("state", ["paused", "completed"])
def test_a_run_that_is_not_running_opens_nothing(state: str) -> None:
    assert decided(run(state=state, eligible=9), NOW + 1e9) == []


# ---------------------------------------------------------------- evaluation


def test_due_versions_are_offered_to_evaluators_if_there_are_any() -> None:
    due = run(unevaluated=(PendingEvaluation(0), PendingEvaluation(2)), evaluators=1)
    assert decided(due) == [Evaluate((PendingEvaluation(0), PendingEvaluation(2)))]
    assert decided(replace(due, evaluators=0)) == []


def test_a_site_is_offered_a_version_whether_or_not_anybody_evaluates_centrally() -> None:
    due = run(unevaluated=(PendingEvaluation(1), PendingEvaluation(2, "a"), PendingEvaluation(2, "b")), evaluators=0)
    assert decided(due) == [Evaluate((PendingEvaluation(2, "a"), PendingEvaluation(2, "b")))]


def test_what_is_due_is_offered_before_the_next_round_changes_what_sites_keep() -> None:
    due = run(unevaluated=(PendingEvaluation(0, "a"),), cohort=Cohort(size=2, quorum=2), eligible=2)
    assert decided(due) == [Evaluate((PendingEvaluation(0, "a"),)), Open(1)]


def test_a_lapsed_evaluation_is_not_offered_again_to_a_worker_that_is_gone() -> None:
    gone = replace(task("expired"), present=False)
    assert decided(run(evaluations=(gone,))) == []
    # Its version is then due again, for another worker.
    assert decided(run(evaluations=(gone,), unevaluated=(PendingEvaluation(1),), evaluators=1)) == [
        Evaluate((PendingEvaluation(1),))
    ]


def test_the_lease_of_a_worker_that_is_gone_lapses_all_the_same() -> None:
    gone = replace(task("leased", expires_at=NOW), present=False)
    assert decided(run(evaluations=(gone,))) == [Expire("t", 1)]


def test_a_finished_run_waits_for_its_last_evaluation_and_no_longer_than_agreed() -> None:
    waiting = run(version=3, evaluations=(task("leased", expires_at=NOW + 601),), idle_since=NOW)
    assert decided(waiting, NOW + 600) == []
    assert decided(waiting, NOW + 600.001) == [Complete()]


def test_a_finished_run_does_not_wait_for_a_site_that_is_gone() -> None:
    offered = task("offered", attempts=0)
    assert decided(run(version=3, evaluations=(offered,))) == []
    assert decided(run(version=3, evaluations=(replace(offered, present=False),))) == [Complete()]


def test_a_finished_run_offers_its_last_version_before_it_completes() -> None:
    assert decided(run(version=3, unevaluated=(PendingEvaluation(3),), evaluators=1)) == [
        Evaluate((PendingEvaluation(3),))
    ]
    assert decided(run(version=3, unevaluated=(PendingEvaluation(3, "a"),))) == [
        Evaluate((PendingEvaluation(3, "a"),))
    ]


def test_a_finished_run_does_not_wait_for_evaluators_that_are_not_there() -> None:
    assert decided(run(version=3, unevaluated=(PendingEvaluation(3),), evaluators=0)) == [Complete()]


# ---------------------------------------------------------------- winding up


@pytest.mark.parametrize("state", ["cancelled", "completed"])
def test_a_run_that_was_ended_winds_up_its_round_and_its_evaluations(state: str) -> None:
    ended = run(state=state, round=a_round("leased"), evaluations=(task("leased"),), eligible=9)
    assert decided(ended) == [Abandon("r", f"the run was {state}"), CancelEvaluations()]
    assert decided(run(state=state, eligible=9)) == []


# ---------------------------------------------------------------- whatever is seen


COHORTS = st.builds(
    lambda quorum, spare, enough, tries, max_task_attempts: Cohort(
        size=None if spare is None else quorum + spare,
        quorum=quorum,
        target_updates=enough,
        max_attempts=tries,
        max_task_attempts=max_task_attempts,
    ),
    st.integers(1, 4),
    st.none() | st.integers(0, 3),
    st.none() | st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 3),
)
INSTANTS = st.floats(0, 2 * NOW)
TASKS = st.builds(
    TaskSnapshot,
    st.uuids().map(str),
    st.sampled_from("abc"),
    st.sampled_from(get_args(TaskState)),
    st.integers(0, 5),
    st.integers(0, 5),
    st.none() | INSTANTS,
    st.booleans(),
)
ROUNDS = st.builds(
    RoundSnapshot,
    st.just("r"),
    st.integers(1, 5),
    st.sampled_from(["open", "merging"]),
    INSTANTS,
    st.lists(TASKS, max_size=5).map(tuple),
)
RUNS = st.builds(
    RunSnapshot,
    st.just("run"),
    st.sampled_from(get_args(RunState)),
    st.integers(1, 5),
    st.integers(0, 5),
    COHORTS,
    st.none() | ROUNDS,
    st.integers(0, 4),
    st.integers(0, 6),
    INSTANTS,
    st.lists(TASKS, max_size=2).map(tuple),
    st.lists(
        st.builds(PendingEvaluation, st.integers(0, 5), st.none() | st.sampled_from("abc")), unique=True, max_size=3
    ).map(tuple),
    st.integers(0, 2),
)


@given(snapshot=RUNS, now=INSTANTS)
def test_no_moment_asks_for_two_moves_of_a_round_or_of_a_run(snapshot: RunSnapshot, now: float) -> None:
    actions = decide(snapshot, now, PATIENCE)
    assert sum(isinstance(a, Open | Close | Merge | Abandon | Pause | Complete) for a in actions) <= 1
    assert len(actions) == len(set(actions))
    assert decide(snapshot, now, PATIENCE) == actions


@given(snapshot=RUNS, now=INSTANTS)
def test_every_action_fits_what_was_seen(snapshot: RunSnapshot, now: float) -> None:
    tasks = snapshot.round.tasks if snapshot.round else ()
    accepted = len({task.site for task in tasks if task.state == "accepted"})
    for action in decide(snapshot, now, PATIENCE):
        match action:
            case Open(number):
                assert snapshot.round is None
                assert (snapshot.state, number) == ("running", snapshot.version + 1)
                assert number <= snapshot.rounds
                assert snapshot.eligible >= snapshot.cohort.quorum
            case Close():
                assert accepted >= snapshot.cohort.quorum
            case Merge():
                assert snapshot.round is not None
                assert snapshot.round.state == "merging"
            case Pause() | Complete():
                assert snapshot.state == "running"
            case Abandon() if snapshot.state in LIVE_RUN:
                assert accepted < snapshot.cohort.quorum


@given(snapshot=RUNS, now=INSTANTS)
def test_an_open_round_past_its_deadline_never_stays_open(snapshot: RunSnapshot, now: float) -> None:
    if snapshot.round and snapshot.round.state == "open" and now >= snapshot.round.deadline_at:
        assert any(isinstance(action, Close | Abandon) for action in decide(snapshot, now, PATIENCE))
