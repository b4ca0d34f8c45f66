"""For workers: claim a task, keep it, report on it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from sqlalchemy import select
from sqlalchemy.orm import Session

from tessera.coordinator.api.blobs import uploads
from tessera.coordinator.api.dependencies import Anyone, Cursor, Limit, Serving, SiteCaller
from tessera.coordinator.api.request_limits import BoundedRoute
from tessera.coordinator.auth import tokens
from tessera.coordinator.blobs.uploads import hand_in, owned
from tessera.coordinator.db import tasks, views
from tessera.coordinator.db.tables import TaskRow, VersionRow, WorkerRow
from tessera.coordinator.db.tasks import Held
from tessera.coordinator.db.workers import enrol, enrolled
from tessera.coordinator.domain.principal import Principal
from tessera.coordinator.services import Services
from tessera.coordinator.telemetry.metrics import SENT_BYTES, UPDATES_TOTAL
from tessera.shared.api.tasks import Claim, Evaluated, Failure, Heartbeat, Lease, Receipt, Submission, Task, TaskView
from tessera.shared.model.layers import layers_of
from tessera.shared.problems import (
    Conflict,
    Fault,
    Invalid,
    InvalidUpdate,
    Problem,
    StaleVersion,
    TooLarge,
    Withheld,
    WorkerFailed,
)
from tessera.shared.rounds.outliers import PREFIX
from tessera.shared.rounds.planning import check_report
from tessera.shared.schema import GIVEN_BACK, MOST_ALONG, MOST_CLAIM_BYTES, PROTOCOL, Page

router = APIRouter(prefix="/v1/tasks", tags=["tasks"], route_class=BoundedRoute)

_WAIT = re.compile(r"wait=(\d{1,4})")


@router.post("/claim", operation_id="claimTask", response_model=Task, responses={204: {"description": "nothing now"}})
async def claim(
    body: Claim,
    request: Request,
    serving: Serving,
    caller: SiteCaller,
    prefer: Annotated[str, Header(max_length=128, description="'wait=25' waits that long for a task")] = "",
) -> Response:
    """Leases the next task that is offered to this worker, waiting for one if asked to."""
    if (length := len(await request.body())) > MOST_CLAIM_BYTES:
        raise TooLarge(
            f"the claim has {length} bytes; at most {MOST_CLAIM_BYTES} are taken",
            remedy="Shorten what the worker declares, such as the lists of its policy.",
        )
    _require_protocol(body)
    wanted = _WAIT.search(prefer)
    wait = min(float(wanted.group(1)) if wanted else 0.0, serving.settings.longest_wait_seconds)
    deadline = asyncio.get_running_loop().time() + wait
    worker_id = await run_in_threadpool(_enrol, serving, caller, body)
    with serving.gate.waiting(worker_id) as bell, _watching(request, bell) as gone:
        rung = False
        while not gone.is_set():
            bell.clear()
            task = await run_in_threadpool(_lease, serving, caller, worker_id, body.instance, rung=rung)
            if task is not None:
                # Without defaults: a worker of the version before understands what does not use what is new.
                return Response(task.model_dump_json(exclude_defaults=True), media_type="application/json")
            try:
                if not serving.gate.closed:
                    await asyncio.wait_for(bell.wait(), deadline - asyncio.get_running_loop().time())
            except TimeoutError:
                pass
            rung = bell.is_set()
            if serving.gate.closed or not rung:
                break
    return Response(status_code=204)


@contextmanager
def _watching(request: Request, bell: asyncio.Event) -> Iterator[asyncio.Event]:
    """An event for when the caller has hung up, which rings the bell too: nothing may be leased to it then."""
    gone = asyncio.Event()

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        gone.set()
        bell.set()

    watcher = asyncio.create_task(watch())
    try:
        yield gone
    finally:
        watcher.cancel()


def _require_protocol(body: Claim) -> None:
    if not body.protocol_min <= PROTOCOL <= body.protocol_max:
        spoken = f"{body.protocol_min} to {body.protocol_max}"
        raise Invalid(
            f"this coordinator speaks protocol {PROTOCOL}; the worker speaks {spoken}",
            errors=[Fault(pointer="/protocol_max", detail=spoken)],
            remedy="Install a version of the worker that speaks this protocol; GET /version tells it.",
        )


def _enrol(serving: Services, caller: Principal, body: Claim) -> str:
    """The worker's id. The tables are written to only when it has something new to say of itself."""
    site_id = caller.site_id or ""
    now = serving.database.now()
    with serving.database.snapshot() as session:
        worker_id = enrolled(session, site_id, body)
    if worker_id is None:
        serving.admission.declares(site_id)
        with serving.database.transaction() as session:
            worker_id, nbytes = enrol(session, now, site_id, body, serving.settings.max_workers_per_site)
            serving.room.require(nbytes)
            serving.quota.note_bytes(session, now, site_id, nbytes)
            tasks.withhold(session, now, caller.actor, worker_id, body.withheld)
        serving.call()
    serving.presence.note(worker_id, now)
    return worker_id


