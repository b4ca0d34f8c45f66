"""The time that a run's tasks usually take, after which an open round need not wait (`cohort.adaptive_deadline`)."""

from collections.abc import Sequence
from math import inf
from statistics import median

from tessera.coordinator.domain.leases import may_report
from tessera.coordinator.domain.snapshot import RoundSnapshot

DEVIATIONS = 3
LEAST_DEVIATION = 0.1
"""The least deviation that counts, as a share of the median: tasks that took almost the same time are no rule."""


def usual_seconds(took: Sequence[float]) -> float:
    """Return the median of these times and 3 median absolute deviations (MAD). Infinite times, of tasks that did not
    end, count as the longest; with half of them the result is infinite."""
    # A negative time is unknown: the clock was set back in it.
    took = [each if each >= 0 else inf for each in took]
    middle = median(took) if took else inf
    if middle == inf:
        return inf
    deviation = median(abs(each - middle) for each in took)
    return middle + DEVIATIONS * max(deviation, LEAST_DEVIATION * middle)


def sites_in_time(round_: RoundSnapshot, most_attempts: int, now: float) -> set[str]:
    """Return the sites with a task that may still be reported on and has not been out for longer than usual."""
    out = [task for task in round_.tasks if may_report(task, most_attempts)]
    ended = (task for task in round_.tasks if task.state == "accepted" and task.accepted_at is not None)
    took = [*round_.earlier, *((task.accepted_at or 0.0) - task.offered_at for task in ended), *(inf for _ in out)]
    usual = usual_seconds(took)
    return {task.site for task in out if now - task.offered_at < usual}
