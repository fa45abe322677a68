"""Policy `group` (KVSwap): disk holds everything, memory a summary of K and the groups in use.

Each layer keeps C reuse slots of G tokens per row on the device. The M groups that a step needs are selected
ahead: by a layer (the layer before's input selects) or by a step (this step's exact queries select for the next),
so that what is missing is read while the device computes. See `Selection.lookahead`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from swapkv_jax.adapter import Adapter
from swapkv_jax.attention_choice import query_columns
from swapkv_jax.cache.base import CacheUse
from swapkv_jax.cache.lanes import Lane
from swapkv_jax.cache.offload import OffloadCache
from swapkv_jax.cache.record_reader import PendingWrites, RecordReader
from swapkv_jax.cache.records import RecordTier
from swapkv_jax.cache.slot_pools import SlotPools
from swapkv_jax.cache.whole_layers import WholeLayers
from swapkv_jax.graph import scalar
from swapkv_jax.group_graphs import selection_of
from swapkv_jax.models.blocks import Params, query_weights
from swapkv_jax.program import Program
from swapkv_jax.slot_layouts import Parts, slot_layout
from swapkv_jax.slots import Request, SlotTable
from swapkv_jax.staging import StagingBuffer, fetch, is_ready, put, read_only_view, zeros
from swapkv_jax.strategies.adapters import directions
from swapkv_jax.strategies.sizes import map_parts, stores_keys
from swapkv_jax.tiers import DiskStore
from swapkv_jax.trace import span

KEEP_BATCH = 64  # records written at a time by prefill


@dataclass(frozen=True)
class Arrival:
    """The missing groups of one selection; the first load's worth of them is on its way into the lane."""

    request: Request
    lane: Lane


class Completed(NamedTuple):
    """The groups [n] that a step completes, of rows [n]."""

    rows: np.ndarray
    groups: np.ndarray


_NONE = Completed(np.empty(0, np.int64), np.empty(0, np.int64))


