"""The dashboard's routes, with its events and static files."""

from functools import cache, partial

from fastapi import APIRouter, FastAPI
from fastapi.responses import HTMLResponse, RedirectResponse
from starlette.staticfiles import StaticFiles

from tessera.coordinator.api.dependencies import Serving
from tessera.coordinator.api.events import EventStream, LastEvent, stream
from tessera.coordinator.dashboard import approvals, create_run, login, overview, records, runs, site, workers
from tessera.coordinator.dashboard.charts import comparison
from tessera.coordinator.dashboard.security_headers import PREFIX, SecurityHeaders
from tessera.coordinator.dashboard.session import PageRoute, Signed, holder, no_page
from tessera.coordinator.dashboard.templating import STATIC, environment, show_problem
from tessera.shared.lazy_import import DeferredModule
from tessera.shared.problems import PAGES, NotFound

router = APIRouter(prefix=PREFIX, include_in_schema=False, route_class=PageRoute)


@router.get("/events", response_class=EventStream)
async def all_events(serving: Serving, who: Signed, last_event_id: LastEvent = None) -> EventStream:
    return await stream(serving, None, last_event_id, who.principal, partial(holder, serving, who.secret))


@router.get("/runs/{run_id}/events", response_class=EventStream)
async def run_events(run_id: str, serving: Serving, who: Signed, last_event_id: LastEvent = None) -> EventStream:
    return await stream(serving, run_id, last_event_id, who.principal, partial(holder, serving, who.secret))


nowhere = APIRouter(prefix=PREFIX, include_in_schema=False, route_class=PageRoute)


@nowhere.get("/{path:path}")
def refuse(path: str, _who: Signed) -> None:
    """Refuse an address without a page, such as that of a form, which is not for reading."""
    raise no_page(f"{PREFIX}/{path}")


# It needs the client's libraries, and most coordinators are never asked for these pages.
reference = DeferredModule("tessera.shared.cli.reference.problems")

problems = APIRouter(prefix=PAGES, include_in_schema=False)
"""The pages that the `type` of a problem points to, for all callers: they read neither session nor database."""


@problems.get("")
def list_problems() -> HTMLResponse:
    return HTMLResponse(_problem_page(None))


@problems.get("/{code}")
def show_kind(code: str) -> HTMLResponse:
    if code not in reference.KINDS:
        raise NotFound(f"there is no problem {code[:64]!r}", remedy=f"GET {PAGES} lists them.")
    return HTMLResponse(_problem_page(code))


@cache
def _problem_page(code: str | None) -> str:
    page = environment().get_template("problem_page.html")
    return page.render(pages=PAGES, reference=reference, kind=reference.KINDS[code] if code else None)


def install(app: FastAPI) -> None:
    """Add the dashboard to the coordinator's application."""
    app.state.show_problem = show_problem
    app.add_middleware(SecurityHeaders)
    app.mount(f"{PREFIX}/static", StaticFiles(directory=STATIC), name="static")
    for module in (login, create_run, comparison, approvals, overview, runs, records, workers, site):
        app.include_router(module.router)
    app.include_router(router)
    app.include_router(problems)
    # Last, because it matches every path.
    app.include_router(nowhere)
    app.add_api_route("/", lambda: RedirectResponse(f"{PREFIX}/"), include_in_schema=False)
    app.add_api_route(PREFIX, lambda: RedirectResponse(f"{PREFIX}/"), include_in_schema=False)
