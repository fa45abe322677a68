"""Rotary frequencies, as Hugging Face's `modeling_rope_utils` defines them. NumPy; no JAX import.

Static kinds are one array per model. `dynamic` follows the length of the sequence: see `dynamic_base`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from swapkv_jax.models.geometry import Geometry, RopeScaling


def inv_freq(geometry: Geometry) -> np.ndarray:
    """Inverse frequencies [head_dim / 2], float32: dimension i turns by `inv_freq[i]` per position.

    For `dynamic` scaling they hold up to `original_max_positions`; beyond, use `dynamic_base`.
    """
    scaling = geometry.rope_scaling
    frequencies = frequencies_of_base(geometry.rope_theta, geometry.head_dim)
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        frequencies = frequencies / np.float32(scaling.factor)
    elif scaling.kind == "llama3":
        frequencies = _llama3(frequencies, scaling)
    elif scaling.kind == "yarn":
        frequencies = _yarn(frequencies, scaling, geometry)
    if scaling.factors is not None:
        frequencies = frequencies / np.asarray(scaling.factors, np.float32)
    return frequencies.astype(np.float32)


def frequencies_of_base(base: Any, head_dim: int, xp: Any = np) -> Any:
    """`base ** (-2i / head_dim)` as float32 [..., head_dim / 2] for a scalar or array `base` [...].

    `xp` is `numpy` or `jax.numpy`.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return 1.0 / xp.asarray(base, dtype=np.float32)[..., None] ** exponents


def dynamic_base(length: Any, geometry: Geometry, xp: Any = np) -> Any:
    """RoPE base for `dynamic` scaling at the current length, float32, shaped like `length`.

    `length` counts tokens including the one being computed (its position + 1); during prefill it is the
    whole prompt's length for every position of the prompt. Keys already cached keep the frequencies they
    were rotated with. Up to `original_max_positions` the base is the model's own. With
    `xp=jax.numpy` it traces under jit, so each row of a ragged batch gets its own base:
    `frequencies_of_base(dynamic_base(lengths, geometry, jnp), geometry.head_dim, jnp)` is [B, D / 2].
    """
    scaling = geometry.rope_scaling
    if scaling is None or scaling.kind != "dynamic" or scaling.original_max_positions is None:
        raise ValueError("dynamic_base needs a geometry with dynamic rope scaling")
    original = float(scaling.original_max_positions)
    stretched = xp.maximum(xp.asarray(length, dtype=np.float32), np.float32(original))
    growth = scaling.factor * stretched / original - (scaling.factor - 1.0)
    return np.float32(geometry.rope_theta) * growth ** (geometry.head_dim / (geometry.head_dim - 2))


def attention_scaling(geometry: Geometry) -> float:
    """Factor on cos and sin (so its square is on the attention scores); 1 except for `yarn`."""
    scaling = geometry.rope_scaling
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return _mscale(scaling.factor, scaling.mscale) / _mscale(scaling.factor, scaling.mscale_all_dim)
    return _mscale(scaling.factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _llama3(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Long wavelengths are divided by the factor, short ones kept, those between interpolated."""
    low, high, original = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_positions
    assert low is not None
    assert high is not None
    assert original is not None
    rotations = original * frequencies / np.float32(2 * math.pi)
    smooth = np.clip((rotations - np.float32(low)) / np.float32(high - low), 0.0, 1.0)
    return (1 - smooth) * frequencies / np.float32(scaling.factor) + smooth * frequencies


def _yarn(frequencies: np.ndarray, scaling: RopeScaling, geometry: Geometry) -> np.ndarray:
    """Dimensions that rotate often extrapolate, those that rotate rarely interpolate, a ramp between."""
    original, fast, slow = scaling.original_max_positions, scaling.beta_fast, scaling.beta_slow
    assert original is not None
    assert fast is not None
    assert slow is not None
    dim, theta = geometry.head_dim, geometry.rope_theta

    def dimension_of(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_of(fast), dimension_of(slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip(
        (np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low), 0.0, 1.0
    )
    return frequencies / np.float32(scaling.factor) * ramp + frequencies * (1 - ramp)
