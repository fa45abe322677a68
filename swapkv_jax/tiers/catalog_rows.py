"""What the catalogue says of a session, and the checksum that seals it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import xxhash

_LOGGED_PAGE, _PAGE_CONTENT = 4120, 4080
_PAGES_TOUCHED = 24  # of B-trees, free list and header


class Span(NamedTuple):
    """`groups` groups of a session: those from `first` on of a file, sealed with `nonce`."""

    file: str
    first: int
    groups: int
    nonce: int


@dataclass(frozen=True, kw_only=True)
class SessionEntry:
    """What can be told of a session without reading what it holds. Times are seconds since the epoch."""

    id: int
    name: str
    identity: str
    cipher: str
    stored: int
    token_count: int
    committed: bool
    created: float
    last_use: float


@dataclass(frozen=True, kw_only=True)
class SessionContents:
    """What a session holds: `tokens` (int32, little-endian), the `tail` of its keys and values, the caller's
    `state`, each as the session's cipher left it; and where its whole groups are."""

    tokens: bytes = b""
    tail: bytes = b""
    state: bytes = b"{}"
    spans: tuple[Span, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes that go into the catalogue."""
        return len(self.tokens) + len(self.tail) + len(self.state) + 100 * len(self.spans)

    @property
    def growth(self) -> int:
        """The most that storing it adds to the database and its log together."""
        return 2 * _LOGGED_PAGE * (self.nbytes // _PAGE_CONTENT + _PAGES_TOUCHED)


def seal(entry: SessionEntry, contents: SessionContents) -> bytes:
    """Checksum over all that decides what a session is, the times of its uses left out."""
    digest = xxhash.xxh3_128()
    numbers = (entry.id, entry.stored, entry.token_count, int(entry.committed))
    parts: Sequence[bytes] = (
        repr((entry.name, entry.identity, entry.cipher, numbers, contents.spans)).encode(),
        contents.tokens,
        contents.tail,
        contents.state,
    )
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
