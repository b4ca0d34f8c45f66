"""The executors of a site whose tasks are jobs of Slurm: the worker's own training, and a script of the site's."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from tessera.shared.metrics.eta import LIVE_TASKS
from tessera.worker.errors import ExecutorEnded, TaskFailure
from tessera.worker.executor.executor import ProcessExecutor, TaskWait, Unwanted, functions_of, outcome_of
from tessera.worker.executor.folder import (
    FAILURE,
    INVENTORY,
    RESULT_ARRAYS,
    STOP,
    read_arrays,
    read_document,
    write_document,
)
from tessera.worker.executor.launcher import SETTINGS
from tessera.worker.executor.script import ScriptExecutor
from tessera.worker.executor.script_folder import TASK, ScriptTask
from tessera.worker.executor.script_result import read_result
from tessera.worker.executor.slurm.launcher import Job, SlurmLauncher
from tessera.worker.state.vault import outcome_of as task_outcome_of

if TYPE_CHECKING:
    from tessera.shared.model.blocks import Block
    from tessera.shared.tensors.lazy import Array
    from tessera.worker.data.dataset_info import Inventory
    from tessera.worker.executor.launcher import RankSettings
    from tessera.worker.privacy.account import PrivacyAccount
    from tessera.worker.settings import ExecutorSettings, SlurmSettings
    from tessera.worker.state.checkpoints import TaskCheckpoint
    from tessera.worker.state.vault import RoundWorkload
    from tessera.worker.task.environment import TaskRun
    from tessera.worker.task.handover import FetchedVersion, TaskOutcome

JOBS = "slurm"
"""The name of the folder of the jobs' folders in the state folder, which the nodes share."""


class SlurmExecutor(ProcessExecutor):
    """A `ProcessExecutor` that trains and evaluates in jobs of Slurm, one for each task.

    Processes of this machine load the data sets, on the CPU, and check models. They end while a job trains.
    """

    elsewhere = True

    def __init__(self, settings: RankSettings, state_dir: Path, *given: Any) -> None:
        *others, slurm = given
        super().__init__(settings.model_copy(update={"devices": ("cpu",)}), state_dir, *others)
        self._slurm: SlurmSettings = slurm
        self._job_devices = tuple(f"cuda:{place}" for place in range(slurm.gpus)) or ("cpu",)
        self._jobs = SlurmLauncher(slurm, state_dir / JOBS, (str(len(self._job_devices)),), settings.threads)

    @property
    def kind(self) -> str:
        gpus = self._slurm.gpus
        return "cpu" if gpus == 0 else "cuda" if gpus == 1 else f"{gpus} cuda"

    def inventory(self) -> Inventory:
        device = f"Slurm, partition {self._slurm.partition or 'default'}: {self.kind}"
        return replace(super().inventory(), device=device, gpu=None)

    def settle(self, ask: RoundWorkload) -> None:
        for job in self._jobs.jobs():
            key = self._jobs.key_of(job)
            task = task_outcome_of(key.split()[0], ask) if key else None
            if task is None or task.state not in LIVE_TASKS:
                self._jobs.release(job)

    def _executed(
        self, run: TaskRun, fetched: FetchedVersion, account: PrivacyAccount | None, checkpoint: TaskCheckpoint | None
    ) -> TaskOutcome:
        def fill(folder: Path) -> None:
            # Its wait in the queue belongs to the report that the job goes on with.
            run.report.begin("waiting")
            self._hand_over(folder, run, fetched, account, checkpoint)
            shutil.copy(self.folder / INVENTORY, folder.parents[1] / INVENTORY)
            update = {"devices": self._job_devices, "in_job": True, "console": False}
            write_document(folder.parent / SETTINGS, self._ranks.model_copy(update=update))

        self._launcher.close()
        # The account of an earlier agent knew what the job asked for so far.
        with _submitted(self._jobs, run, checkpoint, fill, begin_anew=account is not None) as job:
            functions, jobs = functions_of(run, account, checkpoint), self._jobs
            of_job = (partial(jobs.poll, job), partial(_pause, jobs, job, run), partial(jobs.fault, job))
            try:
                result = TaskWait(job.folder, run, functions, *of_job).wait()
            except Unwanted as unwanted:
                raise unwanted.reason from None
            except Exception:
                if (job.folder / FAILURE).exists():
                    # The ranks' log goes with the folder.
                    structlog.get_logger("worker").error("slurm-job-failed", job=job.id, output=jobs.output(job))
                raise
            return outcome_of(result, read_arrays(job.folder / RESULT_ARRAYS))


