"""Two studies on one coordinator: a caller of one gets nothing of the other, on any route, in any role.

A row of another study is answered as one that is not there: the same status, words and number of statements.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import select
from starlette.routing import BaseRoute, Mount
from starlette.testclient import TestClient

from tessera.coordinator.app import create_app
from tessera.coordinator.auth.permissions import OF_RUNS
from tessera.coordinator.db.engine import Database
from tessera.coordinator.db.tables import RoundRow, RunBlobRow, Table, TaskRow, VersionRow
from tessera.coordinator.dossier import signing_key
from tessera.coordinator.notify.event_stream import shuffled
from tessera.coordinator.services import Services, assemble
from tessera.shared.api.admin import StudyMember
from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import RunPatch
from tessera.shared.api.tasks import Failure
from tessera.shared.api.versions import Manifest
from tessera.shared.client.dossier import unpacked
from tessera.shared.problems import Invalid, NotFound, TaskCancelled
from tessera.shared.schema import canonical
from tests.coordinator.api.test_routes import ROUTES, STREAMS
from tests.coordinator.dashboard.conftest import signed_in
from tests.support.coordinator import Clock, LiveCoordinator, refused, until
from tests.support.federation import ScriptedWorker, small_model, start_run, values
from tests.support.raw import announced
from tests.support.storage import statements

OWN, OTHER = "stroke", "cancer"
SHARED = "both-site"
ROLES = ("orchestrator", "viewer", "site")
NONE = f"sha256:{'7' * 64}"
NOWHERE = {"run_id": "0" * 32, "task_id": "1" * 32, "digest": f"sha256:{'2' * 64}", "study": "nothing"}
NOWHERE |= {"worker_id": "3" * 32, "upload_id": "4" * 32}
FIXED = {"number": "1", "code": "not-found", "ident": "accuracy", "kind": "csv", "path": "nowhere"}
"""Parts of an address that are the same for all objects."""
OF_ADMINS = {"site_id", "token_id", "enrolment_id"}
"""Parts of an address that only administrators may use."""
FORM = {
    "state": {"state": "paused", "revision": "1"},
    "settings": {"rounds": "3", "quorum": "1", "deadline_seconds": "60"},
    "notes": {"tags": "", "note": ""},
}
"""The fields of a run's forms, by the last part of their address."""
VARYING = r"<time.*?</time>|[0-9a-f]{32,64}"
"""Parts of an answer that differ at each request: the clock, the id of its trace, and a session's form token."""
DIFFERENCE = "/v1/runs/{run_id}/versions/{number}/difference"
QUERIES = {
    "/page/runs/compare": "run={run_id}&run={own_run}",
    "/page/runs/compare/chart.svg": "run={run_id}&run={own_run}",
    "/page/runs": "q={study}&run={run_id}",
    "/page/runs/new": "copy={run_id}",
    "/page/failures": "run={run_id}&after={task_id}",
    "/page/failures.csv": "run={run_id}",
    DIFFERENCE: "since=0",
}


@dataclass
class Apart:
    """A coordinator with two studies, each with a run, asked in one process without a conductor."""

    services: Services
    own: dict[str, str]
    other: dict[str, str]
    secrets: set[str]
    """Every word and id that only the other study has."""
    tokens: dict[str, str]
    before: dict[tuple[str, str], tuple[int, str]] = field(default_factory=dict)
    """The answers to reads by role and path when the other study had no run, and after its work."""
    after: dict[tuple[str, str], tuple[int, str]] = field(default_factory=dict)
    sessions: dict[str, httpx.Client] = field(default_factory=dict)

    def http(self, role: str) -> httpx.Client:
        """A client with the token of a role, and a session of the dashboard."""
        if role not in self.sessions:
            http = TestClient(create_app(self.services), base_url="http://127.0.0.1", follow_redirects=False)
            http.headers["Sec-Fetch-Site"] = "same-origin"
            assert http.post("/page/sign-in", data={"token": self.tokens[role]}).status_code == 303
            http.headers["Authorization"] = f"Bearer {self.tokens[role]}"
            self.sessions[role] = http
        return self.sessions[role]

    def ask(self, role: str, method: str, path: str, named: dict[str, str]) -> tuple[httpx.Response, list[str]]:
        """Send a request; return its answer and the statements that it took."""
        http, body = self.http(role), dict[str, Any]()
        at = path.format(**FIXED, **dict.fromkeys(OF_ADMINS, "x"), action="suspend", **named)
        if method == "POST" and path.startswith("/page"):
            found = re.search(r'name="form_token" value="([0-9a-f]{64})"', http.get("/page/").text)
            body["data"] = {"form_token": found.group(1) if found else "", **FORM.get(path.rpartition("/")[2], {})}
        elif case := ROUTES.get((method, path)):
            body["json"] = {"digests": [named["digest"]]} if path == "/v1/blobs/read" else case.json
            body["headers"] = dict(case.headers)
        query = QUERIES.get(path, "").format(**named, own_run=self.own["run_id"])
        with statements(self.services.database) as seen:
            answer = http.request(method, f"{at}?{query}" if query else at, **body)
        return answer, seen

    def reads(self) -> dict[tuple[str, str], tuple[int, str]]:
        """Read each route, with the study's own objects."""
        found = {}
        for method, path in every_route(self.services):
            for role in ROLES if method == "GET" else ():
                answer, _ = self.ask(role, method, path, self.own)
                text = answer.text
                if answer.headers.get("Content-Type") == "application/zip":
                    files = sorted(unpacked(answer.content).items())
                    # A signature is another each time.
                    text = "".join(raw.decode() for name, raw in files if name != "model.sig")
                found[role, path] = answer.status_code, re.sub(VARYING, "", text)
        return found


