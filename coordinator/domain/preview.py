"""Preview of a run: the workers that would take part, and the workload of its first round for each."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from tessera.coordinator.domain.eligibility import (
    SHOWN,
    RunTerms,
    Vocabulary,
    declared_schema,
    listed,
    misfit,
    objections,
    policy_warnings,
    unsuited,
)
from tessera.coordinator.domain.workers import LiveWorker, plan_willing
from tessera.shared.api.runs import Ineligibility, Preview, RoundWorkload, RunSpec, WorkerPreview
from tessera.shared.api.tasks import AdvertisedPolicy
from tessera.shared.methods.base import CoordinatorHalf, Plan, State
from tessera.shared.methods.registry import coordinator_half
from tessera.shared.model.dataset_schema import IDS, TAKES, class_count
from tessera.shared.model.selectors import kept_back
from tessera.shared.model.spec import Model
from tessera.shared.near_names import nearest
from tessera.shared.rounds.planning import (
    bounds_of,
    largest_weights,
    run_facts,
    warnings_of,
    weight_warnings,
)
from tessera.shared.run_settings import is_open, minutes_until_open

AWAITING = "awaiting-approval"


def preview(
    invited: RunTerms,
    model: Model,
    state: State,
    known: Sequence[LiveWorker],
    live: Collection[str],
    now: float,
    vocabulary: Vocabulary,
) -> Preview:
    """Return the preview of a run. `known` has all workers ever seen, `live` the names of those seen recently.

    The first round is planned as the conductor would, for all eligible workers, assuming that their sites approve the
    run. Raises what the method raises.
    """
    found = {worker.name: _before_planning(invited, model, vocabulary, worker, live, now) for worker in known}
    pool = [worker for worker in known if not _but_for_approval(found[worker.name])]
    invited = replace(invited, spec=invited.spec.trained)
    trains = invited.spec.rounds > 0
    plans, refused = plan_willing(invited.spec, model, state, pool) if trains else ({}, {})
    for name, said in refused.items():
        found[name] = [*found[name], said]
    half = coordinator_half(invited.spec.method, run_facts(invited.spec, model))
    asked = {name: _ask(plan, model, half.largest_update(plan)) for name, plan in plans.items()}
    pool = [worker for worker in known if not _but_for_approval(found[worker.name])]
    workers = tuple(
        WorkerPreview(
            worker=worker.name,
            ineligibilities=tuple(found[worker.name]),
            warnings=_warnings(invited, model, vocabulary, worker, asked, pool),
            workload=asked.get(worker.name),
            never_sends=tuple(kept_back(policy.all_never_sent[:SHOWN], model.blocks))
            if (policy := worker.advertised_policy)
            else (),
            evaluations_left=_evaluations_left(invited.spec, worker),
        )
        for worker in known
    )
    cohort, invited_sites = invited.spec.cohort, invited.spec.cohort.sites or ()
    sites = {worker.site for worker in known if not found[worker.name]}
    lacking = cohort.absent(sites)
    return Preview(
        quorum=cohort.quorum,
        eligible=len(sites),
        awaiting_approval=len({worker.site for worker in known if not _but_for_approval(found[worker.name])} - sites),
        workers=workers,
        lacking=tuple(lacking),
        missing_sites=tuple(sorted({*invited_sites, *cohort.require} - {worker.site for worker in known})),
        warnings=(
            *(
                f"{site} would not take part, and cohort.require names it: no round would be merged"
                for site in lacking
            ),
            *_shared_data(invited.spec, known),
            *_other_numbers(invited.spec, model, pool),
            *_other_words(invited.spec, model, pool),
            *_unmeasured(invited.spec, pool),
            *_unmeasured_centrally(invited.spec, known),
            *_measured_in_part(invited.spec, workers),
            *_capped(invited.spec, len({worker.site for worker in pool})),
            *(_limited(half, invited.spec, pool) if trains else []),
            *warnings_of(invited.spec, model, state),
        ),
    )


def _warnings(
    invited: RunTerms,
    model: Model,
    vocabulary: Vocabulary,
    worker: LiveWorker,
    asked: Mapping[str, RoundWorkload],
    pool: Sequence[LiveWorker],
) -> tuple[Ineligibility, ...]:
    """Return the reason that an eligible worker may not do its part, or that the first round asks it for nothing."""
    if ask := asked.get(worker.name):
        # Only padded texts are certainly as long as the site's settings allow.
        long = misfit(invited.spec, worker.declared, model, vocabulary, padded=True)
        found = policy_warnings(invited, worker.advertised_policy, ask.largest_update_bytes or 0)
        return (*found, *([long] if long else []))
    if worker not in pool or not invited.spec.rounds:
        return ()
    cohort, sites = invited.spec.cohort, {one.site for one in pool}
    if worker.site in {one.site for one in pool if one.name in asked}:
        detail = f"cohort.workers_per_site is {cohort.workers_per_site}, and another worker of its site was drawn"
    elif cohort.asked is not None and cohort.asked < len(sites):
        detail = f"a round asks {cohort.asked} of {len(sites)} sites, and the first round draws others"
    else:
        detail = f"{invited.spec.method.name} plans nothing for it in the first round"
    return (Ineligibility(rule="cohort", detail=detail),)


def _shared_data(spec: RunSpec, known: Sequence[LiveWorker]) -> list[str]:
    """Return a warning if several workers of a site have a data set of this name, which may be the same data."""
    holding = Counter(worker.site for worker in known if worker.declared["datasets"].get(spec.dataset, 0) > 0)
    sites = sorted(site for site, count in holding.items() if count > 1)
    if not sites:
        return []
    subject = f"several workers of {listed(sites)} have a data set {spec.dataset!r}"
    return [f"{subject}: if it is the same data, each spends a separate privacy budget on it; run one worker on it"]


def _other_numbers(spec: RunSpec, model: Model, pool: Sequence[LiveWorker]) -> list[str]:
    """Return a warning if two workers number a class differently."""
    if class_count(model) is None:
        return []
    seen = dict[str, tuple[int, str]]()  # the number and the first worker of each name
    for worker in pool:
        for number, name in enumerate(declared_schema(spec, worker.declared).class_names):
            other, first = seen.setdefault(name, (number, worker.name))
            if other != number:
                subject = (
                    f"class {other} of {spec.dataset!r} at {first} has the name of class {number} at {worker.name}"
                )
                return [f"{subject}: put the same `labels` into all sites' settings, and name the model's classes"]
    return []


def _other_words(spec: RunSpec, model: Model, pool: Sequence[LiveWorker]) -> list[str]:
    """Return a warning if two workers number words differently, which the model's tokenizer did not show."""
    if IDS not in TAKES.get(model.head, ()):
        return []
    seen = dict[str, str]()  # the first worker of each vocabulary
    for worker in pool:
        if own := declared_schema(spec, worker.declared).vocabulary:
            seen.setdefault(own, worker.name)
    if len(seen) < 2:
        return []
    first, other, *_ = seen.values()
    subject = f"the tokenizers of {spec.dataset!r} at {first} and {other} number words differently"
    return [f'{subject}: start from a model folder with a tokenizer, and set tokenizer = "run" at all sites']


