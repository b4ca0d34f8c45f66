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
from tessera.shared.rounds.secure_sums import Precision
from tessera.shared.secure_sums.masked_update import write_masked
from tessera.shared.secure_sums.messages import levels_of
from tessera.shared.tensors.lazy import Array
from tessera.worker.simulation import Result, Weights, simulate
from tessera.worker.task.error_feedback import Feedback
from tests.support.secure_sums import Federation, Steps, ring_of
from tests.worker.simulation.test_simulation import SITES, model, spec

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


def test_a_run_ends_near_that_of_plain_updates_with_half_the_bytes(model: Weights, tmp_path: Path) -> None:
    plain, few, many = run(model), run(model, tmp_path / "few", **secure(16)), run(model, **secure(32))
    expected = moved(plain, model)
    errors = [float(np.linalg.norm(moved(each, model) - expected) / np.linalg.norm(expected)) for each in (many, few)]
    # After two rounds: in later ones training itself makes a small difference large.
    assert errors[0] < 1e-3
    assert errors[1] < 1e-2
    sent = [each.outcomes[-1].upload_bytes for each in (few, many)]
    # Two bytes less for each value of each site; headers are as long as before.
    assert sent[1] - sent[0] == pytest.approx(2 * expected.size * len(SITES), rel=0.01)
    kept = [
        path.read_bytes()
        for path in (tmp_path / "few").rglob("*.safetensors")
        if b"feedback/rest" in path.read_bytes()
    ]
    assert kept
    assert [version.digest for version in run(model, **secure(16)).versions] == [
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
        feedback.keep(written.rests, number)
    # Each value is off by less than one unit; draws without feedback would be off by several.
    assert float(np.abs(total - 0.3 * rounds).max()) <= 1 + 1e-3 < sqrt(rounds * 0.3 * 0.7)


@pytest.mark.parametrize("senders", [3, 30, 256])
def test_steps_far_beyond_the_last_ones_have_room(senders: int) -> None:
    few = Precision.of(16, senders)
    assert 16 <= levels_of(16, senders) / 2**few.step < 32
    assert 4 <= levels_of(16, senders) / 2**few.first < 8
    assert few.step >= 2


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
