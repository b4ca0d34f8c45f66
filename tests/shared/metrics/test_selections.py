"""Turnover and overlap of selections on made-up rounds."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from tessera.shared.api.runs import Round
from tessera.shared.api.tasks import TaskView
from tessera.shared.metrics.selections import Choices, choices_of, selection_scalars

THEN = datetime(2026, 1, 1, tzinfo=UTC)


def view(worker: str, *sent: int, state: str = "merged", stack: str = "m") -> TaskView:
    return TaskView(
        id=worker, run="r", round=1, worker=worker, kind="train", state=state, token=1, attempts=1,
        layers=tuple(f"{stack}.{index}" for index in sent),
    )  # fmt: skip


def made(*tasks: TaskView, state: Any = "committed") -> Round:
    return Round(run="r", number=1, attempt=1, state=state, stage="t", opened_at=THEN, deadline_at=THEN, tasks=tasks)


def test_choices_are_those_of_merged_updates_by_site() -> None:
    rounds = [
        made(view("a/one", 0), view("a/two", 1), view("b/w", 2), view("c/w", 3, state="left_out")),
        made(view("a/one", 3), state="abandoned"),
        # A round that chooses together trains nothing.
        made(view("a/one"), view("b/w")),
    ]
    assert choices_of(rounds) == [{"a": {"m.0", "m.1"}, "b": {"m.2"}}]


def picked(**sites: str) -> Choices:
    """Return the choices of sites, each a text with a letter for each layer."""
    return {site: frozenset(layers) for site, layers in sites.items()}


def test_scalars_of_a_version_compare_each_site_with_its_last_choice() -> None:
    earlier = [picked(a="pq", b="pq"), picked(a="rs")]
    # a changes nothing and b two layers; c is there for the first time.
    now = picked(a="rs", b="rs", c="r")
    pairs = (1 + 1 / 2 + 1 / 2) / 3
    assert selection_scalars(earlier, now) == {"layers_sent": 2, "turnover": 1, "overlap": pairs, "one_sender": 0}
    assert selection_scalars(earlier, picked(d="pq")) == {"layers_sent": 2}
    assert selection_scalars(earlier, {}) == {}
