"""Gather attention for Hopper and newer GPUs: slot ids are read in the kernel, slots come by asynchronous copies.

One block of one warpgroup serves one query: its grid index is (query of the head, head, row), so that the R queries
of a KV head run side by side and share its slots in L2. A step copies `tile` slots, each contiguous, into shared
memory while the step before it computes. Every token of a step keeps an online softmax of its own (Milakov and
Gimelshein 2018), all in registers: until the last step, when they are joined, no warp waits for another's sums. The
rolling buffer is a step before the first.

Products are plain multiply-adds: of any group, in float32 as in bfloat16, on Hopper and what follows it. Where shapes
and the GPU allow tensor cores, see mosaic_hopper.py.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..versions import gpu_interpreter, load, store
from .reference import LOWEST

WARPS, WARP, VECTOR = 4, 32, 4
REGISTERS = 64  # of a thread for one step's keys; values and sums take as many
STAGES = 2
ALIGNMENT = 128  # bytes
IN_BOUNDS = plgpu.OOBFillMode.PROMISE_IN_BOUNDS  # makes a slot's copy one bulk transfer, without a descriptor


def gather_attention_gpu(
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
    rows = step_tokens(dim)
    stride = slot_stride(tokens, width, dtype)
    tile = rows // stride
    steps = pl.cdiv(slots.shape[1], tile)
    ids, kept = jnp.where(valid, slots, 0), valid
    ids, kept = (jnp.pad(x, ((0, 0), (0, steps * tile - slots.shape[1]))) for x in (ids, kept))
    # Which of a step's tokens count, the rolling buffer's first: [B, 1 + steps, rows].
    seen = kept.reshape(batch, steps, tile, 1) & (jnp.arange(stride) < tokens)
    seen = jnp.pad(seen.reshape(batch, steps, -1), ((0, 0), (1, 0), (0, rows - tile * stride)))
    seen = seen.at[:, 0].set(jnp.arange(rows) <= jnp.minimum(newest, tokens - 1)[:, None])
    out, lse = plgpu.kernel(
        partial(_kernel, tokens=tokens, stride=stride, tile=tile, steps=steps, interpreted=bool(interpret)),
        out_type=(
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((batch, heads, repeat), jnp.float32),
        ),
        grid=(repeat, heads, batch),
        grid_names=("query", "head", "row"),
        scratch_types=[
            plgpu.SMEM((STAGES, rows, width), dtype),
            plgpu.Barrier(num_arrivals=tile, num_barriers=STAGES),
            plgpu.Barrier(),
        ],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=gpu_interpreter(detect_races=False) if interpret is True else interpret,
        kernel_name="gather_attention",
    )(q, pool, ids, seen.astype(jnp.int32), rolling)
    return out, lse


def step_tokens(dim: int) -> int:
    """Tokens of a step, as many as a warpgroup's registers hold."""
    return REGISTERS * WARPS * WARP // max(dim, 128)


def slot_stride(tokens: int, width: int, dtype: Any) -> int:
    """Tokens from one slot to the next in shared memory, where a copy must begin at a multiple of 128 bytes."""
    aligned = ALIGNMENT // math.gcd(ALIGNMENT, width * jnp.dtype(dtype).itemsize)
    return pl.cdiv(tokens, aligned) * aligned


