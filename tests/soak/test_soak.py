"""The short form of the soak. `make soak` is the long one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.soak.__main__ import GROWS, WORKERS, main, trends

SAMPLES = [
    {"seconds": float(n), "round": float(n), "memory of serve": 1e8, "rows of uploads": 5.0} for n in range(40)
]


def grown(name: str, by_round: float) -> list[str]:
    samples = [{**sample, name: sample.get(name, 0.0) + by_round * sample["round"]} for sample in SAMPLES]
    return [trend.name for trend in trends(samples) if trend.grows]


def test_what_grows_is_found_and_what_may_is_not() -> None:
    assert grown("memory of serve", 0.0) == []
    assert grown("memory of serve", 1e6) == ["memory of serve"]
    assert grown("rows of uploads", float(WORKERS)) == ["rows of uploads"]
    assert grown("rows of tasks", GROWS["rows of tasks"]) == []
    assert grown("rows of tasks", 3 * GROWS["rows of tasks"]) == ["rows of tasks"]


@pytest.mark.long
@pytest.mark.sqlite
@pytest.mark.timeout(300)
def test_nothing_grows_with_rounds_but_what_is_remembered_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "soak.json"
    code = main(["--rounds", "24", "--every", "0.1", "--unused", "2", "--out", str(out)])
    assert code == 0, capsys.readouterr().out
    assert json.loads(out.read_text())["samples"][-1]["round"] >= 24
