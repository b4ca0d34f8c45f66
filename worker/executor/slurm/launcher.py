"""The launcher of jobs of Slurm. Imports no torch.

Each task has a folder of its own for the job below `home`, in a file system that the nodes share:

- `key`: what the task depends on, written when the folder is complete. A restarted agent finds its job by it.
- `job`: the job's id. The folder's name is the job's name.
- `output.log`: the job's output.
- `inventory.json`, `home/`: as of any executor (`executor.folder`); `home/task` is the task's folder.
- `home/started`: made by the first job that starts.
"""

import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from uuid import uuid4

import structlog

from tessera.worker.errors import ExecutorEnded, TaskFailure
from tessera.worker.executor.folder import FAILURE, RESULT
from tessera.worker.executor.script import scrubbed
from tessera.worker.executor.script_folder import RESULT as SCRIPT_RESULT
from tessera.worker.executor.slurm import commands
from tessera.worker.executor.slurm.commands import LOST, JobState, SlurmAway, SlurmRefusal
from tessera.worker.settings import SlurmSettings
from tessera.worker.state.atomic_files import written_whole

KEY, JOB, OUTPUT = "key", "job", "output.log"
NAME = "tessera-"
"""The first part of the names of jobs and of their folders."""
FOLDER_SECONDS = 0.25
"""Longest time between two looks at a task's folder."""
SETTLED_SECONDS = 60.0
"""Time for the files of a job that has ended to be seen in the shared file system."""
END_SECONDS = 60.0
"""Longest wait for the end of a cancelled job."""
OUTPUT_BYTES = 1 << 14
"""The end of a job's output that is kept for the site's log."""
PROBE_BYTES = 1 << 16

CAUSES = {
    "timeout": "reached its time limit",
    "preempted": "was preempted",
    "node-failed": "ended with its node",
    "lost": "is not known to Slurm any more",
    "failed": "failed",
    "done": "ended without a result",
}
BAD_CONSTRAINTS = "BadConstraints"
REPEATED = ("slurm-preempted", "slurm-node-failed", "slurm-lost")
"""Ends for which the job itself is not the cause: the task begins again without a checkpoint, too."""

AWAY_REMEDY = "Nothing, if slurmctld comes back. Jobs go on meanwhile, and the worker keeps its lease and asks again."


class JobEnded(ExecutorEnded):
    """The end of a job of Slurm without a result."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(code, detail)
        self.repeats = code in REPEATED


class Job:
    """A job, or one that is to be submitted: the handle of `SlurmLauncher`."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.folder = place / "home" / "task"
        self.state = JobState("PENDING", "not submitted")
        self.refusal: str | None = None
        self.is_away = False
        self.running_at: float | None = None
        """The time when it was first seen to run, on the monotonic clock."""
        self.unknown = 0
        """The number of looks since Slurm last knew it."""
        self.ended_at: float | None = None
        """The time when it was first seen to have ended."""
        self.look = Thread()
        """A look at its state, in a thread of its own, since Slurm's commands may take a minute."""
        self.look_at = 0.0

    @property
    def id(self) -> str | None:
        """Slurm's id; None before it is submitted."""
        with suppress(OSError):
            return (self.place / JOB).read_text(encoding="ascii").strip()
        return None

    @property
    def activity(self) -> str:
        """The job's state in words, for the task's progress."""
        return "Slurm does not answer" if self.is_away else self.state.activity


