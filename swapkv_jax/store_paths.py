"""Where things are kept for the user when no place is named."""

from __future__ import annotations

import os
from pathlib import Path


def cache_home() -> Path:
    """The user's cache directory (XDG base directory specification)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()


def default_store_dir() -> Path:
    """Directory of the disk store."""
    return cache_home() / "swapkv_jax" / "store"
