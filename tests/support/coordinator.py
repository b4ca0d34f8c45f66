"""A real coordinator: uvicorn on a free port, a real database, a real blob folder."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import fastapi.routing
import httpx
import pytest
import structlog
import uvicorn.server
from sqlalchemy import event

from tessera.coordinator.app import create_app
from tessera.coordinator.auth.tokens import authenticate, issue_token
from tessera.coordinator.db.engine import insert_or_update
from tessera.coordinator.db.studies import create_study, study_names
from tessera.coordinator.db.tables import UploadRow, new_id
from tessera.coordinator.db.workers import create_site
from tessera.coordinator.server.connections import Server
from tessera.coordinator.server.http_limits import configuration
from tessera.coordinator.services import Services, assemble
from tessera.coordinator.settings import CoordinatorSettings
from tessera.shared.api.admin import TokenSpec
from tessera.shared.client.client import Client
from tessera.shared.problems import MEDIA_TYPE, Problem, ProblemDocument
from tessera.shared.schema import TokenRole
from tests.support.databases import url_in
from tests.support.federation import HOLDING, ScriptedWorker

WAIT_SECONDS = 60.0
"""More than the busiest machine needs; what comes does so long before."""

TICK_SECONDS = 0.5
"""Far apart, since a look at the runs costs more than most tests; what happens, and a clock that is moved, calls for
one at once."""

ROOMY = {"disk_reserve_bytes": 0, "memory_limit_bytes": 1 << 40}
"""How full the machine is that runs the tests is no matter of theirs."""

# What is logged is shown with a test that fails. Neither on stderr, where a command of the same process says its own,
# nor in pytest's output, which anything else would litter that a thread says between two tests.
LOG = logging.getLogger("tessera")
LOG.setLevel(logging.DEBUG)
LOG.addHandler(logging.NullHandler())
# The default renders a traceback with all local values, which takes seconds.
structlog.configure(
    [structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)],
    logger_factory=lambda *_: LOG,
)


def _make_routes_once() -> None:
    """FastAPI makes all routes anew for each application, which takes longer than most tests; ours are alike."""
    contexts = getattr(fastapi.routing, "_EffectiveRouteContext", None)
    if contexts is None:
        return
    make, made = contexts.from_api_route, {}

    def from_api_route(*, original_route: Any, include_context: Any) -> Any:
        # The route is kept, so that no other is ever known by its id.
        known = made.get(id(original_route))
        if known is None:
            context = make(original_route=original_route, include_context=include_context)
            known = made[id(original_route)] = (original_route, context)
        return known[1]

    contexts.from_api_route = from_api_route


_make_routes_once()


def _look_often() -> None:
    """Uvicorn looks every 0.1 s whether it is to stop, and again for each thing it waits for then."""
    uvicorn.server.asyncio = SimpleNamespace(**{**vars(asyncio), "sleep": lambda s: asyncio.sleep(s / 10)})


_look_often()


class Clock:
    """A clock that moves only when a test moves it, and then wakes the coordinators that go by it."""

    def __init__(self, at: float = 1_800_000_000.0) -> None:
        self.at = at
        self.moved: list[Callable[[], None]] = []

    def __call__(self) -> float:
        return self.at

    def advance(self, seconds: float) -> None:
        self.at += seconds
        for call in self.moved:
            call()


class LiveCoordinator:
    """Started with `with`. Stopping and starting again keeps the folder, as a restart does."""

    def __init__(self, folder: Path, *, clock: Callable[[], float] | None = None, **settings: Any) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        places = {
            "database_url": url_in(folder),
            "blob_url": str(folder / "blobs"),
            "staging_dir": folder / "staging",
        }
        quick = {"tick_seconds": TICK_SECONDS, "cohort_wait_seconds": 0, "max_wait_seconds": 5.0, **ROOMY}
        self.settings = CoordinatorSettings(**{**places, **quick, **settings})
        self._port = settings.get("port", 0)
        self._clock = clock
        self._clients: list[Client | httpx.Client] = []

    def __enter__(self) -> Self:
        self.services: Services = assemble(self.settings, self._clock)
        if self.services.database.is_sqlite:
            event.listen(self.services.database.engine, "connect", _without_waiting)
        if isinstance(self._clock, Clock):
            self._clock.moved.append(self.services.wake_conductor)
        self.services.blobs.sweep()
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", self._port))
        scheme = "https" if self.settings.tls_cert else "http"
        self.url = f"{scheme}://127.0.0.1:{self._socket.getsockname()[1]}"
        self._server = Server(configuration(self.app(), self.settings))
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],))
        self._thread.start()
        until(lambda: self._server.started)
        return self

    def __exit__(self, *fault: object) -> None:
        self.services.release_waiters()
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()
        if isinstance(self._clock, Clock):
            self._clock.moved.remove(self.services.wake_conductor)
        for client in self._clients:
            HOLDING.pop(client, None)  # type: ignore[call-overload]
            client.close()

    def elapse(self, seconds: float, *calling: ScriptedWorker) -> None:
        """Let time pass as it does: the conductor looks every now and then, and these workers call."""
        clock, conductor = self._clock, self.services.conductor
        assert isinstance(clock, Clock)
        end = clock.at + seconds
        while clock.at < end:
            clock.advance(min(end - clock.at, self.settings.liveness_seconds / 3))
            for worker in calling:
                worker.enrol()
            until(lambda: conductor.liveness._looked_at == clock.at)

    def app(self) -> Any:
        return create_app(self.services)

    def token(self, role: TokenRole, site: str | None = None, studies: Sequence[str] = ("default",)) -> str:
        """A new token, straight from the tables; its site and studies are made if they are missing."""
        database = self.services.database
        with database.transaction() as session:
            for study in {*studies} - study_names(session):
                create_study(session, database.now(), "test", study, "")
            of_people = tuple(studies) if role in ("orchestrator", "viewer") else None
            spec = TokenSpec(name=f"test-{role}", role=role, site=site, studies=of_people)
            if site is not None and site not in self._sites:
                create_site(session, database.now(), "test", site, studies)
                self._sites.add(site)
            return issue_token(session, database.now(), "test", spec)[1]

    def hold(self, secret: str, raw: Iterable[bytes]) -> list[str]:
        """Put blobs in the store as if the holder of a token had uploaded them, all at once: a request for each takes
        longer than most tests. Return their digests."""
        blobs, database = self.services.blobs, self.services.database
        stored = [blobs.put([data]) for data in raw]
        with database.transaction() as session:
            blobs.record(session, database.now(), stored)
            owner = authenticate(session, database.now(), secret).owner
            for blob in stored:
                row = {"id": new_id(), "owner": owner, "digest": blob.digest}
                state = {"length": blob.size, "complete": True, "created_at": database.now()}
                insert_or_update(session, UploadRow, ("owner", "digest"), {**row, **state}, state)
        return [blob.digest for blob in stored]

    @property
    def _sites(self) -> set[str]:
        return self.__dict__.setdefault("_site_names", set())

    def client(
        self,
        role: TokenRole = "admin",
        site: str | None = None,
        studies: Sequence[str] = ("default",),
        **transport: Any,
    ) -> Client:
        # Nothing here speaks TLS; reading the certificates takes longer than most tests.
        options = {"patience_seconds": 5.0, "verify": False, **transport}
        secret = self.token(role, site, studies)
        client = Client(self.url, secret, **options)
        self._clients.append(client)
        HOLDING[client] = partial(self.hold, secret)
        return client

    def http(self, role: TokenRole = "admin", site: str | None = None) -> httpx.Client:
        """A bare HTTP client, for requests that the typed one would never send."""
        return self.bare({"Authorization": f"Bearer {self.token(role, site)}"})

    def bare(self, headers: dict[str, str] | None = None) -> httpx.Client:
        """The same without a token."""
        client = httpx.Client(base_url=self.url, headers=headers, verify=False, timeout=WAIT_SECONDS)  # noqa: S501 (no TLS)
        self._clients.append(client)
        return client


def _without_waiting(connection: Any, record: object) -> None:
    """Nobody cuts this machine's power."""
    connection.execute("PRAGMA synchronous=OFF")


def until(condition: Callable[[], Any], seconds: float = WAIT_SECONDS) -> Any:
    """The first true value of `condition`. Fails the test if none comes in time."""
    began = time.monotonic()
    while True:
        if value := condition():
            return value
        waited = time.monotonic() - began
        assert waited < seconds, f"this did not come true within {seconds} s: {condition}"
        # Ever more seldom: to look costs more than most of what is waited for.
        time.sleep(min(0.1, max(0.005, waited / 4)))


def refused(response: httpx.Response, status: int, code: str) -> ProblemDocument:
    """The problem that a response must be, whole and well-formed."""
    assert (response.status_code, response.headers["Content-Type"]) == (status, MEDIA_TYPE), response.text[:500]
    document = ProblemDocument.model_validate_json(response.content)
    assert (document.status, document.code, document.type) == (status, code, f"/problems/{code}")
    assert document.detail
    assert document.remedy
    return document


@contextmanager
def refusing(code: str, match: str | None = None) -> Iterator[pytest.ExceptionInfo[Problem]]:
    """Within it, a problem with this code is raised; its text is searched for `match`."""
    with pytest.raises(Problem, match=match) as caught:
        yield caught
    assert caught.value.code == code, caught.value
