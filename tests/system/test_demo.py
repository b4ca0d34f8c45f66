"""The demo, shortened: it ends by itself with a model that transformers loads, and leaves no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import psutil
import pytest

from examples import staging
from tessera.shared.updates.model_folder import ModelFolder
from tests.support.cli import environment
from tests.support.coordinator import until
from tests.support.launcher import Launcher

SHORT = ("--set", "rounds=3", "--set", "method.settings.warmup_rounds=1")


BY = """import runpy, sys
sys.executable = {!r}
runpy.run_module("examples.digits", run_name="__main__", alter_sys=True)"""


def start(out: Path, *arguments: str, python: str = sys.executable) -> subprocess.Popen[str]:
    """`python` is what the demo starts its own processes with."""
    command = [sys.executable, "-c", BY.format(python), "--out", str(out), *arguments]
    return subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def left_of(out: Path) -> list[psutil.Process]:
    """The processes that name the demo's folder, or were told of it."""
    return [
        process
        for process in psutil.process_iter()
        if process.pid != os.getpid() and any(str(out) in part for part in _told(process))
    ]


def _told(process: psutil.Process) -> list[str]:
    try:
        return [*process.cmdline(), *process.environ().values()]
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return []


def test_the_demo_ends_with_a_model_that_measures_the_same_again(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    with Launcher(tmp_path) as launcher:
        demo = start(out, *SHORT, python=str(launcher.python))
        told, _ = demo.communicate(timeout=500)
        assert demo.returncode == 0, told
        assert launcher.running == {}
    assert "Stage two moved" in told
    assert ModelFolder.open(out / "global-model").model == ModelFolder.open(out / "model").model
    assert (out / "rounds.png").read_bytes().startswith(b"\x89PNG")
    assert left_of(out) == []


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_stops_every_process(tmp_path: Path, number: signal.Signals) -> None:
    out = tmp_path / "demo"
    demo = start(out, *SHORT)
    until(lambda: len(left_of(out)) > 3, 60)
    demo.send_signal(number)
    told, _ = demo.communicate(timeout=40)
    assert (demo.returncode, "Interrupted" in told) == (130, True), told
    assert left_of(out) == []


@pytest.mark.long
def test_a_worker_that_dies_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    demo = start(out)
    worker = until(
        lambda: next((p for p in left_of(out) if str(out / "cedar-institute" / "worker.toml") in p.cmdline()), None),
        60,
    )
    until(lambda: "task-done" in (out / "cedar-institute.log").read_text(), 60)
    worker.kill()
    told, _ = demo.communicate(timeout=40)
    assert demo.returncode == 1, told
    assert "cedar-institute ended with exit code -9" in told
    assert '"event": "task-done"' in told


def test_a_folder_that_no_demo_made_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").touch()
    monkeypatch.setattr(staging, "end_by_interrupt", lambda: None)  # this process's signals are not its own
    code = staging.play(lambda *_: pytest.fail("it began"), Namespace(out=tmp_path))
    assert (code, (tmp_path / "mine").exists()) == (1, True)
    assert "no demo made it" in " ".join(capsys.readouterr().out.split())
