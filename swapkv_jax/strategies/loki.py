"""Principal components of each head's keys (Loki, arXiv 2406.02542).

Calibrated offline: per layer and KV head, the eigenvectors of the covariance of the post-RoPE keys of a text. The
summary of a token is its key in the first r of them, and scores are dot products of those r numbers. Keys are not
centred when they are projected: their mean adds the same to every score of a query. Loki's published setting keeps a
quarter of the dimensions (r = D/4) and a quarter of the tokens.

Adapted to a disk as KVSwap adapts its peers: Loki keeps all keys on the device, in PCA coordinates, where only r of
them are kept here; it selects for every head apart, here a row's heads share what is read (`aggregate`; `sum` is the
mean of their scores); and the selection is made one layer or one token ahead instead of by the layer's own query.
"""

from __future__ import annotations

import numpy as np

from swapkv_jax.strategies.per_head import PerHead


class Loki(PerHead):
    pass


def loki_directions(queries: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One layer's directions [Hkv, D, D], those of most variance first, and the variances [Hkv, D].

    Args:
      queries: post-RoPE [n, Hkv, R, D]; of no importance here. keys: post-RoPE [n, Hkv, D].
    """
    del queries
    centred = keys.astype(np.float64) - keys.mean(axis=0, dtype=np.float64)
    values, vectors = np.linalg.eigh(np.einsum("nkd,nke->kde", centred, centred) / len(keys))
    return vectors[..., ::-1], np.maximum(values[..., ::-1], 0.0)
