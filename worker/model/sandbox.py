"""Sandbox for untrusted models and tokenizers: a child process with limits on memory and processor time.

A config of a few hundred bytes can make some model classes allocate lists, tables and positions of any size in main
memory, before the first parameter can be counted. No list of keys covers some five hundred classes. So a child
process without a GPU lays the model out first, under limits that the kernel enforces. A model that stays within them
there stays within them here, and this process then checks it. A run's tokenizer converts the texts there first too.

`python -m tessera.worker.model.sandbox` imports transformers once, which takes seconds, and forks a child for each
model. It exits after a minute without requests, or when the process that started it ends.
"""

import atexit
import ctypes
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
from multiprocessing.connection import wait
from pathlib import Path

from pydantic import TypeAdapter
from tokenizers import Tokenizer

from tessera.shared.model.spec import Model
from tessera.shared.schema import Value, canonical
from tessera.worker.errors import UnsafeConfig
from tessera.worker.model.chats import ChatRequest
from tessera.worker.model.config import check_config
from tessera.worker.model.layouts import MappingFile

MEMORY_BYTES = 2 << 30
"""Limit on memory beyond the libraries'. Position tables and masks of published models take a few hundred MB."""

CPU_SECONDS = 60
"""Limit on processor time rather than wall time, so that a busy machine does not reject valid models."""

TEXTS_PER_CPU_SECOND = 100
"""Texts for which a tokenizer gets another second. Most convert thousands in one."""

AT_ONCE = 4096
"""Number of texts to convert together."""

WALL_SECONDS = 1800.0
"""Limit on wall time, for a child that waits without using processor time."""

POLL_SECONDS = 0.1
IDLE_SECONDS = 60.0

KEEP_DAYS = 30
"""Time after which an unused verdict is deleted."""

HEADER = struct.Struct(">QQQ")
"""Header of a request: the length of its body in bytes, the memory limit in bytes, the processor time in seconds."""
STATUS = struct.Struct(">q")

OUT_OF_MEMORY = 3
"""Exit status of a child in which Python reported a lack of memory."""

LIMITS_NOT_SET = 4
"""Exit status of a child that could not set its limits."""

TOO_LONG = 5
"""Exit status of a child whose tokenizer gave a text more tokens than it may have."""

KEPT_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "LANG", "TMPDIR")

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000

FOLDER = Path(__file__).parent


class LayoutRequest(Value):
    """The model that a child lays out."""

    model: Model
    mapping: MappingFile | None = None


class TokenizerRequest(Value):
    """The texts that a child converts with an untrusted tokenizer, whose parser is native code."""

    tokenizer: str
    """The content of `tokenizer.json`."""
    texts: tuple[tuple[str, ...], ...]
    """Each text, or each pair; or with `by_word` each text's words."""
    max_length: int
    by_word: bool = False


REQUEST: TypeAdapter[LayoutRequest | TokenizerRequest | ChatRequest] = TypeAdapter(
    LayoutRequest | TokenizerRequest | ChatRequest
)


