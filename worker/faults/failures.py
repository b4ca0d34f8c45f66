"""The code and the text by which a worker reports a task's failure."""

from tessera.shared.methods.base import UnsupportedRun
from tessera.shared.methods.registry import UnknownMethod
from tessera.shared.model.selectors import SelectorError
from tessera.shared.problems import Problem
from tessera.shared.updates.codecs.stage import CodecError
from tessera.worker.errors import (
    ConfigError,
    DataError,
    ExampleTooLarge,
    InputMismatch,
    LoaderFailed,
    ModelMismatch,
    NoFiniteLoss,
    TaskFailure,
    TrainingDiverged,
    UnknownArchitecture,
    UnknownAttention,
)
from tessera.worker.governance.airlock import UpdateWithheld
from tessera.worker.governance.policy import PolicyViolation
from tessera.worker.model.layouts import MappingError
from tessera.worker.state.blob_cache import BlobTooLarge
from tessera.worker.task.upload_budget import OverBudget

# Failures whose text we wrote ourselves, about models and plans; any other text might quote data.
REPORTABLE: dict[type[Exception], str] = {
    PolicyViolation: "policy-violation",
    UpdateWithheld: "withheld-by-site",
    ExampleTooLarge: "out-of-memory",
    NoFiniteLoss: "no-finite-loss",
    TrainingDiverged: "diverged",
    ConfigError: "model-refused",
    ModelMismatch: "model-mismatch",
    UnknownArchitecture: "unknown-architecture",
    MappingError: "unknown-architecture",
    UnknownAttention: "unknown-architecture",
    InputMismatch: "input-mismatch",
    UnsupportedRun: "unsuited",
    SelectorError: "invalid-plan",
    UnknownMethod: "unknown-method",
    CodecError: "unknown-codec",
    BlobTooLarge: "too-large",
    OverBudget: "over-budget",
    LoaderFailed: "loader-failed",
}


def failure_of(fault: Exception) -> tuple[str, str]:
    """Return the code and text of a failure for the coordinator. They quote nothing that might be data."""
    if isinstance(fault, Problem):
        return fault.code, fault.detail[:2000]
    if isinstance(fault, TaskFailure):
        return fault.code, str(fault)[:2000]
    for kind, code in REPORTABLE.items():
        if isinstance(fault, kind):
            return code, str(fault)[:2000]
    if isinstance(fault, MemoryError):
        return "out-of-memory", "the model and its batches do not fit into this worker's memory"
    if isinstance(fault, DataError):
        return "data-unreadable", "an example cannot be read any more; the worker's own log has more"
    return "failed", f"{type(fault).__name__}; the worker's own log has more"
