"""What the C library does with memory that a graph has freed."""

from __future__ import annotations

import ctypes
import platform

# mallopt(3) of glibc.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT, _LARGEST = 128 << 20, 64 << 20


def keep_freed_memory() -> None:
    """Lets this process keep up to 128 MiB that it frees, in pieces of up to 64 MiB, for its next allocations.

    XLA's CPU client allocates a graph's temporaries anew at every call. By default glibc may give each back to the
    system, and every page of the next is a fault: attention over 7,744 tokens then took two to five times as long,
    depending on what was allocated before. Other C libraries are left alone.
    """
    if platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, _LARGEST)
        mallopt(_TRIM_THRESHOLD, _KEPT)
