"""A rank: the process of one device, which executes the tasks that the agent hands over together with the others.

Its arguments are the executor's folder and the rank's number. The first rank reads the folders of tasks from its
standard input, a line for each.
"""

import gc
import os
import secrets
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from pickle import PicklingError
from typing import Any, cast

import numpy as np
import structlog
import torch
import torch.distributed as dist

from tessera.shared.methods.base import UnsupportedRun
from tessera.shared.problems import Invalid
from tessera.shared.telemetry import logging
from tessera.shared.updates.base_folder import BaseFolder, ConvertedBlock
from tessera.worker.data.content import digests_of, fingerprint_of
from tessera.worker.data.dataset import Dataset
from tessera.worker.devices import device_name
from tessera.worker.errors import (
    ConfigError,
    DataChanged,
    DataError,
    HiddenFailure,
    TaskFailure,
    in_short,
    is_device_failure,
)
from tessera.worker.executor import mapped
from tessera.worker.executor.checkpoints import GroupCheckpoints
from tessera.worker.executor.folder import (
    ARRAYS,
    CHECK,
    CONVERT,
    DIGESTS,
    FAILURE,
    INVENTORY,
    PROGRESS,
    RESULT,
    RESULT_ARRAYS,
    STOP,
    STOPPED,
    SUBJECTS,
    TASK,
    UNEXPLAINED,
    AgentCall,
    CallResult,
    CheckRecord,
    ContextRecord,
    ConvertRecord,
    DatasetRecord,
    DiskError,
    Document,
    FailureRecord,
    InventoryRecord,
    ProgressDocument,
    ResultRecord,
    TaskDocument,
    below,
    dataset_file,
    read_arrays,
    read_document,
    under,
    wake_agent,
    write_arrays,
    write_document,
)
from tessera.worker.executor.group import FirstRankFailed, Group
from tessera.worker.executor.launcher import SETTINGS, RankSettings
from tessera.worker.executor.stages.check import check, require_memory
from tessera.worker.executor.stages.describe import subject_tables
from tessera.worker.executor.stages.execution import execute, hiding, without_cause
from tessera.worker.executor.stages.local_task import LocalTask, Records
from tessera.worker.executor.stages.run_cache import RunCache
from tessera.worker.faults.failures import failure_of
from tessera.worker.governance.policy import Policy, PolicyViolation
from tessera.worker.governance.site_rules import SiteRules
from tessera.worker.inventory import datasets_of, describe, gpu_name, inventory_of
from tessera.worker.model.build import tied_in
from tessera.worker.model.device_memory import return_unused_memory, use_of_gpus
from tessera.worker.model.four_bits import library
from tessera.worker.model.sandbox import Sandbox, shared_folder
from tessera.worker.model.snapshot import convert_blocks
from tessera.worker.settings import DataSources, SettingsError
from tessera.worker.state.atomic_files import disk_error
from tessera.worker.state.blob_cache import BlobTensor
from tessera.worker.task.handover import FetchedVersion, TaskOutcome
from tessera.worker.task.heartbeat import Stopped
from tessera.worker.training.checkpoints import CheckpointFile, TrainingCheckpoints
from tessera.worker.training.optimization.precision import allow_tf32
from tessera.worker.training.progress import Report
from tessera.worker.training.ranks import OneRank
from tessera.worker.training.setup import TrainingSetup

LOOPBACK = "lo"
"""The name of Linux's loopback interface."""
STORE_FILE = "store"
"""The file by which the ranks find each other."""
KEY_NAME = "tessera-key"
"""In that file, the key by which the ranks of a group sign their messages to each other."""
REPORT_SECONDS = 0.5
"""Least time between two reports of progress."""
ANSWER_SECONDS = 0.002
"""Time between two looks for an answer of the agent."""
LOOK_SECONDS = 0.02
"""Least time between two looks for a stop."""
KEEP_SECONDS = 4.0
"""Time without a task after which memory that is not used goes back to the machine."""


