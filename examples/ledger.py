"""Scores and bytes of a run's rounds, compared with exchanging the whole model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from tessera.shared.client.round_outcomes import RoundOutcome


@dataclass(frozen=True)
class Entry:
    """A committed round; bytes are those of all its workers, each way."""

    number: int
    stage: str
    accepted: int
    asked: int
    scores: Mapping[str, float]
    download_bytes: int
    upload_bytes: int
    model_bytes: int
    seconds: float

    @classmethod
    def of(cls, outcome: RoundOutcome, model_bytes: int) -> Entry:
        """Count only the workers with an accepted update: the bytes of others were not part of an exchange."""
        done = [task for task in outcome.round.tasks if task.is_accepted]
        return cls(
            number=outcome.round.number,
            stage=outcome.round.stage,
            accepted=outcome.accepted,
            asked=outcome.asked,
            scores=outcome.scores,
            download_bytes=sum(task.download_bytes for task in done),
            upload_bytes=sum(task.upload_bytes for task in done),
            model_bytes=model_bytes,
            seconds=outcome.seconds() or 0.0,
        )

    @property
    def moved_bytes(self) -> int:
        return self.download_bytes + self.upload_bytes

    @property
    def full_bytes(self) -> int:
        """Return the bytes of sending the whole model, uncompressed, to each worker and back."""
        return 2 * self.accepted * self.model_bytes


def stages(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    """Return the rounds of each stage, in order."""
    return {name: list(members) for name, members in groupby(entries, key=lambda entry: entry.stage)}


def percent_of_full(entries: Sequence[Entry]) -> float:
    """Return the bytes sent, in percent of full exchanges."""
    return 100 * sum(entry.moved_bytes for entry in entries) / max(1, sum(entry.full_bytes for entry in entries))
