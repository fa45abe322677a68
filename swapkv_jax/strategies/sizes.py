"""What each strategy keeps of keys, in numbers: for plans, so no JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import UNSET

from swapkv_jax.errors import PlanError
from swapkv_jax.selection import Selection

if TYPE_CHECKING:
    from swapkv_jax.models.geometry import Geometry
    from swapkv_jax.plan import Plan

_PER_HEAD = ("loki", "infinigen")  # directions, and a rank, for every KV head by itself
RING = 2  # groups of decode whose exact keys are kept: the one that fills, and the one before, which is being read


class Part(NamedTuple):
    """One array of a summary."""

    shape: tuple[int, ...]
    dtype: str


def summary_parts(plan: Plan) -> Part | dict[str, Part]:
    """The arrays of one layer's summary: [B, P, w] with w numbers per place, or several by name."""
    choice = plan.selection
    assert choice is not None
    size, rows, dtype = plan.kv_heads * plan.head_dim, plan.batch, choice.summary_dtype
    name = choice.strategy_name
    if name == "shadowkv":
        exact = exact_groups(choice) + RING
        return {
            "landmarks": Part((rows, plan.groups, size), dtype),
            "coordinates": Part((rows, plan.capacity, choice.rank), dtype),
            "basis": Part((rows, size, choice.rank), dtype),
            "exact": Part((rows, exact, plan.kv_heads, plan.head_dim, plan.group_tokens), plan.dtype),
            "exact_ids": Part((rows, exact), "int32"),
        }
    width = 2 * size if name == "quest" else choice.rank * (plan.kv_heads if name in _PER_HEAD else 1)
    return Part((rows, plan.summary_places, width), dtype)


def map_parts(function: Callable[[Part], Any], plan: Plan) -> Any:
    """A layer's summary as graphs take it, of what `function` makes of each of its arrays."""
    parts = summary_parts(plan)
    if isinstance(parts, dict):
        return {name: function(part) for name, part in parts.items()}
    return function(parts)


def has_adapter(choice: Selection) -> bool:
    """Whether the strategy needs directions that were calibrated: float32 [Hkv·D, rank] per layer."""
    return choice.strategy_name not in ("quest", "shadowkv")


def stores_keys(choice: Selection) -> bool:
    """Whether records have keys. Else the strategy makes those of a group from its summary."""
    return choice.strategy_name != "shadowkv"


def exact_groups(choice: Selection) -> int:
    """Groups of a prompt that keep exact keys under shadowkv, and are always selected."""
    if choice.strategy_name != "shadowkv" or not isinstance(choice.outlier_groups, int):
        return 0
    return choice.outlier_groups + choice.recent_groups


def pinned_groups(choice: Selection) -> int:
    """Groups that are selected whatever their scores."""
    return choice.sink_groups + choice.recent_groups + exact_groups(choice)


def check_strategy(choice: Selection, geometry: Geometry) -> None:
    """Raises PlanError if a choice is not one that the strategy has."""
    head_dim = geometry.head_dim
    name, size = choice.strategy_name, geometry.kv_heads * head_dim
    if choice.outlier_groups != UNSET and name != "shadowkv":
        raise PlanError(f"outlier_groups belongs to strategy shadowkv, not {name}; leave it out")
    if name == "quest":
        if choice.summary != "group":
            raise PlanError(
                "strategy quest bounds the keys of whole groups: summary must be group, not token; leave it out"
            )
        if choice.rank != size:
            raise PlanError(
                f"strategy quest keeps every dimension of the keys: rank must be Hkv·D = {size}, not {choice.rank}"
            )
    elif name in _PER_HEAD:
        if choice.summary != "token":
            raise PlanError(
                f"strategy {name} scores single tokens: summary must be token, not {choice.summary}"
            )
        if choice.rank > head_dim:
            raise PlanError(
                f"rank {choice.rank} of strategy {name} is per KV head, of D = {head_dim} dimensions; "
                f"use 1 to {head_dim}"
            )
    elif name == "shadowkv":
        if choice.summary != "group":
            raise PlanError("strategy shadowkv has landmarks of groups: summary must be group, not token")
        if not isinstance(choice.outlier_groups, int) or choice.outlier_groups < 0:
            raise PlanError(
                "strategy shadowkv needs outlier_groups, 0 or more; its paper has 48 of groups of 8 tokens"
            )
        if pinned_groups(choice) > choice.selected_groups:
            raise PlanError(
                f"{choice.outlier_groups} outliers, {choice.sink_groups} sink and twice {choice.recent_groups} "
                f"recent groups do not fit into {choice.selected_groups} selected groups; use selected_groups of at "
                f"least {pinned_groups(choice)}"
            )
        if geometry.rope_scaling is not None and geometry.rope_scaling.kind == "dynamic":
            raise PlanError(
                "strategy shadowkv takes RoPE out of keys, which dynamic scaling rotates for the length that a "
                "prompt had; use another strategy"
            )
