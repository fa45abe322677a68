"""The graphs of the `group` policy: attention over selected groups, and the selection itself.

Shapes: B rows, Hkv KV heads, D head dim, C reuse slots (plus one that padding may overwrite), G tokens per
group, r rank of the summary, S row capacity, M selected groups, n records of a load.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from swapkv_jax.graph import Graph, Shape
from swapkv_jax.models.blocks import BlockFunctions, Params
from swapkv_jax.plan import Plan
from swapkv_jax.predictor import group_scores, low_rank_query, select, summarise
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


def compile_group_graphs(plan: Plan, block: BlockFunctions, hidden: int) -> GroupGraphs:
    """Lowers and compiles the policy's graphs for the default device."""
    dtype, b, heads, dim, g = (
        jnp.dtype(plan.dtype),
        plan.batch,
        plan.kv_heads,
        plan.head_dim,
        plan.group_tokens,
    )
    choice = selection_of(plan)
    slots, values = choice.reuse_slots + 1, plan.stride_bytes // plan.itemsize
    pool = Shape((b, heads, slots, g * dim), dtype)
    rolling = Shape((b, heads, g, dim), dtype)
    summary = Shape((b, choice.rank, plan.capacity), dtype)
    adapter = Shape((heads * dim, choice.rank), jnp.float32)
    new = Shape((2, b, heads, dim), dtype)
    ids = Shape((b, choice.selected_groups), jnp.int32)
    x, lengths, scalar = Shape((b, hidden), dtype), Shape((b,), jnp.int32), Shape((), jnp.int32)
    used = Shape((b, slots), jnp.bool_)
    k_row = Shape(plan.layer_shapes(plan.slot_rows)[0], dtype)
    load = {}
    for n in choice.load_buckets:
        places = Shape((n,), jnp.int32)
        load[n] = Graph(
            "load",
            partial(load_groups, dim=dim),
            [pool, pool, Shape((n, values), dtype), places, places],
            (0, 1),
        )
    return GroupGraphs(
        load=load,
        summarise=Graph("summarise", summarise_row, [summary, adapter, k_row, scalar], (0,)),
        predict=Graph(
            "predict", group_predict(plan, block), [block.params, adapter, x, summary, lengths], ()
        ),
        segment=Graph(
            "segment",
            group_segment(plan, block),
            [block.params, adapter, x, pool, pool, used, rolling, rolling, summary, new, ids, lengths],
            (2, 6, 7, 8, 9, 10),
        ),
    )


def summarise_row(
    summary: Float[Array, "B r S"],
    adapter: Float[Array, "HkvD r"],
    k: Float[Array, "1 Hkv D S"],
    row: Int[Array, ""],
) -> Float[Array, "B r S"]:
    """The summary of a prefilled row's keys; what it says beyond the prompt is never looked at."""
    zero = jnp.zeros((), jnp.int32)
    return jax.lax.dynamic_update_slice(
        summary, summarise(k, adapter).astype(summary.dtype), (row, zero, zero)
    )


