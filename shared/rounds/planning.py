"""Plans and tasks of a round: pure functions of the run's spec, its state and its eligible workers.

The coordinator calls them when it opens a round in its tables, a simulation when it opens one in its own process.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from heapq import nlargest
from itertools import chain
from operator import attrgetter
from random import Random
from statistics import median
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from tessera.shared.aggregation.local_work import ROUND
from tessera.shared.aggregation.robust import FEW_SENDERS
from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import Bounds, RunSpec
from tessera.shared.api.secure_sums import SumTask
from tessera.shared.api.tasks import MERGING, Receipt, Task
from tessera.shared.api.versions import VersionRef
from tessera.shared.methods.base import (
    LORA_RANK,
    SECONDS_PER_STEP,
    CoordinatorHalf,
    Guard,
    MethodSettings,
    MethodSpec,
    Participant,
    Plan,
    RunInfo,
    State,
    UnsupportedRun,
    Update,
)
from tessera.shared.methods.registry import (
    UnknownMethod,
    check,
    check_rounds,
    chooses_blocks,
    coordinator_half,
    settings_type,
)
from tessera.shared.model.blocks import layer_key
from tessera.shared.model.dataset_schema import generation_fault, ignore_fault
from tessera.shared.model.selectors import SelectorError, trainable_blocks
from tessera.shared.model.spec import Model
from tessera.shared.model.training_faults import training_faults
from tessera.shared.problems import Fault, Invalid, InvalidUpdate, faults_of
from tessera.shared.rounds import client_privacy, preferences, regions
from tessera.shared.rounds.update_memory import forgotten
from tessera.shared.run_settings import InvalidDelta, check_delta
from tessera.shared.schedule import Pace, fitted_steps, local_steps
from tessera.shared.schema import without_effect
from tessera.shared.secure_sums.messages import NOISE_BITS
from tessera.shared.tensors.dtypes import NUMPY_DTYPES
from tessera.shared.tensors.hashing import derive_seed
from tessera.shared.tensors.statistics import is_statistic

MAX_WEIGHT_OF_MEDIAN = 4
"""Default limit on a site's weight, in multiples of the median site's."""
MAX_NORM_OF_MEDIAN = 10.0
"""Default limit on an update's norm, in multiples of the median norm."""

OF_UPDATES = (
    "codec", "upload_budget", "upload_seconds", "download_codec", "robust", "server_optimizer", "max_examples",
    "max_update_norm", "max_norm_of_median", "signals",
)  # fmt: skip
"""The settings of a run that act on the updates of its sites."""
OF_FILES = ("upload_budget", "upload_seconds", "max_examples")
"""The settings in `OF_UPDATES` that act on an update without blocks too."""

MAX_NAMED = 5
MAX_WARNINGS = 16
MAX_WARNING_CHARACTERS = 500


def run_facts(spec: RunSpec, model: Model) -> RunInfo:
    """Return the facts of the run that both halves of its method may know."""
    return RunInfo(
        model.blocks,
        spec.rounds,
        spec.normalization,
        spec.training,
        spec.privacy,
        upload_budget=spec.upload_budget,
        upload_seconds=spec.upload_seconds,
        robust=spec.robust,
        workers_per_site=spec.cohort.workers_per_site,
        max_update_norm=spec.max_update_norm,
        client_privacy=spec.client_privacy,
        buffered=spec.cohort.buffers,
        memory=spec.cohort.memory,
        fitted=spec.cohort.work == "fitted",
        secure_sums=spec.secure_sums is not None,
        lossy_settings=spec.lossy_settings,
        server_optimizer=spec.server_optimizer,
        external=frozenset(model.external),
        head=model.head,
        lora=model.lora,
    )


def check_method(chosen: MethodSpec) -> None:
    """Raise Invalid for a method that is not installed here, or for settings that it does not take."""
    try:
        check(chosen)
    except UnknownMethod as fault:
        unknown = Fault(pointer="/method/name", detail=str(fault))
        raise Invalid("the run's method is not known here", errors=[unknown]) from None
    except ValidationError as refusal:
        faults = faults_of(refusal, "/method/settings", settings_type(chosen.name))
        raise Invalid(f"the settings of method {chosen.name!r} have faults", errors=faults) from None


