"""Places that tools write to, looked at before the work and not after it."""

from __future__ import annotations

import os
from pathlib import Path

from swapkv_jax import UsageError


def check_json(path: Path, flag: str = "--json") -> None:
    """Raises UsageError if a report could not be written at `path`, the value of `flag`."""
    if not os.access(path.parent, os.W_OK) or path.is_dir():
        raise UsageError(f"cannot write {path}; give {flag} a file in a directory that is writable")


def make_directory(directory: Path, flag: str) -> None:
    """Makes it, with its parents, unless it is there. Raises UsageError, which names the `flag` that chose it."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make {directory}: {error.strerror}; choose another {flag}") from None
