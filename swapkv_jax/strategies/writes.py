"""Writes into a summary in place, inside a graph."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped


def write(summary: jax.Array, values: jax.Array, where: tuple[jax.Array, ...]) -> jax.Array:
    """Writes into the summary in place. Two bytes are written as bits on a CPU: its XLA has no arithmetic of 16 bits
    and converted the whole summary to float32 and back for a write of bfloat16 (80 times slower). A TPU's would copy
    the whole summary to see it as bits, and back (a sixth to a quarter of a segment, by its own estimate)."""
    values = values.astype(summary.dtype)

    def plain(summary: jax.Array, values: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(summary, values, where)

    def as_bits(summary: jax.Array, values: jax.Array) -> jax.Array:
        bits, new = (jax.lax.bitcast_convert_type(x, jnp.uint16) for x in (summary, values))
        return jax.lax.bitcast_convert_type(plain(bits, new), summary.dtype)

    if summary.dtype.itemsize != 2:
        return plain(summary, values)
    return jax.lax.platform_dependent(summary, values, cpu=as_bits, default=plain)


def write_places(
    summary: Shaped[Array, "B P ..."],
    places: Shaped[Array, "B 1 ..."],
    lengths: Int[Array, " B"],
    place_tokens: int,
) -> Shaped[Array, "B P ..."]:
    """The summary with each row's place that the token at `lengths` belongs to."""
    zero = jnp.zeros((), jnp.int32)
    for row in range(places.shape[0]):
        at = (jnp.asarray(row, jnp.int32), lengths[row] // place_tokens, *[zero] * (places.ndim - 2))
        summary = write(summary, places[row][None], at)
    return summary