class SlurmLauncher:
    """A `Launcher` of jobs of Slurm, one for each task. `arguments` are those of `slurm.job` after the folder."""

    def __init__(
        self, settings: SlurmSettings, home: Path, arguments: Sequence[str], threads: int | None = None
    ) -> None:
        self._settings = settings
        # A job starts in another folder if the agent's is not on its node.
        self._home = home.absolute()
        self._arguments = arguments
        self._environment = scrubbed(threads)
        self._log = structlog.get_logger("worker")

    def home(self) -> Path:
        self._home.mkdir(parents=True, exist_ok=True, mode=0o700)
        return self._home

    # ------------------------------------------------------------ folders

    def jobs(self) -> Iterator[Job]:
        """Yield the jobs whose folders are there, as after a restart of the agent."""
        for place in sorted(self._home.glob(f"{NAME}*")):
            yield Job(place)

    def find(self, key: str) -> Job | None:
        """Return the job of an earlier agent with this key. Cancel all others."""
        found = None
        for job in self.jobs():
            if found is None and self.key_of(job) == key:
                found = job
            else:
                self.release(job)
        return found

    def key_of(self, job: Job) -> str | None:
        with suppress(OSError):
            return (job.place / KEY).read_text(encoding="ascii")
        return None

    def prepare(self) -> Job:
        """Return a job with a new folder, to be filled and then submitted. Raises OSError."""
        job = Job(self.home() / f"{NAME}{uuid4().hex[:16]}")
        for folder in (job.place, job.folder.parent, job.folder):
            folder.mkdir(mode=0o700)
        return job

    def release(self, job: Job, *, wait: bool = False) -> bool:
        """Cancel a job unless it has ended, and remove its folder. Return False if Slurm does not answer: the folder
        then stays, and a later call tries again. With `wait`, return when the job has ended."""
        try:
            self._cancel(job)
            until = time.monotonic() + END_SECONDS
            while wait and time.monotonic() < until and (identifier := job.id):
                if not commands.state_of(identifier, job.place.name).is_live:
                    break
                time.sleep(FOLDER_SECONDS)
        except SlurmAway as fault:
            self._log.warning("slurm-away", detail=str(fault), job=job.id, remedy=AWAY_REMEDY)
            return False
        shutil.rmtree(job.place, ignore_errors=True)
        return True

    # ------------------------------------------------------------ a Launcher

    def submit(self, folder: Path, key: str = "") -> Job:
        """Have the job of a complete folder submitted. It may be submitted later, if Slurm does not answer now."""
        job = Job(folder.parents[1])
        _write(job.place / KEY, key)
        return job

    def poll(self, handle: Job) -> bool:
        now = time.monotonic()
        if handle.look.is_alive():
            return True
        if handle.refusal or not handle.state.is_live:
            handle.ended_at = handle.ended_at or now
            # The files that it wrote last may come later than Slurm's answer.
            awaited = handle.state.condition == "done" and not (handle.folder / SCRIPT_RESULT).exists()
            return awaited and now < handle.ended_at + SETTLED_SECONDS
        if now >= handle.look_at:
            handle.look = Thread(target=self._look, args=(handle,), daemon=True)
            handle.look.start()
        return True

    def wait(self, handle: Job, seconds: float) -> None:
        until = time.monotonic() + seconds
        while True:
            time.sleep(FOLDER_SECONDS)
            if handle.state.condition != "running" or time.monotonic() > until or not self.poll(handle):
                return

    def cancel(self, handle: Job) -> None:
        """Cancel the job, as far as Slurm answers."""
        with suppress(SlurmAway):
            self._cancel(handle)
            handle.state = JobState("CANCELLED")

    def _cancel(self, job: Job) -> None:
        if job.look.is_alive():
            job.look.join()
        # Ranks that have written their result end by themselves.
        if job.ended_at or any((job.folder / name).exists() for name in (RESULT, FAILURE)):
            return
        if identifier := job.id or commands.named(job.place.name):
            commands.cancel(identifier, job.place.name)

    def exit_code(self, handle: Job) -> int:
        """Return the exit code of a job that has ended. Raises the failure of one that did not end by itself."""
        if handle.state.condition not in ("done", "failed"):
            raise self.fault(handle)
        return int(handle.state.exit_code.partition(":")[0] or 0)

    def output(self, handle: Job) -> str:
        """Return the last lines of the job's output."""
        with suppress(OSError), (handle.place / OUTPUT).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - OUTPUT_BYTES))
            return file.read(OUTPUT_BYTES).decode(errors="replace")
        return ""

    def fault(self, handle: Job) -> TaskFailure:
        """Return the failure of a job that has ended without a result. Raises OSError for a full disk."""
        # Slurm finds some demands that no node can meet only after the submission.
        late = handle.state.reason if handle.state.reason == BAD_CONSTRAINTS else None
        if refusal := handle.refusal or late:
            return TaskFailure("slurm-refused", f"Slurm refused the job: {refusal}")
        condition, name = handle.state.condition, handle.state.name
        about = {"job": handle.id, "state": name, "exit_code": handle.state.exit_code}
        self._log.error("slurm-job-ended", **about, output=self.output(handle))
        if condition == "cancelled":
            return TaskFailure("slurm-cancelled", "the task's job was cancelled at the site's cluster (scancel)")
        if condition == "failed":
            # A job that could write nothing could not say so either.
            _write(handle.place / "probe", "x" * PROBE_BYTES)
        cause = f"{CAUSES[condition]} ({name}, exit code {handle.state.exit_code or 'unknown'})"
        code = "failed" if condition == "done" else condition
        return JobEnded(f"slurm-{code}", f"the task's job {cause}; the worker's own log has its output")

    def _look(self, job: Job) -> None:
        """Submit the job unless it is, and update its state. Log each change."""
        before, was_away = job.state, job.is_away
        try:
            identifier = job.id or commands.named(job.place.name)
            if identifier is None:
                identifier = self._submit(job)
                self._log.info("slurm-submitted", job=identifier, folder=str(job.place))
            if job.id is None:
                _write(job.place / JOB, identifier)
            state, job.is_away = commands.state_of(identifier, job.place.name), False
            job.unknown = job.unknown + 1 if state == LOST else 0
            # Once is no proof: a controller that starts may not have read its jobs yet.
            if job.unknown != 1:
                job.state = state
        except SlurmRefusal as refusal:
            job.refusal = str(refusal)
            self._log.error("slurm-refused", detail=job.refusal)
        except (SlurmAway, OSError) as fault:
            # Or the folder's file system is full, or gone.
            job.is_away = True
            if not was_away:
                self._log.warning("slurm-away", detail=str(fault), remedy=AWAY_REMEDY)
        if job.state.condition == "running" and job.running_at is None:
            job.running_at = time.monotonic()
        if job.state != before and not job.refusal:
            self._log.info("slurm-state", job=job.id, state=job.state.name, reason=job.state.reason)
        job.look_at = time.monotonic() + self._settings.look_seconds

    def _submit(self, job: Job) -> str:
        settings = self._settings
        program = [sys.executable, "-m", "tessera.worker.executor.slurm.job", str(job.folder), *self._arguments]
        lines = "".join(f"#SBATCH {line}\n" for line in settings.lines)
        script = job.place / "job.sh"
        script.write_text(f"#!/bin/sh\n{lines}exec {shlex.join(program)}\n")
        about = {
            "job-name": job.place.name,
            # Paths in the settings may start there.
            "chdir": Path.cwd(),
            "output": job.place / OUTPUT,
            # A checkpoint is written then; with `preempt_send_user_signal`, at a preemption too.
            "signal": f"B:TERM@{settings.warning_seconds}",
        }
        options = [*limits_of(settings), *(f"--{name}={value}" for name, value in about.items())]
        return commands.submit(str(script), ["--no-requeue", "--nodes=1", *options], self._environment)


def limits_of(settings: SlurmSettings) -> list[str]:
    """Return the options of sbatch by which a site bounds its jobs."""
    limits = {name: getattr(settings, name) for name in ("partition", "account", "gpus", "time")}
    return [f"--{name}={value}" for name, value in limits.items() if value]


def _write(path: Path, text: str) -> None:
    with written_whole(path, mode=0o600) as file:
        file.write(text.encode())
