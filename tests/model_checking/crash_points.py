"""One round, killed at every point of its life, before and after each commit, fsync and rename.

What is killed starts again on what it left; then the round must end as it would have, with the same bits.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from tests.model_checking.actors import POLITE
from tests.model_checking.federation import Federation, Outcome, Shape, workplace
from tests.model_checking.schedule import NONE

SEED = 7
POINTS = {"transaction", "commit", "committed", "fsync", "synced", "rename", "renamed", "vault", "piece"}

STATES = "SELECT state FROM rounds ORDER BY number, attempt"

MOMENTUM = {"kind": "sgd", "momentum": 0.9}

SHAPES = {
    "one worker, all in the database": Shape(workers=1, rounds=1, inline_bytes=65_536, inline_updates=(True,)),
    "two workers, files, uploads": Shape(workers=2, rounds=1, inline_bytes=8),
    "three workers, updates with their submissions": Shape(workers=3, rounds=1, inline_updates=(True,) * 3),
    "two workers, momentum, two rounds": Shape(workers=2, rounds=2, server_optimizer=MOMENTUM, inline_bytes=8),
    "two workers, no rounds": Shape(workers=2, rounds=0, evaluates=True),
    "two workers, a buffer of both": Shape(workers=2, rounds=2, mode="buffer", target_updates=2, inline_bytes=8),
    "three workers, a buffer of two": Shape(
        workers=3, rounds=3, mode="buffer", quorum=2, target_updates=2, inline_bytes=8, replicas=2
    ),
    "two workers, a buffer with a memory and a cap": Shape(
        workers=2,
        rounds=3,
        mode="buffer",
        quorum=1,
        target_updates=1,
        memory=True,
        max_updates_per_site=2,
        inline_bytes=8,
    ),
    "two workers, two coordinators": Shape(workers=2, replicas=2, rounds=1, inline_bytes=8),
}
"""Each worker is asked again until it has done its task, so that the same updates are merged in the end."""

DIFFER = {"three workers, a buffer of two", "two workers, a buffer with a memory and a cap"}
"""Shapes whose versions depend on who comes first: killed anywhere, they end, and no invariant is broken."""


def undisturbed(shape: Shape) -> tuple[Outcome, list[int]]:
    """How it goes if nothing is killed, and the points at which something may be."""
    found: list[int] = []
    return _watched(shape, lambda point, what, _: found.append(point) if what in POINTS else None), found


def between_actions(shape: Shape) -> tuple[Outcome, dict[tuple[str, ...], int]]:
    """How it goes if nothing is killed, and the point after each action that moves a round, by the rounds' states."""
    found: dict[tuple[str, ...], int] = {}

    def look(point: int, what: str, folder: Path) -> None:
        if what == "committed":
            with closing(sqlite3.connect(folder / "tessera.db")) as raw:
                found.setdefault(tuple(state for (state,) in raw.execute(STATES)), point)

    return _watched(shape, look), found


def _watched(shape: Shape, look: Callable[[int, str, Path], None]) -> Outcome:
    """How it goes if nothing is killed; `look` is called at each point, with its number."""
    with workplace() as folder:
        federation = Federation(SEED, folder, NONE, POLITE, shape)
        schedule = federation.schedule
        schedule.on_point = lambda what: look(schedule.points, what, folder)
        try:
            return federation.run(0)
        finally:
            federation.close()


def killed(shape: Shape, point: int, *, power_cut: bool) -> Outcome:
    """How it goes if the process that comes to this point dies there. Raises Violated."""
    with workplace() as folder:
        federation = Federation(SEED, folder, replace(NONE, power_cut=float(power_cut)), POLITE, shape)
        federation.schedule.crash_at = point
        try:
            return federation.run(0)
        finally:
            federation.close()
