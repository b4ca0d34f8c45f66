"""The check that a report on a task is still valid, for every call after the claim (invariant I4)."""

from tessera.shared.problems import LeaseLost, Problem, RoundClosed, TaskCancelled


def refusal(
    state: str, round_state: str | None, shown_token: int, token: int, because: Problem | None = None
) -> Problem | None:
    """Return the refusal of a report with `shown_token`, or None. `round_state` is None without a round; `because` is
    the problem with which the task ended, if there is one."""
    if state == "cancelled" and isinstance(because, TaskCancelled):
        return because
    if state == "cancelled" and round_state in ("merging", "committed"):
        return RoundClosed("the round closed without this task's update")
    if state == "cancelled":
        return TaskCancelled("the task was cancelled, with its round or its run")
    if state != "leased" or shown_token != token:
        return LeaseLost(
            f"the task is {state} under token {token}; the request shows token {shown_token}"
            if shown_token != token
            else f"the task is {state}, not leased"
        )
    return None
