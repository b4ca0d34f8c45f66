"""The records of a dossier, from the rows that its reader may see: versions, sites, results, terms and audit."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import case, distinct, func, select
from sqlalchemy.orm import Session

from tessera.coordinator.db import coverage, views
from tessera.coordinator.db.studies import reads_all, shared_sites
from tessera.coordinator.db.tables import (
    AuditRow,
    RunRow,
    SiteRow,
    StudyMemberRow,
    TaskRow,
    VersionRow,
    WorkerRow,
    select_tasks,
)
from tessera.coordinator.domain.eligibility import RunTerms, policy_of, withheld_reason
from tessera.shared.api.class_counts import ALL
from tessera.shared.api.runs import Coverage, Evaluation, Measurement, RunSpec
from tessera.shared.api.terms import terms_digest, terms_of
from tessera.shared.api.versions import VersionRef
from tessera.shared.methods.base import Plan
from tessera.shared.metrics.classification import Figure, GroupFigures, group_figures, share
from tessera.shared.metrics.comparison import MainScore, main_score
from tessera.shared.metrics.membership import AttackResult
from tessera.shared.metrics.site_spread import scores_by_site, weight_of
from tessera.shared.rounds.client_privacy import EPSILON
from tessera.shared.rounds.planning import task_of
from tessera.shared.schema import TaskKind

Record = dict[str, Any]

GUESS = 0.5
"""The AUROC of an attack that guesses."""


def at(seconds: float) -> str:
    """Return an instant as text, in UTC."""
    return views.instant(seconds).isoformat(timespec="seconds")


def versions_of(session: Session, run: RunRow, until: int) -> list[Record]:
    """Return the versions up to a number: the examples of each site whose update was merged, and the sites that were
    asked and left out, with the reasons."""
    merged = defaultdict[int, dict[str, int | None]](dict)
    by_site = select_tasks(TaskRow.merged_in, SiteRow.name, func.sum(TaskRow.examples)).where(
        TaskRow.run_id == run.id, TaskRow.kind == "train", TaskRow.state == "merged", TaskRow.merged_in <= until
    )
    for number, site, examples in session.execute(by_site.group_by(TaskRow.merged_in, SiteRow.name)):
        # Of a site that has withdrawn, no count is left.
        merged[number][site] = None if examples is None else int(examples)
    absent = coverage.left_out(session, run, 1)
    made = select(VersionRow).where(VersionRow.run_id == run.id, VersionRow.number <= until)
    return [
        {
            "number": one.number,
            "digest": one.digest,
            "made_at": at(one.created_at),
            "kept": one.retired_at is None,
            "coverage": covered.model_dump() if (covered := Coverage.of(one.scalars)) else None,
            "merged": merged[one.number],
            "left_out": {s: why for s, why in absent.get(one.number, {}).items() if s not in merged[one.number]},
            "site_epsilon": one.scalars.get(EPSILON),
            "warnings": one.warnings,
        }
        for one in session.scalars(made.order_by(VersionRow.number))
    ]


def sites_of(session: Session, terms: RunTerms, run: RunRow, until: int, live_since: float) -> list[Record]:
    """Return the sites that have the run's data set or had a task of the run: their parts in the versions up to a
    number, and their present declarations."""
    counted = case(((TaskRow.state == "merged") & (TaskRow.merged_in <= until), TaskRow.merged_in))
    of_sites = select_tasks(SiteRow.name, func.count(distinct(counted))).where(TaskRow.run_id == run.id)
    parts: dict[str, int] = dict(session.execute(of_sites.group_by(SiteRow.name)).all())
    covered = {one.site: one for one in coverage.by_site(session, run, live_since)}
    members = (StudyMemberRow.kind == "site") & (StudyMemberRow.study == run.study)
    left = set(session.scalars(select(StudyMemberRow.member).where(members, StudyMemberRow.left_at.is_not(None))))
    elsewhere, spent = shared_sites(session), views.spent_epsilon(session, run.id, TaskRow.version_number < until)
    sent = select_tasks(SiteRow.name, WorkerRow.name, TaskRow.audit_head).where(
        TaskRow.run_id == run.id, TaskRow.version_number <= until, TaskRow.audit_head.is_not(None)
    )
    heads = defaultdict[str, dict[str, str]](dict)
    for site, name, head in session.execute(sent.order_by(TaskRow.version_number, TaskRow.created_at)):
        heads[site][name] = head
    rows = select(SiteRow, WorkerRow).join_from(SiteRow, WorkerRow).where(SiteRow.name.in_({*parts, *covered}))
    found: dict[str, Record] = {}
    for row, worker in session.execute(rows.order_by(SiteRow.name, WorkerRow.name)).all():
        known = covered.get(row.name)
        fresh = {
            "site": row.name,
            "standing": _standing(row, left=row.id in left),
            "examples": known and known.examples,
            "versions_merged": parts.get(row.name, 0),
            "rounds_missed_of_the_latest": known and known.missed,
            "reason": known and known.reason,
            "epsilon": {name: epsilon for site, name, epsilon in spent if site == row.name},
            "audit_heads": heads[row.name],
            "approves_runs": None,
            "airlock": None,
            "waits": None,
        }
        one = found.setdefault(row.name, fresh)
        # The policy of a site is for all its studies.
        if (policy := policy_of(worker.declared)) and row.id not in elsewhere:
            one["approves_runs"] = bool(one["approves_runs"]) or policy.approve_runs
            one["airlock"] = bool(one["airlock"]) or policy.airlock
        one["waits"] = one["waits"] or withheld_reason(terms, worker.declared)
    return list(found.values())


def _standing(site: SiteRow, *, left: bool) -> str:
    if site.withdrawn_at:
        return "withdrawn"
    return "left the study" if left else "suspended" if site.suspended_at else "member"


def origin_of(session: Session, run: RunRow, spec: RunSpec) -> Record | None:
    """Return the run from whose updates the run was merged again, or from whose version it started; None if it began
    with a model folder."""
    entries = select(AuditRow.action, AuditRow.detail).where(AuditRow.run_id == run.id).order_by(AuditRow.seq)
    action, detail = session.execute(entries.limit(1)).one()
    if action == "run.remerge":
        return {"run": detail["of"], "version": None}
    same = (VersionRow.digest == spec.version) & (VersionRow.number > 0) & (RunRow.study == run.study)
    earlier = same & (RunRow.id != run.id) & (RunRow.created_at < run.created_at)
    rows = select(RunRow.id, VersionRow.number).join(VersionRow, VersionRow.run_id == RunRow.id).where(earlier)
    first = session.execute(rows.order_by(RunRow.created_at, RunRow.id).limit(1)).first()
    return {"run": first[0], "version": first[1]} if first else None


def terms_record(terms: RunTerms, run: RunRow) -> Record:
    """Return the caller who asks, and by kind of task the digest that the approvals in the sites' ledgers have."""
    spec = terms.spec.trained
    kinds: list[TaskKind] = ["train"] if spec.rounds and not terms.spec.rehearsal else []
    kinds += [terms.spec.asks] if spec.evaluation or not kinds else []
    task = task_of(
        spec, Plan(stage="train"), VersionRef(number=0, digest=spec.version), task_id=run.id, token=0, kind="train",
        held_out=False, run=run.id, number=0, seed=0, lease_seconds=60, orchestrator=terms.orchestrator,
    )  # fmt: skip
    tasks = {kind: task.model_copy(update={"kind": kind}) for kind in kinds}
    digests = {kind: terms_digest(terms_of(each), spec.dataset, kind) for kind, each in tasks.items()}
    # A person is named without the provider's address.
    asked = (terms.orchestrator or "").rpartition("#")[2]
    return {"orchestrator": asked, "digests": digests, "changes_since_the_start": run.changes}


