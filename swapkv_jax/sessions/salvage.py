"""A damaged catalogue: what is intact in it goes into a new one, and it is put aside."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from swapkv_jax.errors import TierError
from swapkv_jax.tiers import DiskStore
from swapkv_jax.tiers.catalog import CATALOG_NAME, Catalog, without_advice
from swapkv_jax.tiers.catalog_rows import SessionContents, SessionEntry


@dataclass(frozen=True)
class Salvage:
    """What became of a damaged catalogue.

    Attributes:
      saved: the sessions that are in the new one.
      lost: how many are not, as far as can be told: None if not even that.
      quarantined: where the damaged one is now.
    """

    saved: list[str]
    lost: int | None
    quarantined: Path


def catalog_problems(directory: Path) -> list[str]:
    """What is wrong with the catalogue: its structure, or sessions that are not as they were written."""
    with DiskStore(directory, limit_bytes=None, fingerprint="") as disk, disk.exclusive():
        try:
            disk.sessions.check_catalog()
            catalog = disk.sessions.catalog()
            damaged = [f"session {name!r} is damaged" for name in catalog.damaged_sessions()]
            return [f"{catalog.path}: {problem}" for problem in catalog.problems() + damaged]
        except TierError as error:
            return [without_advice(error, directory)]


def salvageable(directory: Path) -> bool:
    """Whether there is anything in a catalogue, however damaged, that may be saved."""
    path = directory / CATALOG_NAME
    if not path.exists() or not path.stat().st_size:
        return False
    with DiskStore(directory, limit_bytes=None, fingerprint="") as disk, disk.exclusive():
        try:
            return disk.sessions.catalog().last_id() > 0
        except TierError:
            return True


def salvage(directory: Path) -> Salvage:
    """Makes a new catalogue of the sessions that verify. The old one stays, under another name, until somebody
    deletes it. None appends to its files any more: sessions go on in new ones.

    Raises:
      TierError: a session is in use, or there is no room.
    """
    old, new = directory / CATALOG_NAME, directory / f"{CATALOG_NAME}.new"
    with DiskStore(directory, limit_bytes=None, fingerprint="") as disk, disk.exclusive():
        locks = disk.sessions.lock_all()
        if locks is None:
            raise TierError(f"cannot replace {old} while a session is in use; end what uses {directory}")
        try:
            intact, lost = _intact(old)
            new.unlink(missing_ok=True)
            catalog = Catalog(new)
            with catalog.transaction(durable=True):
                for entry, contents in intact:
                    catalog.restore(entry, contents)
                    for span in contents.spans:
                        catalog.add_file(span.file, None, _size(disk.path(span.file)))
                catalog.skip_ids(
                    max(1, len(intact) + (lost or 0))
                )  # it is not a new one, even if it is empty
            catalog.close()
            quarantined = _free_name(old)
            os.link(old, quarantined)
            for suffix in ("-wal", "-shm"):  # SQLite would take them for the new one's
                with suppress(FileNotFoundError):
                    os.rename(f"{old}{suffix}", f"{quarantined}{suffix}")
            os.replace(new, old)
            disk.sync_directory()
        finally:
            for lock in locks:
                disk.sessions.unlock(lock)
    return Salvage([entry.name for entry, _ in intact], lost, quarantined)


def _intact(path: Path) -> tuple[list[tuple[SessionEntry, SessionContents]], int | None]:
    """Committed sessions that verify; and how many do not, None if nobody can tell."""
    try:
        catalog = Catalog(path)
    except TierError:
        return [], None
    intact: list[tuple[SessionEntry, SessionContents]] = []
    lost = 0
    try:
        # One by one: where a page is damaged, only the rows on it cannot be read.
        for session in range(1, catalog.last_id() + 1):
            try:
                entry = catalog.entry_of(session)
                contents = catalog.contents(entry) if entry is not None else None
            except TierError:
                lost += 1
                continue
            if entry is not None and contents is not None and entry.committed:
                intact.append((entry, contents))
    except TierError:
        return [], None  # not even the table can be read
    finally:
        with suppress(TierError):
            catalog.close()
    return intact, lost


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _free_name(path: Path) -> Path:
    names = (path.with_name(f"{path.name}.quarantined-{i}") for i in count(1))
    return next(name for name in names if not name.exists())
