"""What the pages show and do, without a browser."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from html import unescape
from io import StringIO
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree as ET

import pytest
from sqlalchemy import select, update

from tessera.coordinator.dashboard import records
from tessera.coordinator.dashboard.queries import layer_shares
from tessera.coordinator.db import views
from tessera.coordinator.db.helper_tasks import _terms_by_count
from tessera.coordinator.db.tables import RoundRow, RunRow, SiteRow, TaskRow, TokenRow, VersionRow, WorkerRow
from tessera.coordinator.domain.lifecycle import ROUND, RUN, TASK
from tessera.shared.api.admin import EnrolmentSpec
from tessera.shared.api.runs import Cohort, Evaluation, RunPatch
from tessera.shared.api.tasks import AdvertisedPolicy, Failure, Progress
from tessera.shared.api.token_format import hash_of
from tessera.shared.client.client import Client
from tessera.shared.methods.base import MethodSpec
from tessera.shared.methods.registry import FOLDERS, methods
from tessera.shared.problems import BadRequest
from tessera.shared.rounds.eta import Pace, expected_end
from tessera.shared.run_settings import Budget, Privacy, Training, UnitBudget
from tests.coordinator.api.test_secure_sums import Ring
from tests.coordinator.dashboard.conftest import Person, signed_in
from tests.support.cli import tessera
from tests.support.coordinator import LiveCoordinator, until
from tests.support.federation import ScriptedWorker, small_model, start_run, values

MODEL = small_model()
HOSTILE = "<script>alert('x')</script>\"><img src=x onerror=alert(1)>{{ 7 * 7 }}"

PAGES = ("/", "/runs", "/sites", "/approvals", "/failures", "/storage", "/audit", "/runs/new")


def test_every_page_of_an_empty_coordinator_is_there(admin: Person) -> None:
    for path in PAGES:
        answer = admin.http.get(f"/page{path}")
        assert answer.status_code == 200, path
        assert answer.text.count("<h1") == 1, path


def test_viewers_look_and_no_more(coordinator: LiveCoordinator, viewer: Person) -> None:
    run = start_run(coordinator.client(), MODEL, values(MODEL), dataset="none")
    shown = viewer.http.get(f"/page/runs/{run.id}")
    assert shown.status_code == 200
    assert "Pause" not in shown.text
    for path in ("/audit", "/runs/new", f"/runs/{run.id}/cancel"):
        assert viewer.http.get(f"/page{path}").status_code == 403, path
    assert viewer.send(f"/page/runs/{run.id}/state", state="paused", revision="1").status_code == 403
    assert coordinator.client().run(run.id).state == "running"


def test_runs_are_paused_resumed_and_cancelled(coordinator: LiveCoordinator, admin: Person) -> None:
    run = start_run(coordinator.client(), MODEL, values(MODEL), dataset="none")
    way = f"/page/runs/{run.id}/state"
    for revision, state in (("1", "paused"), ("2", "running"), ("3", "cancelled")):
        assert admin.send(way, state=state, revision=revision).status_code == 303
        assert coordinator.client().run(run.id).state == state
    assert admin.send(way, state="running", revision="4").status_code == 409


def test_an_address_without_a_page_is_answered_by_a_page(admin: Person) -> None:
    run = "0" * 32
    # The second one is where a form goes, which a browser asks for when its address is opened again.
    for path in ("/page/nothing", f"/page/runs/{run}/state"):
        answer = admin.http.get(path)
        assert (answer.status_code, answer.headers["content-type"]) == (404, "text/html; charset=utf-8")
        assert f"there is no page {path}" in answer.text
        assert '<nav aria-label="Main">' in answer.text
    # What the API answers to such a request names a description that is there.
    (description,) = re.findall(r"/\S+(?=\.)", BadRequest.remedy)
    assert admin.http.get(description).status_code == 401
    admin.http.cookies.clear()
    assert admin.http.get("/page/nothing").headers["location"] == "/page/sign-in?next=%2Fpage%2Fnothing"


def test_a_number_that_no_database_holds_is_refused(coordinator: LiveCoordinator, admin: Person) -> None:
    run = start_run(coordinator.client(), MODEL, values(MODEL), dataset="none")
    rounds, large = f"/page/runs/{run.id}/rounds", 10**20
    for path in (f"{rounds}?before={large}", f"{rounds}/{large}", f"{rounds}/1?attempt={large}",
                 f"/page/audit?before={large}"):  # fmt: skip
        assert admin.http.get(path).status_code == 422, path


def test_an_orchestrator_steers_nobody_elses_runs(coordinator: LiveCoordinator) -> None:
    person = signed_in(coordinator, "orchestrator")
    run = start_run(coordinator.client(), MODEL, values(MODEL), dataset="none")
    assert "Pause" not in person.http.get(f"/page/runs/{run.id}").text
    # No page asks what its button cannot do.
    assert person.http.get(f"/page/runs/{run.id}/cancel").status_code == 403
    answer = person.send(f"/page/runs/{run.id}/state", state="paused", revision="1")
    assert (answer.status_code, coordinator.client().run(run.id).state) == (403, "running")
    coordinator.client().set_run_state(run.id, "cancelled")
    asked = signed_in(coordinator, "admin").http.get(f"/page/runs/{run.id}/cancel")
    assert (asked.status_code, "is cancelled already" in asked.text) == (409, True)


def test_workers_are_admitted_by_the_code_that_they_show(
    coordinator: LiveCoordinator, admin: Person, viewer: Person
) -> None:
    with Client(coordinator.url, verify=False) as client:
        coordinator.client().create_site("south")
        asked = [
            client.ask_to_join(EnrolmentSpec(site=site, worker="gpu-1", secret_hash=hash_of(site)))
            for site in ("north", "south")
        ]
    shown = admin.http.get("/page/approvals").text
    assert re.findall("(?:north|south)/gpu-1</h3>|new site|known site", shown) == [
        "north/gpu-1</h3>", "new site", "south/gpu-1</h3>", "known site",
    ]  # fmt: skip
    # Who admits has the code from the site's people, and not from here.
    assert asked[0].code not in shown
    assert "gpu-1" not in viewer.http.get("/page/approvals").text
    assert "2 workers wait for enrolment" in admin.http.get("/page/").text
    way = f"/page/approvals/{asked[0].id}"
    yes = {"decision": "approve", "site": "north", "create_site": "yes"}
    assert viewer.send(way, **yes, code=asked[0].code).status_code == 403
    assert admin.send(way, **yes, code="AAAA-AAAA").status_code >= 400
    assert admin.send(way, **yes, code=asked[0].code).status_code == 303
    assert admin.send(f"/page/approvals/{asked[1].id}", decision="decline").status_code == 303
    assert [site.name for site in coordinator.client().sites()] == ["north", "south"]
    assert "No worker waits" in admin.http.get("/page/approvals").text


def test_nobody_overlooks_an_update_that_its_site_holds_for_release(
    coordinator: LiveCoordinator, admin: Person
) -> None:
    worker = ScriptedWorker(coordinator.client("site", "north"), datasets={"data": 8})
    worker.enrol()
    run = start_run(coordinator.client(), MODEL, values(MODEL), dataset="data", rounds=2)
    task = worker.take()
    since = datetime.now(UTC) - timedelta(hours=3)
    worker.client.heartbeat(task.id, task.token, Progress(phase="held", held_since=since))
    shown = admin.http.get("/page/approvals").text
    assert f"north/{worker.name}" in shown
    assert "3 h ago" in shown
    assert f"An update waits for a release in {run.spec.name}" in admin.http.get("/page/").text
    assert "held for release 3 h ago" in re.sub(r"\s+", " ", admin.http.get(f"/page/runs/{run.id}").text)
    seen = tessera("run", "show", run.id, TESSERA_URL=coordinator.url, TESSERA_TOKEN=coordinator.token("viewer"))
    assert re.search(rf"held for release +round 1, north/{worker.name}, 3 h ago", seen.stdout)
    # Words of a worker are no reason to show no page, and its next phase ends the wait.
    client = worker.client
    for odd in ("0001-01-01T00:00:00Z", "2026-01-01T00:00:00", "soon"):
        progress = {"phase": "held", "held_since": odd}
        beat = {"token": task.token, "progress": progress}
        client._transport.request("POST", f"/v1/tasks/{task.id}/heartbeat", json=beat)
        assert admin.http.get("/page/").status_code == 200
        assert admin.http.get("/page/approvals").status_code == 200
    client.heartbeat(task.id, task.token, Progress(phase="uploading"))
    assert "No update waits for a release" in admin.http.get("/page/approvals").text


def test_what_changed_since_it_was_shown_is_not_overwritten(coordinator: LiveCoordinator, admin: Person) -> None:
    run = start_run(coordinator.client(), MODEL, values(MODEL), dataset="none")
    answer = admin.send(f"/page/runs/{run.id}/state", state="paused", revision="7")
    assert answer.status_code == 412
    assert "It has changed since you read it" in answer.text


def test_a_part_of_a_page_is_what_changes_of_it(admin: Person) -> None:
    whole, part = (admin.http.get(f"/page/{query}").text for query in ("", "?part=live"))
    assert part.startswith('<div id="live"')
    assert "<html" not in part

    def without_times(text: str) -> str:
        return re.sub(r"\d+(\.\d+)? (s|min|GB|%|kB|MB)\b|\d+%", "", text)

    assert without_times(part.strip()) in without_times(whole)


def worked(coordinator: LiveCoordinator) -> str:
    """A run with two sites, one of which failed in the second round."""
    client = coordinator.client()
    workers = [
        ScriptedWorker(
            coordinator.client("site", site),
            kinds=("train", "evaluate"),
            held_out={"data": 5},
            methods=("fedfrozen",),
            version="1.2.3+ours",
        )
        for site in ("a", "b")
    ]
    for worker in workers:
        worker.enrol()
    run = start_run(
        client, MODEL, values(MODEL), name="wards", rounds=3, evaluation=Evaluation(sites=True),
        method=MethodSpec(name="fedfrozen", settings={"warmup_rounds": 1}), cohort=Cohort(quorum=2, max_attempts=1),
    )  # fmt: skip
    for worker in workers:
        while (task := worker.take()).kind == "evaluate":
            worker.evaluate(task, accuracy=0.5, loss=1.25)
        worker.train(task)
    until(lambda: client.run(run.id).version.number == 1)
    for worker in workers:
        while (task := worker.take()).kind == "evaluate":
            worker.evaluate(task, accuracy=0.75, loss=0.5)
    # Without this one the round is abandoned, and the run pauses.
    worker.client.fail(task.id, Failure(token=task.token, code=HOSTILE[:64], detail=HOSTILE))
    until(lambda: client.run(run.id).state == "paused")
    return run.id


@pytest.fixture(scope="module")
def wards(standing: LiveCoordinator) -> str:
    """The run of `worked` on the module's coordinator, for tests that change nothing of it."""
    return worked(standing)


