"""Rounds as people follow them: what one came to, and a run watched until it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from itertools import takewhile
from typing import Any

from tessera.shared.api.runs import Measurement, Round, Run
from tessera.shared.api.versions import Version
from tessera.shared.client.client import Client
from tessera.shared.metrics.site_spread import Spread, scores_by_version, spreads
from tessera.shared.problems import NotFound
from tessera.shared.schema import RoundState

OVER: tuple[RoundState, ...] = ("committed", "abandoned")


@dataclass(frozen=True)
class Outcome:
    """A round in figures, with those of the version that it made as far as it has been measured."""

    round: Round
    scores: Mapping[str, float] = field(default_factory=dict)
    spreads: Mapping[str, Spread] = field(default_factory=dict)
    """What sites measured on what they hold out, by name."""
    scalars: Mapping[str, float] = field(default_factory=dict)
    """What the method tells of the version."""
    warnings: tuple[str, ...] = ()
    """What the method warns of, and did not with the version before."""

    @property
    def accepted(self) -> int:
        return sum(task.is_accepted for task in self.round.tasks)

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
            "sites": {name: asdict(spread) for name, spread in self.spreads.items()},
            "scalars": dict(self.scalars),
            "warnings": list(self.warnings),
        }


def outcomes(
    rounds: Iterable[Round],
    scores: Mapping[int, Mapping[str, float]],
    spreads: Mapping[int, Mapping[str, Spread]] | None = None,
    versions: Iterable[Version] = (),
) -> list[Outcome]:
    """Return each round with what is known of its version. `versions` are those, and the ones before them."""
    by_number = {version.number: version for version in versions}
    return [_outcome(round_, scores, spreads or {}, by_number) for round_ in rounds]


def _outcome(
    round_: Round,
    scores: Mapping[int, Mapping[str, float]],
    spreads: Mapping[int, Mapping[str, Spread]],
    versions: Mapping[int, Version],
) -> Outcome:
    number = round_.version
    if number is None:
        return Outcome(round_)
    made, before = versions.get(number), versions.get(number - 1)
    old = before.warnings if before else ()
    return Outcome(
        round_,
        scores.get(number, {}),
        spreads.get(number, {}),
        made.scalars if made else {},
        tuple(warning for warning in made.warnings if warning not in old) if made else (),
    )


def at_work(round_: Round) -> str:
    """Return who in an open round has come how far, in a phrase."""
    names: dict[str, list[str]] = {}
    for task in round_.tasks:
        names.setdefault(task.state, []).append(task.worker)
    return "; ".join(f"{state}: {', '.join(workers)}" for state, workers in names.items())


@dataclass(frozen=True)
class RunProgress:
    """A run at one moment of following it: what ended since the last one, and what is open."""

    run: Run
    ended: tuple[Outcome, ...] = ()
    open: Round | None = None

    @property
    def over(self) -> bool:
        return self.run.state != "running"


def follow(
    client: Client, run_id: str, *, poll_seconds: float = 1.0, sleep: Callable[[float], None] = time.sleep
) -> Iterator[RunProgress]:
    """Look at a run every `poll_seconds` until it no longer runs. Every attempt at a round is told once, in order.

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
        made = [round_.number for round_ in untold.values() if round_.state == "committed"]
        found = list(client.measurements(run_id, min(made))) if made and run.spec.evaluation else []
        settled = list(takewhile(lambda round_: _settled(round_, run, found, last), untold.values()))  # noqa: B023
        told_of = [round_.number for round_ in settled if round_.state == "committed"]
        versions = client.versions(run_id, min(told_of) - 1) if told_of else ()
        ended = outcomes(settled, scores_by_version(found), spreads(found), versions)
        glimpse = RunProgress(run, tuple(ended), last if last and last.state not in OVER else None)
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
    """Return every attempt from `last` on, it included, as they are now."""
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


def _settled(round_: Round, run: Run, found: Iterable[Measurement], last: Round | None) -> bool:
    """Return whether all is known of a round that is ever likely to be."""
    if round_.state not in OVER:
        return False
    evaluation = run.spec.evaluation
    if run.state != "running" or round_.state == "abandoned" or not evaluation:
        return True
    latest = last.number if last and last.state == "committed" else (last.number - 1 if last else 0)
    if not evaluation.due(round_.number, run.spec.rounds) or latest > round_.number:
        return True
    # Which sites will measure a version nobody knows; those that trained it may.
    of_version = [one for one in found if one.version == round_.version]
    central = evaluation.dataset is None or not all(one.held_out for one in of_version)
    measured = {one.site for one in of_version if one.held_out}
    trained = {task.worker.partition("/")[0] for task in round_.tasks if task.is_accepted}
    return central and (not evaluation.sites or len(measured) >= len(trained))