class SlurmScriptExecutor(ScriptExecutor, SlurmExecutor):
    """A `SlurmExecutor` whose training tasks are done by the site's own script, in jobs too."""

    def __init__(self, script: ExecutorSettings, settings: RankSettings, state_dir: Path, *given: Any) -> None:
        super().__init__(script, settings, state_dir, *given)
        assert script.command  # noqa: S101  (otherwise this is another executor)
        self._script: SlurmLauncher = SlurmLauncher(
            self._slurm, state_dir / JOBS, ("--", *script.command), settings.threads
        )

    def _trained(
        self, run: TaskRun, fill: Callable[[Path], int], send: list[Block], checkpoint: TaskCheckpoint | None
    ) -> tuple[dict[str, Array], dict[str, float]]:
        self._launcher.close()
        while True:
            run.report.begin("waiting")
            with _submitted(self._script, run, checkpoint, fill) as job:
                try:
                    self._run(job, job.folder, run)
                    return read_result(job.folder, send)
                except ExecutorEnded as end:
                    if not end.repeats:
                        raise
                    structlog.get_logger("worker").warning("executor-restarted", code=end.code, detail=str(end))

    def _seconds(self, handle: Job, began_at: float) -> float:
        return time.monotonic() - handle.running_at if handle.running_at else 0.0

    def _show(self, handle: Job, folder: Path, run: TaskRun) -> None:
        run.report.activity = None
        if handle.running_at and run.report.phase == "waiting":
            run.report.begin("training", steps=read_document(ScriptTask, folder / TASK).steps)
        super()._show(handle, folder, run)
        _show(handle, run, shows_steps=run.report.step > 0)


@contextmanager
def _submitted(
    jobs: SlurmLauncher,
    run: TaskRun,
    checkpoint: TaskCheckpoint | None,
    fill: Callable[[Path], object],
    *,
    begin_anew: bool = False,
) -> Iterator[Job]:
    """Yield the task's job: one that an agent before this one left, unless it is to `begin_anew`, or a new one with a
    folder that `fill` fills. It is cancelled when the block ends before it. Raises OSError and TaskFailure."""
    task = run.task
    key = f"{task.id} {checkpoint.key.digest if checkpoint else task.version.digest}"
    job = jobs.find(key)
    if job and begin_anew:
        # Two must not write one checkpoint.
        if not jobs.release(job, wait=True):
            raise TaskFailure("slurm-away", "an earlier process's job could not be cancelled: Slurm does not answer")
        job = None
    if job:
        structlog.get_logger("worker").info("slurm-job-found", job=job.id, folder=str(job.place))
    else:
        job = jobs.prepare()
    try:
        if jobs.key_of(job) is None:
            fill(job.folder)
            job = jobs.submit(job.folder, key)
        if checkpoint:
            # A worker that is killed meanwhile finds the job under the same lease.
            checkpoint.keep_instance()
        yield job
    finally:
        jobs.release(job)


def _pause(jobs: SlurmLauncher, job: Job, run: TaskRun, seconds: float) -> None:
    _show(job, run, shows_steps=run.report.phase in ("training", "evaluating"))
    if job.state.condition == "queued" and (job.folder / STOP).exists():
        jobs.cancel(job)
    jobs.wait(job, seconds)


def _show(job: Job, run: TaskRun, *, shows_steps: bool) -> None:
    """Show what the job does, unless the task's own progress does."""
    run.report.is_queued = job.running_at is None
    if job.state.condition == "queued" or job.is_away or not shows_steps:
        run.report.activity = job.activity
