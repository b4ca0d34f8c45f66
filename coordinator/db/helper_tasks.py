"""Tasks of helpers in rounds with secure sums. They belong to no round, but to the version before it: a helper may
train in the same round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from sqlalchemy import Row, select
from sqlalchemy import bindparam as given
from sqlalchemy.orm import Session

from tessera.coordinator.db import audit
from tessera.coordinator.db.tables import WORKER_NAME, RoundRow, RunRow, SiteRow, TaskRow, select_tasks
from tessera.coordinator.db.transitions import ACTOR, cancel_tasks, new_task
from tessera.coordinator.domain.snapshot import SumsSnapshot, TaskSnapshot
from tessera.shared.api.runs import RunSpec
from tessera.shared.api.secure_sums import HELPER_KINDS, HelperKind, SumTask
from tessera.shared.methods.base import Plan
from tessera.shared.schema import ACCEPTED, TaskState
from tessera.shared.secure_sums.committee import check_abandonment
from tessera.shared.secure_sums.errors import SumRefused
from tessera.shared.secure_sums.messages import Agreement, Envelope, Terms, seeds_of, signatures_of, tolerance_of

_OF_ROUND = (
    (TaskRow.run_id == given("run"))
    & TaskRow.kind.in_(HELPER_KINDS)
    & (TaskRow.version_number == given("version"))
    # A failure before a person resumed the run does not count against it.
    & ((TaskRow.state != "failed") | (TaskRow.created_at >= given("since")))
    & (TaskRow.state != "cancelled")
)
_HELPER_TASKS = select_tasks(TaskRow, SiteRow.name).where(_OF_ROUND).order_by(TaskRow.created_at, TaskRow.id)
_ENVELOPES = select_tasks(WORKER_NAME, TaskRow.statement).where(
    TaskRow.run_id == given("run"), TaskRow.merged_in == given("number")
)


@dataclass(frozen=True)
class RoundSums:
    """The secure sums of a round that is about to open."""

    terms: str
    """The blob of their terms."""
    values: str | None
    """The values of the model that the sites train from; None unless the sums are exact."""


def helper_tasks(session: Session, run: RunRow) -> Sequence[Row[TaskRow, str]]:
    """Return the helpers' tasks of the run's present round that count, each with its site."""
    about = {"run": run.id, "version": run.version_number, "since": run.resumed_at}
    return session.execute(_HELPER_TASKS, about).all()


def offer_helper(
    session: Session, now: float, run: RunRow, kind: HelperKind, worker_id: str, site: str, request: SumTask
) -> None:
    """Offer a task of the run's present round to a helper of its secure sums."""
    task = new_task(
        session, now, run, worker_id, Plan(stage=kind), kind=kind, seed=0, sums=request.model_dump(mode="json")
    )
    noted = {"version": run.version_number, "site": site, "seeds": list(request.seeds)}
    audit.record(session, now, ACTOR, f"task.{kind}", task.id, run_id=run.id, **noted)


def withdraw_helpers(session: Session, now: float, run_id: str, kinds: Sequence[HelperKind] = HELPER_KINDS) -> None:
    """Cancel the unfinished tasks of a run's helpers."""
    cancel_tasks(session, now, (TaskRow.run_id == run_id) & TaskRow.kind.in_(kinds), {})


def sums_snapshot(session: Session, run: RunRow, spec: RunSpec, here: Collection[str] | None) -> SumsSnapshot:
    """Return the progress of the helpers with the run's present round."""
    assert spec.secure_sums is not None  # noqa: S101 (for the types)
    helpers = len(spec.secure_sums.helpers)
    found: dict[str, list[TaskSnapshot]] = {kind: [] for kind in HELPER_KINDS}
    seeds: set[int] = set()
    for task, site in helper_tasks(session, run):
        found[task.kind].append(_snapshot(task, site, here))
        if task.kind == "open" and task.state == "accepted":
            seeds.update(SumTask.model_validate(task.sums).seeds)
    is_open = len(seeds) == len(seeds_of(helpers))
    return SumsSnapshot(helpers, signatures_of(helpers), tuple(found["agree"]), tuple(found["open"]), is_open=is_open)


