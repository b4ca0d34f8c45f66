"""A rank: a process of a group, which executes the tasks that the agent hands over.

Its arguments are the group's folder, the rank's number and the descriptor of its connection to the agent.
"""

import gc
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import fields, replace
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import numpy as np
import structlog
import torch
import torch.distributed as dist
from torch import Tensor

from tessera.shared.api.tasks import Receipt
from tessera.shared.client.transfers import Progress
from tessera.shared.methods.base import LocalResult, Phase, TrainingStats
from tessera.shared.model.attention_stats import LayerAttention, TaskTokens
from tessera.shared.model.blocks import Block
from tessera.shared.telemetry import logging
from tessera.shared.tensors.dtypes import NUMPY_DTYPES
from tessera.shared.tensors.lazy import Array
from tessera.worker.data.dataset import Dataset
from tessera.worker.governance.run_history import RunHistory
from tessera.worker.model.build import read_block
from tessera.worker.ranks import serialization
from tessera.worker.ranks.checkpoints import GroupCheckpoints
from tessera.worker.ranks.group import Group
from tessera.worker.ranks.messages import (
    RESULT_FILE,
    Call,
    CheckpointAt,
    Ended,
    GroupTask,
    Progressed,
    Reply,
    Start,
    TaskAt,
    receive,
    send,
)
from tessera.worker.ranks.sharding import bytes_here, gathered
from tessera.worker.ranks.shared_dataset import dataset_of
from tessera.worker.state.blob_cache import Source
from tessera.worker.state.checkpoints import Instance, TaskCheckpoint
from tessera.worker.state.vault import RoundWorkload, Vault
from tessera.worker.task.environment import Coordinator, Journal, Shelf, TaskEnvironment, TaskRun
from tessera.worker.task.evaluate import evaluate
from tessera.worker.task.fetch import Loaded, load, require_memory
from tessera.worker.task.model_cache import ModelCache
from tessera.worker.task.train import train
from tessera.worker.training.context import LocalTaskContext
from tessera.worker.training.input_mismatch import explained, require_own_loss
from tessera.worker.training.optimization.micro_batch import PieceSize
from tessera.worker.training.optimization.precision import allow_tf32
from tessera.worker.training.progress import Report
from tessera.worker.training.setup import TrainingSetup

LOOPBACK = "lo"
"""The name of Linux's loopback interface."""
STORE_FILE = "store"
"""The file by which the ranks find each other."""
REPORT_SECONDS = 0.5
"""Least time between two reports of a rank's progress."""

Result = tuple[tuple[LocalResult, TrainingStats] | int, dict[str, Array], dict[str, Any]]
"""The result of a stage, the optimizer's moments, and the fields of the report."""


def main() -> None:
    """Join the group, and execute tasks until the agent ends, or hands over none for a while."""
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    os.set_inheritable(int(sys.argv[3]), False)
    logging.configure(sys.stdout, console=False)
    connection = Connection(int(sys.argv[3]))
    start: Start = receive(connection)
    _join(folder, rank, start)
    executor = Rank(folder, start.devices[rank], connection)
    for message in _messages(connection, start.idle_seconds):
        # A request to stop may come when the task has ended already.
        if isinstance(message, TaskAt):
            ended = executor.execute(message.path)
            with suppress(BrokenPipeError):
                send(connection, ended)
    dist.destroy_process_group()


def _messages(connection: Connection, idle_seconds: float) -> Iterator[Any]:
    """Yield the agent's messages until it ends, gives up this group, or sends none for a while."""
    with suppress(EOFError, OSError):
        while connection.poll(idle_seconds):
            yield receive(connection)


def _join(folder: Path, rank: int, start: Start) -> None:
    """Join the process group, on this rank's device."""
    device, ranks = start.devices[rank], len(start.devices)
    torch.set_num_threads(start.threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # All ranks are on this machine. Otherwise gloo would listen where the machine's name leads.
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = LOOPBACK
    # What the ranks agree on is on the CPU, so that no rank waits for its GPU.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=start.timeout_seconds)
    # Ranks find each other by a file, since a store of torch's on a port has no password.
    store = dist.FileStore(str(folder / STORE_FILE), ranks)  # type: ignore[attr-defined]  # torch does not declare it
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)


class RanksStopped(Exception):
    """The agent asked the group to stop, because the task is no longer wanted."""