# ---------------------------------------------------------------- results


def evaluations_of(session: Session, run: RunRow, version: VersionRow) -> list[tuple[RunRow, RunSpec, int]]:
    """Return the run, and the runs without rounds of its study that start from its version, each with its settings
    and the number of the version there."""
    spec = RunRow.spec
    same = (
        (RunRow.study == run.study)
        & (spec["version"].as_string() == version.digest)
        & (spec["model"].as_string() == run.spec["model"])
    )
    others = select(RunRow).where(same, spec["rounds"].as_integer() == 0, RunRow.id != run.id)
    rows = [(run, version.number)]
    rows += [(row, 0) for row in session.scalars(others.order_by(RunRow.created_at, RunRow.id))]
    return [(row, RunSpec.model_validate(row.spec), number) for row, number in rows]


def results_of(session: Session, run: RunRow, spec: RunSpec, number: int) -> Iterator[Record]:
    """Yield a version's results in a run, on the central data set and on held-out examples: its main score over
    all, at each site and in each subgroup, with 95 % intervals, and all figures that follow from counts."""
    measured = views.counted_measurements(session, run.id, spec, number)
    for held_out in (False, True):
        ones = [one for one in measured if one.held_out == held_out]
        if spec.evaluation and (main := main_score(ones)):
            yield {
                "run": run.id,
                "run_name": run.name,
                "version": number,
                "dataset": ones[0].dataset,
                "measured_on": f"examples of {ones[0].dataset} that sites hold out" if held_out else ones[0].dataset,
                "rounded": bool(spec.privacy or spec.client_privacy or spec.secure_sums),
                "subgroup_column": spec.evaluation.subgroups,
                **_scores(main, ones, number, spec.evaluation),
                "measurements": list(map(_measurement, ones)),
            }


