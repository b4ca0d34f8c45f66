"""Coverage of a run's versions: the share of the sites and of their declared examples that each rests on.

All sites count that may take part and have declared the run's data set, also while none of their workers is live. A
site that has left for good is to be suspended, or left out of `cohort.sites`.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from statistics import median

from sqlalchemy import Float, case, cast, func, select
from sqlalchemy.orm import Session

from tessera.coordinator.db.snapshots import live_workers, sites_done, terms_of
from tessera.coordinator.db.tables import RoundRow, RunRow, SiteRow, TaskRow, WorkerRow, select_tasks
from tessera.coordinator.domain.eligibility import RunTerms, objections
from tessera.coordinator.domain.workers import LiveWorker, ids, in_study
from tessera.shared.api.runs import BufferedPart, Coverage, SiteCoverage
from tessera.shared.rounds.planning import largest_weights

MAX_LARGEST = 20
"""Sites whose rounds are counted at each commit."""

WINDOW = 100
"""Latest rounds in which a site's last update is looked for."""

MIN_VERSIONS, MIN_UPDATES = 10, 3
"""Versions, and updates for each site, from which on a site's part is compared with its weight."""


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
    examples = _examples(terms, workers)
    parts = _buffered_parts(session, run, examples, before) if terms.spec.cohort.buffers else {}
    found, done, cap = [], sites_done(session, terms), terms.spec.cohort.max_updates_per_site
    for site, count in sorted(examples.items(), key=lambda item: (-item[1], item[0])):
        missed = min(WINDOW, number - last.get(site, before.get(site, 0)))
        own, part = [worker for worker in workers if worker.site == site], parts.get(site)
        late = (
            f"it is at work, from version {part.base} on" if part and part.base is not None and not part.waits else ""
        )
        most = f"it has trained as often as cohort.max_updates_per_site allows, {cap} times" if site in done else ""
        reason = (causes.get(site) or late or most or _unasked(terms, own, live)) if missed else ""
        found.append(SiteCoverage(site=site, examples=count, missed=missed, reason=reason, buffered=part))
    return found


def behind(session: Session, run: RunRow) -> list[str]:
    """Return the sites whose part in a run that buffers updates is below half of their weight, those with the most
    examples first."""
    terms = terms_of(session, run.id, run.changes)
    workers = _holders(session, terms)
    examples = _examples(terms, workers)
    parts = _buffered_parts(session, run, examples, _rounds_before(session, run, workers))
    return sorted((site for site, part in parts.items() if part.is_behind), key=lambda site: (-examples[site], site))


def _buffered_parts(
    session: Session, run: RunRow, examples: Mapping[str, int], before: Mapping[str, int]
) -> dict[str, BufferedPart]:
    """Return each site's part in the latest versions, summed in the database by site and staleness."""
    number = run.version_number
    first = max(1, number - WINDOW + 1)
    most = (run.bounds or {}).get("max_examples")
    counted = TaskRow.examples if most is None else case((TaskRow.examples > most, most), else_=TaskRow.examples)
    merged = (TaskRow.run_id == run.id) & TaskRow.merged_in.between(first, number) & (TaskRow.state == "merged")
    of_version = select(TaskRow.merged_in, cast(func.sum(counted), Float).label("examples")).where(merged)
    whole = of_version.group_by(TaskRow.merged_in).subquery()
    stale = TaskRow.merged_in - 1 - TaskRow.version_number
    sums = select_tasks(SiteRow.name, stale, func.count(), func.sum(counted / func.nullif(whole.c.examples, 0)))
    rows = sums.join(whole, whole.c.merged_in == TaskRow.merged_in).where(merged).group_by(SiteRow.name, stale)
    found = defaultdict[str, list[tuple[int, int, float]]](list)
    for site, staleness, count, share in session.execute(rows.order_by(SiteRow.name, stale)):
        found[site].append((staleness, count, share or 0.0))
    updates = sum(count for rows_of_site in found.values() for _, count, _ in rows_of_site)
    goes_on = (TaskRow.run_id == run.id) & (TaskRow.kind == "train") & TaskRow.merged_in.is_(None)
    goes_on &= TaskRow.state.in_(("leased", "accepted"))
    began = {
        site: {"base": base, "waits": state == "accepted"}
        for site, base, state in session.execute(
            select_tasks(SiteRow.name, TaskRow.version_number, TaskRow.state).where(goes_on)
        )
    }
    parts = {}
    for site, count in examples.items():
        of_site, weight = found[site], count / (sum(examples.values()) or 1)
        # A site that came later can have no part in the versions before.
        versions = number - max(first - 1, before.get(site, 0))
        share = sum(part for _, _, part in of_site) / max(1, versions)
        stales = [staleness for staleness, times, _ in of_site for _ in range(times)]
        judged = versions >= MIN_VERSIONS and updates >= MIN_UPDATES * len(examples)
        parts[site] = BufferedPart(
            updates=len(stales),
            staleness=median(stales) if stales else 0.0,
            most_stale=max(stales, default=0),
            share=share,
            weight=weight,
            is_behind=judged and 2 * share < weight,
            **began.get(site, {}),
        )
    return parts


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
    if cohort.asked is not None and cohort.asked < len(examples):
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
    # A run that buffers updates may have assigned one to a later round than that which asked for it.
    of_round = func.coalesce(TaskRow.merged_in, RoundRow.number)
    oldest = terms_of(session, run.id, run.changes).spec.cohort.oldest_base(first)
    rows = session.execute(
        select_tasks(of_round, SiteRow.name, TaskRow.state, TaskRow.merged_in, TaskRow.problem, RoundRow.reason)
        .join(RoundRow, RoundRow.id == TaskRow.round_id)
        .where(RoundRow.run_id == run.id, RoundRow.number > oldest, of_round >= first)
        .where((RoundRow.state == "committed") | TaskRow.merged_in.is_not(None))
        .where(TaskRow.kind == "train", TaskRow.state != "merged")
    )
    found = defaultdict[tuple[int, str], list[str]](list)
    for number, site, state, assigned, problem, closed_because in rows:
        if problem:
            found[number, site].append(f"{problem['code']}: {problem['detail'][:200]}")
        elif state == "expired":
            found[number, site].append("its lease ran out, and nothing was heard of it")
        elif state == "left_out" and assigned:
            found[number, site].append("its update was left out: its norm is too large")
        elif state == "left_out":
            found[number, site].append("its update came too late for the last version, or its site withdrew")
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
    if terms.spec.cohort.buffers:
        return "it has begun no task"
    return "it was not drawn, or joined later" if terms.spec.cohort.size else "it joined later"
