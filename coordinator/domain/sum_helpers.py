"""Decisions on the helpers of a round with secure sums, between its closing and its merge."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from tessera.coordinator.domain.leases import may_report
from tessera.coordinator.domain.snapshot import SumsSnapshot
from tessera.shared.api.secure_sums import HelperKind


@dataclass(frozen=True)
class AskHelpers:
    """Offer helpers of a closed round tasks of a kind: to sign the set of senders, or to open their sums."""

    round: str
    kind: HelperKind


@dataclass(frozen=True)
class Pause:
    """Pause a run until a person has dealt with the reason."""

    reason: str


def sum_actions(round_id: str, number: int, sums: SumsSnapshot) -> Iterator[AskHelpers | Pause]:
    """Yield the next step towards the sums of a closed round. It has no deadline here, since what a helper has signed
    cannot be signed otherwise; but helpers erase the keys that open it (`worker.state.site_keys.ERASE_SECONDS`)."""
    signed = sum(task.state == "accepted" for task in sums.agree)
    failed = sum(task.state == "failed" for task in sums.agree)
    if signed >= sums.signatures:
        if not any(task.state != "accepted" and may_report(task, inf) for task in sums.openings):
            yield AskHelpers(round_id, "open")
    elif len(sums.agree) < sums.helpers:
        yield AskHelpers(round_id, "agree")
    elif sums.helpers - failed < sums.signatures:
        yield Pause(f"{failed} helpers did not sign the senders of round {number}: see their tasks")
