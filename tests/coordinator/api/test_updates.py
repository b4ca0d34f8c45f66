"""Every update that may not be merged is refused with what is wrong and where, and the round goes on unharmed."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import select

from tessera.coordinator.db.tables import BlobRow, RoundRow, RunBlobRow, RunRow, TaskRow, VersionRow
from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import Run
from tessera.shared.api.tasks import Failure, Submission, Task, TaskView
from tessera.shared.client.client import Client
from tessera.shared.methods.base import MethodSpec
from tessera.shared.model.blocks import Block
from tessera.shared.model.spec import Model
from tessera.shared.problems import Problem
from tessera.shared.rounds.validation import Inspector
from tessera.shared.tensors.dtypes import NUMPY_DTYPES
from tessera.shared.tensors.lazy import as_bytes, digest_of
from tests.support.coordinator import LiveCoordinator, refusing, until
from tests.support.federation import ScriptedWorker, head_of, small_model, start_run, values
from tests.support.malformed import CORPUS, MAX_NORM
from tests.support.raw import PART, announced
from tests.support.updates import update_file

MODEL = small_model()
START = values(MODEL)
HEAD = START["head.weight"]
"""2 x 4 float32: 32 bytes. The first of its plan's blocks; query and key are frozen."""
FROZEN = MethodSpec(name="fedfrozen", settings={"warmup_rounds": 0, "scope": "v_head"})
_names = itertools.count()


@dataclass
class Scene:
    """A round of workers about to misbehave, mostly one, and two that do not."""

    client: Client
    run: Run
    all_bad: list[tuple[ScriptedWorker, Task]]
    good: list[tuple[ScriptedWorker, Task]]

    @property
    def bad(self) -> ScriptedWorker:
        return self.all_bad[0][0]

    @property
    def task(self) -> Task:
        return self.all_bad[0][1]

    def refused(self, data: bytes, code: str = "invalid-update") -> Problem:
        digest = self.bad.client.put_bytes(data)
        with refusing(code) as caught:
            self.bad.submit(self.task, digest)
        return caught.value

    def unharmed(self) -> None:
        """The others' updates merge to their mean: (10 * 1 + 10 * 3) / 20 = 2."""
        for (worker, task), step in zip(self.good, (1.0, 3.0), strict=True):
            worker.train(task, step)
        if self.client.task(self.task.id).state == "leased":
            self.bad.client.fail(self.task.id, Failure(token=self.task.token, code="gave-up", detail="as asked"))
        until(lambda: self.client.run(self.run.id).state == "completed")
        np.testing.assert_allclose(head_of(self.client, self.run), HEAD + 2, rtol=1e-6)


@pytest.fixture
def scene(standing: LiveCoordinator) -> Scene:
    return scene_on(standing)


def scene_on(live: LiveCoordinator, bad: int = 1, **spec: object) -> Scene:
    """Each scene has a data set of its own, so that only its own workers are asked."""
    client, name, size = live.client(), f"data{next(_names)}", bad + 2
    workers = [
        ScriptedWorker(live.client("site", f"s{i}"), name=name, datasets={name: 10}).enrol() for i in range(size)
    ]
    wanted = {"method": FROZEN, "dataset": name, "cohort": Cohort(size=size, quorum=1), **spec}
    run = start_run(client, MODEL, START, **wanted)
    taken = [(worker, worker.take()) for worker in workers]
    return Scene(client, run, taken[:bad], taken[bad:])


def head(array: np.ndarray) -> bytes:
    return update_file({"head.weight": array.astype(np.float32).tobytes()})


def with_value(value: float) -> bytes:
    array = HEAD.copy()
    array[1, 2] = value
    return head(array)


OTHER = "layer.0.qkv.weight#value"

# Of each class of fault one; `tests/shared/updates/test_malformed.py` has every kind.
OVER_HTTP = (
    "nothing at all",
    "a header longer than may be",
    "a header that is no JSON",
    "a tensor twice",
    "more tensors than were asked for",
    "a lone surrogate",
    "a negative axis",
    "overlapping slices",
    "a slice beyond the file",
    "another format",
    "no block",
    "a name that is a path",
    "a slice out of range",
    "floats for bytes",
    "an unknown codec",
    "a parameter that no database stores",
    "two hundred stages",
    "a smaller shape",
    "a larger shape",
    "a chunk that claims what is not there",
    "a zstd bomb",
    "a zstd window of 1 GiB",
    "a place twice",
    "NaN",
    "larger than the run takes",
)


