"""Gather attention as XLA operations: the statement that the kernels are tested against, and the CPU path."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

HIGHEST = jax.lax.Precision.HIGHEST
# A kernel's maximum before anything was seen: finite, so that no difference is NaN.
LOWEST = float(jnp.finfo(jnp.float32).min)


def gather_attention_xla(
    q: Float[Array, "B Hkv R D"],
    pool: Float[Array, "B Hkv C G W"],
    slots: Int[Array, "B M"],
    valid: Bool[Array, "B M"],
    rolling: Float[Array, "B Hkv G W"],
    newest: Int[Array, " B"],
) -> tuple[Float[Array, "B Hkv R D"], Float[Array, "B Hkv R"]]:
    """See `gather_attention`. Keys, values and weights are all widened to float32, so that what it returns in
    bfloat16 is wrong by no more than the last rounding."""
    batch, heads, _, dim = q.shape
    tokens = rolling.shape[2]
    at = jnp.where(valid, slots, 0)[:, None, :, None, None]
    chosen = jnp.take_along_axis(pool, at, axis=2).reshape(batch, heads, -1, pool.shape[-1])
    seen = jnp.concatenate(
        [jnp.repeat(valid, tokens, axis=1), jnp.arange(tokens) <= newest[:, None]], axis=1
    )[:, None, :, None]  # [B, 1, N, 1]
    kv = jnp.where(seen, jnp.concatenate([chosen, rolling], axis=2).astype(jnp.float32), 0)
    k, v = kv[..., :dim], kv[..., dim : 2 * dim]
    scores = jnp.einsum("bkrd,bksd->bkrs", q.astype(jnp.float32), k, precision=HIGHEST) * dim**-0.5
    scores = jnp.where(seen.swapaxes(2, 3), scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    # A row that sees nothing has lse -inf, which would make its weights NaN instead of zero.
    weights = jnp.exp(scores - jnp.maximum(lse, jnp.finfo(jnp.float32).min)[..., None])
    return jnp.einsum("bkrs,bksd->bkrd", weights, v, precision=HIGHEST).astype(q.dtype), lse
