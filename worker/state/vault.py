"""Tensors that never leave the site, kept between the rounds of a run.

A task's tensors are staged before its update is submitted, marked accepted when the coordinator accepts the update,
and become current only when a receipt shows that the round was committed with the update. Tensors of an abandoned
attempt, or of an update that was left out, are discarded. So the vault never runs ahead of the server. Each step is
one rename, and may be repeated after a crash: `settle` asks for the outcome of each file's task. The state is the
file's name, so that tensors and state change at once: a row of the database could differ from the file after a crash.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import RLock

import numpy as np

from tessera.shared.api.tasks import Receipt, TaskView
from tessera.shared.problems import NotFound
from tessera.shared.tensors.dtypes import NUMPY_DTYPES
from tessera.shared.tensors.lazy import Array, as_bytes
from tessera.shared.updates.safetensors_file import read_header, write
from tessera.worker.state.atomic_files import replace, sweep, written_whole

# Identifiers come from the coordinator, and become part of a path: accept only safe characters.
IDENTIFIER = re.compile(r"[A-Za-z0-9-]{1,64}")
STAGED, ACCEPTED = "staged", "accepted"
PENDING = re.compile(r"(?:staged|accepted)-(?P<task>[A-Za-z0-9-]{1,64})-(?P<token>[0-9]{1,18})\.safetensors")
CURRENT = "current.safetensors"
SCALE = "loss-scale.safetensors"

_DTYPES: dict[str, np.dtype] = {
    **{str(name): dtype for name, dtype in NUMPY_DTYPES.items()},
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

_SETTLING = RLock()
"""Held while files are renamed: another thread may send an update that was held for release."""


TASK = "task"
"""The entry of a file's metadata with its task and token: of the task whose merged update made it current."""


RoundWorkload = Callable[[str], TaskView | Receipt]
"""Returns the outcome of a task. Raises Problem."""


@dataclass(frozen=True)
class StagedTensors:
    """A task's tensors, on disk but not current yet. If `durable`, a rename survives a power cut. Without a path
    there are none, and nothing to replace."""

    path: Path | None
    durable: bool

    def accept(self) -> StagedTensors:
        """Mark its update as accepted, and return the renamed file, which waits for the round's end."""
        if self.path and self.path.name.startswith(STAGED):
            accepted = self.path.with_name(ACCEPTED + self.path.name.removeprefix(STAGED))
            # Settled meanwhile, it has gone.
            with _SETTLING, suppress(FileNotFoundError):
                replace(self.path, accepted, durable=self.durable)
            return StagedTensors(accepted, self.durable)
        return self

    def commit(self, unmerged: Collection[str] = ()) -> None:
        """Make it current. Tensors of blocks that were not merged stay as they were."""
        if self.path is None:
            return
        current = self.path.with_name(CURRENT)
        if unmerged:
            before, after = (_read(path) if path.exists() else {} for path in (current, self.path))
            blocks = frozenset(unmerged)
            kept = {name: values for name, values in before.items() if _of_blocks(name, blocks)}
            kept |= {name: values for name, values in after.items() if not _of_blocks(name, blocks)}
            match = PENDING.fullmatch(self.path.name)
            _write(
                self.path, kept, durable=self.durable, of_task=f"{match['task']} {match['token']}" if match else ""
            )
        replace(self.path, current, durable=self.durable)

    def discard(self) -> None:
        if self.path:
            with _SETTLING:
                self.path.unlink(missing_ok=True)


