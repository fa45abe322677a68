"""What the machine under a benchmark can do: its processor, memory bandwidth, disk rate and load."""

from __future__ import annotations

import errno
import os
import platform
import secrets
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import numpy as np

from swapkv_jax.tiers import aligned_buffer, sequential_read_rate

_BANDWIDTH_BYTES = 256 << 20  # per core: far more than any cache holds
_DISK_BYTES = 256 << 20
_REPEATS = 5


def cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0))


def load() -> float:
    """Processes running or waiting, averaged over the last minute. Near 1 is this process alone."""
    return round(os.getloadavg()[0], 2)


def facts(disk: Path | None) -> dict[str, Any]:
    """The machine, measured now. `disk` is the directory whose disk counts, None where none does."""
    return {
        "cpu": _cpu(),
        "cores": cores(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "memory_bytes_per_s": memory_bandwidth(),
        "disk_bytes_per_s": None if disk is None else disk_rate(disk),
        "jax": jax.__version__,
        "backend": jax.default_backend(),
        "python": platform.python_version(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def memory_bandwidth() -> float:
    """Bytes/s that all cores together read from memory: the best of a few tries."""
    buffers = [np.ones(_BANDWIDTH_BYTES // 8, np.int64) for _ in range(cores())]
    best = 0.0
    for _ in range(_REPEATS):
        threads = [threading.Thread(target=buffer.max) for buffer in buffers]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        best = max(best, len(buffers) * _BANDWIDTH_BYTES / (time.perf_counter() - started))
    return best


def disk_rate(directory: Path) -> float:
    """Bytes/s of a plain sequential O_DIRECT read of a new file: the median of a few tries."""
    path = directory / f"rate-{secrets.token_hex(4)}"
    try:
        with path.open("wb", buffering=0) as file:
            block = np.random.default_rng(0).bytes(1 << 20)
            for _ in range(_DISK_BYTES // len(block)):
                file.write(block)
            os.fsync(file.fileno())
        return float(np.median([sequential_read_rate(path) for _ in range(_REPEATS)])) * 1e6
    finally:
        path.unlink(missing_ok=True)


def random_read_rate(
    paths: Sequence[Path], *, record_bytes: int, alignment: int, reads: int, depth: int
) -> float:
    """Bytes/s of `reads` reads of `record_bytes` at random multiples of `alignment` in the files, from `depth`
    threads that each have one read in flight. O_DIRECT where the filesystem takes it; else buffered, after the
    files have left the page cache.

    Raises:
        OSError: a file cannot be read. ValueError: none holds a record.
    """
    with ExitStack() as stack:
        files = []
        for path in paths:
            descriptor = _open_direct(path)
            stack.callback(os.close, descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            places = (os.fstat(descriptor).st_size - record_bytes) // alignment + 1
            files += [(descriptor, places)] if places > 0 else []
        if not files:
            raise ValueError(f"no file holds a record of {record_bytes} bytes")
        rng = np.random.default_rng()
        chosen = [files[i] for i in rng.integers(len(files), size=reads)]
        offsets = [(descriptor, int(rng.integers(places)) * alignment) for descriptor, places in chosen]

        def read(mine: list[tuple[int, int]]) -> int:
            buffer = aligned_buffer(record_bytes)
            return sum(os.preadv(descriptor, [buffer.data], offset) for descriptor, offset in mine)

        with ThreadPoolExecutor(depth) as pool:
            list(pool.map(time.sleep, [0.01] * depth))  # every thread is there before the clock starts
            started = time.perf_counter()
            moved = sum(pool.map(read, [offsets[i::depth] for i in range(depth)]))
            return moved / (time.perf_counter() - started)


def _open_direct(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, os.O_RDONLY)


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
