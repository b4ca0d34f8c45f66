"""The life of a task as its worker drives it: claim it, renew its lease, report on it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

from anyio import to_thread
from sqlalchemy import func, select

from tessera.coordinator.auth import tokens
from tessera.coordinator.blobs.uploads import Upload, find_finished, retain
from tessera.coordinator.db import tasks, views
from tessera.coordinator.db.tables import RoundRow, SiteRow, TaskRow, VersionRow, WorkerRow
from tessera.coordinator.db.tasks import Outcome, TaskRecord
from tessera.coordinator.db.workers import enrol, enrolled
from tessera.coordinator.domain.principal import Principal
from tessera.coordinator.operations.uploads import store_inline
from tessera.coordinator.services import Services
from tessera.coordinator.telemetry.metrics import SENT_BYTES, UPDATES_TOTAL
from tessera.shared.api.tasks import Claim, Evaluated, Failure, Heartbeat, Lease, Submission, Task, TaskView
from tessera.shared.model.layers import layers_of
from tessera.shared.problems import Conflict, Fault, Invalid, InvalidUpdate, Problem, Withheld, WorkerFailed
from tessera.shared.rounds.planning import check_report
from tessera.shared.schema import GIVEN_BACK, MOST_ALONG, Page

HungUp = Callable[[], Awaitable[None]]
"""Returns when the caller has hung up."""

# ---------------------------------------------------------------- claim


async def claim(
    services: Services, caller: Principal, request: Claim, wait_seconds: float, hung_up: HungUp
) -> Task | None:
    """Lease the next task that is offered to the worker, waiting for one until the time is over."""
    clock = asyncio.get_running_loop().time
    deadline = clock() + wait_seconds
    worker_id = await to_thread.run_sync(declare, services, caller, request)
    with services.gate.waiting(worker_id) as bell, _watching(hung_up, bell) as gone:
        rung = False
        while not gone.is_set():
            bell.clear()
            task = await to_thread.run_sync(partial(lease, services, caller, worker_id, request.instance, rung=rung))
            if task is not None:
                return task
            try:
                if not services.gate.closed:
                    await asyncio.wait_for(bell.wait(), deadline - clock())
            except TimeoutError:
                pass
            rung = bell.is_set()
            if services.gate.closed or not rung:
                break
    return None


@contextmanager
def _watching(hung_up: HungUp, bell: asyncio.Event) -> Iterator[asyncio.Event]:
    """An event for when the caller has hung up, which rings the bell too: nothing may be leased to it then."""
    gone = asyncio.Event()

    async def watch() -> None:
        await hung_up()
        gone.set()
        bell.set()

    watcher = asyncio.create_task(watch())
    try:
        yield gone
    finally:
        watcher.cancel()


def declare(services: Services, caller: Principal, request: Claim) -> str:
    """Return the worker's id. The tables are written to only when its declaration has changed."""
    site_id = caller.site_id or ""
    now = services.database.now()
    with services.database.snapshot() as session:
        worker_id = enrolled(session, site_id, request)
    if worker_id is None:
        services.admission.declares(site_id)
        with services.database.transaction() as session:
            worker_id, nbytes = enrol(session, now, site_id, request, services.settings.max_workers_per_site)
            services.room.require(nbytes)
            services.quota.note_bytes(session, now, site_id, nbytes)
            tasks.withhold(session, now, caller.actor, worker_id, request.withheld)
        services.call()
    services.presence.note(worker_id, now)
    return worker_id


