"""Per-run history of a site, used to refuse runs whose terms change midway.

A run says once for all what it trains and how, a version's number names one version, and rounds go forward. A
coordinator that breaks one of these wants the same examples trained on under another guise, to learn from the
difference; whoever trains twice for an honest reason is asked for the same round of the same version. What a task has
shown is written down before its result leaves, and not before: what is refused leaves no trace.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import JsonValue, NonNegativeInt, PositiveInt, ValidationError, field_validator

from tessera.shared import renamed_keys
from tessera.shared.api.tasks import Task
from tessera.shared.schema import Digest, Frozen, Label, TaskKind, canonical
from tessera.worker.governance.policy import Policy, PolicyViolation
from tessera.worker.state.atomic_files import alone, written_whole

RUNS_FOLDER = "runs"
"""What the folder is called beside a worker's other state."""

MEASURED_FOLDER = "measured"
"""Within it, a file for each data set."""

VERSIONS_KEPT = 64

TERMS = (
    "run_name", "model", "method", "dataset", "rounds", "training", "privacy", "normalization", "codec",
    "upload_budget", "upload_seconds", "orchestrator",
)  # fmt: skip
"""What a task says that is the same in all tasks of a run."""


class Handed(Frozen):
    """The last round that a worker handed in an update of, and how often it did."""

    round: int
    version: int
    seed: int
    times: PositiveInt


class Record(Frozen):
    """What one run has shown of itself to the workers that share the folder."""

    terms: dict[str, JsonValue] = {}
    versions: dict[int, Digest] = {}
    """The newest, by number."""
    handed: dict[Label, Handed] = {}
    """By worker."""
    upload_bytes: NonNegativeInt = 0
    """What all updates together had, whatever became of them."""

    @field_validator("terms", mode="before")
    @classmethod
    def _of_a_version_before(cls, given: Any) -> Any:
        return renamed_keys.read_old(given, renamed_keys.TERMS)


class EvaluationCount(Frozen):
    """How many versions were measured on a data set, for all runs."""

    times: NonNegativeInt = 0


@dataclass(frozen=True)
class RunSnapshot:
    """What one task says of its run: the run's terms, and how far it has come."""

    run: str
    kind: TaskKind
    dataset: str
    held_out: bool
    terms: Mapping[str, JsonValue]
    round: int
    version: int
    digest: Digest
    """The version's."""
    seed: int

    @classmethod
    def of(cls, task: Task) -> RunSnapshot:
        said = task.model_dump(mode="json", include=set(TERMS))
        # What a central evaluation measures on is another data set than the run's.
        central = task.kind == "evaluate" and not task.held_out
        terms = {name: said[name] for name in TERMS if not (central and name == "dataset")}
        number, digest = task.version.number, task.version.digest
        return cls(task.run, task.kind, task.dataset, task.held_out, terms, task.round, number, digest, task.seed)


