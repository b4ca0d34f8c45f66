"""What `make` installs, and when: as `make --dry-run` tells it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.paths import ROOT

SOURCES, STAMPS = ("pyproject.toml", "constraints.txt"), ("installed", "installed-demo")


@pytest.mark.parametrize(
    ("target", "there", "installs"),
    [
        ("demo", (), ["demo"]),
        ("demo-secure", (), ["demo"]),
        ("demo-pairs", (), ["demo"]),
        ("demo-llm", (), ["demo"]),
        ("test", (), ["dev"]),
        ("demo", STAMPS, []),
        ("test", STAMPS, []),
        ("demo", ("installed-demo",), []),
        ("test", ("installed-demo",), ["dev"]),
    ],
)
def test_a_demo_installs_what_it_needs_and_everything_else_the_rest(
    tmp_path: Path, target: str, there: tuple[str, ...], installs: list[str]
) -> None:
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text())
    (tmp_path / ".venv").mkdir()
    for at, name in enumerate((*SOURCES, *(f".venv/{stamp}" for stamp in there))):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (at, at))
    told = subprocess.run(
        ["make", "--dry-run", target], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    assert [extra for extra in ("demo", "dev") if f"--editable '.[{extra}]'" in told] == installs


def test_after_everything_was_installed_a_demo_installs_nothing(tmp_path: Path) -> None:
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text())
    for name in SOURCES:
        (tmp_path / name).touch()
    # An interpreter that does nothing, where the environment's own will be, too.
    (tmp_path / ".venv/bin").mkdir(parents=True)
    for program in ("python", "tessera"):
        (tmp_path / ".venv/bin" / program).symlink_to("/bin/true")
    subprocess.run(["make", "install", "PYTHON=/bin/true"], cwd=tmp_path, capture_output=True, check=True)
    told = subprocess.run(["make", "demo"], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert "pip" not in told
    assert "tessera demo" in told
