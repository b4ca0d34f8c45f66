"""Endpoints for administrators and viewers: sites and their workers."""

from typing import Annotated

from fastapi import APIRouter, Query
from sqlalchemy import select

from tessera.coordinator.api.dependencies import Admin, Anyone, Cursor, Key, Limit, Serving, Viewer
from tessera.coordinator.api.request_limits import BoundedRoute
from tessera.coordinator.db import views
from tessera.coordinator.db.studies import is_present
from tessera.coordinator.db.tables import SiteRow, WorkerRow
from tessera.coordinator.operations import sites
from tessera.coordinator.operations.withdrawal import withdraw
from tessera.shared.api.admin import Site, SiteSpec, Withdrawal, WorkerView
from tessera.shared.schema import Label, Page

router = APIRouter(prefix="/v1", tags=["sites"], route_class=BoundedRoute)


@router.post("/sites", status_code=201, operation_id="createSite")
def create_site(spec: SiteSpec, serving: Serving, caller: Admin, key: Key = None) -> Site:
    return sites.create_site(serving, caller, spec, key)


@router.get("/sites", operation_id="listSites")
def list_sites(serving: Serving, caller: Viewer, limit: Limit = 100, cursor: Cursor = None) -> Page[Site]:
    with serving.reading(caller) as session:
        return views.page(
            session,
            select(SiteRow).where(is_present(session)),
            (SiteRow.name,),
            lambda r: views.view_of(Site, r[0]),
            limit,
            cursor,
        )


@router.post("/sites/{site_id}/suspend", operation_id="suspendSite")
def suspend_site(site_id: str, serving: Serving, caller: Admin) -> Site:
    """Refuse all tokens of a site and select none of its workers until it is resumed."""
    return sites.set_suspended(serving, caller, site_id, suspended=True)


@router.post("/sites/{site_id}/resume", operation_id="resumeSite")
def resume_site(site_id: str, serving: Serving, caller: Admin) -> Site:
    """Accept a suspended site's tokens again."""
    return sites.set_suspended(serving, caller, site_id, suspended=False)


@router.post("/sites/{site_id}/withdraw", operation_id="withdrawSite")
def withdraw_site(
    site_id: str,
    serving: Serving,
    caller: Admin,
    study: Annotated[Label | None, Query(description="withdraw from this study alone, if it is in others")] = None,
) -> Withdrawal:
    """Revoke a site's tokens for good, cancel its tasks, and erase its updates, figures, declarations and names. The
    versions into which its updates were merged stay."""
    return withdraw(serving, caller, site_id, study)


@router.get("/workers", operation_id="listWorkers")
def list_workers(serving: Serving, caller: Anyone, limit: Limit = 100, cursor: Cursor = None) -> Page[WorkerView]:
    """Return the workers of the caller's studies, or a site's own. `live` means seen recently, with a site that is
    not suspended and a token that is not revoked."""
    since = serving.database.now() - serving.settings.liveness_seconds
    with serving.reading(caller) as session:
        query = select(WorkerRow, SiteRow).join_from(WorkerRow, SiteRow)
        if caller.site_id is None:
            query = query.where(is_present(session))
        return views.page(
            session, query, (WorkerRow.id,), lambda r: views.worker_view(r[0], r[1], since), limit, cursor
        )
