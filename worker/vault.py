"""Tensors that never leave the site, kept between the rounds of a run.

What a task wants kept is staged before its update is submitted, and becomes current only once the update is known to
be accepted. So the vault never runs ahead of the server, and a crash between acceptance and rename loses nothing:
`settle` asks what became of each staged file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shared.blocks import NUMPY_DTYPES
from shared.container import read_header, write
from shared.problems import NotFound
from shared.tensors import Array, as_bytes
from shared.wire import TaskView
from worker.files import replace, sweep, written_whole

# Identifiers come from the coordinator: only what cannot be anything else becomes part of a path.
IDENTIFIER = re.compile(r"[A-Za-z0-9-]{1,64}")
STAGED = re.compile(r"staged-([A-Za-z0-9-]{1,64})-([0-9]{1,18})\.safetensors")
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


@dataclass(frozen=True)
class Staged:
    """What a task wants kept, on disk but not current yet."""

    path: Path
    durable: bool

    def commit(self) -> None:
        """Makes it current, to survive a power cut when it returns if that is wanted of the vault."""
        replace(self.path, self.path.with_name(CURRENT), durable=self.durable)

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
        """What the last accepted update of this run kept, by name; empty the first time.

        Raises ValueError for a run id that could be a path, and ContainerError for a spoilt file.
        """
        path = self._of_run(run) / CURRENT
        if not path.exists():
            return {}
        with path.open("rb") as file:
            header = read_header(file, path.stat().st_size)
            kept = {}
            for name, entry in header.entries.items():
                file.seek(header.data_start + entry.start)
                flat = np.frombuffer(bytearray(file.read(entry.nbytes)), dtype=_DTYPES[entry.dtype])
                kept[name] = flat.reshape(entry.shape)
        return kept

    def stage(self, run: str, task: str, token: int, keep: Mapping[str, Array]) -> Staged:
        """Writes what the task wants kept, to be committed or discarded. Overwrites an earlier try at the same lease.

        Raises ValueError for an id that could be a path, or an array of a kind that cannot be stored.
        """
        path = self._of_run(run) / f"staged-{_checked(task)}-{token}.safetensors"
        layout = [(name, _dtype_name(name, values), values.shape) for name, values in keep.items()]
        with written_whole(path, durable=self._durable) as file:
            write(file, layout, (as_bytes(values) if values.size else b"" for values in keep.values()))
        return Staged(path, self._durable)

    def settle(self, ask: Callable[[str], TaskView]) -> None:
        """Commits or discards what earlier submissions left staged; `ask` tells what became of a task.

        A task that is still leased under the same token is left staged: its submission may be on its way. Raises
        what `ask` raises, except that a task which the coordinator itself does not know is one that was not accepted.
        """
        for staged, task, token in list(self._staged()):
            try:
                view = ask(task)
            except NotFound as problem:
                # A proxy's page says nothing of the task, and what is kept cannot be had again.
                if not problem.from_document:
                    raise
                staged.discard()
                continue
            if view.token == token and view.state == "accepted":
                staged.commit()
            elif view.token != token or view.state != "leased":
                staged.discard()

    def _staged(self) -> Iterator[tuple[Staged, str, int]]:
        for path in sorted(self._folder.glob("*/staged-*"), key=lambda path: path.stat().st_mtime_ns):
            if match := STAGED.fullmatch(path.name):
                yield Staged(path, self._durable), match[1], int(match[2])

    def _of_run(self, run: str) -> Path:
        return self._folder / _checked(run)


def _checked(identifier: str) -> str:
    if not IDENTIFIER.fullmatch(identifier):
        raise ValueError(f"the coordinator sent an identifier that is not one: {identifier[:80]!r}")
    return identifier


def _dtype_name(name: str, values: Array) -> str:
    if values.dtype not in _NAMES:
        raise ValueError(f"the vault cannot keep {name!r}: {values.dtype} is not one of {', '.join(sorted(_DTYPES))}")
    return _NAMES[values.dtype]
