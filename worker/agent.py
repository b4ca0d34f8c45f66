"""The worker's loop: claim a task, run it, report its result, and repeat."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from uuid import uuid4

import structlog
from pydantic import JsonValue

from tessera.shared.api.tasks import Claim, Failure, Lease, Task
from tessera.shared.client.client import Client
from tessera.shared.client.transport import ANSWER_SECONDS, may_pass
from tessera.shared.host_memory import return_freed_memory
from tessera.shared.methods.registry import methods, regional
from tessera.shared.metrics.eta import LIVE_TASKS
from tessera.shared.problems import (
    Forbidden,
    InvalidUpdate,
    LeaseLost,
    NotFound,
    Problem,
    RoundClosed,
    SiteSuspended,
    StaleVersion,
    TaskCancelled,
    Unauthenticated,
)
from tessera.shared.schema import canonical
from tessera.shared.telemetry import spans
from tessera.shared.telemetry.trace_ids import trace_of, traceparent_of
from tessera.shared.tensors.lazy import digest_of
from tessera.shared.version import VERSION
from tessera.worker.bootstrap import executor_of, runner_of, with_data, with_rules
from tessera.worker.data.dataset_info import augments_images
from tessera.worker.deltas import check_deltas
from tessera.worker.errors import DataError, in_short
from tessera.worker.executor.executor import ProcessExecutor
from tessera.worker.faults.disk import DISK_FULL, Disk
from tessera.worker.faults.failures import failure_of
from tessera.worker.faults.outage import Outage, refuses_worker
from tessera.worker.governance.approvals import Unapproved
from tessera.worker.governance.notices import Notices
from tessera.worker.governance.opening_hours import Opening, local_time
from tessera.worker.governance.policy import PolicyViolation
from tessera.worker.live_values import LiveMonitor
from tessera.worker.metrics_file import WorkerCounts
from tessera.worker.pace import Backoff
from tessera.worker.settings import SettingsError, WorkerSettings, credential_of, tls_of
from tessera.worker.settings_reload import SETTLED_SECONDS, SettingsFile, differing, reloaded
from tessera.worker.state.audit import ROLLED_BACK, Action, StateRolledBack
from tessera.worker.state.database import StateDatabase, StateError
from tessera.worker.state.hash_chain import TaskRef
from tessera.worker.state.vault import outcome_of
from tessera.worker.stores import airlock_of, inbox_of, opt_outs_of, own_folders, state_id_of
from tessera.worker.task.environment import wait_until
from tessera.worker.task.heartbeat import BEATS_PER_LEASE, ReleaseQueue, Renewal, Stop, Stopped
from tessera.worker.task.resumption import ending
from tessera.worker.task.upload import HeldUpdate
from tessera.worker.training.progress import Report

MIN_POLL_SECONDS = 1.0

REMOVAL_SECONDS = 3600.0
"""Time between two searches for vaults to remove."""

DAY_SECONDS = 86400.0

ENDED = ("completed", "cancelled")

CLOSED_SECONDS = 10.0
"""Time between two looks of a worker whose site currently lets it claim nothing."""

GIVE_BACK_SECONDS = 3.0
"""Time that a stopping worker waits for the coordinator to accept its released task."""

MAX_ANSWER_BYTES = 4 << 20
"""Far above the size of any task, which has names but no values. Parsed, it may take tens of times as much."""

ALIVE_FILE = "alive"
"""File touched at each claim, and during a task every ALIVE_SECONDS. A watchdog checks its age."""

# The work is no longer wanted. Neither side is at fault.
UNWANTED = (LeaseLost, TaskCancelled, RoundClosed, StaleVersion, SiteSuspended)


class Agent:
    """The loop of one worker process.

    `stop` ends it from another thread or a signal handler. Changes to the policy and the budgets in `file` apply to
    each task that has not started. Raises SettingsError for an unusable data set, device or token, MethodsUnusable,
    and ExecutorEnded.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        stop: Stop,
        file: SettingsFile | None = None,
        executor: ProcessExecutor | None = None,
    ) -> None:
        token = credential_of(settings)
        self._sources = settings.sources
        # Read before the data sets: a change in between loads them again.
        self._opt_outs = opt_outs_of(self._sources)
        self._executor = executor or executor_of(settings)
        self._stop = stop
        # One context for all clients, because reading the certificates takes longer than a small round.
        verify = tls_of(settings)
        bounded = partial(Client, settings.url, token, verify=verify, max_answer_bytes=MAX_ANSWER_BYTES)
        self._client = bounded(sleep=stop.sleep)
        # Other threads send claims and heartbeats, and may be abandoned while they wait. Each has a client of its own
        # that tries once and leaves the decision about retries to its caller.
        self._connect = partial(bounded, patience_seconds=0)
        # One for all claims, so that a round soon after another needs no new connection.
        self._claims = self._connect()
        self._holding = ReleaseQueue()
        self._sender = partial(bounded, sleep=self._nap)
        self._asking = False
        self._left_out: str | None = None
        self._poll_seconds = settings.poll_seconds
        self._file = file
        self._alive = settings.state_dir / ALIVE_FILE
        # That of an earlier process is too old to show that this one is alive while it loads its data sets.
        self._alive.unlink(missing_ok=True)
        self._runner, self._inventory = runner_of(self._client, settings, self._executor)
        self._closed: str | None = None
        self._unusable: str | None = None
        self._declined = False
        """True once the coordinator knows that the settings are unusable."""
        self._outage = Outage(stop, self._show_alive)
        self._disk = Disk(own_folders(settings))
        self._database = StateDatabase.of(settings.state_dir)
        self._lacking: str | None = None
        """The digest of a state that was rolled back, which could not be written yet."""
        self._pace = Backoff(stop)
        self._removes_at = 0.0
        self._figures = WorkerCounts(settings.metrics_file)
        shown = (self._inventory.gpu, settings.state_dir, self._executor.memory_bytes)
        self._live = LiveMonitor(*shown, shares_log=settings.share_log)
        self._log = structlog.get_logger("worker").bind(worker=settings.name)
        checkpoints = self._runner.checkpoints
        self._claim = Claim(
            worker=settings.name,
            instance=checkpoints.instance if checkpoints else uuid4().hex,
            state_id=state_id_of(settings),
            started_at=time.time(),
            # A script of the site's own is not rehearsed.
            kinds=tuple(kind for kind in settings.all_kinds if not (settings.own_script and kind == "rehearse")),
            datasets={},
            augments=augments_images() or settings.region is not None,
            device=self._inventory.device,
            version=VERSION,
            resources=settings.resources,
        )
        about = (settings.name, inbox_of(settings), airlock_of(settings), settings.state_dir)
        self._notices = [Notices(channel, *about) for channel in settings.notices.channels]
        self._apply_settings(settings)

    def _apply_settings(self, settings: WorkerSettings) -> None:
        """Apply the policy and the budgets of these settings to each task that has not started."""
        self._settings = settings
        self._policy = settings.policy
        self._opening = Opening(settings.policy, settings.state_dir)
        self._runner = with_rules(self._runner, settings)
        allowed = {name: data for name, data in self._runner.datasets.items() if self._policy.allows_dataset(name)}
        claimed = {
            "datasets": {name: self._runner.declared_units(name) for name in allowed},
            "held_out": {
                name: data.held_out
                for name, data in allowed.items()
                if data.held_out and self._runner.may_measure(name, data.held_out)
            },
            "schemas": {name: data.schema for name, data in allowed.items()},
            "methods": tuple(
                sorted(filter(self._policy.allows_method, regional() if settings.region else methods()))
            ),
        }
        self._claim = self._claim.model_copy(update=claimed)

    def run(self) -> None:
        """Claim and run tasks until asked to stop.

        Raises Problem if the coordinator does not admit this worker.
        """
        claim = self._claim
        self._log.info("started", device=claim.device, datasets=claim.datasets, kinds=claim.kinds)
        self._log_opted_out()
        self._note("worker.start", None, **self._terms())
        for notices in self._notices:
            notices.start()
        try:
            while True:
                task = self._next()
                if task is None:
                    self._executor.idle()
                    return_freed_memory()
                else:
                    began_at = time.monotonic()
                    outcome = self._run_task(task)
                    self._pace.after(outcome, time.monotonic() - began_at)
        except Stopped:
            self._note("worker.stop", reason="asked")
            self._log.info("stopped")
        except Problem as refusal:
            self._note("worker.stop", reason=refusal.code, detail=refusal.detail)
            self._log.error("refused", reason=refusal.code, detail=refusal.detail, remedy=refusal.advice)
            raise
        finally:
            self.close()

    def close(self) -> None:
        """Give back the leases of held updates, end the executor, and close the connections to the coordinator."""
        for notices in self._notices:
            notices.end()
        self._holding.end()
        self._executor.close()
        self._client.close()
        # A claim that was abandoned closes its own when it ends.
        if not self._asking:
            self._claims.close()

    def _next(self) -> Task | None:
        """Return a task, or None if there is none yet."""
        self._show_alive()
        if self._is_closed():
            self._decline()
            self._stop.sleep(CLOSED_SECONDS)
            return None
        self._declined = False
        asked_at, began_at = time.monotonic(), time.time()
        self._figures.asking(began_at)
        try:
            self._runner.vault.settle_unanswered(self._client.task)
            task = self._stop.interruptible(self._ask, self._give_back)
            if task is None:
                self._tidy()
        except Problem as problem:
            if refuses_worker(problem):
                raise
            self._outage.wait(problem)
            return None
        except (StateError, OSError) as fault:
            # A file of the worker's own cannot be read or written, such as a new key on a full disk.
            if not self._disk.note(fault):
                remedy = "Make it usable: nothing is claimed until then. A restart is not needed."
                self._log.error("files-unusable", detail=str(fault), remedy=remedy)
            self._stop.sleep(CLOSED_SECONDS)
            return None
        self._outage.over()
        # The policy may have changed during the wait.
        if task is not None and self._is_closed():
            self._give_back(task)
            return None
        if task is None and time.monotonic() - asked_at < MIN_POLL_SECONDS:
            self._stop.sleep(MIN_POLL_SECONDS)
        if task is not None:
            # The task that the claim returned is known only now.
            spans.past("claim", traceparent_of(task.run, task.round), began_at, time.time(), _about(task))
        return task

    def _decline(self) -> None:
        """Show the coordinator once that unusable settings let this worker take no tasks, and give back one."""
        if self._declined or not self._unusable:
            return
        claim = self._claim.model_copy(update={"kinds": ()})
        with suppress(Problem):
            task = self._stop.interruptible(lambda: self._claims.claim(claim, 0), self._give_back)
            self._declined = True
            self._give_back(task, "settings-unusable", "the settings file cannot be used; the worker's log says why")

    def _show_alive(self) -> None:
        # Without it a watchdog acts, and no task fails.
        with suppress(OSError):
            self._alive.touch()

    def _tidy(self) -> None:
        """Settle pending receipts, and remove old vaults of ended runs."""
        vault, days = self._runner.vault, self._settings.keep_vaults_days
        vault.settle(self._client.task)
        if self._runner.checkpoints:
            self._runner.checkpoints.settle(self._client.task)
        self._executor.settle(self._client.task)
        self._remove_unheld()
        if time.monotonic() < self._removes_at:
            return
        self._removes_at = time.monotonic() + REMOVAL_SECONDS
        if days == "forever":
            return
        for run in vault.unused(time.time() - days * DAY_SECONDS):
            with suppress(NotFound):
                # The coordinator has to confirm the end: a run unknown to it may belong to another coordinator.
                if (about := self._client.run(run)).state in ENDED:
                    self._note("vault.remove", None, run=run, run_name=about.spec.name)
                    vault.remove(run)
                    self._log.info("vault-removed", run=about.spec.name, unused_days=days)

    def _remove_unheld(self) -> None:
        """Remove updates that another process held and whose tasks no worker can claim any more."""
        airlock = airlock_of(self._settings)
        for summary in airlock.held():
            if summary.task in self._holding.tasks:
                continue
            task = outcome_of(summary.task, self._client.task)
            if task is None or task.state not in LIVE_TASKS:
                airlock.remove(summary)
                self._runner.vault.forget(summary.run, summary.task)
                self._log.info("held-update-removed", run=summary.run_name, round=summary.round, id=summary.id)

    def _is_closed(self) -> bool:
        """Return True if the site lets the worker claim nothing now. Log each change."""
        try:
            closed = self._unusable_settings() or self._opening.closed()
            if self._runner.inbox:
                # A request that cannot be read may be a refusal.
                self._runner.inbox.withheld()
            self._note_rolled_back()
            if self._database.note(ROLLED_BACK):
                closed = f"{StateRolledBack.code}: `tessera worker adopt` goes on with the state as it is"
        except (StateError, OSError) as fault:
            closed = self._disk.note(fault) or str(fault)
        closed = closed or self._disk.full() or self._holding.full()
        if closed and not self._closed:
            self._log.info("closed", reason=closed)
        elif self._closed and not closed:
            self._log.info("open")
        self._closed = closed
        return closed is not None

    def _unusable_settings(self) -> str | None:
        """Apply changes in the settings file. Return the reason if the file cannot be used."""
        changed, unusable = None, None
        try:
            changed = self._file.reread(self._stop.sleep, self._check_deltas) if self._file else None
            self._apply_opt_outs()
        except SettingsError as fault:
            unusable = str(fault)
        if unusable != self._unusable:
            self._unusable = unusable
            self._figures.settings(usable=unusable is None)
            if unusable:
                remedy = "Fix the file: nothing is claimed until then. A restart is not needed."
                self._log.error("settings-unusable", detail=unusable, remedy=remedy)
        if changed:
            self._reload(changed)
        return unusable

    def _apply_opt_outs(self) -> None:
        """Load the data sets again if an opt-out list has changed. Raises SettingsError, also if one cannot be read:
        no task starts without its list."""
        if (lists := opt_outs_of(self._sources)) == self._opt_outs and not self._executor.is_outdated():
            return
        before, sources = self._opt_outs, self._settings.sources
        while lists != before:
            # Half of a list would leave out fewer people than the whole.
            self._stop.sleep(SETTLED_SECONDS)
            before, lists = lists, opt_outs_of(self._sources)
        self._runner, self._inventory = with_data(self._runner, self._settings, self._executor)
        self._sources, self._opt_outs = sources, lists
        self._apply_settings(self._settings)
        self._log_opted_out()
        self._note("policy.change", None, **self._terms())

    def _log_opted_out(self) -> None:
        """Log the number of examples that each opt-out list leaves out, which only this site sees."""
        for name in self._opt_outs:
            data = self._inventory.datasets[name]
            self._log.info("opt-out", dataset=name, left_out=data.opted_out, examples=data.examples)

    def _check_deltas(self, new: WorkerSettings) -> None:
        check_deltas(reloaded(self._settings, new), self._inventory)

    def _reload(self, new: WorkerSettings) -> None:
        """Apply the policy and the budgets of new settings, and log the other changes, which need a restart."""
        before = self._settings
        self._apply_settings(reloaded(before, new))
        if changed := differing(before, self._settings):
            self._log.info("policy-changed", changed=sorted(changed), **self._terms())
            self._note("policy.change", None, **self._terms())
        allowed = filter(self._policy.allows_dataset, self._settings.datasets)
        unloaded = {f"datasets.{name}" for name in allowed if name not in self._runner.datasets}
        if waiting := differing(self._settings, new) | unloaded:
            remedy = "Restart the worker: of a running one only the policy and privacy budgets change."
            self._log.warning("restart-needed", settings=sorted(waiting), remedy=remedy)

    def _terms(self) -> dict[str, JsonValue]:
        """Return the current policy, budgets and data sets for the audit and the log."""
        allowances = self._runner.allowances.items()
        budgets: dict[str, JsonValue] = {name: most.model_dump(mode="json") for name, most in allowances}
        datasets = dict[str, JsonValue](self._claim.datasets)
        return {"policy": digest_of(canonical(self._policy)), "budgets": budgets, "datasets": datasets}

    def _note(self, action: Action, task: Task | None = None, **detail: JsonValue) -> None:
        """Record a past action in the audit. Runners do not start an action that cannot be recorded."""
        try:
            if self._runner.audit:
                self._runner.audit.record(action, TaskRef.of(task) if task else None, **detail)
        except (StateError, OSError) as fault:
            self._log.error("audit-not-written", action=action, detail=str(fault))

    def _ask(self) -> Task | None:
        self._asking = True
        try:
            task = self._claims.claim(self._current_claim(), self._poll_seconds)
            if (left_out := self._claims.left_out) != self._left_out:
                self._left_out = left_out
                if left_out:
                    remedy = "Install the coordinator's version of Tessera here. Other runs go on meanwhile."
                    self._log.warning("version-too-old", detail=left_out, version=VERSION, remedy=remedy)
            # A held task is not begun again, whatever the coordinator offers.
            return None if task and task.id in self._holding.tasks else task
        finally:
            self._asking = False
            if self._stop.requested:
                self._claims.close()

    def _current_claim(self) -> Claim:
        """Return the claim with the parts that change over time: withheld runs, spent budgets, the clock's offset."""
        offset = local_time().utcoffset() or timedelta()
        offset_minutes = round(offset.total_seconds() / 60)
        advertised_policy = self._policy.advertised_policy(
            self._runner.allowances,
            offset_minutes,
            self._runner.spent(),
            self._runner.total_spent(),
            self._runner.evaluations_left(),
        )
        if self._runner.own_script:
            advertised_policy = advertised_policy.model_copy(update={"own_script": True})
        withheld = self._runner.inbox.withheld() if self._runner.inbox else {}
        party = self._runner.sums
        if party and party.embeddings:
            advertised_policy = advertised_policy.model_copy(update={"embeddings_in_sums": True})
        site_keys = party.keys.public(party.site, party.weight) if party else None
        now = {"advertised_policy": advertised_policy, "withheld": withheld, "site_keys": site_keys}
        if self._runner.inbox and withheld:
            terms = self._runner.inbox.withheld_terms()
            now["withheld_terms"] = {run: terms[run] for run in withheld if run in terms}
        return self._claim.model_copy(update={**now, "holding": self._holding.tasks}).shortened()

    def _run_task(self, task: Task) -> str:
        """Execute a task and report its failure, if any. Return its outcome."""
        report = Report()
        self._client.trace(traceparent_of(task.run, task.round))
        try:
            return self._outcome(task, report, time.monotonic(), partial(self._under_lease, task, report))
        finally:
            self._client.trace(None)

    def _outcome(self, task: Task, report: Report, began_at: float, work: Callable[[], HeldUpdate | None]) -> str:
        """Do a task's work and report its failure, as `_run_task` does. An update that it returns is held."""
        trace = trace_of(task.run, task.round)
        log = self._log.bind(run=task.run_name, round=task.round, stage=task.plan.stage, kind=task.kind, trace=trace)
        outcome = "given-back"
        try:
            with _spanning(task):
                held = work()
        except Stopped:
            # An update may have begun to leave.
            self._note("task.drop", task, code="stopped")
            self._give_back(task)
            raise
        except (*UNWANTED, Unauthenticated, Forbidden) as problem:
            outcome = "dropped"
            self._note("task.drop", task, code=problem.code)
            log.info("task-dropped", reason=problem.code, detail=problem.detail)
            if refuses_worker(problem):
                raise
        except Unapproved as unapproved:
            self._give_back_unapproved(task, unapproved, log)
        except InvalidUpdate as problem:
            outcome = "refused"
            self._note("task.drop", task, code=problem.code)
            log.warning("update-refused", detail=problem.detail, errors=[str(fault) for fault in problem.errors])
        except Exception as fault:  # noqa: BLE001  (a failure of any kind is reported)
            outcome = self._report_failure(task, fault, log)
        else:
            outcome = self._done(task, report, held, log, began_at)
        finally:
            self._live.ended(task, report, outcome)
            self._figures.ended(
                task.kind,
                outcome,
                time.monotonic() - began_at,
                received_bytes=report.download_bytes,
                sent_bytes=report.upload_bytes,
            )
        return outcome

    def _done(self, task: Task, report: Report, held: HeldUpdate | None, log: Any, began_at: float) -> str:
        """Log that a task is done, or that its update is held, which a thread of its own then sends."""
        outcome = "held" if held else "done"
        log.info(
            f"task-{outcome}",
            examples=report.examples,
            metrics=report.metrics,
            download_bytes=report.download_bytes,
            upload_bytes=report.upload_bytes,
            seconds=round(time.monotonic() - began_at, 2),
        )
        if held:
            send = partial(self._send_when_released, task, held)
            self._holding.add(task.id, partial(self._outcome, task, report, began_at, send))
        return outcome

    def _under_lease(self, task: Task, report: Report) -> HeldUpdate | None:
        began_at = checked_at = time.monotonic()
        queued_seconds = 0.0

        def heartbeat() -> Lease:
            return client.heartbeat(task.id, task.token, report.progress(), self._live.sample(task, report))

        def check() -> None:
            nonlocal checked_at, queued_seconds
            self._stop.check()
            renewal.check()
            before, checked_at = checked_at, time.monotonic()
            if report.is_queued:
                queued_seconds += checked_at - before
            self._policy.check_duration(checked_at - began_at - queued_seconds)
            self._opening.check()

        longest = self._policy.max_lease_seconds
        self._opening.begin()
        try:
            # One that waits longer for its answer would keep the next from being sent while the lease lasts.
            beat_seconds = max(1.0, min(task.lease_seconds, longest) / BEATS_PER_LEASE)
            connected = self._connect(answer_seconds=min(beat_seconds, ANSWER_SECONDS))
            with (
                connected as client,
                Renewal(heartbeat, task.lease_seconds, longest, alive=self._show_alive) as renewal,
            ):
                # Another thread sends the heartbeats, and has no span of its own.
                client.trace(spans.present() or traceparent_of(task.run, task.round))
                return self._runner.run(task, check, report)
        finally:
            self._opening.end()

    def _send_when_released(self, task: Task, held: HeldUpdate) -> None:
        """Keep the lease of a held update, and send the update once it is released. Neither counts as work."""

        def heartbeat() -> Lease:
            return client.heartbeat(task.id, task.token, held.report.progress(), self._live.sample(task, held.report))

        def check() -> None:
            self._holding.check()
            renewal.check()
            self._policy.check_duration((datetime.now(UTC) - held.summary.held_at).total_seconds())

        longest = self._policy.max_lease_seconds
        with ending(held), self._connect() as client, self._sender() as sender:
            sender.trace(spans.present() or traceparent_of(task.run, task.round))
            # At once, so that people see what the update waits for.
            with suppress(Problem):
                heartbeat()
            with Renewal(heartbeat, task.lease_seconds, longest) as renewal:
                held.wait(check)
                with self._holding.sending:
                    check()
                    # Nothing is recorded as leaving for a round that closed meanwhile.
                    sender.heartbeat(task.id, task.token, held.report.progress())
                    held.send(replace(self._runner, coordinator=sender), check)

    def _nap(self, seconds: float) -> None:
        """Wait as `Stop.sleep` does, in any thread. Raises Stopped."""

        def check() -> None:
            self._stop.check()
            self._holding.check()

        wait_until(time.monotonic() + seconds, check, time.monotonic, time.sleep)

    def _report_failure(self, task: Task, fault: Exception, log: Any) -> str:
        """Report a failure, or give the task back on a full disk. Return the task's outcome."""
        if isinstance(fault, StateRolledBack):
            self._lacking = fault.head
            # It is also tried before each claim.
            with suppress(StateError, OSError):
                self._note_rolled_back()
            log.error(StateRolledBack.code, detail=str(fault), remedy=StateRolledBack.remedy)
            return self._give_back_for(task, StateRolledBack.code, str(fault))
        if full := self._disk.note(fault):
            return self._give_back_for(task, DISK_FULL, full)
        if isinstance(fault, Problem) and may_pass(fault):
            # A report would fail too. The lease expires by itself.
            self._note("task.drop", task, code=fault.code)
            log.warning("task-dropped", reason=fault.code, detail=fault.detail)
            return "failed"
        code, detail = failure_of(fault)
        if isinstance(fault, PolicyViolation):
            self._note("task.refuse", task, rule=fault.rule, detail=fault.detail)
            more = {"remedy": fault.remedy}
        else:
            self._note("task.fail", task, code=code)
            cause = fault if isinstance(fault, DataError) else fault.__cause__
            more = {"cause": in_short(cause)} if cause else {}
        log.error(
            "task-failed",
            code=code,
            detail=detail,
            exc_info=fault if code == "failed" else None,
            **more,
        )
        self._send_failure(task, Failure(token=task.token, code=code, detail=detail), log)
        return "failed"

    def _note_rolled_back(self) -> None:
        """Stop this worker's later processes too, until a person adopts its state."""
        if self._lacking:
            self._database.set_note(ROLLED_BACK, self._lacking)
            self._lacking = None

    def _give_back_for(self, task: Task, code: str, detail: str) -> str:
        self._note("task.give-back", task, code=code)
        self._give_back(task, code, detail)
        return "given-back"

    def _give_back_unapproved(self, task: Task, unapproved: Unapproved, log: Any) -> None:
        """Report that the site has not approved the run, as each claim does from now on."""
        self._note("task.give-back", task, code=unapproved.code)
        log.warning("task-withheld", code=unapproved.code, detail=str(unapproved), remedy="tessera worker inbox")
        self._send_failure(task, Failure(token=task.token, code=unapproved.code, detail=str(unapproved)), log)

    def _send_failure(self, task: Task, failure: Failure, log: Any) -> None:
        try:
            with self._sender() as client:
                client.trace(spans.present() or traceparent_of(task.run, task.round))
                client.fail(task.id, failure)
        except Problem as problem:
            log.warning("failure-not-reported", reason=problem.code)

    def _give_back(self, task: Task | None, *why: str) -> None:
        """Release the task, with a code and its detail if any. If the request fails, its lease expires by itself."""
        if task is None:
            return
        try:
            with self._connect(answer_seconds=GIVE_BACK_SECONDS) as client:
                client.release(task.id, task.token, *why)
        except Problem as problem:
            self._log.warning("task-not-released", run=task.run_name, reason=problem.code)
        else:
            self._log.info("task-released", run=task.run_name, round=task.round)


def _spanning(task: Task) -> AbstractContextManager[None]:
    return spans.span("task", parent=traceparent_of(task.run, task.round), attributes=_about(task))


def _about(task: Task) -> dict[str, str | int]:
    return {"tessera.run": task.run, "tessera.round": task.round, "tessera.task": task.id, "tessera.kind": task.kind}