def asked_to_abandon(session: Session, run: RunRow, here: Collection[str] | None) -> tuple[TaskSnapshot, ...]:
    """Return the unfinished tasks of helpers before the run's next round."""
    return tuple(
        _snapshot(task, site, here)
        for task, site in helper_tasks(session, run)
        if task.kind == "abandon" and task.state in ("offered", "leased", "expired")
    )


def _snapshot(task: TaskRow, site: str, here: Collection[str] | None) -> TaskSnapshot:
    present = here is None or task.worker_id in here
    return TaskSnapshot(task.id, site, task.state, task.token, task.attempts, task.lease_expires_at, present)


def envelopes(session: Session, run_id: str, number: int) -> dict[str, Envelope]:
    """Return the envelopes of the updates that were assigned to a version, by worker."""
    rows = session.execute(_ENVELOPES, {"run": run_id, "number": number})
    return {worker: Envelope.model_validate(statement) for worker, statement in rows}


def abandonments(tasks: Sequence[Row[TaskRow, str]], former: str) -> dict[str, TaskRow]:
    """Return the tasks to sign that nothing is opened under former terms, by site."""
    return {site: task for task, site in tasks if task.kind == "abandon" and (task.sums or {})["terms"] == former}


def valid_abandonments(tasks: Iterable[TaskRow], former: str, terms: Terms) -> tuple[Agreement, ...]:
    """Return the signatures that helpers of `terms` gave in these tasks, under the keys that they have now."""
    found = []
    for signed in filter(None, map(_agreement, tasks)):
        with suppress(SumRefused):
            check_abandonment(former, signed, terms.helpers)
            found.append(signed)
    return tuple(found)


def rounds_from(session: Session, values: str) -> Sequence[Row[RoundRow, RunRow]]:
    """Return the rounds of all runs that have exact sums from a model with these values, the oldest first."""
    query = select(RoundRow, RunRow).join_from(RoundRow, RunRow).where(RoundRow.sum_values == values)
    return session.execute(query.order_by(RoundRow.opened_at, RoundRow.id)).all()


def senders_in(session: Session, round_id: str) -> set[str]:
    """Return the sites whose updates a round accepted."""
    query = select_tasks(SiteRow.name)
    query = query.where(TaskRow.round_id == round_id, TaskRow.kind == "train", TaskRow.state.in_(ACCEPTED))
    return set(session.scalars(query))


def agreements(tasks: Sequence[Row[TaskRow, str]]) -> tuple[Agreement, ...]:
    """Return the signatures that helpers gave."""
    return tuple(
        Agreement.model_validate(task.statement)
        for task, _ in tasks
        if task.kind == "agree" and task.state == "accepted"
    )


# ---------------------------------------------------------------- views of each party


@dataclass(frozen=True)
class Sender:
    """A site that sent an update under masks."""

    site: str
    weight: int
    blocks: int
    upload_bytes: int
    is_in_set: bool
    """True if the round was closed with it; False before that, and for an update that came late."""


@dataclass(frozen=True)
class HelperPart:
    """A helper's part in a round."""

    site: str
    signing: TaskState | None
    """The state of its task to sign the set of senders; None if it was not asked."""
    opening: TaskState | None
    """The state of its task to sum up masks; None if it was not asked."""
    seeds: int
    """Of how many seeds of each sender it summed up the masks."""


@dataclass(frozen=True)
class SumRecord:
    """A round's secure sums: their parties, the signatures and the opened set."""

    quorum: int
    needed: int
    """The signatures without which nothing is opened."""
    senders: tuple[Sender, ...]
    helpers: tuple[HelperPart, ...]
    agreed: str | None
    """The digest of the set of senders that enough helpers signed."""
    terms: tuple[tuple[int, int], ...]
    """Numbers of sites, the largest first, each with the number of blocks that this number of sites sent."""
    is_open: bool

    @property
    def signed(self) -> int:
        return sum(helper.signing == "accepted" for helper in self.helpers)

    @property
    def tolerance(self) -> int:
        """The number of helpers that can open no single update, even together with the coordinator."""
        return tolerance_of(len(self.helpers))


