"""Partial queries and keys of a skewed head (InfiniGen, arXiv 2406.19707).

Calibrated offline: per layer and KV head, the right singular vectors of the head's queries for a text are an
orthogonal matrix A, and q·k = (qA)·(kA). Skewed like that, few columns carry most of what a score is made of: those
with the largest mean |QA| + |KA| are kept, r of D per head (InfiniGen's partial weight ratio; 0.3 in its
evaluation). The summary of a token is its key in those columns; the layer before's input, through this layer's W_q,
makes the partial query.

Where positions are rotated into queries and keys, W_q and W_k cannot take A up: it is applied after the rotation, so
that W_q is multiplied whole. One A serves the query heads of a KV head, or each would need partial keys of its own.

Adapted to a disk as KVSwap adapts its peers: KV is on disk instead of in CPU memory; a row's heads share what is
read, by the mean of their scores (`aggregate` `sum`); the columns are chosen on the calibration text, not for every
prompt; and a fixed number of tokens is selected, where InfiniGen takes all within α of the best score, up to a
limit.
"""

from __future__ import annotations

import numpy as np

from swapkv_jax.strategies.per_head import PerHead


class InfiniGen(PerHead):
    pass


def infinigen_directions(queries: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One layer's skewing columns [Hkv, D, D], those of the largest mean |QA| + |KA| first, and those means [Hkv, D].

    Args:
      queries: post-RoPE [n, Hkv, R, D]. keys: post-RoPE [n, Hkv, D].
    """
    q = queries.astype(np.float64).transpose(1, 0, 2, 3).reshape(keys.shape[1], -1, keys.shape[2])
    k = keys.astype(np.float64).transpose(1, 0, 2)  # [Hkv, n, D]
    _, skew = np.linalg.eigh(q.swapaxes(1, 2) @ q)  # right singular vectors of Q
    weight = np.abs(q @ skew).mean(axis=1) + np.abs(k @ skew).mean(axis=1)  # [Hkv, D]
    order = np.argsort(-weight, axis=1)
    return np.take_along_axis(skew, order[:, None], axis=2), np.take_along_axis(weight, order, axis=1)
