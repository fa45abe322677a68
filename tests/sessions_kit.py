"""Sessions for tests: a tiny model whose keys and values follow from token, place and layer."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from swapkv_jax.sessions import Identity, Session, SessionStore

LAYERS, HEADS, DIM = 3, 2, 8
IDENTITY = Identity(fingerprint="model-1", dtype="float32", layers=LAYERS, kv_heads=HEADS, head_dim=DIM)


def open_store(directory: Path | str, **options) -> SessionStore:
    """A store of the tiny model."""
    return SessionStore(directory, identity=IDENTITY, **options)


def content(layer: int, ids: Iterable[int]) -> tuple[np.ndarray, np.ndarray]:
    """K [Hkv, D, n] and V [Hkv, n, D]: each token's depend on all ids up to it, as a model's do."""
    ids = np.array(list(ids), np.int64)
    past = np.cumsum((ids + 1) * (np.arange(len(ids)) + 3)) % 9973
    heads, dims = np.meshgrid(np.arange(HEADS), np.arange(DIM), indexing="ij")
    base = (heads * DIM + dims + 1)[None] * (past[:, None, None] + 1) + 31 * layer
    k = np.ascontiguousarray(base.transpose(1, 2, 0), np.float32)
    v = np.ascontiguousarray(-base.transpose(1, 0, 2), np.float32)
    return k, v


def say(session: Session, ids: Iterable[int]) -> None:
    """Writes the keys and values of `ids` from where the session ends, layer after layer."""
    ids = list(ids)
    at = session.stored
    for layer in range(LAYERS):
        k, v = content(layer, ids)
        session.write(layer, at, k[:, :, at:], v[:, at:])


def check(session: Session, ids: Iterable[int]) -> None:
    """The session has the keys and values of just these ids."""
    ids = list(ids)
    assert session.stored == len(ids)
    for layer in range(LAYERS):
        for got, expected in zip(session.kv(layer), content(layer, ids), strict=True):
            np.testing.assert_array_equal(got, expected)
