"""What a simulation came to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from shared.cli.rounds import Outcome, outcomes, scores_by_version
from shared.methods.contract import State
from shared.model import Model
from shared.states import States
from shared.tensors import Array, to_array
from shared.wire import Measurement, Round, RunSpec, Version
from worker.simulation.local import RUN
from worker.simulation.records import Committed
from worker.vault import Vault


@dataclass(frozen=True)
class Result:
    """A run as far as it has come. Its tensors lie in `folder`."""

    spec: RunSpec
    model: Model
    committed: tuple[Committed, ...]
    measurements: tuple[Measurement, ...]
    states: States
    folder: Path

    @cached_property
    def versions(self) -> tuple[Version, ...]:
        """Every version, from the first on, whether or not its tensors are still kept."""
        return tuple(entry.version for entry in self.committed)

    @cached_property
    def rounds(self) -> tuple[Round, ...]:
        """Every attempt at every round."""
        return tuple(attempt for entry in self.committed for attempt in entry.attempts)

    @property
    def outcomes(self) -> list[Outcome]:
        return outcomes(self.rounds, self.scores())

    def scores(self) -> dict[int, dict[str, float]]:
        """What each version was measured at, by its number."""
        return scores_by_version(self.measurements)

    def state(self, number: int | None = None) -> State:
        """A version, the latest if no number is given. Raises NotFound for one that is not kept."""
        version = self.versions[-1 if number is None else number]
        return self.states.load(self.model, self.states.manifest(version.digest), version.number)

    def arrays(self, number: int | None = None) -> dict[str, Array]:
        """A version's values, by block. Raises NotFound for one that is not kept."""
        return {name: to_array(tensor) for name, tensor in self.state(number).model.items()}

    def kept(self, site: str) -> Mapping[str, Array]:
        """What a site's vault holds."""
        return Vault(self.folder / "sites" / site / "vault").load(RUN)
