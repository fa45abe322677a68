"""The plans that a request leaves open, best first where nothing else is known."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec

from swapkv_jax.attention_choice import Attention, default_attention
from swapkv_jax.errors import PlanError
from swapkv_jax.models.geometry import Geometry
from swapkv_jax.plan import DType, KVDType, Plan, Tier, Transport, staging_shape
from swapkv_jax.plan_buffers import ITEMSIZE
from swapkv_jax.planner.budgets import NO_LIMITS, Budgets, weight_bytes
from swapkv_jax.planner.measured_models import MeasuredChoice, measured_choice
from swapkv_jax.selection import Lookahead, Replacement, Selection

CacheChoice = Literal["auto", "resident", "layer", "group"]
TierChoice = Literal["auto", "dram", "disk"]

_LOADS = (8, 16, 32, 64, 96, 128, 256)  # records; a graph each
# Under `layer` one slot is loaded while the next fills; under `step` reads run further ahead.
_STAGING_SLOTS: dict[Lookahead, int] = {"layer": 2, "step": 8, "layer-then-step": 8}
# A Hopper GPU's tensor cores take no less, and of 4 a CPU loses no less in the same memory (measured).
GROUP_SIZE = 8
_TPU_LANES = 128  # the last dimension of a TPU's tiles
SELECTION = Selection(selected_groups=96, reuse_slots=166, rank=64)


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked of the planner; see `make_plan`. `group_size` is G of policy `group` where `group_tokens`, which
    holds for every policy, is None."""

    geometry: Geometry
    cache: CacheChoice = "auto"
    tier: TierChoice = "auto"
    batch: int = 1
    max_context: int | None = None
    dtype: DType = "float32"
    kv_dtype: KVDType | None = None
    physical_layers: int | None = None
    group_tokens: int | None = None
    group_size: int = GROUP_SIZE
    platform: str = "cpu"
    capability: float | None = None
    budgets: Budgets = NO_LIMITS
    exact: bool = False
    overrides: dict[str, Any] = field(default_factory=dict)

    def plan(self, **choices: Any) -> Plan:
        """A plan of this request, as yet unchecked. PlanError: a field that plans do not have, or of a wrong type."""
        g = self.geometry
        # Rows of whole tiles: a TPU pads them to 128 tokens anyway, a GPU's products copied V to pad it to 256.
        whole = 64 if self.platform == "cpu" else 256
        tokens = self.group_size if choices["policy"] == "group" else whole
        common: dict[str, Any] = {
            "layers": g.layers,
            "kv_heads": g.kv_heads,
            "head_dim": g.head_dim,
            "batch": self.batch,
            "max_context": g.context_limit if self.max_context is None else self.max_context,
            "dtype": self.dtype,
            "group_tokens": tokens if self.group_tokens is None else self.group_tokens,
        }
        try:
            return msgspec.convert({**common, **choices, **self.overrides}, Plan)
        except msgspec.ValidationError as error:
            raise PlanError(f"{error}; the fields are {', '.join(Plan.__struct_fields__)}") from None

    @property
    def transport(self) -> Transport:
        return "alias" if self.platform == "cpu" else "copy"


def candidates(request: Request) -> Iterator[Callable[[], Plan]]:
    """What `request` may get, each as a function that makes the plan: the fewer bytes move, the earlier, and what is
    exact before what is not.

    Raises:
      PlanError: (from the functions too) choices that contradict each other.
    """
    cache, tier = request.cache, request.tier
    if cache in ("resident", "layer") and request.kv_dtype not in (None, request.dtype):
        raise PlanError(
            f"--cache {cache} is exact and keeps KV in {request.dtype}: leave --kv-dtype {request.kv_dtype} out, or "
            "use --cache group"
        )
    own_to_layer = tier != "auto" or request.physical_layers is not None
    if cache == "resident" and own_to_layer:
        raise PlanError("--cache resident keeps all KV on the device: leave --tier and --physical-layers out")
    if cache == "group" and request.exact:
        raise PlanError("--cache group is approximate, which --exact rules out: leave one of them out")
    if cache == "auto" and own_to_layer:
        cache = "layer"
    if cache in ("auto", "resident"):
        yield lambda: _resident(request)
    if cache == "layer" or (cache == "auto" and request.geometry.layers >= 2):
        if tier in ("auto", "dram"):
            yield lambda: _layer(request, "dram")
        if tier in ("auto", "disk"):
            yield lambda: _layer(request, "disk")
    if cache == "group" or (cache == "auto" and not request.exact):
        yield lambda: _group(request)


def _resident(request: Request) -> Plan:
    # On a CPU launching is cheap and graphs of one layer compile fastest (measured: 1, 2, 6 and 30 layers
    # per graph run equally fast); elsewhere a step is one graph.
    size = 1 if request.platform == "cpu" else request.geometry.layers
    return request.plan(policy="resident", layers_per_segment=size)


