"""Launchers of tasks: an interface for the processes of this machine, or for jobs of Slurm (`slurm`)."""

import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import suppress
from io import FileIO
from multiprocessing import connection
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

from tessera.worker.executor.folder import WAKE, Document, write_document
from tessera.worker.executor.supervisor import END
from tessera.worker.settings import ENVIRONMENT_PREFIX, DataSources, DeviceName

SETTINGS = "settings.json"
IDLE_SECONDS = 300.0
"""Time without a task after which several ranks end."""
TIMEOUT_SECONDS = 3600.0
"""Longest wait of ranks for another one, which may measure a whole data set for all. The end of a rank is noticed
at once."""
END_SECONDS = 10.0
"""Time for the supervisor to end its ranks before it is killed."""


class RankSettings(Document):
    """The settings of an executor's ranks."""

    devices: tuple[DeviceName, ...]
    threads: int | None = None
    """Threads of one operation in each rank; torch's choice, divided among the ranks, if None."""
    timeout_seconds: float = TIMEOUT_SECONDS
    sandboxed: bool = False
    """True if untrusted models and tokenizers are tried in a sandbox first."""
    in_job: bool = False
    """True in a job of Slurm: for one task, and for another machine than the agent's."""
    console: bool = False
    """True if a person reads the log."""
    base_bits: int | None = None
    """4 if the library for matrices in 4 bits must be there."""
    sources: DataSources | None = None
    """The sources of the data sets that the first rank loads."""

    @property
    def idle_seconds(self) -> float | None:
        """Time without a task after which the ranks end; None for never. Alone, a rank keeps its data sets."""
        return IDLE_SECONDS if len(self.devices) > 1 else None


class Launcher(Protocol):
    """A way to execute the tasks in folders. A handle is the launcher's own."""

    def home(self) -> Path:
        """Return a folder for the tasks' folders and their shared files. Each call may return another folder."""

    def submit(self, folder: Path) -> Any:
        """Have the task in a folder executed. Return a handle. Raises OSError."""

    def poll(self, handle: Any) -> bool:
        """Return True if the task may still end by itself, with a file in its folder that says how."""

    def wait(self, handle: Any, seconds: float) -> None:
        """Return once the folder may have a new file, after this time at the latest."""

    def cancel(self, handle: Any) -> None:
        """End the task at once, and everything that executes it."""


def resident_bytes(process: int | str = "self") -> int:
    """Return the memory of a process. Raises OSError if it cannot be read."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


class LocalLauncher:
    """Processes of this machine, one for each device, which wait for the next task.

    One thread uses it, and must outlive it: the kernel ends the supervisor with the thread that started it.
    """

    def __init__(self, settings: RankSettings, home: Path) -> None:
        """Prepare for processes with folders in `home`, whose present content is removed."""
        self._settings = settings
        self._folder = home
        # Of an agent that was killed together with its supervisor.
        shutil.rmtree(home, ignore_errors=True)
        self._started: tuple[subprocess.Popen[bytes], Path] | None = None
        self._wake: FileIO | None = None

    def home(self) -> Path:
        """Return the folder of the processes, started if there are none. It is removed when they end."""
        if self._started is None or not self.poll(self._started[0]):
            self.close()
            self._started = self._start()
        return self._started[1]

    def submit(self, folder: Path) -> "subprocess.Popen[bytes]":
        """Hand the task to the processes in whose folder its folder is."""
        if self._started is None:
            raise RuntimeError("home starts the processes")
        supervisor = self._started[0]
        # A process that has just ended is noticed by `poll`.
        with suppress(BrokenPipeError):
            assert supervisor.stdin  # noqa: S101  (made with a pipe)
            supervisor.stdin.write(f"{folder}\n".encode())
            supervisor.stdin.flush()
        return supervisor

    def poll(self, handle: "subprocess.Popen[bytes]") -> bool:
        return handle.poll() is None

    def wait(self, handle: "subprocess.Popen[bytes]", seconds: float) -> None:
        # Unlike select, for a descriptor beyond 1023 too.
        if not self._wake:
            time.sleep(seconds)
        elif connection.wait([self._wake.fileno()], seconds):
            self._wake.read()

    def cancel(self, handle: "subprocess.Popen[bytes]") -> None:
        """End the supervisor, its ranks and their folder."""
        handle.send_signal(END)
        try:
            handle.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            # The kernel then ends the ranks.
            handle.kill()
            handle.wait()
        with suppress(BrokenPipeError):
            if handle.stdin:
                handle.stdin.close()

    def memory_bytes(self) -> int:
        """Return the memory of the ranks; 0 without any."""
        # Another thread may end them meanwhile.
        if (started := self._started) is None:
            return 0
        with suppress(OSError):
            supervisor = started[0].pid
            ranks = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
            return sum(map(resident_bytes, ranks))
        return 0

    def close(self) -> None:
        """End the processes, if there are any."""
        if self._started:
            self.cancel(self._started[0])
        if self._wake:
            self._wake.close()
        self._started = self._wake = None

    def _start(self) -> "tuple[subprocess.Popen[bytes], Path]":
        """Start the supervisor, which starts the ranks. Return it and its folder."""
        folder = self._folder / uuid4().hex
        # It may hold the data sets that the ranks share.
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.mkdir(mode=0o700)
        write_document(folder / SETTINGS, self._settings)
        # Some network file systems have no named pipes: `wait` then takes its whole time.
        with suppress(OSError):
            os.mkfifo(folder / WAKE, 0o600)
            self._wake = FileIO(os.open(folder / WAKE, os.O_RDWR | os.O_NONBLOCK))
        arguments = [str(os.getpid()), str(folder), str(len(self._settings.devices))]
        # Overrides of settings may be secrets, of which it needs none.
        environment = {name: value for name, value in os.environ.items() if not name.startswith(ENVIRONMENT_PREFIX)}
        if threads := self._settings.threads:
            environment["OMP_NUM_THREADS"] = str(threads)
        supervisor = subprocess.Popen(  # noqa: S603  (our own module)
            [sys.executable, "-m", "tessera.worker.executor.supervisor", *arguments],
            stdin=subprocess.PIPE,
            env=environment,
            # ^C at a terminal is for the agent.
            start_new_session=True,
        )

        def remove_folder() -> None:
            supervisor.wait()
            shutil.rmtree(folder, ignore_errors=True)

        # The supervisor does so itself unless it is killed.
        threading.Thread(target=remove_folder, daemon=True).start()
        return supervisor, folder
