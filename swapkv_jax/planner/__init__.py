"""The planner: what a plan needs, how fast it would be, and which one to take. `python -m swapkv_jax.planner` says so
for models and devices that need not be here. No JAX.
"""

from swapkv_jax.planner.budgets import NO_LIMITS, Budgets, Needs, shortfalls, weight_bytes
from swapkv_jax.planner.candidates import (
    GROUP_SIZE,
    SELECTION,
    CacheChoice,
    Request,
    TierChoice,
    load_buckets,
)
from swapkv_jax.planner.choose import (
    MAX_OVERHEAD,
    Candidate,
    Choice,
    NothingFits,
    choose_plan,
    describe,
    make_plan,
)
from swapkv_jax.planner.costs import UNKNOWN, DescribedDisk, Rates, StepCost, overhead, step_cost
from swapkv_jax.planner.explain import explain
from swapkv_jax.planner.sizes import parse_rate, parse_seconds, parse_size

__all__ = [
    "GROUP_SIZE",
    "MAX_OVERHEAD",
    "NO_LIMITS",
    "SELECTION",
    "UNKNOWN",
    "Budgets",
    "CacheChoice",
    "Candidate",
    "Choice",
    "DescribedDisk",
    "Needs",
    "NothingFits",
    "Rates",
    "Request",
    "StepCost",
    "TierChoice",
    "choose_plan",
    "describe",
    "explain",
    "load_buckets",
    "make_plan",
    "overhead",
    "parse_rate",
    "parse_seconds",
    "parse_size",
    "shortfalls",
    "step_cost",
    "weight_bytes",
]