def main() -> None:
    """Join the group, and execute tasks until the agent ends, or hands over none for a while."""
    # The imports stay: to go through them takes the garbage collector 0.3 s each time.
    gc.freeze()
    home, rank = Path(sys.argv[1]), int(sys.argv[2])
    settings = read_document(RankSettings, home / SETTINGS)
    logging.configure(sys.stdout, console=settings.console)
    try:
        devices = [torch.device(device_name(name, torch.cuda.device_count())) for name in settings.devices]
    except SettingsError as fault:
        write_inventory(home, InventoryRecord(fault=str(fault)))
        if settings.in_job and rank == 0 and (folder := _line()):
            refusal = FailureRecord(code="slurm-no-gpu", detail=f"on the node of the task's job, {fault}")
            write_document(Path(folder) / FAILURE, refusal)
        return
    device = devices[rank]
    if threads := settings.threads or (len(devices) > 1 and max(1, torch.get_num_threads() // len(devices))):
        torch.set_num_threads(threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    group = _joined(home, rank, settings, device) if len(devices) > 1 else None
    sandbox = Sandbox(shared_folder()) if settings.sandboxed else None
    executor = Rank(home, devices, group, settings.sources, sandbox)
    if settings.in_job:
        signal.signal(signal.SIGTERM, lambda *_: executor.hurry())
    if rank == 0 and sandbox:
        sandbox.sweep(time.time())
    if rank == 0 and settings.sources:
        executor.load(needs_library=settings.base_bits is not None)
    while folder := executor.ranks.same(lambda: _next(settings.idle_seconds)):
        executor.execute(Path(folder))
    if group:
        dist.destroy_process_group()


def write_inventory(home: Path, record: InventoryRecord) -> None:
    """Write the inventory, unless earlier processes of the agent have."""
    path = home.parent / INVENTORY
    if not path.exists():
        write_document(path, record)


def _next(idle_seconds: float | None) -> str | None:
    """Return the folder of the next task; None if the agent ends, or hands over none for a while."""
    ready, _, _ = select.select([0], [], [], KEEP_SECONDS)
    if not ready:
        return_unused_memory()
        ready, _, _ = select.select([0], [], [], idle_seconds)
    return _line() if ready else None


def _line() -> str | None:
    """Return a line of the standard input without reading further, or None at its end."""
    read = b""
    while not read.endswith(b"\n"):
        if not (byte := os.read(0, 1)):
            return None
        read += byte
    return read.decode().rstrip("\n")


def _joined(home: Path, rank: int, settings: RankSettings, device: torch.device) -> Group:
    """Join the process group."""
    # All ranks are on this machine. Otherwise gloo would listen where the machine's name leads.
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = LOOPBACK
    # Ranks agree by values on the CPU, so that no rank waits for its GPU.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    ranks, timeout = len(settings.devices), timedelta(seconds=settings.timeout_seconds)
    # Ranks find each other by a file, since a store of torch's on a port has no password.
    store = dist.FileStore(str(home / STORE_FILE), ranks)  # type: ignore[attr-defined]  # torch does not declare it
    # The file's folder is the worker's alone.
    if rank == 0:
        store.set(KEY_NAME, secrets.token_hex(32))
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)
    return Group(home, store.get(KEY_NAME))


class TaskStopped(Stopped):
    """The task is no longer wanted, or the agent refused to record something."""


class Rank:
    """One rank, for as long as it lives. Without a `group` it is alone."""

    def __init__(
        self,
        home: Path,
        devices: Sequence[torch.device],
        group: Group | None,
        sources: DataSources | None = None,
        sandbox: Sandbox | None = None,
    ) -> None:
        self._home = home
        self._sources = sources
        self._sandbox = sandbox
        self._loaded: dict[str, Dataset] = {}
        """The data sets as they were loaded, in the first rank."""
        self._devices = devices
        self._device = devices[group.rank if group else 0]
        self._group = group
        self.ranks: Group | OneRank = group or OneRank()
        self._cache = RunCache()
        self._dataset: tuple[object, Dataset] | None = None
        self._folder = home
        self._report = Report()
        self._reported_at = self._looked_at = 0.0
        self._requests = 0
        self._checkpoints: GroupCheckpoints | None = None
        self._saves: TrainingCheckpoints | None = None
        """The same, or those of a rank alone."""

    def load(self, *, needs_library: bool = False) -> None:
        """Load the data sets, unless earlier processes of the agent have, and write the inventory of them. With
        `needs_library`, the library for matrices in 4 bits must be there."""
        if self._sources is None or (self._home.parent / INVENTORY).exists():
            return
        try:
            if needs_library:
                library()
            self._loaded = datasets_of(self._sources, cuda=self._device.type == "cuda", make=True)
            prints = {name: fingerprint_of(dataset) for name, dataset in self._loaded.items()}
            found = inventory_of(self._sources.datasets, self._loaded)
            device, gpu = describe(*self._devices), gpu_name(self._devices)
            record = InventoryRecord(inventory=replace(found, device=device, gpu=gpu), fingerprints=prints)
        except (SettingsError, ConfigError, OSError) as fault:
            if isinstance(fault, OSError) and not disk_error(fault):
                raise
            record = InventoryRecord(fault=str(fault), disk=_disk_of(fault))
        write_inventory(self._home, record)

    def execute(self, folder: Path) -> None:
        """Execute the task in a folder. The first rank writes its result there, and any rank its failure."""
        self._folder, self._requests, self._checkpoints, self._saves = folder, 0, None, None
        try:
            for request, answer in self._requests_of_first.items():
                if (folder / request).exists():
                    if self.ranks.is_first:
                        answer(folder / request)
                    return
            outcome = self._execute(read_document(TaskDocument, folder / TASK))
            # All wait for it: they would end if the first one read no next task for a while.
            self.ranks.same(lambda: self._write(outcome))
        except FirstRankFailed:
            return
        except TaskStopped:
            if self.ranks.is_first:
                self._answer(FAILURE, FailureRecord(code=STOPPED, detail=""))
            return
        except Exception as fault:  # noqa: BLE001  (the agent decides what a failure of any kind means)
            record = _failure(fault)
            explained = not (record.code == UNEXPLAINED or record.hidden or fault.__cause__)
            about = {"rank": self._number, "code": record.code, "detail": in_short(fault)}
            structlog.get_logger("worker").error("rank-failed", exc_info=None if explained else fault, **about)
            self._answer(FAILURE, record)
            if is_device_failure(fault):
                # Only a new process can use the GPU again.
                sys.exit(1)
            return
        if self.ranks.shards > 1:
            # Its parts refer to each other, and two of them may not fit.
            gc.collect()

    @property
    def _number(self) -> int:
        return self._group.rank if self._group else 0

    def _execute(self, given: TaskDocument) -> TaskOutcome:
        task, arrays = given.task, read_arrays(self._folder / ARRAYS)
        self._report = given.report
        allow_tf32(allowed=given.compute.tf32)
        if given.compute.shard:
            # A model that is kept is whole.
            self._cache = RunCache()
        local = self._local(given, given.loss_scale, given.noise_seed)
        in_sum = task.trains and task.sums is not None
        # Its files may have changed since the agent started.
        with hiding(in_sum=in_sum), without_cause(hides=local.rules.hides_cause(task)):
            dataset = self._read(task.dataset)
        blocks = {block.name: block for block in given.blocks}
        fetched = FetchedVersion(
            given.document,
            given.mapping,
            given.manifest,
            given.blocks,
            {name: BlobTensor(Path(base.path), blocks[name], base.offset) for name, base in given.bases.items()},
            given.four_bits,
            below("state", arrays),
            below("kept", arrays),
            {name: text.encode() for name, text in given.tokenizer.items()},
        )
        if self._group:
            self._group.sharded = given.compute.shard
        if not (fetched.is_whole and self._cache.models.holds(task.run, task.model, fetched.four_bits)):
            require_memory(local, fetched.document, fetched.four_bits)
        account: Any = None
        if given.units is not None:
            account = _Agent(self._ask, units=given.units)
        return execute(local, fetched, dataset, account, self._saving(given))

    def _saving(self, given: TaskDocument) -> TrainingCheckpoints | None:
        place = given.checkpoint
        if place is None:
            return None
        stored = CheckpointFile(place.key, place.path, partial(self._ask_alone, "note_instance"))
        if self._group is None:
            self._saves = TrainingCheckpoints(stored, place.seconds)
        else:
            self._saves = self._checkpoints = GroupCheckpoints(stored, place.seconds, self._group)
        return self._saves

    def hurry(self) -> None:
        """Write a checkpoint as soon as the task can."""
        if self._saves:
            self._saves.hurry()

    def _local(
        self, given: ContextRecord, loss_scale: Mapping[str, float] | None = None, noise_seed: str | None = None
    ) -> LocalTask:
        policy = Policy.model_validate(given.policy)
        return LocalTask(
            given.task,
            SiteRules(policy=policy, allowances=given.allowances, full_precision=given.full_precision),
            cast("Records", _Agent(self._ask, keep_scale=self._keep_scale)),
            TrainingSetup(self._device, given.micro_batch, given.compute, self.ranks),
            self._cache,
            self._folder,
            self._check,
            given.report,
            loss_scale or {},
            self._sandbox,
            bytes.fromhex(noise_seed) if noise_seed else None,
        )

    def _keep_scale(self, scale: Mapping[str, float]) -> None:
        # Also where one rank fails alone, so that the others must not take part.
        if self.ranks.is_first:
            self._ask_alone("keep_scale", dict(scale))

    # ------------------------------------------------------------ requests that the first rank answers alone

    @property
    def _requests_of_first(self) -> Mapping[str, Callable[[Path], None]]:
        return {DIGESTS: self._digest, SUBJECTS: self._describe, CHECK: self._check_model, CONVERT: self._convert}

    def _check_alone(self) -> None:
        if self._attend():
            raise TaskStopped

    def _digest(self, request: Path) -> None:
        """Write the digests of a data set's examples."""
        given = read_document(DatasetRecord, request)
        self._report = given.report
        with hiding(in_sum=given.in_sum):
            digests = digests_of(self._whole(given.dataset), self._check_alone)
        write_arrays(self._folder / RESULT_ARRAYS, {"digests": digests.readable})
        self._answer(RESULT, ResultRecord(report=given.report, content=digests.content))

    def _describe(self, request: Path) -> None:
        """Write the subjects of a data set."""
        given = read_document(DatasetRecord, request)
        self._report = given.report
        found = subject_tables(self._whole(given.dataset), self._check_alone)
        arrays = {"subjects": found.subjects, "digests": found.digests.view(np.int64)}
        for name, table in found.tables.items():
            arrays |= {f"examples/{name}": table.examples, f"cells/{name}": table.cells}
        write_arrays(self._folder / RESULT_ARRAYS, arrays)
        sizes = {name: table.size for name, table in found.tables.items()}
        self._answer(RESULT, ResultRecord(report=given.report, tables=sizes, unknown_tokens=found.unknown_tokens))

    def _check_model(self, request: Path) -> None:
        """Write the model's block table."""
        given = read_document(CheckRecord, request)
        self._report = given.report
        local = replace(self._local(given), check=self._check_alone)
        checked = check(local, given.document, given.mapping, given.dataset, elsewhere=given.elsewhere)
        if given.names_tied:
            checked = replace(checked, tied=tied_in(given.document, given.mapping))
        self._answer(RESULT, ResultRecord(report=given.report, checked=checked))

    def _convert(self, request: Path) -> None:
        """Hand the agent each block that transformers makes of a published model. Raises TaskFailure."""
        given, path = read_document(ConvertRecord, request), self._folder / "block"

        def take(made: ConvertedBlock) -> None:
            path.write_bytes(made.data)
            self._ask_alone("take", made.block.name, str(path), [str(source) for source in made.sources])

        try:
            convert_blocks(given.config, given.head, BaseFolder.open(given.folder), given.blocks, take)
        except (Invalid, ValueError) as fault:
            # Of files of this site, for its own log.
            raise TaskFailure("no-base", str(fault)) from fault
        self._answer(RESULT, ResultRecord(report=self._report))

    def _answer(self, name: str, document: Document) -> None:
        write_document(self._folder / name, document)
        wake_agent(self._home)

    # ------------------------------------------------------------ data sets

    def _read(self, name: str) -> Dataset:
        """Return a data set. Several ranks map its tensors, and so do later processes of the agent."""
        path, key = dataset_file(self._home, name), (name, 0)
        if self._group or path.exists():
            self.ranks.same(lambda: self._share(name, path))
            key = name, path.stat().st_ino
        if self._dataset is None or self._dataset[0] != key:
            self._dataset = key, mapped.read(path) if path.exists() else self._whole(name)
            self._cache.tokenized.clear()
        return self._dataset[1]

    def _share(self, name: str, path: Path) -> None:
        if path.exists():
            return
        try:
            mapped.write(path, mapped.plain(self._whole(name)))
        except (PicklingError, AttributeError, TypeError) as fault:
            raise UnsupportedRun(
                "the readers of this kind of data set cannot be used by several processes (devices)"
            ) from fault
        # This rank maps it, too.
        self._loaded.clear()

    def _whole(self, name: str) -> Dataset:
        """Return a data set with everything that was loaded. Raises DataError."""
        if name not in self._loaded and self._sources:
            one = self._sources.model_copy(update={"datasets": {name: self._sources.datasets[name]}})
            try:
                (found,) = datasets_of(one, cuda=self._device.type == "cuda").values()
            except SettingsError as fault:
                raise DataError(str(fault)) from fault
            known = read_document(InventoryRecord, self._home.parent / INVENTORY)
            if fingerprint_of(found) != known.fingerprints[name]:
                raise DataChanged(f"the data set {name!r} has changed since the worker started; restart it")
            self._loaded[name] = found
        return self._loaded[name]

    def _write(self, outcome: TaskOutcome) -> None:
        result, arrays = outcome.result, under("moments", outcome.moments)
        if result:
            arrays |= {**under("upload", result.upload), **under("keep", result.keep)}
        if outcome.losses is not None:
            arrays["losses"] = outcome.losses
        write_arrays(self._folder / RESULT_ARRAYS, arrays)
        metrics = None if result is None else dict(result.metrics)
        self._answer(RESULT, ResultRecord(examples=outcome.examples, metrics=metrics, report=self._report))

    # ------------------------------------------------------------ the agent

    def _check(self) -> None:
        """Raise TaskStopped in all ranks once the agent asked for it, and let them agree on the next checkpoint."""
        if self._group is None:
            if self._attend():
                raise TaskStopped
            return
        if self._group.alone:
            return
        wants = self._attend(), bool(self._checkpoints and self._checkpoints.wanted)
        stop, save = self._group.total(torch.tensor(wants, dtype=torch.float64)).tolist()
        if self._checkpoints and save:
            self._checkpoints.agree()
        if stop:
            raise TaskStopped

    def _attend(self) -> bool:
        """Report the progress, in the first rank, and return True if the agent asked it to stop."""
        if not self.ranks.is_first:
            return False
        now = time.monotonic()
        if now - self._reported_at >= REPORT_SECONDS:
            self._show()
        # Each step and each block of a model asks.
        if now - self._looked_at < LOOK_SECONDS:
            return False
        self._looked_at = now
        return (self._folder / STOP).exists()

    def _show(self) -> None:
        self._report.gpu_use = use_of_gpus(self._devices)
        write_document(self._folder / PROGRESS, ProgressDocument(report=self._report))
        self._reported_at = time.monotonic()

    def _ask(self, call: str, *arguments: Any) -> Any:
        """Return the result of a function of the agent, in each rank. Raises TaskStopped if it refuses."""
        return self.ranks.same(lambda: self._ask_alone(call, *arguments))

    def _ask_alone(self, call: str, *arguments: Any) -> Any:
        self._requests += 1
        answer = self._folder / f"answer-{self._requests}.json"
        asked = AgentCall(call=call, arguments=list(arguments), report=self._report)
        self._answer(f"request-{self._requests}.json", asked)
        # The supervisor ends this process with the agent. A job of Slurm outlives it, until its folder is removed.
        while not answer.exists():
            time.sleep(ANSWER_SECONDS)
            if not self._folder.exists():
                raise TaskStopped
        answered = read_document(CallResult, answer)
        if answered.refused:
            raise TaskStopped
        return answered.value


def _failure(fault: Exception) -> FailureRecord:
    code, detail = failure_of(fault)
    if isinstance(fault, HiddenFailure):
        # Otherwise the agent would take the end of this process for the failure, and report that.
        code = "device-failed" if is_device_failure(fault) else code
        return FailureRecord(code=code, detail=str(fault), hidden=True)
    if isinstance(fault, PolicyViolation):
        return FailureRecord(code=code, detail=fault.detail, rule=fault.rule)
    disk = _disk_of(fault) if isinstance(fault, OSError) else None
    return FailureRecord(code=code, detail=detail, disk=disk)


def _disk_of(fault: Exception) -> DiskError | None:
    error = disk_error(fault)
    return (error.errno or 0, error.strerror or "", error.filename) if error else None


class _Agent:
    """The functions of the agent, by their names."""

    def __init__(self, ask: Callable[..., Any], **known: Any) -> None:
        self._ask = ask
        vars(self).update(known)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._ask, name)
