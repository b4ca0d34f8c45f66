"""Bells: heard at once, by everyone who serves, and missed without harm."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tessera.coordinator.notify.wakeup import BATCH, CONDUCTOR, MAX_ADDRESS_LENGTH, SocketWakeups, serving_name


@pytest.fixture(params=["short", "long"])
def bells(tmp_path: Path, request: pytest.FixtureRequest) -> SocketWakeups:
    # A path may be far longer than the address of a socket.
    return SocketWakeups(
        tmp_path / "bells" if request.param == "short" else tmp_path / ("long" * MAX_ADDRESS_LENGTH)[:200]
    )


def test_the_conductor_hears_that_it_is_called_and_many_calls_are_one(bells: SocketWakeups) -> None:
    heard = []
    with bells.listener(CONDUCTOR) as bell:
        for _ in range(1000):
            bells.wake_conductor()
        bell.wait()
        waiting = threading.Thread(target=lambda: heard.append(bell.wait()), daemon=True)
        waiting.start()
        waiting.join(0.1)
        assert heard == []
        bells.wake_conductor()
        waiting.join(5)
        assert heard == [[]]


def test_a_wakeup_names_its_run_unless_one_was_perhaps_lost(bells: SocketWakeups) -> None:
    with bells.listener(CONDUCTOR) as bell:
        bells.wake_conductor(["a"])
        bells.wake_conductor(["b"])
        assert bell.wait() == ["a", "b"]
        bells.wake_conductor(["a"])
        bells.wake_conductor()
        assert bell.wait() == []
        for number in range(1000):
            bells.wake_conductor([str(number)])
        assert bell.wait() == []


def test_all_who_serve_hear_of_every_worker(bells: SocketWakeups) -> None:
    workers = [f"{index:032}" for index in range(3 * BATCH + 1)]
    with bells.listener(serving_name()) as one, bells.listener(serving_name()) as other:
        bells.wake_workers(workers)
        assert one.received() == other.received() == workers
        assert one.received() == []


def test_nobody_need_listen(bells: SocketWakeups) -> None:
    bells.wake_conductor()
    bells.wake_workers(["w"])
    bells.wake_workers([])


KILLED = """
import os, signal, sys
from pathlib import Path
from tessera.coordinator.notify.wakeup import SocketWakeups, serving_name
bell = SocketWakeups(Path(sys.argv[1])).listener(serving_name())
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_bell_of_a_killed_process_is_taken_down(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert len(list(tmp_path.iterdir())) == 1
    SocketWakeups(tmp_path).wake_workers(["w"])
    assert list(tmp_path.iterdir()) == []


def test_a_bell_that_was_left_behind_can_be_hung_up_again(tmp_path: Path) -> None:
    (tmp_path / CONDUCTOR).touch()
    with SocketWakeups(tmp_path).listener(CONDUCTOR) as bell:
        SocketWakeups(tmp_path).wake_conductor()
        bell.wait()
