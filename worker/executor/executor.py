"""The executor as the agent sees it: the agent hands a task over in a folder, answers requests, and waits."""

from __future__ import annotations

import atexit
import math
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np
import structlog
from pydantic import BaseModel

from tessera.shared.methods.base import LocalResult
from tessera.shared.model.blocks import Block
from tessera.shared.model.spec import Model
from tessera.shared.schema import canonical
from tessera.shared.tensors.lazy import Array, digest_of
from tessera.shared.updates.base_folder import BaseFolder, ConvertedBlock
from tessera.worker.compute import Compute, MicroBatch
from tessera.worker.data.dataset_info import DatasetInfo, Inventory
from tessera.worker.data.overlap import ExampleDigests
from tessera.worker.errors import ExecutorEnded, HiddenFailure, TaskFailure
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
    Base,
    CallResult,
    CheckpointPlace,
    CheckRecord,
    ConvertRecord,
    DatasetRecord,
    FailureRecord,
    InventoryRecord,
    ProgressDocument,
    ResultRecord,
    TaskDocument,
    below,
    read_arrays,
    read_document,
    under,
    write_arrays,
    write_document,
)
from tessera.worker.executor.launcher import IDLE_SECONDS, LocalLauncher, RankSettings
from tessera.worker.governance.policy import PolicyViolation
from tessera.worker.privacy.disclosed_counts import CellTable, SubjectTables
from tessera.worker.settings import DataSources, SettingsError
from tessera.worker.state.atomic_files import WriteFailed, sweep
from tessera.worker.state.base_sources import Take
from tessera.worker.state.blob_cache import BlobTensor
from tessera.worker.state.checkpoints import TaskCheckpoint
from tessera.worker.state.vault import RoundWorkload
from tessera.worker.task.environment import Documents, SiteRecords, TaskRun
from tessera.worker.task.handover import CheckedModel, FetchedVersion, TaskOutcome

if TYPE_CHECKING:
    from tessera.worker.privacy.account import PrivacyAccount

FOLDER = "executor"
"""The name of the executor's folder in the state folder."""
MARGIN_SECONDS = 30.0
"""The agent counts on idle processes for this much less, so that it hands no task to some that are about to end."""
LOOK_SECONDS = 0.05
"""Longest time between two looks at a task's folder."""
STOP_SECONDS = 15.0
"""Time in which the ranks have to reach the end of a step, once the task is no longer wanted."""
END_SECONDS = 0.2
"""Time for the end of a process to be noticed after another one has failed because of it."""
SETTLED_SECONDS = 5.0
"""Time without a task after which processes have returned unused memory."""
GROWTH, GROWTH_BYTES = 2, 1 << 30
"""Idle processes are replaced if they take this many times the memory that they took after the first tasks of a run,
and this much more: something leaks."""
ENDED = "a process that executes tasks at this worker ended; the worker's own log has more"


