"""A task of no coordinator, for tests of what a worker makes of it. Processes that they start import it too."""

from __future__ import annotations

from typing import Any

from tessera.shared.api.runs import Training
from tessera.shared.api.tasks import Task
from tessera.shared.api.versions import VersionRef
from tessera.shared.methods.base import MethodSpec, Plan

NO_DIGEST = f"sha256:{'0' * 64}"


def task_of(**more: Any) -> Task:
    """Return a task with all that one must have, and `more`."""
    given = {
        "id": "t", "token": 1, "kind": "train", "run": "r", "run_name": "demo", "round": 1, "rounds": 2, "seed": 0,
        "method": MethodSpec(name="fedavg"), "plan": Plan(), "dataset": "wards", "training": Training(),
        "codec": "raw", "normalization": "participants", "model": NO_DIGEST,
        "version": VersionRef(number=0, digest=NO_DIGEST), "lease_seconds": 60.0,
    }  # fmt: skip
    return Task.model_validate({**given, **more})