@dataclass
class Sandbox:
    """The limits, and the models known to stay within them: in `folder`, if given, for all workers that share it."""

    folder: Path | None = None
    memory_bytes: int = MEMORY_BYTES
    cpu_seconds: int = CPU_SECONDS
    _refused: dict[str, str] = field(default_factory=dict)

    def require(self, model: Model, mapping: MappingFile | None, check: Callable[[], None]) -> None:
        """Raise UnsafeConfig if laying the model out exceeds the limits.

        `check` is called while the child runs; its exceptions propagate.
        """
        check_config(model.config)
        request = canonical(LayoutRequest(model=model, mapping=mapping))
        key = hashlib.sha256(request + _code()).hexdigest()
        if reason := self._refused.get(key):
            raise UnsafeConfig(reason)
        if self.folder is None:
            self._require_within(key, request, check)
            return
        # Several workers of a machine start a run at once: one of them asks, and the others wait for its verdict.
        with (self.folder / f"{key}.lock").open("w") as lock:
            while True:
                try:
                    flock(lock, LOCK_EX | LOCK_NB)
                    break
                except BlockingIOError:
                    check()
                    time.sleep(POLL_SECONDS)
            within = self.folder / key
            try:
                if not within.exists():
                    self._require_within(key, request, check)
                # The modification time is that of the last use.
                within.touch(mode=0o600)
            finally:
                # The waiting workers have the lock open, and will find the verdict.
                Path(lock.name).unlink(missing_ok=True)

    def require_tokenizer(self, request: TokenizerRequest, check: Callable[[], None]) -> None:
        """Raise UnsafeConfig if the tokenizer crashes on these texts, or exceeds the limits. `check` as above."""
        raw = canonical(request)
        key = hashlib.sha256(raw).hexdigest()
        if reason := self._refused.get(key):
            raise UnsafeConfig(reason)
        seconds = self.cpu_seconds + len(request.texts) // TEXTS_PER_CPU_SECOND
        what = "the run's tokenizer is refused: converting the texts with it"
        self._require_within(key, raw, check, what, seconds)

    def write_tokens(self, request: ChatRequest, check: Callable[[], None]) -> None:
        """Make tokens of chats in a child (`chat_template.write_tokens`). Raises UnsafeConfig if the tokenizer or the
        template crashes, or exceeds the limits. `check` as above."""
        raw, seconds = canonical(request), self.cpu_seconds + len(request.chats) // TEXTS_PER_CPU_SECOND
        what = "the chat template or its tokenizer is refused: converting the chats with it"
        self._require_within(hashlib.sha256(raw).hexdigest(), raw, check, what, seconds)

    def sweep(self, now: float) -> None:
        """Delete the verdicts last used more than `KEEP_DAYS` before `now`, in Unix seconds."""
        for path in self.folder.glob("*") if self.folder else ():
            # Another worker may have removed it meanwhile.
            with suppress(FileNotFoundError):
                if path.stat().st_mtime < now - KEEP_DAYS * 86400:
                    path.unlink()

    def _require_within(
        self,
        key: str,
        request: bytes,
        check: Callable[[], None],
        what: str = "the config is refused: laying out its model",
        cpu_seconds: int | None = None,
    ) -> None:
        """Process the request in a child. Raises UnsafeConfig if it exceeds a limit."""
        cpu_seconds = cpu_seconds or self.cpu_seconds
        header = HEADER.pack(len(request), self.memory_bytes, cpu_seconds)
        status = FORK_SERVER.lay_out(header + request, check)
        if status == 0:
            return
        if status in (-signal.SIGKILL, LIMITS_NOT_SET):
            # This is no verdict on the model: the next attempt may succeed.
            ended = (
                "could not set its limits" if status == LIMITS_NOT_SET else "was killed, perhaps for lack of memory"
            )
            raise RuntimeError(f"the process that lays out models {ended}: see the machine's log")
        if status is None:
            excess = f"did not end within {WALL_SECONDS:.0f} s"
        elif status == TOO_LONG:
            excess = "gives a text more tokens than the site's max_length"
        elif status == -signal.SIGXCPU:
            excess = f"takes more than {cpu_seconds} s of processor time"
        else:
            excess = f"takes more than {self.memory_bytes >> 20} MiB of memory, or crashes the process"
        self._refused[key] = f"{what} {excess}"
        raise UnsafeConfig(self._refused[key])


class ForkServer:
    """The process that forks a child for each model. It is started on demand."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.close)

    def lay_out(self, request: bytes, check: Callable[[], None]) -> int | None:
        """Return the child's exit status, negative if a signal ended it, or None if it did not end in time.

        `check` is called while the child runs; its exceptions propagate.
        """
        with self._lock:
            for _ in range(2):
                try:
                    status = _exit_status(self._started(), request, check)
                except (OSError, EOFError):
                    # It had exited after a minute without requests, or was killed.
                    self.close()
                    continue
                except BaseException:
                    self.close()
                    raise
                if status is None:
                    self.close()
                return status
            raise RuntimeError(
                "the process that lays out models does not start: run python -m tessera.worker.model.sandbox to see "
                "the reason"
            )

    def close(self) -> None:
        """Kill the process and its child."""
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
                # The worker's own variables may hold its token.
                **{name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ},
                "CUDA_VISIBLE_DEVICES": "",
                "HF_HUB_OFFLINE": "1",
                "OMP_NUM_THREADS": "1",
                "TOKENIZERS_PARALLELISM": "false",
                "PYTHONPATH": os.pathsep.join(filter(None, [str(FOLDER.parents[2]), os.environ.get("PYTHONPATH")])),
            }
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tessera.worker.model.sandbox"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                # In a process group of its own, so that one signal kills it and its child, and ^C reaches neither.
                start_new_session=True,
            )
        return self._process


FORK_SERVER = ForkServer()


def _exit_status(process: subprocess.Popen[bytes], request: bytes, check: Callable[[], None]) -> int | None:
    assert process.stdin and process.stdout  # noqa: S101, PT018  (made with pipes)
    process.stdin.write(request)
    process.stdin.flush()
    give_up_at = time.monotonic() + WALL_SECONDS
    while not wait([process.stdout.fileno()], POLL_SECONDS):
        check()
        if time.monotonic() > give_up_at:
            return None
    raw = process.stdout.read(STATUS.size)
    if len(raw) < STATUS.size:
        raise EOFError
    return int(STATUS.unpack(raw)[0])


def shared_folder() -> Path | None:
    """Return the folder of verdicts that this user's workers share, or None if it cannot be written."""
    home = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = (Path(home) if home else Path.home() / ".cache") / "tessera" / "models"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except (OSError, RuntimeError):
        return None
    return folder if os.access(folder, os.W_OK) else None