class Rank:
    """One rank of a group, for as long as the group lives."""

    def __init__(self, folder: Path, device: torch.device, connection: Connection) -> None:
        self._folder = folder
        self._device = device
        self._connection = connection
        self._group = Group()
        self._models = ModelCache()
        self._scalers: dict[str, torch.amp.GradScaler] = {}
        self._piece_sizes: dict[str, PieceSize] = {}
        self._dataset: tuple[Path, Dataset] | None = None
        self._report = Report()
        self._reported_at = 0.0
        self._asked_to_stop = False
        self._checkpoints: GroupCheckpoints | None = None

    def execute(self, path: Path) -> Ended:
        """Execute the task in a file. Rank 0 writes its result beside it."""
        self._asked_to_stop, self._checkpoints = False, None
        try:
            given: GroupTask = serialization.read(path)
            result = self._execute(given)
            # The others wait for it: they would end if the agent sent them no message for a while.
            self._group.same(lambda: serialization.write(self._folder / RESULT_FILE, result))
        except RanksStopped:
            pass
        except Exception as fault:  # noqa: BLE001  (the agent decides what a failure of any kind means)
            structlog.get_logger("worker").exception("rank-failed", rank=self._group.rank)
            return Ended(fault=fault)
        if self._group.sharded:
            # Its parts refer to each other, and two of them may not fit.
            gc.collect()
        return Ended()

    def _execute(self, given: GroupTask) -> Result:
        task, fetched = given.task, given.fetched
        self._report = given.report
        allow_tf32(allowed=given.compute.tf32)
        run = TaskRun(self._environment(given), task, self._check, given.report, self._journal())
        built = self._models.take(task.run, task.model)
        self._group.sharded = given.compute.shard
        settings_differ = built and (given.compute.shard or built.four_bits != fetched.four_bits)
        if built is None or settings_differ or len(fetched.bases) < len(fetched.blocks):
            # As in `fetch`: a local value of a block that is not fetched must not leak into this round.
            built = None
            require_memory(run, fetched.document, fetched.four_bits)
        loaded = load(run, replace(fetched, last=built))
        if given.compute.shard:
            nbytes = sum(each.nbytes for each in loaded.built.model.parameters())
            log = structlog.get_logger("worker")
            log.info("model-sharded", rank=self._group.rank, bytes=bytes_here(loaded.built.model), model_bytes=nbytes)
        loaded = replace(loaded, context=GroupContext.of(loaded.context, self._group))
        dataset = self._read(given.dataset)
        rounds = task.kind == "evaluate" and run.env.rounds_figures(task)
        private = bool(given.private) or task.secure_sums is not None or rounds
        require_own_loss(loaded.context, dataset.padded() if private else dataset)
        # One rank alone must not compute with a sharded model.
        rehearses = not given.compute.shard
        with explained(fetched.document, loaded.context, dataset, private=private, rehearses=rehearses):
            stage = self._stage(run, loaded, dataset, given)
        loaded.context.close()
        # What a sharded model trains is set once.
        if not given.compute.shard:
            self._models.keep(loaded.built)
        return stage, loaded.moments.values, vars(run.report)

    def _stage(
        self, run: TaskRun, loaded: Loaded, dataset: Dataset, given: GroupTask
    ) -> tuple[LocalResult, TrainingStats] | int:
        if run.task.kind == "evaluate":
            return evaluate(run, loaded, dataset)
        saving = self._checkpoints = self._checkpoints_at(given.checkpoint) if given.checkpoint else None
        account: Any = None
        if given.private:
            groups = run.groups(dataset)
            account = _Remote(self._call, "private")
            account.units = groups.count if groups else dataset.examples
        return train(run, loaded, dataset, account, saving)

    def _checkpoints_at(self, place: CheckpointAt) -> GroupCheckpoints:
        # Rank 0 alone writes it.
        agents = cast("Instance", _Remote(self._ask, "checkpoint"))
        stored = TaskCheckpoint.at(place.key, place.path, agents)
        return GroupCheckpoints(stored, place.seconds, self._group)

    def _environment(self, given: GroupTask) -> TaskEnvironment:
        return TaskEnvironment(
            coordinator=cast("Coordinator", _Remote(self._call, "coordinator")),
            datasets={},
            setup=TrainingSetup(self._device, given.micro_batch, given.compute, self._group),
            vault=_HandedVault(given.vault, _Remote(self._call, "vault"), self._keep_scale),
            shelf=cast("Shelf", _HandedShelf(given.blobs)),
            scratch=self._folder,
            policy=given.policy,
            scalers=self._scalers,
            piece_sizes=self._piece_sizes,
            allowances=given.allowances,
            history=cast("RunHistory", _Remote(self._call, "history")) if given.counted else None,
            seed_key=given.seed_key,
            noise_key=lambda _: given.noise_key,
        )

    def _keep_scale(self, run: str, state: Mapping[str, Array]) -> None:
        # Also where one rank fails alone, so that the others must not take part.
        if self._group.is_first:
            self._ask("vault", "keep_scale", run, state)

    def _journal(self) -> Journal:
        return cast("Journal", _Remote(self._call, "journal"))

    def _read(self, path: Path) -> Dataset:
        if self._dataset is None or self._dataset[0] != path:
            self._dataset = path, dataset_of(serialization.read(path))
        return self._dataset[1]

    # ------------------------------------------------------------ the agent

    def _check(self) -> None:
        """Raise RanksStopped in all ranks once the agent asked for it, and let them agree on the next checkpoint."""
        if self._group.alone:
            return
        wants = self._attend(), bool(self._checkpoints and self._checkpoints.wanted)
        stop, save = self._group.total(torch.tensor(wants, dtype=torch.float64)).tolist()
        if self._checkpoints and save:
            self._checkpoints.agree()
        if stop:
            raise RanksStopped

    def _attend(self) -> bool:
        """Report the progress, in rank 0, and return whether the agent asked this rank to stop."""
        if self._group.is_first and time.monotonic() - self._reported_at >= REPORT_SECONDS:
            send(self._connection, Progressed(vars(self._report)))
            self._reported_at = time.monotonic()
        while not self._asked_to_stop and self._connection.poll():
            self._receive()
        return self._asked_to_stop

    def _call(self, target: str, method: str, *arguments: Any) -> Any:
        """Return the result of a method of an object of the agent, in each rank."""
        return self._group.same(lambda: self._ask(target, method, *arguments))

    def _ask(self, target: str, method: str, *arguments: Any) -> Any:
        send(self._connection, Progressed(vars(self._report)))
        send(self._connection, Call(target, method, arguments))
        while (reply := self._receive()) is None:
            pass
        if reply.fault:
            raise reply.fault
        return reply.value

    def _receive(self) -> Reply | None:
        """Return the next message if it is a reply; otherwise the agent asks to stop."""
        message = receive(self._connection)
        if isinstance(message, Reply):
            return message
        self._asked_to_stop = True
        return None


