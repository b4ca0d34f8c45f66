"""The process that starts a group's ranks by torchrun, and ends them and removes their folder when the agent ends.

The arguments are the agent's process id, the group's folder and the number of ranks.
"""

import os
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path

from torch.distributed.run import main as torchrun

from tessera.worker.ranks.processes import END, end_with_parent


def main(agent: int, folder: Path, ranks: int) -> int:
    """Run the ranks until they end. Return the exit status."""
    # torchrun's own signals let the ranks end in peace, which takes half a minute if one of them is stuck.
    signal.signal(END, lambda *_: _end(folder))
    end_with_parent(agent, END)
    module = ["-m", "tessera.worker.ranks.main", str(folder), str(os.getpid())]
    try:
        torchrun(["--standalone", f"--nproc-per-node={ranks}", *module])
    except Exception:  # noqa: BLE001  (the agent reports how a group ended)
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def _end(folder: Path) -> None:
    """End the ranks, whose sessions are their own, then remove the folder, and end."""
    for thread in Path("/proc/self/task").iterdir():
        for child in (thread / "children").read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(child), signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])))
