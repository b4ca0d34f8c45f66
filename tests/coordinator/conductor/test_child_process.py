"""The conductor's child process: started again, also by a machine that could not start it at first."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tessera.coordinator.conductor import child_process
from tessera.coordinator.conductor.child_process import ChildConductor
from tests.support.coordinator import until


def test_a_conductor_that_cannot_be_started_for_a_while_is_started_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits_for_its_parent = (sys.executable, "-c", "import sys; sys.stdin.read()")
    monkeypatch.setattr(child_process, "COMMAND", waits_for_its_parent)
    monkeypatch.setattr(child_process, "MAX_PAUSE_SECONDS", 0.05)
    child = ChildConductor(tmp_path / "heartbeat", 1.0)
    with capture_logs() as logs:
        child.start()
        first = child._child
        assert first
        # As without memory for a fork, this raises OSError.
        monkeypatch.setattr(child_process, "COMMAND", ("/nonexistent",))
        first.kill()
        until(lambda: "conductor.not_started" in {line["event"] for line in logs})
        monkeypatch.setattr(child_process, "COMMAND", waits_for_its_parent)
        second = until(lambda: child._child if child._child is not first else None)
    assert second.poll() is None
    child.stop()
    assert second.poll() is not None
    second.stdin.close()


def test_a_conductor_that_dies_at_each_start_does_not_count_as_one_that_conducts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "COMMAND", (sys.executable, "-c", "import sys; sys.stdin.read()"))
    monkeypatch.setattr(child_process, "MAX_PAUSE_SECONDS", 0.05)
    child = ChildConductor(tmp_path / "heartbeat", 1.0)
    child.start()
    assert child.is_alive()
    first = child._child
    assert first
    os.utime(tmp_path / "heartbeat", (0, 0))
    first.kill()
    second = until(lambda: child._child if child._child is not first else None)
    assert not child.is_alive()
    child.stop()
    second.stdin.close()
