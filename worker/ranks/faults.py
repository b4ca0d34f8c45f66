"""Exceptions on their way from a rank to the others and to the agent: ours as they are, any other by its name."""

from typing import Any

import torch

from tessera.shared.methods.base import UnsupportedRun
from tessera.shared.model.selectors import SelectorError
from tessera.worker.attention.probabilities import UnknownAttention
from tessera.worker.data.dataset import DataChanged, DataError
from tessera.worker.data.loaders import LoaderFailed
from tessera.worker.governance.policy import PolicyViolation
from tessera.worker.model.block_map import UnknownArchitecture
from tessera.worker.model.build import ModelMismatch
from tessera.worker.model.config import ConfigError
from tessera.worker.model.layouts import MappingError
from tessera.worker.state.hash_chain import ChainError
from tessera.worker.state.privacy_ledger import LedgerError
from tessera.worker.task.errors import TaskFailure
from tessera.worker.training.divergence import TrainingDiverged
from tessera.worker.training.input_mismatch import InputMismatch
from tessera.worker.training.optimization.micro_batch import ExampleTooLarge

UNEXPLAINED = "failed"
"""The code of failures that only the worker's own log explains."""

KINDS: dict[str, type[BaseException]] = {
    kind.__name__: kind
    for kind in (
        ChainError,
        ConfigError,
        DataChanged,
        DataError,
        ExampleTooLarge,
        InputMismatch,
        LedgerError,
        LoaderFailed,
        MappingError,
        ModelMismatch,
        PolicyViolation,
        SelectorError,
        TaskFailure,
        TrainingDiverged,
        UnknownArchitecture,
        UnknownAttention,
        UnsupportedRun,
        torch.OutOfMemoryError,
    )
}
"""The exceptions that arrive as they were raised. Anything else might quote data, or mean something else there."""

Packed = tuple[str, tuple[Any, ...], dict[str, Any]]
"""The name of an exception's class, its arguments and its attributes."""


def packed(fault: BaseException) -> Packed:
    """Return the parts of an exception of `KINDS`, or of a failure in its place that names the exception alone."""
    if KINDS.get(type(fault).__name__) is not type(fault):
        fault = TaskFailure(UNEXPLAINED, f"{type(fault).__name__} in a rank; the worker's own log has more")
    return type(fault).__name__, fault.args, vars(fault)


def unpacked(name: str, arguments: tuple[Any, ...], attributes: dict[str, Any]) -> BaseException:
    """Return the exception that `packed` was given, without its traceback, also if its constructor takes other
    arguments."""
    kind = KINDS[name]
    fault = kind.__new__(kind, *arguments)
    vars(fault).update(attributes)
    return fault
