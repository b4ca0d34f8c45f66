"""Rounds as people follow them: what one came to, and a run watched until it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from itertools import takewhile
from typing import Any

from shared.client import Client
from shared.problems import NotFound
from shared.wire import Measurement, Round, RoundState, Run

OVER: tuple[RoundState, ...] = ("committed", "abandoned")


@dataclass(frozen=True)
class Outcome:
    """A round in figures. `scores` are those of the version that it made, as far as it has been measured."""

    round: Round
    scores: Mapping[str, float] = field(default_factory=dict)

    @property
    def accepted(self) -> int:
        return sum(task.state == "accepted" for task in self.round.tasks)

    @property
    def asked(self) -> int:
        return len(self.round.tasks)

    @property
    def upload_bytes(self) -> int:
        return sum(task.upload_bytes for task in self.round.tasks)

    @property
    def download_bytes(self) -> int:
        return sum(task.download_bytes for task in self.round.tasks)

    def seconds(self, now: datetime | None = None) -> float | None:
        """From opening to close, or to `now` while it is open."""
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
        }


def scores_by_version(measurements: Iterable[Measurement]) -> dict[int, dict[str, float]]:
    """What was measured of each version: the example-weighted mean over the workers that measured it."""
    by_version: dict[int, list[Measurement]] = {}
    for measurement in measurements:
        by_version.setdefault(measurement.version, []).append(measurement)
    return {version: _mean(group) for version, group in by_version.items()}


def _mean(group: list[Measurement]) -> dict[str, float]:
    shared_names = set.intersection(*(set(measurement.numbers) for measurement in group))
    examples = sum(measurement.examples for measurement in group)
    return {
        name: sum(measurement.numbers[name] * measurement.examples for measurement in group) / examples
        for name in sorted(shared_names)
        if examples
    }


def outcomes(rounds: Iterable[Round], scores: Mapping[int, Mapping[str, float]]) -> list[Outcome]:
    return [Outcome(round_, scores.get(round_.version, {}) if round_.version else {}) for round_ in rounds]


def at_work(round_: Round) -> str:
    """Who in an open round has come how far, in a phrase."""
    names: dict[str, list[str]] = {}
    for task in round_.tasks:
        names.setdefault(task.state, []).append(task.worker)
    return "; ".join(f"{state}: {', '.join(workers)}" for state, workers in names.items())


@dataclass(frozen=True)
class Glimpse:
    """A run at one moment of following it: what ended since the last one, and what is open."""

    run: Run
    ended: tuple[Outcome, ...] = ()
    open: Round | None = None

    @property
    def over(self) -> bool:
        return self.run.state != "running"


def follow(
    client: Client, run_id: str, *, poll_seconds: float = 1.0, sleep: Callable[[float], None] = time.sleep
) -> Iterator[Glimpse]:
    """Looks at a run every `poll_seconds` until it no longer runs. Every attempt at a round is told once, in order.

    A committed round is told once its version has been measured, if it is to be, or once the round after it was
    committed too: evaluation goes on beside the next round.
    """
    told: set[Key] = set()
    untold: dict[Key, Round] = {}
    last: Round | None = None
    while True:
        # The run is read first: of one that is over, no round is missing from what is read after it.
        run = client.run(run_id)
        since = _since(client, run_id, last)
        last = since[-1] if since else None
        untold |= {_key(round_): round_ for round_ in since if _key(round_) not in told}
        waiting = run.spec.evaluation and any(round_.state == "committed" for round_ in untold.values())
        scores = scores_by_version(client.measurements(run_id)) if waiting else {}
        settled = list(takewhile(lambda round_: _settled(round_, run, scores, last), untold.values()))  # noqa: B023
        glimpse = Glimpse(run, tuple(outcomes(settled, scores)), last if last and last.state not in OVER else None)
        yield glimpse
        if glimpse.over:
            return
        for round_ in settled:
            told.add(_key(round_))
            del untold[_key(round_)]
        sleep(poll_seconds)


Key = tuple[int, int]


def _key(round_: Round) -> Key:
    return round_.number, round_.attempt


def _since(client: Client, run_id: str, last: Round | None) -> list[Round]:
    """Every attempt from `last` on, it included, as they are now."""
    if last:
        now = client.round(run_id, last.number)
        found = [now, *_after(client, run_id, now)]
        # The API gives the latest attempt at a round: those before it are only in the whole list.
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


def _settled(round_: Round, run: Run, scores: Mapping[int, object], last: Round | None) -> bool:
    """Whether all is known of a round that is ever likely to be."""
    if round_.state not in OVER:
        return False
    evaluation = run.spec.evaluation
    if run.state != "running" or round_.state == "abandoned" or not evaluation:
        return True
    due = round_.number % evaluation.every == 0 or round_.number == run.spec.rounds
    latest = last.number if last and last.state == "committed" else (last.number - 1 if last else 0)
    return not due or round_.version in scores or latest > round_.number
