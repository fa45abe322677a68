"""The DRAM tier: one locked arena that holds the KV of many sequences in page-aligned blocks."""

import ctypes
import math
import mmap
import os
import resource
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike

from swapkv_jax.errors import TierError, UsageError
from swapkv_jax.memory_limits import available_memory, format_bytes
from swapkv_jax.tiers.eviction import SequenceOrder
from swapkv_jax.tiers.free_list import FreeList

BLOCK_BYTES = 4096
"""Alignment and rounding of every block: a page, an O_DIRECT sector, and 64 × the alignment at which
`jax.device_put` aliases a host buffer on CPU."""


@dataclass(eq=False, slots=True)
class TensorRef:
    """Where one tensor lies in the arena. Only the pool sets `freed`, once, when the block goes back."""

    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype
    freed: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor itself."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes it takes from the pool."""
        return -(-self.nbytes // BLOCK_BYTES) * BLOCK_BYTES


class DramPool:
    """`capacity` bytes of anonymous memory, mapped once, locked, and handed out in 4096-byte blocks.

    A mapping table (sequence, name) → `TensorRef` says where each tensor lies. A sequence is *active* from
    its first allocation until `finish`, then *past*: it keeps its blocks, and `activate` brings it back,
    until an allocation that does not fit evicts it. Active sequences are never evicted.

    NumPy views alias the arena, and so does a JAX CPU array made from one. A block that was freed or
    evicted is handed out again, so views of it must no longer be read. Allocate, free and finish from one
    thread; `view` and `lookup` may be called from any.
    """

    def __init__(self, capacity: int, *, lock: bool = True) -> None:
        """Map (and unless `lock` is False, lock) `capacity` bytes, rounded down to whole blocks.

        A lock the system refuses leaves the memory pageable, with a RuntimeWarning that names the limit.

        Raises:
            UsageError: less than one block.
            TierError: more than the machine or the cgroup has left.
        """
        self.capacity = capacity // BLOCK_BYTES * BLOCK_BYTES
        if self.capacity <= 0:
            raise UsageError(f"a DRAM pool of {capacity} bytes holds nothing: give at least {BLOCK_BYTES}")
        available = available_memory()
        if self.capacity > available:
            raise TierError(
                f"a DRAM pool of {format_bytes(self.capacity)} is {format_bytes(self.capacity - available)} "
                f"more than is available; --dram-memory up to {format_bytes(available)} would fit"
            )
        try:
            arena = mmap.mmap(-1, self.capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise TierError(
                f"cannot map a DRAM pool of {format_bytes(self.capacity)}: {_describe(error.errno)}; "
                f"lower --dram-memory or raise the address-space limit (ulimit -v)"
            ) from error
        self._arena = arena
        # Views descend from this array: it exports the map's buffer, so the map cannot be closed under them
        # (np.ndarray(buffer=map) would not).
        self._bytes: np.ndarray | None = np.frombuffer(arena, np.uint8)
        self.locked = lock and _lock_pages(self._bytes)
        self.evictions = 0
        self._runs = FreeList(self.capacity)
        self._tables: dict[str, dict[str, TensorRef]] = {}
        self._order = SequenceOrder()

    @property
    def free_bytes(self) -> int:
        """Bytes in no block. They need not lie in one run."""
        return self._runs.total

    @property
    def used(self) -> int:
        """Bytes in blocks, past sequences included."""
        return self.capacity - self.free_bytes

    @property
    def active(self) -> tuple[str, ...]:
        """Sequences that cannot be evicted."""
        return self._order.active

    @property
    def past(self) -> tuple[str, ...]:
        """Sequences that can be evicted, next victim first."""
        return self._order.past

    @property
    def note(self) -> str | None:
        """What the user should know of the memory, if anything."""
        return None if self.locked else "the DRAM pool is not locked in memory: it may be swapped out"

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._tables

    def allocate(self, sequence: str, name: str, shape: Sequence[int], dtype: DTypeLike) -> TensorRef:
        """A block for one tensor of `sequence`, which becomes active. Its content is undefined.

        Raises:
            ValueError: an empty shape, or a name the sequence already has.
            TierError: no room even without the past sequences; the pool is then as it was.
        """
        return self._allocate([sequence], name, shape, dtype)[0]

    def allocate_rows(
        self, sequences: Sequence[str], name: str, shape: Sequence[int], dtype: DTypeLike
    ) -> list[TensorRef]:
        """One contiguous run of equal blocks, row b a ref of its own that belongs to `sequences[b]`.

        `rows_view` shows the batch as one array without a copy; each row is freed with its sequence.

        Raises:
            ValueError: as `allocate`, a sequence twice, or a row that is not a whole number of 4096-byte
                blocks.
            TierError: as `allocate`.
        """
        return self._allocate(list(sequences), name, shape, dtype)

    def lookup(self, sequence: str, name: str) -> TensorRef:
        """The ref of a tensor.

        Raises:
            TierError: the sequence has none of that name (never allocated, freed, or evicted).
        """
        try:
            return self._tables[sequence][name]
        except KeyError:
            raise TierError(
                f"the DRAM pool holds no tensor {name!r} of sequence {sequence!r}: it was freed, evicted or "
                f"never allocated; prefill the sequence again"
            ) from None

    def view(self, ref: TensorRef) -> np.ndarray:
        """The tensor as a writable array of `ref.shape`, aliasing the arena.

        Raises:
            TierError: the ref was freed, or the pool is closed.
        """
        return self._ndarray(ref, ref.shape)

    def rows_view(self, refs: Sequence[TensorRef]) -> np.ndarray:
        """The rows of one `allocate_rows` (or some adjacent ones, in order) as one array `[B, *shape]`.

        Raises:
            ValueError: the rows are not adjacent or differ in shape or dtype.
            TierError: one of them was freed, or the pool is closed.
        """
        if not refs:
            raise ValueError("no rows to view")
        first = refs[0]
        for index, ref in enumerate(refs):
            self._check_live(ref)
            if (ref.shape, ref.dtype) != (first.shape, first.dtype):
                raise ValueError(f"row {index} is {ref.dtype}{ref.shape}, row 0 {first.dtype}{first.shape}")
            if ref.offset != first.offset + index * first.nbytes:
                raise ValueError(f"row {index} at offset {ref.offset} does not follow row {index - 1}")
        return self._ndarray(first, (len(refs), *first.shape))

    def activate(self, sequence: str) -> None:
        """Protect a past sequence again, to decode on.

        Raises:
            TierError: the pool no longer holds it.
        """
        self._check_known(sequence)
        self._order.activate(sequence)

    def finish(self, sequence: str) -> None:
        """Make a sequence past: it stays until the room is needed.

        Raises:
            TierError: the pool does not hold it.
        """
        self._check_known(sequence)
        self._order.finish(sequence)

    def free(self, sequence: str) -> None:
        """Free every block of a sequence now, active or past.

        Raises:
            TierError: the pool does not hold it.
        """
        self._check_known(sequence)
        for ref in self._tables.pop(sequence).values():
            ref.freed = True
            self._runs.release(ref.offset, ref.block_bytes)
        self._order.discard(sequence)

    def close(self) -> bool:
        """Give the arena back. False where a live view still pins it: then its last view unmaps it.

        Either way every ref is freed, and no view ever points at unmapped memory.
        """
        for sequence in list(self._tables):
            self.free(sequence)
        self._bytes = None
        try:
            self._arena.close()
        except BufferError:
            return False
        return True

    def _allocate(
        self, sequences: list[str], name: str, shape: Sequence[int], dtype: DTypeLike
    ) -> list[TensorRef]:
        self._check_open()
        rows = [TensorRef(0, tuple(shape), np.dtype(dtype)) for _ in sequences]
        if not rows or rows[0].nbytes <= 0 or min(rows[0].shape, default=1) < 0:
            raise ValueError(f"nothing to allocate: {len(rows)} rows of shape {tuple(shape)}")
        if len(rows) > 1 and rows[0].nbytes != rows[0].block_bytes:
            raise ValueError(
                f"a row of {rows[0].nbytes} bytes is not a multiple of {BLOCK_BYTES}: pad the shape "
                f"{tuple(shape)}, or allocate each row on its own"
            )
        if len(set(sequences)) != len(sequences):
            raise ValueError(f"a sequence appears twice in {sequences}")
        for sequence in sequences:
            if name in self._tables.get(sequence, ()):
                raise ValueError(f"sequence {sequence!r} already has a tensor {name!r}")

        offset = self._make_room(len(rows) * rows[0].block_bytes, keep=sequences)
        for row, (sequence, ref) in enumerate(zip(sequences, rows, strict=True)):
            ref.offset = offset + row * ref.block_bytes
            self._tables.setdefault(sequence, {})[name] = ref
            self._order.activate(sequence)
        return rows

    def _make_room(self, length: int, keep: list[str]) -> int:
        """Offset of `length` free bytes, evicting past sequences outside `keep` only if that yields them."""
        offset = self._runs.allocate(length)
        if offset is not None:
            return offset
        trial = self._runs.copy()

        def suffices(sequence: str) -> bool:
            for ref in self._tables[sequence].values():
                trial.release(ref.offset, ref.block_bytes)
            return trial.largest >= length

        victims = self._order.victims(suffices, keep)
        if victims is None:
            raise TierError(self._full(length, trial.largest))
        for sequence in victims:
            self.free(sequence)
        self.evictions += len(victims)
        offset = self._runs.allocate(length)
        assert offset is not None, "the trial eviction found a run that the real one did not"
        return offset

    def _full(self, length: int, reachable: int) -> str:
        held = sum(ref.block_bytes for name in self.active for ref in self._tables[name].values())
        return (
            f"DRAM pool full: needs {format_bytes(length)} in one run, free {format_bytes(self.free_bytes)} "
            f"of {format_bytes(self.capacity)}, {format_bytes(held)} held by {len(self.active)} active "
            f"sequences, longest run without past ones {format_bytes(reachable)}; raise --dram-memory or "
            f"lower --max-context"
        )

    def _ndarray(self, ref: TensorRef, shape: tuple[int, ...]) -> np.ndarray:
        self._check_live(ref)
        nbytes = math.prod(shape) * ref.dtype.itemsize
        return self._check_open()[ref.offset : ref.offset + nbytes].view(ref.dtype).reshape(shape)

    def _check_live(self, ref: TensorRef) -> None:
        if ref.freed:
            raise TierError(
                f"the DRAM block at offset {ref.offset} was freed or evicted; prefill its sequence again"
            )

    def _check_known(self, sequence: str) -> None:
        if sequence not in self._tables:
            raise TierError(f"the DRAM pool does not hold sequence {sequence!r}; prefill it again")

    def _check_open(self) -> np.ndarray:
        if self._bytes is None:
            raise TierError("the DRAM pool is closed; make a new one")
        return self._bytes


def _lock_pages(arena: np.ndarray) -> bool:
    """mlock the whole arena; on refusal warn with the limit and the remedy. Returns whether it is locked."""
    libc = ctypes.CDLL(None, use_errno=True)
    size = arena.nbytes
    if libc.mlock(ctypes.c_void_p(arena.ctypes.data), ctypes.c_size_t(size)) == 0:
        return True
    code = ctypes.get_errno()
    soft, hard = (
        "unlimited" if limit == resource.RLIM_INFINITY else format_bytes(limit)
        for limit in resource.getrlimit(resource.RLIMIT_MEMLOCK)
    )
    warnings.warn(
        f"cannot lock {format_bytes(size)} of DRAM ({_describe(code)}; RLIMIT_MEMLOCK soft {soft}, hard "
        f"{hard}): the pool stays pageable and may be swapped; raise the limit (ulimit -l, or memlock in "
        f"limits.conf) to at least {-(-size // 1024)} KiB",
        RuntimeWarning,
        stacklevel=3,
    )
    return False


def _describe(code: int | None) -> str:
    return f"errno {code}, {os.strerror(code)}" if code else "unknown error"
