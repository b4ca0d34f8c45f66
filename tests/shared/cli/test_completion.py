"""Shells complete commands and their options, though a command's code is loaded only when it is named."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.shared.cli.test_cli import without
from tests.support.cli import COMMAND, environment, forked, process


def offered(*words: str, command: Sequence[str] = ()) -> list[str]:
    """What bash is told for a line of these words, whose last is being written."""
    line = " ".join(("tessera", *words))
    asked = {"_TESSERA_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words))}
    answer = process(command=command, **asked) if command else forked(**asked)
    assert (answer.returncode, answer.stderr) == (0, "")
    return answer.stdout.split()


def test_the_commands_are_completed_and_none_is_loaded() -> None:
    alone = without("torch", "transformers", "fastapi", "sqlalchemy", "httpx")
    assert {"admin", "coordinator", "run", "worker"} <= set(offered("", command=alone))
    assert offered("coo") == ["coordinator"]


def test_what_follows_run_is_completed_without_torch_or_server() -> None:
    alone = without("torch", "transformers", "fastapi", "sqlalchemy")
    assert {"create", "watch", "export"} <= set(offered("run", "", command=alone))
    assert offered("admin", "join", "app", command=alone) == ["approve"]


def test_options_of_a_part_that_needs_torch_are_completed_too() -> None:
    assert offered("worker", "join", "--si") == ["--site"]


def test_a_part_that_is_not_installed_completes_to_nothing_and_says_nothing() -> None:
    assert offered("model", "", command=without("safetensors")) == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_gets_a_script_that_asks_tessera(shell: str) -> None:
    script = forked(_TESSERA_COMPLETE=f"source_{shell}")
    assert (script.returncode, f"complete_{shell}" in script.stdout) == (0, True), script.stderr


def test_completion_is_installed_for_the_shell_that_asks(tmp_path: Path) -> None:
    line = f"{' '.join(COMMAND)} --install-completion; exit $?"
    home = environment(HOME=str(tmp_path))
    done = subprocess.run(["bash", "-c", line], env=home, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    [script] = tmp_path.glob(".bash_completions/tessera.sh")
    assert "_TESSERA_COMPLETE=complete_bash" in script.read_text()


def test_only_tessera_itself_installs_completion() -> None:
    assert "--install-completion" in offered("--")
    assert "--install-completion" not in offered("run", "--")
