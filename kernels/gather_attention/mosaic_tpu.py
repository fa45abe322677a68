"""Gather attention for TPUs: slot ids choose the blocks that the grid's pipeline copies into VMEM.

The grid is (row, step). A step takes `tile` slots of all heads; each is an input of its own, so that its id can be
its block index and the pipeline copies the next step's slots while this one computes. In VMEM a slot's G tokens are
widened to whole sublane tiles, which makes a step's slots one matrix per head whatever G is. Softmax is online
(Milakov and Gimelshein 2018); the rolling buffer is a step before the first.

Where D is not whole lanes, taking K and V apart would shift every token's lanes. Instead both products take the
packed token as it lies: the query has zeros where V is, and of the sums only the columns of V are kept.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .reference import LOWEST

LANES = 128
SLOT_BYTES = 4 << 20  # of VMEM for one of the two copies of a step's slots: 16 MiB hold it all on every TPU


def gather_attention_tpu(
    q: jax.Array,
    pool: jax.Array,
    slots: jax.Array,
    valid: jax.Array,
    rolling: jax.Array,
    newest: jax.Array,
    *,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """See `gather_attention`."""
    batch, heads, repeat, dim = q.shape
    tokens, width, dtype = *pool.shape[3:], pool.dtype
    padded = pl.cdiv(tokens, sublanes(dtype)) * sublanes(dtype)
    tile = tile_slots(slots.shape[1], heads, padded, width, dtype)
    steps = pl.cdiv(slots.shape[1], tile)
    # One array says both which slots and whether: -1 is not attended, and reads slot 0 for nothing.
    ids = jnp.where(valid, slots, -1)
    ids = jnp.pad(ids, ((0, 0), (0, steps * tile - slots.shape[1])), constant_values=-1).reshape(-1)

    def slot(t: int) -> pl.BlockSpec:
        def where(b, step, ids, newest):
            return b, 0, jnp.maximum(ids[(b * steps + step) * tile + t], 0), 0, 0

        return pl.BlockSpec((1, heads, 1, tokens, width), where)

    def row(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, *shape), lambda b, step, ids, newest: (b, *(0 for _ in shape)))

    split = dim % LANES == 0
    reach = dim if split else width  # values of a query and of an output in the kernel
    q = jnp.pad(q, ((0, 0), (0, 0), (0, 0), (0, reach - dim)))
    out, lse = pl.pallas_call(
        partial(_kernel, tile=tile, dim=dim, split=split),
        out_shape=(
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((batch, heads, repeat, 1), jnp.float32),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, steps),
            in_specs=[
                row(heads, repeat, reach),
                row(heads, tokens, width),
                *(slot(t) for t in range(tile)),
            ],
            out_specs=(row(heads, repeat, reach), row(heads, repeat, 1)),
            scratch_shapes=[
                pltpu.VMEM((heads, tile * padded, width), dtype),
                pltpu.VMEM((heads, repeat, reach), jnp.float32),
                pltpu.VMEM((heads, repeat, 1), jnp.float32),
                pltpu.VMEM((heads, repeat, 1), jnp.float32),
            ],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="gather_attention",
    )(ids, newest, q, rolling, *[pool] * tile)
    return out if split else out[..., dim : 2 * dim], lse[..., 0]


def sublanes(dtype: Any) -> int:
    """Rows of a VMEM tile of `dtype`."""
    return 32 // jnp.dtype(dtype).itemsize


def tile_slots(selected: int, heads: int, padded: int, width: int, dtype: Any) -> int:
    """Slots per step: as many as give scores one register's width, fewer where VMEM does not hold them.

    Args:
      selected: M.
      padded: G, rounded up to whole tiles.
    """
    lanes = pl.cdiv(width, LANES) * LANES
    slot_bytes = heads * padded * lanes * jnp.dtype(dtype).itemsize
    return max(1, min(selected, LANES // padded, SLOT_BYTES // slot_bytes))


def _kernel(ids, newest, q, rolling, *refs, tile: int, dim: int, split: bool) -> None:
    """Blocks: q and out [1, Hkv, R, Q], rolling [1, Hkv, G, W], a slot [1, Hkv, 1, G, W], lse [1, Hkv, R, 1].
    Scratch: kv [Hkv, N, W] with N = tile · padded G; sums [Hkv, R, Q], totals and tops [Hkv, R, 1]. Q is D where K
    and V are `split`, else W."""
    slots, (out, lse, kv, sums, totals, tops) = refs[:tile], refs[tile:]
    row, step, steps = pl.program_id(0), pl.program_id(1), pl.num_programs(1)
    tokens, padded = rolling.shape[2], kv.shape[1] // tile
    place = jax.lax.broadcasted_iota(jnp.int32, (1, 1, kv.shape[1]), 2)
    precision = jax.lax.Precision.HIGHEST if kv.dtype == jnp.float32 else None
    keys, values = (kv.at[:, :, :dim], kv.at[:, :, dim : 2 * dim]) if split else (kv, kv)

    def dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
        dims = (((contract[0],), (contract[1],)), ((0,), (0,)))
        return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)

    def attend(seen: jax.Array) -> None:
        scores = dot(q[0], keys[...], (2, 2)) * dim**-0.5  # [Hkv, R, N]
        scores = jnp.where(seen, scores, LOWEST)
        top = jnp.maximum(tops[...], scores.max(axis=-1, keepdims=True))
        weights = jnp.where(seen, jnp.exp(scores - top), 0.0)
        decay = jnp.exp(tops[...] - top)
        tops[...] = top
        totals[...] = totals[...] * decay + weights.sum(axis=-1, keepdims=True)
        sums[...] = sums[...] * decay + dot(weights.astype(values.dtype), values[...], (2, 1))

    @pl.when(step == 0)
    def _():
        # What widens a slot is never written again, and zeros times zero weights must not be NaN.
        kv[...] = jnp.zeros_like(kv)
        tops[...] = jnp.full_like(tops, LOWEST)
        totals[...], sums[...] = jnp.zeros_like(totals), jnp.zeros_like(sums)
        written = jax.lax.broadcasted_iota(jnp.int32, (1, tokens, 1), 1) <= newest[row]
        kv[:, :tokens] = jnp.where(written, rolling[0], 0)
        attend(place <= jnp.minimum(newest[row], tokens - 1))

    seen = jnp.zeros_like(place, dtype=jnp.bool_)
    for t in range(tile):
        at, chosen = t * padded, ids[(row * steps + step) * tile + t] >= 0
        kv[:, at : at + tokens] = jnp.where(chosen, slots[t][0, :, 0], 0)
        seen |= (place >= at) & (place < at + tokens) & chosen
    attend(seen)

    @pl.when(step == steps - 1)
    def _():
        total = totals[...]
        out[0] = (sums[...] / jnp.where(total > 0, total, 1.0)).astype(out.dtype)
        lse[0] = jnp.where(total > 0, tops[...] + jnp.log(total), -jnp.inf)
