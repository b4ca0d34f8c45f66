"""The input of `decide`: a run at one moment, and the workers that could take part."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf
from statistics import median
from typing import Any, cast
from weakref import WeakKeyDictionary

from sqlalchemy import ColumnElement, Engine, Row, func, select
from sqlalchemy import bindparam as given
from sqlalchemy.orm import Session, load_only

from tessera.coordinator.db import audit
from tessera.coordinator.db.helper_tasks import asked_to_abandon, sums_snapshot
from tessera.coordinator.db.studies import is_present, reads_all
from tessera.coordinator.db.tables import (
    WORKER_NAME,
    RoundRow,
    RunRow,
    SiteRow,
    StudyMemberRow,
    TaskRow,
    VersionRow,
    WorkerRow,
    one_of,
    select_tasks,
)
from tessera.coordinator.db.transitions import code_of
from tessera.coordinator.db.workers import Declarations
from tessera.coordinator.domain.eligibility import RunTerms, objections, withheld_reason
from tessera.coordinator.domain.lifecycle import LIVE_ROUND, LIVE_RUN
from tessera.coordinator.domain.snapshot import (
    Answers,
    PendingEvaluation,
    RoundSnapshot,
    RunSnapshot,
    TaskSnapshot,
)
from tessera.coordinator.domain.workers import LiveWorker, ids, in_study, sites_of
from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import RunSpec
from tessera.shared.methods.base import Plan
from tessera.shared.methods.registry import sticky
from tessera.shared.problems import Withheld
from tessera.shared.rounds import regions
from tessera.shared.run_settings import Training
from tessera.shared.schedule import Pace, local_steps

MAX_UNEVALUATED = 16
"""Versions that one look considers for central evaluation."""

DECLARATIONS = Declarations()
"""Shared by all databases: a digest identifies one text."""

MAX_EARLIER = 100
"""Tasks of earlier rounds by whose times a round closes."""

LEAST_SECONDS = 0.001
"""The least time of training that counts, since a worker's whole seconds may add up to more than all the time."""

MEASURED_TASKS = 3
"""A worker's latest tasks by which its pace is judged: one more than half of them may be an exception."""

MAX_UNAGREED = 100
"""Rounds that may be abandoned because sites have not approved the run, without counting as attempts."""


def live_workers(session: Session, since: float) -> list[LiveWorker]:
    """Return every worker seen since then whose site is not suspended and whose token is not revoked, ordered by name
    (`site/worker`)."""
    live = _LIVE_WORKERS if reads_all(session) else _LIVE_WORKERS.where(is_present(session))
    rows = session.execute(live, {"since": since}).all()
    declared = DECLARATIONS.of(session, {r.id: r.declared_digest for r in rows})
    studies: dict[str, set[str]] = defaultdict(set)
    for site, study in session.execute(_STUDIES_OF_SITES):
        studies[site].add(study)
    found = (LiveWorker(r.id, r.name, r.site, declared[r.id], studies=frozenset(studies[r.site_id])) for r in rows)
    return sorted(found, key=lambda worker: worker.name)


