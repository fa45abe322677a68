"""Random reads of a scratch file and of the store's own files, timed."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import numpy as np

from swapkv_jax.errors import TierError
from swapkv_jax.memory_limits import format_bytes
from swapkv_jax.tiers import Syscalls, aligned_buffer, sequential_read_rate
from swapkv_jax.tiers.direct_io import PAGE, PROBE_PREFIX, probe_direct
from swapkv_jax.tiers.kernel_reads import KernelReads

_THREADS = 64  # reads in flight where the kernel cannot have them
_SEQUENTIAL_BYTES = 256 << 20
_REPEATS = 5


class ScratchFile:
    """A file of random bytes, open for reading, direct where the filesystem takes that; without a name, so that
    nothing of it is left whatever happens."""

    def __init__(self, directory: Path, nbytes: int, syscalls: Syscalls):
        """Raises UsageError: the directory cannot be written. TierError: there is no room for `nbytes`."""
        self.direct = probe_direct(directory, syscalls).direct
        self.nbytes = nbytes
        path = directory / f"{PROBE_PREFIX}scratch-{secrets.token_hex(4)}"
        try:
            try:
                _write(path, nbytes)
                flags = os.O_RDONLY | (os.O_DIRECT if self.direct else 0)
                self.descriptor = syscalls.open(path, flags)
            finally:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise TierError(
                f"cannot write {format_bytes(nbytes)} to measure the disk of {directory}: errno {error.errno}, "
                f"{error.strerror}; make room, or choose another --store-dir"
            ) from error
        self._syscalls = syscalls

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._syscalls.close(self.descriptor)


def _write(path: Path, nbytes: int) -> None:
    block = np.random.default_rng(0).bytes(1 << 20)
    with path.open("xb", buffering=0) as file:
        for done in range(0, nbytes, len(block)):
            file.write(block[: nbytes - done])
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class BatchReader:
    """Batches of random reads of one scratch file: `kind` "kernel", or "threads" where the kernel has no
    asynchronous reads or the page cache is in between."""

    def __init__(self, file: ScratchFile, depth: int, nbytes: int, syscalls: Syscalls):
        """For at most `depth` reads of `nbytes` at a time."""
        self._file, self._syscalls = file, syscalls
        self._buffer = aligned_buffer(depth * nbytes)
        self._rng = np.random.default_rng(0)
        self._kernel: KernelReads | None = None
        self._pool: ThreadPoolExecutor | None = None
        if file.direct:
            with contextlib.suppress(OSError):  # then `kind` says so
                self._kernel = syscalls.kernel_reads(depth)
        if self._kernel is None:
            self._pool = ThreadPoolExecutor(min(depth, _THREADS))
        self.kind = "threads" if self._kernel is None else "kernel"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._kernel is not None:
            self._kernel.close()
        if self._pool is not None:
            self._pool.shutdown()

    def batch_seconds(self, depth: int, nbytes: int, seconds: float) -> float:
        """Median seconds of a batch of `depth` reads of `nbytes`, over `seconds` and three batches at least.

        Raises:
          TierError: a read fails or is short.
        """
        times: list[float] = []
        until = time.perf_counter() + seconds
        while len(times) < 3 or time.perf_counter() < until:
            times.append(self._batch(depth, nbytes))
        return float(np.median(times))

    def _batch(self, depth: int, nbytes: int) -> float:
        places = (self._file.nbytes - nbytes) // PAGE + 1
        offsets = self._rng.integers(places, size=depth) * PAGE
        descriptors, sizes = np.full(depth, self._file.descriptor), np.full(depth, nbytes)
        addresses = self._buffer.ctypes.data + nbytes * np.arange(depth)
        parts = self._buffer[: depth * nbytes].reshape(depth, nbytes)
        if not self._file.direct:
            self._syscalls.drop_cache(self._file.descriptor, 0, 0)
        started = time.perf_counter()
        if self._kernel is not None:
            self._kernel.submit(descriptors, addresses, sizes, offsets)
            moved = self._kernel.collect()
        else:
            assert self._pool is not None
            try:
                moved = np.array([*self._pool.map(self._read, parts, offsets.tolist())])
            except OSError as error:
                moved = np.array([-(error.errno or errno.EIO)])
        taken = time.perf_counter() - started
        if (moved != nbytes).any():
            worst = int(moved.min())
            what = os.strerror(-worst) if worst < 0 else f"{worst} of {nbytes} bytes came"
            raise TierError(
                f"a read of {nbytes} bytes of a file just written failed ({what}); check the disk"
            )
        return taken

    def _read(self, part: np.ndarray, offset: int) -> int:
        return self._syscalls.read_at(self._file.descriptor, part, offset)


def sequential_rate(directory: Path, *, nbytes: int | None = None) -> float:
    """Bytes/s of a plain sequential O_DIRECT read of a new file of `nbytes`: the median of a few tries.

    Raises:
      OSError: the directory cannot be written or read.
    """
    path = directory / f"{PROBE_PREFIX}rate-{secrets.token_hex(4)}"
    try:
        _write(path, nbytes or _SEQUENTIAL_BYTES)
        return float(np.median([sequential_read_rate(path) for _ in range(_REPEATS)])) * 1e6
    finally:
        path.unlink(missing_ok=True)


def random_read_rate(
    paths: Sequence[Path],
    *,
    record_bytes: int,
    alignment: int,
    reads: int,
    depth: int,
    syscalls: Syscalls | None = None,
) -> float:
    """Bytes/s of `reads` reads of `record_bytes` at random multiples of `alignment` in the files, from `depth`
    threads that each have one read in flight. O_DIRECT where the filesystem takes it; else buffered, after the
    files have left the page cache.

    Raises:
        OSError: a file cannot be read. ValueError: none holds a record.
    """
    calls = syscalls or Syscalls()
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
            return sum(calls.read_at(descriptor, buffer, offset) for descriptor, offset in mine)

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