def _lease(serving: Services, caller: Principal, worker_id: str, instance: str, *, rung: bool) -> Task | None:
    """The next task of the worker, if there is one; `rung` says that there should be."""
    if not rung:
        # Who asks for nothing, again and again, is to hold up no writer.
        with serving.database.snapshot() as session:
            if tasks.claimable(session, worker_id, instance) is None:
                return None
    seconds, now = serving.settings.lease_seconds, serving.database.now()
    with serving.database.transaction() as session:
        if rung:
            # The bell rings for those too whose token was revoked while they waited.
            tokens.require_admitted(session, now, caller)
        task = tasks.claimable(session, worker_id, instance)
        if task is None:
            return None
        try:
            tasks.lease(session, now, caller.actor, task, instance, seconds)
        except Conflict:
            # Another thread of this worker was faster; there may be another task.
            return None
        entry = tasks.held(session, task.id, caller.site_id)
        told = tasks.task_message(session, entry, seconds, serving.settings.submission_bytes)
        before = session.get(VersionRow, (told.run, told.version.number - 1))
        earlier = before.digest if before else None
        known = earlier == told.version.digest or tasks.has_begun_another(session, task)
    if known:
        return told
    # A blob that cannot be read is the worker's to find, which reports what comes of it.
    with suppress(Problem):
        return told.model_copy(update={"along": _along(serving, told, earlier)})
    return told


def _along(serving: Services, task: Task, earlier: str | None) -> tuple[bytes, ...]:
    """What is new in the task's version since an earlier one, if all of it is little: each worker is spared two
    requests. The version's document comes first."""
    before = serving.states.manifest(earlier).blocks if earlier else {}
    blocks = serving.states.manifest(task.version.digest).blocks
    model = serving.states.model(task.model)
    new = [block for block in task.plan.fetch.resolve(model.blocks) if blocks[block.name] != before.get(block.name)]
    digests = dict.fromkeys([task.version.digest, *(blocks[block.name] for block in new)])
    left = serving.settings.submission_bytes - sum(block.nbytes for block in new)
    if left < 0 or serving.blobs.size(task.version.digest) > left or len(digests) > MOST_ALONG:
        return ()
    serving.blobs.expect(digests)
    along = tuple(map(serving.blobs.read, digests))
    SENT_BYTES.inc(sum(map(len, along)))
    return along


@router.get("", operation_id="listTasks")
def list_tasks(
    serving: Serving,
    caller: SiteCaller,
    run: Annotated[str | None, Query(max_length=64, description="only of this run")] = None,
    limit: Limit = 100,
    cursor: Cursor = None,
) -> Page[TaskView]:
    """The calling site's own tasks, oldest first."""
    with serving.database.snapshot() as session:
        query = select(TaskRow).join(WorkerRow, WorkerRow.id == TaskRow.worker_id)
        query = query.where(WorkerRow.site_id == caller.site_id)
        if run is not None:
            query = query.where(TaskRow.run_id == run)
        keys = (TaskRow.created_at, TaskRow.id)
        return views.page(session, query, keys, lambda r: _shown(session, caller, r[0].id), limit, cursor)


@router.get("/{task_id}", operation_id="getTask")
def get_task(task_id: str, serving: Serving, caller: Anyone) -> TaskView:
    """A task; a site sees its own only."""
    with serving.database.snapshot() as session:
        return _shown(session, caller, task_id)


