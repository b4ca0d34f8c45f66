"""Times of the week, as people write them: `Mon-Fri 19:00-07:00`.

A span begins on each of its days, and one whose end is not after its beginning ends the day after. Without days it is
of every day.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime
from typing import Annotated

from pydantic import AfterValidator, Field

DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
DAY_MINUTES = 24 * 60
WEEK_MINUTES = 7 * DAY_MINUTES

_DAY = "|".join(DAYS)
_SPAN = re.compile(rf"(?:({_DAY})(?:-({_DAY}))? )?([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-4]):([0-5]\d)")


def _parsed(text: str) -> list[tuple[int, int]]:
    """Return when it begins, in minutes of the week, and how many minutes it lasts: once for each of its days."""
    found = _SPAN.fullmatch(text)
    if not found:
        raise ValueError(f"{text!r} is no time of the week such as 'Mon-Fri 19:00-07:00' or '00:00-06:30'")
    first, last, *clock = found.groups()
    from_hour, from_minute, to_hour, to_minute = map(int, clock)
    begin, end = 60 * from_hour + from_minute, 60 * to_hour + to_minute
    if begin == end or end > DAY_MINUTES:
        raise ValueError(f"{text!r} does not end, or ends at no time of day")
    at = DAYS.index(first) if first else 0
    days = 7 if first is None else 1 if last is None else (DAYS.index(last) - at) % 7 + 1
    lasts = (end - begin) % DAY_MINUTES or DAY_MINUTES
    return [(((at + day) % 7) * DAY_MINUTES + begin, lasts) for day in range(days)]


def _checked(text: str) -> str:
    _parsed(text)
    return text


Span = Annotated[
    str, Field(max_length=32, json_schema_extra={"pattern": f"^{_SPAN.pattern}$"}), AfterValidator(_checked)
]


def is_open(hours: Iterable[Span], local: datetime) -> bool:
    """Return whether the wall clock `local` is within one of the spans."""
    return any((_minute(local) - begin) % WEEK_MINUTES < lasts for span in hours for begin, lasts in _parsed(span))


def minutes_until_open(hours: Iterable[Span], local: datetime) -> int:
    """Return how many minutes of the wall clock it is until the next span begins; at least one."""
    begins = (begin for span in hours for begin, _ in _parsed(span))
    return min(((begin - _minute(local) - 1) % WEEK_MINUTES + 1 for begin in begins), default=WEEK_MINUTES)


def _minute(local: datetime) -> int:
    return local.weekday() * DAY_MINUTES + 60 * local.hour + local.minute
