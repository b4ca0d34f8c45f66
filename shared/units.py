"""Numbers of bytes and times in words."""

from datetime import UTC, datetime
from typing import overload

from rich.filesize import decimal


@overload
def size(count: int) -> str: ...
@overload
def size(count: None) -> None: ...
@overload
def size(count: int | None) -> str | None: ...
def size(count: int | None) -> str | None:
    """Return a number of bytes with a decimal unit."""
    return None if count is None else decimal(count)


def duration(seconds: float) -> str:
    """Return an estimated time in a unit that suits its precision."""
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{round(seconds / length)} {unit}"
    return f"{max(1, round(seconds))} s"


def ago(instant: datetime, now: datetime | None = None) -> str:
    """Return the time since an instant, in its largest unit."""
    passed = max(0, int(((now or datetime.now(UTC)) - instant).total_seconds()))
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if passed >= length:
            return f"{passed // length} {unit} ago"
    return f"{passed} s ago"
