"""A federation in one process: who takes part, what is kept, and going on after it was stopped anywhere."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tessera.shared.client.round_outcomes import RoundOutcome
from tessera.shared.methods.base import (
    CoordinatorHalf,
    LocalResult,
    Method,
    MethodSettings,
    Selector,
    TaskContext,
    TrainingStats,
    WorkerHalf,
)
from tessera.shared.methods.registry import FOLDERS, methods
from tessera.simulation import Conditions, Result, Stalled, VirtualSite, Weights, simulate
from tessera.simulation.coordinator import VirtualCoordinator
from tessera.simulation.virtual_sites import DataSizes, VirtualSites
from tessera.worker.data.dataset import Dataset
from tessera.worker.governance.policy import Policy
from tessera.worker.model.build import instantiate
from tests.support.coordinator import refusing
from tests.support.tables import on_disk
from tests.support.tasks import VIT

NAMES = ("east", "north", "south", "west")
DROPOUT = {**VIT, "hidden_dropout_prob": 0.1, "num_hidden_layers": 1}


def images(seed: int, count: int = 16, held_out: int = 0) -> Dataset:
    """`pixel_values` float32 [count, 1, 8, 8] and `labels` int64 [count]."""
    dice = torch.Generator().manual_seed(seed)
    pixels = torch.randn(count, 1, 8, 8, generator=dice)
    labels = torch.randint(0, 3, (count,), generator=dice)
    rest = images(seed + 1000, held_out) if held_out else None
    return Dataset({"pixel_values": pixels, "labels": labels}, held_out=rest)


@pytest.fixture(scope="module")
def model() -> Weights:
    """A small ViT whose dropout draws on the dice of each task."""
    return Weights.of(instantiate(DROPOUT, "image-classification", seed=1), DROPOUT, "image-classification")


SITES = {name: images(seed) for seed, name in enumerate(NAMES)}


def spec(method: str = "fedavg", rounds: int = 2, settings: Any = None, **wanted: Any) -> dict[str, Any]:
    training = {"batch_size": 8, "learning_rate": 0.05}
    chosen = {"name": method, "settings": settings or {}}
    return {"method": chosen, "rounds": rounds, "training": training, **wanted}


def digests(result: Result) -> list[str]:
    return [version.digest for version in result.versions]


def asked(result: Result) -> list[list[str]]:
    """Who was asked at each attempt at each round."""
    return [[task.worker.partition("/")[0] for task in made.tasks] for made in result.rounds]


def test_sites_of_a_simulated_sum_draw_other_numbers_from_the_seed_that_they_share() -> None:
    sites = VirtualSites({"east": SITES["east"], "west": VirtualSite(SITES["west"], audit_key=bytes(32))}, loaded=2)
    in_sum = [sites.seed_key(name, in_sum=True) for name in ("east", "west")]
    assert len({*in_sum, None}) == 3
    # Elsewhere each has a seed of its own, and the versions are as before.
    assert sites.seed_key("east", in_sum=False) is None
    assert sites.seed_key("west", in_sum=False) == in_sum[1]


# ---------------------------------------------------------------- what comes out


def test_the_same_settings_make_the_same_versions_and_another_seed_makes_others(model: Weights) -> None:
    first = simulate(spec(), model, SITES)
    assert digests(simulate(spec(), model, SITES)) == digests(first)
    assert digests(simulate(spec(seed=1), model, SITES))[1:] != digests(first)[1:]


def test_a_site_whose_data_change_trains_and_is_measured_on_the_new_ones_from_that_round_on(
    model: Weights, tmp_path: Path
) -> None:
    before, after = images(1, 12, held_out=4), images(7, 20, held_out=6)
    changing = {**SITES, "north": VirtualSite(before, changes={2: after})}
    wanted = spec(rounds=2, evaluation={"sites": True})
    conditions = Conditions(policy=Policy(min_evaluation_examples=1))

    def run(sites: Mapping[str, Any], **more: Any) -> Result:
        return simulate(wanted, model, sites, conditions=conditions, **more)

    found, same = run(changing), run({**SITES, "north": before})
    assert digests(found)[:2] == digests(same)[:2]
    assert digests(found)[2] != digests(same)[2]
    examples = [task.examples for made in found.rounds for task in made.tasks if task.worker == "north/worker"]
    assert examples == [12, 20]
    measured = {each.version: each.examples for each in found.measurements if each.site == "north"}
    assert measured == {0: 4, 1: 4, 2: 6}
    # A stopped simulation knows its data again, and refuses others.
    run(changing, out=tmp_path, until=1)
    with refusing("invalid", "other settings or data") as caught:
        run({**SITES, "north": VirtualSite(before, changes={2: images(8, 20, held_out=6)})}, out=tmp_path)
    assert [fault.pointer for fault in caught.value.errors] == ["/sites/north/changes/2/content"]
    assert digests(run(changing, out=tmp_path)) == digests(found)


def test_a_private_simulation_can_be_repeated_and_another_seed_draws_other_noise(model: Weights) -> None:
    pytest.importorskip("opacus")
    private = {"privacy": {"epsilon": 3.0, "delta": 1e-3, "clip_norm": 1.0}, "rounds": 2}
    first = simulate(spec(**private), model, {"alone": images(0)})
    assert digests(simulate(spec(**private), model, {"alone": images(0)})) == digests(first)
    other = simulate(spec(**private, seed=1), model, {"alone": images(0)})
    assert not set(digests(other)[1:]) & set(digests(first)[1:])
    assert len(set(digests(first))) == 3  # and each round other noise


def test_each_round_takes_up_the_schedule_where_the_round_before_left_it(model: Weights) -> None:
    rates: list[float] = []
    hook = register_optimizer_step_pre_hook(lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"]))
    try:
        training = {"batch_size": 8, "learning_rate": 0.05, "schedule": "linear", "steps": 2}
        simulate(spec(training=training, rounds=2), model, {"alone": images(0)})
    finally:
        hook.remove()
    assert rates == [pytest.approx(0.05 * share) for share in (1.0, 0.75, 0.5, 0.25)]


def test_in_which_order_sites_are_named_does_not_matter(model: Weights) -> None:
    turned = dict(reversed(SITES.items()))
    assert digests(simulate(spec(rounds=1), model, turned)) == digests(simulate(spec(rounds=1), model, SITES))


def test_a_single_site_is_plain_training_in_one_place(model: Weights) -> None:
    # The weighted mean of one update is that update: what the version holds is what the site trained.
    result = simulate(spec(rounds=1, codec="raw"), model, {"alone": images(0)})
    moved = [name for name, values in result.arrays().items() if not np.array_equal(values, model.values[name])]
    assert len(moved) > 0.75 * len(model.values)
    assert asked(result) == [["alone"]]


def test_each_version_is_measured_centrally_and_at_each_site_that_holds_something_out(model: Weights) -> None:
    sites = {"a": images(0, held_out=20), "b": images(1, held_out=21), "c": images(2, held_out=19)}
    result = simulate(spec(rounds=2, evaluation={"sites": True, "every": 2}), model, sites, test=images(9, 30))
    found = {(one.version, one.site, one.held_out): one.examples for one in result.measurements}
    versions = (0, 2)
    assert found == {
        **{(version, "a", True): 20 for version in versions},
        **{(version, "b", True): 21 for version in versions},
        **{(version, "evaluator", False): 30 for version in versions},
    }
    assert result.outcomes[1].spreads["accuracy"].sites == 2
    assert set(result.scores()[2]) >= {"accuracy", "loss"}


@pytest.mark.parametrize(("least", "tells"), [(20, {"b"}), (1, {"a", "b"})])
def test_an_update_tells_a_loss_over_as_many_examples_as_the_policy_allows(
    least: int, tells: set[str], model: Weights
) -> None:
    sites = {"a": images(0, 19), "b": images(1, 20)}
    conditions = Conditions(policy=Policy(min_evaluation_examples=least))
    (made,) = simulate(spec(rounds=1), model, sites, conditions=conditions).rounds
    assert {task.worker.partition("/")[0] for task in made.tasks if "loss" in task.metrics} == tells


def test_texts_of_unequal_lengths_count_by_their_labels() -> None:
    config = {
        "model_type": "gpt2", "vocab_size": 4, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2,
        "bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": False,
    }  # fmt: skip
    network = instantiate(config, "causal-lm", seed=1)

    def texts(length: int, token: int) -> Dataset:
        ids = torch.full((20, length), token)
        return Dataset({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids})

    sites = {name: replace(texts(length, token), held_out=texts(length, token))
             for name, length, token in (("short", 2, 1), ("long", 8, 2))}  # fmt: skip
    evaluated = spec(rounds=1, evaluation={"sites": True, "every": 9})
    found = simulate(evaluated, Weights.of(network, config, "causal-lm"), sites)
    own = {one.site: one for one in found.measurements if one.version == 0}
    # Each text's first word follows none: 20 labels at one site, 140 at the other.
    assert {site: one.metrics.get("labels", one.examples) for site, one in own.items()} == {"short": 20, "long": 140}
    pooled = (20 * own["short"].metrics["loss"] + 140 * own["long"].metrics["loss"]) / 160
    assert found.scores()[0]["loss"] == pytest.approx(pooled)
    assert own["short"].metrics["loss"] != own["long"].metrics["loss"]


def test_frozen_blocks_are_fetched_once_and_never_sent(model: Weights) -> None:
    settings = {"warmup_rounds": 1, "scope": "v_head"}
    result = simulate(spec("fedfrozen", rounds=3, settings=settings, codec="raw"), model, SITES)
    warm, first, second = result.outcomes
    whole = len(SITES) * model.model.nbytes
    assert warm.upload_bytes > whole
    assert warm.download_bytes > whole
    # The first frozen round fetches what the warm-up changed; from then on only what is open moves.
    assert first.download_bytes > whole
    assert second.download_bytes < 0.6 * first.download_bytes
    assert second.upload_bytes < 0.2 * warm.upload_bytes


def test_what_sites_keep_is_theirs_and_outlives_a_round(model: Weights) -> None:
    result = simulate(spec("fedper", rounds=2), model, SITES)
    heads = {site: result.kept(site)["classifier.weight"].tobytes() for site in SITES}
    assert len(set(heads.values())) == len(SITES)
    np.testing.assert_array_equal(result.arrays()["classifier.weight"], model.values["classifier.weight"])


# ---------------------------------------------------------------- who takes part


def test_sites_weigh_by_their_examples_however_unequal_they_are(model: Weights) -> None:
    # Of 8, 8, 8 and 200 examples, a limit of four times the median would leave the last one 32 of its 200.
    sites = {name: images(seed, 200 if name == "west" else 8) for seed, name in enumerate(NAMES)}
    made = [simulate(spec(rounds=1, **bound), model, sites) for bound in ({}, {"max_examples": "unlimited"})]
    assert made[0].versions[-1].digest == made[1].versions[-1].digest
    limited = simulate(spec(rounds=1, max_examples=32), model, sites).versions[-1]
    assert limited.digest != made[0].versions[-1].digest
    assert ["which west (200) would exceed" in warning for warning in limited.warnings] == [True]


def test_a_cohort_is_drawn_for_each_round(model: Weights) -> None:
    drawn = asked(simulate(spec(rounds=4, cohort={"size": 2}), model, SITES))
    assert all(len(names) == 2 for names in drawn)
    assert len({tuple(names) for names in drawn}) > 1


def test_a_site_that_is_away_is_not_asked_and_comes_back_with_what_it_kept(model: Weights) -> None:
    result = simulate(spec("fedper", rounds=3), model, SITES, conditions=Conditions(away={"north": (2,)}))
    present = [name for name in NAMES if name != "north"]
    assert asked(result) == [list(NAMES), present, list(NAMES)]
    once = simulate(spec("fedper", rounds=3), model, SITES, until=1)
    assert once.kept("north")["classifier.weight"].tobytes() != result.kept("north")["classifier.weight"].tobytes()


def test_a_condition_of_an_unknown_site_is_refused(model: Weights) -> None:
    with refusing("invalid", "away: there is no site 'nroth'; did you mean `north`?"):
        simulate(spec(), model, SITES, conditions=Conditions(away={"nroth": (2,)}))


def test_workers_that_fall_silent_are_done_without_and_a_round_without_quorum_is_tried_again(model: Weights) -> None:
    wanted = spec(cohort={"quorum": 3, "max_attempts": 10})
    told: list[RoundOutcome] = []
    result = simulate(wanted, model, SITES, conditions=Conditions(dropout=0.4), watch=told.append)
    states = [made.state for made in result.rounds]
    assert states.count("committed") == 2
    assert "abandoned" in states
    assert [outcome.round for outcome in told] == list(result.rounds)
    ended = {task.state for made in result.rounds for task in made.tasks}
    # As at a coordinator, which cancels the task of a worker that does not come back with its round.
    assert ended == {"left_out", "cancelled", "merged"}
    # Of what was accepted in vain nothing is left either.
    assert (
        len(list((result.folder / "blobs").glob("??/*")))
        == len(result.states.manifest(digests(result)[-1]).digests) + 2
    )


def test_the_first_updates_are_enough_if_the_run_says_so(model: Weights) -> None:
    result = simulate(spec(rounds=3, cohort={"target_updates": 2}), model, SITES)
    for made in result.rounds:
        assert sorted(task.state for task in made.tasks) == ["cancelled", "cancelled", "merged", "merged"]
    assert len({tuple(task.state for task in made.tasks) for made in result.rounds}) > 1


def test_a_run_that_cannot_reach_its_quorum_stops_and_says_why(model: Weights) -> None:
    with pytest.raises(Stalled, match="round 2 cannot open: 1 sites are there, and the quorum is 2"):
        simulate(
            spec(cohort={"quorum": 2}),
            model,
            {"a": images(0), "b": images(1)},
            conditions=Conditions(away={"a": (2,)}),
        )


def test_a_round_without_a_required_site_is_not_merged_in_a_simulation_either(model: Weights) -> None:
    wanted = spec(cohort={"require": ["b"], "max_attempts": 1})
    with pytest.raises(Stalled, match=r"round 2 cannot open: 1 sites are there, and cohort\.require names b"):
        simulate(wanted, model, {"a": images(0), "b": images(1)}, conditions=Conditions(away={"b": (2,)}))


def test_the_bound_on_norms_is_kept_as_the_method_stretches_them(model: Weights) -> None:
    # Of 1, 2 and 3 batches.
    sites = {name: images(count, count) for name, count in (("a", 8), ("b", 16), ("c", 24))}
    result = simulate(spec("fednova", rounds=2), model, sites)
    per_step = [
        median(task.metrics["update_norm"] / task.metrics["effective_steps"] for task in made.tasks)
        for made in result.rounds
    ]
    assert result.bounds is not None
    assert result.bounds.median_norm == pytest.approx(max(per_step))


def test_an_update_out_of_bounds_is_refused_and_the_round_goes_on(model: Weights) -> None:
    free = simulate(spec(rounds=1), model, SITES).rounds[0].tasks
    norms = sorted(task.metrics["update_norm"] for task in free)
    result = simulate(spec(rounds=1, max_update_norm=(norms[1] + norms[2]) / 2), model, SITES)
    assert sorted(task.state for task in result.rounds[0].tasks) == ["merged", "merged", "rejected", "rejected"]
    refused = next(task for task in result.rounds[0].tasks if task.state == "rejected")
    assert refused.problem is not None
    assert "l2 norm" in refused.problem.detail


def test_what_the_sites_policy_forbids_is_not_done(model: Weights) -> None:
    conditions = Conditions(policy=Policy(never_send=("classifier.*",)))
    with pytest.raises(Stalled, match=r"policy-violation: never_send: these blocks never leave: classifier\.bias"):
        simulate(spec(cohort={"max_attempts": 1}), model, SITES, conditions=conditions)
    assert simulate(spec("fedper", rounds=1), model, SITES, conditions=conditions).over


def test_a_site_whose_training_diverges_is_told_of(model: Weights) -> None:
    huge = Dataset({"pixel_values": torch.full((8, 1, 8, 8), torch.inf), "labels": torch.zeros(8, dtype=torch.int64)})
    sites = {**SITES, "bad": huge}
    made = simulate(spec(rounds=1), model, sites).rounds[0]
    failed = next(task for task in made.tasks if task.worker == "bad/worker")
    assert (made.state, failed.state) == ("committed", "failed")
    assert failed.problem is not None
    assert "no-finite-loss: the loss is nan" in failed.problem.detail
    with pytest.raises(Stalled, match=r"no more can come; the quorum is 5 .*; bad/worker: no-finite-loss: the loss"):
        simulate(spec(rounds=1, cohort={"quorum": 5, "max_attempts": 1}), model, sites)


# ---------------------------------------------------------------- memory and disk


def test_data_are_loaded_when_their_site_takes_part_and_few_are_held(model: Weights) -> None:
    alive: set[int] = set()
    most = 0

    class Watched(Dataset):
        def __del__(self) -> None:
            alive.discard(id(self))

    def loads(seed: int) -> Callable[[], Dataset]:
        def load() -> Dataset:
            nonlocal most
            dataset = Watched(images(seed).tensors)
            alive.add(id(dataset))
            most = max(most, len(alive))
            return dataset

        return load

    sites = {f"s{seed}": VirtualSite(loads(seed)) for seed in range(5)}
    lazy = simulate(spec(rounds=2), model, sites, conditions=Conditions(loaded=2))
    # Two that are held, and the one being loaded.
    assert most <= 3
    eager = simulate(spec(rounds=2), model, {f"s{seed}": images(seed) for seed in range(5)})
    assert digests(lazy) == digests(eager)


def test_only_the_latest_versions_stay_on_disk(model: Weights, tmp_path: Path) -> None:
    def held(folder: Path) -> int:
        return sum(file.is_file() for file in (folder / "blobs").rglob("*"))

    one = simulate(spec(rounds=3), model, SITES, out=tmp_path / "one")
    everything = Conditions(keep_versions="all")
    whole = simulate(spec(rounds=3), model, SITES, out=tmp_path / "all", conditions=everything)
    assert digests(one) == digests(whole)
    # The last version's blocks, its manifest, and the model's document; no update.
    assert held(tmp_path / "one") == len({*one.states.manifest(digests(one)[-1]).digests}) + 2
    assert held(tmp_path / "all") > 3 * len(model.values)
    with refusing("not-found"):
        one.arrays(1)
    assert whole.arrays(0).keys() == one.arrays().keys()
    # What is not there any more cannot be kept from now on, and is no hindrance.
    simulate(spec(rounds=3), model, SITES, out=tmp_path / "more", until=1)
    more = simulate(spec(rounds=3), model, SITES, out=tmp_path / "more", conditions=everything)
    assert digests(more) == digests(whole)
    assert more.arrays(2).keys() == one.arrays().keys()


def test_a_result_without_a_folder_leaves_none_behind(model: Weights) -> None:
    result = simulate(spec(rounds=1), model, SITES)
    folder = result.folder
    assert folder.exists()
    del result
    gc.collect()
    assert not folder.exists()


def test_one_that_breaks_off_without_a_folder_leaves_none_behind(
    model: Weights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def interrupt(outcome: RoundOutcome) -> None:
        assert any(tmp_path.iterdir())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(spec(), model, SITES, watch=interrupt)
    assert not any(tmp_path.iterdir())


# ---------------------------------------------------------------- stopping and going on


class Killed(BaseException):
    """Stands for the death of the process: nothing catches it."""


@pytest.fixture
def dying(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], list[int]]]:
    """Has the process die at the n-th time that it gives a file its name; 0 only counts."""
    rename = Path.replace

    def arm(at: int) -> list[int]:
        count = [0]

        def replace(self: Path, target: Any) -> Path:
            count[0] += 1
            if count[0] == at:
                raise Killed
            return rename(self, target)

        monkeypatch.setattr(Path, "replace", replace)
        return count

    yield arm
    monkeypatch.setattr(Path, "replace", rename)


@pytest.mark.parametrize(
    ("method", "apart"),
    [("scaffold", 37), *(pytest.param(name, 7, marks=pytest.mark.long) for name in ("fedper", "scaffold"))],
)
def test_wherever_it_is_killed_it_goes_on_with_the_same_bits(
    model: Weights, tmp_path: Path, dying: Callable[[int], list[int]], method: str, apart: int
) -> None:
    wanted = spec(method, rounds=2, evaluation={"sites": True})
    wanted["training"] = {**wanted["training"], "optimizer": "sgd"}
    sites = {"a": images(0, 8, held_out=2), "b": images(1, 8, held_out=2)}

    def run(out: Path) -> Result:
        return simulate(wanted, model, sites, out=out)

    count = dying(0)
    whole = run(tmp_path / "whole")
    names = whole.kept("a").keys()
    assert names
    for at in range(1, count[0] + 1, apart):
        dying(at)
        with pytest.raises(Killed):
            run(tmp_path / str(at))
        dying(0)
        resumed = run(tmp_path / str(at))
        assert digests(resumed) == digests(whole), at
        assert resumed.measurements == whole.measurements, at
        for site in sites:
            assert {name: values.tobytes() for name, values in resumed.kept(site).items()} == {
                name: values.tobytes() for name, values in whole.kept(site).items()
            }, at


def test_killed_between_the_opening_of_a_round_and_the_claims_it_goes_on_at_the_same_time(
    model: Weights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def claim(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(VirtualCoordinator, "claim", claim)
        with pytest.raises(Killed):
            simulate(spec(), model, SITES, out=tmp_path)
    whole, resumed = simulate(spec(), model, SITES), simulate(spec(), model, SITES, out=tmp_path)
    assert (digests(resumed), resumed.simulated_seconds) == (digests(whole), whole.simulated_seconds)


def test_until_stops_at_a_version_and_the_rest_is_the_same(model: Weights, tmp_path: Path) -> None:
    whole = simulate(spec(rounds=3), model, SITES, test=images(9))
    for until in (0, 1, 2, 2, None):
        part = simulate(spec(rounds=3), model, SITES, test=images(9), out=tmp_path, until=until)
        assert len(part.versions) == (4 if until is None else until + 1)
        assert part.over == (until is None)
    assert digests(part) == digests(whole)
    assert part.scores() == whole.scores()
    # One that is over does nothing more.
    told: list[RoundOutcome] = []
    again = simulate(spec(rounds=3), model, SITES, test=images(9), out=tmp_path, watch=told.append)
    assert (told, digests(again)) == ([], digests(whole))
    assert simulate(spec(rounds=3), model, SITES, test=images(9), out=tmp_path, until=1).over


def test_results_of_a_method_before_its_file_changed_are_not_taken(
    model: Weights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "methods" / "mine.py"
    file.parent.mkdir()
    code = """
