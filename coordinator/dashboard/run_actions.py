"""Actions of people on runs: pause, resume and cancel."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse

from tessera.coordinator.api.dependencies import Serving
from tessera.coordinator.dashboard.security_headers import PREFIX
from tessera.coordinator.dashboard.session import STEERING, Fields, PageRoute, Sender, Signed, require_role
from tessera.coordinator.dashboard.templating import render
from tessera.coordinator.db import views
from tessera.coordinator.operations import runs
from tessera.shared.api.runs import RunPatch
from tessera.shared.problems import Fault, Invalid

router = APIRouter(prefix=f"{PREFIX}/runs", include_in_schema=False, route_class=PageRoute)

STATES = ("running", "paused", "cancelled")


@router.get("/{run_id}/cancel")
def confirm_cancel(run_id: str, request: Request, serving: Serving, who: Signed) -> Response:
    require_role(who, *STEERING)
    with serving.database.snapshot() as session:
        run = views.run_view(session, views.find_run(session, run_id))
    return render(request, "confirm.html", who, run=run)


@router.post("/{run_id}/state")
def set_state(run_id: str, serving: Serving, who: Sender, fields: Fields) -> Response:
    """Raise PreconditionFailed if the run is no longer what was shown to the person."""
    require_role(who, *STEERING)
    wanted, revision = fields.get("state", ""), fields.get("revision", "")
    if wanted not in STATES:
        raise Invalid(
            "the form names no state", errors=[Fault(pointer="/state", detail=f"one of {', '.join(STATES)}")]
        )
    patch = RunPatch.model_validate({"state": wanted})
    runs.patch_run(serving, who.principal, run_id, patch, f'"{revision[:20]}"')
    return RedirectResponse(f"{PREFIX}/runs/{run_id}", status_code=303)
