"""The boundary between host buffers and device arrays; the only module that turns one into the other.

On the CPU backend device memory *is* host memory: an aligned NumPy buffer becomes a device array without a
copy, which is fast and unsafe, since JAX does not know when the buffer is written again. Two rules keep it
safe. A buffer is rewritten only after the output of its last consumer is ready (`StagingRing` holds that
fence), and what a program reads is never what the host writes meanwhile (`engine` orders write-backs).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np

from swapkv_jax.errors import TierError
from swapkv_jax.plan import Transport
from swapkv_jax.tiers import aligned_buffer

HUGE_PAGE = 2 << 20  # bytes
ALIAS_ALIGNMENT = 64  # bytes at which the CPU client takes a NumPy buffer as it is


def _device() -> Any:
    return jax.devices()[0]


def device_sharding() -> jax.sharding.Sharding:
    """Where a plan's device buffers live."""
    return jax.sharding.SingleDeviceSharding(_device())


def compute_capability() -> float | None:
    """The device's, as 9.0 is Hopper's; None for what is no CUDA device."""
    try:
        return float(getattr(_device(), "compute_capability", ""))
    except ValueError:  # AMD's are names
        return None


def pinned_sharding() -> jax.sharding.Sharding:
    """Where a plan's pinned host buffers live."""
    return jax.sharding.SingleDeviceSharding(_device(), memory_kind="pinned_host")


def host_view(array: jax.Array) -> np.ndarray:
    """A writable NumPy view of an array in host memory (CPU device memory, or pinned_host anywhere).

    The caller keeps `array` alive, and neither donates it nor lets a program read it while writing.

    Raises:
        TierError: the array's memory is not the host's.
    """
    kind = array.sharding.memory_kind
    if _device().platform != "cpu" and kind != "pinned_host":
        raise TierError(f"an array in {kind} memory of a {_device().platform} cannot be viewed from the host")
    array.block_until_ready()
    raw = (ctypes.c_uint8 * array.nbytes).from_address(array.unsafe_buffer_pointer())
    return np.frombuffer(memoryview(raw), dtype=array.dtype).reshape(array.shape)


def alias(view: np.ndarray) -> jax.Array:
    """The CPU device array that *is* `view`.

    Raises:
        TierError: the backend made a copy instead (another platform, or a misaligned buffer).
    """
    array = jax.device_put(view, device_sharding())
    if array.unsafe_buffer_pointer() != view.ctypes.data:
        raise TierError(
            f"the {_device().platform} backend copied a host buffer at {view.ctypes.data:#x} instead of "
            f'aliasing it; use a plan with transport "copy"'
        )
    return array


def pinned(shape: tuple[int, ...], dtype: str) -> tuple[jax.Array, np.ndarray]:
    """A pinned_host array of zeros and a writable view of its memory."""
    array = jax.device_put(np.zeros(shape, dtype), pinned_sharding())
    return array, host_view(array)


def to_device(array: jax.Array) -> jax.Array:
    """Starts the copy of a pinned_host array to the device."""
    return jax.device_put(array, device_sharding())


def zeros(shape: tuple[int, ...], dtype: str) -> jax.Array:
    """A device buffer of zeros, not shared with anything."""
    return jnp.zeros(shape, dtype, device=device_sharding())


def put(values: np.ndarray) -> jax.Array:
    """A device array of its own with these values."""
    return jnp.array(values, device=device_sharding(), copy=True)


def fetch(array: jax.Array) -> np.ndarray:
    """A copy of a device array, once it is ready. Leaves no reference that would keep it from donation."""
    return np.array(array, copy=True)


def is_ready(array: jax.Array) -> bool:
    """Whether a device array has been computed."""
    return array.is_ready()  # pyright: ignore[reportAttributeAccessIssue]  (its stub lacks it)


def read_only_view(array: jax.Array) -> np.ndarray:
    """A device array's content for a host thread to read: without a copy on a CPU, else fetched."""
    return host_view(array) if _device().platform == "cpu" else np.asarray(array)


class StagingRing:
    """Host buffers that carry records to the device, used in turn, each guarded by its consumer's fence.

    Slot i is filled by an I/O thread, consumed by a program the engine launches, and may be filled again
    only when that program's output is ready: until then the program may still be reading it.
    """

    def __init__(self, slots: int, shape: tuple[int, int], dtype: str, transport: Transport):
        """`slots` buffers of `shape` (records, values per record), zeroed: their memory is all finite."""
        self._fences: list[jax.Array | None] = [None] * slots
        # One allocation, so that NumPy asks for huge pages: O_DIRECT then pins and the disk gathers few long
        # pieces instead of a page at a time (16 % more bytes/s into 1 MiB slots).
        arena = aligned_buffer(slots * int(np.prod(shape)) * np.dtype(dtype).itemsize, HUGE_PAGE)
        arena[...] = 0
        self.buffers = list(arena.view(dtype).reshape(slots, *shape))
        self._aliases = [alias(buffer) for buffer in self.buffers] if transport == "alias" else None

    def __len__(self) -> int:
        return len(self.buffers)

    def records(self, slot: int) -> np.ndarray:
        """The slot as the disk store reads and writes it: uint8 [records, stride]."""
        return self.buffers[slot].view(np.uint8)

    def arrived(self, slot: int) -> jax.Array:
        """The slot's content on the device, or on its way there."""
        if self._aliases is not None:
            return self._aliases[slot]
        return jax.device_put(self.buffers[slot], device_sharding())

    def publish(self, slot: int, fence: jax.Array) -> None:
        """Says that the program whose output is `fence` is the last to read the slot."""
        self._fences[slot] = fence

    def wait_reusable(self, slot: int) -> None:
        """Blocks until nothing reads the slot any more. Called by the thread about to fill it."""
        fence = self._fences[slot]
        if fence is not None:
            fence.block_until_ready()


class StagingBuffer:
    """Host memory for the records of one load, seen by the device in several sizes.

    The caller refills it only when the output of the load that read it is ready.
    """

    def __init__(self, sizes: Sequence[int], values: int, dtype: str, transport: Transport):
        """Room for the largest of `sizes` records of `values` values each, zeroed."""
        itemsize = np.dtype(dtype).itemsize
        self.buffer = aligned_buffer(max(sizes) * values * itemsize).view(dtype).reshape(max(sizes), values)
        self.buffer[...] = 0
        self._aliases = {n: alias(self.buffer[:n]) for n in sizes} if transport == "alias" else None

    @property
    def records(self) -> np.ndarray:
        """As the disk store reads: uint8 [records, stride]."""
        return self.buffer.view(np.uint8)

    def arrived(self, size: int) -> jax.Array:
        """The first `size` records on the device, or on their way there."""
        if self._aliases is not None:
            return self._aliases[size]
        return jax.device_put(self.buffer[:size], device_sharding())


class Flags:
    """A small bool array that the host sets between steps: aliased by the device on a CPU, else sent."""

    def __init__(self, shape: tuple[int, ...], transport: Transport):
        self.host = aligned_buffer(int(np.prod(shape)), ALIAS_ALIGNMENT).view(np.bool_).reshape(shape)
        self.host[...] = False
        self._aliased = transport == "alias"
        self._device = alias(self.host) if self._aliased else jax.device_put(self.host, device_sharding())

    @property
    def device(self) -> jax.Array:
        if not self._aliased:
            self._device = jax.device_put(self.host, device_sharding())
        return self._device
