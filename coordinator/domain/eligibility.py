"""Eligibility of workers for a run, from their advertised capabilities and policies.

It does not bind a site, whose worker checks every task by its own policy. It keeps workers that would refuse out of a
round, and reports the reasons to the creator of the run.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from tessera.shared.api.runs import Ineligibility, RunSpec
from tessera.shared.api.tasks import AdvertisedPolicy
from tessera.shared.methods.base import LORA_RANK, Plan
from tessera.shared.methods.registry import beyond_script, settings_type
from tessera.shared.model.blocks import Block
from tessera.shared.model.dataset_schema import DatasetSchema, token_rows
from tessera.shared.model.selectors import ineffective
from tessera.shared.model.spec import Model
from tessera.shared.run_settings import Budget, Privacy, UnitBudget, about_together
from tessera.shared.schedule import LEAST_BATCH_IN_SUM, local_epochs, trains_on_few
from tessera.shared.schema import TaskKind, needed_versions
from tessera.shared.version import install_line, numbers_of

SHOWN = 5
"""Names in a sentence."""

MAX_JUDGEMENTS = 64
"""Plans for which it is remembered whether a policy refuses them."""

Vocabulary = Callable[[Model], str | None]
"""A function that reads a digest of a model's words and their numbers, as `States.vocabulary` does."""


@dataclass(frozen=True)
class RunTerms:
    """The terms of a run for eligibility. `run` is its id, or None if it does not exist yet."""

    spec: RunSpec
    model_bytes: int
    orchestrator: str | None = None
    run: str | None = None

    @cached_property
    def _named(self) -> frozenset[str]:
        return frozenset(self.spec.cohort.sites or ())

    @cached_property
    def needed_versions(self) -> tuple[tuple[str, str], ...]:
        """The settings in use that are newer than Tessera 0.1.0, with the versions since which they exist."""
        found = dict(needed_versions(self.spec))
        # A method that is not installed here.
        with suppress(KeyError, ValueError):
            of_method = settings_type(self.spec.method.name).model_validate(self.spec.method.settings)
            found |= {f"method.{path}": since for path, since in needed_versions(of_method)}
        return tuple(found.items())

    def lets_know(self, site: str) -> bool:
        """Return True if the run is visible to a site."""
        return self.spec.cohort.sites is None or site in self._named


def policy_of(declared: Mapping[str, Any]) -> AdvertisedPolicy | None:
    """Return a worker's advertised policy; None if its claim left it out to be short."""
    policy = declared.get("advertised_policy")
    if isinstance(policy, AdvertisedPolicy):
        return policy
    # Cached by its JSON, as every decision on a run needs all live workers' policies and parsing them is slow.
    return None if policy is None else _parsed(json.dumps(policy))


@lru_cache(maxsize=4096)
def _parsed(text: str) -> AdvertisedPolicy | None:
    # One that the previous version stored may exceed today's bounds. Its worker judges each task itself.
    with suppress(ValueError):
        return AdvertisedPolicy.model_validate_json(text)
    return None


def withheld_reason(invitation: RunTerms, declared: Mapping[str, Any]) -> str | None:
    """Return the site's reason not to take part in the run; None too if the run has changed since it said so."""
    spec, cohort = invitation.spec.trained, invitation.spec.cohort
    present = {"rounds": spec.rounds, "quorum": cohort.quorum, "deadline_seconds": cohort.deadline_seconds}
    changed = present not in declared.get("withheld_terms", {}).get(invitation.run, [present])
    reason: str | None = declared.get("withheld", {}).get(invitation.run)
    return None if changed else reason


def objections(invitation: RunTerms, site: str, declared: Mapping[str, Any]) -> list[Ineligibility]:
    """Return the reasons that a worker would train in no round of the run, or do the task of a run without rounds;
    empty if it would."""
    found = [Ineligibility(rule=rule, detail=detail) for rule, detail in _objections(invitation, site, declared)]
    reason = too_old(invitation, declared.get("version", ""))
    return [Ineligibility(rule="version", detail=reason), *found] if reason else found