def worked(live: LiveCoordinator, study: str, seed: int) -> dict[str, str]:
    """Do a round of a run of a study, let a task fail, and leave one under way; return the names of its objects."""
    boss, site = live.client("orchestrator", studies=[study]), live.client("site", f"{study}-site", [study])
    own, shared = ScriptedWorker(site).enrol(), ScriptedWorker(live.client("site", SHARED)).enrol()
    model, cohort = small_model(), Cohort(quorum=1, max_attempts=9)
    run = start_run(boss, model, values(model, seed), name=f"{study}-run", study=study, rounds=3, cohort=cohort)
    boss.patch_run(run.id, RunPatch(tags=(f"{study}-tag",), note=f"{study}-note"))
    shared.train(shared.take())
    own.train(own.take())
    until(lambda: boss.run(run.id).version.number == 1)
    task, failing = own.take(), shared.take()
    shared.client.fail(failing.id, Failure(token=failing.token, code=f"{study}-fault", detail=f"{study}-detail"))
    upload = boss._transport.request("POST", "/v1/uploads", headers=announced(b"unfinished")).header("Location")
    return {
        "run_id": run.id,
        "task_id": task.id,
        "digest": boss.run(run.id).version.digest,
        "study": study,
        "worker_id": next(one.id for one in boss.workers() if one.site == f"{study}-site"),
        "upload_id": upload.rpartition("/")[2],
    }


def ids_in(database: Database, run_id: str) -> set[str]:
    """Every id and digest of a run's rows."""
    columns = (TaskRow.id, RoundRow.id, VersionRow.digest, RunBlobRow.digest)
    with database.snapshot() as session:
        return {
            one for column in columns for one in session.scalars(select(column).where(column.class_.run_id == run_id))
        }


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory, database_kind: str) -> Iterator[Apart]:
    # Time stands still, so that answers differ by what happens alone.
    clock, folder = Clock(), tmp_path_factory.mktemp("apart")
    key = signing_key.create(tmp_path_factory.mktemp("keys") / "key.pem").path
    with LiveCoordinator(folder, clock=clock, requests_per_second=100_000, signing_key=key) as live:
        live.token("site", SHARED, [OWN, OTHER])
        tokens = {role: live.token(role, studies=[OWN]) for role in ("orchestrator", "viewer")}
        tokens |= {"site": live.token("site", f"{OWN}-site", [OWN])}
        found = Apart(live.services, own := worked(live, OWN, 1), {}, set(), tokens)
        # The first read of a difference stores it.
        found.ask("orchestrator", "GET", DIFFERENCE, own)
        before = found.reads()
        other = worked(live, OTHER, 2)
        after = found.reads()
        ids = [ids_in(live.services.database, objects["run_id"]) for objects in (other, own)]
        assert len(list(live.client().runs())) == 2
    services = assemble(live.settings, clock)
    secrets = {OTHER, *other.values(), *(ids[0] - ids[1])}
    yield Apart(services, own, other, secrets, tokens, before, after)
    services.database.close()


pytestmark = pytest.mark.both_databases(long="postgresql")


