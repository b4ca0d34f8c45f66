"""A worker's pauses after tasks that it refused, or that failed."""

from __future__ import annotations

import threading
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tessera.shared.methods.base import MethodSpec
from tessera.shared.problems import MEDIA_TYPE, NotFound
from tessera.shared.schema import canonical
from tessera.shared.tensors.lazy import digest_of
from tessera.worker.agent import Agent
from tessera.worker.pace import Backoff
from tessera.worker.settings import WorkerSettings
from tests.support.coordinator import WAIT_SECONDS, until
from tests.support.federation import small_model
from tests.support.scripted import Answer, Asked, answering_by
from tests.support.task_document import task_of
from tests.worker.task.test_hostile_coordinator import Hasty


@pytest.mark.parametrize(
    ("method", "approve", "code"), [("no-such", False, "unknown-method"), ("fedavg", True, "awaiting-approval")]
)
def test_a_coordinator_whose_tasks_are_all_refused_is_asked_ever_less_often(
    tmp_path: Path, method: str, code: str, *, approve: bool
) -> None:
    numbers, asked = count(), list[Asked]()
    gone = Answer(404, NotFound("not there").document().model_dump_json().encode(), {"Content-Type": MEDIA_TYPE})

    model = canonical(small_model())

    def answer(request: Asked) -> Answer:
        """A task of another run at each claim, and the model."""
        if request.path.endswith(digest_of(model)):
            return Answer(200, model)
        if request.path != "/v1/tasks/claim":
            return gone
        run = f"{next(numbers):032x}"
        task = task_of(run=run, method=MethodSpec(name=method), dataset="digits", model=digest_of(model))
        return Answer(200, task.model_dump_json().encode(), {"Content-Type": "application/json"})

    with answering_by(answer, asked) as url:
        stop = Hasty()
        given: Any = {"datasets": {"digits": {"kind": "digits"}}, "policy": {"approve_runs": approve}}
        agent = Agent(WorkerSettings(url=url, token="any", name="w", state_dir=tmp_path / "state", **given), stop)
        thread = threading.Thread(target=agent.run)
        thread.start()
        try:
            until(lambda: len(stop.asked) >= 8)
        finally:
            stop.request()
            thread.join(WAIT_SECONDS)
    assert stop.asked[:8] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert any(code.encode() in request.body for request in asked if request.path.endswith("/failure"))


def test_pauses_begin_anew_after_a_task_that_was_done() -> None:
    stop = Hasty()
    pace = Backoff(stop)
    for outcome in ("failed", "refused", "given-back", "done", "failed"):
        pace.after(outcome, 0.1)
    assert stop.asked == [1, 2, 4, 1]


def test_a_task_whose_round_was_closed_delays_the_next_by_less_than_a_second() -> None:
    stop = Hasty()
    pace = Backoff(stop)
    for seconds in (0.25, 0.25, 1.5, 3600.0):
        pace.after("dropped", seconds)
    assert stop.asked == [0.75, 0.75]
