"""Bells: heard at once, by everyone who serves, and missed without harm."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tessera.coordinator.notify.wakeup import BATCH, CONDUCTOR, MAX_ADDRESS_LENGTH, FolderBells, own_name


@pytest.fixture(params=["short", "long"])
def bells(tmp_path: Path, request: pytest.FixtureRequest) -> FolderBells:
    # A path may be far longer than the address of a socket.
    return FolderBells(
        tmp_path / "bells" if request.param == "short" else tmp_path / ("long" * MAX_ADDRESS_LENGTH)[:200]
    )


def test_the_conductor_hears_that_it_is_called_and_many_calls_are_one(bells: FolderBells) -> None:
    heard = []
    with bells.hung_up(CONDUCTOR) as bell:
        for _ in range(1000):
            bells.call()
        bell.wait()
        waiting = threading.Thread(target=lambda: heard.append(bell.wait()), daemon=True)
        waiting.start()
        waiting.join(0.1)
        assert heard == []
        bells.call()
        waiting.join(5)
        assert heard == [None]


def test_all_who_serve_hear_of_every_worker(bells: FolderBells) -> None:
    workers = [f"{index:032}" for index in range(3 * BATCH + 1)]
    with bells.hung_up(own_name()) as one, bells.hung_up(own_name()) as other:
        bells.wake(workers)
        assert one.rung_for() == other.rung_for() == workers
        assert one.rung_for() == []


def test_nobody_need_listen(bells: FolderBells) -> None:
    bells.call()
    bells.wake(["w"])
    bells.wake([])


KILLED = """
import os, signal, sys
from pathlib import Path
from tessera.coordinator.notify.wakeup import FolderBells, own_name
bell = FolderBells(Path(sys.argv[1])).hung_up(own_name())
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_bell_of_a_killed_process_is_taken_down(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert len(list(tmp_path.iterdir())) == 1
    FolderBells(tmp_path).wake(["w"])
    assert list(tmp_path.iterdir()) == []


def test_a_bell_that_was_left_behind_can_be_hung_up_again(tmp_path: Path) -> None:
    (tmp_path / CONDUCTOR).touch()
    with FolderBells(tmp_path).hung_up(CONDUCTOR) as bell:
        FolderBells(tmp_path).call()
        bell.wait()
