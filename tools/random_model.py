"""A model of another's geometry with random weights: for timing at contexts that no checkpoint at hand allows."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import tokenizers
import xxhash

from swapkv_jax.adapter import Adapter
from swapkv_jax.models import Geometry, Model, Tokenizer, open_model
from swapkv_jax.models.weights import DTYPES, LayerWeights, Slot, Weights, dtype_of, slots


def random_model(source: str, dtype: str, context: int) -> Model:
    """The model named `source` with random weights, its context limit raised to `context` tokens if it is lower.

    A raised limit drops RoPE scaling, which costs nothing per step. The text that comes out means nothing.
    """
    dtype_of(dtype)
    found = open_model(source)
    geometry = found.geometry
    if geometry.context_limit < context:
        geometry = dataclasses.replace(geometry, max_positions=context, rope_scaling=None)
    model = textless_model(geometry, dtype, name=f"{found.name} with random weights")
    return dataclasses.replace(
        model, tokenizer=found.tokenizer, source=found.source, eos_token_ids=found.eos_token_ids
    )


def textless_model(geometry: Geometry, dtype: str, *, name: str) -> Model:
    """Random weights of a geometry, and a tokenizer that knows no text: for token ids alone, with nothing fetched."""
    rng = np.random.default_rng(0)
    outer: LayerWeights = {}
    layers: list[LayerWeights] = [{} for _ in range(geometry.layers)]
    for slot in slots(geometry):
        (outer if slot.layer is None else layers[slot.layer])[slot.key] = _tensor(rng, slot, dtype)
    weights = Weights(embed=outer["embed"], final_norm=outer["final_norm"], layers=layers)
    if not geometry.tied:
        weights["head"] = outer["head"]
    record = json.dumps({"geometry": geometry.to_dict(), "dtype": dtype, "weights": "random"}, sort_keys=True)
    return Model(
        geometry=geometry,
        weights=weights,
        tokenizer=Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE()), vocab=geometry.vocab),
        dtype=dtype,
        fingerprint=xxhash.xxh3_128(record.encode()).hexdigest(),
        source=name,
        name=name,
        eos_token_ids=frozenset(),
    )


def random_adapter(model: Model) -> Adapter:
    """Random orthonormal directions of full rank: keys of random weights have no better ones."""
    size = model.geometry.kv_heads * model.geometry.head_dim
    rng = np.random.default_rng(0)
    vectors = [
        np.linalg.qr(rng.standard_normal((size, size), np.float32))[0] for _ in range(model.geometry.layers)
    ]
    return Adapter(
        vectors=np.stack(vectors),
        spectrum=np.ones((model.geometry.layers, size)),
        fingerprint=model.fingerprint,
        text_digest="random",
        tokens=0,
    )


def _tensor(rng: np.random.Generator, slot: Slot, dtype: str) -> np.ndarray:
    """Matrices that keep the size of what passes through them, norms of 1, biases of 0."""
    if len(slot.shape) == 1:
        return np.full(slot.shape, 0 if slot.key.endswith("bias") else 1, DTYPES[dtype])
    values = rng.standard_normal(slot.shape, np.float32)
    values /= np.sqrt(slot.shape[1], dtype=np.float32)
    return values.astype(DTYPES[dtype], copy=False)
