"""Finished parts of an evaluation in a directory, so that one that was interrupted goes on where it was."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import jax
import xxhash
from kept_runs import code_digest

from swapkv_jax import Plan, UsageError
from swapkv_jax.tuner.tables import Tables

_FLAG = "--resume"

Key = Mapping[str, Any]
"""All that a part depends on besides code and JAX."""


class Parts:
    """Values by key in a directory that no other process uses meanwhile; keys and values are what JSON can hold.

    What was computed by another model, plan, prompt or code is never taken.
    """

    def __init__(self, directory: Path):
        """Raises UsageError if the directory cannot be made or written, or is in use."""
        self._directory = directory
        self._tables = Tables(directory, flag=_FLAG)
        self._common = {"code": code_digest(), "jax": jax.__version__}
        self._lock = (directory / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise UsageError(f"another evaluation goes on in {directory}; choose another {_FLAG}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    def part(self, key: Key, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The value that is kept for `key`, else computed and kept. UsageError if it cannot be written."""
        found = self.find(key)
        if found is None:
            found = compute()
            self._tables.keep(key["task"], {**self._common, **key}, found)
        return found

    def find(self, key: Key) -> dict[str, Any] | None:
        """The value that is kept for `key`; None if there is none, or its file is damaged."""
        return self._tables.find(key["task"], {**self._common, **key}, dict)

    @contextlib.contextmanager
    def prefills(self, plan: Plan) -> Iterator[Path]:
        """A directory for prefills captured as by `plan`: an interrupt or error leaves it as it is, else it is
        removed."""
        place = self._directory / "prefills"
        yield place / xxhash.xxh3_64_hexdigest(f"{self._common} {plan.hash}".encode())
        shutil.rmtree(place, ignore_errors=True)
