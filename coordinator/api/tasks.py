"""Endpoints for workers: claim a task, renew its lease, report on it."""

import asyncio
import re
from contextlib import suppress
from functools import partial
from typing import Annotated, Any

from anyio import to_thread
from fastapi import APIRouter, Depends, Header, Query, Request, Response

from tessera.coordinator.api.blobs import announced, received
from tessera.coordinator.api.dependencies import Anyone, Callers, Cursor, Limit, Serving, SiteCaller
from tessera.coordinator.api.request_limits import BoundedRequest, BoundedRoute, FollowingBlob
from tessera.coordinator.domain.principal import Principal
from tessera.coordinator.operations import tasks
from tessera.coordinator.services import Services
from tessera.coordinator.telemetry.metrics import RECEIVED_BYTES
from tessera.shared.api.framing import MEDIA_TYPE, pack_task
from tessera.shared.api.secure_sums import HelperReport
from tessera.shared.api.tasks import (
    LEFT_OUT,
    Claim,
    EvaluationResult,
    Failure,
    Heartbeat,
    Lease,
    Release,
    ReportResult,
    Submission,
    Task,
    TaskView,
)
from tessera.shared.problems import BadRequest, Fault, Invalid
from tessera.shared.schema import MAX_CLAIM_BYTES, PROTOCOL, Page

router = APIRouter(prefix="/v1/tasks", tags=["tasks"], route_class=BoundedRoute)

_WAIT = re.compile(r"wait=(\d{1,4})")

Wait = Annotated[str, Header(max_length=128, description="'wait=25' waits up to 25 s for a task")]


class Claimants(Callers):
    """Admits workers; a claim of another protocol is refused before anything else of it is validated."""

    def __init__(self) -> None:
        remedy = "Shorten the worker's declaration, such as the lists of its policy."
        super().__init__("site", most_bytes=MAX_CLAIM_BYTES, remedy=remedy)

    def check(self, document: Any) -> None:
        """Raise Invalid."""
        claim = document if isinstance(document, dict) else {}
        spoken = [claim.get(name) for name in ("protocol_min", "protocol_max")]
        lowest, highest = (number if isinstance(number, int) else PROTOCOL for number in spoken)
        if not lowest <= PROTOCOL <= highest:
            older = "worker" if highest < PROTOCOL else "coordinator"
            raise Invalid(
                f"this coordinator speaks protocol {PROTOCOL}; the worker speaks {lowest} to {highest}",
                errors=[Fault(pointer="/protocol_max", detail=f"{lowest} to {highest}")],
                remedy=f"The {older} is older: install the other's release of Tessera there, whose version number "
                "may be the same. The worker asks again by itself within an hour.",
            )


@router.post(
    "/claim",
    operation_id="claimTask",
    response_model=Task,
    responses={200: {"content": {MEDIA_TYPE: {}}}, 204: {"description": "nothing now"}},
)
async def claim(
    body: Claim,
    request: Request,
    serving: Serving,
    caller: Annotated[Principal, Depends(Claimants())],
    prefer: Wait = "",
    accept: Annotated[str, Header(max_length=256, include_in_schema=False)] = "",
) -> Response:
    """Lease the next task that is offered to this worker; wait for one if `Prefer` says so."""
    task = await tasks.claim(serving, caller, body, _seconds(prefer, serving), partial(_disconnected, request))
    if task is None:
        left_out = await to_thread.run_sync(tasks.left_out, serving, caller, body.version)
        return Response(status_code=204, headers={LEFT_OUT: left_out} if left_out else None)
    # Omit defaults so that a worker of the previous version can parse the task.
    if MEDIA_TYPE in accept:
        return Response(pack_task(task), media_type=MEDIA_TYPE)
    return Response(task.model_dump_json(exclude_defaults=True), media_type="application/json")


@router.get("/claim", operation_id="waitAsClaim", status_code=204)
async def wait_as_claim(request: Request, serving: Serving, _: SiteCaller, prefer: Wait = "") -> Response:
    """Answer as late as a claim without a task does, and lease none: a worker's `doctor` finds out whether a proxy on
    the way ends such a request."""
    with suppress(TimeoutError):
        await asyncio.wait_for(_disconnected(request), _seconds(prefer, serving))
    return Response(status_code=204)


