"""The first gate: checks of a task against the site's rules before a version is fetched for it.

It fetches documents alone, where it needs them: the model's description, and the terms of a secure sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import structlog
from pydantic import JsonValue, ValidationError

from tessera.shared.api.tasks import Task
from tessera.shared.methods.base import LORA_RANK
from tessera.shared.methods.registry import beyond_script, needs_one_example_per_row
from tessera.shared.methods.registry import check as check_method
from tessera.shared.schedule import local_epochs, step_range
from tessera.shared.secure_sums.messages import Terms
from tessera.shared.tensors.lazy import Array
from tessera.shared.updates.codecs import pipeline
from tessera.shared.version import install_line
from tessera.worker.data.dataset_info import DatasetInfo, augments_images
from tessera.worker.data.overlap import MAX_SHARED, share_of, sketch_of
from tessera.worker.errors import HiddenFailure, InputMismatch, TaskFailure
from tessera.worker.governance.airlock import HeldTask, Summary
from tessera.worker.governance.approvals import Inbox, Request
from tessera.worker.governance.descriptions import attacking, describing, rehearsing, summary
from tessera.worker.governance.policy import PolicyViolation, check_use, require
from tessera.worker.state.checkpoints import TaskCheckpoint
from tessera.worker.state.privacy_ledger import Ledger
from tessera.worker.task.environment import TaskRun, privacy_module
from tessera.worker.task.fetch import faults_in, read_model
from tessera.worker.task.resumption import checkpoint_of
from tessera.worker.task.secure_sums import admitted_terms
from tessera.worker.training.progress import CALIBRATING

if TYPE_CHECKING:
    from tessera.worker.privacy.account import PrivacyAccount


@dataclass(frozen=True)
class AdmittedTask:
    """The result of admitting a task."""

    dataset: DatasetInfo
    account: PrivacyAccount | None
    """The task's privacy accounting; None without differential privacy."""
    checkpoint: TaskCheckpoint | None
    """The checkpoint to resume from and to write; None if this worker writes none."""
    terms: Terms | None = None
    """The terms of the round's secure sum; None for a run without one."""
    held: tuple[Summary, HeldTask] | None = None
    """The task's update, if it is finished and waits for a release."""
    failure: HiddenFailure | None = None
    """A failure that may depend on the data: the site sends no step."""


def admit(run: TaskRun) -> AdmittedTask:
    """Check a task against the site's rules.

    Raises PolicyViolation, Unapproved, TaskFailure, InputMismatch, UnknownMethod, CodecError.
    """
    env, task = run.env, run.task
    env.policy.check_task(task, env.kinds)
    if env.history:
        env.history.check(run.snapshot, env.policy)
    if task.describes:
        return _described(run)
    try:
        check_method(task.method)
    except ValidationError as refusal:
        raise TaskFailure("invalid-method", f"the settings of {task.method.name!r}: {faults_in(refusal)}") from None
    pipeline.parse(task.codec)
    _require_scriptable(run)
    dataset = _dataset(run)
    check_use(task, for_evaluation=task.dataset in env.for_evaluation)
    _require_own_tokenizer(run, dataset)
    if dataset.pack:
        _require_packable(task)
    if task.training.augments and not env.regional and (task.trains or task.held_out):
        _require_augmentable(task, dataset)
    terms = admitted_terms(run) if task.trains else None
    _check_effect(run)
    _require_rank(run)
    groups = run.groups(dataset) if task.trains else None
    _check_length(run, dataset.examples if groups is None else groups)
    if env.inbox:
        _require_approval(run, env.inbox, dataset, groups)
    if allowance := env.allowances.get(task.dataset):
        allowance.check(task, env.policy.figures_privacy)
    units = dataset.examples if groups is None else groups
    if task.kind == "rehearse":
        # It is charged nothing, and reads too little to compare data sets.
        return AdmittedTask(dataset, _account(run, units, "", None), None)
    failure = _hidden_failure(run, dataset)
    held = env.airlock.find(task) if env.airlock else None
    if task.kind != "train":
        return AdmittedTask(dataset, None, None, held=held)
    checkpoint = None if failure else checkpoint_of(env, task)
    account = _account(run, units, *_reserved(checkpoint, held))
    return AdmittedTask(dataset, account, checkpoint, terms, held, failure)