def begun(spec: RunSpec, model: Model, first: State) -> State:
    """Return the run's state before its first round.

    Raises Invalid for a run that its method cannot do, or with settings of training that its model cannot have.
    """
    faults = [Fault(pointer=f"/training/{name}", detail=said) for name, said in training_faults(spec.training, model)]
    if faults:
        raise Invalid("the model cannot be trained with these settings", errors=faults)
    if spec.evaluation and (said := ignore_fault(spec.evaluation.ignore, model)):
        unknown = Fault(pointer="/evaluation/ignore", detail=said)
        raise Invalid("the model cannot be evaluated with these settings", errors=[unknown])
    prefers = spec.training.loss == "dpo"
    if spec.evaluation and (said := generation_fault(spec.evaluation.max_new_tokens, model, prefers=prefers)):
        too_many = Fault(pointer="/evaluation/max_new_tokens", detail=said)
        raise Invalid("the model cannot be evaluated with these settings", errors=[too_many])
    spec = spec.trained
    half = coordinator_half(spec.method, run_facts(spec, model))
    _check_effect(spec, half.settings)
    _check_ranks(spec, model)
    try:
        state = preferences.begun(spec, model, half, initial_state(half, forgotten(first)))
        if not spec.rounds:
            return state
        plans = _first_plans(half, model, state)
        _check_chosen(half.run, plans)
        _check_sent(spec, plans)
        check_work(half, model, plans)
    except UnsupportedRun as fault:
        raise Invalid("the method cannot do this run", errors=[Fault(pointer="/method", detail=str(fault))]) from None
    except SelectorError as fault:
        remedy = "name blocks of the model in method.settings, or choose another method"
        absent = Fault(pointer="/method", detail=f"{fault}: {remedy}")
        raise Invalid("the method selects blocks that the model does not have", errors=[absent]) from None
    _check_clip(half.run, plans)
    _check_delta(spec)
    _check_unit(spec)
    _check_lengths(spec, model)
    if spec.client_privacy and spec.secure_sums:
        _check_room(spec, model, plans)
    return regions.begun(spec, client_privacy.begun(spec, state))


def with_changes(spec: RunSpec, model: Model, changes: Mapping[str, Any], remedy: str) -> RunSpec:
    """Return the settings of a run under way with other values of some, which have the shape of a `RunPatch`.

    Raises Invalid, with the `remedy`, for those that the run's noise, schedule, stages or sums follow from.
    """
    try:
        wanted = spec.changed(changes)
    except ValidationError as refusal:
        raise Invalid("the run cannot have these settings", errors=faults_of(refusal, model=RunSpec)) from None
    if reasons := list(_fixed(spec, wanted, model)):
        faults = [Fault(pointer=pointer, detail=detail) for pointer, detail in reasons]
        raise Invalid("the run depends on settings that would change", errors=faults, remedy=remedy)
    return wanted


def _fixed(spec: RunSpec, wanted: RunSpec, model: Model) -> Iterator[tuple[str, str]]:
    """Yield the places of changed settings that a run under way cannot change, with the reasons."""
    if not spec.rounds:
        yield "/rounds", "a run without rounds trains nothing, and its settings stay"
    elif spec.secure_sums:
        yield "/secure_sums", "the terms of secure sums, which helpers and sites agreed on, include these settings"
    elif wanted.rounds == spec.rounds:
        return
    elif spec.privacy or spec.client_privacy:
        name = "privacy" if spec.privacy else "client_privacy"
        yield "/rounds", f"the noise of {name} is computed for {spec.rounds} rounds"
    elif spec.training.scheduled:
        yield "/rounds", f"training.schedule and training.warmup run over the {spec.rounds} rounds of the run"
    else:
        check_method(spec.method)
        try:
            check_rounds(spec.method, run_facts(wanted, model))
        except UnsupportedRun as fault:
            yield "/rounds", f"method {spec.method.name}: {fault}"


def _check_effect(spec: RunSpec, settings: MethodSettings) -> None:
    """Raise Invalid for settings of the run or of its method that others leave without effect."""
    found = [*without_effect(spec), *((f"method/settings/{path}", said) for path, said in without_effect(settings))]
    if spec.privacy and spec.privacy.selection == "noisy" and not chooses_blocks(spec.method):
        said = f"would spend privacy on nothing: {spec.method.name} chooses no blocks by data. Leave it out"
        found.append(("privacy/selection", said))
    if found:
        faults = [Fault(pointer=f"/{path}", detail=said) for path, said in found]
        raise Invalid("the run has settings without effect", errors=faults)


