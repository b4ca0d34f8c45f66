"""The executor of a site with a training script of its own (`executor.command`).

The script trains; everything else is done as in any `ProcessExecutor`: data sets, checks of models, evaluations.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, Protocol
from uuid import uuid4

import structlog

from tessera.shared.methods.base import LocalResult, State, UnsupportedRun
from tessera.shared.methods.registry import worker_half
from tessera.shared.model.blocks import Block
from tessera.shared.model.spec import WEIGHTS_FILE
from tessera.shared.rounds.export import Export, small_files
from tessera.shared.schedule import local_steps
from tessera.shared.schema import MAX_NUMBER
from tessera.worker.errors import TaskFailure
from tessera.worker.executor.executor import ProcessExecutor
from tessera.worker.executor.folder import write_document
from tessera.worker.executor.launcher import Launcher
from tessera.worker.executor.script_folder import MODEL, RESULT, STOP, TASK, TASK_VARIABLE, ScriptTask
from tessera.worker.executor.script_result import read_progress, read_result
from tessera.worker.executor.script_supervisor import TERM_SECONDS
from tessera.worker.executor.supervisor import END
from tessera.worker.task.environment import SiteRecords, TaskRun, facts_of, local_work
from tessera.worker.task.handover import FetchedVersion, TaskOutcome
from tessera.worker.training.progress import rounded

if TYPE_CHECKING:
    from tessera.shared.tensors.lazy import Array
    from tessera.worker.executor.launcher import RankSettings
    from tessera.worker.privacy.account import PrivacyAccount
    from tessera.worker.settings import ExecutorSettings
    from tessera.worker.state.checkpoints import TaskCheckpoint

FOLDER = "script"
"""The name of the folder of the script's tasks in the state folder."""
LOOK_SECONDS = 0.2
STOP_SECONDS = 5.0
"""Time for the script to end once it finds that its task is no longer wanted, before SIGTERM."""
OUTPUT_BYTES = 1 << 14
"""The end of the script's output that is kept for the site's log."""
SECRET = re.compile(
    r"^TESSERA_|(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|_PWD|_PASS|_PAT|KEYS?|CREDENTIALS|HEADERS|CONNECTION_STRING)$",
    re.IGNORECASE,
)
"""Environment variables that the script does not get."""


def scrubbed(threads: int | None) -> dict[str, str]:
    """Return this process's environment without secrets, and with the number of threads."""
    kept = {name: value for name, value in os.environ.items() if not SECRET.search(name)}
    return kept | ({"OMP_NUM_THREADS": str(threads)} if threads else {})


class ScriptProcesses(Launcher, Protocol):
    """A launcher of the site's own script."""

    def exit_code(self, handle: Any) -> int:
        """Return the exit code of a script that has ended. Raises TaskFailure if it did not end by itself."""

    def output(self, handle: Any) -> str:
        """Return the last lines of the output of a script that has ended."""


