"""The catalogue of sessions: a SQLite database beside the files that sessions share.

A session's row is sealed by a checksum over everything that decides which tokens it has and where their keys and
values lie, since SQLite does not notice a flipped bit inside a value. Every call belongs inside the directory's
`exclusive`, so that no two connections ever write, and what was looked up holds until it is acted upon.
"""

from __future__ import annotations

import os
import shlex
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from swapkv_jax.errors import TierError
from swapkv_jax.tiers.catalog_rows import SessionContents, SessionEntry, Span, seal

CATALOG_NAME = "catalog.sqlite"

_VERSION = 1
_PATIENCE_S = 30
_LOG_LIMIT = 16 << 20  # then it is emptied into the database
_SCHEMA = """
CREATE TABLE sessions (
    id INTEGER PRIMARY KEY AUTOINCREMENT,  -- never given twice: locks are named by it
    name TEXT UNIQUE NOT NULL,
    identity TEXT NOT NULL,
    cipher TEXT NOT NULL,
    stored INTEGER NOT NULL,
    token_count INTEGER NOT NULL,
    committed INTEGER NOT NULL,
    created REAL NOT NULL,
    last_use REAL NOT NULL,
    seal BLOB NOT NULL
);
CREATE TABLE contents (  -- apart, since SQLite rewrites a row as a whole
    session INTEGER PRIMARY KEY REFERENCES sessions ON DELETE CASCADE,
    tokens BLOB NOT NULL,
    tail BLOB NOT NULL,
    state BLOB NOT NULL
);
CREATE TABLE spans (
    session INTEGER NOT NULL REFERENCES sessions ON DELETE CASCADE,
    ordinal INTEGER NOT NULL,
    file TEXT NOT NULL,
    first INTEGER NOT NULL,
    groups INTEGER NOT NULL,
    nonce INTEGER NOT NULL,
    PRIMARY KEY (session, ordinal)
) WITHOUT ROWID;
CREATE INDEX spans_by_file ON spans (file);
CREATE TABLE files (
    file TEXT PRIMARY KEY,
    owner INTEGER REFERENCES sessions ON DELETE SET NULL,
    size INTEGER NOT NULL  -- bytes it must have at least
) WITHOUT ROWID;
"""


def repair_advice(directory: Path) -> str:
    """What to do about something damaged in a store."""
    where = shlex.quote(str(directory))
    return f"python -m swapkv_jax.store --store-dir {where} verify --repair keeps what is intact"


def without_advice(error: TierError, directory: Path) -> str:
    """What was wrong, for somebody who is following `repair_advice` already."""
    return str(error).removesuffix(f"; {repair_advice(directory)}")


def was_full(error: TierError) -> bool:
    """Whether the catalogue failed for want of room on the disk, or may have."""
    cause = error.__cause__
    if not isinstance(cause, sqlite3.OperationalError):
        return False
    # Beside the log, SQLite needs room for its index, and says no more than "I/O error" where there is none.
    return cause.sqlite_errorcode & 0xFF in (
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_CANTOPEN,
    )


