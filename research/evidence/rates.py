"""The rule that chooses a learning rate, one for all studies and methods.

Some first rates are tried. While the best of all tried is the smallest or the largest, the next one outward is tried
too, up to a limit on each side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Ladder:
    """The learning rates that can be tried, ascending, and those that are tried first."""

    rungs: tuple[float, ...]
    first: tuple[float, ...]
    outward: int
    """Most further rates on each side."""

    def wanted(self, scores: Mapping[float, float]) -> tuple[float, ...]:
        """Return the rates that are still to be tried, by the scores so far; none if the choice is settled."""
        if missing := tuple(rate for rate in self.first if rate not in scores):
            return missing
        chosen, tried = best(scores), sorted(scores)
        place = self.rungs.index(chosen)
        low, high = (self.rungs.index(self.first[end]) for end in (0, -1))
        lowest, highest = max(0, low - self.outward), min(len(self.rungs) - 1, high + self.outward)
        # With one first rate the best is at both ends.
        further = [place - 1] if chosen == tried[0] else []
        further += [place + 1] if chosen == tried[-1] else []
        return tuple(self.rungs[each] for each in further if lowest <= each <= highest)


def best(scores: Mapping[float, float]) -> float:
    """Return the rate of the best score; of equals, the smallest."""
    return max(sorted(scores), key=lambda rate: scores[rate])
