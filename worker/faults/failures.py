"""The code and the text by which a worker reports a task's failure."""

import torch

from tessera.shared.methods.base import UnsupportedRun
from tessera.shared.methods.registry import UnknownMethod
from tessera.shared.model.selectors import SelectorError
from tessera.shared.problems import Problem
from tessera.shared.updates.codecs.stage import CodecError
from tessera.worker.attention.probabilities import UnknownAttention
from tessera.worker.data.dataset import DataError
from tessera.worker.data.loaders import LoaderFailed
from tessera.worker.governance.airlock import UpdateWithheld
from tessera.worker.governance.policy import PolicyViolation
from tessera.worker.model.block_map import UnknownArchitecture
from tessera.worker.model.build import ModelMismatch
from tessera.worker.model.config import ConfigError
from tessera.worker.model.layouts import MappingError
from tessera.worker.state.blob_cache import BlobTooLarge
from tessera.worker.task.errors import TaskFailure
from tessera.worker.task.upload_budget import OverBudget
from tessera.worker.training.divergence import NoFiniteLoss, TrainingDiverged
from tessera.worker.training.input_mismatch import InputMismatch
from tessera.worker.training.optimization.micro_batch import ExampleTooLarge

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
    if isinstance(fault, torch.OutOfMemoryError | MemoryError):
        return "out-of-memory", "the model and its batches do not fit into this worker's memory"
    if isinstance(fault, DataError):
        return "data-unreadable", "an example cannot be read any more; the worker's own log has more"
    return "failed", f"{type(fault).__name__}; the worker's own log has more"