class GroupCache(OffloadCache):
    """See the module. Reads are started and awaited by the engine's thread, and done by the kernel meanwhile."""

    def __init__(self, program: Program, store: DiskStore, adapter: Adapter | None, layers: Sequence[Params]):
        super().__init__(program)
        plan, choice = self._plan, selection_of(self._plan)
        assert program.group is not None
        self._graphs, self._choice = program.group, choice
        self._tier = RecordTier(plan, store)
        self._pending = PendingWrites(self._tier, self._io)
        b = plan.batch
        each = range(plan.layers)
        self._layout = slot_layout(plan)
        self._pools = SlotPools(plan, self._graphs)
        self._whole = WholeLayers(plan, self._pools)
        self._rolling = [self._empty_rolling() for _ in each]
        self._keyed = stores_keys(choice)
        # Of layers that select: the others have none of these.
        self._queries, self._adapters = self._directions(layers, adapter)
        self._summary = self._selecting(
            lambda _: map_parts(lambda part: zeros(part.shape, plan.held_dtype(part.dtype)), plan)
        )
        self._ids = self._selecting(lambda _: zeros((b, choice.selected_groups), "int32"))
        self._no_ids = zeros((b, choice.selected_groups), "int32")
        self._lanes = [self._new_lane() for _ in range(plan.staging_slots or 0)]
        self._free = deque(self._lanes)
        self._table = SlotTable(plan.layers, b, choice.reuse_slots, plan.groups, choice.replacement)
        self._arrivals: list[Arrival | None] = [None] * plan.layers
        self._wanted = [np.full((b, choice.selected_groups), -1, np.int32) for _ in each]
        self._unasked = deque[int]()  # layers that want what has not been requested, the next to run first
        self._step = 0
        self._completed = _NONE  # by the step before
        self._ended = np.zeros(b, np.bool_)  # rows that take no part any more
        self._read_s = 0.0
        self._overflow_loads = 0

    def _selecting(self, make: Callable[[int], Any]) -> list[Any]:
        """What `make` makes for each layer that selects, None for the others."""
        return [None if layer in self._whole else make(layer) for layer in range(self._plan.layers)]

    def _directions(self, layers: Sequence[Params], adapter: Adapter | None) -> tuple[list[Any], list[Any]]:
        """What makes the queries that groups are scored by: the layers' weights, and their adapters."""
        plan, geometry, choice = self._plan, self._program.geometry, self._choice
        columns = query_columns(plan.attention, geometry.heads * geometry.head_dim)
        dtype, adapters = jnp.dtype(choice.summary_dtype), directions(plan, adapter)
        queries = self._selecting(lambda layer: query_weights(layers[layer], geometry, columns).astype(dtype))
        return queries, self._selecting(lambda layer: jax.tree.map(put, adapters[layer]))

    def _new_lane(self) -> Lane:
        plan, sizes = self._plan, self._choice.load_buckets
        staging = StagingBuffer(
            sizes, plan.stride_bytes // plan.itemsize, plan.cache_dtype, plan.transport or "copy"
        )
        return Lane(staging, RecordReader(self._tier, self._pending, sizes[-1], self._io))

    def _empty_rolling(self) -> Parts:
        return tuple(zeros(part.shape, part.dtype) for part in self._plan.rolling_parts.values())

    # ---- prefill -------------------------------------------------------------------------------------

    def _open_sequences(self, names: list[str], prompts: Sequence[int], limits: Sequence[int]) -> None:
        self._drain()
        self._table.clear()
        self._step, self._completed = 0, _NONE
        self._whole.clear()
        self._tier.open(names, limits)

    def filled(self, layer: int, row: int, length: int, k: jax.Array, v: jax.Array) -> None:
        tokens = () if self._keyed else (scalar(length),)
        if layer not in self._whole:
            self._summary[layer] = self._graphs.summarise(
                self._summary[layer], self._adapters[layer], k, scalar(row), *tokens
            )
        self._whole.prefilled(row, length)
        super().filled(layer, row, length, k, v)

    def _keep(self, layer: int, row: int, length: int, k: np.ndarray, v: np.ndarray) -> None:
        self._tier.keep(layer, row, length, k, v, KEEP_BATCH)

    def start(self) -> None:
        super().start()
        self._ring = []
        for layer in range(self._plan.layers):
            k, v = self._tier.rolling_parts(self._tier.rolling[layer])  # [B, Hkv, D, G], [B, Hkv, G, D]
            self._rolling[layer] = tuple(map(put, self._layout.pack(k.swapaxes(2, 3), v)))
        self._whole.fill(self._lanes[0])

    # ---- a step --------------------------------------------------------------------------------------

    def step(
        self, layers: list[Params], x: jax.Array, lengths: jax.Array, held: np.ndarray, active: np.ndarray
    ) -> jax.Array:
        by_step = self._choice.by_step(self._step)
        g = self._plan.group_tokens
        self._ended = ~active
        rows = np.flatnonzero(active & ((held + 1) % g == 0))
        completed = Completed(rows, held[rows] // g)
        for layer, params in enumerate(layers):
            if layer in self._whole:
                self._whole.place(layer, self._free[0])
            elif self._step == 0 if by_step else layer == 0:
                self._predict(layer, params, x, lengths)
                self._want(layer, self._step, self._completed)
                self._request(layer)
            following = layer + 1 if not by_step and layer + 1 < len(layers) else None
            if following in self._whole:
                following = None
            if following is not None:
                self._predict(following, layers[following], x, lengths)
            self._land(layer, x)
            x = self._run(layer, params, x, lengths, following)
            if following is not None:
                self._want(following, self._step, self._completed)
                self._request(following)
            if layer:
                self._finish_layer(layer - 1, completed)
            self._request_ahead()
        self._finish_layer(len(layers) - 1, completed)
        self._request_ahead()
        self._step += 1
        self._completed = completed
        return x

    def _want(self, layer: int, step: int, completed: Completed) -> None:
        """What the layer should attend in `step`: a new selection, or the last one and what was completed since."""
        if self._choice.due(layer, step):
            self._wanted[layer] = fetch(self._ids[layer])
            # Of the group that an ended row's next token would complete there is no record.
            self._wanted[layer][self._ended] = -1
        elif completed.rows.size:
            # First, as what is completed next must not replace it; the last, which scored least, gives way.
            last = self._wanted[layer][completed.rows, :-1]
            self._wanted[layer][completed.rows] = np.concatenate([completed.groups[:, None], last], axis=1)
        else:
            return
        self._unasked.append(layer)

    def _finish_layer(self, layer: int, completed: Completed) -> None:
        """Takes what a layer's segment has put out for the host: completed groups, and what it has selected for the
        next step."""
        rows, groups = completed
        if rows.size:
            k, v = self._rolling_tokens(layer)
            records = self._pending.write(layer, rows, groups, k[rows].swapaxes(2, 3), v[rows])
            if layer in self._whole:
                self._whole.complete(layer, rows, groups, records)
        if self._choice.by_step(self._step + 1) and layer not in self._whole:
            self._want(layer, self._step + 1, completed)

    def _predict(self, layer: int, params: Params, x: jax.Array, lengths: jax.Array) -> None:
        if not self._choice.due(layer, self._step):
            return
        self._ids[layer] = self._graphs.predict(
            params,
            self._queries[layer],
            self._adapters[layer],
            x,
            self._summary[layer],
            lengths,
            self._ids[layer],
        )

    def _run(
        self, layer: int, params: Params, x: jax.Array, lengths: jax.Array, following: int | None
    ) -> jax.Array:
        pool, used = self._pools.arrays[layer], self._pools.used[layer].device
        after = self._no_ids if following is None else self._ids[following]
        if layer in self._whole:
            assert self._graphs.whole is not None
            x, self._rolling[layer] = self._graphs.whole(
                params, x, pool, used, lengths, after, self._rolling[layer]
            )
            return x
        state = (self._rolling[layer], self._summary[layer])
        segment, coming = self._graphs.segment, self._step + 1
        selects = self._choice.by_step(coming) and self._choice.due(layer, coming)
        if self._graphs.between is not None and not selects:
            segment = self._graphs.between
        elif selects:
            state = (*state, self._ids[layer])
        x, *state = segment(params, self._adapters[layer], x, pool, used, lengths, after, *state)
        self._rolling[layer], self._summary[layer], *ids = state
        if ids:
            (self._ids[layer],) = ids
        return x

    # ---- what is missing -----------------------------------------------------------------------------

    def _request(self, layer: int) -> None:
        """Finds slots for what the layer wants and starts to read the missing groups."""
        if layer not in self._unasked:
            return
        self._unasked.remove(layer)
        request = self._table.request(layer, self._wanted[layer])
        lane = self._free.popleft()
        try:
            lane.wait_reusable()
            self._read(request, lane, 0)
        except BaseException:
            self._give_up(request, lane)
            raise
        self._arrivals[layer] = Arrival(request, lane)

    def _request_ahead(self) -> None:
        """As `_request` for what the next step wants, for as many layers as there are lanes for. One is left free: a
        layer that keeps every group takes completed ones through it."""
        while self._unasked and len(self._free) > 1:
            self._request(self._unasked[0])

    def _read(self, request: Request, lane: Lane, first: int) -> None:
        """Starts to fill the lane with the missing groups from index `first` on."""
        lane.started = time.perf_counter()
        records = lane.staging.records
        rows = request.missing_rows[first : first + len(records)]
        groups = request.missing_groups[first : first + len(records)]
        lane.reader.start(request.layer, rows, groups, records[: len(rows)])

    def _land(self, layer: int, x: jax.Array) -> None:
        """Loads what was read into its slots, and says which slots this step attends.

        Waiting for reads while `x` is still being computed costs nothing: only other waits count.
        """
        arrival, self._arrivals[layer] = self._arrivals[layer], None
        if arrival is None:  # the slots are as they were in the step before
            return
        request, lane = arrival.request, arrival.lane
        try:
            for first in range(0, request.misses, len(lane.staging.records)):
                if first:  # more than the largest load: the rest is read now
                    jax.block_until_ready(self._pools.arrays[layer])
                    self._read(request, lane, first)
                    self._overflow_loads += 1
                asked = time.perf_counter()
                lane.reader.finish()
                landed = time.perf_counter()
                self._read_s += landed - lane.started
                span(f"reads {self._lanes.index(lane)}", f"layer {layer}", lane.started, landed)
                if is_ready(x):
                    self._wait_s += landed - asked
                    span("waits", f"layer {layer}", asked, landed)
                self._load(request, lane, first)
        except BaseException:
            self._give_up(request, lane)
            raise
        self._free.append(lane)
        table = self._table
        table.publish(request)
        kept = self._choice.attended == "kept"
        self._pools.used[layer].host[:, : self._choice.reuse_slots] = (
            table.kept_mask(layer) if kept else table.use_mask(request)
        )

    def _give_up(self, request: Request, lane: Lane) -> None:
        lane.give_up()
        self._table.cancel(request)
        self._free.append(lane)

    def _load(self, request: Request, lane: Lane, first: int) -> None:
        layer, here = request.layer, slice(first, first + len(lane.staging.records))
        keys = () if self._keyed else (request.missing_groups[here], self._summary[layer])
        lane.fence = self._pools.load(
            layer, lane.staging, request.missing_rows[here], request.missing_slots[here], *keys
        )

    def settle(self, held: np.ndarray, active: np.ndarray) -> None:
        return  # every layer's completed groups were taken while the next one computed

    def newest(self, layer: int, held: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        k, v = self._rolling_tokens(layer)
        rows, at = np.arange(len(held)), held % self._plan.group_tokens
        return k[rows, :, at], v[rows, :, at]

    def _rolling_tokens(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """K and V [B, Hkv, G, D] of a layer's rolling buffer, to be read before its next segment."""
        return self._layout.unpack(tuple(map(read_only_view, self._rolling[layer])))

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
                self._give_up(arrival.request, arrival.lane)
                self._arrivals[layer] = None
        self._unasked.clear()
        self._pending.drain()

    def close(self) -> None:
        try:
            self._drain()
        finally:
            super().close()
            for lane in self._lanes:
                lane.reader.close()
            self._rolling, self._summary, self._ids = [], [], []
            self._pools.forget()
            self._tier.release()

    @property
    def use(self) -> CacheUse:
        tier, table = self._tier.use, self._table
        notes = {lane.reader.note for lane in self._lanes} - {None}
        return replace(
            tier,
            notes=(*tier.notes, *notes),
            dram_used=tier.dram_used + sum(lane.staging.buffer.nbytes for lane in self._lanes),
            wait_s=self._wait_s,
            groups_selected=table.hits + table.misses,
            groups_read=table.misses,
            reuse_rate=table.reuse_rate,
            read_s=self._read_s,
            overflow_loads=self._overflow_loads,
            summary_bytes=sum(part.nbytes for part in jax.tree.leaves(self._summary)),
        )

    def addresses(self) -> dict[str, int]:
        named = {
            "ids": self._ids, "summary": self._summary, "pool": self._pools.arrays, "rolling": self._rolling
        }  # fmt: skip
        return {
            f"{name}.{layer}.{i}": array.unsafe_buffer_pointer()
            for name, layers in named.items()
            for layer, arrays in enumerate(layers)
            for i, array in enumerate(jax.tree.leaves(arrays))
        }
