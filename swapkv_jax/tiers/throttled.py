"""A disk made slower, so that a small device's storage can be had on any machine."""

from __future__ import annotations

import ctypes
import heapq
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from swapkv_jax.errors import UsageError
from swapkv_jax.tiers.direct_io import Syscalls
from swapkv_jax.tiers.kernel_reads import KernelReads

_PR_SET_TIMERSLACK = 29


@dataclass(frozen=True, kw_only=True)
class StorageProfile:
    """A disk that serves `queue_depth` reads at a time, each after `read_latency` seconds, and moves their bytes one
    after the other at `bandwidth` bytes/s.

    So one read of n bytes takes read_latency + n / bandwidth, and many in flight get the lower of bandwidth and
    queue_depth · n / read_latency.
    """

    name: str
    bandwidth: float
    read_latency: float
    queue_depth: int


# Bandwidths as KVSwap measured them (arXiv 2511.11907), which also says that reads of 512 bytes use less than 6 % of
# them: here 5.7 and 2.3 %. An eMMC's 10,000 random reads of 4 KiB a second are what such parts are specified for.
PROFILES = {
    profile.name: profile
    for profile in (
        StorageProfile(name="nvme-1.8GBps", bandwidth=1.8e9, read_latency=80e-6, queue_depth=16),
        StorageProfile(name="emmc-250MBps", bandwidth=250e6, read_latency=180e-6, queue_depth=2),
    )
}


def storage_profile(name: str) -> StorageProfile:
    """The profile of that name.

    Raises:
        UsageError: there is none.
    """
    try:
        return PROFILES[name]
    except KeyError:
        raise UsageError(f"no storage profile {name!r}; the profiles are {', '.join(PROFILES)}") from None


class Schedule:
    """When a profile's disk is done with each read that it is given; in any clock's seconds."""

    def __init__(self, profile: StorageProfile) -> None:
        self._profile = profile
        self._places = [float("-inf")] * profile.queue_depth  # a heap: when each place in the queue is free
        self._idle = float("-inf")  # when the last byte so far has moved

    def done(self, now: float, sizes: Sequence[int]) -> list[float]:
        """When reads of `sizes` bytes that are asked for `now` end, in the order they are served."""
        p = self._profile
        ends = []
        for size in sizes:
            began = max(now, self._places[0])
            self._idle = max(self._idle, began + p.read_latency) + size / p.bandwidth
            heapq.heapreplace(self._places, self._idle)
            ends.append(self._idle)
        return ends


class ThrottledDisk(Syscalls):
    """The real disk, whose reads end no sooner than the profile's disk would end them, whoever reads and however:
    one by one or many at a time. All of them share one queue. Writes are as fast as ever.

    Where the real disk is the slower one, it stays what it is.
    """

    def __init__(
        self,
        profile: StorageProfile,
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] | None = None,
    ) -> None:
        """`clock` and `sleep` (seconds) are for tests."""
        self.profile = profile
        self._schedule = Schedule(profile)
        self._lock = threading.Lock()
        self._clock = clock
        self._sleep = sleep or _sleep_precisely

    def read_at(self, descriptor: int, buffer: np.ndarray, offset: int) -> int:
        due = self.ask([buffer.size])
        moved = super().read_at(descriptor, buffer, offset)
        self.wait(due)
        return moved

    def kernel_reads(self, size: int) -> KernelReads:
        return _ThrottledReads(size, self)

    def ask(self, sizes: Sequence[int]) -> float:
        """Queues reads; returns when the last of them ends."""
        with self._lock:
            now = self._clock()
            return max(self._schedule.done(now, sizes), default=now)

    def wait(self, due: float) -> None:
        """Returns at `due`, or at once if that is over."""
        left = due - self._clock()
        if left > 0:
            self._sleep(left)


class _ThrottledReads(KernelReads):
    def __init__(self, size: int, disk: ThrottledDisk) -> None:
        super().__init__(size)
        self._disk = disk
        self._due = float("-inf")

    def submit(
        self, descriptors: np.ndarray, addresses: np.ndarray, nbytes: np.ndarray, offsets: np.ndarray
    ) -> None:
        self._due = self._disk.ask(nbytes.tolist())
        super().submit(descriptors, addresses, nbytes, offsets)

    def collect(self) -> np.ndarray:
        results = super().collect()
        self._disk.wait(self._due)
        return results


_precise = threading.local()
_SPIN_S = 30e-6  # a sleep ends so much late


def _sleep_precisely(seconds: float) -> None:
    """Sleeps to the microsecond: without the 50 that Linux adds so as to wake several threads at once, and not
    through the last moment."""
    until = time.perf_counter() + seconds
    if not getattr(_precise, "set", False):
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1000, 0, 0, 0)  # nanoseconds; of this thread
        _precise.set = True
    if seconds > _SPIN_S:
        time.sleep(seconds - _SPIN_S)
    while time.perf_counter() < until:
        pass