def _check_ranks(spec: RunSpec, model: Model) -> None:
    """Raise Invalid for ranks of sites that the model's adapters do not have."""
    ranks = model.lora.ranks if model.lora else ()
    if wrong := sorted(site for site, rank in spec.lora_ranks.items() if rank not in ranks):
        has = (
            f"has adapters of the ranks {', '.join(map(str, ranks))}" if ranks else "has no adapters of several ranks"
        )
        remedy = "name one of these" if ranks else "create it with `tessera model init --lora-rank 4,8,16`"
        detail = f"the rank is {spec.lora_ranks[wrong[0]]}, and the model {has}: {remedy}"
        fault = Fault(pointer=f"/lora_ranks/{wrong[0]}", detail=detail)
        raise Invalid("a site cannot train adapters of this rank", errors=[fault])


def _check_sent(spec: RunSpec, plans: Sequence[Plan]) -> None:
    """Raise UnsupportedRun for settings of updates if the method trains and sends no blocks."""
    if not plans or any(plan.upload or not plan.train for plan in plans):
        return
    fields = RunSpec.model_fields
    acting = OF_FILES if any(plan.extra for plan in plans) else ()
    names = [name for name in OF_UPDATES if name not in acting]
    if found := [name for name in names if getattr(spec, name) != fields[name].get_default()]:
        raise UnsupportedRun(
            f"the method sends no blocks, so that {', '.join(found)} would have no effect: leave "
            f"{'it' if len(found) == 1 else 'them'} out, or choose a method that sends some"
        )


def _check_clip(run: RunInfo, plans: Sequence[Plan]) -> None:
    """Raise Invalid for clipping by layer where the first round has no two layers to train."""
    if run.privacy is None or run.privacy.clip == "whole" or not plans:
        return
    trained = [block for plan in plans for block in run.blocks if run.trained(plan.train).holds(block)]
    if len(set(map(layer_key, trained))) < 2:
        said = "the method trains blocks of one layer, or of none, so that there is one part to clip: leave it out"
        fault = Fault(pointer="/privacy/clip", detail=said)
        raise Invalid("there are no layers to clip apart", errors=[fault])


def _first_plans(half: CoordinatorHalf[Any], model: Model, state: State) -> list[Plan]:
    """Return the first round's plans for a worker that declares nothing. Raises SelectorError as `resolve` does."""
    plans = list(plans_of(half, state, [Participant("any", 1)], Random(0)).values())  # noqa: S311 (no secret)
    _require_blocks(model, plans)
    return plans


def plans_of(
    half: CoordinatorHalf[Any],
    state: State,
    cohort: Sequence[Participant],
    rng: Random,
    lora_ranks: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, Plan]:
    """Return the method's plans by worker, less the blocks that the run or the worker does not train. `lora_ranks`
    are the run's. Raises UnsupportedRun if a worker can train none of the model's adapters."""
    ranks = {worker.name: rank_of(half.run, worker, lora_ranks) for worker in cohort}
    plans = {name: _limited(half.run, plan, ranks[name]) for name, plan in half.plan(state, cohort, rng).items()}
    dated = {ROUND: float(state.round + 1)} if half.normalizes and half.run.training.scheduled else {}
    steps = {worker.name: worker.steps for worker in cohort if half.run.fitted}
    return {name: _of_length(plan, steps.get(name), dated) for name, plan in plans.items()}


def _of_length(plan: Plan, steps: int | None, scalars: Mapping[str, float]) -> Plan:
    """Return a plan with the worker's own number of steps, and with these scalars."""
    changes = {"steps": steps, "scalars": {**plan.scalars, **scalars}}
    return plan.model_copy(update=changes) if steps or scalars else plan


def rank_of(run: RunInfo, worker: Participant, lora_ranks: Mapping[str, int]) -> int | None:
    """Return the rank at which a worker trains the model's adapters, None for their whole rank. Raises
    UnsupportedRun if each of the model's ranks is larger than the worker's."""
    if run.lora is None:
        return None
    most = worker.resources.get(LORA_RANK)
    if not (rank := run.lora.rank_within(most)):
        raise UnsupportedRun(
            f"{worker.name} trains adapters up to rank {most:g} (resources.lora_rank), and the model has none of "
            "these: add a smaller rank to `tessera model init --lora-rank`, or leave the site out (cohort.sites)"
        )
    rank = min(rank, lora_ranks.get(worker.site, rank))
    return None if rank == run.lora.rank else rank


