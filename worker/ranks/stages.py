"""The stages of tasks that a rank group executes for the agent, which has no model and no GPU of its own."""

from __future__ import annotations

import atexit
import shutil
import time
from dataclasses import replace
from pathlib import Path
from pickle import PicklingError
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import structlog
import torch

from tessera.shared.methods.base import LocalResult, TrainingStats
from tessera.worker.data.dataset import Dataset
from tessera.worker.ranks import serialization
from tessera.worker.ranks.messages import CheckpointAt, GroupTask, Start
from tessera.worker.ranks.session import RanksEnded, Session
from tessera.worker.ranks.shared_dataset import parts_of
from tessera.worker.state.atomic_files import sweep
from tessera.worker.state.checkpoints import TaskCheckpoint
from tessera.worker.task.environment import TaskRun
from tessera.worker.task.errors import TaskFailure
from tessera.worker.task.fetch import Fetched, Loaded
from tessera.worker.training.ranks import require_summable

if TYPE_CHECKING:
    from tessera.worker.privacy.account import PrivacyAccount

FOLDER = "ranks"
IDLE_SECONDS = 300.0
"""Time for which the ranks of a run wait for its next task."""
MARGIN_SECONDS = 30.0
"""The agent counts on a group for this much less, so that it hands no task to ranks that are about to end."""
TIMEOUT_SECONDS = 3600.0
"""Longest wait of ranks for another one, which may measure a whole data set for all. The end of a rank is noticed
at once."""


class DeviceStages:
    """The training and evaluation of tasks on several devices.

    A group of ranks is started for the first task of a run, and kept while further ones of that run follow.
    """

    def __init__(self, devices: tuple[torch.device, ...], state_dir: Path, threads: int) -> None:
        """Prepare for groups on these devices. `threads` are those of one operation in each rank."""
        self.devices = devices
        self._start = Start(devices, threads, IDLE_SECONDS, TIMEOUT_SECONDS)
        self.folder = state_dir / FOLDER
        """The folder of the groups' folders."""
        # Of an agent that was killed together with its launcher.
        shutil.rmtree(self.folder, ignore_errors=True)
        self._session: Session | None = None
        self._run = ""
        self._until = 0.0
        self._written: tuple[Dataset, Path] | None = None
        atexit.register(self.close)

    @property
    def kind(self) -> str:
        return f"{len(self.devices)} {self.devices[0].type}"

    def train(
        self,
        run: TaskRun,
        fetched: Fetched,
        loaded: Loaded,
        dataset: Dataset,
        account: PrivacyAccount | None,
        checkpoint: TaskCheckpoint | None,
    ) -> tuple[LocalResult, TrainingStats]:
        """Train as `task.train.train` does. Raises its exceptions, and TaskFailure if a rank ends.

        With a checkpoint that was written in between, new ranks then go on from it: a task that ends its ranks
        before the next one fails. A sharded model has no checkpoints.
        """
        if account is None:
            require_summable(loaded.half, loaded.context, dataset, len(self.devices))
        if run.env.setup.compute.shard:
            checkpoint = None
        while True:
            try:
                return self._executed(run, fetched, loaded, dataset, account, checkpoint)  # type: ignore[no-any-return]
            except RanksEnded as end:
                if checkpoint is None or not checkpoint.reread() or checkpoint.document is None:
                    raise
                structlog.get_logger("worker").warning("ranks-restarted", detail=str(end))
                if account:
                    account.resume(checkpoint.document["private"]["account"])
            finally:
                if checkpoint is not None:
                    # Of a rank that was killed while it wrote.
                    sweep(checkpoint.path.parent)

    def evaluate(self, run: TaskRun, fetched: Fetched, loaded: Loaded, dataset: Dataset) -> int:
        """Evaluate as `task.evaluate.evaluate` does. Raises its exceptions, and TaskFailure if a rank ends."""
        return self._executed(run, fetched, loaded, dataset)  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the ranks, if there are any."""
        if self._session:
            self._session.close()
        self._session = self._written = None

    def _executed(
        self,
        run: TaskRun,
        fetched: Fetched,
        loaded: Loaded,
        dataset: Dataset,
        account: PrivacyAccount | None = None,
        checkpoint: TaskCheckpoint | None = None,
    ) -> Any:
        session = self._session_for(run)
        task, env = run.task, run.env
        states = fetched.manifest.server_state
        given = GroupTask(
            task,
            replace(fetched, last=None),
            dataset=self._file_of(session, dataset),
            vault={**loaded.context.vault, **loaded.moments.values},
            blobs={states[name].digest: env.shelf.path(states[name].digest) for name in loaded.context.server_state},
            report=run.report,
            micro_batch=env.setup.micro_batch,
            compute=env.setup.compute,
            policy=env.policy,
            allowances=dict(env.allowances),
            private=account is not None,
            counted=env.history is not None,
            seed_key=env.seed_key,
            noise_key=env.noise_key(task),
            checkpoint=CheckpointAt(checkpoint.key, checkpoint.path, env.checkpoint_seconds) if checkpoint else None,
        )
        targets = {
            "journal": run.journal,
            "vault": env.vault,
            "private": account,
            "history": env.history,
            "checkpoint": checkpoint,
        }
        result, moments, report = session.execute(given, targets, vars(run.report).update, run.check)
        vars(run.report).update(report)
        loaded.moments.values.update(moments)
        self._until = time.monotonic() + IDLE_SECONDS - MARGIN_SECONDS
        return result

    def _session_for(self, run: TaskRun) -> Session:
        """Return the run's group, started if there is none."""
        session = self._session
        if session and session.alive and self._run == run.task.run and time.monotonic() < self._until:
            return session
        self.close()
        self._session = Session(self._start, self.folder)
        self._run = run.task.run
        return self._session

    def _file_of(self, session: Session, dataset: Dataset) -> Path:
        """Return the file of a data set, written if it is not that of the last task. Raises TaskFailure."""
        if self._written and self._written[0] is dataset:
            return self._written[1]
        if self._written:
            self._written[1].unlink(missing_ok=True)
            self._written = None
        path = session.folder / f"dataset-{uuid4().hex}"
        try:
            serialization.write(path, parts_of(dataset))
        except (PicklingError, AttributeError, TypeError) as fault:
            raise TaskFailure(
                "unsuited", "the readers of this kind of data set cannot be used by several processes (devices)"
            ) from fault
        self._written = dataset, path
        return path
