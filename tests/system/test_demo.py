"""The demo, shortened: it ends by itself with a model that transformers loads, and leaves no process behind."""

from __future__ import annotations

import os
import signal
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tessera.examples import staging
from tessera.shared.updates.model_folder import ModelFolder
from tests.support import zygote
from tests.support.cli import environment
from tests.support.coordinator import until
from tests.support.launcher import Launcher
from tests.support.zygote import Forked

SETTINGS = ("rounds=3", "method.settings.warmup_rounds=1", "training.epochs=1", "training.batch_size=256")
SHORT = [word for setting in SETTINGS for word in ("--set", setting)]


@contextmanager
def demo(out: Path, *arguments: str, python: str = sys.executable) -> Iterator[tuple[Forked, Path]]:
    """The demo, and what it says. `python` is what it starts its own processes with."""
    log = out.with_suffix(".log")
    with log.open("wb") as said, open(os.devnull) as nothing:  # noqa: PTH123 (a device)
        yield (
            zygote.start(
                "tests.support.demo",
                [python, "--out", str(out), *arguments],
                environment(),
                reads=nothing.fileno(),
                writes=said.fileno(),
                errors=said.fileno(),
            ),
            log,
        )


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
    with Launcher(tmp_path) as launcher, demo(out, *SHORT, python=str(launcher.python)) as (process, log):
        assert process.wait(timeout=500) == 0, log.read_text()
        assert launcher.running == {}
    assert "Stage two moved" in log.read_text()
    assert ModelFolder.open(out / "global-model").model == ModelFolder.open(out / "model").model
    assert (out / "rounds.png").read_bytes().startswith(b"\x89PNG")
    assert left_of(out) == []


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_stops_every_process(tmp_path: Path, number: signal.Signals) -> None:
    out = tmp_path / "demo"
    with demo(out, *SHORT) as (process, log):
        until(lambda: len(left_of(out)) > 3, 60)
        process.send_signal(number)
        code = process.wait(timeout=40)
    assert (code, "Interrupted" in log.read_text()) == (130, True), log.read_text()
    assert left_of(out) == []


@pytest.mark.long
def test_a_worker_that_dies_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    named = str(out / "cedar-institute" / "worker.toml")
    with demo(out) as (process, log):
        worker = until(lambda: next((p for p in left_of(out) if named in _told(p)), None), 60)
        until(lambda: "task-done" in (out / "cedar-institute.log").read_text(), 60)
        worker.kill()
        code = process.wait(timeout=40)
    told = log.read_text()
    assert code == 1, told
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
