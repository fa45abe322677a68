"""Every buffer that a plan fixes, by name, shape and tier."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import msgspec

from swapkv_jax.attention_choice import query_columns
from swapkv_jax.models.geometry import Geometry
from swapkv_jax.strategies.sizes import has_adapter, summary_parts
from swapkv_jax.tiers import planned_file_bytes

if TYPE_CHECKING:
    from swapkv_jax.plan import Plan

ITEMSIZE: dict[str, int] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int32": 4,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "int8": 1,
    "bool": 1,
}


Phase = Literal["always", "prefill", "graph"]


class Buffer(msgspec.Struct, frozen=True, kw_only=True):
    """One buffer the plan fixes.

    `tier` is where its bytes are; `alias_of` names the tier whose memory it shares instead of taking its
    own (on a CPU a device slot can be the pool itself). `phase` is "prefill" for what decode never holds, "graph" for
    what it holds as temporaries of a graph alone.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    tier: Literal["device", "dram", "disk"]
    alias_of: Literal["dram"] | None = None
    phase: Phase = "always"

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


def plan_buffers(plan: Plan, g: Geometry) -> Iterator[Buffer]:
    """All buffers of a valid plan but the weights and the compiler's temporaries."""
    b, dt = plan.batch, plan.dtype
    yield Buffer(name="x", shape=(b, g.hidden), dtype=dt, tier="device")
    for name in ("tokens", "lengths", "advance", "forced"):
        yield Buffer(name=name, shape=(b,), dtype="int32", tier="device")
    yield Buffer(name="logits", shape=(b, g.vocab), dtype="float32", tier="device")
    for i in range(plan.layers if plan.policy != "group" else 0):
        shape = (2, b, plan.kv_heads, plan.head_dim)
        yield Buffer(name=f"new.{i}", shape=shape, dtype=dt, tier="device")
    if plan.policy == "resident":
        yield from _layers(plan, "kv", plan.layers, b, "device")
        return
    if plan.policy == "group":
        yield from _group_buffers(plan, g)
        return
    slots = plan.physical_layers or 0
    if plan.tier == "disk":
        yield from _layers(plan, "slot", slots, b, "device")
        yield from _disk_buffers(plan)
        return
    if plan.transport == "in_graph":
        for part, shape in zip("kv", plan.layer_shapes(b), strict=True):
            yield Buffer(name=f"pool.{part}", shape=(plan.layers, *shape), dtype=dt, tier="dram")
        yield from _layers(plan, "slot", slots, b, "device", phase="graph")  # prefill's too
        # No more layers are there at once, but a TPU's compiler places them in one more K or V's memory.
        shape = plan.layer_shapes(b)[0]
        yield Buffer(name="slot.spare", shape=shape, dtype=dt, tier="device", phase="graph")
        return
    yield from _layers(plan, "pool", plan.layers, b, "dram")
    if plan.transport == "alias":
        yield from _layers(plan, "slot", slots, b, "device", alias_of="dram")
        yield from _layers(plan, "prefill", slots, 1, "device", phase="prefill")
    else:  # one layer computes from its slot while the others are on their way
        yield from _layers(plan, "slot", 1, b, "device")
        yield from _layers(plan, "arriving", slots - 1, b, "device")


def _group_buffers(plan: Plan, g: Geometry) -> Iterator[Buffer]:
    s, b = plan.selection, plan.batch
    assert s is not None
    summary = summary_parts(plan)
    for i in range(plan.layers):
        slots = plan.pool_slots(i)
        for part, pool in plan.pool_parts(slots).items():
            yield Buffer(name=f"pool.{part}.{i}", shape=pool.shape, dtype=pool.dtype, tier="device")
        for part, rolling in plan.rolling_parts.items():
            yield Buffer(name=f"rolling.{part}.{i}", shape=rolling.shape, dtype=rolling.dtype, tier="device")
        yield Buffer(name=f"used.{i}", shape=(b, slots), dtype="bool", tier="device")
        if i in s.whole:
            continue
        for name, part in summary.items() if isinstance(summary, dict) else [("", summary)]:
            where = f"summary.{name}.{i}" if name else f"summary.{i}"
            yield Buffer(name=where, shape=part.shape, dtype=plan.held_dtype(part.dtype), tier="device")
        yield Buffer(name=f"ids.{i}", shape=(b, s.selected_groups), dtype="int32", tier="device")
        queries = (g.hidden, query_columns(plan.attention, g.heads * g.head_dim))
        yield Buffer(name=f"queries.{i}", shape=queries, dtype=s.summary_dtype, tier="device")
        if has_adapter(s):
            adapter = (plan.kv_heads * plan.head_dim, s.rank)
            yield Buffer(name=f"adapter.{i}", shape=adapter, dtype="float32", tier="device")
    yield Buffer(name="no_ids", shape=(b, s.selected_groups), dtype="int32", tier="device")
    yield from _staging(plan, s.load_buckets[-1])
    yield from _layers(plan, "prefill", plan.prefill_slots, 1, "device", phase="prefill")
    yield from _record_buffers(plan)
    for row in range(plan.dram_rows or 0):
        yield Buffer(name=f"row.{row}", shape=(plan.dram_row_bytes,), dtype="uint8", tier="dram")


def _disk_buffers(plan: Plan) -> Iterator[Buffer]:
    yield from _staging(plan, plan.staging_groups or 0)
    yield from _record_buffers(plan)


def _staging(plan: Plan, records: int) -> Iterator[Buffer]:
    """Memory that records are read into, and as much on a device that cannot reach it: there they arrive."""
    shape = (records, plan.stride_bytes // plan.itemsize)
    for i in range(plan.staging_slots or 0):
        yield Buffer(name=f"staging.{i}", shape=shape, dtype=plan.cache_dtype, tier="dram")
        if plan.transport == "copy":
            yield Buffer(name=f"arriving.{i}", shape=shape, dtype=plan.cache_dtype, tier="device")


def _record_buffers(plan: Plan) -> Iterator[Buffer]:
    rolling = (plan.layers, plan.batch, plan.rolling_bytes // plan.itemsize)
    yield Buffer(name="rolling", shape=rolling, dtype=plan.cache_dtype, tier="dram")
    file_bytes = planned_file_bytes(plan.layers, plan.groups, plan.payload_bytes, plan.record_alignment)
    for row in range(plan.batch):
        yield Buffer(name=f"sequence.{row}", shape=(file_bytes,), dtype="uint8", tier="disk")


def _layers(
    plan: Plan,
    name: str,
    count: int,
    rows: int,
    tier: Literal["device", "dram"],
    *,
    alias_of: Literal["dram"] | None = None,
    phase: Phase = "always",
) -> Iterator[Buffer]:
    for i in range(count):
        for part, shape in zip("kv", plan.layer_shapes(rows), strict=True):
            yield Buffer(
                name=f"{name}.{part}.{i}",
                shape=shape,
                dtype=plan.dtype,
                tier=tier,
                alias_of=alias_of,
                phase=phase,
            )
