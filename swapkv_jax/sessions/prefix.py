"""What a new session can start from: the longest beginning of its prompt that any session has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from swapkv_jax.errors import TierError
from swapkv_jax.sessions.contents import common_prefix, token_ids
from swapkv_jax.sessions.files import SessionFiles, clip, count
from swapkv_jax.sessions.identity import Identity
from swapkv_jax.sessions.layout import SESSION_GROUP
from swapkv_jax.tiers.catalog import Catalog
from swapkv_jax.tiers.catalog_rows import SessionEntry, Span


def shared_prefix(
    catalog: Catalog, files: SessionFiles, identity: Identity, tokens: Sequence[int], notes: list[str]
) -> tuple[np.ndarray, tuple[Span, ...]]:
    """The first ids of `tokens` (int32, whole groups of them) whose keys and values are stored, and where.

    Token ids decide, those of every session of this identity and key. `notes` is told what could not be looked at,
    and if nothing was found.
    """
    wanted = np.array(tokens, "<i4")
    best: tuple[Span, ...] = ()
    passed_over: Counter[str] = Counter()
    sizes = catalog.files()
    for entry in catalog.entries():
        if not entry.committed:
            continue
        if entry.identity != identity.to_json():
            passed_over["of another model"] += 1
        elif entry.cipher != files.cipher.name:
            passed_over["with another key"] += 1
        else:
            try:
                spans = _common(catalog, files, entry, wanted, sizes, count(best))
            except TierError as error:
                notes.append(f"nothing was shared from a session: {error}")
                continue
            best = max(best, spans, key=count)
    if not best and len(wanted) >= SESSION_GROUP:
        others = ", ".join(f"{number} {why}" for why, number in passed_over.items())
        notes.append(
            f"no stored session begins with the prompt's first {SESSION_GROUP} tokens"
            + (f" (not looked at: {others})" if others else "")
        )
    return wanted[: count(best) * SESSION_GROUP], best


def _common(
    catalog: Catalog,
    files: SessionFiles,
    entry: SessionEntry,
    wanted: np.ndarray,
    sizes: dict[str, int],
    least: int,
) -> tuple[Span, ...]:
    """Where the groups that a session begins with as `wanted` does are, up to the first file that is lost: if there
    are more than `least`."""
    data = catalog.tokens(entry)
    theirs = token_ids(files.open_value(data, entry.name, "tokens", entry.token_count))
    groups = min(common_prefix(wanted, theirs), entry.stored) // SESSION_GROUP
    if groups <= least:
        return ()
    contents = catalog.contents(entry)  # verified: all of it is read only where it promises something
    spans = clip(contents.spans, groups)
    lost = [i for i, span in enumerate(spans) if files.lost(span.file, sizes.get(span.file, 0))]
    return spans[: lost[0]] if lost else spans
