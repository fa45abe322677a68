"""How a store keeps to its limit: what is past goes first, then past sessions, and nothing in vain."""

from __future__ import annotations

from collections.abc import Callable

from swapkv_jax.errors import TierError
from swapkv_jax.memory_limits import format_bytes
from swapkv_jax.tiers.eviction import SequenceOrder
from swapkv_jax.tiers.past_sessions import FileCalls, PastSessions
from swapkv_jax.tiers.store_directory import StoreDirectory


class Room:
    """The bytes that everything in a directory takes, against a limit. For use inside the directory's `exclusive`.

    Attributes:
      limit_bytes: what they may be; None for as many as the disk has.
      sessions: of the directory.
      evicted: names of the sessions that had to go, in their order; whoever tells the user empties it.
    """

    def __init__(
        self,
        directory: StoreDirectory,
        limit_bytes: int | None,
        order: SequenceOrder,
        files: FileCalls,
        used: Callable[[], int],
    ) -> None:
        """`order` and `used` are the store's own; `files` works on files by their names."""
        self.limit_bytes = limit_bytes
        self.evicted: list[str] = []
        self.sessions = PastSessions(directory, files, self.make)
        self._directory, self._order, self._files, self._used = directory, order, files, used

    def note_past(self) -> None:
        """Brings the order up to date with what other processes finished or deleted."""
        stored = self._directory.sequences()
        for sequence in set(self._order.past).difference(stored):
            self._order.discard(sequence)
        for sequence in stored:
            if sequence not in self._order:
                self._order.finish(sequence)

    def make(self, nbytes: int, keep: str | None = None, *, evict_sessions: bool = True) -> None:
        """Evicts past sequences, but not `keep`, then past sessions, until `nbytes` more fit. What a decode works
        with is not worth anybody's session: for it, `evict_sessions` is False.

        Raises:
            TierError: that would not be enough; nothing is evicted then.
        """
        if self.limit_bytes is None:
            return
        missing = self._missing(nbytes)
        if missing > 0 and self.sessions.exist:
            self._compact()
            missing = self._missing(nbytes)
        if missing <= 0:
            return
        self.note_past()
        freed: dict[str, int] = {}

        def suffices(sequence: str) -> bool:
            if self._files.evictable(sequence):
                freed[sequence] = self._files.size(sequence)
            return sum(freed.values()) >= missing

        sessions = []
        if self._order.victims(suffices, keep={keep} if keep else ()) is None:
            short = missing - sum(freed.values())
            if self.sessions.exist and evict_sessions:
                sessions, gained = self.sessions.victims(short)
                short -= gained
            if short > 0:
                past = f"{len(freed)} past sequences"
                past += f" and {len(sessions)} past sessions" if sessions else ""
                kept = self.sessions.exist and not evict_sessions and self.sessions.victims(short)[0]
                remedy = "raise --disk-space or lower --max-context"
                if kept:
                    remedy += f", or make room with python -m swapkv_jax.store --store-dir {self._directory.path} gc"
                raise TierError(
                    f"the disk store in {self._directory.path} is full: needs {format_bytes(nbytes)} beside the "
                    f"{format_bytes(self._used() + self.sessions.bytes_to_keep_free - sum(freed.values()))} that are "
                    f"in use, limit {format_bytes(self.limit_bytes)}, {format_bytes(short)} short even without its "
                    f"{past}; {remedy}"
                )
        for sequence in freed:
            self._files.remove(sequence)
        for session in sessions:
            self.sessions.forget(session)
            self.evicted.append(session.name)

    def shrink(self, nbytes: int) -> list[str]:
        """Evicts past sequences and sessions until everything takes `nbytes`. Returns the sessions' names.

        Raises:
            TierError: that is not enough; what can be evicted is.
        """
        self._compact()
        self.note_past()
        for sequence in self._order.past:
            if self._used() <= nbytes:
                break
            if self._files.evictable(sequence):
                self._files.remove(sequence)
        names = []
        if (over := self._used() - nbytes) > 0:
            for session in self.sessions.victims(over)[0]:
                self.sessions.forget(session)
                names.append(session.name)
            self._compact()
        if (over := self._used() - nbytes) > 0:
            raise TierError(
                f"{self._directory.path} still takes {format_bytes(over)} more than {format_bytes(nbytes)}: the "
                f"rest is in use or not the store's; close its sessions, or allow more"
            )
        return names

    def _missing(self, nbytes: int) -> int:
        """Bytes that the limit lacks for `nbytes` more."""
        assert self.limit_bytes is not None
        return self._used() + self.sessions.bytes_to_keep_free + nbytes - self.limit_bytes

    def _compact(self) -> None:
        """Makes the catalogue as small as it gets without going over the limit meanwhile."""
        catalog = self.sessions.catalog()
        catalog.checkpoint()
        if catalog.free_bytes and (self.limit_bytes is None or self._missing(catalog.compacting_bytes) <= 0):
            catalog.compact()
