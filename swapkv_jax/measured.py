"""Measurements kept in the user's cache, each for as long as it is true: of one device, for thirty days."""

from __future__ import annotations

import os
import platform
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
import xxhash

from swapkv_jax.errors import TierError
from swapkv_jax.store_paths import cache_home

MAX_AGE = timedelta(days=30)


class Measured(Protocol):
    """What was measured of the device that `identity` names, at the time `measured` (ISO 8601, UTC)."""

    @property
    def identity(self) -> str: ...

    @property
    def measured(self) -> str: ...


M = TypeVar("M", bound=Measured)


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: int
    checksum: str
    content: msgspec.Raw


_VERSION = 1


def host_name() -> str:
    """A name of this machine that outlives a reboot."""
    return platform.node() or "unknown"


def now() -> str:
    """The time, as records keep it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def record_path(kind: str, key: str) -> Path:
    """Where a record of this kind (a word) and key (any text, such as a mount point) is kept for this machine."""
    digest = xxhash.xxh3_64_hexdigest(f"{host_name()}\0{key}".encode())
    return cache_home() / "swapkv_jax" / "rates" / f"{kind}-{digest}.json"


def load(path: Path, kind: type[M], identity: str) -> tuple[M | None, str]:
    """The record in `path` if it may be used, else None; and why not, in a few words.

    It may not where it is damaged, of another device than `identity`, older than `MAX_AGE`, or from the future.
    """
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_File)
        if file.version != _VERSION or file.checksum != _checksum(bytes(file.content)):
            return None, f"{path} is damaged or of another version"
        record = msgspec.json.decode(file.content, type=kind)
        age = datetime.now(UTC) - datetime.fromisoformat(record.measured)
    except FileNotFoundError:
        return None, "not measured yet"
    except OSError as error:
        return None, f"{path} cannot be read ({error.strerror})"
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError, TypeError) as error:
        return None, f"{path} is damaged ({error})"
    if record.identity != identity:
        return None, f"measured on another device ({record.identity}; this is {identity})"
    if not -timedelta(days=1) < age < MAX_AGE:
        return None, f"measured {record.measured[:10]}, not within the last {MAX_AGE.days} days"
    return record, ""


def save(path: Path, record: Measured) -> None:
    """Keeps the record, in place of one that may be there.

    Raises:
      TierError: the cache cannot be written.
    """
    content = msgspec.json.encode(record)
    file = _File(version=_VERSION, checksum=_checksum(content), content=msgspec.Raw(content))
    new = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            new.write_bytes(msgspec.json.encode(file) + b"\n")
            os.replace(new, path)
        finally:
            new.unlink(missing_ok=True)
    except OSError as error:
        raise TierError(
            f"cannot keep measurements in {path.parent} (errno {error.errno}, {error.strerror}); make it writable, "
            "or set XDG_CACHE_HOME to a writable directory"
        ) from error


def _checksum(content: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(content)
