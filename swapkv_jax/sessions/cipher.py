"""What is done to a session's bytes on their way to the disk and back."""

from __future__ import annotations

from typing import Protocol

import numpy as np


class NotAuthentic(Exception):
    """Something was not sealed with this key for the place it is found at."""


class Cipher(Protocol):
    """Encrypts records in place and whole values. What is bound to a context opens only in that context.

    Attributes:
      name: tells ciphers and keys apart; "" where nothing is encrypted.
      overhead: bytes that a record's payload grows by.
    """

    name: str
    overhead: int

    def seal_records(
        self, records: np.ndarray, payload_bytes: int, *, nonce: int, layer: int, first: int
    ) -> None:
        """Encrypts the first `payload_bytes` of records uint8 `[n, stride]`, which lie at `first` on of a file."""
        ...

    def open_records(
        self, records: np.ndarray, payload_bytes: int, *, nonces: np.ndarray, layer: int, first: int
    ) -> None:
        """Inverse of `seal_records`; NotAuthentic for what was not sealed with this key for this place."""
        ...

    def seal(self, data: bytes, context: str) -> bytes:
        """Encrypts a value."""
        ...

    def open(self, data: bytes, context: str) -> bytes:
        """Inverse of `seal`; NotAuthentic for what was not sealed with this key for this context."""
        ...


class Plain:
    """Nothing is encrypted."""

    name = ""
    overhead = 0

    def seal_records(
        self, records: np.ndarray, payload_bytes: int, *, nonce: int, layer: int, first: int
    ) -> None:
        """Leaves the records as they are."""

    def open_records(
        self, records: np.ndarray, payload_bytes: int, *, nonces: np.ndarray, layer: int, first: int
    ) -> None:
        """Leaves the records as they are."""

    def seal(self, data: bytes, context: str) -> bytes:
        """The data."""
        return data

    def open(self, data: bytes, context: str) -> bytes:
        """The data."""
        return data
