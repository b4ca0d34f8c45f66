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

from common.processes import CALM, HOST, await_true
from rivals.environments import python
from rivals.timed import Given, Turn, watch

APP = Path(__file__).parent / "flare_app"
STOP_SECONDS = 60.0
TOLD_SECONDS = 300.0
"""The driver is killed if it says nothing for so long."""
SERVER_PORT = 8002
"""Where a proof of concept always listens for its clients."""
PORT_SECONDS = 120.0


@dataclass
class Flare:
    given: Given
    _turns: int = 0

    def __enter__(self) -> Self:
        interpreter = python("flare")
        # The server of an earlier federation may still be ending, and would answer in place of this one.
        await_true(_port_is_free, PORT_SECONDS, f"port {SERVER_PORT} is free for FLARE's server", 0.5)
        self._folder = self.given.folder
        self._workspace = self._folder / "poc"
        weights = self.given.weights()
        environment = {
            **os.environ,
            **CALM,
            "HOME": str(self._folder),
            "NVFLARE_POC_WORKSPACE": str(self._workspace),
            # Its services are started as `python3`.
            "PATH": f"{interpreter.parent}:{os.environ['PATH']}",
            "PYTHONPATH": "",
        }
        with (self._folder / "flare.log").open("w") as log:
            self._driver = subprocess.Popen(
                [interpreter, APP / "drive.py", weights, str(self.given.workers)],
                cwd=self._folder,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        try:
            self._told("ready")
            await_true(lambda: len(self._clients()) == self.given.workers and self._server(), 120, "FLARE runs", 0.5)
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
            tail = (self._folder / "flare.log").read_text(encoding="utf-8")[-2000:]
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
        times = self._folder / f"times-{self._turns}"

        def start() -> None:
            if self._driver.stdin:
                self._driver.stdin.write(f"{rounds + 1} {times}\n")
                self._driver.stdin.flush()

        found = watch(times, rounds, self._server, self._clients, start, self._require_driver)
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
