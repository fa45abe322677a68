"""Calibration of strategies that know each KV head's directions, on the queries and keys a text gives rise to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import cast

import jax
import numpy as np

from swapkv_jax.adapter import Adapter, digest_text
from swapkv_jax.calibration import TOKENS, WINDOW, encode, settled
from swapkv_jax.errors import ModelError, UsageError
from swapkv_jax.models import Model
from swapkv_jax.models.blocks import split_block
from swapkv_jax.models.weights import Progress
from swapkv_jax.plan import DType
from swapkv_jax.planner import make_plan
from swapkv_jax.program import compile_program
from swapkv_jax.sampling import Sampling
from swapkv_jax.selection import StrategyName
from swapkv_jax.staging import fetch, zeros
from swapkv_jax.strategies.infinigen import infinigen_directions
from swapkv_jax.strategies.loki import loki_directions

Directions = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
_DIRECTIONS: dict[StrategyName, Directions] = {"loki": loki_directions, "infinigen": infinigen_directions}
_BAR = "calibrate (layers)"


def calibrate_heads(
    model: Model,
    text: str,
    *,
    strategy: StrategyName,
    tokens: int = TOKENS,
    window: int = WINDOW,
    progress: Progress | None = None,
) -> Adapter:
    """The adapter of `strategy` (loki or infinigen) for the first `tokens` tokens of `text`, cut into windows that
    are each a prompt of its own.

    Vectors are [L, Hkv·D, D], a head's D rows below those of the head before; the spectrum [L, D] adds up over heads
    what the strategy orders its directions by. Memory, besides the weights: one layer's KV of a window, and all
    tokens' hidden states and one layer's queries and keys.

    Args:
      progress: called as (what, layers done, in all).
    Raises:
      UsageError: fewer tokens than dimensions. ModelError: queries or keys that are not finite in the model's dtype.
    """
    g = model.geometry
    ids = encode(model, text, tokens)
    if len(ids) < g.head_dim:
        raise UsageError(
            f"{len(ids)} tokens of calibration text cannot show {g.head_dim} dimensions; give at least so many tokens"
        )
    window = min(window, len(ids), g.context_limit)
    windows = [ids[i : i + window] for i in range(0, len(ids), window)]
    vectors = np.empty((g.layers, g.kv_heads * g.head_dim, g.head_dim), np.float32)
    spectrum = np.empty((g.layers, g.head_dim), np.float64)
    for layer, (queries, keys) in enumerate(queries_and_keys(model, windows)):
        if not (np.isfinite(queries).all() and np.isfinite(keys).all()):
            raise ModelError(
                f"layer {layer}: queries or keys are not finite in {model.dtype}; calibrate in float32, or check the "
                "weights"
            )
        found, weights = _DIRECTIONS[strategy](queries, keys)
        vectors[layer] = settled(found).reshape(-1, g.head_dim)
        spectrum[layer] = weights.sum(axis=0)
        if progress is not None:
            progress(_BAR, layer + 1, g.layers)
    return Adapter(
        vectors=vectors,
        spectrum=spectrum,
        fingerprint=model.fingerprint,
        text_digest=digest_text(text),
        tokens=len(ids),
        strategy=strategy,
    )


def queries_and_keys(model: Model, windows: Sequence[list[int]]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Layer by layer, the post-RoPE queries [n, Hkv, R, D] and keys [n, Hkv, D] of the windows' n tokens, float32."""
    g = model.geometry
    plan = make_plan(
        g,
        cache="resident",
        max_context=max(map(len, windows)),
        dtype=cast(DType, model.dtype),
        layers_per_segment=1,  # the decode graphs are not used here, so the one that compiles fastest
    )
    program = compile_program(plan, g, Sampling())
    project = jax.jit(split_block(g, model.dtype).project)
    params = jax.tree.map(jax.device_put, model.params)
    k, v = (zeros(shape, plan.dtype) for shape in plan.layer_shapes(1))
    hidden = [program.embed_prompt(params["embed"], ids) for ids in windows]
    for layer in params["layers"]:
        queries, keys = [], []
        for i, ids in enumerate(windows):
            for x, (start, size) in zip(hidden[i], program.chunks(len(ids)), strict=True):
                positions = np.arange(start, start + size, dtype=np.int32)
                q_new, k_new, _ = project(layer, x, positions, np.full(size, len(ids), np.int32))
                queries.append(fetch(q_new)[: len(ids) - start].astype(np.float32))
                keys.append(fetch(k_new)[: len(ids) - start].astype(np.float32))
            hidden[i], k, v = program.prefill_layer(layer, hidden[i], k, v, 0, len(ids))
        yield np.concatenate(queries), np.concatenate(keys)
