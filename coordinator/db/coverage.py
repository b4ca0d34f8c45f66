"""Coverage of a run's versions: the share of the sites and of their declared examples that each rests on.

All sites count that may take part and have declared the run's data set, also while none of their workers is live. A
site that has left for good is to be suspended, or left out of `cohort.sites`.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from tessera.coordinator.db.snapshots import live_workers, terms_of
from tessera.coordinator.db.tables import IS_LEASED, RoundRow, RunRow, SiteRow, TaskRow, WorkerRow, select_tasks
from tessera.coordinator.domain.eligibility import RunTerms, objections
from tessera.coordinator.domain.workers import LiveWorker, ids, in_study
from tessera.shared.api.runs import Coverage, SiteCoverage
from tessera.shared.rounds.planning import largest_weights

MAX_LARGEST = 20
"""Sites whose rounds are counted at each commit."""

WINDOW = 100
"""Latest rounds in which a site's last update is looked for."""


def of_version(session: Session, run: RunRow, number: int, merged: Iterable[str]) -> dict[str, float]:
    """Return the metrics of the coverage of a version that these workers' updates make; none if no site is known."""
    terms = terms_of(session, run.id, run.changes)
    workers = _holders(session, terms)
    examples = _examples(terms, workers)
    here = {worker.partition("/")[0] for worker in merged} & examples.keys()
    if not here:
        return {}
    share = sum(examples[site] for site in here) / sum(examples.values())
    least, missed = terms.spec.cohort.min_coverage, _missed_most(session, run, number, workers, examples)
    low = missed or (least is not None and share < least)
    made = Coverage(sites=len(here) / len(examples), examples=share, low=low)
    return {f"{Coverage.PREFIX}{name}": float(value) for name, value in made.model_dump().items()}


def by_site(session: Session, run: RunRow, live_since: float) -> list[SiteCoverage]:
    """Return each site's part in the latest rounds, the sites with the most examples first."""
    terms, number = terms_of(session, run.id, run.changes), run.version_number
    workers = _holders(session, terms)
    live = ids(live_workers(session, live_since))
    last: dict[str, int] = dict(
        session.execute(
            select_tasks(SiteRow.name, func.max(TaskRow.merged_in))
            .where(TaskRow.run_id == run.id, TaskRow.kind == "train", TaskRow.state == "merged")
            .where(TaskRow.version_number >= number - WINDOW)
            .group_by(SiteRow.name)
        ).all()
    )
    before, causes = _rounds_before(session, run, workers), left_out(session, run, number).get(number, {})
    began: dict[str, int] = {}
    if terms.spec.cohort.buffers:
        at_work = (TaskRow.run_id == run.id) & (TaskRow.kind == "train") & IS_LEASED
        began = dict(session.execute(select_tasks(SiteRow.name, TaskRow.version_number).where(at_work)).all())
    found = []
    for site, examples in sorted(_examples(terms, workers).items(), key=lambda item: (-item[1], item[0])):
        missed = min(WINDOW, number - last.get(site, before.get(site, 0)))
        own = [worker for worker in workers if worker.site == site]
        late = f"it is at work, from version {began[site]} on" if site in began else ""
        reason = (causes.get(site) or late or _unasked(terms, own, live)) if missed else ""
        found.append(SiteCoverage(site=site, examples=examples, missed=missed, reason=reason))
    return found


def _holders(session: Session, terms: RunTerms) -> list[LiveWorker]:
    """Return the workers, live or not, that have the data set and whose sites may take part."""
    known = in_study(terms.spec.study, live_workers(session, 0.0))
    return [w for w in known if terms.lets_know(w.site) and w.declared["datasets"].get(terms.spec.dataset, 0) > 0]


def _examples(terms: RunTerms, workers: Iterable[LiveWorker]) -> dict[str, int]:
    return largest_weights(terms.spec, [worker.participant(terms.spec.dataset) for worker in workers])


