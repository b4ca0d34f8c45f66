"""A site that dies after it has trained with privacy: `python -m tests.support.leaving FOLDER`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from tests.worker.privacy.test_private_task import private_task

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    private_task(folder, token=1).begin(steps=5)
    leaving = private_task(folder, token=2)
    leaving.begin(steps=5)
    leaving.leave()
    os.kill(os.getpid(), signal.SIGKILL)
