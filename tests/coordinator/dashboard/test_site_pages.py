"""A site's own pages: what its people see, and that they see and change nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tessera.coordinator.dashboard import site
from tessera.coordinator.dashboard.security_headers import HEADERS
from tessera.coordinator.dashboard.templating import NOTHING, size
from tessera.coordinator.db.tables import TaskRow
from tessera.shared.api.admin import TokenSpec
from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import Evaluation, Run, RunPatch
from tessera.shared.api.tasks import Failure, Progress
from tessera.shared.rounds.outliers import DISTANCE, NORM
from tests.coordinator.dashboard.conftest import Person
from tests.coordinator.dashboard.test_login import paths
from tests.support.coordinator import LiveCoordinator, until
from tests.support.federation import ScriptedWorker, small_model, start_run, values

MODEL = small_model()

OF_A_SITE = {
    ("GET", "/page/"), ("GET", "/page/site"), ("GET", "/page/site/runs/{run_id}"), ("GET", "/page/sign-in"),
    ("POST", "/page/sign-in"), ("GET", "/page/sign-in/provider"), ("GET", "/page/sign-in/provider/back"),
    ("GET", "/page/signed-in"), ("POST", "/page/sign-out"), ("POST", "/page/theme"),
}  # fmt: skip
"""The routes that answer a site's session otherwise than an address without a page."""


@dataclass
class Scene:
    coordinator: LiveCoordinator
    north: ScriptedWorker
    south: ScriptedWorker
    run: Run
    """Of both sites. The first version has the updates of both, the second that of the south alone."""
    other: Run
    """Of the south alone."""

    def signed_in(self, site: str = "north") -> Person:
        person = Person(self.coordinator)
        assert person.sign_in(self.coordinator.token("site", site)).status_code == 303
        return person


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with LiveCoordinator(tmp_path_factory.mktemp("sites")) as coordinator:
        client, declared = coordinator.client(), {"kinds": ("train", "evaluate"), "held_out": {"data": 5}}
        north, south = (
            ScriptedWorker(coordinator.client("site", name), name=f"gpu-{name}", **declared).enrol()  # type: ignore[arg-type]
            for name in ("north", "south")
        )
        run = start_run(
            client, MODEL, values(MODEL), name="wards", rounds=3, evaluation=Evaluation(sites=True),
            cohort=Cohort(quorum=1, sites=("north", "south"), max_task_attempts=1),
        )  # fmt: skip
        for accuracy in (0.125, 0.375):
            for worker, score in ((north, accuracy), (south, accuracy + 0.5)):
                while (task := worker.take()).kind == "evaluate":
                    worker.evaluate(task, download_bytes=7, accuracy=score)
                if worker is north and task.round == 2:
                    worker.client.fail(task.id, Failure(token=task.token, code="out-of-memory", detail="too large"))
                else:
                    worker.train(task)
        until(lambda: client.run(run.id).version.number == 2)
        client.patch_run(run.id, RunPatch(tags=("secret-tag",), note="south is slow"), client.run(run.id).revision)
        more = ScriptedWorker(coordinator.client("site", "south"), name="xray-south", datasets={"xray": 10}).enrol()
        other = start_run(client, MODEL, values(MODEL), name="only-south", dataset="xray")
        assert more.take().run == other.id
        yield Scene(coordinator, north, south, client.run(run.id), other)


def test_a_site_sees_its_part_in_its_runs(scene: Scene) -> None:
    page, tasks = scene.signed_in().see("/site"), list(scene.north.client.tasks())
    (row,) = [row for row in page.rows if row[0] == "wards"]
    assert row[2:4] == ["2 of 3", "1 of 2, asked in 3 rounds; left out of the last 1"]
    assert row[4] == size(sum(task.upload_bytes for task in tasks))
    (worker,) = [row for row in page.rows if row[0] == "gpu-north"]
    assert "out-of-memory: too large" in worker[-1]
    assert "tessera audit compare" in page.text


def test_a_site_sees_the_fate_and_the_reason_of_each_round(scene: Scene) -> None:
    page = scene.signed_in().see(f"/site/runs/{scene.run.id}")
    rounds = {row[0]: row[1:5] for row in page.rows if len(row) == 7 and row[0] in "123"}
    assert rounds["1"] == ["gpu-north", "merged", "its update is part of version 1", "10"]
    assert rounds["2"][:2] == ["gpu-north", "failed"]
    assert rounds["2"][2].startswith("worker-failed out-of-memory: too large Begin a run with")
    scores = [row for row in page.rows if row[2:3] == ["data, held out"]]
    assert ["0", "gpu-north", "data, held out", "5", "0.125"] in scores


