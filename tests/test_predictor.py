"""The predictor against brute force over exact attention logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swapkv_jax.errors import PlanError
from swapkv_jax.predictor import group_scores, low_rank_query, select, summarise

ROWS, KV_HEADS, REPEAT, DIM, PLACES = 3, 2, 2, 4, 24
WIDTH = KV_HEADS * DIM
CONFIGS = st.sampled_from(
    [(1, 5, 1, 2), (4, 3, 1, 1), (4, 6, 0, 0), (8, 2, 0, 1), (4, 9, 2, 3)]
)  # G, M, sink, recent
LENGTHS = st.lists(st.integers(0, PLACES), min_size=ROWS, max_size=ROWS)
SEEDS = st.integers(0, 2**32 - 1)


def predict(q, k, adapter, lengths, config, aggregate, dtype="float32"):
    """Ids [B, M] and scores [B, N] as a decode segment computes them: one jitted function."""
    group_tokens, selected, sink, recent = config
    summary = summarise(k, adapter).astype(dtype)
    summary = jnp.where(jnp.arange(PLACES) < lengths[:, None, None], summary, jnp.nan)
    query = low_rank_query(q, adapter, aggregate)
    scores = group_scores(query, summary, lengths, group_tokens, aggregate)
    return select(scores, lengths // group_tokens, selected, sink, recent), scores


predict_jit = jax.jit(predict, static_argnums=(4, 5, 6))


def exact_scores(q, k, lengths, group_tokens, aggregate):
    """[B, N] in float64 from full queries and keys; -inf beyond the complete groups."""
    logits = np.einsum("bkrd,bkds->bkrs", q.astype(np.float64), k.astype(np.float64))
    if aggregate == "sum":
        per_head = (logits.mean(axis=2).sum(axis=1) / KV_HEADS)[:, None]  # [B, 1, S]
    else:
        per_head = logits.reshape(ROWS, -1, PLACES) / np.sqrt(DIM)
    best = per_head.reshape(ROWS, per_head.shape[1], -1, group_tokens).max(axis=-1)
    out = np.full((ROWS, PLACES // group_tokens), -np.inf)
    for b, length in enumerate(lengths):
        row = best[b, :, : length // group_tokens]
        if aggregate == "softmax" and row.size:
            row = np.exp(row - row.max(axis=1, keepdims=True))
            row = row / row.sum(axis=1, keepdims=True)
        out[b, : row.shape[1]] = row.sum(axis=0)
    return out


def check_ids(ids, scores, complete, config, tolerance):
    """The ids are pinned groups plus as many others as fit, of the best scores, ascending, then -1."""
    _, selected, sink, recent = config
    assert ids.shape == (ROWS, selected)
    assert ids.dtype == np.int32
    for row, score, count in zip(ids, scores, complete, strict=True):
        chosen = [int(i) for i in row if i >= 0]
        assert row.tolist() == sorted(set(chosen)) + [-1] * (selected - min(selected, count))
        pinned = {g for g in range(count) if g < sink or g >= count - recent}
        assert pinned <= set(chosen) <= set(range(count))
        rest = np.sort([score[g] for g in range(count) if g not in pinned])[::-1]
        free = np.sort([score[g] for g in chosen if g not in pinned])[::-1]
        np.testing.assert_allclose(free, rest[: len(free)], atol=tolerance, rtol=0)


@given(SEEDS, LENGTHS, CONFIGS, st.sampled_from(["sum", "softmax"]))
@settings(max_examples=80, deadline=None)
def test_full_rank_selects_what_exact_scores_select(seed, lengths, config, aggregate):
    """r = Hkv*D and an orthonormal basis: nothing is lost, and a head's query meets its own head's keys alone, so
    the choice is brute force's. (Near-equal scores may change places: the chosen groups' scores are compared.)"""
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(ROWS, KV_HEADS, REPEAT, DIM)).astype(np.float32)
    k = rng.normal(size=(ROWS, KV_HEADS, DIM, PLACES)).astype(np.float32)
    basis = np.linalg.qr(rng.normal(size=(WIDTH, WIDTH)))[0].astype(np.float32)
    lengths = np.array(lengths, np.int32)
    ids, scores = predict_jit(q, k, basis, lengths, config, aggregate)
    exact = exact_scores(q, k, lengths, config[0], aggregate)
    np.testing.assert_allclose(scores, exact, atol=1e-4)
    check_ids(np.asarray(ids), exact, lengths // config[0], config, tolerance=2e-4)


@given(SEEDS, LENGTHS, CONFIGS)
@settings(max_examples=40, deadline=None)
def test_whole_numbers_select_exactly_and_prefer_the_lower_of_equal_groups(seed, lengths, config):
    rng = np.random.default_rng(seed)
    q = rng.integers(-2, 3, size=(ROWS, KV_HEADS, REPEAT, DIM)).astype(np.float32)
    k = rng.integers(-2, 3, size=(ROWS, KV_HEADS, DIM, PLACES)).astype(np.float32)
    basis = np.eye(WIDTH, dtype=np.float32)[rng.permutation(WIDTH)] * rng.choice([-1, 1], WIDTH).astype(
        np.float32
    )
    lengths = np.array(lengths, np.int32)
    group_tokens, selected, sink, recent = config
    ids, _ = predict_jit(q, k, basis, lengths, config, "sum")
    exact = exact_scores(q, k, lengths, group_tokens, "sum")
    for row, score, count in zip(np.asarray(ids), exact, lengths // group_tokens, strict=True):
        first = [g for g in range(count) if g < sink or g >= count - recent]
        rest = sorted(set(range(count)) - set(first), key=lambda g: (-score[g], g))
        want = sorted((first + rest)[:selected])
        assert row.tolist() == want + [-1] * (selected - len(want))


@pytest.mark.parametrize("aggregate", ["sum", "softmax"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@given(SEEDS, LENGTHS)
@settings(max_examples=15, deadline=None)
def test_low_rank_and_narrow_summaries_follow_their_own_scores(aggregate, dtype, seed, lengths):
    config = (4, 3, 1, 1)
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(ROWS, KV_HEADS, REPEAT, DIM)).astype(np.float32)
    k = rng.normal(size=(ROWS, KV_HEADS, DIM, PLACES)).astype(np.float32)
    basis = np.linalg.qr(rng.normal(size=(WIDTH, 3)))[0].astype(np.float32)
    lengths = np.array(lengths, np.int32)
    ids, scores = map(np.asarray, predict_jit(q, k, basis, lengths, config, aggregate, dtype))
    check_ids(ids, scores, lengths // config[0], config, tolerance=0)
    low_k = np.einsum("kdc,bkds->bcs", basis.reshape(KV_HEADS, DIM, -1), k)
    logits = np.einsum("bkrd,kdc,bcs->bkrs", q, basis.reshape(KV_HEADS, DIM, -1), low_k)
    if aggregate == "sum":
        logits = logits.mean(axis=(1, 2))[:, None]
    else:
        logits = logits.reshape(ROWS, -1, PLACES) / np.sqrt(DIM)
    best = logits.reshape(ROWS, logits.shape[1], -1, config[0]).max(axis=-1)
    for got, row, count in zip(scores, best, lengths // config[0], strict=True):
        seen = row[:, :count]
        if aggregate == "softmax" and seen.size:
            seen = np.exp(seen) / np.exp(seen).sum(axis=1, keepdims=True)
        np.testing.assert_allclose(got[:count], seen.sum(axis=0), atol=1e-4 if dtype == "float32" else 0.1)
        assert np.all(got[count:] == -np.inf)


def test_softmax_shares_sum_to_one_per_head_and_survive_large_logits():
    query = jnp.full((1, 5, 2), 1e4)
    summary = jnp.asarray(np.random.default_rng(0).normal(size=(1, 2, 16)), jnp.float32)
    scores = group_scores(query, summary, jnp.array([11]), 4, "softmax")
    np.testing.assert_allclose(scores[0, :2].sum(), 5, rtol=1e-6)
    assert np.all(scores[0, 2:] == -jnp.inf)


def test_no_nan_arises_in_rows_without_a_complete_group():
    with jax.debug_nans(True):
        scores = group_scores(jnp.ones((2, 3, 2)), jnp.ones((2, 2, 8)), jnp.array([3, 8]), 4, "softmax")
        ids = select(scores, jnp.array([0, 2]), 3, 1, 1)
    assert ids.tolist() == [[-1, -1, -1], [0, 1, -1]]


def test_scores_beyond_the_complete_groups_are_never_selected():
    scores = jnp.array([[0.0, 2.0, jnp.nan, jnp.inf], [-jnp.inf, 1.0, 3.0, jnp.nan]])
    ids = select(scores, jnp.array([2, 3]), 2, 0, 0)
    assert ids.tolist() == [[0, 1], [1, 2]]


def test_pinned_groups_displace_higher_scores():
    scores = jnp.arange(10.0)[None, ::-1]
    assert select(scores, jnp.array([8]), 4, 1, 2).tolist() == [[0, 1, 6, 7]]
    assert select(scores, jnp.array([8]), 3, 1, 2).tolist() == [[0, 6, 7]]
    assert select(scores, jnp.array([2]), 4, 1, 3).tolist() == [[0, 1, -1, -1]]


def test_summaries_of_a_token_and_of_a_prompt_agree():
    rng = np.random.default_rng(1)
    k = jnp.asarray(rng.normal(size=(ROWS, KV_HEADS, DIM, PLACES)), jnp.bfloat16)
    adapter = jnp.asarray(rng.normal(size=(WIDTH, 3)), jnp.float32)
    whole = summarise(k, adapter)
    assert (whole.shape, whole.dtype) == ((ROWS, 3, PLACES), jnp.float32)
    np.testing.assert_allclose(summarise(k[..., 5:6], adapter), whole[..., 5:6], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(summarise(k[1], adapter), whole[1], rtol=1e-5, atol=1e-6)
    flat = np.asarray(k, np.float32).reshape(ROWS, WIDTH, PLACES)
    np.testing.assert_allclose(whole, np.einsum("cr,bcn->brn", adapter, flat), atol=0.1)


@pytest.mark.parametrize("aggregate", ["sum", "softmax"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_nothing_a_gpu_graph_cannot_capture(aggregate, dtype):
    """No loop or callback, in any dtype, under the strict promotion that conftest sets."""
    q = jnp.ones((ROWS, KV_HEADS, REPEAT, DIM), dtype)
    k = jnp.ones((ROWS, KV_HEADS, DIM, PLACES), dtype)
    args = q, k, jnp.ones((WIDTH, 3), jnp.float32), jnp.zeros(ROWS, jnp.int32)
    closed = jax.make_jaxpr(predict, static_argnums=(4, 5, 6))(*args, (4, 3, 1, 1), aggregate, dtype)
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
    with pytest.raises(PlanError, match="10 token places doesn't divide into groups of 4"):
        group_scores(jnp.ones((1, 2)), jnp.ones((1, 2, 10)), jnp.array([4]), 4, "sum")
    with pytest.raises(PlanError, match="'max' is unknown; use sum or softmax"):
        low_rank_query(jnp.ones((1, 1, 1, 2)), jnp.ones((2, 1)), "max")  # pyright: ignore[reportArgumentType]
    with pytest.raises(PlanError, match="'max' is unknown"):
        group_scores(jnp.ones((1, 2)), jnp.ones((1, 2, 8)), jnp.array([4]), 4, "max")  # pyright: ignore[reportArgumentType]