def served(routes: Iterable[BaseRoute], prefix: str = "") -> Iterator[tuple[str, str]]:
    """The method and path of each route of the API and the dashboard."""
    for route in routes:
        if within := getattr(route, "original_router", None):
            yield from served(within.routes)
        elif not isinstance(route, Mount):
            yield from ((method, route.path) for method in getattr(route, "methods", ()))


PAGE_STREAMS = {("GET", "/page/events"), ("GET", "/page/runs/{run_id}/events")}
SIGNING = ("/page/sign-in", "/page/sign-out", "/page/signed-in", "/page/theme")


def every_route(services: Services) -> list[tuple[str, str]]:
    """The routes but streams, which do not end, and those of sessions. Their addresses name only what is known here:
    a route about other objects fails until it is tested."""
    found = sorted({*served(create_app(services).routes)} - STREAMS - PAGE_STREAMS)
    found = [(method, path) for method, path in found if not path.startswith(SIGNING)]
    names = {name.partition(":")[0] for _, path in found for name in re.findall(r"{(.*?)}", path)}
    assert names <= {*NOWHERE, *FIXED, *OF_ADMINS, "action"}
    return [(method, path.replace("{path:path}", "nowhere")) for method, path in found]


@pytest.mark.both_databases(long="postgresql")
@pytest.mark.parametrize("role", ROLES)
def test_another_study_s_rows_are_answered_as_if_they_were_not_there(apart: Apart, role: str) -> None:
    wrong = []
    for method, path in every_route(apart.services):
        if f"{path} {QUERIES.get(path, '')}".count("{") == 0 and path != "/v1/blobs/read":
            continue
        answers = []
        for named in (apart.other, NOWHERE):
            answer, taken = apart.ask(role, method, path, named)
            text = answer.text
            for name, value in sorted(named.items(), key=lambda one: -len(one[1])):
                text = text.replace(value, name)
            answers.append((answer.status_code, re.sub(VARYING, "", text), len(taken)))
        if answers[0] != answers[1]:
            wrong.append((method, path, answers))
    assert wrong == []


@pytest.mark.both_databases(long="postgresql")
@pytest.mark.parametrize("role", ROLES)
def test_no_route_has_a_word_of_another_study(apart: Apart, role: str) -> None:
    told = []
    for method, path in every_route(apart.services):
        for named in (apart.own, NOWHERE):
            answer, _ = apart.ask(role, method, path, named)
            assert answer.status_code < 500, (method, path)
            told += [(method, path, word) for word in sorted(apart.secrets) if word in answer.text]
    assert told == []


def test_the_work_of_another_study_changes_no_answer(apart: Apart) -> None:
    """No count, total, time or order tells of it either."""
    assert {key: answer for key, answer in apart.before.items() if apart.after[key] != answer} == {}


def test_each_table_with_rows_of_runs_is_limited_to_those_of_the_caller() -> None:
    of_runs = {mapper.class_ for mapper in Table.registry.mappers if "run_id" in mapper.columns}
    assert of_runs == set(OF_RUNS)


def test_the_study_s_own_rows_are_there(apart: Apart) -> None:
    """The tests above would also hold for callers who are answered nothing at all."""
    assert apart.ask("site", "GET", "/page/site/runs/{run_id}", apart.own)[0].status_code == 200
    reads = [path for method, path in every_route(apart.services) if method == "GET" and "{run_id}" in path]
    found = {path: apart.ask("orchestrator", "GET", path, apart.own)[0].status_code for path in reads}
    assert {path for path, status in found.items() if status != 200} == {
        "/page/runs/{run_id}/charts/{ident}.svg",
        "/page/runs/{run_id}/cancel",
        "/page/site/runs/{run_id}",
    }


# ---------------------------------------------------------------- over HTTP, as people and workers use it


def test_events_of_another_study_do_not_come(coordinator: LiveCoordinator) -> None:
    boss, viewer = (coordinator.client("orchestrator", studies=[study]) for study in (OTHER, OWN))
    http = coordinator.bare({"Authorization": f"Bearer {coordinator.token('viewer', studies=[OWN])}"})
    model = small_model()
    with http.stream("GET", "/v1/events") as stream:
        lines = stream.iter_lines()
        next(lines)
        hidden = start_run(boss, model, values(model, 1), name="hidden", study=OTHER)
        shown = start_run(viewer, model, values(model, 2), name="shown", study=OWN)
        boss.set_run_state(hidden.id, "paused")
        viewer.set_run_state(shown.id, "paused")
        told = []
        for line in lines:
            told += [line] if line.startswith("data: {") and line != "data: {}" else []
            if "run.pause" in line:
                break
    assert told
    assert all(shown.id in line for line in told)
    refused(http.get(f"/v1/runs/{hidden.id}/events"), 404, "not-found")


