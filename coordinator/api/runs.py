"""Endpoints for orchestrators: runs, their rounds, versions and measurements."""

from functools import partial
from typing import Annotated

from anyio import to_thread
from fastapi import APIRouter, Depends, Header, Query, Request, Response
from fastapi import Path as PathParam
from fastapi.responses import StreamingResponse
from sqlalchemy import select
from sqlalchemy.orm import Session

from tessera.coordinator.api.blobs import OCTETS, Holder, get_blob, verified
from tessera.coordinator.api.dependencies import (
    MANY,
    Anyone,
    Callers,
    Cursor,
    Key,
    Limit,
    Orchestrator,
    Serving,
    Viewer,
)
from tessera.coordinator.api.request_limits import BoundedRoute
from tessera.coordinator.db import coverage, views
from tessera.coordinator.db.snapshots import terms_of
from tessera.coordinator.db.tables import RUNS, RoundRow, RunRow, SiteRow, TaskRow, VersionRow, find
from tessera.coordinator.domain.principal import Principal
from tessera.coordinator.operations import runs
from tessera.coordinator.operations.exports import find_export
from tessera.shared.api.runs import (
    Measurement,
    ParentVersion,
    Preview,
    Round,
    Run,
    RunPatch,
    RunSpec,
    SiteCoverage,
    SiteReport,
)
from tessera.shared.api.versions import Version
from tessera.shared.problems import NotFound, PreconditionRequired
from tessera.shared.schema import Page

MAX_SITES = 1_000

router = APIRouter(prefix="/v1/runs", tags=["runs"], route_class=BoundedRoute)

Starter = Annotated[Principal, Depends(Callers("orchestrator", "admin", most_values=MANY))]
RoundNumber = Annotated[int, PathParam(ge=1, lt=1 << 31)]
Earlier = Annotated[int, Query(alias="since", ge=0, lt=1 << 31, description="the number of the earlier version")]
Since = Annotated[int, Query(ge=0, lt=1 << 31, description="only this version and later ones")]
VersionNumber = Annotated[
    str, PathParam(pattern=r"^(latest|[0-9]{1,9})$", description="a version's number, or 'latest'")
]


@router.post("", status_code=201, operation_id="createRun")
def create_run(spec: RunSpec, serving: Serving, caller: Starter, response: Response, key: Key = None) -> Run:
    """Start a run from an uploaded model and first version."""
    run = runs.create_run(serving, caller, spec, key)
    response.headers["Location"] = f"/v1/runs/{run.id}"
    response.headers["ETag"] = runs.etag(run.revision)
    return run


@router.post("/preview", operation_id="previewRun")
def preview_run(spec: RunSpec, serving: Serving, caller: Starter) -> Preview:
    """Return the workers that would take part in a run, why others would not, and its first round's workload.
    Change nothing."""
    return runs.preview_run(serving, caller, spec)


@router.get("", operation_id="listRuns")
def list_runs(serving: Serving, caller: Anyone, limit: Limit = 100, cursor: Cursor = None) -> Page[Run]:
    """Return the runs of the caller's studies; for a site, those that it takes part in."""
    with serving.reading(caller) as session:
        site, keys = _site_of(session, caller), (RunRow.created_at, RunRow.id)
        return views.page(session, RUNS, keys, lambda row: _shown(session, site, row[0]), limit, cursor)


@router.get("/{run_id}", operation_id="getRun")
def get_run(run_id: str, serving: Serving, caller: Anyone, response: Response) -> Run:
    """Return a run; a site gets only runs that it takes part in, without their other sites."""
    with serving.reading(caller) as session:
        run = _shown(session, _site_of(session, caller), views.find_run(session, run_id))
    response.headers["ETag"] = runs.etag(run.revision)
    return run


def _site_of(session: Session, caller: Principal) -> SiteRow | None:
    return None if caller.site_id is None else find(session, SiteRow, caller.site_id)


def _shown(session: Session, site: SiteRow | None, row: RunRow) -> Run:
    run = views.run_view(session, row)
    return views.for_site(run, site.name) if site else run


@router.patch("/{run_id}", operation_id="patchRun")
def patch_run(
    run_id: str,
    patch: RunPatch,
    serving: Serving,
    caller: Orchestrator,
    response: Response,
    if_match: Annotated[str | None, Header(alias="If-Match")] = None,
) -> Run:
    """Pause, resume or cancel a run, or change its tags and note, rounds, quorum and deadline. A pause lets the open
    round end; a cancellation ends it at once. Changed settings act from the next round on, but a longer deadline is
    that of the open round too.

    An orchestrator may change the runs that it created, an administrator all runs.
    """
    if if_match is None:
        raise PreconditionRequired("the request carries no If-Match header")
    run = runs.patch_run(serving, caller, run_id, patch, if_match)
    response.headers["ETag"] = runs.etag(run.revision)
    return run


@router.put("/{run_id}/base", operation_id="setBase")
def set_base(run_id: str, base: ParentVersion, serving: Serving, caller: Starter) -> Run:
    """Set the parent's version on which a region's run goes on (`tessera regional`). A round on another version ends.
    Only the run's creator or an administrator may."""
    return runs.set_base(serving, caller, run_id, base)


