"""Tessera's side: a real coordinator and real workers, which train nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from benchmarks.federation import DATASET, Federation
from benchmarks.measuring import (
    PeakMemory,
    faulted_bytes,
    forget_peak,
    peak_bytes,
    processor_seconds,
    proportional_bytes,
)
from benchmarks.rounds.sides import Turn
from tessera.shared.updates.codecs.pipeline import LOSSLESS
from tessera.shared.updates.model_folder import ModelFolder


@dataclass
class Tessera:
    """Over a federation whose workers are there already, so that several cases may share it."""

    federation: Federation
    model: ModelFolder
    sent: Mapping[str, Any] | None = None
    """The selector of what each worker sends; everything if None."""
    codec: str = LOSSLESS
    dataset: str = DATASET
    name: str = "tessera"
    may_fail: bool = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, at: TracebackType | None
    ) -> None:
        """The federation is not its own."""

    def turn(self, rounds: int) -> Turn:
        federation = self.federation
        server, clients = [federation.coordinator_pid], federation.worker_pids
        for pid in (*server, *clients):
            forget_peak(pid)
        settings = {"sent": self.sent} if self.sent else {}
        method = {"name": "drift", "settings": settings}
        spec = {"codec": self.codec, "dataset": self.dataset}
        run = federation.begin(self.model, rounds + 1, len(clients), method, **spec)
        federation.await_version(run, 1, every_seconds=0.02)
        before = processor_seconds(server), processor_seconds(clients)
        faulted = faulted_bytes(clients)
        with PeakMemory({"server": server}, 0.2, proportional_bytes) as memory:
            federation.await_version(run, rounds + 1, every_seconds=0.2)
        # A busy machine may see the first round's end only after others: their tasks say what moved in them.
        moved = federation.moved_in(run)
        first, *others = federation.spans(run)
        return Turn(
            first_seconds=first,
            seconds=tuple(others),
            server_processor=(processor_seconds(server) - before[0]) / rounds,
            client_processor=(processor_seconds(clients) - before[1]) / rounds,
            server_peak=peak_bytes(server[0]),
            client_peak=max(map(peak_bytes, clients)),
            received=moved.received / rounds,
            sent=moved.sent / rounds,
            client_faulted=(faulted_bytes(clients) - faulted) / rounds,
            server_proportional=memory.peaks["server"],
        )