def _limited(half: CoordinatorHalf[Any], spec: RunSpec, pool: Sequence[LiveWorker]) -> list[str]:
    """Return a warning if some sites would weigh less than the examples that they have."""
    willing = [worker.participant(spec.dataset) for worker in pool]
    return weight_warnings(half, bounds_of(spec, willing), largest_weights(spec, willing)) if willing else []


def _unmeasured(spec: RunSpec, pool: Sequence[LiveWorker]) -> list[str]:
    """Return a warning if sites that take part would not measure versions, although the run asks them to."""
    if not (spec.evaluation and spec.evaluation.sites):
        return []
    measuring = {
        worker.site
        for worker in pool
        if "evaluate" in worker.declared["kinds"] and worker.declared.get("held_out", {}).get(spec.dataset, 0) > 0
    }
    sites = sorted({worker.site for worker in pool} - measuring)
    if not sites:
        return []
    subject = f"{listed(sites)} would give no score: too few examples are held out of"
    return [
        f"{subject} {spec.dataset!r}. Raise its held_out: a site measures on min_evaluation_examples (20) or more"
    ]


def _unmeasured_centrally(spec: RunSpec, known: Sequence[LiveWorker]) -> list[str]:
    """Return a warning if no worker would measure versions on the central data set."""
    wanted = spec.evaluation and spec.evaluation.dataset
    if not wanted:
        return []
    declared = [worker.declared for worker in known if "evaluate" in worker.declared["kinds"]]
    held = {name for each in declared for name, examples in each["datasets"].items() if examples > 0}
    if wanted in held:
        return []
    remedy = (
        f"did you mean {close!r}?" if (close := nearest(wanted, held)) else "ask a site to add it, or leave it out"
    )
    return [f"no worker that evaluates has the data set {wanted!r} of evaluation.dataset; {remedy}"]


