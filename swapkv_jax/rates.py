"""How fast memory and the link to the device are: measured, and kept per device."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np

from swapkv_jax import measured
from swapkv_jax.cgroups import usable_cores
from swapkv_jax.staging import fetch, pinned, put, to_device
from swapkv_jax.talk import Progress

_MEMORY_BYTES = 256 << 20  # per core: far more than any cache holds
_LINK_BYTES = 64 << 20
_REPEATS = 5


class DeviceRates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bytes/s of one JAX device: from the memory it computes in, from pinned host memory to it, and back.

    On a CPU `memory` is read by all usable cores together and the link is a copy within memory.
    """

    identity: str
    measured: str
    memory: float
    to_device: float
    from_device: float

    def __post_init__(self) -> None:
        if not all(0 < rate < float("inf") for rate in (self.memory, self.to_device, self.from_device)):
            raise ValueError("rates must be positive and finite")


def memory_bandwidth(progress: Progress | None = None) -> float:
    """Bytes/s that the default device reads from its memory: the best of a few tries, since only a moment in which
    nobody else used it tells."""
    cpu = jax.default_backend() == "cpu"
    return _best(_host_read if cpu else _device_read, "memory bandwidth (tries)", progress)


def to_device_bandwidth(progress: Progress | None = None) -> float:
    """Bytes/s from pinned host memory to the default device, one transfer after the other: the median of a few."""
    source, _ = pinned((_LINK_BYTES,), "uint8")
    return _median(lambda: to_device(source), "host to device (tries)", progress)


def from_device_bandwidth(progress: Progress | None = None) -> float:
    """Bytes/s from the default device to the host, likewise."""
    array = put(np.zeros(_LINK_BYTES, np.uint8))
    return _median(lambda: fetch(array), "device to host (tries)", progress)


def measure_device_rates(progress: Progress | None = None) -> DeviceRates:
    """All rates of the default device, measured now."""
    return DeviceRates(
        identity=device_identity(),
        measured=measured.now(),
        memory=memory_bandwidth(progress),
        to_device=to_device_bandwidth(progress),
        from_device=from_device_bandwidth(progress),
    )


def saved_device_rates() -> tuple[DeviceRates | None, str]:
    """The rates kept for the default device if they may be used, else None; and a note that says so."""
    identity = device_identity()
    rates, why = measured.load(_path(), DeviceRates, identity)
    name = jax.devices()[0].device_kind
    if rates is None:
        return None, f"{name}: no rates ({why})"
    return rates, f"{name}: rates measured {rates.measured[:10]}"


def ensure_device_rates(progress: Progress | None = None) -> tuple[DeviceRates, str]:
    """As `saved_device_rates`, but measured and kept where there are none to be used.

    Raises:
      TierError: the cache cannot be written.
    """
    rates, note = saved_device_rates()
    if rates is None:
        rates = remeasure_device_rates(progress)
        note = f"{note}: measured now"
    return rates, note


def remeasure_device_rates(progress: Progress | None = None) -> DeviceRates:
    """Measures the rates and keeps them, whatever was kept before. TierError: the cache cannot be written."""
    rates = measure_device_rates(progress)
    measured.save(_path(), rates)
    return rates


def device_identity() -> str:
    """Host, backend, kind of the default device and the cores beside it: what its rates are true of."""
    device = jax.devices()[0]
    return f"{measured.host_name()}, {device.platform} {device.device_kind}, {usable_cores()} cores"


def _path() -> Path:
    return measured.record_path("device", jax.devices()[0].device_kind)


def _host_read() -> float:
    buffers = [np.ones(_MEMORY_BYTES // 8, np.int64) for _ in range(usable_cores())]
    threads = [threading.Thread(target=buffer.max) for buffer in buffers]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(buffers) * _MEMORY_BYTES / (time.perf_counter() - started)


def _device_read() -> float:
    array = put(np.ones(_MEMORY_BYTES // 4, np.float32))
    total = jax.jit(lambda a: a.sum())
    total(array).block_until_ready()
    started = time.perf_counter()
    total(array).block_until_ready()
    return _MEMORY_BYTES / (time.perf_counter() - started)


def _best(rate: Callable[[], float], bar: str, progress: Progress | None) -> float:
    return max(_tries(rate, bar, progress))


def _median(transfer: Callable[[], Any], bar: str, progress: Progress | None) -> float:
    def rate() -> float:
        started = time.perf_counter()
        jax.block_until_ready(transfer())
        return _LINK_BYTES / (time.perf_counter() - started)

    rate()  # the first one maps memory
    return statistics.median(_tries(rate, bar, progress))


def _tries(rate: Callable[[], float], bar: str, progress: Progress | None) -> list[float]:
    rates = []
    for done in range(_REPEATS):
        rates.append(rate())
        if progress is not None:
            progress(bar, done + 1, _REPEATS)
    return rates
