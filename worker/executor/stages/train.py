"""The training stage, with the second gate: the plan is checked before data are read."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import structlog
import torch
from torch import Tensor

from tessera.shared.methods.base import EXTRA, Extra, LocalResult, Phase, TrainingStats, UnsupportedRun
from tessera.shared.methods.registry import coordinator_half
from tessera.shared.model.block_rates import PRIVATE
from tessera.shared.model.spec import Model
from tessera.shared.run_settings import Training
from tessera.shared.schema import EPSILON
from tessera.shared.tensors.lazy import Array
from tessera.worker.data.dataset import LABELS, Dataset
from tessera.worker.errors import TaskFailure, TrainingDiverged
from tessera.worker.executor.stages.load import PreparedTask
from tessera.worker.executor.stages.local_task import LocalTask
from tessera.worker.executor.stages.rehearse import Rehearsal
from tessera.worker.executor.stages.tokenize import require_apart
from tessera.worker.governance.policy import PolicyViolation
from tessera.worker.model.block_map import tied_names
from tessera.worker.model.forward import one_for_each
from tessera.worker.privacy.bounded_figures import disclosed
from tessera.worker.task.environment import facts_of, local_work, privacy_module
from tessera.worker.training.batches import Batch, Batches, ReadableBatches
from tessera.worker.training.checkpoints import TrainingCheckpoints
from tessera.worker.training.context import synthetic_batch
from tessera.worker.training.optimization.precision import gradient_scaler, restore_scale, scale_of
from tessera.worker.training.progress import rounded
from tessera.worker.training.trainer import Trainer, epochs_of

if TYPE_CHECKING:
    from tessera.worker.privacy.private_task import Account, PrivateTask


def train(
    local: LocalTask,
    loaded: PreparedTask,
    dataset: Dataset,
    account: Account | None,
    checkpoints: TrainingCheckpoints | None = None,
    rehearsal: Rehearsal | None = None,
) -> tuple[LocalResult, TrainingStats]:
    """Train by the method and return its result.

    Raises PolicyViolation, TaskFailure, TrainingDiverged, SelectorError and exceptions of the method's worker half.
    """
    task, report = local.task, local.report
    half, context = loaded.half, loaded.context
    loaded.personalise()
    _check_plan(local, loaded)
    require_apart(local, context, dataset)
    private = _private(local, dataset, account, checkpoints) if account else None
    units = report.examples = private.units if private else dataset.examples
    # Selecting blocks may read data too; no steps are counted for that.
    report.begin("training")
    if private:
        dataset = dataset.padded()
        context.choose_top = private.top_k
        context.placeholder = synthetic_batch(context.model, dataset)
    else:
        # Before training, not at upload: heartbeats already report the loss of the first batches, and a failed
        # selection is reported too.
        local.records.note_exact(dataset.examples, "training")
    size, labels = task.training.batch_size, dataset.inputs[LABELS]
    if not private and isinstance(labels, Tensor) and one_for_each(labels):
        # Elsewhere a batch's loss is the mean over its labels, so that scores depend on the batches.
        size = local.piece_size.of_batches(size)
    batches: Iterable[Batch] = Batches(dataset, size, local.device)
    if private:
        is_covered = task.privacy is not None and task.privacy.selection == "noisy"
        known = partial(private.known, context, dataset)
        batches = private.watched(ReadableBatches(dataset, size, local.device, known) if is_covered else batches)
    else:
        context.batches = batches
    # One example may move a mean loss, or a method's own metrics, without a bound. Of this site alone they would also
    # tell what a secure sum hides.
    no_figures = local.rules.rounds_figures(task) or task.sums is not None
    probed = LocalResult({})
    few = dataset.examples < (least := local.rules.policy.min_evaluation_examples)
    if (count := half.settings.probe_examples) and not (private or no_figures or few):
        probed = half.measure(context, next(iter(Batches(dataset, max(count, least), local.device))))
    chosen = half.select(context, batches)
    if private:
        private.check_choice()
    selected = local.setup.ranks.same(lambda: chosen)
    phases, training = _planned(local, half.phases(context, selected), units, rehearsal)
    least = sys.maxsize if no_figures else least
    with loss_scaler(local) as scaler:
        trainer = Trainer(
            half,
            context,
            training,
            local.setup,
            local.check,
            private,
            report,
            least,
            scaler,
            round_number=task.round,
            rounds=task.rounds,
            piece_size=local.piece_size,
            moments=loaded.moments if task.training.keep_moments else None,
            checkpoints=checkpoints,
        )
        stats = trainer.train(phases, dataset, task.seed)
    result = half.collect(context, selected, stats)
    worked = local_work(task, loaded.document, units)
    metrics = {
        name: rounded(value) if name.startswith(half.signals) else value
        for name, value in {**probed.metrics, **result.metrics, **worked}.items()
        if not (few and name.startswith(half.signals))
    }
    sent = {**result.upload, **_extra(local, result.extra)}
    result = replace(result, upload=sent, keep={**probed.keep, **result.keep}, metrics=metrics, extra={})
    _require_finite_keep(result, task.training.learning_rate)
    measured = {"loss": rounded(stats.loss)} if math.isfinite(stats.loss) else {}
    report.metrics = {**measured, **result.metrics}
    if private:
        report.metrics = {**disclosed(report.metrics), EPSILON: private.spent()}
    elif no_figures:
        report.metrics = disclosed(report.metrics)
    report.metrics |= loaded.metrics
    if task.sums:
        report.metrics = {name: value for name, value in report.metrics.items() if name == EPSILON}
    elif no_figures:
        _require_mergeable(local, loaded.document, units)
    return result, stats


def _planned(
    local: LocalTask, phases: Sequence[Phase], units: int, rehearsal: Rehearsal | None
) -> tuple[Sequence[Phase], Training]:
    """Return the phases and the length of training. Raises PolicyViolation if it is too long."""
    if rehearsal:
        return rehearsal.shorten(phases)
    training = local.task.local_training
    local.rules.policy.check_epochs(epochs_of(phases, training, units))
    return phases, training


def _private(
    local: LocalTask, dataset: Dataset, account: Account, checkpoints: TrainingCheckpoints | None
) -> PrivateTask:
    """Return the private half of the task's training."""
    task = local.task
    resumed = checkpoints.document["private"] if checkpoints and checkpoints.document else None
    groups = dataset.by_group if task.privacy and task.privacy.unit == "group" else None
    private: PrivateTask = privacy_module("private_task").PrivateTask(
        account, task, groups, local.noise_key, resumed, local.setup.ranks
    )
    return private


