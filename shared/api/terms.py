"""The terms of a run as its tasks state them, and the digest of the terms that a site's approval covers."""

import hashlib
import json
from collections.abc import Mapping

from pydantic import JsonValue

from tessera.shared.api.tasks import MERGING, Task
from tessera.shared.schema import DEFAULT_STUDY, TaskKind

TERMS = (
    "run_name", "study", "model", "method", "dataset", "rounds", "training", "privacy", "normalization", "codec",
    "upload_budget", "upload_seconds", "orchestrator", "secure_sums", "client_privacy", "ignore", "subgroups",
    "max_new_tokens", "keep_updates", "version", "describe", "parent", *MERGING,
)  # fmt: skip
"""Fields of a task that are the same in all tasks of a run. Without `secure_sums` among them, a later round could
send the update that earlier ones hid, or have it opened by other helpers. Without `ignore`, `subgroups` and
`max_new_tokens`, which only evaluations state, two measurements of a version could differ by a class, and so show its
score. Without the
digest of the `version`, which only attacks state, one approval would be of any number of versions. Without
`describe`, one to train would be of counts of the data in a secure sum too."""

OF_EVALUATIONS = ("ignore", "subgroups", "max_new_tokens")
"""Terms that only evaluations state."""


def terms_of(task: Task) -> dict[str, JsonValue]:
    """Return the run's terms, as far as the task states them."""
    shown = task.model_dump(mode="json", include=set(TERMS))
    fields = {
        "study": task.study,
        "subgroups": None,
        "max_new_tokens": 0,
        "describe": False,
        "parent": None,
        **shown,
        "version": task.version.digest,
    }
    # A central evaluation uses another data set than the run.
    central = task.kind == "evaluate" and not task.held_out
    omitted = ({"dataset"} if central else set()) | (set(OF_EVALUATIONS) if task.kind != "evaluate" else set())
    omitted |= {"version"} if task.kind != "attack" else set()
    return {name: fields[name] for name in TERMS if name not in omitted}


def terms_digest(terms: Mapping[str, JsonValue], dataset: str, kind: TaskKind) -> str:
    """Return the digest that an approval covers: a run's terms, its data set and the kind of its tasks."""
    covered = {**terms, "dataset": dataset, "kind": kind}
    # Only evaluations state it: a run that trains and measures is approved once.
    for name in OF_EVALUATIONS:
        covered.pop(name, None)
    for name, usual in {"study": DEFAULT_STUDY, "describe": False, "parent": None}.items():
        # Approvals without it are of such runs.
        if covered.get(name) == usual:
            del covered[name]
    return hashlib.sha256(json.dumps(covered, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
