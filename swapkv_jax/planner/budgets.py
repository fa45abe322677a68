"""What each tier may take, and what a plan lacks of it."""

from __future__ import annotations

from dataclasses import dataclass

from swapkv_jax.memory_limits import exact_bytes, format_bytes
from swapkv_jax.models.geometry import Geometry
from swapkv_jax.plan import Plan
from swapkv_jax.plan_buffers import ITEMSIZE


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """Bytes each tier may take; None is no limit. `device` holds the weights too.

    Where device memory is host memory (`shared`), one budget may not be spent twice: device and DRAM bytes
    together must fit `host`.
    """

    device: int | None = None
    dram: int | None = None
    disk: int | None = None
    host: int | None = None


NO_LIMITS = Budgets()


def weight_bytes(geometry: Geometry, dtype: str) -> int:
    """Bytes of all weights as the graphs hold them."""
    g = geometry
    q, kv = g.heads * g.head_dim, g.kv_heads * g.head_dim
    layer = g.hidden * (q + 2 * kv) + q * g.hidden + 3 * g.hidden * g.intermediate + 2 * g.hidden
    layer += (q + 2 * kv) * g.qkv_bias + g.hidden * g.o_bias + (2 * g.intermediate + g.hidden) * g.mlp_bias
    layer += 2 * g.head_dim * g.qk_norm
    tables = g.vocab * g.hidden * (1 if g.tied else 2)
    return (g.layers * layer + tables + g.hidden) * ITEMSIZE[dtype]


def weights_read(geometry: Geometry, dtype: str) -> int:
    """Bytes of the weights that a step reads: all but a table of embeddings that is not the head too."""
    table = 0 if geometry.tied else geometry.vocab * geometry.hidden * ITEMSIZE[dtype]
    return weight_bytes(geometry, dtype) - table


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Bytes a plan takes of each tier at its peak, prefill and weights included."""

    device: int
    aliased: int
    dram: int
    disk: int
    weights: int

    @classmethod
    def of(cls, plan: Plan, geometry: Geometry) -> Needs:
        memory, weights = plan.memory(geometry), weight_bytes(geometry, plan.dtype)
        return cls(
            device=memory.device + memory.prefill + weights,
            aliased=memory.aliased,
            dram=memory.dram,
            disk=memory.disk,
            weights=weights,
        )

    @property
    def memory(self) -> int:
        """Bytes of device and DRAM together, those that are both counted once."""
        return self.device + self.dram


def shortfalls(plan: Plan, geometry: Geometry, budgets: Budgets) -> list[str]:
    """What each exceeded budget lacks, in words; empty when the plan fits."""
    needs = Needs.of(plan, geometry)
    remark = f" ({format_bytes(needs.weights)} of it weights)"
    tiers = [
        ("--device-memory", needs.device + needs.aliased, budgets.device, remark),
        ("--dram-memory", needs.dram, budgets.dram, ""),
        ("--disk-space", needs.disk, budgets.disk, ""),
        ("this machine's memory", needs.memory, budgets.host, ""),
    ]
    return [
        f"needs {exact_bytes(need)}{remark} of {name}, {format_bytes(need - budget)} over the budget of "
        f"{format_bytes(budget)}"
        for name, need, budget, remark in tiers
        if budget is not None and need > budget
    ]
