"""The choice of layers as pure functions: places that are held, calendars, draws, ballots, and means of reports."""

from __future__ import annotations

from itertools import chain
from random import Random
from typing import Any

import pytest

from tessera.shared.methods.base import UnsupportedRun, Update
from tessera.shared.methods.layer_choice import (
    Candidates,
    ChosenLayers,
    CommonChoice,
    check_ballot,
    check_calendar,
    due,
    explored,
    vote_weights,
    waiting,
)
from tessera.shared.model.blocks import Block


def stacked(*sizes: int) -> Candidates:
    """Return stacks a and b of layers that have a query each."""
    return Candidates.of(
        [
            Block(tensor=f"{stack}.{i}.q.weight", role="query", layer=i, shape=(2,), dtype="F32")
            for stack, size in zip("ab", sizes, strict=False)
            for i in range(size)
        ]
    )


SIX = stacked(6)
NAMES = [layer.name for layer in SIX.layers]


def top(scores: dict[int, float], count: int, drawn: Any = (), held: Any = (), margin: float = 0.0) -> list[int]:
    by_name = {name: scores.get(place, 0.0) for place, name in enumerate(NAMES)}
    found = SIX.top(
        by_name, count, [NAMES[i] for i in drawn], ChosenLayers(frozenset(NAMES[i] for i in held), margin)
    )
    return [layer.index for layer in found]


# ---------------------------------------------------------------- held places


def test_layer_keeps_its_place_until_another_score_is_larger_by_the_margin() -> None:
    # 0.5 x 1.2 = 0.6.
    assert top({0: 0.5, 1: 0.59}, 1, held=[0], margin=0.2) == [0]
    assert top({0: 0.5, 1: 0.61}, 1, held=[0], margin=0.2) == [1]
    assert top({0: 0.5, 1: 0.59}, 1) == [1]


def test_layer_that_loses_its_place_is_the_weakest_that_held_one() -> None:
    assert top({0: 0.5, 1: 0.2, 2: 0.4}, 2, held=[0, 1], margin=0.5) == [0, 2]


def test_tie_goes_to_the_layer_that_holds_a_place_and_then_to_the_one_nearer_the_input() -> None:
    assert top({0: 0.4, 3: 0.4, 5: 0.4}, 2, held=[5], margin=0.0) == [5, 0]


def test_margin_of_a_score_of_zero_holds_nothing_against_a_positive_one() -> None:
    assert top({2: 0.1}, 1, held=[0], margin=9.0) == [2]


def test_factors_of_scores_are_at_most_one() -> None:
    held = ChosenLayers(frozenset({"a.0"}), 0.25)
    assert (held.factor("a.0"), held.factor("a.1")) == (1.0, 0.8)


# ---------------------------------------------------------------- drawn places


def test_drawn_layers_take_the_places_of_the_smallest_scores() -> None:
    assert top({0: 0.9, 1: 0.8, 2: 0.7}, 3, drawn=[5]) == [5, 0, 1]
    assert top({0: 0.9, 1: 0.8}, 2, drawn=[0]) == [0, 1]
    assert top({0: 0.9}, 1, drawn=[3, 4]) == [3]


def test_calendar_trains_each_layer_once_in_any_of_so_many_rounds() -> None:
    for every in (3, 4, 6, 9):
        rounds = [due(SIX, 2, every, number) for number in range(1, 30)]
        assert all(len(layers) <= 2 for layers in rounds)
        for first in range(len(rounds) - every):
            assert sorted(chain(*rounds[first : first + every])) == NAMES


def test_calendar_keeps_each_stack_within_its_share() -> None:
    both = stacked(6, 3)
    assert both.quotas(3) == [2, 1]
    for number in range(1, 10):
        found = due(both, 3, 3, number)
        assert [sum(name.startswith(stack) for name in found) for stack in "ab"] == [2, 1]
        # A worker with room for one layer gets one.
        assert len(due(both, 1, 3, number)) == 1


def test_a_worker_with_less_room_than_the_calendar_trains_every_layer_in_some_cycle() -> None:
    # Three of six layers are due in each round, and the worker trains two of these.
    own, common = set[str](), set[str]()
    for number in range(12):
        own |= set(due(SIX, 2, 2, number))
        common |= {layer.name for layer in SIX.top(dict.fromkeys(NAMES, 0.5), 2, due(SIX, 3, 2, number))}
    assert own == common == set(NAMES)


