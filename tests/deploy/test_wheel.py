"""The wheel of `make wheel`, installed into an empty environment, with every file that it needs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch

from release import packages
from release.locks import parsed
from tests.support.cli import environment
from tests.support.paths import ROOT
from tests.system.test_quickstart import Machines, ended, follow

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
    said(sys.executable, "-m", "release.packages", "--out", folder, cwd=ROOT)
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


def test_both_files_are_equal_bit_for_bit_wherever_they_are_built(wheel: Path, tmp_path: Path) -> None:
    packages.copy_source(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/.git").symlink_to(ROOT / ".git")
    for file in (tmp_path / "elsewhere").rglob("*"):
        if file.is_file() and not file.is_symlink():
            file.chmod(0o700)
            os.utime(file, (1, 1))
    build = f"umask 077 && {sys.executable} -m release.packages --out {tmp_path / 'dist'}"
    said("env", "TZ=Asia/Tokyo", "sh", "-c", build, cwd=tmp_path / "elsewhere")
    digests = [
        {file.name: sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}
        for folder in (wheel.parent, tmp_path / "dist")
    ]
    assert digests[0] == digests[1]
    assert len(digests[0]) == 2


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


@pytest.fixture(scope="module")
def worker(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a new environment with a worker, from its lock alone."""
    made = empty(tmp_path_factory.mktemp("worker") / "env", Path(sys.executable))
    lock = (ROOT / "deploy/requirements-worker.lock").read_text()
    more = ["-r", ROOT / "deploy/requirements-cuda.lock"]
    if torch.__version__.endswith("+cpu"):
        # From where pip found it for this process, which may be a folder: an index would come first.
        (made / "torch.lock").write_text(
            next(text for name, text in parsed(lock).items() if name.startswith("torch="))
        )
        install(made, "--no-deps", "--index-url", "file:///none", "-r", made / "torch.lock")
        more = []
    install(made, "-r", ROOT / "deploy/requirements-worker.lock", *more)
    said(sys.executable, "-m", "pip", "--python", made / "python", "install", "--no-deps", wheel, cwd=made)
    return made


def empty(folder: Path, python: Path | str) -> Path:
    """A new environment; the folder of its programs."""
    said(python, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    return folder / "bin"


def install(programs: Path, *words: str | Path) -> None:
    pip = (sys.executable, "-m", "pip", "--python", programs / "python", "install", "--quiet", "--require-hashes")
    said(*pip, *words, cwd=programs)


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_the_quickstart_runs_from_the_wheel_and_the_locks(
    version: str, wheel: Path, worker: Path, tmp_path: Path
) -> None:
    # Where several are installed by pyenv, this names one.
    python = f"PYENV_VERSION={version}", f"python{version}"
    if subprocess.run(["env", *python, "-c", ""], capture_output=True, check=False).returncode:
        pytest.skip(f"there is no Python {version}")
    there = said("env", *python, "-c", "import sys; print(sys.executable)", cwd=tmp_path).strip()
    coordinator = empty(tmp_path / "env", there)
    install(coordinator, "-r", ROOT / "deploy/requirements-coordinator.lock")
    said(sys.executable, "-m", "pip", "--python", coordinator / "python", "install", "--no-deps", wheel, cwd=tmp_path)
    assert f"CPython {version}." in said(coordinator / "tessera", "--version", "--verbose", cwd=tmp_path)
    with ended(Machines(tmp_path, {"A": coordinator, "B": worker})) as machines:
        follow(machines)


@pytest.mark.timeout(1200)
def test_the_demo_runs_from_the_wheel(installed: Callable[..., str]) -> None:
    short = ("--set", "rounds=2", "--set", "method.settings.warmup_rounds=1", "--set", "training.epochs=1")
    result = installed("tessera", "demo", *short)
    assert "Exported; loaded again with transformers' from_pretrained" in result, result


def test_the_wheel_has_every_file_that_is_no_code(wheel: Path) -> None:
    files = {
        path.relative_to(ROOT).as_posix()
        for side in ("coordinator", "examples", "migrations", "shared", "worker")
        for path in (ROOT / side).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".ipynb"
    } | {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")}
    with ZipFile(wheel) as archive:
        assert files - {name.removeprefix("tessera/") for name in archive.namelist()} == set()
