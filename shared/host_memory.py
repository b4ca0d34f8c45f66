"""The memory limit of this process, and the C library's handling of freed memory."""

import ctypes
import os
from pathlib import Path

KEPT_BYTES = 64 << 20
HEAPS = 2
"""Of as many threads as there are, each of which would else keep a heap of its own."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


def keep_freed_memory() -> None:
    """Make the C library keep up to 64 MiB of freed memory, rather than return it at once.

    The scratch of a chunk is one megabyte, which glibc would map again each time: page faults would then take half
    of the time of summing. Does nothing if the C library has no such setting.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, KEPT_BYTES // 2)
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(_M_ARENA_MAX, HEAPS)


def return_freed_memory() -> None:
    """Give all freed memory back to the system. Does nothing if the C library cannot."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


UNLIMITED_BYTES = 1 << 60
"""Version 1 of control groups says no limit with a very large one."""

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def available_bytes(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int:
    """Return the machine's memory, or the least limit of the control groups that this process is in."""
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE")
    return min(whole, *(limit for _, limit in groups(cgroups, membership)), whole)


def groups(cgroups: Path, membership: Path) -> list[tuple[Path, int]]:
    """Return the control groups, of version 1 or 2, that this process is in and that have a limit, with it."""
    if not membership.exists():
        return []
    found = []
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top = cgroups / controllers
        inside = top / path.lstrip("/")
        # A container may be shown the path that it has outside; its own group is then at the top.
        inside_out = (group for group in (inside, *inside.parents) if group.is_relative_to(top))
        found += [(group, limit) for group in inside_out if (limit := _limit(group))]
    return found


def _limit(group: Path) -> int | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        if (group / name).exists():
            told = (group / name).read_text().strip()
            return int(told) if told != "max" and int(told) < UNLIMITED_BYTES else None
    return None