class RunHistory:
    """The records of all runs, a file each in `folder`, which several workers of a site may share."""

    def __init__(self, folder: Path, worker: str) -> None:
        self._folder = folder
        self._worker = worker

    def check(self, snapshot: RunSnapshot, policy: Policy) -> None:
        """Judge a task by what the run has shown before. Raises PolicyViolation."""
        # An update that still has a byte to come is begun.
        self._next(self._read(snapshot), snapshot, policy, 1 if snapshot.kind == "train" else 0)
        if snapshot.kind == "evaluate":
            policy.check_measurements(snapshot.dataset, self.measured(snapshot.dataset) + 1)

    def add(self, snapshot: RunSnapshot, policy: Policy, upload_bytes: int = 0) -> None:
        """Judge it once more, with the bytes of its update, and write down what it shows, which is on disk when this
        returns."""
        with alone(self._folder, wait=True):
            record = self._next(self._read(snapshot), snapshot, policy, upload_bytes)
            with written_whole(self._path(snapshot)) as file:
                file.write(canonical(record))

    def measured(self, dataset: str) -> int:
        """Return how many versions were measured on a data set, for all runs. Raises PolicyViolation."""
        path = self._measured_path(dataset)
        try:
            return EvaluationCount.model_validate_json(path.read_bytes()).times if path.exists() else 0
        except ValidationError as fault:
            raise PolicyViolation("max_evaluations", f"{path} cannot be read as a count") from fault

    def measure(self, dataset: str, policy: Policy) -> None:
        """Count one more version measured on a data set, which is on disk when this returns. Raises PolicyViolation
        if that is one too many.

        Call it before the data are read: that a measurement fails tells of them too.
        """
        with alone(self._folder, wait=True):
            times = self.measured(dataset) + 1
            policy.check_measurements(dataset, times)
            with written_whole(self._measured_path(dataset)) as file:
                file.write(canonical(EvaluationCount(times=times)))

    def _measured_path(self, dataset: str) -> Path:
        # A data set's name is a label, which cannot be a path.
        return self._folder / MEASURED_FOLDER / f"{dataset}.json"

    def _path(self, snapshot: RunSnapshot) -> Path:
        # A run's identifier cannot be a path.
        return self._folder / f"{snapshot.run}.json"

    def _read(self, snapshot: RunSnapshot) -> Record:
        path = self._path(snapshot)
        try:
            return Record.model_validate_json(path.read_bytes()) if path.exists() else Record()
        except ValidationError as fault:
            raise PolicyViolation("run", f"what is written down of the run {snapshot.run} cannot be read") from fault

    def _next(self, record: Record, snapshot: RunSnapshot, policy: Policy, upload_bytes: int) -> Record:
        """Return the record with what the task shows. Raises PolicyViolation if the two do not go together."""
        terms = snapshot.terms
        if changed := [name for name, now in terms.items() if name in record.terms and record.terms[name] != now]:
            raise PolicyViolation("run", f"the run {snapshot.run} was another before, in {', '.join(changed)}")
        versions = _with_version(record.versions, snapshot)
        handed = dict(record.handed)
        if snapshot.kind == "train":
            handed[self._worker] = _next_round(record.handed.get(self._worker), snapshot, policy.max_attempts)
        total_bytes = record.upload_bytes + upload_bytes
        policy.check_run_upload(total_bytes)
        known = {**record.terms, **terms}
        return Record(terms=known, versions=versions, handed=handed, upload_bytes=total_bytes)


def _with_version(versions: Mapping[int, Digest], snapshot: RunSnapshot) -> dict[int, Digest]:
    number, digest = snapshot.version, snapshot.digest
    if versions.get(number, digest) != digest:
        raise PolicyViolation("version", f"version {number} of the run {snapshot.run} was another one before")
    if len(versions) >= VERSIONS_KEPT and number < min(versions):
        raise PolicyViolation(
            "version", f"version {number} of the run {snapshot.run} is older than what is remembered"
        )
    known = {**versions, number: digest}
    return {number: known[number] for number in sorted(known)[-VERSIONS_KEPT:]}


def _next_round(last: Handed | None, snapshot: RunSnapshot, max_attempts: int) -> Handed:
    """Return what is written down of a task that trains. It may be the same round again, if what was handed in came
    to nothing."""
    asked = Handed(round=snapshot.round, version=snapshot.version, seed=snapshot.seed, times=1)
    if last is None or (asked.round > last.round and asked.version > last.version):
        return asked
    if (asked.round, asked.version, asked.seed) != (last.round, last.version, last.seed):
        raise PolicyViolation(
            "round",
            f"round {asked.round} on version {asked.version} does not come after round {last.round} on version "
            f"{last.version}, which was handed in",
        )
    if last.times >= max_attempts:
        raise PolicyViolation(
            "max_attempts", f"round {last.round} was handed in {last.times} times, which is allowed"
        )
    return asked.model_copy(update={"times": last.times + 1})