def _require_mergeable(local: LocalTask, document: Model, units: int) -> None:
    """Raise PolicyViolation if the method cannot merge without the metrics that do not leave this site."""
    task = local.task
    try:
        coordinator_half(task.method, facts_of(task, document)).check(task.plan, units, local.report.metrics)
    except ValueError as lack:
        detail = f"the method {task.method.name} needs metrics of training, which do not leave this site: {lack}"
        raise PolicyViolation("figures", detail) from None


def _extra(local: LocalTask, extra: Mapping[str, Extra]) -> dict[str, Array]:
    """Return the values of a result's extra arrays by their names in an update, with zeros in rows over too few
    examples, as in rows over none. Raises TaskFailure for arrays other than the plan's."""
    shapes = {each.name: each.shape for each in local.task.plan.extra}
    if (found := {name: each.values.shape for name, each in extra.items()}) != shapes:
        raise TaskFailure("invalid-result", f"the method returned the extra arrays {found}, expected {shapes}")
    # Under privacy, no noise would cover which rows are over few examples.
    least = 0 if local.task.privacy else local.rules.policy.min_evaluation_examples
    sent = {}
    for name, each in extra.items():
        examples = np.broadcast_to(each.examples, shapes[name][:1])
        sent[EXTRA + name] = values = each.values.copy()
        values[examples < least] = 0
        if count := int(((examples > 0) & (examples < least)).sum()):
            local.report.withheld[EXTRA + name] = count
            structlog.get_logger("worker").warning("rows-withheld", array=name, rows=count, least=least)
    return sent


def _require_finite_keep(result: LocalResult, rate: float) -> None:
    """Raise TrainingDiverged for values from which no later round of this site could train. The last step may make
    such of a finite loss, and the coordinator, which refuses them in an update, does not see what a site keeps."""
    for name, values in result.keep.items():
        if not np.isfinite(values).all():
            raise TrainingDiverged(f"{name}, which the site keeps, is not finite with a learning rate of {rate:g}")


def _check_plan(local: LocalTask, loaded: PreparedTask) -> None:
    """Check the plan against our own block table before any data is read.

    Raises PolicyViolation, TaskFailure, UnsupportedRun.
    """
    plan, context, policy = local.task.plan, loaded.context, local.rules.policy
    extra = [each.block for each in plan.extra]
    private = [*loaded.half.private().resolve(context.blocks), *context.private]
    policy.check_private(block for block in private if plan.upload.holds(block))
    asked = plan.upload.resolve(context.blocks)
    added = (block.name for block in context.private)
    policy.check_plan([*context.blocks, *extra], [*asked, *extra], tied_names(context.model), added)
    if extra and local.task.privacy is None and local.rules.rounds_figures(local.task):
        named = ", ".join(block.name for block in extra)
        raise PolicyViolation("figures", f"exact figures over examples do not leave this site, such as {named}")
    if baseless := sorted(block.name for block in asked if block.name not in loaded.bases):
        raise TaskFailure("invalid-plan", f"the plan uploads blocks that it does not fetch as a base: {baseless[:8]}")
    if PRIVATE in local.task.training.rates and not context.private:
        raise UnsupportedRun(
            f"training.rates.{PRIVATE} is for modules that a method adds at a site, and {local.task.method.name} "
            "adds none: leave it out"
        )


@contextmanager
def loss_scaler(local: LocalTask) -> Iterator[torch.amp.GradScaler]:
    """Yield a loss scaler at the scale that the run's last training found, also before a restart of the worker.

    The scale is kept at once, whether or not the update is merged. Training that diverges removes it: its scale is
    unusable.
    """
    task, records, scalers = local.task, local.records, local.cache.scalers
    scaler = scalers.pop(task.run, None)
    if scaler is None:
        scaler = gradient_scaler(task.training, local.device)
        restore_scale(scaler, local.loss_scale)
    try:
        yield scaler
    except TrainingDiverged:
        records.keep_scale({})
        raise
    scalers[task.run] = scaler
    if scaler.is_enabled():
        records.keep_scale(scale_of(scaler))
