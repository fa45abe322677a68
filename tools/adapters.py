"""The adapters that a tool's plans of policy `group` select by."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from swapkv_jax import Plan
from swapkv_jax.adapter import Adapter
from swapkv_jax.models import Model
from swapkv_jax.selection import StrategyName
from swapkv_jax.strategies.adapters import plan_adapter
from swapkv_jax.talk import Talk

Adapters = Mapping[StrategyName, Adapter]
"""By strategy. An engine whose strategy is not among them takes the adapter that is kept for its plan."""


def adapters_for(model: Model, plans: Iterable[Plan], place: Path | None, say: Talk) -> Adapters:
    """The adapter in `place`, for all engines of its strategy. What the others need is made here, once, if it is not
    kept yet.

    Raises:
        ModelError: no adapter of this model in `place`, or none can be kept. UsageError: see `calibrate`.
    """
    needed = {
        (s.strategy_name, plan.place_tokens): plan for plan in plans if (s := plan.selection) is not None
    }
    given: dict[StrategyName, Adapter] = {}
    if place is not None and needed:
        adapter = Adapter.load(place, model.fingerprint)
        given = {adapter.strategy: adapter}
    for (strategy, _), plan in sorted(needed.items()):
        if strategy in given:
            continue
        with say.bars() as progress:
            _, note = plan_adapter(model, plan, progress=progress)
        if note is not None:
            say(note)
    return given


def adapter_of(adapters: Adapters, plan: Plan) -> Adapter | None:
    """The one for an engine of this plan, None for the one that is kept."""
    return None if plan.selection is None else adapters.get(plan.selection.strategy_name)
