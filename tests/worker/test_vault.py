"""The vault: what is kept becomes current with the acceptance of the update that it belongs to, and not before."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from shared.client import Client
from shared.container import ContainerError
from shared.problems import MEDIA_TYPE, NotFound, Problem, Unavailable
from shared.wire import TaskView
from tests.support.scripted import Answer, answering
from worker.vault import Vault

RUN, TASK = "run-1", "task-1"


def kept(value: float) -> dict[str, np.ndarray]:
    return {"head.weight": np.full((2, 3), value, dtype=np.float32)}


def answer(state: str, token: int = 3) -> TaskView:
    given = {"id": TASK, "run": RUN, "round": 0, "worker": "a", "kind": "train", "state": state, "token": token}
    return TaskView.model_validate({**given, "leases": 1})


def value_in(vault: Vault) -> float | None:
    now = vault.load(RUN)
    return float(now["head.weight"][0, 0]) if now else None


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_a_committed_stage_is_what_the_next_round_finds(tmp_path: Path) -> None:
    vault = Vault(tmp_path)
    vault.stage(RUN, TASK, 3, kept(1.0)).commit()
    assert value_in(Vault(tmp_path)) == 1.0
    assert files(tmp_path) == ["current.safetensors"]


def test_a_discarded_stage_leaves_what_was_current(tmp_path: Path) -> None:
    vault = Vault(tmp_path)
    vault.stage(RUN, TASK, 3, kept(1.0)).commit()
    vault.stage(RUN, "task-2", 1, kept(2.0)).discard()
    assert value_in(vault) == 1.0
    assert files(tmp_path) == ["current.safetensors"]


def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path: Path) -> None:
    keep = {
        "bf16": np.array([1.5, -0.0, np.nan], dtype=ml_dtypes.bfloat16),
        "counter": np.array(7, dtype=np.int64),
        "mask": np.array([True, False]),
        "none": np.zeros((0, 4), dtype=np.float32),
        "turned": np.arange(6, dtype=np.float64).reshape(2, 3).T,
    }
    vault = Vault(tmp_path)
    vault.stage(RUN, TASK, 3, keep).commit()
    found = vault.load(RUN)
    assert {name: (a.shape, a.dtype, a.tobytes()) for name, a in found.items()} == {
        name: (a.shape, a.dtype, a.tobytes()) for name, a in keep.items()
    }


@pytest.mark.parametrize(
    ("view", "value", "left"),
    [
        (answer("accepted"), 2.0, 1),  # the crash came between acceptance and rename
        (answer("accepted", token=4), 1.0, 1),  # another lease of this task was accepted, with other results
        (answer("leased"), 1.0, 2),  # the submission may still be on its way
        (answer("leased", token=4), 1.0, 1),
        (answer("lapsed"), 1.0, 1),
        (answer("cancelled"), 1.0, 1),
        (answer("offered"), 1.0, 1),
    ],
)
def test_settling_commits_only_what_was_accepted_under_the_same_token(
    tmp_path: Path, view: TaskView, value: float, left: int
) -> None:
    Vault(tmp_path).stage(RUN, "task-0", 1, kept(1.0)).commit()
    Vault(tmp_path).stage(RUN, TASK, 3, kept(2.0))
    vault = Vault(tmp_path)
    asked = []
    vault.settle(lambda task: asked.append(task) or view)
    assert asked == [TASK]
    assert value_in(vault) == value
    assert len(files(tmp_path)) == left


def settled(vault: Vault, answer: Answer) -> None:
    """Settles with a coordinator, or what stands before it, that gives this answer."""
    with answering(answer) as (url, _), Client(url, patience_seconds=0, verify=False) as client:
        vault.settle(client.task)


def test_settling_discards_what_the_coordinator_does_not_know(tmp_path: Path) -> None:
    vault = Vault(tmp_path)
    vault.stage(RUN, TASK, 3, kept(1.0))
    body = NotFound("no such task").document().model_dump_json().encode()
    settled(vault, Answer(404, body, {"Content-Type": MEDIA_TYPE}))
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (Answer(503), Unavailable),
        (Answer(404, b"<html>no such page</html>", {"Content-Type": "text/html"}), NotFound),  # a proxy's own
    ],
)
def test_settling_keeps_what_the_coordinator_did_not_judge(
    tmp_path: Path, answer: Answer, problem: type[Problem]
) -> None:
    vault = Vault(tmp_path)
    vault.stage(RUN, TASK, 3, kept(1.0))
    with pytest.raises(problem):
        settled(vault, answer)
    assert files(tmp_path) == [f"staged-{TASK}-3.safetensors"]


@pytest.mark.parametrize("run", ["../other", "a/b", "", "x" * 65, "run\n", ".", "current.safetensors"])
def test_an_identifier_that_could_be_a_path_is_refused(tmp_path: Path, run: str) -> None:
    vault = Vault(tmp_path / "vault")
    with pytest.raises(ValueError, match="identifier"):
        vault.load(run)
    with pytest.raises(ValueError, match="identifier"):
        vault.stage(RUN, run, 1, kept(1.0))
    assert files(tmp_path) == []


def test_a_spoilt_file_is_refused_rather_than_trained_from(tmp_path: Path) -> None:
    vault = Vault(tmp_path)
    vault.stage(RUN, TASK, 3, kept(1.0)).commit()
    path = tmp_path / RUN / "current.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ContainerError):
        vault.load(RUN)


def test_only_the_owner_may_look_into_the_vault(tmp_path: Path) -> None:
    Vault(tmp_path / "vault")
    assert (tmp_path / "vault").stat().st_mode & 0o777 == 0o700
