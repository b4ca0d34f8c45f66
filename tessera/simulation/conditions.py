"""The conditions of a simulated federation that are not in a run's spec."""

from collections.abc import Collection, Iterable
from pathlib import Path
from random import Random
from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from tessera.shared.near_names import did_you_mean
from tessera.shared.schema import BytesOrRate, Label, Value
from tessera.shared.tensors.hashing import derive_seed
from tessera.worker.governance.policy import Policy
from tessera.worker.settings import DeviceName


class Spread(Value):
    """Speeds of all sites, from those of the first site by name to the last one's."""

    geometric: tuple[PositiveFloat, PositiveFloat]


class Line(Value):
    """A site's line, in bytes per second."""

    up: BytesOrRate
    down: BytesOrRate


class Conditions(Value):
    """The first eight settings affect the results; the others affect only the use of the machine.

    `dropout` is the probability that a worker never answers a task.
    """

    dropout: float = Field(default=0.0, ge=0, lt=1)
    away: dict[Label, tuple[PositiveInt, ...]] = Field(
        default={}, description="rounds that each site misses, by site"
    )
    policy: Policy = Field(default=Policy(), description="policy of every site")
    speed: PositiveFloat | Spread | dict[Label, PositiveFloat] | None = Field(
        default=None,
        description="simulated seconds per optimizer step: a number, numbers by site, or `{ geometric = [1, 10] }` "
        "from the first site by name to the last; where it is unset a training takes 1 s",
    )
    line: BytesOrRate | Line | dict[Label, Line] | None = Field(
        default=None,
        description="bytes per second: a number, `up` and `down`, or these by site; without, transfers take no time",
    )
    absence: Annotated[float, Field(ge=0, lt=1)] | dict[Label, tuple[tuple[NonNegativeFloat, PositiveFloat], ...]] = (
        Field(
            default=0.0,
            description="the probability that a site misses a round; or by site the windows in which it takes no "
            "task, in simulated seconds since the beginning",
        )
    )
    jitter: NonNegativeFloat = Field(
        default=0.0, le=3, description="sigma of a lognormal factor of the time of each training, drawn from the seed"
    )
    mappings: tuple[Path, ...] = Field(default=(), description="mapping files for unsupported attention layouts")
    device: DeviceName = "cpu"
    threads: PositiveInt | None = Field(default=None, description="threads per operation; unchanged if unset")
    processes: PositiveInt = Field(default=1, description="processes in which sites train at the same time")
    loaded: PositiveInt = Field(default=4, description="sites' data sets held in memory at once")
    keep_versions: PositiveInt | Literal["all"] = Field(default=1, description="the latest versions to keep on disk")

    @model_validator(mode="after")
    def _processes_are_alike(self) -> Self:
        if self.processes > 1 and (self.threads != 1 or self.device != "cpu"):
            raise ValueError(
                f"processes={self.processes} needs threads = 1 and device = 'cpu', so that the results are those of "
                f"one process; threads is {self.threads or 'unset'} and device is {self.device}"
            )
        return self

    @property
    def named_sites(self) -> dict[str, Iterable[str]]:
        """The sites that each setting names."""
        by_site = {name: getattr(self, name) for name in ("away", "speed", "line", "absence")}
        return {name: found for name, found in by_site.items() if isinstance(found, dict)}

    def is_there(self, site: str, number: int) -> bool:
        """Return True if a site is available in a round."""
        return number not in self.away.get(site, ())

    def falls_silent(self, seed: int, number: int, attempt: int, worker: str) -> bool:
        """Return True if a worker never answers in this attempt at a round."""
        rng = Random(derive_seed(seed, "dropout", number, attempt, worker))  # noqa: S311 (no secret: reproducible)
        return rng.random() < self.dropout


def unknown_sites(setting: str, named: Iterable[str], sites: Collection[str]) -> list[str]:
    """Return a message for each site that a setting names and that is not among the sites."""
    return [f"{setting}: there is no site {name!r}{did_you_mean(name, sites)}" for name in named if name not in sites]
