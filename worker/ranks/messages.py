"""Messages between the agent and its ranks."""

from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tessera.shared.api.tasks import Task
from tessera.shared.tensors.lazy import Array
from tessera.worker.compute import Compute
from tessera.worker.governance.policy import Allowance, Policy
from tessera.worker.ranks.serialization import dumps, loads, record
from tessera.worker.state.checkpoints import CheckpointKey
from tessera.worker.task.fetch import Fetched
from tessera.worker.training.optimization.micro_batch import MicroBatch
from tessera.worker.training.progress import Report

RESULT_FILE = "result"

MAX_MESSAGE_BYTES = 1 << 30
"""Limit on a message: a method's scores of all examples travel in one."""


@record
@dataclass(frozen=True)
class Start:
    """The settings of a group: the first message to each rank."""

    devices: tuple[torch.device, ...]
    threads: int
    """Threads of one operation in each rank."""
    idle_seconds: float
    """Time without a task after which a rank ends."""
    timeout_seconds: float
    """Time after which a rank that waits for the others in a collective operation fails."""


@record
@dataclass(frozen=True)
class CheckpointAt:
    """The place of a task's checkpoint."""

    key: CheckpointKey
    path: Path
    seconds: float
    """Time between two checkpoints."""


@record
@dataclass(frozen=True)
class GroupTask:
    """One task for a group, after everything that needs the coordinator."""

    task: Task
    fetched: Fetched
    dataset: Path
    """The file of the data set, which several tasks share."""
    vault: dict[str, Array]
    blobs: dict[str, Path]
    """The files of the server state, by digest."""
    report: Report
    micro_batch: MicroBatch
    compute: Compute
    policy: Policy
    allowances: dict[str, Allowance]
    private: bool
    """True if the agent keeps accounts of the task's privacy."""
    counted: bool
    """True if the agent counts evaluations."""
    seed_key: bytes | None
    noise_key: bytes | None
    """The seed of the noise of a simulation."""
    checkpoint: CheckpointAt | None
    """The checkpoint to resume from and to write; None if this worker writes none."""


@record
@dataclass(frozen=True)
class TaskAt:
    """A task to execute: the path of its file."""

    path: Path


@record
@dataclass(frozen=True)
class StopTask:
    """The task of the group is no longer wanted."""


@record
@dataclass(frozen=True)
class Call:
    """A call of a method of an object of the agent, by rank 0."""

    target: str
    method: str
    arguments: tuple[Any, ...]


@record
@dataclass(frozen=True)
class Reply:
    """The result of a call, or the exception that it raised."""

    value: Any = None
    fault: BaseException | None = None


@record
@dataclass(frozen=True)
class Progressed:
    """The fields of the report, of rank 0."""

    fields: dict[str, Any] = field(default_factory=dict)


@record
@dataclass(frozen=True)
class Ended:
    """The end of a rank's task: with a result or stopped as asked, or with an exception."""

    fault: BaseException | None = None


def send(connection: Connection, message: object) -> None:
    """Send a message. Raises OSError, and TypeError for what no document can hold."""
    connection.send_bytes(dumps(message))


def receive(connection: Connection) -> Any:
    """Return the next message. Raises EOFError and OSError."""
    return loads(connection.recv_bytes(MAX_MESSAGE_BYTES))
