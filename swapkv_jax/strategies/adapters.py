"""The calibrated directions that a plan's strategy selects by."""

from __future__ import annotations

from functools import partial
from typing import Any

from swapkv_jax.adapter import Adapter
from swapkv_jax.calibration import ensure_adapter
from swapkv_jax.errors import UsageError
from swapkv_jax.models import Model
from swapkv_jax.models.weights import Progress
from swapkv_jax.plan import Plan
from swapkv_jax.strategies.calibrate import calibrate_heads
from swapkv_jax.strategies.sizes import has_adapter


def plan_adapter(
    model: Model, plan: Plan, *, progress: Progress | None = None
) -> tuple[Adapter | None, str | None]:
    """The adapter kept for `model` and the strategy of a plan of policy `group`, calibrated first if need be, and a
    note that says which it was; None where the strategy has none.

    Raises:
      UsageError, ModelError: see `ensure_adapter`.
    """
    choice = plan.selection
    assert choice is not None
    if not has_adapter(choice):
        return None, None
    name = choice.strategy_name
    make = None if name == "kvswap" else partial(calibrate_heads, strategy=name)
    return ensure_adapter(model, place_tokens=plan.place_tokens, strategy=name, make=make, progress=progress)


def directions(plan: Plan, adapter: Adapter | None) -> list[Any]:
    """Each layer's directions as the strategy's graphs take them: float32 [Hkv·D, rank], or () where it has none.

    Raises:
      UsageError: the strategy needs an adapter and there is none, or it is another's, or has too few directions.
    """
    choice = plan.selection
    assert choice is not None
    if not has_adapter(choice):
        return [()] * plan.layers
    if adapter is None:
        raise UsageError(
            f"strategy {choice.strategy_name} needs an adapter; make one with tools/calibrate.py"
        )
    if adapter.strategy != choice.strategy_name:
        raise UsageError(
            f"the adapter is one of strategy {adapter.strategy}, the plan's is {choice.strategy_name}; leave the "
            "adapter out to have the right one made"
        )
    return list(adapter.slice(choice.rank).vectors)
