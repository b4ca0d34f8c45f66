"""Keys that have a new name since protocol 2. Imports no other module.

Documents that are hashed keep their old names and are read by these; what people write is refused with the new name.
"""

from collections.abc import Mapping
from typing import Any

RUN = {
    "cohort.enough": "cohort.target_updates",
    "cohort.tries": "cohort.max_attempts",
    "cohort.task_tries": "cohort.max_task_attempts",
    "divide": "normalization",
}
"""Of a run file, and of a run that is created over HTTP."""

POLICY = {
    "max_tries": "max_attempts",
    "min_measured": "min_evaluation_examples",
    "max_measurements": "max_evaluations",
}
"""Of a worker's `[policy]`."""

COORDINATOR = {
    "longest_wait_seconds": "max_wait_seconds",
    "live_seconds": "liveness_seconds",
    "gather_seconds": "cohort_wait_seconds",
    "alive_file": "heartbeat_file",
    "head_seconds": "header_timeout_seconds",
    "body_seconds": "body_timeout_seconds",
    "idle_seconds": "idle_timeout_seconds",
    "failures_per_minute": "auth_failures_per_minute",
    "answer_bytes_per_token": "response_bytes_per_token",
    "max_listeners": "max_event_streams",
    "housekeeping_seconds": "gc_interval_seconds",
}
"""Of the coordinator's settings, which are read from the environment."""

MANIFEST = {"memory": "server_state", "numbers": "scalars"}
TERMS = {"divide": "normalization"}


def read_old(given: Any, names: Mapping[str, str]) -> Any:
    """Return a document with its keys' present names."""
    return {names.get(key, key): value for key, value in given.items()} if isinstance(given, dict) else given


def refuse_old(given: Any, names: Mapping[str, str], prefix: str = "") -> Any:
    """Return what is given. Raise ValueError if it has old keys, which may be dotted, naming the present ones."""
    old = [key for key in names if _has(given, key.split("."))]
    if old:
        raise ValueError("; ".join(f"`{prefix}{key}` is now `{prefix}{names[key]}`" for key in old))
    return given


def _has(given: Any, steps: list[str]) -> bool:
    for step in steps:
        if not (isinstance(given, Mapping) and step in given):
            return False
        given = given[step]
    return True