_LIVE_WORKERS = (
    select(
        WorkerRow.id,
        WORKER_NAME.label("name"),
        WorkerRow.site_id,
        SiteRow.name.label("site"),
        WorkerRow.declared_digest,
    )
    .join_from(WorkerRow, SiteRow)
    .where(WorkerRow.last_seen_at >= given("since"), SiteRow.suspended_at.is_(None), ~WorkerRow.revoked)
)
_STUDIES_OF_SITES = select(StudyMemberRow.member, StudyMemberRow.study).where(
    StudyMemberRow.kind == "site", StudyMemberRow.left_at.is_(None)
)
_CHANGES = select(RunRow.changes).where(RunRow.id == given("run"))
_OPEN_ROUNDS = select(RoundRow.run_id).where(one_of(RoundRow.state, *LIVE_ROUND))
_OPEN_TASKS = select(TaskRow.run_id).where(one_of(TaskRow.state, "offered", "leased"))
_TO_DECIDE = (
    select(RunRow.id)
    .where(RunRow.state.in_(LIVE_RUN) | RunRow.id.in_(_OPEN_ROUNDS) | RunRow.id.in_(_OPEN_TASKS))
    .order_by(RunRow.created_at, RunRow.id)
)
_LIVE_ROUND = (RoundRow.run_id == RunRow.id) & one_of(RoundRow.state, *LIVE_ROUND)
# From the end: the round before the live one.
_ENDED_AT = (
    select(RoundRow.closed_at)
    .where(RoundRow.run_id == given("run"), RoundRow.closed_at.is_not(None))
    .order_by(RoundRow.number.desc(), RoundRow.attempt.desc())
    .limit(1)
    .scalar_subquery()
)
_RUN = (
    select(RunRow, RoundRow, _ENDED_AT)
    .outerjoin(RoundRow, _LIVE_ROUND)
    .where(RunRow.id == given("run"))
    # Not its settings, which were parsed before.
    .options(load_only(RunRow.state, RunRow.version_number, RunRow.resumed_at, RunRow.changes))
)
# An expired evaluation of an earlier version at a site is not repeated: the site's own state may have changed.
_REPEATED = TaskRow.attempts < given("most_attempts")
_REPEATED &= ~TaskRow.held_out | (TaskRow.version_number == given("latest_due"))
_PENDING = (TaskRow.run_id == given("run")) & (TaskRow.kind == given("asks"))
# One list of states, which an index serves, and then which of the expired ones count.
_PENDING &= TaskRow.state.in_(("offered", "leased", "expired"))
_PENDING &= (TaskRow.state != "expired") | _REPEATED
# Only these columns: every decision about a run reads them, and a task's plan is slow to decode.
_TASKS = (
    select(
        TaskRow.id,
        WorkerRow.site_id,
        TaskRow.state,
        TaskRow.token,
        TaskRow.attempts,
        TaskRow.lease_expires_at,
        TaskRow.worker_id,
        TaskRow.kind,
        TaskRow.created_at,
    )
    .join_from(TaskRow, WorkerRow)
    .order_by(TaskRow.id)
)
_PENDING_TASKS = _TASKS.where(_PENDING)
_TASKS_IN_ROUND = _TASKS.where(_PENDING | (TaskRow.round_id == given("round")))
# Of a run that buffers updates: whichever rounds asked for them.
_BUFFERED = (TaskRow.run_id == given("run")) & (TaskRow.kind == "train")
_BUFFERED &= (
    TaskRow.state.in_(("offered", "leased"))
    | ((TaskRow.state == "expired") & (TaskRow.attempts < given("most_attempts")))
    | ((TaskRow.state == "accepted") & TaskRow.merged_in.is_(None))
)
_TOOK = (TaskRow.run_id == given("run")) & (TaskRow.kind == "train")
_EARLIER = (
    select(TaskRow.state, TaskRow.created_at, TaskRow.lease_expires_at)
    .where(_TOOK, TaskRow.round_id != given("round"), TaskRow.token > 0, TaskRow.version_number < given("number"))
    .where(TaskRow.state.in_(("merged", "left_out", "cancelled")))
    .order_by(TaskRow.created_at.desc(), TaskRow.id)
    .limit(MAX_EARLIER)
)
_LAST_TASKS = (
    select(TaskRow.plan, TaskRow.examples, TaskRow.created_at, TaskRow.lease_expires_at, TaskRow.progress)
    .where(_TOOK, TaskRow.worker_id == given("worker"), TaskRow.state.in_(("accepted", "merged", "left_out")))
    .order_by(TaskRow.version_number.desc())
    .limit(MEASURED_TASKS)
)
_BUSY = select(TaskRow.worker_id).where(
    TaskRow.run_id == given("run"),
    one_of(TaskRow.state, "offered", "leased"),
    (TaskRow.kind == "train") | TaskRow.held_out,
)
# A task that its site gave back until a person there decides has read nothing.
_BEGUN = (TaskRow.run_id == given("run")) & (TaskRow.kind == "train") & (TaskRow.token > 0)
_BEGUN &= func.coalesce(TaskRow.problem["code"].as_string(), "") != Withheld.code
_DONE = select_tasks(SiteRow.name).where(_BEGUN).group_by(SiteRow.name)
_DONE = _DONE.having(func.count(TaskRow.version_number.distinct()) >= given("most"))
_BUFFERED_TASKS = _TASKS.where(_PENDING | _BUFFERED)
_AT_WORK = select_tasks(SiteRow.name, TaskRow.state, TaskRow.worker_id, TaskRow.round_id)
_AT_WORK = _AT_WORK.where(_BUFFERED | (TaskRow.round_id == given("round")))