def load_groups(
    pool_k: Float[Array, "B Hkv C1 GD"],
    pool_v: Float[Array, "B Hkv C1 GD"],
    records: Float[Array, "n values"],
    rows: Int[Array, " n"],
    slots: Int[Array, " n"],
    *,
    dim: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Puts records, each K [Hkv, D, G] then V [Hkv, G, D], into slots of rows. Padding goes to the last slot.

    In a slot K is [Hkv, G, D] too: a group then is a run of memory that a scatter copies whole.

    The last output is the staging memory's fence: it is ready when the records have been read.
    """
    n, heads, width = records.shape[0], pool_k.shape[1], pool_k.shape[3]
    k = records[:, : heads * width].reshape(n, heads, dim, -1).swapaxes(2, 3).reshape(n, heads, width)
    v = records[:, heads * width : 2 * heads * width].reshape(n, heads, width)
    return pool_k.at[rows, :, slots].set(k), pool_v.at[rows, :, slots].set(v), rows[0] + slots[0]


def attend_groups(
    q: Float[Array, "B Hkv R D"],
    pool_k: Float[Array, "B Hkv C1 GD"],
    pool_v: Float[Array, "B Hkv C1 GD"],
    used: Bool[Array, "B C1"],
    rolling_k: Float[Array, "B Hkv G D"],
    rolling_v: Float[Array, "B Hkv G D"],
    newest: Int[Array, " B"],
) -> Float[Array, "B Hkv R D"]:
    """Each row's query over the slots in use and over the rolling buffer's tokens 0 … `newest`.

    The two parts join by merging softmax sums (online softmax), so nothing is concatenated or copied. Slots
    not in use take no part: any K there, even NaN, and any finite V.
    """
    b, heads, _, dim = q.shape
    tokens = pool_k.shape[3] // dim
    k = pool_k.reshape(b, heads, -1, dim)
    v = pool_v.reshape(b, heads, -1, dim)
    scale = dim**-0.5
    far = jnp.einsum("bkrd,bksd->bkrs", q, k, preferred_element_type=jnp.float32) * scale
    near = jnp.einsum("bkrd,bkgd->bkrg", q, rolling_k, preferred_element_type=jnp.float32) * scale
    far = jnp.where(jnp.repeat(used, tokens, axis=1)[:, None, None], far, -jnp.inf)
    near = jnp.where((jnp.arange(tokens) <= newest[:, None])[:, None, None], near, -jnp.inf)
    top = jnp.maximum(far.max(axis=-1), near.max(axis=-1))[..., None]  # finite: the new token is always near
    far, near = jnp.exp(far - top), jnp.exp(near - top)
    out = jnp.einsum("bkrs,bksd->bkrd", far.astype(v.dtype), v, preferred_element_type=jnp.float32)
    out = out + jnp.einsum(
        "bkrg,bkgd->bkrd", near.astype(v.dtype), rolling_v, preferred_element_type=jnp.float32
    )
    return (out / (far.sum(axis=-1) + near.sum(axis=-1))[..., None]).astype(q.dtype)


def group_segment(plan: Plan, block: BlockFunctions) -> Callable[..., Any]:
    """One layer's step: (params, adapter, x, pools, used, rolling, summary, new, ids, lengths) → x, rolling,
    summary, new, ids: `ids` [B, M] are the groups that the next step should attend."""

    def segment(
        params: Params, adapter, x, pool_k, pool_v, used, rolling_k, rolling_v, summary, new, ids, lengths
    ):
        del new, ids  # given for their memory alone
        q, k_new, v_new = block.project(params, x, lengths, lengths + 1)
        newest = lengths % plan.group_tokens
        here = (jnp.arange(plan.group_tokens) == newest[:, None])[:, None, :, None]  # [B, 1, G, 1]
        rolling_k = jnp.where(here, k_new[:, :, None], rolling_k)
        rolling_v = jnp.where(here, v_new[:, :, None], rolling_v)
        x = block.finish(params, x, attend_groups(q, pool_k, pool_v, used, rolling_k, rolling_v, newest))
        # The write comes before the read, so that XLA can do it in place.
        token = summarise(k_new[..., None], adapter).astype(summary.dtype)  # [B, r, 1]
        zero = jnp.zeros((), jnp.int32)
        for row in range(token.shape[0]):
            at = (jnp.asarray(row, jnp.int32), zero, lengths[row])
            summary = jax.lax.dynamic_update_slice(summary, token[row][None], at)
        ids = _select(plan, q, adapter, summary, lengths + 1)
        return x, rolling_k, rolling_v, summary, jnp.stack([k_new, v_new]), ids

    return segment


def group_predict(plan: Plan, block: BlockFunctions) -> Callable[..., Any]:
    """A layer's selection before its own step: (params, adapter, x, summary, lengths) → ids [B, M].

    With the layer's own input it is exact; with the input of the layer before, the paper's approximation.
    """

    def predict(params: Params, adapter, x, summary, lengths):
        q, _, _ = block.project(params, x, lengths, lengths + 1)
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
    summary: Float[Array, "B r S"],
    lengths: Int[Array, " B"],
) -> Int[Array, "B M"]:
    choice, g = selection_of(plan), plan.group_tokens
    query = low_rank_query(q, adapter, choice.aggregate)
    scores = group_scores(query, summary, lengths, g, choice.aggregate)
    return select(scores, lengths // g, choice.selected_groups, choice.sink_groups, choice.recent_groups)
