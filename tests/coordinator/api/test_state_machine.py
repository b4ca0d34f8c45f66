"""Whatever is asked of the API in whatever order: hypothesis chooses, a model says what must come of it.

A real server and real HTTP, with its conductor at work beside them; the clock moves only when it is told to.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import Run
from tessera.shared.api.tasks import Task
from tessera.shared.problems import Conflict, NotFound, Problem
from tests.support.coordinator import Clock, LiveCoordinator
from tests.support.federation import ScriptedWorker, small_model, start_run, values
from tests.support.histories import Log, RecordingClient, check

MODEL = small_model(2)
START = values(MODEL)
LEASE_SECONDS = 60.0
SITES = ("a", "b")


class Api(RuleBasedStateMachine):
    """A run of two sites. What each holds is remembered here: the task, and until when."""

    tasks = Bundle("tasks")

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.clock = Clock()
        self.live = LiveCoordinator(self.folder, clock=self.clock, lease_seconds=LEASE_SECONDS)
        self.live.__enter__()
        self.log = Log()
        self.workers: dict[str, ScriptedWorker] = {}
        for site in SITES:
            token = self.live.token("site", site)
            client = RecordingClient(self.live.url, token, self.log, f"{site}/w", verify=False)
            self.workers[site] = ScriptedWorker(client)
        self.client = self.live.client()
        self.accepted: set[str] = set()

    def teardown(self) -> None:
        findings = check(self.log.lines, self.live.services.database, self.live.services.blobs)
        for worker in self.workers.values():
            worker.client.close()
        self.live.__exit__()
        shutil.rmtree(self.folder)
        assert findings == []

    @initialize(quorum=st.integers(1, 2), rounds=st.integers(1, 3))
    def begin(self, quorum: int, rounds: int) -> None:
        for worker in self.workers.values():
            worker.enrol()
        cohort = Cohort(size=2, quorum=quorum, max_attempts=100, deadline_seconds=300)
        self.run: Run = start_run(self.client, MODEL, START, rounds=rounds, cohort=cohort)

    # ------------------------------------------------------------ what workers do

    @rule(target=tasks, site=st.sampled_from(SITES), anew=st.booleans())
    def claim(self, site: str, anew: bool) -> Any:
        """By the process that is there, or by another under the same name."""
        worker = self.workers[site]
        if anew:
            worker = self.workers[site] = ScriptedWorker(worker.client)
        task = worker.claim(0)
        return multiple() if task is None else (site, task)

    @rule(held=tasks)
    def renew(self, held: tuple[str, Task]) -> None:
        site, task = held
        before = self._task(task)
        try:
            lease = self.workers[site].client.heartbeat(task.id, task.token)
        except Conflict:
            assert self._refusable(task)
        else:
            assert (before["state"], before["token"]) == ("leased", task.token)
            assert lease.lease_seconds == LEASE_SECONDS

    @rule(held=tasks, step=st.integers(-3, 3))
    def train(self, held: tuple[str, Task], step: int) -> None:
        site, task = held
        try:
            view = self.workers[site].train(task, step=float(step))
        except Conflict:
            assert self._refusable(task)
        else:
            assert (view.state, view.token) == ("accepted", task.token)
            self.accepted.add(task.id)

    @rule(held=tasks)
    def spoil(self, held: tuple[str, Task]) -> None:
        """Sends what is not finite."""
        site, task = held
        worker = self.workers[site]
        base = worker.fetch(task)
        digest = worker.upload(task, {"head.weight": np.full_like(base["head.weight"], np.nan)})
        try:
            worker.submit(task, digest)
        except Problem as problem:
            assert problem.code == "invalid-update" or self._refusable(task), problem  # noqa: PT017
        else:
            raise AssertionError("what is not finite was accepted")

    @rule(held=tasks)
    def fail(self, held: tuple[str, Task]) -> None:
        site, task = held
        try:
            view = self.workers[site].fail(task)
        except Conflict:
            assert self._refusable(task)
        else:
            assert view.state == "failed"

    @rule(held=tasks)
    def release(self, held: tuple[str, Task]) -> None:
        site, task = held
        try:
            self.workers[site].client.release(task.id, task.token)
        except Conflict:
            assert self._refusable(task)

    @rule(held=tasks)
    def meddle(self, held: tuple[str, Task]) -> None:
        """Another site shows the right token."""
        site, task = held
        other = self.workers[SITES[1 - SITES.index(site)]]
        try:
            other.client.heartbeat(task.id, task.token)
        except NotFound:
            return
        raise AssertionError("a site renewed the lease of another")

    @rule(held=tasks, ahead=st.integers(1, 3))
    def guess(self, held: tuple[str, Task], ahead: int) -> None:
        """A token that was never given."""
        site, task = held
        try:
            self.workers[site].client.heartbeat(task.id, self._task(task)["token"] + ahead)
        except Conflict:
            return
        raise AssertionError("a token that was never given renewed a lease")

    # ------------------------------------------------------------ what else happens

    @rule(state=st.sampled_from(["paused", "running"]))
    def steer(self, state: Any) -> None:
        try:
            self.run = self.client.set_run_state(self.run.id, state)
        except Conflict:
            assert self.client.run(self.run.id).state not in ("running", "paused")

    @rule(seconds=st.sampled_from([1.0, 59.0, 61.0, 301.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    # ------------------------------------------------------------ what always holds

    @invariant()
    def versions_and_rounds_agree(self) -> None:
        if not hasattr(self, "run"):
            return
        self.live.services.conductor.wakeups.call()
        rounds = list(self.client.rounds(self.run.id))
        live = [r for r in rounds if r.state in ("open", "merging")]
        assert len(live) <= 1
        for round_ in rounds:
            workers = [task.worker for task in round_.tasks]
            assert len(set(workers)) == len(workers)
            if round_.state == "committed":
                assert sum(task.state == "merged" for task in round_.tasks) >= self.run.spec.cohort.quorum
        kept = {task.id for round_ in rounds for task in round_.tasks if task.is_accepted}
        assert self.accepted <= kept

    def _task(self, task: Task) -> dict[str, Any]:
        return self.client.task(task.id).model_dump()

    def _refusable(self, task: Task) -> bool:
        """Whether a report on this task may be refused: its lease is gone, or it was reported on already."""
        now = self._task(task)
        return (now["state"], now["token"]) != ("leased", task.token)


Api.TestCase.settings = settings(
    max_examples=12, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
TestApi = pytest.mark.long(Api.TestCase)
