"""The graphs of the `group` policy: attention over selected groups, and the selection itself.

Shapes: B rows, Hkv KV heads, D head dim, C reuse slots (plus one that padding may overwrite), G tokens per
group, r rank of the summary, P its places (tokens or groups) per row, S row capacity, M selected groups, n
records of a load.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from swapkv_jax.graph import Graph, GraphMaker, Shape
from swapkv_jax.models.blocks import BlockFunctions, Params
from swapkv_jax.models.geometry import Geometry
from swapkv_jax.plan import Plan
from swapkv_jax.predictor import group_means, group_scores, low_rank_query, select, summarise
from swapkv_jax.selection import Selection


@dataclass(frozen=True)
class GroupGraphs:
    """One layer's graphs; every layer runs through the same ones.

    `load[n]`: see `load_groups`. `summarise`: see `summarise_row`. `predict`, `segment`: see `group_predict`
    and `group_segment`.
    """

    load: dict[int, Graph]
    summarise: Graph
    predict: Graph
    segment: Graph

    @property
    def all(self) -> tuple[Graph, ...]:
        return (self.segment, self.predict, *self.load.values())


def compile_group_graphs(
    plan: Plan, block: BlockFunctions, geometry: Geometry, make: GraphMaker = Graph
) -> GroupGraphs:
    """The policy's graphs, lowered and compiled for the default device, or as `make` makes them."""
    dtype, b, heads, dim, g = (
        jnp.dtype(plan.dtype),
        plan.batch,
        plan.kv_heads,
        plan.head_dim,
        plan.group_tokens,
    )
    choice = selection_of(plan)
    slots, values = choice.reuse_slots + 1, plan.stride_bytes // plan.itemsize
    pool_k, pool_v = (Shape(shape, dtype) for shape in plan.pool_shapes)
    rolling = Shape((b, heads, g, dim), dtype)
    summary = Shape((b, plan.summary_places, choice.rank), jnp.dtype(choice.summary_dtype))
    adapter = Shape((heads * dim, choice.rank), jnp.float32)
    ids = Shape((b, choice.selected_groups), jnp.int32)
    x, lengths, scalar = Shape((b, geometry.hidden), dtype), Shape((b,), jnp.int32), Shape((), jnp.int32)
    used = Shape((b, slots), jnp.bool_)
    queries = Shape((geometry.hidden, geometry.heads * geometry.head_dim), jnp.dtype(choice.summary_dtype))
    k_row = Shape(plan.layer_shapes(plan.slot_rows)[0], dtype)
    state = [rolling, rolling, summary, *([ids] if choice.lookahead == "step" else [])]
    load = {}
    for n in choice.load_buckets:
        places = Shape((n,), jnp.int32)
        load[n] = make(
            "load",
            partial(load_groups, tokens=g),
            [pool_k, pool_v, Shape((n, values), dtype), places, places],
            (0, 1),
        )
    return GroupGraphs(
        load=load,
        summarise=make(
            "summarise",
            partial(summarise_row, place_tokens=plan.place_tokens),
            [summary, adapter, k_row, scalar],
            (0,),
        ),
        predict=make(
            "predict",
            group_predict(plan, block),
            [block.params, queries, adapter, x, summary, lengths, ids],
            (6,),
        ),
        segment=make(
            "segment",
            group_segment(plan, block),
            [block.params, adapter, x, pool_k, pool_v, used, lengths, ids, *state],
            (2, *range(8, 8 + len(state))),
        ),
    )


def summarise_row(
    summary: Float[Array, "B P r"],
    adapter: Float[Array, "HkvD r"],
    k: Float[Array, "1 Hkv D S"],
    row: Int[Array, ""],
    *,
    place_tokens: int,
) -> Float[Array, "B P r"]:
    """The summary of a prefilled row's keys; what it says beyond the prompt is never looked at."""
    zero = jnp.zeros((), jnp.int32)
    k = group_means(k, place_tokens) if place_tokens > 1 else k
    return _write(summary, summarise(k, adapter), (row, zero, zero))


