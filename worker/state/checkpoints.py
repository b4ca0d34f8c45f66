"""Checkpoints of unfinished training, from which a task resumes after its worker was killed.

A checkpoint is one safetensors file in the vault's folder of its run, readable by the owner alone. It replaces the
task's last one by a rename, and is used only for a task with the same key. It gives no right to the task: the lease
decides that. Under privacy it holds the noise's secret state, which would reveal the update without noise.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import structlog

from tessera.shared.metrics.eta import LIVE_TASKS
from tessera.shared.schema import Value, canonical
from tessera.shared.tensors.lazy import digest_of
from tessera.shared.updates.safetensors_file import ContainerError, read_header
from tessera.worker.state.atomic_files import sync_names, write_secret
from tessera.worker.state.vault import RoundWorkload, checked_identifier, outcome_of

JsonObject = dict[str, Any]

PREFIX, SUFFIX = "checkpoint-", ".safetensors"
INSTANCE = "instance"
"""File with the instance of the process that wrote the last checkpoint."""

INSTANCE_FORM = re.compile(r"[0-9a-f]{32}")

KEY, DOCUMENT = "key", "document"
"""The entries of a file's metadata: JSON documents."""


class CheckpointKey(Value):
    """Everything that a task's training depends on. Threads and loaders are not part of it."""

    run: str
    round: int
    task: str
    model: str
    """The digest of the model's description."""
    base: str
    """The digest of the version from which training starts."""
    plan: str
    settings: str
    """A digest of the settings of training, method, privacy and codec, and of the seed."""
    data: str
    """A digest of the examples in their order, and of their labels."""
    libraries: str
    device: str

    @property
    def digest(self) -> str:
        return digest_of(canonical(self))


class TaskCheckpoint:
    """The newest checkpoint of one task, if there is one, which the process that trains writes. `document` is its
    JSON, None without a checkpoint."""

    def __init__(self, key: CheckpointKey, path: Path, checkpoints: Checkpoints, document: JsonObject | None) -> None:
        self.key = key
        self.path = path
        self.document = document
        self._checkpoints = checkpoints
        self._is_newer = False

    def note_instance(self) -> None:
        """Note that the checkpoint was replaced.

        Training must not fail because a note cannot be written.
        """
        self._is_newer = True
        self.keep_instance()

    def keep_instance(self) -> None:
        """Have the next process go on with the task under this one's lease, as after a checkpoint."""
        try:
            self._checkpoints.note_instance()
        except OSError as fault:
            remedy = "Make room in state_dir. Training goes on, and the next checkpoint tries again."
            structlog.get_logger("worker").warning("checkpoint-not-written", detail=str(fault), remedy=remedy)

    def reread(self) -> bool:
        """Read the checkpoint if it was replaced since the last call. Return True if there is a newer one."""
        is_newer, self._is_newer = self._is_newer, False
        if is_newer:
            self.document = read_checkpoint(self.path)[1]
        return is_newer and self.document is not None

    def remove(self) -> None:
        """Remove the checkpoint. Nothing of it survives a power cut when this returns."""
        self.document = None
        _remove(self.path)
        self._checkpoints.forget_instance()


class Checkpoints:
    """The checkpoints of all tasks, in the vault under `folder`.

    `instance` names this process in its claims. A process that starts where another left a checkpoint takes over the
    other's name, and so its lease; but only once for each checkpoint, so that a task which kills its worker counts
    as an attempt.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        file = folder / INSTANCE
        left = file.read_text(encoding="ascii").strip() if file.exists() else ""
        self.instance = left if INSTANCE_FORM.fullmatch(left) else uuid4().hex
        self._noted = False
        self.forget_instance()

    def note_instance(self) -> None:
        """Leave this process's name to the process that resumes from its checkpoints."""
        if not self._noted:
            write_secret(self._folder / INSTANCE, self.instance)
            self._noted = True

    def forget_instance(self) -> None:
        (self._folder / INSTANCE).unlink(missing_ok=True)
        self._noted = False

    def of_task(self, key: CheckpointKey) -> TaskCheckpoint:
        """Return the task's checkpoint, and remove every other one of its run.

        Raises ValueError for an id that could be a path.
        """
        folder = self._folder / checked_identifier(key.run)
        path = folder / f"{PREFIX}{checked_identifier(key.task)}{SUFFIX}"
        document = None
        log = structlog.get_logger("worker").bind(run=key.run, task=key.task)
        for file in self._files(folder):
            written, found = read_checkpoint(file)
            if written == key:
                document = found
                continue
            if written is None:
                log.warning("checkpoint-unreadable", file=str(file), remedy="Nothing: the task begins again.")
            else:
                log.info("checkpoint-removed", differs=_differing(written, key))
            _remove(file)
        return TaskCheckpoint(key, path, self, document)

    def settle(self, ask: RoundWorkload) -> None:
        """Remove the checkpoints of tasks that no worker can claim any more. Raises the exceptions of `ask`."""
        for file in self._files(self._folder / "*"):
            task = outcome_of(file.name.removeprefix(PREFIX).removesuffix(SUFFIX), ask)
            if task is None or task.state not in LIVE_TASKS:
                _remove(file)

    def _files(self, folder: Path) -> list[Path]:
        return sorted(self._folder.glob(f"{folder.name}/{PREFIX}*{SUFFIX}"))


def read_checkpoint(path: Path) -> tuple[CheckpointKey | None, JsonObject | None]:
    """Return the key and the document in a checkpoint; None and None if it cannot be read."""
    try:
        with path.open("rb") as file:
            metadata = read_header(file, path.stat().st_size).metadata
        return CheckpointKey.model_validate_json(metadata[KEY]), json.loads(metadata[DOCUMENT])
    except (ContainerError, OSError, ValueError, KeyError):
        return None, None


def _differing(one: CheckpointKey, other: CheckpointKey) -> list[str]:
    return [name for name, value in one if value != getattr(other, name)]


def _remove(path: Path) -> None:
    if path.exists():
        path.unlink()
        sync_names(path.parent)
        # A run that keeps nothing needs no folder.
        with suppress(OSError):
            path.parent.rmdir()