class Catalog:
    """One connection to a directory's catalogue."""

    def __init__(self, path: Path) -> None:
        """Opens the catalogue, or makes an empty one (mode 0600).

        Raises:
            TierError: it cannot be read, is damaged, or of another version.
        """
        self.path = path
        with self._explained("open"):
            # SQLite would make it readable to others; what it puts beside the database takes this mode too.
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        try:
            self._connect(alone=False)
        except TierError as error:
            if not was_full(error):
                raise
            self._connect(alone=True)

    def _connect(self, *, alone: bool) -> None:
        """Connects. `alone`, SQLite keeps the log's index in memory, where a full disk has no room for it, and others
        cannot connect meanwhile."""
        self._alone = alone
        with self._explained("open"):
            self._db = sqlite3.connect(
                self.path, isolation_level=None, check_same_thread=False, timeout=_PATIENCE_S
            )
        try:
            with self._explained("open"):
                if alone:
                    self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
                self._prepare()
        except BaseException:
            self._db.close()
            raise

    def _prepare(self) -> None:
        # Temporary tables stay in memory: on disk they would lie outside the store.
        for pragma in (
            "journal_mode = WAL",
            "wal_autocheckpoint = 0",
            "foreign_keys = ON",
            "temp_store = MEMORY",
        ):
            self._db.execute(f"PRAGMA {pragma}")
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version == 0:
            with self.transaction(durable=True):
                for statement in filter(None, map(str.strip, _SCHEMA.split(";\n"))):
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version = {_VERSION}")
        elif version != _VERSION:
            raise TierError(
                f"{self.path} has version {version}, this package reads {_VERSION}; use the package that wrote it, "
                f"or another --store-dir"
            )

    # ---- reading -------------------------------------------------------------------------------------

    def entries(self) -> list[SessionEntry]:
        """All sessions, least recently used first."""
        return self._entries("ORDER BY last_use, id")

    def entry(self, name: str) -> SessionEntry | None:
        """The session of that name."""
        found = self._entries("WHERE name = ?", name)
        return found[0] if found else None

    def entry_of(self, session: int) -> SessionEntry | None:
        """The session of that number."""
        found = self._entries("WHERE id = ?", session)
        return found[0] if found else None

    def last_id(self) -> int:
        """The highest number that a session was ever given; 0 before the first one."""
        rows = self._all("SELECT seq FROM sqlite_sequence WHERE name = 'sessions'")
        return rows[0][0] if rows else 0

    def damaged_sessions(self) -> list[str]:
        """Sessions that are not as they were written."""
        damaged = []
        for entry in self.entries():
            try:
                self.contents(entry)
            except TierError:
                damaged.append(entry.name)
        return damaged

    def tokens(self, entry: SessionEntry) -> bytes:
        """A session's token ids as they are in the catalogue: `contents` verifies them."""
        rows = self._all("SELECT tokens FROM contents WHERE session = ?", entry.id)
        return rows[0][0] if rows and isinstance(rows[0][0], bytes) else b""

    def contents(self, entry: SessionEntry) -> SessionContents:
        """What a session holds.

        Raises:
            TierError: the row is not as it was written.
        """
        with self._explained("read"):
            (sealed,) = self._db.execute("SELECT seal FROM sessions WHERE id = ?", (entry.id,)).fetchone()
            row = self._db.execute(
                "SELECT tokens, tail, state FROM contents WHERE session = ?", (entry.id,)
            ).fetchone()
        contents = None
        if row is not None and all(isinstance(part, bytes) for part in row):
            tokens, tail, state = row
            contents = SessionContents(tokens=tokens, tail=tail, state=state, spans=self.spans(entry.id))
        if contents is None or sealed != seal(entry, contents):
            raise TierError(
                f"session {entry.name!r} is damaged in {self.path}; {repair_advice(self.path.parent)}"
            )
        return contents

    def spans(self, session: int) -> tuple[Span, ...]:
        """Where a session's groups are, in their order."""
        rows = self._all(
            "SELECT file, first, groups, nonce FROM spans WHERE session = ? ORDER BY ordinal", session
        )
        return tuple(Span(*row) for row in rows)

    def files(self) -> dict[str, int]:
        """Every file that was committed, and the bytes it must have at least."""
        used = self._all("SELECT DISTINCT file FROM spans")
        return {**{file: 0 for (file,) in used}, **dict(self._all("SELECT file, size FROM files"))}

    def owner(self, file: str) -> int | None:
        """The session that may append to a file."""
        rows = self._all("SELECT owner FROM files WHERE file = ?", file)
        return rows[0][0] if rows else None

    def committed_groups(self, file: str) -> int:
        """The first group of a file from which on no session has any."""
        ((groups,),) = self._all("SELECT MAX(first + groups) FROM spans WHERE file = ?", file)
        return groups or 0

    def users(self, file: str) -> list[int]:
        """The sessions that have groups in a file."""
        return [row[0] for row in self._all("SELECT DISTINCT session FROM spans WHERE file = ?", file)]

    def unused_files(self) -> list[str]:
        """Files that no session has groups in."""
        rows = self._all("SELECT file FROM files WHERE file NOT IN (SELECT file FROM spans)")
        return [row[0] for row in rows]

    # ---- writing -------------------------------------------------------------------------------------

    @contextmanager
    def transaction(self, *, durable: bool) -> Iterator[None]:
        """All of the block's writes or none. A durable one has reached the disk when the block ends."""
        with self._explained("write"):
            self._db.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
            if self._log_bytes > _LOG_LIMIT:
                self.checkpoint()

    def add(
        self, name: str, identity: str, cipher: str, contents: SessionContents, stored: int, tokens: int
    ) -> int:
        """A new session, not committed yet; its id. Inside a transaction."""
        now = time.time()
        row = self._db.execute(
            "INSERT INTO sessions (name, identity, cipher, stored, token_count, committed, created, last_use, seal) "
            "VALUES (?, ?, ?, 0, 0, 0, ?, ?, x'')",
            (name, identity, cipher, now, now),
        )
        assert row.lastrowid is not None
        self._db.execute("INSERT INTO contents VALUES (?, x'', x'', x'')", (row.lastrowid,))
        self.save(row.lastrowid, contents, stored=stored, tokens=tokens, committed=False)
        return row.lastrowid

    def save(
        self, session: int, contents: SessionContents, *, stored: int, tokens: int, committed: bool = True
    ) -> None:
        """Replaces what a session holds. Inside a transaction."""
        kept = self.spans(session)
        same = next((i for i, (a, b) in enumerate(zip(kept, contents.spans, strict=False)) if a != b), None)
        same = min(len(kept), len(contents.spans)) if same is None else same
        self._db.execute("DELETE FROM spans WHERE session = ? AND ordinal >= ?", (session, same))
        rows = [(session, i, *span) for i, span in enumerate(contents.spans) if i >= same]
        self._db.executemany("INSERT INTO spans VALUES (?, ?, ?, ?, ?, ?)", rows)
        self._db.execute(
            "UPDATE contents SET tokens = ?, tail = ?, state = ? WHERE session = ?",
            (contents.tokens, contents.tail, contents.state, session),
        )
        self._db.execute(
            "UPDATE sessions SET stored = ?, token_count = ?, committed = ?, last_use = ? WHERE id = ?",
            (stored, tokens, committed, time.time(), session),
        )
        entry = self.entry_of(session)
        assert entry is not None
        self._db.execute("UPDATE sessions SET seal = ? WHERE id = ?", (seal(entry, contents), session))

    def restore(self, entry: SessionEntry, contents: SessionContents) -> None:
        """A session as another catalogue had it, under a new number. Inside a transaction."""
        session = self.add(
            entry.name, entry.identity, entry.cipher, contents, entry.stored, entry.token_count
        )
        self.save(session, contents, stored=entry.stored, tokens=entry.token_count)
        self._db.execute(
            "UPDATE sessions SET created = ?, last_use = ? WHERE id = ?",
            (entry.created, entry.last_use, session),
        )

    def skip_ids(self, last: int) -> None:
        """Gives sessions numbers above `last` from now on. Inside a transaction."""
        self._db.execute("DELETE FROM sqlite_sequence WHERE name = 'sessions' AND seq < ?", (last,))
        self._db.execute(
            "INSERT INTO sqlite_sequence SELECT 'sessions', ? WHERE NOT EXISTS "
            "(SELECT 1 FROM sqlite_sequence WHERE name = 'sessions')",
            (last,),
        )

    def touch(self, session: int) -> None:
        """Used just now. Inside a transaction."""
        self._db.execute("UPDATE sessions SET last_use = ? WHERE id = ?", (time.time(), session))

    def remove(self, session: int) -> None:
        """Forgets a session; its files are `unused_files` then, unless others have groups in them. Inside a
        transaction."""
        self._db.execute("DELETE FROM sessions WHERE id = ?", (session,))

    def add_file(self, file: str, owner: int | None, size: int) -> None:
        """A file that a session, or nobody, appends to, or its new size. Inside a transaction."""
        self._db.execute(
            "INSERT INTO files VALUES (?, ?, ?) ON CONFLICT (file) DO UPDATE SET size = excluded.size",
            (file, owner, size),
        )

    def remove_files(self, files: Collection[str]) -> None:
        """Forgets files. Inside a transaction."""
        self._db.executemany("DELETE FROM files WHERE file = ?", [(file,) for file in files])

    def checkpoint(self) -> None:
        """Moves what was committed from the log into the database, as far as no reader is in the way."""
        with self._explained("write"):
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def problems(self) -> list[str]:
        """What SQLite's own check of the database's structure finds."""
        try:
            lines = [row[0] for row in self._db.execute("PRAGMA integrity_check(20)")]
        except sqlite3.Error as error:
            return [str(error)]
        return [] if lines == ["ok"] else lines

    @property
    def compacting_bytes(self) -> int:
        """The most that `compact` takes on its way, beside what there is."""
        return 2 * self.path.stat().st_size

    @property
    def free_bytes(self) -> int:
        """Bytes of pages that hold nothing."""
        ((pages,),) = self._all("PRAGMA freelist_count")
        return pages * 4096

    def compact(self) -> None:
        """Gives the database's unused pages back to the disk, and with them what deleted sessions had in them."""
        with self._explained("write"):
            self._db.execute("VACUUM")
        self.checkpoint()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """What the block writes needs no room on the disk, but who is killed meanwhile leaves a damaged catalogue:
        only for deleting where a full disk leaves no other way.

        Raises:
            TierError: others are connected.
        """
        try:
            with self._explained("write"):
                self._db.execute("PRAGMA busy_timeout = 0")  # they stay connected for as long as they run
                self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
                self._db.execute("PRAGMA journal_mode = MEMORY")
            yield
        finally:
            with self._explained("write"):
                self._db.execute(f"PRAGMA locking_mode = {'EXCLUSIVE' if self._alone else 'NORMAL'}")
                self._db.execute("PRAGMA journal_mode = WAL")
                self._db.execute(f"PRAGMA busy_timeout = {1000 * _PATIENCE_S}")

    def close(self) -> None:
        """Closes the connection; the last one moves the log into the database."""
        with self._explained("close"):
            self._db.close()

    # ---- eviction ------------------------------------------------------------------------------------

    def victims(
        self, nbytes: int, evictable: Callable[[SessionEntry], bool], size: Callable[[str], int]
    ) -> tuple[list[SessionEntry], int]:
        """Past sessions whose end frees `nbytes`, least recently used first, and the bytes it does free.

        Those that free nothing, as others in use have groups in all their files, are not among them. Where all of
        them do not free enough, the bytes are less than `nbytes`.
        """
        free = [entry for entry in self.entries() if evictable(entry)]
        going = {entry.id for entry in free}
        left = Counter(
            {file: len(users) for file in self.files() if (users := set(self.users(file))) <= going}
        )
        chosen, freed = [], 0
        for entry in free:
            if freed >= nbytes:
                break
            files = {span.file for span in self.spans(entry.id)} & left.keys()
            if not files:
                continue
            chosen.append(entry)
            left.subtract(files)
            freed += sum(size(file) for file in files if left[file] == 0)
        return chosen, freed

    # ---- inside --------------------------------------------------------------------------------------

    @property
    def _log_bytes(self) -> int:
        try:
            return Path(f"{self.path}-wal").stat().st_size
        except FileNotFoundError:  # `in_place` there is none
            return 0

    def _entries(self, condition: str, *values: object) -> list[SessionEntry]:
        rows = self._all(
            "SELECT id, name, identity, cipher, stored, token_count, committed, created, last_use FROM sessions "
            + condition,
            *values,
        )
        names = (
            "id",
            "name",
            "identity",
            "cipher",
            "stored",
            "token_count",
            "committed",
            "created",
            "last_use",
        )
        return [SessionEntry(**dict(zip(names, row, strict=True))) for row in rows]

    def _all(self, statement: str, *values: object) -> list[tuple]:
        with self._explained("read"):
            return self._db.execute(statement, values).fetchall()

    @contextmanager
    def _explained(self, verb: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            raise TierError(
                f"cannot {verb} {self.path}: {error}; free some space, check the disk, or choose another --store-dir"
            ) from error
        except sqlite3.DatabaseError as error:
            raise TierError(
                f"cannot {verb} {self.path}: {error}; {repair_advice(self.path.parent)}"
            ) from error
        except OSError as error:
            raise TierError(
                f"cannot {verb} {self.path}: errno {error.errno}, {error.strerror}; choose another --store-dir"
            ) from error
