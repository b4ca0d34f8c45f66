"""Comparison of a site's audit chain with the coordinator's record of its tasks."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from tessera.shared.api.tasks import TaskView
from tessera.shared.schema import TaskKind
from tessera.worker.state.audit import Action, SiteAuditEntry

Kind = Literal[
    "counted-never-sent", "sent-not-counted", "other-digest", "other-bytes", "other-examples", "chain-rolled-back",
    "ledger-rolled-back",
]  # fmt: skip

Attempt = tuple[Action, str | None, int | None]
"""The action that records a result, and the task and the token that it was for."""

SENT: dict[TaskKind, Action] = {
    "train": "update.leave", "evaluate": "figures.leave", "rehearse": "figures.leave",
    "describe": "figures.leave", "attack": "figures.leave", "agree": "sums.agree",
    "open": "sums.open", "abandon": "sums.abandon",
}  # fmt: skip
"""The action that records the result of a task, by the kind of task."""

EXAMPLES: tuple[Kind, str, str] = ("other-examples", "examples", "examples")
COMPARED: dict[Action, tuple[tuple[Kind, str, str], ...]] = {
    "update.leave": (EXAMPLES, ("other-digest", "update", "update"), ("other-bytes", "bytes", "upload_bytes")),
    "figures.leave": (EXAMPLES,),
    "sums.agree": (),
    "sums.abandon": (),
    "sums.open": (("other-digest", "masks", "update"), ("other-bytes", "bytes", "upload_bytes")),
}
"""The parts of a result that both sides record: the kind of a difference, the name here, and the name there."""


@dataclass(frozen=True)
class Discrepancy:
    """One disagreement between the two records."""

    kind: Kind
    task: str
    run: str
    round: int
    detail: str


@dataclass(frozen=True)
class AuditComparison:
    """Result of comparing the two records."""

    agreed: int
    """Number of results recorded identically by both sides."""
    earlier: int
    """Number of tasks that predate the chain or belong to workers that do not write to it."""
    differences: tuple[Discrepancy, ...]


def compare(
    entries: Sequence[SiteAuditEntry], tasks: Iterable[TaskView], worker: str | None = None
) -> AuditComparison:
    """Compare the chain's entries with the coordinator's view of all the site's tasks.

    `worker` writes to the chain, even if the chain is empty.
    """
    workers = {entry.worker for entry in entries} | {worker}
    digests = {entry.digest for entry in entries}
    left = {(entry.action, entry.task, entry.token): entry for entry in entries if entry.action in COMPARED}
    known = {entry.task for entry in entries}
    shown: dict[Attempt, TaskView] = {}
    earlier = agreed = 0
    found: list[Discrepancy] = []
    for task in tasks:
        attempt = (SENT[task.kind], task.id, task.token)
        shown[attempt] = task
        if task.audit_head and task.audit_head not in digests and task.worker.partition("/")[2] in workers:
            detail = (
                f"{task.worker} sent it with the digest {task.audit_head} of this chain, which has no such entry: "
                "the chain was truncated, rewritten or restored from an older copy"
            )
            found.append(Discrepancy("chain-rolled-back", task.id, task.run, task.round, detail))
            continue
        if not task.is_accepted:
            continue
        sent = left.get(attempt)
        began_later = not entries or (task.created_at is not None and task.created_at < entries[0].at)
        if sent is None and task.id not in known and (began_later or task.worker.partition("/")[2] not in workers):
            earlier += 1
        elif sent is None:
            detail = f"the coordinator counts a result of {task.worker} that is not recorded here"
            found.append(Discrepancy("counted-never-sent", task.id, task.run, task.round, detail))
        elif other := list(_others(sent, task)):
            found += other
        else:
            agreed += 1
    found += _uncounted(entries, left, shown)
    return AuditComparison(agreed, earlier, tuple(found))


def _others(sent: SiteAuditEntry, task: TaskView) -> Iterator[Discrepancy]:
    """Yield the differences between both records of one result."""
    for kind, name, shown in COMPARED[sent.action]:
        here, there = sent.detail.get(name), getattr(task, shown)
        if here != there:
            detail = f"here it is {here}, at the coordinator {there}"
            yield Discrepancy(kind, task.id, task.run, task.round, detail)


def _uncounted(
    entries: Sequence[SiteAuditEntry],
    left: dict[Attempt, SiteAuditEntry],
    shown: dict[Attempt, TaskView],
) -> Iterator[Discrepancy]:
    """Yield results sent but not counted, unless the chain records why."""
    over = {
        (entry.task, entry.token) for entry in entries if entry.action in ("task.drop", "task.fail", "task.refuse")
    }
    for key, sent in left.items():
        task = shown.get(key)
        under_way = task is not None and task.state == "leased"
        if (task is not None and task.is_accepted) or key[1:] in over or under_way:
            continue
        state = f"says that its task is {task.state}" if task else "knows of no such task under this token"
        detail = f"it left here on {sent.at:%Y-%m-%d %H:%M:%S} UTC; the coordinator {state}"
        yield Discrepancy("sent-not-counted", sent.task or "", sent.run or "", sent.round or 0, detail)
