"""A task from admission to upload: each stage hands its result to the next."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, BinaryIO, cast

import structlog

from tessera.shared.api.descriptions import Description
from tessera.shared.api.membership import MembershipCounts
from tessera.shared.api.secure_sums import HELPER_KINDS
from tessera.shared.api.tasks import Task
from tessera.shared.methods.base import LocalResult
from tessera.shared.problems import Problem
from tessera.shared.schedule import local_steps
from tessera.shared.schema import EPSILON, canonical
from tessera.shared.telemetry import spans
from tessera.shared.tensors.lazy import digest_of, to_array
from tessera.shared.updates.update_file import WrittenUpdate
from tessera.worker.data.dataset_info import DatasetInfo
from tessera.worker.errors import HiddenFailure
from tessera.worker.governance.policy import Allowance, PolicyViolation, permits_figures
from tessera.worker.privacy.cost import least_budget_of
from tessera.worker.state.atomic_files import temporary_file
from tessera.worker.state.audit import LEAVING, StateRolledBack
from tessera.worker.state.database import StateError
from tessera.worker.state.hash_chain import TaskRef
from tessera.worker.state.privacy_ledger import LedgerEntry, noisy_in
from tessera.worker.task.admission import admit
from tessera.worker.task.description import describe, summed
from tessera.worker.task.environment import Journal, TaskEnvironment, TaskRun
from tessera.worker.task.fetch import fetch
from tessera.worker.task.handover import FetchedVersion, TaskOutcome
from tessera.worker.task.heartbeat import Stopped
from tessera.worker.task.membership import attack
from tessera.worker.task.rehearsal import rehearse
from tessera.worker.task.resumption import ending
from tessera.worker.task.secure_sums import check_values, help_open
from tessera.worker.task.upload import Egress, HeldUpdate, UpdateFile
from tessera.worker.training.progress import Check, Report

if TYPE_CHECKING:
    from tessera.worker.privacy.account import PrivacyAccount


@dataclass(frozen=True)
class TaskRunner(TaskEnvironment):
    """Runner of a worker's tasks. The site's rules apply at three gates: before a version is fetched (`admission`),
    before data are read (`train`, `evaluate`) and before anything leaves (`upload`)."""

    def run(self, task: Task, check: Check, report: Report) -> HeldUpdate | None:
        """Execute a task; when this returns, the coordinator has accepted the result, or the returned update waits
        for its release.

        Raises PolicyViolation before any forbidden step, Unapproved before any work for an unapproved run, Problem
        if the coordinator refuses, the exceptions of `check`, and other exceptions if the task fails.
        """
        # A rehearsal is charged nothing.
        ledger = None if task.kind == "rehearse" else self.ledger
        journal = Journal(TaskRef.of(task), task.dataset, self.audit, ledger, self.limits)
        run = TaskRun(self, task, check, report, journal, began_at=self.clock())
        report.hides = self.hides(task)
        if report.hides:
            self.hidden.add(task.run)
        self._require_state(task.audit_head)
        run.journal.note(
            "task.start",
            kind=task.kind,
            method=task.method.name,
            orchestrator=task.orchestrator,
            dataset=task.dataset,
            plan=digest_of(canonical(task.plan)),
            version=task.version.digest,
            **({"base_bits": bits} if (bits := self.executor.compute.base_bits) else {}),
            **({"own_script": True} if self.own_script and task.trains else {}),
        )
        if task.kind in HELPER_KINDS:
            help_open(run)
            return None
        admission = admit(run)
        if task.kind == "rehearse":
            with _at_quantum(run):
                rehearsal = rehearse(run, admission)
            Egress(run).submit_report(rehearsal.model_dump(mode="json"))
            return None
        dataset, account, checkpoint = admission.dataset, admission.account, admission.checkpoint
        held = None
        if admission.held and self.airlock:
            # The task was done under an earlier lease.
            return HeldUpdate.again(Egress(run, account, checkpoint, admission.terms), self.airlock, *admission.held)
        if task.describes or task.kind == "attack":
            return self._reported(Egress(run, terms=admission.terms), dataset)
        report.begin("fetching")
        with _at_quantum(run), self.shelf.pinning(), _settling(account), ending(checkpoint):
            with spans.span("fetch"):
                fetched = fetch(run, dataset)
                if admission.terms:
                    check_values(admission.terms, fetched.manifest)
            egress = Egress(run, account, checkpoint, admission.terms)
            with spans.span(task.kind):
                try:
                    if admission.failure:
                        raise admission.failure
                    outcome = self.executor.execute(run, fetched, account, checkpoint)
                except HiddenFailure as hidden:
                    outcome = _without_step(run, fetched, dataset, account, hidden)
            if outcome.result:
                egress = replace(egress, weights=outcome.weights)
                held = self._sent(egress, fetched, outcome)
            else:
                egress.submit_evaluation(outcome.examples)
        return held

    def _sent(self, egress: Egress, fetched: FetchedVersion, outcome: TaskOutcome) -> HeldUpdate | None:
        """Submit the update of an outcome, or return it held for release."""
        result = outcome.result
        assert result  # noqa: S101 (for the types)
        with spans.span("upload"), egress.checked(result, fetched) as update:
            keep, blocks = {**result.keep, **fetched.feedback.kept(), **outcome.moments}, fetched.blocks
            if self.airlock:
                return HeldUpdate.of(egress, self.airlock, update, keep, outcome.examples, blocks)
            ready = egress.leave(update, outcome.examples, blocks, keeps=bool(keep))
            with spans.span("submit"):
                egress.submit(ready, keep, outcome.examples)
        return None

    def _reported(self, egress: Egress, dataset: DatasetInfo) -> HeldUpdate | None:
        """Submit counts of subjects, alone or in a secure sum, or return them held for release."""
        counts: Description | MembershipCounts
        with _at_quantum(egress.run), self.shelf.pinning():
            if egress.run.task.kind == "attack":
                counts = attack(egress.run, dataset)
            else:
                counts = describe(egress.run)
                if egress.terms:
                    return self._sent(egress, *summed(egress.run, egress.terms, counts))
        egress.run.wait_for_quantum(egress.run.check)
        if not self.airlock:
            egress.submit_report(counts.model_dump(mode="json"))
            return None
        with temporary_file(self.scratch) as (path, file):
            file.write(canonical(counts))
            file.flush()
            egress.run.report.metrics = counts.figures
            opened = cast("Callable[[], BinaryIO]", partial(path.open, "rb"))
            update = UpdateFile(WrittenUpdate({}, {}, None), file.tell(), opened, path)
            return HeldUpdate.of(egress, self.airlock, update, {}, sum(counts.subjects), ())

    def _require_state(self, head: str | None) -> None:
        """Raise StateRolledBack if the audit lacks an entry that the coordinator holds, so that the ledgers may too.

        An audit from which nothing has left yet is that of a new state folder: a worker may lose its state, unless a
        budget counts its privacy costs. A coordinator that lies stops the worker, which it could do in any case.
        """
        if self.audit is None or head is None or self.audit.has(head):
            return
        rules = any(self.privacy_rules(name) for name in self.datasets)
        if rules or any(entry.action in LEAVING for entry in self.audit.read()):
            raise StateRolledBack(
                f"the coordinator accepted a result with the digest {head} of this site's audit, which lacks it: its "
                "files are an older copy, and the ledgers may lack what was spent since",
                head,
            )
        structlog.get_logger("worker").warning("state-lost", head=head, remedy="Nothing, if the state folder is new.")
        # Otherwise the next task would find entries that left, and not this one.
        self.audit.record("chain.adopt", None, head=head)

    def spent(self) -> dict[str, float]:
        """Return the epsilon spent of each data set with a budget; infinite after an uncovered use without noise."""
        ledger = self.ledger
        found = {
            name: _least(most, partial(ledger.latest, name) if ledger else tuple)
            for name, most in self.allowances.items()
        }
        return {name: epsilon for name, epsilon in found.items() if epsilon is not None}

    def total_spent(self) -> float | None:
        """Return the epsilon spent of all data sets together, under the site's budget for them; None without one."""
        most = self.policy.max_total_privacy
        return _least(most, self.ledger.latest_of_all if self.ledger else tuple) if most else None

    def evaluations_left(self) -> dict[str, int]:
        """Return the number of versions that may still be measured on each data set, where it is below the limit of
        one run."""
        left = dict[str, int]()
        if self.history is None:
            return left
        for name in self.datasets:
            try:
                left[name] = max(0, self.policy.max_evaluations - self.history.measured(name))
            except PolicyViolation:
                # The task itself fails for a count that cannot be read, and reports why.
                left[name] = 0
        return {name: count for name, count in left.items() if count < self.policy.max_run_evaluations}

    def declared_units(self, dataset: str) -> int:
        """Return the number of examples of a data set; of groups if only runs that protect groups may train on it."""
        examples = self.datasets[dataset]
        policy = self.policy
        rules = (
            policy.require_privacy,
            policy.max_weekly_privacy,
            policy.max_total_privacy,
            self.allowances.get(dataset),
        )
        if (
            dataset in self.for_evaluation
            or examples.groups is None
            or all(rule is None or rule.unit == "example" for rule in rules)
        ):
            return examples.examples
        return examples.groups

    def may_measure(self, dataset: str, examples: int) -> bool:
        """Return True if versions may be evaluated on `examples` of an evaluation-only data set."""
        noise = self.policy.figures_privacy
        permitted = all(permits_figures(rule, noise) for rule in self.privacy_rules(dataset))
        return permitted and examples >= self.policy.min_evaluation_examples


