"""Tensors that never leave the site, kept between the rounds of a run.

What a task wants kept is staged before its update is submitted, is set aside as accepted when the coordinator has
accepted the update, and becomes current only when a receipt shows that the round was committed with the update. What
came of an abandoned attempt, or of an update that was left out, is discarded. So the vault never runs ahead of the
server. Each step is one rename, and may be repeated after a crash: `settle` asks what became of each file.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tessera.shared.api.tasks import Receipt, TaskView
from tessera.shared.problems import NotFound
from tessera.shared.tensors.dtypes import NUMPY_DTYPES
from tessera.shared.tensors.lazy import Array, as_bytes
from tessera.shared.updates.safetensors_file import read_header, write
from tessera.worker.state.atomic_files import replace, sweep, written_whole

# Identifiers come from the coordinator: only what cannot be anything else becomes part of a path.
IDENTIFIER = re.compile(r"[A-Za-z0-9-]{1,64}")
STAGED, ACCEPTED = "staged", "accepted"
PENDING = re.compile(r"(?:staged|accepted)-(?P<task>[A-Za-z0-9-]{1,64})-(?P<token>[0-9]{1,18})\.safetensors")
CURRENT = "current.safetensors"

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


class NoReceipt(ValueError):
    """The coordinator does not tell whether an accepted update was merged."""


RoundWorkload = Callable[[str], TaskView | Receipt]
"""Tells what became of a task. Raises Problem."""


@dataclass(frozen=True)
class Staged:
    """What a task wants kept, on disk but not current yet. What is renamed survives a power cut if it is durable."""

    path: Path
    durable: bool

    def accept(self) -> Staged:
        """Note that its update was accepted: from here on it waits for the round's end. Returns it as it is then."""
        if self.path.name.startswith(STAGED):
            accepted = self.path.with_name(ACCEPTED + self.path.name.removeprefix(STAGED))
            replace(self.path, accepted, durable=self.durable)
            return Staged(accepted, self.durable)
        return self

    def commit(self, unmerged: Collection[str] = ()) -> None:
        """Make it current. What belongs to a block that was not merged stays as it was."""
        current = self.path.with_name(CURRENT)
        if unmerged:
            before, after = (_read(path) if path.exists() else {} for path in (current, self.path))
            blocks = frozenset(unmerged)
            kept = {name: values for name, values in before.items() if _of_blocks(name, blocks)}
            kept |= {name: values for name, values in after.items() if not _of_blocks(name, blocks)}
            _write(self.path, kept, durable=self.durable)
        replace(self.path, current, durable=self.durable)

    def discard(self) -> None:
        self.path.unlink(missing_ok=True)


