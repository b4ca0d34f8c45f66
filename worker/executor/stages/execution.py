"""The execution of a fetched task: build the model, then train or evaluate it. It needs no coordinator and no ledger.

Each use of the site's data is recorded first, through the task's `records` and its `account`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import structlog
import torch

from tessera.shared.methods.base import UnsupportedRun
from tessera.shared.model.dataset_schema import problem_of, target_scale
from tessera.shared.problems import Problem
from tessera.worker.data.dataset import Dataset
from tessera.worker.errors import NO_FIGURES, HiddenFailure, Indivisible, InputMismatch, TaskFailure
from tessera.worker.executor.stages.evaluate import evaluate, example_losses
from tessera.worker.executor.stages.load import load
from tessera.worker.executor.stages.local_task import LocalTask
from tessera.worker.executor.stages.rehearse import Rehearsal
from tessera.worker.executor.stages.run_cache import BuiltModel
from tessera.worker.executor.stages.tokenize import require_apart, tokenize
from tessera.worker.executor.stages.train import train
from tessera.worker.governance.policy import PolicyViolation
from tessera.worker.task.handover import FetchedVersion, TaskOutcome
from tessera.worker.task.heartbeat import Stopped
from tessera.worker.training.checkpoints import TrainingCheckpoints
from tessera.worker.training.input_mismatch import explained, require_output, require_own_loss
from tessera.worker.training.ranks import require_summable

if TYPE_CHECKING:
    from tessera.worker.privacy.private_task import Account

VISIBLE = (Problem, Stopped, PolicyViolation, UnsupportedRun)
"""Ends of training that follow from the coordinator, the clock or the settings. Any other may depend on the data, and
would be an exact answer about a single site, while a secure sum reveals the sum alone."""

BY_DATA = (InputMismatch, Indivisible)
"""Ends among `VISIBLE` that may follow from the data too."""


def execute(
    local: LocalTask,
    fetched: FetchedVersion,
    dataset: Dataset,
    account: Account | None,
    checkpoints: TrainingCheckpoints | None = None,
) -> TaskOutcome:
    """Train, rehearse, evaluate or attack by a task. Raises HiddenFailure if training for a secure sum fails,
    TaskFailure, PolicyViolation, InputMismatch, UnsupportedRun, MemoryError, the exceptions of the method and of
    `local.check`."""
    rehearsal = Rehearsal(local, dataset, account) if local.task.kind == "rehearse" else None
    if rehearsal:
        local, dataset, account, checkpoints = rehearsal.local, rehearsal.sample(dataset), rehearsal.account, None
    try:
        outcome, built = _executed(local, fetched, dataset, account, checkpoints, rehearsal)
    except torch.OutOfMemoryError as fault:
        raise MemoryError(str(fault)) from fault
    if rehearsal:
        return rehearsal.outcome(outcome)
    # The trainable parameters of a sharded model are set once.
    if local.setup.ranks.shards == 1:
        local.cache.models.keep(built)
    return outcome


def _executed(
    local: LocalTask,
    fetched: FetchedVersion,
    dataset: Dataset,
    account: Account | None,
    checkpoints: TrainingCheckpoints | None,
    rehearsal: Rehearsal | None,
) -> tuple[TaskOutcome, BuiltModel]:
    task = local.task
    trains, ranks = task.trains, local.setup.ranks
    in_sum, hides = trains and task.sums is not None, local.rules.hides_cause(task)
    silent = in_sum or task.privacy is not None or hides
    loaded = load(local, fetched)
    loaded = replace(loaded, context=ranks.context(loaded.context))
    context = loaded.context
    if rehearsal:
        rehearsal.mark()
    with without_cause(hides=hides):
        dataset = tokenize(local, fetched, loaded, dataset)
    if problem_of(fetched.document) == "regression":
        dataset = dataset.standardised(*target_scale(fetched.document.config))
    if rehearsal:
        dataset = rehearsal.fill(context, dataset)
    # Its longest text would decide where the comparison fails.
    require_own_loss(context, dataset.padded() if silent else dataset)
    # One rank alone must not compute with a sharded model.
    rehearses = ranks.shards == 1
    if in_sum and rehearses:
        # From now on only this site's log has a mismatch.
        require_output(context, dataset)
        require_apart(local, context, dataset)
    if ranks.size > 1 and trains and account is None:
        require_summable(loaded.half, context, dataset, ranks.size)
    fitting = explained(fetched.document, context, dataset, private=silent, rehearses=rehearses)
    if trains:
        with hiding(in_sum=in_sum), fitting:
            result, stats = train(local, loaded, dataset, account, checkpoints, rehearsal)
        outcome = TaskOutcome(stats.examples, result, loaded.moments.values)
    elif task.kind == "attack":
        with without_cause(hides=hides), fitting:
            losses = example_losses(local, loaded, dataset)
        outcome = TaskOutcome(len(losses), losses=losses)
    else:
        with without_cause(hides=hides), fitting:
            outcome = TaskOutcome(evaluate(local, loaded, dataset))
    context.close()
    return outcome, loaded.built


@contextmanager
def hiding(*, in_sum: bool) -> Iterator[None]:
    """Raise HiddenFailure in place of a failure in a secure sum that may depend on the data."""
    try:
        yield
    except Exception as fault:
        if not in_sum or (isinstance(fault, VISIBLE) and not isinstance(fault, BY_DATA)):
            raise
        raise HiddenFailure(type(fault).__name__) from fault


@contextmanager
def without_cause(*, hides: bool) -> Iterator[None]:
    """If the site `hides` the cause of a failed evaluation or attack, report it without.

    This site's log has it. Raises TaskFailure.
    """
    try:
        yield
    except VISIBLE:
        raise
    except Exception as fault:
        if not hides:
            raise
        structlog.get_logger("worker").error("no-figures", cause=type(fault).__name__, exc_info=fault)
        raise TaskFailure(*NO_FIGURES) from fault
