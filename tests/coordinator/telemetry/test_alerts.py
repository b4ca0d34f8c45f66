"""The alerts for Prometheus name series that exist."""

from __future__ import annotations

import re
import threading
from typing import Any

import promql_parser
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.support.coordinator import LiveCoordinator, until
from tests.support.federation import Cohort, ScriptedWorker, small_model, start_run, values
from tests.support.paths import ROOT

(GROUP,) = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yaml").read_text())["groups"]
RULES: list[dict[str, Any]] = GROUP["rules"]


def samples(coordinator: LiveCoordinator, begins: str = "tessera_") -> dict[str, list[tuple[dict[str, str], float]]]:
    """Return what `/metrics` shows, by name. Tests before this one left many series, which take long to parse."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    shown = coordinator.http("viewer").get("/metrics").text.splitlines(keepends=True)
    for family in text_string_to_metric_families("".join(line for line in shown if line.startswith(begins))):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_each_alert_is_whole_and_has_a_name_of_its_own() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES) > 10
    for rule in RULES:
        assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}, rule["alert"]
        assert set(rule["annotations"]) == {"summary", "action"}, rule["alert"]
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert re.fullmatch(r"\d+[mh]", rule["for"])


def test_every_expression_is_promql_and_names_series_that_there_are(standing: LiveCoordinator) -> None:
    there = samples(standing)
    for rule in RULES:
        promql_parser.parse(rule["expr"])
        named = re.findall(r"\b(tessera_\w+|up)\b(?:\{(\w+)=\"([^\"]+)\"\})?", rule["expr"])
        assert named, rule["alert"]
        for name, label, value in named:
            if name == "up":
                continue
            assert name in there, f"there is no {name}"
            found = any(labels.get(label) == value for labels, _ in there[name])
            assert found or not label, f"{name}{{{label}={value}}}"


def test_metrics_tell_of_rounds_that_are_late(coordinator: LiveCoordinator) -> None:
    def value(name: str, **labels: str) -> float:
        return next(value for found, value in samples(coordinator, name)[name] if found == labels)

    client, model = coordinator.client(), small_model()
    assert value("tessera_ready") == 1
    assert value("tessera_round_overdue_seconds") == value("tessera_merging_seconds") == 0
    ScriptedWorker(coordinator.client("site", "a")).enrol()
    run = start_run(client, model, values(model), cohort=Cohort(size=1, deadline_seconds=3600))
    until(lambda: value("tessera_rounds", state="open") == 1)
    assert value("tessera_round_overdue_seconds") == 0
    database = coordinator.services.database
    conductor, looked = coordinator.services.conductor, threading.Event()
    # When this is called, the last look has ended.
    conductor.step = lambda _: looked.set()
    conductor.wakeups.call()
    until(looked.is_set)
    with database.transaction() as session:
        session.connection().exec_driver_sql("UPDATE rounds SET deadline_at = deadline_at - 3700")
    assert 100 <= value("tessera_round_overdue_seconds") < 200
    with database.transaction() as session:
        session.connection().exec_driver_sql("UPDATE rounds SET state = 'merging'")
        session.connection().exec_driver_sql(
            "UPDATE audit SET at = at - 50, action = 'round.close' WHERE action = 'round.open'"
        )
    assert 50 <= value("tessera_merging_seconds") < 150
    assert value("tessera_rounds", state="merging") == 1
    assert client.run(run.id).state == "running"
