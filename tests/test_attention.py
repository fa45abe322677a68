"""Decode's attention against float64 NumPy. (Prefill's is in test_prefill.py.)"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swapkv_jax.attention import attend

TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2, "float16": 2e-3}

attend_compiled = jax.jit(attend)


def dense(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """float64 softmax of one row's q [Hkv, R, D] over all of k [Hkv, N, D], v [Hkv, N, D]."""
    q, k, v = (array.astype(np.float64) for array in (q, k, v))
    scores = np.einsum("krd,knd->krn", q, k) / np.sqrt(q.shape[-1])
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("krn,knd->krd", weights / weights.sum(axis=-1, keepdims=True), v)


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_attend_is_dense_attention(data: st.DataObject) -> None:
    """Ragged rows, every head ratio, capacities that are no multiple of anything and one of several blocks; what
    is past a row's length is NaN in K and the largest finite number in V."""
    shape = data.draw(
        st.sampled_from(
            [(1, 1, 1, 8, 1), (3, 2, 3, 8, 13), (2, 1, 4, 16, 40), (4, 3, 1, 8, 7), (2, 2, 3, 8, 600)]
        )
    )
    batch, heads, repeat, dim, size = shape
    dtype = data.draw(st.sampled_from(list(TOLERANCE)))
    lengths = np.array(data.draw(st.lists(st.integers(0, size), min_size=batch, max_size=batch)), np.int32)
    spread = data.draw(st.sampled_from([0.1, 3.0, 30.0]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))

    def draw(*shape: int, scale: float = 1.0) -> np.ndarray:
        return np.array(jnp.asarray(scale * rng.standard_normal(shape), dtype))

    q, k, v = (
        draw(batch, heads, repeat, dim, scale=spread),
        draw(batch, heads, dim, size),
        draw(batch, heads, size, dim),
    )
    k_new, v_new = draw(batch, heads, dim), draw(batch, heads, dim)
    for row, length in enumerate(lengths):
        k[row, :, :, length:] = np.nan
        v[row, :, length:] = jnp.finfo(dtype).max
    ours = np.asarray(attend_compiled(q, k, v, k_new, v_new, lengths))
    assert ours.dtype == q.dtype
    for row, length in enumerate(lengths):
        keys = np.concatenate([k[row, :, :, :length].swapaxes(1, 2), k_new[row][:, None]], axis=1)
        values = np.concatenate([v[row, :, :length], v_new[row][:, None]], axis=1)
        expected = dense(q[row], keys, values)
        tolerance = TOLERANCE[dtype] * max(1.0, spread)  # rounding of a score grows with the score
        np.testing.assert_allclose(ours[row].astype(np.float64), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("scale", [1e4, -1e4])
def test_extreme_scores_stay_finite(scale: float) -> None:
    """One key that outweighs all others, in the cache or the new token itself."""
    q = np.full((1, 1, 1, 8), 10.0, np.float32)
    k = np.zeros((1, 1, 8, 4), np.float32)
    k[..., 2] = scale
    v = np.arange(4, dtype=np.float32)[None, None, :, None] * np.ones((1, 1, 4, 8), np.float32)
    new = np.full((1, 1, 8), -scale, np.float32)
    ours = attend_compiled(q, k, v, new, np.full_like(new, 9.0), np.array([4], np.int32))
    np.testing.assert_array_equal(np.asarray(ours), 2.0 if scale > 0 else 9.0)
