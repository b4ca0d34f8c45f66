"""The process that starts a group's ranks by torchrun, and ends them and removes their folder when the agent ends.

The arguments are the agent's process id, the group's folder and the number of ranks.
"""

import os
import shutil
import signal
import sys
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.run import main as torchrun

from tessera.worker.ranks.processes import end_with_parent


def main(agent: int, folder: Path, ranks: int) -> int:
    """Run the ranks until they end. Return the exit status."""
    signal.signal(signal.SIGTERM, _end)
    module = ["-m", "tessera.worker.ranks.main", str(folder), str(os.getpid())]
    try:
        end_with_parent(agent, signal.SIGTERM)
        # It replaces the signal's handler by one that ends the ranks too, whose sessions are their own.
        torchrun(["--standalone", f"--nproc-per-node={ranks}", *module])
    except (Exception, SystemExit, SignalException):  # noqa: BLE001  (the agent reports how a group ended)
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def _end(_signal: int, _frame: FrameType | None) -> None:
    raise SystemExit(1)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])))