class ScriptLauncher:
    """A `Launcher` of the site's own script: a process group for each task, with the end of its output."""

    def __init__(self, command: tuple[str, ...], home: Path, threads: int | None) -> None:
        """Prepare for tasks with folders in `home`, whose present content is removed."""
        self._command, self._home = command, home
        self._environment = scrubbed(threads)
        self._output, self._reader = bytearray(), Thread()
        shutil.rmtree(home, ignore_errors=True)

    def home(self) -> Path:
        self._home.mkdir(parents=True, exist_ok=True, mode=0o700)
        return self._home

    def submit(self, folder: Path) -> subprocess.Popen[bytes]:
        supervisor = subprocess.Popen(  # noqa: S603  (the site's own settings name the command)
            [sys.executable, "-m", "tessera.worker.executor.script_supervisor", str(os.getpid()), *self._command],
            env={**self._environment, TASK_VARIABLE: str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._output = bytearray()
        self._reader = Thread(target=self._read, args=(supervisor, self._output), daemon=True)
        self._reader.start()
        return supervisor

    def poll(self, handle: subprocess.Popen[bytes]) -> bool:
        return handle.poll() is None

    def wait(self, handle: subprocess.Popen[bytes], seconds: float) -> None:
        with suppress(subprocess.TimeoutExpired):
            handle.wait(seconds)

    def cancel(self, handle: subprocess.Popen[bytes]) -> None:
        """End the script: SIGTERM to its group, and SIGKILL after a while."""
        if handle.poll() is None:
            handle.send_signal(END)
        try:
            handle.wait(2 * TERM_SECONDS)
        except subprocess.TimeoutExpired:
            # The kernel then ends the script.
            handle.kill()
            handle.wait()

    def exit_code(self, handle: subprocess.Popen[bytes]) -> int:
        return handle.wait()

    def output(self, handle: subprocess.Popen[bytes]) -> str:
        # A process that left the group may hold the pipe open.
        self._reader.join(1.0)
        return bytes(self._output).decode(errors="replace")

    def _read(self, handle: subprocess.Popen[bytes], output: bytearray) -> None:
        assert handle.stdout  # noqa: S101  (made with a pipe)
        with handle.stdout as pipe:
            while piece := os.read(pipe.fileno(), 1 << 16):
                output += piece
                del output[:-OUTPUT_BYTES]


class ScriptExecutor(ProcessExecutor):
    """A `ProcessExecutor` whose training tasks are done by the site's own script."""

    scripted = True

    def __init__(self, script: ExecutorSettings, settings: RankSettings, state_dir: Path, *given: Any) -> None:
        super().__init__(settings, state_dir, *given)
        self._timeout_seconds = script.timeout_seconds
        assert script.command  # noqa: S101  (otherwise this is another executor)
        self._script: ScriptProcesses = ScriptLauncher(script.command, state_dir / FOLDER, settings.threads)

    def execute(
        self, run: TaskRun, fetched: FetchedVersion, account: PrivacyAccount | None, checkpoint: TaskCheckpoint | None
    ) -> TaskOutcome:
        """Execute a task. One that trains raises PolicyViolation, TaskFailure, UnsupportedRun, and the exceptions of
        `run.check`; it has no checkpoints."""
        if not run.task.trains:
            return super().execute(run, fetched, account, checkpoint)
        train, send = self._planned(run, fetched)
        examples = run.env.datasets[run.task.dataset].examples
        run.report.examples = examples
        SiteRecords(run).note_exact(examples, "training")
        if "cuda" in self.kind:
            # Its memory is for the script.
            self._launcher.close()
        fill = partial(self._write_task, run=run, fetched=fetched, train=train, send=send)
        upload, figures = self._trained(run, fill, send, checkpoint)
        if self._shows_figures(run):
            named = {name if name == "loss" else f"script_{name}": value for name, value in figures.items()}
            run.report.metrics = {name: rounded(value) for name, value in named.items() if abs(value) < MAX_NUMBER}
        run.report.metrics |= run.task.plan.rank_metric(fetched.document.lora)
        run.report.metrics |= local_work(run.task, fetched.document, examples)
        return TaskOutcome(examples, LocalResult(upload))

    def _trained(
        self,
        run: TaskRun,
        fill: Callable[[Path], int],
        send: list[Block],
        checkpoint: TaskCheckpoint | None,
    ) -> tuple[dict[str, Array], dict[str, float]]:
        """Have the script train in a folder that `fill` fills. Return the values of the blocks, and the figures."""
        folder = self._script.home() / uuid4().hex
        folder.mkdir(mode=0o700)
        try:
            run.report.begin("training", steps=fill(folder))
            self._run(self._script.submit(folder), folder, run)
            return read_result(folder, send)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _planned(self, run: TaskRun, fetched: FetchedVersion) -> tuple[list[Block], list[Block]]:
        """Return the blocks to train and to send, checked as before any other training. Raises PolicyViolation,
        TaskFailure, UnsupportedRun."""
        task, blocks = run.task, fetched.blocks
        if not fetched.is_whole:
            raise UnsupportedRun("the plan fetches a part of the model, and a site's own script trains a whole one")
        tied = self.check(run, fetched.document, run.env.datasets[task.dataset]).tied
        asked = task.plan.upload.resolve(blocks)
        run.env.policy.check_plan(blocks, asked, tied)
        trainable = facts_of(task, fetched.document).trainable
        train = [block for block in task.plan.train.resolve(blocks) if trainable.holds(block)]
        named = {block.name for block in train}
        return train, [block for block in asked if block.name in named]

    def _write_task(
        self, folder: Path, run: TaskRun, fetched: FetchedVersion, train: list[Block], send: list[Block]
    ) -> int:
        """Write a task into its folder. Return its number of steps. Raises OSError."""
        task, sources = run.task, self._ranks.sources
        assert sources  # noqa: S101  (of a worker)
        examples, source = run.env.datasets[task.dataset].examples, sources.datasets[task.dataset]
        steps = local_steps(task.local_training, examples)
        whole = not (source.held_out or source.opt_out or source.part)
        model = fetched.document.model_copy(update={"external": {}})
        (folder / MODEL).mkdir()
        for name, raw in small_files(model, run.read):
            (folder / MODEL / name).write_bytes(raw)
        with (folder / MODEL / WEIGHTS_FILE).open("wb") as file:
            for piece in Export(State(0, fetched.bases), model).pieces():
                file.write(piece)
                run.check()
        record = ScriptTask(
            run=task.run_name,
            round=task.round,
            rounds=task.rounds,
            method=task.method.name,
            dataset=task.dataset,
            examples=examples,
            steps=steps,
            seed=run.training_seed,
            training=task.local_training,
            train=tuple(block.name for block in train),
            send=tuple(block.name for block in send),
            lora_rank=worker_half(task.method, facts_of(task, fetched.document)).computed_rank,
            mapping=fetched.mapping,
            sources=sources.model_copy(update={"datasets": {task.dataset: source}}),
            data={"kind": source.kind, **source.options} if whole else None,
        )
        write_document(folder / TASK, record)
        return steps

    def _run(self, handle: Any, folder: Path, run: TaskRun) -> None:
        """Wait until the script ends. Raises TaskFailure unless it left a result, and the exceptions of
        `run.check`."""
        began_at, log = time.monotonic(), structlog.get_logger("worker")
        try:
            while self._script.poll(handle):
                run.check()
                self._check_time(self._seconds(handle, began_at))
                self._show(handle, folder, run)
                self._script.wait(handle, LOOK_SECONDS)
        except BaseException:
            with suppress(OSError):
                (folder / STOP).touch()
            self._script.wait(handle, STOP_SECONDS)
            self._script.cancel(handle)
            log.warning("script-stopped", output=self._script.output(handle))
            raise
        code, seconds = self._script.exit_code(handle), round(self._seconds(handle, began_at), 2)
        log.info("script-ended", exit_code=code, seconds=seconds)
        if code or not (folder / RESULT).exists():
            log.error("script-failed", exit_code=code, output=self._script.output(handle))
            how = f"ended with exit code {code}" if code else "ended without a result (task.submit)"
            raise TaskFailure("script-failed", f"the site's own script {how}; the worker's own log has its output")

    def _seconds(self, handle: Any, began_at: float) -> float:
        """Return the time for which the script has run."""
        return time.monotonic() - began_at

    def _check_time(self, seconds: float) -> None:
        if self._timeout_seconds and seconds > self._timeout_seconds:
            most = f"{self._timeout_seconds:g} s (executor.timeout_seconds)"
            raise TaskFailure("script-timeout", f"the site's own script took longer than {most}")

    def _show(self, handle: Any, folder: Path, run: TaskRun) -> None:
        if progress := read_progress(folder):
            run.report.step = min(progress.step, run.report.steps)
            run.report.loss = progress.loss if self._shows_figures(run) else None

    @staticmethod
    def _shows_figures(run: TaskRun) -> bool:
        """Return True if figures of training may leave: one example may move them without a bound."""
        env, examples = run.env, run.env.datasets[run.task.dataset].examples
        return not env.rounds_figures(run.task) and examples >= env.policy.min_evaluation_examples
