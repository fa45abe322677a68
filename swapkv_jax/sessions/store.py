"""The sessions of one model in a store's directory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from swapkv_jax.errors import TierError, UsageError
from swapkv_jax.memory_limits import format_bytes
from swapkv_jax.sessions.cipher import Cipher, Plain
from swapkv_jax.sessions.files import SessionFiles
from swapkv_jax.sessions.identity import Identity
from swapkv_jax.sessions.info import SessionInfo, session_infos
from swapkv_jax.sessions.layout import SESSION_GROUP, Layout
from swapkv_jax.sessions.lost import shorten_lost
from swapkv_jax.sessions.prefix import shared_prefix
from swapkv_jax.sessions.privacy import check_private
from swapkv_jax.sessions.session import Durability, Session
from swapkv_jax.tiers import DiskStore, IoCounts, Syscalls
from swapkv_jax.tiers.catalog import was_full
from swapkv_jax.tiers.catalog_rows import SessionContents, SessionEntry
from swapkv_jax.tiers.past_sessions import RESERVE_BYTES

_LONGEST_NAME, _SHOWN_NAME = 200, 60
_ROW_BYTES_PER_TOKEN = 8  # its id, and its share of a span per group


class SessionStore:
    """Finds, makes, forks and deletes sessions. Any number of processes may use one directory at once.

    Attributes:
      notes: lines the user should see: what a crash left, what was lost, why nothing was found to start from. The
        caller empties it.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        identity: Identity,
        limit_bytes: int | None = None,
        durability: Durability = "close",
        syscalls: Syscalls | None = None,
        cipher: Cipher | None = None,
    ) -> None:
        """Opens or makes the store and clears away what killed processes left.

        Args:
          identity: of the model; sessions of others are neither opened nor shared from.
          limit_bytes: what everything in the directory may take, the catalogue included.
          durability: when a commit waits for the disk, and so survives a loss of power: never ("none"), the last
            one ("close"), or each time ("group"). A killed process loses nothing committed in any case.
          cipher: encrypts what is written; only sessions of the same cipher and key are opened or shared from.

        Raises:
          UsageError: the directory cannot be made or written, or is not this user's alone.
          TierError: the catalogue is damaged, or the limit leaves no room for one.
        """
        self.identity = identity
        self.durability: Durability = durability
        self.notes: list[str] = []
        self._cipher = cipher or Plain()
        self._open: dict[str, tuple[Session, int]] = {}
        check_private(Path(directory))
        self._disk = DiskStore(
            directory, limit_bytes=limit_bytes, fingerprint=identity.fingerprint, syscalls=syscalls
        )
        self._sessions = self._disk.sessions
        self._files = SessionFiles(self._disk, Layout.of(identity), self._cipher)
        try:
            with self._disk.exclusive():
                freed, problem = self._sessions.sweep()
        except BaseException:
            self._disk.close()
            raise
        if freed:
            self.notes.append(
                f"{self.directory}: {format_bytes(freed)} that an interrupted process left are free again"
            )
        self.notes.extend(note for note in (problem, self._disk.support.note) if note is not None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def directory(self) -> Path:
        """Where everything is."""
        return self._disk.directory

    @property
    def bytes_used(self) -> int:
        """Real bytes of everything in the directory."""
        return self._disk.bytes_used

    @property
    def evicted(self) -> list[str]:
        """Names of past sessions that this store has deleted to keep to its limit."""
        return list(self._disk.evicted_sessions)

    def bytes_of(self, tokens: int) -> int:
        """The most that a session of so many tokens takes beside a catalogue, if it shares nothing."""
        layout = self._files.layout
        tail = bytes(layout.layers * layout.payload_bytes)
        commit = SessionContents(tokens=bytes(_ROW_BYTES_PER_TOKEN * tokens), tail=tail).growth
        return self._files.planned_bytes(-(-tokens // SESSION_GROUP)) + RESERVE_BYTES + commit

    @property
    def counts(self) -> IoCounts:
        """Records moved so far, by all sessions of this store."""
        return self._disk.counts

    def open(self, name: str, tokens: Sequence[int] | None = None) -> Session:
        """The session of that name, locked until it is closed; a new one where there is none.

        A new one starts with the longest prefix of `tokens` in whole groups that any session of this model has, by
        comparing token ids; nothing is copied. Without a commit it is gone when it is closed.

        Raises:
          UsageError: a name that cannot be.
          TierError: in use, of another model or key, or damaged.
        """
        check_name(name)
        with self._disk.exclusive():
            entry = self._known(name)
            if entry is None:
                entry = self._new(name, tokens or ())
            self._check_own(entry)
            lock = self._sessions.lock(entry)
            if lock is None:
                raise TierError(
                    f"session {name!r} is in use by another process; wait for it to end, or fork the session"
                )
            try:
                entry, lost = shorten_lost(self._disk, self._files, entry)
                self.notes.extend(lost)
                contents = self._sessions.catalog().contents(entry)
                session = Session(self._files, entry, contents, self.durability, self._closed)
            except BaseException:
                self._sessions.unlock(lock)
                raise
            self._open[name] = session, lock
            return session

    def fork(self, source: str, name: str) -> None:
        """A second session that starts as the first was last committed. Their keys and values are shared.

        Raises:
          UsageError: the source does not exist, or the name does.
          TierError: the source is of another model or key, or damaged; or there is no room.
        """
        check_name(name)
        with self._disk.exclusive():
            entry = _committed(self._disk, source)
            catalog = self._sessions.catalog()
            if self._known(name) is not None:
                raise UsageError(f"there is a session {name!r} already; delete it or choose another name")
            self._check_own(entry)
            lock = self._sessions.lock(entry)  # the source must not make room for its own copy
            try:
                contents = self._renamed(catalog.contents(entry), entry, name)
                with self._disk.room(contents.growth), catalog.transaction(durable=self.durability != "none"):
                    copy = catalog.add(
                        name, entry.identity, entry.cipher, contents, entry.stored, entry.token_count
                    )
                    catalog.save(copy, contents, stored=entry.stored, tokens=entry.token_count)
            finally:
                if lock is not None:
                    self._sessions.unlock(lock)

    def list(self) -> list[SessionInfo]:
        """All committed sessions in the directory, other models' included, least recently used first.

        Raises:
          TierError: the catalogue is damaged.
        """
        with self._disk.exclusive():
            return session_infos(self._disk)

    def delete(self, name: str) -> int:
        """Deletes a session; what others share stays. Returns the bytes that frees.

        Raises:
          UsageError: there is none of that name.
          TierError: it is in use.
        """
        return delete_session(self._disk, name)

    def gc(self, byte_budget: int) -> list[str]:
        """Deletes past sessions, least recently used first, until everything takes at most `byte_budget` bytes, and
        returns their names. What is in use stays.

        Raises:
          TierError: that is not enough.
        """
        return self._disk.shrink(byte_budget)

    def close(self) -> None:
        """Closes every session; harmless when repeated."""
        with ExitStack() as stack:  # all of them, even where one raises
            stack.callback(self._disk.close)
            for session, _ in self._open.values():
                stack.callback(session.close)

    # ---- inside --------------------------------------------------------------------------------------

    def _closed(self, session: Session) -> None:
        _, lock = self._open.pop(session.name)
        with self._disk.exclusive():
            try:
                self._note_use(session)
            except (
                TierError
            ) as error:  # what was committed is safe, and the next sweep clears away what was not
                self.notes.append(f"the use of session {session.name!r} was not noted: {error}")
            finally:
                self._sessions.unlock(lock)

    def _note_use(self, session: Session) -> None:
        catalog = self._sessions.catalog()
        entry = catalog.entry_of(session.id)
        if session.committed:
            with catalog.transaction(durable=False):
                catalog.touch(session.id)
        elif entry is not None:
            self._sessions.forget(entry)

    def _known(self, name: str) -> SessionEntry | None:
        """The session of that name, unless its process was killed before it came to anything."""
        entry = self._sessions.catalog().entry(name)
        if entry is not None and not entry.committed and self._sessions.idle(entry):
            self._sessions.forget(entry)
            return None
        return entry

    def _check_own(self, entry: SessionEntry) -> None:
        identity = Identity.from_json(entry.identity)
        if identity != self.identity:
            if identity.dtype != self.identity.dtype:
                raise UsageError(
                    f"session {entry.name!r} is in {identity.dtype}, this is {self.identity.dtype}: give --dtype "
                    f"{identity.dtype}, or another session name"
                )
            raise UsageError(
                f"session {entry.name!r} was made by another model, or other weights, tokenizer or RoPE settings "
                f"({self.identity.difference(identity)}): use what made it, or another session name"
            )
        if entry.cipher != self._cipher.name:
            how = "not encrypted" if not entry.cipher else "encrypted"
            how += " with another key" if entry.cipher and self._cipher.name else ""
            remedy = "give its key" if entry.cipher else "give no key"
            raise TierError(f"session {entry.name!r} is {how}; {remedy}, or another session name")

    def _new(self, name: str, tokens: Sequence[int]) -> SessionEntry:
        """A row for a new session, with what it can share."""
        catalog, seal = self._sessions.catalog(), self._files.seal_value
        most = SessionContents(tokens=bytes(_ROW_BYTES_PER_TOKEN * len(tokens)))
        with self._disk.room(most.growth):  # before looking: what there is to share may have to go
            found, spans = shared_prefix(catalog, self._files, self.identity, tokens, self.notes)
            stored = len(found)
            contents = SessionContents(
                tokens=seal(found.tobytes(), name, "tokens", stored),
                tail=seal(b"", name, "tail", stored),
                state=seal(b"{}", name, "state", stored),
                spans=spans,
            )
            with catalog.transaction(durable=False):
                catalog.add(name, self.identity.to_json(), self._cipher.name, contents, stored, stored)
        entry = catalog.entry(name)
        assert entry is not None
        return entry

    def _renamed(self, contents: SessionContents, entry: SessionEntry, name: str) -> SessionContents:
        """The contents as a session of another name has them: encrypted values are bound to the name."""

        def rebound(data: bytes, what: str, tokens: int) -> bytes:
            return self._files.seal_value(
                self._files.open_value(data, entry.name, what, tokens), name, what, tokens
            )

        return SessionContents(
            tokens=rebound(contents.tokens, "tokens", entry.token_count),
            tail=rebound(contents.tail, "tail", entry.stored),
            state=rebound(contents.state, "state", entry.token_count),
            spans=contents.spans,
        )


def delete_session(disk: DiskStore, name: str) -> int:
    """Deletes a session, of whatever model; what others share stays. Returns the bytes that frees.

    Raises:
      UsageError: there is none of that name.
      TierError: it is in use, or the disk is too full even for that.
    """
    with disk.exclusive():
        entry = _committed(disk, name)
        if not disk.sessions.idle(entry):
            raise TierError(f"session {name!r} is in use; close it, or wait for its process to end")
        return disk.sessions.forget(entry)


def erase_deleted(disk: DiskStore) -> None:
    """Takes what deleted sessions had in the catalogue off the disk.

    Raises:
      TierError: the disk is full, and others use the catalogue.
    """
    with disk.exclusive():
        catalog = disk.sessions.catalog()
        try:
            catalog.compact()
        except TierError as error:
            if not was_full(error):
                raise
            with catalog.in_place():
                catalog.compact()


def _committed(disk: DiskStore, name: str) -> SessionEntry:
    catalog = disk.sessions.catalog()
    entry = catalog.entry(name)
    if entry is None or not entry.committed:
        names = ", ".join(repr(e.name) for e in catalog.entries() if e.committed)
        raise UsageError(f"no session {name!r} in {disk.directory}; there are {names or 'none'}")
    return entry


def check_name(name: str) -> None:
    """Refuses what cannot be a session's name.

    Raises:
      UsageError: it is empty, blank, too long or not printable.
    """
    if not name.strip() or len(name) > _LONGEST_NAME or not name.isprintable():
        shown = repr(name if len(name) <= _SHOWN_NAME else f"{name[:_SHOWN_NAME]}…")
        raise UsageError(
            f"session name {shown} must be 1 to {_LONGEST_NAME} printable characters, not only spaces; choose another"
        )
