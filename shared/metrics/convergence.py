"""Rounds, time and bytes until a run's score reached a level, and the jitter of its last versions."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, starmap
from math import isfinite
from statistics import stdev
from typing import Any, Literal, NamedTuple, Self

from rich.filesize import decimal

from tessera.shared.metrics.site_spread import is_better_low
from tessera.shared.problems import Invalid

SHARES = (0.9, 0.95)
"""Of the best value: the levels if none is given."""
JITTER_VERSIONS = 5
"""The number of measured versions, the last ones, over which jitter is the standard deviation of a score."""

COSTS = ("rounds", "seconds", "megabytes down", "megabytes up", "megabytes both ways")
"""The figures of a score's cost, for people."""

Clock = Literal["wall", "rounds"]
CLOCKS: Mapping[Clock, str] = {"wall": "wall time since the run's start", "rounds": "simulated time in rounds"}
"""The times of a run, and of a simulation."""


class RoundCost(NamedTuple):
    """The cost of one attempt at a round; `version` is the number of the version that it made, if it made one."""

    version: int | None
    download_bytes: int
    upload_bytes: int
    seconds: float
    since_start: float
    """Seconds from the run's start to its end."""

    @property
    def bytes(self) -> int:
        return self.download_bytes + self.upload_bytes


@dataclass(frozen=True)
class ScoreCost:
    """The cost until the first measured version with a score, from the run's start and with abandoned attempts; None
    if no version has it."""

    score: float
    share: float | None
    """Of the best value, if the score is given so."""
    reached: bool
    rounds: int | None = None
    seconds: float | None = None
    download_bytes: int | None = None
    upload_bytes: int | None = None
    bytes: int | None = None
    """Both ways."""

    @property
    def text(self) -> str:
        return f"{self.score:.4g}" + (f" ({100 * self.share:g} % of the best)" if self.share else "")

    def figures(self) -> dict[str, float]:
        """Return each of COSTS; none if it was not reached."""
        megabytes = [(count or 0) / 1e6 for count in (self.download_bytes, self.upload_bytes, self.bytes)]
        return (
            dict(zip(COSTS, (self.rounds or 0, self.seconds or 0.0, *megabytes), strict=True)) if self.reached else {}
        )


@dataclass(frozen=True)
class Convergence:
    """The cost of some scores in a run, and the jitter of its last versions."""

    metric: str
    title: str
    """The name of the score's values."""
    best: float
    last: int
    """The last measured version."""
    clock: Clock
    reached: tuple[ScoreCost, ...]
    jitter: float | None
    """Standard deviation of the score; None of a single version."""
    jitter_versions: tuple[int, ...]

    def facts(self) -> Iterator[tuple[str, str]]:
        """Yield each figure for people."""
        way = "or less" if is_better_low(self.metric) else "or more"
        for one in self.reached:
            yield f"{self.title} {one.text} {way}", self._cost(one)
        few = "not known: fewer than two versions were measured"
        first, last = self.jitter_versions[0], self.jitter_versions[-1]
        over = f"over the last {len(self.jitter_versions)} measured versions ({first} to {last})"
        shown = few if self.jitter is None else f"{self.jitter:.4g}, the standard deviation {over}"
        yield f"jitter of {self.title}", shown

    def _cost(self, one: ScoreCost) -> str:
        if not one.reached:
            return f"never up to version {self.last}; the best is {self.best:.4g}"
        down, up, both = map(decimal, (one.download_bytes or 0, one.upload_bytes or 0, one.bytes or 0))
        spent = f"{one.seconds:.1f} s ({CLOCKS[self.clock]}), {down} down, {up} up, {both} together"
        return f"round {one.rounds}: {spent}" if one.rounds else "the first version, before any round"

    def rows(self) -> Iterator[tuple[int, str, float]]:
        """Yield each figure as a number, with a version and a name."""
        for one in self.reached:
            name = f"{self.metric}.to_" + (f"{100 * one.share:g}_percent" if one.share else f"{one.score:g}")
            at = self.last if one.rounds is None else one.rounds
            for figure, value in asdict(one).items():
                if figure != "share" and value is not None:
                    yield at, f"{name}.{figure}", float(value)
        if self.jitter is not None:
            yield self.last, f"{self.metric}.jitter", self.jitter
            yield self.last, f"{self.metric}.jitter_versions", float(len(self.jitter_versions))


@dataclass(frozen=True)
class Point:
    """A measured version, with the totals from the run's start to it."""

    version: int
    score: float
    seconds: float
    download_bytes: int
    upload_bytes: int


@dataclass(frozen=True)
class Curve:
    """A score by version, with its cost."""

    metric: str
    title: str
    points: tuple[Point, ...]
    """One or more, in order."""
    clock: Clock = "wall"

    @classmethod
    def of(
        cls, metric: str, title: str, values: Mapping[int, float], costs: Sequence[RoundCost], clock: Clock = "wall"
    ) -> Self | None:
        """Return the curve of a score's values by version; None without any that has a cost."""
        down = accumulate(cost.download_bytes for cost in costs)
        up = accumulate(cost.upload_bytes for cost in costs)
        made = zip(costs, down, up, strict=True)
        spent = {c.version: (c.since_start, downs, ups) for c, downs, ups in made if c.version is not None}
        spent[0] = (0.0, 0, 0)
        # A live run may have measured a version whose round was not read yet.
        points = tuple(Point(n, value, *spent[n]) for n, value in sorted(values.items()) if n in spent)
        return cls(metric, title, points, clock) if points else None

    @classmethod
    def read(cls, found: Mapping[str, Any] | None) -> Self | None:
        """Return a curve from `asdict`'s form of it, or None from None."""
        points = tuple(Point(**point) for point in found["points"]) if found else ()
        return cls(**{**found, "points": points}) if found else None

    @property
    def best(self) -> float:
        return (min if is_better_low(self.metric) else max)(point.score for point in self.points)

    def convergence(self, scores: Iterable[float] = (), best: float | None = None) -> Convergence:
        """Return the cost of these scores, by default of shares of the best value, and the jitter.

        `best` is that of all runs that are compared. Raises Invalid for a score that is no number.
        """
        last, levels = (
            self.points[-JITTER_VERSIONS:],
            levels_of(self.metric, self.best if best is None else best, scores),
        )
        return Convergence(
            self.metric,
            self.title,
            self.best,
            self.points[-1].version,
            self.clock,
            tuple(starmap(self._reached, levels)),
            stdev(point.score for point in last) if len(last) > 1 else None,
            tuple(point.version for point in last),
        )

    def _reached(self, score: float, share: float | None) -> ScoreCost:
        low = is_better_low(self.metric)
        for at in self.points:
            if at.score <= score if low else at.score >= score:
                both = at.download_bytes + at.upload_bytes
                return ScoreCost(score, share, True, at.version, at.seconds, at.download_bytes, at.upload_bytes, both)
        return ScoreCost(score, share, reached=False)


def levels_of(metric: str, best: float, scores: Iterable[float] = ()) -> list[tuple[float, float | None]]:
    """Return some scores or, without any, shares of a best value, each with its share or None.

    Of a loss it is the value divided by the share. Raises Invalid for a score that is no number.
    """
    scores = list(scores)
    if unusable := [score for score in scores if not isfinite(score)]:
        raise Invalid(f"{unusable[0]} is no score to reach", remedy="Give a finite number, such as 0.9.")
    low = is_better_low(metric)
    # Each is easier to reach than the best, which may be negative.
    shares = [(best / share if low == (best > 0) else best * share, share) for share in SHARES]
    return [(score, None) for score in scores] or [*shares]
