"""What is drawn, weighed and averaged are sites, however many workers each has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
import pytest

from tessera.shared.aggregation.mean import Normalization, average
from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import Bounds, RunSpec
from tessera.shared.api.versions import VersionRef
from tessera.shared.methods.base import UPDATE_NORM, MethodSpec, Participant, Plan, RunInfo, State, Update
from tessera.shared.methods.registry import coordinator_half
from tessera.shared.problems import Invalid
from tessera.shared.rounds.aggregate import AcceptedUpdate, _by_site, norm_scores, observed, outlying, pooled
from tessera.shared.rounds.planning import begun, bounds_of, largest_weights, plan_round, run_facts, weight_warnings
from tessera.shared.run_settings import Training
from tessera.shared.tensors.lazy import ArrayTensor, Tensor, to_array
from tests.support.federation import small_model

MODEL = small_model()
NONE = State(0, {})
FEDAVG, FEDNOVA = (coordinator_half(MethodSpec(name=name), RunInfo((), 9)) for name in ("fedavg", "fednova"))


def spec(**settings: object) -> RunSpec:
    digest = f"sha256:{'0' * 64}"
    plain = {"name": "r", "method": MethodSpec(name="fedavg"), "model": digest, "version": digest, "dataset": "d"}
    return RunSpec.model_validate({**plain, "rounds": 1000, **settings})


def workers(*of: tuple[str, int, int]) -> list[Participant]:
    """Workers by site: how many, and how many examples each has."""
    return [
        Participant(f"{site}/{place:02}", examples, site=site)
        for site, count, examples in of
        for place in range(count)
    ]


def drawn(willing: Sequence[Participant], number: int, **cohort: object) -> list[str]:
    return list(plan_round(spec(cohort=Cohort.model_validate(cohort)), MODEL, State(number - 1, {}), willing))


def test_a_site_with_many_workers_is_drawn_as_often_as_one_with_few() -> None:
    willing = workers(("a", 1, 10), ("b", 1, 10), ("c", 1, 10), ("x", 97, 10))
    seen = Counter(name[0] for number in range(1, 401) for name in drawn(willing, number, size=2))
    # Two of four sites: each is expected in 200 of 400 rounds.
    assert all(150 < seen[site] < 250 for site in "abcx"), seen


def test_the_draw_does_not_depend_on_the_order_in_which_workers_come() -> None:
    willing = workers(("a", 3, 10), ("b", 1, 10), ("c", 5, 10))
    for number in range(1, 20):
        once = drawn(willing, number, size=2, workers_per_site=2)
        assert once == drawn(willing[::-1], number, size=2, workers_per_site=2) == sorted(once)
        assert max(Counter(name[0] for name in once).values()) <= 2


def test_a_site_stays_with_the_worker_that_took_part_last() -> None:
    willing = workers(("a", 4, 10))
    before = Participant("a/02", 10, site="a", last_round=3)
    for number in range(4, 24):
        assert drawn([*willing[:2], before, willing[3]], number) == ["a/02"]
    # Without it, the dice choose, and not always the same.
    assert len({drawn(willing, number)[0] for number in range(4, 24)}) > 1


def test_a_site_that_declares_without_end_hardly_moves_the_bound_on_weights() -> None:
    honest = workers(("a", 1, 1000), ("b", 1, 1000), ("c", 1, 1000), ("d", 1, 1000))
    liar = Participant("x/w", (1 << 40) - 1, site="x")
    assert bounds_of(spec(), [*honest, liar]).max_examples == 4000
    # Nor does it with names without end: it is one site, that has what its one worker of a round has.
    many = [Participant(f"x/{place}", (1 << 40) - 1, site="x") for place in range(50)]
    assert bounds_of(spec(), [*honest, *many]).max_examples == 4000


def test_a_site_s_examples_are_those_of_as_many_workers_as_take_part() -> None:
    willing = workers(("a", 3, 10), ("b", 3, 20), ("c", 3, 30))
    assert bounds_of(spec(), willing).max_examples == 4 * 20
    assert bounds_of(spec(cohort=Cohort(workers_per_site=2)), willing).max_examples == 4 * 40


def test_a_limit_on_weights_names_the_sites_that_it_limits() -> None:
    willing = workers(("a", 1, 6), ("b", 1, 10), ("c", 1, 14), ("d", 1, 400))

    # The median of 6, 10, 14 and 400 is 12, and d counts with 48 examples.
    def said(among: Sequence[Participant], method: str = "fedavg", **settings: Any) -> list[str]:
        wanted = spec(method=MethodSpec(name=method), **settings)
        half = coordinator_half(wanted.method, run_facts(wanted, MODEL))
        return weight_warnings(half, bounds_of(wanted, among), largest_weights(wanted, among))

    (warning,) = said(willing)
    assert "the weight of a site to 48 examples, which d (400) would exceed" in warning
    assert said(willing[:3]) == said(willing, max_examples="unlimited") == []
    # These weigh all sites alike.
    assert said(willing, robust={"rule": "median"}, cohort={"quorum": 3}) == said(willing, "scaffold") == []
    assert bounds_of(spec(), willing, simulated=True).max_examples is None
    assert bounds_of(spec(max_examples=7), willing, simulated=True).max_examples == 7


@pytest.mark.parametrize(
    ("settings", "examples", "norm"),
    [
        ({}, 40, 10.0),
        ({"max_examples": 7, "max_norm_of_median": 3.0}, 7, 3.0),
        ({"max_examples": "unlimited", "max_norm_of_median": "unlimited"}, None, None),
        # A robust rule judges by itself what is far off.
        ({"robust": {"rule": "median"}, "cohort": {"quorum": 3}}, 40, None),
    ],
)
def test_bounds_are_what_the_run_says_or_else_by_the_median(
    settings: dict[str, object], examples: int | None, norm: float | None
) -> None:
    bounds = bounds_of(spec(**settings), workers(("a", 1, 10)))
    assert (bounds.max_examples, bounds.max_norm_of_median) == (examples, norm)


def tensor(*values: float) -> ArrayTensor:
    return ArrayTensor(np.array(values, "f4"))


def update(worker: str, examples: int, **blocks: Tensor) -> Update:
    return Update(worker, examples, blocks, {"told": float(examples)}, site=worker[0])


@pytest.mark.parametrize("normalization", ["cohort", "inverse-probability"])
def test_averaging_what_sites_sent_together_is_averaging_what_their_workers_sent(
    normalization: Normalization,
) -> None:
    model = {"u": tensor(1.0, 2.0), "v": tensor(0.0, 0.0)}
    # Of the site x, one worker sent both blocks and the other only one.
    of_x = [update("x/1", 10, u=tensor(2, 3), v=tensor(8, 8)), update("x/2", 30, u=tensor(4, 5))]
    other = update("y/1", 40, u=tensor(0, 0), v=tensor(1, 1))
    as_one = pooled(model, of_x, normalization)
    assert (as_one.examples, as_one.site, as_one.metrics) == (40, "x", {"told": 25.0})
    by_workers = average(model, [(float(u.examples), u.blocks) for u in [*of_x, other]], normalization, lambda _: 0.5)
    by_sites = average(model, [(float(u.examples), u.blocks) for u in [as_one, other]], normalization, lambda _: 0.5)
    for name in model:
        np.testing.assert_allclose(to_array(by_sites[name]), to_array(by_workers[name]), rtol=1e-6)


def test_a_block_that_one_worker_of_a_site_sent_is_whole_where_senders_divide() -> None:
    model = {"v": tensor(0.0)}
    as_one = pooled(model, [update("x/1", 10, v=tensor(8)), update("x/2", 30)], "participants")
    assert to_array(as_one.blocks["v"]) == [8.0]


def test_the_only_update_of_a_site_is_taken_as_it_is() -> None:
    alone = update("x/1", 10, v=tensor(8))
    assert pooled({"v": tensor(0.0)}, [alone], "participants") is alone


@pytest.mark.parametrize("method", ["scaffold", "feddyn"])
def test_methods_that_remember_something_for_each_site_take_one_worker_of_it(method: str) -> None:
    training = Training(optimizer="sgd", learning_rate=0.1)
    several = spec(method=MethodSpec(name=method), training=training, cohort=Cohort(workers_per_site=2))
    with pytest.raises(Invalid) as refusal:
        begun(several, MODEL, NONE)
    assert "workers_per_site" in (refusal.value.errors or ())[0].detail


def reported(*norms: float) -> list[AcceptedUpdate]:
    """An update of each of so many sites, of these norms."""
    base = VersionRef(number=0, digest=f"sha256:{'0' * 64}")
    return [
        AcceptedUpdate(f"s{n}", f"s{n}/w", "", 1, {UPDATE_NORM: norm}, Plan(), base) for n, norm in enumerate(norms)
    ]


def test_a_site_that_returns_to_a_run_that_has_nearly_converged_is_not_left_out() -> None:
    bounds = Bounds(max_norm_of_median=10)
    later = observed(FEDAVG, bounds, reported(1.0, 2.0, 3.0))
    assert later.median_norm == 2.0
    # Beside the round's own median of 0.01 the third is 500 times as large; beside the first round's, 2.5 times.
    assert outlying(FEDAVG, bounds, reported(0.01, 0.01, 5.0)) == ["s2/w"]
    assert outlying(FEDAVG, later, reported(0.01, 0.01, 5.0)) == []
    assert outlying(FEDAVG, later, reported(0.01, 0.01, 21.0)) == ["s2/w"]
    assert observed(FEDAVG, later, reported(0.01, 0.01, 5.0)).median_norm == 2.0


def test_sites_and_their_workers_are_merged_in_the_order_of_their_names() -> None:
    first, second, third = reported(1.0, 2.0, 3.0)
    twin = replace(first, worker="s0/v")
    for came in permutations((first, second, third, twin)):
        assert _by_site(came) == [[twin, first], [second], [third]]


def worked(steps: float, *norms: float, liar: float | None = None) -> list[AcceptedUpdate]:
    """Updates of these norms, each of so many effective steps but for the last, which may claim others."""
    told = [{**entry.metrics, "effective_steps": steps} for entry in reported(*norms)]
    told[-1]["effective_steps"] = liar or steps
    return [replace(entry, metrics=metrics) for entry, metrics in zip(reported(*norms), told, strict=True)]


def test_a_liar_who_claims_few_effective_steps_is_left_out_for_the_norm_that_would_be_merged() -> None:
    bounds = Bounds(max_norm_of_median=10)
    liars = worked(50, 1.0, 2.0, 3.0, 4.0, liar=1)
    # Per step: 0.02 0.04 0.06 4, the median of which is 0.05, and 80 times that is claimed.
    assert outlying(FEDNOVA, bounds, liars) == ["s3/w"]
    assert outlying(FEDAVG, bounds, liars) == []
    assert norm_scores(FEDNOVA, bounds, liars)["s3/w"] == {"anomaly.norm": pytest.approx(80), "anomaly.left_out": 1}


def test_norms_of_rounds_of_few_and_of_many_effective_steps_are_compared_per_step() -> None:
    later = observed(FEDNOVA, Bounds(max_norm_of_median=10), worked(2, 1.0, 2.0, 3.0))
    assert later.median_norm == 1.0
    # A hundred times the steps, a hundred times the norms: nobody moves further per step than before.
    more = worked(200, 1.0, 2.0, 900.0)
    assert outlying(FEDNOVA, later, more) == []
    assert observed(FEDNOVA, later, more).median_norm == 1.0
    assert outlying(FEDNOVA, later, worked(200, 1.0, 2.0, 2100.0)) == ["s2/w"]


def test_a_site_is_judged_by_its_largest_update_however_many_examples_the_others_report() -> None:
    # Of different blocks: where those who sent one divide it, the site's step has a norm of 1e5.
    small, large, *others = reported(0.001, 1e5, 1.0, 1.0, 1.0)
    pair = [replace(small, site="x", worker="x/1", examples=10**9), replace(large, site="x", worker="x/2")]
    assert outlying(FEDAVG, Bounds(max_norm_of_median=10), [*pair, *others]) == ["x/1", "x/2"]


def test_a_site_of_several_workers_is_stretched_no_further_than_the_run_s_largest_norm() -> None:
    model = {"u": tensor(0.0), "v": tensor(0.0)}
    told = {"effective_steps": 1.0}
    one = Update("x/1", 10**9, {"u": tensor(0.001)}, {**told, UPDATE_NORM: 0.001}, site="x")
    two = Update("x/2", 1, {"v": tensor(0.8)}, {**told, UPDATE_NORM: 0.8}, site="x")
    as_one = replace(pooled(model, [one, two], "participants"), examples=32)
    other = Update("y/1", 96, {}, {"effective_steps": 96.0})
    facts = RunInfo((), 9, training=Training(optimizer="sgd", batch_size=1, learning_rate=0.1), max_update_norm=1.0)
    merged = coordinator_half(MethodSpec(name="fednova"), facts).merge(State(0, model), [as_one, other])
    assert to_array(merged.model["v"]) == [pytest.approx(1.0)]


def test_workers_of_one_site_are_stretched_as_they_are_merged() -> None:
    one, two, *others = worked(10, 10.0, 20.0, 20.0, 20.0, 20.0)
    # Of 15 and 5 steps and as many examples each, which makes 10 as the others have; their larger norm likewise.
    told = [(one, "x/1", 15.0), (two, "x/2", 5.0)]
    pair = [
        replace(entry, site="x", worker=name, metrics={**entry.metrics, "effective_steps": steps})
        for entry, name, steps in told
    ]
    found = norm_scores(FEDNOVA, Bounds(max_norm_of_median=1.01), [*pair, *others])
    assert found == {name: {"anomaly.norm": 1.0} for name in ("s2/w", "s3/w", "s4/w", "x/1", "x/2")}
