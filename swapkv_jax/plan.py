"""The static plan: every choice that fixes a buffer's shape, decided before the first token.

A plan derives each buffer of each tier as name, shape, dtype and bytes. Nothing here imports JAX, so that
a plan can be made, checked and printed for hardware that is not at hand.
"""

from __future__ import annotations

import hashlib
import math
from typing import Literal

import msgspec

from swapkv_jax.attention_choice import Attention, slot_width
from swapkv_jax.errors import PlanError
from swapkv_jax.models.geometry import Geometry
from swapkv_jax.plan_buffers import ITEMSIZE, Buffer, plan_buffers
from swapkv_jax.plan_checks import check_plan
from swapkv_jax.selection import Selection
from swapkv_jax.strategies.sizes import Part, stores_keys
from swapkv_jax.tiers.direct_io import PAGE
from swapkv_jax.tiers.record import record_stride

Policy = Literal["resident", "layer", "group"]
Tier = Literal["dram", "disk"]
Transport = Literal["alias", "copy", "in_graph"]
DType = Literal["float32", "bfloat16", "float16"]
KVDType = Literal["float32", "bfloat16", "float16", "int8"]


class TierBytes(msgspec.Struct, frozen=True, kw_only=True):
    """Planned bytes per tier. `aliased` device bytes are the DRAM pool's own, counted there; `prefill` is what decode
    does not hold between its graphs."""

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
      kv_dtype: of KV in slots, rolling buffer and records, where that is another (policy `group`). `cache_dtype`
        reads it. Of int8 the keys of a record's KV head are multiples of one step, and its values of another; the
        rolling buffer is `rolling_dtype` then.
      group_tokens: G, tokens per record of the disk store.
      physical_layers: device slots of one layer's KV each (policy `layer`).
      tier: where the other layers are (policy `layer`). Under `group` everything is on disk; `dram` then puts
        a pool of `dram_rows` rows in front of it.
      transport: `alias` where device memory is host memory and a slot can be the pool itself, else `copy`: by the
        host between graphs, or `in_graph`: by the one graph of all layers (policy `layer` in DRAM, on a TPU).
      layers_per_segment: consecutive layers compiled as one static graph (policy `resident`; one for
        `layer`, whose unit of motion is a layer).
      prefill_chunks: prompt tokens per prefill call, the sizes that a prompt is cut into; the largest bounds
        the temporaries of prefill.
      staging_groups: records per staging slot, staging_slots: how many such slots (tier `disk`).
      record_alignment: bytes that a record's length is rounded up to; a multiple of what O_DIRECT asks for.
      io_threads: readers and writers of the disk store.
      selection: the choices that only policy `group` has.
      attention: how its slots are attended, `xla` on any platform or a platform's kernel, and how they lie.
      dram_rows: how many rows, from the first on, the pool holds whole; the others are read from disk (policy
        `group`, tier `dram`).
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
    io_threads: int = 6
    selection: Selection | None = None
    attention: Attention = "xla"
    dram_rows: int | None = None
    kv_dtype: KVDType | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        if self.kv_dtype == self.dtype:  # one form for one choice: plans of one meaning have one hash
            msgspec.structs.force_setattr(self, "kv_dtype", msgspec.UNSET)

    # ---- derived sizes -------------------------------------------------------------------------------

    @property
    def cache_dtype(self) -> KVDType:
        """The dtype of decode's KV. (Prefill's, which attends a layer at a time, is `dtype`.)"""
        return self.dtype if self.kv_dtype is msgspec.UNSET else self.kv_dtype

    @property
    def rolling_dtype(self) -> DType:
        """The dtype of the newest tokens under policy `group`, which do not fill a record yet."""
        if self.cache_dtype != "int8":
            return self.cache_dtype
        return "bfloat16" if self.dtype == "float32" else self.dtype

    def held_dtype(self, dtype: str) -> str:
        """What device buffers of `dtype` that graphs write a little of are held as: the same, or on a CPU the bits of
        a 16-bit one. A CPU's XLA has no arithmetic of 16 bits: to write one record it would convert all slots to
        float32 and back, and copy them all where only the graph sees them as bits."""
        return "uint16" if self.transport == "alias" and ITEMSIZE.get(dtype) == 2 else dtype

    @property
    def itemsize(self) -> int:
        """Bytes of one value of the KV cache."""
        return ITEMSIZE[self.cache_dtype]

    @property
    def capacity(self) -> int:
        """Tokens a row's KV buffers hold: `max_context` rounded up so that groups, pages and staging fit."""
        token_bytes = self.kv_heads * self.head_dim * self.itemsize
        unit = self.group_tokens
        if self.policy == "layer" and self.tier == "dram":
            # A row's K of one layer is a pool block of its own, and blocks are whole pages.
            unit = math.lcm(unit, PAGE // math.gcd(PAGE, token_bytes))
        elif self.tier == "disk" and self.staging_groups:
            unit = self.group_tokens * self.staging_groups
        return -(-self.max_context // unit) * unit

    @property
    def groups(self) -> int:
        """Groups of G tokens that one row can hold."""
        return self.capacity // self.group_tokens

    @property
    def place_tokens(self) -> int:
        """Tokens that one place of the K summary stands for (policy `group`)."""
        return 1 if self.selection is not None and self.selection.summary == "token" else self.group_tokens

    @property
    def summary_places(self) -> int:
        """Places of the K summary per row (policy `group`)."""
        return self.capacity // self.place_tokens

    @property
    def segments(self) -> int:
        """Compiled graphs launched per step, without the head."""
        return -(-self.layers // self.layers_per_segment)

    @property
    def payload_bytes(self) -> int:
        """Bytes of K and V in one (layer, group) record, or of V alone where the strategy makes keys itself."""
        steps = self.kv_heads * ITEMSIZE["float32"] if self.cache_dtype == "int8" else 0
        return self._record_sides * (self._side_values * self.itemsize + steps)

    @property
    def _side_values(self) -> int:
        return self.kv_heads * self.head_dim * self.group_tokens

    @property
    def _record_sides(self) -> int:
        return 2 if self.selection is None or stores_keys(self.selection) else 1

    @property
    def key_heads(self) -> int:
        """KV heads that a record has keys of: all, or none."""
        return self.kv_heads if self._record_sides == 2 else 0

    @property
    def rolling_bytes(self) -> int:
        """Bytes of the newest tokens of a row and layer in host memory: a record's, and no less than K and V."""
        return max(self.stride_bytes, 2 * self._side_values * ITEMSIZE[self.rolling_dtype])

    @property
    def stride_bytes(self) -> int:
        """Bytes from one record to the next, footer and alignment included."""
        return record_stride(self.payload_bytes, self.record_alignment)

    @property
    def dram_row_bytes(self) -> int:
        """Bytes that a whole row takes in the pool of policy `group`: all payloads, rounded up to pages."""
        return -(-self.layers * self.groups * self.payload_bytes // PAGE) * PAGE

    @property
    def full_kv_bytes(self) -> int:
        """Bytes of the whole KV cache at `max_context`, all layers and rows, in `dtype` and without any rounding:
        what `resident` would hold."""
        values = 2 * self.layers * self.batch * self.max_context * self.kv_heads * self.head_dim
        return values * ITEMSIZE[self.dtype]

    @property
    def slot_rows(self) -> int:
        """Rows of a device slot that prefill fills: the batch, or one where decode has no such slots."""
        own = self.policy == "group" or (self.transport == "alias" and self.tier == "dram")
        return 1 if own else self.batch

    @property
    def prefill_slots(self) -> int:
        """Layers whose KV prefill holds on the device: one computes while the other streams out."""
        return self.physical_layers or 2

    def layer_shapes(self, rows: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of one layer's K [rows, Hkv, D, S] and V [rows, Hkv, S, D].

        K is kept transposed: both attention products then read memory in the order it lies, on a CPU three
        times faster than K as [rows, Hkv, S, D].
        """
        s = self.capacity
        return (rows, self.kv_heads, self.head_dim, s), (rows, self.kv_heads, s, self.head_dim)

    @property
    def selecting_layers(self) -> tuple[int, ...]:
        """The layers that select what they attend: under `group` all but the whole ones."""
        whole = () if self.selection is None else self.selection.whole
        return tuple(layer for layer in range(self.layers) if layer not in whole)

    def slots_of(self, layer: int) -> int:
        """Groups of a row that one layer has slots for under `group`."""
        choice = self.selection
        assert choice is not None
        return self.groups if layer in choice.whole else choice.reuse_slots

    def pool_slots(self, layer: int) -> int:
        """C1, the slots of one layer's arrays under `group`: `slots_of` and one that padding may overwrite."""
        return self.slots_of(layer) + 1

    def pool_parts(self, slots: int) -> dict[str, Part]:
        """The arrays of a layer's slots under `group`, C1 = `slots`: `k` [B, Hkv, D, C1·G] and `v` [B, Hkv, C1·G, D]
        for attention `xla`, one pool `kv` [B, Hkv, C1, G, W] for a kernel; of int8 also `steps` [B, Hkv, 2, C1], what
        keys and values are multiples of."""
        head, tokens, dim = (self.batch, self.kv_heads), self.group_tokens, self.head_dim
        dtype = self.held_dtype(self.cache_dtype)
        if self.attention != "xla":
            return {"kv": Part((*head, slots, tokens, slot_width(self.attention, dim)), dtype)}
        parts = {
            "k": Part((*head, dim, slots * tokens), dtype),
            "v": Part((*head, slots * tokens, dim), dtype),
        }
        if self.cache_dtype == "int8":
            parts["steps"] = Part((self.batch, self.kv_heads, 2, slots), "float32")
        return parts

    @property
    def rolling_parts(self) -> dict[str, Part]:
        """The arrays of one layer's rolling buffer under `group`: `k` and `v` [B, Hkv, G, D] for attention `xla`,
        both in one `kv` [B, Hkv, G, W] for a kernel."""
        head, dtype = (self.batch, self.kv_heads, self.group_tokens), self.rolling_dtype
        if self.attention == "xla":
            return {part: Part((*head, self.head_dim), dtype) for part in "kv"}
        return {"kv": Part((*head, slot_width(self.attention, self.head_dim)), dtype)}

    # ---- buffers -------------------------------------------------------------------------------------

    def buffers(self, geometry: Geometry) -> tuple[Buffer, ...]:
        """Every buffer of every tier but the weights and the compiler's temporaries."""
        self.validate(geometry)
        return tuple(plan_buffers(self, geometry))

    def memory(self, geometry: Geometry) -> TierBytes:
        """Totals per tier of `buffers(geometry)`."""
        totals = {"device": 0, "aliased": 0, "prefill": 0, "dram": 0, "disk": 0}
        for buffer in self.buffers(geometry):
            if buffer.phase != "always":
                totals["prefill"] += buffer.bytes
            elif buffer.alias_of:
                totals["aliased"] += buffer.bytes
            else:
                totals[buffer.tier] += buffer.bytes
        return TierBytes(**totals)

    # ---- checks --------------------------------------------------------------------------------------

    def validate(self, geometry: Geometry) -> None:
        """Raises PlanError naming the first thing that is wrong and what would work."""
        check_plan(self, geometry)

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
