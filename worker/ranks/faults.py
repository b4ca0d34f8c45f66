"""Exceptions on their way from a rank to the others and to the agent."""

import pickle
from typing import Any

from tessera.worker.task.errors import TaskFailure

UNEXPLAINED = "failed"
"""The code of failures that only the worker's own log explains."""

Packed = tuple[type[BaseException], tuple[Any, ...], dict[str, Any]]


def packed(fault: BaseException) -> Packed:
    """Return an exception in a form that can be pickled, also if its constructor takes other arguments."""
    found: Packed = type(fault), fault.args, vars(fault)
    try:
        pickle.dumps(found)
    except Exception:  # noqa: BLE001  (each library's objects fail in their own way)
        return packed(failure_of_rank(fault))
    return found


def unpacked(found: Packed) -> BaseException:
    """Return the exception that `packed` was given, without its traceback."""
    kind, arguments, attributes = found
    fault = kind.__new__(kind, *arguments)
    vars(fault).update(attributes)
    return fault


def failure_of_rank(fault: BaseException) -> TaskFailure:
    """Return a failure that names the exception alone: its text might quote data."""
    return TaskFailure(UNEXPLAINED, f"{type(fault).__name__} in a rank; the worker's own log has more")