def _scores(main: MainScore, ones: Sequence[Measurement], number: int, evaluation: Evaluation) -> Record:
    """Return the main score and the figures of a version's measurements, all central or all of sites."""
    figures = {(one.site, one.subgroup): one for one in group_figures(ones, evaluation.specificity)}
    counted = figures if main.name == "accuracy" else {}
    # A central data set has the figures of its site alone.
    everywhere = ones[0].site if main.central else None
    apart = scores_by_site(ones, main.name)
    labels = Counter[str]()
    for one in ones:
        labels[one.site] += weight_of(one, main.name) if main.name in one.metrics else 0
    # Sites without counts are in the score alone.
    pooled = figures.get((everywhere, ALL)) if {site for site, _ in figures} >= labels.keys() else None
    total = pooled if main.name == "accuracy" else None
    whole = _score(main.name, main.values[number], labels.total(), total)
    return {
        "score": main.title,
        "all": whole,
        # Of classes and groups that are too small to be shown.
        "labels_left_out": labels.total() - whole["labels"],
        "sites": {
            site: _score(main.name, by_version[number], labels[site], counted.get((site, ALL)))
            for site, by_version in sorted(apart.items())
        },
        "subgroups": {
            group: _score(main.name, 0.0, 0, one)
            for (site, group), one in counted.items()
            if site == everywhere and group != ALL
        },
        "pooled": pooled.as_json()["found"] if pooled else None,
        "figures": [one.as_json() for one in figures.values()],
    }


def attack_of(session: Session, run: RunRow) -> Record:
    """Return the result of a run's membership attack."""
    found = AttackResult.of(views.run_view(session, run), views.site_reports(session, run.id))
    return {
        "run": run.id,
        "run_name": run.name,
        "succeeded": any((one.figures["auroc"].low or 0) > GUESS for one in found.found if "auroc" in one.figures),
        "sentences": found.sentences,
        "figures": found.as_json(),
    }


def _score(name: str, value: float, labels: int, counted: GroupFigures | None) -> Record:
    """Return a score with its interval: from counts, or of an accuracy without counts from the number of labels."""
    figure = Figure(value)
    if counted and "accuracy" in counted.found.figures:
        figure, labels = counted.found.figures["accuracy"], counted.found.labels
    elif name.endswith("accuracy") and labels and 0 <= value <= 1:
        figure = share(value * labels, labels)._replace(value=value)
    return {"value": figure.value, "low": figure.low, "high": figure.high, "labels": labels}


def _measurement(one: Measurement) -> Record:
    shown = one.model_dump(mode="json", include={"version", "dataset", "held_out", "examples", "metrics"})
    return {"site": one.site, "labels": one.labels, **shown}


def far_below(results: Record) -> Iterator[tuple[str, str, Record]]:
    """Yield the sites and subgroups whose interval is below the score over all: the kind, name and score of each."""
    for kind in ("site", "subgroup"):
        for name, score in results[f"{kind}s"].items():
            if score["high"] is not None and score["high"] < results["all"]["value"]:
                yield kind, name, score


# ---------------------------------------------------------------- audit


def audit_of(session: Session, run_id: str, sites: Sequence[Mapping[str, Any]]) -> Record:
    """Return the last entry of the coordinator's chain that the reader may see, and those of the sites' chains."""
    newest = select(AuditRow.seq, AuditRow.digest, AuditRow.at).order_by(AuditRow.seq.desc()).limit(1)
    seq, digest, written = session.execute(newest).one()
    of_run = session.scalar(select(func.count()).where(AuditRow.run_id == run_id).select_from(AuditRow))
    # The number counts the entries of other studies too.
    number = {"seq": seq} if reads_all(session) else {}
    return {
        "coordinator": {**number, "digest": digest, "at": at(written), "entries_of_run": of_run},
        "sites": {site["site"]: site["audit_heads"] for site in sites},
    }
