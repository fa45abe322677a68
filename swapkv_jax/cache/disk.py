"""Policy `layer` over the disk store: records stream through staging slots into the device's layer slots."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import jax
import numpy as np

from swapkv_jax.cache.base import CacheUse
from swapkv_jax.cache.layer import LayerByLayerCache, Slot, slot_addresses
from swapkv_jax.cache.records import RecordTier
from swapkv_jax.graph import scalar
from swapkv_jax.models.blocks import Params
from swapkv_jax.program import Program
from swapkv_jax.staging import StagingRing, host_view, zeros
from swapkv_jax.tiers import DiskStore
from swapkv_jax.trace import span


@dataclass(frozen=True)
class Piece:
    """What one staging slot carries: `groups` stored records of a layer's row, then maybe the rolling one."""

    step: int
    layer: int
    row: int
    first_group: int
    groups: int
    rolling: bool


class DiskLayerCache(LayerByLayerCache):
    """Every layer is read once per step, ahead of its use, in pieces of a staging slot each.

    The newest tokens, not yet a whole group, stay in memory (the rolling buffer) and ride along as one more
    record. A group that becomes whole is written before anything is read again, so that what is read is
    always what was written.

    Where device memory is the host's (transport `alias`) the I/O threads themselves put records into the
    device slot, once the graph that used it before is done; else a graph does, from the staging slot.
    """

    def __init__(self, program: Program, store: DiskStore):
        super().__init__(program)
        plan = program.plan
        self._tier = RecordTier(plan, store)
        values = plan.stride_bytes // plan.itemsize
        self._staging = StagingRing(
            plan.staging_slots or 0, (plan.staging_groups or 0, values), plan.dtype, plan.transport or "copy"
        )
        self._slots = self._prefill_ring()
        self._pending: deque[Piece] = deque()  # in the order they are needed; not yet being read
        self._reading: deque[tuple[Piece, int, Future[None]]] = deque()
        self._next_slot = 0
        self._step = 0
        # Per device slot: which (step, layer) is being put into it, or was and has not been launched yet; and
        # an output of the last graph that read it.
        self._filling: list[tuple[int, int] | None] = [None] * len(self._slots)
        self._readers: list[jax.Array | None] = [None] * len(self._slots)
        self._views: list[tuple[np.ndarray, np.ndarray]] = []

    # ---- sequences -----------------------------------------------------------------------------------

    def _keep(self, layer: int, row: int, length: int, k: np.ndarray, v: np.ndarray) -> None:
        self._tier.keep(layer, row, length, k, v, self._plan.staging_groups or 1)

    def _append(self, layer: int, row: int, at: int, k: np.ndarray, v: np.ndarray) -> None:
        group = self._tier.append(layer, row, at, k, v)
        if group is not None:
            self._tier.write(layer, row, group, self._tier.rolling[layer, row][None])

    def _open_sequences(self, names: list[str], prompts: Sequence[int], limits: Sequence[int]) -> None:
        self._drain()
        self._tier.open(names, limits)

    def _prefill_ring(self) -> list[Slot]:
        if getattr(self, "_slots", None):
            return self._slots  # decode's own slots serve prefill too
        k_shape, v_shape = self._plan.layer_shapes(self._plan.batch)
        dtype = self._plan.dtype
        return [
            (zeros(k_shape, dtype), zeros(v_shape, dtype)) for _ in range(self._plan.physical_layers or 0)
        ]

    def start(self) -> None:
        super().start()
        self._slots = self._ring
        if self._plan.transport == "alias":
            self._views = [self._by_group(k, v) for k, v in self._slots]

    def _by_group(self, k: jax.Array, v: jax.Array) -> tuple[np.ndarray, np.ndarray]:
        """A slot's memory as K [B, Hkv, D, groups, G] and V [B, Hkv, groups, G, D]."""
        p = self._plan
        k_shape = (p.batch, p.kv_heads, p.head_dim, p.groups, p.group_tokens)
        v_shape = (p.batch, p.kv_heads, p.groups, p.group_tokens, p.head_dim)
        return host_view(k).reshape(k_shape), host_view(v).reshape(v_shape)

    def _close_sequences(self) -> None:
        self._drain()
        self._tier.close()

    # ---- reading ahead -------------------------------------------------------------------------------

    def step(
        self, layers: list[Params], x: jax.Array, lengths: jax.Array, held: np.ndarray, active: np.ndarray
    ) -> jax.Array:
        if not self._pending and not self._reading:  # the first step; later ones are read ahead
            self._filling = [None] * len(self._slots)
            for layer in range(self._plan.layers):
                self._pending.extend(self._pieces(layer, held))
        self._step += 1
        x = super().step(layers, x, lengths, held, active)
        self._pending.extend(self._pieces(len(layers) - 1, held + active))
        self._read_ahead()
        return x

    def _pieces(self, layer: int, held: np.ndarray) -> Iterator[Piece]:
        """The pieces that fill a slot with the first `held` tokens of every row."""
        size = self._plan.staging_groups or 1
        for row, tokens in enumerate(held):
            whole, rest = divmod(int(tokens), self._plan.group_tokens)
            records = whole + (rest > 0)
            for first in range(0, records, size):
                n = min(size, records - first)
                rolling = first + n > whole
                yield Piece(self._step + 1, layer, row, first, n - rolling, rolling)

    def _read_ahead(self) -> None:
        while self._pending and len(self._reading) < len(self._staging):
            turn = (self._pending[0].step, self._pending[0].layer)
            index = turn[1] % len(self._slots)
            if self._filling[index] not in (None, turn):
                break  # the device slot still waits for its graph to be launched
            self._filling[index] = turn
            piece, slot = self._pending.popleft(), self._next_slot
            self._next_slot = (slot + 1) % len(self._staging)
            self._reading.append((piece, slot, self._io.submit(self._read, piece, slot)))

    def _read(self, piece: Piece, slot: int) -> None:
        """Fills a staging slot, and from there the device slot if it can be reached. Runs on an I/O thread."""
        self._staging.wait_reusable(slot)
        started = time.perf_counter()
        count = piece.groups + piece.rolling
        records = self._staging.records(slot)
        if piece.groups:
            file = self._tier.files[piece.row]
            try:
                file.read(piece.layer, piece.first_group, piece.groups, records[: piece.groups])
            except BaseException:
                # A later piece may be shorter than the slot: what it leaves of damaged values would get
                # weight 0 in attention, and 0 × NaN is NaN.
                records[...] = 0
                raise
        if piece.rolling:
            records[piece.groups] = self._tier.rolling[piece.layer, piece.row]
        span(f"reads {slot}", f"layer {piece.layer}, row {piece.row}", started, time.perf_counter())
        if self._views:
            self._put(piece, records[:count])

    def _put(self, piece: Piece, records: np.ndarray) -> None:
        """Records to their place in the device slot, once nothing reads what it held before."""
        index = piece.layer % len(self._slots)
        self._wait_unread(index)
        k_slot, v_slot = self._views[index]
        k, v = self._tier.parts(records)
        groups = slice(piece.first_group, piece.first_group + len(records))
        k_slot[piece.row, :, :, groups] = k.transpose(1, 2, 0, 3)
        v_slot[piece.row, :, groups] = v.transpose(1, 0, 2, 3)

    def _wait_unread(self, index: int) -> None:
        """Blocks until the last graph launched on a device slot has read it."""
        reader = self._readers[index]
        if reader is not None:
            reader.block_until_ready()

    def _arrive(self, layer: int) -> Slot:
        index = layer % len(self._slots)
        self._read_ahead()
        while self._reading and self._reading[0][0].layer == layer:
            piece, slot, read = self._reading.popleft()
            started = time.perf_counter()
            read.result()
            landed = time.perf_counter()
            self._wait_s += landed - started
            span("waits", f"layer {layer}", started, landed)
            if not self._views:
                self._fill(index, piece, slot)
            self._read_ahead()
        return self._slots[index]

    def _fill(self, index: int, piece: Piece, slot: int) -> None:
        assert self._program.fill is not None
        k, v, fence = self._program.fill(
            *self._slots[index], self._staging.arrived(slot), scalar(piece.row), scalar(piece.first_group)
        )
        self._slots[index] = (k, v)  # at once: the next piece may fail to be read
        self._staging.publish(slot, fence)

    def _ahead(self, layer: int, held: np.ndarray, active: np.ndarray) -> None:
        index = layer % len(self._slots)
        self._filling[index], self._readers[index] = None, self._new[layer]
        # Layers before this one have been written back: the next step may read them.
        if layer:
            self._pending.extend(self._pieces(layer - 1, held + active))
        self._read_ahead()

    def _drain(self) -> None:
        self._pending.clear()
        while self._reading:
            future = self._reading.popleft()[2]
            if not future.cancel():
                future.exception()  # nobody will use what was read, nor how it failed

    def close(self) -> None:
        self._drain()
        super().close()
        self._slots = []
        self._tier.release()

    @property
    def use(self) -> CacheUse:
        tier = self._tier.use
        return replace(
            tier, dram_used=tier.dram_used + sum(b.nbytes for b in self._staging.buffers), wait_s=self._wait_s
        )

    def addresses(self) -> dict[str, int]:
        return {**super().addresses(), **slot_addresses(self._slots)}
