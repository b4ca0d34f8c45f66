"""Processes that end with the process that started them (Linux)."""

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int, how: signal.Signals) -> None:
    """Have the kernel send this process a signal when its parent, process `parent`, ends, however it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(how))
    # It may have ended before.
    if os.getppid() != parent:
        os.kill(os.getpid(), how)
