"""Programs that start without their imports: a process that has done these forks itself for each of them.

To import what a coordinator needs takes a second and more, what a worker needs five. What is started so is a process
like any other, of its own session and the caller's child, to be killed and waited for.
"""

from __future__ import annotations

import array
import atexit
import ctypes
import fcntl
import gc
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
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NoReturn

SANDBOX = "tessera.worker.model.sandbox"
LAUNCHER = "tessera.worker.executor.launcher"
SUPERVISOR = "tessera.worker.executor.supervisor"
TESTS = "execnet"
_COORDINATORS = (
    "tessera.coordinator.cli",
    "tessera.coordinator.app",
    "tessera.coordinator.server.http_limits",
)
# `tessera coordinator serve` is among the commands.
_WORKERS = (
    *_COORDINATORS,
    "tessera.worker.cli.worker",
    "tessera.worker.agent",
    "tessera.worker.doctor",
    "tessera.worker.data.kinds.digits",
    "tessera.worker.executor.rank",
    # peft takes two seconds of each process that has adapters.
    "tessera.worker.model.lora",
    "tessera.worker.privacy.per_example_grads",
    "transformers.modeling_utils",
)
NEEDS = {
    "tessera.coordinator": _COORDINATORS,
    "tessera.shared.cli": _WORKERS,
    SANDBOX: _WORKERS,
    TESTS: _WORKERS,
    SUPERVISOR: _WORKERS,
    "tests.support.code": _WORKERS,
    "tests.support.demo": _WORKERS,
    "tests.support.hostile": _WORKERS,
    "tests.soak.coordinator": _COORDINATORS,
    "tests.soak.worker": _COORDINATORS,
}
"""What is imported before, by the module that is run."""

_ZYGOTES: dict[Sequence[str], socket.socket] = {}
_TURN = threading.Lock()
_ADOPTS = 36
"""PR_SET_CHILD_SUBREAPER: whether what loses its parent becomes a child of this process."""
_DESCRIPTORS = 16
"""The most descriptors of one request."""
_FREE = 200
"""A descriptor above all that a zygote has open."""
_POPEN = subprocess.Popen
SUPERVISORS: list[Forked] = []
"""The supervisors that were started in place of those of this process's agents, and may have ended."""


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
    with open(os.devnull, "wb") as nothing:  # noqa: PTH123 (a device)
        return _piped(command[2], command[3:], env, nothing.fileno())


def testing(*_: object, **__: object) -> Forked:
    """In place of the `subprocess.Popen` by which pytest-xdist starts a process of tests."""
    return _piped(TESTS, [], os.environ, 2)


def _piped(module: str, arguments: Sequence[str], environment: Mapping[str, str], errors: int) -> Forked:
    (theirs_in, ours_in), (ours_out, theirs_out) = os.pipe(), os.pipe()
    forked = start(module, arguments, environment, reads=theirs_in, writes=theirs_out, errors=errors)
    os.close(theirs_in)
    os.close(theirs_out)
    forked.stdin, forked.stdout = os.fdopen(ours_in, "wb"), os.fdopen(ours_out, "rb")
    return forked


def reading(command: Sequence[str], *, env: Mapping[str, str], **_: object) -> Forked:
    """In place of `subprocess.Popen` of `python -m module`, with a pipe for its standard input and this process's
    output."""
    theirs, ours = os.pipe()
    forked = start(command[2], command[3:], env, reads=theirs, writes=1, errors=2)
    os.close(theirs)
    forked.stdin = os.fdopen(ours, "wb")
    SUPERVISORS.append(forked)
    return forked


def _zygote(needs: Sequence[str]) -> socket.socket:
    if needs in _ZYGOTES:
        return _ZYGOTES[needs]
    here, there = socket.socketpair()
    command = [sys.executable, "-m", "tests.support.zygote", str(there.fileno()), *needs]
    # The first test that needs it may have gone to another folder.
    root = Path(__file__).parents[2]
    process = subprocess.Popen(command, pass_fds=[there.fileno()], start_new_session=True, cwd=root)
    there.close()
    return _keep(needs, here, process)


def _keep(needs: Sequence[str], line: socket.socket, process: subprocess.Popen[bytes]) -> socket.socket:
    def end() -> None:
        line.close()
        process.wait()

    atexit.register(end)
    _ZYGOTES[needs] = line
    return line


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
        head, descriptors, _, _ = socket.recv_fds(line, 8, _DESCRIPTORS)
        if not head:
            os._exit(0)
        head += _read(line, 8 - len(head))
        wanted: dict[str, object] = json.loads(_read(line, int.from_bytes(head, "big")))
        told, telling = os.pipe()
        middle = os.fork()
        if middle == 0:
            parent = os.getpid()
            if pid := os.fork():
                os.write(telling, pid.to_bytes(8, "big"))
                # Its child goes to whoever adopts.
                os._exit(0)
            while os.getppid() == parent:
                time.sleep(0.001)
            os.setsid()
            os.close(told)
            os.close(telling)
            line.close()
            _rename(descriptors, [0, 1, 2])
            return wanted
        os.waitpid(middle, 0)
        line.sendall(os.read(told, 8))
        for descriptor in (told, telling, *descriptors):
            os.close(descriptor)


