"""The result of a simulation."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

from tessera.shared.api.runs import Bounds, Measurement, Round, Run, RunSpec
from tessera.shared.api.tasks import TaskView
from tessera.shared.api.versions import Version, VersionRef
from tessera.shared.client.export import Progress, export_folder, in_place_of
from tessera.shared.client.round_outcomes import RoundOutcome, outcomes
from tessera.shared.methods.base import State
from tessera.shared.metrics.comparison import History
from tessera.shared.metrics.rows import MetricRow, rows_of, write_csv
from tessera.shared.metrics.site_spread import scores_by_version
from tessera.shared.model.spec import Model
from tessera.shared.rounds.export import Export
from tessera.shared.rounds.versions import States
from tessera.shared.tensors.lazy import Array, to_array
from tessera.worker.state.vault import Vault


@dataclass(frozen=True)
class Result:
    """A run so far. Its tensors are in `folder`."""

    id: str
    """The run's id, by which sites keep tensors."""
    spec: RunSpec
    bounds: Bounds | None
    """The run's bounds; None before its first round."""
    model: Model
    versions: tuple[Version, ...]
    """Every version, from the first, even if its tensors were removed. Its time is simulated."""
    rounds: tuple[Round, ...]
    """Every attempt at every round that has ended."""
    measurements: tuple[Measurement, ...]
    unmeasured: tuple[TaskView, ...]
    """The tasks that failed to measure a version, whose number is their `round`, with their problems."""
    over: bool
    """True if all rounds are finished, or the method planned no more."""
    states: States
    folder: Path

    @cached_property
    def simulated_seconds(self) -> dict[int, float]:
        """The simulated time from the beginning to each version, by its number."""
        begin = self.versions[0].created_at
        return {each.number: (each.created_at - begin).total_seconds() for each in self.versions}

    @property
    def run(self) -> Run:
        """The run as the coordinator would show it."""
        first, last = self.versions[0], self.versions[-1]
        return Run(
            id=f"{self.spec.name}-{self.spec.seed}",
            state="completed" if self.over else "paused",
            spec=self.spec,
            bounds=self.bounds,
            version=VersionRef(number=last.number, digest=last.digest),
            model_bytes=self.model.nbytes,
            revision=1,
            created_at=first.created_at,
            updated_at=last.created_at,
        )

    @property
    def outcomes(self) -> list[RoundOutcome]:
        """Every attempt at every round, with its outcome."""
        return outcomes(self.rounds, self.spec, self.measurements, self.versions)

    @property
    def history(self) -> History:
        """The run with its costs. Its times are simulated."""
        return History.of(self.run, self.rounds, self.measurements, "rounds")

    def scores(self) -> dict[int, dict[str, float]]:
        """Return the metrics of each version, by its number."""
        return scores_by_version(self.measurements)

    def state(self, number: int | None = None) -> State:
        """Return a version, the latest if no number is given. Raises NotFound for one that is not kept."""
        version = self.versions[-1 if number is None else number]
        return self.states.load(self.model, self.states.manifest(version.digest), version.number)

    def arrays(self, number: int | None = None) -> dict[str, Array]:
        """Return a version's values, by block. Raises NotFound for one that is not kept."""
        return {name: to_array(tensor) for name, tensor in self.state(number).model.items()}

    def kept(self, site: str) -> Mapping[str, Array]:
        """Return the tensors in a site's vault."""
        return Vault(self.folder / "sites" / site / "vault").load(self.id)

    def export(self, out: Path, number: int | None = None, like: Path | None = None) -> None:
        """Write a version (the latest if no number is given) as a model folder, as `tessera run export` does.

        Raises Invalid if `out` exists, and NotFound for a version that is not kept.
        """
        export_folder(_Versions(self), self.run, out, number, lambda _: None, like)

    def write_measurements(self, out: Path, reach: Sequence[float] = ()) -> None:
        """Write all measurements, one number a row, as `tessera run metrics --csv` does."""
        rows = [*rows_of(self.run, self.rounds, self.versions, self.measurements, reach, "rounds"), *self._times()]
        with in_place_of(out) as partial:
            with partial.open("w", encoding="utf-8", newline="") as file:
                write_csv(rows, file)
            partial.replace(out)

    def _times(self) -> Iterator[MetricRow]:
        """Yield the simulated time from the beginning to each version."""
        for number, seconds in self.simulated_seconds.items():
            name = "simulated_seconds"
            yield MetricRow(self.run.id, number, None, None, "version", None, None, None, name, seconds)


@dataclass(frozen=True)
class _Versions:
    """Implements `shared.client.export.Exports`."""

    result: Result

    def model(self, digest: str) -> Model:
        return self.result.states.model(digest)

    def read_blob(self, digest: str, max_bytes: int = 0) -> bytes:
        return self.result.states.read(digest)

    def export(
        self, run_id: str, file: BinaryIO, number: int | None = None, progress: Progress | None = None
    ) -> None:
        for piece in Export(self.result.state(number), self.result.model).pieces():
            file.write(piece)
            if progress:
                progress(len(piece))
