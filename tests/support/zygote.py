"""Programs that start without their imports: a process that has done these forks itself for each of them.

To import what a coordinator needs takes a second and more, what a worker needs five. What is started so is a process
like any other, of its own session and the caller's child, to be killed and waited for.
"""

from __future__ import annotations

import array
import atexit
import ctypes
import importlib
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace

_WORKERS = (
    "tessera.worker.cli.worker",
    "tessera.worker.agent",
    "tessera.worker.data.kinds.digits",
    "transformers.modeling_utils",
)
_COORDINATORS = (
    "tessera.coordinator.cli",
    "tessera.coordinator.app",
    "tessera.coordinator.server.http_limits",
)
NEEDS = {
    "tessera.coordinator": _COORDINATORS,
    "tessera.shared.cli": _WORKERS,
    "tessera.worker.model.sandbox": _WORKERS,
    "tests.support.demo": _WORKERS,
    "tests.support.leaving": _WORKERS,
    "tests.soak.coordinator": _COORDINATORS,
    "tests.soak.worker": _COORDINATORS,
}
"""What is imported before, by the module that is run."""

_TURN = threading.Lock()
_ADOPTS = 36
"""PR_SET_CHILD_SUBREAPER: whether what loses its parent becomes a child of this process."""


class Forked(subprocess.Popen[bytes]):
    """A process that somebody else has started and left to this one."""

    def __init__(self, pid: int) -> None:
        self.args: Sequence[str] = ()
        self.pid = pid
        self.returncode = None
        self.stdin = self.stdout = self.stderr = None
        self.text_mode = False
        self._child_created = True
        self._communication_started = False
        self._input = None
        self._waitpid_lock = threading.Lock()


def start(
    module: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    *,
    reads: int,
    writes: int,
    errors: int,
    folder: str | None = None,
) -> Forked:
    """`python -m module`, with these descriptors as its standard streams."""
    wanted = {
        "module": module,
        "arguments": arguments,
        "environment": dict(environment),
        "folder": folder or str(Path.cwd()),
    }
    message = json.dumps(wanted).encode()
    adopts = ctypes.CDLL(None).prctl
    with _TURN:
        line = _zygote(NEEDS[module])
        adopts(_ADOPTS, 1, 0, 0, 0)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [reads, writes, errors]))]
        line.sendmsg([len(message).to_bytes(8, "big")], rights)
        line.sendall(message)
        pid = int.from_bytes(_read(line, 8), "big")
        adopts(_ADOPTS, 0, 0, 0, 0)
    return Forked(pid)


def piped(command: Sequence[str], *, env: Mapping[str, str], **_: object) -> Forked:
    """In place of `subprocess.Popen` of `python -m module`, with pipes for its standard input and output."""
    (theirs_in, ours_in), (ours_out, theirs_out) = os.pipe(), os.pipe()
    with open(os.devnull, "wb") as nothing:  # noqa: PTH123 (a device)
        forked = start(command[2], command[3:], env, reads=theirs_in, writes=theirs_out, errors=nothing.fileno())
    os.close(theirs_in)
    os.close(theirs_out)
    forked.stdin, forked.stdout = os.fdopen(ours_in, "wb"), os.fdopen(ours_out, "rb")
    return forked


@cache
def _zygote(needs: Sequence[str]) -> socket.socket:
    here, there = socket.socketpair()
    command = [sys.executable, "-m", "tests.support.zygote", str(there.fileno()), *needs]
    # The first test that needs it may have gone to another folder.
    root = Path(__file__).parents[2]
    process = subprocess.Popen(command, pass_fds=[there.fileno()], start_new_session=True, cwd=root)
    there.close()

    def end() -> None:
        here.close()
        process.wait()

    atexit.register(end)
    return here


def _read(line: socket.socket, length: int) -> bytes:
    read = b""
    while len(read) < length:
        part = line.recv(length - len(read))
        if not part:
            raise EOFError
        read += part
    return read


def _serve(line: socket.socket) -> dict[str, object]:
    """Forks for each request; what is asked for, in the child that is to do it."""
    while True:
        head, descriptors, _, _ = socket.recv_fds(line, 8, 3)
        if not head:
            sys.exit()
        head += _read(line, 8 - len(head))
        wanted: dict[str, object] = json.loads(_read(line, int.from_bytes(head, "big")))
        told, telling = os.pipe()
        middle = os.fork()
        if middle == 0:
            if pid := os.fork():
                os.write(telling, pid.to_bytes(8, "big"))
                # Its child goes to whoever adopts.
                os._exit(0)
            os.setsid()
            for number, descriptor in enumerate(descriptors):
                os.dup2(descriptor, number)
                os.close(descriptor)
            os.close(told)
            os.close(telling)
            line.close()
            return wanted
        os.waitpid(middle, 0)
        line.sendall(os.read(told, 8))
        for descriptor in (told, telling, *descriptors):
            os.close(descriptor)


def _fork_conductor() -> list[str] | None:
    """Forks what `coordinator serve` starts as its conductor, which waits until it does so; the child's arguments, in
    the child. One that is started again later is a process of its own."""
    child_process = importlib.import_module("tessera.coordinator.conductor.child_process")
    (starts, start), (reads, writes) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        os.close(start)
        os.close(writes)
        if not os.read(starts, 1):
            os._exit(0)
        os.dup2(reads, 0)
        os.close(starts)
        os.close(reads)
        return list(child_process.COMMAND[3:])
    os.close(starts)
    os.close(reads)

    def first(*_: object, **__: object) -> Forked:
        child_process.subprocess = subprocess
        forked = Forked(pid)
        forked.stdin = os.fdopen(writes, "wb")
        with suppress(BrokenPipeError):  # somebody has killed it already
            os.write(start, b"s")
        os.close(start)
        return forked

    child_process.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": first})
    return None


def _seed() -> None:
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


if __name__ == "__main__":
    for name in sys.argv[2:]:
        importlib.import_module(name)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ^C is for those who were started
    given = _serve(socket.socket(fileno=int(sys.argv[1])))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(str(given["folder"]))
    os.environ.clear()
    os.environ.update(given["environment"])  # type: ignore[call-overload]
    arguments: list[str] = given["arguments"]  # type: ignore[assignment]
    if given["module"] == "tessera.coordinator" and arguments[:1] == ["serve"] and "--no-conduct" not in arguments:
        arguments = _fork_conductor() or arguments
    _seed()
    sys.argv = [str(given["module"]), *arguments]
    code: object = 0
    try:
        runpy.run_module(str(given["module"]), run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = ended.code
    if isinstance(code, str):
        print(code, file=sys.stderr)
    # As an interpreter ends, but for taking apart all that was imported, which takes a second and more.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if isinstance(code, str) else int(code or 0))  # type: ignore[call-overload]