def _limited(run: RunInfo, plan: Plan, lora_rank: int | None) -> Plan:
    """Return a plan with the blocks that may train alone, at the worker's rank of adapters."""
    scalars = plan.scalars if lora_rank is None else {**plan.scalars, LORA_RANK: float(lora_rank)}
    limited = replace(run, lora_rank=lora_rank).trained
    return plan.model_copy(update={"train": limited(plan.train), "upload": limited(plan.upload), "scalars": scalars})


def _check_chosen(run: RunInfo, plans: Iterable[Plan]) -> None:
    """Raise UnsupportedRun if the first round trains or sends none of the blocks that its plans select, or if
    `full_fine_tuning` has no effect."""
    base = [block for block in run.blocks if not trainable_blocks(run.blocks, run.external).holds(block)]
    for plan in plans:
        if plan.train:
            run.require_trainable(plan.train, "selects blocks to train")
        if plan.upload and not plan.upload.resolve(run.blocks):
            raise UnsupportedRun(
                "the method keeps all trained blocks at the sites, and nothing is left to send: change "
                "method.settings, or choose the method local"
            )
        if run.training.full_fine_tuning and plan.train and not any(plan.train.holds(block) for block in base):
            raise UnsupportedRun(
                "training.full_fine_tuning is true, and the method trains no block of the base: leave the setting "
                "out, or choose another method, such as fedavg"
            )


def _require_blocks(model: Model, plans: Iterable[Plan]) -> None:
    """Raise SelectorError for a plan that selects blocks which the model does not have."""
    for plan in plans:
        for selector in (plan.fetch, plan.train, plan.upload):
            selector.resolve(model.blocks)


def _check_delta(spec: RunSpec) -> None:
    """Raise Invalid if the delta of client-level privacy is too large for the number of sites."""
    try:
        if spec.client_privacy:
            check_delta(spec.client_privacy.delta, client_privacy.stated_sites(spec), "site", "client_privacy.delta")
    except InvalidDelta as fault:
        too_large = Fault(pointer="/client_privacy/delta", detail=str(fault))
        raise Invalid("client_privacy would protect no site", errors=[too_large]) from None


def _check_unit(spec: RunSpec) -> None:
    """Raise Invalid if the unit of a sum of few bits would follow a step other than the mean of the sites'."""
    if spec.secure_sums and spec.secure_sums.bits != NOISE_BITS and not spec.server_optimizer.neutral:
        bits = f"{spec.secure_sums.bits} bits take their unit from the mean step, which it changes"
        fault = Fault(pointer="/server_optimizer", detail=f"{bits}: leave it out, or secure_sums.bits")
        raise Invalid("secure_sums.bits does not go with a server optimizer", errors=[fault])


def _check_lengths(spec: RunSpec, model: Model) -> None:
    """Raise Invalid for DoRA in a run with `privacy`: its gradients of single examples were not verified."""
    if spec.privacy and model.lora and model.lora.dora:
        detail = "gradients of single examples are not known for DoRA's adapters: create the model without --dora"
        raise Invalid("the run cannot be private", errors=[Fault(pointer="/privacy", detail=detail)])


def _check_room(spec: RunSpec, model: Model, plans: Sequence[Plan]) -> None:
    """Raise Invalid if secure sums of the run's updates have no room for the noise."""
    values = sum(block.numel for block in model.blocks if any(plan.upload.holds(block) for plan in plans))
    try:
        client_privacy.check_room(spec, max(values, 1))
    except ValueError as fault:
        no_room = Fault(pointer="/client_privacy", detail=str(fault))
        raise Invalid("the sums have no room for the noise of client_privacy", errors=[no_room]) from None


def initial_state(half: CoordinatorHalf[Any], first: State) -> State:
    """Return a run's state before its first round. Raises UnsupportedRun if its method cannot do the run, and
    SelectorError for blocks that it would select later and the model does not have."""
    _check_half(half)
    return half.start(first)


def check_work(half: CoordinatorHalf[Any], model: Model, plans: Sequence[Plan]) -> None:
    """Check a method and its plans against the run's protections.

    The coordinator checks the first round's plans when a run is created, and a site its own plan in each round: it
    does not rely on the coordinator. Raises UnsupportedRun.
    """
    _check_half(half)
    _check_trained(model, plans)
    _check_beside(half, model)
    _check_extra(half, plans)
    if half.run.secure_sums:
        _check_summed(model, plans)
    if half.run.client_privacy:
        _check_noisy(model, plans)


