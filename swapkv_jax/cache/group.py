"""Policy `group` (KVSwap): disk holds everything, memory a summary of K and the groups in use.

Each layer keeps C reuse slots of G tokens per row on the device. The M groups to attend are selected ahead: by
a token (`step` lookahead: this step's exact queries select for the next step) or by a layer (`layer`: a layer's
input selects for the layer after it), so that what is missing is read while the device computes.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import jax
import numpy as np

from swapkv_jax.adapter import Adapter
from swapkv_jax.cache.base import CacheUse
from swapkv_jax.cache.layer import LayerCache, Slot
from swapkv_jax.cache.records import RecordTier
from swapkv_jax.graph import scalar
from swapkv_jax.group_graphs import selection_of
from swapkv_jax.models.blocks import Params
from swapkv_jax.program import Program
from swapkv_jax.slots import Request, SlotTable
from swapkv_jax.staging import Flags, StagingBuffer, fetch, put, zeros
from swapkv_jax.tiers import DiskStore, aligned_buffer

KEEP_BATCH = 64  # records written at a time by prefill


@dataclass
class Arrival:
    """The missing groups of one selection; the first load's worth of them is being read into staging."""

    request: Request
    in_memory: dict[int, np.ndarray]  # index among the missing → record that is still being written
    read: Future[None]