def _rename(descriptors: Sequence[int], numbers: Sequence[int]) -> None:
    """Gives open descriptors other numbers, which others of them may have."""
    apart = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, _FREE) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, number in zip(apart, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)


def _fork_rank(command: Sequence[str], *, stdin: int | None, preexec_fn: Callable[[], None], **_: object) -> Forked:
    """In place of `subprocess.Popen` in an executor's supervisor: a rank, which has imported what it needs."""
    pid = os.fork()
    if pid == 0:
        try:
            if stdin is not None:
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            preexec_fn()
            subprocess.Popen = _POPEN  # type: ignore[misc]
            if _fork_ahead(SANDBOX, answers=True) is not None:
                sys.argv = [SANDBOX]
                _run(lambda: runpy.run_module(SANDBOX, run_name="__main__", alter_sys=True))
            sys.argv = ["-c", *command[3:]]
            _run(importlib.import_module("tessera.worker.executor.rank").main)
        except BaseException:  # noqa: BLE001  (its supervisor must not go on in this process)
            traceback.print_exc()
            os._exit(1)
    return Forked(pid)


def _run(main: Callable[[], object]) -> NoReturn:
    """Ends as an interpreter does, but for taking apart all that was imported, which takes a second and more."""
    code: object = 0
    try:
        main()
    except SystemExit as ended:
        code = ended.code
    if isinstance(code, str):
        print(code, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if isinstance(code, str) else int(code or 0))  # type: ignore[call-overload]


def _fork_ahead(owner: str, *, answers: bool) -> list[str] | None:
    """Forks what a module's first `subprocess.Popen` starts, which waits until then, and gets its arguments in it.

    It has a pipe for its standard input, and one for its output if it `answers`. What is started later is not forked.
    """
    starting = importlib.import_module(owner)
    (starts, start), (reads, writes), (heard, told) = os.pipe(), os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        for number in (start, writes, heard):
            os.close(number)
        with os.fdopen(starts) as file:
            given = file.read()
        if not given:
            os._exit(0)
        os.dup2(reads, 0)
        if answers:
            os.dup2(told, 1)
        for number in (reads, told):
            os.close(number)
        command, environment = json.loads(given)
        os.environ.clear()
        os.environ.update(environment)
        return list(command[3:])
    for number in (starts, reads, told):
        os.close(number)

    def first(command: Sequence[str], *, env: Mapping[str, str] | None = None, **_: object) -> Forked:
        starting.subprocess = subprocess  # type: ignore[attr-defined]
        forked = Forked(pid)
        forked.stdin, forked.stdout = os.fdopen(writes, "wb"), os.fdopen(heard, "rb")
        # Somebody may have killed it already.
        with suppress(BrokenPipeError), os.fdopen(start, "w") as file:
            json.dump([list(command), dict(os.environ if env is None else env)], file)
        return forked

    starting.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": first})  # type: ignore[attr-defined]
    return None


def _test() -> dict[str, object]:
    """Runs tests, beside a zygote of their own; what that is asked for, in the child that is to do it."""
    here, there = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        here.close()
        return _serve(there)
    there.close()
    importlib.import_module("tests.support.zygote")._keep(_WORKERS, here, Forked(pid))
    sys.modules["__main__"] = ModuleType("__main__")
    _run(lambda: exec(eval(sys.stdin.readline()), {}))  # noqa: S102, S307  (as execnet starts a process)


def _called(module: str, arguments: list[str]) -> tuple[str, list[str]]:
    """What this process is to run: what was asked for, or what that starts."""
    serves = (module, *arguments[:1]) == ("tessera.coordinator", "serve") or arguments[:2] == ["coordinator", "serve"]
    if serves and "--no-conduct" not in arguments:
        child_process = "tessera.coordinator.conductor.child_process"
        if (given := _fork_ahead(child_process, answers=False)) is not None:
            return "tessera.coordinator", given
    if arguments[:2] == ["worker", "run"] and (given := _fork_ahead(LAUNCHER, answers=False)) is not None:
        return SUPERVISOR, given
    return module, arguments


def _seed() -> None:
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in sys.argv[2:]:
            importlib.import_module(name)
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ^C is for those who were started
    given = _serve(socket.socket(fileno=int(sys.argv[1])))
    if given["module"] == TESTS:
        given = _test()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(str(given["folder"]))
    os.environ.clear()
    os.environ.update(given["environment"])  # type: ignore[call-overload]
    module, arguments = _called(str(given["module"]), given["arguments"])  # type: ignore[arg-type]
    _seed()
    sys.argv = [module, *arguments]
    if module == SUPERVISOR:
        subprocess.Popen = _fork_rank  # type: ignore[misc,assignment]
    _run(lambda: runpy.run_module(module, run_name="__main__", alter_sys=True))