_TERMS: WeakKeyDictionary[Engine, dict[str, tuple[int, RunTerms]]] = WeakKeyDictionary()
"""Of the runs that were asked for lately, by database, each with its count of changes. A run's creator never changes;
its settings may, at this process or at another."""

MAX_TERMS = 1024


def terms_of(session: Session, run_id: str, changes: int | None = None) -> RunTerms:
    """Return a run's terms, which are parsed once for many requests and looks. `changes` is the row's, if known."""
    known = _TERMS.setdefault(session.get_bind().engine, {})
    if changes is None:
        changes = session.execute(_CHANGES, {"run": run_id}).scalar_one()
    since, terms = known.get(run_id, (None, None))
    if terms is None or since != changes:
        run = session.get_one(RunRow, run_id)
        creator = audit.creator_of(session, run_id)
        terms = RunTerms(RunSpec.model_validate(run.spec), run.model_bytes, creator, run_id)
        if len(known) >= MAX_TERMS:
            known.clear()
        # The row's own count: the caller's may be of an earlier moment.
        known[run_id] = run.changes, terms
    return terms


def spec_in(spec: RunSpec, round_: RoundRow | None) -> RunSpec:
    """Return the settings of a run for a round, which keeps those that it opened with."""
    return spec.changed(round_.opened_with) if round_ and round_.opened_with else spec


def eligible(invited: RunTerms, live: Sequence[LiveWorker]) -> list[LiveWorker]:
    """Return the workers that could train in a round of this run."""
    return [
        worker
        for worker in in_study(invited.spec.study, live)
        if not objections(invited, worker.site, worker.declared)
    ]


def candidates(session: Session, invited: RunTerms, live: Sequence[LiveWorker]) -> list[LiveWorker]:
    """Return the workers that may take part in the run's next round; with a sticky method, none as a replacement for
    another."""
    took_part = _took_part(session, invited) if sticky(invited.spec.method) else {}
    done = sites_done(session, invited)
    able = (worker for worker in eligible(invited, live) if worker.site not in done)
    return [worker for worker in able if took_part.get(worker.site, worker.id) == worker.id]


def sites_done(session: Session, invited: RunTerms) -> set[str]:
    """Return the sites that have begun to train from as many versions as the run allows (`max_updates_per_site`)."""
    most = invited.spec.cohort.max_updates_per_site
    return set(session.scalars(_DONE, {"run": invited.run, "most": most})) if most else set()


def has_quorum(session: Session, invited: RunTerms, live: Sequence[LiveWorker]) -> bool:
    """Return True if `candidates` are of the sites that a round needs, from as few of them as possible."""
    took_part = _took_part(session, invited) if sticky(invited.spec.method) else {}
    sites, done = set[str](), sites_done(session, invited)
    for worker in in_study(invited.spec.study, live):
        if took_part.get(worker.site, worker.id) == worker.id and worker.site not in sites | done:
            if not objections(invited, worker.site, worker.declared):
                sites.add(worker.site)
            if not invited.spec.cohort.lack(sites):
                return True
    return False


def _took_part(session: Session, invited: RunTerms) -> dict[str, str]:
    """Return the worker that last took part for each site that has several."""
    # A site with one worker has no replacement.
    several = select(WorkerRow.site_id).group_by(WorkerRow.site_id).having(func.count() > 1)
    rows = (
        select_tasks(SiteRow.name, TaskRow.worker_id)
        # An accepted update may still be merged.
        .where(TaskRow.run_id == invited.run, TaskRow.kind == "train", TaskRow.state.in_(("accepted", "merged")))
        .where(WorkerRow.site_id.in_(several))
        .group_by(SiteRow.name, TaskRow.worker_id)
        .order_by(func.max(TaskRow.version_number))
    )
    return dict(session.execute(rows).all())


