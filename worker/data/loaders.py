"""Batches read ahead of their use: by a thread, or by processes of torch's DataLoader (loaders).

Loaders are started by `forkserver`: the worker has threads and perhaps a GPU, with which a fork is unsafe. They get
lists of places, drawn by the worker, so that the order is the same for any number of them.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import shutil
import signal
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import chain, islice
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import structlog
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as MapDataset

from tessera.worker.data.augmentation import SeededAugmentation, augmented
from tessera.worker.data.dataset import Dataset, RowRequest, Rows
from tessera.worker.errors import DataError, LoaderFailed

Transform = Callable[[Sequence[int]], Rows]

T = TypeVar("T")

PREFETCH = 2
"""Number of batches that each loader reads ahead."""
PIECE_ROWS = 16
"""Number of rows that a loader reads together of a part that several share."""
LOOK_SECONDS = 5.0
"""Time between two looks whether the loaders are alive."""
PATIENCE_SECONDS = 600.0
"""Time to wait for a batch, which a disk on a network may need, before its loader counts as stuck."""
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (where Linux keeps what processes share)

# The forkserver imports it once, and the loaders share its memory.
PRELOADED = ["tessera.worker.data.loaders", "tessera.worker.data.readers.pictures"]


def stream(
    dataset: Dataset,
    batch_size: int | None,
    generator: torch.Generator | None = None,
    skip: int = 0,
    augmentation: SeededAugmentation | None = None,
) -> Iterator[Rows]:
    """Yield the batches of `Dataset.batches`, with rows on disk as they are read: `finished` completes them.

    Rows on disk are read, and images are changed, while the batch before is used. Raises DataError and LoaderFailed.
    """
    for batch in _attempts(dataset, dataset.order(batch_size, generator, skip), augmentation):
        if isinstance(batch, DataError):
            raise batch
        yield {**batch, **dataset.common}


def stream_readable(dataset: Dataset, batch_size: int | None, known: Tensor | None = None) -> Iterator[Rows | None]:
    """Yield the batches of `stream` in the stored order.

    Of a batch that cannot be read, yield each example by itself, and None for an example that cannot be read or is
    not `known`, bool [examples]. No example makes this raise.
    """
    order = [part for rows in dataset.order(batch_size) for part in _apart(rows, known)]
    for rows, batch in _each_attempt(dataset, order):
        if known is not None and not bool(known[rows].all()):
            yield None
        elif not isinstance(batch, DataError):
            yield {**batch, **dataset.common}
        elif len(rows) == 1:
            yield None
        else:
            for alone in (attempt(dataset, row) for row in torch.split(rows, 1)):
                yield None if isinstance(alone, DataError) else {**alone, **dataset.common}


def _apart(rows: Tensor, known: Tensor | None) -> list[Tensor]:
    """Return the places of a batch, int64 [batch], in parts, of which each one that is not known has its own."""
    if known is None:
        return [rows]
    unknown = {place for place, is_known in enumerate(known[rows].tolist()) if not is_known}
    cuts = sorted(unknown | {place + 1 for place in unknown})
    return [part for part in torch.tensor_split(rows, cuts) if len(part)]


def _each_attempt(dataset: Dataset, order: Sequence[Tensor]) -> Iterator[tuple[Tensor, Rows | DataError]]:
    """Yield the places of each batch with its inputs or a reader's error. This process reads what loaders cannot."""
    done = 0
    try:
        for batch in _attempts(dataset, order):
            yield order[done], batch
            done += 1
    except LoaderFailed as fault:
        structlog.get_logger("worker").warning("loaders-not-used", reason=str(fault))
    for rows in order[done:]:
        yield rows, attempt(dataset, rows)


def _attempts(
    dataset: Dataset, order: Sequence[Tensor], augmentation: SeededAugmentation | None = None
) -> Iterator[Rows | DataError]:
    """Yield the inputs of the examples at each of these places, or a reader's error, read ahead where that takes
    long. Raises LoaderFailed."""
    if dataset.in_loaders:
        return read_by_loaders(dataset, order, augmentation)
    here = (attempt(dataset, rows, augmentation) for rows in order)
    return _ahead(here) if dataset.on_disk or augmentation else here


def attempt(dataset: Dataset, rows: Tensor, augmentation: SeededAugmentation | None = None) -> Rows | DataError:
    """Return the inputs of `read_here`, or a reader's error."""
    try:
        return read_here(dataset, rows, augmentation)
    except DataError as fault:
        return fault