@router.get("/{run_id}/rounds", operation_id="listRounds")
def list_rounds(
    run_id: str, serving: Serving, caller: Viewer, limit: Limit = 100, cursor: Cursor = None
) -> Page[Round]:
    """Return every attempt at every round, with its tasks, oldest first."""
    with serving.reading(caller) as session:
        views.find_run(session, run_id)
        query = select(RoundRow).options(views.WITH_TASKS).where(RoundRow.run_id == run_id)
        keys = (RoundRow.number, RoundRow.attempt)
        return views.page(session, query, keys, lambda row: views.round_view(row[0]), limit, cursor)


@router.get("/{run_id}/rounds/{number}", operation_id="getRound")
def get_round(run_id: str, number: RoundNumber, serving: Serving, caller: Viewer) -> Round:
    """Return the latest attempt at a round."""
    with serving.reading(caller) as session:
        same = (RoundRow.run_id == run_id) & (RoundRow.number == number)
        query = select(RoundRow).options(views.WITH_TASKS).where(same).order_by(RoundRow.attempt.desc())
        row = session.scalars(query.limit(1)).first()
        if row is None:
            raise NotFound(f"run {run_id} has no round {number}")
        run = views.find_run(session, run_id)
        return views.open_round_view(session, row, terms_of(session, run_id, run.changes).spec.cohort)


@router.get("/{run_id}/versions", operation_id="listVersions")
def list_versions(
    run_id: str, serving: Serving, caller: Viewer, limit: Limit = 100, cursor: Cursor = None, since: Since = 0
) -> Page[Version]:
    with serving.reading(caller) as session:
        views.find_run(session, run_id)
        query = select(VersionRow).where(VersionRow.run_id == run_id, VersionRow.number >= since)
        return views.page(session, query, (VersionRow.number,), lambda r: views.view_of(Version, r[0]), limit, cursor)


@router.get("/{run_id}/versions/{number}/export", operation_id="exportVersion", response_class=StreamingResponse)
async def export_version(
    run_id: str, number: VersionNumber, serving: Serving, caller: Orchestrator
) -> StreamingResponse:
    """Return a version as one safetensors file of whole tensors, under their names in transformers."""

    found = await to_thread.run_sync(find_export, serving, caller, run_id, number)
    await verified(serving, caller, found.unverified)
    name = f"{found.spec.name}-{found.number}.safetensors"
    headers = {
        "Content-Length": str(found.weights.nbytes),
        "Content-Disposition": f'attachment; filename="{name}"',
    }
    return StreamingResponse(found.weights.pieces(), media_type=OCTETS, headers=headers)


@router.get(
    "/{run_id}/versions/{number}/difference",
    operation_id="getDifference",
    response_class=Response,
    responses={200: {"content": {OCTETS: {}}}, 206: {"description": "the bytes that `Range` requests"}},
)
async def get_difference(
    run_id: str,
    number: RoundNumber,
    request: Request,
    serving: Serving,
    caller: Holder,
    since: Earlier,
    range_: Annotated[str | None, Header(alias="Range", max_length=64, include_in_schema=False)] = None,
) -> Response:
    """Return the blob from which a worker computes this version, given an earlier one."""
    digest = await serving.differences.find(caller, run_id, number, since)
    return await get_blob(digest, request, serving, caller, range_)


@router.get("/{run_id}/reports", operation_id="listReports")
def list_reports(run_id: str, serving: Serving, caller: Viewer) -> Page[SiteReport]:
    """Return the latest task of each site in a run without rounds, and what the site reported."""
    with serving.reading(caller) as session:
        views.find_run(session, run_id)
        return Page(items=tuple(views.site_reports(session, run_id)))


@router.get("/{run_id}/coverage", operation_id="listCoverage")
def list_coverage(run_id: str, serving: Serving, caller: Viewer) -> Page[SiteCoverage]:
    """Return each site that may take part and has the data set, with the number of rounds in a row that were merged
    without it and the reason, the sites with the most examples first; at most a thousand."""
    live_since = serving.database.now() - serving.settings.liveness_seconds
    with serving.reading(caller) as session:
        return Page(items=tuple(coverage.by_site(session, views.find_run(session, run_id), live_since)[:MAX_SITES]))


@router.get("/{run_id}/metrics", operation_id="listMeasurements")
def list_measurements(
    run_id: str,
    serving: Serving,
    caller: Viewer,
    limit: Limit = 100,
    cursor: Cursor = None,
    since: Since = 0,
    counts: Annotated[bool, Query(description="also the counts by subgroup, which are long")] = False,
) -> Page[Measurement]:
    """Return each version's evaluations, on the central data set and on sites' held-out data."""
    with serving.reading(caller) as session:
        spec = RunSpec.model_validate(views.find_run(session, run_id).spec)
        rows = views.WITH_COUNTS if counts else views.EVALUATIONS
        query = rows.where(TaskRow.run_id == run_id, TaskRow.version_number >= since)
        keys = (TaskRow.version_number, TaskRow.id)
        view = partial(views.measurement_view, spec=spec, counts=counts)
        return views.page(session, query, keys, view, limit, cursor)