@cache
def _code() -> bytes:
    """Return a fingerprint of the code: with other versions of it, a verdict may differ."""
    texts = b"".join(hashlib.sha256(path.read_bytes()).digest() for path in sorted(FOLDER.glob("*.py")))
    return texts + "/".join(version(name) for name in ("torch", "transformers")).encode()


def _limit(memory_bytes: int, cpu_seconds: int) -> None:
    """Limit the memory and processor time of this process from now on, by soft limits within the hard ones."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _set_soft(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + cpu_seconds)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    status = Path("/proc/self/status")
    if status.exists():
        kib = next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmData:"))
        # Writable memory, not address space, of which torch reserves far more than it uses.
        _set_soft(resource.RLIMIT_DATA, (kib << 10) + memory_bytes)


def confine() -> None:
    """Take the network from this process, where the system lets users create namespaces, and its pipes."""
    ctypes.CDLL(None).unshare(CLONE_NEWUSER | CLONE_NEWNET)
    # On the standard output, a child could tell another verdict on itself.
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(nothing, descriptor)


def _set_soft(which: int, most: int) -> None:
    _, hard = resource.getrlimit(which)
    # Exceeding the soft limit on processor time sends SIGXCPU, which differs from being killed.
    resource.setrlimit(which, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _serve() -> None:
    """Fork a child for each request on standard input, and write its exit status to standard output."""
    # Slurm and systemd send it to all processes: the worker decides when its task ends, and a killed child would be a
    # verdict on the model. The worker ends this process by SIGKILL, or by the end of its input.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # This takes seconds, so the process that only imports this module does not do it.
    check_model = importlib.import_module("tessera.worker.model.build").check_model
    write_tokens = importlib.import_module("tessera.worker.model.chat_template").write_tokens
    while header := _read(HEADER.size):
        length, memory_bytes, cpu_seconds = HEADER.unpack(header)
        raw = _read(length)
        child = os.fork()
        if child == 0:
            confine()
            os._exit(_status(check_model, write_tokens, raw, memory_bytes, cpu_seconds))
        _, status = os.waitpid(child, 0)
        os.write(1, STATUS.pack(os.waitstatus_to_exitcode(status)))


def _read(length: int) -> bytes:
    """Return `length` bytes of standard input, or none after a minute without data or at its end."""
    read = bytearray()
    while len(read) < length:
        ready, _, _ = select.select([0], [], [], IDLE_SECONDS)
        piece = os.read(0, length - len(read)) if ready else b""
        if not piece:
            return b""
        read += piece
    return bytes(read)


def _status(
    lay_out: Callable[[Model, MappingFile | None], object],
    write_tokens: Callable[[ChatRequest], None],
    raw: bytes,
    memory_bytes: int,
    cpu_seconds: int,
) -> int:
    request = REQUEST.validate_json(raw)
    try:
        _limit(memory_bytes, cpu_seconds)
    except (OSError, ValueError):
        return LIMITS_NOT_SET
    try:
        if isinstance(request, LayoutRequest):
            lay_out(request.model, request.mapping)
        elif isinstance(request, ChatRequest):
            write_tokens(request)
        elif not _convert(request):
            return TOO_LONG
    except Exception as fault:  # noqa: BLE001  (the parent finds all other faults of the model itself)
        return OUT_OF_MEMORY if _is_out_of_memory(fault) else 0
    return 0


def _convert(request: TokenizerRequest) -> bool:
    """Convert the texts. Return True if all are within `max_length`."""
    tokenizer = Tokenizer.from_str(request.tokenizer)
    tokenizer.enable_truncation(request.max_length)
    texts = [text if len(text) > 1 or request.by_word else text[0] for text in request.texts]
    for first in range(0, len(texts), AT_ONCE):
        encoded = tokenizer.encode_batch(texts[first : first + AT_ONCE], is_pretokenized=request.by_word)
        if any(len(one.ids) > request.max_length for one in encoded):
            return False
    return True


def _is_out_of_memory(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


if __name__ == "__main__":
    _serve()
