"""What a site has handed in is remembered, so that a run cannot be shown to it in two forms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tessera.shared.api.runs import Training
from tessera.shared.api.secure_sums import SumTask
from tessera.shared.api.tasks import CohortTerms
from tessera.shared.api.versions import VersionRef
from tessera.shared.methods.base import MethodSpec, Plan
from tessera.shared.privacy.noise_shares import rho_for
from tessera.shared.run_settings import Budget, ClientPrivacy, Privacy
from tessera.shared.secure_sums.messages import Agreement, Terms
from tessera.worker.governance.policy import Policy, PolicyViolation
from tessera.worker.governance.run_history import MAX_RESTORES, VERSIONS_KEPT, Record, RunHistory, TaskStatement
from tessera.worker.state.database import StateDatabase, StateError
from tests.support.secure_sums import Federation
from tests.support.task_document import task_of

MEASURING: dict[str, Any] = {"kind": "evaluate", "held_out": True}
PRIVATE: dict[str, Any] = {"privacy": Privacy(epsilon=1.0, delta=1e-5, clip_norm=1.0)}
SUMS = {"helpers": ["a", "b", "c"], "quorum": 5}
DIGESTS = [f"sha256:{number:064x}" for number in range(100)]


def task(number: int, digest: str | None = None, **more: object) -> TaskStatement:
    """Round `number` on the version before it."""
    version = VersionRef(number=number - 1, digest=digest or DIGESTS[number - 1])
    given = {"round": number, "rounds": 90, "seed": 5, "model": DIGESTS[0], "version": version}
    return TaskStatement.of(task_of(**{**given, **more}))


def refused(seen: RunHistory, asked: TaskStatement, rule: str, max_attempts: int = 10) -> str:
    with pytest.raises(PolicyViolation) as violation:
        seen.check(asked, Policy(max_attempts=max_attempts))
    assert violation.value.rule == rule
    return violation.value.detail


def test_rounds_that_go_forward_are_all_well(tmp_path: Path) -> None:
    seen = RunHistory(tmp_path, "w")
    for number in (1, 2, 5):
        seen.check(task(number), Policy(max_attempts=1))
        seen.add(task(number), Policy(max_attempts=1))


def test_what_is_only_looked_at_leaves_no_trace(tmp_path: Path) -> None:
    seen = RunHistory(tmp_path / "runs", "w")
    seen.check(task(1), Policy(max_attempts=10))
    seen.check(task(1, DIGESTS[7], method=MethodSpec(name="fedprox")), Policy(max_attempts=10))
    assert list(tmp_path.iterdir()) == []


def test_a_task_whose_plan_is_another_is_an_honest_retry_and_counted(tmp_path: Path) -> None:
    seen = RunHistory(tmp_path, "w")
    for stage in ("train", "again"):
        seen.add(task(1, plan=Plan(stage=stage)), Policy(max_attempts=2))
    assert refused(seen, task(1), "max_attempts", 2) == "round 1 was already submitted 2 times (policy.max_attempts)"


def test_a_run_with_secure_sums_may_not_go_on_without_them_or_with_other_helpers(tmp_path: Path) -> None:
    seen, sums = RunHistory(tmp_path, "w"), {"helpers": ["a", "b", "c"], "quorum": 5}
    seen.add(task(1, secure_sums=sums, sums=SumTask(terms=DIGESTS[9])), Policy())
    seen.check(task(2, secure_sums=sums, sums=SumTask(terms=DIGESTS[8])), Policy())
    for number in (1, 2):
        for other in (None, {**sums, "helpers": ["d", "e", "f"]}, {**sums, "quorum": 3}):
            assert refused(seen, task(number, secure_sums=other), "run") == "run r has changed its secure_sums"


@pytest.mark.parametrize(
    ("given", "fixed"),
    [
        ({}, []),
        (PRIVATE, ["rounds"]),
        ({"client_privacy": ClientPrivacy(epsilon=1.0, delta=1e-5, clip_norm=1.0)}, ["rounds"]),
        ({"secure_sums": SUMS, "sums": SumTask(terms=DIGESTS[9])}, ["rounds", "quorum", "deadline_seconds"]),
    ],
)
def test_a_live_run_changes_nothing_that_noise_or_sums_follow_from(
    tmp_path: Path, given: dict[str, Any], fixed: list[str]
) -> None:
    seen, cohort = RunHistory(tmp_path, "w"), CohortTerms(quorum=3)
    seen.add(task(1, cohort=cohort, **given), Policy())
    changes: dict[str, dict[str, Any]] = {"rounds": {"rounds": 95}}
    changes |= {
        name: {"cohort": cohort.model_copy(update={name: 7})}
        for name in ("quorum", "deadline_seconds", "size", "target_updates", "workers_per_site", "invited")
    }
    for name, change in changes.items():
        asked = task(2, **{"cohort": cohort, **given, **change})
        if name in (*fixed, "size", "target_updates", "workers_per_site", "invited"):
            term = "rounds" if name == "rounds" else "cohort"
            assert refused(seen, asked, "run") == f"run r has changed its {term}"
        else:
            seen.check(asked, Policy())


def test_a_task_from_before_a_change_still_counts_after_one_from_after_it(tmp_path: Path) -> None:
    # Two workers of a site, of which one was in the open round when the run was changed.
    RunHistory(tmp_path, "a").add(task(2, rounds=95), Policy())
    RunHistory(tmp_path, "b").add(task(1), Policy())


def test_a_run_may_not_weaken_the_client_privacy_that_it_stated(tmp_path: Path) -> None:
    seen = RunHistory(tmp_path, "w")
    seen.add(task(1, client_privacy=ClientPrivacy(epsilon=1.0, delta=1e-5, clip_norm=1.0)), Policy())
    weaker = task(2, client_privacy=ClientPrivacy(epsilon=9.0, delta=1e-5, clip_norm=1.0))
    assert refused(seen, weaker, "run") == "run r has changed its client_privacy"


@pytest.mark.parametrize(("first", "second"), [((), ("rare",)), (("rare",), ()), (("rare",), ("rare", "common"))])
def test_no_second_measurement_leaves_other_classes_out(
    tmp_path: Path, first: tuple[str, ...], second: tuple[str, ...]
) -> None:
    seen = RunHistory(tmp_path, "gpu")
    seen.add(task(1, ignore=first, **MEASURING), Policy())
    # An update's task states none.
    seen.add(task(2), Policy())
    seen.add(task(2, ignore=first, **MEASURING), Policy())
    assert refused(seen, task(2, ignore=second, **MEASURING), "run") == "run r has changed its ignore"


def test_what_was_handed_in_is_remembered_after_a_restart(tmp_path: Path) -> None:
    RunHistory(tmp_path, "w").add(task(3), Policy(max_attempts=10), kept="t")
    again = RunHistory(tmp_path, "w")
    assert "tessera worker adopt --run r" in refused(again, task(2), "round")
    refused(again, task(3, seed=6), "round")
    refused(again, task(4, DIGESTS[2], version=VersionRef(number=2, digest=DIGESTS[2])), "round")
    assert refused(again, task(4, training=Training(epochs=2), codec="delta+int8"), "run").endswith("training, codec")


def other(number: int, **more: Any) -> TaskStatement:
    """A round on a version that a restored coordinator made anew."""
    return task(number, DIGESTS[number + 40], **more)


def test_a_plain_run_of_a_restored_coordinator_goes_on_and_not_without_end(tmp_path: Path) -> None:
    seen, policy = RunHistory(tmp_path, "w"), Policy(max_attempts=10)
    for number in (1, 2, 3, 4, 5):
        seen.add(task(number), policy)
    # From the version that the backup has. Those after it are made anew.
    for asked in (task(3), other(4), other(5), other(6)):
        seen.add(asked, policy)
    for _ in range(MAX_RESTORES - 1):
        seen.add(task(3), policy)
        seen.add(other(4), policy)
    refused(seen, task(3), "round")
    for more in ({}, MEASURING):
        assert "tessera worker adopt --run r" in refused(seen, task(4, **more), "version")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([task(4), task(5, **MEASURING)], [other(5, **MEASURING), task(4), other(5), other(6)]),
        ([task(4)], [task(4, seed=6), other(5)]),
        ([task(4)], [other(4), other(5)]),
        ([task(number, **MEASURING) for number in (3, 4, 5)], [other(n, **MEASURING) for n in (4, 5, 6)]),
        ([task(4), task(5, **MEASURING)], [other(5), other(6)]),
    ],
    ids=["measured first", "other seed", "other version", "only measures", "less than a round lost"],
)
def test_a_plain_run_of_a_restored_coordinator_is_not_stopped_by_what_the_worker_did_last(
    tmp_path: Path, before: list[TaskStatement], after: list[TaskStatement]
) -> None:
    seen = RunHistory(tmp_path, "w")
    for asked in (*before, *after):
        seen.add(asked, Policy())
    # Each restore counts once, whatever the worker sees of it.
    (record,) = StateDatabase.of(tmp_path).documents(Record, "SELECT record FROM runs")
    assert record.handed["w"].restores == 1


@pytest.mark.parametrize(
    "covered",
    [
        PRIVATE,
        {"secure_sums": SUMS, "sums": SumTask(terms=DIGESTS[9])},
        {"client_privacy": ClientPrivacy(epsilon=1.0, delta=1e-5, clip_norm=1.0)},
        {},
    ],
    ids=["privacy", "sums", "client privacy", "state at the site"],
)
def test_a_run_that_privacy_or_state_binds_goes_back_only_if_a_person_adopts_it(
    tmp_path: Path, covered: dict[str, Any]
) -> None:
    seen, policy, kept = RunHistory(tmp_path, "w"), Policy(max_attempts=10), "" if covered else "t"
    for number in (1, 2, 3, 4):
        seen.add(task(number, **covered), policy, upload_bytes=5, kept=kept)
    refused(seen, task(2, **covered), "round")
    for more in ({}, MEASURING):
        assert "tessera worker adopt --run r" in refused(seen, other(4, **covered, **more), "version")
    with pytest.raises(ValueError, match="0 runs here are called 'no-such'"):
        seen.adopt("no-such")
    assert seen.adopt(str(task(1).terms["run_name"])) == seen.adopt("r") == "r"
    seen.add(task(2, **covered), policy)
    seen.add(task(3, DIGESTS[50], **covered), policy)
    # What it has sent, and its terms, stay.
    assert "max_run_upload_bytes" in refused_bytes(seen, task(4, **covered))
    refused(seen, task(4, codec="bits", **covered), "run")


def refused_bytes(seen: RunHistory, asked: TaskStatement) -> str:
    with pytest.raises(PolicyViolation) as violation:
        seen.check(asked, Policy(max_run_upload_bytes=20))
    return violation.value.rule


def test_two_workers_of_a_site_are_not_shown_two_versions(tmp_path: Path) -> None:
    north, south = RunHistory(tmp_path, "north"), RunHistory(tmp_path, "south")
    north.add(task(3, **PRIVATE), Policy(max_attempts=10))
    south.add(task(3, **PRIVATE), Policy(max_attempts=10))
    refused(south, task(3, DIGESTS[9], **PRIVATE), "version")
    # Each has rounds of its own.
    south.add(task(4, **PRIVATE), Policy(max_attempts=10))
    north.check(task(3, **PRIVATE), Policy(max_attempts=10))


def test_who_hands_in_second_is_judged_by_what_the_first_wrote(tmp_path: Path) -> None:
    north, south = RunHistory(tmp_path, "north"), RunHistory(tmp_path, "south")
    north.check(task(1, **PRIVATE), Policy(max_attempts=10))
    south.check(task(1, DIGESTS[9], **PRIVATE), Policy(max_attempts=10))
    north.add(task(1, **PRIVATE), Policy(max_attempts=10))
    with pytest.raises(PolicyViolation, match="version 0"):
        south.add(task(1, DIGESTS[9], **PRIVATE), Policy(max_attempts=10))


def test_a_central_evaluation_is_of_another_data_set_and_an_earlier_version(tmp_path: Path) -> None:
    seen = RunHistory(tmp_path, "w")
    for number in range(1, VERSIONS_KEPT + 3):
        seen.add(task(number, **PRIVATE), Policy(max_attempts=10))
    evaluation = {"kind": "evaluate", "dataset": "test", "round": 60, **PRIVATE}
    seen.add(task(61, **evaluation), Policy(max_attempts=10))
    refused(seen, task(61, DIGESTS[1], **evaluation), "version")
    assert "older than the versions kept" in refused(seen, task(2, **evaluation), "version")
    refused(seen, task(67, dataset="test", **PRIVATE), "run")


def test_a_record_that_cannot_be_read_is_looked_at_by_a_person(tmp_path: Path) -> None:
    seen = RunHistory(tmp_path, "w")
    seen.add(task(1), Policy(max_attempts=10))
    StateDatabase.of(tmp_path).write("UPDATE runs SET record = '{}x'")
    with pytest.raises(StateError, match="a row was changed, and is no Record"):
        seen.check(task(2), Policy())


def test_what_was_measured_is_counted_for_all_runs_and_workers_that_share_it(tmp_path: Path) -> None:
    policy, measuring = Policy(max_evaluations=2), {"kind": "evaluate", "held_out": True}
    north, south = RunHistory(tmp_path, "north"), RunHistory(tmp_path, "south")
    north.measure("one", "wards", policy)
    # Counted before anything is measured, so that whoever is killed in between has not measured for nothing.
    south.check(task(1, run="another", **measuring), policy)
    south.measure("another", "wards", policy)
    assert RunHistory(tmp_path, "north").measured("wards") == 2
    for asked in (lambda: north.check(task(1, **measuring), policy), lambda: north.measure("one", "wards", policy)):
        with pytest.raises(PolicyViolation, match="2 versions were measured on the data set 'wards'") as violation:
            asked()
        assert violation.value.rule == "max_evaluations"
    north.check(task(1), policy)
    north.measure("one", "clinics", policy)


def test_evaluations_of_a_run_are_counted_over_its_data_sets_and_workers(tmp_path: Path) -> None:
    policy, measuring = Policy(max_run_evaluations=2), {"kind": "evaluate", "held_out": True}
    first = task(1, **measuring)
    north, south = RunHistory(tmp_path, "north"), RunHistory(tmp_path, "south")
    north.measure(first.run, "wards", policy)
    north.add(first, policy)
    south.measure(first.run, "clinics", policy)
    for asked in (lambda: north.check(first, policy), lambda: north.measure(first.run, "wards", policy)):
        with pytest.raises(PolicyViolation, match="2 versions of the run were measured here") as violation:
            asked()
        assert violation.value.rule == "max_run_evaluations"
    assert RunHistory(tmp_path, "north").measured("wards") == 1
    north.measure("another", "wards", policy)


TOTAL = Policy.model_validate({"require_client_privacy": {"epsilon": 1.0, "delta": 1e-5, "total_epsilon": 1.5}})


def test_what_noisy_sums_reveal_of_a_site_adds_up_over_runs_and_workers(tmp_path: Path) -> None:
    """Runs of a small epsilon each would reveal the whole site, one after the other."""
    rho = rho_for(Budget(epsilon=1.0, delta=1e-5))
    first, second = RunHistory(tmp_path, "first"), RunHistory(tmp_path, "second")
    # Before there is a limit, it counts too.
    first.add(task(1, run="run-0"), Policy(), 1, rho)
    first.add(task(1, run="run-1"), TOTAL, 1, rho)
    assert first.spent_of_site() == 2 * rho
    # The epsilon of zCDP grows about as the root of the number of runs: 1, 1.45, 1.83.
    for later in (second, RunHistory(tmp_path, "first")):
        with pytest.raises(PolicyViolation, match=r"an epsilon of 1\.825 at delta 1e-05, and the site allows 1.5"):
            later.check_site(TOTAL, rho)
        with pytest.raises(PolicyViolation, match="require_client_privacy"):
            later.add(task(1, run="run-2"), TOTAL, 1, rho)
    assert first.spent_of_site() == 2 * rho


def test_what_all_updates_of_a_run_may_have_is_counted_for_the_workers_that_share_it(tmp_path: Path) -> None:
    policy = Policy(max_run_upload_bytes=1000)
    RunHistory(tmp_path, "north").add(task(1), policy, 600)
    south = RunHistory(tmp_path, "south")
    with pytest.raises(PolicyViolation, match="would total 1001 bytes, more than the 1000 allowed") as violation:
        south.add(task(1), policy, 401)
    assert violation.value.rule == "max_run_upload_bytes"
    south.add(task(1), policy, 400)
    # With no byte left nothing is trained any more, while a version may still be measured.
    with pytest.raises(PolicyViolation, match="max_run_upload_bytes"):
        south.check(task(2), policy)
    south.check(task(2, kind="evaluate"), policy)
    RunHistory(tmp_path, "north").check(task(1, run="another"), policy)


# ---------------------------------------------------------------- exact sums over all runs


@pytest.fixture
def sites() -> Federation:
    return Federation(6, 4)


def repeated(seen: RunHistory, terms: Terms) -> str:
    with pytest.raises(PolicyViolation) as violation:
        seen.add_sum(terms)
    assert violation.value.rule == "sums_repeated"
    with pytest.raises(PolicyViolation, match="sums_repeated"):
        seen.check_sum(terms)
    return violation.value.detail


def abandoned(sites: Federation, former: Terms, helpers: int) -> dict[str, list[Agreement]]:
    signed = [sites.member(name).abandon("run-1", 1, former.digest, n) for n, name in enumerate(sites.sealing)]
    return {former.digest: signed[:helpers]}


def test_updates_from_one_model_enter_one_sum_over_all_runs_workers_and_restarts(
    tmp_path: Path, sites: Federation
) -> None:
    """Runs that differ in weights, settings or cohort would give equations about this site's update."""
    first = sites.terms()
    RunHistory(tmp_path, "w").add_sum(first)
    for changed in ({"run": "run-2"}, {"round": 2}, {"attempt": 2}, {"max_weight": 9}, {"settings": DIGESTS[3]}):
        other = sites.terms(**{"values": first.values, **changed})
        where = "left in another run" if "run" in changed else "left in round 1 of this run"
        assert where in repeated(RunHistory(tmp_path, "another"), other)
    # The lease was lost, and the same task came again.
    RunHistory(tmp_path, "w").add_sum(first)
    RunHistory(tmp_path, "w").add_sum(sites.terms(2))


