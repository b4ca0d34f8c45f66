"""The events of one run in simulated time: what the conductor decides, and what the virtual workers do."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, nsmallest
from math import inf
from pathlib import Path
from random import Random

from tessera.coordinator.conductor.liveness import TooFewWilling
from tessera.coordinator.domain.decide import Action, Evaluate, decide
from tessera.coordinator.domain.leases import Expire, Offer
from tessera.coordinator.domain.round_moves import Abandon, Close, Merge, Open
from tessera.coordinator.domain.snapshot import RunSnapshot, Timeouts
from tessera.coordinator.domain.sum_helpers import Pause
from tessera.coordinator.domain.without_rounds import Complete
from tessera.shared.api.runs import Round, RunSpec
from tessera.shared.api.tasks import Claim
from tessera.shared.client.round_outcomes import RoundOutcome, outcomes
from tessera.shared.model.spec import Model
from tessera.shared.problems import Conflict, InvalidUpdate
from tessera.shared.rounds.validation import Inspector
from tessera.shared.tensors.hashing import derive_seed
from tessera.simulation.blob_folder import Folder
from tessera.simulation.conditions import Conditions
from tessera.simulation.coordinator import EVALUATOR, INSTANCE, LONGEST_SECONDS, LeasedTask, VirtualCoordinator
from tessera.simulation.profiles import Profiles
from tessera.simulation.result import Result
from tessera.simulation.secure_sums import NamedKeys
from tessera.simulation.virtual_sites import WORKER, VirtualSites, worker_of
from tessera.simulation.virtual_workers import Work, Workers, WorkResult
from tessera.simulation.worker_processes import WorkerProcesses

SILENT_SECONDS = 60.0
"""The lease of a worker that falls silent."""

Watch = Callable[[RoundOutcome], None]
"""Called after every attempt at a round, once the new version is measured."""


class Stalled(RuntimeError):
    """A run cannot continue under its own rules. The message gives the reason."""


@dataclass(order=True)
class Event:
    """The end of a task's work, or the arrival of its report. At one instant, evaluations are first."""

    at: float
    trains: bool
    place: int
    leased: LeasedTask = field(compare=False)
    result: WorkResult | None = field(default=None, compare=False)
    """None until the work is done."""


