"""What was measured of a model's layers, for its plans of policy `group` on a CPU.

A few layers lose most by what they do not see (of SmolLM2-135M 7, 18 and 20, found by letting one layer at a time
select in every 16th step alone, see tools/performance.md). They keep every group, in int8, and the others select
rarely.
"""

from __future__ import annotations

from dataclasses import dataclass

from swapkv_jax.models.geometry import Geometry
from swapkv_jax.selection import Selection


@dataclass(frozen=True)
class MeasuredChoice:
    """What a model's plan is without further wishes; KV is in int8."""

    group_tokens: int
    selection: Selection


_SMOLLM2_135M = MeasuredChoice(
    group_tokens=16,
    selection=Selection(
        selected_groups=100,
        reuse_slots=100,
        rank=64,
        refresh=(8,) * 30,
        whole_layers=(7, 18, 20),
    ),
)
# By architecture, layers, hidden, heads, KV heads, head dim, vocabulary.
_MODELS = {("llama", 30, 576, 9, 3, 64, 49152): _SMOLLM2_135M}


def measured_choice(g: Geometry) -> MeasuredChoice | None:
    """What was measured of models of this geometry, None if nothing was."""
    return _MODELS.get((g.architecture, g.layers, g.hidden, g.heads, g.kv_heads, g.head_dim, g.vocab))
