"""Leases that are kept and lost, and the wish to stop, with real threads and real sockets."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from itertools import pairwise

import httpx
import pytest

from tessera.shared.api.tasks import Lease
from tessera.shared.client.client import Client
from tessera.shared.client.transport import HttpAnswer, IntermediaryFault, Unreachable
from tessera.shared.problems import LeaseLost, Problem, RoundClosed, TaskCancelled, Unauthenticated
from tessera.worker.task import heartbeat as heartbeat_module
from tessera.worker.task.heartbeat import Renewal, Stop, Stopped
from tests.support.coordinator import WAIT_SECONDS


def eventually(condition: threading.Event) -> None:
    assert condition.wait(WAIT_SECONDS)


@pytest.fixture
def deaf() -> Iterator[str]:
    """The URL of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_a_lease_is_renewed_four_times_in_its_length() -> None:
    beats: list[float] = []
    enough = threading.Event()

    def heartbeat() -> Lease:
        beats.append(time.monotonic())
        if len(beats) == 5:
            enough.set()
        return Lease(lease_seconds=0.4)

    with Renewal(heartbeat, lease_seconds=0.4, clock=lambda: 0.0) as renewal:
        eventually(enough)
        renewal.check()
    between = [later - earlier for earlier, later in pairwise(beats)]
    assert min(between) >= 0.1


def test_between_the_heartbeats_of_a_long_lease_the_process_shows_that_it_is_alive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(heartbeat_module, "ALIVE_SECONDS", 0.01)
    beats, shown, enough = [], [], threading.Event()

    def heartbeat() -> Lease:
        beats.append(1)
        return Lease(lease_seconds=86400)

    def alive() -> None:
        shown.append(1)
        if len(shown) == 3:
            enough.set()

    # Its heartbeats are six hours apart.
    with Renewal(heartbeat, lease_seconds=86400, alive=alive):
        eventually(enough)
    assert beats == []


@pytest.mark.parametrize("problem", [LeaseLost("x"), TaskCancelled("x"), RoundClosed("x"), Unauthenticated("x")])
def test_what_ends_a_lease_is_carried_to_whoever_checks(problem: Problem) -> None:
    asked = threading.Event()

    def heartbeat() -> Lease:
        asked.set()
        raise problem

    with Renewal(heartbeat, lease_seconds=0.1) as renewal:
        eventually(asked)
        renewal._thread.join(WAIT_SECONDS)
        with pytest.raises(type(problem)):
            renewal.check()


def test_a_lease_survives_a_page_that_no_coordinator_wrote() -> None:
    beats, recovered = [], threading.Event()

    def heartbeat() -> Lease:
        beats.append(1)
        if len(beats) == 1:
            raise IntermediaryFault(HttpAnswer(403, httpx.Headers({"Content-Type": "text/html"})))
        recovered.set()
        return Lease(lease_seconds=60)

    with Renewal(heartbeat, lease_seconds=0.1, clock=lambda: 0.0) as renewal:
        eventually(recovered)
        renewal.check()


def test_a_lease_survives_an_outage_that_is_shorter_than_itself() -> None:
    beats = []
    recovered = threading.Event()

    def heartbeat() -> Lease:
        beats.append(1)
        if len(beats) < 3:
            raise Unreachable("down")
        recovered.set()
        return Lease(lease_seconds=60.0)

    with Renewal(heartbeat, lease_seconds=0.2, clock=lambda: 0.0) as renewal:
        eventually(recovered)
        renewal.check()


def test_a_lease_that_could_not_be_renewed_for_its_length_is_lost() -> None:
    now = [100.0]

    def heartbeat() -> Lease:
        raise Unreachable("down")

    with Renewal(heartbeat, lease_seconds=60.0, clock=lambda: now[0]) as renewal:
        now[0] = 160.0
        renewal.check()
        now[0] = 160.1
        with pytest.raises(LeaseLost, match="could not be renewed for 60 s"):
            renewal.check()


def test_a_heartbeat_that_hangs_does_not_hide_that_the_lease_ran_out(deaf: str) -> None:
    now = [0.0]
    with (
        Client(deaf, "token", patience_seconds=0) as client,
        Renewal(lambda: client.heartbeat("task", 1), lease_seconds=0.1, clock=lambda: now[0]) as renewal,
    ):
        now[0] = 1.0
        with pytest.raises(LeaseLost):
            renewal.check()


def test_a_renewal_lasts_no_longer_than_the_site_allows() -> None:
    now, beats, twice = [0.0], [], threading.Event()

    def heartbeat() -> Lease:
        beats.append(1)
        if len(beats) > 1:
            twice.set()
            raise Unreachable("down")
        return Lease(lease_seconds=86400)

    with Renewal(heartbeat, lease_seconds=0.1, max_lease_seconds=0.2, clock=lambda: now[0]) as renewal:
        eventually(twice)
        now[0] = 0.3
        with pytest.raises(LeaseLost, match=r"could not be renewed for 0\.2 s"):
            renewal.check()


def test_a_lease_that_nothing_renews_any_more_counts_as_lost() -> None:
    asked = threading.Event()

    def heartbeat() -> Lease:
        asked.set()
        raise OverflowError("timestamp too large")

    with Renewal(heartbeat, lease_seconds=0.1, clock=lambda: 0.0) as renewal:
        eventually(asked)
        renewal._thread.join(WAIT_SECONDS)
        with pytest.raises(LeaseLost, match="timestamp too large"):
            renewal.check()


def test_no_heartbeat_is_sent_once_the_task_is_over() -> None:
    with Renewal(lambda: Lease(lease_seconds=0.05), lease_seconds=0.05) as renewal:
        pass
    assert not renewal._thread.is_alive()


def test_stopping_ends_a_sleep_at_once_from_another_thread() -> None:
    stop = Stop()
    threading.Timer(0.05, stop.request).start()
    with pytest.raises(Stopped):
        # Longer than a test may take.
        stop.sleep(86400)
    with pytest.raises(Stopped):
        stop.check()


def test_a_signal_ends_a_long_poll_at_once(deaf: str) -> None:
    stop = Stop()
    before = signal.signal(signal.SIGUSR1, lambda *_: stop.request())
    try:
        # It waits for an answer longer than a test may take.
        with Client(deaf, "token", patience_seconds=0, answer_seconds=86400) as client:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
            with pytest.raises(Stopped):
                stop.interruptible(lambda: client.task("any"), too_late=lambda _: None)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_result_that_comes_after_the_wish_to_stop_is_given_back() -> None:
    stop, go, given_back = Stop(), threading.Event(), threading.Event()
    late: list[str] = []

    def slow() -> str:
        eventually(go)
        return "a task"

    def give_back(result: str) -> None:
        late.append(result)
        given_back.set()

    stop_soon = threading.Timer(0.05, stop.request)
    stop_soon.start()
    with pytest.raises(Stopped):
        stop.interruptible(slow, give_back)
    go.set()
    eventually(given_back)
    assert late == ["a task"]


@pytest.mark.parametrize("fault", [LeaseLost("gone"), OSError("disk full")])
def test_an_interruptible_call_gives_its_result_and_its_exception(fault: Exception) -> None:
    stop = Stop()

    def refused() -> str:
        raise fault

    assert stop.interruptible(lambda: "a task", too_late=pytest.fail) == "a task"
    with pytest.raises(type(fault)):
        stop.interruptible(refused, too_late=pytest.fail)
