"""How freed memory is kept."""

from __future__ import annotations

import ctypes

KEPT_BYTES = 64 << 20
HEAPS = 2
"""Of as many threads as there are, each of which would else keep a heap of its own."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


def keep_freed_memory() -> None:
    """Has the C library keep up to 64 MiB of what is freed, rather than hand it back at once.

    A chunk's scratch is a megabyte, just what glibc would map anew each time: half of the time that adding up takes
    then goes into page faults. Does nothing where the C library has no such setting.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, KEPT_BYTES // 2)
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(_M_ARENA_MAX, HEAPS)
