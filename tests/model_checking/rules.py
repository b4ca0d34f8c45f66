"""The pure rules alone, at a hundred times the speed: `decide`, the lifecycles and `refusal` on records in memory.

What the tables and the HTTP side do is here a page of dictionaries: a stand-in, whose likeness to the real storage is
what `federation` is for. Conductors look, and act later on what they saw; requests come late, twice or never; and a
version is the set of reports that it is made of, so that what counted can be read off it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from tessera.coordinator.domain.acceptance import refusal
from tessera.coordinator.domain.decide import Action, decide
from tessera.coordinator.domain.leases import Expire, Offer
from tessera.coordinator.domain.lifecycle import LIVE_ROUND, LIVE_RUN, ROUND, RUN, TASK, Lifecycle
from tessera.coordinator.domain.round_moves import Abandon, Close, Merge, Open
from tessera.coordinator.domain.snapshot import RoundSnapshot, RunSnapshot, TaskSnapshot, Timeouts
from tessera.coordinator.domain.sum_helpers import Pause
from tessera.coordinator.domain.without_rounds import Complete
from tessera.shared.api.cohort import Cohort
from tessera.shared.rounds.planning import choose
from tessera.shared.schema import ACCEPTED
from tessera.shared.tensors.hashing import derive_seed
from tests.model_checking.invariants import LEGAL, Violated

LEASE = 30.0
LIVE = 45.0
PATIENCE = Timeouts(cohort_wait_seconds=10, evaluation_seconds=100, lease_seconds=LEASE)
Report = tuple[str, int]
"""A worker's, and the round's number that it was made for."""


@dataclass
class Task:
    id: str
    worker: str
    round: int
    state: str = "offered"
    token: int = 0
    attempts: int = 0
    expires_at: float | None = None
    accepted_token: int | None = None


@dataclass
class Round:
    id: str
    number: int
    opened_at: float
    deadline_at: float
    tasks: list[Task]
    state: str = "open"
    closed_at: float = 0.0


@dataclass
class Run:
    cohort: Cohort
    rounds: int
    seed: int
    state: str = "running"
    resumed_at: float = 0.0
    versions: list[frozenset[Report]] = field(default_factory=lambda: [frozenset()])
    attempts: list[Round] = field(default_factory=list)

    @property
    def live(self) -> Round | None:
        return next((one for one in reversed(self.attempts) if one.state in LIVE_ROUND), None)


class Overtaken(Exception):
    """A guarded write found another state than it expected."""


def move(thing: Task | Round | Run, lifecycle: Lifecycle, kind: str, event: str) -> None:
    if thing.state not in lifecycle[event].sources:
        raise Overtaken(event)
    # The table as the architecture has it, written out once more.
    if LEGAL[kind][event].get(thing.state) != lifecycle[event].target:
        raise Violated(f"states: {kind}.{event} from {thing.state}")
    thing.state = lifecycle[event].target


class Rules:
    """One run after the other, on one seed. `step` is one event."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = Random(seed)
        self.now = 0.0
        self.steps = 0
        self.runs = 0
        self.ended = {"completed": 0, "cancelled": 0}
        self._begin()

    def _begin(self) -> None:
        random = self.random
        self.runs += 1
        count = random.randint(2, 6)
        quorum = random.randint(1, count)
        self.workers = [f"{site}/w" for site in "abcdef"[:count]]
        self.seen = dict.fromkeys(self.workers, self.now)
        cohort = Cohort(
            size=random.choice((None, count, quorum)),
            quorum=quorum,
            target_updates=random.choice((None, quorum)),
            deadline_seconds=150,
            max_attempts=random.choice((2, 5)),
            max_task_attempts=random.choice((1, 3)),
        )
        self.run = Run(cohort, random.randint(1, 6), random.randrange(1 << 30), resumed_at=self.now)
        self.looks: list[tuple[RunSnapshot, float]] = []
        """What conductors saw, and have not acted on yet."""
        self.post: list[Callable[[], None]] = []
        """Reports on their way."""
        self.held: list[tuple[Task, int]] = []
        """Leases that somebody believes to have."""
        self.storm_until = self.now + random.uniform(200, 2000)

    # ------------------------------------------------------------ events

    def step(self) -> None:
        self.steps += 1
        random = self.random
        self.now += random.random()
        storm = self.now < self.storm_until
        chance = random.random()
        if chance < 0.25:
            self._look()
        elif chance < 0.5 and self.looks:
            # In calm, one conductor that acts on what it has just seen.
            self._act(self.looks.pop(random.randrange(len(self.looks))) if storm else self._latest())
        elif chance < 0.75:
            self._claim(random.choice(self.workers))
        elif chance < 0.9 and self.held:
            self._work(random.choice(self.held), storm=storm)
        elif self.post:
            self._deliver(storm=storm)
        elif storm and random.random() < 0.02:
            self._whim()
        if storm and random.random() < 0.002:
            # A crash: what was only in memory is gone.
            self.looks.clear()
            self.post.clear()
            self.held = [one for one in self.held if random.random() < 0.5]
        self._check()
        self._go_on(storm=storm)

    def _go_on(self, *, storm: bool) -> None:
        if self.run.state not in LIVE_RUN and self.run.live is None:
            self.ended[self.run.state] += 1
            self._begin()
        elif self.run.state == "paused" and not storm:
            move(self.run, RUN, "run", "resume")
            self.run.resumed_at = self.now

    def _deliver(self, *, storm: bool) -> None:
        """One message: in another order than sent, and in a storm repeated or lost."""
        place = self.random.randrange(len(self.post))
        message = self.post[place] if storm and self.random.random() < 0.2 else self.post.pop(place)
        if not storm or self.random.random() > 0.1:
            message()

    def _latest(self) -> tuple[RunSnapshot, float]:
        self.looks.clear()
        self._look()
        return self.looks.pop()

    def _look(self) -> None:
        run = self.run
        live = run.live
        number = len(run.versions)
        ended = max((one.closed_at for one in run.attempts), default=0.0)
        here = {worker for worker, at in self.seen.items() if at >= self.now - LIVE}
        tasks = () if live is None else tuple(
            TaskSnapshot(t.id, t.worker, t.state, t.token, t.attempts, t.expires_at, t.worker in here)
            for t in live.tasks
        )  # fmt: skip
        snapshot = RunSnapshot(
            id="run",
            state=run.state,
            rounds=run.rounds,
            version=number - 1,
            cohort=run.cohort,
            round=live and RoundSnapshot(live.id, live.number, live.state, live.deadline_at, tasks),
            abandoned=sum(
                one.number == number and one.state == "abandoned" and one.opened_at >= run.resumed_at
                for one in run.attempts
            ),
            eligible=len(here),
            idle_since=max(run.resumed_at, ended),
            goes_on=bool(run.attempts) and run.attempts[-1].state == "committed" and ended > run.resumed_at,
            evaluations=(),
            unevaluated=(),
            evaluators=0,
        )
        self.looks.append((snapshot, self.now))
        if len(self.looks) > 3:
            self.looks.pop(0)

    def _act(self, look: tuple[RunSnapshot, float]) -> None:
        snapshot, at = look
        for action in decide(snapshot, at, PATIENCE):
            try:
                self._do(action)
            except Overtaken:
                continue

    def _do(self, action: Action) -> None:
        run = self.run
        match action:
            case Expire(task_id, token):
                task = self._task(task_id)
                if task.token != token or (task.expires_at or 0) > self.now:
                    raise Overtaken
                move(task, TASK, "task", "expire")
            case Offer(task_id):
                move(self._task(task_id), TASK, "task", "offer")
            case Close(round_id, _):
                self._end(self._round(round_id), "close")
            case Abandon(round_id, _):
                self._end(self._round(round_id), "abandon")
            case Merge(round_id):
                self._merge(self._round(round_id))
            case Open(number):
                self._open(number)
            case Pause(_):
                move(run, RUN, "run", "pause")
            case Complete(_):
                move(run, RUN, "run", "complete")
            case _:
                raise Violated(f"decide: {action} without evaluations")

    def _merge(self, round_: Round) -> None:
        run = self.run
        if run.state not in LIVE_RUN or round_.number != len(run.versions):
            raise Overtaken
        move(round_, ROUND, "round", "commit")
        round_.closed_at = self.now
        reports = frozenset((task.worker, task.round) for task in round_.tasks if task.state == "accepted")
        for task in round_.tasks:
            if task.state == "accepted":
                move(task, TASK, "task", "merge")
        run.versions.append(reports)
        if len(reports) < run.cohort.quorum:
            raise Violated(f"quorum: {len(reports)} of {run.cohort.quorum} updates were merged")

    def _open(self, number: int) -> None:
        run = self.run
        here = [worker for worker, at in self.seen.items() if at >= self.now - LIVE]
        if run.live or run.state != "running" or number != len(run.versions) or len(here) < run.cohort.quorum:
            raise Overtaken
        chosen = choose(here, run.cohort, Random(derive_seed(run.seed, "cohort", number)))
        name = f"{self.runs}-{len(run.attempts)}"
        tasks = [Task(f"{name}-{worker}", worker, number) for worker in chosen]
        run.attempts.append(Round(name, number, self.now, self.now + run.cohort.deadline_seconds, tasks))

    def _end(self, round_: Round, event: str) -> None:
        move(round_, ROUND, "round", event)
        if event == "abandon":
            round_.closed_at = self.now
        for task in round_.tasks:
            if task.state in TASK["cancel"].sources:
                move(task, TASK, "task", "cancel")
            if event == "abandon" and task.state == "accepted":
                move(task, TASK, "task", "leave_out")

    # ------------------------------------------------------------ workers and people

    def _claim(self, worker: str) -> None:
        self.seen[worker] = self.now
        live = self.run.live
        for task in live.tasks if live else ():
            if task.worker == worker and task.state == "offered":
                move(task, TASK, "task", "lease")
                task.token += 1
                task.attempts += 1
                task.expires_at = self.now + LEASE
                self.held.append((task, task.token))
                self.held = self.held[-20:]

    def _work(self, held: tuple[Task, int], *, storm: bool) -> None:
        task, token = held
        chance = self.random.random()
        event = "renew" if chance < 0.4 else "accept"
        if storm and chance > 0.9:
            event = self.random.choice(("fail", "release", "reject"))
        self.post.append(lambda: self._report(task, token, event))
        if event == "accept":
            self.held.remove(held)

    def _report(self, task: Task, token: int, event: str) -> None:
        round_ = next((one for one in self.run.attempts if task in one.tasks), None)
        if round_ is None:
            return
        self.seen[task.worker] = self.now
        if event == "accept" and task.state in ACCEPTED and task.token == token:
            return
        before = (task.state, task.token, task.attempts, task.expires_at)
        if refusal(task.state, round_.state, token, task.token):
            if task.accepted_token == token and event == "accept":
                raise Violated(f"I13: a repeated report on {task.id} was refused")
            return
        if token != before[1] or before[0] != "leased" or round_.state != "open":
            raise Violated(
                f"I4: {event} of {task.id} under token {token}, which is {before} in a round {round_.state}"
            )
        if event == "renew":
            task.expires_at = self.now + LEASE
            return
        move(task, TASK, "task", event)
        if event == "accept":
            task.accepted_token = token
        if event == "release":
            task.attempts -= 1

    def _whim(self) -> None:
        event = self.random.choice(("pause", "resume", "resume", "cancel"))
        if event == "cancel" and self.random.random() < 0.7:
            return
        if self.run.state in RUN[event].sources:
            move(self.run, RUN, "run", event)
            if event == "resume":
                self.run.resumed_at = self.now

    def _task(self, task_id: str) -> Task:
        return next((t for one in self.run.attempts for t in one.tasks if t.id == task_id), None) or _gone()

    def _round(self, round_id: str) -> Round:
        return next((one for one in self.run.attempts if one.id == round_id), None) or _gone()

    # ------------------------------------------------------------ what always holds

    def _check(self) -> None:
        run = self.run
        live = [one for one in run.attempts if one.state in LIVE_ROUND]
        if len(live) > 1:
            raise Violated(f"one live round: {[one.id for one in live]}")
        if live and live[0].number != len(run.versions):
            raise Violated(f"I3: round {live[0].number} lives at version {len(run.versions) - 1}")
        # Only the last attempt can have changed; those before it ended, and were looked at then.
        for one in run.attempts[-2:]:
            for task in one.tasks:
                kept = task.state in ACCEPTED and task.token == task.accepted_token
                if task.accepted_token is not None and not kept:
                    raise Violated(f"I5: the report on {task.id} was accepted, and is {task.state}")
                if one.state != "open" and task.state in ("offered", "leased", "expired"):
                    raise Violated(f"states: task {task.id} is {task.state} in a round that is {one.state}")
        last = run.versions[-1]
        if any(number != len(run.versions) - 1 for _, number in last):
            raise Violated(f"I1: version {len(run.versions) - 1} is made of {sorted(last)}")
        if self.now > self.storm_until + 4000:
            raise Violated(f"I14: long after the storm the run is {run.state} at version {len(run.versions) - 1}")


def _gone() -> None:
    raise Overtaken


def rehearse(seed: int, steps: int) -> Rules:
    """So many events. Raises Violated, with the seed."""
    rules = Rules(seed)
    try:
        for _ in range(steps):
            rules.step()
    except Violated as fault:
        fault.add_note(
            f"seed {seed}, step {rules.steps}; again: python -m tests.model_checking --rules --seed {seed}"
        )
        raise
    return rules