def remembering(session: Session, run_id: str, willing: Sequence[LiveWorker]) -> list[LiveWorker]:
    """Return the same workers with the round that each last did, where its site has several to choose from."""
    counts = Counter(worker.site for worker in willing)
    crowded = [site for site, count in counts.items() if count > 1]
    if not crowded:
        return list(willing)
    rows = (
        select_tasks(TaskRow.worker_id, func.max(TaskRow.version_number) + 1)
        # An update that was left out changed no vault.
        .where(TaskRow.run_id == run_id, TaskRow.kind == "train", TaskRow.state.in_(("accepted", "merged")))
        .where(SiteRow.name.in_(crowded))
        .group_by(TaskRow.worker_id)
    )
    rounds: dict[str, int] = dict(session.execute(rows).all())
    return [replace(worker, last_round=rounds.get(worker.id, 0)) for worker in willing]


def paces(session: Session, run_id: str, training: Training, workers: Sequence[LiveWorker]) -> dict[str, Pace]:
    """Return the pace of each worker that trained in the run, by name: the median of its latest tasks."""
    found = {}
    for worker in workers:
        rows = session.execute(_LAST_TASKS, {"run": run_id, "worker": worker.id}).all()
        if measured := [pace for row in rows if (pace := _pace(training, *row))]:
            found[worker.name] = Pace(
                median(pace.seconds_per_step for pace in measured), median(pace.fixed_seconds for pace in measured)
            )
    return found


def _pace(
    training: Training, planned: dict[str, Any], examples: int, offered: float, ended: float, progress: dict[str, Any]
) -> Pace | None:
    """Return the pace of an accepted task; None if it trained nothing, or if the clock was set back in it.

    Its worker reports the time of each phase in whole seconds. They divide the time from the offer to the acceptance,
    which is exact but may have begun before the worker was there.
    """
    plan, phases = Plan.model_validate(planned), dict(progress.get("phase_seconds", {}))
    if not plan.train or ended < offered:
        return None
    reported = phases.pop("training", None)
    # People decide when a held update is released.
    phases.pop("held", None)
    fixed = float(sum(phases.values()))
    seconds = max(ended - offered - fixed, LEAST_SECONDS)
    if reported is not None:
        seconds = min(max(seconds, reported - 0.5), reported + 0.5)
    return Pace(seconds / local_steps(training.of_steps(plan.steps), examples), fixed)


def sites_at_work(
    session: Session, run_id: str, cohort: Cohort, round_id: str | None, here: Collection[str] | None
) -> dict[str, bool]:
    """Return the sites that a run which buffers updates gives no task now: they have one, an update that is not
    merged yet, or had a task of the live round. True for a site that counts for the next version, with a lease or an
    update. A task that waits for a worker which is not `here` keeps no other worker of its site from another."""
    about = {"run": run_id, "most_attempts": cohort.max_task_attempts, "round": round_id}
    found: dict[str, bool] = {}
    for site, state, worker, asked_in in session.execute(_AT_WORK, about) if cohort.buffers else ():
        counts = state in ("leased", "accepted")
        if counts or asked_in == round_id or here is None or worker in here:
            found[site] = found.get(site, False) or counts
    return found


def evaluators(invited: RunTerms, live: Sequence[LiveWorker]) -> list[LiveWorker]:
    """Return the workers that could evaluate this run's versions on the central data set."""
    if invited.spec.evaluation is None or invited.spec.rehearsal:
        return []
    wanted = invited.spec.evaluation.dataset
    return [
        worker
        for worker in in_study(invited.spec.study, live)
        if invited.lets_know(worker.site)
        and invited.spec.asks in worker.declared["kinds"]
        and worker.declared["datasets"].get(wanted, 0) > 0
        and withheld_reason(invited, worker.declared) is None
    ]


