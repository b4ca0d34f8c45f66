"""Secure sums of 16 bits: half the bytes, and what rounding drops goes with the next update."""

from __future__ import annotations

from io import BytesIO
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from tessera.shared.api.runs import RunSpec
from tessera.shared.problems import Invalid
from tessera.shared.rounds.secure_sums import Precision, exponent_of
from tessera.shared.secure_sums.masked_update import write_masked
from tessera.shared.secure_sums.messages import RingBlock, levels_of
from tessera.shared.tensors.lazy import Array, ArrayTensor
from tessera.simulation import Result, Weights, simulate
from tessera.worker.model.build import instantiate
from tessera.worker.state.error_feedback import Feedback
from tests.simulation.test_simulation import SITES, model, spec
from tests.support.secure_sums import Federation, Steps, ring_of
from tests.support.tasks import VIT

__all__ = ["model"]

HELPERS = sorted(SITES)[:3]
SGD = {"batch_size": 8, "learning_rate": 0.05, "optimizer": "sgd"}


def run(model: Weights, out: Path | None = None, **wanted: Any) -> Result:
    return simulate(
        spec(rounds=2, **{"training": SGD, "cohort": {"size": 4, "quorum": 3}, **wanted}), model, SITES, out=out
    )


def secure(bits: int, **more: Any) -> dict[str, Any]:
    return {"secure_sums": {"helpers": HELPERS, "quorum": 3, "bits": bits}, **more}


def moved(result: Result, model: Weights) -> Array:
    return np.concatenate([(values - model.values[name]).ravel() for name, values in result.arrays().items()])


def test_a_run_ends_near_that_of_plain_updates_with_half_the_bytes(tmp_path: Path) -> None:
    # Nothing random: in a sum sites draw other numbers.
    model = Weights.of(instantiate(VIT, "image-classification", seed=1), VIT, "image-classification")
    whole = {"training": {**SGD, "batch_size": None, "steps": 2, "epochs": None}}
    plain = run(model, **whole)
    few, many = run(model, tmp_path / "few", **secure(16), **whole), run(model, **secure(32), **whole)
    expected = moved(plain, model)
    errors = [float(np.linalg.norm(moved(each, model) - expected) / np.linalg.norm(expected)) for each in (many, few)]
    # After two rounds: in later ones training itself makes a small difference large.
    assert errors[0] < 1e-3
    # The unit is a power of two: a norm beside one may give twice the error on another processor.
    assert errors[1] < 2e-2
    sent = [each.outcomes[-1].upload_bytes for each in (few, many)]
    # Two bytes less for each value of each site; headers are as long as before.
    assert sent[1] - sent[0] == pytest.approx(2 * expected.size * len(SITES), rel=0.01)
    kept = [
        path.read_bytes()
        for path in (tmp_path / "few").rglob("*.safetensors")
        if b"feedback/rest" in path.read_bytes()
    ]
    assert kept
    assert [version.digest for version in run(model, **secure(16), **whole).versions] == [
        version.digest for version in few.versions
    ]


def test_what_is_dropped_does_not_add_up_over_rounds() -> None:
    terms = Federation(30, 4, bits=16, sizes={"head": 500}).terms()
    unit, rounds, feedback = 2.0 ** terms.blocks["head"].exponent, 60, Feedback("train")
    step, total = np.full(500, 0.3 * unit, np.float32), np.zeros(500)
    for number in range(rounds):
        rest = feedback.rests.get("head")
        steps = {"head": Steps(step if rest is None else step + rest.values)}
        file = BytesIO()
        written = write_masked(file, terms, steps, terms.max_weight, [], number, keep_rests=True)
        (values,) = ring_of(file.getvalue(), terms, ["head"])["head"].chunks()
        total += values.view(np.int16)
        feedback.keep(written.rests)
    # Each value is off by less than one unit; draws without feedback would be off by several.
    assert float(np.abs(total - 0.3 * rounds).max()) <= 1 + 1e-3 < sqrt(rounds * 0.3 * 0.7)


class Values(ArrayTensor):
    """Values that are compared as stored ones are: by what they are, not one by one."""

    __eq__, __hash__ = object.__eq__, object.__hash__


@pytest.mark.parametrize("moving", [6, 300, 600])
def test_values_that_a_single_site_moves_arrive_in_all_rounds(moving: int) -> None:
    """Thirty sites, each of which moves values of its own: some of 600 values, or all."""
    sites, rounds, fed = 30, 8, Federation(30, 4, bits=16, sizes={"head": 600})
    states = [np.random.default_rng(1).normal(scale=0.05, size=600).astype(np.float32)]
    steps = np.zeros((sites, 600), np.float32)
    steps[np.arange(moving) % sites, np.arange(moving)] = 0.01
    feedback = [Feedback("train") for _ in range(sites)]
    for number in range(rounds):
        before, *_, present = [Values(values, "F32") for values in (states * 2)[-2:]]
        exponent = exponent_of(present, before if number else present, Precision.of(16, sites))
        terms = fed.terms(blocks={"head": RingBlock(elements=600, exponent=exponent)})
        total = np.zeros(600)
        for own, rest_of in zip(steps, feedback, strict=True):
            rest = rest_of.rests.get("head")
            sent, file = {"head": Steps(own if rest is None else own + rest.values)}, BytesIO()
            written = write_masked(file, terms, sent, terms.max_weight, [], number, keep_rests=True)
            (values,) = ring_of(file.getvalue(), terms, ["head"])["head"].chunks()
            total += values.view(np.int16)
            rest_of.keep(written.rests)
        states.append((states[-1] + total * 2.0 ** terms.blocks["head"].exponent / sites).astype(np.float32))
    arrived = (states[-1] - states[0])[:moving] / (rounds * 0.01 / sites)
    assert arrived == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("senders", [3, 30, 256])
def test_steps_far_beyond_the_last_ones_have_room(senders: int) -> None:
    few = Precision.of(16, senders)
    assert 16 <= levels_of(16, senders) / 2**few.step < 32
    assert 4 <= levels_of(16, senders) / 2**few.first < 8
    assert few.step >= 2


def test_a_unit_that_a_server_optimizer_would_shrink_is_refused(model: Weights) -> None:
    with pytest.raises(Invalid) as refusal:
        run(model, **secure(16, server_optimizer={"kind": "adam"}))
    assert [fault.pointer for fault in refusal.value.errors] == ["/server_optimizer"]
    assert run(model, **secure(32, server_optimizer={"kind": "adam"})).versions


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"cohort": {"size": 300, "quorum": 3}}, "16 have room for 256 sites: lower cohort.size"),
        ({"cohort": {"quorum": 3}}, "16 have room for 256 sites"),
        (
            {"client_privacy": {"epsilon": 9.0, "delta": 1e-5, "clip_norm": 1.0}, "normalization": "cohort"},
            "noise needs 32 bits: leave out secure_sums.bits",
        ),
    ],
)
def test_sums_without_room_are_refused(changed: dict[str, Any], message: str) -> None:
    digest = f"sha256:{'0' * 64}"
    about = {"name": "n", "dataset": "d", "model": digest, "version": digest}
    RunSpec.model_validate({**spec(), **about, "cohort": {"size": 4, "quorum": 3}, **secure(16)})
    with pytest.raises(ValidationError, match=message):
        RunSpec.model_validate({**spec(), **about, "cohort": {"size": 4, "quorum": 3}, **secure(16), **changed})
