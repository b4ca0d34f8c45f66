"""The benchmark of the choice of a codec. Nothing here looks at how long anything takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import light
from benchmarks.codec_choice import LINES, MEGABYTES, SIDES, Case
from benchmarks.federation import Federation
from tests.benchmarks.test_costs import quickly


def test_a_choice_is_compared_with_the_better_of_both_by_medians(tmp_path: Path) -> None:
    case = Case(Federation(tmp_path), 1, 0.01)
    case.seconds = {"raw": [3.0, 2.0, 90.0], "lossless": [5.0, 4.0, 6.0], light.CHOOSING: [3.6, 1.0, 3.3]}
    assert case.of_best() == pytest.approx(1.1)


def test_each_line_has_a_model_and_the_choice_stands_beside_both() -> None:
    assert LINES.keys() == MEGABYTES.keys()
    assert list(SIDES) == ["raw", "lossless", light.CHOOSING]


@pytest.mark.long
def test_each_side_has_its_rounds_and_its_bytes(tmp_path: Path) -> None:
    (row,) = quickly("codec_choice", tmp_path)["rows"]
    assert row["raw_up_MB"] == pytest.approx(2, rel=0.01)
    assert row["lossless_up_MB"] < 0.8 * row["raw_up_MB"]
    # It chooses again in each round, by what it measures on this machine: the mean is that of both or between them.
    assert 0.95 * row["lossless_up_MB"] <= row["auto_up_MB"] <= 1.01 * row["raw_up_MB"]
    assert min(row[f"{side}_s"] for side in SIDES) > 0


@pytest.mark.long
def test_a_worker_that_cannot_do_its_task_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    with Federation(tmp_path / "federation", lease_seconds=3600) as federation:
        light.start(federation, 1)
        # The folder in which it writes updates.
        (tmp_path / "federation" / "light-0").rmdir()
        case = Case(federation, 1, 0.01)
        with pytest.raises(RuntimeError, match=r"light-worker|FileNotFoundError"):
            case.turn(0)
