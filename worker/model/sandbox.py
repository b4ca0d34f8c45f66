"""A bound on what laying out an untrusted model may cost: it happens first in a child process, within limits.

A config is a few hundred bytes, and some model classes make lists, tables and positions as large as it tells them to,
in main memory, before the first parameter is there to be counted. No list of keys covers some five hundred classes.
So a child process without a GPU lays the model out first, under a limit on its memory and processor time that the
kernel enforces. What ends there within the limits does so here too, and this process then judges the model itself.

`python -m tessera.worker.model.sandbox` imports transformers once, which takes seconds, and forks itself for each
model that it is asked about. It ends when nobody has asked for a minute, or when whoever started it is gone.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from fcntl import LOCK_EX, LOCK_NB, flock
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TextIO

from tessera.shared.model.spec import Model
from tessera.shared.schema import Frozen, canonical
from tessera.worker.model.config import UnsafeConfig, check_config
from tessera.worker.model.layouts import MappingFile

MEMORY_BYTES = 2 << 30
"""Beyond what the libraries take. Tables of positions and masks of published models have at most some hundred MB."""

CPU_SECONDS = 60
"""Of processor time, so that a busy machine refuses nothing."""

WALL_SECONDS = 1800.0
"""After which a child that waits for something is ended all the same."""

LOOK_SECONDS = 0.1
IDLE_SECONDS = 60.0

KEEP_DAYS = 30
"""For how long a verdict is kept that nobody asks for."""

HEADER = struct.Struct(">QQQ")
"""Of a question: its bytes, which follow, and the limits."""
STATUS = struct.Struct(">q")

OUTSIDE = 3
"""A child's exit status where the memory did not suffice and Python could still say so."""

UNBOUNDED = 4
"""The same where the limits could not be set."""

HERE = Path(__file__).parent


class Question(Frozen):
    """What the child is asked to lay out."""

    model: Model
    mapping: MappingFile | None = None


@dataclass
class Sandbox:
    """The limits, and which models were laid out within them: in `folder`, if there is one, for all who share it."""

    folder: Path | None = None
    memory_bytes: int = MEMORY_BYTES
    cpu_seconds: int = CPU_SECONDS
    _refused: dict[str, str] = field(default_factory=dict)

    def require(self, model: Model, mapping: MappingFile | None, check: Callable[[], None]) -> None:
        """Ensure that laying the model out stays within the limits. `check` is called while the child is at it.

        Raises UnsafeConfig for a model that does not, and what `check` raises.
        """
        check_config(model.config)
        question = canonical(Question(model=model, mapping=mapping))
        key = hashlib.sha256(question + _code()).hexdigest()
        if reason := self._refused.get(key):
            raise UnsafeConfig(reason)
        if self.folder is None:
            self._ask(key, question, check)
            return
        # Several workers of a machine begin a run at once: one of them asks, and the others wait for its answer.
        with (self.folder / f"{key}.lock").open("w") as lock:
            while not _locked(lock):
                check()
                time.sleep(LOOK_SECONDS)
            within = self.folder / key
            try:
                if not within.exists():
                    self._ask(key, question, check)
                # Its time is that of its last use.
                within.touch(mode=0o600)
            finally:
                # Those who wait have it open, and find the verdict.
                Path(lock.name).unlink(missing_ok=True)

    def sweep(self, now: float) -> None:
        """Remove the verdicts that were last used more than `KEEP_DAYS` before `now`, in Unix seconds."""
        for path in self.folder.glob("*") if self.folder else ():
            # Another worker may have removed it meanwhile.
            with suppress(FileNotFoundError):
                if path.stat().st_mtime < now - KEEP_DAYS * 86400:
                    path.unlink()

    def _ask(self, key: str, question: bytes, check: Callable[[], None]) -> None:
        refusal = self._laid_out(question, check)
        if refusal:
            self._refused[key] = f"the config is refused: {refusal}"
            raise UnsafeConfig(self._refused[key])

    def _laid_out(self, question: bytes, check: Callable[[], None]) -> str | None:
        """Have a child lay the model out. Return which limit it reached, None if it ended within all of them."""
        status = FORKS.lay_out(question, self.memory_bytes, self.cpu_seconds, check)
        if status is None:
            return f"laying its model out did not end within {WALL_SECONDS:.0f} s"
        if status == 0:
            return None
        if status == -signal.SIGXCPU:
            return f"laying its model out takes more than {self.cpu_seconds} s of processor time"
        if status in (-signal.SIGKILL, UNBOUNDED):
            # No verdict on the model, which may be laid out at the next try.
            ended = "was killed, perhaps for want of memory" if status < 0 else "could not set its limits"
            raise RuntimeError(f"the process that lays models out {ended}: look at the machine's own log")
        return f"laying its model out takes more than {self.memory_bytes >> 20} MiB of memory, or ends the process"


