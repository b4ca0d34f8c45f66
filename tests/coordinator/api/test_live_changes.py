"""Rounds, quorum and deadline of a live run: what may change, who may change it, and from when on it acts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tessera.coordinator.alerts.attention import withheld_runs
from tessera.coordinator.db.engine import Database
from tessera.coordinator.db.snapshots import terms_of
from tessera.coordinator.db.tables import RunRow
from tessera.coordinator.domain.without_rounds import Complete
from tessera.coordinator.domain.workers import LiveWorker
from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import RunPatch
from tessera.shared.methods.base import CoordinatorHalf, Method, MethodSettings, MethodSpec, Participant, Plan, State
from tessera.shared.methods.registry import methods
from tessera.shared.problems import Conflict, Forbidden, Invalid
from tests.coordinator.db.test_snapshots import SPEC
from tests.support.coordinator import LiveCoordinator, refused, until
from tests.support.databases import url_in
from tests.support.federation import ScriptedWorker, small_model, start_run, values
from tests.support.storage import add_run

MODEL = small_model()
START = values(MODEL)
NOISE = {"epsilon": 5.0, "delta": 1e-6, "clip_norm": 1.0}
OF_SITES = {"client_privacy": {**NOISE, "expected_sites": 3, "delta": 1e-3}, "normalization": "cohort"}
SUMS = {"secure_sums": {"helpers": ["a", "b", "c"]}, "cohort": {"quorum": 5}}
AUTO = {"method": MethodSpec(name="fedfrozen", settings={"warmup_rounds": "auto"})}
FIXED = {"method": MethodSpec(name="fedfrozen", settings={"warmup_rounds": 2}), "rounds": 6}
MEDIAN = {"robust": {"rule": "trimmed-mean", "attackers": 1}, "cohort": {"quorum": 3}}


def change(**changes: Any) -> RunPatch:
    return RunPatch.model_validate(changes)


def fewer(quorum: int) -> dict[str, Any]:
    return {"cohort": {"quorum": quorum}}


@pytest.mark.parametrize(
    ("settings", "changes", "pointer", "says"),
    [
        ({"privacy": NOISE}, {"rounds": 9}, "/rounds", "the noise of privacy is computed for 5 rounds"),
        (OF_SITES, {"rounds": 9}, "/rounds", "the noise of client_privacy is computed for 5 rounds"),
        ({"training": {"schedule": "cosine"}}, {"rounds": 9}, "/rounds", "run over the 5 rounds of the run"),
        ({"training": {"warmup": 0.1}}, {"rounds": 9}, "/rounds", "run over the 5 rounds of the run"),
        (AUTO, {"rounds": 9}, "/rounds", "the warm-up's stages are judged by the number of rounds that are left"),
        (FIXED, {"rounds": 2}, "/rounds", "nothing would ever be frozen"),
        (SUMS, {"rounds": 9}, "/secure_sums", "agreed on"),
        (SUMS, fewer(6), "/secure_sums", "agreed on"),
        (SUMS, {"cohort": {"deadline_seconds": 60}}, "/secure_sums", "agreed on"),
        (MEDIAN, fewer(2), "", "cohort.quorum is 2. Raise it to 3."),
        ({"cohort": {"size": 2}}, fewer(3), "/cohort", "a quorum of 3 cannot come from a cohort of 2"),
    ],
)  # fmt: skip
def test_a_setting_that_noise_schedule_stages_or_sums_follow_from_stays(
    standing: LiveCoordinator, settings: dict[str, Any], changes: dict[str, Any], pointer: str, says: str
) -> None:
    client = standing.client("orchestrator")
    run = start_run(client, MODEL, START, **{"dataset": "none", "rounds": 5, **settings})
    with pytest.raises(Invalid) as refusal:
        client.patch_run(run.id, change(**changes))
    (fault,) = refusal.value.errors
    assert fault.pointer == pointer
    assert says in fault.detail
    assert client.run(run.id) == run
    if pointer in ("/rounds", "/secure_sums"):
        assert f"`tessera run create --from {run.id} --set " in refusal.value.advice


@pytest.mark.parametrize("settings", [{"privacy": NOISE}, OF_SITES, {"training": {"schedule": "cosine"}}, AUTO])
def test_a_quorum_and_a_deadline_that_nothing_follows_from_change(
    standing: LiveCoordinator, settings: dict[str, Any]
) -> None:
    client = standing.client("orchestrator")
    run = start_run(client, MODEL, START, **{"dataset": "none", "rounds": 5, **settings})
    found = client.patch_run(run.id, change(cohort={"quorum": 2, "deadline_seconds": 60})).spec
    assert (found.rounds, found.cohort) == (5, Cohort(quorum=2, deadline_seconds=60))
    assert found == run.spec.model_copy(update={"cohort": found.cohort})


def test_each_method_of_tessera_that_reads_the_number_of_rounds_says_what_follows() -> None:
    def reads(method: Method[Any]) -> bool:
        modules = {half.__module__ for half in (method.coordinator, method.worker)} - {CoordinatorHalf.__module__}
        return any("run.rounds" in Path(sys.modules[name].__file__ or "").read_text() for name in modules)

    reading = {name: one.coordinator.check_rounds for name, one in methods().items() if reads(one)}
    assert {"fedfrozen", "scaffold"} <= set(reading)
    assert CoordinatorHalf.check_rounds not in reading.values()


class Changing(CoordinatorHalf[MethodSettings]):
    """A method during whose planning somebody does something."""

    meanwhile: list[tuple[int, Callable[[], object]]] = []

    def plan_for(self, state: State, worker: Participant) -> Plan:
        if self.meanwhile and self.meanwhile[0][0] == state.round and worker.name != "any":
            self.meanwhile.pop()[1]()
        return Plan()


@pytest.fixture
def changing() -> Iterator[str]:
    """A method that is installed while the test lasts."""
    methods()["changing"] = Method("changing", coordinator=Changing, source="a test")
    yield "changing"
    Changing.meanwhile.clear()
    del methods()["changing"]


def test_a_method_whose_file_reads_the_number_of_rounds_and_says_nothing_keeps_it(
    standing: LiveCoordinator, changing: str
) -> None:
    # This file names what such a method would read: run.rounds.
    client = standing.client()
    run = start_run(client, MODEL, START, dataset="none", method=MethodSpec(name=changing))
    with pytest.raises(Invalid) as refusal:
        client.patch_run(run.id, change(rounds=3))
    assert "(CoordinatorHalf.check_rounds)" in refusal.value.errors[0].detail
    client.set_run_state(run.id, "cancelled")


def test_a_change_of_rounds_under_a_method_that_is_not_installed_here_is_refused(
    standing: LiveCoordinator, changing: str
) -> None:
    client = standing.client()
    run = start_run(client, MODEL, START, dataset="none", method=MethodSpec(name=changing))
    method = methods().pop(changing)
    try:
        with pytest.raises(Invalid) as refusal:
            client.patch_run(run.id, change(rounds=3))
    finally:
        methods()[changing] = method
    assert [fault.pointer for fault in refusal.value.errors] == ["/method/name"]
    client.set_run_state(run.id, "cancelled")


def test_a_round_planned_before_a_change_is_not_opened_after_it(coordinator: LiveCoordinator, changing: str) -> None:
    client, worker = coordinator.client(), ScriptedWorker(coordinator.client("site", "a"), methods=("changing",))
    run = start_run(client, MODEL, START, method=MethodSpec(name=changing))
    Changing.meanwhile.append((0, lambda: client.patch_run(run.id, change(**fewer(2)))))
    worker.enrol()
    until(lambda: client.run(run.id).spec.cohort.quorum == 2)
    assert worker.claim(1) is None
    assert not list(client.rounds(run.id))
    other = ScriptedWorker(coordinator.client("site", "b"), methods=("changing",)).enrol()
    assert worker.take().cohort.quorum == other.take().cohort.quorum == 2


def test_no_round_is_opened_beyond_a_number_that_was_lowered_during_a_merge(
    coordinator: LiveCoordinator, changing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Changing, "check_rounds", lambda _: None)
    client, worker = coordinator.client(), ScriptedWorker(coordinator.client("site", "a"), methods=("changing",))
    run = start_run(client, MODEL, START, rounds=5, method=MethodSpec(name=changing))
    Changing.meanwhile.append((1, lambda: client.patch_run(run.id, change(rounds=1))))
    worker.train(worker.take())
    until(lambda: client.run(run.id).state == "completed")
    assert not Changing.meanwhile
    assert [round_.number for round_ in client.rounds(run.id)] == [1]


def test_a_run_that_was_given_more_rounds_meanwhile_does_not_complete(standing: LiveCoordinator) -> None:
    # The conductor decides from what it has read before: here a change came in between.
    client = standing.client()
    run = start_run(client, MODEL, START, dataset="none", rounds=1)
    with pytest.raises(Conflict, match="the run has more rounds now"):
        standing.services.conductor.actions.do(run.id, Complete())
    assert client.run(run.id).state == "running"


def test_a_run_that_was_given_fewer_rounds_meanwhile_opens_no_other(standing: LiveCoordinator) -> None:
    client, worker = standing.client(), ScriptedWorker(standing.client("site", "fewer"), datasets={"few": 10})
    run = start_run(client, MODEL, START, dataset="few", rounds=1)
    worker.train(worker.take())
    until(lambda: client.run(run.id).state == "completed")
    # As if it had been decided while there were two.
    with pytest.raises(Conflict, match="the run has fewer rounds now"):
        standing.services.conductor.rounds.open(run.id, 2)
    assert len(list(client.rounds(run.id))) == 1


def test_an_open_round_keeps_what_its_sites_agreed_to_and_the_next_has_the_change(
    coordinator: LiveCoordinator,
) -> None:
    client = coordinator.client("orchestrator")
    one, two = (ScriptedWorker(coordinator.client("site", site)) for site in ("a", "b"))
    run = start_run(client, MODEL, START, rounds=1, cohort=Cohort(deadline_seconds=600))
    task = one.take()
    before = client.round(run.id, 1)
    client.patch_run(run.id, change(rounds=2, cohort={"quorum": 2, "deadline_seconds": 900}))
    # The open round waits for longer, and is otherwise as it was, also for a worker that asks again.
    assert (client.round(run.id, 1).deadline_at - before.deadline_at).total_seconds() == pytest.approx(300)
    assert one.take() == task
    client.patch_run(run.id, change(cohort={"deadline_seconds": 30}))
    assert (client.round(run.id, 1).deadline_at - before.deadline_at).total_seconds() == pytest.approx(300)
    assert one.take() == task
    one.train(task)
    until(lambda: client.run(run.id).version.number == 1)
    two.enrol()
    later = [worker.take() for worker in (one, two)]
    assert {(t.rounds, t.cohort.quorum, t.cohort.deadline_seconds) for t in later} == {(2, 2, 30)}
    opened = client.round(run.id, 2)
    assert (opened.deadline_at - opened.opened_at).total_seconds() == pytest.approx(30)
    for worker, asked in zip((one, two), later, strict=True):
        worker.train(asked)
    until(lambda: client.run(run.id).state == "completed")
    entries = [entry for entry in coordinator.client().audit() if entry.action == "run.change"]
    assert [(entry.actor, entry.detail) for entry in entries] == [
        (
            "orchestrator:test-orchestrator",
            {
                "before": {"rounds": 1, "cohort": {"quorum": 1, "deadline_seconds": 600}},
                "after": {"rounds": 2, "cohort": {"quorum": 2, "deadline_seconds": 900}},
            },
        ),
        (
            "orchestrator:test-orchestrator",
            {"before": {"cohort": {"deadline_seconds": 900}}, "after": {"cohort": {"deadline_seconds": 30}}},
        ),
    ]


def test_a_run_has_no_fewer_rounds_than_have_begun(coordinator: LiveCoordinator) -> None:
    client, worker = coordinator.client(), ScriptedWorker(coordinator.client("site", "a"))
    run = start_run(client, MODEL, START, rounds=9)
    worker.train(worker.take())
    task = worker.take()
    with pytest.raises(Conflict, match="rounds cannot be 1: round 2 is under way") as refusal:
        client.patch_run(run.id, change(rounds=1))
    assert refusal.value.advice == (
        f"Set rounds to 2 to complete the run after it, or `tessera run cancel {run.id}`."
    )
    client.patch_run(run.id, change(rounds=2))
    worker.train(task)
    until(lambda: client.run(run.id).state == "completed")
    with pytest.raises(Conflict, match="completed, which is final") as refusal:
        client.patch_run(run.id, change(rounds=9))
    assert f"`tessera run create --from {run.id} --set rounds=9`" in refusal.value.advice
    assert client.run(run.id).version.number == 2


def test_a_change_is_its_owner_s_or_an_administrator_s(standing: LiveCoordinator) -> None:
    owner, http = standing.client("orchestrator"), standing.http("viewer")
    run = start_run(owner, MODEL, START, dataset="none")
    for role, site in (("viewer", None), ("site", "elsewhere")):
        etag = {"If-Match": f'"{run.revision}"'}
        http = standing.http(role, site)  # type: ignore[arg-type]
        refused(http.patch(f"/v1/runs/{run.id}", json={"rounds": 3}, headers=etag), 403, "forbidden")
    with pytest.raises(Forbidden):
        standing.client("orchestrator").patch_run(run.id, change(rounds=3))
    assert owner.patch_run(run.id, change(rounds=3)).spec.rounds == 3
    again = standing.client().patch_run(run.id, change(rounds=4))
    assert again.spec.rounds == 4
    # A repetition, whose first answer was lost, changes nothing more.
    assert owner.patch_run(run.id, change(rounds=4), run.revision) == again


@pytest.mark.parametrize(
    "given",
    [{"training": {"epochs": 2}}, {"cohort": {"size": 2}}, {"rounds": 0}, {"cohort": {"deadline_seconds": 0}}],
)
def test_no_other_setting_of_a_live_run_changes(standing: LiveCoordinator, given: dict[str, Any]) -> None:
    http, run = standing.http(), start_run(standing.client(), MODEL, START, dataset="none")
    refused(http.patch(f"/v1/runs/{run.id}", json=given, headers={"If-Match": f'"{run.revision}"'}), 422, "invalid")


def test_a_process_that_has_parsed_a_run_s_settings_sees_another_s_change(database: Database, tmp_path: Path) -> None:
    with database.transaction() as session:
        add_run(session).spec = {**SPEC, "rounds": 1}
    other = Database(url_in(tmp_path))
    with database.snapshot() as session:
        assert terms_of(session, "run").spec.rounds == 1
    with other.transaction() as session:
        row = session.get_one(RunRow, "run")
        row.spec, row.changes = {**SPEC, "rounds": 2}, 1
    other.close()
    with database.snapshot() as session:
        assert terms_of(session, "run").spec.rounds == 2


def test_settings_that_a_session_read_before_another_s_change_are_not_kept_as_the_changed_ones(
    database: Database,
) -> None:
    with database.transaction() as session:
        row = add_run(session)
        row.spec = {**SPEC, "rounds": 1}
        session.flush()
        assert terms_of(session, "run", 1).spec.rounds == 1
        row.spec, row.changes = {**SPEC, "rounds": 2}, 1
        session.flush()
        assert terms_of(session, "run", 1).spec.rounds == 2


def test_no_run_is_said_to_wait_for_a_site_that_goes_on_since_it_changed_back(database: Database) -> None:
    waiting = {"rounds": 1, "quorum": 1, "deadline_seconds": 3600}
    said = {"withheld": {"run": "awaiting-approval"}, "withheld_terms": {"run": [waiting]}}
    with database.transaction() as session:
        row = add_run(session)
        for changes, rounds in ((1, 1), (2, 2)):
            row.spec, row.changes = {**SPEC, "rounds": rounds}, changes
            session.flush()
            found = withheld_runs(session, [LiveWorker("w", "a/w", "a", said)])
            assert [workers for _, workers in found] == [[("a/w", "awaiting-approval")]] * (rounds == 1)