def test_calendar_that_asks_for_more_layers_than_train_is_refused_with_a_remedy() -> None:
    check_calendar(SIX, 3, 2)
    with pytest.raises(UnsupportedRun, match=r"explore_after is 5, and 1 of the 6 .* raise explore_after to 6, or"):
        check_calendar(SIX, 5, 1, "explore_after")
    with pytest.raises(UnsupportedRun, match=r"pick_every is 2, and 2 of the 6 layers .* raise pick_every to 3, or"):
        check_calendar(SIX, 2, 2)
    with pytest.raises(UnsupportedRun, match=r"0 of the 2 layers from b\.0 .*: raise the number of layers"):
        check_calendar(stacked(2, 2), 9, 1)


def test_layers_that_wait_longest_come_first_and_of_equals_those_nearer_the_input() -> None:
    last = dict(zip(NAMES, (4, 0, 7, 2, 0, 5), strict=True))
    assert waiting(SIX, 6, last, 4) == ["a.1", "a.4", "a.3", "a.0"]
    assert waiting(SIX, 2, last, 4) == ["a.1", "a.4"]
    assert waiting(SIX, 6, last, -1) == []


def test_each_stack_tries_the_waiting_layers_that_its_share_holds() -> None:
    both = stacked(6, 3)
    last = {layer.name: 3 - layer.index for layer in both.layers}
    # Three of nine layers: two places of the first stack, one of the second.
    assert waiting(both, 3, last, 9) == ["a.5", "a.4", "b.2"]
    assert waiting(both, 1, last, 9) == ["a.5"]


