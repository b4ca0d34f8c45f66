"""When all is known of a round that is ever likely to be, from literals."""

from __future__ import annotations

from tessera.shared.api.runs import Measurement, Round
from tessera.shared.client.round_outcomes import _settled
from tests.support import literals
from tests.support.literals import round_of, run_of, view_of

RUN = run_of(rounds=5, evaluation={"sites": True})


def trained_by(*workers: str) -> Round:
    return round_of(*(view_of(worker, "merged") for worker in workers), version=1)


def measured(worker: str) -> Measurement:
    return literals.measured(worker, loss=1.0)


def test_measurements_of_many_workers_of_one_site_do_not_stand_for_those_of_others() -> None:
    made, of_one = trained_by("a/1", "b/1", "c/1"), [measured(f"a/{number}") for number in range(9)]
    assert not _settled(made, RUN, of_one, made)
    assert _settled(made, RUN, [*of_one, measured("b/1"), measured("c/1")], made)


def test_a_site_whose_several_workers_trained_is_awaited_once() -> None:
    made = trained_by("a/1", "a/2", "b/1")
    assert _settled(made, RUN, [measured("a/1"), measured("b/1")], made)
