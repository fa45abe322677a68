"""A disk that misbehaves on demand, for every test of what the engine makes of it."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import threading
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from swapkv_jax.generation import Step
from swapkv_jax.tiers import Syscalls
from swapkv_jax.tiers.kernel_reads import KernelReads

SECTOR = 512

# Called as (the real transfer, descriptor, buffer, offset); returns the bytes it says were moved.
Transfer = Callable[[int, np.ndarray, int], int]
Behaviour = Callable[[Transfer, int, np.ndarray, int], int]


class Disk(Syscalls):
    """Every transfer of records goes the way of `reading` or `writing`, where set, also those that the kernel does
    asynchronously. With `threads` it does none: threads read then.

    `arrived` counts the reads that asynchronous batches brought whole.
    """

    reading: Behaviour | None = None
    writing: Behaviour | None = None
    arrived = 0

    def __init__(self, *, threads: bool = False) -> None:
        self.threads = threads

    def kernel_reads(self, size: int) -> KernelReads:
        if self.threads:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        return FaultyReads(size, self)

    def read_at(self, descriptor: int, buffer: np.ndarray, offset: int) -> int:
        if self.reading is None:
            return super().read_at(descriptor, buffer, offset)
        return self.reading(super().read_at, descriptor, buffer, offset)

    def write_at(self, descriptor: int, buffer: np.ndarray, offset: int) -> int:
        if self.writing is None:
            return super().write_at(descriptor, buffer, offset)
        return self.writing(super().write_at, descriptor, buffer, offset)


class FaultyReads(KernelReads):
    """Asynchronous reads of a `Disk`. They have happened by the time that its `reading` takes part."""

    def __init__(self, size: int, disk: Disk) -> None:
        super().__init__(size)
        self._disk = disk
        self._reads: list[tuple[int, int, int, int]] = []  # descriptor, address, bytes, offset

    def submit(
        self, descriptors: np.ndarray, addresses: np.ndarray, nbytes: np.ndarray, offsets: np.ndarray
    ) -> None:
        columns = (column.tolist() for column in (descriptors, addresses, nbytes, offsets))
        self._reads = list(zip(*columns, strict=True))
        super().submit(descriptors, addresses, nbytes, offsets)

    def collect(self) -> np.ndarray:
        results = super().collect()
        reads, self._reads = self._reads, []
        behaviour = self._disk.reading
        if behaviour is not None:
            for i, (descriptor, address, size, offset) in enumerate(reads):
                results[i] = _misread(behaviour, int(results[i]), descriptor, _memory(address, size), offset)
        self._disk.arrived += sum(result == read[2] for result, read in zip(results, reads, strict=True))
        return results


def _misread(behaviour: Behaviour, result: int, descriptor: int, buffer: np.ndarray, offset: int) -> int:
    """What a read that ended with `result` ends with instead. What it does not claim to have moved is spoilt."""

    def transfer(descriptor: int, part: np.ndarray, offset: int) -> int:
        if result < 0:
            raise OSError(-result, os.strerror(-result))
        return min(result, part.size)

    try:
        moved = behaviour(transfer, descriptor, buffer, offset)
    except OSError as error:
        moved = -(error.errno or errno.EIO)
    buffer[max(moved, 0) :] = 0xFF
    return moved


def _memory(address: int, nbytes: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


class Once:
    """The first transfer at each place of each file goes wrong in the way that a subclass says."""

    def __init__(self) -> None:
        self.seen: set[tuple[int, int]] = set()

    def __call__(self, transfer: Transfer, descriptor: int, buffer: np.ndarray, offset: int) -> int:
        if (descriptor, offset) in self.seen:
            return transfer(descriptor, buffer, offset)
        self.seen.add((descriptor, offset))
        return self.wrong(partial(transfer, descriptor), buffer, offset)

    def wrong(self, transfer: Callable[[np.ndarray, int], int], buffer: np.ndarray, offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


class Short(Once):
    """One sector and no more."""

    def wrong(self, transfer: Callable[[np.ndarray, int], int], buffer: np.ndarray, offset: int) -> int:
        return transfer(buffer[:SECTOR], offset)


class Odd(Once):
    """It ends within a sector; what the buffer holds from there on is not the file's."""

    def wrong(self, transfer: Callable[[np.ndarray, int], int], buffer: np.ndarray, offset: int) -> int:
        moved = transfer(buffer, offset) - 5
        buffer[moved:] ^= 0xFF
        return moved


class Wrong(Once):
    """A bit of the first record arrives flipped."""

    def wrong(self, transfer: Callable[[np.ndarray, int], int], buffer: np.ndarray, offset: int) -> int:
        moved = transfer(buffer, offset)
        buffer[99] ^= 4
        return moved


class Slow:
    """Transfers take their time and end out of order."""

    def __init__(self, *pauses_s: float) -> None:
        self._pauses, self._random, self._lock = pauses_s, random.Random(0), threading.Lock()

    def __call__(self, transfer: Transfer, descriptor: int, buffer: np.ndarray, offset: int) -> int:
        with self._lock:
            pause = self._random.choice(self._pauses)
        time.sleep(pause)
        return transfer(descriptor, buffer, offset)


class Always:
    """Every transfer fails. `at` is how many steps had come when the first one did."""

    def __init__(self, code: int, steps: list[Step]) -> None:
        self._code, self._steps = code, steps
        self.at: int | None = None

    def __call__(self, transfer: Transfer, descriptor: int, buffer: np.ndarray, offset: int) -> int:
        if self.at is None:
            self.at = len(self._steps)
        raise OSError(self._code, os.strerror(self._code))
