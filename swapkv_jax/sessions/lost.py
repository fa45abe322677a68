"""What is left of a session whose files are not what they were."""

from __future__ import annotations

from swapkv_jax.sessions.files import SessionFiles, clip, count
from swapkv_jax.sessions.layout import SESSION_GROUP
from swapkv_jax.tiers import DiskStore
from swapkv_jax.tiers.catalog_rows import SessionContents, SessionEntry


def shorten_lost(disk: DiskStore, files: SessionFiles, entry: SessionEntry) -> tuple[SessionEntry, list[str]]:
    """Where a file of a locked session is missing or truncated, leaves it the keys and values before that file.

    Returns the session as it is now, and what the user should know. Inside `exclusive`.

    Raises:
      TierError: the catalogue is damaged.
    """
    catalog = disk.sessions.catalog()
    sizes, spans = catalog.files(), catalog.spans(entry.id)
    for i, span in enumerate(spans):
        why = files.lost(span.file, sizes.get(span.file, 0))
        if why is not None:
            shorter = shorten(disk, files, entry, catalog.contents(entry), count(spans[:i]))
            note = (
                f"session {entry.name!r} has lost the keys and values after token {shorter.stored} of "
                f"{entry.token_count}, which are computed again: {why}"
            )
            return shorter, [note]
    return entry, []


def shorten(
    disk: DiskStore, files: SessionFiles, entry: SessionEntry, contents: SessionContents, groups: int
) -> SessionEntry:
    """Leaves a locked session the keys and values of its first groups, and all its token ids: the rest can be
    computed again. Inside `exclusive`."""
    catalog, stored = disk.sessions.catalog(), groups * SESSION_GROUP
    shorter = SessionContents(
        tokens=contents.tokens,
        tail=files.seal_value(b"", entry.name, "tail", stored),
        state=contents.state,
        spans=clip(contents.spans, groups),
    )
    with disk.room(shorter.growth), catalog.transaction(durable=False):
        catalog.save(entry.id, shorter, stored=stored, tokens=entry.token_count, committed=entry.committed)
    disk.sessions.delete_unused()
    shortened = catalog.entry(entry.name)
    assert shortened is not None
    return shortened
