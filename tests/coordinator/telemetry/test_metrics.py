"""What Prometheus is told, and that the documents say the same."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import closing

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tessera.coordinator.db.engine import Database
from tessera.coordinator.db.stats import Commits, RoundDurations
from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import Evaluation
from tests.support.coordinator import LiveCoordinator, until
from tests.support.federation import ScriptedWorker, small_model, start_run, values
from tests.support.paths import ROOT
from tests.support.storage import statements

MONITORING = ROOT / "docs" / "operating" / "monitoring.md"


def metrics_of(coordinator: LiveCoordinator) -> dict[str, Metric]:
    text = coordinator.http("viewer").get("/metrics").text
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(family: Metric, suffix: str = "", **labels: str) -> float:
    """The one sample with these labels, whatever others it has."""
    (found,) = [
        sample.value
        for sample in family.samples
        if sample.name == family.name + suffix and labels.items() <= sample.labels.items()
    ]
    return found


def counted(families: dict[str, Metric], **labels: str) -> float:
    """The number of requests with these labels."""
    family = families.get("tessera_request_duration_seconds")
    samples = family.samples if family else ()
    return sum(s.value for s in samples if s.name.endswith("_count") and labels.items() <= s.labels.items())


def named(family: Metric) -> str:
    """As the documents write it: counters with `_total`, and the labels that any of its samples has."""
    labels = {label for sample in family.samples for label in sample.labels} - {"le"}
    name = family.name + ("_total" if family.type == "counter" else "")
    return name + (f"{{{','.join(sorted(labels))}}}" if labels else "")


def ours(families: Iterable[Metric]) -> list[Metric]:
    return [family for family in families if family.name.startswith("tessera_")]


@pytest.fixture(scope="module")
def busy_metrics(standing: LiveCoordinator) -> list[Metric]:
    """What one tells that has committed a round, has another open, and has refused something."""
    client, model = standing.client(), small_model()
    evaluation = Evaluation(dataset="data", sites=True)
    start_run(client, model, values(model), name="cats", rounds=5, cohort=Cohort(size=1), evaluation=evaluation)
    worker = ScriptedWorker(standing.client("site", "a"), kinds=("train", "evaluate"), held_out={"data": 4})
    for _ in range(4):
        task = worker.take()
        if task.kind == "train":
            worker.train(task)
        else:
            worker.evaluate(task, accuracy=0.5 if task.held_out else 0.25, of_a_sites_own_invention=1.0)
        if task.round == 2:
            break
    standing.http().get("/nowhere")
    return ours(metrics_of(standing).values())


def test_a_committed_round_is_told_of_with_its_bytes_and_measurements(coordinator: LiveCoordinator) -> None:
    client, model = coordinator.client(), small_model()
    spec = {"rounds": 2, "cohort": Cohort(size=1), "evaluation": Evaluation(dataset="data")}
    run = start_run(client, model, values(model), name="cats", **spec)
    worker = ScriptedWorker(coordinator.client("site", "a"), kinds=("train", "evaluate"))
    done: list[str] = []
    while "train" not in done or "evaluate" not in done:
        task = worker.take()
        done.append(task.kind)
        if task.kind == "train":
            worker.train(task)
        else:
            worker.evaluate(task, accuracy=0.25, invented=1.0)
    until(lambda: client.run(run.id).version.number == 1)
    families = metrics_of(coordinator)
    task = next(task for task in client.round(run.id, 1).tasks)
    this = {"run": run.id, "name": "cats"}
    for name, expected in {
        "version": 1,
        "rounds": 2,
        "cohort": 1,
        "updates": 1,
        "upload_bytes": task.upload_bytes,
        "download_bytes": task.download_bytes,
    }.items():
        assert value(families[f"tessera_run_{name}"], **this) == expected, name
    assert task.upload_bytes > 0
    measured = families["tessera_run_metric"].samples
    assert [(s.labels["metric"], s.labels["source"], s.value) for s in measured] == [("accuracy", "central", 0.25)]
    assert value(families["tessera_round_duration_seconds"], "_count") == 1
    merging, whole = families["tessera_merge_duration_seconds"], families["tessera_round_duration_seconds"]
    assert 0 <= value(merging, "_sum") <= value(whole, "_sum")
    assert 0 <= value(families["tessera_site_silent_seconds"], site="a") < 60


def test_the_cohort_of_a_round_is_as_many_sites_however_many_workers_each_has(coordinator: LiveCoordinator) -> None:
    client, model = coordinator.client(), small_model()
    names = {"a": ("1", "2", "3"), "b": ("1",), "c": ("1",)}
    workers = [
        ScriptedWorker(coordinator.client("site", site), name=name).enrol() for site in names for name in names[site]
    ]
    cohort = Cohort(size=3, quorum=2, workers_per_site=3)
    run = start_run(client, model, values(model), name="cats", rounds=2, cohort=cohort)
    *trained, last = [(worker, worker.take()) for worker in workers]
    for worker, task in trained:
        worker.train(task)
    last[0].fail(last[1])
    until(lambda: client.run(run.id).version.number == 1)
    families = metrics_of(coordinator)
    # Five workers of three sites were asked, and four of two sent something.
    assert value(families["tessera_run_cohort"], run=run.id) == 3
    assert value(families["tessera_run_updates"], run=run.id) == 2
    assert value(families["tessera_run_upload_bytes"], run=run.id) == sum(
        task.upload_bytes for task in client.round(run.id, 1).tasks
    )


def test_tasks_are_told_by_kind_and_state_while_their_round_is_open(coordinator: LiveCoordinator) -> None:
    client, model = coordinator.client(), small_model()
    run = start_run(client, model, values(model), cohort=Cohort(size=1))
    worker = ScriptedWorker(coordinator.client("site", "a"))
    task = worker.take()
    families = metrics_of(coordinator)
    assert value(families["tessera_tasks"], kind="train", state="leased") == 1
    worker.train(task)
    until(lambda: client.run(run.id).state == "completed")
    families = metrics_of(coordinator)
    assert families["tessera_tasks"].samples == []
    assert families["tessera_run_version"].samples == []


def test_requests_are_counted_by_the_template_of_their_route(coordinator: LiveCoordinator) -> None:
    http = coordinator.http()
    places = [
        {"method": "GET", "route": "/v1/runs/{run_id}", "status": "4xx"},
        {"method": "none", "route": "none", "status": "4xx"},
    ]

    def counts() -> list[float]:
        families = metrics_of(coordinator)
        return [counted(families, **labels) for labels in places]

    # What counts is this process, and other tests were in it.
    before = counts()
    for _ in range(3):
        http.get("/v1/runs/nothing")
    http.request("PROPFIND", "/a/path/of/anybodys")
    http.request("PROPFIND", "/v1/runs")
    # After the answer.
    until(lambda: counts() == [before[0] + 3, before[1] + 2])
    family = metrics_of(coordinator)["tessera_request_duration_seconds"]
    assert value(family, "_sum", **places[0]) > 0
    assert not [s for s in family.samples if "body" in s.labels["route"] or s.labels["method"] == "PROPFIND"]


def test_a_request_that_fails_counts_as_a_fault_of_the_coordinator(coordinator: LiveCoordinator) -> None:
    labels = {"method": "GET", "route": "/v1/runs", "status": "5xx"}
    http, before = coordinator.http(), counted(metrics_of(coordinator), **labels)
    with coordinator.services.database.engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE runs RENAME TO walks")
    assert http.get("/v1/runs").status_code >= 500
    with coordinator.services.database.engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE walks RENAME TO runs")
    until(lambda: counted(metrics_of(coordinator), **labels) > before)


def test_the_commits_of_rounds_are_told_once_each_and_a_new_process_reads_none_of_the_past(
    coordinator: LiveCoordinator,
) -> None:
    client, model = coordinator.client(), small_model()
    run = start_run(client, model, values(model), rounds=2, cohort=Cohort(size=1))
    worker = ScriptedWorker(coordinator.client("site", "a"))
    heard: list[RoundDurations] = []
    commits = Commits(0.0, heard.append)
    for number in (1, 2):
        worker.train(worker.take())
        until(lambda number=number: client.run(run.id).version.number == number)  # type: ignore[misc]
        with coordinator.services.database.snapshot() as session:
            commits.follow(session)
            commits.follow(session)
        assert len(heard) == number
    assert all(one.merge_seconds <= one.round_seconds for one in heard)
    anew: list[RoundDurations] = []
    # One that nobody else uses meanwhile.
    database = Database(coordinator.services.database.url.render_as_string(hide_password=False))
    with closing(database), database.snapshot() as session, statements(database) as asked:
        Commits(database.now(), anew.append).follow(session)
        assert anew == []
        # Where it begins, where it ends, and the commits between.
        assert sum(one.startswith("SELECT") for one in asked) == 3


def test_every_metric_is_described_with_its_labels_and_no_other_is(busy_metrics: list[Metric]) -> None:
    described = {
        name + (f"{{{','.join(sorted(labels.split(',')))}}}" if labels else "")
        for row in re.findall(r"^\| (`tessera_.*?) \|", MONITORING.read_text(), re.MULTILINE)
        for name, labels in re.findall(r"`(tessera_\w+)(?:{([\w,]+)})?`", row)
    }
    assert {named(family) for family in busy_metrics} == described


def test_names_have_one_prefix_and_base_units(busy_metrics: list[Metric]) -> None:
    for family in busy_metrics:
        assert not re.search(r"_(ms|milliseconds|minutes|hours|kb|mb|percent)$", family.name), family.name
        if family.type == "histogram":
            assert family.name.endswith("_seconds"), family.name