class _Remote:
    """An object of the agent, whose methods are called by `call`."""

    def __init__(self, call: Callable[..., Any], target: str) -> None:
        self._call = call
        self._target = target

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return partial(self._call, self._target, method)


class _HandedVault(Vault):
    """The vault's tensors for one task. The agent has settled it, and keeps the loss scale."""

    def __init__(
        self, arrays: dict[str, Array], agent: Any, keep_scale: Callable[[str, Mapping[str, Array]], None]
    ) -> None:
        self._arrays = arrays
        self._agent = agent
        self._keep_scale = keep_scale

    def load(self, run: str) -> dict[str, Array]:
        return self._arrays

    def settle_run(self, run: str, receipt: Receipt | None, ask: RoundWorkload) -> None:
        pass

    def load_scale(self, run: str) -> dict[str, Array]:
        return self._agent.load_scale(run)  # type: ignore[no-any-return]

    def keep_scale(self, run: str, state: Mapping[str, Array]) -> None:
        self._keep_scale(run, state)


class _HandedShelf:
    """The blobs that the agent has fetched for one task."""

    def __init__(self, paths: Mapping[str, Path]) -> None:
        self._paths = paths

    def fetch(self, digest: str, max_bytes: int, source: Source, progress: Progress | None = None) -> Path:
        return self._paths[digest]

    def in_memory(self, digest: str) -> bytes | None:
        """Return None: it is read from its file."""


class GroupContext(LocalTaskContext):
    """A context whose measurements are the first rank's, since those of two GPUs differ by rounding."""

    group: Group

    @classmethod
    def of(cls, context: LocalTaskContext, group: Group) -> "GroupContext":
        made = cls(**{each.name: getattr(context, each.name) for each in fields(LocalTaskContext)})
        made.group = group
        return made

    def read(self, block: Block) -> Array:
        tensors = {name: gathered(tensor) for name, tensor in self._tensor(block).items()}
        if self.group.sharded and not self.group.is_first:
            # Of a sharded model, rank 0's result alone is read.
            return np.zeros(block.shape, NUMPY_DTYPES[block.dtype])
        return read_block(tensors, block)

    def read_all(self, blocks: Iterable[Block]) -> dict[str, Array]:
        return {block.name: self.read(block) for block in blocks}

    def images_once(self, data: Dataset, phases: Sequence[Phase] | None = None) -> AbstractContextManager[Dataset]:
        """Return the data set as it is: ranks that share a tower's weights must all call it for each batch."""
        return nullcontext(data)

    def attention(self, batches: Iterable[Mapping[str, Tensor]], tokens: TaskTokens) -> dict[str, LayerAttention]:
        return self.group.same(lambda: super(GroupContext, self).attention(batches, tokens))

    def attention_rows(self, batch: Mapping[str, Tensor], queries: int) -> dict[str, Array]:
        return self.group.same(lambda: super(GroupContext, self).attention_rows(batch, queries))

    def gradient_norms(self, batches: Iterable[Mapping[str, Tensor]], blocks: Sequence[Block]) -> dict[str, float]:
        return self.group.same(lambda: super(GroupContext, self).gradient_norms(batches, blocks))

    def fisher(self, batches: Iterable[Mapping[str, Tensor]], blocks: Sequence[Block]) -> dict[str, float]:
        return self.group.same(lambda: super(GroupContext, self).fisher(batches, blocks))