def _write(summary: jax.Array, values: jax.Array, where: tuple[jax.Array, ...]) -> jax.Array:
    """Writes into the summary in place, as bits: XLA's CPU backend has no arithmetic of 16 bits, and converted the
    whole summary to float32 and back for a write of bfloat16 (80 times slower)."""
    values = values.astype(summary.dtype)
    if summary.dtype.itemsize == 2:
        bits = jax.lax.bitcast_convert_type(summary, jnp.uint16)
        bits = jax.lax.dynamic_update_slice(bits, jax.lax.bitcast_convert_type(values, jnp.uint16), where)
        return jax.lax.bitcast_convert_type(bits, summary.dtype)
    return jax.lax.dynamic_update_slice(summary, values, where)


def load_groups(
    pool_k: Float[Array, "B Hkv D CG"],
    pool_v: Float[Array, "B Hkv CG D"],
    records: Float[Array, "n values"],
    rows: Int[Array, " n"],
    slots: Int[Array, " n"],
    *,
    tokens: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Puts records, each K [Hkv, D, G] then V [Hkv, G, D], into slots of rows. Padding goes to the last slot.

    Args:
      tokens: G.
    Returns: the pools, and the staging memory's fence, which is ready when the records have been read.
    """
    heads, dim = pool_k.shape[1:3]
    size, zero = heads * dim * tokens, jnp.zeros((), jnp.int32)

    def one_by_one(pool_k: jax.Array, pool_v: jax.Array) -> tuple[jax.Array, jax.Array]:
        def put(i: Int[Array, ""], pools: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            pool_k, pool_v = pools
            record, row, at = records[i], rows[i], slots[i] * tokens
            k = record[:size].reshape(1, heads, dim, tokens)
            v = record[size : 2 * size].reshape(1, heads, tokens, dim)
            pool_k = jax.lax.dynamic_update_slice(pool_k, k, (row, zero, zero, at))
            return pool_k, jax.lax.dynamic_update_slice(pool_v, v, (row, zero, at, zero))

        return jax.lax.fori_loop(0, records.shape[0], put, (pool_k, pool_v))

    def at_once(pool_k: jax.Array, pool_v: jax.Array) -> tuple[jax.Array, jax.Array]:
        # A GPU's command buffer takes no loop.
        at = slots[:, None] * tokens + jnp.arange(tokens, dtype=jnp.int32)  # [n, G]
        k = records[:, :size].reshape(-1, heads, dim, tokens).transpose(0, 3, 1, 2)  # [n, G, Hkv, D]
        v = records[:, size : 2 * size].reshape(-1, heads, tokens, dim).transpose(0, 2, 1, 3)
        pool_k = pool_k.at[rows[:, None], :, :, at].set(k, mode="promise_in_bounds")
        return pool_k, pool_v.at[rows[:, None], :, at].set(v, mode="promise_in_bounds")

    pool_k, pool_v = jax.lax.platform_dependent(
        pool_k, pool_v, cuda=at_once, rocm=at_once, default=one_by_one
    )
    return pool_k, pool_v, rows[0] + slots[0]


def attend_groups(
    q: Float[Array, "B Hkv R D"],
    pool_k: Float[Array, "B Hkv D CG"],
    pool_v: Float[Array, "B Hkv CG D"],
    used: Bool[Array, "B C1"],
    rolling_k: Float[Array, "B Hkv G D"],
    rolling_v: Float[Array, "B Hkv G D"],
    newest: Int[Array, " B"],
) -> Float[Array, "B Hkv R D"]:
    """Each row's query over the slots in use and over the rolling buffer's tokens 0 … `newest`.

    The two parts join by merging softmax sums (online softmax), so nothing is concatenated or copied. Slots
    not in use take no part: any K there, even NaN, and any finite V.
    """
    tokens = rolling_k.shape[2]
    scale = q.shape[-1] ** -0.5
    far = jnp.einsum("bkrd,bkds->bkrs", q, pool_k, preferred_element_type=jnp.float32) * scale
    near = jnp.einsum("bkrd,bkgd->bkrg", q, rolling_k, preferred_element_type=jnp.float32) * scale
    far = jnp.where(jnp.repeat(used, tokens, axis=1)[:, None, None], far, -jnp.inf)
    near = jnp.where((jnp.arange(tokens) <= newest[:, None])[:, None, None], near, -jnp.inf)
    top = jnp.maximum(far.max(axis=-1), near.max(axis=-1))[..., None]  # finite: the new token is always near
    far, near = jnp.exp(far - top), jnp.exp(near - top)
    out = jnp.einsum("bkrs,bksd->bkrd", far.astype(q.dtype), pool_v, preferred_element_type=jnp.float32)
    out = out + jnp.einsum(
        "bkrg,bkgd->bkrd", near.astype(q.dtype), rolling_v, preferred_element_type=jnp.float32
    )
    return (out / (far.sum(axis=-1) + near.sum(axis=-1))[..., None]).astype(q.dtype)


def group_segment(plan: Plan, block: BlockFunctions) -> Callable[..., Any]:
    """One layer's step: (params, adapter, x, pools, used, lengths, after, rolling, summary) → x, rolling, summary.

    `after` [B, M] is there to be waited for: the selection for the next layer, whose reads should run beside this
    graph, must not share the processor with it. Under `step` lookahead the graph also takes and gives `ids` [B, M],
    the groups that the next step should attend.
    """
    selects = selection_of(plan).lookahead == "step"

    def segment(
        params: Params, adapter, x, pool_k, pool_v, used, lengths, after, rolling_k, rolling_v, summary, *ids
    ):
        del after, ids  # given for their order and memory alone
        q, k_new, v_new = block.project(params, x, lengths, lengths + 1)
        newest = lengths % plan.group_tokens
        here = (jnp.arange(plan.group_tokens) == newest[:, None])[:, None, :, None]  # [B, 1, G, 1]
        rolling_k = jnp.where(here, k_new[:, :, None], rolling_k)
        rolling_v = jnp.where(here, v_new[:, :, None], rolling_v)
        x = block.finish(params, x, attend_groups(q, pool_k, pool_v, used, rolling_k, rolling_v, newest))
        # The write comes before the read, so that XLA can do it in place.
        k = k_new if plan.place_tokens == 1 else rolling_k.astype(jnp.float32).mean(2)  # [B, Hkv, D]
        # A group's mean is right once the group is complete; nobody looks at it before.
        place = summarise(k[..., None], adapter)  # [B, 1, r]
        zero = jnp.zeros((), jnp.int32)
        for row in range(place.shape[0]):
            at = (jnp.asarray(row, jnp.int32), lengths[row] // plan.place_tokens, zero)
            summary = _write(summary, place[row][None], at)
        if not selects:
            return x, rolling_k, rolling_v, summary
        ids = _select(plan, q, adapter, summary, lengths + 1)
        return x, rolling_k, rolling_v, summary, ids

    return segment


def group_predict(plan: Plan, block: BlockFunctions) -> Callable[..., Any]:
    """A layer's selection before its own step: (params, queries, adapter, x, summary, lengths, ids) → ids [B, M].

    `queries` are the layer's query weights, in the summary's dtype: scores need no more. With the layer's own input
    the selection is exact but for that; with the input of the layer before it is the paper's approximation.
    """

    def predict(params: Params, queries, adapter, x, summary, lengths, ids):
        del ids  # given for their memory alone
        q = block.queries(params, queries, x, lengths, lengths + 1)
        return _select(plan, q, adapter, summary, lengths)

    return predict


def selection_of(plan: Plan) -> Selection:
    """The plan's selection, which a valid plan of this policy has."""
    assert plan.selection is not None
    return plan.selection


def _select(
    plan: Plan,
    q: Float[Array, "B Hkv R D"],
    adapter: Float[Array, "HkvD r"],
    summary: Float[Array, "B P r"],
    lengths: Int[Array, " B"],
) -> Int[Array, "B M"]:
    choice, g = selection_of(plan), plan.group_tokens
    query = low_rank_query(q, adapter, choice.aggregate)
    scores = group_scores(query, summary, lengths // g, g // plan.place_tokens, choice.aggregate)
    return select(scores, lengths // g, choice.selected_groups, choice.sink_groups, choice.recent_groups)
