"""A task from admission to upload: each stage hands its result to the next."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tessera.shared.api.tasks import Task
from tessera.shared.problems import Problem
from tessera.shared.schema import canonical
from tessera.shared.telemetry import spans
from tessera.shared.tensors.lazy import digest_of
from tessera.worker.governance.airlock import UpdateWithheld
from tessera.worker.governance.policy import PolicyViolation
from tessera.worker.privacy.cost import least_budget_of
from tessera.worker.state.hash_chain import TaskRef
from tessera.worker.state.privacy_ledger import LedgerError, noisy_in
from tessera.worker.task.admission import admit
from tessera.worker.task.environment import Journal, TaskEnvironment, TaskRun
from tessera.worker.task.evaluate import evaluate
from tessera.worker.task.fetch import fetch, load
from tessera.worker.task.heartbeat import Stopped
from tessera.worker.task.train import train
from tessera.worker.task.upload import Egress
from tessera.worker.training.progress import Check, Report

if TYPE_CHECKING:
    from tessera.worker.privacy.private_task import PrivateTask

CLOCK_RULES = ("max_task_seconds", "max_minutes_per_day")


@dataclass(frozen=True)
class TaskRunner(TaskEnvironment):
    """One worker's way to do a task. The site's rules stand at three gates: before anything is fetched (`admission`),
    before data are read (`train`, `evaluate`), and before anything leaves (`upload`)."""

    def run(self, task: Task, check: Check, report: Report) -> None:
        """Do a task to its end: when this returns, the coordinator has accepted the result.

        Raises PolicyViolation before anything that the site forbids is done, Unapproved before anything is done for a
        run without approval, Problem for what the coordinator refuses, whatever `check` raises to end the task early,
        and other exceptions for a task that cannot be done.
        """
        run = TaskRun(self, task, check, report, Journal(TaskRef.of(task), task.dataset, self.audit, self.ledger))
        run.journal.note(
            "task.start",
            kind=task.kind,
            method=task.method.name,
            orchestrator=task.orchestrator,
            dataset=task.dataset,
            plan=digest_of(canonical(task.plan)),
            version=task.version.digest,
        )
        admission = admit(run)
        dataset, private = admission.dataset, admission.private
        report.begin("fetching")
        with self.shelf.pinning(), _settling(private):
            with spans.span("fetch"):
                loaded = load(run, fetch(run))
            egress = Egress(run, admission.snapshot, private)
            if task.kind == "train":
                with spans.span("train"):
                    result, stats = train(run, loaded, dataset, private)
                with spans.span("upload"):
                    update = egress.upload(result, loaded, stats.examples)
                with spans.span("submit"):
                    egress.submit(update, {**result.keep, **loaded.feedback.kept()}, stats.examples)
            else:
                with spans.span("evaluate"):
                    egress.submit_evaluation(evaluate(run, loaded, dataset))
        loaded.context.close()
        self.models.keep(loaded.built)

    def spent(self) -> dict[str, float]:
        """Return what runs have spent of each data set that has a privacy budget: the least budget that admits it."""
        found = {}
        for name, most in self.allowances.items():
            # What cannot be read or added up here refuses the tasks themselves, and says why.
            with suppress(LedgerError, OSError, ImportError):
                entries = self.ledger.latest(name) if self.ledger else ()
                found[name] = math.inf if most.uncovered(entries) else least_budget_of(noisy_in(entries), most.delta)
        return found

    def may_measure(self, dataset: str, examples: int) -> bool:
        """Return whether versions may be measured on so many examples of a data set that nothing trains on."""
        rules = (self.policy.require_privacy, self.allowances.get(dataset))
        return examples >= self.policy.min_evaluation_examples and all(rule.evaluations for rule in rules if rule)


@contextmanager
def _settling(private: PrivateTask | None) -> Iterator[None]:
    """Take back what a private task has reserved if the block ends before anything leaves.

    That is so of ends which follow from nothing that was computed: the coordinator's doing, the line's, a person's,
    the clock's. Any other failure is told, and may depend on what came of the data: it counts as something that left.
    """
    try:
        yield
    except (Problem, Stopped, UpdateWithheld, PolicyViolation) as end:
        if private and (not isinstance(end, PolicyViolation) or end.rule in CLOCK_RULES):
            private.void()
        raise