def _shown(session: Session, caller: Principal, task_id: str) -> TaskView:
    entry = tasks.held(session, task_id, caller.site_id)
    name = views.worker_name(session, entry.task.worker_id)
    view = views.task_view(entry.task, name, entry.round.number if entry.round else entry.task.version_number)
    return view if caller.site_id is None else _for_site(view)


def _for_site(view: TaskView) -> TaskView:
    """A task as its site sees it."""
    # How to stay below notice is nothing to tell a site, and what it was told once stays the same: a repeated report
    # gets the first answer, and a worker of the version before knows no other state of what was accepted.
    told: dict[str, Any] = {"numbers": without_scores(view.numbers)}
    if view.is_accepted:
        told |= {"state": "accepted", "unmerged": ()}
    if view.is_accepted and view.kind == "train":
        about = {"task": view.id, "token": view.token, "state": view.state, "unmerged": view.unmerged}
        told["receipt"] = Receipt.model_validate(about)
    return view.model_copy(update=told)


@router.post("/{task_id}/heartbeat", operation_id="renewLease")
def heartbeat(task_id: str, body: Heartbeat, serving: Serving, caller: SiteCaller) -> Lease:
    """Renews the lease. A problem tells that there is nothing left to do: `lease-lost`, `task-cancelled`, ..."""
    seconds = serving.settings.lease_seconds
    with serving.database.transaction() as session:
        now = serving.database.now()
        tasks.renew(session, now, task_id, caller.site_id, body.token, seconds, body.progress)
        serving.presence.note(tasks.held(session, task_id, caller.site_id).task.worker_id, now)
    return Lease(lease_seconds=seconds)


@router.post("/{task_id}/update", operation_id="submitUpdate")
async def submit_update(task_id: str, body: Submission, serving: Serving, caller: SiteCaller) -> TaskView:
    """Hands in an update, which was uploaded before or comes along. It is accepted when this returns, or refused and
    named why."""
    # Who asks the same at once waits for the answer, rather than have all of it inspected again.
    async with serving.submitting.at(f"{caller.owner} {task_id}"):
        return await serving.inspections.run(caller.owner, submitted, serving, caller, task_id, body)


def submitted(serving: Services, caller: Principal, task_id: str, body: Submission) -> TaskView:
    """Inspects an update and accepts or rejects it: what `submit_update` does in a thread."""
    with serving.database.snapshot() as session:
        entry = tasks.held(session, task_id, caller.site_id)
        if tasks.was_accepted(entry, body):
            return _view(serving, caller, task_id)
        if before := tasks.rejection(entry, body):
            raise before
        _require_report(entry, body, "train")
        upload_bytes = owned(session, caller.owner, body.update)
    if body.data is not None:
        upload_bytes = _taken(serving, caller, body.update, body.data)
    if upload_bytes is None:
        missing = Fault(pointer="/update", detail="no finished upload of yours has this digest")
        raise Invalid(f"{body.update} was not uploaded", errors=[missing], remedy="Upload it, then submit again.")
    try:
        measured, layers = _inspect(serving, entry, body)
    except InvalidUpdate as problem:
        _reject(serving, caller, task_id, body, problem)
        UPDATES_TOTAL.labels(outcome="rejected").inc()
        raise
    _accept(serving, caller, task_id, body, upload_bytes, {**without_scores(body.numbers), **measured}, layers)
    UPDATES_TOTAL.labels(outcome="accepted").inc()
    return _view(serving, caller, task_id)


@router.post("/{task_id}/evaluation", operation_id="submitEvaluation")
def submit_evaluation(task_id: str, body: Evaluated, serving: Serving, caller: SiteCaller) -> TaskView:
    """Hands in what a version was measured at."""
    with serving.database.snapshot() as session:
        entry = tasks.held(session, task_id, caller.site_id)
        if tasks.was_accepted(entry, body):
            return _view(serving, caller, task_id)
        _require_report(entry, body, "evaluate")
    _accept(serving, caller, task_id, body, 0, dict(body.numbers))
    return _view(serving, caller, task_id)


