"""Charts: shapes where the figures say, text that is escaped, and nothing that the page's policy refuses."""

from __future__ import annotations

import re
from typing import Literal
from xml.etree import ElementTree as ET

import pytest

from tessera.coordinator.dashboard.templating import size
from tessera.shared.metrics.svg_charts import (
    HEIGHT,
    ROOM,
    TOP,
    Band,
    Interval,
    Panel,
    Series,
    bars,
    heat,
    lines,
    nice,
    svg_file,
    timeline,
)

HOSTILE = "<script>&\"'"


def parsed(picture: str) -> ET.Element:
    """The picture as XML, which it must be; of no attribute that would be style or script."""
    root = ET.fromstring(picture)  # noqa: S314 (made here)
    names = {name for element in root.iter() for name in element.attrib}
    assert not {name for name in names if name == "style" or name.startswith("on")}
    assert "script" not in {element.tag for element in root.iter()}
    assert root.find("title") is not None
    assert root.find("desc") is not None
    return root


def test_a_line_goes_from_corner_to_corner() -> None:
    root = parsed(lines("x", HOSTILE, [Series(HOSTILE, {0: 0.0, 10: 1.0}, main=True)], along="version"))
    (path,) = [element.attrib["d"] for element in root.iter("path")]
    assert path == f"M0.0 {HEIGHT - 30:.1f} L1000.0 {TOP:.1f}"
    assert root.findtext("title") == HOSTILE
    assert root.findtext("desc") == f"By version. Last values: {HOSTILE}: 1 at 10."


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ((0.99991, 0.99995), ["0.99991", "0.99992", "0.99993", "0.99994", "0.99995"]),
        ((0.99999971, 0.9999999), ["0.9999997", "0.99999975", "0.9999998", "0.99999985", "0.9999999"]),
        ((0.25, 0.5), ["0.2", "0.3", "0.4", "0.5"]),
        ((3, 3), ["0", "1", "2", "3"]),
    ],
)
def test_labels_of_an_axis_are_told_apart_and_have_room(values: tuple[float, float], labels: list[str]) -> None:
    root = parsed(lines("x", "t", [Series("a", dict(enumerate(values)))], along="version"))
    texts = list(root.iter("text"))[: len(labels)]
    assert [one.text for one in texts] == labels
    assert ("roomy" in root.attrib["class"]) == (max(map(len, labels)) > ROOM)


def test_stages_stand_behind_the_lines_where_there_are_several() -> None:
    series = [Series("a", {1: 1.0, 4: 2.0})]
    both = [Band("warm-up", 1, 2), Band(HOSTILE, 3, 4)]
    assert len(list(parsed(lines("x", "t", series, bands=both, along="version")).iter("rect"))) == 2
    apart = [Band("warm-up", 1, 4), Band("frozen", 5, 9)]
    assert list(parsed(lines("x", "t", series, bands=apart, along="version")).iter("rect")) == []


def test_what_is_not_finite_is_left_out_and_nothing_makes_no_picture() -> None:
    assert lines("x", "t", [Series("a", {1: float("nan")})], along="version") == ""
    assert bars("x", "t", [], None, along="round", label=size, description="") == ""
    assert heat("x", "t", {}, [], "", "layer") == ""


@pytest.mark.parametrize("ends", [(0.0, 5e-324), (1e-310, 2e-310), (1.0, 1.0 + 2e-16), (-1e100, 1e100)])
def test_any_numbers_make_a_picture(ends: tuple[float, float]) -> None:
    assert parsed(lines("x", "t", [Series("a", dict(enumerate(ends)))], along="version")).find(".//path") is not None


def test_bars_stand_on_each_other() -> None:
    down, up = Series("down", {1: 300.0}), Series("up", {1: 100.0})
    first, second = parsed(
        bars("x", "t", [down, up], Series("full", {1: 400.0}), along="round", label=size, description=HOSTILE)
    ).iter("rect")
    assert float(second.attrib["y"]) + float(second.attrib["height"]) == pytest.approx(
        float(first.attrib["y"]), abs=0.11
    )
    assert float(first.attrib["height"]) == pytest.approx(3 * float(second.attrib["height"]), abs=0.3)
    assert first.findtext("title") == "round 1, down: 300 B"


def test_heat_shows_each_share() -> None:
    root = parsed(heat("x", "t", {HOSTILE: [0.0, 0.5, 1.0]}, ["0", "1", "2"], "told", "layer"))
    assert [re.findall(r"h\d", cell.attrib["class"]) for cell in root.iter("rect")] == [["h0"], ["h5"], ["h9"]]
    assert [cell.findtext("title") for cell in root.iter("rect")][1] == f"{HOSTILE}, layer 1: 50%"


def test_a_timeline_shows_who_did_what_when() -> None:
    rows = {"a": [Interval("offered", 0, 5, "waited 5 s"), Interval("accepted", 5, 20, "worked 15 s")]}
    waited, worked = parsed(timeline("x", "t", rows, 20, {"deadline": 99}, "told")).iter("rect")
    assert (waited.attrib["width"], worked.attrib["x"], worked.attrib["width"]) == ("25.00%", "25.00%", "75.00%")
    assert worked.findtext("title") == "worked 15 s"


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.25, 0.5, 0.75, 1]),
        (0.31, 0.78, [0.2, 0.4, 0.6, 0.8]),
        (5, 5, [0, 2, 4, 6]),
        (0, 0, [0, 0.25, 0.5, 0.75, 1]),
        (-3, -3, [-3, -2, -1, 0]),
    ],
)
def test_ticks_are_round_and_hold_the_values_between_them(low: float, high: float, expected: list[float]) -> None:
    assert nice(low, high) == pytest.approx(expected)


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("shape", ["lines", "bars", "heat"])
def test_a_chart_s_file_has_room_for_its_picture_and_its_legend(shape: Literal["lines", "bars", "heat"]) -> None:
    series = [Series(f"site-{number}", {0: 0.5, 1: 0.75}) for number in range(6)]
    rows = {one.name: [0.5, 0.75] for one in series}
    if shape == "heat":
        panel = Panel("x", "Layers", heat("x", "Layers", rows, ["0", "1"], "", "layer"), (), (), shape=shape)
    else:
        panel = Panel("x", "Scores", lines("x", "Scores", series, along="version"), (), (), series, shape=shape)
    root = ET.fromstring(svg_file(panel))  # noqa: S314 (made here)
    picture_at, legend = root.findall("{*}svg")
    (picture,) = picture_at.findall("{*}svg")
    bottom = int(picture_at.attrib["y"]) + int(picture.attrib["height"])
    places = [(int(key.attrib["x"]), int(key.attrib["y"])) for key in legend.findall("{*}svg")]
    assert len(set(places)) == len(places) == len(panel.series)
    top = int(legend.attrib["y"])
    assert bottom < top
    assert top + max((y for _, y in places), default=0) + 12 <= int(root.attrib["height"])


def test_long_names_of_a_legend_are_whole_and_have_room() -> None:
    names = [f"method=fedfrozen, learning_rate={rate}" for rate in (0.1, 0.01, 0.001)]
    series = [Series(name, {0: 0.5, 1: 0.75}) for name in names]
    picture = lines("x", "Scores", series, along="version")
    *_, legend = ET.fromstring(svg_file(Panel("x", "Scores", picture, (), (), series))).findall("{*}svg")  # noqa: S314 (made here)
    keys = legend.findall("{*}svg")
    assert [key.findtext("{*}text") for key in keys] == names
    assert [(key.attrib["x"], key.attrib["y"]) for key in keys] == [("0", "0"), ("0", "20"), ("0", "40")]