def test_pages_of_a_run_show_what_the_api_shows(standing: LiveCoordinator, wards: str) -> None:
    run, admin = wards, signed_in(standing)
    shown = admin.http.get(f"/page/runs/{run}").text
    for told in ("wards", "warm-up", "of 3", "0.75", "worst site", "Bytes by round", "abandoned", "paused"):
        assert told in shown, told
    assert "version 1, 2 of 2 sites; worst site" in shown
    assert "No layers by site: every update has the same layers." in shown
    assert "No warm-up signals: they are measured if warmup_rounds is auto." in shown
    assert "No scores" not in shown
    first = admin.http.get(f"/page/runs/{run}/rounds/1").text
    for told in ("a/w", "b/w", "accepted", "done", "Timeline", "worked, accepted", "3 updates or more"):
        assert told in first, told
    assert admin.http.get(f"/page/runs/{run}/rounds").text.count("<tr>") == 3
    assert admin.http.get(f"/page/runs/{run}/rounds/9").status_code == 404
    assert admin.http.get("/page/sites").text.count("1.2.3+ours") == 2
    failures = admin.http.get("/page/failures").text
    assert failures.count("<code>worker-failed</code>") == 1
    assert "wards, round 2" in failures
    assert "Abandoned rounds" in failures
    assert "log has the details" in failures
    overview = admin.http.get("/page/").text
    assert "wards is paused" in overview
    assert "1 task failed within a day" in overview
    assert "abandoned the round" in admin.http.get(f"/page/audit?run={run}").text
    assert "wards" in admin.http.get("/page/storage").text


def test_a_list_of_forty_workers_in_place_of_sites_and_curves(standing: LiveCoordinator, wards: str) -> None:
    shown = signed_in(standing).http.get("/page/").text
    assert re.findall(r'q=(\w)%2F">\w</a> <span class="state (\w+)">(\w+)<', shown) == [
        ("a", "waiting", "waiting"), ("b", "waiting", "waiting"),
    ]  # fmt: skip
    assert 'role="img" aria-label="Accuracy from 0.5 to 0.75"' in shown
    assert f"/page/runs/{wards}" in shown
    assert "/page/workers/" not in shown
    assert "Traffic saved" not in shown


def test_words_of_leases_on_the_pages_for_people(coordinator: LiveCoordinator, admin: Person) -> None:
    workers = [ScriptedWorker(coordinator.client("site", site)) for site in ("a", "b")]
    for worker in workers:
        worker.enrol()
    run = start_run(coordinator.client(), MODEL, values(MODEL), cohort=Cohort(quorum=2))
    workers[0].take()
    (page, *_) = re.findall(r"/page/workers/\w+", admin.http.get("/page/sites?q=a/").text)
    for path in ("/page/", page, f"/page/runs/{run.id}", "/page/sites"):
        text = as_text(admin.http.get(path).text)
        assert "at work" in text, path
        assert not re.findall(r"\b(?:leased?|offered)\b", text), path


def test_alike_matters_and_alike_failures_fill_no_page(coordinator: LiveCoordinator, admin: Person) -> None:
    client = coordinator.client()
    run = worked(coordinator)
    for name in "pqrst":
        client.set_run_state(start_run(client, MODEL, values(MODEL), name=name, dataset="none").id, "paused")
    assert "<summary>3 more like this</summary>" in admin.http.get("/page/").text
    problem = {"type": "about:blank", "code": "out-of-memory", "title": "t", "status": 422, "retryable": False,
               "detail": "3 GB asked", "remedy": "Lower batch_size."}  # fmt: skip
    with coordinator.services.database.transaction() as session:
        count = session.execute(update(TaskRow).values(state="failed", problem=problem)).rowcount
    (line,) = re.findall(r"<summary>(.*?)</summary>", admin.http.get("/page/failures").text, re.DOTALL)
    assert f"failed out-of-memory: {count} at 2 workers wards: 3 GB asked" in as_text(line)
    shown = as_text(admin.http.get(f"/page/audit?run={run}").text)
    assert "began the task a/w, training from version 0 of wards" in shown
    assert "committed the round round 1 of wards" in shown
    assert "created the run wards" in shown
    assert "token 1" not in shown


def test_actions_of_the_audit_without_words() -> None:
    states = {"run": RUN, "round": ROUND, "task": TASK}
    moves = {f"{kind}.{event}" for kind, lifecycle in states.items() for event in lifecycle}
    sources = "".join(path.read_text() for path in Path(records.__file__).parents[1].rglob("*.py"))
    recorded = set(re.findall(r'audit\.record\(\s*session, [\w.]+, [\w.]+, "([\w.]+)"', sources))
    assert len(recorded) > 10
    assert moves | recorded <= records.ACTIONS.keys()


def test_downloads_that_no_integer_of_a_database_can_add_up_take_no_page_down(
    coordinator: LiveCoordinator, admin: Person
) -> None:
    run = worked(coordinator)
    with coordinator.services.database.transaction() as session:
        # Two are as much as 1024 tasks with the most that a site may report.
        session.execute(update(TaskRow).values(download_bytes=1 << 62))
    for path in (
        "/",
        "/runs",
        f"/runs/{run}",
        f"/runs/{run}?x=bytes",
        f"/runs/{run}/rounds",
        f"/runs/{run}/rounds/1",
    ):
        assert admin.http.get(f"/page{path}").status_code == 200, path
    assert "tessera_run_download_bytes" in coordinator.http("viewer").get("/metrics").text


def test_layers_are_counted_by_site_and_by_groups_of_rounds(coordinator: LiveCoordinator) -> None:
    run_id = worked(coordinator)
    with coordinator.services.database.transaction() as session:
        trained = session.query(TaskRow).filter_by(kind="train", version_number=0).join(WorkerRow).join(SiteRow)
        first, later = trained.order_by(SiteRow.name)
        first.layers, later.layers, later.version_number = ["layer.10", "layer.2"], ["layer.2"], 4
        session.flush()
        run = views.run_view(session, views.find_run(session, run_id))
        run = run.model_copy(update={"version": run.version.model_copy(update={"number": 4})})
        names, by_site, by_round = layer_shares(session, run, 2)
        assert names == ["layer.2", "layer.10"]
        assert by_site == {"a": [1, 1], "b": [1, 0]}
        assert by_round == {"1": [1, 1], "4": [1, 0]}
        assert layer_shares(session, run, 1)[2] == {"1": [1, 0.5]}
        assert list(layer_shares(session, run, 9)[2]) == ["1", "5"]


