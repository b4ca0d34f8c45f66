"""Limits on the bytes that a site announces."""

from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import bindparam as given
from sqlalchemy import delete, insert, select, update
from sqlalchemy.orm import Session

from tessera.coordinator.db.tables import AnnouncedRow
from tessera.shared.problems import QuotaExceeded

UNFINISHED_UPLOADS = 1_000
"""Of a site."""

FINISHING_SECONDS = 30.0
"""Time after which a site with too many unfinished uploads may retry."""


@dataclass(frozen=True)
class Quota:
    """Limits on the blobs that a site announces, counted in the tables so that several coordinators agree."""

    bytes_per_day: int | None

    def spend(self, session: Session, now: float, site_id: str, unfinished: int, more_bytes: int) -> None:
        """Count the bytes that a new upload, or a new length of one, adds. Raises QuotaExceeded."""
        if unfinished >= UNFINISHED_UPLOADS:
            raise QuotaExceeded(
                f"{unfinished} uploads of this site are unfinished; finish them, or let them expire",
                retry_after_seconds=FINISHING_SECONDS,
            )
        if self.bytes_per_day is None:
            return
        rows = self._of_the_day(session, now, site_id)
        total = sum(rows.values())
        if total + more_bytes > self.bytes_per_day:
            oldest = min(rows, default=int(now // 3600))
            raise QuotaExceeded(
                f"this site has announced {total} bytes within a day; {more_bytes} more would exceed "
                f"{self.bytes_per_day} (setting site_bytes_per_day)",
                retry_after_seconds=(oldest + 24) * 3600 - now,
            )
        _add(session, now, site_id, rows, more_bytes)

    def note_bytes(self, session: Session, now: float, site_id: str, more: int) -> None:
        """Count bytes that a site stores in the tables against its limits on announced blobs."""
        if self.bytes_per_day is not None:
            _add(session, now, site_id, self._of_the_day(session, now, site_id), more)

    def _of_the_day(self, session: Session, now: float, site_id: str) -> dict[int, int]:
        """Return the bytes of the last day by hour, and delete older rows and those of a clock that was ahead."""
        present = int(now // 3600)
        day = range(present - 23, present + 1)
        rows = session.connection().execute(_ANNOUNCED, {"site": site_id}).all()
        if any(hour not in day for hour, _ in rows):
            outside = ~AnnouncedRow.hour.between(day[0], present)
            session.execute(delete(AnnouncedRow).where(AnnouncedRow.site_id == site_id, outside))
        return {hour: count for hour, count in rows if hour in day}


_ANNOUNCED = select(AnnouncedRow.hour, AnnouncedRow.bytes).where(AnnouncedRow.site_id == given("site"))
_ENTER_HOUR = insert(AnnouncedRow)
_ADD_BYTES = (
    update(AnnouncedRow)
    .where(AnnouncedRow.site_id == given("site"), AnnouncedRow.hour == given("present"))
    .values(bytes=AnnouncedRow.bytes + given("more"))
)


def _add(session: Session, now: float, site_id: str, rows: Mapping[int, int], more: int) -> None:
    """Add bytes to the present hour's row, which is one of the day's, or a new one."""
    hour = int(now // 3600)
    if hour in rows:
        session.connection().execute(_ADD_BYTES, {"site": site_id, "present": hour, "more": more})
    else:
        session.connection().execute(_ENTER_HOUR, {"site_id": site_id, "hour": hour, "bytes": more})
