"""Beside the conductor: now and again, what is no longer kept is removed."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import structlog

from tessera.coordinator.maintenance.garbage_collection import Retention

log = structlog.get_logger()


@dataclass(frozen=True)
class Housekeeping:
    retention: Retention
    every_seconds: float
    _ended: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """A daemon, and not waited for: what is cut off is found again by the next pass."""
        threading.Thread(target=self._work, name="housekeeping", daemon=True).start()

    def end(self) -> None:
        self._ended.set()

    def _work(self) -> None:
        while not self._ended.wait(self.every_seconds):
            try:
                self.retention.collect()
            except Exception:  # the next pass may find the database or the store back
                log.exception("housekeeping.failed")
