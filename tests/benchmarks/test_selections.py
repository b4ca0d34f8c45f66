"""Turnover and overlap of selections on made-up rounds, and the planted study on a tiny one."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import combinations
from math import isnan
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from benchmarks.document import block, tidied
from benchmarks.evidence import planted
from benchmarks.evidence.selections import Selections, chance, choices_of, jaccard, selections
from tessera.shared.api.runs import Round
from tessera.shared.api.tasks import TaskView
from tessera.shared.client.round_outcomes import Outcome
from tessera.shared.model.blocks import Block, Layer

THEN = datetime(2026, 1, 1, tzinfo=UTC)


def layers(stack: str, count: int) -> list[Layer]:
    block = Block(tensor="w", role="mlp", shape=(1,), dtype="F32")
    return [Layer(stack, index, (block,)) for index in range(count)]


FOUR = layers("m", 4)


def view(worker: str, *sent: int, state: str = "merged", stack: str = "m") -> TaskView:
    return TaskView(
        id=worker, run="r", round=1, worker=worker, kind="train", state=state, token=1, attempts=1,
        layers=tuple(f"{stack}.{index}" for index in sent),
    )  # fmt: skip


def outcome(*tasks: TaskView, state: Any = "committed") -> Outcome:
    return Outcome(
        Round(run="r", number=1, attempt=1, state=state, stage="t", opened_at=THEN, deadline_at=THEN, tasks=tasks)
    )


def test_choices_are_those_of_merged_updates_by_site() -> None:
    rounds = [
        outcome(view("a/one", 0), view("a/two", 1), view("b/w", 2), view("c/w", 3, state="left_out")),
        outcome(view("a/one", 3), state="abandoned"),
        # A round that chooses together trains nothing.
        outcome(view("a/one"), view("b/w")),
    ]
    assert choices_of(rounds) == [{"a": {"m.0", "m.1"}, "b": {"m.2"}}]


def test_turnover_counts_new_layers_against_the_last_time_that_a_site_took_part() -> None:
    rounds = [
        outcome(view("a/w", 0, 1), view("b/w", 0, 1)),
        outcome(view("a/w", 0, 2)),
        outcome(view("a/w", 0, 2), view("b/w", 2, 3)),
    ]
    # Site a: 1, then 0; site b: 2, over the round that it missed.
    assert selections(rounds, FOUR).turnover == pytest.approx(1.0)


def test_overlap_is_the_mean_jaccard_index_of_pairs_of_sites() -> None:
    found = selections([outcome(view("a/w", 0, 1), view("b/w", 0, 1), view("c/w", 1, 2))], FOUR)
    # 2 of 2, and twice 1 of 3.
    assert found.overlap == pytest.approx((1 + 1 / 3 + 1 / 3) / 3)
    assert found.union == 0.75
    assert isnan(found.turnover)


def test_chance_is_the_mean_over_all_pairs_of_choices() -> None:
    names = [layer.name for layer in FOUR]
    every = list(combinations(names, 2))
    expected = fmean(jaccard(one, other) for one in every for other in every)
    assert chance(every[0], every[3], FOUR) == pytest.approx(expected)
    three = list(combinations(names, 3))
    mixed = fmean(jaccard(one, other) for one in every for other in three)
    assert chance(every[0], three[0], FOUR) == pytest.approx(mixed)


def test_chance_keeps_the_share_of_each_stack() -> None:
    both = [*layers("a", 3), *layers("b", 1)]
    one, other = {"a.0", "b.0"}, {"a.1", "b.0"}
    # b.0 is in both; a's layer is the same one with the probability 1/3.
    assert chance(one, other, both) == pytest.approx(1 / 3 * 1 + 2 / 3 * 1 / 3)


def test_run_without_a_choice_has_no_figures() -> None:
    found = selections([outcome(view("a/w"))], FOUR)
    assert all(isnan(value) for value in (found.turnover, found.overlap, found.chance, found.union))


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