def read_here(dataset: Dataset, rows: Tensor, augmentation: SeededAugmentation | None = None) -> Rows:
    """Return the inputs of the examples at the places `rows`, without those common to all, read by this thread.
    Raises DataError."""
    read = _in_memory(dataset, rows) | (dataset.on_disk.read(rows) if dataset.on_disk else {})
    return augmented(augmentation, dataset, rows, read)


def read_apart(dataset: Dataset, rows: Tensor, augmentation: SeededAugmentation | None = None) -> tuple[Rows, Tensor]:
    """Return the inputs of `read_here`, read one by one, and the mask of readable examples, bool [examples]. A
    readable example takes the place of an unreadable one; without any, there are no inputs."""
    found = [attempt(dataset, row, augmentation) for row in torch.split(rows, 1)]
    good = [each for each in found if not isinstance(each, DataError)]
    readable = torch.tensor([not isinstance(each, DataError) for each in found])
    whole = [good[0] if isinstance(each, DataError) else each for each in found] if good else []
    return {name: torch.cat([each[name] for each in whole]) for name in (good[0] if good else ())}, readable


def read_by_loaders(
    dataset: Dataset, parts: Sequence[Tensor], augmentation: SeededAugmentation | None = None
) -> Iterator[Rows | DataError]:
    """Yield the inputs of the examples at each of these places, without those common to all, or a reader's error.
    Raises LoaderFailed."""
    if dataset.loaders is None or dataset.on_disk is None:
        raise ValueError("no loaders read the data set")
    some = dataset.on_disk.some
    requests = (
        RowRequest(some(rows).numpy(), augmentation.of(dataset, rows) if augmentation else None) for rows in parts
    )
    for rows, read in zip(parts, dataset.loaders.read(dataset.on_disk.transform, requests), strict=True):
        if isinstance(read, DataError):
            yield read
        else:
            found = {name: tensor[: len(rows)] for name, tensor in read.items()}
            yield {**augmented(augmentation, dataset, rows, _in_memory(dataset, rows)), **found}


def read_in_pieces(
    dataset: Dataset, parts: Sequence[Tensor], augmentation: SeededAugmentation | None = None
) -> Iterator[Rows | DataError]:
    """Yield the same as `read_by_loaders`, with several loaders at work on each part."""
    pieces = [torch.split(part, PIECE_ROWS) for part in parts]
    read = read_by_loaders(dataset, list(chain.from_iterable(pieces)), augmentation)
    for of_part in pieces:
        found = list(islice(read, len(of_part)))
        rows = [each for each in found if not isinstance(each, DataError)]
        fault = next((each for each in found if isinstance(each, DataError)), None)
        yield fault or {name: torch.cat([each[name] for each in rows]) for name in rows[0]}


def _in_memory(dataset: Dataset, rows: Tensor) -> Rows:
    return {name: tensor[rows] for name, tensor in dataset.tensors.items()}


def finished(dataset: Dataset, batch: Rows) -> Rows:
    """Return a batch of `stream` with its rows on disk converted to the model's inputs, on the device of each."""
    return dataset.on_disk.finished(batch) if dataset.on_disk else batch


def _ahead(batches: Iterator[T]) -> Iterator[T]:
    """Yield the batches, each read while the batch before it is used."""
    with ThreadPoolExecutor(1, "reading") as pool:
        coming = pool.submit(next, batches, None)
        while (batch := coming.result()) is not None:
            coming = pool.submit(next, batches, None)
            yield batch


