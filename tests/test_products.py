"""Products with weights against NumPy's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from swapkv_jax.models.products import multiply

sizes = st.integers(1, 70)


@settings(deadline=None, max_examples=30)
@given(rows=sizes, inputs=sizes, outputs=sizes, half=st.booleans())
def test_it_is_the_product(rows: int, inputs: int, outputs: int, half: bool) -> None:
    """In the operands' dtype, or in float32 if asked."""
    rng = np.random.default_rng(rows + inputs + outputs)
    dtype = jnp.bfloat16 if half else jnp.float32
    weights, x = (
        jnp.asarray(rng.standard_normal((n, inputs)), jnp.float32).astype(dtype) for n in (outputs, rows)
    )
    expected = np.asarray(x, np.float64) @ np.asarray(weights, np.float64).T
    for asked, tolerance in ((jnp.float32, 1e-5), (None, 1e-2 if half else 1e-5)):
        found = jax.jit(multiply, static_argnums=2)(weights, x, asked)
        assert found.dtype == (asked or dtype)
        size = max(1.0, float(np.abs(expected).max()))
        np.testing.assert_allclose(
            np.asarray(found, np.float64), expected, rtol=tolerance, atol=tolerance * size
        )
