"""Finished parts of an evaluation in a directory, so that one that was interrupted goes on where it was."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import jax
import xxhash

import swapkv_jax
from swapkv_jax import TierError, UsageError

Key = Mapping[str, Any]
"""All that a part's value depends on, besides code and JAX, as JSON."""


class Parts:
    """Values by key in a directory that no other process uses meanwhile. Values are what JSON can hold.

    A key is kept beside its value, with a digest of this package's code and the version of JAX: what was computed by
    another model, plan, prompt or code is never taken.
    """

    def __init__(self, directory: Path):
        """Raises UsageError if the directory cannot be made, or is in use."""
        self._directory = directory
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = (directory / "lock").open("w")
        except OSError as error:
            raise UsageError(f"cannot write {directory}: {error.strerror}; choose another --resume") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise UsageError(f"another evaluation goes on in {directory}; choose another --resume") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    def part(self, key: Key, compute: Callable[[], Any]) -> Any:
        """The value that is kept for `key`, else computed and kept.

        Raises:
          TierError: a part cannot be written, or is damaged.
        """
        found = self.find(key)
        if found is None:
            found = compute()
            self._keep(key, found)
        return found

    def find(self, key: Key) -> Any | None:
        """The value that is kept for `key`, None if there is none. TierError if it is damaged."""
        path, whole = self._place(key)
        try:
            kept = json.loads(path.read_bytes())
            return kept["value"] if kept["key"] == whole else None
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TierError(
                f"{path} cannot be read ({error}); delete it to compute that part again"
            ) from None

    @contextlib.contextmanager
    def prefills(self) -> Iterator[Path]:
        """A directory for captured prefills, which is left as it is by an interrupt or error, and else removed."""
        place = self._directory / "prefills"
        yield place
        shutil.rmtree(place, ignore_errors=True)

    def _keep(self, key: Key, value: Any) -> None:
        path, whole = self._place(key)
        unfinished = path.with_suffix(".new")
        try:
            with unfinished.open("w") as file:
                json.dump({"key": whole, "value": value}, file)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(path)
        except OSError as error:
            raise TierError(
                f"cannot write {path}: {error.strerror} (errno {error.errno}); make room, or choose another --resume"
            ) from error

    def _place(self, key: Key) -> tuple[Path, dict[str, Any]]:
        """A part's file and its whole key, as JSON gives it back."""
        whole = json.loads(json.dumps({"code": _code_digest(), "jax": jax.__version__, **key}))
        name = xxhash.xxh3_128_hexdigest(json.dumps(whole, sort_keys=True).encode())
        return self._directory / f"{name}.json", whole


@functools.cache
def _code_digest() -> str:
    """Over every module of the package: changed code may answer otherwise."""
    digest = xxhash.xxh3_128()
    kernels = importlib.import_module("swapkv_jax.kernels")  # in a checkout not below the package's directory
    for place in map(Path, [*swapkv_jax.__path__, *kernels.__path__]):
        for path in sorted(place.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()