def site_evaluators(invited: RunTerms, live: Sequence[LiveWorker]) -> list[LiveWorker]:
    """Return the workers that could evaluate versions: those that could train and have held-out examples; of a run
    that counts subjects, one worker of each site; of a rehearsal, each that could train."""
    spec = invited.spec
    if spec.rehearsal:
        # A round may draw any of a site's workers, and their devices differ.
        return eligible(invited, live)
    if spec.counts_subjects:
        return list({worker.site: worker for worker in reversed(eligible(invited, live))}.values())
    if spec.evaluation is None or not spec.evaluation.sites:
        return []
    return [
        worker
        for worker in eligible(invited, live)
        if spec.asks in worker.declared["kinds"] and worker.declared.get("held_out", {}).get(spec.dataset, 0) > 0
    ]


def runs_to_decide(session: Session) -> list[str]:
    """Return the ids of live runs, and of ended ones with open rounds or tasks."""
    return list(session.scalars(_TO_DECIDE))


def run_snapshot(session: Session, run_id: str, live: Sequence[LiveWorker], *, absent_are_gone: bool) -> RunSnapshot:
    """Return a run at this moment. With `absent_are_gone`, workers that are not live are not waited for."""
    found = session.execute(_RUN, {"run": run_id}).one()
    run, round_, ended = cast("tuple[RunRow, RoundRow | None, float | None]", found)
    invited = terms_of(session, run_id, run.changes)
    spec = invited.spec
    here = ids(in_study(spec.study, live)) if absent_are_gone else None
    about = {"run": run_id, "most_attempts": spec.cohort.max_task_attempts, "latest_due": latest_due(run, spec)}
    about |= {"asks": spec.asks}
    in_round = _BUFFERED_TASKS if spec.cohort.buffers else _TASKS_IN_ROUND
    rows = session.execute(in_round if round_ else _PENDING_TASKS, about | {"round": round_ and round_.id})
    tasks, evaluations = _task_snapshots(rows, here, _required(session, spec))
    # If others are away, the run waits for them as any run does.
    done = sites_done(session, invited)
    done &= sites_of(eligible(invited, [worker for worker in live if worker.site in done]))
    at_work = sites_at_work(session, run_id, spec.cohort, round_.id if round_ else None, here)
    # Judged are only the sites that a round could ask now.
    able = set() if round_ else {site for site, counts in at_work.items() if counts}
    if not round_ or (spec.cohort.buffers and spec.cohort.beside(at_work)):
        busy = at_work.keys() if round_ else able
        idle = [worker for worker in live if worker.site not in busy]
        able |= sites_of(candidates(session, invited, idle))
    abandoned, because = (0, "") if round_ else _abandoned(session, run)
    adopts, awaits_parent = _of_parent(session, run, spec)
    return RunSnapshot(
        id=run.id,
        state=run.state,
        rounds=spec.rounds,
        version=run.version_number,
        cohort=spec_in(spec, round_).cohort,
        round=_round_snapshot(session, run, round_, spec, tasks, here) if round_ else None,
        abandoned=abandoned,
        abandoned_because=because,
        # An attempt that does not count as abandoned has a reason all the same.
        goes_on=ended is not None and ended > run.resumed_at and not because,
        eligible=0 if not round_ and spec.cohort.absent(able) else len(able),
        done=0 if spec.cohort.lack(able | done) else len(done),
        idle_since=max(run.resumed_at, ended or 0.0, round_.opened_at if round_ else 0.0),
        evaluations=evaluations,
        unevaluated=(*central_due(session, run, spec, here), *sites_due(session, run, invited, live)),
        evaluators=len(evaluators(invited, live)),
        answers=None if spec.rounds else _answers(session, run, invited, live),
        abandoning=() if round_ or not spec.secure_sums else asked_to_abandon(session, run, here),
        adopts=adopts,
        awaits_parent=awaits_parent,
    )


def _of_parent(session: Session, run: RunRow, spec: RunSpec) -> tuple[bool, bool]:
    """Return two truths about a region's run: it has a version of its parent to adopt; it has to wait for one."""
    if (parent := spec.parent) is None:
        return False, False
    scalars = session.get_one(VersionRow, (run.id, run.version_number)).scalars
    adopts = scalars[regions.PARENT] != parent.base.number
    return adopts, not adopts and scalars[regions.ROUNDS] >= parent.rounds_each