def _without_step(
    run: TaskRun, fetched: FetchedVersion, dataset: DatasetInfo, account: PrivacyAccount | None, hidden: HiddenFailure
) -> TaskOutcome:
    """Return the outcome of a site that learned nothing: the version as it was fetched, and the vault as it was.

    Only this site's log and audit record the fault. The task's report has the same examples and privacy costs
    as after training. Raises PolicyViolation if a budget has no room for the round's steps.
    """
    run.journal.note("train.fail", code=str(hidden))
    structlog.get_logger("worker").error("update-without-step", cause=str(hidden), exc_info=hidden.__cause__)
    units = account.units if account else dataset.examples
    run.report.examples, run.report.metrics = units, {}
    if account:
        account.charge(local_steps(run.task.local_training, units))
        run.report.metrics = {EPSILON: account.spent()}
    asked = run.task.plan.upload.resolve(fetched.blocks)
    upload = {block.name: to_array(fetched.bases[block.name]) for block in asked if block.name in fetched.bases}
    return TaskOutcome(units, LocalResult(upload, fetched.kept))


def _least(most: Allowance, read: Callable[[], Sequence[LedgerEntry]]) -> float | None:
    """Return the least budget that admits the entries, infinite after a use that it does not bound; None if they
    cannot be read."""
    # A task on a data set with an unreadable ledger fails and reports why.
    with suppress(StateError, OSError, ImportError):
        entries = read()
        return math.inf if most.uncovered(entries) else least_budget_of(noisy_in(entries, most.unit), most.delta)
    return None


@contextmanager
def _at_quantum(run: TaskRun) -> Iterator[None]:
    """Let a failure of the block end the task at a multiple of the site's quantum. A lost lease changes nothing: the
    worker's next claim would show when it noticed. A stop by the site itself is not delayed."""

    def check() -> None:
        with suppress(Problem, PolicyViolation):
            run.check()

    try:
        yield
    except Stopped:
        raise
    except Exception:
        run.wait_for_quantum(check)
        raise


@contextmanager
def _settling(account: PrivacyAccount | None) -> Iterator[None]:
    """Release a private task's reserved budget if the block ends before its first step, because of the coordinator,
    the network or a stop. Any other failure is reported and may depend on the data, so the budget counts as spent.

    After the first step it stays spent for any reason: how long a task took until then depends on the examples, and a
    person who withheld an update saw its noisy norms.
    """
    try:
        yield
    except (Problem, Stopped):
        if account:
            account.void()
        raise