def layout(dim: int) -> Any:
    """How a warpgroup holds tokens × D: a token's values lie side by side in as many lanes as divide it."""
    lanes = next(n for n in (32, 16, 8, 4) if dim % (n * VECTOR) == 0)
    at_once = WARP // lanes
    if at_once == 1:
        tiles = plgpu.Tiling(((WARPS, WARP * VECTOR), (VECTOR,)))
        return plgpu.Layout.TILED(tiles, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
    tiles = plgpu.Tiling(((WARPS * at_once, lanes * VECTOR), (at_once, lanes * VECTOR), (VECTOR,)))
    return plgpu.Layout.TILED(tiles, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


def _kernel(
    q, pool, ids, seen, rolling, out, lse, kv, arrived, rolled, *, tokens, stride, tile, steps, interpreted
):
    """`kv`: [STAGES, rows, W] in shared memory. `seen`: [B, 1 + steps, rows], in global memory."""
    query, head, row = (jax.lax.axis_index(name) for name in ("query", "head", "row"))
    rows, dim = kv.shape[1], q.shape[-1]
    grid = layout(dim)
    per_token, per_value = grid.reduce(1), grid.reduce(0)
    shape, last = (rows, dim), STAGES - 1

    # The interpreter has no registers to lay out, and no rules for `layout_cast`, `load` and `store`.
    def held(x: jax.Array, layout: Any) -> jax.Array:
        return x if interpreted else plgpu.layout_cast(x, layout)

    def read(ref: Any, at: tuple[Any, ...], layout: Any) -> jax.Array:
        return ref[at] if interpreted else load(ref, at, layout)

    def spread(x: jax.Array, axis: int) -> jax.Array:
        return held(jax.lax.broadcast_in_dim(x, shape, (axis,)), grid)

    def fetch(step: jax.Array | int, stage: jax.Array | int) -> None:
        for t in range(tile):
            slot, part = ids[row, step * tile + t], pl.ds(t * stride, tokens)
            plgpu.copy_gmem_to_smem(
                pool.at[row, head, slot], kv.at[stage, part], arrived.at[stage], oob_mode=IN_BOUNDS
            )

    q_row = read(q, (row, head, query), per_value).astype(jnp.float32) * dim**-0.5

    def attend(
        step: jax.Array | int, stage: jax.Array | int, state: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, ...]:
        sums, totals, tops = state
        counts = read(seen, (row, step), per_token) > 0
        k = read(kv, (stage, slice(None), pl.ds(0, dim)), grid).astype(jnp.float32)
        scores = jnp.where(counts, (k * spread(q_row, 1)).sum(axis=1), LOWEST)
        top = jnp.maximum(tops, scores)
        weights = jnp.where(counts, jnp.exp(scores - top), 0.0)
        decay = jnp.exp(tops - top)
        v = read(kv, (stage, slice(None), pl.ds(dim, dim)), grid).astype(jnp.float32)
        v = jnp.where(spread(counts, 0), v, 0.0)
        return sums * spread(decay, 0) + v * spread(weights, 0), totals * decay + weights, top

    plgpu.copy_gmem_to_smem(rolling.at[row, head], kv.at[last, pl.ds(0, tokens)], rolled, oob_mode=IN_BOUNDS)
    for stage in range(min(last, steps)):
        fetch(stage, stage)
    state = (
        held(jnp.zeros(shape, jnp.float32), grid),
        held(jnp.zeros((rows,), jnp.float32), per_token),
        held(jnp.full((rows,), LOWEST, jnp.float32), per_token),
    )
    plgpu.barrier_wait(rolled)
    state = attend(0, last, state)

    def advance(step: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        @pl.when(step + last < steps)
        def _():
            # Into the stage that the step before this one read: every warp must be done with it.
            plgpu.commit_smem()
            fetch(step + last, (step + last) % STAGES)

        plgpu.barrier_wait(arrived.at[step % STAGES])
        return attend(step + 1, step % STAGES, state)

    sums, totals, tops = jax.lax.fori_loop(0, steps, advance, state)
    top = tops.max(axis=0)
    share = jnp.exp(tops - top)
    total = (totals * share).sum(axis=0)
    result = (sums * spread(share, 0)).sum(axis=0) / jnp.where(total > 0, total, 1.0)
    result = result.astype(out.dtype)
    if interpreted:
        out[row, head, query] = result
    else:
        store(out, (row, head, query), result)
    lse[row, head, query] = jnp.where(total > 0, top + jnp.log(total), -jnp.inf)