def test_scores_of_a_run_are_chosen_and_taken_away(standing: LiveCoordinator, wards: str) -> None:
    place, admin = f"/page/runs/{wards}", signed_in(standing)
    shown = admin.http.get(f"{place}?metric=loss&x=bytes").text
    assert re.findall(r'aria-current="true">(Loss|Accuracy|bytes|version)<', shown) == ["Loss", "bytes"]
    assert ('<h2 id="loss">' in shown, '<h2 id="accuracy">' in shown) == (True, False)
    assert re.search(r"By bytes\. Last values: global: 0\.5 at \S+ k?B;", shown)
    assert "tessera run export" in shown
    assert "--version best" in shown
    assert admin.http.get(f"{place}?metric=nonsense").text.count("Accuracy as a table") == 1
    assert admin.http.get(f"{place}?x=weight").status_code == 422
    table = admin.http.get(f"{place}/metrics.csv")
    assert table.headers["content-disposition"] == 'attachment; filename="wards-metrics.csv"'
    scores = [row for row in csv.DictReader(StringIO(table.text)) if row["metric"] == "accuracy"]
    assert sorted((row["version"], row["site"], row["value"]) for row in scores) == [
        (version, site, value) for version, value in (("0", "0.5"), ("1", "0.75")) for site in "ab"
    ]
    rows = admin.http.get(f"{place}/metrics.json").json()
    assert [row["value"] for row in rows if row["metric"] == "accuracy"] == [0.5, 0.5, 0.75, 0.75]
    picture = admin.http.get(f"{place}/charts/accuracy.svg")
    assert picture.headers["content-type"] == "image/svg+xml"
    root = ET.fromstring(picture.text)  # noqa: S314 (made here)
    assert "var(" not in str(root.findtext("{*}style"))
    assert [text.text for text in root.findall(".//{*}text")][-3:] == ["global", "a", "b"]
    assert admin.http.get(f"{place}/charts/nothing.svg").status_code == 404


def test_the_best_version_and_the_latest_scores_are_among_all_that_were_evaluated(
    coordinator: LiveCoordinator, admin: Person
) -> None:
    run = worked(coordinator)
    other = start_run(coordinator.client(), MODEL, values(MODEL), name="other", dataset="none").id
    with coordinator.services.database.transaction() as session:
        of_run = select(TaskRow).filter_by(run_id=run, kind="evaluate", version_number=1)
        for task in session.scalars(of_run).all():
            columns = {one.key: getattr(task, one.key) for one in TaskRow.__table__.columns}
            # Every third version from 4 to 205: a chart of 206 versions would draw every fourth.
            for number in range(4, 206, 3):
                metrics = {"accuracy": 0.97 if number == 31 else 0.8 if number == 205 else 0.6, "loss": 0.5}
                changed = {"id": f"{task.id}-{number}", "version_number": number, "metrics": metrics}
                session.add(TaskRow(**{**columns, **changed}))
        made = session.get_one(VersionRow, (run, 1))
        session.add(VersionRow(run_id=run, number=206, digest=made.digest, scalars={}, warnings=[], created_at=0.0))
        session.get_one(RunRow, run).version_number = 206
    shown = admin.http.get(f"/page/runs/{run}").text
    assert '<dt>Best version</dt><dd>31<small>Accuracy 0.97</small><small title="at 2 of 2 sites: a, b">at 2' in shown
    assert "<dt>Accuracy</dt><dd>0.8<small>version 205, 2 of 2 sites" in shown
    # Versions 0, 1 and these 68 are evaluated, of which every second is shown, with the best and the last.
    numbers = [int(number) for number in re.findall(r'<tr><th scope="row">(\d+)</th><td>', shown)]
    assert numbers[:37] == sorted({0, *range(4, 203, 6), 31, 205}, reverse=True)
    compared = admin.http.get(f"/page/runs/compare?run={run}&run={other}").text
    assert 'data-label="of version">31<' in compared
    assert "Accuracy 0.97" in compared


def test_a_best_version_of_other_sites_without_an_explanation(coordinator: LiveCoordinator, admin: Person) -> None:
    run = worked(coordinator)
    other = start_run(coordinator.client(), MODEL, values(MODEL), name="other", dataset="none").id
    with coordinator.services.database.transaction() as session:
        of_run = select(TaskRow, SiteRow.name).join(WorkerRow, TaskRow.worker_id == WorkerRow.id).join(SiteRow)
        for task, site in session.execute(of_run.where(TaskRow.kind == "evaluate")).all():
            # The second version is measured by one site alone, and is worse there.
            task.metrics = {"accuracy": 0.9 - 0.1 * task.version_number if site == "a" else 0.1}
            task.state = "failed" if site == "b" and task.version_number else task.state
    said = "two versions are compared at the sites that measured both"
    shown = as_text(admin.http.get(f"/page/runs/{run}").text)
    assert "Best version 0 Accuracy 0.9 at 1 of 2 sites: a; " + said in shown
    assert said in as_text(admin.http.get(f"/page/runs/compare?run={run}&run={other}").text)


def test_names_that_one_site_invented_do_not_lengthen_a_run_s_page(
    coordinator: LiveCoordinator, admin: Person
) -> None:
    run = worked(coordinator)
    common = {"accuracy": 0.5, "loss": 1.0, "zeal": 0.1}
    with coordinator.services.database.transaction() as session:
        evaluations = select(TaskRow, SiteRow.name).join(WorkerRow, WorkerRow.id == TaskRow.worker_id).join(SiteRow)
        for task, site in session.execute(evaluations.where(TaskRow.kind == "evaluate")).all():
            # As many as coordinators accepted before.
            invented = {f"{number}_{task.version_number}": 1.0 for number in range(4093)} if site == "a" else {}
            task.metrics = {**common, **invented}
    shown = admin.http.get(f"/page/runs/{run}").text
    names = re.findall(r"\?metric=(\w+)&", shown)
    assert len(set(names)) <= 64 + 1
    # Both sites measured these.
    assert [*common, "training_loss"] == [
        name for name in dict.fromkeys(names) if "_1" not in name and "_0" not in name
    ]
    other = start_run(coordinator.client(), MODEL, values(MODEL), name="other", dataset="none").id
    compared = admin.http.get(f"/page/runs/compare?run={run}&run={other}").text
    assert len(set(re.findall(r"metric=(\w+)&", compared))) <= 64


def test_runs_are_found_by_their_tags_method_and_text(coordinator: LiveCoordinator) -> None:
    person, client = signed_in(coordinator, "orchestrator"), coordinator.client()
    with Client(coordinator.url, coordinator.token("orchestrator"), verify=False) as theirs:
        start_run(theirs, MODEL, values(MODEL), name="other", dataset="x-ray", method=MethodSpec(name="fedper"))
    run = start_run(client, MODEL, values(MODEL), name="wards", dataset="none")
    admin = signed_in(coordinator, "admin")
    place = f"/page/runs/{run.id}/notes"
    assert admin.send(place, tags="pilot, 100%  pilot", note=" ").status_code == 422
    assert admin.send(place, tags="pilot, v2  pilot", note="with the new\r\nscanner").status_code == 303
    found = client.run(run.id)
    assert (found.tags, found.note, found.updated_at) == (("pilot", "v2"), "with the new\nscanner", run.updated_at)
    # What another person has written meanwhile is not overwritten, nor is what is another's.
    assert admin.send(place, tags="mine", note="").status_code == 412
    assert person.send(place, old_tags="pilot v2", old_note=found.note, tags="", note="").status_code == 403
    (entry,) = [entry for entry in client.audit() if entry.action == "run.annotate"]
    assert (entry.subject, entry.detail["tags"]) == (run.id, ["pilot", "v2"])
    found_by = {"q=PILOT": ["wards"], "q=scanner": ["wards"], "q=_": [], "q=the": ["wards", "other"]}
    found_by |= {"method=fedper": ["other"], "dataset=none&method=": ["wards"], "state=paused": []}
    found_by |= {"state=running&q=th&dataset=x-ray": ["other"]}
    for query, names in found_by.items():
        shown = admin.http.get(f"/page/runs?{query}").text
        assert re.findall(r'aria-label="Compare ([^"]+)"', shown) == names, query