class Vault:
    """The kept tensors of every run, under `folder`, which only the owner may read.

    Unless it is `durable`, it survives the death of the process but no power cut.
    """

    def __init__(self, folder: Path, *, durable: bool = True) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        sweep(folder)
        self._folder = folder
        self._durable = durable

    def load(self, run: str) -> dict[str, Array]:
        """Return the tensors that the last merged update of this run kept, by name; empty the first time.

        Raises ValueError for a run id that could be a path, and ContainerError for a corrupt file.
        """
        path = self._of_run(run) / CURRENT
        return _read(path) if path.exists() else {}

    def stage(self, run: str, task: str, token: int, keep: Mapping[str, Array]) -> StagedTensors:
        """Write a task's tensors, to be accepted or discarded. Overwrites an earlier attempt under the same lease.
        Without any, now and from earlier tasks of the run, nothing is written.

        Raises ValueError for an id that could be a path, or an array of a kind that cannot be stored.
        """
        folder, name = self._of_run(run), f"{STAGED}-{checked_identifier(task)}-{token}.safetensors"
        if not keep and all(other.name == SCALE for other in folder.glob("*")):
            return StagedTensors(None, self._durable)
        path = folder / name
        _write(path, keep, durable=self._durable, of_task=f"{task} {token}")
        return StagedTensors(path, self._durable)

    def set_aside(self, run: str, task: str, keep: Mapping[str, Array]) -> None:
        """Write the tensors of a task whose update is held for release, to be staged when it leaves."""
        _write(self._set_aside(run, task), keep, durable=self._durable)

    def read_aside(self, run: str, task: str) -> dict[str, Array]:
        """Return the tensors that were set aside for a task. Raises OSError if there are none."""
        return _read(self._set_aside(run, task))

    def forget(self, run: str, task: str) -> None:
        """Remove the tensors that were set aside for a task, if there are any."""
        self._set_aside(run, task).unlink(missing_ok=True)

    def _set_aside(self, run: str, task: str) -> Path:
        return self._of_run(run) / f"held-{checked_identifier(task)}.safetensors"

    def load_scale(self, run: str) -> dict[str, Array]:
        """Return a run's loss scale that `keep_scale` kept. Raises as `load`."""
        path = self._of_run(run) / SCALE
        return _read(path) if path.exists() else {}

    def keep_scale(self, run: str, state: Mapping[str, Array]) -> None:
        """Keep the loss scale of a run now, whether or not an update is merged. An empty `state` removes it."""
        path = self._of_run(run) / SCALE
        if state:
            _write(path, state, durable=self._durable)
        else:
            path.unlink(missing_ok=True)

    def settle(self, ask: RoundWorkload) -> None:
        """Settle the pending files of every run. Raises the exceptions of `ask`."""
        for folder in self._folder.glob("*/"):
            self._settle(folder, "*", ask)

    def settle_unanswered(self, ask: RoundWorkload) -> None:
        """Settle the submissions without an answer. Raises the exceptions of `ask`."""
        for folder in self._folder.glob("*/"):
            self._settle(folder, f"{STAGED}-*", ask)

    def settle_run(self, run: str, receipt: Receipt | None, ask: RoundWorkload) -> None:
        """Settle a run's pending files before a task of it begins. Calls `ask` for tasks other than the receipt's.

        Raises the exceptions of `ask`.
        """
        self._settle(self._of_run(run), "*", lambda task: receipt if receipt and receipt.task == task else ask(task))

    def lacks(self, receipt: Receipt, run: str, *, kept: bool) -> bool:
        """Return True if the current tensors of a settled run are another task's than a merged one's, or gone
        although it `kept` some. Tensors that a person adopted for an unknown task count as the merged one's."""
        if receipt.state != "merged" or not (self._of_run(run) / CURRENT).exists():
            return receipt.state == "merged" and kept
        return self.task_of(run) not in ("", f"{receipt.task} {receipt.token}")

    def task_of(self, run: str) -> str:
        """Return the task and the token whose tensors a run's current ones are; empty if that is unknown."""
        path = self._of_run(run) / CURRENT
        return _task_of(path) if path.exists() else ""

    def adopt(self, run: str, receipt: Receipt | None) -> None:
        """Let the run's current tensors (none, if they are gone) be those of a merged task, or of an unknown one."""
        path, of_task = self._of_run(run) / CURRENT, f"{receipt.task} {receipt.token}" if receipt else ""
        if receipt or path.exists():
            _write(path, self.load(run), durable=self._durable, of_task=of_task)

    def _settle(self, folder: Path, pattern: str, ask: RoundWorkload) -> None:
        """Commit, keep or discard each pending file, oldest first, by the outcome of its task."""
        waiting: list[StagedTensors] = []
        with _SETTLING:
            for path in sorted(folder.glob(pattern), key=lambda path: path.stat().st_mtime_ns):
                match = PENDING.fullmatch(path.name)
                if match is None:
                    continue
                staged, fate = StagedTensors(path, self._durable), outcome_of(match["task"], ask)
                if fate is None or fate.token != int(match["token"]):
                    staged.discard()
                    continue
                if fate.state == "accepted":
                    waiting.append(staged.accept())
                elif fate.state == "merged":
                    staged.commit(fate.unmerged)
                elif fate.state != "leased":
                    # A task that is still leased may have its submission on its way.
                    staged.discard()
                if fate.state in ("merged", "left_out"):
                    # Rounds end one after the other, so an update before this one is not merged any more.
                    while waiting:
                        waiting.pop().discard()

    def unused(self, since: float) -> list[str]:
        """Return the runs without a tensor kept or settled since then, in seconds since 1970."""
        return sorted(folder.name for folder in self._folder.glob("*/") if folder.stat().st_mtime < since)

    def remove(self, run: str) -> None:
        """Remove all tensors of a run."""
        shutil.rmtree(self._of_run(run))

    def _of_run(self, run: str) -> Path:
        return self._folder / checked_identifier(run)


