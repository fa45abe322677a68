"""Choosing the next token on the device: greedy, or temperature with top-k and top-p.

Randomness is a function of seed, row and position alone, so that a run can be repeated or taken up again at
any token without carrying a generator's state.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import msgspec
from jaxtyping import Array, Float, Int

from swapkv_jax.errors import UsageError

COLDEST = 1e-4  # below, logits divided by the temperature leave float32


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are chosen. Temperature 0 is greedy; top_k 0 and top_p 1 leave the distribution whole."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature != 0.0 and not COLDEST <= self.temperature < float("inf"):
            raise UsageError(f"temperature must be 0 (greedy) or at least {COLDEST}, not {self.temperature}")
        if self.top_k < 0:
            raise UsageError(f"top_k must be 0 (off) or more, not {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise UsageError(f"top_p must be over 0 and at most 1 (off), not {self.top_p}")
        if not 0 <= self.seed < 2**32:
            raise UsageError(f"seed must be between 0 and 2**32 - 1, not {self.seed}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def choose(logits: Float[Array, "B V"], positions: Int[Array, " B"], sampling: Sampling) -> Int[Array, " B"]:
    """The next token of each row. `positions` are those the tokens will take. Sampling is static."""
    if sampling.greedy:
        # The first of the largest, as argmax finds it, which a CPU's XLA does a number at a time.
        ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)
        smaller = logits < logits.max(axis=-1, keepdims=True)
        return jnp.where(smaller, jnp.int32(logits.shape[-1]), ids).min(axis=-1)
    scaled = logits / sampling.temperature
    kept = _nucleus(_top_k(scaled, sampling.top_k), sampling.top_p)
    rows = jnp.arange(logits.shape[0])
    base = jax.random.key(sampling.seed)
    keys = jax.vmap(lambda row, at: jax.random.fold_in(jax.random.fold_in(base, row), at))(rows, positions)
    return jax.vmap(jax.random.categorical)(keys, kept).astype(jnp.int32)


def _top_k(logits: Float[Array, "B V"], top_k: int) -> Float[Array, "B V"]:
    if top_k == 0 or top_k >= logits.shape[-1]:
        return logits
    least = jax.lax.top_k(logits, top_k)[0][:, -1:]
    return jnp.where(logits >= least, logits, -jnp.inf)


def _nucleus(logits: Float[Array, "B V"], top_p: float) -> Float[Array, "B V"]:
    """Keeps the likeliest tokens up to and including the one whose sum reaches `top_p`."""
    if top_p == 1.0:
        return logits
    order = jnp.sort(logits, axis=-1, descending=True)
    mass = jnp.cumsum(jax.nn.softmax(order, axis=-1), axis=-1)
    kept = jnp.sum(mass < top_p, axis=-1, keepdims=True)  # index of the last token kept
    kept = jnp.minimum(kept, logits.shape[-1] - 1)  # the rounded sum of all may stay under top_p
    least = jnp.take_along_axis(order, kept, axis=-1)
    return jnp.where(logits >= least, logits, -jnp.inf)
