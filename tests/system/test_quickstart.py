"""The commands of docs/quickstart.md, as they stand there and in that order, with both machines on loopback."""

from __future__ import annotations

import os
import re
import shutil
import signal
import ssl
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tessera.shared.client.client import Client
from tests.support.cli import environment
from tests.support.coordinator import until
from tests.support.launcher import Launcher
from tests.support.paths import ROOT
from tests.support.processes import free_port
from tests.support.shell_blocks import blocks

PAGE = ROOT / "docs" / "quickstart.md"


class Machines:
    """Runs blocks, with a folder for each machine. `programs` has the command `tessera` of each."""

    def __init__(self, folder: Path, programs: Mapping[str, Path], **settings: str) -> None:
        self.port = free_port()
        self.folder = folder
        self.running: list[subprocess.Popen[bytes]] = []
        for name in "AB":
            (folder / name).mkdir()
        self._programs = programs
        own = {"HOME": str(folder), "XDG_STATE_HOME": str(folder / "state")}
        self.environment = environment(TESSERA_PORT=str(self.port), OMP_NUM_THREADS="1", **own, **settings)

    def begin(self, block: str, more: str = "") -> Path:
        """Starts a block on its machine; returns the file that has what it says."""
        machine = re.match(r"# machine ([AB])", block)
        assert machine, block
        place = self.folder / machine[1]
        log = place / f"{len(self.running)}.log"
        text = f"set -e\n{more}{block}".replace("localhost:8470", f"localhost:{self.port}")
        with log.open("wb") as out:
            self.running.append(
                subprocess.Popen(
                    ["bash", "-c", text],
                    cwd=place,
                    env={**self.environment, "PATH": f"{self._programs[machine[1]]}:{os.environ['PATH']}"},
                    stdout=out,
                    stderr=out,
                    start_new_session=True,
                )
            )
        return log

    def end(self, log: Path, seconds: float = 100) -> str:
        """Waits for the block that was begun last to end well; what it said."""
        code = self.running[-1].wait(timeout=seconds)
        said = log.read_text()
        assert code == 0, said
        return said


def _with_a_small_model(block: str) -> str:
    """Returns the block with a smaller model: that of the page takes long to train."""
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    for key, value in {**small, "patch_size": 4}.items():
        block, found = re.subn(f'"{key}": [0-9]+', f'"{key}": {value}', block)
        assert found == 1, key
    return block


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    (tmp_path / "bin").mkdir()
    with Launcher(tmp_path / "bin") as launcher:
        programs = dict.fromkeys("AB", launcher.python.parent)
        with ended(Machines(tmp_path, programs, PYTHONPATH=str(ROOT))) as made:
            yield made


@contextmanager
def ended(machines: Machines) -> Iterator[Machines]:
    """Ends at last what still runs."""
    try:
        yield machines
    finally:
        for process in reversed(machines.running):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(timeout=30)


@pytest.mark.timeout(300)
def test_the_page_makes_a_model(machines: Machines) -> None:
    follow(machines)


def follow(machines: Machines) -> None:
    """Follow the page to its end. The model is made where the worker is, which has torch."""
    certificate, serve, join, approve, data, work, run = (block.text for block in blocks(PAGE) if not block.reason)
    a, b = machines.folder / "A", machines.folder / "B"
    machines.end(machines.begin(certificate))
    machines.begin(serve)
    until(lambda: _ready(machines.port, a / "cert.pem"), 60)
    (b / "cert.pem").write_bytes((a / "cert.pem").read_bytes())

    begun_at = time.monotonic()
    joining = machines.begin(join)
    waits = machines.running[-1]
    code = until(lambda: re.search(r"\b[A-Z]{4}-[A-Z]{4}\b", joining.read_text()), 60)[0]
    machines.end(machines.begin(approve.replace("CODE", code)))
    assert waits.wait(timeout=60) == 0, joining.read_text()
    machines.end(machines.begin(data))
    machines.begin(work)
    exports = "\n".join(line for line in approve.splitlines() if line.startswith("export")) + "\n"
    until(lambda: _live(machines), 60)
    assert '"live": true' in machines.end(machines.begin("# machine A\ntessera admin workers --json\n", exports))
    print(f"\njoined and at work after {time.monotonic() - begun_at:.0f} s")

    model, start = re.split(r"(?=tessera run init)", _with_a_small_model(run))
    machines.end(machines.begin(model.replace("# machine A", "# machine B")), 200)
    shutil.copytree(b / "model", a / "model")
    said = machines.end(machines.begin(f"# machine A\n{start}", exports), 200)
    assert "first is completed" in said
    # Of version 2, at one site.
    assert re.search(r"\b2 +accuracy +1 +0\.[0-9]{3}\b", said), said
    assert {"config.json", "model.safetensors"} <= {file.name for file in (a / "trained").iterdir()}


def _ready(port: int, certificate: Path) -> bool:
    try:
        verify = ssl.create_default_context(cafile=str(certificate))
        return httpx.get(f"https://localhost:{port}/healthz/ready", verify=verify).is_success
    except httpx.TransportError:
        return False


def _live(machines: Machines) -> bool:
    """Whether the worker is there: a look from this process, since a command takes as long as the worker needs."""
    a = machines.folder / "A"
    verify = ssl.create_default_context(cafile=str(a / "cert.pem"))
    token = (a / "admin.token").read_text().strip()
    with Client(f"https://localhost:{machines.port}", token, verify=verify) as client:
        return any(worker.live for worker in client.workers())
