"""How keys and values lie in a session's records: groups of 64 tokens, whatever the plan that uses them."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from swapkv_jax.sessions.identity import Identity

SESSION_GROUP = 64
"""Tokens per record: shared prefixes, and what is left where a file is lost, are whole groups."""


@dataclass(frozen=True)
class Layout:
    """Records uint8 `[n, ≥ payload_bytes]` of one layer: K [Hkv, D, 64], then V [Hkv, 64, D]."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: np.dtype

    @classmethod
    def of(cls, identity: Identity) -> Layout:
        """The layout for a model."""
        dtype = ml_dtypes.bfloat16 if identity.dtype == "bfloat16" else identity.dtype
        return cls(identity.layers, identity.kv_heads, identity.head_dim, np.dtype(dtype))

    @property
    def payload_bytes(self) -> int:
        """Bytes of K and V of one group of one layer."""
        return SESSION_GROUP * self.token_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token of one layer."""
        return 2 * self.kv_heads * self.head_dim * self.dtype.itemsize

    def parts(self, records: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """K [n, Hkv, D, 64] and V [n, Hkv, 64, D] of records, as views."""
        half = self.payload_bytes // 2
        k = records[:, :half].view(self.dtype).reshape(-1, self.kv_heads, self.head_dim, SESSION_GROUP)
        v = (
            records[:, half : 2 * half]
            .view(self.dtype)
            .reshape(-1, self.kv_heads, SESSION_GROUP, self.head_dim)
        )
        return k, v

    def pack(self, k: np.ndarray, v: np.ndarray, records: np.ndarray) -> None:
        """K [Hkv, D, n·64] and V [Hkv, n·64, D] into n records."""
        n = len(records)
        k_out, v_out = self.parts(records)
        k_out[...] = k.reshape(self.kv_heads, self.head_dim, n, SESSION_GROUP).transpose(2, 0, 1, 3)
        v_out[...] = v.reshape(self.kv_heads, n, SESSION_GROUP, self.head_dim).transpose(1, 0, 2, 3)

    def unpack(self, records: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
        """The records' first tokens into K [Hkv, D, t] and V [Hkv, t, D], where t may end within the last record."""
        whole, rest = divmod(v.shape[1], SESSION_GROUP)
        k_in, v_in = self.parts(records)
        for group in range(whole):  # slices of the outputs: no reshape of a view that is not contiguous
            tokens = slice(group * SESSION_GROUP, (group + 1) * SESSION_GROUP)
            k[:, :, tokens], v[:, tokens] = k_in[group], v_in[group]
        if rest:
            k[:, :, whole * SESSION_GROUP :] = k_in[whole, :, :, :rest]
            v[:, whole * SESSION_GROUP :] = v_in[whole, :, :rest]
