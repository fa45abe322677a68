"""The predictor against brute force over exact attention logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swapkv_jax.errors import PlanError
from swapkv_jax.predictor import group_means, group_scores, low_rank_query, select, summarise

ROWS, KV_HEADS, REPEAT, DIM, PLACES = 3, 2, 2, 4, 24
WIDTH = KV_HEADS * DIM
CONFIGS = st.sampled_from(
    [(1, 5, 1, 2), (4, 3, 1, 1), (4, 6, 0, 0), (8, 2, 0, 1), (4, 9, 2, 3)]
)  # G, M, sink, recent
LENGTHS = st.lists(st.integers(0, PLACES), min_size=ROWS, max_size=ROWS)
SEEDS = st.integers(0, 2**32 - 1)
KINDS = st.sampled_from(["token", "group"])  # what a summary keeps


def predict(q, k, adapter, lengths, config, aggregate, kind="token", dtype="float32"):
    """Ids [B, M] and scores [B, N] as a decode graph computes them: one jitted function."""
    group_tokens, selected, sink, recent = config
    complete = lengths // group_tokens
    places, seen = (1, complete) if kind == "group" else (group_tokens, lengths)
    summary = summarise(group_means(k, group_tokens) if kind == "group" else k, adapter).astype(dtype)
    real = jnp.arange(summary.shape[1]) < seen[:, None]  # [B, P]
    summary = jnp.where(real[..., None], summary, jnp.nan)
    query = low_rank_query(q, adapter, aggregate)
    scores = group_scores(query, summary, complete, places, aggregate)
    return select(scores, complete, selected, sink, recent), scores


predict_jit = jax.jit(predict, static_argnums=(4, 5, 6, 7))


def exact_scores(q, k, lengths, group_tokens, aggregate, kind, adapter=None):
    """[B, N] in float64 from queries and keys, full or as the adapter has them; -inf beyond the complete groups."""
    q, k = q.astype(np.float64), k.astype(np.float64)
    if kind == "group":
        k = k.reshape(*k.shape[:3], -1, group_tokens).mean(axis=-1)
    if adapter is None:
        logits = np.einsum("bkrd,bkdp->bkrp", q, k)
    else:
        basis = adapter.reshape(KV_HEADS, DIM, -1).astype(np.float64)
        logits = np.einsum("bkrd,kdc,bcp->bkrp", q, basis, np.einsum("kdc,bkdp->bcp", basis, k))
    if aggregate == "sum":
        per_head = logits.mean(axis=(1, 2))[:, None]  # [B, 1, P]
    else:
        per_head = logits.reshape(ROWS, -1, logits.shape[-1]) / np.sqrt(DIM)
    places = 1 if kind == "group" else group_tokens
    best = per_head.reshape(ROWS, per_head.shape[1], -1, places).max(axis=-1)
    out = np.full((ROWS, PLACES // group_tokens), -np.inf)
    for b, length in enumerate(lengths):
        row = best[b, :, : length // group_tokens]
        if aggregate == "softmax" and row.size:
            row = np.exp(row - row.max(axis=1, keepdims=True))
            row = row / row.sum(axis=1, keepdims=True)
        out[b, : row.shape[1]] = row.sum(axis=0)
    return out


def check_ids(ids, scores, complete, config, tolerance):
    """The ids are the pinned groups, then as many others as fit, of the best scores, best first, then -1."""
    _, selected, sink, recent = config
    assert ids.shape == (ROWS, selected)
    assert ids.dtype == np.int32
    for row, score, count in zip(ids, scores, complete, strict=True):
        chosen = [int(i) for i in row if i >= 0]
        assert row.tolist() == chosen + [-1] * (selected - min(selected, count))
        assert len(set(chosen)) == len(chosen)
        pinned = [g for g in range(count) if g < sink or g >= count - recent]
        assert chosen[: len(pinned)] == pinned
        assert set(chosen) <= set(range(count))
        rest = np.sort([score[g] for g in range(count) if g not in pinned])[::-1]
        free = [score[g] for g in chosen[len(pinned) :]]
        np.testing.assert_allclose(free, rest[: len(free)], atol=tolerance, rtol=0)


@given(SEEDS, LENGTHS, CONFIGS, st.sampled_from(["sum", "softmax"]), KINDS)
@settings(max_examples=100, deadline=None)
def test_full_rank_selects_what_exact_scores_select(seed, lengths, config, aggregate, kind):
    """r = Hkv*D and an orthonormal basis: nothing is lost, and a head's query meets its own head's keys alone, so
    the choice is brute force's. (Near-equal scores may change places: the chosen groups' scores are compared.)"""
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(ROWS, KV_HEADS, REPEAT, DIM)).astype(np.float32)
    k = rng.normal(size=(ROWS, KV_HEADS, DIM, PLACES)).astype(np.float32)
    basis = np.linalg.qr(rng.normal(size=(WIDTH, WIDTH)))[0].astype(np.float32)
    lengths = np.array(lengths, np.int32)
    ids, scores = predict_jit(q, k, basis, lengths, config, aggregate, kind)
    exact = exact_scores(q, k, lengths, config[0], aggregate, kind)
    np.testing.assert_allclose(scores, exact, atol=1e-4)
    check_ids(np.asarray(ids), exact, lengths // config[0], config, tolerance=2e-4)


@given(SEEDS, LENGTHS, CONFIGS, KINDS)
@settings(max_examples=60, deadline=None)
def test_whole_numbers_select_exactly_and_prefer_the_lower_of_equal_groups(seed, lengths, config, kind):
    """Means of 1, 4 or 8 whole numbers, and their products, are exact in float32."""
    rng = np.random.default_rng(seed)
    q = rng.integers(-2, 3, size=(ROWS, KV_HEADS, REPEAT, DIM)).astype(np.float32)
    k = rng.integers(-2, 3, size=(ROWS, KV_HEADS, DIM, PLACES)).astype(np.float32)
    basis = np.eye(WIDTH, dtype=np.float32)[rng.permutation(WIDTH)] * rng.choice([-1, 1], WIDTH).astype(
        np.float32
    )
    lengths = np.array(lengths, np.int32)
    group_tokens, selected, sink, recent = config
    ids, _ = predict_jit(q, k, basis, lengths, config, "sum", kind)
    exact = exact_scores(q, k, lengths, group_tokens, "sum", kind)
    for row, score, count in zip(np.asarray(ids), exact, lengths // group_tokens, strict=True):
        first = [g for g in range(count) if g < sink or g >= count - recent]
        rest = sorted(set(range(count)) - set(first), key=lambda g: (-score[g], g))
        want = (first + rest)[:selected]
        assert row.tolist() == want + [-1] * (selected - len(want))


@pytest.mark.parametrize("aggregate", ["sum", "softmax"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@given(SEEDS, LENGTHS, KINDS)
@settings(max_examples=15, deadline=None)
def test_low_rank_and_narrow_summaries_follow_their_own_scores(aggregate, dtype, seed, lengths, kind):
    config = (4, 3, 1, 1)
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(ROWS, KV_HEADS, REPEAT, DIM)).astype(np.float32)
    k = rng.normal(size=(ROWS, KV_HEADS, DIM, PLACES)).astype(np.float32)
    basis = np.linalg.qr(rng.normal(size=(WIDTH, 3)))[0].astype(np.float32)
    lengths = np.array(lengths, np.int32)
    ids, scores = map(np.asarray, predict_jit(q, k, basis, lengths, config, aggregate, kind, dtype))
    check_ids(ids, scores, lengths // config[0], config, tolerance=0)
    exact = exact_scores(q, k, lengths, config[0], aggregate, kind, basis)
    tolerance = {"float32": 1e-4, "float16": 0.02, "bfloat16": 0.1}[dtype]
    np.testing.assert_allclose(scores, exact, atol=tolerance)


def test_softmax_shares_sum_to_one_per_head_and_survive_large_logits():
    query = jnp.full((1, 5, 2), 1e4)
    summary = jnp.asarray(np.random.default_rng(0).normal(size=(1, 16, 2)), jnp.float32)
    scores = group_scores(query, summary, jnp.array([2]), 4, "softmax")
    np.testing.assert_allclose(scores[0, :2].sum(), 5, rtol=1e-6)
    assert np.all(scores[0, 2:] == -jnp.inf)


def test_no_nan_arises_in_rows_without_a_complete_group():
    with jax.debug_nans(True):
        scores = group_scores(jnp.ones((2, 3, 2)), jnp.ones((2, 8, 2)), jnp.array([0, 2]), 4, "softmax")
        ids = select(scores, jnp.array([0, 2]), 3, 1, 1)
    assert ids.tolist() == [[-1, -1, -1], [0, 1, -1]]


def test_scores_beyond_the_complete_groups_are_never_selected():
    scores = jnp.array([[0.0, 2.0, jnp.nan, jnp.inf], [-jnp.inf, 1.0, 3.0, jnp.nan]])
    ids = select(scores, jnp.array([2, 3]), 2, 0, 0)
    assert ids.tolist() == [[1, 0], [2, 1]]


def test_pinned_groups_displace_higher_scores():
    scores = jnp.arange(10.0)[None, ::-1]
    assert select(scores, jnp.array([8]), 4, 1, 2).tolist() == [[0, 6, 7, 1]]
    assert select(scores, jnp.array([8]), 3, 1, 2).tolist() == [[0, 6, 7]]
    assert select(scores, jnp.array([2]), 4, 1, 3).tolist() == [[0, 1, -1, -1]]


def test_summaries_of_a_token_and_of_a_prompt_agree():
    rng = np.random.default_rng(1)
    k = jnp.asarray(rng.normal(size=(ROWS, KV_HEADS, DIM, PLACES)), jnp.bfloat16)
    adapter = jnp.asarray(rng.normal(size=(WIDTH, 3)), jnp.float32)
    whole = summarise(k, adapter)
    assert (whole.shape, whole.dtype) == ((ROWS, PLACES, 3), jnp.float32)
    np.testing.assert_allclose(summarise(k[..., 5:6], adapter), whole[:, 5:6], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(summarise(k[1], adapter), whole[1], rtol=1e-5, atol=1e-6)
    flat = np.asarray(k, np.float32).reshape(ROWS, WIDTH, PLACES)
    np.testing.assert_allclose(whole, np.einsum("cr,bcn->bnr", adapter, flat), atol=0.1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("group_tokens", [1, 3, 8])
def test_group_means(group_tokens, dtype):
    """Summed in float32 whatever the keys' dtype, with and without a row dimension."""
    k = jnp.asarray(np.random.default_rng(2).normal(size=(ROWS, KV_HEADS, DIM, PLACES)), dtype)
    means_of = jax.jit(group_means, static_argnums=1)
    means = means_of(k, group_tokens)
    assert means.dtype == jnp.float32
    exact = np.asarray(k, np.float64).reshape(ROWS, KV_HEADS, DIM, -1, group_tokens).mean(axis=-1)
    np.testing.assert_allclose(means, exact, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(means_of(k[1], group_tokens), means[1])


@pytest.mark.parametrize("kind", ["token", "group"])
@pytest.mark.parametrize("aggregate", ["sum", "softmax"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_nothing_a_gpu_graph_cannot_capture(aggregate, dtype, kind):
    """No loop or callback, in any dtype, under the strict promotion that conftest sets."""
    q = jnp.ones((ROWS, KV_HEADS, REPEAT, DIM), dtype)
    k = jnp.ones((ROWS, KV_HEADS, DIM, PLACES), dtype)
    args = q, k, jnp.ones((WIDTH, 3), jnp.float32), jnp.zeros(ROWS, jnp.int32)
    static = ((4, 3, 1, 1), aggregate, kind, dtype)
    closed = jax.make_jaxpr(predict, static_argnums=(4, 5, 6, 7))(*args, *static)
    names = set(_primitives(closed.jaxpr))
    assert "top_k" in names
    assert not {name for name in names if "callback" in name or name in ("scan", "while", "cond")}


def _primitives(jaxpr):
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _primitives(inner)


def test_what_cannot_work_is_refused():
    with pytest.raises(PlanError, match=r"1 sink and 2 recent groups don't fit into 2 .* at least 3"):
        select(jnp.zeros((1, 4)), jnp.array([4]), 2, 1, 2)
    with pytest.raises(PlanError, match="10 places doesn't divide into groups of 4"):
        group_scores(jnp.ones((1, 2)), jnp.ones((1, 10, 2)), jnp.array([1]), 4, "sum")
    with pytest.raises(PlanError, match="'max' is unknown; use sum or softmax"):
        low_rank_query(jnp.ones((1, 1, 1, 2)), jnp.ones((2, 1)), "max")  # pyright: ignore[reportArgumentType]
    with pytest.raises(PlanError, match="'max' is unknown"):
        group_scores(jnp.ones((1, 2)), jnp.ones((1, 8, 2)), jnp.array([1]), 4, "max")  # pyright: ignore[reportArgumentType]
