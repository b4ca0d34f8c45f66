"""Outcomes of rounds, and following a run until it ends."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from itertools import takewhile
from typing import Any

from tessera.shared.api.runs import Measurement, Round, Run, RunSpec
from tessera.shared.api.versions import Version
from tessera.shared.client.client import Client
from tessera.shared.metrics.evaluation_bytes import evaluation_bytes
from tessera.shared.metrics.site_spread import Spread, scores_by_version, spreads
from tessera.shared.problems import NotFound
from tessera.shared.schema import RoundState

OVER: tuple[RoundState, ...] = ("committed", "abandoned")


@dataclass(frozen=True)
class RoundOutcome:
    """A round with its totals, and the metrics of its version as far as they have been measured."""

    round: Round
    scores: Mapping[str, float] = field(default_factory=dict)
    central: bool = False
    """True if the scores are of the central data set, and else of `spreads`."""
    spreads: Mapping[str, Spread] = field(default_factory=dict)
    """The sites' metrics on their held-out examples, by name."""
    scalars: Mapping[str, float] = field(default_factory=dict)
    """The method's metrics of the version."""
    warnings: tuple[str, ...] = ()
    """The method's warnings that the previous version did not have."""
    evaluation_bytes: int = 0
    """Fetched for evaluations that count in this round."""
    buffers: bool = False
    """Its version may take updates that earlier rounds asked for."""

    @property
    def accepted(self) -> int:
        return self.round.accepted

    @property
    def asked(self) -> int:
        return len(self.round.tasks)

    @property
    def upload_bytes(self) -> int:
        return sum(task.upload_bytes for task in self.round.tasks)

    @property
    def download_bytes(self) -> int:
        return self.evaluation_bytes + sum(task.download_bytes for task in self.round.tasks)

    def seconds(self, now: datetime | None = None) -> float | None:
        """Return the time from opening to close, or to `now` while the round is open."""
        end = self.round.closed_at or now
        return (end - self.round.opened_at).total_seconds() if end else None

    def as_json(self) -> dict[str, Any]:
        return {
            **self.round.model_dump(mode="json"),
            "accepted": self.accepted,
            "asked": self.asked,
            "download_bytes": self.download_bytes,
            "upload_bytes": self.upload_bytes,
            "seconds": self.seconds(),
            "scores": dict(self.scores),
            "sites": {name: asdict(spread) for name, spread in self.spreads.items()},
            "scalars": dict(self.scalars),
            "warnings": list(self.warnings),
        }


def outcomes(
    rounds: Iterable[Round], spec: RunSpec, measurements: Sequence[Measurement], versions: Iterable[Version] = ()
) -> list[RoundOutcome]:
    """Return the outcomes of a run's rounds. Measurements and versions are those of the rounds and their
    predecessors."""
    by_number = {version.number: version for version in versions}
    scores, at_sites = scores_by_version(measurements), spreads(measurements)
    central = {one.version for one in measurements if not one.held_out}
    evaluated = evaluation_bytes(measurements, spec.rounds)

    def outcome(round_: Round) -> RoundOutcome:
        number, fetched = round_.version, evaluated[round_.number, round_.attempt]
        if number is None:
            return RoundOutcome(round_, evaluation_bytes=fetched, buffers=spec.cohort.buffers)
        version, previous = by_number.get(number), by_number.get(number - 1)
        old = previous.warnings if previous else ()
        return RoundOutcome(
            round_,
            scores.get(number, {}),
            number in central,
            at_sites.get(number, {}),
            version.scalars if version else {},
            tuple(warning for warning in version.warnings if warning not in old) if version else (),
            fetched,
            spec.cohort.buffers,
        )

    return [outcome(round_) for round_ in rounds]


def at_work(round_: Round) -> str:
    """Return the workers of a round by state of their tasks, as a phrase."""
    names: dict[str, list[str]] = {}
    for task in round_.tasks:
        names.setdefault(task.state, []).append(task.worker)
    return "; ".join(f"{state}: {', '.join(workers)}" for state, workers in names.items())


