"""Long-context decoding when the KV cache does not fit the accelerator's memory."""

from swapkv_jax.engine import Engine, Generation, Step
from swapkv_jax.errors import ModelError, PlanError, SwapKVError, TierError, UsageError
from swapkv_jax.models import load_model
from swapkv_jax.plan import Plan
from swapkv_jax.planner import Budgets, make_plan
from swapkv_jax.sampling import Sampling

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
