"""Coordinators and workers as real processes, to be killed."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

import httpx
import psutil

from tessera.shared.api.admin import TokenSpec
from tessera.shared.client.client import Client
from tests.support import zygote
from tests.support.coordinator import ROOMY, until
from tests.support.databases import url_in

_PORTS = itertools.count(37 * os.getpid())


def free_port() -> int:
    """Return a free port below the range from which the system picks: nothing else takes it before it is used."""
    while True:
        port = 20_000 + next(_PORTS) % 12_000
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


class Process:
    """A program in a process group of its own, with its output in a file. It is run from `tree`, if there is one."""

    def __init__(
        self,
        folder: Path,
        name: str,
        arguments: list[str],
        environment: Mapping[str, str] | None = None,
        tree: Path | None = None,
    ):
        self.log = folder / f"{name}.log"
        module, *rest = arguments
        told = {**os.environ, **(environment or {})}
        if tree:
            told["PYTHONPATH"] = str(tree)
        with self.log.open("ab") as log, open(os.devnull) as nothing:  # noqa: PTH123 (a device)
            out = log.fileno()
            self.popen: subprocess.Popen[bytes] = (
                zygote.start(module, rest, told, reads=nothing.fileno(), writes=out, errors=out)
                if module in zygote.NEEDS and not tree
                else subprocess.Popen(
                    [sys.executable, "-m", *arguments],
                    env=told,
                    cwd=tree,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    @property
    def pid(self) -> int:
        return self.popen.pid

    def kill(self) -> None:
        """kill -9, and waits until it is gone."""
        self.popen.kill()
        self.popen.wait()

    def terminate(self) -> int:
        """SIGTERM; the exit code."""
        self.popen.send_signal(signal.SIGTERM)
        return self.popen.wait(timeout=30)

    def said(self, text: str) -> bool:
        return text in self.log.read_text(errors="replace")


def peak_bytes(pid: int) -> int:
    """The most memory that a process has held at any time (VmHWM)."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) * 1024


def memory_of(pid: int) -> Iterator[bytes]:
    """Yield the contents of each writable mapping of a process, as its operator could read them."""
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            place, rights, *_ = line.split()
            start, end = (int(bound, 16) for bound in place.split("-"))
            if rights.startswith("rw"):
                # A mapping may be gone since the list was read.
                with suppress(OSError):
                    memory.seek(start)
                    yield memory.read(end - start)


class CoordinatorProcess:
    """`coordinator serve` on one port and folder, that can be killed and started again."""

    def __init__(self, folder: Path, *options: str, module: str = "tessera.coordinator", **settings: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._options = options
        self._module = module
        self.folder = folder
        self.tree: Path | None = None
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        quick = {"tick_seconds": 0.1, "cohort_wait_seconds": 60.0, **ROOMY}
        self.environment = {
            f"TESSERA_{key.upper()}": str(value)
            for key, value in {
                "database_url": url_in(folder),
                "blob_url": folder / "blobs",
                "staging_dir": folder / "staging",
                "port": self.port,
                "admin_token_file": folder / "admin.token",
                **quick,
                **settings,
            }.items()
        }
        self._clients: list[Client] = []

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *fault: object) -> None:
        for client in self._clients:
            client.close()
        if self.process.popen.poll() is None:
            self.process.kill()

    def start(self) -> None:
        """Returns once it is ready."""
        self.launch()
        until(self._ready)

    def launch(self) -> None:
        self.process = Process(
            self.folder,
            "coordinator",
            [self._module, "serve", "--migrate", *self._options],
            self.environment,
            self.tree,
        )

    def conductor(self) -> psutil.Process:
        """The child that moves the rounds, once it does."""
        found: list[psutil.Process] = until(lambda: psutil.Process(self.process.pid).children())
        return found[0]

    def pids(self) -> list[int]:
        """The processes of the coordinator: the one that serves, and its children."""
        own = psutil.Process(self.process.pid)
        return [own.pid, *(child.pid for child in own.children(recursive=True))]

    def beside(self, name: str, *arguments: str) -> Process:
        """Another process with the same settings, and of the same tree."""
        return Process(self.folder, name, list(arguments), self.environment, self.tree)

    def _ready(self) -> bool:
        assert self.process.popen.poll() is None, self.process.log.read_text()
        try:
            return httpx.get(f"{self.url}/healthz/ready", verify=False).is_success  # noqa: S501 (no TLS)
        except httpx.TransportError:
            return False

    def kill(self) -> None:
        self.process.kill()

    def admin(self) -> Client:
        return self.client((self.folder / "admin.token").read_text().strip())

    def site(self, name: str) -> Client:
        """A client of a new site."""
        return self.client(self.site_token(name))

    def site_token(self, name: str) -> str:
        admin = self.admin()
        admin.create_site(name)
        return admin.issue_token(TokenSpec(name=name, role="site", site=name)).secret

    def client(self, token: str) -> Client:
        client = Client(self.url, token, patience_seconds=30)
        self._clients.append(client)
        return client


def audit_key(site: str) -> bytes:
    """The audit key of a test's site, by which a simulation repeats what it trains."""
    return sha256(site.encode()).digest()


def worker_process(
    coordinator: CoordinatorProcess, site: str, datasets: str, tree: Path | None = None, **settings: Any
) -> Process:
    """`tessera worker run` for a new site; `datasets` is TOML. Starting it again is `restart`."""
    folder = coordinator.folder / site
    folder.mkdir(exist_ok=True)
    options = {
        "url": coordinator.url,
        "token": coordinator.site_token(site),
        "name": "w",
        "state_dir": str(folder / "state"),
        "threads": 1,
        "poll_seconds": 5,
        # Its training seeds follow from it.
        "audit_key": audit_key(site).hex(),
        "duration_quantum_seconds": 0.01,
        **settings,
    }
    # JSON's strings, numbers and lists are TOML's.
    lines = [f"{key} = {json.dumps(value)}" for key, value in options.items()]
    (folder / "worker.toml").write_text("\n".join([*lines, datasets]))
    return start_worker(folder, tree)


def start_worker(folder: Path, tree: Path | None = None) -> Process:
    """The worker whose settings lie in `folder`, once more."""
    arguments = ["tessera.shared.cli", "worker", "run", "--config", str(folder / "worker.toml")]
    return Process(folder, "worker", arguments, tree=tree)