def lease(services: Services, caller: Principal, worker_id: str, instance: str, *, rung: bool) -> Task | None:
    """Lease the worker's next task, if there is one; `rung` says that there should be."""
    if not rung:
        # A worker that polls again and again must not hold up writers.
        with services.database.snapshot() as session:
            if tasks.claimable(session, worker_id, instance) is None:
                return None
    seconds, now = services.settings.lease_seconds, services.database.now()
    with services.database.transaction() as session:
        if rung:
            # The bell rings for those too whose token was revoked while they waited.
            tokens.require_admitted(session, now, caller)
        offered = tasks.claimable(session, worker_id, instance)
        if offered is None:
            return None
        try:
            tasks.lease(session, now, caller.actor, offered, instance, seconds)
        except Conflict:
            # Another thread of this worker was faster; there may be another task.
            return None
        record = tasks.find_task(session, offered.id, caller.site_id)
        task = tasks.task_message(session, record, seconds, services.settings.submission_bytes)
        before = session.get(VersionRow, (task.run, task.version.number - 1))
        earlier = before.digest if before else None
        known = earlier == task.version.digest or tasks.has_begun_another(session, offered)
    if known:
        return task
    # The worker finds a blob that cannot be read itself, and reports what comes of it.
    with suppress(Problem):
        return task.model_copy(update={"along": _inline_blobs(services, task, earlier)})
    return task


def _inline_blobs(services: Services, task: Task, earlier: str | None) -> tuple[bytes, ...]:
    """Return what is new in the task's version since an earlier one, if all of it is small.

    It spares each worker two requests. The version's document comes first.
    """
    before = services.states.manifest(earlier).blocks if earlier else {}
    blocks = services.states.manifest(task.version.digest).blocks
    model = services.states.model(task.model)
    new = [block for block in task.plan.fetch.resolve(model.blocks) if blocks[block.name] != before.get(block.name)]
    digests = dict.fromkeys([task.version.digest, *(blocks[block.name] for block in new)])
    left = services.settings.submission_bytes - sum(block.nbytes for block in new)
    if left < 0 or services.blobs.size(task.version.digest) > left or len(digests) > MOST_ALONG:
        return ()
    services.blobs.expect(digests)
    inline = tuple(map(services.blobs.read, digests))
    SENT_BYTES.inc(sum(map(len, inline)))
    return inline


# ---------------------------------------------------------------- look


def list_tasks(
    services: Services, caller: Principal, run: str | None, limit: int, cursor: str | None
) -> Page[TaskView]:
    """Return a page of the calling site's tasks, oldest first."""
    number = func.coalesce(RoundRow.number, TaskRow.version_number)
    query = (
        select(TaskRow, SiteRow.name, WorkerRow.name, number)
        .join(WorkerRow, WorkerRow.id == TaskRow.worker_id)
        .join(SiteRow, SiteRow.id == WorkerRow.site_id)
        .outerjoin(RoundRow, RoundRow.id == TaskRow.round_id)
        .where(WorkerRow.site_id == caller.site_id)
    )
    if run is not None:
        query = query.where(TaskRow.run_id == run)

    def view(row: tuple[TaskRow, str, str, int]) -> TaskView:
        task, site, worker, number = row
        return views.task_for_site(views.task_view(task, f"{site}/{worker}", number))

    with services.database.snapshot() as session:
        return views.page(session, query, (TaskRow.created_at, TaskRow.id), view, limit, cursor)


def get_task(services: Services, caller: Principal, task_id: str) -> TaskView:
    """Return a task. Raise NotFound if it is another site's."""
    with services.database.snapshot() as session:
        return _view(tasks.find_task(session, task_id, caller.site_id), caller)


def _view(record: TaskRecord, caller: Principal) -> TaskView:
    view = views.task_view(record.task, f"{record.site}/{record.worker.name}", record.number)
    return view if caller.site_id is None else views.task_for_site(view)


# ---------------------------------------------------------------- report


def heartbeat(services: Services, caller: Principal, task_id: str, request: Heartbeat) -> Lease:
    """Renew the lease. Raise LeaseLost, TaskCancelled or RoundClosed."""
    seconds = services.settings.lease_seconds
    with services.database.transaction() as session:
        now = services.database.now()
        record = tasks.find_task(session, task_id, caller.site_id)
        tasks.renew(session, record, request.token, now + seconds, request.progress)
        services.presence.note(record.worker.id, now)
    return Lease(lease_seconds=seconds)