def _hidden_failure(run: TaskRun, dataset: DatasetInfo) -> HiddenFailure | None:
    """Compare the data set with others. Return a failure that must stay hidden from the coordinator. Raises as
    `check_overlap` does."""
    try:
        check_overlap(run, dataset)
    except HiddenFailure as hidden:
        return hidden
    return None


def _dataset(run: TaskRun) -> DatasetInfo:
    """Return the facts about the task's data set. Raises TaskFailure."""
    if run.task.dataset not in run.env.datasets:
        raise TaskFailure("unknown-dataset", f"this worker has no data set {run.task.dataset!r}")
    return run.env.datasets[run.task.dataset]


def _described(run: TaskRun) -> AdmittedTask:
    """Check a task that describes a data set. Raises PolicyViolation, Unapproved, TaskFailure."""
    env, task = run.env, run.task
    dataset = _dataset(run)
    terms = admitted_terms(run) if task.describe else None
    if env.inbox:
        _require_approval(run, env.inbox, dataset, None)
    return AdmittedTask(dataset, None, None, terms, env.airlock.find(task) if env.airlock else None)


def _require_own_tokenizer(run: TaskRun, dataset: DatasetInfo) -> None:
    """Raise PolicyViolation if no example may make the task fail but the run's own tokenizer converts the texts."""
    env, task = run.env, run.task
    silent = task.privacy is not None or task.secure_sums is not None
    if task.kind == "evaluate":
        # Without a rule of privacy, the failure of such an evaluation names no cause.
        silent = env.rounds_figures(task) and (silent or bool(env.privacy_rules(task.dataset)))
    if silent and dataset.raw_examples:
        # The author of a run could choose a tokenizer that fails, or never ends, at a certain text.
        raise PolicyViolation(
            "tokenizer",
            f"the data set {task.dataset!r} takes the run's own tokenizer, which may fail at some text; a task with "
            "privacy or secure sums may not fail because of an example",
        )


def _require_scriptable(run: TaskRun) -> None:
    """Raise PolicyViolation for training that the site's own script cannot do, if there is one."""
    task = run.task
    if not run.env.own_script:
        return
    own = "this site trains with a script of its own (executor.command)"
    require(task.kind != "rehearse", "executor", f"{own}, which is not rehearsed")
    if task.trains:
        private = task.privacy is not None or task.secure_sums is not None or task.sums is not None
        require(not private, "executor", f"{own}, which counts as not private: no run with privacy or secure sums")
        what = (
            f'the run learns preferences (training.loss = "{task.training.loss}"), of which a script has no reference'
        )
        require(task.training.loss is None, "executor", f"{own}: {what}")
        beyond = beyond_script(task.method)
        require(beyond is None, "executor", f"{own}: {beyond}")


def _check_effect(run: TaskRun) -> None:
    """Raise PolicyViolation for a rule that would keep back no block of the model, before a person is asked.

    The built model decides (`train`): a table of blocks may describe another model, and lacks names of tied tensors.
    """
    policy = run.env.policy
    if run.task.trains and (policy.never_send or policy.may_send.exclude):
        policy.check_effect([*read_model(run).blocks, *(each.block for each in run.task.plan.extra)])


def _require_rank(run: TaskRun) -> None:
    """Raise PolicyViolation for adapters of a larger rank than this site's."""
    most, plan = run.env.resources.get(LORA_RANK), run.task.plan
    if run.task.trains and most is not None and (lora := read_model(run).lora):
        rank = plan.lora_rank or lora.rank
        detail = f"the plan trains adapters of rank {rank}, and this site holds at most {most:g}"
        require(rank <= most, LORA_RANK, detail)


