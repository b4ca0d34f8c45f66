"""When a worker may work: its hours, its minutes a day, and how fast it may send."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tessera.worker.governance.opening_hours import Opening
from tessera.worker.governance.policy import Policy, PolicyViolation
from tessera.worker.task.environment import Throttle

MONDAY_NOON = datetime(2026, 11, 23, 12, tzinfo=UTC)


class Time:
    """A day and a clock that move only together, and only when told to."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> datetime:
        return MONDAY_NOON + timedelta(seconds=self.seconds)

    def clock(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


def opening(path: Path, time: Time, **policy: object) -> Opening:
    return Opening(Policy.model_validate(policy), path, time.now, time.clock)


def test_outside_of_its_hours_it_says_for_how_long(tmp_path: Path) -> None:
    time = Time()
    door = opening(tmp_path, time, hours=["Mon-Fri 19:00-07:00"])
    assert door.closed() == "outside of its hours (Mon-Fri 19:00-07:00) for 7 h 0 min"
    time.sleep(7 * 3600)
    assert door.closed() is None


def test_the_minutes_of_a_day_are_kept_over_a_restart_and_given_anew_the_next_day(tmp_path: Path) -> None:
    time = Time()
    door = opening(tmp_path, time, max_minutes_per_day=10)
    door.begin()
    time.sleep(9 * 60)
    door.check()
    again = opening(tmp_path, time, max_minutes_per_day=10)
    assert (again.used_seconds(), again.closed()) == (540.0, None)
    again.begin()
    time.sleep(61)
    with pytest.raises(PolicyViolation, match="the 10 minutes of this day are used up") as violation:
        again.check()
    assert violation.value.rule == "max_minutes_per_day"
    assert again.closed() == "the 10 minutes of this day are used up"
    time.sleep(12 * 3600)
    assert again.closed() is None


def test_minutes_that_cannot_be_written_end_no_task_and_are_counted(tmp_path: Path) -> None:
    time, folder = Time(), tmp_path / "state"
    door = opening(folder, time, max_minutes_per_day=10)
    # As on a full disk, no file can be made there.
    folder.touch()
    door.begin()
    time.sleep(9 * 60)
    with capture_logs() as logged:
        door.check()
        door.end()
    assert {entry["event"] for entry in logged} == {"usage-not-written"}
    door.begin()
    time.sleep(59)
    door.check()
    folder.unlink()
    door.end()
    assert opening(folder, time, max_minutes_per_day=10).used_seconds() == 599.0
    time.sleep(5)
    with pytest.raises(PolicyViolation, match="the 10 minutes of this day are used up"):
        door.check()


def test_what_is_not_work_is_not_counted(tmp_path: Path) -> None:
    time = Time()
    door = opening(tmp_path, time, max_minutes_per_day=10)
    time.sleep(3600)
    door.begin()
    time.sleep(30)
    door.end()
    assert door.used_seconds() == 30.0


def test_a_throttle_keeps_to_its_rate_and_can_be_stopped_while_it_waits() -> None:
    time, checked = Time(), []
    throttle = Throttle(1000.0, lambda: checked.append(time.seconds), time.clock, time.sleep)
    throttle.sent(2000)
    throttle.sent(500)
    # 2,500 bytes at 1,000 a second.
    assert time.seconds == 2.5
    assert checked == [0.5, 1.0, 1.5, 2.0, 2.5]
    time.sleep(10)
    # Who was slower by itself is not held up.
    throttle.sent(1000)
    assert time.seconds == 12.5