class ProcessExecutor:
    """The execution of tasks in processes of this machine, one for each device.

    They load the data sets. A single one lasts. Several are started for the inventory or the first task of a run, and
    kept while further tasks of that run follow.
    """

    scripted = False
    """True if a script of the site's own trains."""
    elsewhere = False
    """True if other machines execute tasks."""

    def __init__(
        self,
        settings: RankSettings,
        state_dir: Path,
        compute: Compute | None = None,
        micro_batch: MicroBatch = None,
    ) -> None:
        self._ranks = settings
        self._devices = settings.devices
        self.compute = compute or Compute()
        self.micro_batch = micro_batch
        self.folder = state_dir / FOLDER
        """The folder of the folders of processes."""
        self._launcher = LocalLauncher(settings, self.folder)
        self._gpu: str | None = None
        self._task = ("", "", "")
        """The run, kind and data set of the last task."""
        self._used_at = -math.inf
        """The time of the processes' last use."""
        self._first_bytes: dict[tuple[str, str, str], int] = {}
        """The memory that idle processes took after the first task of each run, kind and data set."""
        self._replaced = 0
        self._checked = Documents()
        """The models that processes have checked, each for the tasks of one kind and plan."""
        atexit.register(self.close)

    @property
    def kind(self) -> str:
        count, name = len(self._devices), self._devices[0]
        kind = "cuda" if self._gpu or name.startswith("cuda") else "cpu"
        return kind if count == 1 else f"{count} {kind}"

    def start(self) -> None:
        """Start the processes, which import for seconds, unless there are some. Raises OSError."""
        self._launcher.home()

    def inventory(self) -> Inventory:
        """Return the facts about the data sets and the devices, once the first rank has loaded the data sets. Raises
        SettingsError for settings that cannot be used, also because of the disk, and ExecutorEnded."""
        home, path = self._launcher.home(), self.folder / INVENTORY
        while True:
            # Looked at before the file, which a process writes before it ends.
            ended = self._launcher.home() != home
            if path.exists():
                break
            if ended:
                self.close()
                raise ExecutorEnded("executor-ended", ENDED)
            time.sleep(LOOK_SECONDS)
        record = read_document(InventoryRecord, path)
        if record.inventory is None:
            self.close()
            raise SettingsError(record.fault) from (WriteFailed(*record.disk) if record.disk else None)
        self._used_at, self._gpu = time.monotonic(), record.inventory.gpu
        return record.inventory

    def reload(self, sources: DataSources) -> Inventory:
        """Have new processes load the data sets of these settings. Raises as `inventory` does."""
        self.close()
        self._ranks = self._ranks.model_copy(update={"sources": sources})
        self._launcher = LocalLauncher(self._ranks, self.folder)
        return self.inventory()

    def is_outdated(self) -> bool:
        """Return True if the data sets have changed since the inventory, as the data sets of a region may."""
        return False

    def memory_bytes(self) -> int:
        """Return the memory of the processes."""
        return self._launcher.memory_bytes()

    def settle(self, ask: RoundWorkload) -> None:
        """End what executes a task that no worker can claim any more, as after a restart. Raises those of `ask`."""

    def idle(self) -> None:
        """Replace processes whose memory has grown far beyond what the first tasks of the run left."""
        used = self.memory_bytes()
        if not used or not self._task[0] or time.monotonic() < self._used_at + SETTLED_SECONDS:
            return
        self._first_bytes.setdefault(self._task, used)
        first = max(nbytes for (run, _, _), nbytes in self._first_bytes.items() if run == self._task[0])
        if used < GROWTH * first + GROWTH_BYTES:
            return
        self._replaced += 1
        about = {"memory_bytes": used, "after_first_task_bytes": first, "times": self._replaced}
        structlog.get_logger("worker").warning("executor-replaced", **about)
        self._launcher.close()
        self._first_bytes.clear()
        # Otherwise the next task starts them.
        with suppress(OSError):
            self.start()

    def digests(self, run: TaskRun, dataset: str) -> ExampleDigests:
        def hand_over(folder: Path) -> None:
            in_sum = run.task.kind == "train" and run.task.sums is not None
            write_document(folder / DIGESTS, DatasetRecord(dataset=dataset, in_sum=in_sum, report=run.report))

        result, arrays = self._submitted(run, hand_over, {})
        return ExampleDigests(arrays["digests"], result.content)

    def subjects(self, run: TaskRun, dataset: str) -> SubjectTables:
        def hand_over(folder: Path) -> None:
            write_document(folder / SUBJECTS, DatasetRecord(dataset=dataset, report=run.report))

        result, arrays = self._submitted(run, hand_over, {})
        tables = {
            name: CellTable(arrays[f"examples/{name}"], arrays[f"cells/{name}"], size)
            for name, size in result.tables.items()
        }
        return SubjectTables(arrays["subjects"], arrays["digests"].view(np.uint64), tables, result.unknown_tokens)

    def check(self, run: TaskRun, document: Model, dataset: DatasetInfo) -> CheckedModel:
        task, about = run.task, (self.compute, run.task.method, run.task.plan, run.task.training, run.task.privacy)
        digests = (digest_of(canonical(one)) for one in about if one)
        key = " ".join((str(self._home(run)), task.kind, task.model, task.dataset, *digests))

        def ask() -> CheckedModel:
            about = {"dataset": dataset, "names_tied": self.scripted, "elsewhere": self.elsewhere}
            record = CheckRecord(**self._context(run, document), **about)
            result, _ = self._submitted(run, lambda folder: write_document(folder / CHECK, record), {})
            assert result.checked  # noqa: S101  (as asked for)
            return result.checked

        return self._checked.read(CheckedModel, key, ask)

    def convert(self, run: TaskRun, document: Model, folder: BaseFolder, blocks: Iterable[Block], take: Take) -> None:
        def taken(name: str, path: str, sources: list[str]) -> None:
            take(ConvertedBlock(wanted[name], memoryview(Path(path).read_bytes()), tuple(map(Path, sources))))

        wanted = {block.name: block for block in blocks}
        about = {"config": document.config, "head": document.head, "folder": folder.path}
        record = ConvertRecord(**about, blocks=tuple(wanted.values()))
        self._submitted(run, lambda folder: write_document(folder / CONVERT, record), {"take": taken})

    def execute(
        self, run: TaskRun, fetched: FetchedVersion, account: PrivacyAccount | None, checkpoint: TaskCheckpoint | None
    ) -> TaskOutcome:
        """Execute a task as `stages.execution.execute` does. Raises its exceptions, and ExecutorEnded.

        With a checkpoint that was written in between, new processes then go on from it: a task that ends them before
        the next one fails, unless it is not the cause and not private. A sharded model has no checkpoints.
        """
        if self.compute.shard:
            checkpoint = None
        while True:
            try:
                return self._executed(run, fetched, account, checkpoint)
            except ExecutorEnded as end:
                document = checkpoint.document if checkpoint and checkpoint.reread() else None
                if document is None and (account or not end.repeats):
                    raise
                structlog.get_logger("worker").warning("executor-restarted", code=end.code, detail=str(end))
                if account and document:
                    account.resume(document["private"]["account"])
            finally:
                if checkpoint is not None:
                    # Of a rank that was killed while it wrote.
                    sweep(checkpoint.path.parent)

    def close(self) -> None:
        """End the processes, if there are any, and remove their folders."""
        self._launcher.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _executed(
        self, run: TaskRun, fetched: FetchedVersion, account: PrivacyAccount | None, checkpoint: TaskCheckpoint | None
    ) -> TaskOutcome:
        hand_over = partial(self._hand_over, run=run, fetched=fetched, account=account, checkpoint=checkpoint)
        return outcome_of(*self._submitted(run, hand_over, functions_of(run, account, checkpoint)))

    def _submitted(
        self, run: TaskRun, hand_over: Callable[[Path], None], functions: Mapping[str, Callable[..., Any]]
    ) -> tuple[ResultRecord, dict[str, Array]]:
        """Submit the folder that `hand_over` fills. Return the result with its arrays. Raises as `execute` does."""
        folder = self._home(run) / f"task-{uuid4().hex}"
        folder.mkdir(mode=0o700)
        try:
            hand_over(folder)
            handle = self._launcher.submit(folder)
            alive, pause = partial(self._launcher.poll, handle), partial(self._launcher.wait, handle)
            result = TaskWait(folder, run, functions, alive, pause).wait()
            arrays = read_arrays(folder / RESULT_ARRAYS)
        except Unwanted as unwanted:
            raise unwanted.reason from None
        except BaseException:
            # Otherwise ranks may be out of step, or still at work.
            together = len(self._devices) > 1 and (folder / TASK).exists()
            if together or not (folder / FAILURE).exists():
                self._launcher.close()
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            self._used_at = time.monotonic()
        return result, arrays

    def _home(self, run: TaskRun) -> Path:
        """Return the folder of the processes for a run."""
        if len(self._devices) > 1:
            # Their memory is for one run.
            other = self._task[0] not in ("", run.task.run)
            if other or time.monotonic() > self._used_at + IDLE_SECONDS - MARGIN_SECONDS:
                self._launcher.close()
        self._task = (run.task.run, run.task.kind, run.task.dataset)
        return self._launcher.home()

    def _context(self, run: TaskRun, document: Model) -> dict[str, Any]:
        """Return the fields of a ContextRecord."""
        env, seed = run.env, run.training_seed
        return {
            "task": run.task.model_copy(update={"seed": seed, "token": 0, "inline_blobs": ()}),
            "document": document,
            "mapping": run.mapping(document),
            "report": run.report,
            "micro_batch": self.micro_batch,
            "compute": self.compute,
            "policy": env.policy.model_dump(mode="json", exclude_defaults=True),
            "allowances": dict(env.allowances),
            "full_precision": env.full_precision,
        }

    def _hand_over(
        self,
        folder: Path,
        run: TaskRun,
        fetched: FetchedVersion,
        account: PrivacyAccount | None,
        checkpoint: TaskCheckpoint | None,
    ) -> None:
        """Write a task into its folder. Raises OSError."""
        noise, bases = run.env.noise_key(run.task), fetched.bases.values()
        arrays = {**under("kept", fetched.kept), **under("state", fetched.server_state)}
        write_arrays(folder / ARRAYS, arrays)
        record = TaskDocument(
            **self._context(run, fetched.document),
            manifest=fetched.manifest,
            blocks=fetched.blocks,
            bases={base.block.name: _place(folder / f"base-{n}", base) for n, base in enumerate(bases)},
            four_bits=fetched.four_bits,
            tokenizer={name: raw.decode() for name, raw in fetched.tokenizer.items()},
            loss_scale=SiteRecords(run).loss_scale(),
            units=account.units if account else None,
            checkpoint=checkpoint
            and CheckpointPlace(key=checkpoint.key, path=checkpoint.path, seconds=run.env.checkpoint_seconds),
            noise_seed=noise.hex() if noise else None,
        )
        write_document(folder / TASK, record)