class Vault:
    """The kept tensors of every run, under `folder`, which only the owner may read.

    Unless it is `durable`, what it keeps survives the death of the process but no power cut.
    """

    def __init__(self, folder: Path, *, durable: bool = True) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        sweep(folder)
        self._folder = folder
        self._durable = durable

    def load(self, run: str) -> dict[str, Array]:
        """Return what the last merged update of this run kept, by name; empty the first time.

        Raises ValueError for a run id that could be a path, and ContainerError for a spoilt file.
        """
        path = self._of_run(run) / CURRENT
        return _read(path) if path.exists() else {}

    def stage(self, run: str, task: str, token: int, keep: Mapping[str, Array]) -> Staged:
        """Write what the task wants kept, to be accepted or discarded. Overwrites an earlier try at the same lease.

        Raises ValueError for an id that could be a path, or an array of a kind that cannot be stored.
        """
        path = self._of_run(run) / f"{STAGED}-{_checked(task)}-{token}.safetensors"
        _write(path, keep, durable=self._durable)
        return Staged(path, self._durable)

    def settle(self, ask: RoundWorkload) -> None:
        """Settle what every run has pending. Raises what `ask` raises."""
        for folder in self._folder.glob("*/"):
            self._settle(folder, "*", ask)

    def settle_unanswered(self, ask: RoundWorkload) -> None:
        """Settle those submissions that had no answer. Raises what `ask` raises."""
        for folder in self._folder.glob("*/"):
            self._settle(folder, f"{STAGED}-*", ask)

    def settle_run(self, run: str, receipt: Receipt | None, ask: RoundWorkload) -> None:
        """Settle what a run has pending, before a task of it begins; `ask` is asked for what is not in the receipt.

        Raises what `ask` raises, and NoReceipt where the task would begin from what is kept without knowing whether
        the update before was merged.
        """
        told = self._settle(
            self._of_run(run), "*", lambda task: receipt if receipt and receipt.task == task else ask(task)
        )
        if not told:
            raise NoReceipt(
                "the coordinator sends no receipts, so that a worker cannot tell whether what it keeps of the run "
                "was merged: upgrade the coordinator first. What is kept waits until then"
            )

    def _settle(self, folder: Path, pattern: str, ask: RoundWorkload) -> bool:
        """Do with each pending file, oldest first, what its task has come to.

        Returns whether the coordinator told: one of before receipts says of an update for ever that it is accepted.
        """
        waiting: list[Staged] = []
        told = True
        for path in sorted(folder.glob(pattern), key=lambda path: path.stat().st_mtime_ns):
            match = PENDING.fullmatch(path.name)
            if match is None:
                continue
            staged, fate = Staged(path, self._durable), _fate_of(match["task"], ask)
            if fate is None or fate.token != int(match["token"]):
                staged.discard()
                continue
            if fate.state == "accepted":
                if isinstance(fate, TaskView) and not _read(path):
                    # No receipt will come, and nothing is kept that could wait for it.
                    staged.discard()
                    continue
                waiting.append(staged.accept())
                told = isinstance(fate, Receipt)
            elif fate.state == "merged":
                staged.commit(fate.unmerged)
            elif fate.state != "leased":
                # A task that is still leased may have its submission on its way.
                staged.discard()
            if fate.state in ("merged", "left_out"):
                # Rounds end one after the other, so an update before this one is not merged any more.
                while waiting:
                    waiting.pop().discard()
                told = True
        return told

    def unused(self, since: float) -> list[str]:
        """Return the runs for which nothing was kept or settled since then, in seconds since 1970."""
        return sorted(folder.name for folder in self._folder.glob("*/") if folder.stat().st_mtime < since)

    def remove(self, run: str) -> None:
        """Remove all that is kept of a run."""
        shutil.rmtree(self._of_run(run))

    def _of_run(self, run: str) -> Path:
        return self._folder / _checked(run)


def _read(path: Path) -> dict[str, Array]:
    with path.open("rb") as file:
        header = read_header(file, path.stat().st_size)
        kept = {}
        for name, entry in header.entries.items():
            file.seek(header.data_start + entry.start)
            flat = np.frombuffer(bytearray(file.read(entry.nbytes)), dtype=_DTYPES[entry.dtype])
            kept[name] = flat.reshape(entry.shape)
    return kept


def _write(path: Path, keep: Mapping[str, Array], *, durable: bool) -> None:
    layout = [(name, _dtype_name(name, values), values.shape) for name, values in keep.items()]
    with written_whole(path, durable=durable) as file:
        write(file, layout, (as_bytes(values) if values.size else b"" for values in keep.values()))


def _of_blocks(name: str, blocks: frozenset[str]) -> bool:
    """Return whether what is kept under a name belongs to one of these blocks: as `own/` and the block's name."""
    parts = name.split("/")
    return any("/".join(parts[first:]) in blocks for first in range(len(parts)))


def _fate_of(task: str, ask: RoundWorkload) -> TaskView | Receipt | None:
    """Return what became of a task; None if the coordinator itself does not know it, and so has not accepted its
    update."""
    try:
        told = ask(task)
    except NotFound as problem:
        # A proxy's page says nothing of the task, and what is kept cannot be had again.
        if not problem.from_document:
            raise
        return None
    return (told.receipt if isinstance(told, TaskView) else None) or told


def _checked(identifier: str) -> str:
    if not IDENTIFIER.fullmatch(identifier):
        raise ValueError(f"the coordinator sent an identifier that is not one: {identifier[:80]!r}")
    return identifier


def _dtype_name(name: str, values: Array) -> str:
    if values.dtype not in _NAMES:
        raise ValueError(f"the vault cannot keep {name!r}: {values.dtype} is not one of {', '.join(sorted(_DTYPES))}")
    return _NAMES[values.dtype]