def _layer(request: Request, tier: Tier) -> Plan:
    staging = {"staging_groups": 1, "staging_slots": 12} if tier == "disk" else {}
    slots = 2 if request.physical_layers is None else request.physical_layers
    # A TPU's compiler copies layers beside the layers before them: one launch a step.
    in_graph = request.platform == "tpu" and tier == "dram"
    transport = request.overrides.get("transport", "in_graph" if in_graph else request.transport)
    plan = request.plan(
        policy="layer",
        tier=tier,
        transport=transport,
        layers_per_segment=request.geometry.layers if transport == "in_graph" else 1,
        physical_layers=slots,
        **staging,
    )
    if staging and "staging_groups" not in request.overrides:
        plan.validate(request.geometry)  # the shape derives from sizes that must be sound
        size = staging_shape(plan.groups, plan.stride_bytes)
        plan = msgspec.structs.replace(plan, staging_groups=size)
    return plan


def _group(request: Request) -> Plan:
    tier = request.tier if request.cache == "group" else "auto"
    rows = request.batch if tier == "dram" else None
    choice = SELECTION
    if (measured := _measured(request)) is not None:
        choice = measured.selection
        request = replace(request, group_tokens=measured.group_tokens, kv_dtype="int8")
    selection = request.overrides.get("selection") or _fitted(choice, request)
    plan = request.plan(
        policy="group",
        tier="dram" if rows else "disk",
        transport=request.transport,
        selection=selection,
        attention=_attention(request),
        kv_dtype=_kv_dtype(request),
        staging_slots=_STAGING_SLOTS[selection.lookahead],
        dram_rows=rows,
    )
    return _with_pool(plan, request.geometry, request.budgets) if tier == "auto" else plan


def _attention(request: Request) -> Attention:
    g = request.geometry
    return (
        request.overrides.get("attention")
        or default_attention(
            request.platform,
            kv_heads=g.kv_heads,
            heads=g.heads,
            head_dim=g.head_dim,
            group_tokens=request.group_size if request.group_tokens is None else request.group_tokens,
            dtype=_kv_dtype(request),
            capability=request.capability,
        )[0]
    )


def _kv_dtype(request: Request) -> KVDType:
    """Of policy `group`'s KV. In half the bytes there is room for twice the slots: of the same memory half as much is
    lost (measured)."""
    return request.kv_dtype or ("bfloat16" if request.dtype == "float32" else request.dtype)


def _measured(request: Request) -> MeasuredChoice | None:
    """What was measured of the model on a CPU, where nothing is asked that it would contradict."""
    asked = request.group_tokens, request.kv_dtype, *map(request.overrides.get, ("selection", "attention"))
    if request.platform != "cpu" or request.group_size != GROUP_SIZE or any(x is not None for x in asked):
        return None
    return measured_choice(request.geometry)


def _fitted(choice: Selection, request: Request) -> Selection:
    """`choice`, no larger than the context, the keys and the batch make use of. The slots of `SELECTION` are of
    16-bit KV: of any other there are as many as that memory holds."""
    g = request.geometry
    unit = max(1, request.group_size if request.group_tokens is None else request.group_tokens)
    context = g.context_limit if request.max_context is None else request.max_context
    groups = max(1, -(-context // unit))
    pinned = choice.sink_groups + choice.recent_groups + (max(choice.refresh, default=1) > 1)
    room = choice.reuse_slots
    if choice is SELECTION:
        room = room * ITEMSIZE["bfloat16"] // ITEMSIZE[_kv_dtype(request)]
    selected = max(pinned, min(choice.selected_groups, room, groups))
    slots = max(pinned, min(room, groups))
    if request.platform == "tpu" and _attention(request) == "xla":
        # Slots, and one more for padding, fill whole tiles: they would be padded to that.
        tile = math.lcm(_TPU_LANES, unit) // unit
        slots = -(-(slots + 1) // tile) * tile - 1
    return msgspec.structs.replace(
        choice,
        selected_groups=selected,
        reuse_slots=slots,
        rank=min(choice.rank, g.kv_heads * g.head_dim),
        load_buckets=load_buckets(request.batch, selected, choice.replacement),
    )


def load_buckets(batch: int, selected: int, replacement: Replacement = "lru") -> tuple[int, ...]:
    """Sizes of loads for `batch` rows that select so many groups each; all of them in one where nothing is reused."""
    if replacement == "all":
        return (batch * selected,)
    # A step misses a tenth to a sixth of what it selects; larger loads than this are for the first step alone.
    largest = max(8, -(-batch * selected // 4))
    return *(n for n in _LOADS if n < largest), min(largest, 2 * _LOADS[-1])


def _with_pool(plan: Plan, geometry: Geometry, budgets: Budgets) -> Plan:
    """A disk plan of policy `group` with the DRAM pool that its budgets have room for, if any."""
    if budgets.dram is None:
        return plan
    memory = plan.memory(geometry)
    room = budgets.dram - memory.dram
    if budgets.host is not None:
        device = memory.device + memory.prefill + weight_bytes(geometry, plan.dtype)
        room = min(room, budgets.host - device - memory.dram)
    rows = min(plan.batch, room // plan.dram_row_bytes)
    return msgspec.structs.replace(plan, tier="dram", dram_rows=rows) if rows > 0 else plan
