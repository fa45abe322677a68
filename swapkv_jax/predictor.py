"""Which groups the `group` policy attends: a score for every group from low-rank keys, and the best M of them.

Follows KVSwap (arXiv 2511.11907): the post-RoPE keys of all KV heads, flattened to Hkv*D numbers per token, are
summarised by their r coordinates in a per-layer basis, the adapter; queries are projected alike, so that a dot
product over r approximates q·k. Pure functions of static shapes without loops or callbacks, so that they compile
into the decode segment's graph and are captured with it.

Shapes below: B rows, Hkv KV heads, R query heads per KV head, D head dim, r rank, S token places, G tokens per
group, N = S/G groups. Scores are float32 whatever the dtype of queries and summary.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from swapkv_jax.errors import PlanError
from swapkv_jax.selection import Aggregate


def summarise(k: Float[Array, "*b Hkv D n"], adapter: Float[Array, "HkvD r"]) -> Float[Array, "*b n r"]:
    """The summary of n tokens' post-RoPE keys, in float32: stored in a narrower dtype it is rounded only once."""
    flat = k.reshape(*k.shape[:-3], adapter.shape[0], k.shape[-1])
    return jnp.einsum("...cn,cr->...nr", flat, adapter.astype(flat.dtype), preferred_element_type=jnp.float32)


def group_means(k: Float[Array, "*b Hkv D n"], group_tokens: int) -> Float[Array, "*b Hkv D n/G"]:
    """The mean key of each group, float32. n is a multiple of G = `group_tokens`.

    Neighbours' keys differ by what RoPE turns fast, which their mean loses: the same rank keeps more of its
    variance (SmolLM2, G 4, r 64: 97 % against 90 %), and it takes G times less memory and time to score.
    """
    slices = (jax.lax.slice_in_dim(k, i, None, group_tokens, -1) for i in range(group_tokens))
    return functools.reduce(jnp.add, (part.astype(jnp.float32) for part in slices)) / group_tokens


def low_rank_query(
    q: Float[Array, "B Hkv R D"], adapter: Float[Array, "HkvD r"], aggregate: Aggregate
) -> Float[Array, "B *Hq r"]:
    """Projects post-RoPE queries so that `group_scores` can meet them with a summary. Float32.

    `sum` (the paper's): [B, r], averaged within each KV group, projected, averaged over KV heads.
    `softmax`: [B, Hq, r], each query head by its own KV head's D rows of the adapter, and scaled by 1/sqrt(D),
    since a softmax, unlike a maximum, depends on scale.
    """
    _, kv_heads, _, dim = q.shape
    basis = adapter.astype(jnp.float32).reshape(kv_heads, dim, -1)
    q = q.astype(jnp.float32)
    if aggregate == "sum":
        return jnp.einsum("bkd,kdc->bc", q.mean(axis=2), basis) / kv_heads
    if aggregate == "softmax":
        projected = jnp.einsum("bkrd,kdc->bkrc", q, basis) * dim**-0.5
        return projected.reshape(q.shape[0], -1, basis.shape[-1])
    raise _unknown(aggregate)


