"""`tessera --version --verbose` names what a report of a fault needs."""

from __future__ import annotations

import platform
from importlib.metadata import version

import pytest

from tessera.coordinator.db import engine
from tessera.shared.cli import versions
from tessera.shared.schema import PROTOCOL
from tests.support.cli import tessera


@pytest.mark.parametrize("options", [("--version", "--verbose"), ("--verbose", "--version")])
def test_every_version_that_a_report_needs_is_named(options: tuple[str, str]) -> None:
    said = tessera(*options).stdout
    assert said.splitlines()[0] == tessera("--version").stdout.strip()
    assert platform.python_version() in said
    assert f"worker protocol {PROTOCOL}, database schema {engine._revisions()[1]}" in said
    of_worker = said.partition("\nworker\n")[2].partition("\n\n")[0]
    assert f"  torch {version('torch')}" in of_worker.splitlines()
    assert "pytest" not in said


def test_an_extra_that_is_not_whole_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    found = versions.version
    monkeypatch.setattr(
        versions, "requires", lambda _: ["httpx>=1", 'peft; extra == "lora"', 'no-such; extra == "lora"']
    )
    assert list(versions.lines())[3:] == [
        "\nalways",
        f"  httpx {found('httpx')}",
        "\nlora (not installed: lacks no-such)",
        f"  peft {found('peft')}",
    ]


def test_verbose_alone_says_what_it_is_for() -> None:
    done = tessera("--verbose", "run", "list")
    assert (done.returncode, "tessera --version --verbose" in done.stderr) == (2, True)
