"""Decisions on the open round of a run that buffers updates (`cohort.mode`)."""

from collections.abc import Iterator

from tessera.coordinator.domain.round_moves import Abandon, Ask, Close
from tessera.coordinator.domain.snapshot import RoundSnapshot, RunSnapshot


def buffered(
    round_: RoundSnapshot, run: RunSnapshot, now: float, came: set[str], waiting: set[str]
) -> Iterator[Abandon | Ask | Close]:
    """Yield the next step of an open round whose updates are too few for `target_updates`. One that is abandoned
    leaves its updates, and the tasks that go on, to the next attempt."""
    lack, is_over = run.cohort.lack(came), now >= round_.deadline_at
    if run.eligible and run.state == "running":
        yield Ask(round_.number)
    if not lack and (is_over or not (waiting or run.eligible)):
        yield Close(round_.id, "the deadline came" if is_over else "all tasks ended")
    elif not run.eligible and (lack := run.cohort.lack(came | waiting)):
        yield Abandon(
            round_.id, f"updates came from {len(came)} of the sites, and {len(waiting)} more may send one; {lack}"
        )
