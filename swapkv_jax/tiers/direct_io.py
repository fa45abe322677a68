"""Reading and writing files past the page cache: aligned buffers, a probed O_DIRECT, whole transfers."""

import contextlib
import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from swapkv_jax.errors import TierError, UsageError
from swapkv_jax.tiers.kernel_reads import KernelReads

PAGE = 4096
PROBE_PREFIX = ".probe-"
"""Files named so hold nothing; a crash may leave one."""

_SECTORS = (512, PAGE)
_RETRY_PAUSES_S = (0.001, 0.02)  # after these, an error that persists is raised
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FINAL = _FULL | {errno.EBADF, errno.EINVAL, errno.EROFS}  # asking again cannot help
_DIRTY_LIMIT = 32 << 20  # buffered writes between two flushes; only flushed pages leave the cache


class Syscalls:
    """Every call that touches a stored file, in one object, so that tests can make them fail."""

    def open(self, path: str | Path, flags: int, mode: int = 0o600) -> int:
        return os.open(path, flags | os.O_CLOEXEC, mode)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def read_at(self, descriptor: int, buffer: np.ndarray, offset: int) -> int:
        return os.preadv(descriptor, [buffer.data], offset)

    def write_at(self, descriptor: int, buffer: np.ndarray, offset: int) -> int:
        return os.pwritev(descriptor, [buffer.data], offset)

    def reserve(self, descriptor: int, offset: int, length: int) -> None:
        os.posix_fallocate(descriptor, offset, length)

    def truncate(self, descriptor: int, length: int) -> None:
        os.ftruncate(descriptor, length)

    def flush(self, descriptor: int) -> None:
        os.fdatasync(descriptor)

    def drop_cache(self, descriptor: int, offset: int, length: int) -> None:
        os.posix_fadvise(descriptor, offset, length, os.POSIX_FADV_DONTNEED)

    def kernel_reads(self, size: int) -> KernelReads:
        return KernelReads(size)

    def try_lock(self, descriptor: int, *, shared: bool = False) -> bool:
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


@dataclass(frozen=True)
class IoCounts:
    """What a store moved so far: system calls that moved data, and their bytes, padding included."""

    bytes_read: int = 0
    bytes_written: int = 0
    reads: int = 0
    writes: int = 0
    retries: int = 0


