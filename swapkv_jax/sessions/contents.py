"""What of a session is kept in the catalogue."""

from __future__ import annotations

import numpy as np


def token_ids(data: bytes) -> np.ndarray:
    """Token ids, int32 [n], from how the catalogue has them."""
    return np.frombuffer(data, "<i4")


def bind(name: str, what: str, tokens: int) -> str:
    """The context that an encrypted value belongs to: it cannot stand in for another one, or for an older one of
    another length."""
    return f"{what} of session {name!r} with {tokens} tokens"


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Tokens that two lists of ids have in common from the first on."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n
