"""What is compared: each side holds its processes for the length of a case, and does some rounds at each turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from benchmarks.measuring import median


@dataclass(frozen=True)
class Turn:
    """Some rounds in a row. All but the peaks and `first_seconds` are of the rounds after the first."""

    first_seconds: float
    seconds: tuple[float, ...]
    server_processor: float
    """CPU seconds per round."""
    client_processor: float
    """CPU seconds per round, of all clients together."""
    server_peak: int
    client_peak: int
    """The largest client's."""
    received: float | None = None
    """Bytes per round that the server received, of payload; None where it is not counted."""
    sent: float | None = None
    client_faulted: float | None = None
    """Bytes of memory per round that all clients together touched for the first time."""
    server_proportional: int | None = None
    """The server's peak with pages that its processes share counted once (Pss)."""


class Side(Protocol):
    name: str
    may_fail: bool
    """Whether the comparison goes on without it."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, at: TracebackType | None
    ) -> None: ...
    def turn(self, rounds: int) -> Turn:
        """One round that may have to build or fetch what later ones have, then `rounds` more."""
        ...


@dataclass(frozen=True)
class Summary:
    """Turns taken together: medians, and the highest peaks."""

    first_seconds: float
    seconds: float
    fastest: float
    slowest: float
    server_processor: float
    client_processor: float
    server_peak: int
    client_peak: int
    received: float | None
    sent: float | None
    client_faulted: float | None
    server_proportional: int | None

    @classmethod
    def of(cls, turns: Sequence[Turn]) -> Summary:
        every = [seconds for turn in turns for seconds in turn.seconds]
        received = [turn.received for turn in turns if turn.received is not None]
        sent = [turn.sent for turn in turns if turn.sent is not None]
        faulted = [turn.client_faulted for turn in turns if turn.client_faulted is not None]
        return cls(
            first_seconds=turns[0].first_seconds,
            seconds=median(every),
            fastest=min(every),
            slowest=max(every),
            server_processor=median(turn.server_processor for turn in turns),
            client_processor=median(turn.client_processor for turn in turns),
            server_peak=max(turn.server_peak for turn in turns),
            client_peak=max(turn.client_peak for turn in turns),
            received=median(received) if received else None,
            sent=median(sent) if sent else None,
            client_faulted=median(faulted) if faulted else None,
            server_proportional=max(filter(None, (turn.server_proportional for turn in turns)), default=None),
        )


@dataclass(frozen=True)
class Comparison:
    """The figures of a case's sides by name, and the reason why another system has none."""

    found: Mapping[str, Summary]
    failures: Mapping[str, str]