@dataclass
class Simulation:
    """A run and its sites. Its progress is in the coordinator's tables and in `blobs`, from which it resumes."""

    spec: RunSpec
    model: Model
    population: VirtualSites
    test_examples: int
    """Of the central data set; 0 without one."""
    conditions: Conditions
    profiles: Profiles
    blobs: Folder
    inspector: Inspector
    coordinator: VirtualCoordinator
    workers: Workers
    processes: WorkerProcesses
    _events: list[Event] = field(default_factory=list)
    _measured: int = -1
    """The last version whose evaluations are over."""
    _seen: RunSnapshot | None = None
    _offered: set[str] = field(default_factory=set)
    """The workers with an offered task."""
    _declared: dict[str, int] = field(default_factory=dict)
    """By site, the round from which on it has the data that its worker declared last."""
    _begun: set[str] = field(default_factory=set)
    """The tasks whose work has begun."""
    _last: dict[str, str] = field(default_factory=dict)
    """The last task that each worker trained for, by the worker's name."""
    _counted: dict[str, str] = field(default_factory=dict)
    """The last accepted task of each worker."""
    _order: tuple[tuple[int, int], dict[str, int]] = ((0, 0), {})
    """Of a round that needs only the first updates, by its number and attempt: the place of each worker."""
    _stored: dict[str, str] = field(default_factory=dict)
    """The updates that may still be merged, by task."""
    _oldest: int = 0
    """The oldest version whose blobs may be here."""

    def run(self, until: int | None, watch: Watch) -> bool:
        """Continue to version `until`, or to the last. Return True if the run is over then.

        Raises Stalled, Invalid, and the exceptions of a method's code.
        """
        coordinator = self.coordinator
        self.workers.settle(coordinator.task)
        self._clear()
        self._counted, self._offered = coordinator.counted(), coordinator.offered()
        for leased in coordinator.leased():
            self._expect(leased)
        reported = {(made.number, made.attempt) for made in coordinator.ended_rounds()}
        state, _ = coordinator.progress()
        while state == "running":
            if not coordinator.is_due:
                if not self._claim():
                    self._wait()
                continue
            coordinator.is_due, before = False, self._measured
            is_done, ended = self._decide(until)
            if ended or self._measured != before:
                for made in self._news(reported):
                    watch(self._outcome(made))
            state, _ = coordinator.progress()
            if is_done:
                break
        # No later task of this call brings the receipts of the last updates.
        self.workers.settle(coordinator.task)
        self._clear()
        return state == "completed"

    def result(self, folder: Path, *, over: bool) -> Result:
        """Return the result so far."""
        run, rounds = self.coordinator.run(), tuple(self.coordinator.ended_rounds())
        return Result(
            id=run.id,
            spec=self.spec,
            bounds=run.bounds if any(made.version for made in rounds) else None,
            model=self.model,
            versions=tuple(self.coordinator.versions()),
            rounds=rounds,
            measurements=tuple(self.coordinator.measurements()),
            unmeasured=tuple(self.coordinator.failed_evaluations()),
            over=over,
            states=self.coordinator.states,
            folder=folder,
        )

    # ------------------------------------------------------------ the conductor

    def _decide(self, until: int | None) -> tuple[bool, bool]:
        """Do what is due in the run. Return two truths: version `until` is reached; a round ended."""
        coordinator = self.coordinator
        _, number = coordinator.progress()
        measures = self._measured < number
        # A version is measured by sites that were there in its round, on the data that they had.
        self._declare(number if measures or number >= self.spec.rounds else number + 1)
        self._seen = run = coordinator.snapshot()
        actions = [
            action
            for action in decide(run, coordinator.clock(), Timeouts(0.0, inf, LONGEST_SECONDS))
            if self._is_wanted(action, run, measures=measures, until=until)
        ]
        for place, action in enumerate(actions):
            try:
                self._do(action, run)
            except Conflict:
                # An action before it may have overtaken it. The next look decides anew.
                if place == 0:
                    raise
        if not actions and measures and not coordinator.offered() and all(event.trains for event in self._events):
            self._measured = number
            coordinator.look()
        ended = any(isinstance(action, Merge | Abandon) for action in actions)
        return not (actions or measures) and until is not None and number >= until, ended

    def _is_wanted(self, action: Action, run: RunSnapshot, *, measures: bool, until: int | None) -> bool:
        if isinstance(action, Expire | Offer):
            return True
        if measures or isinstance(action, Evaluate):
            # A buffer may make several versions while a site trains, which measures the latest one then.
            return isinstance(action, Evaluate) and (measures or self.spec.cohort.buffers)
        return until is None or run.version < until or isinstance(action, Complete)

    def _do(self, action: Action, run: RunSnapshot) -> None:
        if isinstance(action, Pause):
            raise Stalled(self._why_abandoned(run) if run.abandoned else action.reason)
        try:
            self.coordinator.do(action)
        except TooFewWilling as fault:
            if isinstance(action, Open):
                raise Stalled(f"round {action.number} cannot open: {fault}") from None
        self._offered = self.coordinator.offered()
        if isinstance(action, Close | Merge | Abandon | Complete):
            self._drop_cancelled()
        if isinstance(action, Merge | Abandon):
            self._remove_merged()

    def _why_abandoned(self, run: RunSnapshot) -> str:
        """Return the reason why a round was abandoned, with its workers' problems."""
        made = self.coordinator.ended_rounds(run.version + 1)[-1]
        said = [f"{task.worker}: {task.problem.detail}" for task in made.tasks if task.problem]
        reason = "; ".join([made.reason or "", *said])
        return f"round {made.number} was abandoned {run.abandoned} times. {reason}"

    # ------------------------------------------------------------ who is there

    def _declare(self, number: int) -> None:
        """Have the workers declare their data of a round, and note which of them are there."""
        claims = [
            (site, self._claim_of(site, number))
            for site in self.population.holdings
            if self._declared.get(site) != self.population.since(site, number)
        ]
        if not self._declared and self.test_examples and self.spec.evaluation and self.spec.evaluation.dataset:
            data = {self.spec.evaluation.dataset: self.test_examples}
            claims.append((self.evaluator, _claim(EVALUATOR, kinds=("evaluate",), datasets=data)))
        if claims:
            self.coordinator.declare(claims)
            self._declared = {site: self.population.since(site, number) for site in self.population.holdings}
        at, sites = self.coordinator.clock(), self.population.holdings
        away = {worker_of(site) for site in sites if not self.profiles.is_there(site, number, at)}
        self.coordinator.liveness.absent = away | self._silent()

    @property
    def evaluator(self) -> str:
        """The site of the worker with the central data set: one that the run lets know of it."""
        return (self.spec.cohort.sites or (EVALUATOR,))[0]

    def _claim_of(self, site: str, number: int) -> Claim:
        held, about = self.population.holding(site, number), self.population.participant(site, number)
        sums = self.spec.secure_sums
        return _claim(
            WORKER,
            kinds=("train", "evaluate", *(("agree", "open") if sums else ())),
            datasets={self.spec.dataset: held.examples},
            held_out={self.spec.dataset: held.held_out} if held.held_out else {},
            methods=(self.spec.method.name,),
            augments=True,
            resources=dict(about.resources),
            site_keys=NamedKeys(site).public(site, self.population.weight(site)) if sums else None,
        )

    def _silent(self) -> set[str]:
        """Return the workers that fell silent with a task. One of a run that buffers is back when its lease ends."""
        if not self.conditions.dropout:
            return set()
        return {
            worker
            for worker, number, attempt, leases, is_leased in self.coordinator.unfinished()
            if self._falls_silent(worker, number, attempt, leases) and (is_leased or not self.spec.cohort.buffers)
        }

    def _falls_silent(self, worker: str, number: int, attempt: int, leases: int) -> bool:
        """Return True if a worker falls silent with a task of a round that it has leased this often."""
        once = leases == 1 or not self.spec.cohort.buffers
        return once and attempt > 0 and self.conditions.falls_silent(self.spec.seed, number, attempt, worker)

    # ------------------------------------------------------------ the workers

    def _claim(self) -> bool:
        """Have idle workers claim their tasks; return True if any did."""
        busy = {event.leased.worker for event in self._events} | self.coordinator.liveness.absent
        if not (idle := sorted(self._offered - busy)):
            return False

        def seconds(worker: str, number: int, attempt: int, leases: int) -> float:
            return SILENT_SECONDS if self._falls_silent(worker, number, attempt, leases + 1) else LONGEST_SECONDS

        cohort = len(self._seen.round.tasks) if self._seen and self._seen.round else 1
        claimed = self.coordinator.claim(idle, cohort, seconds)
        for leased in claimed:
            self._expect(leased)
        self._offered = self.coordinator.offered()
        self.coordinator.look()
        return bool(claimed)

    def _expect(self, leased: LeasedTask) -> None:
        """Note when a task's work ends. That of a silent worker never does, and evaluations take no time."""
        if leased.is_silent:
            return
        task, at = leased.task, leased.leased_at
        site = self.population.site_of(leased.worker)
        if leased.trains:
            at += self.profiles.training_seconds(site, task, leased.examples, self._name(leased))
        heappush(self._events, Event(at, leased.trains, self._place(leased), leased))

    def _name(self, leased: LeasedTask) -> str:
        """Return a task's name, which is the same in each simulation."""
        if leased.trains:
            place = self.population.place(self.population.site_of(leased.worker))
            return f"{leased.task.round}-{leased.attempt}-{place}"
        at = "central" if not leased.task.held_out else self._place(leased)
        return f"evaluate-{leased.task.round}-{at}"

    def _place(self, leased: LeasedTask) -> int:
        """Return a task's place among those that end at the same instant: drawn if only the first updates count."""
        if not leased.trains and not leased.task.held_out:
            return len(self.population.holdings)
        key, worker, cohort = (leased.task.round, leased.attempt), leased.worker, self.spec.cohort
        if not leased.trains or cohort.enough is None:
            return self.population.place(self.population.site_of(worker))
        if cohort.buffers:
            return derive_seed(self.spec.seed, "arrival", *key, worker)
        if self._order[0] != key:
            asked = self.coordinator.asked(*key)
            rng = Random(derive_seed(self.spec.seed, "arrival", *key))  # noqa: S311 (no secret: reproducible)
            self._order = key, {name: place for place, name in enumerate(rng.sample(asked, len(asked)))}
        return self._order[1][worker]

    def _wait(self) -> None:
        """Let time pass until the next event, or until there may be something to decide."""
        clock, run = self.coordinator.clock, self._seen
        timers = [self.profiles.next_change(clock())]
        if run and run.round and run.round.state == "open":
            ends = (task.lease_expires_at for task in run.round.tasks if task.state == "leased")
            timers += [run.round.deadline_at, *(at for at in ends if at and at < clock() + LONGEST_SECONDS / 2)]
        # A buffer waits beyond its deadline.
        due_at = min((at for at in timers if at > clock()), default=inf)
        if self._events and self._events[0].at <= due_at:
            self._next_event()
        elif due_at < inf:
            clock.at = due_at
            self.coordinator.look()
        else:
            raise Stalled(self._why_closed())

    def _why_closed(self) -> str:
        """Return the reason why no round opens, and none goes on."""
        _, number = self.coordinator.progress()
        there = self.coordinator.there()
        return f"round {number + 1} cannot open: {len(there)} sites are there, and {self.spec.cohort.lack(there)}"

    def _next_event(self) -> None:
        """Finish the first task's work, or deliver its report if that arrives now."""
        self._work_ahead()
        event = heappop(self._events)
        leased = event.leased
        if event.result is None:
            event.result = result = self.processes.result(leased.task.id)
            if result.submission:
                self._stored[leased.task.id] = result.submission.update
                site = self.population.site_of(leased.worker)
                event.at += self.profiles.transfer_seconds(site, result.download_bytes, result.upload_bytes)
                if self._events and self._events[0] < event:
                    heappush(self._events, event)
                    return
        self.coordinator.clock.at = event.at
        self._deliver(leased, event.result)

    def _deliver(self, leased: LeasedTask, result: WorkResult) -> None:
        coordinator, worker, task = self.coordinator, leased.worker, leased.task.id
        if result.failure:
            coordinator.fail(worker, task, result.failure)
            return
        try:
            if result.submission:
                coordinator.submit(worker, task, result.submission)
            elif result.evaluation:
                coordinator.submit_evaluation(worker, task, result.evaluation)
        except InvalidUpdate:
            # The coordinator has recorded the refusal.
            return
        self._counted[worker] = task

    def _work_ahead(self) -> None:
        """Begin the work of the next tasks, as many as the processes take and the round needs."""
        ahead, run, cohort = self.processes.ahead, self._seen, self.spec.cohort
        if cohort.enough and run and run.round:
            came = {task.site for task in run.round.tasks if task.state == "accepted"}
            ahead = min(ahead, max(1, cohort.enough - len(came)))
        for event in nsmallest(ahead, self._events) if ahead > 1 else self._events[:1]:
            task = event.leased.task
            if task.id not in self._begun:
                self._begun.add(task.id)
                self.processes.begin(self._work(event.leased))
                if event.leased.trains:
                    self._last[event.leased.worker] = task.id

    def _work(self, leased: LeasedTask) -> Work:
        task, worker, earlier = leased.task, leased.worker, None
        last = self._last.get(worker)
        if last and not (task.receipt and task.receipt.task == last):
            earlier = self.coordinator.task(last)
        counted = self._counted.get(worker)
        return Work(name=self._name(leased), worker=worker, task=task, counted=counted, earlier=earlier)

    def _drop_cancelled(self) -> None:
        """Forget the tasks that were cancelled."""
        leased = self.coordinator.leased_ids()
        gone = [event for event in self._events if event.leased.task.id not in leased]
        for event in gone:
            self.processes.forget(event.leased.task.id)
        if gone:
            self._events = [event for event in self._events if event.leased.task.id in leased]
            heapify(self._events)

    # ------------------------------------------------------------ what is kept

    def _remove_merged(self) -> None:
        """Remove the updates that nothing merges any more, and the versions that nothing needs."""
        self.inspector.release()
        if self.spec.secure_sums:
            # The terms of the round are in no version.
            self._clear()
            return
        used, _ = self.coordinator.open_updates()
        # No table has the updates that have not arrived yet.
        on_their_way = {event.leased.task.id for event in self._events}
        used |= {digest for task, digest in self._stored.items() if task in on_their_way}
        over = {task for task, digest in self._stored.items() if digest not in used}
        for task in over:
            self.blobs.remove([self._stored.pop(task)])
        first = self._first_kept()
        if self._oldest < first:
            needed = self._needed()
            for version in self.coordinator.versions(self._oldest):
                if version.number < first and self.blobs.has_blob(version.digest):
                    self.blobs.remove(self._digests(version.digest) - needed)
            self._oldest = first

    def _first_kept(self) -> int:
        """Return the number of the oldest version to keep."""
        keep, (_, number), (_, base) = (
            self.conditions.keep_versions,
            self.coordinator.progress(),
            self.coordinator.open_updates(),
        )
        if keep == "all":
            return 0
        # The scales of secure sums follow from the last step.
        first = number + 1 - (max(keep, 2) if self.spec.secure_sums else keep)
        return max(0, first if base is None else min(first, base))

    def _clear(self) -> None:
        """Remove all blobs that are not needed."""
        self.blobs.keep_only(self._needed())

    def _needed(self) -> set[str]:
        """Return the blobs that may still be read."""
        states, (used, _) = self.coordinator.states, self.coordinator.open_updates()
        kept = (version.digest for version in self.coordinator.versions(self._first_kept()))
        files = {ref.digest for ref in states.model(self.spec.model).preprocessing.values()}
        waiting = {
            self._stored[event.leased.task.id] for event in self._events if event.result and event.result.submission
        }
        return {self.spec.model} | files | used | waiting | set[str]().union(*map(self._digests, kept))

    def _digests(self, version: str) -> set[str]:
        """Return a version's blobs; none if they were removed."""
        return (
            {version, *self.coordinator.states.manifest(version).digests} if self.blobs.has_blob(version) else set()
        )

    # ------------------------------------------------------------ news

    def _news(self, reported: set[tuple[int, int]]) -> Iterable[Round]:
        """Yield the rounds that ended, and were measured, since the last call."""
        since = max((number for number, _ in reported), default=0)
        for made in self.coordinator.ended_rounds(since):
            if (made.number, made.attempt) in reported or (made.version or 0) > self._measured:
                continue
            reported.add((made.number, made.attempt))
            yield made

    def _outcome(self, made: Round) -> RoundOutcome:
        since = made.number - 1
        found = self.coordinator.measurements(since)
        return outcomes([made], self.spec, found, self.coordinator.versions(since))[0]


def _claim(worker: str, **about: object) -> Claim:
    return Claim.model_validate({"worker": worker, "instance": INSTANCE, **about})