def test_a_selection_of_runs_survives_sorting_and_the_next_page(
    standing: LiveCoordinator, wards: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tessera.coordinator.dashboard.runs.AT_A_TIME", 2)
    viewer, client = signed_in(standing, "viewer"), standing.client()
    others = {name: start_run(client, MODEL, values(MODEL), name=name, dataset="sorted", rounds=rounds).id
              for name, rounds in (("aa", 5), ("Bb", 6), ("cc", 7))}  # fmt: skip

    def shown(**query: object) -> tuple[list[str], str]:
        text = viewer.http.get("/page/runs", params={"dataset": "sorted", **query}).text  # type: ignore[dict-item]
        return re.findall(r'aria-label="Compare ([^"]+)"', text), text

    assert shown()[0] == ["cc", "Bb"]
    assert shown(sort="name")[0] == ["aa", "Bb"]
    assert shown(sort="-name", page=2)[0] == ["aa"]
    names, text = shown(sort="name", page=2, run=[others["aa"], others["cc"], "nothing"])
    assert names == ["cc"]
    assert re.findall(r'value="(\w+)" id="tick-\w+"[^>]* checked', text) == [others["aa"], others["cc"]]
    # The order and the filter are sent again with the next page, which is no more than a form.
    assert re.findall(r'name="sort" value="([^"]+)"', text)[:2] == ["name", "-name"]
    assert text.index(">Compare</button>") < text.index("<table")
    assert 'aria-sort="ascending"' in text
    assert shown(sort="nothing")[0] == ["cc", "Bb"]
    # Those without a score are last in both directions.
    for sort in ("score", "-score"):
        assert shown(dataset="", sort=sort)[0][0] == "wards", sort


@pytest.mark.parametrize(
    ("path", "columns"),
    [
        ("/sites", "worker health seen device version done failures size"),
        ("/runs/{run}/rounds/1", "worker state attempts examples loss up down size"),
        ("/storage", "name state versions kept blobs bytes whole"),
        ("/tokens", "name role site created expires"),
        ("/runs", "name state method dataset score versions model sent began"),
    ],
)
def test_a_table_whose_heads_do_not_sort_it(standing: LiveCoordinator, wards: str, path: str, columns: str) -> None:
    admin = signed_in(standing)
    found: dict[str, list[str]] = {}
    for sort in [f"-{columns}".split()[0], *columns.split()]:
        answer = admin.http.get(f"/page{path.format(run=wards)}", params={"sort": sort})
        assert answer.status_code == 200, sort
        assert answer.text.count("aria-sort") == 1, sort
        (table,) = re.findall(r'<table(?:(?!<table).)*class="sort".*?</table>', answer.text, re.DOTALL)
        found[sort] = re.findall(r'<th scope="row"[^>]*>(.*?)</th>', table, re.DOTALL)
        assert set(re.findall(r'name="sort" value="-?(\w+)"', table)) == set(columns.split())
    assert {tuple(sorted(rows)) for rows in found.values()} == {tuple(sorted(found[sort]))}
    descending, ascending, *_ = found.values()
    assert len({*ascending}) < len(ascending) or descending == ascending[::-1]


def test_settings_of_a_live_run_are_changed_on_its_page_unless_another_has_changed_them(
    coordinator: LiveCoordinator, admin: Person
) -> None:
    client = coordinator.client()
    run = start_run(client, MODEL, values(MODEL), dataset="none")
    shown, place = admin.http.get(f"/page/runs/{run.id}").text, f"/page/runs/{run.id}/settings"
    old = dict(re.findall(r'name="(old_\w+)" value="([^"]*)"', shown.partition('id="notes"')[0]))
    assert old == {"old_rounds": "1", "old_quorum": "1", "old_deadline_seconds": "3600"}
    for _ in range(2):
        assert admin.send(place, **old, rounds="5", quorum="2", deadline_seconds=str(1 / 3)).status_code == 303
    found = client.run(run.id).spec
    assert (found.rounds, found.cohort) == (5, Cohort(quorum=2, deadline_seconds=1 / 3))
    assert admin.send(place, **old, rounds="6", quorum="2", deadline_seconds="60").status_code == 412
    old |= {"old_rounds": "5", "old_quorum": "2", "old_deadline_seconds": str(1 / 3)}
    assert admin.send(place, **old, rounds="0", quorum="2", deadline_seconds="60").status_code == 422
    viewer = signed_in(coordinator, "viewer")
    assert viewer.send(place, **old, rounds="6").status_code == 403
    assert 'id="limits"' not in viewer.http.get(f"/page/runs/{run.id}").text
    assert client.run(run.id).spec == found
    client.set_run_state(run.id, "cancelled")
    assert 'id="limits"' not in admin.http.get(f"/page/runs/{run.id}").text


def test_a_search_ignores_the_case_of_letters_beyond_ascii(coordinator: LiveCoordinator, viewer: Person) -> None:
    client = coordinator.client()
    run = start_run(client, MODEL, values(MODEL), name="wards", dataset="none")
    client.patch_run(run.id, RunPatch(note="Étude pilote"))
    for text in ("ÉTUDE", "étude"):
        assert run.id in viewer.http.get("/page/runs", params={"q": text}).text


def test_a_note_with_letters_that_no_page_shows_can_be_changed(coordinator: LiveCoordinator, admin: Person) -> None:
    client = coordinator.client()
    run = start_run(client, MODEL, values(MODEL), dataset="none")
    place, written = f"/page/runs/{run.id}", "zero\u200bwidth\u202e"
    client.patch_run(run.id, RunPatch(note=written))
    (old,) = re.findall(r'name="old_note" value="([^"]*)"', admin.http.get(place).text)
    assert old == "zero\ufffdwidth\ufffd"
    # A tag is added: the note that the person left alone stays as it was written.
    assert admin.send(f"{place}/notes", old_note=old, note=old, tags="pilot").status_code == 303
    found = client.run(run.id)
    assert (found.tags, found.note) == (("pilot",), written)
    assert admin.send(f"{place}/notes", old_note=old, note="new", old_tags="pilot", tags="pilot").status_code == 303
    assert client.run(run.id).note == "new"


def test_runs_are_compared_side_by_side(standing: LiveCoordinator, wards: str) -> None:
    first, client, viewer = wards, standing.client(), signed_in(standing, "viewer")
    cohort = Cohort(sites=("north", "south"))
    second = start_run(client, MODEL, values(MODEL), name="wards", rounds=7, dataset="none", cohort=cohort).id
    shown = viewer.http.get(f"/page/runs/compare?run={first}&run={second}&x=bytes").text
    for text in (f"wards<wbr> ({first[:8]})", "Accuracy 0.75", "not measured", "<code>rounds</code>", "Best score"):
        assert text.replace("<wbr>", "") in shown.replace("<wbr>", ""), text
    settings = re.findall(r"<th scope=\"row\"><code>(\S+)</code>", shown.replace("<wbr>", ""))
    assert {"rounds", "dataset", "method.name", "method.settings.warmup_rounds"} <= {*settings}
    assert "seed" not in settings
    assert "north, south" in shown
    assert "[" not in as_text(shown)
    assert "their scores are not of the same examples" in shown
    for page in (f"runs/compare?run={first}&run={second}&", f"runs/{first}?"):
        told = as_text(viewer.http.get(f"/page/{page}score=0.99&metric=accuracy").text)
        assert "accuracy 0.99 or more never up to version" in told.lower()
        assert "jitter of accuracy" in told.lower()
        assert viewer.http.get(f"/page/{page}score=nan").status_code == 422
    rows = viewer.http.get(f"/page/runs/{first}/metrics.csv?score=0.99").text
    assert "accuracy.to_0.99.reached,0.0" in rows
    for metric in ("accuracy", "loss"):
        picture = viewer.http.get(f"/page/runs/compare/chart.svg?run={first}&run={second}&metric={metric}").text
        assert ET.fromstring(picture).findall(".//{*}circle[@class='best c0']") != []  # noqa: S314 (made here)
    for runs in ([first], [first, first], [first] * 2 + [f"r{n}" for n in range(7)]):
        answer = viewer.http.get("/page/runs/compare", params={"run": runs})
        assert answer.status_code == 422
        assert "a comparison needs two to 6 different runs" in answer.text
    assert viewer.http.get(f"/page/runs/compare?run={first}&run=nothing").status_code == 404


@pytest.mark.parametrize(
    ("selection", "caveat"), [("refused", ""), ("uncovered", "; the choice of blocks is not covered")]
)
def test_what_a_run_with_privacy_has_spent_is_shown_by_worker_and_round(
    coordinator: LiveCoordinator, viewer: Person, selection: Literal["refused", "uncovered"], caveat: str
) -> None:
    client = coordinator.client()
    workers = [ScriptedWorker(coordinator.client("site", site)) for site in ("a", "b")]
    for worker in workers:
        worker.enrol()
    private = Privacy(epsilon=3.0, delta=1e-5, clip_norm=1.0, selection=selection)
    run = start_run(client, MODEL, values(MODEL), rounds=2, privacy=private, cohort=Cohort(quorum=2))
    place = f"/page/runs/{run.id}"
    assert "No epsilon by worker: no update has been accepted yet." in viewer.http.get(place).text
    for number in (1, 2):
        for worker, spent in zip(workers, (1.25, 1.5), strict=True):
            worker.train(worker.take(), epsilon=spent * number)
        until(lambda made=number: client.run(run.id).version.number == made)
    shown = viewer.http.get(place).text
    assert "Epsilon spent, by worker" in shown
    assert f"the limit of the run is 3{caveat}." in shown
    assert f"epsilon 3 at delta 1e-05 for each example of each worker{caveat}<" in shown
    assert "a/w: 2.5 at 2; b/w: 3 at 2" in shown
    # What a site's data have told in all is not known here, and so not said.
    assert "epsilon" not in viewer.http.get("/page/sites").text.lower()


def test_nothing_that_a_worker_says_becomes_markup(coordinator: LiveCoordinator, admin: Person) -> None:
    run = worked(coordinator)
    with coordinator.services.database.transaction() as session:
        # As a coordinator that checks less, or a person with the database at hand, might enter it.
        for worker in session.query(WorkerRow):
            worker.name = HOSTILE
            worker.declared = {**worker.declared, "device": HOSTILE, "datasets": {HOSTILE: 3}}
        for task in session.query(TaskRow):
            task.layers = [HOSTILE, "layer.0"]
    ways = [*PAGES[:-1], f"/runs/{run}", f"/runs/{run}/rounds/1", f"/runs/{run}/rounds/2", f"/runs/{run}/rounds"]
    seen = 0
    for path in ways:
        text = admin.http.get(f"/page{path}").text
        assert "<script>alert" not in text, path
        assert "<img" not in text, path
        seen += "&lt;script&gt;" in text
    assert seen >= 5
    # Nor is it a template.
    assert "{{ 7 * 7 }}" in admin.http.get("/page/failures").text


def test_nothing_that_a_worker_says_turns_letters_around_or_controls_anything(
    coordinator: LiveCoordinator, admin: Person
) -> None:
    ScriptedWorker(coordinator.client("site", "a")).enrol()
    with coordinator.services.database.transaction() as session:
        for worker in session.query(WorkerRow):
            worker.declared = {**worker.declared, "device": "\x1b[31m\u202egnp.exe\x9b2J"}
    text = admin.http.get("/page/sites").text
    assert not set(text) & set("\x1b\u202e\x9b")
    assert "\ufffd[31m\ufffdgnp.exe\ufffd2J" in text


def test_a_run_is_started_from_what_another_made(coordinator: LiveCoordinator) -> None:
    person = signed_in(coordinator, "orchestrator")
    worker = ScriptedWorker(coordinator.client("site", "a"))
    worker.enrol()
    before = start_run(coordinator.client(), MODEL, values(MODEL), name="first", dataset="none")
    form = person.http.get("/page/runs/new?method=fedfrozen").text
    (start,) = re.findall(r'<option value="(sha256:\S+ sha256:\S+ \w+)">first', form)
    assert '<option value="data">data (1 live worker)</option>' in form
    assert re.search(r'name="/evaluation/sites"[^>]*>.*?<option selected>true</option>', form)
    questions = person.http.get("/page/runs/new").text
    assert re.findall(r"<legend>(\d\. [^<]+)", questions) == [
        "1. Which model?",
        "2. Which data set?",
        "3. Which method?",
    ]
    assert '<option value="data" selected>' in questions
    for told in (
        "<code>tessera model init --lora-rank 8</code>",
        "Sends the whole model.",
        f'<option value="{start}">',
    ):
        assert told in questions, told
    needy = person.http.get("/page/runs/new?method=scaffold").text
    assert re.search(r'name="/training/optimizer"[^>]*>.*?<option selected>sgd</option>', needy)
    given = {"method": "fedfrozen", "start": start, "request_key": "w1", "/name": "second", "/dataset": "data"}
    given |= {"/rounds": "2", "/method/settings/warmup_rounds": "1", "/cohort/quorum": "1"}
    shown = person.send("/page/runs/new", step="preview", **given)
    assert shown.status_code == 200
    assert "a/w" in shown.text
    assert "The run has not started" in shown.text
    assert [run.spec.name for run in coordinator.client().runs()] == ["first"]
    for _ in range(2):  # pressed twice, it is begun once
        answer = person.send("/page/runs/new", step="start", **given)
        assert answer.status_code == 303
    (made,) = [run for run in coordinator.client().runs() if run.id != before.id]
    assert (made.spec.name, made.spec.method.settings["warmup_rounds"], made.spec.rounds) == ("second", 1, 2)
    assert made.spec.version == before.version.digest
    # A copy is filled in with every setting that was given, and starts the same run but for its name.
    copied = person.http.get(f"/page/runs/new?copy={made.id}").text
    filled = dict(re.findall(r'name="(/\S+)" value="([^"]+)"', copied))
    filled |= dict(re.findall(r'name="(/[^"]+)"[^>]*>(?:(?!</select>).)*<option selected>([^<]+)', copied))
    filled |= dict(re.findall(r'name="(/dataset)"[^>]*>(?:(?!</select>).)*<option value="([^"]+)" selected>', copied))
    assert filled["/name"] == "second-2"
    filled |= {"method": "fedfrozen", "start": start, "request_key": "w2"}
    assert person.send("/page/runs/new", step="start", **filled).status_code == 303
    (again,) = [run for run in coordinator.client().runs() if run.spec.name == "second-2"]
    assert again.spec.model_copy(update={"name": "second"}) == made.spec
    assert person.http.get("/page/runs/new?copy=nothing").status_code == 404


def test_a_newcomer_s_form_chooses_no_model_and_no_version_of_another_run(coordinator: LiveCoordinator) -> None:
    person = signed_in(coordinator, "orchestrator")
    for site, data in (("a", "wards"), ("b", "notes")):
        ScriptedWorker(coordinator.client("site", site), datasets={data: 10}).enrol()
    client = coordinator.client()
    client.suspend_site(next(site.id for site in client.sites() if site.name == "b"))
    # Equal versions of two runs.
    for name in ("big", "small"):
        start_run(client, MODEL, values(MODEL), name=name, dataset="none")
    questions = person.http.get("/page/runs/new").text
    assert re.findall(r'name="method" value="(\w+)"( checked)?', questions)[:2] == [
        ("fedavg", " checked"),
        ("ditto", ""),
    ]
    starts = dict(re.findall(r'<option value="(sha256[^"]+)"[^>]*>(big|small) ', questions))
    assert sorted(starts.values()) == ["big", "small"]
    assert '<option value="">choose a model</option>' in questions
    assert "sha256" not in "".join(re.findall(r"<option[^>]* selected>", questions))
    for start, name in starts.items():
        form = person.http.get("/page/runs/new", params={"method": "fedavg", "start": start}).text
        assert re.findall(r'<option value="sha256[^"]+" selected>(\w+)', form) == [name]
    # All that there is, and nothing else can be typed.
    select_field = re.findall(r'<select id="dataset" name="dataset">(.*?)</select>', questions)
    assert re.findall(r">([^<]+)</option>", select_field[0]) == [
        "choose a data set", "notes (no live worker)", "wards (1 live worker)",
    ]  # fmt: skip


def test_a_preview_counts_sites_as_the_quorum_does(coordinator: LiveCoordinator) -> None:
    for name in ("w1", "w2"):
        ScriptedWorker(coordinator.client("site", "a"), name=name).enrol()
    asks = ScriptedWorker(coordinator.client("site", "b"), advertised_policy=AdvertisedPolicy(approve_runs=True))
    asks.enrol()
    before = start_run(coordinator.client(), MODEL, values(MODEL), dataset="none")
    given = {"method": "fedavg", "start": f"{before.spec.model} {before.spec.version}", "/name": "wards"}
    given |= {"/dataset": "data", "/rounds": "2", "/cohort/quorum": "2"}
    shown = signed_in(coordinator, "orchestrator").send("/page/runs/new", step="preview", **given).text
    assert "1 site would take part; the quorum is 2." in shown
    assert "The run would wait; 1 more would take part once a person there has approved it." in shown


def test_settings_of_local_training_are_shown_and_kept_in_a_copy(coordinator: LiveCoordinator, admin: Person) -> None:
    training = Training.model_validate(
        {"rates": {"head": 10}, "keep_moments": True, "label_smoothing": 0.1, "class_weights": [1, 2.5]}
    )
    run = start_run(coordinator.client(), MODEL, values(MODEL), training=training)
    page = unescape(admin.http.get(f"/page/runs/{run.id}").text)
    assert "times 10 for head, moments kept between rounds, labels smoothed by 0.1, weighted classes" in page
    form = unescape(admin.http.get(f"/page/runs/new?copy={run.id}").text)
    for text in ('{"head": 10.0}', "[1.0, 2.5]"):
        assert text in form


def test_a_copy_keeps_the_nulls_that_were_given(coordinator: LiveCoordinator) -> None:
    person = signed_in(coordinator, "orchestrator")
    training = Training(batch_size=None, epochs=None, steps=7)
    before = start_run(coordinator.client(), MODEL, values(MODEL), dataset="none", training=training)
    form = person.http.get(f"/page/runs/new?copy={before.id}").text
    filled = dict(re.findall(r'name="(/\S+)" value="([^"]+)"', form))
    assert (filled["/training/batch_size"], filled["/training/epochs"]) == ("null", "null")
    assert "/privacy/epsilon" not in filled
    given = {"method": "fedavg", "start": f"{before.spec.model} {before.spec.version}", **filled}
    assert "batches of all" in person.send("/page/runs/new", step="preview", **given).text
    assert person.send("/page/runs/new", step="start", **given).status_code == 303
    (spec,) = [run.spec for run in coordinator.client().runs() if run.id != before.id]
    assert spec.training == training


def test_a_name_and_a_data_set_of_digits_alone_are_text(coordinator: LiveCoordinator) -> None:
    person = signed_in(coordinator, "orchestrator")
    before = start_run(coordinator.client(), MODEL, values(MODEL), dataset="none")
    given = {"method": "fedavg", "start": f"{before.spec.model} {before.spec.version}"}
    given |= {
        "/name": "2024",
        "/dataset": "007",
        "/rounds": "2",
        "/max_examples": "9",
        "/max_norm_of_median": "unlimited",
    }
    assert person.send("/page/runs/new", step="start", **given).status_code == 303
    (spec,) = [run.spec for run in coordinator.client().runs() if run.id != before.id]
    assert (spec.name, spec.dataset, spec.rounds) == ("2024", "007", 2)
    assert (spec.max_examples, spec.max_norm_of_median) == (9, "unlimited")


def test_who_has_no_model_yet_reads_how_to_make_one(coordinator: LiveCoordinator) -> None:
    shown = signed_in(coordinator, "orchestrator").http.get("/page/runs/new").text
    assert "tessera run create run.toml --model my-model" in shown
    assert "No worker has a data set yet." in shown


def test_what_was_uploaded_can_be_begun_with(coordinator: LiveCoordinator) -> None:
    token = coordinator.token("orchestrator")
    person = Person(coordinator)
    person.sign_in(token)
    with Client(coordinator.url, token, verify=False) as client:
        run = start_run(client, MODEL, values(MODEL), dataset="none")
    form = person.http.get("/page/runs/new?method=fedavg").text
    assert f'<option value="{run.spec.model} {run.spec.version}">bert, uploaded' in form


def test_what_is_wrong_is_said_beside_its_field(coordinator: LiveCoordinator) -> None:
    person = signed_in(coordinator, "orchestrator")
    given = {"/name": "no good", "/rounds": "many", "/cohort/size": "2", "/cohort/quorum": "5", "/training": "x"}
    given |= {"/method/settings/share": "2", "/method/settings/within": "[", "/server_optimizer": '{"kind": "magic"}'}
    answer = person.send("/page/runs/new", step="preview", method="safl", **given)
    assert answer.status_code == 422
    for ident in ("f-name", "f-rounds", "f-dataset", "f-method-settings-within", "f-server_optimizer"):
        assert f'id="{ident}-error"' in answer.text, ident
    assert 'value="no good"' in answer.text
    given |= {"/name": "good", "/rounds": "1", "/dataset": "d", "/cohort/quorum": "1", "/server_optimizer": ""}
    given |= {"/method/settings/within": "", "/model": "sha256:" + "0" * 64, "/version": "sha256:" + "0" * 64}
    answer = person.send("/page/runs/new", step="preview", method="safl", **given)
    assert 'id="f-method-settings-share-error"' in answer.text
    given |= {"start": f"{given['/model']} {given['/version']}"}
    answer = person.send("/page/runs/new", step="preview", method="safl", **given)
    assert "choose from the list or give digests, not both" in answer.text


def test_what_is_not_there_says_why(coordinator: LiveCoordinator, viewer: Person) -> None:
    client = coordinator.client()
    for evaluation, why in (
        (None, "No scores: the run asks for no evaluation."),
        (Evaluation(sites=True), "No scores: nothing has been evaluated yet."),
    ):
        run = start_run(client, MODEL, values(MODEL), dataset="none", evaluation=evaluation)
        assert why in viewer.http.get(f"/page/runs/{run.id}").text
    for method, why in (
        (
            MethodSpec(name="fedfrozen", settings={"warmup_rounds": "auto"}),
            "No warm-up signals: they need two rounds",
        ),
        (MethodSpec(name="safl"), "No attention entropy: no worker has measured it."),
    ):
        run = start_run(client, MODEL, values(MODEL), dataset="none", method=method)
        assert why in viewer.http.get(f"/page/runs/{run.id}").text
    run = start_run(client, MODEL, values(MODEL), dataset="none", signals={"drift": True})
    shown = viewer.http.get(f"/page/runs/{run.id}").text
    assert "No client drift by role: they need a round with two updates." in shown


OWN_METHOD = """
from tessera.shared.methods.base import Chart, Method

METHOD = Method(
    "restless",
    source="a test",
    charts=(
        Chart("distance moved", ("moved.",), description="Of each layer.", unit="nm"),
        Chart("wind", ("wind",), missing="it is calm", requires={"weather": "bad"}),
    ),
)
"""


@pytest.fixture
def own_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MethodSpec]:
    """Put a method with charts of its own into a folder of a user's."""
    (tmp_path / "restless.py").write_text(OWN_METHOD)
    with monkeypatch.context() as patched:
        patched.setenv(FOLDERS, str(tmp_path))
        methods.cache_clear()
        yield MethodSpec(name="restless")
    methods.cache_clear()


