"""Client drift by role, by hand and in rounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from tessera.shared.aggregation.drift import DRIFT, drift_by_role
from tessera.shared.api.runs import RunSpec
from tessera.shared.tensors.lazy import ArrayTensor
from tessera.simulation import Conditions, Weights, simulate
from tests.support.tasks import DIGITS_VIT, images, untrained

SPEC = {"name": "drift", "method": {"name": "fedavg"}, "dataset": "d", "rounds": 3}
START = dict.fromkeys(("model", "version"), "sha256:" + "0" * 64)


def test_steps_of_a_role_are_relative_to_its_length() -> None:
    roles = {"q": "query", "k": "key", "k2": "key", "zero": "head", "one": "value"}
    start = {"q": (3.0, 4.0), "k": (0.0, 2.0), "k2": (0.0, 0.0), "zero": (0.0, 0.0), "one": (1.0, 0.0)}
    steps = {
        1: {"q": (1.0, 0.0), "k": (0.0, 4.0), "k2": (0.0, 0.0), "zero": (1.0, 0.0), "one": (1.0, 0.0)},
        3: {"q": (1.0, 0.0), "k": (0.0, 0.0), "k2": (0.0, 0.0), "zero": (1.0, 0.0)},
    }
    model = {name: ArrayTensor(np.array(values, "f4")) for name, values in start.items()}
    senders = [
        (float(weight), {name: ArrayTensor(np.add(start[name], each).astype("f4")) for name, each in of.items()})
        for weight, of in steps.items()
    ]
    found = drift_by_role(model, roles, senders)
    # Both steps of q are (1, 0), and its length is 5. The keys' mean step is 1 long, and they are 2. The first site
    # is 3 away from the mean and the second 1, so that the mean square is (9 + 3 * 1) / 4.
    assert found["drift.movement.query"] == pytest.approx(1 / 5)
    assert found["drift.disagreement.query"] == found["drift.noise.query"] == pytest.approx(0, abs=1e-6)
    assert found["drift.movement.key"] == pytest.approx(1 / 2)
    assert found["drift.disagreement.key"] == pytest.approx(3**0.5 / 2)
    # The squares of the weights, 1/4 and 3/4, sum to 5/8: 3 * (5/8) / (3/8) = 5.
    assert found["drift.noise.key"] == pytest.approx(5**0.5 / 2)
    # Blocks without a length have no measure, nor has what one site sent.
    assert {name.rpartition(".")[2] for name in found} == {"query", "key"}


@pytest.mark.parametrize("method", ["fedavg", pytest.param("safl", marks=pytest.mark.long)])
def test_drift_is_measured_with_any_method_when_asked_and_changes_no_bit_of_the_model(method: str) -> None:
    model = Weights(*untrained(DIGITS_VIT, "image-classification"))
    sites = {"a": images(8), "b": images(6)}

    def versions(**more: Any) -> Any:
        spec = {**SPEC, "method": {"name": method}, **more}
        result = simulate(spec, model, sites, conditions=Conditions(keep_versions="all"))
        return result.arrays(), [{n for n in each.scalars if n.startswith(DRIFT)} for each in result.versions]

    plain, none = versions()
    measured, found = versions(signals={"drift": True, "every": 2})
    assert [bool(names) for names in found] == [False, False, True, False]
    assert {"drift.movement.value", "drift.disagreement.value", "drift.noise.value"} <= found[2]
    assert not any(none)
    assert all(np.array_equal(plain[name], measured[name]) for name in plain)


def test_signals_that_compare_single_updates_are_refused_where_these_are_private() -> None:
    signals = {"signals": {"drift": True}}
    client = {
        "client_privacy": {"epsilon": 1.0, "delta": 1e-3, "clip_norm": 1.0, "expected_sites": 9},
        "normalization": "cohort",
    }
    sums = {"secure_sums": {"helpers": ["a", "b", "c"]}, "cohort": {"quorum": 5}}
    for private, said in ((client, "leave out signals"), (sums, "signals: drift compares single updates")):
        RunSpec.model_validate({**SPEC, **START, **private})
        with pytest.raises(ValidationError, match=said):
            RunSpec.model_validate({**SPEC, **START, **private, **signals})
