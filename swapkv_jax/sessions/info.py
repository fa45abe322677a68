"""What can be told of sessions from outside."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from swapkv_jax.sessions.identity import Identity
from swapkv_jax.tiers import DiskStore


@dataclass(frozen=True, kw_only=True)
class SessionInfo:
    """What is known of a session without opening it. Times are seconds since the epoch.

    Attributes:
      tokens: committed. stored: of those, how many have K and V.
      own_bytes: on disk in files that no other session uses: what deleting it frees. shared_bytes: in others.
      in_use: somebody has it open.
    """

    name: str
    identity: Identity
    encrypted: bool
    tokens: int
    stored: int
    own_bytes: int
    shared_bytes: int
    created: float
    last_use: float
    in_use: bool


def session_infos(disk: DiskStore) -> list[SessionInfo]:
    """All committed sessions, least recently used first. Inside the store's `exclusive`.

    Raises:
      TierError: the catalogue is damaged.
    """
    catalog = disk.sessions.catalog()

    def size(files: Iterable[str]) -> int:
        return sum(map(disk.size, files))

    infos = []
    for entry in catalog.entries():
        if not entry.committed:
            continue
        files = {span.file for span in catalog.spans(entry.id)}
        own = {file for file in files if catalog.users(file) == [entry.id]}
        infos.append(
            SessionInfo(
                name=entry.name,
                identity=Identity.from_json(entry.identity),
                encrypted=bool(entry.cipher),
                tokens=entry.token_count,
                stored=entry.stored,
                own_bytes=size(own),
                shared_bytes=size(files - own),
                created=entry.created,
                last_use=entry.last_use,
                in_use=not disk.sessions.idle(entry),
            )
        )
    return infos
