"""What each strategy keeps of a place's keys, in numbers: for plans, so no JAX."""

from __future__ import annotations

from swapkv_jax.errors import PlanError
from swapkv_jax.selection import Selection

_PER_HEAD = ("loki", "infinigen")  # directions, and a rank, for every KV head by itself


def summary_width(choice: Selection, kv_heads: int, head_dim: int) -> int:
    """Numbers per place of the summary, in `choice.summary_dtype`."""
    if choice.strategy_name == "quest":
        return 2 * kv_heads * head_dim
    return choice.rank * (kv_heads if choice.strategy_name in _PER_HEAD else 1)


def has_adapter(choice: Selection) -> bool:
    """Whether the strategy needs directions that were calibrated: float32 [Hkv·D, rank] per layer."""
    return choice.strategy_name != "quest"


def check_strategy(choice: Selection, kv_heads: int, head_dim: int) -> None:
    """Raises PlanError if a choice is not one that the strategy has."""
    name, size = choice.strategy_name, kv_heads * head_dim
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
