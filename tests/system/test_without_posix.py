"""What Windows lacks is hidden from a process: the client and the command line are imported and used all the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cli import environment
from tests.support.coordinator import LiveCoordinator
from tests.support.paths import ROOT

HIDING = """
import os, signal, socket, sys
MODULES = {"fcntl", "grp", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty"}
class Hiding:
    def find_spec(self, name, path=None, target=None):
        if name in MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hiding())
assert not MODULES & sys.modules.keys()
NAMES = {
    os: '''chown chroot fchmod fchown fork forkpty getegid geteuid getgid getgroups getloadavg getpgid getuid killpg
        lchown mkfifo nice openpty pathconf posix_fallocate posix_spawn pwrite sched_getaffinity sched_setaffinity
        setsid statvfs sysconf wait3 wait4 O_CLOEXEC O_DIRECTORY O_NOFOLLOW O_NONBLOCK''',
    signal: '''SIGALRM SIGCHLD SIGCONT SIGHUP SIGKILL SIGPIPE SIGPROF SIGQUIT SIGSTOP SIGTSTP SIGUSR1 SIGUSR2
        SIGWINCH SIGXCPU alarm pthread_kill pthread_sigmask setitimer sigwait''',
    socket: "AF_UNIX SO_REUSEPORT socketpair",
}
for module, names in NAMES.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
"""
"""Run when an interpreter starts. Only `os.uname` stays, by which numpy asks Linux for its version."""

COMMANDS = (
    "--help", "--version --verbose", "run list --help", "admin --help", "verify --help", "docs", "docs run-keys",
    "model init --help",
)  # fmt: skip
USE = """
import tessera
session = tessera.connect()
print(session.runs())
"""


@pytest.fixture
def windows(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "sitecustomize.py").write_text(HIDING)
    return environment(PYTHONPATH=f"{tmp_path}:{ROOT}")


def said(words: list[str], given: dict[str, str]) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, *words], env=given, capture_output=True, text=True, timeout=120, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_needs_nothing_that_windows_lacks(windows: dict[str, str], command: str) -> None:
    code, text = said(["-m", "tessera.shared.cli", *command.split()], windows)
    assert (code, "Traceback" in text) == (0, False), text


def test_client_and_command_line_reach_a_coordinator_without_posix(
    windows: dict[str, str], coordinator: LiveCoordinator
) -> None:
    windows |= {"TESSERA_URL": coordinator.url, "TESSERA_TOKEN": coordinator.token("viewer")}
    assert said(["-c", USE], windows) == (0, "[]\n")
    code, text = said(["-m", "tessera.shared.cli", "run", "list", "--json"], windows)
    assert (code, text.split()) == (0, ["[]"]), text


def test_what_needs_linux_or_macos_says_so(windows: dict[str, str]) -> None:
    code, text = said(["-m", "tessera.shared.cli", "coordinator", "doctor"], windows)
    assert code == 2
    assert "WSL" in text, text