def stored(live: LiveCoordinator, task: Task) -> dict[str, object]:
    """All rows of a task's run, but for the task itself, and every blob."""
    rows: dict[str, object] = {}
    with live.services.database.snapshot() as session:
        for table in (RunRow, RoundRow, VersionRow, RunBlobRow, TaskRow):
            key = table.id if table is RunRow else table.run_id  # type: ignore[attr-defined]
            found = session.scalars(select(table).where(key == task.run)).all()
            columns = [column.key for column in table.__table__.columns]
            values_of = [{name: getattr(row, name) for name in columns} for row in found]
            rows[table.__tablename__] = sorted(str(row) for row in values_of if row.get("id") != task.id)
        rows["blobs"] = sorted(session.scalars(select(BlobRow.digest)))
    rows["files"] = sorted(str(path) for path in Path(live.settings.blob_url).rglob("*") if path.is_file())
    return rows


def test_a_malformed_update_is_named_and_the_round_is_unharmed(standing: LiveCoordinator) -> None:
    """One round, in which each fault comes from another site."""
    scene = scene_on(standing, bad=len(OVER_HTTP), max_update_norm=MAX_NORM)
    for what, (worker, task) in zip(OVER_HTTP, scene.all_bad, strict=True):
        data, kind = CORPUS[what]
        digest = worker.client.put_bytes(data)
        before = stored(standing, task)
        with refusing("invalid-update") as caught:
            worker.submit(task, digest)
        assert {fault.code for fault in caught.value.errors} == {kind}, what
        assert stored(standing, task) == before, what
        view = scene.client.task(task.id)
        assert (view.state, view.problem) == ("rejected", caught.value.document()), what
    scene.unharmed()


def test_every_faulty_block_is_named_at_once(scene: Scene) -> None:
    bad = np.full(16, np.nan, np.float32).tobytes()
    problem = scene.refused(update_file({"head.weight": with_value(np.inf)[-32:], OTHER: bad}))
    assert sorted(fault.pointer for fault in problem.errors) == ["head.weight", OTHER]
    assert "16 or more values" in next(f.detail for f in problem.errors if f.pointer == OTHER)


def test_a_norm_over_the_run_s_limit_is_refused(standing: LiveCoordinator) -> None:
    scene = scene_on(standing, max_update_norm=17.0)
    # Eight elements moved by 7: sqrt(8 * 49) = 19.799
    problem = scene.refused(head(HEAD + np.float32(7)))
    assert problem.detail == "the update's l2 norm is 19.799; this run takes at most 17"
    # The others move the head's 8 elements and the value's 16 by 3 at most: sqrt(24 * 9) = 14.7
    scene.unharmed()


def test_the_norm_of_an_accepted_update_is_measured(scene: Scene) -> None:
    digest = scene.bad.client.put_bytes(head(HEAD + np.float32(1)))
    view = scene.bad.submit(scene.task, digest)
    # Eight elements moved by 1.
    assert view.metrics["update_norm"] == pytest.approx(8**0.5, rel=1e-6)


def test_as_many_numbers_as_may_be_reported_leave_room_for_what_is_measured(scene: Scene) -> None:
    many = {f"layer {i}": 0.5 for i in range(4096)}
    scene.bad.client.submit(scene.task.id, submission(scene, metrics=many))
    shown = [task for task in next(scene.client.rounds(scene.run.id)).tasks if task.id == scene.task.id]
    assert shown[0].metrics == {**many, "update_norm": 0.0}


