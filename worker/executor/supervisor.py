"""The process that starts an executor's ranks, and ends them and removes their folder when the agent or a rank ends.

Its arguments are the agent's process id, the executor's folder, and the number of ranks. The first rank reads the
folders of tasks from the standard input. A job of Slurm calls `supervise` for a single task. Imports no torch.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

PR_SET_PDEATHSIG = 1

END = signal.SIGUSR1
"""The signal by which the agent, or the kernel at the agent's end, has the supervisor end the ranks."""

RANK = "from tessera.shared.lazy_import import load; load('tessera.worker.executor.rank').main()"
"""The code of a rank: its loaders import the main module of their parent, and need nothing of it."""


def end_with_parent(parent: int, how: signal.Signals) -> None:
    """Have the kernel send this process a signal when its parent, process `parent`, ends, however it ends (Linux)."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(how))
    # It may have ended before.
    if os.getppid() != parent:
        os.kill(os.getpid(), how)


def supervise(agent: int, folder: Path, count: int, task: Path | None = None) -> int:
    """Run the ranks until one of them ends, or this process gets `END`. Return that rank's exit code.

    With a `task`, they execute this one only, SIGTERM has them write a checkpoint, and the folder stays.
    """
    # Slurm and systemd send SIGTERM to all processes: the agent decides when its task ends. Ranks inherit this.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(END, lambda *_: sys.exit())
    # Set before a rank's own code runs: its imports take seconds.
    end_with_this = partial(end_with_parent, os.getpid(), signal.SIGKILL)
    ranks: list[subprocess.Popen[bytes]] = []

    def pass_on(*_: object) -> None:
        for process in ranks:
            process.terminate()

    try:
        end_with_parent(agent, END)
        for rank in range(count):
            command = [sys.executable, "-c", RANK, str(folder), str(rank)]
            tasks = subprocess.DEVNULL if rank else subprocess.PIPE if task else None
            ranks.append(subprocess.Popen(command, stdin=tasks, preexec_fn=end_with_this))  # noqa: PLW1509, S603  (no threads; our own)
        if task and (line := ranks[0].stdin):
            # They ignore the signal until they can write one.
            signal.signal(signal.SIGTERM, pass_on)
            with suppress(BrokenPipeError), line:
                line.write(f"{task}\n".encode())
        # The others cannot go on without it.
        ended, status = os.wait()
        (rank,) = (number for number, process in enumerate(ranks) if process.pid == ended)
        if code := os.waitstatus_to_exitcode(status):
            print(f"the process of rank {rank} of {count} ended with {code}", file=sys.stderr)
        return code
    finally:
        # The agent may ask for the end, and end itself meanwhile.
        signal.signal(END, signal.SIG_IGN)
        for process in ranks:
            process.kill()
        for process in ranks:
            process.wait()
        if task is None:
            _remove(agent, folder)


def _remove(agent: int, folder: Path) -> None:
    # Without the agent, no later processes use what lies beside it: the inventory, and mapped data sets. If the
    # folder is gone, the next agent has removed these, and what lies there is that agent's.
    alone = os.getppid() != agent and folder.exists()
    shutil.rmtree(folder.parent if alone else folder, ignore_errors=True)


if __name__ == "__main__":
    supervise(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
