"""The table of all methods: its short form runs, and the pages have its figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.methods.__main__ import QUICK
from benchmarks.methods.arms import ARMS, KINDS, MODELS
from benchmarks.methods.cells import measure, prepare
from benchmarks.methods.tasks import TASKS
from docs.method_table import BEGIN, BEGIN_MODES, DETAILS, END, PAGE, details, modes, short
from tessera.shared.methods.registry import methods
from tests.support.paths import ROOT

TABLE = ROOT / "benchmarks" / "methods" / "table.json"


def measured(file: Path, *tasks: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.methods", "--quick", "--tasks", *tasks, "--out", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_a_cell_is_measured_or_refused_in_the_words_of_the_product(tmp_path: Path) -> None:
    prepare(tmp_path / "text", "text", QUICK)
    arms = {arm.name: arm for arm in ARMS}
    assert_measured(measure(tmp_path / "text", "text", arms["lora, `factors`"], 0.01, QUICK))
    assert "prompts" in measure(tmp_path / "text", "text", arms["promptfl"], 0.01, QUICK)["refused"]


def assert_measured(row: dict[str, Any]) -> None:
    assert 0 <= row["worst"][0] <= row["score"][0] <= 1
    assert row["up_bytes"] > 0


@pytest.mark.long
@pytest.mark.timeout(900)  # a process that imports torch, and a fork of it for each cell
def test_a_cell_of_each_task_is_measured_once(tmp_path: Path) -> None:
    tasks = list(TASKS)
    found = measured(tmp_path / "table.json", *tasks)
    cells = {task: entry["cells"] for task, entry in found["tasks"].items()}
    assert list(cells) == tasks
    for task, rows in cells.items():
        assert_measured(rows["lora, `factors`"])
        # In a process of its own.
        assert rows["lora, `factors`"]["peak_bytes"] > 0
        # Only the CLIP of the pairs has prompts: elsewhere the product's own refusal stands in the row.
        assert task == "pairs" or "prompts" in rows["promptfl"]["refused"]
    before = (tmp_path / "table.json").read_bytes()
    measured(tmp_path / "table.json", *tasks)
    assert (tmp_path / "table.json").read_bytes() == before


def test_every_method_of_the_product_has_a_row() -> None:
    assert set(methods()) <= {arm.method for arm in ARMS}
    assert {arm.model for arm in ARMS} == set(MODELS)
    assert {arm.kind for arm in ARMS} == set(KINDS)
    assert len({arm.name for arm in ARMS}) == len(ARMS)


def test_the_pages_have_the_figures_of_the_file() -> None:
    found = json.loads(TABLE.read_text())
    assert DETAILS.read_text() == details(found)
    assert f"{BEGIN}\n{short(found)}\n\n{END}" in PAGE.read_text()


def cell(*scores: float, **more: Any) -> dict[str, Any]:
    figures = {"up_bytes": 2000.0, "down_bytes": 3000.0, "processor_seconds": 2.0, "peak_bytes": 1e6, "epsilon": None}
    return {"score": list(scores), "worst": [0.1] * 3, "new": [None] * 3, **figures, **more}


def test_a_difference_below_the_spread_is_shown_as_none() -> None:
    cells = {
        "fedavg": cell(0.5, 0.6, 0.7),
        # By seed +0.10, +0.11, +0.12: its interval, 0.11 ± 4.30 * 0.01 / sqrt(3), is above 0.
        "better": cell(0.6, 0.71, 0.82, up_bytes=500.0),
        # By seed +0.3, 0, 0: 0.1 ± 4.30 * 0.173 / sqrt(3) includes 0.
        "unclear": cell(0.8, 0.6, 0.7, epsilon=8.0),
        "none": {"refused": "the model has no prompts"},
    }
    found = {
        "budget": {"rounds": 4, "batch": 16, "seeds": [0, 1, 2]},
        "machine": {"at": "2026-11-30T20:00:00", "python": "3.11", "cores": 2, "processor": "some"},
        "packages": {"torch": "2"},
        "tasks": {"image": {"about": "digits", "rows": [*cells, "later"], "rates": {}, "cells": cells}},
    }
    assert short(found).splitlines()[2:] == [
        "| fedavg | 60.0 | 1 | 1 |",
        "| better | **71.0** | 0.25 | 1 |",
        "| unclear, epsilon 8 | 70.0 | 1 | 1 |",
    ]
    rows = [line for line in details(found).splitlines() if line.startswith("| ")]
    assert rows[2:] == [
        "| fedavg | 60.0±10.0 |  | 10.0 |  | 2 | 3 | 1 | 1 |",
        "| better | 71.0±11.0 | +11.0 | 10.0 |  | 0.5 | 3 | 1 | 1 |",
        "| unclear, epsilon 8 | 70.0±10.0 | (+10.0) | 10.0 |  | 2 | 3 | 1 | 1 |",
    ]
    assert "- none: the model has no prompts" in details(found)
    assert "Not measured yet: later." in details(found)


def test_the_page_has_the_modes_that_methods_and_settings_declare() -> None:
    made = PAGE.read_text().partition(BEGIN_MODES)[2].partition(END)[0].strip()
    assert made == modes(), "run `python -m docs.method_table`"