def group_scores(
    query: Float[Array, "B *Hq r"],
    summary: Float[Array, "B P r"],
    complete: Int[Array, " B"],
    group_places: int,
    aggregate: Aggregate,
) -> Float[Array, "B N"]:
    """How much each group matters to the next token; -inf for groups that are not among a row's `complete` ones.

    A group is `group_places` places of the summary: its G tokens, of which the best counts, or its mean key.

    `sum`: the approximate logit of the mean query (the paper).
    `softmax`: per query head, a softmax of the groups' approximate logits over the row's complete groups, and
    the sum of that over heads: a head that looks for one place counts as much there as a head of large logits
    does everywhere. It differs from a softmax over tokens (whose group sums would be the attention mass) in
    that a group counts by one logit alone; it needs G times fewer exponentials and selects as well.

    What lies in the summary beyond the complete groups takes no part, even NaN.

    Raises:
      PlanError: P is not a multiple of `group_places`.
    """
    if summary.shape[1] % group_places:
        raise PlanError(
            f"a summary of {summary.shape[1]} places doesn't divide into groups of {group_places}; "
            "use a capacity that is a multiple of group_tokens"
        )
    seen = jnp.arange(summary.shape[1] // group_places) < complete[:, None]  # [B, N]
    query = query.astype(summary.dtype)
    if aggregate == "sum":
        logits = jnp.einsum("br,bpr->bp", query, summary, preferred_element_type=jnp.float32)
        return jnp.where(seen, _best_of_groups(logits, group_places), -jnp.inf)
    if aggregate == "softmax":
        logits = jnp.einsum("bhr,bpr->bhp", query, summary, preferred_element_type=jnp.float32)
        return _shares(logits, seen, group_places)
    raise _unknown(aggregate)


def head_scores(
    queries: Float[Array, "B Hkv R w"],
    summary: Float[Array, "B P Hkvw"],
    complete: Int[Array, " B"],
    group_places: int,
    aggregate: Aggregate,
    *,
    scale: float,
) -> Float[Array, "B N"]:
    """As `group_scores`, with a summary of w numbers for each KV head, which that head's queries alone are scored by.
    `sum` is the mean of their logits, `scale` is on the logits of `softmax`."""
    batch, places, _ = summary.shape
    seen = jnp.arange(places // group_places) < complete[:, None]  # [B, N]
    if aggregate == "sum":
        query = queries.mean(axis=2).reshape(batch, -1) / queries.shape[1]
        return group_scores(query, summary, complete, group_places, aggregate)
    if aggregate == "softmax":
        by_head = summary.reshape(batch, places, queries.shape[1], -1)
        queries = (queries * scale).astype(summary.dtype)
        logits = jnp.einsum("bkrw,bpkw->bkrp", queries, by_head, preferred_element_type=jnp.float32)
        return _shares(logits.reshape(batch, -1, places), seen, group_places)
    raise _unknown(aggregate)


def select(
    scores: Float[Array, "B N"], complete: Int[Array, " B"], selected: int, sink: int, recent: int
) -> Int[Array, "B M"]:
    """The M = `selected` groups to attend in each row, int32 ids, best first; -1 after the last if fewer exist.

    The first `sink` and the last `recent` of a row's `complete` groups are always among them, the others are
    those of the highest scores (of equal ones the lower ids), which must not be NaN or +inf. No group is named
    twice. What is scored at or beyond `complete` takes no part, even NaN.

    Raises:
      PlanError: M has no room for the pinned groups.
    """
    if sink + recent > selected:
        raise PlanError(
            f"{sink} sink and {recent} recent groups don't fit into {selected} selected groups; "
            f"use selected_groups of at least {sink + recent}"
        )
    groups = scores.shape[-1]
    ids = jnp.arange(groups, dtype=jnp.int32)
    limit = complete.astype(jnp.int32)[:, None]
    exists = ids < limit  # [B, N]
    pinned = (ids < sink) | (ids >= limit - recent)
    ranked = jnp.where(exists, jnp.where(pinned, jnp.inf, scores), -jnp.inf)
    _, best = jax.lax.top_k(ranked, min(selected, groups))
    best = jnp.where(best < limit, best, -1)
    return jnp.pad(best, ((0, 0), (0, max(0, selected - groups))), constant_values=-1)


def _shares(
    logits: Float[Array, "B Hq P"], seen: Bool[Array, "B N"], group_places: int
) -> Float[Array, "B N"]:
    best = jnp.where(seen[:, None], _best_of_groups(logits, group_places), -jnp.inf)  # [B, Hq, N]
    # A row without a complete group has neither a maximum nor a sum. Any other sum is at least 1.
    top = jnp.maximum(best.max(axis=-1, keepdims=True), jnp.finfo(best.dtype).min)
    weights = jnp.exp(best - top)
    # As a product: XLA's CPU backend would compute the exponentials again for each head of the sum.
    shares = jnp.einsum("bh,bhn->bn", 1 / jnp.maximum(weights.sum(axis=-1), 1), weights)
    return jnp.where(seen, shares, -jnp.inf)


def _best_of_groups(logits: Float[Array, "*b S"], group_tokens: int) -> Float[Array, "*b N"]:
    """The maximum over each group. As maxima of G strided slices: XLA's CPU backend vectorises those, and not
    a reduction over a last dimension of G (scoring took 15 to 50 % longer, two JAX versions)."""
    slices = (jax.lax.slice_in_dim(logits, i, None, group_tokens, -1) for i in range(group_tokens))
    return functools.reduce(jnp.maximum, slices)


def _unknown(aggregate: str) -> PlanError:
    return PlanError(f"aggregate {aggregate!r} is unknown; use sum or softmax")
