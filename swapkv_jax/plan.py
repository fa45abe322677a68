"""The static plan: every choice that fixes a buffer's shape, decided before the first token.

A plan derives each buffer of each tier as name, shape, dtype and bytes. Nothing here imports JAX, so that
a plan can be made, checked and printed for hardware that is not at hand.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import Literal

import msgspec

from swapkv_jax.errors import PlanError
from swapkv_jax.models.geometry import Geometry
from swapkv_jax.selection import Selection
from swapkv_jax.tiers import planned_file_bytes
from swapkv_jax.tiers.direct_io import PAGE
from swapkv_jax.tiers.record import record_stride

Policy = Literal["resident", "layer", "group"]
Tier = Literal["dram", "disk"]
Transport = Literal["alias", "copy"]
DType = Literal["float32", "bfloat16", "float16"]

SECTOR = 512  # bytes: the finest alignment that any disk takes for O_DIRECT

ITEMSIZE: dict[str, int] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int32": 4,
    "uint32": 4,
    "uint8": 1,
    "bool": 1,
}


class Buffer(msgspec.Struct, frozen=True, kw_only=True):
    """One buffer the plan fixes.

    `tier` is where its bytes are; `alias_of` names the tier whose memory it shares instead of taking its
    own (on a CPU a device slot can be the pool itself). `phase` is "prefill" for what decode never holds.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    tier: Literal["device", "dram", "disk"]
    alias_of: Literal["dram"] | None = None
    phase: Literal["always", "prefill"] = "always"

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


