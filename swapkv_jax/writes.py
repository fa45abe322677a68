"""Graphs that put keys and values where decode graphs read them: new tokens, and layers that arrive from a tier.

Each has the form that a platform's compiler does in place and without a loop where loops cost a launch each.
B rows, Hkv KV heads, D head dim, S row capacity, G tokens per record.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from swapkv_jax.plan import Plan


def append_tokens(
    ks: list[jax.Array], vs: list[jax.Array], news: list[jax.Array], lengths: jax.Array
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Writes each row's new token, of all layers, at its own length, in place.

    Apart from the graphs that read the caches, since reading and writing one buffer in one graph made XLA copy it
    (2 to 4 times slower on a CPU).

    Args:
      ks, vs: per layer, K [B, Hkv, D, S] and V [B, Hkv, S, D].
      news: per layer, the new tokens' K and V [2, B, Hkv, D].
      lengths: tokens that a row [B] has before this one.
    """
    # On a GPU each row's write would be a launch of its own; a TPU copies what it scatters into.
    return jax.lax.platform_dependent(
        ks, vs, news, lengths, cuda=_append_at_once, rocm=_append_at_once, default=_append_by_row
    )


def _append_by_row(ks, vs, news, lengths):
    ks, vs, zero = list(ks), list(vs), jnp.zeros((), jnp.int32)
    for i, new in enumerate(news):
        for row in range(new.shape[1]):
            at, index = lengths[row], jnp.asarray(row, jnp.int32)
            k_new, v_new = new[0, row][None, :, :, None], new[1, row][None, :, None]
            ks[i] = jax.lax.dynamic_update_slice(ks[i], k_new, (index, zero, zero, at))
            vs[i] = jax.lax.dynamic_update_slice(vs[i], v_new, (index, zero, at, zero))
    return ks, vs


def _append_at_once(ks, vs, news, lengths):
    rows = jnp.arange(lengths.shape[0], dtype=jnp.int32)
    kept = {"mode": "clip", "unique_indices": True}
    ks = [k.at[rows, :, :, lengths].set(new[0], **kept) for k, new in zip(ks, news, strict=True)]
    vs = [v.at[rows, :, lengths].set(new[1], **kept) for v, new in zip(vs, news, strict=True)]
    return ks, vs


def fill_layer(
    k_slot: jax.Array, v_slot: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """A layer, K [B, Hkv, D, S] and V [B, Hkv, S, D], that has arrived moves into the slot the graphs read."""
    return jax.lax.platform_dependent(k_slot, v_slot, k, v, tpu=_fill_by_part, default=_fill_whole)


def _fill_whole(k_slot, v_slot, k, v):
    del k_slot, v_slot
    return jax.lax.optimization_barrier((k, v))  # else JAX hands the arrivals themselves back


def _fill_by_part(k_slot, v_slot, k, v):
    # XLA's TPU compiler would copy a whole layer twice, once into memory of its own.
    axis = 0 if k.shape[0] > 1 else 1
    for i in range(k.shape[axis]):
        k_part, v_part = (jax.lax.slice_in_dim(a, i, i + 1, axis=axis) for a in (k, v))
        k_slot = jax.lax.dynamic_update_slice_in_dim(k_slot, k_part, i, axis)
        v_slot = jax.lax.dynamic_update_slice_in_dim(v_slot, v_part, i, axis)
    return k_slot, v_slot


def fill_records(plan: Plan) -> Callable[..., Any]:
    """The graph that puts a staging slot's records into a row of a layer's slot."""
    heads, dim, tokens = plan.kv_heads, plan.head_dim, plan.group_tokens

    def fill(k_slot, v_slot, records, row, first_group):
        """records [n, values], each K [Hkv, D, G] then V [Hkv, G, D] → their place in a row of the slot.

        The last output is the staging slot's fence: it is ready when the records have been read.
        """
        size, zero = heads * dim * tokens, jnp.zeros((), jnp.int32)

        def one_by_one(k_slot, v_slot):
            def put(i, slot):
                # Record by record: XLA's CPU code for all at once computes every element's place (a third slower).
                k_slot, v_slot = slot
                record, at = records[i], (first_group + i) * tokens
                k = record[:size].reshape(1, heads, dim, tokens)
                v = record[size : 2 * size].reshape(1, heads, tokens, dim)
                k_slot = jax.lax.dynamic_update_slice(k_slot, k, (row, zero, zero, at))
                return k_slot, jax.lax.dynamic_update_slice(v_slot, v, (row, zero, at, zero))

            return jax.lax.fori_loop(0, records.shape[0], put, (k_slot, v_slot))

        def at_once(k_slot, v_slot):
            # A GPU's command buffer takes no loop.
            n, at = records.shape[0], first_group * tokens
            k = records[:, :size].reshape(n, heads, dim, tokens).transpose(1, 2, 0, 3)
            v = records[:, size : 2 * size].reshape(n, heads, tokens, dim).transpose(1, 0, 2, 3)
            k, v = k.reshape(1, heads, dim, n * tokens), v.reshape(1, heads, n * tokens, dim)
            k_slot = jax.lax.dynamic_update_slice(k_slot, k, (row, zero, zero, at))
            return k_slot, jax.lax.dynamic_update_slice(v_slot, v, (row, zero, at, zero))

        k_slot, v_slot = jax.lax.platform_dependent(
            k_slot, v_slot, cuda=at_once, rocm=at_once, default=one_by_one
        )
        return k_slot, v_slot, row + first_group

    return fill
