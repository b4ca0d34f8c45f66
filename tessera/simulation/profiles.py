"""Simulated time: the clock, which stands still while anything is computed, and the time that sites need."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from random import Random

from tessera.shared.api.tasks import Task
from tessera.shared.schedule import local_steps
from tessera.shared.tensors.hashing import derive_seed
from tessera.simulation.conditions import Conditions, Line, Spread

BEGIN = float(1 << 30)
"""The instant at which a simulation begins, in seconds since 1970: any, but always the same."""
TICKS_PER_SECOND = 1 << 10
"""Durations are whole ticks, so that sums of instants are exact, in whichever order they are added."""


@dataclass
class VirtualClock:
    """Seconds since 1970 of a simulation."""

    at: float = BEGIN

    def __call__(self) -> float:
        return self.at


def ticks(seconds: float) -> float:
    """Return a duration as whole ticks, in seconds."""
    return round(seconds * TICKS_PER_SECOND) / TICKS_PER_SECOND


TRAINING_SECONDS = 1.0
"""The time of each training at sites without a speed."""


@dataclass(frozen=True)
class Profiles:
    """The speed, line and presence of each of the sites, which are sorted by name."""

    conditions: Conditions
    sites: Sequence[str]
    seed: int

    def training_seconds(self, site: str, task: Task, examples: int, name: str) -> float:
        """Return the time of a training: its steps at the site's speed, with jitter that follows from its `name`."""
        speed, jitter = self._seconds_per_step(site), self.conditions.jitter
        seconds = TRAINING_SECONDS if speed is None else speed * steps_of(task, examples)
        if jitter:
            seconds *= Random(derive_seed(self.seed, "jitter", name)).lognormvariate(0.0, jitter)  # noqa: S311 (no secret: reproducible)
        return ticks(seconds)

    def transfer_seconds(self, site: str, download_bytes: int, upload_bytes: int) -> float:
        """Return the time in which a site fetches and sends this much."""
        line = self.conditions.line
        line = line.get(site) if isinstance(line, dict) else line
        if line is None:
            return 0.0
        down, up = (line.down, line.up) if isinstance(line, Line) else (line, line)
        return ticks(download_bytes / down + upload_bytes / up)

    def is_there(self, site: str, number: int, at: float) -> bool:
        """Return True if a site takes tasks of a round at an instant."""
        absence = self.conditions.absence
        if isinstance(absence, dict):
            absent = any(first <= at - BEGIN < last for first, last in absence.get(site, ()))
        else:
            absent = absence > 0 and self._dice("absence", number, site).random() < absence
        return not absent and self.conditions.is_there(site, number)

    def next_change(self, at: float) -> float:
        """Return the next instant at which a site goes or comes back; infinite if there is none."""
        absence = self.conditions.absence
        windows = absence.values() if isinstance(absence, dict) else ()
        edges = (BEGIN + edge for of_site in windows for window in of_site for edge in window)
        return min((edge for edge in edges if edge > at), default=inf)

    def _dice(self, *about: object) -> Random:
        return Random(derive_seed(self.seed, *about))  # noqa: S311 (no secret: reproducible)

    def _seconds_per_step(self, site: str) -> float | None:
        speed = self.conditions.speed
        if isinstance(speed, Spread):
            first, last = speed.geometric
            share = self.sites.index(site) / max(len(self.sites) - 1, 1)
            return float(first * (last / first) ** share)
        return speed.get(site) if isinstance(speed, dict) else speed


def steps_of(task: Task, examples: int) -> int:
    """Return the number of optimizer steps that a task asks of a worker with this many examples."""
    return local_steps(task.local_training, examples)