class IoCounters:
    """A running `IoCounts` that several threads add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals = dict.fromkeys((field.name for field in fields(IoCounts)), 0)

    def add(self, **amounts: int) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self._totals[name] += amount

    def snapshot(self) -> IoCounts:
        with self._lock:
            return IoCounts(**self._totals)


def aligned_buffer(nbytes: int, alignment: int = PAGE) -> np.ndarray:
    """A writable uint8 array `[nbytes]` whose address is a multiple of `alignment`. Content undefined."""
    raw = np.empty(nbytes + alignment, np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + nbytes]


@dataclass(frozen=True)
class DirectSupport:
    """What a directory's filesystem takes: `alignment` of offsets, lengths and addresses for O_DIRECT.

    Without O_DIRECT, `direct` is False, `alignment` a page, and `note` says so for the user.
    """

    direct: bool
    alignment: int
    note: str | None = None


def probe_direct(directory: Path, syscalls: Syscalls) -> DirectSupport:
    """Find out by a real write and read of a throw-away file, since flags and statvfs both mislead.

    A full disk, which takes none either, counts as one without O_DIRECT.

    Raises:
        UsageError: the directory takes no file at all.
    """
    path = directory / f"{PROBE_PREFIX}{os.getpid()}-{threading.get_ident()}"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
    refusal = "this system has no O_DIRECT"
    try:
        if direct_flag := getattr(os, "O_DIRECT", 0):
            # A refusing filesystem has created the file by the time it refuses, hence the two unlinks.
            try:
                descriptor = syscalls.open(path, flags | direct_flag)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                refusal = f"the filesystem refuses O_DIRECT ({os.strerror(errno.EINVAL)})"
            else:
                path.unlink()
                try:
                    for sector in _SECTORS:
                        if _transfers(descriptor, sector, syscalls):
                            return DirectSupport(direct=True, alignment=sector)
                finally:
                    syscalls.close(descriptor)
                refusal = f"the filesystem opens with O_DIRECT but fails {PAGE}-byte transfers"
            path.unlink(missing_ok=True)
        syscalls.close(syscalls.open(path, flags))
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):  # what is there can be read and deleted all the same
            full = (
                f"no room to find out about O_DIRECT ({error.strerror}); using buffered I/O; free some space"
            )
            return DirectSupport(direct=False, alignment=PAGE, note=f"{directory}: {full}")
        raise UsageError(
            f"cannot write in store directory {directory}: errno {error.errno}, {error.strerror}; "
            f"choose another --store-dir"
        ) from error
    finally:
        path.unlink(missing_ok=True)
    note = f"{directory}: {refusal}; using buffered I/O and dropping pages after use"
    return DirectSupport(direct=False, alignment=PAGE, note=note)


def _transfers(descriptor: int, sector: int, syscalls: Syscalls) -> bool:
    """Whether a write and a read at just this alignment (and no better) give the bytes back."""
    buffer = aligned_buffer(4 * PAGE)
    buffer[: 2 * PAGE] = np.arange(2 * PAGE) % 251
    written, read = buffer[sector : 2 * sector], buffer[2 * PAGE + sector : 2 * PAGE + 2 * sector]
    try:
        syscalls.write_at(descriptor, written, sector)
        count = syscalls.read_at(descriptor, read, sector)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return count == sector and np.array_equal(read, written)


# Long reads follow one another on disk. Three at a time keep it busy; more arrive out of order and cost a
# sequential disk a fifth of its rate (measured: 2.0 GB/s with six, 2.4 with three, 2.0 with one).
LONG_READ_BYTES = 1 << 20
_long_reads = threading.BoundedSemaphore(3)


class AlignedFile:
    """Whole, retried transfers on one open descriptor, direct or buffered."""

    def __init__(
        self,
        path: Path,
        descriptor: int,
        support: DirectSupport,
        counters: IoCounters,
        syscalls: Syscalls,
    ) -> None:
        """Take over `descriptor`, opened on `path` with O_DIRECT iff `support.direct`."""
        self.path = path
        self.descriptor = descriptor
        self.support = support
        self._counters = counters
        self._syscalls = syscalls
        self._dirty = 0

    def read(self, buffer: np.ndarray, offset: int) -> None:
        """Fill the 1-D `buffer` from `offset`, over short reads, interruptions and passing errors.

        Raises:
            TierError: the file ends early, or the error persists.
        """
        with _long_reads if buffer.size >= LONG_READ_BYTES else contextlib.nullcontext():
            self._transfer(self._syscalls.read_at, "read", buffer, offset)
        if not self.support.direct:
            self._syscalls.drop_cache(self.descriptor, offset, buffer.size)

    def write(self, buffer: np.ndarray, offset: int) -> None:
        """Write the whole 1-D `buffer` at `offset`, likewise.

        Raises:
            TierError: the error persists, or says that the disk is full.
        """
        self._transfer(self._syscalls.write_at, "write", buffer, offset)
        if not self.support.direct:
            self._dirty += buffer.size
            if self._dirty >= _DIRTY_LIMIT:
                self.flush()

    def flush(self) -> None:
        """Wait until what was written is on the device.

        Raises:
            TierError: the device says it is not.
        """
        try:
            self._syscalls.flush(self.descriptor)
        except OSError as error:
            raise TierError(
                f"cannot flush {self.path}: errno {error.errno}, {error.strerror}; check the disk"
            ) from error
        if not self.support.direct:
            self._dirty = 0
            self._syscalls.drop_cache(self.descriptor, 0, 0)

    def close(self) -> None:
        """Close the descriptor."""
        self._syscalls.close(self.descriptor)

    def _transfer(
        self, call: Callable[[int, np.ndarray, int], int], verb: str, buffer: np.ndarray, offset: int
    ) -> None:
        done = failures = 0
        while done < buffer.size:
            reason: OSError | str
            try:
                moved = call(self.descriptor, buffer[done:], offset + done)
            except InterruptedError:
                continue
            except OSError as error:
                moved, reason = 0, error
            else:
                counts = {f"{verb}s": 1, f"bytes_{'read' if verb == 'read' else 'written'}": moved}
                self._counters.add(**counts)
                reason = "the file ends early"
            reached = done + moved
            if reached < buffer.size:
                # O_DIRECT can only go on from an aligned place: repeat the tail of an odd short transfer.
                reached -= reached % self.support.alignment
            if reached > done:
                done = reached
                continue
            final = isinstance(reason, OSError) and reason.errno in _FINAL
            if final or failures == len(_RETRY_PAUSES_S):
                raise self._failure(verb, reason, offset + done, buffer.size - done)
            self._counters.add(retries=1)
            time.sleep(_RETRY_PAUSES_S[failures])
            failures += 1

    def _failure(self, verb: str, reason: OSError | str, offset: int, left: int) -> TierError:
        where = f"cannot {verb} {left} bytes at {offset} of {self.path}"
        if isinstance(reason, str):
            return TierError(f"{where}: {reason}; delete the file, its sequence must be prefilled again")
        full = reason.errno in _FULL
        remedy = "free some space or choose another --store-dir" if full else "check the disk"
        return TierError(f"{where}: errno {reason.errno}, {reason.strerror}; {remedy}")


def sequential_read_rate(
    path: Path,
    *,
    chunk_bytes: int = 1 << 20,
    limit_bytes: int | None = None,
    syscalls: Syscalls | None = None,
) -> float:
    """MB/s (10^6 bytes) at which one thread reads the file from its start: the yardstick for the store.

    O_DIRECT where the filesystem takes it, else buffered after dropping the file from the page cache.
    `chunk_bytes` must be a multiple of 4096; reading stops at `limit_bytes` or the last whole chunk.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is shorter than one chunk.
    """
    buffer = aligned_buffer(chunk_bytes)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        descriptor = os.open(path, os.O_RDONLY)
    with os.fdopen(descriptor, "rb", buffering=0):
        size = os.fstat(descriptor).st_size
        end = min(size, limit_bytes or size) // chunk_bytes * chunk_bytes
        if end == 0:
            raise ValueError(f"{path} has {size} bytes, less than one chunk of {chunk_bytes}")
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        start = time.perf_counter()
        read = (syscalls or Syscalls()).read_at
        moved = sum(read(descriptor, buffer, offset) for offset in range(0, end, chunk_bytes))
        return moved / (time.perf_counter() - start) / 1e6
