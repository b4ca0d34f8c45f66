"""Turnover, overlap and chance of selections on made-up rounds."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import combinations
from math import isnan
from statistics import fmean

import pytest

from evidence.selections import chance, selections
from tessera.shared.api.runs import Round
from tessera.shared.api.tasks import TaskView
from tessera.shared.metrics.selections import jaccard
from tessera.shared.model.blocks import Block, Layer

THEN = datetime(2026, 1, 1, tzinfo=UTC)


def layers(stack: str, count: int) -> list[Layer]:
    block = Block(tensor="w", role="mlp", shape=(1,), dtype="F32")
    return [Layer(stack, index, (block,)) for index in range(count)]


FOUR = layers("m", 4)


def view(worker: str, *sent: int) -> TaskView:
    return TaskView(
        id=worker, run="r", round=1, worker=worker, kind="train", state="merged", token=1, attempts=1,
        layers=tuple(f"m.{index}" for index in sent),
    )  # fmt: skip


def made(*tasks: TaskView) -> Round:
    given = {"state": "committed", "stage": "t", "opened_at": THEN, "deadline_at": THEN, "tasks": tasks}
    return Round.model_validate({"run": "r", "number": 1, "attempt": 1, **given})


def test_turnover_counts_new_layers_against_the_last_time_that_a_site_took_part() -> None:
    rounds = [
        made(view("a/w", 0, 1), view("b/w", 0, 1)),
        made(view("a/w", 0, 2)),
        made(view("a/w", 0, 2), view("b/w", 2, 3)),
    ]
    # Site a: 1, then 0; site b: 2, over the round that it missed.
    assert selections(rounds, FOUR).turnover == pytest.approx(1.0)


def test_overlap_is_the_mean_jaccard_index_of_pairs_of_sites() -> None:
    found = selections([made(view("a/w", 0, 1), view("b/w", 0, 1), view("c/w", 1, 2))], FOUR)
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
    found = selections([made(view("a/w"))], FOUR)
    assert all(isnan(value) for value in (found.turnover, found.overlap, found.chance, found.union))
