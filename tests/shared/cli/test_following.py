"""When all is known of a round that is ever likely to be, from literals."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from tessera.shared.api.runs import Measurement, Round, Run, RunSpec
from tessera.shared.api.tasks import TaskView
from tessera.shared.api.versions import VersionRef
from tessera.shared.client.round_outcomes import _settled

AT = datetime(2026, 1, 1, tzinfo=UTC)
DIGEST = f"sha256:{'0' * 64}"
SPEC: dict[str, Any] = {
    "name": "n",
    "method": {"name": "fedavg"},
    "model": DIGEST,
    "version": DIGEST,
    "dataset": "data",
}
RUN = Run(
    id="r",
    state="running",
    spec=RunSpec.model_validate({**SPEC, "rounds": 5, "evaluation": {"sites": True}}),
    version=VersionRef(number=1, digest=DIGEST),
    model_bytes=0,
    revision=1,
    created_at=AT,
    updated_at=AT,
)


def trained_by(*workers: str) -> Round:
    facts = {"run": "r", "round": 1, "kind": "train", "token": 1, "attempts": 1, "state": "merged"}
    return Round(
        run="r",
        number=1,
        attempt=1,
        state="committed",
        stage="train",
        opened_at=AT,
        deadline_at=AT,
        version=1,
        tasks=tuple(TaskView.model_validate({**facts, "id": worker, "worker": worker}) for worker in workers),
    )


def measured(worker: str) -> Measurement:
    return Measurement(version=1, dataset="data", worker=worker, held_out=True, examples=30, metrics={"loss": 1.0})


def test_measurements_of_many_workers_of_one_site_do_not_stand_for_those_of_others() -> None:
    made, of_one = trained_by("a/1", "b/1", "c/1"), [measured(f"a/{number}") for number in range(9)]
    assert not _settled(made, RUN, of_one, made)
    assert _settled(made, RUN, [*of_one, measured("b/1"), measured("c/1")], made)


def test_a_site_whose_several_workers_trained_is_awaited_once() -> None:
    made = trained_by("a/1", "a/2", "b/1")
    assert _settled(made, RUN, [measured("a/1"), measured("b/1")], made)
