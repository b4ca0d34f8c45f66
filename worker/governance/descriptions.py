"""Plain-language descriptions of runs and of the policy, for the person who approves runs."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from pydantic import BaseModel

from tessera.shared.api.rehearsals import STEPS
from tessera.shared.api.tasks import CohortTerms, Task
from tessera.shared.methods.registry import probe_examples
from tessera.shared.model.blocks import Block
from tessera.shared.model.preprocessing import TOKENIZER
from tessera.shared.model.selectors import EVERYTHING, kept_back
from tessera.shared.model.spec import Model
from tessera.shared.run_settings import Privacy
from tessera.shared.schedule import local_epochs, step_range
from tessera.shared.schema import DEFAULT_STUDY
from tessera.shared.units import size
from tessera.worker.governance.policy import Allowance, Policy, plain

NAMES = {
    "bert": "BERT", "roberta": "RoBERTa", "distilbert": "DistilBERT", "deberta-v2": "DeBERTa", "vit": "ViT",
    "clip": "CLIP", "siglip": "SigLIP", "gpt2": "GPT-2", "t5": "T5", "llama": "Llama", "dinov2": "DINOv2",
}  # fmt: skip

OWN_SCRIPT = (
    "This site's own script trains (executor.command), by its own optimizer and batches. It counts as not private: "
    "runs with differential privacy or secure sums are refused."
)
ANY_BLOCK = "Any block may leave"


def summary(
    task: Task,
    model: Model,
    examples: int,
    policy: Policy | None = None,
    *,
    groups: int | None = None,
    raw_texts: bool = False,
    least_in_sum: int | None = None,
    weight_in_sum: int = 1,
    rounds_figures: bool = False,
    measured: int = 0,
    own_script: bool = False,
) -> str:
    """Return a few sentences on the task's run: its work, the data that leave the site, for whom, and how privately.

    `groups`: the number of groups of these examples, if the run protects groups. `raw_texts`: whether the data set
    takes the run's tokenizer. `least_in_sum`: the fewest sites in a secure sum that this site's settings allow; None
    if it takes part in none. `weight_in_sum`: this site's weight in exact sums. `rounds_figures`: whether figures
    over examples leave as rounded sums. `measured`: the number of held-out examples of a task that measures a run
    which is to train on the `examples`: no round has named blocks yet. `own_script`: whether the site's own script
    trains.
    """
    if measured:
        task = task.model_copy(update={"kind": "train", "held_out": False})
    scripted = [OWN_SCRIPT] if own_script and task.kind == "train" else []
    work = [_work(task, model, examples, groups, measured), *scripted, *_tokenizer(task, model, raw_texts=raw_texts)]
    extra = _extra(task, policy) if task.plan.extra or measured else ()
    figures = [*extra, *_figures(task, policy, rounds=rounds_figures), *_kept(task, model, policy)]
    leaving = [_leaving(task, model, announced=measured > 0), *figures, *_masks(task, least_in_sum)]
    merging = [*_merging(task, weight_in_sum)] if task.kind == "train" else []
    if task.kind == "train" and task.keep_updates == "run":
        merging.append("The coordinator keeps each update as long as the run, to merge again without a site.")
    of_site = _client_privacy(task) if task.kind == "train" else ()
    return " ".join([*work, *leaving, *merging, *_parent(task), _privacy(task), *of_site])


def _parent(task: Task) -> Iterator[str]:
    """Yield a sentence on the parent's run, for a task of a region."""
    if parent := task.parent:
        who = f"orchestrator {parent.orchestrator}" if parent.orchestrator else "an orchestrator who is not named"
        yield (
            f"This coordinator is a region's: it sends the mean of the region's updates to {parent.coordinator}, "
            f"where {who} started the run {parent.run} (terms {parent.terms[:16]})."
        )


def _recipient(task: Task) -> str:
    to = f"to orchestrator {task.orchestrator}" if task.orchestrator else "to an orchestrator who is not named"
    return to if task.study == DEFAULT_STUDY else f"{to} of the study {task.study}"


