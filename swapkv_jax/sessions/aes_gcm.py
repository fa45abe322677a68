"""Encryption at rest: AES-256-GCM under a key from a file.

Token ids, state, keys and values are encrypted; names, lengths and times of sessions are not, nor what a running
decode keeps in files of its own (`DiskStore(unlinked=True)` leaves none of those behind). Every record and every
value has a random nonce and is bound to its place, so that what was moved, swapped or put back does not open.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
import struct
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from swapkv_jax.errors import UsageError
from swapkv_jax.sessions.cipher import NotAuthentic

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY_BYTES = 32
KEYRING_SERVICE = "swapkv_jax"

_NONCE_BYTES, _TAG_BYTES = 12, 16


def cipher_of(key_file: Path | None, keyring: str | None) -> AesGcm | None:
    """What encrypts with the key that flags name, if they name one; UsageError if there is no such key."""
    if keyring is not None:
        return AesGcm.from_keyring(keyring)
    return AesGcm.from_file(key_file) if key_file is not None else None


class AesGcm:
    """See `Cipher`. A record's payload is followed by its tag and its nonce.

    Nonces are random: up to 2³² records, 400 TB of the smallest model's, may be written under one key.
    """

    overhead = _TAG_BYTES + _NONCE_BYTES

    def __init__(self, key: bytes) -> None:
        """Takes a key of 32 bytes.

        Raises:
          UsageError: it is of another length, or the package that encrypts is not installed.
        """
        if len(key) != KEY_BYTES:
            raise UsageError(f"the key has {len(key)} bytes; it must be {KEY_BYTES}")
        self._aead = _aead(key)
        self.name = "aes-256-gcm:" + hmac.digest(key, b"swapkv_jax sessions", hashlib.sha256).hex()[:16]

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Takes the key from a file: 32 bytes, or 64 hexadecimal digits, that only its owner can read.

        Raises:
          UsageError: there is none, or others can read it.
        """
        remedy = f"make one with: (umask 077; head -c {KEY_BYTES} /dev/urandom > {path})"
        try:
            mode = stat.S_IMODE(path.stat().st_mode)
            data = path.read_bytes()
        except OSError as error:
            raise UsageError(f"cannot read the key file {path}: {error.strerror}; {remedy}") from None
        if mode & 0o077:
            raise UsageError(f"key file {path} is open to other users (mode {mode:o}); chmod 600 {path}")
        if len(data) != KEY_BYTES:
            try:
                data = bytes.fromhex(data.decode("ascii").strip())
            except ValueError:
                data = b""
        if len(data) != KEY_BYTES:
            raise UsageError(
                f"key file {path} holds neither {KEY_BYTES} bytes nor {2 * KEY_BYTES} hexadecimal digits; {remedy}"
            )
        return cls(data)

    @classmethod
    def from_keyring(cls, name: str) -> Self:
        """Takes the key, 64 hexadecimal digits, from the system's keyring: the password of `name` in the service
        swapkv_jax.

        Raises:
          UsageError: there is none, or no keyring, or the package that asks it is not installed.
        """
        remedy = f"store one with: keyring set {KEYRING_SERVICE} {name}"
        try:
            keyring = import_module("keyring")  # of an extra
        except ImportError:
            raise UsageError(
                "keys from the keyring need the package keyring; pip install 'swapkv-jax[encryption]'"
            ) from None
        try:
            password = keyring.get_password(KEYRING_SERVICE, name)
        except keyring.errors.KeyringError as error:
            raise UsageError(f"cannot ask the system's keyring: {error}; give --key-file instead") from None
        if password is None:
            raise UsageError(f"the system's keyring has no key {name!r}; {remedy}")
        try:
            key = bytes.fromhex(password.strip())
        except ValueError:
            raise UsageError(
                f"the key {name!r} in the system's keyring is not {2 * KEY_BYTES} hexadecimal digits; {remedy}"
            ) from None
        return cls(key)

    def seal_records(
        self, records: np.ndarray, payload_bytes: int, *, nonce: int, layer: int, first: int
    ) -> None:
        """See `Cipher`."""
        drawn = os.urandom(_NONCE_BYTES * len(records))
        end = payload_bytes + _TAG_BYTES
        for i, record in enumerate(records):
            own = drawn[i * _NONCE_BYTES : (i + 1) * _NONCE_BYTES]
            sealed = self._aead.encrypt(own, record[:payload_bytes].data, _place(nonce, layer, first + i))
            record[:end] = np.frombuffer(sealed, np.uint8)
            record[end : end + _NONCE_BYTES] = np.frombuffer(own, np.uint8)

    def open_records(
        self, records: np.ndarray, payload_bytes: int, *, nonces: np.ndarray, layer: int, first: int
    ) -> None:
        """See `Cipher`."""
        end = payload_bytes + _TAG_BYTES
        for i, (record, nonce) in enumerate(zip(records, nonces.tolist(), strict=True)):
            own = record[end : end + _NONCE_BYTES].tobytes()
            plain = self._open(own, record[:end].data, _place(nonce, layer, first + i))
            record[:payload_bytes] = np.frombuffer(plain, np.uint8)

    def seal(self, data: bytes, context: str) -> bytes:
        """See `Cipher`."""
        own = os.urandom(_NONCE_BYTES)
        return own + self._aead.encrypt(own, data, context.encode())

    def open(self, data: bytes, context: str) -> bytes:
        """See `Cipher`."""
        return self._open(data[:_NONCE_BYTES], data[_NONCE_BYTES:], context.encode())

    def _open(self, nonce: bytes, data: bytes | memoryview, context: bytes) -> bytes:
        from cryptography.exceptions import InvalidTag

        try:
            return self._aead.decrypt(nonce, data, context)
        except (InvalidTag, ValueError):  # ValueError: too short to be anything
            raise NotAuthentic from None


def _place(nonce: int, layer: int, place: int) -> bytes:
    return struct.pack("<QII", nonce, layer, place)


def _aead(key: bytes) -> AESGCM:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError:
        raise UsageError(
            "encrypted sessions need the package cryptography; pip install 'swapkv-jax[encryption]'"
        ) from None
    return AESGCM(key)
