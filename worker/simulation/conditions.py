"""Under what circumstances a federation is simulated: what a run's spec does not say."""

from pathlib import Path
from random import Random
from typing import Literal

from pydantic import Field, PositiveInt

from tessera.shared.hashing import derive_seed
from tessera.shared.schema import Frozen, Label
from tessera.worker.governance.policy import Policy
from tessera.worker.settings import DeviceName


class Conditions(Frozen):
    """The first four decide what comes out; the others only how much of the machine it takes.

    `dropout` is the probability with which a worker that was asked never answers.
    """

    dropout: float = Field(default=0.0, ge=0, lt=1)
    away: dict[Label, tuple[PositiveInt, ...]] = Field(default={}, description="by site, the rounds that it misses")
    policy: Policy = Field(default=Policy(), description="what every site allows")
    mappings: tuple[Path, ...] = Field(default=(), description="files that describe attention not known here")
    device: DeviceName = "cpu"
    threads: PositiveInt | None = Field(default=None, description="threads of one operation; as it is if unset")
    loaded: PositiveInt = Field(default=4, description="sites' data sets held in memory at once")
    keep_versions: PositiveInt | Literal["all"] = Field(default=1, description="the latest versions to keep on disk")

    def is_there(self, site: str, number: int) -> bool:
        """Return whether a site can be asked in a round."""
        return number not in self.away.get(site, ())

    def falls_silent(self, seed: int, number: int, attempt: int, worker: str) -> bool:
        """Return whether a worker that was asked in this attempt at a round never answers."""
        rng = Random(derive_seed(seed, "dropout", number, attempt, worker))  # noqa: S311 (no secret: reproducible)
        return rng.random() < self.dropout