def describing(task: Task, policy: Policy) -> str:
    """Return a few sentences on a task that describes a data set."""
    to = _recipient(task)
    if task.secure_sums:
        to = f"into a secure sum of {task.secure_sums.quorum} sites or more, whose totals go {to},"
    rule, noise = policy.disclosure, policy.figures_privacy
    names = "" if task.describe else ", and the names of classes in the settings"
    said = (
        f"Describes `{task.dataset}`, and trains nothing. Sends {to} the numbers of its groups, or of its examples "
        f"without groups, by class and by bins of lengths or sizes{names}. Numbers below {rule.minimum} leave as "
        f"zero, and others as multiples of {rule.step}."
    )
    return f"{said} They have noise, which costs an example {noise.bound}." if noise else said


def attacking(task: Task, model: Model, examples: int, held_out: int, policy: Policy) -> str:
    """Return a few sentences on a task that measures a membership inference attack."""
    rule = policy.disclosure
    return (
        f"Measures how well a person who has this version of {_model(model)} could recognise the records of "
        f"`{task.dataset}` that it was trained on, and trains nothing. Computes its loss of {examples:,} training "
        f"and {held_out:,} held-out examples. Sends {_recipient(task)} the numbers of groups, or of examples "
        f"without groups, by their loss, of both kinds apart. Numbers below {rule.minimum} leave as zero, and others "
        f"as multiples of {rule.step}."
    )


def rehearsing(task: Task, model: Model, examples: int, *, synthetic: bool) -> str:
    """Return a few sentences on a task that rehearses a run's training."""
    to = f"to orchestrator {task.orchestrator}" if task.orchestrator else "to an orchestrator who is not named"
    rows = "synthetic rows of its shape" if synthetic else "as many of its rows as these steps take"
    return (
        f"Rehearses a run of {task.rounds} rounds by the method {task.method.name}: trains "
        f"{in_words(task.plan.train.resolve(model.blocks), model.blocks)} of {_model(model)} for {STEPS} steps on "
        f"`{task.dataset}` ({examples:,} examples), with {rows}. Only a report leaves, {to}: times, memory, bytes "
        "and numbers of steps and examples, or why it failed. No block and no figure of an example leaves, nothing "
        "is kept, and no privacy is spent. The run itself asks again."
    )


def _work(task: Task, model: Model, examples: int, groups: int | None, measured: int) -> str:
    of = f" of {groups:,} groups" if groups else ""
    on = f"on `{task.dataset}` ({examples:,} examples{of})"
    if task.kind == "evaluate":
        held_out = "the held-out examples of " if task.held_out else ""
        return f"Measures versions of {_model(model)} {on.replace('on ', f'on {held_out}', 1)}."
    trained = f"{in_words(task.plan.train.resolve(model.blocks), model.blocks)} of {_model(model)}"
    if measured:
        trained = f"blocks of {_model(model)}, which each round names,"
    epochs, steps = local_epochs(task.training, groups or examples), task.training.steps
    length = f"{epochs} {'epoch' if epochs == 1 else 'epochs'}"
    if steps:
        length = f"{steps} {'step' if steps == 1 else 'steps'} (at most {length})"
    if task.cohort.work == "fitted":
        least, most = step_range(task.training, groups or examples, task.cohort.work_factor)
        length = f"{least} to {most} steps, by this site's speed (usually {length}),"
    at_most = f"at most {task.trainings} of " if task.trainings < task.rounds else ""
    often = f"for {length} a round, {at_most}{task.rounds} rounds"
    base = " Its base trains too, beside adapters or prompts." if task.training.full_fine_tuning else ""
    pairs = (
        " Learns which of two answers is better (dpo), beside the run's first version." if task.training.loss else ""
    )
    also = f" Measures its versions on the data set's {measured:,} held-out examples." if measured else ""
    return f"Trains {trained} {on} {often}, by the method {task.method.name}.{base}{pairs}{also}"


def _tokenizer(task: Task, model: Model, *, raw_texts: bool) -> Iterator[str]:
    brought, settings = model.preprocessing.get(TOKENIZER), model.preprocessing.get("tokenizer_config.json")
    if raw_texts and brought:
        more = f" Its settings, with the chat template if it has one, are {settings.digest}." if settings else ""
        yield f"`{task.dataset}` is converted with the run's own tokenizer, {brought.digest}.{more}"
    elif raw_texts:
        yield f"`{task.dataset}` takes the run's own tokenizer, and the run has none: its tasks will fail."
    elif brought:
        yield f"The run brings its own tokenizer, {brought.digest}, which `{task.dataset}` does not use."