def _check_half(half: CoordinatorHalf[Any]) -> None:
    """Raise UnsupportedRun if the method cannot do the run."""
    if half.run.normalization == "inverse-probability":
        for block in half.run.blocks:
            half.inclusion_probability(block)
    merging, telling = (next(c for c in type(half).__mro__ if name in vars(c)) for name in ("merge", "check_merge"))
    # A class's statement about its own merge does not hold for a merge that overrides it.
    check_merge = CoordinatorHalf.check_merge if telling in merging.__mro__[1:] else type(half).check_merge
    guards: dict[Guard, bool] = {
        "robust": not half.run.robust.neutral,
        "client_privacy": half.run.client_privacy is not None,
        "secure_sums": half.run.secure_sums,
    }
    for guard, is_set in guards.items():
        if is_set:
            check_merge(half, guard)
    if half.run.buffered:
        half.require("buffered", "set cohort.mode to barrier")
    if half.run.memory:
        half.check_memory()
    if half.normalizes:
        _check_local_work(half)
    if half.run.lora and half.run.lora.ranks:
        _check_parts(half)


def _check_local_work(half: CoordinatorHalf[Any]) -> None:
    """Raise UnsupportedRun if steps cannot be divided by the sites' local work."""
    run, kept = half.run, half.run.training.keep_moments and half.run.training.optimizer == "sgd"
    if kept:
        raise UnsupportedRun(
            "the local work counts a site's momentum from zero in each round (fednova, and cohort.work): leave "
            "training.keep_moments out, or train with adamw"
        )
    if run.fitted:
        half.require("unequal_steps", 'set cohort.work to "fixed"')


def _check_parts(half: CoordinatorHalf[Any]) -> None:
    """Raise UnsupportedRun if the parts of adapters would not be averaged over the sites that train them."""
    run = half.run
    remedy = "create the model with one rank (--lora-rank 8)"
    if type(half).merge is not CoordinatorHalf.merge and not half.averages_parts:
        raise UnsupportedRun(
            "the method does not average each block over the sites that sent it, and the model has adapters of "
            f"several ranks: {remedy}, or choose a method such as lora"
        )
    past = {
        "secure_sums needs one plan for all sites": run.secure_sums,
        "client_privacy divides by the number of all sites": run.client_privacy is not None,
        f"normalization {run.normalization!r} divides by the weights of all sites": run.normalization
        != "participants",
    }
    for reason, is_set in past.items():
        if is_set:
            raise UnsupportedRun(
                f"{reason}, and a part of adapters of several ranks is averaged over the sites that train it: "
                f"{remedy}, or leave {reason.split()[0]} out"
            )


def _check_extra(half: CoordinatorHalf[Any], plans: Sequence[Plan]) -> None:
    """Raise UnsupportedRun if a round sends arrays beside blocks past a guard of the run, or two of one name."""
    run = half.run
    for plan in plans:
        if len({each.name for each in plan.extra}) < len(plan.extra):
            raise UnsupportedRun("the method's plan names an extra array twice: give each a name of its own")
    past = {
        "secure_sums": run.secure_sums,
        "client_privacy": run.client_privacy is not None,
        "privacy": run.privacy is not None and not half.covers_extra,
        "cohort.workers_per_site": run.workers_per_site > 1,
    }
    names = sorted({each.name for plan in plans for each in plan.extra})
    if names and (found := [guard for guard, is_set in past.items() if is_set]):
        raise UnsupportedRun(
            f"the method sends arrays beside blocks ({', '.join(names)}), which {' and '.join(found)} would not "
            f"cover: leave out {' and '.join(found)}, or choose a method that sends blocks alone, such as fedavg"
        )


def _check_summed(model: Model, plans: Iterable[Plan]) -> None:
    """Raise UnsupportedRun if a round has nothing to sum."""
    if not any(plan.upload.resolve(model.blocks) for plan in plans):
        raise UnsupportedRun("the method sends no blocks, of which secure_sums could be taken: leave it out")


def _check_noisy(model: Model, plans: Sequence[Plan]) -> None:
    """Raise UnsupportedRun if a round would add noise to running statistics, which can make a variance negative."""
    sent = sorted(b.name for b in model.blocks if is_statistic(b.name) and any(p.upload.holds(b) for p in plans))
    if sent:
        raise UnsupportedRun(
            f"client_privacy adds noise to all sent blocks, which can make running statistics such as {sent[0]} "
            "negative: choose fedbn, which keeps them at the sites, or a model with layer norms"
        )


