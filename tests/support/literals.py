"""Runs, rounds, tasks and measurements as a coordinator reports them, with defaults."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from tessera.shared.api.runs import Measurement, Round, Run
from tessera.shared.api.tasks import TaskView

AT = datetime(2026, 1, 1, tzinfo=UTC)
DIGEST = f"sha256:{'0' * 64}"


def run_of(name: str = "n", state: str = "running", version: int = 1, ident: str = "r", **spec: Any) -> Run:
    wanted = {"name": name, "method": {"name": "fedavg"}, "model": DIGEST, "version": DIGEST, "dataset": "data"}
    facts = {"model_bytes": 0, "revision": 1, "created_at": AT, "updated_at": AT}
    made = {"number": version, "digest": DIGEST}
    return Run.model_validate(
        {"id": ident, "state": state, "spec": {**wanted, "rounds": 1, **spec}, "version": made, **facts}
    )


def view_of(worker: str, state: str = "accepted", **given: Any) -> TaskView:
    facts = {"id": worker, "run": "r", "round": 1, "kind": "train", "token": 1, "attempts": 1}
    return TaskView.model_validate({**facts, "worker": worker, "state": state, **given})


def round_of(*tasks: TaskView, **given: Any) -> Round:
    """Return a committed attempt of no duration."""
    facts = {"run": "r", "number": 1, "attempt": 1, "state": "committed", "stage": "train"}
    return Round.model_validate({**facts, "opened_at": AT, "deadline_at": AT, "tasks": tasks, **given})


def measured(
    worker: str, version: int = 1, examples: int = 10, *, held_out: bool = True, **metrics: float
) -> Measurement:
    given = {"version": version, "dataset": "data", "worker": worker, "held_out": held_out, "examples": examples}
    return Measurement.model_validate({**given, "metrics": metrics})