def test_a_users_method_has_the_charts_that_it_declares(
    own_method: MethodSpec, coordinator: LiveCoordinator, viewer: Person
) -> None:
    run = start_run(coordinator.client(), MODEL, values(MODEL), method=own_method)
    page = f"/page/runs/{run.id}"
    shown = viewer.http.get(page).text
    assert "No distance moved: no version has any yet." in shown
    assert "No wind: they are measured if weather is bad." in shown
    with coordinator.services.database.transaction() as session:
        session.get_one(VersionRow, (run.id, 0)).scalars = {"moved.10": 2.0, "moved.9": 1.0, "secret": 3.0}
    shown = viewer.http.get(page).text
    assert "Distance moved (nm)</h2>" in shown
    assert "Of each layer." in shown
    assert "Last values: 9: 1 at 0; 10: 2 at 0." in shown
    assert "No distance moved" not in shown
    assert "secret" not in shown


def test_a_suspended_site_has_no_live_worker(coordinator: LiveCoordinator, viewer: Person) -> None:
    ScriptedWorker(coordinator.client("site", "a")).enrol()
    assert "1 of 1 worker live" in viewer.http.get("/page/sites").text
    (site,) = coordinator.client().sites()
    coordinator.client().suspend_site(site.id)
    shown = viewer.http.get("/page/sites").text
    assert '<span class="state suspended">suspended</span>' in shown
    assert "worker live" not in shown
    assert "norms are compared from 3 updates of a round on" in shown
    assert '<span class="state suspended">suspended</span>' in viewer.http.get("/page/").text