def test_a_site_sends_again_after_an_abandoned_attempt_if_enough_helpers_never_open_it(
    tmp_path: Path, sites: Federation
) -> None:
    seen, first = RunHistory(tmp_path, "w"), sites.terms()
    seen.add_sum(first)
    assert "too few" in repeated(seen, sites.terms(attempt=2, abandoned=abandoned(sites, first, 2)))
    second = sites.terms(attempt=2, abandoned=abandoned(sites, first, 3))
    seen.check_sum(second)
    seen.add_sum(second)
    # Now nothing may leave under the first terms, nor under third ones that abandon those alone.
    repeated(seen, first)
    repeated(seen, sites.terms(attempt=3, abandoned=abandoned(sites, first, 4)))


def test_a_repetition_that_was_allowed_keeps_the_first_sum_in_mind(tmp_path: Path, sites: Federation) -> None:
    seen, first = RunHistory(tmp_path, "w"), sites.terms()
    seen.add_sum(first)
    second = sites.terms(run="run-2", repeat_model=True)
    seen.add_sum(second)
    repeated(seen, sites.terms(run="run-3", abandoned=abandoned(sites, second, 4)))


@pytest.mark.parametrize(
    ("task_asked", "repeats"),
    [
        ({"secure_sums": {**SUMS, "repeat_model": True}}, True),
        ({"secure_sums": {**SUMS, "repeat_model": True}, "kind": "evaluate"}, False),
        ({"secure_sums": SUMS}, False),
        ({}, False),
    ],
)
def test_a_task_says_whether_it_repeats_a_model(task_asked: dict[str, Any], repeats: bool) -> None:
    assert task(1, **task_asked).repeats_model is repeats


