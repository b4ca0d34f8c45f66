"""The end of a worker's process."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import atexit
from tessera.worker.cli.exits import end

class Torch:
    def __del__(self):
        print("taken apart", flush=True)

torch = Torch()
atexit.register(print, "closed")
print("stopped", end=" ")
end()
"""


def test_a_stopped_worker_s_process_does_not_live_on_to_take_torch_apart() -> None:
    ended = subprocess.run([sys.executable, "-c", SCRIPT], check=True, capture_output=True, text=True)
    assert ended.stdout == "stopped closed\n"
