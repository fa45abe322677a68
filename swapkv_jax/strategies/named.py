"""The strategy that a plan names."""

from __future__ import annotations

from collections.abc import Callable

from swapkv_jax.plan import Plan
from swapkv_jax.selection import Selection, StrategyName
from swapkv_jax.strategies.base import Strategy
from swapkv_jax.strategies.infinigen import InfiniGen
from swapkv_jax.strategies.kvswap import KVSwap
from swapkv_jax.strategies.loki import Loki
from swapkv_jax.strategies.quest import Quest

_STRATEGIES: dict[StrategyName, Callable[[Plan, Selection], Strategy]] = {
    "kvswap": KVSwap,
    "quest": Quest,
    "loki": Loki,
    "infinigen": InfiniGen,
}


def strategy_of(plan: Plan) -> Strategy:
    """The strategy of a valid plan of policy `group`."""
    choice = plan.selection
    assert choice is not None
    return _STRATEGIES[choice.strategy_name](plan, choice)
