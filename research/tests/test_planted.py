"""The planted study on a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.document import block, tidied
from evidence import planted
from evidence.selections import Selections


@pytest.mark.long
def test_planted_study_prints_a_row_for_each_arm(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = ("oracle", "random", "attention, pick_every 3", "attention, vote")
    monkeypatch.setattr(planted, "ARMS", {arm: planted.ARMS[arm] for arm in few})
    planted.main(["--quick"])
    printed = capsys.readouterr().out.splitlines()
    rows = {line.split(" | ")[0].removeprefix("| "): line.split(" | ") for line in printed if line.startswith("| ")}
    assert set(planted.ARMS) <= set(rows)
    overall = [line.split(" | ") for line in printed if line.startswith("| oracle")]
    assert overall[0][1] == "100.0"
    assert len(overall[1]) == 1 + planted.QUICK.rounds + 1


def test_the_document_has_the_report_of_the_saved_study() -> None:
    assert block(planted.COMMAND) == tidied(planted.lines(*planted.read()))


def test_a_saved_study_is_read_as_it_was(tmp_path: Path) -> None:
    chosen = Selections(turnover=0.5, overlap=0.25, chance=0.2, union=0.4)
    results = [(0.9, {"oracle": planted.Figures(0.5, (0.1, 0.7), chosen, 76.5)})]
    planted.write(tmp_path / "planted.json", planted.QUICK, results)
    assert planted.read(tmp_path / "planted.json")[:2] == (planted.QUICK, results)


def test_only_the_muted_layers_are_damaged() -> None:
    start, _ = planted.start_of(planted.QUICK, 0)
    whole = planted.Weights.of(planted.pretrained(planted.QUICK, 0), planted.CONFIG, "text-classification")
    changed = {name for name, values in start.values.items() if (values != whole.values[name]).any()}
    assert changed == {
        f"bert.encoder.layer.{layer}.output.LayerNorm.{part}"
        for layer in planted.planted_of(0)
        for part in ("weight", "bias")
    }