class TierBytes(msgspec.Struct, frozen=True, kw_only=True):
    """Planned bytes per tier. `aliased` device bytes are the DRAM pool's own, counted there."""

    device: int
    aliased: int
    prefill: int
    dram: int
    disk: int


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is fixed before the first token. Hashable; `to_json`/`from_json` round-trip exactly.

    Attributes:
      policy: `resident` (whole KV on the device), `layer` (`physical_layers` layers of it), or `group`
        (selected groups of it, see `selection`).
      layers, kv_heads, head_dim: the geometry the plan was made for; `validate` compares them.
      batch: rows decoded together.
      max_context: tokens a row may reach, prompt and answer together.
      dtype: of weights, activations and KV.
      group_tokens: G, tokens per record of the disk store.
      physical_layers: device slots of one layer's KV each (policy `layer`).
      tier: where the other layers are (policy `layer`).
      transport: `alias` where device memory is host memory and a slot can be the pool itself, else `copy`.
      layers_per_segment: consecutive layers compiled as one static graph (policy `resident`; one for
        `layer`, whose unit of motion is a layer).
      prefill_chunks: prompt tokens per prefill call, the sizes that a prompt is cut into; the largest bounds
        the temporaries of prefill.
      staging_groups: records per staging slot, staging_slots: how many such slots (tier `disk`).
      record_alignment: bytes that a record's length is rounded up to; a multiple of what O_DIRECT asks for.
      io_threads: readers and writers of the disk store.
      selection: the choices that only policy `group` has.
    """

    version: Literal[1] = 1
    policy: Policy
    layers: int
    kv_heads: int
    head_dim: int
    batch: int
    max_context: int
    dtype: DType = "float32"
    group_tokens: int = 64
    physical_layers: int | None = None
    tier: Tier | None = None
    transport: Transport | None = None
    layers_per_segment: int = 1
    prefill_chunks: tuple[int, ...] = (64, 256)
    staging_groups: int | None = None
    staging_slots: int | None = None
    record_alignment: int = PAGE
    io_threads: int = 4
    selection: Selection | None = None

    # ---- derived sizes -------------------------------------------------------------------------------

    @property
    def itemsize(self) -> int:
        """Bytes of one value of the KV cache."""
        return ITEMSIZE[self.dtype]

    @property
    def capacity(self) -> int:
        """Tokens a row's KV buffers hold: `max_context` rounded up so that groups, pages and staging fit."""
        token_bytes = self.kv_heads * self.head_dim * self.itemsize
        unit = self.group_tokens
        if self.tier == "dram":  # a row's K is a pool block of its own, and blocks are whole pages
            unit = math.lcm(unit, PAGE // math.gcd(PAGE, token_bytes))
        elif self.tier == "disk" and self.staging_groups:
            unit = self.group_tokens * self.staging_groups
        return -(-self.max_context // unit) * unit

    @property
    def groups(self) -> int:
        """Groups of G tokens that one row can hold."""
        return self.capacity // self.group_tokens

    @property
    def segments(self) -> int:
        """Compiled graphs launched per step, without the head."""
        return -(-self.layers // self.layers_per_segment)

    @property
    def payload_bytes(self) -> int:
        """Bytes of K and V in one (layer, group) record."""
        return 2 * self.kv_heads * self.head_dim * self.group_tokens * self.itemsize

    @property
    def stride_bytes(self) -> int:
        """Bytes from one record to the next, footer and alignment included."""
        return record_stride(self.payload_bytes, self.record_alignment)

    @property
    def full_kv_bytes(self) -> int:
        """Bytes of the whole KV cache at `max_context`, all layers and rows, without any rounding."""
        return 2 * self.layers * self.batch * self.max_context * self.kv_heads * self.head_dim * self.itemsize

    @property
    def slot_rows(self) -> int:
        """Rows of a device slot that prefill fills: the batch, or one where decode has no such slots."""
        own = self.policy == "group" or (self.transport == "alias" and self.tier == "dram")
        return 1 if own else self.batch

    def layer_shapes(self, rows: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of one layer's K [rows, Hkv, D, S] and V [rows, Hkv, S, D].

        K is kept transposed: both attention products then read memory in the order it lies, on a CPU three
        times faster than K as [rows, Hkv, S, D].
        """
        s = self.capacity
        return (rows, self.kv_heads, self.head_dim, s), (rows, self.kv_heads, s, self.head_dim)

    # ---- buffers -------------------------------------------------------------------------------------

    def buffers(self, geometry: Geometry) -> tuple[Buffer, ...]:
        """Every buffer of every tier but the weights and the compiler's temporaries."""
        self.validate(geometry)
        return tuple(self._buffers(geometry))

    def _buffers(self, g: Geometry) -> Iterator[Buffer]:
        b, dt = self.batch, self.dtype
        yield Buffer(name="x", shape=(b, g.hidden), dtype=dt, tier="device")
        for name in ("tokens", "lengths", "advance", "forced"):
            yield Buffer(name=name, shape=(b,), dtype="int32", tier="device")
        yield Buffer(name="logits", shape=(b, g.vocab), dtype="float32", tier="device")
        for i in range(self.layers):
            shape = (2, b, self.kv_heads, self.head_dim)
            yield Buffer(name=f"new.{i}", shape=shape, dtype=dt, tier="device")
        if self.policy == "resident":
            yield from self._layers("kv", self.layers, b, "device")
            return
        if self.policy == "group":
            yield from self._group_buffers()
            return
        slots = self.physical_layers or 0
        if self.tier == "disk":
            yield from self._layers("slot", slots, b, "device")
            yield from self._disk_buffers()
            return
        yield from self._layers("pool", self.layers, b, "dram")
        if self.transport == "alias":
            yield from self._layers("slot", slots, b, "device", alias_of="dram")
            yield from self._layers("prefill", slots, 1, "device", phase="prefill")
        else:  # one layer computes from its slot while the others are on their way
            yield from self._layers("slot", 1, b, "device")
            yield from self._layers("arriving", slots - 1, b, "device")

    @property
    def prefill_slots(self) -> int:
        """Layers whose KV prefill holds on the device: one computes while the other streams out."""
        return self.physical_layers or 2

    def _group_buffers(self) -> Iterator[Buffer]:
        s, b, dt = self.selection, self.batch, self.dtype
        assert s is not None
        pool = (b, self.kv_heads, s.reuse_slots + 1, self.group_tokens * self.head_dim)
        rolling = (b, self.kv_heads, self.group_tokens, self.head_dim)
        values = self.stride_bytes // self.itemsize
        for i in range(self.layers):
            for part in "kv":
                yield Buffer(name=f"pool.{part}.{i}", shape=pool, dtype=dt, tier="device")
                yield Buffer(name=f"rolling.{part}.{i}", shape=rolling, dtype=dt, tier="device")
            yield Buffer(name=f"summary.{i}", shape=(b, s.rank, self.capacity), dtype=dt, tier="device")
            yield Buffer(name=f"used.{i}", shape=(b, s.reuse_slots + 1), dtype="bool", tier="device")
            yield Buffer(name=f"ids.{i}", shape=(b, s.selected_groups), dtype="int32", tier="device")
            adapter = (self.kv_heads * self.head_dim, s.rank)
            yield Buffer(name=f"adapter.{i}", shape=adapter, dtype="float32", tier="device")
            yield Buffer(name=f"staging.{i}", shape=(s.load_buckets[-1], values), dtype=dt, tier="dram")
        yield from self._layers("prefill", self.prefill_slots, 1, "device", phase="prefill")
        yield from self._record_buffers()

    def _disk_buffers(self) -> Iterator[Buffer]:
        values = self.stride_bytes // self.itemsize
        for i in range(self.staging_slots or 0):
            yield Buffer(
                name=f"staging.{i}", shape=(self.staging_groups or 0, values), dtype=self.dtype, tier="dram"
            )
        yield from self._record_buffers()

    def _record_buffers(self) -> Iterator[Buffer]:
        rolling = (self.layers, self.batch, self.stride_bytes // self.itemsize)
        yield Buffer(name="rolling", shape=rolling, dtype=self.dtype, tier="dram")
        file_bytes = planned_file_bytes(self.layers, self.groups, self.payload_bytes, self.record_alignment)
        for row in range(self.batch):
            yield Buffer(name=f"sequence.{row}", shape=(file_bytes,), dtype="uint8", tier="disk")

    def _layers(
        self,
        name: str,
        count: int,
        rows: int,
        tier: Literal["device", "dram"],
        *,
        alias_of: Literal["dram"] | None = None,
        phase: Literal["always", "prefill"] = "always",
    ) -> Iterator[Buffer]:
        for i in range(count):
            for part, shape in zip("kv", self.layer_shapes(rows), strict=True):
                yield Buffer(
                    name=f"{name}.{part}.{i}",
                    shape=shape,
                    dtype=self.dtype,
                    tier=tier,
                    alias_of=alias_of,
                    phase=phase,
                )

    def memory(self, geometry: Geometry) -> TierBytes:
        """Totals per tier of `buffers(geometry)`."""
        totals = {"device": 0, "aliased": 0, "prefill": 0, "dram": 0, "disk": 0}
        for buffer in self.buffers(geometry):
            if buffer.phase == "prefill":
                totals["prefill"] += buffer.bytes
            elif buffer.alias_of:
                totals["aliased"] += buffer.bytes
            else:
                totals[buffer.tier] += buffer.bytes
        return TierBytes(**totals)

    # ---- checks --------------------------------------------------------------------------------------

    def validate(self, geometry: Geometry) -> None:
        """Raises PlanError naming the first thing that is wrong and what would work."""
        for name in ("layers", "kv_heads", "head_dim"):
            mine, theirs = getattr(self, name), getattr(geometry, name)
            if mine != theirs:
                raise PlanError(
                    f"the plan is for another geometry: its {name} is {mine}, the model's {theirs}; "
                    "make a plan for this model (leave --plan out)"
                )
        for name in ("batch", "max_context", "group_tokens", "layers_per_segment", "io_threads"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.record_alignment < 1 or self.record_alignment % SECTOR:
            raise PlanError(
                f"record_alignment must be a multiple of {SECTOR} bytes, not {self.record_alignment}; "
                f"use {PAGE}"
            )
        if self.max_context > geometry.context_limit:
            raise PlanError(
                f"max_context {self.max_context} is over the model's limit of {geometry.context_limit} tokens; "
                f"use at most {geometry.context_limit}"
            )
        if not self.prefill_chunks or any(c < 1 for c in self.prefill_chunks):
            raise PlanError(
                f"prefill_chunks must be one or more positive sizes, not {list(self.prefill_chunks)}"
            )
        if self.selection is not None and self.policy != "group":
            raise PlanError(f"selection belongs to policy group, not {self.policy}; leave it out")
        if self.policy == "resident":
            self._validate_resident()
        elif self.policy == "layer":
            self._validate_layer()
        else:
            self._validate_group()

    def _validate_resident(self) -> None:
        for name in ("physical_layers", "tier", "transport", "staging_groups", "staging_slots"):
            if getattr(self, name) is not None:
                raise PlanError(
                    f"{name} means nothing under policy resident; leave it out, or use policy layer"
                )
        if self.layers_per_segment > self.layers:
            raise PlanError(
                f"layers_per_segment {self.layers_per_segment} is more than the model's {self.layers} layers; "
                f"use at most {self.layers}"
            )

    def _validate_group(self) -> None:
        if self.selection is None:
            raise PlanError("policy group needs a selection (selected_groups, reuse_slots, rank)")
        self.selection.validate(self.kv_heads * self.head_dim)
        if self.tier != "disk" or self.transport is None:
            raise PlanError("policy group needs tier disk and a transport (alias or copy)")
        for name in ("physical_layers", "staging_groups", "staging_slots"):
            if getattr(self, name) is not None:
                raise PlanError(f"{name} means nothing under policy group; leave it out, or use policy layer")
        if self.layers_per_segment != 1:
            raise PlanError(
                f"policy group selects by the layer: layers_per_segment must be 1, not {self.layers_per_segment}"
            )

    def _validate_layer(self) -> None:
        slots = self.physical_layers
        if slots is None or slots < 2:
            raise PlanError(
                f"physical_layers must be at least 2 (one computes while the next arrives), not {slots}; use 2"
            )
        if self.layers < 2:
            raise PlanError("policy layer needs a model of at least 2 layers, not 1; use policy resident")
        if slots > self.layers:
            raise PlanError(
                f"physical_layers {slots} is more than the model's {self.layers} layers; "
                f"use 2 to {self.layers}, or policy resident"
            )
        if self.layers_per_segment != 1:
            raise PlanError(
                f"policy layer moves KV by the layer: layers_per_segment must be 1, not {self.layers_per_segment}"
            )
        if self.tier is None or self.transport is None:
            raise PlanError("policy layer needs a tier (dram or disk) and a transport (alias or copy)")
        if self.tier == "disk":
            if (
                not self.staging_groups
                or self.staging_groups < 1
                or not self.staging_slots
                or self.staging_slots < 2
            ):
                raise PlanError(
                    "tier disk needs staging_groups of at least 1 and staging_slots of at least 2"
                )
        elif self.staging_groups is not None or self.staging_slots is not None:
            raise PlanError("staging_groups and staging_slots belong to tier disk; leave them out")

    # ---- JSON ----------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """Canonical JSON, fields in the order of this class."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode()

    @classmethod
    def from_json(cls, text: str | bytes, *, source: str = "plan") -> Plan:
        """Parses a plan; PlanError names unknown fields, wrong types and missing values."""
        try:
            return msgspec.json.decode(text, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise PlanError(
                f"{source} is not a plan: {error}; the fields are {', '.join(cls.__struct_fields__)}"
            ) from None

    @property
    def hash(self) -> str:
        """Sixteen hex digits over the canonical JSON."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]


def staging_shape(plan_groups: int, stride_bytes: int, target_bytes: int = 2 << 20) -> int:
    """Records per staging slot: little under `target_bytes`, so that rounding a row up wastes the least.

    Args:
      plan_groups: groups a row must be able to hold.
      stride_bytes: bytes per record.
      target_bytes: 256 KiB already reach a disk's full bandwidth, but each piece also costs a wake-up of two
        threads and a launch: pieces of 1.6 to 2 MiB bring a tenth to a fifth more than 1 MiB (measured).
    """
    target = max(1, min(plan_groups, target_bytes // stride_bytes))
    sizes = range(max(1, 3 * target // 4), target + 1)
    return min(sizes, key=lambda n: (-(-plan_groups // n) * n, target - n))