def test_a_round_ends_about_when_rounds_before_it_did_and_its_slowest_worker_will() -> None:
    half = Pace(over=False, phase="training", done=0.5)
    # Half of training is half of all, by which 30 s are 60; as much as the rounds before say, 100, together 80.
    assert expected_end(0.0, 30.0, 1e9, [90.0, 100.0, 300.0], [Pace(over=True), half]) == pytest.approx(80.0)
    assert expected_end(0.0, 30.0, 1e9, [], [half]) is None
    # One that had other things to do first is no slower for it.
    late = Pace(over=False, began_at=290.0, phase="training", done=0.5)
    assert expected_end(0.0, 300.0, 1e9, [310.0], [late, Pace(over=True)]) == pytest.approx(310.0)
    assert expected_end(0.0, 30.0, 1e9, [100.0], [Pace(over=False)]) == 100.0
    assert expected_end(0.0, 30.0, 70.0, [100.0], []) == 70.0
    assert expected_end(0.0, 300.0, 1e9, [100.0], []) == 300.0


def test_progress_becomes_a_forecast_on_the_page(coordinator: LiveCoordinator, viewer: Person) -> None:
    worker = ScriptedWorker(coordinator.client("site", "a"))
    worker.enrol()
    run = start_run(coordinator.client(), MODEL, values(MODEL), rounds=2)
    task = worker.take()
    at = Progress(phase="training", step=39, steps=40, phase_seconds={"training": 3900.0})
    worker.client.heartbeat(task.id, task.token, at)
    first = viewer.http.get(f"/page/runs/{run.id}").text
    # 39 steps took 3900 s, so the last one takes 100 s.
    assert "training step 39 of 40, 1 min 40 s left" in " ".join(first.split())
    assert "no forecast yet" in first
    assert "Left, about" not in first
    worker.train(task)
    task = worker.take()
    worker.client.heartbeat(task.id, task.token, Progress(phase="training", step=30, steps=40, loss=0.125))
    shown = viewer.http.get(f"/page/runs/{run.id}").text
    assert "training step 30 of 40, loss 0.125" in " ".join(shown.split())
    assert "Left, about" in shown
    assert '<progress aria-label="a/w: steps" max="40" value="30">' in shown


@pytest.mark.parametrize(
    ("reported", "shown"),
    [
        pytest.param({"phase": "training", "steps": 10}, "training step 0 of 10", marks=pytest.mark.long),
        ({"phase": "fetching", "total_bytes": 2000}, "fetching 0 B of 2"),
    ],
)
def test_progress_without_its_first_half_takes_no_page_down(
    coordinator: LiveCoordinator, viewer: Person, reported: dict[str, object], shown: str
) -> None:
    worker = ScriptedWorker(coordinator.client("site", "a"))
    worker.enrol()
    run = start_run(coordinator.client(), MODEL, values(MODEL))
    task = worker.take()
    worker.client.heartbeat(task.id, task.token, Progress.model_validate(reported))
    for path in ("/", f"/runs/{run.id}", f"/runs/{run.id}/rounds/1"):
        answer = viewer.http.get(f"/page{path}")
        assert answer.status_code == 200, path
        assert shown in " ".join(answer.text.split()), path


