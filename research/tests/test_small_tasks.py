"""Studies on small tasks, and counts from configs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from small_tasks import codec_ratios, methods, safl_bytes, unequal_processes, unequal_speeds
from small_tasks.safl_bytes import COHORTS, CONFIGS, blocks_of, rows
from small_tasks.unequal_speeds import Point
from tessera.shared.model.blocks import layers_of


def test_bytes_are_counted_each_way_for_a_shared_choice_and_for_each_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(safl_bytes, "DRAWS", 10)
    blocks = blocks_of({**CONFIGS["24 layers, bert-large"], "hidden_size": 64, "intermediate_size": 256})
    layer = layers_of(blocks)[0].nbytes
    always = sum(b.nbytes for b in blocks if b.layer is None and b.role in {"head", "norm"})
    (same, up, down), (_, up_pruned, down_pruned), *each = rows(blocks, 8, 0.375)
    assert (same, up, down) == ("all choose the same", always + 8 * layer, always + 8 * layer)
    # Three eighths of 64 and of 256 rows are whole numbers; biases and norms are not pruned.
    matrices = 4 * 64 * 64 + 2 * 64 * 256
    assert up - up_pruned == 8 * 0.375 * matrices * 4
    assert down_pruned == down
    for workers, (_, alone_up, union), _ in zip(COHORTS, each[::2], each[1::2], strict=True):
        # Of 24 layers, the chance that none of N draws of 8 takes a given one is (2/3)^N.
        expected = always + 24 * layer * (1 - (2 / 3) ** workers)
        assert alone_up == up
        assert union == pytest.approx(expected, rel=0.06)


@pytest.mark.long
def test_codecs_are_measured_on_what_training_leaves(tmp_path: Path) -> None:
    codec_ratios.main(["--quick", "--out", str(tmp_path)])
    found = {row["codec"]: row for row in json.loads((tmp_path / "compression.json").read_text())["rows"]}
    for row in found.values():
        # Differences themselves arrive as they are; what rounds is to add them.
        lossless = "delta" not in row["codec"] or row["codec"] == "delta+shuffle+zstd"
        assert (row["error, AdamW 1e-4"] == 0) == (row["error, SGD 0.1"] == 0) == lossless
    assert found["delta+int8"]["ratio, AdamW 1e-4"] > 3.5
    assert found["bits+shuffle+zstd"]["ratio, AdamW 1e-4"] > 1.2


@pytest.mark.long
def test_an_arm_leaves_its_figures() -> None:
    figures = methods.measured("fedavg, int8", 0, 1)
    assert set(figures) == set(methods.COLUMNS)
    # As in docs/benchmarks.md.
    assert figures["kB up"] == pytest.approx(217.9, rel=0.01)


def test_the_time_to_a_score_is_that_of_the_second_of_three_versions_that_have_it() -> None:
    waits = [Point(number, 10.0 * number, accuracy, accuracy) for number, accuracy in enumerate((0, 30, 60, 60, 60))]
    soon = [
        Point(number, 4.0 * number, accuracy, accuracy - 9) for number, accuracy in enumerate((0, 60, 60, 60, 63))
    ]
    never = [Point(number, 4.0 * number, 50.0, 50.0) for number in range(5)]
    found = unequal_speeds.row({0: soon, 1: never}, {0: waits, 1: waits})
    assert (found["reached"], found["time to it"]) == ("1 of 2", "0.27")
    assert found["accuracy"] == pytest.approx((61 + 50) / 2)
    assert unequal_speeds.row({0: never}, {0: waits})["time to it"] == "never"


@pytest.mark.long
def test_each_way_of_waiting_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    unequal_speeds.main(["--quick", "--tasks", "digits"])
    shown = capsys.readouterr().out
    assert all(arm.split(",")[0] in shown for arm in unequal_speeds.ARMS)


@pytest.mark.long
def test_each_way_of_waiting_runs_between_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(unequal_processes, "TOLD_SECONDS", 0.0)
    unequal_processes.main(["--rounds", "3", "--pause", "0.01"])
    found = json.loads((tmp_path / "bench-output/unequal_processes.json").read_text())["rows"]
    assert [row["arm"] for row in found] == [*unequal_processes.RUN_ARMS]
    assert found[0]["seconds to it"] <= found[0]["seconds in all"]