from tessera.shared.methods.base import CoordinatorHalf, Method, MethodSettings

class Mine(CoordinatorHalf[MethodSettings]):
    \"\"\"FedAvg.\"\"\"

METHOD = Method(name="mine", coordinator=Mine, source="")
"""
    monkeypatch.setenv(FOLDERS, str(file.parent))
    mine = {**spec(), "method": {"name": "mine"}}
    try:
        for _ in range(2):
            file.write_text(code)
            methods.cache_clear()
            simulate(mine, model, SITES, out=tmp_path / "out", until=1)
        file.write_text(code.replace("FedAvg", "Another"))
        with refusing("invalid", "other settings") as caught:
            simulate(mine, model, SITES, out=tmp_path / "out", until=1)
        assert [fault.pointer for fault in caught.value.errors] == ["/method_file"]
    finally:
        methods.cache_clear()


def test_a_folder_is_of_one_simulation_and_of_one_process(model: Weights, tmp_path: Path) -> None:
    simulate(spec(), model, SITES, out=tmp_path, until=1)
    with refusing("invalid", "other settings") as caught:
        simulate(spec(rounds=4, seed=1), model, {**SITES, "east": images(7, 9)}, out=tmp_path)
    found = {fault.pointer: fault.detail for fault in caught.value.errors}
    assert found.pop("/sites/east/content").startswith("was ")
    assert found == {
        "/sites/east/examples": "was 16 and is 9",
        "/spec/rounds": "was 2 and is 4",
        "/spec/seed": "was 0 and is 1",
    }

    more = {f"site-{number}": images(number) for number in range(21)}
    with refusing("invalid", "or data, the first 20 of 25") as caught:
        simulate(spec(), model, more, out=tmp_path)
    assert len(caught.value.errors) == 20

    def meanwhile(outcome: RoundOutcome) -> None:
        with refusing("invalid", "another process is using"):
            simulate(spec(), model, SITES, out=tmp_path)

    assert simulate(spec(), model, SITES, out=tmp_path, watch=meanwhile).over


def test_a_folder_does_not_go_on_with_other_data_of_the_same_size(model: Weights, tmp_path: Path) -> None:
    sites = {"east": images(0, held_out=20), "west": images(1)}
    simulate(spec(rounds=1), model, sites, test=images(9), out=tmp_path)
    east = sites["east"]
    corrected = {**east.tensors, "labels": east.tensors["labels"].roll(1)}
    for changed, test, resources, pointer in (
        (replace(east, tensors=corrected), images(9), {}, "/sites/east/content"),
        (replace(east, held_out=images(5, 20)), images(9), {}, "/sites/east/content"),
        (east, images(8), {}, "/test/content"),
        (east, images(9), {"gpu_memory": 8.0}, "/sites/east/resources/gpu_memory"),
    ):
        given = {**sites, "east": VirtualSite(changed, resources)}
        with refusing("invalid", "a simulation with other settings or data") as caught:
            simulate(spec(rounds=1), model, given, test=test, out=tmp_path)
        assert [fault.pointer for fault in caught.value.errors] == [pointer]
    assert simulate(spec(rounds=1), model, sites, test=images(9), out=tmp_path).over


def test_the_content_of_a_site_is_what_results_depend_on() -> None:
    labels = {"labels": torch.tensor([0, 1])}

    def stored(*values: float) -> Dataset:
        return on_disk(labels, torch.tensor([[value] for value in values]).__getitem__, (1,))

    texts = Dataset(labels, sources=[b"a", b"b"])
    different = [
        texts,
        replace(texts, sources=[b"a", b"c"]),
        replace(texts, sources=np.array([[97], [99]], np.uint8), tensors={"labels": torch.tensor([1, 1])}),
        replace(texts, pack=True),
        stored(1.0, 2.0),
        stored(1.0, 3.0),
    ]
    assert len({DataSizes.of(data).content for data in different}) == len(different)
    assert DataSizes.of(replace(texts, sources=np.array([[97], [98]], np.uint8))) == DataSizes.of(texts)


# ---------------------------------------------------------------- refusals and faults


class Faulty(WorkerHalf[MethodSettings]):
    def collect(self, context: TaskContext, selected: Selector, stats: TrainingStats) -> LocalResult:
        raise KeyError("a slip in the method's code")


class Spoilt(WorkerHalf[MethodSettings]):
    """Has a value to keep that overflowed in the last step."""

    def collect(self, context: TaskContext, selected: Selector, stats: TrainingStats) -> LocalResult:
        return replace(super().collect(context, selected, stats), keep={"own": np.array([1, np.inf], np.float32)})


class Brief(CoordinatorHalf[MethodSettings]):
    """Has had enough after two rounds."""

    def plan(self, state: Any, cohort: Any, rng: Any) -> Mapping[str, Any]:
        return super().plan(state, cohort, rng) if state.round < 2 else {}


@pytest.fixture
def _more_methods() -> Iterator[None]:
    made = {
        "faulty": (CoordinatorHalf[MethodSettings], Faulty),
        "spoilt": (CoordinatorHalf[MethodSettings], Spoilt),
        "brief": (Brief, WorkerHalf[MethodSettings]),
    }
    for name, (coordinator, worker) in made.items():
        methods()[name] = Method(name, coordinator=coordinator, worker=worker, source="a test")
    yield
    for name in made:
        del methods()[name]


@pytest.mark.usefixtures("_more_methods")
def test_a_fault_in_a_methods_code_is_seen_as_it_is(model: Weights) -> None:
    with pytest.raises(KeyError, match="a slip"):
        simulate(spec("faulty"), model, SITES)


@pytest.mark.usefixtures("_more_methods")
def test_a_site_keeps_no_values_from_which_it_could_not_train_again(model: Weights) -> None:
    with pytest.raises(Stalled, match="diverged: own, which the site keeps, is not finite with a learning rate"):
        simulate(spec("spoilt", cohort={"max_attempts": 1}), model, SITES)


@pytest.mark.usefixtures("_more_methods")
def test_a_method_that_plans_nothing_more_ends_the_run(model: Weights) -> None:
    result = simulate(spec("brief", rounds=5), model, SITES)
    assert (len(result.versions), result.over) == (3, True)


@pytest.mark.parametrize(
    ("wanted", "pointer"),
    [
        ({"rounds": -1}, "/rounds"),
        ({"method": "nothing"}, "/method/name"),
        ({"method": "fedprox", "settings": {"nu": 1}}, "/method/settings/nu"),
        ({"evaluation": {"dataset": "elsewhere"}}, "/evaluation/dataset"),
        ({"method": "scaffold"}, "/method"),
    ],
)
def test_a_spec_that_makes_no_run_is_refused(model: Weights, wanted: dict[str, Any], pointer: str) -> None:
    with refusing("invalid") as caught:
        simulate(spec(**wanted), model, SITES)
    assert pointer in {fault.pointer for fault in caught.value.errors}


@pytest.mark.parametrize("asked", ["describe", "membership_attack"])
def test_a_simulation_asks_for_no_counts_of_data(model: Weights, asked: str) -> None:
    with refusing("invalid", "a simulation trains"):
        simulate(spec(rounds=0, **{asked: True}), model, SITES)


def test_a_run_whose_sites_have_trained_as_often_as_they_may_stops_with_the_reason(model: Weights) -> None:
    with pytest.raises(Stalled, match="max_updates_per_site"):
        simulate(spec(rounds=3, cohort={"max_updates_per_site": 1}), model, SITES)


def test_a_federation_needs_a_site(model: Weights) -> None:
    with refusing("invalid", "needs a site"):
        simulate(spec(), model, {})


def test_a_robust_run_scores_its_updates(model: Weights) -> None:
    wanted = spec(rounds=2, robust={"rule": "median"}, cohort={"quorum": 3})
    told: list[RoundOutcome] = []
    result = simulate(wanted, model, SITES, watch=told.append)
    for made in result.rounds:
        scores = {task.worker.partition("/")[0]: task.metrics for task in made.tasks}
        assert set(scores) == set(NAMES)
        assert all({"anomaly.norm", "anomaly.distance", "anomaly.cosine"} <= set(found) for found in scores.values())
        # Honest sites: each goes somewhat the way of the median, and none is many times as far off as the others.
        assert all(found["anomaly.cosine"] > 0 for found in scores.values())
        assert all(0.2 < found["anomaly.distance"] < 5 for found in scores.values())
    assert [outcome.round for outcome in told] == list(result.rounds)


NAMED = {**DROPOUT, "id2label": {"0": "O", "1": "person", "2": "place"}}


def test_macro_f1_leaves_out_a_class_that_the_run_ignores_centrally_at_sites_and_over_their_counts() -> None:
    start = Weights.of(instantiate(NAMED, "image-classification", seed=1), NAMED, "image-classification")
    sites = {"a": images(0, held_out=40), "b": images(1, held_out=40)}

    def measured(**more: object) -> Result:
        return simulate(spec(rounds=1, evaluation={"sites": True, **more}), start, sites, test=images(9, 60))

    every, some = measured(), measured(ignore=["O"])
    assert digests(every) == digests(some)
    assert every.scores()[1].keys() == some.scores()[1].keys()
    for plain, other in zip(every.measurements, some.measurements, strict=True):
        assert {**other.metrics, "macro_f1": 0} == {**plain.metrics, "macro_f1": 0}
        if (counts := other.class_counts) is not None:
            by_class = zip(counts.hits[1:], counts.predictions[1:], counts.labels[1:], strict=True)
            f1 = [2 * hits / (made + true) for hits, made, true in by_class if made + true]
            assert other.metrics["macro_f1"] == pytest.approx(sum(f1) / len(f1), abs=1e-3)
    assert [bool(one.class_counts) for one in some.measurements] == [one.held_out for one in some.measurements]
    central = [one.metrics["macro_f1"] for result in (every, some) for one in result.measurements if not one.held_out]
    assert central[:2] != central[2:]


@pytest.mark.parametrize(
    ("config", "ignored", "told"),
    [
        (NAMED, ["0", "persn"], "names '0', which is no class of the model; it can be O, person, place"),
        (NAMED, ["persn"], "did you mean `person`?"),
        (NAMED, ["O", "person", "place"], "leaves no class for macro F1"),
        (DROPOUT, ["O"], "the model's config names none: add `id2label` to it"),
    ],
)
def test_a_label_that_macro_f1_cannot_leave_out_is_refused(
    config: dict[str, Any], ignored: list[str], told: str
) -> None:
    start = Weights.of(instantiate(config, "image-classification", seed=1), config, "image-classification")
    with refusing("invalid", "cannot be evaluated with these settings") as caught:
        simulate(spec(evaluation={"sites": True, "ignore": ignored}), start, SITES)
    (fault,) = caught.value.errors
    assert (fault.pointer, told in fault.detail) == ("/evaluation/ignore", True)
