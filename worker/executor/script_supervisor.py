"""The process that runs a site's own training script, and ends the script's process group with the agent.

Its arguments are the agent's process id and the script's command. It ends as the script does. Imports no torch.
"""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from tessera.worker.executor.supervisor import END, end_with_parent

PR_SET_CHILD_SUBREAPER = 36

TERM_SECONDS = 10.0
"""Time for the script to end after SIGTERM, before SIGKILL."""


def supervise(agent: int, command: list[str]) -> int:
    """Run the script until it ends, or this process gets `END`. Return its exit code."""
    # As in `supervisor`: the agent decides when its task ends.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(END, lambda *_: sys.exit())
    end_with_parent(agent, END)
    # Processes that left the script's group, as torchrun's do, become this one's children when their parent ends.
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)
    prepare = partial(_prepare, os.getpid())
    try:
        # The site's own settings name the command, and there are no threads.
        script = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=prepare)  # noqa: PLW1509, S603
    except OSError as fault:
        print(f"{command[0]} cannot be run: {fault.strerror}", file=sys.stderr)
        return 127
    try:
        code = script.wait()
        return code if code >= 0 else 128 - code
    finally:
        signal.signal(END, signal.SIG_IGN)
        _end_all(script)


def _prepare(supervisor: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent(supervisor, signal.SIGKILL)


def _end_all(script: subprocess.Popen[bytes]) -> None:
    """End the script, if it still runs, and every process that it left, in its group or not."""
    with suppress(ProcessLookupError, subprocess.TimeoutExpired):
        if script.poll() is None:
            os.killpg(script.pid, signal.SIGTERM)
            script.wait(TERM_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(script.pid, signal.SIGKILL)
    script.wait()
    with suppress(ChildProcessError):
        while True:
            for process in _children():
                os.kill(process, signal.SIGKILL)
            os.wait()


def _children() -> Iterator[int]:
    """Yield the ids of this process's children. One that has ended keeps its id until it is waited for."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(status.read_bytes().rpartition(b")")[2].split()[1]) == os.getpid():
                yield int(status.parent.name)


if __name__ == "__main__":
    sys.exit(supervise(int(sys.argv[1]), sys.argv[2:]))
