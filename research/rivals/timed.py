"""What the sides of other systems share: their settings, weights in a file, and rounds that they note as they end."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from common.processes import PeakMemory, await_true, processor_seconds

ROUND_SECONDS = 1800.0

Turn = dict[str, Any]
"""A turn as `benchmarks.rounds` reads it: of the rounds after the first, but for the peaks and `first_seconds`."""


@dataclass(frozen=True)
class Given:
    """The settings of a side, as `benchmarks.rounds` sends them."""

    folder: Path
    model: Path
    workers: int
    ca: Path | None = None
    server: Path | None = None
    key: Path | None = None
    """A CA, and the certificate and the key of a server, if connections have TLS."""

    @classmethod
    def read(cls, line: str) -> Given:
        found = json.loads(line)
        workers = found.pop("workers")
        return cls(workers=workers, **{name: Path(path) for name, path in found.items()})

    def weights(self) -> Path:
        """Write the model's tensors as a numpy file. Return it."""
        file = self.folder / "weights.npz"
        np.savez(file, **load_file(self.model / "model.safetensors"))  # type: ignore[arg-type]
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
    check: Callable[[], None] = lambda: None,
) -> Turn:
    """Start, and watch the processes until that many rounds and one more have been noted. `check` raises if no more
    rounds will be."""

    def count() -> int:
        check()
        return len(rounds_in(times))

    groups = {"server": server(), **{str(pid): [pid] for pid in clients()}}
    with PeakMemory(groups) as memory:
        start()
        await_true(lambda: count() >= 1, ROUND_SECONDS, "the first round ends", 0.05)
        before = processor_seconds(server()), processor_seconds(clients())
        await_true(lambda: count() > rounds, rounds * ROUND_SECONDS, "all rounds end", 0.1)
        after = processor_seconds(server()), processor_seconds(clients())
    first, *others = rounds_in(times)
    peaks = dict(memory.peaks)
    return {
        "first_seconds": first,
        "seconds": others,
        "server_processor": (after[0] - before[0]) / rounds,
        "client_processor": (after[1] - before[1]) / rounds,
        "server_peak": peaks.pop("server"),
        "client_peak": max(peaks.values()),
    }
