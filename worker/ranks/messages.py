"""Messages between the agent and its ranks, and the socket that carries them."""

import os
import socket
import struct
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tessera.shared.api.tasks import Task
from tessera.shared.tensors.lazy import Array
from tessera.worker.compute import Compute
from tessera.worker.governance.policy import Allowance, Policy
from tessera.worker.ranks.handover import dumps, loads, record
from tessera.worker.state.checkpoints import CheckpointKey
from tessera.worker.task.fetch import Fetched
from tessera.worker.training.optimization.micro_batch import MicroBatch
from tessera.worker.training.progress import Report

START_FILE = "start"
RESULT_FILE = "result"
STORE_FILE = "store"
"""The file by which the ranks find each other."""

MAX_MESSAGE_BYTES = 1 << 30
"""Limit on a message: a method's scores of all examples travel in one."""

PEER = struct.Struct("3i")
"""Process, user and group of a socket's other end."""


@record
@dataclass(frozen=True)
class Start:
    """The settings of a group."""

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
class Handover:
    """One task for a group, after everything that needs the coordinator."""

    task: Task
    fetched: Fetched
    dataset: Path
    """The handover of the data set, which several tasks share."""
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
    has_history: bool
    """True if the agent counts evaluations."""
    checkpoint: CheckpointAt | None
    """The checkpoint to resume from and to write; None if this worker writes none."""


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
class TaskAt:
    """A task to execute: the path of its handover."""

    path: Path


@record
@dataclass(frozen=True)
class StopTask:
    """The task of the group is no longer wanted."""


@record
@dataclass(frozen=True)
class Ended:
    """The end of a rank's task: with a result or stopped as asked, or with an exception."""

    fault: BaseException | None = None


@record
@dataclass(frozen=True)
class Progressed:
    """The fields of the report, of rank 0."""

    fields: dict[str, Any] = field(default_factory=dict)


def send(connection: Connection, message: object) -> None:
    """Send a message. Raises OSError, and TypeError for what no document can hold."""
    connection.send_bytes(dumps(message))


def receive(connection: Connection) -> Any:
    """Return the next message. Raises EOFError and OSError."""
    return loads(connection.recv_bytes(MAX_MESSAGE_BYTES))


def listen(folder: Path, ranks: int) -> socket.socket:
    """Return a socket to which the ranks of a folder connect."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(_address(folder))
    server.listen(ranks)
    return server


def accept(server: socket.socket) -> Connection | None:
    """Return the next connection; None if it is another user's. Raises TimeoutError."""
    peer, _ = server.accept()
    _, user, _ = PEER.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size))
    if user != os.getuid():
        peer.close()
        return None
    peer.setblocking(True)
    return Connection(peer.detach())


def connect(folder: Path) -> Connection:
    """Connect a rank to its agent. Raises OSError."""
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.connect(_address(folder))
    return Connection(client.detach())


def _address(folder: Path) -> str:
    # In the abstract namespace, because a path in a state folder may be too long for a socket.
    return f"\0tessera-{folder.name}"
