"""Error responses as problem+json. None contains data of the request's body."""

import http
import math
from collections.abc import Iterable, Iterator

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import JsonValue, ValidationError
from sqlalchemy.exc import DataError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute, Route

from tessera.coordinator.db.engine import DATABASE_AWAY, DatabaseDamaged, SchemaMismatch, log_away
from tessera.coordinator.limits.disk import RETRY_SECONDS, is_full, is_unusable
from tessera.coordinator.telemetry.metrics import PROBLEMS_TOTAL
from tessera.coordinator.telemetry.request_timing import present_trace
from tessera.shared.problems import (
    MEDIA_TYPE,
    BadRequest,
    Fault,
    Invalid,
    NotFound,
    Problem,
    ServerFault,
    StoreFull,
    Unavailable,
    faults_in,
)

log = structlog.get_logger()

UNLOGGED = {401, 429}
"""Problems that unauthenticated callers can cause at will; they are counted, but not logged."""


def headers_of(problem: Problem) -> dict[str, str]:
    headers = {k: v for k, v in problem.headers.items() if k.lower() != "content-length"}
    if problem.retry_after_seconds is not None:
        headers["Retry-After"] = str(max(1, math.ceil(problem.retry_after_seconds)))
    return headers


def respond(request: Request, problem: Problem) -> Response:
    if problem.status not in UNLOGGED:
        log.info(
            "request.refused",
            method=request.method,
            path=request.scope["path"],
            status=problem.status,
            code=problem.code,
            detail=problem.detail,
        )
    return _written(problem.json(), problem, problem.status, headers_of(problem))


def _written(document: dict[str, JsonValue], problem: Problem, status: int, headers: dict[str, str]) -> Response:
    PROBLEMS_TOTAL.labels(code=problem.code).inc()
    if trace := present_trace():
        document["trace"] = trace
    return JSONResponse(document, status_code=status, headers=headers, media_type=MEDIA_TYPE)


def _problem(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, Problem)  # noqa: S101 (registered for it)
    return respond(request, problem)


def _invalid(request: Request, refusal: Exception) -> Response:
    assert isinstance(refusal, RequestValidationError)  # noqa: S101 (registered for it)
    unreadable = any(error["type"] == "json_invalid" for error in refusal.errors())
    kind = BadRequest if unreadable else Invalid
    return respond(
        request, kind("the request is invalid; see the errors", errors=faults_of_request(request, refusal))
    )


def faults_of_request(request: Request, refusal: RequestValidationError) -> list[Fault]:
    body = getattr(request.scope.get("route"), "body_field", None)
    # The first step only names the part of the request: body, header, path or query.
    errors = [{**error, "loc": error["loc"][1:]} for error in refusal.errors()]
    return faults_in(errors, model=body and body.field_info.annotation)


def _http(request: Request, refusal: Exception) -> Response:
    """Convert Starlette's own errors: no such route, wrong method."""
    assert isinstance(refusal, HTTPException)  # noqa: S101 (registered for it)
    phrase = http.HTTPStatus(refusal.status_code).phrase
    kind: type[Problem] = NotFound if refusal.status_code == 404 else BadRequest
    headers = dict(refusal.headers or {})
    if refusal.status_code == 405 and (methods := _methods_of(request)):
        headers["Allow"] = ", ".join(sorted(methods))
    remedy = "Check the URL: a coordinator's has no path such as /page or /v1. Earlier versions lack newer requests."
    problem = kind(f"{request.method} {request.scope['path']}: {phrase}", remedy=remedy, headers=headers)
    document = problem.json() | {"status": refusal.status_code}
    return _written(document, problem, refusal.status_code, problem.headers)


def _methods_of(request: Request) -> set[str]:
    """Return every method of the path. Each has a route, and the route that refuses names its own method only."""
    path = getattr(request.scope.get("route"), "path", None)
    same = (route for route in _routes(request.app.router.routes) if route.path == path)
    return {method for route in same for method in route.methods or ()}


def _routes(routes: Iterable[BaseRoute]) -> Iterator[Route]:
    for route in routes:
        if within := getattr(route, "original_router", None):
            yield from _routes(within.routes)
        elif isinstance(route, Route):
            yield route


def _gone(request: Request, fault: Exception) -> Response:
    """Handle a client that disconnected: the response is not read, and no error is logged."""
    return Response(status_code=400)


def _fault(request: Request, fault: Exception) -> Response:
    log.error("request.failed", method=request.method, path=request.scope["path"], exc_info=fault)
    detail = f"the coordinator failed to process this request; see its log (trace {present_trace()})"
    return respond(request, ServerFault(detail))


def _full(request: Request, fault: Exception) -> Response:
    """Respond with 503 to a full disk and to files that this machine refuses; raise any other file error again."""
    if is_full(fault):
        return _no_room(request, fault)
    if not is_unusable(fault):
        raise fault
    log.error("files.unusable", method=request.method, path=request.scope["path"], fault=str(fault))
    detail = "the coordinator cannot use its files at the moment; see its log"
    return respond(request, Unavailable(detail, retry_after_seconds=RETRY_SECONDS))


def _no_room(request: Request, fault: Exception) -> Response:
    log.error("disk.full", method=request.method, path=request.scope["path"], fault=str(fault))
    return respond(request, StoreFull("the coordinator's disk is full", retry_after_seconds=RETRY_SECONDS))


def _away(request: Request, fault: Exception) -> Response:
    """Respond with 503, because a retry may succeed: the database was restarted, is busy, or its disk is full."""
    if is_full(fault):
        return _no_room(request, fault)
    log_away(fault, method=request.method, path=request.scope["path"])
    if isinstance(fault, DatabaseDamaged):
        detail = "the coordinator's database is damaged; its administrator has to restore a backup"
        return respond(request, Unavailable(detail, retry_after_seconds=RETRY_SECONDS))
    return respond(request, Unavailable("the coordinator's database did not answer in time", retry_after_seconds=1))


def _ahead(request: Request, fault: Exception) -> Response:
    """Respond with 503 to a request for a newer version of the coordinator, which runs beside this one; raise a
    document that is unreadable for another reason again."""
    if isinstance(fault, ValidationError) and request.app.state.services.database.schema() != "ahead":
        raise fault
    detail = "this process of the coordinator is older than another, which can serve this request"
    return respond(request, Unavailable(detail, retry_after_seconds=1))


def _unstorable(request: Request, fault: Exception) -> Response:
    """Refuse text with a NUL, which PostgreSQL cannot store: no such name exists."""
    if "\0" in request.scope["path"]:
        return respond(request, NotFound(f"there is no {request.scope['path']!r}"))
    return respond(
        request, Invalid("the database cannot store a value of the request, perhaps a text with a NUL character")
    )


def install(app: FastAPI) -> None:
    app.add_exception_handler(Problem, _problem)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(ClientDisconnect, _gone)
    for kind in DATABASE_AWAY:
        app.add_exception_handler(kind, _away)
    app.add_exception_handler(SchemaMismatch, _ahead)
    app.add_exception_handler(ValidationError, _ahead)
    app.add_exception_handler(DataError, _unstorable)
    app.add_exception_handler(OSError, _full)
    app.add_exception_handler(Exception, _fault)