def _round_snapshot(
    session: Session,
    run: RunRow,
    round_: RoundRow,
    spec: RunSpec,
    tasks: tuple[TaskSnapshot, ...],
    here: set[str] | None,
) -> RoundSnapshot:
    sums = sums_snapshot(session, run, spec, here) if spec.secure_sums else None
    earlier = _earlier(session, round_) if spec.cohort.adaptive_deadline and round_.state == "open" else ()
    return RoundSnapshot(round_.id, round_.number, round_.state, round_.deadline_at, tasks, sums, earlier)


def _earlier(session: Session, round_: RoundRow) -> tuple[float, ...]:
    """Return `RoundSnapshot.earlier`. A task that no worker began says nothing of its time."""
    rows = session.execute(_EARLIER, {"run": round_.run_id, "round": round_.id, "number": round_.number})
    return tuple(inf if state == "cancelled" else (ended or 0.0) - began for state, began, ended in rows)


def _required(session: Session, spec: RunSpec) -> dict[str, str]:
    """Return the names of the required sites by id."""
    required = spec.cohort.require
    rows = session.execute(select(SiteRow.id, SiteRow.name).where(SiteRow.name.in_(required))) if required else ()
    return dict(iter(rows))


def _task_snapshots(
    rows: Iterable[Row[*tuple[Any, ...]]], here: set[str] | None, required: Mapping[str, str]
) -> tuple[tuple[TaskSnapshot, ...], tuple[TaskSnapshot, ...]]:
    """Return the tasks of rounds, and the evaluations."""
    found: dict[bool, list[TaskSnapshot]] = {True: [], False: []}
    for id_, site, state, token, attempts, expires_at, worker_id, kind, offered_at in rows:
        present = here is None or worker_id in here
        named = required.get(site, site)
        # An accepted task's lease ended with its acceptance.
        task = TaskSnapshot(id_, named, state, token, attempts, expires_at, present, offered_at, expires_at)
        found[kind == "train"].append(task)
    return tuple(found[True]), tuple(found[False])


def _answers(session: Session, run: RunRow, invited: RunTerms, live: Sequence[LiveWorker]) -> Answers:
    """Return the sites' answers to a run without rounds."""
    tasks = session.execute(
        select_tasks(SiteRow.name, WORKER_NAME, TaskRow.state, TaskRow.problem, TaskRow.created_at)
        .where(TaskRow.run_id == run.id, TaskRow.kind == invited.spec.asks)
        .order_by(TaskRow.created_at, TaskRow.id)
    ).all()
    answered = {site for site, _, state, *_ in tasks if state == "accepted"}
    last = {worker: (state, problem) for _, worker, state, problem, at in tasks if at >= run.resumed_at}
    failed = [f"{worker}: {code_of(problem)}" for worker, (state, problem) in last.items() if state == "failed"]
    withheld = sites_of(w for w in live if invited.lets_know(w.site) and withheld_reason(invited, w.declared))
    named = invited.spec.cohort.sites
    return Answers(
        len(answered),
        len({site for site, *_ in tasks}),
        is_full=named is not None and answered.issuperset(named),
        withheld=len(withheld - answered),
        failed=tuple(sorted(failed)[:5]),
    )


def _abandoned(session: Session, run: RunRow) -> tuple[int, str]:
    """Return the number of abandoned attempts at the next round, and the reason of the last. Attempts that failed
    because a site had not approved the run count only beyond a limit: each site has to report that once."""
    rounds = session.execute(
        select(RoundRow.id, RoundRow.reason)
        .where(
            RoundRow.run_id == run.id,
            RoundRow.number == run.version_number + 1,
            RoundRow.state == "abandoned",
            RoundRow.opened_at >= run.resumed_at,
        )
        .order_by(RoundRow.attempt)
    ).all()
    if not rounds:
        return 0, ""
    ids = [row.id for row in rounds]
    cancelled = select(TaskRow.round_id, TaskRow.problem).where(
        TaskRow.round_id.in_(ids[:MAX_UNAGREED]), TaskRow.state == "cancelled"
    )
    withheld = (row for row in session.execute(cancelled) if row.problem and row.problem["code"] == Withheld.code)
    return len(ids) - len({row.round_id for row in withheld}), rounds[-1].reason or ""


