"""The sessions in a store's directory, as far as the store must know them: who uses them, what their end frees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from swapkv_jax.errors import TierError
from swapkv_jax.tiers.catalog import CATALOG_NAME, Catalog, repair_advice, was_full
from swapkv_jax.tiers.catalog_rows import SessionEntry
from swapkv_jax.tiers.store_directory import SESSION_PREFIX, StoreDirectory

RESERVE_BYTES = 256 << 10
"""Kept free under a limit wherever there is a catalogue: opening it and deleting from it must never have to wait."""


@dataclass(frozen=True)
class FileCalls:
    """What the store does with one file of a session, by its name."""

    size: Callable[[str], int]
    evictable: Callable[[str], bool]
    remove: Callable[[str], None]


class PastSessions:
    """The catalogue, once somebody needs it, and its sessions' locks. For use inside the directory's `exclusive`."""

    def __init__(self, directory: StoreDirectory, files: FileCalls, make_room: Callable[[int], None]) -> None:
        self._directory, self._files, self._make_room = directory, files, make_room
        self._catalog: Catalog | None = None

    @property
    def exist(self) -> bool:
        """Whether the directory has a catalogue."""
        return self._path.exists()

    @property
    def bytes_to_keep_free(self) -> int:
        """Bytes under a limit that only the catalogue may take."""
        return RESERVE_BYTES + self._log_bytes if self.exist else 0

    def catalog(self) -> Catalog:
        """The catalogue, made where it is missing.

        Raises:
            TierError: it is damaged, or there is no room for it.
        """
        if self._catalog is None:
            if not self.exist:
                self._make_room(RESERVE_BYTES)
            self._catalog = Catalog(self._path)
        return self._catalog

    def lock(self, entry: SessionEntry) -> int | None:
        """Keeps everybody else from using a session: what `unlock` takes, or None if somebody uses it.

        Raises:
            TierError: the lock cannot be made.
        """
        return self._directory.lock(_lock_name(entry.id))

    def unlock(self, lock: int) -> None:
        """Ends what `lock` began."""
        self._directory.unlock(lock)

    def lock_all(self) -> list[int] | None:
        """Keeps everybody from using any session: what `unlock` takes, or None if somebody uses one."""
        locks: list[int] = []
        for name in self._directory.locks():
            lock = self._directory.lock(name)
            if lock is None:
                for held in locks:
                    self.unlock(held)
                return None
            locks.append(lock)
        return locks

    def idle(self, entry: SessionEntry) -> bool:
        """Whether nobody has the session open."""
        lock = self.lock(entry)
        if lock is None:
            return False
        self.unlock(lock)
        return True

    def victims(self, nbytes: int) -> tuple[list[SessionEntry], int]:
        """See `Catalog.victims`."""
        return self.catalog().victims(nbytes, self.idle, self._files.size)

    def forget(self, entry: SessionEntry) -> int:
        """Deletes a session that nobody uses, and what of its files no other has. Returns the bytes that frees."""
        catalog, freed = self.catalog(), 0
        try:
            self._remove_row(entry)
        except TierError as error:
            if not was_full(error):
                raise
            if freed := self._remove_files(entry):
                self._remove_row(entry)
            else:
                with catalog.in_place():
                    self._remove_row(entry)
        catalog.checkpoint()
        self._directory.forget_lock(_lock_name(entry.id))
        return freed + self.delete_unused()

    def delete_unused(self) -> int:
        """Deletes the files in the catalogue that no session has groups in. Returns the bytes that frees."""
        catalog, freed = self.catalog(), 0
        unused = [file for file in catalog.unused_files() if self._files.evictable(file)]
        for file in unused:
            freed += self._files.size(file)
            self._files.remove(file)
        if unused:
            with catalog.transaction(durable=False):
                catalog.remove_files(unused)
        return freed

    def check_catalog(self) -> list[str]:
        """The parts of sessions that lie here, if there is a catalogue that may say whose they are.

        Raises:
            TierError: it is missing or empty though there are some, or cannot be read.
        """
        files = self._directory.session_files()
        lost = files and ("missing" if not self.exist else "empty" if self.catalog().last_id() == 0 else None)
        if lost:
            raise TierError(
                f"{self._path} is {lost}, so nobody can tell whose {len(files)} files "
                f"beside it are; put it back, or delete them"
            )
        return files

    def strangers(self) -> list[str]:
        """Parts of sessions that the catalogue does not know, and nobody has open: what `sweep` deletes."""
        known = self.catalog().files()
        return [f for f in self._directory.session_files() if f not in known and self._files.evictable(f)]

    def sweep(self) -> tuple[int, str | None]:
        """Deletes what killed processes left: sessions never committed, files that are no session's, locks of
        sessions that are gone. Returns the bytes that frees, and why nothing was deleted though something seems left.

        Raises:
            TierError: the catalogue cannot be read, or is missing.
        """
        self.check_catalog()
        catalog, freed = self.catalog(), 0
        abandoned = [entry for entry in catalog.entries() if not entry.committed and self.idle(entry)]
        orphans = self.strangers()
        unused = catalog.unused_files()
        if (abandoned or orphans or unused) and (damaged := catalog.problems() + catalog.damaged_sessions()):
            # What does not seem to be anybody's may well be somebody's.
            advice = repair_advice(self._directory.path)
            return 0, f"{self._path} is damaged ({damaged[0]}), so nothing was cleared away; {advice}"
        for entry in abandoned:
            freed += self.forget(entry)
        freed += self.delete_unused()
        for file in orphans:
            freed += self._files.size(file)
            self._files.remove(file)
        self._directory.forget_locks({_lock_name(entry.id) for entry in catalog.entries()})
        return freed, None

    def close(self) -> None:
        """Closes the catalogue; harmless when repeated."""
        if self._catalog is not None:
            self._catalog.close()
            self._catalog = None

    def _remove_row(self, entry: SessionEntry) -> None:
        catalog = self.catalog()
        with catalog.transaction(durable=False):
            catalog.remove(entry.id)

    def _remove_files(self, entry: SessionEntry) -> int:
        """Deletes the files that only this session has, ahead of its row: the room that removing that takes."""
        catalog, freed = self.catalog(), 0
        for file in {span.file for span in catalog.spans(entry.id)}:
            if catalog.users(file) == [entry.id] and self._files.evictable(file):
                freed += self._files.size(file)
                self._files.remove(file)
        return freed

    @property
    def _path(self) -> Path:
        return self._directory.path / CATALOG_NAME

    @property
    def _log_bytes(self) -> int:
        """What was committed to the log and may yet be added to the database, before the log is emptied."""
        try:
            return Path(f"{self._path}-wal").stat().st_size
        except FileNotFoundError:
            return 0


def _lock_name(session: int) -> str:
    return f"{SESSION_PREFIX}{session}"