class LoaderProcesses:
    """A number of loaders, which read the rows of one data set at a time and wait for the next pass over it.

    They start when they are first needed, end when another data set needs its own, and end with this process,
    however that ends. Used by one thread at a time.
    """

    def __init__(self, count: int, *, pinned: bool = False) -> None:
        """Make `count` loaders when they are needed. `pinned` memory is copied to a GPU without a wait."""
        self.count = count
        self.pinned = pinned
        self._transform: Transform | None = None
        self._requests: list[RowRequest] = []
        self._loader: DataLoader[Any] | None = None
        self._alive: Connection | None = None
        self._pass = 0

    def prepare(self) -> None:
        """Start the process that loaders are forked from, so that its imports of seconds are over when they start."""
        multiprocessing.set_forkserver_preload(PRELOADED)
        # It unblocks SIGTERM when it starts.
        resource_tracker.ensure_running()
        # Processes inherit what this thread blocks.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def read(self, transform: Transform, requests: Iterable[RowRequest]) -> Iterator[Rows | DataError]:
        """Yield the result of a table's transform for each request, or its error, in their order. A pass that
        begins ends the previous pass. Raises LoaderFailed."""
        self._pass += 1
        this = self._pass
        if self._transform is not transform:
            self.close()
            self._transform = transform
        batches = self._begin(transform, requests)
        while this == self._pass:
            batch = self._next(batches)
            if batch is None:
                return
            yield batch
        raise RuntimeError("another pass over the data began before the end of this one")

    def close(self) -> None:
        """End the loaders. A later `read` starts others."""
        # The last reference to its iterator ends the processes.
        self._loader = None
        if self._alive:
            self._alive.close()
        self._alive = None

    def _begin(self, transform: Transform, requests: Iterable[RowRequest]) -> Iterator[Any]:
        self._requests[:] = requests
        if self._loader:
            try:
                return iter(self._loader)
            except (RuntimeError, OSError, EOFError):
                # One has ended, or still reads a batch of a pass that was left.
                self.close()
        return self._start(transform)

    def _start(self, transform: Transform) -> Iterator[Any]:
        self.prepare()
        context = multiprocessing.get_context("forkserver")
        ends, self._alive = context.Pipe(duplex=False)
        # It warns of more loaders than processors, which may wait for a disk.
        with warnings.catch_warnings(action="ignore"):
            self._loader = DataLoader(
                _Rows(transform),
                batch_sampler=self._requests,  # type: ignore[arg-type]  # any batches of indices
                num_workers=self.count,
                collate_fn=_as_it_is,
                pin_memory=self.pinned,
                timeout=LOOK_SECONDS,
                worker_init_fn=partial(_begin_loader, ends),
                multiprocessing_context=context,
                # Of its own: it would draw from the global one at each pass.
                generator=torch.Generator(),
                prefetch_factor=PREFETCH,
                persistent_workers=True,
            )
            batches = iter(self._loader)
        # Before Python's own exit, which would wait for loaders that ignore its SIGTERM.
        atexit.unregister(self.close)
        atexit.register(self.close)
        return batches

    def _next(self, batches: Iterator[Any]) -> Any:
        """Return the next batch, or None at the end."""
        waited = 0.0
        while True:
            try:
                return next(batches, None)
            except (RuntimeError, OSError, EOFError) as fault:
                # A batch that a loader read before it ended may be lost too.
                waited += LOOK_SECONDS
                if "timed out" not in str(fault) or waited >= PATIENCE_SECONDS:
                    self.close()
                    raise LoaderFailed(self._about(fault)) from fault

    def _about(self, fault: Exception) -> str:
        reason = str(fault).partition("\n")[0] or type(fault).__name__
        try:
            free = f"{shutil.disk_usage(SHARED_MEMORY).free >> 20} MiB free"
        except OSError:
            free = "missing"
        return (
            f"loaders: {reason}. The kernel may have ended a loader for lack of memory, or of shared memory "
            f"({SHARED_MEMORY}: {free}; a container needs --shm-size). Enlarge it, or lower `loaders` in the "
            f"worker's settings from {self.count}; 0 reads without further processes"
        )


class _Rows(MapDataset[Any]):
    """The data set of a loader: rows by requests."""

    def __init__(self, transform: Transform) -> None:
        self._transform = transform

    def __getitems__(self, request: RowRequest) -> Rows | DataError:
        """Return the rows, or the error, which torch would wrap in a stack of lines."""
        try:
            rows = self._transform(request.places.tolist())
        except DataError as fault:
            return fault
        return request.change(rows) if request.change else rows


def _as_it_is(batch: T) -> T:
    return batch


def _begin_loader(alive: Connection, _: int) -> None:
    """Prepare a loader, which ends with its worker: the pipe's other end closes, however the worker ends."""
    # The worker decides what these mean: a terminal sends ^C to all processes, and Slurm and systemd send SIGTERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_after, args=(alive,), daemon=True).start()


def _end_after(alive: Connection) -> None:
    with suppress(EOFError, OSError):
        alive.recv_bytes()
    os._exit(1)