def central_due(
    session: Session,
    run: RunRow,
    spec: RunSpec,
    here: Collection[str] | None,
    most: int | None = MAX_UNEVALUATED,
) -> list[PendingEvaluation]:
    """Return the versions due for central evaluation (every n-th, the first and the last; oldest first, at most
    `most`) that were not measured, are not being measured, and did not fail too often.

    An evaluation that was only offered to a worker who is not `here` does not count, unless `here` is unknown.
    """
    if spec.evaluation is None or spec.evaluation.dataset is None or spec.rehearsal:
        return []
    due = (VersionRow.number % spec.evaluation.every == 0) | (VersionRow.number == spec.rounds)
    central = (TaskRow.run_id == run.id) & (TaskRow.kind == spec.asks) & ~TaskRow.held_out
    awaited, spent = _awaited_or_spent(run, spec)
    if here is not None:
        awaited &= TaskRow.worker_id.in_(here)
    taken = awaited | spent | TaskRow.state.in_(("leased", "accepted"))
    numbers = (
        select(VersionRow.number)
        .where(VersionRow.run_id == run.id, due, VersionRow.retired_at.is_(None))
        .where(VersionRow.number.not_in(select(TaskRow.version_number).where(central, taken)))
        .order_by(VersionRow.number)
        .limit(most)
    )
    return [PendingEvaluation(number) for number in session.scalars(numbers)]


def _awaited_or_spent(run: RunRow, spec: RunSpec) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    """Return two conditions on evaluations: available to their worker, and out of attempts, of which a run that was
    resumed has one more."""
    used_up = TaskRow.attempts >= spec.cohort.max_task_attempts
    awaited = (TaskRow.state == "offered") | ((TaskRow.state == "expired") & ~used_up)
    return awaited, used_up & (TaskRow.created_at >= run.resumed_at)


def latest_due(run: RunRow, spec: RunSpec) -> int:
    """Return the latest version that is to be evaluated."""
    number = run.version_number
    if spec.evaluation is None or spec.evaluation.due(number, spec.rounds):
        return number
    return number - number % spec.evaluation.every


def sites_due(
    session: Session, run: RunRow, invited: RunTerms, live: Sequence[LiveWorker]
) -> list[PendingEvaluation]:
    """Return the latest due version for each live worker that has neither evaluated it on held-out examples nor
    reached the limit of attempts. All workers of a site evaluate, and count as one site in every statistic
    (`shared.metrics.site_spread`).

    Missed evaluations of earlier versions are not repeated: the worker's own state has changed since.
    """
    able, spec = site_evaluators(invited, live), invited.spec
    if not able:
        return []
    number = latest_due(run, spec)
    tasks = (TaskRow.run_id == run.id) & (TaskRow.version_number == number) & (TaskRow.kind == spec.asks)
    tasks &= TaskRow.held_out == (spec.asks == "evaluate")
    awaited, spent = _awaited_or_spent(run, spec)
    over = awaited | spent | TaskRow.state.in_(("leased", "accepted"))
    if spec.rehearsal:
        # A failure is an answer, until a person has mended its cause and resumes the run.
        over |= (TaskRow.state == "failed") & (TaskRow.created_at >= run.resumed_at)
    rows = session.execute(select_tasks(TaskRow.worker_id, SiteRow.name).where(tasks, over)).all()
    asked, sites = {worker for worker, _ in rows}, {site for _, site in rows} if spec.counts_subjects else set()
    if spec.cohort.buffers:
        # Several versions may be made while it trains or measures. Measuring all of them, it might never train.
        asked |= set(session.scalars(_BUSY, {"run": run.id}))
    return [PendingEvaluation(number, one.id) for one in able if one.id not in asked and one.site not in sites]
