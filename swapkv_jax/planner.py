"""From a model, a batch and memory budgets to a plan, or to an error that says what would fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from swapkv_jax.errors import PlanError, UsageError
from swapkv_jax.memory_limits import exact_bytes, format_bytes
from swapkv_jax.models.geometry import Geometry
from swapkv_jax.plan import DType, Plan, Tier, Transport, staging_shape
from swapkv_jax.plan_buffers import ITEMSIZE
from swapkv_jax.selection import Lookahead, Selection

CacheChoice = Literal["auto", "resident", "layer", "group"]
TierChoice = Literal["auto", "dram", "disk"]


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """Bytes each tier may take; None is no limit. `device` holds the weights too.

    Where device memory is host memory (`shared`), one budget may not be spent twice: device and DRAM bytes
    together must fit `host`.
    """

    device: int | None = None
    dram: int | None = None
    disk: int | None = None
    host: int | None = None


NO_LIMITS = Budgets()
_LOADS = (8, 16, 32, 64, 96, 128, 256)  # records; a graph each
# Under `layer` one slot is loaded while the next fills; under `step` reads run further ahead.
_STAGING_SLOTS: dict[Lookahead, int] = {"layer": 2, "step": 8}
SELECTION = Selection(selected_groups=96, reuse_slots=146, rank=64)


def make_plan(
    geometry: Geometry,
    *,
    cache: CacheChoice = "auto",
    tier: TierChoice = "auto",
    batch: int = 1,
    max_context: int | None = None,
    dtype: DType = "float32",
    physical_layers: int | None = None,
    group_tokens: int | None = None,
    platform: str = "cpu",
    budgets: Budgets = NO_LIMITS,
    **overrides: Any,
) -> Plan:
    """The plan for a choice of cache and tier, or under `auto` the first that the budgets hold.

    `auto` tries `resident`, then `layer` from DRAM, then `layer` from disk: the fewer bytes move, the better.

    Policy `group` keeps everything on disk. Tier `dram` keeps every row in DRAM too; `auto` does so with as many
    as the DRAM budget holds, and with none if there is no such budget: the policy is there for small memory.

    Args:
      max_context: tokens per row, prompt and answer together (default: the model's limit).
      platform: "cpu", "gpu" or "tpu"; on a CPU device buffers may alias host memory.
      overrides: any other field of `Plan`.
    Raises:
      PlanError: contradictory choices, or budgets that no allowed plan fits; then it says which are short
        and by how much.
    """
    if cache == "resident" and (tier != "auto" or physical_layers is not None):
        raise PlanError("--cache resident keeps all KV on the device: leave --tier and --physical-layers out")
    if cache == "auto" and (tier != "auto" or physical_layers is not None):
        cache = "layer"  # what only `layer` has was asked for
    if max_context is None:
        max_context = geometry.context_limit
    common: dict[str, Any] = {
        "layers": geometry.layers,
        "kv_heads": geometry.kv_heads,
        "head_dim": geometry.head_dim,
        "batch": batch,
        "max_context": max_context,
        "dtype": dtype,
        "group_tokens": group_tokens if group_tokens is not None else 4 if cache == "group" else 64,
    }
    failures = []
    for plan in _candidates(geometry, cache, tier, physical_layers, platform, budgets, common, overrides):
        plan.validate(geometry)
        short = shortfalls(plan, geometry, budgets)
        if not short:
            return plan
        failures.append(f"{describe(plan)} {', '.join(short)}")
    raise PlanError(
        "no plan fits: " + "; ".join(failures) + "; raise a budget, or lower --max-context or the rows"
    )


def _candidates(
    geometry: Geometry,
    cache: CacheChoice,
    tier: TierChoice,
    physical_layers: int | None,
    platform: str,
    budgets: Budgets,
    common: dict[str, Any],
    overrides: dict[str, Any],
) -> Iterator[Plan]:
    def plan(**choices: Any) -> Plan:
        try:
            return msgspec.convert({**common, **choices, **overrides}, Plan)
        except msgspec.ValidationError as error:
            raise PlanError(f"{error}; the fields are {', '.join(Plan.__struct_fields__)}") from None

    if cache in ("auto", "resident"):
        # On a CPU launching is cheap and graphs of one layer compile fastest (measured: 1, 2, 6 and 30 layers
        # per graph run equally fast); elsewhere a step is one graph.
        size = 1 if platform == "cpu" else geometry.layers
        yield plan(policy="resident", layers_per_segment=size)
    if physical_layers is None:
        physical_layers = 2
    if cache == "auto" and geometry.layers < physical_layers:
        return
    transport: Transport = "alias" if platform == "cpu" else "copy"
    if cache == "group":
        rows = common["batch"] if tier == "dram" else None
        selection = overrides.get("selection") or _default_selection(geometry, common)
        group = plan(
            policy="group",
            tier="dram" if rows else "disk",
            transport=transport,
            selection=selection,
            staging_slots=_STAGING_SLOTS[selection.lookahead],
            dram_rows=rows,
        )
        yield _with_pool(group, geometry, budgets) if tier == "auto" else group
        return
    tiers: tuple[Tier, ...] = ("dram", "disk") if tier == "auto" else (tier,)
    for name in tiers if cache != "resident" else ():
        staging = {"staging_groups": 1, "staging_slots": 12} if name == "disk" else {}
        layer = plan(
            policy="layer", tier=name, transport=transport, physical_layers=physical_layers, **staging
        )
        if staging and "staging_groups" not in overrides:
            layer.validate(geometry)  # the shape derives from sizes that must be sound
            size = staging_shape(layer.groups, layer.stride_bytes)
            layer = msgspec.structs.replace(layer, staging_groups=size)
        yield layer


def _default_selection(geometry: Geometry, common: dict[str, Any]) -> Selection:
    """`SELECTION`, no larger than the context, the keys and the batch make use of."""
    groups = max(1, -(-common["max_context"] // common["group_tokens"]))
    pinned = SELECTION.sink_groups + SELECTION.recent_groups
    selected = max(pinned, min(SELECTION.selected_groups, groups))
    # A step misses a tenth to a sixth of what it selects; larger loads than this are for the first step alone.
    largest = max(8, -(-common["batch"] * selected // 4))
    return msgspec.structs.replace(
        SELECTION,
        selected_groups=selected,
        reuse_slots=max(pinned, min(SELECTION.reuse_slots, groups)),
        rank=min(SELECTION.rank, geometry.kv_heads * geometry.head_dim),
        load_buckets=(*(n for n in _LOADS if n < largest), min(largest, 2 * _LOADS[-1])),
    )


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


def describe(plan: Plan) -> str:
    """A plan's policy in a few words."""
    if plan.policy == "resident":
        return "resident"
    if plan.selection is not None:
        s = plan.selection
        kept = f", {plan.dram_rows} of {plan.batch} row(s) in DRAM too" if plan.dram_rows else ""
        return (
            f"group (tier {plan.tier}{kept}; {s.selected_groups} of up to {plan.groups} groups of "
            f"{plan.group_tokens}, rank {s.rank})"
        )
    return f"layer (tier {plan.tier}, {plan.physical_layers} physical layers)"


def weight_bytes(geometry: Geometry, dtype: str) -> int:
    """Bytes of all weights as the graphs hold them."""
    g = geometry
    q, kv = g.heads * g.head_dim, g.kv_heads * g.head_dim
    layer = g.hidden * (q + 2 * kv) + q * g.hidden + 3 * g.hidden * g.intermediate + 2 * g.hidden
    layer += (q + 2 * kv) * g.qkv_bias + g.hidden * g.o_bias + (2 * g.intermediate + g.hidden) * g.mlp_bias
    layer += 2 * g.head_dim * g.qk_norm
    tables = g.vocab * g.hidden * (1 if g.tied else 2)
    return (g.layers * layer + tables + g.hidden) * ITEMSIZE[dtype]


def shortfalls(plan: Plan, geometry: Geometry, budgets: Budgets) -> list[str]:
    """What each exceeded budget lacks, in words; empty when the plan fits."""
    memory, weights = plan.memory(geometry), weight_bytes(geometry, plan.dtype)
    device = memory.device + memory.prefill + weights
    needs = [
        (
            "--device-memory",
            device + memory.aliased,
            budgets.device,
            f" ({format_bytes(weights)} of it weights)",
        ),
        ("--dram-memory", memory.dram, budgets.dram, ""),
        ("--disk-space", memory.disk, budgets.disk, ""),
        ("this machine's memory", device + memory.dram, budgets.host, ""),
    ]
    return [
        f"needs {exact_bytes(need)}{remark} of {name}, {format_bytes(need - budget)} over the budget of "
        f"{format_bytes(budget)}"
        for name, need, budget, remark in needs
        if budget is not None and need > budget
    ]


def parse_size(text: str) -> int:
    """Bytes from "512MiB", "2GB", "1.5 GiB" or a plain number: MiB and its kind are powers of 1024, MB of 1000."""
    units = {"": 1, "b": 1}
    for power, letter in enumerate("kmgt", start=1):
        units[f"{letter}b"], units[f"{letter}ib"] = 1000**power, 1024**power
    number = text.strip().lower()
    unit = ""
    while number and number[-1].isalpha():
        number, unit = number[:-1], number[-1] + unit
    try:
        value = float(number) * units[unit]
    except (ValueError, KeyError):
        raise UsageError(f"{text!r} is not a size; write it like 512MiB, 2GB or 1073741824") from None
    if not 1 <= value < 2**63:
        raise UsageError(f"{text!r} is not a usable size; write it like 512MiB, 2GB or 1073741824")
    return int(value)
