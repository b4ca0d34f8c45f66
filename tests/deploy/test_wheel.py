"""The wheel of `make wheel`, installed into an empty environment, with every file that it needs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch

from tests.support.cli import environment
from tests.support.paths import ROOT

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

SIMULATION = """
name = "trial"
model = "model"
rounds = 2
method = { name = "fedavg" }
evaluation = { sites = true }
[simulation]
sites = 2
[simulation.data]
kind = "digits"
held_out = 0.2
part = { scheme = "iid" }
"""


def said(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        command, cwd=cwd, env=environment(PYTHONPATH=""), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    said(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ".", cwd=ROOT)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Runs a program of an environment with the wheel, in an empty folder."""
    folder = tmp_path_factory.mktemp("environment")
    said(sys.executable, "-m", "venv", "--without-pip", folder / "env", cwd=folder)
    python = folder / "env/bin/python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", "--no-deps")
    said(*pip, wheel, cwd=folder)
    # Its dependencies are those of this process; what is installed there in editable form is not found by this.
    own = Path(said(python, "-c", "import site; print(site.getsitepackages()[0])", cwd=folder).strip())
    (own / "dependencies.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")

    def run(program: str, *arguments: str) -> str:
        return said(folder / "env/bin" / program, *arguments, cwd=folder)

    (folder / "trial.toml").write_text(SIMULATION)
    return run


def test_the_wheel_installs_one_name(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        names = {name.partition("/")[0] for name in archive.namelist()}
    assert {name for name in names if not name.endswith(".dist-info")} == {"tessera"}


def test_an_environment_with_the_wheel_alone_simulates_a_federation(installed: Callable[..., str]) -> None:
    place = installed("python", "-c", "import tessera; print(tessera.__file__, tessera.connect.__module__)")
    assert "/env/lib/" in place
    assert "tessera.session" in place
    vit = str(ROOT / "examples/digits/vit.json")
    installed("tessera", "model", "init", "model", "--config", vit, "--head", "image-classification", "--random")
    result = installed("tessera", "simulate", "trial.toml", "--out", "out")
    assert "round 2 train: 2 of 2 updates" in result, result


def test_the_wheel_has_every_file_that_is_no_code(wheel: Path) -> None:
    files = {
        path.relative_to(ROOT).as_posix()
        for side in ("coordinator", "migrations", "shared", "worker")
        for path in (ROOT / side).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    } | {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")}
    with ZipFile(wheel) as archive:
        assert files - {name.removeprefix("tessera/") for name in archive.namelist()} == set()
