"""One round, killed at every point of its life, before and after each commit, fsync and rename.

What is killed starts again on what it left; then the round must end as it would have, with the same bits.
"""

from __future__ import annotations

from dataclasses import replace

from tests.model_checking.actors import POLITE
from tests.model_checking.federation import Federation, Outcome, Shape, workplace
from tests.model_checking.schedule import NONE

SEED = 7
POINTS = {"transaction", "commit", "committed", "fsync", "synced", "rename", "renamed", "vault", "piece"}

MOMENTUM = {"kind": "sgd", "momentum": 0.9}

SHAPES = {
    "one worker, all in the database": Shape(workers=1, rounds=1, inline_bytes=65_536, inline_updates=(True,)),
    "two workers, files, uploads": Shape(workers=2, rounds=1, inline_bytes=8),
    "three workers, updates with their submissions": Shape(workers=3, rounds=1, inline_updates=(True,) * 3),
    "two workers, momentum, two rounds": Shape(workers=2, rounds=2, server_optimizer=MOMENTUM, inline_bytes=8),
    "two workers, two coordinators": Shape(workers=2, replicas=2, rounds=1, inline_bytes=8),
}
"""Each worker is asked again until it has done its task, so that the same updates are merged in the end."""


def undisturbed(shape: Shape) -> tuple[Outcome, list[int]]:
    """How it goes if nothing is killed, and the points at which something may be."""
    found: list[int] = []
    with workplace() as folder:
        federation = Federation(SEED, folder, NONE, POLITE, shape)
        schedule = federation.schedule
        schedule.on_point = lambda what: found.append(schedule.points) if what in POINTS else None
        try:
            return federation.run(0), found
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
