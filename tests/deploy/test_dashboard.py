"""The dashboard for Grafana shows what there is, and is whole. It was not loaded into a Grafana here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import promql_parser
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.coordinator import LiveCoordinator

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


@pytest.fixture(scope="module")
def dashboard(deploy: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((deploy / "grafana" / "tessera.json").read_text())
    return found


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def selectors(expression: Any) -> Iterator[Any]:
    """Every series that an expression reads."""
    found: list[Any] = []

    def visit(node: Any) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            found.append(node)

    promql_parser.walk(expression, pre_visit=visit)
    yield from found


def parsed(expression: str) -> Any:
    return promql_parser.parse(expression.replace("$__rate_interval", "5m"))


def test_every_expression_reads_series_that_there_are(
    dashboard: dict[str, Any], coordinator: LiveCoordinator
) -> None:
    families = list(text_string_to_metric_families(coordinator.http("viewer").get("/metrics").text))
    suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}
    there = {family.name + suffix for family in families for suffix in suffixes.get(family.type, ("",))}
    read = {
        selector.name
        for panel in panels(dashboard)
        for target in panel["targets"]
        for selector in selectors(parsed(target["expr"]))
    }
    assert read - there == set()
    assert len(read) > 20


def test_each_panel_has_an_id_a_place_of_its_own_and_a_data_source_that_is_chosen(dashboard: dict[str, Any]) -> None:
    everything = dashboard["panels"]
    assert len({panel["id"] for panel in everything}) == len(everything)
    assert len({panel["title"] for panel in everything}) == len(everything)
    for panel in everything:
        place = panel["gridPos"]
        assert place["x"] >= 0
        assert place["x"] + place["w"] <= 24, panel["title"]
    for one, other in combinations(everything, 2):
        a, b = one["gridPos"], other["gridPos"]
        apart = (
            a["x"] + a["w"] <= b["x"]
            or b["x"] + b["w"] <= a["x"]
            or a["y"] + a["h"] <= b["y"]
            or b["y"] + b["h"] <= a["y"]
        )
        assert apart, (one["title"], other["title"])
    for panel in panels(dashboard):
        assert panel["datasource"] == DATASOURCE
        assert {target["datasource"]["uid"] for target in panel["targets"]} == {DATASOURCE["uid"]}
        ids = [target["refId"] for target in panel["targets"]]
        assert len(set(ids)) == len(ids)


def test_every_variable_is_defined_and_used(dashboard: dict[str, Any]) -> None:
    defined = {variable["name"] for variable in dashboard["templating"]["list"]}
    assert defined == {"datasource", "job", "run"}
    text = json.dumps(dashboard["panels"])
    assert [name for name in defined if f"${name}" not in text and f"${{{name}}}" not in text] == []