def test_workers_that_need_attention_are_on_top_and_can_be_filtered(
    coordinator: LiveCoordinator, viewer: Person
) -> None:
    for site in ("a", "b"):
        for name in ("w1", "w2"):
            ScriptedWorker(coordinator.client("site", site), name=name, datasets={f"of-{site}": 1}).enrol()
    database = coordinator.services.database
    with database.snapshot() as session:
        rows = session.execute(select(WorkerRow.id, WorkerRow.token_id)).all()
    later = database.now()
    for worker, token in rows:
        coordinator.services.last_seen.note(worker, later, token)

    def stored() -> bool:
        with database.snapshot() as session:
            return set(session.scalars(select(WorkerRow.last_seen_at))) == {later}

    # Once this is stored, nothing earlier is still to be.
    until(stored)
    with database.transaction() as session:
        session.execute(update(WorkerRow).where(WorkerRow.name == "w2").values(last_seen_at=0.0))
        session.execute(update(SiteRow).where(SiteRow.name == "a").values(suspended_at=1.0))

    def shown(query: str = "") -> list[tuple[str, str]]:
        text = viewer.http.get(f"/page/sites?{query}").text
        assert "/suspend" not in text
        row = r'class="site">(.*?)</span>|/page/workers/\w+">(.*?)</a>'
        return [(site, worker) for site, worker in re.findall(row, text)]

    both = [("", "w1"), ("", "w2")]
    assert shown() == [("b", ""), ("", "w2"), ("", "w1"), ("a", ""), *both]
    assert shown("health=attention") == [("b", ""), ("", "w2")]
    assert shown("q=OF-A&health=suspended") == [("a", ""), *both]
    assert shown("q=nothing") == []
    assert viewer.http.get("/page/sites?health=dead").status_code == 422


LIVE = {
    "gpu_name": "Tensor 9",
    "gpu_memory_bytes": 80_000_000_000,
    "gpu_memory_used_bytes": 20_000_000_000,
    "log": [{"at": "2026-01-02T03:04:05Z", "event": "training", "run": "r"}],
}
UNREADABLE = (
    None,
    "well",
    [1],
    {"cpus": -1},
    {"log": [{"event": "traceback"}]},
    {"log": LIVE["log"] * 21},  # type: ignore[operator]
    {"gpu_name": "x" * 10_000},
)


def test_a_worker_has_a_page_whatever_it_tells(coordinator: LiveCoordinator, admin: Person, viewer: Person) -> None:
    policy = AdvertisedPolicy(
        hours=("06:00-22:00",), budgets={"other": UnitBudget(epsilon=8, delta=1e-5)}, spent={"other": 2.5},
        max_total_privacy=UnitBudget(epsilon=9, delta=1e-5), total_spent=2.25,
        max_weekly_privacy=UnitBudget(epsilon=7, delta=1e-5),
    )  # fmt: skip
    worker = ScriptedWorker(coordinator.client("site", "a"), advertised_policy=policy)
    worker.enrol()
    private = Privacy(epsilon=3.0, delta=1e-5, clip_norm=1.0)
    start_run(coordinator.client(), MODEL, values(MODEL), privacy=private)
    task, site = worker.take(), coordinator.http("site", "a")
    (page,) = re.findall(r"/page/workers/\w+", admin.http.get("/page/sites").text)

    def shown(told: object) -> str:
        beat = {"token": task.token, "live": told}
        assert site.post(f"/v1/tasks/{task.id}/heartbeat", json=beat).status_code == 200
        return admin.http.get(page).text

    for told in UNREADABLE:
        text = shown(told)
        assert "has not reported the state of its machine yet" in text, told
        assert "The site does not share them" in text, told
    for words in (
        "epsilon 5.5 left of 8 at delta 1e-05 for each example",
        "all data sets",
        "epsilon 6.75 left of 9",
        "06:00-22:00 (UTC+0:00)",
        "at most epsilon 7 at delta 1e-05 for each example, on each data set",
        "rounded in all runs",
        "Revoke the token",
    ):
        assert words in text, words
    text = shown({**LIVE, "watts": 300})
    for words in ("Tensor 9", "of 80 GB", "training</strong>", "from its last heartbeat"):
        assert words in text, words
    # The load is that of the whole machine, and may be more than its processors.
    assert "load 5.3<small>of all programs, on 4</small>" in shown({"cpus": 4, "cpu_load": 5.3})
    # What is told takes the place of what was told before.
    assert "Tensor 9" not in shown({"cpus": 4})
    worker.client.fail(task.id, Failure(token=task.token, code="out-of-memory", detail="it does not fit"))
    assert "it does not fit" in admin.http.get(page).text
    required = {"require_secure_sums": True, "require_client_privacy": Budget(epsilon=2, delta=1e-4)}
    ScriptedWorker(coordinator.client("site", "a"), advertised_policy=AdvertisedPolicy(**required)).enrol()
    text = admin.http.get(page).text
    assert "required: updates leave only under masks" in text
    assert "at most epsilon 2 at delta 0.0001, in secure sums" in text
    assert "Revoke" not in viewer.http.get(page).text