def _missed_most(
    session: Session, run: RunRow, number: int, workers: Iterable[LiveWorker], examples: Mapping[str, int]
) -> bool:
    """Return True if one of the largest sites was left out of most rounds. The largest are as few as hold half of the
    examples, and all of equal size. Where sites are drawn, a round counts for a site only if the round asked it."""
    largest, held = list[str](), 0
    for site, count in sorted(examples.items(), key=lambda item: -item[1])[:MAX_LARGEST]:
        if 2 * held >= sum(examples.values()) and count < examples[largest[-1]]:
            break
        largest.append(site)
        held += count
    of_largest = [worker for worker in workers if worker.site in largest]
    rounds = select_tasks(SiteRow.name, func.count(TaskRow.version_number.distinct())).group_by(SiteRow.name)
    rounds = rounds.where(TaskRow.run_id == run.id, TaskRow.kind == "train", TaskRow.worker_id.in_(ids(of_largest)))
    merged: dict[str, int] = dict(session.execute(rounds.where(TaskRow.state == "merged")).all())
    cohort = terms_of(session, run.id, run.changes).spec.cohort
    if cohort.size is not None and cohort.size < len(examples):
        asked: dict[str, int] = dict(session.execute(rounds).all())
    else:
        before = _rounds_before(session, run, of_largest)
        asked = {site: number - before[site] for site in largest}
    return any(2 * merged.get(site, 0) < count for site, count in asked.items())


def _rounds_before(session: Session, run: RunRow, workers: Iterable[LiveWorker]) -> dict[str, int]:
    """Return the number of rounds that were committed before the first worker of each site connected."""
    joined = (
        select(SiteRow.name, func.min(WorkerRow.created_at))
        .join_from(WorkerRow, SiteRow)
        .where(WorkerRow.id.in_(ids(list(workers))))
        .group_by(SiteRow.name)
    )
    committed = select(func.count()).where(RoundRow.run_id == run.id, RoundRow.state == "committed")
    return {
        site: session.scalar(committed.where(RoundRow.closed_at < at)) or 0 if at > run.created_at else 0
        for site, at in session.execute(joined)
    }


def left_out(session: Session, run: RunRow, first: int) -> dict[int, dict[str, str]]:
    """Return the reasons for which committed rounds, from round `first` on, were merged without tasks that they
    offered, by round and site."""
    rows = session.execute(
        select_tasks(RoundRow.number, SiteRow.name, TaskRow.state, TaskRow.problem, RoundRow.reason)
        .join(RoundRow, RoundRow.id == TaskRow.round_id)
        .where(RoundRow.run_id == run.id, RoundRow.number >= first, RoundRow.state == "committed")
        .where(TaskRow.kind == "train", TaskRow.state != "merged")
    )
    found = defaultdict[tuple[int, str], list[str]](list)
    for number, site, state, problem, closed_because in rows:
        if problem:
            found[number, site].append(f"{problem['code']}: {problem['detail'][:200]}")
        elif state == "expired":
            found[number, site].append("its lease ran out, and nothing was heard of it")
        elif state == "left_out":
            found[number, site].append("its update was left out: its norm is too large")
        elif state == "cancelled":
            found[number, site].append(f"its update had not come when the round closed: {closed_because}")
    by_round = defaultdict[int, dict[str, str]](dict)
    for (number, site), reasons in found.items():
        by_round[number][site] = "; ".join(dict.fromkeys(reasons))
    return by_round


def _unasked(terms: RunTerms, workers: Iterable[LiveWorker], live: set[str]) -> str:
    """Return the reason for which a site was not asked, as far as its present state shows it."""
    here = [worker for worker in workers if worker.id in live]
    if not here:
        return "none of its workers calls"
    said = [objections(terms, worker.site, worker.declared) for worker in here]
    if all(said):
        return f"{said[0][0].rule}: {said[0][0].detail}"
    return "it was not drawn, or joined later" if terms.spec.cohort.size else "it joined later"