def submit_update(services: Services, caller: Principal, task_id: str, report: Submission) -> TaskView:
    """Inspect an update, and accept or reject it.

    Raise InvalidUpdate for an update that cannot be used, and Invalid for one that was not uploaded.
    """
    with services.database.snapshot() as session:
        record = tasks.find_task(session, task_id, caller.site_id)
        if tasks.was_accepted(record, report.token, report.update):
            return _view(record, caller)
        if before := tasks.rejection(record, report.token, report.update):
            raise before
        tasks.require_report(record, report, "train")
        upload = find_finished(session, caller.owner, report.update)
    if report.data is not None:
        upload = store_inline(services, caller, report.update, report.data)
    if upload is None:
        missing = Fault(pointer="/update", detail="no finished upload of yours has this digest")
        raise Invalid(f"{report.update} was not uploaded", errors=[missing], remedy="Upload it, then submit again.")
    spec, plan = record.spec, record.plan
    try:
        model = services.states.model(spec.model)
        check_report(spec, model, plan, report.examples, report.numbers)
        manifest = services.states.manifest(record.version.digest)
        # The whole update is read, outside of any transaction.
        measured, blocks = services.inspector.checked(report.update, model, manifest, plan, spec.max_update_norm)
        numbers = {**views.without_scores(report.numbers), **measured}
    except InvalidUpdate as problem:
        _reject(services, caller, record, tasks.rejected(report, problem))
        raise
    layers = [layer.name for layer in layers_of(model.by_name[name] for name in blocks)]
    outcome = tasks.accepted(report, numbers, upload.length, layers)
    view = _accept(services, caller, record, outcome, upload)
    UPDATES_TOTAL.labels(outcome="accepted").inc()
    return view


def submit_evaluation(services: Services, caller: Principal, task_id: str, report: Evaluated) -> TaskView:
    """Accept what a version was measured at."""
    with services.database.snapshot() as session:
        record = tasks.find_task(session, task_id, caller.site_id)
        if tasks.was_accepted(record, report.token):
            return _view(record, caller)
        tasks.require_report(record, report, "evaluate")
    return _accept(services, caller, record, tasks.accepted(report, dict(report.numbers)))


def fail(services: Services, caller: Principal, task_id: str, report: Failure) -> TaskView:
    """End a task that cannot be done at its worker; the round goes on without it."""
    withheld = report.code in GIVEN_BACK
    problem = Withheld(report.detail) if withheld else WorkerFailed.of(report.code, report.detail)
    with services.database.transaction() as session:
        record = tasks.find_task(session, task_id, caller.site_id)
        if not tasks.was_failed(record, report.token):
            tasks.fail(session, services.database.now(), caller.actor, record, report.token, problem)
        view = _view(record, caller)
    services.call()
    return view


def release(services: Services, caller: Principal, task_id: str, request: Heartbeat) -> TaskView:
    """Take a task back undone, and offer it again at once."""
    with services.database.transaction() as session:
        record = tasks.find_task(session, task_id, caller.site_id)
        if not tasks.was_released(record, request.token):
            tasks.release(session, services.database.now(), caller.actor, record, request.token)
        view, worker_id = _view(record, caller), record.worker.id
    services.wake([worker_id])
    return view


def _accept(
    services: Services, caller: Principal, record: TaskRecord, outcome: Outcome, upload: Upload | None = None
) -> TaskView:
    with services.database.transaction() as session:
        now = services.database.now()
        record = tasks.reload(session, record)
        if not tasks.was_accepted(record, outcome.token, outcome.columns["update_digest"]):
            if upload:
                retain(session, now, upload)
            tasks.settle(session, now, caller.actor, record, outcome)
            # Counted and not refused: what is under way may finish.
            nbytes = len(json.dumps(outcome.columns["numbers"]))
            services.quota.note_bytes(session, now, caller.site_id or "", nbytes)
        view = _view(record, caller)
    services.call()
    return view


def _reject(services: Services, caller: Principal, record: TaskRecord, outcome: Outcome) -> None:
    with services.database.transaction() as session:
        tasks.settle(session, services.database.now(), caller.actor, tasks.reload(session, record), outcome)
    services.call()
    UPDATES_TOTAL.labels(outcome="rejected").inc()
