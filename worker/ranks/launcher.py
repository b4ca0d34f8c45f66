"""The process that starts a group's ranks, and ends them and removes their folder when the agent or one of them ends.

The arguments are the agent's process id, the group's folder and the number of ranks.
"""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from tessera.worker.ranks.processes import end_with_parent


def main(agent: int, folder: Path, ranks: int) -> None:
    """Run the ranks until one of them ends, or this process gets SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    module = [sys.executable, "-m", "tessera.worker.ranks.main", str(folder), str(os.getpid())]
    started: list[subprocess.Popen[bytes]] = []
    try:
        end_with_parent(agent, signal.SIGTERM)
        started.extend(subprocess.Popen([*module, str(rank)]) for rank in range(ranks))  # noqa: S603  (our own)
        # The others cannot go on without it.
        os.wait()
    finally:
        # The agent may ask for the end, and end itself meanwhile.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for process in started:
            process.kill()
        for process in started:
            process.wait()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
