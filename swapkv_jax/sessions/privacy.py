"""Who may see what is stored: conversations can be read out of keys and values, so only their owner."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from swapkv_jax.errors import UsageError


def check_private(directory: Path) -> None:
    """Refuses a store that is not this user's alone.

    Raises:
      UsageError: it belongs to somebody else, or others may look into it.
    """
    try:
        status = directory.stat()
    except FileNotFoundError:
        return  # it will be made, for this user alone
    if status.st_uid != os.geteuid():
        raise UsageError(
            f"store directory {directory} belongs to user {status.st_uid}, not to {os.geteuid()} who would store "
            f"conversations in it; choose another --store-dir"
        )
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise UsageError(
            f"store directory {directory} is open to other users (mode {mode:o}); chmod 700 {directory}, or choose "
            f"another --store-dir"
        )
