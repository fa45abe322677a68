"""Policy `layer` as one graph: every layer's KV is copied out of pinned host memory by the graph itself.

A TPU's compiler turns a slice of a `pinned_host` array that goes to the device into an asynchronous copy, which runs
beside the layers before it. (On a GPU the same would divide the command buffer: there transfers stay between graphs.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from swapkv_jax.attention import attend
from swapkv_jax.models.blocks import BlockFunctions, Params
from swapkv_jax.plan import Plan


def in_graph_segment(plan: Plan, block: BlockFunctions) -> Callable[..., Any]:
    """All layers' step: (layers, x, K, V, news, lengths) → x, news.

    K [L, B, Hkv, D, S] and V [L, B, Hkv, S, D] are in host memory and only read. The new K and V, [2, B, Hkv, D] of
    each layer, take the memory of `news`.
    """
    slots = plan.physical_layers or 0

    def segment(
        layers: list[Params], x: jax.Array, ks: jax.Array, vs: jax.Array, news: Any, lengths: jax.Array
    ):
        del news
        inputs, out = [], []
        for layer, params in enumerate(layers):
            inputs.append(x)
            at = jnp.asarray(layer, jnp.int32)
            if layer >= slots:
                # The slot is free once the layer that many before this one is done: its output is the next input.
                at = _not_before(at, inputs[layer - slots + 1])
            k, v = (_arrive(pool, at) for pool in (ks, vs))
            q, k_new, v_new = block.project(params, x, lengths, lengths + 1)
            x = block.finish(params, x, attend(q, k, v, k_new, v_new, lengths))
            out.append(jnp.stack([k_new, v_new]))
        return x, out

    return segment


def _arrive(pool: jax.Array, layer: jax.Array) -> jax.Array:
    host = jax.lax.dynamic_index_in_dim(pool, layer, keepdims=False)
    return jax.device_put(host, jax.memory.Space.Device)


def _not_before(index: jax.Array, x: jax.Array) -> jax.Array:
    """`index` unchanged, but known only when `x` is. Without it the compiler starts every layer's copy at once, into
    as many slots, and optimization barriers are gone before it schedules (libtpu 0.0.52)."""
    late = jnp.isinf(x[0, 0]).astype(jnp.int32)  # 0 or 1
    return jnp.minimum(index + late, index)