def _check_trained(model: Model, plans: Sequence[Plan]) -> None:
    """Raise UnsupportedRun if a round trains an external base, or blocks of 16 bits."""
    _check_base(model, plans)
    short = {block.name for block in model.blocks if NUMPY_DTYPES[block.dtype].itemsize == 2}
    trained = [block.name for plan in plans for block in plan.train.resolve(model.blocks)]
    if found := sorted(short.intersection(trained)):
        raise UnsupportedRun(
            f"the method trains {len(found)} blocks of 16 bits, such as {found[0]}, which small steps do not move: "
            "create the model with `tessera model init --dtype float32`, or train adapters (--lora-rank) beside it"
        )


def _check_beside(half: CoordinatorHalf[Any], model: Model) -> None:
    """Raise UnsupportedRun if the method's merge changes an external base, or blocks of 16 bits."""
    changed = [block for block in model.blocks if half.merged_beside.holds(block)]
    if external := [block.name for block in changed if block.name in model.external]:
        raise UnsupportedRun(
            f"the method's merge changes {len(external)} blocks of the external base, such as {external[0]}, which "
            "the coordinator does not have: create the model without --external-base, or change method.settings"
        )
    if short := [block.name for block in changed if NUMPY_DTYPES[block.dtype].itemsize == 2]:
        raise UnsupportedRun(
            f"the method's merge changes {len(short)} blocks of 16 bits, such as {short[0]}, in which a small step "
            "is lost: create the model with `tessera model init --dtype float32`, or change method.settings"
        )


def _check_base(model: Model, plans: Iterable[Plan]) -> None:
    """Raise UnsupportedRun for a plan that trains or sends a block of an external base."""
    selectors = [selector for plan in plans for selector in (plan.train, plan.upload)]
    chosen = {block.name for block in model.base if any(selector.holds(block) for selector in selectors)}
    if chosen:
        raise UnsupportedRun(
            f"the method trains {len(chosen)} blocks of the external base, such as {min(chosen)}, of which the "
            "coordinator has digests alone: leave out training.full_fine_tuning, create the model with adapters "
            "(--lora-rank) or prompts, or create it without --external-base"
        )


def plan_round(spec: RunSpec, model: Model, state: State, willing: Sequence[Participant]) -> dict[str, Plan]:
    """Return the plans of the round after `state` by worker, in the order of the names. No plans end the run.

    The cohort is drawn from the eligible workers, independently of their order: sites first, so that no site is drawn
    more often for having more workers, then workers of each. Raise SelectorError for a plan that selects blocks which
    the model does not have, and anything that the method raises.
    """
    number = state.round + 1
    rng = Random(derive_seed(spec.seed, "cohort", number))  # noqa: S311 (no secret: reproducible)
    of_sites = by_site(willing)
    drawn = [_of_site(spec, number, of_sites[site]) for site in choose(list(of_sites), spec.cohort, rng)]
    cohort = sorted(chain.from_iterable(drawn), key=attrgetter("name"))
    half = coordinator_half(spec.method, run_facts(spec, model))
    plans = plans_of(half, state, cohort, rng, spec.lora_ranks)
    if spec.parent:
        # The parent's method has planned for the region.
        plans = dict.fromkeys(plans, spec.parent.base.plan)
    _require_blocks(model, plans.values())
    if model.external:
        _check_base(model, plans.values())
    return {participant.name: plans[participant.name] for participant in cohort if participant.name in plans}


def own_steps(
    spec: RunSpec, workers: Sequence[Participant], measured: Mapping[str, Pace] = MappingProxyType({})
) -> list[Participant]:
    """Return the workers of a run with fitted work, with their own numbers of steps: by the paces that were
    `measured`, by name, or else those that their sites declare."""
    declared = {worker.name: worker.resources.get(SECONDS_PER_STEP) for worker in workers}
    paces = {name: Pace(seconds) for name, seconds in declared.items() if seconds} | dict(measured)
    examples = {worker.name: worker.examples for worker in workers}
    found = fitted_steps(spec.training, examples, paces, spec.cohort.work_factor)
    usual = {worker.name: local_steps(spec.training, worker.examples) for worker in workers}
    return [
        worker if found[worker.name] == usual[worker.name] else replace(worker, steps=found[worker.name])
        for worker in workers
    ]