@pytest.mark.parametrize(("count", "after"), [(2, 3), (2, 5), (1, 6), (3, 2), (6, 1)])
def test_scores_that_never_change_leave_no_layer_waiting_and_keep_some_places(count: int, after: int) -> None:
    last, by_score, rounds = dict.fromkeys(NAMES, 0), 0, 60
    scores = dict(zip(NAMES, (0.0, 1.0, 5.0, 4.0, 2.0, 0.0), strict=True))
    for number in range(1, rounds + 1):
        tried = waiting(SIX, count, last, number - 1 - after)
        by_score += count - len(tried)
        last |= {layer.name: number for layer in SIX.top(scores, count, tried)}
        # At most 6 - count layers wait together, count of them are tried in a round, the first `after` rounds late.
        assert min(last.values()) >= number - (after + -(-6 // count) - 2)
    # Of `after + 1` rounds the six layers fill at most six places.
    assert by_score >= (count - 6 / (after + 1)) * rounds


def test_each_free_place_is_explored_with_the_given_probability() -> None:
    draws = [explored(SIX, 3, 0.25, ["a.0"], Random(seed)) for seed in range(2000)]
    # Of three places one is taken: 2 x 1/4 are expected, with a standard error of 0.014.
    assert sum(map(len, draws)) / 2000 == pytest.approx(0.5, abs=0.05)
    assert all("a.0" not in draw and len(set(draw)) == len(draw) <= 2 for draw in draws)
    assert {name for draw in draws for name in draw} == set(NAMES[1:])
    assert draws[7] == explored(SIX, 3, 0.25, ["a.0"], Random(7))


def test_nothing_is_explored_where_all_places_are_taken() -> None:
    assert explored(SIX, 1, 0.99, ["a.0", "a.1"], Random(0)) == []
    assert explored(SIX, 0, 0.99, [], Random(0)) == []


# ---------------------------------------------------------------- votes


def ballot(*layers: int) -> dict[str, float]:
    return {name: float(place in layers) for place, name in enumerate(NAMES)}


def test_ballot_has_one_vote_for_each_of_the_layers_of_a_round() -> None:
    check_ballot(SIX, ballot(1, 4), 2)
    for votes, why in [
        (ballot(1), "has 1 votes .* must have 2"),
        (ballot(0, 1, 2), "has 3 votes"),
        ({**ballot(1, 4), "a.1": 2.0}, r"the vote for a\.1 is 2\.0, and must be 0 or 1"),
        ({**ballot(1, 4), "a.0": -1.0}, "must be 0 or 1"),
        ({**ballot(1, 4), "a.0": float("nan")}, "must be 0 or 1"),
        (dict.fromkeys(NAMES[:2], 1.0), r"the vote for a\.2 is None"),
    ]:
        with pytest.raises(ValueError, match=why):
            check_ballot(SIX, votes, 2)


def test_ballot_keeps_each_stack_within_its_share() -> None:
    both = stacked(2, 2)
    votes = {"a.0": 1.0, "a.1": 1.0, "b.0": 0.0, "b.1": 0.0}
    with pytest.raises(ValueError, match=r"2 votes for layers from a\.0 on, and must have 1"):
        check_ballot(both, votes, 2)


def test_votes_count_one_a_site_or_its_examples_up_to_the_second_largest() -> None:
    assert vote_weights([10, 500, 40], by_examples=False) == [1, 1, 1]
    assert vote_weights([10, 500, 40], by_examples=True) == [10, 40, 40]
    assert vote_weights([7], by_examples=True) == [7]
    assert vote_weights([7, 900], by_examples=True) == [7, 7]


def update(worker: str, examples: int, *layers: int) -> Update:
    return Update(
        worker, examples, {}, {f"vote.{place}": vote for place, vote in enumerate(ballot(*layers).values())}
    )


def voting(**settings: Any) -> CommonChoice:
    wanted = {"by_examples": False, "smoothing": 0.0, "hysteresis": 0.0, **settings}
    return CommonChoice(SIX, "vote", **wanted)


def elected(choice: CommonChoice, scalars: dict[str, float], count: int = 2) -> list[int] | None:
    found = choice.layers(scalars, count)
    return None if found is None else [layer.index for layer in found]


def test_layers_of_most_votes_are_elected_and_of_equals_those_nearer_the_input() -> None:
    after = voting().after({}, [update("a", 1, 1, 4), update("b", 1, 4, 5), update("c", 1, 2, 4)], 2)
    assert after["vote.4"] == 1
    assert after["vote.1"] == after["vote.2"] == after["vote.5"] == pytest.approx(1 / 3)
    assert elected(voting(), after) == [4, 1]
    assert elected(voting(), {}) is None


@pytest.mark.parametrize("by_examples", [False, True])
def test_one_site_cannot_decide_against_all_others(by_examples: bool) -> None:
    honest = [update("a", 30, 3, 4), update("b", 20, 3, 4)]
    after = voting(by_examples=by_examples).after({}, [*honest, update("liar", 1 << 40, 0, 5)], 2)
    assert elected(voting(), after) == [3, 4]
    alone = voting(by_examples=by_examples).after({}, [update("a", 30, 3, 4)], 2)
    assert elected(voting(), alone) == [3, 4]


def test_site_without_a_report_has_no_vote_and_a_round_without_reports_changes_nothing() -> None:
    after = voting().after({}, [update("a", 9, 0, 1), Update("private", 9, {})], 2)
    assert (after["vote.0"], after["vote.5"]) == (1.0, 0.0)
    assert voting().after(after, [Update("private", 9, {})], 2) == {}


def test_shares_of_votes_are_smoothed_over_rounds_from_the_second_on() -> None:
    choice = voting(smoothing=0.75)
    first = choice.after({}, [update("a", 1, 0, 1)], 2)
    assert first["vote.0"] == 1
    second = {**first, **choice.after(first, [update("a", 1, 2, 3)], 2)}
    assert (second["vote.0"], second["vote.2"]) == (0.75, 0.25)
    assert elected(choice, second) == [0, 1]
    third = choice.after(second, [update("a", 1, 2, 3)], 2)
    assert (third["vote.0"], third["vote.2"]) == (0.5625, 0.4375)
    # 1 - 0.75^n passes one half in the third round of other votes.
    assert elected(choice, choice.after(third, [update("a", 1, 2, 3)], 2)) == [2, 3]


def test_elected_layers_hold_their_places_by_the_hysteresis() -> None:
    choice = voting(hysteresis=0.5)
    scalars = choice.after({}, [update(site, 1, 0, 1) for site in "abc"], 2)
    assert [scalars[f"held.{place}"] for place in range(6)] == [1, 1, 0, 0, 0, 0]
    # Three votes against two for layer 1 are not more than 1.5 times as many.
    votes = [update("a", 1, 0, 2), update("b", 1, 0, 2), update("c", 1, 1, 2), update("d", 1, 1, 0)]
    scalars |= choice.after(scalars, votes, 2)
    assert elected(choice, scalars) == [0, 1]
    assert elected(voting(), scalars) == [0, 2]
    scalars |= choice.after(scalars, [update(site, 1, 2, 3) for site in "abcd"], 2)
    assert elected(choice, scalars) == [2, 3]
    assert [place for place in range(6) if scalars[f"held.{place}"]] == [2, 3]


def test_mean_scores_are_weighted_by_examples() -> None:
    choice = CommonChoice(SIX, "score", by_examples=True, smoothing=0.5, hysteresis=0.0)
    reports = [Update(w, n, {}, dict.fromkeys((f"score.{i}" for i in range(6)), s)) for w, n, s in
               (("a", 30, 0.1), ("b", 10, 0.9))]  # fmt: skip
    assert choice.after({}, reports, 2)["score.0"] == pytest.approx(0.3)
    assert choice.after({"score.0": 0.1}, reports, 2)["score.0"] == pytest.approx(0.2)
