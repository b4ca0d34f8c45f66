"""A membership inference attack on a version by its loss. Only disclosed counts of losses leave."""

from __future__ import annotations

import numpy as np

from tessera.shared.api.membership import LOSS_BINS, LOSS_EDGES, MembershipCounts
from tessera.shared.tensors.lazy import Array
from tessera.worker.data.dataset_info import DatasetInfo
from tessera.worker.errors import NO_FIGURES, ExecutorEnded, TaskFailure
from tessera.worker.governance.described_data import Answers
from tessera.worker.governance.policy import require
from tessera.worker.privacy.disclosed_counts import SubjectTables, counts_along
from tessera.worker.task.environment import TaskRun
from tessera.worker.task.fetch import fetch


def attack(run: TaskRun, dataset: DatasetInfo) -> MembershipCounts:
    """Return the counts of an attack on the task's version, as the site's rules let them leave. Raises
    PolicyViolation, TaskFailure, LedgerError and the exceptions of an evaluation."""
    env, task = run.env, run.task
    known, found = _origin(run), env.executor.subjects(run, task.dataset)
    rule = env.policy.disclosure

    run.report.begin("fetching")
    # First, so that a failure of the network is not counted.
    fetched = fetch(run, dataset)

    def make() -> MembershipCounts:
        try:
            losses = env.executor.execute(run, fetched, None, None).losses
        except ExecutorEnded as end:
            # One example may have ended it.
            raise TaskFailure(*NO_FIGURES) from end
        assert losses is not None  # noqa: S101  (of an attack)
        members, others = (
            tuple(counts_along(cells, LOSS_BINS, rule).tolist()) for cells in _cells(losses, found, dataset.examples)
        )
        return MembershipCounts(
            unit="example" if dataset.groups is None else "group",
            minimum=rule.minimum,
            step=rule.step,
            members=members,
            others=others,
            known=known,
        )

    if env.described is None:
        return make()
    answers = Answers(MembershipCounts, "max_attacks", env.policy.max_attacks, "attacked")
    # The rest of a task changes no loss.
    question = f"{task.model} {task.version.digest} {task.training.precision}"
    return env.described.answer(answers, task.dataset, question, _digests(found, dataset.examples), rule, make)


def _origin(run: TaskRun) -> bool:
    """Return True if the site knows that the version was trained on its data, and False if it can only assume that.

    Raises PolicyViolation for a site whose rules these counts would break, and TaskFailure for one without members.
    """
    env, task = run.env, run.task
    detail = "this site sends nothing that is of it alone (policy.require_secure_sums), as counts of losses are"
    require(not env.policy.require_secure_sums, "attack", detail)
    detail = "this site has a rule of privacy, or noise on its figures, and counts of losses have no noise"
    require(not env.privacy_rules(task.dataset) and env.policy.figures_privacy is None, "attack", detail)
    known = env.history.has_trained(task.dataset, task.version.digest) if env.history else False
    if known is None:
        raise TaskFailure(
            "not-trained", f"no run has trained on the data set {task.dataset!r} here, so that no version knows it"
        )
    return known


def _digests(found: SubjectTables, examples: int) -> Array:
    """Return the digests of subjects, uint64 [subjects, 2], which differ for training examples and held-out ones: a
    subject that moves between them has changed."""
    digests = found.digests.copy()
    digests[np.unique(found.subjects[examples:]), 1] ^= np.uint64(1)
    return digests


def _cells(losses: Array, found: SubjectTables, examples: int) -> tuple[Array, Array]:
    """Return the bin of each subject's mean loss, int64 [subjects], of the training examples and of the others: the
    last one for a loss that is infinite.

    An example without a label that counts is left out.
    """
    cells = []
    for part in (slice(examples), slice(examples, None)):
        scored = ~np.isnan(losses[part])
        _, numbers = np.unique(found.subjects[part][scored], return_inverse=True)
        means = np.bincount(numbers, losses[part][scored]) / np.bincount(numbers)
        cells.append(np.searchsorted(LOSS_EDGES, means, side="right"))
    return cells[0], cells[1]