def rehearsal_plans(spec: RunSpec, model: Model, state: State, workers: Iterable[Participant]) -> dict[str, Plan]:
    """Return the first round's plan of each worker, if all take part. Raises as `plan_round`."""
    half, cohort = coordinator_half(spec.method, run_facts(spec, model)), sorted(workers, key=attrgetter("name"))
    rng = Random(derive_seed(spec.seed, "cohort", 1))  # noqa: S311 (no secret)
    plans = plans_of(half, state, cohort, rng, spec.lora_ranks)
    _require_blocks(model, plans.values())
    return plans


def by_site(willing: Iterable[Participant]) -> dict[str, list[Participant]]:
    """Return the participants of each site, by the site's name."""
    found: dict[str, list[Participant]] = {}
    for participant in willing:
        found.setdefault(participant.site, []).append(participant)
    return found


def _of_site(spec: RunSpec, number: int, workers: Sequence[Participant]) -> list[Participant]:
    """Return the workers of a site that take part: first those that did so last, since a vault belongs to a worker,
    then others at random."""

    def place(worker: Participant) -> tuple[int, int]:
        return -worker.last_round, derive_seed(spec.seed, "worker", number, worker.name)

    return sorted(workers, key=place)[: spec.cohort.workers_per_site]


def bounds_of(spec: RunSpec, willing: Iterable[Participant], *, simulated: bool = False) -> Bounds:
    """Return the bounds of a run whose first round opens with these eligible workers.

    They stay the run's: bounds recomputed for each cohort would depend on its members. The median is taken over
    sites, so that a site which declares a huge number of examples shifts it by half a rank. The sites of a simulation
    have the examples that they declare, so that their weights have no limit by default.
    """
    if spec.client_privacy or spec.secure_sums:
        # Each site counts as one, or with the weight of its own settings; no single norm is known.
        return Bounds()
    examples: int | None = None
    if not simulated:
        examples = max(1, int(MAX_WEIGHT_OF_MEDIAN * median(largest_weights(spec, willing).values())))
    norm = MAX_NORM_OF_MEDIAN if spec.robust.neutral else None
    if spec.max_examples is not None:
        examples = None if spec.max_examples == "unlimited" else spec.max_examples
    if spec.max_norm_of_median is not None:
        norm = None if spec.max_norm_of_median == "unlimited" else spec.max_norm_of_median
    return Bounds(max_examples=examples, max_norm_of_median=norm)


def largest_weights(spec: RunSpec, willing: Iterable[Participant]) -> dict[str, int]:
    """Return the most examples with which each site may take part in a round: with its largest workers."""
    most = spec.cohort.workers_per_site
    return {
        site: sum(nlargest(most, (worker.examples for worker in workers)))
        for site, workers in by_site(willing).items()
    }


def weight_warnings(half: CoordinatorHalf[Any], bounds: Bounds, examples: Mapping[str, int]) -> list[str]:
    """Return a warning if some sites weigh less than their `examples` would. Robust rules weigh all sites alike."""
    most = bounds.max_examples
    if most is None or not half.run.robust.neutral:
        return []
    weight = half.weight(Update("", most, {}))
    limited = sorted(
        (-n, site) for site, n in examples.items() if n > most and half.weight(Update("", n, {})) > weight
    )
    if not limited:
        return []
    named = ", ".join(f"{site} ({-count})" for count, site in limited[:MAX_NAMED])
    more = f" and {len(limited) - MAX_NAMED} more" if len(limited) > MAX_NAMED else ""
    subject = f"max_examples limits the weight of a site to {most} examples, which {named}{more} would exceed"
    return [f'{subject}: set it to "unlimited" for a mean by the declared numbers']


def check_report(spec: RunSpec, model: Model, plan: Plan, examples: int, metrics: Mapping[str, float]) -> None:
    """Have the method check a worker's report beside its blocks. Raises InvalidUpdate."""
    try:
        coordinator_half(spec.method, run_facts(spec, model)).check(plan, examples, metrics)
    except ValueError as fault:
        unusable = Fault(pointer="/metrics", detail=str(fault)[:300], code="metrics-unusable")
        raise InvalidUpdate("the method cannot merge the update's numbers", errors=[unusable]) from None


def dataset_of(spec: RunSpec, kind: str, *, held_out: bool) -> str:
    """Return a worker's name of a task's data."""
    central = kind == "evaluate" and not held_out and spec.evaluation
    return (central and central.dataset) or spec.dataset