@router.post("/{task_id}/failure", operation_id="reportFailure")
def report_failure(task_id: str, body: Failure, serving: Serving, caller: SiteCaller) -> TaskView:
    """Reports that the task cannot be done here; the round goes on without it."""
    withheld = body.code in GIVEN_BACK
    problem = Withheld(body.detail) if withheld else WorkerFailed.of(body.code, body.detail)
    with serving.database.transaction() as session:
        entry = tasks.held(session, task_id, caller.site_id)
        if not tasks.was_failed(entry, body.token):
            tasks.fail(session, serving.database.now(), caller.actor, entry, body.token, problem)
    serving.call()
    return _view(serving, caller, task_id)


@router.post("/{task_id}/release", operation_id="releaseTask")
def release(task_id: str, body: Heartbeat, serving: Serving, caller: SiteCaller) -> TaskView:
    """Gives the task back undone; it is offered again at once."""
    with serving.database.transaction() as session:
        entry = tasks.held(session, task_id, caller.site_id)
        if not tasks.was_released(entry, body.token):
            tasks.release(session, serving.database.now(), caller.actor, entry, body.token)
        worker_id = entry.task.worker_id
    serving.wake([worker_id])
    return _view(serving, caller, task_id)


def _require_report(entry: Held, body: Submission | Evaluated, kind: str) -> None:
    entry.require(body.token)
    if entry.task.kind != kind:
        raise Conflict(f"this is a task to {entry.task.kind}, not to {kind}")
    if body.examples > entry.declared:
        # The count is the update's weight: it may not exceed what was declared before the cohort was chosen.
        fault = Fault(pointer="/examples", detail=f"{body.examples} examples; the worker declared {entry.declared}")
        raise Invalid("the report counts more examples than the worker declared", errors=[fault])
    if body.version != entry.version.digest:
        raise StaleVersion(f"the task starts from {entry.version.digest}; the report is about {body.version}")


def _taken(serving: Services, caller: Principal, digest: str, data: bytes) -> int:
    """Keeps an update that came with its submission, as if it had been uploaded; its length."""
    if len(data) > (most := serving.settings.submission_bytes):
        fault = Fault(pointer="/data", detail=f"{len(data)} bytes; at most {most} come with a submission")
        raise Invalid("the update is too long for its submission", errors=[fault], remedy="Upload it first.")
    taking = uploads(serving)
    taking.received(len(data))
    serving.memory.require()
    taking.keep(taking.announce(caller.owner, digest, len(data), site_id=caller.site_id), data)
    return len(data)


def without_scores(numbers: Mapping[str, float]) -> dict[str, float]:
    """The numbers that the coordinator does not keep for what it finds of an update beside the others."""
    return {name: value for name, value in numbers.items() if not name.startswith(PREFIX)}


def _inspect(serving: Services, entry: Held, body: Submission) -> tuple[dict[str, float], list[str]]:
    """Reads the whole update, outside of any transaction: what was measured of it, and the layers that it has blocks
    of. Raises InvalidUpdate."""
    spec = entry.spec
    model = serving.states.model(spec.model)
    check_report(spec, model, entry.plan, body.examples, body.numbers)
    manifest = serving.states.manifest(entry.version.digest)
    measured, blocks = serving.inspector.checked(body.update, model, manifest, entry.plan, spec.max_update_norm)
    return dict(measured), [layer.name for layer in layers_of(model.by_name[name] for name in blocks)]


def _reject(serving: Services, caller: Principal, task_id: str, body: Submission, problem: Problem) -> None:
    with serving.database.transaction() as session:
        entry = tasks.held(session, task_id, caller.site_id)
        tasks.reject(session, serving.database.now(), caller.actor, entry, body, problem)
    serving.call()


def _accept(
    serving: Services,
    caller: Principal,
    task_id: str,
    body: Submission | Evaluated,
    upload_bytes: int,
    numbers: dict[str, float],
    layers: Sequence[str] = (),
) -> None:
    with serving.database.transaction() as session:
        entry = tasks.held(session, task_id, caller.site_id)
        if not tasks.was_accepted(entry, body):
            now = serving.database.now()
            if isinstance(body, Submission):
                hand_in(session, now, caller.owner, body.update)
            tasks.accept(session, now, caller.actor, entry, body, upload_bytes, numbers, layers)
            # Counted and not refused: what is under way may finish.
            serving.quota.note_bytes(session, now, caller.site_id or "", len(json.dumps(numbers)))
    serving.call()


def _view(serving: Services, caller: Principal, task_id: str) -> TaskView:
    return get_task(task_id, serving, caller)
