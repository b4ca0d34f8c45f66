"""A memory of each site's latest update, beside a plain loop over arrays (CA2FL, Wang et al., ICLR 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import Bounds
from tessera.shared.api.versions import VersionRef
from tessera.shared.methods.base import MethodSpec
from tessera.shared.rounds.aggregate import AcceptedUpdate
from tessera.shared.rounds.planning import begun
from tessera.shared.rounds.server_step import MEMORY
from tessera.shared.rounds.update_memory import WEIGHT
from tessera.shared.tensors.dtypes import DType
from tessera.shared.tensors.lazy import to_array
from tessera.shared.updates.codecs.pipeline import LOSSLESS
from tests.shared.rounds.test_stale_updates import HEAD, MLP, MODEL, VARIANCE, Run

Latest = dict[str, AcceptedUpdate]
NO_BOUNDS = Bounds()


class Remembering(Run):
    """A run with a memory, on version 1."""

    def __init__(self, path: Path, dtype: DType = "F32", **cohort: Any) -> None:
        super().__init__(path, "fedavg", dtype)
        wanted = Cohort(mode="buffer", staleness="none", memory=True, **cohort)
        self.spec = self.spec.model_copy(update={"cohort": wanted, "method": MethodSpec(name="fedavg")})
        self.refs, self.versions = self.refs[:1], self.versions[:1]

    def commit(self, accepted: Sequence[AcceptedUpdate], latest: Latest, bounds: Bounds = NO_BOUNDS) -> VersionRef:
        """Merge into the latest version, and go on from the next."""
        sites = list(latest.values())
        made = self.aggregation.merge(self.spec, bounds, self.refs[-1], accepted, latest=sites)
        self.refs.append(made.ref)
        state = self.states.load(self.model, made.manifest, made.ref.number)
        self.versions.append({name: to_array(tensor) for name, tensor in state.model.items()})
        self.memory = {name: to_array(tensor) for name, tensor in state.server_state.items()}
        self.scalars = state.scalars
        latest |= {update.site: update for update in accepted}
        return made.ref


def looped(
    versions: list[Any], latest: dict[str, tuple[float, Any]], sent: dict[str, tuple[float, Any]]
) -> tuple[Any, Any]:
    """The formula's next value and memory, with each site's weight and step, from all latest steps."""
    before = sum((weight * step for weight, step in latest.values()), np.zeros_like(versions[-1]))
    change = np.zeros_like(before)
    for site, (weight, step) in sent.items():
        old_weight, old = latest.get(site, (0.0, np.zeros_like(before)))
        change += weight * step - old_weight * old
    total = sum(weight for weight, _ in {**latest, **sent}.values())
    share = sum(weight for weight, _ in sent.values()) / total
    return versions[-1] + share * before / total + change / total, (before + change) / total


# Of each version: site, the version that it started from, its step and examples.
ROUNDS: tuple[tuple[tuple[str, int, float, int], ...], ...] = (
    (("a", 1, 0.5, 10), ("b", 1, -0.25, 30)),
    (("a", 2, 0.25, 10),),
    (("slow", 1, 1.0, 60), ("a", 3, 0.125, 20)),
    (("b", 2, -0.5, 30),),
    (("a", 5, 0.5, 15), ("b", 5, 0.25, 30), ("slow", 4, -1.0, 60)),
    (("slow", 6, 0.75, 60),),
)


@pytest.mark.parametrize(
    ("codec", "dtype"),
    [
        *((codec, "F32") for codec in ("raw", LOSSLESS, "delta", "delta+int8+zstd", "delta+topk=0.25")),
        *((codec, "BF16") for codec in (LOSSLESS, "delta")),
    ],
)
def test_versions_and_memory_are_those_of_a_plain_loop(tmp_path: Path, codec: str, dtype: DType) -> None:
    run, latest = Remembering(tmp_path, dtype), Latest()
    expected: list[Any] = [run.versions[0][MLP.name].astype(np.float64)]
    steps: dict[str, tuple[float, Any]] = {}
    for number, sent in enumerate(ROUNDS, start=2):
        accepted, now = [], {}
        for site, base, step, examples in sent:
            update = replace(run.update(base, step, codec, worker=site), examples=examples)
            accepted.append(update)
            opened = run.aggregation.inspector.open(
                update.digest, run.model, run.states.manifest(update.base.digest), update.plan
            )
            # As the coordinator reads it: a lossy codec sends another step.
            read = to_array(opened[MLP.name]).astype(np.float64) - run.versions[base - 1][MLP.name]
            now[site] = (float(examples), read)
        value, memory = looped(expected, steps, now)
        expected.append(value)
        steps |= now
        run.commit(accepted, latest)
        # A version of 16 bits is rounded once; the memory is in float32 all the same.
        made, rounding = run.versions[-1][MLP.name].astype(np.float64), 2**-8 if dtype == "BF16" else 0
        np.testing.assert_allclose(made, value, rtol=rounding, atol=2e-6, err_msg=f"version {number}")
        expected[-1] = made if rounding else value
        np.testing.assert_allclose(run.memory[MEMORY + MLP.name], memory, atol=2e-6)
        assert run.scalars[WEIGHT] == sum(weight for weight, _ in steps.values())
    mean = sum(weight * step for weight, step in steps.values()) / sum(weight for weight, _ in steps.values())
    np.testing.assert_allclose(run.memory[MEMORY + MLP.name], mean, atol=1e-6)


def test_with_equal_weights_the_step_is_that_of_the_paper_times_k_of_n(tmp_path: Path) -> None:
    run, latest = Remembering(tmp_path), Latest()
    run.commit([run.update(1, step, worker=site) for site, step in (("a", 0.5), ("b", 1.0), ("c", -0.75))], latest)
    before = run.versions[-1][HEAD.name]
    h = (0.5 + 1.0 - 0.75) / 3
    run.commit([run.update(2, 0.25, worker="a"), run.update(2, 0.75, worker="b")], latest)
    step = 2 / 3 * (h + ((0.25 - 0.5) + (0.75 - 1.0)) / 2)
    np.testing.assert_allclose(run.versions[-1][HEAD.name], before + step, atol=1e-6)


def test_if_all_sites_send_the_version_is_their_mean_to_the_bit(tmp_path: Path) -> None:
    run, plain, latest = Remembering(tmp_path / "a"), Remembering(tmp_path / "b"), Latest()
    plain.spec = plain.spec.model_copy(update={"cohort": Cohort(mode="buffer", staleness="none")})
    for number, steps in enumerate(((0.3, 0.7), (-0.1, 0.2), (0.11, 0.13)), start=1):
        for each, known in ((run, latest), (plain, {})):
            each.commit(
                [each.update(number, step, worker=site) for site, step in zip("ab", steps, strict=True)], known
            )
        same = [each.states.manifest(each.refs[-1].digest).blocks for each in (run, plain)]
        assert same[0] == same[1]


def test_a_site_that_has_withdrawn_leaves_the_memory(tmp_path: Path) -> None:
    run, latest = Remembering(tmp_path), Latest()
    run.commit([run.update(1, step, worker=site) for site, step in (("a", 0.5), ("b", 1.0), ("c", -4.0))], latest)
    del latest["c"]
    before = run.versions[-1][HEAD.name]
    run.commit([run.update(2, 0.25, worker="a")], latest)
    # h of a and b alone: (0.5 + 1) / 2.
    np.testing.assert_allclose(run.versions[-1][HEAD.name], before + (0.75 + 0.25 - 0.5) / 2, atol=1e-6)
    np.testing.assert_allclose(run.memory[MEMORY + HEAD.name], (0.25 + 1.0) / 2, atol=1e-6)
    run.commit([run.update(3, 1.0, worker="b")], latest)
    np.testing.assert_allclose(run.memory[MEMORY + HEAD.name], (0.25 + 1.0) / 2, atol=1e-6)


def test_a_weight_is_limited_in_the_memory_as_in_the_mean(tmp_path: Path) -> None:
    run, latest, bounds = Remembering(tmp_path), Latest(), Bounds(max_examples=20)
    large = replace(run.update(1, 1.0, worker="large"), examples=1000)
    run.commit([large, replace(run.update(1, 0.0, worker="small"), examples=20)], latest, bounds)
    run.commit([replace(run.update(2, 0.0, worker="small"), examples=20)], latest, bounds)
    np.testing.assert_allclose(run.memory[MEMORY + HEAD.name], 0.5, atol=1e-6)
    assert run.scalars[WEIGHT] == 40


def test_running_variances_are_averaged_without_a_memory(tmp_path: Path) -> None:
    run, latest = Remembering(tmp_path), Latest()
    run.commit([run.update(1, -9, worker=site, moves=[HEAD, VARIANCE]) for site in "ab"], latest)
    assert MEMORY + VARIANCE.name not in run.memory
    run.commit([run.update(2, -0.5, worker="a", moves=[HEAD, VARIANCE])], latest)
    np.testing.assert_allclose(run.versions[-1][VARIANCE.name], 0.5, atol=1e-6)


def test_a_run_that_begins_with_another_run_s_version_remembers_nothing(tmp_path: Path) -> None:
    run, latest = Remembering(tmp_path), Latest()
    run.commit([run.update(1, 1.0, worker=site) for site in "ab"], latest)
    state = run.states.load(MODEL, run.states.manifest(run.refs[-1].digest), 0)
    assert any(name.startswith(MEMORY) for name in state.server_state)
    first = begun(run.spec, MODEL, state)
    assert (first.server_state, first.scalars, first.model) == ({}, {}, state.model)


# ---------------------------------------------------------------- FedAsync


@pytest.mark.parametrize("codec", ["raw", LOSSLESS, "delta"])
def test_mixing_moves_a_version_towards_the_values_that_a_site_sent(tmp_path: Path, codec: str) -> None:
    run = Run(tmp_path, "fedavg")
    run.spec = run.spec.model_copy(update={"cohort": Cohort(mode="buffer", target_updates=1, quorum=1, mixing=0.6)})
    late = replace(run.update(1, 0.5, codec), since=[ref.digest for ref in run.refs[1:]])
    merged, present = run.merged(late), run.versions[2]
    # Of the MLP two versions were made since, of the head none.
    for block, changes in ((MLP, 2), (HEAD, 0)):
        sent = run.versions[0][block.name] + 0.5
        share = 0.6 / (1 + changes) ** 0.5
        wanted = present[block.name] + share * (sent - present[block.name])
        np.testing.assert_allclose(merged[block.name], wanted, atol=1e-6)


@pytest.mark.parametrize(
    ("cohort", "said"),
    [
        ({"memory": True}, 'set staleness to "none"'),
        ({"memory": True, "staleness": "none", "mixing": 0.5, "target_updates": 1}, "leave one out"),
        ({"mixing": 0.5, "target_updates": 2}, "set target_updates and quorum to 1"),
    ],
)
def test_what_would_correct_late_updates_twice_is_refused(cohort: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Cohort(mode="buffer", **cohort)
