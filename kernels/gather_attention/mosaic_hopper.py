"""Gather attention for Hopper GPUs with tensor cores: bfloat16, groups of whole tiles of 8 tokens.

One block of one warpgroup serves the R queries of a KV head. A step copies 64 tokens, whole slots, into shared memory
while the step before it computes, multiplies all queries with their keys and the weights with their values (`wgmma`,
sums in float32), and keeps each query's online softmax (Milakov and Gimelshein 2018) in registers. The rolling buffer
takes the place of the first slot.

`wgmma` multiplies 64 rows, of which at most 16 are queries: four to sixteen times the products that are needed, and
still, at 32 multiply-adds per byte of a slot, well below the 150 that an H100 can make while its memory delivers it.
Keys as the rows would waste none of them, but softmax would then go across warps at every step, and weights through
shared memory. A row that is no query is whatever shared memory held: rows never mix, and it is not written out.

A weight of zero does not hide NaN from a product. So an entry that is not valid copies the rolling buffer once more,
with zeros where it is not written: everything in shared memory is then a number.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..versions import gpu_interpreter, load, store
from .reference import LOWEST

ROWS = 64  # of a product
STEP = 64  # tokens
STAGES = 2
TILE = 8  # rows of shared memory that `wgmma` reads together
COLUMNS = 128  # of values in one product: the registers of its result are not the only ones
ROLLING = -1  # an entry that copies the rolling buffer


def gather_attention_hopper(
    q: jax.Array,
    pool: jax.Array,
    slots: jax.Array,
    valid: jax.Array,
    rolling: jax.Array,
    newest: jax.Array,
    *,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """See `gather_attention`; for the sizes that `attention_choice.refusal` lets through."""
    batch, heads, repeat, dim = q.shape
    held, tokens, width = pool.shape[2:]
    tile = STEP // tokens
    steps = pl.cdiv(1 + slots.shape[1], tile)
    spare = steps * tile - 1 - slots.shape[1]
    ids = jnp.pad(jnp.where(valid, slots, ROLLING), ((0, 0), (1, spare)), constant_values=ROLLING)
    written = jnp.arange(tokens) <= newest[:, None]
    # Which of a step's tokens count, the rolling buffer's first: [B, steps, STEP].
    seen = jnp.repeat(ids[:, 1:] >= 0, tokens, axis=1)
    seen = jnp.concatenate([written, seen], axis=1).reshape(batch, steps, STEP)
    queries = pl.cdiv(repeat, TILE) * TILE
    q = jnp.pad(q, ((0, 0), (0, 0), (0, queries - repeat), (0, 0)))
    out, lse = plgpu.kernel(
        partial(_kernel, heads=heads, held=held, tokens=tokens, steps=steps, interpreted=bool(interpret)),
        out_type=(
            jax.ShapeDtypeStruct((batch * heads, queries, dim), q.dtype),
            jax.ShapeDtypeStruct((batch * heads, ROWS), jnp.float32),
        ),
        grid=(heads, batch),
        grid_names=("head", "row"),
        scratch_types=[
            plgpu.SMEM((ROWS, dim), q.dtype),
            plgpu.SMEM((STAGES, STEP, width), pool.dtype),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=tile, num_barriers=STAGES),
        ],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=gpu_interpreter(detect_races=False) if interpret is True else interpret,
        kernel_name="gather_attention_hopper",
    )(
        # A copy into tiles has two dimensions more, and may have five.
        q.reshape(batch * heads, queries, dim),
        pool.reshape(batch * heads * held, tokens, width),
        ids,
        seen.astype(jnp.int32),
        jnp.where(written[:, None, :, None], rolling, 0).reshape(batch * heads, tokens, width),
    )
    out = out.reshape(batch, heads, queries, dim)[:, :, :repeat]
    return out, lse.reshape(batch, heads, ROWS)[:, :, :repeat]


def _kernel(
    q,
    pool,
    ids,
    seen,
    rolling,
    out,
    lse,
    q_rows,
    kv,
    asked,
    arrived,
    *,
    heads,
    held,
    tokens,
    steps,
    interpreted,
):
    """In shared memory: `q_rows` [ROWS, D], `kv` [STAGES, STEP, W]. `seen`: [B, steps, STEP], in global memory."""
    head, row = (jax.lax.axis_index(name) for name in ("head", "row"))
    at = row * heads + head
    queries, dim = q.shape[1:]
    tile = STEP // tokens
    grid = plgpu.Layout.WGMMA
    per_row, per_column = grid.reduce(1), grid.reduce(0)
    parts = [(first, min(COLUMNS, dim - first)) for first in range(0, dim, COLUMNS)]

    # The interpreter has no registers to lay out, and no rules for `layout_cast`, `load` and `store`; nor does it
    # know tiles, or a product of registers: it makes of every `wgmma` the same plain product as here.
    def held_as(x: jax.Array, layout: Any) -> jax.Array:
        return x if interpreted else plgpu.layout_cast(x, layout)

    def product(a: Any, b: Any, columns: int, *, across: bool = False) -> jax.Array:
        """a [ROWS, K] times b [K, columns], or times b [columns, K] `across`."""
        if interpreted:
            dims = (((1,), (1 if across else 0,)), ((), ()))
            return jax.lax.dot_general(a[...], b[...], dims, preferred_element_type=jnp.float32)

        def multiply(sums: Any) -> jax.Array:
            plgpu.wgmma(sums, a, b.transpose((1, 0)) if across else b)
            return sums[...]

        return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((ROWS, columns), jnp.float32))

    def fetch(step: jax.Array | int, stage: jax.Array | int) -> None:
        for t in range(tile):
            slot, into = ids[row, step * tile + t], kv.at[stage, pl.ds(t * tokens, tokens)]

            @pl.when(slot >= 0)
            def _(slot=slot, into=into):
                plgpu.copy_gmem_to_smem(pool.at[at * held + slot], into, arrived.at[stage])

            @pl.when(slot < 0)
            def _(into=into):
                plgpu.copy_gmem_to_smem(rolling.at[at], into, arrived.at[stage])

    def advance(step: jax.Array, state: tuple[Any, ...]) -> tuple[Any, ...]:
        sums, totals, tops = state
        stage = step % STAGES

        @pl.when(step + 1 < steps)
        def _():
            # Into the stage that the step before this one read: every warp must be done with it.
            plgpu.commit_smem()
            fetch(step + 1, (step + 1) % STAGES)

        counts = seen[row, step] if interpreted else load(seen, (row, step), per_column)
        counts = jax.lax.broadcast_in_dim(counts, (ROWS, STEP), (1,)) > 0
        plgpu.barrier_wait(arrived.at[stage])
        scores = product(q_rows, kv.at[stage, :, pl.ds(0, dim)], STEP, across=True) * dim**-0.5
        scores = jnp.where(counts, scores, LOWEST)
        top = jnp.maximum(tops, scores.max(axis=1))
        weights = jnp.exp(scores - jax.lax.broadcast_in_dim(top, scores.shape, (0,)))
        weights = jnp.where(counts, weights, 0.0)
        decay = jnp.exp(tops - top)
        totals = totals * decay + weights.sum(axis=1)
        weights = weights.astype(kv.dtype)
        sums = tuple(
            part * jax.lax.broadcast_in_dim(decay, part.shape, (0,))
            + product(weights, kv.at[stage, :, pl.ds(dim + first, columns)], columns)
            for part, (first, columns) in zip(sums, parts, strict=True)
        )
        return sums, totals, top

    plgpu.copy_gmem_to_smem(q.at[at], q_rows.at[pl.ds(0, queries)], asked)
    fetch(0, 0)
    state = (
        tuple(held_as(jnp.zeros((ROWS, columns), jnp.float32), grid) for _, columns in parts),
        held_as(jnp.zeros((ROWS,), jnp.float32), per_row),
        held_as(jnp.full((ROWS,), LOWEST, jnp.float32), per_row),
    )
    plgpu.barrier_wait(asked)
    sums, totals, tops = jax.lax.fori_loop(0, steps, advance, state)

    def write(ref: Any, where: tuple[Any, ...], value: jax.Array) -> None:
        if interpreted:
            ref[where] = value
        else:
            store(ref, where, value)

    some = totals > 0
    write(lse, (at,), jnp.where(some, tops + jnp.log(totals), -jnp.inf))
    share = 1.0 / jnp.where(some, totals, 1.0)
    # What they attend takes the place of the queries, with which every warp must be done.
    plgpu.commit_smem()
    for part, (first, columns) in zip(sums, parts, strict=True):
        part = part * jax.lax.broadcast_in_dim(share, part.shape, (0,))
        write(q_rows, (slice(None), pl.ds(first, columns)), part.astype(q_rows.dtype))
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(q_rows.at[pl.ds(0, queries)], out.at[at])
    plgpu.wait_smem_to_gmem(0)
