"""The strategy that a plan names."""

from __future__ import annotations

from swapkv_jax.models.blocks import BlockFunctions
from swapkv_jax.plan import Plan
from swapkv_jax.selection import StrategyName
from swapkv_jax.strategies.base import Strategy
from swapkv_jax.strategies.infinigen import InfiniGen
from swapkv_jax.strategies.kvswap import KVSwap
from swapkv_jax.strategies.loki import Loki
from swapkv_jax.strategies.places import PlaceStrategy
from swapkv_jax.strategies.quest import Quest
from swapkv_jax.strategies.shadowkv import ShadowKV

_OF_PLACES: dict[StrategyName, type[PlaceStrategy]] = {
    "kvswap": KVSwap,
    "quest": Quest,
    "loki": Loki,
    "infinigen": InfiniGen,
}


def strategy_of(plan: Plan, block: BlockFunctions) -> Strategy:
    """The strategy of a valid plan of policy `group`."""
    choice = plan.selection
    assert choice is not None
    if choice.strategy_name == "shadowkv":
        return ShadowKV(plan, choice, block)
    return _OF_PLACES[choice.strategy_name](plan, choice)


def shadowkv_of(plan: Plan, block: BlockFunctions) -> ShadowKV:
    """The strategy of a plan whose records have no keys, which it makes."""
    strategy = strategy_of(plan, block)
    assert isinstance(strategy, ShadowKV)
    return strategy