def _seconds(prefer: str, serving: Services) -> float:
    wanted = _WAIT.search(prefer)
    return min(float(wanted.group(1)) if wanted else 0.0, serving.settings.max_wait_seconds)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


@router.get("", operation_id="listTasks")
def list_tasks(
    serving: Serving,
    caller: SiteCaller,
    run: Annotated[str | None, Query(max_length=64, description="only of this run")] = None,
    limit: Limit = 100,
    cursor: Cursor = None,
) -> Page[TaskView]:
    """Return the calling site's own tasks, oldest first."""
    return tasks.list_tasks(serving, caller, run, limit, cursor)


@router.get("/{task_id}", operation_id="getTask")
def get_task(task_id: str, serving: Serving, caller: Anyone) -> TaskView:
    """Return a task; a site sees its own only."""
    return tasks.get_task(serving, caller, task_id)


@router.post("/{task_id}/heartbeat", operation_id="renewLease")
def heartbeat(task_id: str, body: Heartbeat, serving: Serving, caller: SiteCaller) -> Lease:
    """Renew the lease. A problem such as `lease-lost` or `task-cancelled` means that the worker must stop."""
    return tasks.heartbeat(serving, caller, task_id, body)


@router.post(
    "/{task_id}/update",
    operation_id="submitUpdate",
    openapi_extra={"requestBody": {"content": {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}}}},
)
async def submit_update(
    task_id: str,
    body: Submission,
    request: BoundedRequest,
    serving: Serving,
    caller: SiteCaller,
) -> TaskView:
    """Submit an update that was uploaded before or is in the request. The response accepts it, or rejects it with the
    reason."""
    blobs, following = getattr(request.state, "blobs", ()), getattr(request.state, "following", None)
    if len(blobs) + bool(following) + (body.data is not None) > 1:
        raise BadRequest("the request contains more than one update", remedy="Send the update that `update` names.")
    if following:
        await _receive(request, serving, caller, body.update, following)
    elif blobs:
        body = body.model_copy(update={"data": blobs[0]})
    # Concurrent repetitions wait for the first result instead of inspecting the update again.
    async with serving.submitting.hold(f"{caller.owner} {task_id}"):
        return await serving.inspections.run(caller.owner, tasks.submit_update, serving, caller, task_id, body)


async def _receive(
    request: BoundedRequest, serving: Services, caller: Principal, digest: str, following: FollowingBlob
) -> None:
    """Receive the update behind a submission as an upload, which can be resumed like any other."""
    upload = await announced(serving, caller, digest, following.length)
    if upload.complete:
        return
    RECEIVED_BYTES.inc(len(following.begun))
    end = await serving.uploads.whole(upload, received(request.pieces), following.begun)
    if end < upload.length:
        raise BadRequest(f"{end} of {upload.length} bytes of the update were received", remedy="Upload the others.")


@router.post("/{task_id}/helper-report", operation_id="submitHelperReport")
def submit_helper_report(task_id: str, body: HelperReport, serving: Serving, caller: SiteCaller) -> TaskView:
    """Submit a helper's part of a secure sum: its signature, or the sums of masks, uploaded before."""
    return tasks.submit_helper_report(serving, caller, task_id, body)


@router.post("/{task_id}/evaluation", operation_id="submitEvaluation")
def submit_evaluation(task_id: str, body: EvaluationResult, serving: Serving, caller: SiteCaller) -> TaskView:
    """Submit the metrics of an evaluation."""
    return tasks.submit_evaluation(serving, caller, task_id, body)


@router.post("/{task_id}/report", operation_id="submitReport")
def submit_report(task_id: str, body: ReportResult, serving: Serving, caller: SiteCaller) -> TaskView:
    """Submit the description of a data set, or the report on a rehearsal or a membership inference attack."""
    return tasks.submit_report(serving, caller, task_id, body)


@router.post("/{task_id}/failure", operation_id="reportFailure")
def report_failure(task_id: str, body: Failure, serving: Serving, caller: SiteCaller) -> TaskView:
    """Report that the worker cannot do the task; the round continues without it."""
    return tasks.fail(serving, caller, task_id, body)


@router.post("/{task_id}/release", operation_id="releaseTask")
def release(task_id: str, body: Release, serving: Serving, caller: SiteCaller) -> TaskView:
    """Return the task unfinished; it is offered again at once, up to 20 times."""
    return tasks.release(serving, caller, task_id, body)
