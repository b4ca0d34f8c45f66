"""Every rule of `decide`, with literals: what is seen, and what is to be done about it."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.coordinator.domain.buffered import sites_are_done
from tessera.coordinator.domain.decide import CancelEvaluations, Evaluate, decide
from tessera.coordinator.domain.leases import Expire, MoveBack, Offer, Shorten
from tessera.coordinator.domain.lifecycle import LIVE_RUN
from tessera.coordinator.domain.round_moves import Abandon, Ask, Close, Merge, Open
from tessera.coordinator.domain.snapshot import (
    Answers,
    PendingEvaluation,
    RoundSnapshot,
    RunSnapshot,
    SumsSnapshot,
    TaskSnapshot,
    Timeouts,
)
from tessera.coordinator.domain.sum_helpers import AskHelpers, Pause
from tessera.coordinator.domain.without_rounds import Complete
from tessera.shared.api.cohort import Cohort
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


SPENT = run(cohort=Cohort(quorum=2, max_updates_per_site=3), rounds=9, version=4, eligible=1, done=2)


def asking(answered: int, asked: int, **facts: Any) -> RunSnapshot:
    """A run without rounds, with a deadline of 100 s."""
    of_answers = {name: facts.pop(name) for name in ("is_full", "withheld", "failed") if name in facts}
    cohort = Cohort(quorum=2, deadline_seconds=100)
    return run(rounds=0, cohort=cohort, answers=Answers(answered, asked, **of_answers), **facts)


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


def lapsed(*tasks: TaskSnapshot) -> tuple[TaskSnapshot, ...]:
    """Tasks of two helpers of 99 attempts, the first still leased, and others."""
    return (task("leased", "h0", attempts=99, expires_at=NOW), task("expired", "h1", attempts=99), *tasks)


def live(*tasks: TaskSnapshot, **facts: Any) -> RoundSnapshot:
    return replace(a_round(**facts), tasks=tasks)


def of_sites(*tasks: tuple[str, str]) -> RunSnapshot:
    """A run in a round of workers given by their sites and how far they are."""
    return run(round=live(*(task(s, f"t{i}", site=site) for i, (site, s) in enumerate(tasks))))


def gone(*of_task: str, **facts: Any) -> TaskSnapshot:
    return replace(task(*of_task, **facts), present=False)


def cohort(quorum: int = 2, **facts: Any) -> dict[str, Cohort]:
    return {"cohort": Cohort(quorum=quorum, **facts)}


def buffering(quorum: int = 2, **facts: Any) -> dict[str, Cohort]:
    return cohort(quorum, mode="buffer", target_updates=2, **facts)


def timed(*took: float | None, deadline_at: float = NOW + 1000) -> RoundSnapshot:
    """A round whose tasks were offered now, and accepted after these seconds; None is at work."""
    tasks = (
        replace(
            task("leased" if seconds is None else "accepted", f"t{i}", expires_at=NOW + 60),
            offered_at=NOW,
            accepted_at=None if seconds is None else NOW + seconds,
        )
        for i, seconds in enumerate(took)
    )
    return RoundSnapshot("r", 1, "open", deadline_at, tuple(tasks))


SIGNING = SumsSnapshot(4, 3, lapsed(*helpers("accepted", "accepted")))
OFFERED_AGAIN = [Expire("h0", 99), Offer("h1")]
TOO_FEW = "{} of {} updates came and no more can come; the quorum is {}"
CENTRAL, AT_A = PendingEvaluation(3), PendingEvaluation(3, "a")

RULES: list[tuple[str, RunSnapshot, dict[float, list[object]]]] = [
    # ---------------------------------------------------------------- leases
    ("helpers get their tasks again without a limit of attempts",
     run(round=replace(a_round("accepted", state="merging"), sums=SIGNING)), {0: OFFERED_AGAIN}),
    ("and in a paused run too",
     run(round=replace(a_round("accepted", state="merging"), sums=SIGNING), state="paused"), {0: OFFERED_AGAIN}),
    ("helpers are asked without a limit to sign that an attempt is never opened",
     run(abandoning=lapsed(task("leased"))), {0: OFFERED_AGAIN}),
    ("but not in an ended run", run(abandoning=lapsed(), state="cancelled"), {0: [CancelEvaluations()]}),
    ("a cancelled run's sums are not opened",
     summing(ALL_SIGNED, state="cancelled"), {0: [Abandon("r", "the run was cancelled")]}),
    ("a lease lapses at the moment it expires and not before",
     run(round=live(task("leased", "t", attempts=2, expires_at=NOW), task("leased", "u"))),
     {-0.001: [], 0: [Expire("t", token=2)]}),
    ("a lapsed task is offered again while it has tries left",
     run(**cohort(1, max_task_attempts=3),
         round=live(task("expired", "second", attempts=2), task("expired", "last", attempts=3))),
     {0: [Offer("second")]}),
    ("a lapsed task without a try left is not waited for",
     run(**cohort(1, max_task_attempts=2), round=live(task("expired", attempts=2))),
     {0: [Abandon("r", TOO_FEW.format(0, 1, 1))]}),
    ("an evaluation's lease lapses and is offered again too",
     run(evaluations=(task("leased", "slow", expires_at=NOW - 1), task("expired", "lost"))),
     {0: [Expire("slow", 1), Offer("lost")]}),
    ("leases of a round that is being merged are left alone",
     run(round=live(task("leased", expires_at=NOW - 1), state="merging")), {0: [Merge("r")]}),
    ("a clock that is set back does not keep a dead worker's lease",
     run(**cohort(1), round=live(task("leased", expires_at=NOW + 3600))), {0: [Shorten("t", 1, NOW + 60)]}),
    ("the clock of the process that renews leases may be a little ahead",
     run(**cohort(1), round=live(task("leased", expires_at=NOW + 61))), {0: []}),
    # ---------------------------------------------------------------- the round in progress
    ("an open round waits for all its tasks", run(round=a_round("accepted", "accepted", "leased")), {0: []}),
    ("an open round waits for its quorum", run(round=a_round("accepted", "offered")), {0: []}),
    ("a round closes at its deadline if the quorum is there",
     run(round=a_round("accepted", "accepted", "leased", deadline_at=NOW)),
     {-0.001: [], 0: [Close("r", "the deadline came")]}),
    ("a round closes early once all its tasks have ended",
     run(round=a_round("accepted", "accepted", "failed", "rejected")), {0: [Close("r", "all tasks ended")]}),
    ("a round waits until enough updates are in",
     run(**cohort(1, size=4, target_updates=2), round=a_round("accepted", "leased", "leased", "leased")), {0: []}),
    ("a round closes early once enough updates are in",
     run(**cohort(1, size=4, target_updates=2), round=a_round("accepted", "accepted", "leased", "offered")),
     {0: [Close("r", "2 updates are enough")]}),
    ("enough never undercuts the quorum",
     run(**cohort(3, size=4, target_updates=1), round=a_round("accepted", "accepted", "leased", "leased")), {0: []}),
    ("a round waits for a required site, even beyond enough updates",
     run(**cohort(1, target_updates=1, require=("t1",)), round=a_round("accepted", "leased")), {0: []}),
    ("a round closes once its required site is in",
     run(**cohort(1, target_updates=2, require=("t1",)), round=a_round("accepted", "accepted", "leased")),
     {0: [Close("r", "2 updates are enough")]}),
    ("a round whose required site failed ends at once, without a version",
     run(**cohort(1, require=("t1",)), round=a_round("accepted", "failed", "leased")),
     {0: [Abandon("r", "1 of 3 updates came and no more can come; cohort.require names t1")]}),
    ("and at its deadline, whoever else is there",
     run(**cohort(1, require=("t1",)), round=a_round("accepted", "leased", deadline_at=NOW)),
     {-0.001: [], 0: [Abandon("r", "1 of 2 updates came by the deadline; cohort.require names t1")]}),
    ("many updates of one site are no quorum",
     of_sites(("a", "accepted"), ("a", "accepted"), ("a", "accepted"), ("b", "failed")),
     {0: [Abandon("r", TOO_FEW.format(1, 2, 2))]}),
    ("nor can its updates that may yet come make one",
     of_sites(("a", "accepted"), ("a", "leased"), ("b", "failed")), {0: [Abandon("r", TOO_FEW.format(1, 2, 2))]}),
    ("many updates of one site are not enough",
     replace(of_sites(("a", "accepted"), ("a", "accepted"), ("b", "leased")), **cohort(1, target_updates=2)),
     {0: []}),
    ("a site counts once one of its workers has delivered and its others are awaited",
     of_sites(("a", "accepted"), ("a", "leased"), ("b", "accepted")),
     {0: [], 100: [Expire("t1", 1), Close("r", "the deadline came")]}),
    ("a site counts once whether or not its others fail",
     of_sites(("a", "accepted"), ("a", "failed"), ("b", "accepted")), {0: [Close("r", "all tasks ended")]}),
    ("a round is abandoned at its deadline without a quorum",
     run(round=a_round("accepted", "leased", "offered", deadline_at=NOW)),
     {0: [Abandon("r", "1 of 3 updates came by the deadline; the quorum is 2")]}),
    ("a round is abandoned as soon as its quorum is out of reach",
     run(round=a_round("accepted", "failed", "rejected")), {0: [Abandon("r", TOO_FEW.format(1, 3, 2))]}),
    ("one accepted and one under way can make two", run(round=a_round("accepted", "leased", "failed")), {0: []}),
    ("but not three",
     run(**cohort(3), round=a_round("accepted", "leased", "failed")), {0: [Abandon("r", TOO_FEW.format(1, 3, 3))]}),
    ("a closed round is merged even if the run is paused",
     run(state="paused", round=a_round("accepted", state="merging")), {0: [Merge("r")]}),
    ("a task whose worker is gone is not waited for",
     run(**cohort(1), round=live(task("accepted", "t0"), gone("offered", "t1"))),
     {0: [Close("r", "all tasks ended")]}),
    ("a worker that is gone is waited for while it may be at work",
     run(**cohort(1), round=live(task("accepted", "t0"), gone("leased", "t1"))), {0: []}),
    ("over-selection closes a round at the number of sites that it wants",
     run(**cohort(1, size=2, over_selection=0.5), round=a_round("accepted", "accepted", "leased")),
     {0: [Close("r", "2 updates are enough")]}),
    ("a round opens at once when as many sites are there as it asks",
     run(**cohort(size=2, over_selection=0.5), version=1, eligible=3), {0: [Open(2)]}),
    ("and waits for one that it asks beyond its size",
     run(**cohort(size=2, over_selection=0.5), version=1, eligible=2), {29.9: [], 30: [Open(2)]}),
    # Of 10, 20 and 30 s and longer, the median is 25 s, and the deviations are 15, 5, 5 and longer: 10 s.
    ("a round waits for a task no longer than the median and three deviations of the others' times",
     run(**cohort(2, adaptive_deadline=True), round=timed(10, 20, 30, None)),
     {54.9: [], 55: [Close("r", "the other sites take longer than usual")]}),
    ("earlier rounds count too, and at least a tenth of the median",
     run(**cohort(2, adaptive_deadline=True), round=replace(timed(10, 10, None), earlier=(10.0, 10.0, inf))),
     {12.9: [], 13: [Close("r", "the other sites take longer than usual")]}),
    ("while half of the times are not known, it waits for the deadline",
     run(**cohort(2, adaptive_deadline=True), round=timed(10, 10, None, None, deadline_at=NOW + 50)),
     {49.9: [], 50: [Close("r", "the deadline came")]}),
    ("times in which the clock was set back are not known either",
     run(**cohort(2, adaptive_deadline=True), round=timed(-5, -5, None, deadline_at=NOW + 50)),
     {49.9: [], 50: [Close("r", "the deadline came")]}),
    ("a quorum is needed all the same",
     run(**cohort(3, adaptive_deadline=True), round=timed(10, 10, None)), {50: []}),
    ("and a required site", run(**cohort(1, require=("t2",), adaptive_deadline=True), round=timed(10, 10, None)),
     {50: []}),
    ("a buffered round closes so as well",
     run(**cohort(2, mode="buffer", target_updates=9, adaptive_deadline=True), round=timed(10, 20, 30, None)),
     {54.9: [], 55: [Close("r", "the other sites take longer than usual")]}),
    # ---------------------------------------------------------------- a round that buffers updates
    ("idle sites are asked while a round is open",
     run(**buffering(), eligible=1, round=a_round("accepted", "leased")), {0: [Ask(1)]}),
    ("but not in a paused run", run(**buffering(), eligible=1, state="paused", round=a_round("leased")), {0: []}),
    ("nor once enough updates are in",
     run(**buffering(), eligible=1, round=a_round("accepted", "accepted", "leased")),
     {0: [Close("r", "2 updates are enough")]}),
    ("enough updates close it in a paused run too",
     run(**buffering(), state="paused", round=a_round("accepted", "accepted")),
     {0: [Close("r", "2 updates are enough")]}),
    ("at the deadline the quorum is enough",
     run(**buffering(quorum=1), round=a_round("accepted", "leased", deadline_at=NOW)),
     {-0.001: [], 0: [Close("r", "the deadline came")]}),
    ("it waits beyond the deadline while a quorum may come",
     run(**buffering(), round=a_round("accepted", "leased", deadline_at=NOW)), {0: [], 1e3: [Expire("t1", 1)]}),
    ("a failed task is planned again by the next attempt, while others go on",
     run(**buffering(quorum=3), round=a_round("accepted", "leased", "failed")),
     {0: [Abandon("r", "updates came from 1 of the sites, and 1 more may send one; the quorum is 3")]}),
    ("a required site is waited for",
     run(**buffering(quorum=1, require=("t1",)), round=a_round("accepted", "leased")), {0: []}),
    # ---------------------------------------------------------------- between rounds
    ("the next round opens at once when the full cohort is there",
     run(**cohort(size=3), version=1, eligible=3), {0: [Open(2)]}),
    ("a round gathers for a while once there is a quorum",
     run(**cohort(size=3), eligible=2), {29.999: [], 30: [Open(1)]}),
    ("a run whose sites have trained as often as they may pauses, once others had time to appear",
     SPENT, {29.999: [], 30: [Pause(sites_are_done(SPENT))]}),
    ("one with a quorum of others goes on",
     run(**cohort(max_updates_per_site=3), version=1, eligible=2, done=2), {30: [Open(2)]}),
    ("no round opens below the quorum however long it waits", run(**cohort(size=3), eligible=1), {1e9: []}),
    *((f"a clock that is set back stops no {state} run until it has caught up",
       run(state=state, **cohort(size=3), eligible=3, abandoned=1), {0: [], -61: [MoveBack()]})
      for state in ("running", "paused")),
    ("without a cohort size further sites get the time to come",
     run(eligible=2), {29.999: [], 30: [Open(1)]}),
    ("without a cohort size no round opens below the quorum", run(eligible=1), {99: []}),
    ("a run that goes on waits for no further sites", run(version=1, eligible=2, goes_on=True), {0: [Open(2)]}),
    ("a run that goes on waits for the quorum", run(version=1, eligible=1, goes_on=True), {99: []}),
    ("a run that goes on waits for all of a cohort with a size",
     run(**cohort(size=3), version=1, eligible=2, goes_on=True), {0: []}),
    ("a round is tried again", run(**cohort(max_attempts=3), version=4, rounds=9, abandoned=2, eligible=2),
     {30: [Open(5)]}),
    ("and then the run pauses with a reason",
     run(**cohort(max_attempts=3), version=4, rounds=9, abandoned=3, abandoned_because="b/w: disk-full", eligible=2),
     {0: [Pause("round 5 was abandoned 3 times, at last because b/w: disk-full")]}),
    *((f"a fault that lasts some seconds does not use up all attempts: the wait after {abandoned}",
       run(**cohort(size=2, max_attempts=10), version=4, rounds=9, abandoned=abandoned, eligible=2),
       {seconds - 0.1: [], seconds: [Open(5)]})
      for abandoned, seconds in ((1, 1), (2, 10), (3, 60), (9, 60))),
    ("a run completes after its last round", run(version=3, eligible=9), {0: [Complete()]}),
    ("a paused run opens nothing", run(state="paused", eligible=9), {1e9: []}),
    # ---------------------------------------------------------------- evaluation
    ("due versions are offered to evaluators", run(unevaluated=(PendingEvaluation(0), CENTRAL), evaluators=1),
     {0: [Evaluate((PendingEvaluation(0), CENTRAL))]}),
    ("due versions wait for evaluators", run(unevaluated=(PendingEvaluation(0), CENTRAL)), {0: []}),
    ("a site is offered a version without any central evaluator",
     run(unevaluated=(PendingEvaluation(1), AT_A, PendingEvaluation(3, "b"))),
     {0: [Evaluate((AT_A, PendingEvaluation(3, "b")))]}),
    ("due evaluations are offered before the next round changes what sites keep",
     run(unevaluated=(AT_A,), **cohort(size=2), eligible=2), {0: [Evaluate((AT_A,)), Open(1)]}),
    ("a lapsed evaluation is not offered again to a worker that is gone",
     run(evaluations=(gone("expired"),)), {0: []}),
    ("its version is then due again, for another worker",
     run(evaluations=(gone("expired"),), unevaluated=(CENTRAL,), evaluators=1), {0: [Evaluate((CENTRAL,))]}),
    ("the lease of a worker that is gone lapses all the same",
     run(evaluations=(gone("leased", expires_at=NOW),)), {0: [Expire("t", 1)]}),
    ("a finished run waits for its last evaluation and no longer than agreed",
     run(version=3, evaluations=(task("leased", expires_at=NOW + 601),)), {600: [], 600.001: [Complete()]}),
    ("a finished run waits for a site", run(version=3, evaluations=(task("offered", attempts=0),)), {0: []}),
    ("a finished run does not wait for a site that is gone",
     run(version=3, evaluations=(gone("offered", attempts=0),)), {0: [Complete()]}),
    ("a finished run offers its last version before it completes",
     run(version=3, unevaluated=(CENTRAL,), evaluators=1), {0: [Evaluate((CENTRAL,))]}),
    ("to sites too", run(version=3, unevaluated=(AT_A,)), {0: [Evaluate((AT_A,))]}),
    ("a finished run does not wait for evaluators that are not there",
     run(version=3, unevaluated=(CENTRAL,)), {0: [Complete()]}),
    # ---------------------------------------------------------------- without rounds
    ("a run without rounds asks each site", asking(0, 0, unevaluated=(AT_A,)), {0: [Evaluate((AT_A,))]}),
    ("it waits for further sites", asking(2, 2), {29: [], 30: [Complete()]}),
    ("it waits for each answer until its deadline", asking(2, 3, evaluations=(task("leased", expires_at=NOW + 101),)),
     {99: [], 100: [Complete("2 of 3 sites answered by the deadline")]}),
    ("it says that a site has not answered", asking(2, 3), {30: [Complete("2 of 3 sites answered")]}),
    ("it waits for a person's approval at a site", asking(2, 3, withheld=1),
     {99: [], 100: [Complete("2 of 3 sites answered by the deadline")]}),
    ("it waits for a central evaluator", asking(2, 2, unevaluated=(CENTRAL,)),
     {99: [], 100: [Complete("2 of 2 sites answered by the deadline")]}),
    ("it ends early once each site that it names has answered", asking(2, 2, is_full=True), {0: [Complete()]}),
    ("it does not end while one of them works", asking(2, 2, is_full=True, evaluations=(task("leased"),)), {0: []}),
    ("it is never complete with fewer answers than its quorum", asking(1, 2, failed=("b/w: diverged",)),
     {29: [], 30: [Pause("1 of 2 sites answered (b/w: diverged); the quorum is 2")]}),
    ("without any answer it pauses", asking(0, 0),
     {99: [], 100: [Pause("0 of 0 sites answered by the deadline; the quorum is 2")]}),
    ("it waits for sites to come", asking(1, 1), {99: []}),
    ("a paused one asks nobody", asking(0, 0, state="paused", unevaluated=(AT_A,)), {0: [], 1e9: []}),
    # ---------------------------------------------------------------- winding up
    *((f"a {state} run winds up its round and its evaluations",
       run(state=state, round=a_round("leased"), evaluations=(task("leased"),), eligible=9),
       {0: [Abandon("r", f"the run was {state}"), CancelEvaluations()]}) for state in ("cancelled", "completed")),
    *((f"a {state} run opens nothing", run(state=state, eligible=9), {0: [], 1e9: []})
      for state in ("cancelled", "completed")),
]  # fmt: skip


@pytest.mark.parametrize(("seen", "to_do"), [pytest.param(*row, id=rule) for rule, *row in RULES])
def test_the_rules(seen: RunSnapshot, to_do: dict[float, list[object]]) -> None:
    assert {seconds: decided(seen, NOW + seconds) for seconds in to_do} == to_do


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
    answers=st.none() | st.builds(Answers, st.integers(0, 3), st.integers(3, 5), st.booleans(), st.integers(0, 2)),
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
                if isinstance(action, Complete) and snapshot.answers:
                    assert snapshot.answers.answered >= snapshot.cohort.quorum
            case Abandon() if snapshot.state in LIVE_RUN:
                assert accepted < snapshot.cohort.quorum


@given(snapshot=RUNS, now=INSTANTS)
def test_an_open_round_past_its_deadline_never_stays_open(snapshot: RunSnapshot, now: float) -> None:
    if snapshot.round and snapshot.round.state == "open" and now >= snapshot.round.deadline_at:
        assert any(isinstance(action, Close | Abandon) for action in decide(snapshot, now, PATIENCE))
