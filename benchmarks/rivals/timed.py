"""What the sides of other systems share: weights in a file of theirs, and rounds that they write down as they end."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from benchmarks.measuring import PeakMemory, await_true, processor_seconds
from benchmarks.network import Network
from benchmarks.rounds.sides import Turn
from tessera.shared.tensors.dtypes import NUMPY_DTYPES
from tessera.shared.updates.model_folder import ModelFolder

ROUND_SECONDS = 1800.0


def write_weights(model: ModelFolder, file: Path) -> Path:
    """The model's blocks as a numpy file: the same arrays as are sent here."""
    arrays = {
        block.name: np.frombuffer(raw, NUMPY_DTYPES[block.dtype]).reshape(block.shape)
        for block, raw in model.blocks()
    }
    np.savez(file, **arrays)  # type: ignore[arg-type]
    return file


def rounds_in(times: Path) -> list[float]:
    lines = times.read_text(encoding="utf-8").splitlines() if times.exists() else []
    return [float(json.loads(line)["seconds"]) for line in lines]


def watch(
    times: Path,
    rounds: int,
    server: Callable[[], Sequence[int]],
    clients: Callable[[], Sequence[int]],
    start: Callable[[], None],
    network: Network,
    check: Callable[[], None] = lambda: None,
) -> Turn:
    """Starts, and watches the processes until that many rounds and one more have been written down. `check` raises
    if no more rounds will be."""

    def count() -> int:
        check()
        return len(rounds_in(times))

    groups = {"server": server(), **{str(pid): [pid] for pid in clients()}}
    with PeakMemory(groups) as memory:
        start()
        await_true(lambda: count() >= 1, ROUND_SECONDS, "the first round ends", 0.05)
        before = processor_seconds(server()), processor_seconds(clients()), network.moved()
        await_true(lambda: count() > rounds, rounds * ROUND_SECONDS, "all rounds end", 0.1)
        after = processor_seconds(server()), processor_seconds(clients())
        moved = network.moved_since(before[2])
    first, *others = rounds_in(times)
    peaks = dict(memory.peaks)
    return Turn(
        first_seconds=first,
        seconds=tuple(others),
        server_processor=(after[0] - before[0]) / rounds,
        client_processor=(after[1] - before[1]) / rounds,
        server_peak=peaks.pop("server"),
        client_peak=max(peaks.values()),
        received=moved.received / rounds if moved else None,
        sent=moved.sent / rounds if moved else None,
    )
