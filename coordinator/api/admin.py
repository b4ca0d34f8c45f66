"""Endpoints for administrators: tokens, the audit chain, status and metrics."""

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from sqlalchemy import Row, select

from tessera.coordinator.alerts.status import status
from tessera.coordinator.api.dependencies import Admin, Anyone, Cursor, Key, Limit, Serving, Viewer
from tessera.coordinator.api.request_limits import BoundedRoute
from tessera.coordinator.db import audit, views
from tessera.coordinator.db.tables import AuditRow, SiteRow, TokenRow
from tessera.coordinator.operations import sites
from tessera.coordinator.telemetry.metrics import Metrics
from tessera.shared.api.admin import AuditEntry, IssuedToken, Rotation, RotationResult, Status, Token, TokenSpec
from tessera.shared.schema import Page

router = APIRouter(tags=["admin"], route_class=BoundedRoute)


@router.post("/v1/admin/tokens", status_code=201, operation_id="issueToken")
def issue_token(spec: TokenSpec, serving: Serving, caller: Admin, key: Key = None) -> IssuedToken:
    """Issue a token. Its secret is in this response only and is not stored."""
    return sites.issue_token(serving, caller, spec, key)


@router.get("/v1/admin/tokens", operation_id="listTokens")
def list_tokens(serving: Serving, caller: Admin, limit: Limit = 100, cursor: Cursor = None) -> Page[Token]:
    with serving.database.snapshot() as session:
        query = select(TokenRow, SiteRow.name).outerjoin_from(TokenRow, SiteRow)
        keys = (TokenRow.created_at, TokenRow.id)

        def view(row: Row[TokenRow, str | None]) -> Token:
            return views.token_view(*row, serving.last_seen.last_use(row[0].id))

        return views.page(session, query, keys, view, limit, cursor)


@router.delete("/v1/admin/tokens/{token_id}", status_code=204, operation_id="revokeToken")
def revoke_token(token_id: str, serving: Serving, caller: Admin) -> None:
    """Revoke a token at once, and end the claims that wait with it."""
    sites.revoke_token(serving, caller, token_id)


@router.post("/v1/admin/tokens/{token_id}/rotate", operation_id="rotateTokenById")
def rotate_token(token_id: str, rotation: Rotation, serving: Serving, caller: Admin) -> RotationResult:
    """Replace the secret of a token by one made by the administrator. The previous one stays valid for a while."""
    return sites.rotate_token(serving, caller, token_id, rotation.secret_hash)


@router.get("/v1/admin/audit", operation_id="listAudit")
def list_audit(serving: Serving, caller: Admin, limit: Limit = 100, cursor: Cursor = None) -> Page[AuditEntry]:
    """Return every change of state, oldest first, each chained to the previous one."""
    with serving.database.snapshot() as session:
        return views.page(session, select(AuditRow), (AuditRow.seq,), lambda r: views.audit_view(r[0]), limit, cursor)


@router.get("/v1/admin/audit/names", operation_id="listAuditNames")
def list_audit_names(serving: Serving, caller: Admin) -> dict[str, str]:
    """Return the name behind each pseudonym of the audit. A site that has withdrawn has none."""
    with serving.database.snapshot() as session:
        return audit.names_of(session)


@router.get("/v1/admin/status", operation_id="getStatus")
def get_status(serving: Serving, caller: Viewer) -> Status:
    """Return the progress and warnings of the live runs, the latest failures with their remedies, and what waits for
    a person; with blobs, free disk and memory for a caller who reads all studies."""
    now = serving.database.now()
    with serving.reading(caller) as session:
        needs = serving.alerts(session, now)
        return status(session, now - serving.settings.liveness_seconds, needs, serving.disk, serving.memory)


@router.get("/openapi.json", include_in_schema=False)
def description(request: Request, caller: Anyone) -> JSONResponse:
    """Return the description of this API."""
    return JSONResponse(request.app.openapi())


@router.get("/metrics", operation_id="getMetrics", response_class=Response)
def metrics(request: Request, caller: Viewer) -> Response:
    """Return Prometheus metrics: of the caller's runs and sites, and of the process for a caller who reads all
    studies."""
    exported: Metrics = request.app.state.metrics
    return Response(exported.exposition(caller), media_type=CONTENT_TYPE_LATEST)
