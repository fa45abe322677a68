"""Long-context decoding when the KV cache does not fit the accelerator's memory.

The names below are imported on first use: bookkeeping modules and `--help` need no JAX.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from swapkv_jax.errors import ModelError, PlanError, SwapKVError, TierError, UsageError

if TYPE_CHECKING:
    from swapkv_jax.engine import Engine
    from swapkv_jax.generation import Generation, Step
    from swapkv_jax.models import load_model
    from swapkv_jax.plan import Plan
    from swapkv_jax.planner import Budgets, make_plan
    from swapkv_jax.sampling import Sampling

_HOMES = {
    "Engine": "engine",
    "Generation": "generation",
    "Step": "generation",
    "load_model": "models",
    "Plan": "plan",
    "Budgets": "planner",
    "make_plan": "planner",
    "Sampling": "sampling",
}

__all__ = [
    "Budgets",
    "Engine",
    "Generation",
    "ModelError",
    "Plan",
    "PlanError",
    "Sampling",
    "Step",
    "SwapKVError",
    "TierError",
    "UsageError",
    "load_model",
    "make_plan",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
