"""Task failures that are reported to the coordinator, by code."""

from collections.abc import Iterator
from contextlib import contextmanager

from pydantic import ValidationError

from tessera.shared.problems import faults_of
from tessera.worker.state.blob_cache import BlobTooLarge


class TaskFailure(ValueError):
    """A task that cannot be executed as given. Both the code and the text are reported to the coordinator."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code


class HiddenFailure(Exception):
    """A failure in a secure sum that may depend on the data, by the name of its class: the coordinator learns nothing
    of it."""


@contextmanager
def failing_as(code: str) -> Iterator[None]:
    """Turn validation errors in the block into TaskFailure with this code."""
    try:
        yield
    except ValidationError as refusal:
        raise TaskFailure(code, faults_in(refusal)) from None
    except (TaskFailure, BlobTooLarge):
        raise
    except ValueError as fault:
        raise TaskFailure(code, str(fault)[:300]) from None


def faults_in(refusal: ValidationError) -> str:
    """Return the first eight faults of a document in one line."""
    return "; ".join(f"{fault.pointer}: {fault.detail}" for fault in faults_of(refusal)[:8])
