"""What a site keeps belongs to merged updates: abandoned attempts and updates left out leave no trace in a vault."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.shared.tensors.lazy import Array, to_array
from tessera.simulation import Conditions, Result, simulate
from tests.shared.methods.test_methods_in_rounds import sites_of, start_of

SITES = ("a", "b", "c")
ROUNDS = 2
UNSURE = Conditions(dropout=0.3)
SPARSE = "delta+topk=0.1"
PLAIN = {"optimizer": "sgd", "momentum": 0.0, "learning_rate": 0.05, "batch_size": 8}
# One keeps what the server counts, the other a model of its own.
STATEFUL = ("scaffold", "ditto")
# These keep things of the same kinds.
ALIKE = ("feddyn", "moon", "pfeddc", "fedpgp", "fedotp", "fedper", "fedrep", "fedbn", "local", "safl")
EACH = pytest.mark.parametrize(
    ("method", "codec"),
    [
        *((name, "raw") for name in STATEFUL),
        ("fedavg", SPARSE),
        *(pytest.param(name, "raw", marks=pytest.mark.long) for name in ALIKE),
    ],
)


def run(
    method: str,
    conditions: Conditions | None = None,
    out: Path | None = None,
    until: int | None = None,
    **given: Any,
) -> Result:
    spec = {
        "method": {"name": method},
        "rounds": ROUNDS,
        "seed": 3,
        "training": PLAIN,
        "cohort": {"quorum": len(SITES), "max_attempts": 20},
        **given,
    }
    data = sites_of(method, len(SITES))
    return simulate(spec, start_of(method), data, conditions=conditions or Conditions(), out=out, until=until)


def kept(result: Result) -> dict[str, dict[str, bytes]]:
    return {site: {name: v.tobytes() for name, v in result.kept(site).items()} for site in SITES}


@cache
def calm(method: str, codec: str) -> tuple[list[str], dict[str, dict[str, bytes]]]:
    result = run(method, codec=codec)
    return [version.digest for version in result.versions], kept(result)


@EACH
def test_attempts_that_were_abandoned_leave_no_trace(method: str, codec: str) -> None:
    result = run(method, UNSURE, codec=codec)
    states = [made.state for made in result.rounds]
    assert states.count("abandoned") >= 3
    # All that was accepted of them was left out, so that whoever tries again does so from where it stood.
    assert {task.state for made in result.rounds if made.state == "abandoned" for task in made.tasks} == {
        "left_out",
        "cancelled",
    }
    assert ([version.digest for version in result.versions], kept(result)) == calm(method, codec)


@EACH
def test_an_update_that_is_left_out_leaves_the_vault_as_it_was(method: str, codec: str, tmp_path: Path) -> None:
    states, before = [], kept(run(method, out=tmp_path / "run", until=0, codec=codec, max_norm_of_median=1.001))
    for number in range(1, ROUNDS + 1):
        result = run(method, out=tmp_path / "run", until=number, codec=codec, max_norm_of_median=1.001)
        (made,) = (one for one in result.rounds if one.number == number)
        now = kept(result)
        for task in made.tasks:
            site = task.worker.partition("/")[0]
            if task.state == "left_out":
                assert now[site] == before[site]
            states.append(task.state)
        before = now
    # A method that sends no block has no norm to judge.
    assert set(states) == ({"merged"} if method == "local" else {"merged", "left_out"})


def means(result: Result, prefix: str) -> list[tuple[Array, Array]]:
    """What the server remembers under a prefix, and the mean of what sites keep under the same names, over those of
    which an update was ever merged. All have as many examples."""
    server_state = {name: to_array(t) for name, t in result.state().server_state.items() if name.startswith(prefix)}
    vaults = [vault for site in SITES if (vault := result.kept(site))]
    assert server_state
    return [
        (values, sum(vault.get(name, np.zeros_like(values)) for vault in vaults) / len(vaults))
        for name, values in server_state.items()
    ]


@pytest.mark.parametrize(
    ("conditions", "limits"),
    [
        pytest.param(UNSURE, {}, marks=pytest.mark.long),
        pytest.param(Conditions(), {"max_norm_of_median": 1.001}, marks=pytest.mark.long),
        (UNSURE, {"max_norm_of_median": 1.001}),
    ],
    ids=["abandoned", "left-out", "both"],
)
@pytest.mark.parametrize(
    ("method", "prefix"), [("scaffold", "control/"), pytest.param("feddyn", "gradient/", marks=pytest.mark.long)]
)
def test_what_the_server_remembers_is_the_mean_of_what_sites_keep(
    method: str, prefix: str, conditions: Conditions, limits: dict[str, float]
) -> None:
    result = run(method, conditions, rounds=3, **limits)
    states = [task.state for made in result.rounds for task in made.tasks]
    assert "left_out" in states
    largest = max(np.abs(own).max() for own, _ in means(result, prefix))
    assert max(np.abs(own - mean).max() for own, mean in means(result, prefix)) < 1e-5 * largest
