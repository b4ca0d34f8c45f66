"""The rounds of one run, one after the other, in this process."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any, Literal

from tessera.shared.api.runs import Bounds, Round, RunSpec
from tessera.shared.api.secure_sums import SumTask
from tessera.shared.api.tasks import TaskView
from tessera.shared.api.versions import Manifest, Version, VersionRef
from tessera.shared.client.round_outcomes import RoundOutcome, outcomes
from tessera.shared.methods.base import CoordinatorHalf, Plan, State
from tessera.shared.methods.registry import coordinator_half
from tessera.shared.metrics.selections import RECENT, choices_of
from tessera.shared.model.spec import Model
from tessera.shared.rounds.aggregate import Aggregation, Merged, stretched_norm
from tessera.shared.rounds.client_privacy import simulated_key
from tessera.shared.rounds.outliers import median_norm
from tessera.shared.rounds.planning import begun, bounds_of, plan_round, run_facts, warnings_of
from tessera.shared.rounds.secure_sums import Sums, terms_of_round
from tessera.shared.rounds.versions import States
from tessera.shared.schema import canonical
from tessera.shared.secure_sums.messages import Envelope, Terms
from tessera.shared.tensors.hashing import derive_seed
from tessera.worker.simulation.blob_folder import Folder
from tessera.worker.simulation.checkpoint import AcceptedReport, CommittedVersion, MeasuredVersion, RecordFolder
from tessera.worker.simulation.conditions import Conditions
from tessera.worker.simulation.in_process_coordinator import RUN, InProcessCoordinator, Order
from tessera.worker.simulation.result import Result
from tessera.worker.simulation.secure_sums import keys_of
from tessera.worker.simulation.virtual_sites import VirtualSites, worker_of
from tessera.worker.simulation.virtual_workers import EVALUATOR, Workers
from tessera.worker.simulation.worker_processes import WorkerProcesses

Watch = Callable[[RoundOutcome], None]
"""Called after every attempt at a round, once the new version is measured."""


class Stalled(RuntimeError):
    """A run cannot continue under its own rules. The message gives the reason."""


@dataclass
class Simulation:
    """A run and its sites. Its progress is in `records` and `blobs`, from which it resumes."""

    spec: RunSpec
    model: Model
    population: VirtualSites
    conditions: Conditions
    states: States
    blobs: Folder
    records: RecordFolder
    aggregation: Aggregation
    coordinator: InProcessCoordinator
    workers: Workers
    processes: WorkerProcesses
    versions: list[CommittedVersion] = field(default_factory=list)

    def run(self, until: int | None, watch: Watch) -> bool:
        """Continue to version `until`, or to the last. Return True if the run is over then.

        Raises Stalled, Invalid, and the exceptions of a method's code.
        """
        self.versions = self.records.committed() or [self._first()]
        for entry in self.versions:
            for made in entry.attempts:
                self.coordinator.end(made)
        self.workers.settle()
        over = self._go_on(until, watch)
        # No later task of this call brings the receipts of the last updates.
        self.workers.settle()
        return over

    def _go_on(self, until: int | None, watch: Watch) -> bool:
        self.blobs.keep_only(self._needed())
        self._measure()
        last = self.spec.rounds if until is None else min(until, self.spec.rounds)
        while self.latest.number < last:
            attempts = self._attempts(watch)
            if not attempts:
                return True
            made = self._merge(attempts)
            self._measure()
            watch(self._outcome(made))
        return self.latest.number >= self.spec.rounds

    def result(self, folder: Path, *, over: bool) -> Result:
        """Return the result so far."""
        measured = self._measured(entry.version.number for entry in self.versions)
        bounds = self.bounds if self.latest.number else None
        return Result(
            spec=self.spec,
            bounds=bounds,
            model=self.model,
            committed=tuple(self.versions),
            measurements=tuple(measurement for found in measured for measurement in found.measurements),
            unmeasured=tuple(task for found in measured for task in found.failed),
            over=over,
            states=self.states,
            folder=folder,
        )

    @property
    def latest(self) -> Version:
        return self.versions[-1].version

    # ------------------------------------------------------------ versions

    def _first(self) -> CommittedVersion:
        given = self.states.load(self.model, self.states.manifest(self.spec.version), 0)
        state = begun(self.spec, self.model, given)
        digest = self.spec.version if state == given else self.states.store(state, self.spec.version)[1][-1].digest
        ref = VersionRef(number=0, digest=digest)
        return self._commit(ref, state.scalars, warnings_of(self.spec, self.model, state))

    def _merge(self, attempts: Sequence[Round]) -> Round:
        """Merge and commit the last attempt, and return it with the scores of its updates."""
        reports = [held.reported for task in attempts[-1].tasks if (held := self.records.open.get(task.id))]
        bounds, base = self.bounds, _ref(self.latest)
        accepted = [one.accepted(self.population.site_of(one.view.worker), base) for one in reports]
        key, sums = simulated_key(self.spec.seed, base.number + 1), self._sums(reports)
        before = choices_of(entry.attempts[-1] for entry in self.versions[-RECENT:] if entry.attempts)
        new = self.aggregation.merge(self.spec, bounds, base, accepted, sums, key, before)
        # Empty for secure sums, which go with no robust rule.
        scores = self.aggregation.scores(self.spec, bounds, base, accepted)
        made = _ended(_scored(attempts[-1], [new.scores, scores]), new.merged)
        self.versions.append(self._commit(new.ref, new.scalars, new.warnings, [*attempts[:-1], made]))
        self.processes.end(made)
        self.records.keep_downloads(self.coordinator.held)
        updates = self._open_updates()
        self.records.open.clear()
        self.aggregation.inspector.release()
        self.blobs.remove(updates)
        keep = self._keep
        if keep != "all" and len(self.versions) > keep:
            self.blobs.remove(self._digests(self.versions[-1 - keep].version) - self._needed())
        return made

    def _commit(
        self,
        ref: VersionRef,
        scalars: Mapping[str, float],
        warnings: Sequence[str],
        attempts: Sequence[Round] = (),
    ) -> CommittedVersion:
        about = {"scalars": dict(scalars), "warnings": tuple(warnings)}
        version = Version(number=ref.number, digest=ref.digest, created_at=datetime.now(UTC), **about)
        entry = CommittedVersion(version=version, attempts=tuple(attempts))
        self.records.commit(entry)
        return entry

    def _needed(self) -> set[str]:
        """Return the blobs that may still be read."""
        keep = self._keep
        kept = self.versions if keep == "all" else self.versions[-keep:]
        digests = set[str]().union(*(self._digests(entry.version) for entry in kept))
        files = {ref.digest for ref in self.states.model(self.spec.model).preprocessing.values()}
        return {self.spec.model} | files | self._open_updates() | digests

    @property
    def _keep(self) -> int | Literal["all"]:
        """The number of versions to keep: the scales of secure sums follow from the last step."""
        keep = self.conditions.keep_versions
        return keep if keep == "all" or not self.spec.secure_sums else max(keep, 2)

    def _open_updates(self) -> set[str]:
        """Return the digests of the accepted updates of the round that is not committed yet, and of its terms."""
        reports = [held.reported for held in self.records.open.all()]
        terms = {Envelope.model_validate_json(one.envelope).terms for one in reports if one.envelope}
        return {one.update for one in reports} | terms

    def _digests(self, version: Version) -> set[str]:
        """Return a version's blobs; none if they were removed."""
        if not self.blobs.has_blob(version.digest):
            return set()
        return {version.digest, *self.states.manifest(version.digest).digests}

    # ------------------------------------------------------------ rounds

    def _attempts(self, watch: Watch) -> list[Round]:
        """Attempt the next round until the quorum is reached. Return no attempt if the method plans no more."""
        made: list[Round] = []
        for attempt in range(1, self.spec.cohort.max_attempts + 1):
            opened_at, orders = datetime.now(UTC), self._orders(attempt)
            if not orders:
                return []
            views = self._answers(orders, attempt)
            made.append(self._closed(orders, attempt, opened_at, views))
            if made[-1].state == "committed":
                return made
            made[-1] = _ended(made[-1], {})
            self.processes.end(made[-1])
            watch(self._outcome(made[-1]))
        raise Stalled(f"round {made[-1].number} was abandoned {len(made)} times. {_reason(made[-1])}")

    def _orders(self, attempt: int) -> list[Order]:
        number = self.latest.number + 1
        there = self._there(number)
        if lack := self.spec.cohort.lack(there):
            raise Stalled(f"round {number} cannot open: {len(there)} sites are there, and {lack}")
        state = self.states.load(self.model, self._manifest, self.latest.number)
        plans = plan_round(
            self.spec, self.model, state, [self.population.participant(site, number) for site in there]
        )
        sums = self._sum_task(plans, state, attempt)
        return [self._order(number, attempt, worker, plan, sums) for worker, plan in plans.items()]

    def _sum_task(self, plans: Mapping[str, Plan], state: State, attempt: int) -> SumTask | None:
        """Return the secure sum's part of the round's tasks; None for a run without secure sums."""
        if self.spec.secure_sums is None or not plans:
            return None
        weight = max(self.population.weight(self.population.site_of(worker)) for worker in plans)
        before = None
        if len(self.versions) > 1:
            former = self.versions[-2].version
            before = self.states.load(self.model, self.states.manifest(former.digest), former.number)
        keys, version = keys_of(self.spec.secure_sums.helpers), _ref(self.latest)
        about = (self.spec, self.model, plans, keys, weight, state, before)
        terms = terms_of_round(*about, run=RUN, attempt=attempt, version=version, values=self._manifest.values)
        return SumTask(terms=self.blobs.put([canonical(terms)]).digest)

    def _sums(self, reports: Sequence[AcceptedReport]) -> Sums | None:
        """Return the sums of a round, which need no opening here; None for a run without."""
        if self.spec.secure_sums is None:
            return None
        envelopes = {one.view.worker: Envelope.model_validate_json(one.envelope or "{}") for one in reports}
        (digest,) = {envelope.terms for envelope in envelopes.values()}
        return Sums(Terms.model_validate_json(self.blobs.read(digest)), envelopes, ())

    def _there(self, number: int) -> list[str]:
        return [site for site in self.population.holdings if self._is_available(site, number)]

    @property
    def bounds(self) -> Bounds:
        """The bounds of the next round, as a coordinator has them."""
        rounds = (entry.attempts[-1] for entry in self.versions if entry.attempts)
        largest = max((median_norm(self._norms_in(made)) for made in rounds), default=0.0)
        return self._fixed_bounds.model_copy(update={"median_norm": largest})

    def _norms_in(self, made: Round) -> dict[str, float]:
        """Return the norm of each update of a committed round, by worker: here a site has one worker."""
        return {
            task.worker: norm
            for task in made.tasks
            if task.state in ("merged", "left_out") and (norm := stretched_norm(self._half, task.metrics)) is not None
        }

    @cached_property
    def _half(self) -> CoordinatorHalf[Any]:
        return coordinator_half(self.spec.method, run_facts(self.spec, self.model))

    @cached_property
    def _fixed_bounds(self) -> Bounds:
        """The bounds that a coordinator fixes when the first round opens; the settings fix the sites of it."""
        return bounds_of(self.spec, (self.population.participant(site, 1) for site in self._there(1)), simulated=True)

    def _is_available(self, site: str, number: int) -> bool:
        allowed = self.spec.cohort.sites
        return (allowed is None or site in allowed) and self.conditions.is_there(site, number)

    def _order(self, number: int, attempt: int, worker: str, plan: Plan, sums: SumTask | None) -> Order:
        task = f"{number}-{attempt}-{self.population.place(self.population.site_of(worker))}"
        return Order(
            id=task, worker=worker, kind="train", number=number, plan=plan, version=_ref(self.latest), sums=sums
        )

    def _answers(self, orders: Sequence[Order], attempt: int) -> list[TaskView]:
        """Return the end of each order, in the sequence of `orders`."""
        views, left = dict[str, TaskView](), deque(self._arrivals(orders, attempt))
        self.coordinator.cohort = len(orders)
        while left:
            needed = self._needed_updates(views.values())
            asked: list[Order] = []
            while left and (needed is None or len(asked) < needed):
                order = left.popleft()
                if self.conditions.falls_silent(self.spec.seed, order.number, attempt, order.worker):
                    views[order.id] = self.coordinator.view(order, "expired")
                else:
                    asked.append(order)
            if not asked:
                views |= {order.id: self.coordinator.view(order, "cancelled") for order in left}
                break
            views |= self.processes.train(asked)
        return [views[order.id] for order in orders]

    def _needed_updates(self, views: Iterable[TaskView]) -> int | None:
        """Return the number of updates that the round still waits for; None for all."""
        cohort = self.spec.cohort
        if not cohort.target_updates:
            return None
        came = self._came(views)
        return max(len(cohort.absent(came)), max(cohort.target_updates, cohort.quorum) - len(came))

    def _came(self, views: Iterable[TaskView]) -> set[str]:
        """Return the sites whose updates were accepted."""
        return {self.population.site_of(view.worker) for view in views if view.state == "accepted"}

    def _arrivals(self, orders: Sequence[Order], attempt: int) -> list[Order]:
        """Return the orders as their answers arrive: shuffled if the round needs only the first of them."""
        if self.spec.cohort.target_updates is None:
            return list(orders)
        rng = Random(derive_seed(self.spec.seed, "arrival", orders[0].number, attempt))  # noqa: S311 (no secret: reproducible)
        return rng.sample(orders, len(orders))

    def _closed(self, orders: Sequence[Order], attempt: int, opened_at: datetime, views: Sequence[TaskView]) -> Round:
        number, accepted = orders[0].number, self._came(views)
        lack = self.spec.cohort.lack(accepted)
        return Round(
            run=RUN,
            number=number,
            attempt=attempt,
            state="abandoned" if lack else "committed",
            stage=orders[0].plan.stage,
            opened_at=opened_at,
            deadline_at=opened_at + timedelta(seconds=self.spec.cohort.deadline_seconds),
            closed_at=datetime.now(UTC),
            reason=f"{len(accepted)} of {len(views)} updates came; {lack}" if lack else "all tasks ended",
            version=None if lack else number,
            tasks=tuple(views),
        )

    # ------------------------------------------------------------ evaluation

    @property
    def _manifest(self) -> Manifest:
        return self.states.manifest(self.latest.digest)

    def _outcome(self, made: Round) -> RoundOutcome:
        measured = self._measured((made.number - 1, made.number))
        found = [measurement for one in measured for measurement in one.measurements]
        return outcomes([made], self.spec, found, [entry.version for entry in self.versions[-2:]])[0]

    def _measured(self, numbers: Iterable[int]) -> list[MeasuredVersion]:
        return [found for number in numbers if (found := self.records.measured(number))]

    def _measure(self) -> None:
        """Measure the latest version if that is due and was not done before."""
        evaluation, number = self.spec.evaluation, self.latest.number
        if evaluation is None or not evaluation.due(number, self.spec.rounds):
            return
        if self.records.measured(number) is not None:
            return
        sites = [site for site in self.population.holdings if self._measures(site)] if evaluation.sites else []
        orders = [self._evaluation(site, held_out=True) for site in sites]
        if evaluation.dataset:
            orders.append(self._evaluation(EVALUATOR, held_out=False))
        found = self.processes.evaluate(orders)
        self.records.keep_downloads(self.coordinator.held)
        self.records.measure(number, MeasuredVersion.of(found))

    def _measures(self, site: str) -> bool:
        number = self.latest.number
        return self.population.holding(site, number).held_out > 0 and self._is_available(site, number)

    def _evaluation(self, site: str, *, held_out: bool) -> Order:
        number = self.latest.number
        return Order(
            id=f"evaluate-{number}-{self.population.place(site) if held_out else 'central'}",
            worker=worker_of(site),
            kind="evaluate",
            number=number,
            plan=Plan(stage="evaluate"),
            version=_ref(self.latest),
            held_out=held_out,
        )


def _ref(version: Version) -> VersionRef:
    return VersionRef(number=version.number, digest=version.digest)


def _scored(made: Round, found: Sequence[Mapping[str, Mapping[str, float]]]) -> Round:
    """Return the round with the scores of each worker's update among its metrics."""
    tasks = tuple(
        task.model_copy(
            update={
                "metrics": {**task.metrics, **{k: v for one in found for k, v in one.get(task.worker, {}).items()}}
            }
        )
        for task in made.tasks
    )
    return made.model_copy(update={"tasks": tasks})


def _ended(made: Round, merged: Merged) -> Round:
    """Return the round with the outcome of each accepted update."""

    def ended(task: TaskView) -> TaskView:
        if task.state != "accepted":
            return task
        unmerged = merged.get(task.worker)
        fate = {"state": "left_out"} if unmerged is None else {"state": "merged", "unmerged": unmerged}
        return task.model_copy(update=fate)

    return made.model_copy(update={"tasks": tuple(map(ended, made.tasks))})


def _reason(made: Round) -> str:
    """Return the reason why a round was abandoned, with its workers' problems."""
    said = [f"{task.worker}: {task.problem.detail}" for task in made.tasks if task.problem]
    return "; ".join([made.reason or "", *said])
