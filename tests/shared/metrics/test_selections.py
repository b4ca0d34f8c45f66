"""Turnover and overlap of selections on made-up rounds."""

from __future__ import annotations

from tessera.shared.api.tasks import TaskView
from tessera.shared.metrics.selections import Choices, choices_of, selection_scalars
from tests.support.literals import round_of, view_of


def view(worker: str, *sent: int, state: str = "merged") -> TaskView:
    return view_of(worker, state, layers=[f"m.{index}" for index in sent])


def test_choices_are_those_of_merged_updates_by_site() -> None:
    rounds = [
        round_of(view("a/one", 0), view("a/two", 1), view("b/w", 2), view("c/w", 3, state="left_out")),
        round_of(view("a/one", 3), state="abandoned"),
        # A round that chooses together trains nothing.
        round_of(view("a/one"), view("b/w")),
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