def test_a_stream_resumes_by_an_id_that_counts_no_event_of_others(coordinator: LiveCoordinator) -> None:
    boss, model = coordinator.client("orchestrator", studies=[OWN]), small_model()
    coordinator.token("viewer", studies=[OTHER])
    http = coordinator.bare({"Authorization": f"Bearer {coordinator.token('viewer', studies=[OWN])}"})
    run = start_run(boss, model, values(model), study=OWN)

    def heard(since: int, most: int) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        with http.stream("GET", "/v1/events", headers={"Last-Event-ID": str(since)}) as stream:
            for line in stream.iter_lines():
                events += [json.loads(line[6:])] if line.startswith('data: {"') else []
                if len(events) == most:
                    return events
        return events

    with http.stream("GET", "/v1/events") as stream:
        lines = stream.iter_lines()
        next(lines)
        for state in ("paused", "running", "paused"):
            boss.set_run_state(run.id, state)
        until_seen = (json.loads(line[6:]) for line in lines if line.startswith('data: {"'))
        events = [next(until_seen) for _ in range(3)]
    entries = [one.seq for one in coordinator.client().audit() if one.action in ("run.pause", "run.resume")]
    assert not {event["seq"] for event in events} & {*entries}
    assert heard(events[0]["seq"], 2) == events[1:]


@given(st.integers(0, (1 << 52) - 1), st.binary(min_size=32, max_size=32))
def test_each_number_has_a_place_of_its_own(number: int, key: bytes) -> None:
    place = shuffled(number, key)
    assert 0 <= place < 1 << 52
    assert shuffled(place, key, back=True) == number


def test_a_stream_ends_with_its_caller_s_membership(coordinator: LiveCoordinator) -> None:
    admin, boss = coordinator.client(), coordinator.client("orchestrator", studies=[OWN])
    http = coordinator.bare({"Authorization": f"Bearer {coordinator.token('viewer', studies=[OWN])}"})
    token = next(one for one in admin.tokens() if one.role == "viewer")
    model = small_model()
    run = start_run(boss, model, values(model), study=OWN)
    with http.stream("GET", f"/v1/runs/{run.id}/events") as of_run, http.stream("GET", "/v1/events") as of_all:
        lines = of_all.iter_lines()
        next(lines)
        admin.remove_from_study(OWN, StudyMember(kind="token", member=token.id))
        assert not [line for line in of_run.iter_lines() if line.startswith("data: {") and line != "data: {}"]
        boss.set_run_state(run.id, "paused")
        admin.add_to_study(OWN, StudyMember(kind="token", member=token.id))
        boss.set_run_state(run.id, "running")
        # The pause came while it was no member. Both are later than the membership that it has now.
        assert run.id in next(line for line in lines if line.startswith("data: {") and line != "data: {}")


@pytest.mark.parametrize("study", [OTHER, "nothing"])
def test_no_run_starts_in_a_study_of_others(coordinator: LiveCoordinator, study: str) -> None:
    coordinator.token("viewer", studies=[OTHER])
    boss, model = coordinator.client("orchestrator", studies=[OWN]), small_model()
    mine = start_run(boss, model, values(model), study=OWN)
    for start in (boss.create_run, boss.preview_run):
        with pytest.raises(Invalid) as caught:
            start(mine.spec.model_copy(update={"study": study}))
        assert [(fault.pointer, fault.detail) for fault in caught.value.errors] == [
            ("/study", f"there is no study {study!r}; it can be {OWN}")
        ]