def test_no_site_sends_updates_of_more_versions_than_its_run_allows(tmp_path: Path) -> None:
    cohort = CohortTerms(mode="buffer", max_updates_per_site=2)
    seen, other = RunHistory(tmp_path, "w"), RunHistory(tmp_path, "other")
    seen.add(task(1, cohort=cohort), Policy())
    # Another attempt at the same.
    seen.add(task(1, cohort=cohort), Policy())
    other.add(task(3, cohort=cohort), Policy())
    for history in (seen, other):
        detail = refused(history, task(5, cohort=cohort), "max_updates_per_site")
        assert detail == "the site has sent updates of 2 versions, as many as the run allows"
    raised = cohort.model_copy(update={"max_updates_per_site": 9})
    assert refused(seen, task(5, cohort=raised), "run") == "run r has changed its cohort"


def test_a_run_that_goes_back_does_not_begin_to_count_anew(tmp_path: Path) -> None:
    cohort = CohortTerms(max_updates_per_site=2)
    seen = RunHistory(tmp_path, "w")
    seen.add(task(4, cohort=cohort), Policy())
    seen.add(task(2, cohort=cohort), Policy())
    assert refused(seen, task(3, cohort=cohort), "max_updates_per_site")


def test_a_buffered_run_is_approved_as_such_and_others_as_before() -> None:
    plain = task(1)
    assert "mode" not in str(plain.terms["cohort"])
    changes = [{"mode": "buffer"}, {"mode": "buffer", "memory": True}, {"max_updates_per_site": 3}]
    digests = {task(1, cohort=CohortTerms(**change)).terms_digest() for change in changes}
    assert len({plain.terms_digest(), *digests}) == 4
    assert task(1, cohort=CohortTerms(mode="barrier")).terms_digest() == plain.terms_digest()


def test_the_digests_of_ordinary_tasks_know_nothing_of_buffers() -> None:
    plain, capped = task_of(rounds=9), task_of(rounds=9, cohort=CohortTerms(max_updates_per_site=3))
    assert (plain.trainings, capped.trainings) == (9, 3)
    shown = plain.model_dump(mode="json")["cohort"]
    assert shown.keys() == {
        "size", "workers_per_site", "target_updates", "quorum", "deadline_seconds", "invited", "invited_digest"
    }  # fmt: skip
    others = [{"mode": "buffer"}, {"mode": "buffer", "mixing": 0.5}, {"max_updates_per_site": 3}]
    digests = {task_of(rounds=9, cohort=CohortTerms(**other)).alike_digest for other in others}
    assert len({plain.alike_digest, *digests}) == 4