def _read(path: Path) -> dict[str, Array]:
    with path.open("rb") as file:
        header = read_header(file, path.stat().st_size)
        kept = {}
        for name, entry in header.entries.items():
            file.seek(header.data_start + entry.start)
            flat = np.frombuffer(bytearray(file.read(entry.nbytes)), dtype=_DTYPES[entry.dtype])
            kept[name] = flat.reshape(entry.shape)
    return kept


def _task_of(path: Path) -> str:
    with path.open("rb") as file:
        return read_header(file, path.stat().st_size).metadata.get(TASK, "")


def _write(path: Path, keep: Mapping[str, Array], *, durable: bool, of_task: str = "") -> None:
    layout = [(name, _dtype_name(name, values), values.shape) for name, values in keep.items()]
    with written_whole(path, durable=durable, mode=0o600) as file:
        values = (as_bytes(values) if values.size else b"" for values in keep.values())
        write(file, layout, values, {TASK: of_task} if of_task else None)


def _of_blocks(name: str, blocks: frozenset[str]) -> bool:
    """Return True if a tensor's name ends in one of these blocks' names, as in `own/` and the block's name."""
    parts = name.split("/")
    return any("/".join(parts[first:]) in blocks for first in range(len(parts)))


def outcome_of(task: str, ask: RoundWorkload) -> TaskView | Receipt | None:
    """Return the outcome of a task; None if the coordinator does not know it, and so has not accepted its update."""
    try:
        answer = ask(task)
    except NotFound as problem:
        # A proxy's 404 page says nothing about the task, and a discarded file cannot be restored.
        if not problem.from_document:
            raise
        return None
    return (answer.receipt if isinstance(answer, TaskView) else None) or answer


def checked_identifier(identifier: str) -> str:
    """Return an identifier that is safe in a path. Raises ValueError."""
    if not IDENTIFIER.fullmatch(identifier):
        raise ValueError(f"the coordinator sent an invalid identifier: {identifier[:80]!r}")
    return identifier


def _dtype_name(name: str, values: Array) -> str:
    if values.dtype not in _NAMES:
        raise ValueError(f"the vault cannot keep {name!r}: {values.dtype} is not one of {', '.join(sorted(_DTYPES))}")
    return _NAMES[values.dtype]