def test_values_that_no_float_and_no_date_can_hold_are_dashes_on_a_workers_page(
    coordinator: LiveCoordinator, viewer: Person
) -> None:
    huge = {"max_minutes_per_day": 1e308, "max_epochs": 10**400, "max_model_bytes": 10**400}
    policy = AdvertisedPolicy.model_validate(huge)
    worker = ScriptedWorker(coordinator.client("site", "a"), advertised_policy=policy)
    worker.enrol()
    start_run(coordinator.client(), MODEL, values(MODEL))
    task, site = worker.take(), coordinator.http("site", "a")
    (page,) = re.findall(r"/page/workers/\w+", viewer.http.get("/page/sites").text)
    # With and without an offset: earlier and later than any date in UTC.
    for instant in ("0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "0001-01-01T00:00:00"):
        beat = {"token": task.token, "live": {"started_at": instant, "log": [{"at": instant, "event": "started"}]}}
        assert site.post(f"/v1/tasks/{task.id}/heartbeat", json=beat).status_code == 200
        answer = viewer.http.get(page)
        assert answer.status_code == 200, instant
        assert "worker started" in answer.text
    assert answer.text.count("at most \u2013") == 3


def test_administrators_suspend_resume_rotate_and_revoke_after_a_second_look(
    coordinator: LiveCoordinator, admin: Person, viewer: Person
) -> None:
    worker = ScriptedWorker(coordinator.client("site", "a"))
    worker.enrol()
    (site,) = coordinator.client().sites()
    (token,) = [one for one in coordinator.client().tokens() if one.role == "site"]
    acts = [
        (f"/page/sites/{site.id}/suspend", f"Suspend {site.name}?"),
        (f"/page/sites/{site.id}/resume", "Resume"),
        (f"/page/tokens/{token.id}/rotate", "10 min"),
        (f"/page/tokens/{token.id}/revoke", "cannot be undone"),
    ]
    for path, words in acts:
        assert viewer.http.get(path).status_code == 403, path
        assert viewer.send(path).status_code == 403, path
        assert admin.http.post(path, data={}).status_code == 403, path
        assert words in admin.http.get(path).text, path
        assert admin.http.get(path.replace(site.id, "x").replace(token.id, "x")).status_code == 404, path
    assert admin.send(acts[0][0]).status_code == 303
    assert next(iter(coordinator.client().sites())).suspended_at
    assert admin.send(acts[1][0]).status_code == 303
    (secret,) = re.findall(r'class="secret">(.*?)<', admin.send(acts[2][0]).text)
    # Both secrets are valid for a while. Of a third one the page says what it ends.
    assert "the secret from then, valid for another" in admin.http.get(acts[2][0]).text
    renewed = coordinator.bare({"Authorization": f"Bearer {secret}"})
    assert renewed.get("/v1/workers").status_code == 200
    worker.enrol()
    assert admin.send(acts[3][0]).status_code == 303
    assert renewed.get("/v1/workers").status_code == 401
    assert admin.send(acts[2][0]).status_code == 409
    assert [admin.http.get(path).status_code for path, _ in acts[2:]] == [409, 409]
    tokens = admin.http.get("/page/tokens").text
    assert secret not in tokens
    assert 'class="state revoked"' in tokens
    assert "never" in tokens
    actions = [entry.action for entry in coordinator.client().audit() if entry.actor.endswith("test-admin")]
    assert actions[-4:] == ["site.suspend", "site.resume", "token.rotate", "token.revoke"]


def test_audit_and_failures_are_filtered_and_downloaded(coordinator: LiveCoordinator, admin: Person) -> None:
    run = worked(coordinator)
    with coordinator.services.database.transaction() as session:
        session.execute(update(TaskRow).where(TaskRow.state == "failed").values(created_at=1000.0))
        problem = {"type": "about:blank", "code": "failed", "title": "t", "status": 422, "retryable": False,
                   "detail": "=cmd|' /C calc'!A0", "remedy": "none"}  # fmt: skip
        session.execute(update(TaskRow).where(TaskRow.state == "failed").values(problem=problem))

    def audited(**filters: str) -> list[list[str]]:
        answer = admin.http.get("/page/audit.csv", params=filters)
        assert answer.headers["content-disposition"] == 'attachment; filename="audit.csv"'
        return list(csv.reader(StringIO(answer.text)))[1:]

    every = audited()
    assert [int(row[0]) for row in every] == list(range(len(every), 0, -1))
    assert {(row[2], row[3]) for row in audited(who="SITE:A")} == {("site:a", "worker.enrol")}
    assert {row[3] for row in audited(who="test-site", what="task.f", run=run)} == {"task.fail"}
    assert audited(who="100%_") == audited(until="1970-01-02T00:00") == audited(run="none") == []
    assert audited(since="1970-01-02T00:00", until="2999-01-01T00:00") == every
    shown = admin.http.get("/page/audit", params={"what": "task.fail", "who": "test"}).text
    assert shown.count('title="task.fail">could not do the task</td>') == 1
    assert 'href="/page/audit.csv?who=test&amp;what=task.fail&amp;"' in shown
    assert "No entry matches the filter" in admin.http.get("/page/audit?who=nothing").text
    for path in ("/page/audit", "/page/failures.csv"):
        refused = admin.http.get(f"{path}?since=yesterday")
        assert (refused.status_code, "such as 2026-07-01T12:00" in refused.text) == (422, True)

    failures = {"": 1, "who=b/": 1, "who=a/": 0, "what=failed": 1, "what=rejected": 0, "what=x": 0,
                "until=1970-01-01T00:16": 0, "since=1970-01-01T00:16&until=1970-01-01T00:17": 1}  # fmt: skip
    for query, count in failures.items():
        assert admin.http.get(f"/page/failures?{query}").text.count("<summary>") == count, query
        assert admin.http.get(f"/page/failures.csv?{query}").text.count("wards") == count, query
    # What a worker says is no formula to a spreadsheet.
    assert ",'=cmd|" in admin.http.get("/page/failures.csv").text
    assert signed_in(coordinator, "viewer").http.get("/page/audit.csv").status_code == 403


def test_failures_of_one_instant_are_all_on_a_page_of_the_list(
    coordinator: LiveCoordinator, admin: Person, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of a round are, whose tasks begin together."""
    monkeypatch.setattr(records, "FAILURES", 2)
    worked(coordinator)
    with coordinator.services.database.transaction() as session:
        session.execute(update(TaskRow).values(state="failed", created_at=1000.0))
        ids = set(session.scalars(select(TaskRow.id)))
    found, place = [], "/page/failures"
    while place:
        shown = admin.http.get(place).text
        found += re.findall(r'<li id="of-([0-9a-f]+)"', shown)
        (place,) = re.findall(r'href="([^"]+)" rel="next"', shown) or [""]
        place = unescape(place)
    assert len(ids) == len(found) > 4
    assert set(found) == ids


def test_runs_and_tokens_of_one_instant_are_all_on_a_page_of_the_list(
    coordinator: LiveCoordinator, admin: Person, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tessera.coordinator.dashboard.runs.AT_A_TIME", 2)
    monkeypatch.setattr("tessera.coordinator.dashboard.workers.TOKENS", 2)
    for name in "abcde":
        start_run(coordinator.client(), MODEL, values(MODEL), name=name, dataset="none")
    lists = {
        "/page/runs": (RunRow, r'name="run" value="(\w+)"'),
        "/page/tokens": (TokenRow, r"/page/tokens/(\w+)/rotate"),
    }
    for first, (table, shown_id) in lists.items():
        with coordinator.services.database.transaction() as session:
            session.execute(update(table).values(created_at=1000.0))
            ids = set(session.scalars(select(table.id)))
        found, page = [], "1"
        while page:
            shown = admin.http.get(first, params={"page": page}).text
            found += re.findall(shown_id, shown)
            (page,) = re.findall(r'name="page" value="(\d+)">Next page', shown) or [""]
        assert sorted(found) == sorted(ids)
        assert len(ids) > 4


def test_all_attempts_at_a_round_are_on_a_page_of_the_list(
    coordinator: LiveCoordinator, admin: Person, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tessera.coordinator.dashboard.runs.AT_A_TIME", 2)
    run = worked(coordinator)
    with coordinator.services.database.transaction() as session:
        last = session.scalars(select(RoundRow).filter_by(run_id=run, number=2)).one()
        columns = {one.key: getattr(last, one.key) for one in RoundRow.__table__.columns}
        for number, attempt in ((1, 2), (1, 3), (2, 2), (2, 3), (2, 4)):
            session.add(RoundRow(**{**columns, "id": f"{number}-{attempt}", "number": number, "attempt": attempt}))
    found, place = [], f"/page/runs/{run}/rounds"
    while place:
        shown = admin.http.get(place).text
        found += [tuple(map(int, pair)) for pair in re.findall(r"/rounds/(\d+)\?attempt=(\d+)", shown)]
        (place,) = re.findall(r'href="([^"]+)" rel="next"', shown) or [""]
        place = unescape(place)
    assert found == [(2, 4), (2, 3), (2, 2), (2, 1), (1, 3), (1, 2), (1, 1)]


def test_audit_entries_of_a_run_that_is_not_in_the_menu_show_the_filter(
    coordinator: LiveCoordinator, admin: Person, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "CHOICES", 1)
    old, new = (start_run(coordinator.client(), MODEL, values(MODEL), name=name, dataset="none") for name in "ab")
    for run in (old, new):
        shown = admin.http.get(f"/page/audit?run={run.id}").text
        assert re.findall(r'<option value="(\w+)" selected>', shown) == [run.id]


def as_text(page: str) -> str:
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]*>", " ", page)))


def test_a_secure_sum_shows_who_sent_who_helped_and_what_was_opened(coordinator: LiveCoordinator) -> None:
    ring, viewer = Ring(coordinator), signed_in(coordinator, "viewer")
    place = f"/page/runs/{ring.run.id}"
    assert "over 3 sites or more, opened by site-00, site-01, site-02" in viewer.http.get(place).text

    def shown() -> str:
        return as_text(viewer.http.get(f"{place}/rounds/1").text)

    ring.sites[0].train(1.0, 10)
    assert "Sent under masks 1 site; a block needs 3 to be opened" in shown()
    assert "Sites send their updates under masks." in shown()
    for site in ring.sites[1:]:
        site.train(1.0, 5)
    until(lambda: "The helpers check who sent" in shown())
    assert ring.sites[0].help("agree").state == "accepted"
    assert "Signed the set 1 of 3 helpers; 3 must" in shown()
    assert "The coordinator has read nothing yet." in shown()
    for site in ring.sites[1:]:
        assert site.help("agree").state == "accepted"
    ring.open()
    until(lambda: ring.now().state == "completed")
    text, blocks = shown(), len(ring.model.blocks)
    assert f"{blocks} blocks: the sum of 3 sites" in text
    assert f"site-01 sent {blocks} blocks under masks, weight 2," in text
    assert re.search(r"Set that was opened [0-9a-f]{12} the start of its digest", text)
    assert "which site sent which blocks with what weight; the sum of each block; no update of a site" in text
    assert re.search(r"site-0\d \(helper\) signed the set; summed up the masks of [123] seeds? of each sender", text)
    assert "More than 1 helper could open single updates together with the coordinator." in text


def test_blocks_that_too_few_sites_sent_are_counted_as_not_opened() -> None:
    # Places 0 to 5: the first envelope has 0, 1 and 4, the second has 1 and 4, the third has 1 and 5.
    assert _terms_by_count(["13", "12", "22"]) == ((3, 1), (2, 1), (1, 2))
    assert _terms_by_count(["", "1"]) == ((1, 1),)
    assert _terms_by_count([]) == ()


def test_a_round_without_secure_sums_has_no_record_of_them(coordinator: LiveCoordinator) -> None:
    worker = ScriptedWorker(coordinator.client("site", "a"))
    worker.enrol()
    run = start_run(coordinator.client(), MODEL, values(MODEL))
    worker.take()
    page = signed_in(coordinator, "viewer").http.get(f"/page/runs/{run.id}/rounds/1")
    assert (page.status_code, "Secure sum" in page.text) == (200, False)


def test_a_bar_of_a_round_shows_the_phases_that_its_worker_reported(coordinator: LiveCoordinator) -> None:
    worker = ScriptedWorker(coordinator.client("site", "a"))
    worker.enrol()
    run = start_run(coordinator.client(), MODEL, values(MODEL), rounds=2)
    worker.train(worker.take())
    task, viewer = worker.take(), signed_in(coordinator, "viewer")
    seconds = {"fetching": 2.0, "training": 6.0, "uploading": 0.0}
    worker.client.heartbeat(task.id, task.token, Progress(phase="training", phase_seconds=seconds))
    text = viewer.http.get(f"/page/runs/{run.id}/rounds/2").text
    widths = [float(width) for width in re.findall(r'"stretch (?:fetching|training)".*?width="(.*?)%"', text)]
    assert widths[1] == pytest.approx(3 * widths[0], abs=0.3)
    assert "stretch uploading" not in text
    assert "stretch merging" not in text
    assert "stretch merging" in viewer.http.get(f"/page/runs/{run.id}/rounds/1").text
