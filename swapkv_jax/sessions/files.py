"""The files that sessions share: each open once, whoever reads it here, and closed when nobody does."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from swapkv_jax.errors import TierError
from swapkv_jax.sessions.cipher import Cipher, NotAuthentic
from swapkv_jax.sessions.contents import bind
from swapkv_jax.sessions.layout import SESSION_GROUP, Layout
from swapkv_jax.tiers import DiskStore, SequenceFile, planned_file_bytes
from swapkv_jax.tiers.catalog import repair_advice
from swapkv_jax.tiers.catalog_rows import Span
from swapkv_jax.tiers.store_directory import SESSION_PREFIX


class SessionFiles:
    """Creates, opens, writes and reads the files of a store's sessions."""

    def __init__(self, disk: DiskStore, layout: Layout, cipher: Cipher) -> None:
        self.disk, self.layout, self.cipher = disk, layout, cipher
        self._payload_bytes = layout.payload_bytes + cipher.overhead
        self._uses: Counter[str] = Counter()

    def planned_bytes(self, groups: int) -> int:
        """The most that a file of so many groups takes, filesystem metadata included."""
        alignment = self.disk.support.alignment
        return planned_file_bytes(self.layout.layers, groups, self._payload_bytes, alignment)

    def create(self, groups: int) -> SequenceFile:
        """A new file with room for `groups` groups.

        Raises:
          TierError: the disk or its limit has no room.
        """
        name = f"{SESSION_PREFIX}{secrets.token_hex(8)}"
        file = self.disk.create(
            name,
            layers=self.layout.layers,
            group_tokens=SESSION_GROUP,
            payload_bytes=self._payload_bytes,
            prompt_groups=groups,
            ephemeral=False,
            shared=True,
        )
        self._uses[name] += 1
        return file

    def open(self, name: str) -> SequenceFile:
        """A stored file, until `release`.

        Raises:
          TierError: missing, damaged or truncated.
        """
        with self._advised():
            file = self.disk.open(
                name,
                layers=self.layout.layers,
                group_tokens=SESSION_GROUP,
                payload_bytes=self._payload_bytes,
                shared=True,
            )
        self._uses[name] += 1
        return file

    def release(self, name: str) -> None:
        """Ends one use of a file."""
        self._uses[name] -= 1
        if not self._uses[name]:
            del self._uses[name]
            self.disk.finish(name)

    def lost(self, name: str, size: int) -> str | None:
        """Why a file of at least `size` bytes cannot be what was committed, if it is plain to see."""
        path = self.disk.path(name)
        try:
            actual = path.stat().st_size
        except FileNotFoundError:
            return f"{path} is missing"
        return None if actual >= size else f"{path} is truncated: {actual} bytes, {size - actual} short"

    def write(self, file: SequenceFile, layer: int, first: int, records: np.ndarray, nonce: int) -> None:
        """Seals and writes records `[n, stride]` to the places from `first` on.

        Raises:
          TierError: no room, or the write keeps failing.
        """
        self.cipher.seal_records(records, self.layout.payload_bytes, nonce=nonce, layer=layer, first=first)
        file.write(layer, first, records, nonce=nonce)

    def read(self, file: SequenceFile, layer: int, first: int, nonces: np.ndarray, out: np.ndarray) -> None:
        """Fills `out` `[n, stride]` with verified records, sealed with `nonces` `[n]`, from `first` on.

        Raises:
          TierError: the read keeps failing, or a record is damaged, missing or another's.
        """
        with self._advised():
            file.read(layer, first, len(out), out, nonces=nonces)
        try:
            self.cipher.open_records(out, self.layout.payload_bytes, nonces=nonces, layer=layer, first=first)
        except NotAuthentic:
            raise TierError(
                f"a record of layer {layer} from group {first} on of {file.path} was not encrypted for that place: "
                f"somebody changed the file; delete the sessions that use it"
            ) from None

    @contextmanager
    def _advised(self) -> Iterator[None]:
        """Sequences can be made again, so that deleting one is good advice; a session's file others share."""
        try:
            yield
        except TierError as error:
            wrong, _, advice = str(error).rpartition("; ")
            if not advice.startswith("delete "):
                raise
            raise TierError(f"{wrong}; {repair_advice(self.disk.directory)}") from error

    def open_value(self, data: bytes, name: str, what: str, tokens: int) -> bytes:
        """What the catalogue has of a session, decrypted: see `bind`.

        Raises:
          TierError: it was not encrypted as that.
        """
        try:
            return self.cipher.open(data, bind(name, what, tokens))
        except NotAuthentic:
            raise TierError(
                f"the {what} of session {name!r} in {self.disk.directory} was not encrypted as that: somebody "
                f"changed the catalogue; delete the session"
            ) from None

    def seal_value(self, data: bytes, name: str, what: str, tokens: int) -> bytes:
        """Inverse of `open_value`."""
        return self.cipher.seal(data, bind(name, what, tokens))


def clip(spans: tuple[Span, ...], groups: int) -> tuple[Span, ...]:
    """The spans of the first `groups` groups."""
    kept = []
    for span in spans:
        if groups <= 0:
            break
        kept.append(span._replace(groups=min(span.groups, groups)))
        groups -= span.groups
    return tuple(kept)


def count(spans: tuple[Span, ...]) -> int:
    """Groups in all."""
    return sum(span.groups for span in spans)