def test_a_norm_that_cannot_be_told_is_refused(standing: LiveCoordinator) -> None:
    block = Block(tensor="w", role="head", shape=(2,), dtype="F64")
    model = Model(config={"model_type": "bert"}, head="features", blocks=(block,))
    client, name = standing.client(), f"data{next(_names)}"
    worker = ScriptedWorker(standing.client("site", "a"), name=name, datasets={name: 10}).enrol()
    run = start_run(client, model, {"w": np.array([-1.7e308, 0.0])}, dataset=name, cohort=Cohort(max_attempts=1))
    task = worker.take()
    huge = np.array([1.7e308, 0.0], dtype=NUMPY_DTYPES["F64"])
    digest = worker.client.put_bytes(update_file({"w": bytes(as_bytes(huge))}))
    with refusing("invalid-update", "norm"):
        worker.submit(task, digest)
    until(lambda: client.run(run.id).state == "paused")
    assert next(client.rounds(run.id)).tasks[0].state == "rejected"


def test_numbers_that_the_method_cannot_merge_are_refused(standing: LiveCoordinator) -> None:
    client, name = standing.client(), f"data{next(_names)}"
    bad, good = (
        ScriptedWorker(standing.client("site", site), name=name, datasets={name: 10}, methods=("fednova",)).enrol()
        for site in "ab"
    )
    cohort = Cohort(size=2, quorum=1)
    run = start_run(client, MODEL, START, method=MethodSpec(name="fednova"), dataset=name, cohort=cohort)
    for worker, steps in ((bad, 1e9), (good, 1.0)):
        task = worker.take()
        said = Submission(
            token=task.token,
            version=task.version.digest,
            update=worker.client.put_bytes(head(HEAD + np.float32(1))),
            examples=10,
            metrics={"effective_steps": steps},
        )
        if worker is bad:
            with refusing("invalid-update", "cannot merge the update's numbers") as caught:
                worker.client.submit(task.id, said)
            assert [fault.pointer for fault in caught.value.errors] == ["/metrics"]
        else:
            worker.client.submit(task.id, said)
    until(lambda: client.run(run.id).state == "completed")


# ---------------------------------------------------------------- reports about something else


def submission(scene: Scene, **change: object) -> Submission:
    digest = scene.bad.client.put_bytes(head(HEAD))
    said = {"token": scene.task.token, "version": scene.task.version.digest, "update": digest, "examples": 10}
    return Submission.model_validate(said | change)


CHANGES: dict[str, tuple[Callable[[Scene], dict[str, object]], str, str]] = {
    "a stale token": (lambda s: {"token": s.task.token - 1}, "lease-lost", "shows token 0"),
    "a token of the future": (lambda s: {"token": s.task.token + 1}, "lease-lost", "shows token 2"),
    "a huge token": (lambda _: {"token": 10**30}, "lease-lost", "shows token 1000"),
    "a stale version": (
        lambda _: {"version": f"sha256:{'0' * 64}"},
        "stale-version",
        "the report is about sha256:00",
    ),
    "bytes not uploaded": (lambda _: {"update": f"sha256:{'1' * 64}"}, "invalid", "was not uploaded"),
    "another's bytes": (
        lambda s: {"update": s.good[0][0].client.put_bytes(head(HEAD + 12345))},
        "invalid",
        "was not uploaded",
    ),
}


def test_a_report_about_something_else_is_refused_and_the_task_goes_on(scene: Scene) -> None:
    for change, code, says in CHANGES.values():
        with refusing(code, says):
            scene.bad.client.submit(scene.task.id, submission(scene, **change(scene)))
        assert scene.client.task(scene.task.id).state == "leased"
    scene.unharmed()


def test_an_upload_that_is_not_finished_is_no_update(scene: Scene, standing: LiveCoordinator) -> None:
    data = head(HEAD + np.float32(777))
    http = standing.bare({"Authorization": f"Bearer {scene.bad.client._transport._credential.secret}"})
    location = http.post("/v1/uploads", headers=announced(data)).headers["Location"]
    assert (
        http.patch(location, headers={**PART, "Upload-Offset": "0"}, content=data[:-1]).headers["Upload-Complete"]
        == "?0"
    )
    with refusing("invalid", "was not uploaded"):
        scene.bad.submit(scene.task, digest_of(data))
    scene.unharmed()


def test_a_training_task_takes_no_evaluation(scene: Scene) -> None:
    with refusing("conflict", "a task to train, not to evaluate"):
        scene.bad.evaluate(scene.task, accuracy=1.0)
    scene.unharmed()


