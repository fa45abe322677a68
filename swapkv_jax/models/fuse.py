"""From the checkpoint's tensors to the decoder block's: Q, K and V side by side, gate and up side by side.

Matrices become [in, out], the order in which a CPU streams them fastest for a batch of any size. The fused
arrays are 64-byte aligned, so that a CPU device array is the same memory and weights exist once.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from swapkv_jax.models.weights import LayerWeights, Weights
from swapkv_jax.tiers import aligned_buffer

Params = dict[str, Any]


def fuse(weights: Weights) -> Params:
    """Returns {"embed" [V, H], "final_norm" [H], "head" [V, H] unless tied, "layers": one dict per block}.

    Takes everything out of `weights` as it goes, so that only one layer exists twice at any time.
    """
    taken = cast("dict[str, Any]", weights)
    layers: list[LayerWeights] = taken.pop("layers")
    params: Params = {"layers": [fuse_layer(layers.pop(0)) for _ in range(len(layers))]}
    for name in list(taken):
        params[name] = _aligned(taken.pop(name))
    return params


def fuse_layer(w: LayerWeights) -> Params:
    """One layer's weights under the names of `blocks.DecoderBlock`."""
    layer: Params = {
        "input_norm": {"scale": _aligned(w["input_norm"])},
        "post_norm": {"scale": _aligned(w["post_norm"])},
        "qkv": _linear(w, "q", "k", "v"),
        "o": _linear(w, "o"),
        "gate_up": _linear(w, "gate", "up"),
        "down": _linear(w, "down"),
    }
    if "q_norm" in w:
        layer["q_norm"] = {"scale": _aligned(w["q_norm"])}
        layer["k_norm"] = {"scale": _aligned(w["k_norm"])}
    return layer


def _linear(w: LayerWeights, *names: str) -> Params:
    linear = {"kernel": _aligned(np.concatenate([w[name] for name in names]))}
    if f"{names[0]}_bias" in w:
        linear["bias"] = _aligned(np.concatenate([w[f"{name}_bias"] for name in names]))
    return linear


def _aligned(array: np.ndarray) -> np.ndarray:
    if array.flags.c_contiguous and array.ctypes.data % 64 == 0:
        return array
    out = aligned_buffer(array.nbytes, 64).view(array.dtype).reshape(array.shape)
    out[...] = array
    return out