def test_a_site_without_a_task_in_a_round_is_told_so(coordinator: LiveCoordinator) -> None:
    first = ScriptedWorker(coordinator.client("site", "first")).enrol()
    run = start_run(coordinator.client(), MODEL, values(MODEL), rounds=3, cohort=Cohort(quorum=1))
    first.train(first.take())
    task = first.take()
    late = ScriptedWorker(coordinator.client("site", "late")).enrol()
    first.train(task)
    late.take()
    person = Person(coordinator)
    person.sign_in(coordinator.token("site", "late"))
    page = person.see(f"/site/runs/{run.id}")
    assert [row[:3] for row in page.rows[1:]] == [
        ["3", "w", "at work"], ["2", NOTHING, "left out"], ["1", NOTHING, "left out"],
    ]  # fmt: skip
    assert page.facts["With your updates"] == "0 of 2, asked in 1 round; left out of the last 2"


def test_no_page_of_a_site_has_a_trace_of_another_site(scene: Scene) -> None:
    person, traces = scene.signed_in(), ("south", "0.625", "0.875", "only-south", "secret-tag", scene.other.id)
    for path in ("/site", f"/site/runs/{scene.run.id}", f"/site/runs/{scene.other.id}", "/runs", "/"):
        shown = person.http.get(f"/page{path}", follow_redirects=True).text
        own = shown.replace(f"/site/runs/{scene.other.id}", "").replace(f"no run {scene.other.id}", "")
        assert [trace for trace in traces if trace in own] == [], path
        assert re.findall(r"data-events", shown) == []
    others, missing = (
        refusal(person, "GET", f"/page/site/runs/{run}").replace(run, "X") for run in (scene.other.id, "0" * 32)
    )
    assert others == missing


def refusal(person: Person, method: str, path: str, query: str = "", form: dict[str, str] | None = None) -> str:
    """A page that is not there, without its address and the time."""
    answer = person.http.request(method, path + query, data=form if method == "POST" else None)
    assert answer.status_code == 404, (method, path)
    return re.sub(r"<footer>.*</footer>", "", answer.text).replace(path + query, "X").replace(path, "X")


def test_no_other_route_of_the_dashboard_answers_a_site(scene: Scene) -> None:
    person = scene.signed_in()
    known = {
        "run_id": scene.run.id, "site_id": "x", "worker_id": next(iter(scene.coordinator.client().workers())).id,
        "number": "1", "ident": "accuracy", "kind": "csv", "action": "suspend", "path": "nothing",
        "token_id": next(iter(scene.coordinator.client().tokens())).id, "enrolment_id": "x",
    }  # fmt: skip
    form = {"form_token": person.form_token(), "state": "cancelled", "revision": str(scene.run.revision)}
    there = set(paths(scene.coordinator.app().routes))
    assert there > OF_A_SITE
    assert len(there) > 35
    missing = refusal(person, "GET", "/page/nothing-at-all")
    for method, route in sorted(there - OF_A_SITE):
        path = re.sub(r"\{(\w+)(?::\w+)?\}", lambda found: known[found[1]], route)
        for query in ("", "?sort=-score", "?page=x"):
            assert refusal(person, method, path, query, form) == missing, (method, path + query)
    assert scene.coordinator.client().run(scene.run.id).state == "running"


def test_a_site_has_the_rules_of_sessions_and_headers(coordinator: LiveCoordinator) -> None:
    person = Person(coordinator)
    answer = person.sign_in(coordinator.token("site", "north"))
    assert "HttpOnly" in answer.headers["Set-Cookie"]
    answer = person.http.get("/page/")
    assert (answer.status_code, answer.headers["Location"]) == (303, "/page/site")
    answer = person.http.get("/page/site")
    assert {name: answer.headers[name] for name in HEADERS} == dict(HEADERS)
    assert person.http.post("/page/sign-out", data={"form_token": "x"}).status_code == 403
    assert person.send("/page/sign-out").status_code == 303
    assert person.http.get("/page/site").headers["Location"].startswith("/page/sign-in")
    # Other roles have no page of a site, and an enrolment token no session.
    admin = Person(coordinator)
    admin.sign_in(coordinator.token("admin"))
    assert admin.http.get("/page/site").status_code == 403
    enrolment = coordinator.client().issue_token(TokenSpec(name="e", role="enrolment", site="north", uses=1))
    assert Person(coordinator).sign_in(enrolment.secret).status_code == 401


