"""The kinds of data sets. To add a kind, put a file named after the kind into `kinds`, or into a folder of the
environment variable TESSERA_KINDS, or declare a module of another installed package by an entry point of the group
`tessera.datasets`, with the kind's name. Only the operator of a worker's process can do so."""

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import ValidationError

from tessera.shared.near_names import did_you_mean, nearest
from tessera.shared.validation_errors import messages_of
from tessera.worker.data import kinds as kinds_package
from tessera.worker.data.dataset import Adapter, Dataset, Loaders
from tessera.worker.data.kinds import FOLDERS, own_folders
from tessera.worker.data.opt_out import without
from tessera.worker.data.partition.division import hold_out, part_of
from tessera.worker.data.partition.schemes import SitePartition
from tessera.worker.data.prepared import NOT_KEPT, PreparedFolder
from tessera.worker.errors import DataError

KINDS = "tessera.worker.data.kinds"
GROUP = "tessera.datasets"
EVERY_KIND = ("kind", "part", "held_out", "opt_out", "use", "privacy", "ledger")
"""The keys that a data set of any kind has, beside the options of its kind."""


def load(
    kind: str,
    options: Mapping[str, object],
    *,
    part: SitePartition | None = None,
    held_out: float | None = None,
    opt_out: Path | None = None,
    key: bytes = b"",
    prepared: PreparedFolder = NOT_KEPT,
    loaders: Loaders | None = None,
) -> Dataset:
    """Return the data set of a kind, or a part of it, without the groups in the list `opt_out`, and with a share of
    the examples held out by a hash with `key`.

    `prepared` is the folder for files that its kind makes once from the data. `loaders` read what is on disk.

    Raises DataError for an unknown kind, an invalid option, an unreadable file or an empty side of the division.
    """
    if held_out is not None and not key:
        raise ValueError("held_out: give the key that decides which examples are held out")
    adapter = _adapter(kind)
    if adapter is None:
        raise DataError(f"kind: there is no {kind!r}{did_you_mean(kind, kinds())}")
    try:
        given = adapter.options.model_validate(options)
        dataset: Dataset = adapter.open_prepared(given, prepared) if adapter.open_prepared else adapter.open(given)
    except ValidationError as fault:
        steps, message = messages_of(fault.errors(include_url=False), adapter.options)[0]
        near = nearest(str(steps[-1]), EVERY_KIND) if message.startswith("unknown key") and len(steps) == 1 else None
        message = f"unknown key; did you mean `{near}`?" if near else message
        raise DataError(f"{'.'.join(map(str, steps)) or kind}: {message}") from None
    report = dataset.report
    if not report.contradictions:
        report = replace(report, relabelled=len(dataset.contradictions()))
    dataset = replace(dataset, loaders=loaders, report=report)
    if loaders and dataset.in_loaders:
        loaders.prepare()
    if part is not None and part.index is not None:
        dataset = part_of(dataset, part, part.index)
    if opt_out is not None:
        dataset = without(dataset, opt_out)
    return dataset if held_out is None else hold_out(dataset, held_out, key)


def streamed(kind: str, options: Mapping[str, object]) -> dict[str, object]:
    """Return the options with which a kind that can leave its data on disk does so."""
    adapter = _adapter(kind)
    leaves = adapter is not None and "in_memory" in adapter.options.model_fields
    return {**options, "in_memory": False} if leaves else dict(options)


def adapters() -> dict[str, Adapter[Any]]:
    """Return every installed adapter by kind. Imports the libraries of all, which takes seconds. Raises DataError for
    a file that cannot be imported."""
    return {kind: adapter for kind in kinds() if (adapter := _adapter(kind))}


def kinds() -> set[str]:
    """Return the names of the installed kinds. Imports no library."""
    return {*_files(), *(entry.name for entry in entry_points(group=GROUP))}


@cache
def _adapter(kind: str) -> Adapter[Any] | None:
    """Return the adapter of a kind. Imports only the libraries that this kind needs. Raises DataError."""
    if kind in _files():
        modules = [_imported(kind)]
    else:
        modules = [entry.load() for entry in entry_points(group=GROUP, name=kind)]
    return getattr(modules[-1], "ADAPTER", None) if modules else None


def _imported(kind: str) -> ModuleType:
    """Return the module of a kind. Raises DataError for a file of TESSERA_KINDS that declares no kind."""
    own = [path for folder in own_folders() if (path := folder / f"{kind}.py").is_file()]
    try:
        module = importlib.import_module(f"{KINDS}.{kind}")
    except Exception as fault:
        if own:
            raise DataError(f"kind: {own[0]} cannot be imported: {type(fault).__name__}: {fault}") from fault
        raise
    if own and not isinstance(getattr(module, "ADAPTER", None), Adapter):
        raise DataError(f"kind: {own[0]} declares no ADAPTER: add it, or begin the name of the file with _")
    return module


@cache
def _files() -> frozenset[str]:
    """Return the kinds that are files. Raises DataError for an absent folder, and for a name given twice."""
    ours = {info.name for info in pkgutil.iter_modules([str(Path(kinds_package.__file__).parent)])}
    others = {entry.name for entry in entry_points(group=GROUP)}
    for folder in own_folders():
        if not folder.is_dir():
            raise DataError(f"kind: {FOLDERS} names {folder}, which is not a folder: create it or remove it there")
        names = {file.stem for file in folder.glob("*.py") if not file.name.startswith("_")}
        if twice := sorted(names & (ours | others)):
            raise DataError(f"kind: {folder / twice[0]}.py has the name of another kind: rename it")
        ours |= names
    return frozenset(ours)
