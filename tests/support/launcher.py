"""A `python` for tests of shell lines and of our programs: `python -m tessera.shared.cli` is forked (see `zygote`).

Each command that a person types is a process, and to import what it needs takes longer than what it does.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Self

from tests.support import zygote

MODULE = "tessera.shared.cli"

# Started without site packages, this takes ten milliseconds.
SHIM = f"""#!{sys.executable} -SE
import array, json, os, signal, socket, sys
arguments = sys.argv[1:]
if arguments[:2] != ["-m", {MODULE!r}]:
    os.execv({sys.executable!r}, [{sys.executable!r}, *arguments])
line = socket.socket(socket.AF_UNIX)
line.connect(ADDRESS)
told = json.dumps([arguments[2:], dict(os.environ), os.getcwd()]).encode()
streams = array.array("i", [0, 1, 2])
line.sendmsg([len(told).to_bytes(8, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
line.sendall(told)
pid = int.from_bytes(line.recv(8, socket.MSG_WAITALL), "big")
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: os.kill(pid, number))
code = int.from_bytes(line.recv(8, socket.MSG_WAITALL), "big", signed=True)
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


class Launcher:
    """Used with `with`. `python` is the program; `running` has what it started and has not ended."""

    def __init__(self, folder: Path) -> None:
        self.python = folder / "python"
        self.running: dict[int, zygote.Forked] = {}
        self._line = socket.socket(socket.AF_UNIX)
        self._line.bind(str(folder / "launcher"))
        self._line.listen()
        self.python.write_text(SHIM.replace("ADDRESS", repr(str(folder / "launcher"))))
        self.python.chmod(0o755)
        tessera = folder / "tessera"
        tessera.write_text(f'#!/bin/sh\nexec {shlex.quote(str(self.python))} -m {MODULE} "$@"\n')
        tessera.chmod(0o755)

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *fault: object) -> None:
        # Closing alone would leave the thread in `accept`.
        self._line.shutdown(socket.SHUT_RDWR)
        self._line.close()
        for process in list(self.running.values()):
            process.send_signal(signal.SIGKILL)

    def _accept(self) -> None:
        while True:
            try:
                caller, _ = self._line.accept()
            except OSError:
                return
            threading.Thread(target=self._run, args=[caller], daemon=True).start()

    def _run(self, caller: socket.socket) -> None:
        with caller:
            head, streams, _, _ = socket.recv_fds(caller, 8, 3, socket.MSG_WAITALL)
            told = caller.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL)
            arguments, environment, folder = json.loads(told)
            reads, writes, errors = streams
            process = zygote.start(
                MODULE, arguments, environment, reads=reads, writes=writes, errors=errors, folder=folder
            )
            for stream in streams:
                os.close(stream)
            self.running[process.pid] = process
            caller.sendall(process.pid.to_bytes(8, "big"))
            code = process.wait()
            del self.running[process.pid]
            caller.sendall(code.to_bytes(8, "big", signed=True))
