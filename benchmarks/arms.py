"""What `benchmarks.results` compares: a task, and the arms that train on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tessera.worker.data.dataset import Dataset


@dataclass(frozen=True)
class Arm:
    """One way to train on a task."""

    name: str
    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    spec: Mapping[str, Any] = field(default_factory=dict)
    """What differs in the run's spec; `training` is merged into the task's."""
    model: str = "plain"
    central: bool = False
    """Whether one site holds all data."""


@dataclass(frozen=True)
class Task:
    """Data, models and arms. The first arm is what the others are compared with."""

    name: str
    arms: tuple[Arm, ...]
    rounds: int
    training: Mapping[str, Any]
    sites: Callable[[int], Mapping[str, Dataset]]
    """Every site's data with what it holds out, by the seed."""
    test: Callable[[], Dataset]
    models: Callable[[str, int, Path], Sequence[str]]
    """The options of `tessera model init` that make a model, by its name and the seed; a folder for what it needs."""
