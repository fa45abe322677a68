"""Random keys and values in place of a prefill: decode can be timed without computing a long prompt."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np

from swapkv_jax.graph import scalar


def put_random(k: jax.Array, v: jax.Array, row: int, length: int, seed: int) -> tuple[jax.Array, jax.Array]:
    """Writes standard normal numbers as a row's first `length` tokens into donated buffers.

    K [rows, Hkv, D, S], V [rows, Hkv, S, D]. The numbers depend on `seed`, Hkv, D and `length` alone, not on
    how many tokens the buffers hold, so that every cache policy gets the same ones.
    """
    heads, dim = k.shape[1:3]
    draw = np.random.default_rng(seed).standard_normal
    k_row = draw((1, heads, dim, length), np.float32).astype(k.dtype)
    v_row = draw((1, heads, length, dim), np.float32).astype(v.dtype)
    at = scalar(row if k.shape[0] > 1 else 0)
    return _put(k, k_row, at), _put(v, v_row, at)


@partial(jax.jit, donate_argnums=0)
def _put(buffer: jax.Array, part: jax.Array, row: jax.Array) -> jax.Array:
    zero = row * 0
    return jax.lax.dynamic_update_slice(buffer, part, (row, zero, zero, zero))