@dataclass(frozen=True)
class RunProgress:
    """A run at one moment, with the rounds that ended since the last look and the open round."""

    run: Run
    ended: tuple[RoundOutcome, ...] = ()
    open: Round | None = None

    @property
    def over(self) -> bool:
        return self.run.state != "running"


def follow(
    client: Client, run_id: str, *, poll_seconds: float = 1.0, sleep: Callable[[float], None] = time.sleep
) -> Iterator[RunProgress]:
    """Read a run whenever it may have changed, at most once in `poll_seconds`, until it stops running.

    Every attempt at a round is reported once, in order. The coordinator's events show that something changed; without
    them the run is read every `poll_seconds`.
    A committed round is reported once its version has been evaluated, if it is to be, or once the next round is
    committed too: evaluation runs beside the next round.
    """
    reported: set[Key] = set()
    pending: dict[Key, Round] = {}
    last: Round | None = None
    for _ in client.changes(run_id):
        # The run is read before its rounds, so that no round of a finished run is missing.
        run = client.run(run_id)
        since = _since(client, run_id, last)
        last = since[-1] if since else None
        pending |= {_key(round_): round_ for round_ in since if _key(round_) not in reported}
        ended = [round_.number for round_ in pending.values() if round_.state in OVER]
        found = list(client.measurements(run_id, min(ended) - 1)) if ended and run.spec.evaluation else []
        settled = list(takewhile(lambda round_: _settled(round_, run, found, last), pending.values()))  # noqa: B023
        numbers = [round_.number for round_ in settled if round_.state == "committed"]
        versions = client.versions(run_id, min(numbers) - 1) if numbers else ()
        progress = RunProgress(
            run,
            tuple(outcomes(settled, run.spec, found, versions)),
            last if last and last.state not in OVER else None,
        )
        yield progress
        if progress.over:
            return
        for round_ in settled:
            reported.add(_key(round_))
            del pending[_key(round_)]
        sleep(poll_seconds)


Key = tuple[int, int]


def _key(round_: Round) -> Key:
    return round_.number, round_.attempt


def _since(client: Client, run_id: str, last: Round | None) -> list[Round]:
    """Return every attempt from `last` on, including it, in its present state."""
    if last:
        now = client.round(run_id, last.number)
        found = [now, *_after(client, run_id, now)]
        # This endpoint returns a round's latest attempt; only the list has the earlier ones.
        if now.attempt == last.attempt and all(round_.attempt == 1 for round_ in found[1:]):
            return found
    begin = _key(last) if last else (0, 0)
    return [round_ for round_ in client.rounds(run_id) if _key(round_) >= begin]


def _after(client: Client, run_id: str, round_: Round) -> Iterator[Round]:
    while round_.state == "committed":
        try:
            round_ = client.round(run_id, round_.number + 1)
        except NotFound:
            return
        yield round_


def _settled(round_: Round, run: Run, found: Iterable[Measurement], last: Round | None) -> bool:
    """Return True if no more metrics of a round are expected."""
    if round_.state not in OVER:
        return False
    evaluation = run.spec.evaluation
    if run.state != "running" or round_.state == "abandoned" or not evaluation:
        return True
    latest = last.number if last and last.state == "committed" else (last.number - 1 if last else 0)
    if not evaluation.due(round_.number, run.spec.rounds) or latest > round_.number:
        return True
    # The evaluating sites are not known in advance; those that trained the version may evaluate it.
    of_version = [one for one in found if one.version == round_.version]
    central = evaluation.dataset is None or not all(one.held_out for one in of_version)
    measured = {one.site for one in of_version if one.held_out}
    trained = {task.worker.partition("/")[0] for task in round_.tasks if task.is_accepted}
    return central and (not evaluation.sites or len(measured) >= len(trained))
