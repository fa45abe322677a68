"""Graphs that compute for a while before they look at a buffer, so that filling it too early is always seen."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp


def burn(rounds: int) -> jax.Array:
    """0 as int32, after a chain of products that no compiler shortens."""

    def product(_: Any, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ x)

    x = jax.lax.fori_loop(0, rounds, product, jnp.full((96, 96), 0.01, jnp.float32))
    return jnp.isnan(x[0, 0]).astype(jnp.int32)


def late(buffers: Any, rounds: int) -> Any:
    """Floating-point and bool buffers (any pytree) as they are after a burn, and not before."""
    burnt = burn(rounds)

    def read(buffer: jax.Array) -> jax.Array:
        other = jnp.array(False if buffer.dtype == bool else jnp.nan, buffer.dtype)
        return jnp.where(burnt == 0, buffer, other)

    return jax.tree.map(read, buffers)


def rounds_for(target_s: float) -> int:
    """How many rounds of `burn` take about that long here."""
    probe = 300
    compiled = jax.jit(partial(burn, probe)).lower().compile()
    jax.block_until_ready(compiled())
    started = time.perf_counter()
    jax.block_until_ready(compiled())
    return max(1, int(probe * target_s / (time.perf_counter() - started)))
