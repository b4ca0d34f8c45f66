"""The execution of a fetched task: build the model, then train or evaluate it. It needs no coordinator and no ledger.

What the site records before its data are read goes through `run.journal`, the task's `account` and `env.history`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import structlog

from tessera.shared.methods.base import LocalResult, UnsupportedRun
from tessera.shared.problems import Problem
from tessera.shared.schedule import local_steps
from tessera.shared.schema import EPSILON
from tessera.shared.tensors.lazy import Array, to_array
from tessera.worker.data.content import digests_of
from tessera.worker.data.dataset import Dataset
from tessera.worker.data.dataset_info import DatasetInfo
from tessera.worker.data.overlap import ExampleDigests
from tessera.worker.errors import HiddenFailure, Indivisible, InputMismatch, TaskFailure
from tessera.worker.governance.policy import PolicyViolation
from tessera.worker.state.error_feedback import without_feedback
from tessera.worker.task.environment import TaskRun
from tessera.worker.task.evaluate import evaluate
from tessera.worker.task.fetch import Fetched, load
from tessera.worker.task.heartbeat import Stopped
from tessera.worker.task.model_cache import Built
from tessera.worker.task.tokenize import require_apart, tokenize
from tessera.worker.task.train import train
from tessera.worker.training.checkpoints import CheckpointFile, TrainingCheckpoints
from tessera.worker.training.input_mismatch import explained, require_output, require_own_loss
from tessera.worker.training.optimization.moments import Moments, without_moments
from tessera.worker.training.ranks import require_summable

if TYPE_CHECKING:
    from tessera.worker.privacy.account import PrivacyAccount
    from tessera.worker.privacy.private_task import Account
    from tessera.worker.state.checkpoints import TaskCheckpoint

VISIBLE = (Problem, Stopped, PolicyViolation, UnsupportedRun)
"""Ends of training that follow from the coordinator, the clock or the settings. Any other may depend on the data, and
would be an exact answer about a site of which a secure sum reveals the sum alone."""

BY_DATA = (InputMismatch, Indivisible)
"""Ends among `VISIBLE` that may follow from the data too."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a task."""

    examples: int
    """The number of examples, or of protected groups."""
    result: LocalResult | None = None
    """The method's result; None of an evaluation."""
    moments: Mapping[str, Array] = field(default_factory=dict)
    """The optimizer's moments, to keep for the run's next round."""
    built: Built | None = None
    """The model, for the next task in this process."""


@dataclass(frozen=True, eq=False, repr=False)
class Direct:
    """The execution of tasks in this process, as `task.runner.Executor` describes it."""

    datasets: Mapping[str, Dataset]
    kind: str = "cpu"

    def digests(self, run: TaskRun, dataset: str) -> ExampleDigests:
        return digests_of(self.datasets[dataset], run.check)

    def execute(
        self, run: TaskRun, fetched: Fetched, account: PrivacyAccount | None, checkpoint: TaskCheckpoint | None
    ) -> Outcome:
        file = checkpoint and CheckpointFile.of(checkpoint)
        checkpoints = TrainingCheckpoints(file, run.env.checkpoint_seconds) if file else None
        return execute(run, fetched, self.datasets[run.task.dataset], account, checkpoints)


def execute(
    run: TaskRun,
    fetched: Fetched,
    dataset: Dataset,
    account: Account | None,
    checkpoints: TrainingCheckpoints | None = None,
) -> Outcome:
    """Train or evaluate by a task. Raises HiddenFailure if training for a secure sum fails, TaskFailure,
    PolicyViolation, InputMismatch, UnsupportedRun, the exceptions of the method and of `run.check`."""
    env, task = run.env, run.task
    trains, ranks = task.kind == "train", env.setup.ranks
    in_sum, rounds = trains and task.sums is not None, not trains and env.rounds_figures(task)
    silent = in_sum or task.privacy is not None or rounds
    loaded = load(run, fetched)
    loaded = replace(loaded, context=ranks.context(loaded.context))
    context = loaded.context
    with without_cause(rounds=rounds):
        dataset = tokenize(run, fetched, loaded, dataset)
    # Its longest text would decide where the comparison fails.
    require_own_loss(context, dataset.padded() if silent else dataset)
    # One rank alone must not compute with a sharded model.
    rehearses = ranks.shards == 1
    if in_sum and rehearses:
        # From now on only this site's log has a mismatch.
        require_output(context, dataset)
        require_apart(run, context, dataset)
    if ranks.size > 1 and trains and account is None:
        require_summable(loaded.half, context, dataset, ranks.size)
    fitting = explained(fetched.document, context, dataset, private=silent, rehearses=rehearses)
    if trains:
        with hiding(in_sum=in_sum), fitting:
            result, stats = train(run, loaded, dataset, account, checkpoints)
        outcome = Outcome(stats.examples, result, loaded.moments.values, loaded.built)
    else:
        with without_cause(rounds=rounds), fitting:
            outcome = Outcome(evaluate(run, loaded, dataset), built=loaded.built)
    context.close()
    return outcome


def without_step(
    run: TaskRun, fetched: Fetched, dataset: DatasetInfo, account: PrivacyAccount | None, hidden: HiddenFailure
) -> Outcome:
    """Return the outcome of a site that learned nothing: the version as it was fetched, and the vault as it was.

    Only this site's log and audit record the fault. It reports what it would have reported after training. Raises
    PolicyViolation if a budget has no room for the round's steps.
    """
    run.journal.note("train.fail", code=str(hidden))
    structlog.get_logger("worker").error("update-without-step", cause=str(hidden), exc_info=hidden.__cause__)
    units = account.units if account else dataset.examples
    run.report.examples, run.report.metrics = units, {}
    if account:
        account.charge(local_steps(run.task.training, units))
        run.report.metrics = {EPSILON: account.spent()}
    asked = run.task.plan.upload.resolve(fetched.blocks)
    upload = {block.name: to_array(fetched.bases[block.name]) for block in asked if block.name in fetched.bases}
    keep = without_moments(without_feedback(fetched.kept))
    return Outcome(units, LocalResult(upload, keep), Moments.of(fetched.kept).values)


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
def without_cause(*, rounds: bool) -> Iterator[None]:
    """If figures leave rounded, report a failed evaluation without its cause, which may depend on an example.

    This site's log has it. Raises TaskFailure.
    """
    try:
        yield
    except VISIBLE:
        raise
    except Exception as fault:
        if not rounds:
            raise
        structlog.get_logger("worker").error("no-figures", cause=type(fault).__name__, exc_info=fault)
        raise TaskFailure("no-figures", "this site has no figures of the version; its own log has more") from fault