def test_the_same_submission_again_gives_the_same_answer_and_counts_once(scene: Scene) -> None:
    (first, first_task), (second, second_task) = scene.good
    head_digest = first.upload(first_task, {"head.weight": HEAD + np.float32(1)})
    answers = [first.submit(first_task, head_digest) for _ in range(3)]
    assert answers[0] == answers[1] == answers[2]
    with refusing("lease-lost"):
        first.submit(first_task, first.upload(first_task, {"head.weight": HEAD}))
    digest = second.upload(second_task, {"head.weight": HEAD + np.float32(4)})
    second.submit(second_task, digest, examples=5)
    scene.bad.client.fail(scene.task.id, Failure(token=scene.task.token, code="x", detail="y"))
    until(lambda: scene.client.run(scene.run.id).state == "completed")
    # After the round is over, too, but for the receipt: what has become of it since.
    again = first.submit(first_task, head_digest)
    receipts = [answer.receipt.state if answer.receipt else None for answer in (answers[0], again)]
    assert receipts == ["accepted", "merged"]
    assert again.model_copy(update={"receipt": answers[0].receipt}) == answers[0]
    # (10 * 1 + 5 * 4) / 15 = 2
    np.testing.assert_allclose(head_of(scene.client, scene.run), HEAD + 2, rtol=1e-6)


def test_an_update_cannot_claim_more_examples_than_its_worker_declared(scene: Scene) -> None:
    worker, task = scene.bad, scene.task
    digest = worker.upload(task, {"head.weight": HEAD + np.float32(1000)})
    for claimed in (11, 2**40 - 1):
        with refusing("invalid") as caught:
            worker.submit(task, digest, examples=claimed)
        assert [fault.pointer for fault in caught.value.errors] == ["/examples"]
    assert worker.submit(task, digest, examples=10).state == "accepted"


def test_a_second_and_different_update_of_one_task_is_refused(scene: Scene) -> None:
    scene.bad.train(scene.task)
    with refusing("lease-lost", "the task is accepted, not leased"):
        scene.bad.submit(scene.task, scene.bad.client.put_bytes(head(HEAD + 9)))


# ---------------------------------------------------------------- in one request


def test_an_update_too_long_for_its_submission_is_refused_with_what_may_be(scene: Scene) -> None:
    assert scene.task.inline_bytes == 65_536
    data = bytes(65_537)
    # As base64: behind its submission an update may have any length.
    report = submission(scene, update=digest_of(data)).model_copy(update={"data": data})
    with refusing("invalid", "65537 bytes; a submission may contain 65536"):
        scene.bad.client._post(f"/v1/tasks/{scene.task.id}/update", report, TaskView)


@pytest.mark.parametrize("spoilt", [False, True], ids=["accepted", "rejected"])
def test_the_same_submission_many_times_at_once_is_inspected_once(
    scene: Scene, standing: LiveCoordinator, monkeypatch: pytest.MonkeyPatch, spoilt: bool
) -> None:
    inspected: list[str] = []
    sent: list[int] = []
    real = Inspector.checked

    def slowly(self: Inspector, digest: str, *more: Any) -> Any:
        inspected.append(digest)
        # Long enough for all others to come in between.
        until(lambda: len(sent) == 8)
        time.sleep(0.3)
        return real(self, digest, *more)

    monkeypatch.setattr(Inspector, "checked", slowly)
    said = submission(scene, **({"update": scene.bad.client.put_bytes(b"no update")} if spoilt else {}))
    credential = scene.bad.client._transport._credential
    assert credential
    http = standing.bare({"Authorization": f"Bearer {credential.secret}", "Content-Type": "application/json"})

    def submit(number: int) -> tuple[int, str]:
        sent.append(number)
        answer = http.post(f"/v1/tasks/{scene.task.id}/update", content=said.model_dump_json())
        return answer.status_code, answer.json().get("state") or answer.json()["code"]

    with ThreadPoolExecutor(8) as pool:
        answers = set(pool.map(submit, range(8)))
    assert answers == {(422, "invalid-update") if spoilt else (200, "accepted")}
    assert len(inspected) == 1