def _evaluations_left(spec: RunSpec, worker: LiveWorker) -> int | None:
    """Return the number of versions of the run that a worker's site may still measure; None if it measures none."""
    policy, declared, evaluation = worker.advertised_policy, worker.declared, spec.evaluation
    if policy is None or evaluation is None or "evaluate" not in declared["kinds"]:
        return None
    held_out = declared.get("held_out", {}) if evaluation.sites else {}
    names = {spec.dataset} & held_out.keys() | {evaluation.dataset} & declared["datasets"].keys()
    most = policy.max_run_evaluations
    left = [policy.evaluations_left.get(name, most) for name in names if name]
    return min((each for each in left if each is not None), default=None)


def _measured_in_part(spec: RunSpec, workers: Sequence[WorkerPreview]) -> list[str]:
    """Return a warning if sites would not measure all versions of the run, since their evaluations are used up."""
    versions = spec.evaluation.versions(spec.rounds) if spec.evaluation else 0
    left = {one.worker: one.evaluations_left for one in workers if one.evaluations_left is not None}
    few = [f"{name} ({count} left)" for name, count in left.items() if count < versions]
    if not few:
        return []
    remedy = "raise evaluation.every, or have the site raise max_run_evaluations or max_evaluations"
    return [f"the run measures {versions} versions, more than {listed(few)} would: {remedy}"]


def _capped(spec: RunSpec, sites: int) -> list[str]:
    """Return a warning if the sites would have trained as often as the run allows them before its last round."""
    most, asked = spec.cohort.max_updates_per_site, spec.cohort.target_updates if spec.cohort.buffers else None
    each = min(asked or spec.cohort.asked or sites, sites)
    if most is None or not each or (reached := most * sites // each) >= spec.rounds:
        return []
    subject = f"{sites} sites, each of which trains from {most} versions at most, make about {reached} versions"
    return [f"{subject} of {spec.rounds}: set rounds to {max(reached, 1)}, or raise cohort.max_updates_per_site"]


def _but_for_approval(found: Sequence[Ineligibility]) -> list[Ineligibility]:
    return [said for said in found if said.rule != AWAITING]


def _before_planning(
    invited: RunTerms, model: Model, vocabulary: Vocabulary, worker: LiveWorker, live: Collection[str], now: float
) -> list[Ineligibility]:
    found = [_silent(worker.advertised_policy, now)] if worker.name not in live else []
    found += objections(invited, worker.site, worker.declared)
    if said := unsuited(invited.spec, worker.declared, model, vocabulary):
        found.append(said)
    if worker.advertised_policy and worker.advertised_policy.approve_runs and invited.run is None:
        found.append(Ineligibility(rule=AWAITING, detail="a person at its site has to approve the run first"))
    return found


def _silent(policy: AdvertisedPolicy | None, now: float) -> Ineligibility:
    """Return the reason that a worker is silent: its site's hours, if they are known, or an unknown reason."""
    if policy and policy.hours:
        local = datetime.fromtimestamp(now, UTC) + timedelta(minutes=policy.utc_offset_minutes)
        if not is_open(policy.hours, local):
            hours, minutes = divmod(minutes_until_open(policy.hours, local), 60)
            detail = f"it works {', '.join(policy.hours)} and begins in {hours} h {minutes} min"
            return Ineligibility(rule="hours", detail=detail)
    return Ineligibility(rule="silent", detail="it was not seen recently")


def _ask(plan: Plan, model: Model, largest_update: int) -> RoundWorkload:
    totals: dict[str, int] = {}
    for part in ("fetch", "train", "upload"):
        blocks = plan.sent(model.blocks) if part == "upload" else getattr(plan, part).resolve(model.blocks)
        if part == "fetch":
            # An external base is at the sites.
            blocks = tuple(block for block in blocks if block.name not in model.external)
        totals |= {f"{part}_blocks": len(blocks), f"{part}_bytes": sum(block.nbytes for block in blocks)}
    return RoundWorkload(stage=plan.stage, largest_update_bytes=largest_update, **totals)