@pytest.mark.parametrize("resumed", [False, True])
def test_a_sites_session_ends_with_its_suspension(coordinator: LiveCoordinator, resumed: bool) -> None:
    token, client, person = coordinator.token("site", "north"), coordinator.client(), Person(coordinator)
    person.sign_in(token)
    assert person.http.get("/page/site").status_code == 200
    (row,) = client.sites()
    client.suspend_site(row.id)
    if resumed:
        client.resume_site(row.id)
    assert person.http.get("/page/site").headers["Location"].startswith("/page/sign-in")
    assert person.sign_in(token).status_code == (303 if resumed else 403)


def test_a_sites_session_ends_with_its_token(coordinator: LiveCoordinator) -> None:
    person, client = Person(coordinator), coordinator.client()
    person.sign_in(coordinator.token("site", "north"))
    client.revoke_token(next(token.id for token in client.tokens() if token.role == "site"))
    assert person.http.get("/page/site").headers["Location"].startswith("/page/sign-in")


def test_a_site_sees_its_own_waiting_approvals_and_held_updates_alone(coordinator: LiveCoordinator) -> None:
    client = coordinator.client()
    north, south = (ScriptedWorker(coordinator.client("site", name)).enrol() for name in ("north", "south"))
    shared = start_run(client, MODEL, values(MODEL), name="shared", rounds=9, cohort=Cohort(quorum=1))
    tasks = [worker.take() for worker in (north, south)]
    for worker, task in zip((north, south), tasks, strict=True):
        held = Progress(phase="held", held_since=datetime.now(UTC))
        worker.client.heartbeat(task.id, task.token, held)
    south.datasets["xray"] = 10
    secret = start_run(client, MODEL, values(MODEL), name="secret", dataset="xray")
    # A worker may name a run in which its site has had no task.
    north.withheld = {secret.id: "not approved", shared.id: "the board has not met"}
    north.enrol()
    person = Person(coordinator)
    person.sign_in(coordinator.token("site", "north"))
    page = person.see("/site")
    assert [heading for heading in page.parts["h3"] if heading] == [
        "shared waits for an approval", "shared: 1 update held for a release",
    ]  # fmt: skip
    assert "w: the board has not met" in page.parts["li"]
    assert "secret" not in page.text


def test_a_site_does_not_see_how_unusual_its_updates_are(scene: Scene) -> None:
    with scene.coordinator.services.database.transaction() as session:
        task = session.query(TaskRow).filter(TaskRow.run_id == scene.run.id, TaskRow.state == "merged").all()
        for one in task:
            one.metrics = {**one.metrics, NORM: 77.25, DISTANCE: 77.25}
    viewer = Person(scene.coordinator)
    viewer.sign_in(scene.coordinator.token("viewer"))
    assert "unusual" in viewer.see("/sites").parts["state"]
    for path in ("/site", f"/site/runs/{scene.run.id}"):
        shown = scene.signed_in().see(path)
        assert "unusual" not in shown.parts["state"]
        assert "77.25" not in shown.text


def test_many_runs_and_rounds_are_paged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "RUNS_AT_A_TIME", 2)
    monkeypatch.setattr(site, "ROUNDS_AT_A_TIME", 2)
    with LiveCoordinator(tmp_path) as coordinator:
        worker, names = ScriptedWorker(coordinator.client("site", "north")).enrol(), []
        for number in range(3):
            run = start_run(coordinator.client(), MODEL, values(MODEL), name=f"run-{number}", rounds=3)
            for _ in range(3):
                worker.train(worker.take())
        person = Person(coordinator)
        person.sign_in(coordinator.token("site", "north"))
        for path, first in ((f"/site?page={page}", "run-") for page in (1, 2)):
            names.append([row[0] for row in person.see(path).rows if row[0].startswith(first)])
        assert names == [["run-2", "run-1"], ["run-0"]]
        until(lambda: coordinator.client().run(run.id).version.number == 3)
        page = person.see(f"/site/runs/{run.id}")
        assert [row[0] for row in page.rows if len(row) == 7][1:] == ["3"]
        (older,) = [link for link in page.links if "before=" in link]
        assert older == f"/page/site/runs/{run.id}?before=3"
        assert [row[0] for row in person.see(older.removeprefix("/page")).rows if len(row) == 7][1:] == ["2", "1"]