class GroupCache(LayerCache):
    """See the module. A group that was just completed is served from memory until it has been written."""

    def __init__(self, program: Program, store: DiskStore, adapter: Adapter):
        super().__init__(program)
        plan, choice = self._plan, selection_of(self._plan)
        assert program.group is not None
        self._graphs, self._choice = program.group, choice
        self._tier = RecordTier(plan, store)
        layers, b, dtype, transport = plan.layers, plan.batch, plan.dtype, plan.transport or "copy"
        pool = (b, plan.kv_heads, choice.reuse_slots + 1, plan.group_tokens * plan.head_dim)
        values = plan.stride_bytes // plan.itemsize
        self._adapters = [put(vectors) for vectors in adapter.slice(choice.rank).vectors]
        self._pools = [(zeros(pool, dtype), zeros(pool, dtype)) for _ in range(layers)]
        self._rolling = [self._empty_rolling() for _ in range(layers)]
        self._summary = [zeros((b, choice.rank, plan.capacity), dtype) for _ in range(layers)]
        self._ids = [zeros((b, choice.selected_groups), "int32") for _ in range(layers)]
        self._used = [Flags((b, choice.reuse_slots + 1), transport) for _ in range(layers)]
        self._staging = [StagingBuffer(choice.load_buckets, values, dtype, transport) for _ in range(layers)]
        self._table = SlotTable(layers, b, choice.reuse_slots, plan.groups, choice.replacement)
        self._arrivals: list[Arrival | None] = [None] * layers
        self._writing: dict[tuple[int, int, int], tuple[np.ndarray, Future[None]]] = {}
        self._lock = threading.Lock()
        self._read_s = 0.0
        self._overflow_loads = 0

    def _empty_rolling(self) -> Slot:
        p = self._plan
        shape = (p.batch, p.kv_heads, p.group_tokens, p.head_dim)
        return zeros(shape, p.dtype), zeros(shape, p.dtype)

    # ---- prefill -------------------------------------------------------------------------------------

    def _open_sequences(self, names: list[str], prompts: Sequence[int], limits: Sequence[int]) -> None:
        self._drain()
        self._table.clear()
        self._tier.open(names, limits)

    def filled(self, layer: int, row: int, length: int, k: jax.Array, v: jax.Array) -> None:
        self._summary[layer] = self._graphs.summarise(
            self._summary[layer], self._adapters[layer], k, scalar(row)
        )
        super().filled(layer, row, length, k, v)

    def _keep(self, layer: int, row: int, length: int, k: np.ndarray, v: np.ndarray) -> None:
        self._tier.keep(layer, row, length, k, v, KEEP_BATCH)

    def start(self) -> None:
        super().start()
        self._ring = []
        for layer in range(self._plan.layers):
            k, v = self._tier.parts(self._tier.rolling[layer])  # [B, Hkv, D, G], [B, Hkv, G, D]
            self._rolling[layer] = (put(np.ascontiguousarray(k.swapaxes(2, 3))), put(v))

    # ---- a step --------------------------------------------------------------------------------------

    def step(
        self, layers: list[Params], x: jax.Array, lengths: jax.Array, held: np.ndarray, active: np.ndarray
    ) -> jax.Array:
        by_layer = self._choice.lookahead == "layer"
        last = len(layers) - 1
        for layer, params in enumerate(layers):
            if self._arrivals[layer] is None:
                # Nothing was selected ahead: the first step, or the first layer under `layer` lookahead.
                self._request(layer, self._predict(layer, params, x, lengths))
            following = None
            if by_layer and layer < last:
                following = self._predict(layer + 1, layers[layer + 1], x, lengths)
            self._land(layer)
            x = self._run(layer, params, x, lengths)
            if layer:
                self._write_back(layer - 1, held, active)
                if not by_layer:
                    self._request(layer - 1, self._ids[layer - 1])
            if following is not None:
                self._request(layer + 1, following)
        self._write_back(last, held, active)
        if not by_layer:
            self._request(last, self._ids[last])
        return x

    def _predict(self, layer: int, params: Params, x: jax.Array, lengths: jax.Array) -> jax.Array:
        return self._graphs.predict(params, self._adapters[layer], x, self._summary[layer], lengths)

    def _run(self, layer: int, params: Params, x: jax.Array, lengths: jax.Array) -> jax.Array:
        x, rolling_k, rolling_v, self._summary[layer], self._new[layer], self._ids[layer] = (
            self._graphs.segment(
                params,
                self._adapters[layer],
                x,
                *self._pools[layer],
                self._used[layer].device,
                *self._rolling[layer],
                self._summary[layer],
                self._new[layer],
                self._ids[layer],
                lengths,
            )
        )
        self._rolling[layer] = (rolling_k, rolling_v)
        return x

    # ---- what is missing -----------------------------------------------------------------------------

    def _request(self, layer: int, ids: jax.Array) -> None:
        """Finds slots for the selected groups and starts to read the missing ones."""
        request = self._table.request(layer, fetch(ids))
        in_memory = self._still_writing(request)
        read = self._io.submit(self._read, request, in_memory, 0)
        self._arrivals[layer] = Arrival(request, in_memory, read)

    def _still_writing(self, request: Request) -> dict[int, np.ndarray]:
        """Which of the missing groups are in memory because their write has not ended."""
        found = {}
        for key, (record, write) in list(self._writing.items()):
            layer, row, group = key
            if write.done():
                write.result()  # a failed write surfaces here
                del self._writing[key]
            elif layer == request.layer:
                here = (request.missing_rows == row) & (request.missing_groups == group)
                found.update(dict.fromkeys(np.flatnonzero(here).tolist(), record))
        return found

    def _read(self, request: Request, in_memory: dict[int, np.ndarray], first: int) -> None:
        """Fills staging with the missing groups from index `first` on. Runs on an I/O thread."""
        started = time.perf_counter()
        records = self._staging[request.layer].records
        rows = request.missing_rows[first : first + len(records)]
        groups = request.missing_groups[first : first + len(records)]
        cuts = {*(i - first for i in in_memory), *(i - first + 1 for i in in_memory)}
        edges = sorted({0, len(rows), *(cut for cut in cuts if 0 < cut < len(rows))})
        for begin, end in itertools.pairwise(edges):
            if first + begin in in_memory:
                records[begin] = in_memory[first + begin]
            else:
                piece = slice(begin, end)
                self._tier.start_read(request.layer, rows[piece], groups[piece], records[piece]).result()
        with self._lock:
            self._read_s += time.perf_counter() - started

    def _land(self, layer: int) -> None:
        """Loads what was read into its slots, and says which slots this step attends."""
        arrival = self._arrivals[layer]
        assert arrival is not None
        self._arrivals[layer] = None
        request, staging = arrival.request, self._staging[layer]
        started = time.perf_counter()
        try:
            arrival.read.result()
            self._wait_s += time.perf_counter() - started
            for first in range(0, request.misses, len(staging.records)):
                if first:  # more than the largest load: the rest is read now
                    started = time.perf_counter()
                    jax.block_until_ready(self._pools[layer])
                    self._read(request, arrival.in_memory, first)
                    self._overflow_loads += 1
                    self._wait_s += time.perf_counter() - started
                self._load(layer, request, first)
        except BaseException:
            staging.buffer[...] = 0  # damaged values must not stay where weight 0 would meet them
            self._table.cancel(request)
            raise
        self._table.publish(request)
        self._used[layer].host[:, :-1] = self._table.use_mask(request)

    def _load(self, layer: int, request: Request, first: int) -> None:
        sizes = self._choice.load_buckets
        count = min(request.misses - first, sizes[-1])
        size = next(n for n in sizes if n >= count)
        rows = np.zeros(size, np.int32)
        slots = np.full(size, self._choice.reuse_slots, np.int32)  # padding goes to the spare slot
        rows[:count] = request.missing_rows[first : first + count]
        slots[:count] = request.missing_slots[first : first + count]
        k, v, _ = self._graphs.load[size](
            *self._pools[layer], self._staging[layer].arrived(size), rows, slots
        )
        self._pools[layer] = (k, v)

    def _append(self, layer: int, row: int, at: int, k: np.ndarray, v: np.ndarray) -> None:
        group = self._tier.append(layer, row, at, k, v)
        if group is not None:
            record = aligned_buffer(self._plan.stride_bytes)[None]
            record[0] = self._tier.rolling[layer, row]
            write = self._io.submit(self._tier.write, layer, row, group, record)
            self._writing[layer, row, group] = (record[0], write)

    def _arrive(self, layer: int) -> Slot:
        raise AssertionError("policy group attends its pools")

    # ---- the end -------------------------------------------------------------------------------------

    def _close_sequences(self) -> None:
        try:
            self._drain()
        finally:
            self._tier.close()

    def _drain(self) -> None:
        """Lets reads and writes end. What was read is forgotten; a write that failed is raised."""
        for layer, arrival in enumerate(self._arrivals):
            if arrival is not None:
                arrival.read.exception()
                self._table.cancel(arrival.request)
                self._arrivals[layer] = None
        writing, self._writing = self._writing, {}
        failures = [failure for _, write in writing.values() if (failure := write.exception())]
        if failures:
            raise failures[0]

    def close(self) -> None:
        try:
            self._drain()
        finally:
            super().close()
            self._pools, self._rolling, self._summary, self._ids = [], [], [], []
            self._tier.release()

    @property
    def use(self) -> CacheUse:
        tier, table = self._tier.use, self._table
        return replace(
            tier,
            dram_used=tier.dram_used + sum(s.buffer.nbytes for s in self._staging),
            wait_s=self._wait_s,
            groups_selected=table.hits + table.misses,
            groups_read=table.misses,
            reuse_rate=table.reuse_rate,
            read_s=self._read_s,
            overflow_loads=self._overflow_loads,
            summary_bytes=sum(s.nbytes for s in self._summary),
        )

    def addresses(self) -> dict[str, int]:
        named = {"summary": self._summary, "ids": self._ids}
        for i, part in enumerate("kv"):
            named[f"pool.{part}"] = [pool[i] for pool in self._pools]
            named[f"rolling.{part}"] = [rolling[i] for rolling in self._rolling]
        mine = {
            f"{name}.{layer}": array.unsafe_buffer_pointer()
            for name, arrays in named.items()
            for layer, array in enumerate(arrays)
        }
        return {**super().addresses(), **mine}
