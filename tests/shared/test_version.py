"""The command that a message gives for a missing extra, in each kind of installation."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tessera.shared.version import compared
from tests.support.cli import environment
from tests.support.paths import ROOT


def lines_of(folder: Path, *, code: str = "i('dicom'), i('dicom', elsewhere=True), i()") -> str:
    """What a process says that imports Tessera by its path, and finds no installation but the one in `folder`."""
    source = folder / "source"
    if not source.exists():
        # Not the checkout itself, where a build may have left a description.
        source.mkdir()
        (source / "tessera").symlink_to(ROOT / "tessera")
    done = subprocess.run(
        [
            sys.executable,
            "-S",
            "-c",
            f"from tessera.shared.version import install_line as i; print(*({code}), sep='\\n')",
        ],
        cwd=folder,
        env=environment(PYTHONPATH=f"{source}:{folder}", PATH=""),
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


def install(folder: Path, origin: object = None) -> None:
    """Write down an installation as pip does; `origin` is where it says that the distribution came from."""
    info = folder / "tessera_fl-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tessera-fl\nVersion: 0.1.0\n")
    if origin:
        (info / "direct_url.json").write_text(json.dumps(origin))


@pytest.mark.parametrize(
    "origin", [None, {"url": "file:///gone/tessera_fl-0.1.0-py3-none-any.whl", "archive_info": {}}]
)
def test_no_wheel_is_told_of_a_checkout_or_of_the_other_project(tmp_path: Path, origin: object) -> None:
    install(tmp_path, origin)
    assert lines_of(tmp_path).splitlines() == [
        f"{sys.executable} -m pip install 'tessera-fl[dicom]'",
        "pip install 'tessera-fl[dicom]'",
        f"{sys.executable} -m pip install tessera-fl",
    ]


def test_an_editable_installation_is_not_told_to_take_the_extra_from_an_index(tmp_path: Path) -> None:
    checkout = tmp_path / "a checkout"
    checkout.mkdir()
    (checkout / "pyproject.toml").touch()
    install(tmp_path, {"url": checkout.as_uri(), "dir_info": {"editable": True}})
    pip = f"{sys.executable} -m pip install"
    assert lines_of(tmp_path).splitlines()[0] == f"{pip} -e '{checkout}[dicom]'"
    (checkout / "constraints.txt").touch()
    # What a build leaves in a checkout, from which a command may be started.
    (tmp_path / "source/tessera_fl.egg-info").mkdir()
    (tmp_path / "source/tessera_fl.egg-info/PKG-INFO").write_text("Name: tessera-fl\nVersion: 0.1.0\n")
    assert lines_of(tmp_path).splitlines()[0] == f"{pip} -c '{checkout}/constraints.txt' -e '{checkout}[dicom]'"


def test_a_copy_of_a_checkout_keeps_to_its_constraints(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "constraints.txt").touch()
    install(tmp_path, {"url": tmp_path.as_uri(), "dir_info": {}})
    expected = f"{sys.executable} -m pip install -c {tmp_path}/constraints.txt 'tessera-fl[dicom]'"
    assert lines_of(tmp_path).splitlines()[0] == expected


def test_a_checkout_that_moved_is_not_named(tmp_path: Path) -> None:
    install(tmp_path, {"url": (tmp_path / "gone").as_uri(), "dir_info": {}})
    assert lines_of(tmp_path).splitlines()[0] == f"{sys.executable} -m pip install 'tessera-fl[dicom]'"


def test_source_on_the_path_alone_is_told_to_be_installed(tmp_path: Path) -> None:
    said = lines_of(tmp_path)
    assert f"tessera-fl is not installed in this environment: pip install -e {ROOT}" in said
    assert said.splitlines()[-1].startswith(f"ImportError: Tessera is imported from {ROOT}")


@pytest.mark.parametrize(
    ("version", "difference"),
    [
        ("0.2.0", ""),
        ("0.1.9", "older"),
        ("0.2.1.dev4", "newer"),
        ("0.10.0", "newer"),
        ("0.2.0+site", "other build"),
        ("", "not stated"),
    ],
)
def test_versions_are_compared_by_their_numbers(version: str, difference: str) -> None:
    assert compared(version, "0.2.0") == difference
