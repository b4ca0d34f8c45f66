"""The process that starts a group's ranks, and ends them and removes their folder when the agent or one of them ends.

Its arguments are the agent's process id, the group's folder, and the descriptor of each rank's connection.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

PR_SET_PDEATHSIG = 1

END = signal.SIGUSR1
"""The signal by which the agent, or the kernel at the agent's end, has the launcher end the ranks."""

RANK = "from tessera.worker.ranks.rank import main; main()"
"""The code of a rank: its loaders import the main module of their parent, and need nothing of it."""


def end_with_parent(parent: int, how: signal.Signals) -> None:
    """Have the kernel send this process a signal when its parent, process `parent`, ends, however it ends (Linux)."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(how))
    # It may have ended before.
    if os.getppid() != parent:
        os.kill(os.getpid(), how)


def launch(agent: int, folder: Path, connections: Sequence[int]) -> None:
    """Run the ranks until one of them ends, or this process gets `END`."""
    # Slurm and systemd send SIGTERM to all processes: the agent decides when its task ends. Ranks inherit this.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(END, lambda *_: sys.exit())
    # Set before a rank's own code runs: its imports take seconds.
    end_with_this = partial(end_with_parent, os.getpid(), signal.SIGKILL)
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        end_with_parent(agent, END)
        for rank, connection in enumerate(connections):
            command = [sys.executable, "-c", RANK, str(folder), str(rank), str(connection)]
            ranks.append(subprocess.Popen(command, pass_fds=[connection], preexec_fn=end_with_this))  # noqa: PLW1509, S603  (no threads; our own)
            # The agent notices the end of a rank by the end of its connection.
            os.close(connection)
        # The others cannot go on without it.
        os.wait()
    finally:
        # The agent may ask for the end, and end itself meanwhile.
        signal.signal(END, signal.SIG_IGN)
        for process in ranks:
            process.kill()
        for process in ranks:
            process.wait()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    launch(int(sys.argv[1]), Path(sys.argv[2]), [int(each) for each in sys.argv[3:]])
