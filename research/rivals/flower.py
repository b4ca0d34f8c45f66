"""Flower's side: its deployment engine, a SuperLink and a SuperNode for each client."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from common.processes import HOST, Processes, await_true, free_port
from rivals.environments import python
from rivals.timed import Given, Turn, watch

APP = Path(__file__).parent / "flower_app"
COMMAND_SECONDS = 120.0
"""The most that submitting a run may take."""


@dataclass
class Flower:
    given: Given
    _turns: int = 0
    _nodes: list[str] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._programs = python("flower").parent
        folder = self.given.folder
        self._app = Path(shutil.copytree(APP, folder / "app"))
        self._weights = self.given.weights()
        self._processes = Processes(folder)
        port = free_port()
        home = folder / "home"
        home.mkdir()
        # A lone process asks nobody whether it may, and tells nobody that it did.
        self._environment = {
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "PATH": f"{self._programs}:{os.environ['PATH']}",
            "PYTHONPATH": "",
        }
        served, trusted, connection = ["--insecure"], ["--insecure"], "insecure = true"
        if self.given.ca:
            served = ["--ssl-ca-certfile", str(self.given.ca), "--ssl-certfile", str(self.given.server)]
            served += ["--ssl-keyfile", str(self.given.key)]
            trusted = ["--root-certificates", str(self.given.ca)]
            connection = f'root-certificates = "{self.given.ca}"'
        lines = ["[superlink]", 'default = "here"', "[superlink.here]", f'address = "{HOST}:{port}"', connection, ""]
        (home / "config.toml").write_text("\n".join(lines), encoding="utf-8")
        try:
            command = [str(self._programs / "flower-superlink"), *served, "--host", HOST]
            command += ["--port", str(port), "--disable-runtime-dependency-installation"]
            self._processes.start("superlink", command, self._environment)
            await_true(lambda: self._listens(port), 60, "the SuperLink listens", 0.2)
            for index in range(self.given.workers):
                name = f"supernode-{index}"
                command = [str(self._programs / "flower-supernode"), *trusted]
                command += ["--superlink", f"{HOST}:{port}", "--port", str(free_port())]
                self._processes.start(name, command, self._environment)
                self._nodes.append(name)
        except BaseException:
            self._processes.stop()
            raise
        return self

    def _listens(self, port: int) -> bool:
        self._processes.check()
        with suppress(OSError), socket.create_connection((HOST, port), timeout=5):
            return True
        return False

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, at: TracebackType | None
    ) -> None:
        self._processes.stop()

    def turn(self, rounds: int) -> Turn:
        self._turns += 1
        times = self.given.folder / f"times-{self._turns}"
        settings = {"rounds": rounds + 1, "workers": self.given.workers}
        paths = {"weights": str(self._weights), "times": str(times)}
        config = " ".join([*(f"{k}={v}" for k, v in settings.items()), *(f'{k}="{v}"' for k, v in paths.items())])

        def start() -> None:
            subprocess.run(
                [self._programs / "flwr", "run", self._app, "here", "--run-config", config],
                env={**os.environ, **self._environment},
                check=True,
                capture_output=True,
                timeout=COMMAND_SECONDS,
            )

        return watch(times, rounds, self._server, self._clients, start)

    def _server(self) -> list[int]:
        self._processes.check()
        return [self._processes.pid("superlink")]

    def _clients(self) -> list[int]:
        return [self._processes.pid(name) for name in self._nodes]
