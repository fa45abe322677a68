"""Attention of one layer over its cache, as XLA operations.

K lies as [.., Hkv, D, S] and V as [.., Hkv, S, D]. Scores and sums are float32 whatever the
cache's dtype.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

KEY_BLOCK = (
    256  # keys scored at a time during prefill: with chunks as long, scores nearly fit a CPU's L2 cache
)

VALUE_BLOCK = 256  # values summed at a time by a CPU, at most

Sums = tuple[Array, Array, Array]  # of an online softmax: weighted values [.., D], weights [..], maximum [..]


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
    seen = jnp.arange(k.shape[-1])[None] < lengths[:, None]
    return attend_seen(q, k, v, k_new, v_new, seen)


def attend_seen(
    q: Float[Array, "B Hkv R D"],
    k: Float[Array, "B Hkv D S"],
    v: Float[Array, "B Hkv S D"],
    k_new: Float[Array, "B Hkv D"],
    v_new: Float[Array, "B Hkv D"],
    seen: Bool[Array, "B S"],
) -> Float[Array, "B Hkv R D"]:
    """As `attend`, over whichever cached tokens are `seen`."""
    scale = q.shape[-1] ** -0.5
    scores = jnp.einsum("bkrd,bkds->bkrs", q, k, preferred_element_type=jnp.float32) * scale
    scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
    own = jnp.einsum("bkrd,bkd->bkr", q, k_new, preferred_element_type=jnp.float32) * scale
    top = jnp.maximum(scores.max(axis=-1), own)  # [B, Hkv, R]
    weights = jnp.exp(scores - top[..., None])
    own = jnp.exp(own - top)
    out = _weigh(weights.astype(v.dtype), v) + own[..., None] * v_new[:, :, None].astype(jnp.float32)
    return (out / (weights.sum(axis=-1) + own)[..., None]).astype(q.dtype)


def _weigh(weights: Float[Array, "B Hkv R S"], v: Float[Array, "B Hkv S D"]) -> Float[Array, "B Hkv R D"]:
    """The values' sums by their weights, in float32."""

    def at_once(weights: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.einsum("bkrs,bksd->bkrd", weights, v, preferred_element_type=jnp.float32)

    def by_blocks(weights: jax.Array, v: jax.Array) -> jax.Array:
        # A CPU lays values out anew before it multiplies them, which a block at a time stays in its caches.
        *batch, tokens, dim = v.shape
        size = next(size for size in range(min(VALUE_BLOCK, tokens), 0, -1) if tokens % size == 0)
        if size < VALUE_BLOCK // 4:  # an odd number of tokens: small products cost more than they save
            return at_once(weights, v)
        weights, v = weights.reshape(*weights.shape[:-1], -1, size), v.reshape(*batch, -1, size, dim)
        return jnp.einsum("bkrns,bknsd->bknrd", weights, v, preferred_element_type=jnp.float32).sum(axis=2)

    return jax.lax.platform_dependent(weights, v, cpu=by_blocks, default=at_once)


def attend_chunk(
    q: Float[Array, "C Hkv R D"],
    k_new: Float[Array, "Hkv D C"],
    v_new: Float[Array, "Hkv C D"],
    k: Float[Array, "rows Hkv D S"],
    v: Float[Array, "rows Hkv S D"],
    row: Int[Array, ""],
    start: Int[Array, ""],
) -> Float[Array, "C Hkv R D"]:
    """One prefill chunk: C queries at positions start.. over their row's first `start` cached tokens and,
    causally, over the chunk's own.

    Keys are visited block by block with an online softmax (Milakov and Gimelshein 2018), straight from the
    cache and no further than `start`, so that cost follows the prompt and not the capacity. The loop's length
    is data: prefill is not captured as a graph. What lies beyond `start` in the cache takes no part: any K
    there, even NaN, and any finite V.
    """
    chunk, heads, repeat, dim = q.shape
    size = k.shape[-1]
    block = min(KEY_BLOCK, size)
    scale = dim**-0.5
    queries = q.transpose(1, 2, 0, 3).reshape(heads, repeat * chunk, dim)
    zero = jnp.zeros((), jnp.int32)

    def score(keys: Float[Array, "Hkv D N"]) -> Float[Array, "Hkv RC N"]:
        return jnp.einsum("kqd,kds->kqs", queries, keys, preferred_element_type=jnp.float32)

    def weigh(weights: Float[Array, "Hkv RC N"], values: Float[Array, "Hkv N D"]) -> Float[Array, "Hkv RC D"]:
        weights = weights.astype(values.dtype)
        return jnp.einsum("kqs,ksd->kqd", weights, values, preferred_element_type=jnp.float32)

    def own() -> Sums:
        seen = jnp.tile(jnp.tril(jnp.ones((chunk, chunk), bool)), (repeat, 1))
        scores = jnp.where(seen, score(k_new), -jnp.inf)
        top = scores.max(axis=-1)
        weights = jnp.exp((scores - top[..., None]) * scale)
        return weigh(weights, v_new), weights.sum(axis=-1), top

    def merge(sums: Sums, scores: Float[Array, "Hkv RC N"], values: Float[Array, "Hkv N D"]) -> Sums:
        out, total, top = sums
        new_top = jnp.maximum(top, scores.max(axis=-1))
        weights = jnp.exp((scores - new_top[..., None]) * scale)
        decay = jnp.exp((top - new_top) * scale)
        return out * decay[..., None] + weigh(weights, values), total * decay + weights.sum(axis=-1), new_top

    def cached(first: Int[Array, ""]) -> tuple[Float[Array, "Hkv D N"], Float[Array, "Hkv N D"]]:
        keys = jax.lax.dynamic_slice(k, (row, zero, zero, first), (1, heads, dim, block))
        values = jax.lax.dynamic_slice(v, (row, zero, first, zero), (1, heads, block, dim))
        return keys[0], values[0]

    def whole(i: Int[Array, ""], sums: Sums) -> Sums:
        keys, values = cached(i * block)
        return merge(sums, score(keys), values)  # every query sees all of it: masking would cost two passes

    def rest(sums: Sums) -> Sums:
        begin = start // block * block
        first = jnp.minimum(begin, size - block)  # the row's last block may overlap the one before
        keys, values = cached(first)
        at = first + jnp.arange(block)
        return merge(sums, jnp.where((at >= begin) & (at < start), score(keys), -jnp.inf), values)

    # Own keys come first: every query sees itself there, so that no maximum is -inf from then on.
    sums = jax.lax.fori_loop(0, start // block, whole, own())
    out, total, _ = jax.lax.cond(start % block > 0, rest, lambda sums: sums, sums)
    out = (out / total[..., None]).astype(q.dtype).reshape(heads, repeat, chunk, dim)
    return out.transpose(2, 0, 1, 3)