def _check_length(run: TaskRun, units: int) -> None:
    """Raise PolicyViolation for larger batches or more epochs than the site allows, of examples or of groups."""
    policy, task = run.env.policy, run.task
    private = task.trains and task.privacy
    policy.check_batch(task.training.batch_size, units, private.examples_per_unit if private else 1)
    if task.trains:
        _require_steps(task, units)
        policy.check_epochs(local_epochs(task.local_training, units))
        # A phase has whole epochs of its own, or the run's length.
        policy.check_work(task.local_training, units, in_exact_sum=task.in_exact_sum)


def _require_steps(task: Task, units: int) -> None:
    """Raise TaskFailure for a plan with other numbers of steps than the run's terms allow."""
    if (steps := task.plan.steps) is None:
        return
    least, most = step_range(task.training, units, task.cohort.work_factor)
    if task.cohort.work != "fitted" or not least <= steps <= most:
        raise TaskFailure(
            "invalid-plan",
            f"the plan has {steps} steps; with cohort.work {task.cohort.work!r} the run allows {least} to {most}",
        )


def _require_packable(task: Task) -> None:
    """Raise TaskFailure if the run needs a row for each example, and the data set has rows of several texts."""
    what = None
    if task.privacy is not None:
        what = "under differential privacy, where a row of several texts would be protected in place of a text"
    elif needs_one_example_per_row(task.method):
        what = f"by the method {task.method.name}, which compares or measures rows of one text each"
    if what:
        raise TaskFailure("packed-texts", f"the data set {task.dataset!r} is packed (pack = true), and trains {what}")


def _require_augmentable(task: Task, dataset: DatasetInfo) -> None:
    """Raise TaskFailure or InputMismatch if the examples cannot be changed as the run's training asks."""
    if not augments_images():
        raise TaskFailure(
            "augmentation-not-installed",
            "the run uses training.augmentation, which needs kornia at the worker: "
            + install_line("augmentation", elsewhere=True),
        )
    if said := dataset.augmentation_misfit(task.training.augmentation):
        raise InputMismatch(f"the data set {task.dataset!r} does not take the run's training.augmentation: {said}")


def _require_approval(run: TaskRun, inbox: Inbox, dataset: DatasetInfo, groups: int | None) -> None:
    """Raise Unapproved unless the run is approved; file a request from its first task."""
    task, trains = run.task, "train" in run.env.kinds and run.task.rounds > 0 and run.task.kind != "rehearse"
    measured = dataset.held_out if task.held_out else 0
    examples = dataset.examples if trains or not task.held_out else measured
    party = run.env.sums
    quorum, deadline = task.cohort.quorum, task.cohort.deadline_seconds
    live_terms = {"rounds": task.rounds, "quorum": quorum, "deadline_seconds": deadline}

    def said() -> str:
        if task.describes:
            return describing(task, run.env.policy)
        if task.kind == "attack":
            return attacking(task, read_model(run), examples, dataset.held_out, run.env.policy)
        if task.kind == "rehearse":
            return rehearsing(task, read_model(run), examples, synthetic=run.env.rehearses_synthetic(task))
        return summary(
            task,
            read_model(run),
            examples,
            run.env.policy,
            groups=groups,
            raw_texts=dataset.raw_texts,
            least_in_sum=party.quorum if party else None,
            weight_in_sum=party.weight if party else 1,
            rounds_figures=run.env.rounds_figures(task),
            measured=measured if trains else 0,
            own_script=run.env.own_script,
        )

    def make_request(terms: str) -> Request:
        request = Request(
            run=task.run,
            run_name=task.run_name,
            terms=terms,
            orchestrator=task.orchestrator,
            dataset=task.dataset,
            examples=examples,
            worker=run.env.name,
            asked_at=datetime.now(UTC),
            repeats_model=replace(run.snapshot, kind="train" if trains else task.kind).repeats_model,
            live_terms=live_terms,
            summary=inbox.changes_since(task.run, live_terms) + said(),
        )
        run.journal.note("run.ask", terms=terms, summary=request.summary)
        return request

    inbox.require(run.snapshot, make_request, trains=trains)


