"""What was measured of a model's layers, for its plans of policy `group` on a CPU.

A few layers lose most by what they do not see (of SmolLM2-135M 7, 17, 18, 20 and 23, found by letting one layer at a
time select in every 16th step alone, see tools/performance.md). Three of them keep every group, two select in every
fourth step, and the others in every 32nd: but all in the first 16, where what the prompt asks for is found.
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
        refresh=tuple(4 if layer in (17, 23) else 32 for layer in range(30)),
        opening_steps=16,
        whole_layers=(7, 18, 20),
    ),
)
# By architecture, layers, hidden, heads, KV heads, head dim, vocabulary.
_MODELS = {("llama", 30, 576, 9, 3, 64, 49152): _SMOLLM2_135M}


def measured_choice(g: Geometry) -> MeasuredChoice | None:
    """What was measured of models of this geometry, None if nothing was."""
    return _MODELS.get((g.architecture, g.layers, g.hidden, g.heads, g.kv_heads, g.head_dim, g.vocab))
