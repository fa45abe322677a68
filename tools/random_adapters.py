"""Adapters of random directions, for models whose weights mean nothing."""

from __future__ import annotations

import numpy as np
from adapters import Adapters
from random_model import random_adapter

from swapkv_jax.adapter import Adapter
from swapkv_jax.models import Model
from swapkv_jax.selection import StrategyName


def random_adapters(model: Model) -> Adapters:
    """One of full rank for every strategy that has adapters: keys of random weights have no better directions."""
    of_heads: tuple[StrategyName, ...] = ("loki", "infinigen")
    return {"kvswap": random_adapter(model), **{name: _of_heads(model, name) for name in of_heads}}


def _of_heads(model: Model, strategy: StrategyName) -> Adapter:
    g = model.geometry
    rng = np.random.default_rng(0)
    shape = (g.layers, g.kv_heads, g.head_dim, g.head_dim)
    vectors = np.linalg.qr(rng.standard_normal(shape, np.float32))[0]
    return Adapter(
        vectors=vectors.reshape(g.layers, -1, g.head_dim),
        spectrum=np.ones((g.layers, g.head_dim)),
        fingerprint=model.fingerprint,
        text_digest="random",
        tokens=0,
        strategy=strategy,
    )
