"""Records of int8: each value is the nearest multiple of its KV head's step."""

from __future__ import annotations

import numpy as np
import pytest
from engines import geometry
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from swapkv_jax import make_plan
from swapkv_jax.cache.records import RecordTier, in_steps
from swapkv_jax.selection import Selection
from swapkv_jax.tiers import DiskStore

SIDES = (2, 3, 4, 5)  # records, KV heads, and what a head has of each


@given(arrays(np.float32, SIDES, elements=st.floats(-(2.0**100), 2.0**100, width=32)))
def test_values_are_the_nearest_steps(values: np.ndarray) -> None:
    numbers, steps = in_steps(values)
    assert numbers.dtype == np.int8
    assert np.abs(numbers.astype(int)).max() <= 127
    error = np.abs(numbers * steps[..., None, None] - values)
    assert (error <= steps[..., None, None] * (0.5 + 1e-4) + 1e-36).all()
    np.testing.assert_allclose(steps, np.abs(values).max(axis=(2, 3)) / 127, rtol=1e-6, atol=1e-37)


@pytest.mark.parametrize("values", [0.0, 1e-45, 1e-38, 127.0, -127.0])
def test_no_step_is_not_a_number(values: float) -> None:
    numbers, steps = in_steps(np.full(SIDES, values, np.float32))
    assert np.isfinite(steps).all()
    np.testing.assert_allclose(numbers * steps[..., None, None], values, atol=1e-37)


def test_a_record_has_its_numbers_and_its_steps(tmp_path) -> None:
    model = geometry()
    choice = Selection(selected_groups=4, reuse_slots=4, rank=8, recent_groups=1)
    plan = make_plan(
        model, cache="group", max_context=64, group_tokens=4, selection=choice, kv_dtype="int8", tier="disk"
    )
    heads, dim, tokens = plan.kv_heads, plan.head_dim, plan.group_tokens
    assert plan.payload_bytes == 2 * heads * (dim * tokens + 4)
    rng = np.random.default_rng(0)
    k = rng.standard_normal((3, heads, dim, tokens), np.float32)
    v = 10 * rng.standard_normal((3, heads, tokens, dim), np.float32)
    tier = RecordTier(plan, DiskStore(tmp_path, limit_bytes=None, fingerprint="model"))
    try:
        records = np.full((3, plan.stride_bytes), 0xAB, np.uint8)
        tier.put(records, k, v)
        parts = tier.parts(records)
    finally:
        tier.release()
    steps = records[:, 2 * heads * dim * tokens : plan.payload_bytes].copy().view(np.float32)
    steps = steps.reshape(3, heads, 2)
    for side, (values, part) in enumerate(zip((k, v), parts, strict=True)):
        own = steps[:, :, side, None, None]
        assert np.abs(part * own - values).max() <= own.max() / 2 + 1e-6
    assert (records[:, plan.payload_bytes :] == 0xAB).all()
