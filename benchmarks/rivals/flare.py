"""NVIDIA FLARE's side: its proof-of-concept mode, a server and clients as processes with mutual TLS, as it comes."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from benchmarks.measuring import await_true
from benchmarks.network import DIRECT, HOST, Network
from benchmarks.rivals.environments import python
from benchmarks.rivals.timed import watch, write_weights
from benchmarks.rounds.sides import Turn
from examples.processes import CALM
from tessera.shared.updates.model_folder import ModelFolder

APP = Path(__file__).parent / "flare_app"
STOP_SECONDS = 60.0
TOLD_SECONDS = 300.0
"""The driver is killed if it says nothing for so long."""
SERVER_PORT = 8002
"""Where a proof of concept always listens for its clients."""
PORT_SECONDS = 120.0


@dataclass
class Flare:
    folder: Path
    model: ModelFolder
    workers: int
    network: Network = DIRECT
    name: str = "flare"
    _turns: int = 0

    def __enter__(self) -> Self:
        interpreter = python("flare")
        # The server of an earlier federation may still be ending, and would answer in place of this one.
        await_true(_port_is_free, PORT_SECONDS, f"port {SERVER_PORT} is free for FLARE's server", 0.5)
        self.folder.mkdir(parents=True)
        self._workspace = self.folder / "poc"
        weights = write_weights(self.model, self.folder / "weights.npz")
        environment = {
            **os.environ,
            **CALM,
            "HOME": str(self.folder),
            "NVFLARE_POC_WORKSPACE": str(self._workspace),
            # Its services are started as `python3`.
            "PATH": f"{interpreter.parent}:{os.environ['PATH']}",
            "PYTHONPATH": "",
        }
        ports = [str(self.network.port(SERVER_PORT)) for _ in range(self.workers)]
        with (self.folder / "flare.log").open("w") as log:
            self._driver = subprocess.Popen(
                [interpreter, APP / "drive.py", weights, *ports],
                cwd=self.folder,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        try:
            self._told("ready")
            await_true(lambda: len(self._clients()) == self.workers and self._server(), 120, "FLARE runs", 0.5)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _told(self, wanted: str | None = None) -> str:
        limit = threading.Timer(TOLD_SECONDS, self._driver.kill)
        limit.start()
        line = self._driver.stdout.readline().strip() if self._driver.stdout else ""
        limit.cancel()
        if not line or (wanted and line != wanted):
            tail = (self.folder / "flare.log").read_text(encoding="utf-8")[-2000:]
            raise RuntimeError(f"FLARE said {line!r}: {tail}")
        return line

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, at: TracebackType | None
    ) -> None:
        if self._driver.stdin:
            self._driver.stdin.close()
        try:
            self._driver.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._driver.kill()
            self._driver.wait()
        # Its services are children of nobody, and some outlive being told to stop.
        for process in self._services():
            process.kill()

    def turn(self, rounds: int) -> Turn:
        self._turns += 1
        times = self.folder / f"times-{self._turns}"

        def start() -> None:
            if self._driver.stdin:
                self._driver.stdin.write(f"{rounds + 1} {times}\n")
                self._driver.stdin.flush()

        found = watch(times, rounds, self._server, self._clients, start, self.network, self._require_driver)
        self._told()
        self._told("done")
        return found

    def _require_driver(self) -> None:
        if self._driver.poll() is not None:
            self._told()

    def _services(self) -> list[psutil.Process]:
        """All that runs in the workspace, told by the command lines."""
        return [
            process
            for process in psutil.process_iter(["cmdline"])
            if process.pid != self._driver.pid and str(self._workspace) in " ".join(process.info["cmdline"] or ())
        ]

    def _programs(self, module: str) -> list[int]:
        return [process.pid for process in self._services() if module in process.info["cmdline"]]

    def _server(self) -> list[int]:
        return self._programs("nvflare.private.fed.app.server.server_train")

    def _clients(self) -> list[int]:
        return self._programs("nvflare.private.fed.app.client.client_train")


def _port_is_free() -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST, SERVER_PORT)) != 0
