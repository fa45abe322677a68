"""Attention of one layer over its cache, as XLA operations.

Both functions take K as [.., Hkv, D, S] and V as [.., Hkv, S, D]. Scores and sums are float32 whatever the
cache's dtype.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

KEY_BLOCK = 512  # keys scored at a time during prefill; bounds the scores' temporary


def attend(
    q: Float[Array, "B Hkv R D"],
    k: Float[Array, "B Hkv D S"],
    v: Float[Array, "B Hkv S D"],
    k_new: Float[Array, "B Hkv D"],
    v_new: Float[Array, "B Hkv D"],
    lengths: Int[Array, " B"],
) -> Float[Array, "B Hkv R D"]:
    """One decode step: each row's query over its first `lengths` cached tokens and over its own new token.

    The new token joins by merging softmax sums instead of being written into the cache first, so that the
    cache is only read here, and one function serves caches that can and cannot be written on the device.
    What lies beyond a row's length takes no part: any K there, even NaN, and any finite V.
    """
    scale = q.shape[-1] ** -0.5
    scores = jnp.einsum("bkrd,bkds->bkrs", q, k, preferred_element_type=jnp.float32) * scale
    seen = jnp.arange(k.shape[-1])[None] < lengths[:, None]  # [B, S]
    scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
    own = jnp.einsum("bkrd,bkd->bkr", q, k_new, preferred_element_type=jnp.float32) * scale
    top = jnp.maximum(scores.max(axis=-1), own)  # [B, Hkv, R]
    weights = jnp.exp(scores - top[..., None])
    own = jnp.exp(own - top)
    out = jnp.einsum("bkrs,bksd->bkrd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    out = out + own[..., None] * v_new[:, :, None].astype(jnp.float32)
    return (out / (weights.sum(axis=-1) + own)[..., None]).astype(q.dtype)


def attend_chunk(
    q: Float[Array, "C Hkv R D"],
    k: Float[Array, "Hkv D S"],
    v: Float[Array, "Hkv S D"],
    start: Int[Array, ""],
) -> Float[Array, "C Hkv R D"]:
    """One prefill chunk of one row: C queries at positions start.. over the keys up to their own.

    The cache already holds the chunk's keys. Keys are visited block by block with an online softmax (Milakov
    and Gimelshein 2018), and only as far as the chunk's last position, so that cost follows the prompt and
    not the cache's capacity. The loop's length is data: prefill is not captured as a graph.
    """
    chunk, heads, repeat, dim = q.shape
    size = k.shape[-1]
    block = min(KEY_BLOCK, size)
    queries = q.transpose(1, 2, 0, 3).reshape(heads, repeat * chunk, dim)
    positions = jnp.tile(start + jnp.arange(chunk), repeat)  # [R*C]
    scale = dim**-0.5

    def visit(i: Int[Array, ""], carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        out, total, top = carry
        first = jnp.minimum(i * block, size - block)  # the last block may overlap the one before
        k_block = jax.lax.dynamic_slice_in_dim(k, first, block, axis=2)
        v_block = jax.lax.dynamic_slice_in_dim(v, first, block, axis=1)
        keys = first + jnp.arange(block)
        scores = jnp.einsum("kqd,kds->kqs", queries, k_block, preferred_element_type=jnp.float32) * scale
        seen = (keys[None] <= positions[:, None]) & (keys >= i * block)[None]
        scores = jnp.where(seen[None], scores, -jnp.inf)
        new_top = jnp.maximum(top, scores.max(axis=-1))
        # A query whose keys all lie in earlier blocks keeps its finite maximum; -inf never meets -inf
        # because every query sees position 0 in the first block.
        weights = jnp.exp(scores - new_top[..., None])
        decay = jnp.exp(top - new_top)
        part = jnp.einsum(
            "kqs,ksd->kqd", weights.astype(v.dtype), v_block, preferred_element_type=jnp.float32
        )
        return out * decay[..., None] + part, total * decay + weights.sum(axis=-1), new_top

    blocks = (start + chunk + block - 1) // block
    out, total, _ = jax.lax.fori_loop(
        0,
        jnp.minimum(blocks, -(-size // block)),
        visit,
        (
            jnp.zeros((heads, repeat * chunk, dim), jnp.float32),
            jnp.zeros((heads, repeat * chunk), jnp.float32),
            jnp.full((heads, repeat * chunk), -jnp.inf, jnp.float32),
        ),
    )
    out = (out / total[..., None]).astype(q.dtype).reshape(heads, repeat, chunk, dim)
    return out.transpose(2, 0, 1, 3)
