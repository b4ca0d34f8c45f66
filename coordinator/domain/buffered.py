"""Decisions on the open round of a run that buffers updates (`cohort.mode`), and on runs with a cap of updates."""

from collections.abc import Iterator

from tessera.coordinator.domain.round_moves import Abandon, Ask, Close
from tessera.coordinator.domain.snapshot import RoundSnapshot, RunSnapshot


def buffered(
    round_: RoundSnapshot, run: RunSnapshot, now: float, came: set[str], waiting: set[str], over: str
) -> Iterator[Abandon | Ask | Close]:
    """Yield the next step of an open round whose updates are too few for `target_updates`. One that is abandoned
    leaves its updates, and the tasks that go on, to the next attempt. `over` is the reason to close without a site in
    `waiting`."""
    lack, is_over = run.cohort.lack(came), now >= round_.deadline_at
    if run.eligible and run.state == "running":
        yield Ask(round_.number)
    if not lack and (is_over or not (waiting or run.eligible)):
        yield Close(round_.id, "the deadline came" if is_over else over)
    elif not run.eligible and (lack := run.cohort.lack(came | waiting)):
        yield Abandon(
            round_.id, f"updates came from {len(came)} of the sites, and {len(waiting)} more may send one; {lack}"
        )


def sites_are_done(run: RunSnapshot) -> str:
    """Return the reason to pause a run whose sites have trained as often as it allows, but for fewer than its
    quorum."""
    return (
        f"{run.done} sites have trained from {run.cohort.max_updates_per_site} versions, as many as "
        f"cohort.max_updates_per_site allows, and {run.eligible} others can take part, while the quorum is "
        f"{run.cohort.quorum}: resume the run when other sites are here, or cancel it, and its versions stay"
    )