def _leaving(task: Task, model: Model, *, announced: bool) -> str:
    to = _recipient(task)
    if task.kind == "evaluate":
        return f"Sends figures such as its accuracy, of how many examples and labels they are, and no blocks, {to}."
    if announced:
        most = size(sum(block.nbytes for block in model.blocks))
        return (
            f"Sends the blocks and arrays that each round asks for within the site's policy, at most "
            f"{len(model.blocks)} blocks with {most} a round before coding, and figures of versions, {to}."
        )
    sent = task.plan.upload.resolve(model.blocks)
    nbytes = size(sum(block.nbytes for block in sent))
    return (
        f"Sends {len(sent)} blocks ({in_words(sent, model.blocks)}), {nbytes} a round before coding, {to}; later "
        "rounds may ask for other blocks and arrays, within the site's policy. Versions may also be measured on "
        "the examples held out here, which sends figures."
    )


def _extra(task: Task, policy: Policy | None) -> Iterator[str]:
    named = [f"{each.block.name} ({' x '.join(map(str, each.shape))})" for each in task.plan.extra]
    nbytes = size(sum(each.block.nbytes for each in task.plan.extra))
    if named:
        yield f"Beside blocks leave arrays computed from the examples, {nbytes} a round: {', '.join(named)}."
    else:
        yield "Arrays are computed from the examples, such as the mean features and the number of each class."
    if policy and not task.privacy:
        yield f"A row of them over fewer than {policy.min_evaluation_examples} examples leaves as zeros."


def _figures(task: Task, policy: Policy | None, *, rounds: bool) -> Iterator[str]:
    if rounds and policy and policy.figures_privacy:
        yield f"Figures have noise: one evaluation costs an example {policy.figures_privacy.bound}."
        return
    if rounds:
        yield (
            "Figures are computed from rounded sums, each of which one example moves by at most one step. They have "
            "no noise, so that a step hides no example."
        )
        return
    yield "Figures are exact, to three digits."
    if task.kind == "train":
        yield "With updates leave the mean loss, and what the method measures in training."
    if task.kind == "train" and (probes := probe_examples(task.method)):
        least = max(probes, policy.min_evaluation_examples if policy else 0)
        yield f"Each round the method also measures the model on the first {least} examples."
    if policy and policy.send_class_counts:
        yield (
            "With figures, counts by class and by subgroups in the settings leave: predictions by true class, and "
            f"binned scores. The evaluation is without those of fewer than {policy.min_subjects} subjects."
        )


def _kept(task: Task, model: Model, policy: Policy | None) -> Iterator[str]:
    if task.kind != "train" or policy is None:
        return
    if policy.may_send != EVERYTHING:
        allowed = [block for block in model.blocks if policy.may_send.holds(block)]
        yield f"The site's may_send allows {in_words(allowed, model.blocks)}."
    if kept := kept_back(policy.all_never_sent, model.blocks):
        yield f"Of the blocks that never leave, {'; '.join(kept)}."


def _masks(task: Task, least: int | None) -> Iterator[str]:
    if task.secure_sums and task.kind == "train":
        *others, last = task.secure_sums.helpers
        yield (
            f"Updates leave under masks: the coordinator learns sums over at least {task.secure_sums.quorum} sites, "
            f"which {', '.join(others)} and {last} open together. Weights and block names are not masked."
        )
        if task.secure_sums.repeat_model:
            yield (
                "Updates from the same model may already be in a sum of another run (repeat_model). A person with "
                "both sums can subtract them: if this site is in one of them alone, the difference is its own "
                "update; if the runs differ in settings, it is an equation about the sites' updates."
            )
        if least is None:
            yield "This site takes part in no secure sum: its tasks will fail."


def _cohort(cohort: CohortTerms) -> str:
    """Return a sentence on the sites whose updates make a version."""
    among = "all sites of the coordinator"
    if cohort.invited_digest:
        among = f"{cohort.invited} invited sites (list {cohort.invited_digest.removeprefix('sha256:')[:8]})"
    drawn = f"{cohort.size} sites, drawn at random from {among}" if cohort.size else among
    first = f" and ends with the first {cohort.target_updates}" if cohort.target_updates else ""
    workers = f", and up to {cohort.workers_per_site} workers of each" if cohort.workers_per_site > 1 else ""
    within = f"within {cohort.deadline_seconds:g} seconds"
    if cohort.mode == "buffer":
        enough = cohort.target_updates or cohort.quorum
        late = f"updates may start from versions up to {cohort.max_staleness} older"
        kept = "; each site's latest update is kept, and moves later versions too" if cohort.memory else ""
        share = f"; a version moves {cohort.mixing:g} of the way to the values of its update" if cohort.mixing else ""
        return f"Versions are made of the first updates of {enough} of {drawn}; {late}{kept}{share}."
    return f"A round asks {drawn}{workers}; it needs updates of {cohort.quorum} {within}{first}."


