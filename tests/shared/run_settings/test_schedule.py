"""Times of the week, in whole weeks of minutes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from tessera.shared.run_settings import is_open, minutes_until_open

MONDAY = datetime(2026, 11, 23, tzinfo=UTC)


def at(day: int, clock: str) -> datetime:
    """A time of the week that begins on a Monday."""
    hour, minute = map(int, clock.split(":"))
    return MONDAY + timedelta(days=day, hours=hour, minutes=minute)


@pytest.mark.parametrize(
    ("span", "open_at", "closed_at"),
    [
        (
            "Mon-Fri 19:00-07:00",
            [(0, "19:00"), (5, "06:59"), (2, "03:00")],
            [(0, "06:59"), (5, "07:00"), (6, "20:00")],
        ),
        ("Sat-Sun 00:00-24:00", [(5, "00:00"), (6, "23:59")], [(4, "23:59"), (0, "00:00")]),
        ("Sun 22:00-02:00", [(6, "22:00"), (0, "01:59")], [(6, "01:00"), (0, "02:00")]),
        ("Fri-Mon 08:00-09:00", [(4, "08:00"), (0, "08:59")], [(1, "08:30"), (3, "08:30")]),
        ("12:00-13:00", [(0, "12:00"), (6, "12:59")], [(3, "13:00")]),
    ],
)
def test_a_span_is_open_on_its_days_and_over_midnight(
    span: str, open_at: list[tuple[int, str]], closed_at: list[tuple[int, str]]
) -> None:
    assert all(is_open([span], at(*when)) for when in open_at)
    assert not any(is_open([span], at(*when)) for when in closed_at)


@pytest.mark.parametrize("day", range(7))
def test_when_it_opens_next_is_when_it_is_open_next(day: int) -> None:
    hours = ["Mon-Fri 19:00-07:00", "Sun 10:00-11:00"]
    for minutes in range(0, 24 * 60, 37):
        now = at(day, "00:00") + timedelta(minutes=minutes)
        if not is_open(hours, now):
            waits = minutes_until_open(hours, now)
            assert is_open(hours, now + timedelta(minutes=waits))
            assert not is_open(hours, now + timedelta(minutes=waits - 1))


@pytest.mark.parametrize(
    "text", ["Mon-Fri", "19-07", "Mon 19:00-19:00", "Mon 25:00-26:00", "mon 19:00-20:00", "Mon 10:00-24:30"]
)
def test_what_is_no_time_of_the_week_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"no time of the week|does not end"):
        is_open([text], MONDAY)