def test_a_run_s_parts_of_another_study_are_parts_that_were_not_uploaded(coordinator: LiveCoordinator) -> None:
    """A blob, and the root of a manifest, whose names a caller may guess: those of a public model."""
    model, other = small_model(), coordinator.client("orchestrator", studies=[OTHER])
    theirs = start_run(other, model, values(model), study=OTHER)
    manifest = other.manifest(theirs.spec.version)
    boss = coordinator.client("orchestrator", studies=[OWN])
    boss.put_bytes(canonical(model))
    known = theirs.spec.model_copy(update={"study": OWN})
    of_nothing = dict.fromkeys(manifest.blocks, NONE)
    for what, documents in (
        (
            "block",
            lambda real: Manifest(blocks=dict(manifest.blocks, **({} if real else of_nothing)), scalars={"x": 1}),
        ),
        ("root", lambda real: Manifest(blocks={}, root=theirs.spec.version if real else NONE)),
    ):
        told = []
        for real in (True, False):
            version = boss.put_bytes(canonical(documents(real)))
            with pytest.raises(Invalid) as caught:
                boss.preview_run(known.model_copy(update={"version": version}))
            told.append(re.sub(r"sha256:[0-9a-f]{64}", "", f"{caught.value.detail} {caught.value.errors}"))
        assert told[0] == told[1], what


def test_a_site_gets_tasks_of_its_studies_alone(coordinator: LiveCoordinator) -> None:
    inside, outside = (ScriptedWorker(coordinator.client("site", name, [name])).enrol() for name in (OWN, OTHER))
    boss, model = coordinator.client("orchestrator", studies=[OWN]), small_model()
    run = start_run(boss, model, values(model), study=OWN, evaluation={"dataset": "data", "sites": False})
    task = inside.take()
    assert task.study == OWN
    assert outside.claim(0) is None
    assert [one.worker for one in boss.preview_run(run.spec).workers] == [f"{OWN}/w"]
    assert [site.name for site in boss.sites()] == [OWN]


def test_a_site_that_leaves_loses_its_task_and_the_run_s_blobs(coordinator: LiveCoordinator) -> None:
    admin, worker = coordinator.client(), ScriptedWorker(coordinator.client("site", "a"), forgets=True).enrol()
    boss, model = coordinator.client("orchestrator"), small_model()
    run = start_run(boss, model, values(model))
    task = worker.take()
    member = StudyMember(kind="site", member=next(site.id for site in admin.sites()))
    admin.remove_from_study("default", member)
    with pytest.raises(TaskCancelled):
        worker.client.heartbeat(task.id, task.token)
    assert not worker.client.has_blob(task.version.digest)
    assert list(worker.client.runs()) == []
    until(lambda: [round_.state for round_ in boss.rounds(run.id)] == ["abandoned"])
    # Its name stays in the history of the run.
    assert {one.worker for round_ in boss.rounds(run.id) for one in round_.tasks} == {"a/w"}
    assert worker.claim(0) is None
    admin.add_to_study("default", member)
    assert until(lambda: worker.claim(0))


def test_a_site_that_left_is_in_the_history_and_in_no_list(coordinator: LiveCoordinator) -> None:
    admin, boss = coordinator.client(), coordinator.client("orchestrator", studies=[OWN])
    coordinator.token("viewer", studies=[OTHER])
    worker, model = ScriptedWorker(coordinator.client("site", "gone", [OWN])).enrol(), small_model()
    run = start_run(boss, model, values(model), study=OWN)
    worker.take()
    (known,) = boss.workers()
    admin.remove_from_study(OWN, StudyMember(kind="site", member=next(site.id for site in admin.sites())))
    assert list(boss.sites()) == list(boss.workers()) == []
    reader = {"Authorization": f"Bearer {coordinator.token('viewer', studies=[OWN])}"}
    person = signed_in(coordinator, "viewer", [OWN])
    for path in ("/", "/sites", "/approvals"):
        assert "gone" not in person.see(path).text
    assert person.http.get(f"/page/workers/{known.id}").status_code == 404
    assert "gone" not in coordinator.bare(reader).get("/metrics").text
    assert {one.worker for round_ in boss.rounds(run.id) for one in round_.tasks} == {"gone/w"}


def test_a_member_who_leaves_a_study_joins_no_other(coordinator: LiveCoordinator) -> None:
    """Neither `default`, to which callers of no study belong, nor a study of the same people."""
    admin, boss = coordinator.client(), coordinator.client("orchestrator")
    token, model = next(one for one in admin.tokens() if one.role == "orchestrator"), small_model()
    run = start_run(boss, model, values(model))
    admin.remove_from_study("default", StudyMember(kind="token", member=token.id))
    assert list(boss.runs()) == list(boss.sites()) == list(boss.studies()) == []
    for refusal in (lambda: boss.run(run.id), lambda: boss.set_run_state(run.id, "paused")):
        with pytest.raises(NotFound):
            refusal()
    with pytest.raises(Invalid, match="study does not exist"):
        boss.create_run(run.spec)