def sum_record(session: Session, round_: RoundRow, spec: RunSpec) -> SumRecord | None:
    """Return the work of the parties of a round; None for a run without secure sums."""
    if spec.secure_sums is None:
        return None
    sums, helpers = spec.secure_sums, spec.secure_sums.helpers
    senders, in_set = [], []
    rows = session.scalars(
        select(TaskRow)
        .where(TaskRow.round_id == round_.id, TaskRow.kind == "train", TaskRow.state.in_(ACCEPTED))
        .where(TaskRow.statement.is_not(None))
    )
    for task in rows:
        envelope = Envelope.model_validate(task.statement)
        blocks, is_in_set = int(envelope.blocks or "0", 16).bit_count(), task.merged_in == round_.number
        senders.append(Sender(envelope.site, envelope.weight, blocks, task.upload_bytes, is_in_set))
        in_set += [envelope.blocks] if is_in_set else []
    tasks: dict[str, dict[str, list[TaskRow]]] = {site: {kind: [] for kind in HELPER_KINDS} for site in helpers}
    for task, site in _asked_in(session, round_):
        if site in tasks:
            tasks[site][task.kind].append(task)
    parts = tuple(_part(site, tasks[site]["agree"], tasks[site]["open"]) for site in helpers)
    signed = Counter(one.senders for site in helpers for one in map(_agreement, tasks[site]["agree"]) if one)
    needed = signatures_of(len(helpers))
    agreed = next((digest for digest, count in signed.items() if count >= needed), None)
    opened = {seed for site in helpers for task in tasks[site]["open"] for seed in _seeds(task)}
    return SumRecord(
        sums.quorum,
        needed,
        tuple(sorted(senders, key=lambda sender: sender.site)),
        parts,
        agreed,
        _terms_by_count(in_set),
        is_open=len(opened) == len(seeds_of(len(helpers))),
    )


def _asked_in(session: Session, round_: RoundRow) -> Sequence[Row[TaskRow, str]]:
    """Return the tasks of helpers that belong to this attempt at a round, each with its site."""
    query = (
        select_tasks(TaskRow, SiteRow.name)
        .where(TaskRow.run_id == round_.run_id, TaskRow.kind.in_(("agree", "open")), TaskRow.state != "cancelled")
        .where(TaskRow.version_number == round_.number - 1, TaskRow.created_at >= round_.opened_at)
        .order_by(TaskRow.created_at, TaskRow.id)
    )
    if round_.closed_at is not None:
        query = query.where(TaskRow.created_at <= round_.closed_at)
    return session.execute(query).all()


def _part(site: str, agree: Sequence[TaskRow], openings: Sequence[TaskRow]) -> HelperPart:
    return HelperPart(site, _state(agree), _state(openings), len({s for task in openings for s in _seeds(task)}))


def _state(tasks: Sequence[TaskRow]) -> TaskState | None:
    """Return the state of the accepted one, or of the latest."""
    states: list[TaskState] = [task.state for task in tasks]  # type: ignore[misc]
    return "accepted" if "accepted" in states else states[-1] if states else None


def _agreement(task: TaskRow) -> Agreement | None:
    return Agreement.model_validate(task.statement) if task.state == "accepted" else None


def _seeds(task: TaskRow) -> tuple[int, ...]:
    return SumTask.model_validate(task.sums).seeds if task.state == "accepted" else ()


def _terms_by_count(blocks: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """Return the numbers of envelopes that name a block, each with the number of such blocks. An envelope's bits are
    given in hexadecimal digits."""
    if not blocks:
        return ()
    width = 2 * max(-(-len(each) // 2) for each in blocks)
    bits = [np.unpackbits(np.frombuffer(bytes.fromhex(each.zfill(width)), np.uint8)) for each in blocks]
    counts = Counter[int](np.stack(bits).sum(axis=0, dtype=np.int64).tolist())
    return tuple((sites, counts[sites]) for sites in sorted(counts, reverse=True) if sites)