def _merging(task: Task, weight: int) -> Iterator[str]:
    """Yield sentences on the sites that a round asks, and on the merging of their updates: versions that differ in
    this alone would show an update."""
    rule, optimizer = task.robust, task.server_optimizer
    yield _cohort(task.cohort)
    weigh = "A site weighs as many examples as it has"
    if task.client_privacy:
        weigh = "All sites weigh alike"
    elif task.secure_sums:
        weigh = f"This site weighs {weight} by its own settings, in each sum"
    elif not rule.neutral:
        weigh = f"All sites weigh alike, by the rule {rule.rule} ({_settings(rule, 'rule')})"
    elif task.max_examples is None:
        weigh += ", up to four times the median site's"
    elif task.max_examples != "unlimited":
        weigh += f", up to {task.max_examples:,}"
    divided = {"participants": "the weight of the sites that sent it", "cohort": "the weight of all in the round"}
    by = divided.get(task.normalization, "that of all in the round, times the probability that a site sends it")
    yield f"{weigh}. The sum of a block is divided by {by}."
    if task.max_update_norm is not None:
        yield f"Updates longer than {task.max_update_norm:g} are refused."
    if task.max_norm_of_median is not None:
        most = task.max_norm_of_median
        limit = "however long they are" if most == "unlimited" else f"up to {most:g} times the median's length"
        yield f"Updates count {limit}."
    if not optimizer.neutral:
        yield f"The coordinator makes its own step of their mean: {optimizer.kind} ({_settings(optimizer, 'kind')})."


def _settings(rule: BaseModel, name: str) -> str:
    given = rule.model_dump(exclude={name}, exclude_none=True)
    return ", ".join(f"{key} {value:g}" for key, value in given.items())


def _privacy(task: Task) -> str:
    privacy: Privacy | None = task.privacy
    if privacy is None:
        seen = "sums of updates" if task.secure_sums else "updates"
        seen = seen if task.kind == "train" else "figures"
        return (
            f"No differential privacy: anyone who sees the {seen}, such as the coordinator's operator, may learn "
            "about single examples."
        )
    if task.kind == "evaluate":
        return "The run's differential privacy covers training, not measurements."
    of = "one example"
    if privacy.unit == "group":
        of = f"all examples of one group, of which a step uses {privacy.examples_per_unit} at most,"
    return f"Differential privacy: all updates together reveal of {of} at most {privacy.bound}{privacy.caveat}."


def _client_privacy(task: Task) -> Iterator[str]:
    given = task.client_privacy
    if given and given.honest_sites:
        yield (
            "Privacy of the site as a whole, by noise that the sites add: all sums together reveal of its updates at "
            f"most {given.bound}, if {given.honest_sites} sites of each sum keep their noise to themselves."
        )
    elif given:
        yield (
            f"The coordinator says that it adds noise, so that all versions of the run together reveal at most "
            f"{given.bound} of all data of one site; this site cannot verify it."
        )


def _model(model: Model) -> str:
    layers = len({block.layer for block in model.blocks if block.layer is not None})
    kind = str(model.config["model_type"])
    return f"a {NAMES.get(kind, kind)} with {layers} {'layer' if layers == 1 else 'layers'}"


def in_words(chosen: Sequence[Block], blocks: Sequence[Block]) -> str:
    """Return a description of chosen blocks by role: 'all value and 1 of 2 head blocks'. Extra arrays are named."""
    if arrays := [block.name for block in chosen if block.role == "extra"]:
        kinds = ([block for block in table if block.role != "extra"] for table in (chosen, blocks))
        return f"{in_words(*kinds)} and the arrays {', '.join(arrays)}"
    if len(chosen) == len(blocks):
        return "all blocks"
    of = Counter(block.role for block in blocks)
    parts = [
        f"all {role}" if count == of[role] else f"{count} of {of[role]} {role}"
        for role, count in Counter(block.role for block in chosen).items()
    ]
    if not parts:
        return "no blocks"
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts) + " blocks"