def task_of(
    spec: RunSpec,
    plan: Plan,
    version: VersionRef,
    *,
    task_id: str,
    token: int,
    kind: str,
    held_out: bool,
    run: str,
    number: int,
    seed: int,
    lease_seconds: float,
    inline_bytes: int = 0,
    stream_bytes: int = 0,
    orchestrator: str | None = None,
    receipt: Receipt | None = None,
    sums: SumTask | None = None,
) -> Task:
    """Return a worker's task: its plan in round `number`, and the settings of the run."""
    return Task(
        id=task_id,
        token=token,
        kind=kind,
        run=run,
        run_name=spec.name,
        study=spec.study,
        round=number,
        rounds=spec.rounds,
        seed=seed,
        method=spec.method,
        plan=plan,
        dataset=dataset_of(spec, kind, held_out=held_out),
        held_out=held_out,
        ignore=spec.evaluation.ignore if spec.evaluation and kind == "evaluate" else (),
        subgroups=spec.evaluation.subgroups if spec.evaluation and kind == "evaluate" else None,
        max_new_tokens=spec.evaluation.max_new_tokens if spec.evaluation and kind == "evaluate" else 0,
        describe=spec.describe and spec.rounds > 0,
        training=spec.training,
        privacy=spec.privacy,
        client_privacy=spec.shared_client_privacy or spec.client_privacy,
        codec=spec.codec,
        upload_budget=spec.upload_budget,
        upload_seconds=spec.upload_seconds,
        normalization=spec.normalization,
        keep_updates=spec.keep_updates,
        parent=spec.parent.stated if spec.parent else None,
        model=spec.model,
        version=version,
        **{**{name: getattr(spec, name) for name in MERGING}, "cohort": spec.cohort.terms},
        inline_bytes=inline_bytes,
        stream_bytes=stream_bytes,
        orchestrator=orchestrator,
        lease_seconds=lease_seconds,
        receipt=receipt,
        secure_sums=spec.secure_sums,
        sums=sums,
    )


def training_seed(spec: RunSpec, number: int, worker: str) -> int:
    """Return the seed of one worker in one round: the same at every attempt, so that a retry repeats it.

    In a secure sum it is the same for all sites, each of which mixes in a secret or, in a simulation, its name.
    """
    return derive_seed(spec.seed, "train", number, *([] if spec.secure_sums else [worker]))


def evaluation_seed(spec: RunSpec, version: int) -> int:
    return derive_seed(spec.seed, "evaluate", version)


def warnings_of(
    spec: RunSpec,
    model: Model,
    state: State,
    bounds: Bounds | None = None,
    left_out: Sequence[str] = (),
    merged: Mapping[str, int] = MappingProxyType({}),
) -> tuple[str, ...]:
    """Return the warnings of a version, bounded: updates left out, sites that count with fewer than the `merged`
    examples that they have, the settings of a first version, limits of the robust rule, and the method's own
    warnings."""
    spec = spec.trained
    larger = f"larger than {bounds.max_norm_of_median} times the largest median norm" if bounds and left_out else ""
    aside = [f"the updates of {', '.join(left_out)} were left out: {larger}"] if left_out else []
    half = coordinator_half(spec.method, run_facts(spec, model))
    aside += weight_warnings(half, bounds, merged) if bounds else []
    of_method = half.warnings(state)
    # The settings are read when the run is created, and stay the same.
    of_settings = [] if state.round else client_privacy.warnings(spec)
    said = [*aside, *of_settings, *_of_rule(spec, state), *of_method]
    return tuple(sentence[:MAX_WARNING_CHARACTERS] for sentence in said[:MAX_WARNINGS])


def _of_rule(spec: RunSpec, state: State) -> list[str]:
    rule = spec.robust
    if rule.neutral or not state.scalars.get(FEW_SENDERS):
        return []
    few = f"some blocks stayed as they were, sent by fewer than the {rule.least} sites that {rule.rule} takes"
    return [f"{few}: {FEW_SENDERS} of the version says how many"]


def choose(eligible: Sequence[str], cohort: Cohort, rng: Random) -> list[str]:
    """Return the sites of a round, sorted by name and independent of their order here: the required ones, and others
    drawn at random."""
    size = cohort.asked
    if size is None or size >= len(eligible):
        return sorted(eligible)
    required = {*cohort.require}.intersection(eligible)
    others = sorted({*eligible} - required)
    return sorted([*required, *rng.sample(others, size - len(required))])
