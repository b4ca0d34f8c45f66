"""The vault: what is kept becomes current with the merge of the update that it belongs to, and not before."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tessera.shared.api.tasks import Receipt, TaskView
from tessera.shared.client.client import Client
from tessera.shared.client.transport import IntermediaryFault
from tessera.shared.problems import MEDIA_TYPE, NotFound
from tessera.shared.updates.safetensors_file import ContainerError
from tessera.worker.state.vault import Vault
from tests.support.scripted import Answer, answering

RUN, TASK = "run-1", "task-1"


def kept(value: float) -> dict[str, np.ndarray]:
    return {"head.weight": np.full((2, 3), value, dtype=np.float32)}


def answer(state: str, token: int = 3) -> TaskView:
    given = {"id": TASK, "run": RUN, "round": 0, "worker": "a", "kind": "train", "state": state, "token": token}
    return TaskView.model_validate({**given, "attempts": 1})


def value_in(vault: Vault) -> float | None:
    now = vault.load(RUN)
    return float(now["head.weight"][0, 0]) if now else None


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_nothing_is_staged_while_a_run_keeps_nothing(tmp_path: Path) -> None:
    vault = Vault(tmp_path)
    vault.keep_scale(RUN, {"scale": np.ones(1, np.float32)})
    staged = vault.stage(RUN, TASK, 3, {})
    staged.discard()
    staged.accept().commit()
    assert files(tmp_path) == ["loss-scale.safetensors"]
    # What was kept before is replaced by nothing, as soon as that is merged.
    vault.stage(RUN, TASK, 3, kept(1.0)).commit()
    emptied = vault.stage(RUN, "task-2", 1, {})
    assert value_in(vault) == 1.0
    emptied.commit()
    assert vault.load(RUN) == {}


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
        (answer("accepted"), 1.0, 2),  # the round is under way
        (answer("merged"), 2.0, 1),
        (answer("left_out"), 1.0, 1),  # the attempt was abandoned, or the update too large
        (answer("merged", token=4), 1.0, 1),  # another lease of this task was accepted, with other results
        (answer("leased"), 1.0, 2),  # the submission may still be on its way
        (answer("leased", token=4), 1.0, 1),
        (answer("expired"), 1.0, 1),
        (answer("cancelled"), 1.0, 1),
        (answer("offered"), 1.0, 1),
    ],
)
def test_settling_commits_only_what_was_merged_under_the_same_token(
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


def nobody(task: str) -> TaskView:
    raise AssertionError(f"the coordinator was asked about {task}")


def killed(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def receipt(state: str, task: str = TASK, token: int = 3, **given: object) -> Receipt:
    return Receipt.model_validate({"task": task, "token": token, "state": state, **given})


def test_an_accepted_update_waits_for_its_receipt_which_needs_no_request(tmp_path: Path) -> None:
    vault = Vault(tmp_path)
    vault.stage(RUN, TASK, 3, kept(1.0)).accept()
    vault.settle_unanswered(nobody)
    vault.settle_run(RUN, receipt("accepted"), nobody)
    assert files(tmp_path) == [f"accepted-{TASK}-3.safetensors"]
    assert value_in(vault) is None
    vault.settle_run(RUN, receipt("merged"), nobody)
    assert (files(tmp_path), value_in(vault)) == (["current.safetensors"], 1.0)


def test_what_the_receipt_is_not_about_is_asked_for(tmp_path: Path) -> None:
    vault = Vault(tmp_path)
    vault.stage(RUN, TASK, 3, kept(1.0)).accept()
    vault.stage("run-2", TASK, 3, kept(1.0)).accept()
    # As a site is answered: the state stays, and the receipt says what became of it.
    shown = answer("accepted").model_copy(update={"receipt": receipt("left_out")})
    vault.settle_run(RUN, receipt("merged", task="task-9"), lambda _: shown)
    assert value_in(vault) is None
    # What another run has pending is no concern of this run's task.
    assert files(tmp_path) == [f"accepted-{TASK}-3.safetensors"]


def test_a_worker_that_lost_its_state_has_nothing_to_settle(tmp_path: Path) -> None:
    vault = Vault(tmp_path)
    vault.settle_run(RUN, receipt("merged"), nobody)
    assert vault.load(RUN) == {}


def test_settling_again_after_a_crash_between_receipt_and_rename_changes_nothing(tmp_path: Path) -> None:
    vault = Vault(tmp_path)
    vault.stage(RUN, "task-0", 1, {"own/a": np.zeros(2), "own/b": np.zeros(2)}).commit()
    vault.stage(RUN, TASK, 3, {"own/a": np.ones(2), "own/b": np.ones(2)}).accept()
    told = receipt("merged", unmerged=("b",))
    with pytest.MonkeyPatch.context() as patched:
        # The file is rewritten without what was not merged, and the process dies before it is renamed.
        patched.setattr("tessera.worker.state.vault.replace", killed)
        with pytest.raises(KeyboardInterrupt):
            vault.settle_run(RUN, told, nobody)
    again = Vault(tmp_path)
    again.settle_run(RUN, told, nobody)
    assert {name: values.tolist() for name, values in again.load(RUN).items()} == {"own/a": [1, 1], "own/b": [0, 0]}


def test_a_block_that_was_not_merged_keeps_what_belonged_to_it(tmp_path: Path) -> None:
    names = ("control/a", "feedback/rest/a", "feedback/round/a", "control/b", "head")
    vault = Vault(tmp_path)
    vault.stage(RUN, "task-0", 1, dict.fromkeys(names, np.zeros(1))).commit()
    vault.stage(RUN, TASK, 3, {**dict.fromkeys(names, np.ones(1)), "control/new": np.ones(1)}).accept()
    vault.settle_run(RUN, receipt("merged", unmerged=("a", "new")), nobody)
    # Of `new` nothing was kept before.
    assert {name: values[0] for name, values in vault.load(RUN).items()} == {
        **dict.fromkeys(names[:3], 0),
        **dict.fromkeys(names[3:], 1),
    }


@pytest.mark.parametrize(("state", "value"), [("merged", 3.0), ("left_out", 1.0)])
def test_an_update_before_one_that_is_over_is_over_too(tmp_path: Path, state: str, value: float) -> None:
    vault = Vault(tmp_path)
    vault.stage(RUN, "task-0", 1, kept(1.0)).commit()
    vault.stage(RUN, "task-1", 3, kept(2.0)).accept()
    vault.stage(RUN, "task-2", 3, kept(3.0)).accept()
    vault.settle(lambda task: answer("accepted" if task == "task-1" else state))
    assert (files(tmp_path), value_in(vault)) == (["current.safetensors"], value)


def test_which_runs_have_not_used_their_vault_for_long_is_told_by_their_last_change(tmp_path: Path) -> None:
    vault = Vault(tmp_path)
    for run in ("old", "new"):
        vault.stage(run, TASK, 3, kept(1.0)).commit()
    os.utime(tmp_path / "old", (1000, 1000))
    assert vault.unused(1000) == []
    assert vault.unused(1001) == ["old"]
    vault.remove("old")
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


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
    "answer",
    [Answer(503), Answer(404, b"<html>no such page</html>", {"Content-Type": "text/html"})],  # a proxy's own
)
def test_settling_keeps_what_the_coordinator_did_not_judge(tmp_path: Path, answer: Answer) -> None:
    vault = Vault(tmp_path)
    vault.stage(RUN, TASK, 3, kept(1.0))
    with pytest.raises(IntermediaryFault):
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


def test_a_loss_scale_is_kept_at_once_and_beside_what_waits_for_a_merge(tmp_path: Path) -> None:
    vault = Vault(tmp_path)
    vault.keep_scale(RUN, {})
    assert vault.load_scale(RUN) == {}
    vault.stage(RUN, TASK, 3, kept(1.0))
    vault.keep_scale(RUN, {"scale": np.array(1024.0)})
    vault.settle(lambda _: answer("left_out"))
    assert Vault(tmp_path).load_scale(RUN)["scale"] == 1024.0
    assert files(tmp_path) == ["loss-scale.safetensors"]
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in tmp_path.rglob("*.safetensors"))
    vault.keep_scale(RUN, {})
    assert files(tmp_path) == []


def test_tensors_of_an_older_copy_are_known_by_their_task(tmp_path: Path) -> None:
    vault = Vault(tmp_path)
    receipts = [Receipt(task=f"t{number}", token=1, state="merged") for number in (1, 2)]
    vault.stage(RUN, "t1", 1, kept(1.0)).commit()
    older = (tmp_path / RUN / "current.safetensors").read_bytes()
    # As a block that was not merged leaves it, too.
    vault.stage(RUN, "t2", 1, kept(2.0)).commit(["no-such-block"])
    assert not vault.lacks(receipts[1], RUN, kept=True)
    (tmp_path / RUN / "current.safetensors").write_bytes(older)
    assert vault.lacks(receipts[1], RUN, kept=False)
    assert not vault.lacks(receipts[1].model_copy(update={"state": "left_out"}), RUN, kept=True)
    vault.adopt(RUN, receipts[1])
    assert not vault.lacks(receipts[1], RUN, kept=True)
    assert vault.load(RUN).keys() == kept(1.0).keys()
    # A removed file is missed if its task kept something.
    shutil.rmtree(tmp_path / RUN)
    assert vault.lacks(receipts[1], RUN, kept=True)
    assert not vault.lacks(receipts[1], RUN, kept=False)
