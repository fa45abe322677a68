"""The adapters that a tool's plans of policy `group` select by."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from swapkv_jax import Plan
from swapkv_jax.adapter import Adapter
from swapkv_jax.calibration import ensure_adapter
from swapkv_jax.models import Model
from swapkv_jax.talk import Talk


def adapter_for(model: Model, plans: Iterable[Plan], place: Path | None, say: Talk) -> Adapter | None:
    """The adapter in `place` for all engines. Without a place, None: each engine then takes the one that is kept
    for its plan, which is made here, once, if it was not there.

    Raises:
        ModelError: no adapter of this model in `place`, or none can be kept. UsageError: see `calibrate`.
    """
    needed = sorted({plan.place_tokens for plan in plans if plan.policy == "group"})
    if not needed:
        return None
    if place is not None:
        return Adapter.load(place, model.fingerprint)
    for place_tokens in needed:
        with say.bars() as progress:
            _, note = ensure_adapter(model, place_tokens=place_tokens, progress=progress)
        say(note)
    return None
