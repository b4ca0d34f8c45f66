"""What the pages show and do, without a browser: rows, facts and links, not sentences."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from html import unescape
from io import StringIO
from pathlib import Path
from typing import Any, Literal
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
from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import Evaluation, Run, RunPatch
from tessera.shared.api.tasks import AdvertisedPolicy, Failure, Progress
from tessera.shared.api.token_format import hash_of
from tessera.shared.client.client import Client
from tessera.shared.methods.base import MethodSpec
from tessera.shared.methods.registry import FOLDERS, methods
from tessera.shared.problems import BadRequest
from tessera.shared.run_settings import Budget, Privacy, Training, UnitBudget
from tests.coordinator.api.test_secure_sums import Ring
from tests.coordinator.dashboard.conftest import Person, signed_in
from tests.support.cli import tessera
from tests.support.coordinator import LiveCoordinator, until
from tests.support.federation import ScriptedWorker, small_model, start_run, values
from tests.support.pages import Page

MODEL = small_model()
HOSTILE = "<script>alert('x')</script>\"><img src=x onerror=alert(1)>{{ 7 * 7 }}"

PAGES = ("/", "/runs", "/sites", "/approvals", "/failures", "/storage", "/audit", "/runs/new")


def idle(coordinator: LiveCoordinator, **spec: Any) -> Run:
    """A run that no worker takes part in."""
    return start_run(coordinator.client(), MODEL, values(MODEL), **{"dataset": "none", **spec})


def enrolled(coordinator: LiveCoordinator, site: str, **declared: Any) -> ScriptedWorker:
    return ScriptedWorker(coordinator.client("site", site), **declared).enrol()


def worked(coordinator: LiveCoordinator) -> str:
    """A run with two sites, one of which failed in the second round."""
    client = coordinator.client()
    declared = {"held_out": {"data": 5}, "methods": ("fedfrozen",), "version": "1.2.3+ours"}
    workers = [enrolled(coordinator, site, kinds=("train", "evaluate"), **declared) for site in ("a", "b")]
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


# ---------------------------------------------------------------- who may do what


def test_every_page_of_an_empty_coordinator_is_there(admin: Person) -> None:
    for path in PAGES:
        assert len(admin.see(path).parts["h1"]) == 1, path


def test_viewers_and_other_orchestrators_look_and_no_more(coordinator: LiveCoordinator, viewer: Person) -> None:
    run, place = idle(coordinator), "/page/runs/"
    for person in (viewer, signed_in(coordinator, "orchestrator")):
        assert not {"Pause", "Resume"} & {*person.see(f"/runs/{run.id}").parts["button"]}
        # No page asks what its button cannot do.
        assert person.http.get(f"{place}{run.id}/cancel").status_code == 403
        assert person.send(f"{place}{run.id}/state", state="paused", revision="1").status_code == 403
    for path in ("/audit", "/audit.csv", "/runs/new"):
        assert viewer.http.get(f"/page{path}").status_code == 403, path
    assert coordinator.client().run(run.id).state == "running"


def test_runs_are_paused_resumed_and_cancelled_as_they_were_shown(
    coordinator: LiveCoordinator, admin: Person
) -> None:
    run = idle(coordinator)
    way = f"/page/runs/{run.id}/state"
    assert admin.send(way, state="paused", revision="7").status_code == 412
    for revision, state in (("1", "paused"), ("2", "running"), ("3", "cancelled")):
        assert admin.send(way, state=state, revision=revision).status_code == 303
        assert coordinator.client().run(run.id).state == state
    assert admin.send(way, state="running", revision="4").status_code == 409
    assert admin.http.get(f"/page/runs/{run.id}/cancel").status_code == 409


def test_an_address_without_a_page_is_answered_by_a_page(admin: Person) -> None:
    # The second one is where a form goes, which a browser asks for when its address is opened again.
    for path in ("/page/nothing", f"/page/runs/{'0' * 32}/state"):
        answer = admin.http.get(path)
        assert (answer.status_code, answer.headers["content-type"]) == (404, "text/html; charset=utf-8")
        assert path in answer.text
        assert '<nav aria-label="Main">' in answer.text
    # What the API answers to such a request names a description that is there.
    (description,) = re.findall(r"/\S+(?=\.)", BadRequest.remedy)
    assert admin.http.get(description).status_code == 401
    admin.http.cookies.clear()
    assert admin.http.get("/page/nothing").headers["location"] == "/page/sign-in?next=%2Fpage%2Fnothing"


def test_a_number_that_no_database_holds_is_refused(standing: LiveCoordinator, wards: str) -> None:
    rounds, large = f"/page/runs/{wards}/rounds", 10**20
    for path in (f"{rounds}?before={large}", f"{rounds}/{large}", f"{rounds}/1?attempt={large}",
                 f"/page/audit?before={large}"):  # fmt: skip
        assert signed_in(standing).http.get(path).status_code == 422, path


def test_workers_are_admitted_by_the_code_that_they_show(
    coordinator: LiveCoordinator, admin: Person, viewer: Person
) -> None:
    with Client(coordinator.url, verify=False) as client:
        coordinator.client().create_site("south")
        asked = [
            client.ask_to_join(EnrolmentSpec(site=site, worker="gpu-1", secret_hash=hash_of(site)))
            for site in ("north", "south")
        ]
    shown = admin.see("/approvals")
    assert shown.parts["h3"] == ["north/gpu-1", "south/gpu-1"]
    cards = [item for item in shown.parts["li"] if "/gpu-1" in item]
    assert ["new site" in cards[0], "known site" in cards[1]] == [True, True]
    # Who admits has the code from the site's people, and not from here.
    assert asked[0].code not in shown.text
    assert viewer.see("/approvals").parts["h3"] == []
    assert "2 workers wait for enrolment" in admin.see("/").parts["h3"]
    way = f"/page/approvals/{asked[0].id}"
    yes = {"decision": "approve", "site": "north", "create_site": "yes"}
    assert viewer.send(way, **yes, code=asked[0].code).status_code == 403
    assert admin.send(way, **yes, code="AAAA-AAAA").status_code >= 400
    assert admin.send(way, **yes, code=asked[0].code).status_code == 303
    assert admin.send(f"/page/approvals/{asked[1].id}", decision="decline").status_code == 303
    assert [site.name for site in coordinator.client().sites()] == ["north", "south"]
    assert admin.see("/approvals").parts["h3"] == []


def test_nobody_overlooks_an_update_that_its_site_holds_for_release(
    coordinator: LiveCoordinator, admin: Person
) -> None:
    worker = enrolled(coordinator, "north", datasets={"data": 8})
    run = idle(coordinator, dataset="data", rounds=2)
    task, client = worker.take(), worker.client
    since = datetime.now(UTC) - timedelta(hours=3)
    client.heartbeat(task.id, task.token, Progress(phase="held", held_since=since))
    assert admin.see("/approvals").rows[-1] == [run.spec.name, f"north/{worker.name}", "3 h ago"]
    assert f"An update waits for a release in {run.spec.name}" in admin.see("/").parts["h3"]
    assert "held for release 3 h ago" in admin.see(f"/runs/{run.id}").text
    seen = tessera("run", "show", run.id, TESSERA_URL=coordinator.url, TESSERA_TOKEN=coordinator.token("viewer"))
    assert re.search(rf"held for release +round 1, north/{worker.name}, 3 h ago", seen.stdout)
    # Words of a worker are no reason to show no page, and its next phase ends the wait.
    for odd in ("0001-01-01T00:00:00Z", "2026-01-01T00:00:00", "soon"):
        beat = {"token": task.token, "progress": {"phase": "held", "held_since": odd}}
        client._transport.request("POST", f"/v1/tasks/{task.id}/heartbeat", json=beat)
        admin.see("/")
        admin.see("/approvals")
    client.heartbeat(task.id, task.token, Progress(phase="uploading"))
    assert admin.see("/approvals").rows == []


def test_administrators_suspend_resume_rotate_and_revoke_after_a_second_look(
    coordinator: LiveCoordinator, admin: Person, viewer: Person
) -> None:
    worker, client = enrolled(coordinator, "a"), coordinator.client()
    (site,) = client.sites()
    (token,) = [one for one in client.tokens() if one.role == "site"]
    acts = [f"/sites/{site.id}/{act}" for act in ("suspend", "resume")]
    acts += [f"/tokens/{token.id}/{act}" for act in ("rotate", "revoke")]
    for path in acts:
        assert viewer.http.get(f"/page{path}").status_code == viewer.send(f"/page{path}").status_code == 403, path
        assert admin.see(path).parts["button"][-1].startswith(path.rpartition("/")[2].capitalize()), path
        unknown = path.replace(site.id, "x").replace(token.id, "x")
        assert admin.http.get(f"/page{unknown}").status_code == 404, path
    suspend, resume, rotate, revoke = (f"/page{path}" for path in acts)
    assert admin.send(suspend).status_code == 303
    assert next(iter(client.sites())).suspended_at
    assert admin.send(resume).status_code == 303
    (secret,) = re.findall(r'class="secret">(.*?)<', admin.send(rotate).text)
    # Both secrets are valid for a while. Of a third one the page says what it ends.
    assert "the secret from then, valid for another" in admin.http.get(rotate).text
    renewed = coordinator.bare({"Authorization": f"Bearer {secret}"})
    assert renewed.get("/v1/workers").status_code == 200
    worker.enrol()
    assert admin.send(revoke).status_code == 303
    assert renewed.get("/v1/workers").status_code == 401
    assert [admin.http.get(path).status_code for path in (rotate, revoke)] == [409, 409]
    tokens = admin.see("/tokens")
    assert secret not in tokens.text
    (row,) = [row for row in tokens.rows if row[0] == token.name]
    assert (row[1:4], row[6]) == (["revoked", "site", "a"], "never")
    actions = [entry.action for entry in client.audit() if entry.actor.endswith("test-admin")]
    assert actions[-4:] == ["site.suspend", "site.resume", "token.rotate", "token.revoke"]


# ---------------------------------------------------------------- what is shown


def test_a_part_of_a_page_is_what_changes_of_it(admin: Person) -> None:
    whole, part = (admin.http.get(f"/page/{query}").text for query in ("", "?part=live"))
    assert part.startswith('<div id="live"')
    assert "<html" not in part

    def without_times(text: str) -> str:
        return re.sub(r"\d+(\.\d+)? (s|min|GB|%|kB|MB)\b|\d+%", "", text)

    assert without_times(part.strip()) in without_times(whole)


def test_pages_of_a_run_show_what_the_api_shows(standing: LiveCoordinator, wards: str) -> None:
    admin = signed_in(standing)
    shown = admin.see(f"/runs/{wards}")
    assert shown.parts["h1"] == ["wards paused"]
    assert shown.facts["Versions"] == "1 of 3"
    assert shown.facts["Accuracy"].startswith("0.75 version 1, 2 of 2 sites; worst site 0.75")
    assert {"Accuracy", "Loss", "Bytes by round"} <= {*shown.parts["h2"]}
    absent = [item.partition(":")[0] for item in shown.parts["li"] if item.startswith("No ")]
    assert absent == ["No layers by site", "No warm-up signals", "No kernel drift"]
    # An abandoned attempt is shown with its reason.
    second, first = shown.rows[-2:]
    assert (second[0], second[2].split()[0], second[3]) == ("2", "abandoned", "0 of 2")
    assert (first[:3], first[3]) == (["1", "warm-up", "committed"], "2 of 2")
    round_ = admin.see(f"/runs/{wards}/rounds/1")
    assert [(row[:3]) for row in round_.rows[1:]] == [[f"{site}/w", "merged", "done"] for site in "ab"]
    assert "Secure sum: what each party saw" not in round_.parts["h2"]
    assert len(admin.see(f"/runs/{wards}/rounds").rows) == 1 + 2
    assert admin.http.get(f"/page/runs/{wards}/rounds/9").status_code == 404
    assert [row[6] for row in admin.see("/sites").rows if row[0] == "w"] == ["1.2.3+ours newer"] * 2
    assert "2 workers of version 1.2.3+ours newer" in admin.see("/sites").text
    failures = admin.see("/failures")
    assert failures.parts["summary"][0].startswith("failed worker-failed: b/w wards: ")
    assert failures.parts["h3"] == ["wards", "wards, round 2"]
    overview = admin.see("/")
    assert {"wards is paused", "1 task failed within a day"} <= {*overview.parts["h3"]}
    assert "abandoned the round" in [row[3] for row in admin.see(f"/audit?run={wards}").rows]
    assert "wards" in [row[0] for row in admin.see("/storage").rows]
    # The overview has a list of sites with their states, and a curve.
    assert [item for item in overview.parts["li"] if item in ("a waiting", "b waiting")] == ["a waiting", "b waiting"]
    assert 'role="img" aria-label="Accuracy from 0.5 to 0.75"' in admin.http.get("/page/").text
    assert [row[0] for row in overview.rows[1:]] == ["wards"]


def test_alike_matters_and_alike_failures_fill_no_page(coordinator: LiveCoordinator, admin: Person) -> None:
    run = worked(coordinator)
    for name in "pqrst":
        coordinator.client().set_run_state(idle(coordinator, name=name).id, "paused")
    assert "3 more like this" in admin.see("/").parts["summary"]
    problem = {"type": "about:blank", "code": "out-of-memory", "title": "t", "status": 422, "retryable": False,
               "detail": "3 GB asked", "remedy": "Lower batch_size."}  # fmt: skip
    with coordinator.services.database.transaction() as session:
        count = session.execute(update(TaskRow).values(state="failed", problem=problem)).rowcount
    (line,) = admin.see("/failures").parts["summary"]
    assert line.startswith(f"failed out-of-memory: {count} at 2 workers wards: 3 GB asked")
    told = {(row[3], row[4]) for row in admin.see(f"/audit?run={run}").rows}
    assert {("began the task", "a/w, training from version 0 of wards"), ("committed the round", "round 1 of wards"),
            ("created the run", "wards")} <= told  # fmt: skip


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
        admin.see(path)
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
    text = admin.http.get(f"{place}?metric=loss&x=bytes").text
    assert re.findall(r'aria-current="true">(Loss|Accuracy|bytes|version)<', text) == ["Loss", "bytes"]
    shown = admin.see(f"/runs/{wards}?metric=nonsense")
    assert ("Loss" in shown.parts["h2"], shown.parts["summary"].count("Accuracy as a table")) == (True, 1)
    assert "Accuracy" not in admin.see(f"/runs/{wards}?metric=loss&x=bytes").parts["h2"]
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
    assert [label.text for label in root.findall(".//{*}text")][-3:] == ["global", "a", "b"]
    assert admin.http.get(f"{place}/charts/nothing.svg").status_code == 404


def test_the_best_version_and_the_latest_scores_are_among_all_that_were_evaluated(
    coordinator: LiveCoordinator, admin: Person
) -> None:
    run, other = worked(coordinator), idle(coordinator, name="other").id
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
    shown = admin.see(f"/runs/{run}")
    assert shown.facts["Best version"].startswith("31 Accuracy 0.97 at 2 of 2 sites")
    assert shown.facts["Accuracy"].startswith("0.8 version 205, 2 of 2 sites")
    # Versions 0, 1 and these 68 are evaluated, of which every second is shown, with the best and the last.
    numbers = [int(row[0]) for row in shown.rows if row[0].isdecimal()]
    assert numbers[:37] == sorted({0, *range(4, 203, 6), 31, 205}, reverse=True)
    row = next(row for row in admin.see(f"/runs/compare?run={run}&run={other}").rows if row[0] == "wards")
    assert (row[3].startswith("Accuracy 0.97"), row[4]) == (True, "31")
    # If sites measured different versions, the page says by which the best was chosen.
    with coordinator.services.database.transaction() as session:
        evaluated = select(TaskRow, SiteRow.name).join(WorkerRow, TaskRow.worker_id == WorkerRow.id).join(SiteRow)
        for task, site in session.execute(evaluated.where(TaskRow.kind == "evaluate")).all():
            task.metrics = {"accuracy": 0.9 - 0.001 * task.version_number if site == "a" else 0.1}
            task.state = "failed" if site == "b" and task.version_number else task.state
    assert admin.see(f"/runs/{run}").facts["Best version"].startswith("0 Accuracy 0.9 at 1 of 2 sites: a; ")


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
    names = re.findall(r"\?metric=(\w+)&", " ".join(admin.see(f"/runs/{run}").links))
    assert len(set(names)) <= 64 + 1
    # Both sites measured these.
    assert [*common, "training_loss"] == [name for name in dict.fromkeys(names) if not re.search("_[01]", name)]
    compared = admin.see(f"/runs/compare?run={run}&run={idle(coordinator, name='other').id}")
    assert len(set(re.findall(r"metric=(\w+)&", " ".join(compared.links)))) <= 64


# ---------------------------------------------------------------- lists and filters


def test_runs_are_found_by_their_tags_method_and_text(coordinator: LiveCoordinator) -> None:
    person, client = signed_in(coordinator, "orchestrator"), coordinator.client()
    idle(coordinator, name="other", dataset="x-ray", method=MethodSpec(name="fedper"))
    run, admin = idle(coordinator, name="wards"), signed_in(coordinator, "admin")
    place = f"/page/runs/{run.id}/notes"
    assert admin.send(place, tags="pilot, 100%  pilot", note=" ").status_code == 422
    assert admin.send(place, tags="pilot, v2  pilot", note="with the new\r\nÉtude scanner").status_code == 303
    found = client.run(run.id)
    assert (found.tags, found.note) == (("pilot", "v2"), "with the new\nÉtude scanner")
    assert found.updated_at == run.updated_at
    # What another person has written meanwhile is not overwritten, nor is what is another's.
    assert admin.send(place, tags="mine", note="").status_code == 412
    assert person.send(place, old_tags="pilot v2", old_note=found.note, tags="", note="").status_code == 403
    (entry,) = [entry for entry in client.audit() if entry.action == "run.annotate"]
    assert (entry.subject, entry.detail["tags"]) == (run.id, ["pilot", "v2"])
    found_by = {"q=PILOT": ["wards"], "q=scanner": ["wards"], "q=_": [], "q=the": ["wards", "other"]}
    found_by |= {"q=ÉTUDE": ["wards"], "q=étude": ["wards"]}
    found_by |= {"method=fedper": ["other"], "dataset=none&method=": ["wards"], "state=paused": []}
    found_by |= {"state=running&q=th&dataset=x-ray": ["other"]}
    for query, names in found_by.items():
        assert [row[1].split()[0] for row in admin.see(f"/runs?{query}").rows[1:]] == names, query


def test_a_selection_of_runs_survives_sorting_and_the_next_page(
    standing: LiveCoordinator, wards: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tessera.coordinator.dashboard.runs.AT_A_TIME", 2)
    viewer = signed_in(standing, "viewer")
    others = {name: idle(standing, name=name, dataset="sorted", rounds=rounds).id
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


def test_audit_and_failures_are_filtered_and_downloaded(coordinator: LiveCoordinator, admin: Person) -> None:
    run = worked(coordinator)
    problem = {"type": "about:blank", "code": "failed", "title": "t", "status": 422, "retryable": False,
               "detail": "=cmd|' /C calc'!A0", "remedy": "none"}  # fmt: skip
    with coordinator.services.database.transaction() as session:
        failed = update(TaskRow).where(TaskRow.state == "failed")
        session.execute(failed.values(created_at=1000.0, problem=problem))

    def audited(**filters: str) -> list[list[str]]:
        answer = admin.http.get("/page/audit.csv", params=filters)
        assert answer.headers["content-disposition"] == 'attachment; filename="audit.csv"'
        return list(csv.reader(StringIO(answer.text)))[1:]

    every = audited()
    assert [int(row[0]) for row in every] == list(range(len(every), 0, -1))
    assert {(row[2], row[3]) for row in audited(who="SITE:A")} == {
        ("site:a", action) for action in ("worker.enrol", "task.lease", "task.accept")
    }
    assert {row[3] for row in audited(who="site:b", what="task.f", run=run)} == {"task.fail"}
    assert audited(who="100%_") == audited(until="1970-01-02T00:00") == audited(run="none") == []
    assert audited(since="1970-01-02T00:00", until="2999-01-01T00:00") == every
    shown = admin.see("/audit?what=task.fail&who=site")
    assert [row[3] for row in shown.rows[1:]] == ["could not do the task"]
    assert "/page/audit.csv?who=site&what=task.fail&" in shown.links
    assert admin.see("/audit?who=nothing").rows == []
    for path in ("/page/audit", "/page/failures.csv"):
        assert admin.http.get(f"{path}?since=yesterday").status_code == 422
    failures = {"": 1, "who=b/": 1, "who=a/": 0, "what=failed": 1, "what=rejected": 0, "what=x": 0,
                "until=1970-01-01T00:16": 0, "since=1970-01-01T00:16&until=1970-01-01T00:17": 1}  # fmt: skip
    for query, count in failures.items():
        assert len(admin.see(f"/failures?{query}").parts["summary"]) == count, query
        assert admin.http.get(f"/page/failures.csv?{query}").text.count("wards") == count, query
    # What a worker says is no formula to a spreadsheet.
    assert ",'=cmd|" in admin.http.get("/page/failures.csv").text


@pytest.mark.parametrize(
    ("setting", "first", "table", "shown_id", "following"),
    [
        ("records.FAILURES", "/page/failures", TaskRow, r'<li id="of-(\w+)"', r'href="([^"]+)" rel="next"'),
        ("runs.AT_A_TIME", "/page/runs", RunRow, r'name="run" value="(\w+)"', r'name="(page" value="\d+)">Next page'),
        ("workers.TOKENS", "/page/tokens", TokenRow, r"/page/tokens/(\w+)/rotate", r'name="(page" value="\d+)">Next'),
    ],
)
def test_rows_of_one_instant_are_all_on_a_page_of_the_list(
    coordinator: LiveCoordinator, admin: Person, monkeypatch: pytest.MonkeyPatch,
    setting: str, first: str, table: Any, shown_id: str, following: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(f"tessera.coordinator.dashboard.{setting}", 2)
    worked(coordinator)
    for name in "abcd":
        idle(coordinator, name=name)
    with coordinator.services.database.transaction() as session:
        session.execute(update(TaskRow).values(state="failed"))
        session.execute(update(table).values(created_at=1000.0))
        ids = set(session.scalars(select(table.id)))
    found, place = [], first
    while place:
        text = admin.http.get(place).text
        found += re.findall(shown_id, text)
        (place,) = re.findall(following, text) or [""]
        place = f"{first}?page={place[13:]}" if place.startswith("page") else unescape(place)
    assert len(ids) == len(found) > 4
    assert set(found) == ids


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
    for run in [idle(coordinator, name=name) for name in "ab"]:
        assert admin.see(f"/audit?run={run.id}").fields["run"] == run.id


def test_workers_that_need_attention_are_on_top_and_can_be_filtered(
    coordinator: LiveCoordinator, viewer: Person
) -> None:
    for site in ("a", "b"):
        for name in ("w1", "w2"):
            enrolled(coordinator, site, name=name, datasets={f"of-{site}": 1})
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

    def shown(query: str = "") -> list[str]:
        page = viewer.see(f"/sites?{query}")
        assert not any(link.endswith("/suspend") for link in page.links)
        return [row[0].split()[0] for row in page.rows[1:]]

    assert shown() == ["b", "w2", "w1", "a", "w1", "w2"]
    assert shown("health=attention") == ["b", "w2"]
    assert shown("q=OF-A&health=suspended") == ["a", "w1", "w2"]
    assert shown("q=nothing") == []
    assert viewer.http.get("/page/sites?health=dead").status_code == 422
    # A suspended site has no live worker.
    page = viewer.see("/sites")
    assert [row[1] for row in page.rows if row[0].startswith("w")] == ["silent", "well", "suspended", "suspended"]
    assert [row[0] for row in page.rows if "live" in row[0]] == ["b 1 of 2 workers live"]
    assert "a suspended" in viewer.see("/").parts["li"]


# ---------------------------------------------------------------- a live run


def test_settings_of_a_live_run_are_changed_on_its_page_unless_another_has_changed_them(
    coordinator: LiveCoordinator, admin: Person
) -> None:
    client, run = coordinator.client(), idle(coordinator)
    place = f"/page/runs/{run.id}/settings"
    fields = admin.see(f"/runs/{run.id}").fields
    old = {name: fields[name] for name in ("old_rounds", "old_quorum", "old_deadline_seconds")}
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
    assert "old_rounds" not in viewer.see(f"/runs/{run.id}").fields
    assert client.run(run.id).spec == found
    client.set_run_state(run.id, "cancelled")
    assert "old_rounds" not in admin.see(f"/runs/{run.id}").fields


def test_a_note_with_letters_that_no_page_shows_can_be_changed(coordinator: LiveCoordinator, admin: Person) -> None:
    client, run, written = coordinator.client(), idle(coordinator), "zero\u200bwidth\u202e"
    client.patch_run(run.id, RunPatch(note=written))
    old = admin.see(f"/runs/{run.id}").fields["old_note"]
    assert old == "zero\ufffdwidth\ufffd"
    # A tag is added: the note that the person left alone stays as it was written.
    place = f"/page/runs/{run.id}/notes"
    assert admin.send(place, old_note=old, note=old, tags="pilot").status_code == 303
    found = client.run(run.id)
    assert (found.tags, found.note) == (("pilot",), written)
    assert admin.send(place, old_note=old, note="new", old_tags="pilot", tags="pilot").status_code == 303
    assert client.run(run.id).note == "new"


def test_runs_are_compared_side_by_side(standing: LiveCoordinator, wards: str) -> None:
    viewer = signed_in(standing, "viewer")
    second = idle(standing, name="wards", rounds=7, cohort=Cohort(sites=("north", "south"))).id
    pair = f"run={wards}&run={second}"
    shown = viewer.see(f"/runs/compare?{pair}&x=bytes")
    results = {row[0]: row for row in reversed(shown.rows)}
    assert results[f"wards ({wards[:8]})"][3].startswith("Accuracy 0.75")
    assert results[f"wards ({second[:8]})"][3] == "not measured"
    assert {"rounds", "dataset", "method.name", "method.settings.warmup_rounds"} <= results.keys()
    assert "seed" not in results
    assert results["cohort.sites"][1:] == ["\u2013", "north, south"]
    assert 'class="notice warn"' in viewer.http.get(f"/page/runs/compare?{pair}").text
    for page in (f"runs/compare?{pair}&", f"runs/{wards}?"):
        reached = viewer.see(f"/{page}score=0.99&metric=accuracy")
        assert any("0.99 or more" in cell for row in reached.rows for cell in row)
        assert viewer.http.get(f"/page/{page}score=nan").status_code == 422
    rows = viewer.http.get(f"/page/runs/{wards}/metrics.csv?score=0.99").text
    assert "accuracy.to_0.99.reached,0.0" in rows
    for metric in ("accuracy", "loss"):
        picture = viewer.http.get(f"/page/runs/compare/chart.svg?{pair}&metric={metric}").text
        assert ET.fromstring(picture).findall(".//{*}circle[@class='best c0']") != []  # noqa: S314 (made here)
    for runs in ([wards], [wards, wards], [wards] * 2 + [f"r{n}" for n in range(7)]):
        assert viewer.http.get("/page/runs/compare", params={"run": runs}).status_code == 422
    assert viewer.http.get(f"/page/runs/compare?run={wards}&run=nothing").status_code == 404


@pytest.mark.parametrize("selection", ["refused", "uncovered"])
def test_what_a_run_with_privacy_has_spent_is_shown_by_worker_and_round(
    coordinator: LiveCoordinator, viewer: Person, selection: Literal["refused", "uncovered"]
) -> None:
    client, workers = coordinator.client(), [enrolled(coordinator, site) for site in ("a", "b")]
    private = Privacy(epsilon=3.0, delta=1e-5, clip_norm=1.0, selection=selection)
    run = start_run(client, MODEL, values(MODEL), rounds=2, privacy=private, cohort=Cohort(quorum=2))
    place = f"/runs/{run.id}"
    assert any(item.startswith("No epsilon by worker") for item in viewer.see(place).parts["li"])
    for number in (1, 2):
        for worker, spent in zip(workers, (1.25, 1.5), strict=True):
            worker.train(worker.take(), epsilon=spent * number)
        until(lambda made=number: client.run(run.id).version.number == made)
    shown = viewer.see(place)
    (title,) = [title for title in shown.parts["h2"] if title.startswith("Epsilon")]
    assert ["2", "2.5", "3"] in shown.rows, title
    bound = shown.facts["Differential privacy"]
    assert bound.startswith("epsilon 3 at delta 1e-05 for each example of each worker")
    assert ("the choice of blocks is not covered" in bound) == (selection == "uncovered")
    # What a site's data have told in all is not known here, and so not said.
    assert "epsilon" not in viewer.see("/sites").text.lower()


def test_nothing_that_a_worker_says_becomes_markup_or_controls_anything(
    coordinator: LiveCoordinator, admin: Person
) -> None:
    run, controlling = worked(coordinator), "\x1b[31m\u202egnp.exe\x9b2J"
    with coordinator.services.database.transaction() as session:
        # As a coordinator that checks less, or a person with the database at hand, might enter it.
        for worker in session.query(WorkerRow):
            worker.name = HOSTILE
            worker.declared = {**worker.declared, "device": HOSTILE + controlling, "datasets": {HOSTILE: 3}}
        for task in session.query(TaskRow):
            task.layers = [HOSTILE, "layer.0"]
    ways = [*PAGES[:-1], f"/runs/{run}", f"/runs/{run}/rounds/1", f"/runs/{run}/rounds/2", f"/runs/{run}/rounds"]
    seen = 0
    for path in ways:
        text = admin.http.get(f"/page{path}").text
        assert "<script>alert" not in text, path
        assert "<img" not in text, path
        assert not set(text) & set("\x1b\u202e\x9b"), path
        seen += "&lt;script&gt;" in text
    assert seen >= 5
    # Nor is it a template.
    assert "{{ 7 * 7 }}" in admin.http.get("/page/failures").text
    assert "\ufffd[31m\ufffdgnp.exe\ufffd2J" in admin.http.get("/page/sites").text


# ---------------------------------------------------------------- starting a run


def test_a_run_is_started_from_what_another_made(coordinator: LiveCoordinator) -> None:
    person = signed_in(coordinator, "orchestrator")
    enrolled(coordinator, "a")
    before = idle(coordinator, name="first")
    form = person.see("/runs/new?method=fedfrozen")
    assert form.options["/dataset"][1:] == ["data (1 live worker)"]
    assert form.fields["/evaluation/sites"] == "true"
    questions = person.see("/runs/new")
    assert [legend[:2] for legend in questions.parts["legend"]] == ["1.", "2.", "3."]
    assert questions.fields["dataset"] == "data"
    (start,) = re.findall(
        r'<option value="(sha256:\S+ sha256:\S+ \w+)">first', person.http.get("/page/runs/new").text
    )
    assert person.see("/runs/new?method=scaffold").fields["/training/optimizer"] == "sgd"
    given = {"method": "fedfrozen", "start": start, "request_key": "w1", "/name": "second", "/dataset": "data"}
    given |= {"/rounds": "2", "/method/settings/warmup_rounds": "1", "/cohort/quorum": "1"}
    shown = person.send("/page/runs/new", step="preview", **given)
    assert (shown.status_code, Page(shown.text).rows[1][0]) == (200, "a/w")
    assert [run.spec.name for run in coordinator.client().runs()] == ["first"]
    for _ in range(2):  # pressed twice, it is begun once
        assert person.send("/page/runs/new", step="start", **given).status_code == 303
    (made,) = [run for run in coordinator.client().runs() if run.id != before.id]
    assert (made.spec.name, made.spec.method.settings["warmup_rounds"], made.spec.rounds) == ("second", 1, 2)
    assert made.spec.version == before.version.digest
    # A copy is filled in with every setting that was given, and starts the same run but for its name.
    copied = person.see(f"/runs/new?copy={made.id}").fields
    filled = {name: value for name, value in copied.items() if name.startswith("/") and value}
    assert filled["/name"] == "second-2"
    filled |= {"method": "fedfrozen", "start": start, "request_key": "w2"}
    assert person.send("/page/runs/new", step="start", **filled).status_code == 303
    (again,) = [run for run in coordinator.client().runs() if run.spec.name == "second-2"]
    assert again.spec.model_copy(update={"name": "second"}) == made.spec
    assert person.http.get("/page/runs/new?copy=nothing").status_code == 404


def test_a_newcomer_s_form_chooses_no_model_and_no_version_of_another_run(coordinator: LiveCoordinator) -> None:
    person, client = signed_in(coordinator, "orchestrator"), coordinator.client()
    # Without a model or a data set, it shows how to make them.
    empty = person.see("/runs/new")
    assert ("start" in empty.options, empty.options["dataset"]) == (False, ["choose a data set"])
    assert "tessera run create run.toml --model my-model" in empty.text
    for site, data in (("a", "wards"), ("b", "notes")):
        enrolled(coordinator, site, datasets={data: 10})
    client.suspend_site(next(site.id for site in client.sites() if site.name == "b"))
    # Equal versions of two runs.
    for name in ("big", "small"):
        idle(coordinator, name=name)
    text, questions = person.http.get("/page/runs/new").text, person.see("/runs/new")
    assert re.findall(r'name="method" value="(\w+)"( checked)?', text)[:2] == [("fedavg", " checked"), ("ditto", "")]
    starts = dict(re.findall(r'<option value="(sha256[^"]+)"[^>]*>(big|small) ', text))
    assert sorted(starts.values()) == ["big", "small"]
    assert questions.options["start"][0] == "choose a model"
    assert "start" not in questions.fields
    for start, name in starts.items():
        form = person.http.get("/page/runs/new", params={"method": "fedavg", "start": start}).text
        assert re.findall(r'<option value="sha256[^"]+" selected>(\w+)', form) == [name]
    # All that there is, and nothing else can be typed.
    assert questions.options["dataset"] == ["choose a data set", "notes (no live worker)", "wards (1 live worker)"]


@pytest.mark.parametrize(
    ("training", "fact", "filled"),
    [
        (
            {"rates": {"head": 10}, "keep_moments": True, "label_smoothing": 0.1, "class_weights": [1, 2.5]},
            ("Optimizer", "times 10 for head, moments kept between rounds, labels smoothed by 0.1, weighted classes"),
            {"/training/rates": '{"head": 10.0}', "/training/class_weights": "[1.0, 2.5]"},
        ),
        # A copy keeps the nulls that were given.
        (
            {"batch_size": None, "epochs": None, "steps": 7},
            ("Training", "batches of all"),
            {"/training/batch_size": "null", "/training/epochs": "null", "/privacy/epsilon": ""},
        ),
    ],
)
def test_settings_of_local_training_are_shown_and_kept_in_a_copy(
    coordinator: LiveCoordinator, training: dict[str, Any], fact: tuple[str, str], filled: dict[str, str]
) -> None:
    person, settings = signed_in(coordinator, "orchestrator"), Training.model_validate(training)
    before = idle(coordinator, training=settings)
    fields = person.see(f"/runs/new?copy={before.id}").fields
    assert {name: fields[name] for name in filled} == filled
    given = {name: value for name, value in fields.items() if name.startswith("/") and value}
    given |= {"method": "fedavg", "start": f"{before.spec.model} {before.spec.version}"}
    preview = Page(person.send("/page/runs/new", step="preview", **given).text)
    for shown in (person.see(f"/runs/{before.id}"), preview):
        assert shown.facts[fact[0]].endswith(fact[1])
    assert person.send("/page/runs/new", step="start", **given).status_code == 303
    (spec,) = [run.spec for run in coordinator.client().runs() if run.id != before.id]
    assert spec.training == settings


def test_a_name_and_a_data_set_of_digits_alone_are_text(coordinator: LiveCoordinator) -> None:
    person, before = signed_in(coordinator, "orchestrator"), idle(coordinator)
    given = {"method": "fedavg", "start": f"{before.spec.model} {before.spec.version}", "/name": "2024"}
    given |= {"/dataset": "007", "/rounds": "2", "/max_examples": "9", "/max_norm_of_median": "unlimited"}
    assert person.send("/page/runs/new", step="start", **given).status_code == 303
    (spec,) = [run.spec for run in coordinator.client().runs() if run.id != before.id]
    assert (spec.name, spec.dataset, spec.rounds) == ("2024", "007", 2)
    assert (spec.max_examples, spec.max_norm_of_median) == (9, "unlimited")


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
    wrong = {"f-name", "f-rounds", "f-dataset", "f-method-settings-within", "f-server_optimizer"}
    assert wrong <= {*re.findall(r'id="([\w-]+)-error"', answer.text)}
    assert Page(answer.text).fields["/name"] == "no good"
    given |= {"/name": "good", "/rounds": "1", "/dataset": "d", "/cohort/quorum": "1", "/server_optimizer": ""}
    given |= {"/method/settings/within": "", "/model": "sha256:" + "0" * 64, "/version": "sha256:" + "0" * 64}
    answer = person.send("/page/runs/new", step="preview", method="safl", **given)
    assert 'id="f-method-settings-share-error"' in answer.text
    given |= {"start": f"{given['/model']} {given['/version']}"}
    answer = person.send("/page/runs/new", step="preview", method="safl", **given)
    assert 'id="start-error"' in answer.text


# ---------------------------------------------------------------- charts and forecasts


@pytest.mark.parametrize(
    ("spec", "what"),
    [
        ({"evaluation": None}, "No scores"),
        ({"evaluation": Evaluation(sites=True)}, "No scores"),
        ({"method": MethodSpec(name="fedfrozen", settings={"warmup_rounds": "auto"})}, "No warm-up signals"),
        ({"method": MethodSpec(name="safl")}, "No attention entropy"),
        ({"signals": {"drift": True}}, "No client drift by role"),
    ],
)
def test_what_is_not_there_says_why(standing: LiveCoordinator, spec: dict[str, Any], what: str) -> None:
    items = signed_in(standing, "viewer").see(f"/runs/{idle(standing, **spec).id}").parts["li"]
    assert [item.startswith(f"{what}: ") and len(item) > len(what) + 9 for item in items if what in item] == [True]


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
    run = idle(coordinator, method=own_method)
    items = viewer.see(f"/runs/{run.id}").parts["li"]
    assert {"No distance moved: no version has any yet.", "No wind: they are measured if weather is bad."} <= {*items}
    with coordinator.services.database.transaction() as session:
        session.get_one(VersionRow, (run.id, 0)).scalars = {"moved.10": 2.0, "moved.9": 1.0, "secret": 3.0}
    shown = viewer.see(f"/runs/{run.id}")
    assert "Distance moved (nm)" in shown.parts["h2"]
    assert ["0", "1", "2"] in shown.rows
    assert "Of each layer." in shown.text
    assert "secret" not in shown.text


def test_progress_becomes_a_forecast_on_the_page(coordinator: LiveCoordinator, viewer: Person) -> None:
    worker, run = enrolled(coordinator, "a"), idle(coordinator, dataset="data", rounds=2)
    task = worker.take()
    at = Progress(phase="training", step=39, steps=40, phase_seconds={"training": 3900.0})
    worker.client.heartbeat(task.id, task.token, at)
    first = viewer.see(f"/runs/{run.id}")
    # 39 steps took 3900 s, so the last one takes 100 s.
    assert any("training step 39 of 40, 1 min 40 s left" in item for item in first.parts["li"])
    assert "Left, about" not in first.facts
    worker.train(task)
    task = worker.take()
    worker.client.heartbeat(task.id, task.token, Progress(phase="training", step=30, steps=40, loss=0.125))
    shown = viewer.see(f"/runs/{run.id}")
    assert any("training step 30 of 40, loss 0.125" in item for item in shown.parts["li"])
    assert "Left, about" in shown.facts
    text = viewer.http.get(f"/page/runs/{run.id}").text
    assert '<progress aria-label="a/w: steps" max="40" value="30">' in text


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
    worker, run = enrolled(coordinator, "a"), idle(coordinator, dataset="data")
    task = worker.take()
    worker.client.heartbeat(task.id, task.token, Progress.model_validate(reported))
    for path in ("/", f"/runs/{run.id}", f"/runs/{run.id}/rounds/1"):
        assert shown in viewer.see(path).text, path


def test_a_bar_of_a_round_shows_the_phases_that_its_worker_reported(coordinator: LiveCoordinator) -> None:
    worker, run = enrolled(coordinator, "a"), idle(coordinator, dataset="data", rounds=2)
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


# ---------------------------------------------------------------- a worker


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
    worker = enrolled(coordinator, "a", advertised_policy=policy)
    idle(coordinator, dataset="data", privacy=Privacy(epsilon=3.0, delta=1e-5, clip_norm=1.0))
    task, site = worker.take(), coordinator.http("site", "a")
    place = next(link for link in admin.see("/sites").links if "/workers/" in link).removeprefix("/page")

    def shown(told: object) -> Page:
        beat = {"token": task.token, "live": told}
        assert site.post(f"/v1/tasks/{task.id}/heartbeat", json=beat).status_code == 200
        return admin.see(place)

    for told in UNREADABLE:
        page = shown(told)
        assert not {"GPU memory", "GPU", "Processors"} & page.facts.keys(), told
        assert "share_log" in page.text, told
    for name, value in {
        "other": "epsilon 5.5 left of 8 at delta 1e-05 for each example",
        "all data sets": "epsilon 6.75 left of 9",
        "Hours": "06:00-22:00 (UTC+0:00)",
        "Privacy of seven days": "at most epsilon 7 at delta 1e-05 for each example, on each data set",
        "Figures": "rounded in all runs",
    }.items():
        assert page.facts[name].startswith(value), name
    assert "Revoke the token" in page.parts["a"]
    page = shown({**LIVE, "watts": 300})
    assert (page.facts["GPU"], page.facts["GPU memory"]) == ("Tensor 9", "20 GB of 80 GB")
    assert "training" in page.parts["li"][-1]
    # The load is that of the whole machine, and may be more than its processors.
    assert shown({"cpus": 4, "cpu_load": 5.3}).facts["Processors"].startswith("load 5.3")
    # What is told takes the place of what was told before.
    assert "GPU" not in shown({"cpus": 4}).facts
    worker.client.fail(task.id, Failure(token=task.token, code="out-of-memory", detail="it does not fit"))
    assert "it does not fit" in admin.see(place).rows[-1][-1]
    required = {"require_secure_sums": True, "require_client_privacy": Budget(epsilon=2, delta=1e-4)}
    enrolled(coordinator, "a", advertised_policy=AdvertisedPolicy(**required))
    facts = admin.see(place).facts
    assert facts["Secure sums"].startswith("required")
    assert facts["Privacy of the site"] == "at most epsilon 2 at delta 0.0001, in secure sums"
    assert not [text for text in viewer.see(place).parts["a"] if text.startswith("Revoke")]


def test_values_that_no_float_and_no_date_can_hold_are_dashes_on_a_workers_page(
    coordinator: LiveCoordinator, viewer: Person
) -> None:
    huge = {"max_minutes_per_day": 1e308, "max_epochs": 10**400, "max_model_bytes": 10**400}
    worker = enrolled(coordinator, "a", advertised_policy=AdvertisedPolicy.model_validate(huge))
    idle(coordinator, dataset="data")
    task, site = worker.take(), coordinator.http("site", "a")
    place = next(link for link in viewer.see("/sites").links if "/workers/" in link).removeprefix("/page")
    # With and without an offset: earlier and later than any date in UTC.
    for instant in ("0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "0001-01-01T00:00:00"):
        beat = {"token": task.token, "live": {"started_at": instant, "log": [{"at": instant, "event": "started"}]}}
        assert site.post(f"/v1/tasks/{task.id}/heartbeat", json=beat).status_code == 200
        page = viewer.see(place)
        assert any("worker started" in item for item in page.parts["li"]), instant
    assert sum(value == "at most \u2013" for value in page.facts.values()) == 3


# ---------------------------------------------------------------- secure sums


def test_a_secure_sum_shows_who_sent_who_helped_and_what_was_opened(coordinator: LiveCoordinator) -> None:
    ring, viewer = Ring(coordinator), signed_in(coordinator, "viewer")
    place = f"/runs/{ring.run.id}"
    assert viewer.see(place).facts["Secure sums"] == "over 3 sites or more, opened by site-00, site-01, site-02"

    def shown() -> Page:
        return viewer.see(f"{place}/rounds/1")

    ring.sites[0].train(1.0, 10)
    assert shown().facts["Sent under masks"].startswith("1 site")
    for site in ring.sites[1:]:
        site.train(1.0, 5)
    until(lambda: shown().facts["Sent under masks"].startswith("3 sites"))
    for site in ring.sites:
        assert site.help("agree").state == "accepted"
        assert shown().facts["Set that was opened"].startswith("none")
    assert shown().facts["Signed the set"] == "3 of 3 helpers; 3 must"
    ring.open()
    until(lambda: ring.now().state == "completed")
    page, blocks = shown(), len(ring.model.blocks)
    assert re.match("[0-9a-f]{12} ", page.facts["Set that was opened"])
    assert f"{blocks} blocks: the sum of 3 sites" in page.parts["li"]
    parties = {row[0]: row[1] for row in page.rows[1:8]}
    assert parties["coordinator"] == "subtracted the masks"
    assert parties["site-01"].startswith(f"sent {blocks} blocks under masks, weight 2,")
    assert all(parties[f"site-0{n} (helper)"].startswith("signed the set") for n in range(3))
    assert sum("summed up the masks of" in did for did in parties.values()) >= 2


def test_blocks_that_too_few_sites_sent_are_counted_as_not_opened() -> None:
    # Places 0 to 5: the first envelope has 0, 1 and 4, the second has 1 and 4, the third has 1 and 5.
    assert _terms_by_count(["13", "12", "22"]) == ((3, 1), (2, 1), (1, 2))
    assert _terms_by_count(["", "1"]) == ((1, 1),)
    assert _terms_by_count([]) == ()
