"""Memory in use: near the limit no work starts, because a process above it is killed without warning.

The allocator keeps freed memory, so what seems to be too much in use is given back before it is judged.
"""

import os
import re
import threading
import time
from pathlib import Path

from tessera.shared.host_memory import CGROUPS, MEMBERSHIP, groups, return_freed_memory
from tessera.shared.problems import Busy

WATERMARK = 0.85
RETRY_SECONDS = 10.0
FRESH_SECONDS = 1.0


class Memory:
    """This process's memory against the configured limit, or else that of its control groups."""

    def __init__(self, limit_bytes: int | None, cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> None:
        self._limit_bytes = limit_bytes
        self._groups = [] if limit_bytes else groups(cgroups, membership)
        self._lock = threading.Lock()
        self._share = 0.0
        self._measured_at = float("-inf")

    def share(self) -> float:
        """Return the used share of the limit, at most a second old; 0 without a limit."""
        with self._lock:
            if time.monotonic() - self._measured_at > FRESH_SECONDS:
                self._share = self._measure()
                if self._share > WATERMARK:
                    return_freed_memory()
                    self._share = self._measure()
                self._measured_at = time.monotonic()
            return self._share

    def require(self) -> None:
        """Raise Busy if too little memory is left to start work."""
        if (share := self.share()) > WATERMARK:
            raise Busy(f"{share:.0%} of the coordinator's memory is in use", retry_after_seconds=RETRY_SECONDS)

    def _measure(self) -> float:
        if self._limit_bytes:
            return own_bytes() / self._limit_bytes
        return max((used_bytes(group) / limit for group, limit in self._groups), default=0.0)


def used_bytes(group: Path) -> int:
    """Return the bytes that a control group uses, without cached pages of files, which it can release."""
    used = next(group / name for name in ("memory.current", "memory.usage_in_bytes") if (group / name).exists())
    cached = re.findall(r"^(?:total_)?(?:in)?active_file (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
    # Version 1 lists each twice: for the group alone, and including its children.
    return int(used.read_text()) - sum(map(int, cached[-2:]))


def own_bytes() -> int:
    """Return the resident bytes of this process, without mapped files."""
    _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGESIZE")