def check_overlap(run: TaskRun, dataset: DatasetInfo) -> None:
    """Raise PolicyViolation if two data sets share examples but not a ledger, and one of them is under a limit, of
    this worker or of another that shares the folder of ledgers.

    Privacy spent under one name would not count under the other.
    """
    env, name, ledger = run.env, run.task.dataset, run.env.ledger
    if ledger is None:
        return
    for lost in ledger.lost([name]):
        ledger.read(lost)
    prints = _fingerprints(run, name, ledger)
    with ledger.page(name) as page:
        sketch = sketch_of(prints, page.sketch)
        limits = (env.allowances.get(name), env.policy.max_weekly_privacy)
        page.know(run.journal.task, dataset.examples, sketch, limited=any(limits))
        is_limited = page.limited
    others = ledger.besides([name])
    if not is_limited:
        limited = ledger.limited()
        others = [name for name in others if name in limited]
    for other, theirs in ledger.sketches(others).items():
        loaded = [name for name in env.datasets if ledger.name(name) == other]
        shares = [share_of(theirs, prints)]
        shares += [share_of(sketch, _fingerprints(run, name, ledger)) for name in loaded]
        if max(shares) > MAX_SHARED:
            # The share is exact information about the data, so only this site's log has it.
            shared = f"{max(shares):.0%}"
            structlog.get_logger("worker").warning("data-sets-overlap", dataset=name, other=other, shared=shared)
            raise PolicyViolation(
                "overlap",
                f"the data sets {name!r} and {other!r} have examples in common, but separate privacy ledgers, so a "
                "budget of one misses what the other spends",
            )


def _fingerprints(run: TaskRun, dataset: str, ledger: Ledger) -> Array:
    known = run.env.fingerprints
    if dataset not in known:
        digests = run.env.executor.digests(run, dataset)
        run.env.contents[dataset] = digests.content_under(ledger.hash_key)
        known[dataset] = digests.keyed(ledger.hash_key)
    return known[dataset]


def _reserved(
    checkpoint: TaskCheckpoint | None, held: tuple[Summary, HeldTask] | None
) -> tuple[str, Mapping[str, JsonValue] | None]:
    """Return the key under which the ledger may have what a private task has reserved, and these charges, if any."""
    if held:
        return held[1].checkpoint, held[1].private
    if checkpoint is None:
        return "", None
    private = checkpoint.document["private"] if checkpoint.document else None
    return checkpoint.key.digest, private and private["account"]


def _account(run: TaskRun, units: int, key: str, charges: Mapping[str, JsonValue] | None) -> PrivacyAccount | None:
    """Return the task's privacy accounting, if any, to continue from the `charges` under a checkpoint's key. Raises
    PolicyViolation if the budget does not suffice."""
    env, task = run.env, run.task
    # A region's sites account for their own examples.
    if task.privacy is None or env.regional:
        return None
    if task.dataset in env.divided:
        raise PolicyViolation(
            "part",
            f"{task.dataset!r} is one part of a partition, where adding one example moves others between sites: "
            "no epsilon holds for it",
        )
    privacy = privacy_module("account")
    run.report.activity = CALIBRATING
    account: PrivacyAccount = privacy.PrivacyAccount(
        task,
        task.privacy,
        units,
        env.ledger or Ledger(env.scratch, durable=False),
        env.allowances.get(task.dataset),
        env.policy.require_privacy,
        env.policy.max_weekly_privacy,
        env.policy.max_total_privacy,
        key,
        charges,
    )
    return account
