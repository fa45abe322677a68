"""What is left of a session whose files are not what they were."""

from __future__ import annotations

from swapkv_jax.sessions.files import SessionFiles, count
from swapkv_jax.sessions.layout import SESSION_GROUP
from swapkv_jax.tiers import DiskStore
from swapkv_jax.tiers.catalog_rows import SessionContents, SessionEntry


def shorten_lost(disk: DiskStore, files: SessionFiles, entry: SessionEntry) -> tuple[SessionEntry, list[str]]:
    """Where a file of a locked session is missing or truncated, leaves it the keys and values before that file.

    The token ids are all kept: the rest can be computed again. Returns the session as it is now, and what the user
    should know. Inside `exclusive`.

    Raises:
      TierError: the catalogue is damaged.
    """
    catalog = disk.sessions.catalog()
    sizes, spans = catalog.files(), catalog.spans(entry.id)
    for i, span in enumerate(spans):
        why = files.lost(span.file, sizes.get(span.file, 0))
        if why is None:
            continue
        contents = catalog.contents(entry)
        stored = count(spans[:i]) * SESSION_GROUP
        shorter = SessionContents(
            tokens=contents.tokens,
            tail=files.seal_value(b"", entry.name, "tail", stored),
            state=contents.state,
            spans=spans[:i],
        )
        with disk.room(shorter.growth), catalog.transaction(durable=False):
            catalog.save(
                entry.id, shorter, stored=stored, tokens=entry.token_count, committed=entry.committed
            )
        note = (
            f"session {entry.name!r} has lost the keys and values after token {stored} of {entry.token_count}, which "
            f"are computed again: {why}"
        )
        shortened = catalog.entry(entry.name)
        assert shortened is not None
        return shortened, [note]
    return entry, []