class Forks:
    """The process that forks a child for each model, started when it is needed and not there."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.close)

    def lay_out(self, question: bytes, memory_bytes: int, cpu_seconds: int, check: Callable[[], None]) -> int | None:
        """Return the exit status of the child, negative if a signal ended it; None if it did not end in time.

        Raises what `check` raises, which is called meanwhile.
        """
        with self._lock:
            for _ in range(2):
                try:
                    status = _answer_of(self._started(), question, memory_bytes, cpu_seconds, check)
                except (OSError, EOFError):
                    # It ended before it was asked, having been idle for a minute, or somebody ended it.
                    self.close()
                    continue
                except BaseException:
                    self.close()
                    raise
                if status is None:
                    self.close()
                return status
            raise RuntimeError(
                "the process that lays models out does not run: try python -m tessera.worker.model.sandbox by hand"
            )

    def close(self) -> None:
        """End the process and its child."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            environment = {
                **os.environ,
                "CUDA_VISIBLE_DEVICES": "",
                "HF_HUB_OFFLINE": "1",
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE.parents[2]), os.environ.get("PYTHONPATH")])),
            }
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tessera.worker.model.sandbox"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                # Of a group of its own, so that it ends with its child; and ^C at a terminal is the worker's to hear.
                start_new_session=True,
            )
        return self._process


FORKS = Forks()


def _answer_of(
    process: subprocess.Popen[bytes],
    question: bytes,
    memory_bytes: int,
    cpu_seconds: int,
    check: Callable[[], None],
) -> int | None:
    assert process.stdin  # noqa: S101  (made with pipes)
    assert process.stdout  # noqa: S101  (the same)
    process.stdin.write(HEADER.pack(len(question), memory_bytes, cpu_seconds) + question)
    process.stdin.flush()
    give_up_at = time.monotonic() + WALL_SECONDS
    while not select.select([process.stdout], [], [], LOOK_SECONDS)[0]:
        check()
        if time.monotonic() > give_up_at:
            return None
    raw = process.stdout.read(STATUS.size)
    if len(raw) < STATUS.size:
        raise EOFError
    return int(STATUS.unpack(raw)[0])


def shared_folder() -> Path | None:
    """Return the folder of verdicts that all of this user's workers share; None if there can be none."""
    home = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = (Path(home) if home else Path.home() / ".cache") / "tessera" / "models"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except (OSError, RuntimeError):
        return None
    return folder if os.access(folder, os.W_OK) else None


def _locked(file: TextIO) -> bool:
    try:
        flock(file, LOCK_EX | LOCK_NB)
    except BlockingIOError:
        return False
    return True


@cache
def _code() -> bytes:
    """Return what a verdict depends on besides the question: another version of the code may lay out otherwise."""
    ours = sorted(HERE.glob("*.py"))
    texts = b"".join(hashlib.sha256(path.read_bytes()).digest() for path in ours)
    return texts + "/".join(version(name) for name in ("torch", "transformers")).encode()


def _limit(memory_bytes: int, cpu_seconds: int) -> None:
    """Bound what this process may take beyond what it has taken already; limits that are there are only lowered."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _lower(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + cpu_seconds)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    status = Path("/proc/self/status")
    if status.exists():
        kib = next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmData:"))
        # What may be written to, and not the address space, of which torch reserves far more than it uses.
        _lower(resource.RLIMIT_DATA, (kib << 10) + memory_bytes)


def _lower(which: int, most: int) -> None:
    _, hard = resource.getrlimit(which)
    # The soft limit of processor time ends a process by a signal of its own, which tells it from being killed.
    resource.setrlimit(which, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _serve() -> None:
    """Fork a child for each question on standard input, and write its exit status to standard output."""
    # Takes seconds, which whoever asks must not spend.
    check_model = importlib.import_module("tessera.worker.model.build").check_model
    while header := _read(HEADER.size):
        length, memory_bytes, cpu_seconds = HEADER.unpack(header)
        raw = _read(length)
        child = os.fork()
        if child == 0:
            os._exit(_status(check_model, raw, memory_bytes, cpu_seconds))
        _, status = os.waitpid(child, 0)
        os.write(1, STATUS.pack(os.waitstatus_to_exitcode(status)))


def _read(length: int) -> bytes:
    """Read so many bytes; none if nobody asks for a minute, or ever again."""
    read = bytearray()
    while len(read) < length:
        ready, _, _ = select.select([0], [], [], IDLE_SECONDS)
        piece = os.read(0, length - len(read)) if ready else b""
        if not piece:
            return b""
        read += piece
    return bytes(read)


def _status(
    lay_out: Callable[[Model, MappingFile | None], object], raw: bytes, memory_bytes: int, cpu_seconds: int
) -> int:
    question = Question.model_validate_json(raw)
    try:
        _limit(memory_bytes, cpu_seconds)
    except (OSError, ValueError):
        return UNBOUNDED
    try:
        lay_out(question.model, question.mapping)
    except Exception as fault:  # noqa: BLE001  (what else is wrong with the model, the parent finds for itself)
        return OUTSIDE if _ran_out(fault) else 0
    return 0


def _ran_out(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


if __name__ == "__main__":
    _serve()