def privacy_in_words(policy: Policy, budgets: Mapping[str, Allowance] = MappingProxyType({})) -> Iterator[str]:
    """Yield a sentence for each rule of privacy of a policy and of its data sets' budgets."""
    if floor := policy.require_privacy:
        yield f"Runs that train need privacy: at most {plain(floor).in_words}."
    elif policy.max_weekly_privacy or policy.max_total_privacy:
        yield "Runs that train need differential privacy."
    if weekly := policy.max_weekly_privacy:
        yield f"On each data set, all runs together may spend {plain(weekly).in_words} in any seven days."
    if total := policy.max_total_privacy:
        yield f"On all data sets together, all runs may spend {plain(total).in_words}."
    for name, budget in budgets.items():
        yield f"On {name}, all runs together may spend {plain(budget).in_words}."
    if policy.require_secure_sums:
        yield "Updates leave only under masks, in runs with secure sums."
    if of_site := policy.require_client_privacy:
        yield f"Runs that train need privacy of this site as a whole, in secure sums: at most {of_site.bound}."
        if of_site.total:
            yield f"Of this site as a whole, all runs together may spend {of_site.total.bound}."
    if noise := policy.figures_privacy:
        yield f"Figures have noise: one evaluation costs an example {noise.bound}."


def unprotected(policy: Policy, budgets: Mapping[str, Allowance]) -> str:
    """Return the protections that no rule of the site requires, in words; empty if rules require all."""
    rules = (policy.require_privacy, policy.max_weekly_privacy, policy.max_total_privacy, *budgets.values())
    missing = {
        "runs need no differential privacy": not any(rules),
        "approval is not required": not policy.approve_runs,
        "updates need no masks": not (policy.require_secure_sums or policy.require_client_privacy),
    }
    return "; ".join(what for what, is_missing in missing.items() if is_missing)


def policy_in_words(policy: Policy) -> Iterator[str]:
    """Yield sentences that describe the policy."""
    of_studies = "" if policy.studies is None else f", of the studies {_any_of(policy.studies, '')},"
    yield f"Runs of {_any_of(policy.orchestrators, 'any orchestrator')}{of_studies} may ask."
    yield (
        f"They may use {_any_of(policy.methods, 'any installed method')} on {_any_of(policy.models, 'any model')} "
        f"and {_any_of(policy.datasets, 'any data set that is set up')}."
    )
    never = f", never {', '.join(policy.never_send)}" if policy.never_send else ""
    never += (
        f", nor {', '.join(policy.never_send_if_present)} where a model has it"
        if policy.never_send_if_present
        else ""
    )
    what = ANY_BLOCK if policy.may_send == EVERYTHING else "Only blocks that may_send names may leave"
    whole = f", {size(policy.max_run_upload_bytes)} over a run" if policy.max_run_upload_bytes else ""
    yield f"{what}{never}; at most {size(policy.max_upload_bytes)} at a time{whole}."
    if not (policy.require_privacy or policy.max_weekly_privacy or policy.max_total_privacy):
        yield "Runs need no differential privacy, except on data sets with a budget."
    yield from privacy_in_words(policy)
    yield (
        f"Versions are measured on {policy.min_evaluation_examples} examples or more that nothing trains on, at most "
        f"{policy.max_run_evaluations:,} times for a run and {policy.max_evaluations:,} times for a data set."
    )
    yield (
        "Figures leave as rounded sums, each of which one example moves by at most one step."
        if policy.advertised_policy({}, 0).rounds_figures
        else "Figures leave exact, but rounded in private runs, in secure sums and on data sets with a budget."
    )
    if policy.send_class_counts:
        yield (
            "With exact figures, counts by class and subgroup leave: predictions by true class, and binned scores. "
            f"The evaluation is without those of fewer than {policy.min_subjects} subjects."
        )
    yield f"A person approves each run: {_yes(policy.approve_runs)}; releases each update: {_yes(policy.airlock)}."
    when = f"It works {', '.join(policy.hours)}" if policy.hours else "It works at all hours"
    most = f", {policy.max_minutes_per_day:g} minutes a day at most" if policy.max_minutes_per_day else ""
    slow = policy.max_upload_bytes_per_second
    yield f"{when}{most}{f', and uploads {size(int(slow))} a second at most' if slow else ''}."


def _any_of(names: Sequence[str] | None, otherwise: str) -> str:
    return otherwise if names is None else ", ".join(names) or "none at all"


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"