def outcome_of(result: ResultRecord, arrays: Mapping[str, Array]) -> TaskOutcome:
    """Return the outcome in an executor's result."""
    local = None
    if result.metrics is not None:
        local = LocalResult(below("upload", arrays), below("keep", arrays), result.metrics)
    return TaskOutcome(result.examples, local, below("moments", arrays), arrays.get("losses"))


class TaskWait:
    """The agent's wait for the end of a task, during which it answers the executor."""

    def __init__(
        self,
        folder: Path,
        run: TaskRun,
        functions: Mapping[str, Callable[..., Any]],
        alive: Callable[[], bool],
        pause: Callable[[float], None],
        fault: Callable[[], Exception] = lambda: ExecutorEnded("executor-ended", ENDED),
    ) -> None:
        """`fault` returns the failure of an executor that is not alive and left no result."""
        self._folder = folder
        self._run = run
        self._functions = functions
        self._alive = alive
        self._pause = pause
        self._fault = fault
        # The answers of an agent before this one.
        self._answered = len(list(folder.glob("answer-*.json")))
        self._reported = 0
        self._unwanted: BaseException | None = None
        """The reason why the task is no longer wanted."""
        self._until = 0.0

    def wait(self) -> ResultRecord:
        """Return the result. Raises Unwanted once the ranks wait for the next task, and otherwise what ended it."""
        while True:
            # Looked at before the files, so that the last files of a process that has ended are read.
            alive = self._alive()
            self._read_progress()
            if (result := self._result()) is not None:
                return result
            if not alive:
                raise self._unwanted or self._fault()
            if not self._answers():
                self._check()
                self._pause(LOOK_SECONDS)

    def _read_progress(self) -> None:
        path = self._folder / PROGRESS
        if path.exists() and (written := path.stat().st_mtime_ns) != self._reported:
            self._reported = written
            vars(self._run.report).update(vars(read_document(ProgressDocument, path).report))

    def _result(self) -> ResultRecord | None:
        if (self._folder / RESULT).exists():
            result = read_document(ResultRecord, self._folder / RESULT)
            vars(self._run.report).update(vars(result.report))
            return result
        if not (self._folder / FAILURE).exists():
            return None
        record = read_document(FailureRecord, self._folder / FAILURE)
        if self._unwanted and record.code == STOPPED:
            raise Unwanted(self._unwanted)
        raise self._unwanted or self._failure(record)

    def _failure(self, record: FailureRecord) -> BaseException:
        """Return the exception of a failure: that of a process which has ended, if it may be the cause."""
        until = time.monotonic() + END_SECONDS
        while record.code == UNEXPLAINED and self._alive() and time.monotonic() < until:
            time.sleep(END_SECONDS / 100)
        if record.code == UNEXPLAINED and not self._alive():
            return self._fault()
        if record.disk:
            return WriteFailed(*record.disk)
        if record.hidden:
            return HiddenFailure(record.detail)
        return PolicyViolation(record.rule, record.detail) if record.rule else TaskFailure(record.code, record.detail)

    def _answers(self) -> bool:
        """Answer the executor's next request, if there is one."""
        path = self._folder / f"request-{self._answered + 1}.json"
        if not path.exists():
            return False
        self._answered += 1
        request, answer = read_document(AgentCall, path), CallResult()
        vars(self._run.report).update(vars(request.report))
        try:
            value = self._functions[request.call](*request.arguments)
            answer = CallResult(value=value.model_dump(mode="json") if isinstance(value, BaseModel) else value)
        except Exception as fault:  # noqa: BLE001  (raised when the ranks have stopped)
            self._give_up(fault)
            answer = CallResult(refused=True)
        write_document(self._folder / f"answer-{self._answered}.json", answer)
        return True

    def _check(self) -> None:
        """Have the task stopped if it is no longer wanted. Raise the reason if it does not stop."""
        if self._unwanted is None:
            try:
                self._run.check()
            except BaseException as reason:  # noqa: BLE001  (raised when the ranks have stopped)
                self._give_up(reason)
                (self._folder / STOP).touch()
        elif time.monotonic() > self._until:
            raise self._unwanted

    def _give_up(self, reason: BaseException) -> None:
        if self._unwanted is None:
            self._unwanted, self._until = reason, time.monotonic() + STOP_SECONDS


class Unwanted(Exception):
    """A task that is no longer wanted, and that the executor has left."""

    def __init__(self, reason: BaseException) -> None:
        super().__init__()
        self.reason = reason


def functions_of(
    run: TaskRun, account: PrivacyAccount | None, checkpoint: TaskCheckpoint | None
) -> dict[str, Callable[..., Any]]:
    """Return the functions that the executor may call, by name. The agent writes the ledger: only it has the key, and
    the executor learns only during a task how many steps the method's phases take."""
    records = SiteRecords(run)
    found: dict[str, Callable[..., Any]] = {
        name: getattr(records, name) for name in ("note_exact", "reserve_figures", "measure", "keep_scale")
    }
    if checkpoint:
        found["note_instance"] = checkpoint.note_instance
    if account:
        found |= {name: getattr(account, name) for name in ("look", "choose", "begin", "start", "charges", "spent")}
    return found


def _place(path: Path, base: BlobTensor) -> Base:
    """Return the place of a block's values, written to a file if they are in memory."""
    if base.data is None:
        return Base(path=str(base.path), offset=base.offset)
    path.write_bytes(base.data)
    return Base(path=str(path))