def _objections(invitation: RunTerms, site: str, declared: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    asks, spec = invitation.spec.asks, invitation.spec.trained
    # Not another one for each of thousands of workers.
    invitation = invitation if spec is invitation.spec else replace(invitation, spec=spec)
    if not invitation.lets_know(site):
        yield "not-invited", "its site is not among cohort.sites"
    if missing := sorted(_kinds(spec, asks).difference(declared["kinds"])):
        silent = "it takes no tasks at present; its own log says why"
        yield "kinds", f"it does not {missing[0]}" if declared["kinds"] else silent
    if spec.method.name not in declared["methods"]:
        yield "methods", f"it does not know the method {spec.method.name}, or may not use it"
    if spec.training.augments and not declared.get("augments"):
        install = install_line("augmentation", elsewhere=True)
        yield (
            "augmentation",
            f"it cannot change images: have the site run {install}, or leave out training.augmentation",
        )
    if spec.secure_sums and (declared.get("site_keys") or {}).get("site") != site:
        yield "secure_sums", f"it takes part in no secure sums, or not as {site}: set [secure_sums] in its settings"
    examples = declared["datasets"].get(spec.dataset, 0)
    if spec.rounds == 0 and (spec.evaluation or spec.membership_attack):
        yield from _unmeasurable(spec, declared)
    elif examples <= 0:
        others = ", ".join(sorted(declared["datasets"])[:SHOWN])
        yield "datasets", f"it has no data set {spec.dataset}, or may not use it; it has {others or 'none'}"
    if reason := withheld_reason(invitation, declared):
        yield "withheld", reason
    if policy := policy_of(declared):
        yield from _refusals(invitation, examples, policy)


def too_old(invitation: RunTerms, version: str) -> str | None:
    """Return the reason that a worker of this version would not know a setting of the run, or None."""
    for path, since in invitation.needed_versions:
        if numbers_of(version) < numbers_of(since):
            stated = version or "which it does not say"
            remedy = f"have the site install {since} or later, or leave {path} out"
            return f"its version of Tessera, {stated}, does not know {path}: {remedy}"
    return None


def _kinds(spec: RunSpec, asks: TaskKind) -> set[TaskKind]:
    """Return the kinds of tasks that a worker of the run does, of which rounds ask for `train`."""
    beside: set[TaskKind] = {"describe"} if spec.describe else {asks}
    return {"train", *(beside - {"evaluate"})} if spec.rounds else beside


def _unmeasurable(spec: RunSpec, declared: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the reason that a worker has no examples on which a run without rounds could measure its model."""
    central = spec.evaluation and declared["datasets"].get(spec.evaluation.dataset, 0)
    held_out = spec.membership_attack or (spec.evaluation and spec.evaluation.sites)
    at_site = held_out and declared.get("held_out", {}).get(spec.dataset, 0)
    if not (central or at_site):
        yield "datasets", f"it holds out no examples of a data set {spec.dataset}, and has no central data set"


def _refusals(invitation: RunTerms, examples: int, policy: AdvertisedPolicy) -> Iterator[tuple[str, str]]:
    """Yield the rules of the site's policy that the run as a whole violates."""
    spec, privacy = invitation.spec, invitation.spec.privacy
    if policy.orchestrators is not None and invitation.orchestrator not in policy.orchestrators:
        yield "orchestrators", f"it takes no runs of {invitation.orchestrator or 'who is not named'}"
    if policy.studies is not None and spec.study not in policy.studies:
        yield "studies", f"it takes no runs of study {spec.study}"
    if invitation.model_bytes > policy.max_model_bytes:
        yield (
            "max_model_bytes",
            f"a model of {invitation.model_bytes} bytes is more than its {policy.max_model_bytes}",
        )
    if not spec.rounds or spec.describe:
        return
    if (epochs := local_epochs(spec.training, examples)) > policy.max_epochs:
        yield "max_epochs", f"{epochs} epochs are more than its {policy.max_epochs}"
    at_most = (spec.training.batch_size or examples) * (privacy.examples_per_unit if privacy else 1)
    if (largest := min(at_most, examples)) > policy.max_batch:
        yield "max_batch", f"a batch of {largest} is more than its {policy.max_batch}"
    least = max(policy.min_batch or 0, LEAST_BATCH_IN_SUM if spec.has_exact_sums else 0)
    if trains_on_few(spec.training, examples, least):
        yield "min_batch", f"less than one pass over its {examples} examples needs batches of {least}"
    yield from _privacy_refusals(spec, policy)
    if policy.own_script and (refusal := _script_refusal(spec)):
        yield "executor", refusal


def _script_refusal(spec: RunSpec) -> str | None:
    """Return the reason why a site's own script cannot train in a run."""
    if spec.privacy or spec.secure_sums:
        return "it trains with its own script, which counts as not private: no run with privacy or secure sums"
    # A method that is not installed here, or other settings: the worker judges.
    with suppress(ValueError):
        return beyond_script(spec.method)
    return None


def _privacy_refusals(spec: RunSpec, policy: AdvertisedPolicy) -> Iterator[tuple[str, str]]:
    """Yield the rules about privacy that the run violates."""
    floor, privacy = policy.require_privacy, spec.privacy
    if floor and not (privacy and floor.is_met_by(privacy)):
        yield "require_privacy", f"it requires privacy of {floor.in_words}"
    if floor and privacy and privacy.selection == "uncovered":
        yield "require_privacy", "it requires privacy that covers the choice of blocks"
    yield from _sums_refusals(spec, policy)
    for rule, name, budget, spent in (*_budgets(spec, policy), *_weekly_budget(policy)):
        if privacy is None or privacy.selection == "uncovered":
            yield rule, f"{name} admits no run without privacy that covers all"
        elif not budget.counts(privacy):
            yield rule, f"{name} is for groups, and the run protects examples"
        if spent >= budget.epsilon:
            yield rule, f"runs have spent {name}: epsilon {budget.epsilon:g}"


def _sums_refusals(spec: RunSpec, policy: AdvertisedPolicy) -> Iterator[tuple[str, str]]:
    """Yield the rules about secure sums, and the noise in them, that the run violates."""
    if policy.require_secure_sums and spec.secure_sums is None:
        yield "require_secure_sums", "it requires secure sums"
    if floor := policy.require_client_privacy:
        noise = spec.shared_client_privacy
        if noise is None or noise.epsilon > floor.epsilon or noise.delta > floor.delta:
            yield "require_client_privacy", f"it requires client_privacy in secure sums of {floor.bound} at most"


def _budgets(spec: RunSpec, policy: AdvertisedPolicy) -> Iterator[tuple[str, str, UnitBudget, float]]:
    """Yield the site's privacy budgets that the run would spend: the rule, its name, the budget, and the epsilon that
    runs have spent of it."""
    if budget := policy.budgets.get(spec.dataset):
        yield (
            "privacy",
            f"the privacy budget of its data set {spec.dataset}",
            budget,
            policy.spent.get(spec.dataset, 0.0),
        )
    if total := policy.max_total_privacy:
        yield "max_total_privacy", "its site's privacy budget of all data sets", total, policy.total_spent or 0.0


def _weekly_budget(policy: AdvertisedPolicy) -> Iterator[tuple[str, str, UnitBudget, float]]:
    """Yield the site's budget of seven days as `_budgets` does. A week's spending depends on when the run trains."""
    if weekly := policy.max_weekly_privacy:
        yield "max_weekly_privacy", "its site's privacy budget of seven days", weekly, 0.0


def policy_warnings(invitation: RunTerms, policy: AdvertisedPolicy | None, upload_bytes: int) -> list[Ineligibility]:
    """Return warnings of limits that may delay an eligible worker or end its participation early. A round asks it for
    `upload_bytes` before any codec."""
    found = _policy_warnings(invitation.spec, policy, upload_bytes) if policy else ()
    return [Ineligibility(rule=rule, detail=detail) for rule, detail in found]


def _policy_warnings(spec: RunSpec, policy: AdvertisedPolicy, upload_bytes: int) -> Iterator[tuple[str, str]]:
    if spec.privacy:
        yield from _overspent(spec, spec.privacy, policy)
    if upload_bytes > policy.max_upload_bytes:
        yield "max_upload_bytes", f"it sends at most {policy.max_upload_bytes} bytes at a time"
    if policy.max_run_upload_bytes is not None and upload_bytes * spec.rounds > policy.max_run_upload_bytes:
        yield "max_run_upload_bytes", f"it sends at most {policy.max_run_upload_bytes} bytes for the whole run"
    if policy.max_minutes_per_day is not None:
        yield "max_minutes_per_day", f"it works at most {policy.max_minutes_per_day:g} minutes a day"
    if policy.hours:
        yield "hours", f"it works {', '.join(policy.hours)} by its own clock"
    if policy.airlock:
        yield "airlock", "a person at its site releases each update"


def _overspent(spec: RunSpec, privacy: Privacy, policy: AdvertisedPolicy) -> Iterator[tuple[str, str]]:
    """Yield the budgets that do not cover the whole run."""
    for rule, _, budget, spent in _budgets(spec, policy):
        # A site's budget is checked at half of its delta (`worker.privacy.accountant`).
        half = budget.delta / 2
        # One example of a group is at a distance of two groups, whose zCDP is four times as large.
        times = 1 if privacy.unit == budget.unit else 4
        runs = [*[privacy] * times, *([Budget(epsilon=spent, delta=half)] if spent else [])]
        if (epsilon := about_together(runs, half)) > budget.epsilon:
            before = f"with the {spent:.3g} of runs before, " if spent else ""
            allowed = f"its site allows {budget.epsilon:g}{'' if rule == 'privacy' else ' over all data sets'}"
            yield rule, f"{before}the run would spend an epsilon of about {epsilon:.3g}, and {allowed}"


def refused_model(policy: AdvertisedPolicy | None, model: Model) -> Ineligibility | None:
    """Return the site's reason to refuse the model, or None."""
    kind = str(model.config.get("model_type"))
    if policy is None or policy.models is None or kind in policy.models:
        return None
    return Ineligibility(rule="models", detail=f"it takes no models of type {kind}")


def misfit(
    spec: RunSpec, declared: Mapping[str, Any], model: Model, vocabulary: Vocabulary, *, padded: bool
) -> Ineligibility | None:
    """Return the reason that the worker's data set, as declared, would not fit the model, or None."""
    schema = declared_schema(spec, declared)
    of_model = vocabulary(model) if schema.vocabulary else None
    prefers = spec.training.loss == "dpo"
    found = schema.mismatches(model, padded=padded, vocabulary=of_model, prefers=prefers)
    return Ineligibility(rule="inputs", detail=f"its data set {spec.dataset}: {'; '.join(found)}") if found else None


def declared_schema(spec: RunSpec, declared: Mapping[str, Any]) -> DatasetSchema:
    """Return the declared schema of the worker's data set for the run."""
    return DatasetSchema.model_validate(declared.get("schemas", {}).get(spec.dataset, {}))


def unsuited(
    spec: RunSpec, declared: Mapping[str, Any], model: Model, vocabulary: Vocabulary
) -> Ineligibility | None:
    """Return the reason that the site would refuse the model or the worker could not train it, or None."""
    if spec.describe:
        return None
    padded = spec.privacy is not None
    refused = refused_model(policy_of(declared), model) or _refused_rank(spec, declared, model)
    return refused or misfit(spec, declared, model, vocabulary, padded=padded)


def _refused_rank(spec: RunSpec, declared: Mapping[str, Any], model: Model) -> Ineligibility | None:
    """Return the reason that the worker would train none of the ranks of the model's adapters, or None."""
    most = declared.get("resources", {}).get(LORA_RANK)
    if model.lora is None or not spec.trained.rounds or model.lora.rank_within(most):
        return None
    least = min(model.lora.ranks or (model.lora.rank,))
    detail = f"it trains adapters up to rank {most:g} (resources.lora_rank), and the model's have rank {least}"
    return Ineligibility(rule=LORA_RANK, detail=detail)


def refused_plans(
    spec: RunSpec, model: Model, plans: Mapping[str, Plan], policies: Mapping[str, AdvertisedPolicy | None]
) -> dict[str, Ineligibility]:
    """Return the workers whose policies would refuse to send their planned updates, and why."""
    exact, private = spec.has_exact_sums, spec.privacy is not None

    def judged(policy: AdvertisedPolicy, plan: Plan) -> Ineligibility | None:
        # At most one policy of many is new, and a run asks for the same blocks in most rounds.
        about, known = (spec.model, plan.upload, plan.extra, exact, private), policy.judgements
        if about not in known:
            if len(known) >= MAX_JUDGEMENTS:
                known.clear()
            known[about] = refused_plan(policy, model, plan, in_sum=exact, private=private)
        found: Ineligibility | None = known[about]
        return found

    found = {name: judged(policy, plans[name]) for name, policy in policies.items() if policy}
    return {name: refused for name, refused in found.items() if refused}


def refused_plan(
    policy: AdvertisedPolicy | None, model: Model, plan: Plan, *, in_sum: bool = False, private: bool = False
) -> Ineligibility | None:
    """Return the site's reason not to send the update that a plan asks for, or None. `in_sum`: without noise.
    `private`: in a run with `privacy`."""
    if policy is None:
        return None
    extra = [each.block for each in plan.extra]
    for rule, detail in ineffective(policy.never_send, policy.may_send, [*model.blocks, *extra]):
        return Ineligibility(rule=rule, detail=f"{detail}, in its site's policy")
    if extra and policy.rounds_figures and not private:
        return Ineligibility(rule="figures", detail=f"exact figures do not leave it: {_listed(extra)}")
    asked = plan.sent(model.blocks)
    if kept := [block for block in asked if policy.withholds(block)]:
        return Ineligibility(rule="never_send", detail=f"these blocks never leave it: {_listed(kept)}")
    if in_sum and not policy.embeddings_in_sums and (kept := token_rows(model.head, asked)):
        detail = f"it sends no rows of single tokens to a sum without noise (secure_sums.embeddings): {_listed(kept)}"
        return Ineligibility(rule="secure_sums", detail=detail)
    if kept := [block for block in asked if not policy.may_send.holds(block)]:
        return Ineligibility(rule="may_send", detail=f"these blocks may not leave it: {_listed(kept)}")
    return None


def _listed(blocks: list[Block]) -> str:
    return listed(sorted(block.name for block in blocks))


def listed(names: Sequence[str]) -> str:
    """Return names for a sentence: the first few, and the number of the others."""
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
