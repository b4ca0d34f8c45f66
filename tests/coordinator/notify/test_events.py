"""What happens, told as it happens: in order, from where somebody was cut off, to those who may look."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import httpx
import pytest
from sqlalchemy import select, update

from tessera.coordinator.auth import tokens
from tessera.coordinator.db import audit
from tessera.coordinator.db.tables import TokenRow
from tessera.coordinator.notify import event_stream
from tessera.coordinator.notify.event_stream import ChangeFeed, Permission
from tessera.coordinator.server import http_limits
from tessera.shared.api.tasks import Progress
from tests.coordinator.dashboard.conftest import signed_in
from tests.support.coordinator import WAIT_SECONDS, Clock, LiveCoordinator, refused, until
from tests.support.federation import ScriptedWorker, small_model, start_run, values

MODEL = small_model()


@dataclass
class Event:
    kind: str
    id: int | None
    data: Any


class Listening:
    """Reads a stream in a thread of its own."""

    def __init__(self, http: httpx.Client, path: str, since: int | None) -> None:
        self._http, self._path = http, path
        self._headers = {} if since is None else {"Last-Event-ID": str(since)}
        self._queue: Queue[Event | None] = Queue()
        self.begun = threading.Event()
        self.lines: list[str] = []
        self.whole = False
        """Whether the stream has ended as its sender meant it to."""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        assert self.begun.wait(WAIT_SECONDS)

    def _read(self) -> None:
        kind, number = "", None
        with (
            suppress(httpx.TransportError),
            self._http.stream("GET", self._path, headers=self._headers, timeout=WAIT_SECONDS) as answer,
        ):
            assert answer.headers["Content-Type"].startswith("text/event-stream")
            for line in answer.iter_lines():
                self.lines.append(line)
                self.begun.set()
                name, _, value = line.partition(": ")
                if name == "id":
                    number = int(value)
                elif name == "event":
                    kind = value
                elif name == "data":
                    self._queue.put(Event(kind, number, json.loads(value)))
                    number = None
            self.whole = True
        self.begun.set()
        self._queue.put(None)

    def next(self, kind: str = "change") -> Event:
        while True:
            event = self._queue.get(timeout=WAIT_SECONDS)
            assert event is not None, "the stream has ended"
            if event.kind == kind:
                return event

    def until(self, action: str) -> list[Event]:
        found: list[Event] = []
        while not found or found[-1].data["action"] != action:
            found.append(self.next())
        return found

    def ended(self) -> bool:
        with suppress(Empty):
            while self._queue.get(timeout=WAIT_SECONDS) is not None:
                pass
            return True
        return False


def listening(coordinator: LiveCoordinator, path: str = "/v1/events", since: int | None = None) -> Listening:
    return Listening(coordinator.http("viewer"), path, since)


def one_round(coordinator: LiveCoordinator) -> str:
    worker = ScriptedWorker(coordinator.client("site", "a")).enrol()
    run = start_run(coordinator.client(), MODEL, values(MODEL))
    worker.train(worker.take())
    return run.id


def test_every_change_of_state_is_told_once_and_in_order(coordinator: LiveCoordinator) -> None:
    heard = listening(coordinator)
    run = one_round(coordinator)
    events = heard.until("run.complete")
    seqs = [event.id for event in events]
    assert seqs == list(range(seqs[0] or 0, (seqs[-1] or 0) + 1))
    told = [event.data["action"] for event in events if event.data["run"] == run]
    assert told == [
        "run.create", "round.open", "task.lease", "task.accept", "round.close", "round.commit", "version",
        "run.complete",
    ]  # fmt: skip
    assert events[-1].data.keys() == {"seq", "at", "action", "subject", "run"}


def test_who_was_cut_off_goes_on_after_the_last_event_seen(coordinator: LiveCoordinator) -> None:
    run = one_round(coordinator)
    until(lambda: coordinator.client().run(run).state == "completed")
    events = listening(coordinator, f"/v1/runs/{run}/events", since=0).until("run.complete")
    middle = events[3]
    again = listening(coordinator, f"/v1/runs/{run}/events", since=middle.id).until("run.complete")
    assert [event.id for event in again] == [event.id for event in events[4:]]


def test_the_events_of_a_run_are_that_runs_alone(coordinator: LiveCoordinator) -> None:
    client = coordinator.client()
    quiet = start_run(client, MODEL, values(MODEL), dataset="none")
    heard = listening(coordinator, f"/v1/runs/{quiet.id}/events")
    one_round(coordinator)
    client.set_run_state(quiet.id, "cancelled")
    assert heard.next().data["action"] == "run.cancel"


def test_more_events_than_are_read_at_a_time_come_whole(
    coordinator: LiveCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream, "BATCH", 2)
    run = one_round(coordinator)
    until(lambda: coordinator.client().run(run).state == "completed")
    assert len(listening(coordinator, f"/v1/runs/{run}/events", since=0).until("run.complete")) == 8


def test_what_another_process_records_is_told_too(coordinator: LiveCoordinator) -> None:
    heard = listening(coordinator)
    database = coordinator.services.database
    with database.transaction() as session:
        audit.record(session, database.now(), "another", "site.create", "there")
    assert heard.next().data["subject"] == "there"


def test_a_heartbeat_is_told_as_progress_and_moves_no_id(coordinator: LiveCoordinator) -> None:
    worker = ScriptedWorker(coordinator.client("site", "a")).enrol()
    run = start_run(coordinator.client(), MODEL, values(MODEL))
    task = worker.take()
    heard = listening(coordinator, f"/v1/runs/{run.id}/events")
    heard.next("progress")
    worker.client.heartbeat(task.id, task.token, Progress(phase="training"))
    assert heard.next("progress").id is None


@contextmanager
def much_happening(coordinator: LiveCoordinator) -> Iterator[None]:
    """Something is recorded again and again, so that no listener ever waits for long."""
    over, database = threading.Event(), coordinator.services.database

    def record() -> None:
        while not over.wait(0.02):
            with database.transaction() as session:
                audit.record(session, database.now(), "test", "happens", "again")
            coordinator.services.change_feed.notify()

    busy = threading.Thread(target=record)
    busy.start()
    try:
        yield
    finally:
        over.set()
        busy.join()


def end_tokens(coordinator: LiveCoordinator) -> None:
    client = coordinator.client()
    for token in client.tokens():
        if token.role == "viewer":
            client.revoke_token(token.id)


def test_a_revoked_token_hears_no_more_however_much_happens(
    coordinator: LiveCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only the revocation itself can have it judged anew.
    monkeypatch.setattr(event_stream, "BEAT_SECONDS", 1e9)
    heard = listening(coordinator)
    with much_happening(coordinator):
        heard.until("happens")
        end_tokens(coordinator)
        assert heard.ended()


def test_what_another_process_revoked_ends_streams_here(coordinator: LiveCoordinator) -> None:
    heard, database = listening(coordinator), coordinator.services.database
    with database.transaction() as session:
        for row in session.scalars(select(TokenRow).where(TokenRow.role == "viewer")):
            tokens.revoke_token(session, database.now(), "another", row.id)
    # Nobody rings here: it is seen at the next look at the tables.
    assert heard.ended()


def test_a_token_that_expires_hears_no_more_however_much_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream, "BEAT_SECONDS", 0.2)
    clock = Clock()
    with LiveCoordinator(tmp_path, clock=clock) as coordinator:
        heard = listening(coordinator)
        until(lambda: ": nothing new" in heard.lines)
        with coordinator.services.database.transaction() as session:
            session.execute(update(TokenRow).where(TokenRow.role == "viewer").values(expires_at=clock.at + 60))
        with much_happening(coordinator):
            heard.until("happens")
            clock.advance(61)
            assert heard.ended()


def test_a_page_hears_no_more_once_its_session_has_ended(
    coordinator: LiveCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream, "BEAT_SECONDS", 1e9)
    person = signed_in(coordinator, "viewer")
    heard = Listening(coordinator.bare(person.cookie), "/page/events", None)
    with much_happening(coordinator):
        heard.until("happens")
        assert person.send("/page/sign-out").status_code == 303
        assert heard.ended()


def test_a_site_hears_nothing_and_nobody_hears_of_a_run_that_is_not_there(standing: LiveCoordinator) -> None:
    for path in ("/v1/events", "/v1/runs/nothing/events"):
        refused(standing.http("site", "a").get(path), 403, "forbidden")
        refused(standing.bare().get(path), 401, "unauthenticated")
    refused(standing.http().get("/v1/runs/nothing/events"), 404, "not-found")
    refused(standing.http().get("/v1/events", headers={"Last-Event-ID": "x"}), 422, "invalid")


@contextmanager
def crowded(folder: Path) -> Iterator[LiveCoordinator]:
    with LiveCoordinator(folder, max_event_streams=2) as coordinator:
        yield coordinator


def test_one_token_has_no_more_than_its_share_of_the_places(tmp_path: Path) -> None:
    with LiveCoordinator(tmp_path, max_event_streams=20) as coordinator:
        one, other = coordinator.http("viewer"), coordinator.http("viewer")
        # A tenth of 20.
        for _ in range(2):
            Listening(one, "/v1/events", None)
        refused(one.get("/v1/events"), 503, "busy")
        with other.stream("GET", "/v1/events") as answer:
            assert answer.status_code == 200


def test_no_more_listen_than_may_and_who_leaves_makes_room(tmp_path: Path) -> None:
    with crowded(tmp_path) as coordinator:
        first, second = (coordinator.http("viewer") for _ in range(2))
        Listening(first, "/v1/events", None)
        with second.stream("GET", "/v1/events"):
            answer = coordinator.http().get("/v1/events")
            refused(answer, 503, "busy")
            assert answer.headers["Retry-After"] == "5"
        until(lambda: len(coordinator.services.change_feed._listeners) == 1)
        listening(coordinator)


def test_who_listens_does_not_hold_up_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # No stream ends by itself, and the server cuts off what has not ended in this time.
    monkeypatch.setattr(event_stream, "BEAT_SECONDS", 1e9)
    monkeypatch.setattr(http_limits, "GRACE_SECONDS", WAIT_SECONDS)
    with LiveCoordinator(tmp_path) as coordinator:
        heard = [listening(coordinator) for _ in range(3)]
    assert all(each.ended() and each.whole for each in heard)


def test_clients_that_come_at_once_share_one_reader(
    coordinator: LiveCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As browsers do after a restart: each finds that nothing reads, and the tables take a moment to answer."""
    monkeypatch.setattr(event_stream, "BEAT_SECONDS", 1e9)
    services = coordinator.services
    feed = ChangeFeed(services.database, tick_seconds=600, most_listeners=8)

    async def events() -> list[bytes]:
        feed.attach()
        streams = [feed.listen(None, None, "token", lambda: Permission(None)) for _ in range(8)]
        await asyncio.gather(*map(anext, streams))
        readers = [task for task in asyncio.all_tasks() if task.get_coro().__name__ == "_read_on"]  # type: ignore[union-attr]
        assert len(readers) == 1
        with services.database.transaction() as session:
            audit.record(session, services.database.now(), "test", "happens", "once")
        feed.notify()
        return await asyncio.gather(*map(anext, streams))

    received = asyncio.run(events())
    assert [event.count(b"happens") for event in received] == [1] * 8


def test_nobody_looks_while_nobody_listens(coordinator: LiveCoordinator) -> None:
    http = coordinator.http("viewer")
    with http.stream("GET", "/v1/events") as answer:
        next(answer.iter_lines())
    looking = coordinator.services.change_feed
    until(lambda: looking._reader is not None and looking._reader.done())
