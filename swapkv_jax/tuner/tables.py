"""Measurements of the tuner by what they depend on, kept on disk so that what was interrupted goes on."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import xxhash

from swapkv_jax.errors import UsageError

T = TypeVar("T")


class _Entry(msgspec.Struct, frozen=True, kw_only=True):
    key: msgspec.Raw
    value: msgspec.Raw
    checksum: str


class Tables:
    """One JSON file per measurement in `directory`, which is made if it is missing. `fresh` forgets what is there;
    `flag` is how the directory was chosen."""

    def __init__(self, directory: Path, *, fresh: bool = False, flag: str = "--tables"):
        """Raises UsageError: the directory cannot be made or written."""
        self._directory, self._fresh, self._flag = directory, fresh, flag
        self._seen: dict[Path, Any] = {}
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot make {directory}: {error.strerror}; choose another {flag}") from None
        if not os.access(directory, os.W_OK):
            raise UsageError(f"cannot write in {directory}; choose another {flag}")

    def find(self, kind: str, key: Any, type: type[T]) -> T | None:
        """What was measured under `key` (anything msgspec writes), None if nothing was or its file is damaged."""
        path = self._path(kind, key)
        if path in self._seen:
            return self._seen[path]
        if self._fresh:
            return None
        try:
            entry = msgspec.json.decode(path.read_bytes(), type=_Entry)
            if bytes(entry.key) != msgspec.json.encode(key) or entry.checksum != _checksum(entry.value):
                return None
            value = msgspec.json.decode(entry.value, type=type)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            return None  # it is measured again, which is all that can be done
        self._seen[path] = value
        return value

    def keep(self, kind: str, key: Any, value: Any) -> None:
        """Keeps a measurement. UsageError: it cannot be written."""
        path, content = self._path(kind, key), msgspec.Raw(msgspec.json.encode(value))
        self._seen[path] = value
        entry = _Entry(key=msgspec.Raw(msgspec.json.encode(key)), value=content, checksum=_checksum(content))
        new = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
        try:
            path.parent.mkdir(exist_ok=True)
            new.write_bytes(msgspec.json.encode(entry))
            os.replace(new, path)
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}; choose another {self._flag}") from None

    def _path(self, kind: str, key: Any) -> Path:
        digest = xxhash.xxh3_128_hexdigest(msgspec.json.encode(key))
        return self._directory / kind / f"{digest}.json"


def _checksum(content: msgspec.Raw) -> str:
    return xxhash.xxh3_64_hexdigest(bytes(content))
