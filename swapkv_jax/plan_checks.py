"""What a plan must satisfy, with a remedy for everything that it does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swapkv_jax.attention_choice import refusal
from swapkv_jax.errors import PlanError
from swapkv_jax.models.geometry import Geometry
from swapkv_jax.strategies.sizes import check_strategy, stores_keys
from swapkv_jax.tiers.direct_io import PAGE

if TYPE_CHECKING:
    from swapkv_jax.plan import Plan


# Above these nothing gets better, and listing buffers or starting threads would not end.
_COUNTS = ("batch", "max_context", "group_tokens", "layers_per_segment", "io_threads")
_MOST = {
    "batch": 65536,
    "max_context": 1 << 30,
    "group_tokens": 65536,
    "layers_per_segment": 65536,
    "io_threads": 256,
    "record_alignment": 1 << 20,
    "staging_slots": 4096,
    "staging_groups": 1 << 20,
}

SECTOR = 512  # bytes: the finest alignment that any disk takes for O_DIRECT


def check_plan(plan: Plan, geometry: Geometry) -> None:
    """Raises PlanError naming the first thing that is wrong and what would work."""
    for name in ("layers", "kv_heads", "head_dim"):
        mine, theirs = getattr(plan, name), getattr(geometry, name)
        if mine != theirs:
            raise PlanError(
                f"the plan is for another geometry: its {name} is {mine}, the model's {theirs}; "
                "make a plan for this model (leave --plan out)"
            )
    for name, most in _MOST.items():
        value = getattr(plan, name)
        if name in _COUNTS and value < 1:
            raise PlanError(f"{name} must be at least 1, not {value}")
        if value is not None and value > most:
            raise PlanError(f"{name} must be at most {most}, not {value}")
    if plan.record_alignment < 1 or plan.record_alignment % SECTOR:
        raise PlanError(
            f"record_alignment must be a multiple of {SECTOR} bytes, not {plan.record_alignment}; use {PAGE}"
        )
    if plan.max_context > geometry.context_limit:
        raise PlanError(
            f"max_context {plan.max_context} is over the model's limit of {geometry.context_limit} tokens; "
            f"use at most {geometry.context_limit}"
        )
    chunks = plan.prefill_chunks
    if not 1 <= len(chunks) <= 8 or min(chunks) < 1 or max(chunks) > _MOST["group_tokens"]:
        raise PlanError(
            f"prefill_chunks must be one or more positive sizes (at most 8, each at most "
            f"{_MOST['group_tokens']}), not {list(chunks)[:9]}"
        )
    if plan.selection is not None and plan.policy != "group":
        raise PlanError(f"selection belongs to policy group, not {plan.policy}; leave it out")
    if plan.dram_rows is not None and plan.policy != "group":
        raise PlanError(f"dram_rows belongs to policy group, not {plan.policy}; leave it out")
    if plan.attention != "xla" and plan.policy != "group":
        raise PlanError(
            f"attention {plan.attention} belongs to policy group, not {plan.policy}; leave it out"
        )
    if plan.cache_dtype != plan.dtype and plan.policy != "group":
        raise PlanError(
            f"kv_dtype {plan.cache_dtype} beside dtype {plan.dtype} belongs to policy group, not {plan.policy}, "
            "whose KV is exact; leave it out"
        )
    if plan.policy == "resident":
        _validate_resident(plan)
    elif plan.policy == "layer":
        _validate_layer(plan)
    else:
        _validate_group(plan, geometry)


def _validate_resident(plan: Plan) -> None:
    for name in ("physical_layers", "tier", "transport", "staging_groups", "staging_slots"):
        if getattr(plan, name) is not None:
            raise PlanError(f"{name} means nothing under policy resident; leave it out, or use policy layer")
    if plan.layers_per_segment > plan.layers:
        raise PlanError(
            f"layers_per_segment {plan.layers_per_segment} is more than the model's {plan.layers} layers; "
            f"use at most {plan.layers}"
        )


def _validate_group(plan: Plan, geometry: Geometry) -> None:
    if plan.selection is None:
        raise PlanError("policy group needs a selection (selected_groups, reuse_slots, rank)")
    plan.selection.validate(plan.kv_heads * plan.head_dim)
    check_strategy(plan.selection, geometry)
    unserved = refusal(
        plan.attention,
        kv_heads=plan.kv_heads,
        heads=geometry.heads,
        head_dim=plan.head_dim,
        group_tokens=plan.group_tokens,
        dtype=plan.cache_dtype,
    )
    if unserved is not None:
        raise PlanError(unserved)
    if plan.cache_dtype == "int8":
        _validate_int8(plan)
    _validate_whole_layers(plan)
    if len(plan.selection.refresh) not in (0, plan.layers):
        raise PlanError(
            f"refresh has {len(plan.selection.refresh)} numbers for {plan.layers} layers; give one per layer, or "
            "leave it out"
        )
    if plan.selection.segments_select and plan.layers < 2:
        raise PlanError(
            f"lookahead {plan.selection.lookahead} reads for a layer while others compute, and the model has 1 "
            "layer; use lookahead layer"
        )
    if plan.tier is None or plan.transport is None:
        raise PlanError(
            "policy group needs a tier (disk, or dram for a pool in front of it) and a transport (alias or copy)"
        )
    if plan.transport == "in_graph":
        raise PlanError("transport in_graph belongs to policy layer; use alias or copy")
    if plan.tier == "disk" and plan.dram_rows is not None:
        raise PlanError("dram_rows means nothing with tier disk; leave it out, or use tier dram")
    if plan.tier == "dram" and not 1 <= (plan.dram_rows or 0) <= plan.batch:
        raise PlanError(
            f"policy group with tier dram needs dram_rows of 1 to the batch of {plan.batch}, not {plan.dram_rows}; "
            "use tier disk for none"
        )
    if plan.staging_slots is None or plan.staging_slots < 2:
        raise PlanError(
            f"policy group needs staging_slots of at least 2 (one loads while the next fills), not "
            f"{plan.staging_slots}; use 2, or more where lookahead is by a step, which reads that many layers ahead"
        )
    for name in ("physical_layers", "staging_groups"):
        if getattr(plan, name) is not None:
            raise PlanError(f"{name} means nothing under policy group; leave it out, or use policy layer")
    if plan.layers_per_segment != 1:
        raise PlanError(
            f"policy group selects by the layer: layers_per_segment must be 1, not {plan.layers_per_segment}"
        )


def _validate_int8(plan: Plan) -> None:
    values = plan.kv_heads * plan.head_dim * plan.group_tokens
    if values % 4:
        raise PlanError(
            f"kv_dtype int8 keeps steps of 4 bytes each after Hkv·D·G = {values} bytes: G must be a multiple of 4, "
            f"not {plan.group_tokens}; use that, or another kv_dtype"
        )
    assert plan.selection is not None
    if not stores_keys(plan.selection):
        raise PlanError(
            f"strategy {plan.selection.strategy_name} makes keys itself, in the KV's own dtype: kv_dtype int8 is not "
            "for it; use bfloat16"
        )


def _validate_whole_layers(plan: Plan) -> None:
    assert plan.selection is not None
    whole = plan.selection.whole
    if not whole:
        return
    if list(whole) != sorted(set(whole)) or not 0 <= whole[0] <= whole[-1] < plan.layers:
        raise PlanError(
            f"whole_layers must be rising numbers of layers, 0 to {plan.layers - 1}, not {list(whole)}"
        )
    if len(whole) == plan.layers:
        raise PlanError("whole_layers names every layer: use policy resident, or leave some out")
    if not stores_keys(plan.selection):
        raise PlanError(
            f"strategy {plan.selection.strategy_name} makes keys from a selection's summary, which whole layers do "
            "not have; leave whole_layers out"
        )


def _validate_layer(plan: Plan) -> None:
    slots = plan.physical_layers
    if slots is None or slots < 2:
        raise PlanError(
            f"physical_layers must be at least 2 (one computes while the next arrives), not {slots}; use 2"
        )
    if plan.layers < 2:
        raise PlanError("policy layer needs a model of at least 2 layers, not 1; use policy resident")
    if slots > plan.layers:
        raise PlanError(
            f"physical_layers {slots} is more than the model's {plan.layers} layers; "
            f"use 2 to {plan.layers}, or policy resident"
        )
    if plan.tier is None or plan.transport is None:
        raise PlanError(
            "policy layer needs a tier (dram or disk) and a transport (alias or copy; in_graph on a TPU)"
        )
    in_graph = plan.transport == "in_graph"
    if in_graph and plan.tier != "dram":
        raise PlanError(
            "transport in_graph copies from DRAM, and disk is the host's to read; use tier dram, or copy"
        )
    wanted, by = (plan.layers, "in one graph") if in_graph else (1, "by the layer")
    if plan.layers_per_segment != wanted:
        raise PlanError(
            f"policy layer moves KV {by} over transport {plan.transport}: layers_per_segment must be {wanted}, not "
            f"{plan.layers_per_segment}"
        )
    if plan.tier == "disk":
        if (
            not plan.staging_groups
            or plan.staging_groups < 1
            or not plan.staging_slots
            or plan.staging_slots < 2
        ):
            raise PlanError("tier disk needs staging_groups of at least 1 and staging_slots of at least 2")
    elif plan.staging_groups is not None or plan.staging_slots is not None:
        raise PlanError("staging_groups and staging_slots belong to tier disk; leave them out")
