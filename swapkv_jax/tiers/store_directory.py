"""The directory of a disk store: names, sizes and locks of its files, shared between processes."""

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote, unquote

import numpy as np

from swapkv_jax.errors import TierError, UsageError
from swapkv_jax.tiers.direct_io import PROBE_PREFIX, AlignedFile, DirectSupport, IoCounters, Syscalls
from swapkv_jax.tiers.header import HEADER_BYTES, Header, HeaderError, decode

SESSION_PREFIX = "session:"
"""Sequences named so are parts of sessions: the catalogue says whose, and only it says whether they may go."""

_SUFFIX = ".kv"
_LOCK_SUFFIX = ".lock"
_LONGEST_NAME = 200


class StoreDirectory:
    """One `.kv` file per sequence; each is flock'ed while it is open, and the directory while it changes."""

    def __init__(self, path: str | Path, syscalls: Syscalls) -> None:
        """Make the directory (mode 0700) where it is missing.

        Raises:
            UsageError: it cannot be made or opened.
        """
        self.path = Path(path)
        self._syscalls = syscalls
        self._mutex = threading.RLock()
        self._depth = 0
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise UsageError(
                f"cannot use store directory {self.path}: errno {error.errno}, {error.strerror}; "
                f"choose another --store-dir"
            ) from error

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._descriptor < 0

    @property
    def bytes_used(self) -> int:
        """Real bytes of all files here, leftovers and other processes' included."""
        return sum(entry.stat(follow_symlinks=False).st_blocks * 512 for entry in self._entries())

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keep other threads and processes from creating, growing, opening or deleting files. Reentrant."""
        with self._mutex:
            if self.closed:
                raise TierError(f"the disk store in {self.path} is closed; make a new one")
            if self._depth == 0:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                if self._depth == 0:
                    fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def file(self, sequence: str) -> Path:
        """Where a sequence is stored. Any name works that is short enough once %-encoded.

        Raises:
            UsageError: it is not, or it is empty.
        """
        name = quote(sequence, safe="") + _SUFFIX
        if not sequence or len(name) > _LONGEST_NAME:
            raise UsageError(
                f"sequence name {sequence!r} must have 1 to {_LONGEST_NAME - len(_SUFFIX)} characters "
                f"(%-encoded); choose a shorter one"
            )
        return self.path / name

    def size(self, sequence: str) -> int:
        """Real bytes of one sequence."""
        return self.file(sequence).stat().st_blocks * 512

    def sequences(self) -> list[str]:
        """All stored sequences but the parts of sessions, least recently finished first."""
        entries = [entry for entry in self._entries() if entry.name.endswith(_SUFFIX)]
        entries.sort(key=lambda entry: entry.stat(follow_symlinks=False).st_mtime_ns)
        names = (unquote(entry.name.removesuffix(_SUFFIX)) for entry in entries)
        return [name for name in names if not name.startswith(SESSION_PREFIX)]

    def session_files(self) -> list[str]:
        """All parts of sessions, those that no session has any more included."""
        names = (unquote(e.name.removesuffix(_SUFFIX)) for e in self._entries() if e.name.endswith(_SUFFIX))
        return [name for name in names if name.startswith(SESSION_PREFIX)]

    def lock(self, name: str) -> int | None:
        """Locks a name, which needs no file of its own, for this process alone: a descriptor to `close`, or None
        if somebody has it. Call inside `exclusive`.

        Raises:
            TierError: the lock's file cannot be made.
        """
        path = self.path / (quote(name, safe="") + _LOCK_SUFFIX)
        try:
            descriptor = self._syscalls.open(path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise TierError(
                f"cannot lock {path}: errno {error.errno}, {error.strerror}; free some space, or choose "
                f"another --store-dir"
            ) from error
        if self._syscalls.try_lock(descriptor):
            return descriptor
        self._syscalls.close(descriptor)
        return None

    def unlock(self, descriptor: int) -> None:
        """Gives back what `lock` gave."""
        self._syscalls.close(descriptor)

    def forget_lock(self, name: str) -> None:
        """Removes what `lock` left behind. Call inside `exclusive`, with nobody else holding it."""
        (self.path / (quote(name, safe="") + _LOCK_SUFFIX)).unlink(missing_ok=True)

    def locks(self) -> list[str]:
        """Names that were locked once, and may be."""
        names = (entry.name for entry in self._entries() if entry.name.endswith(_LOCK_SUFFIX))
        return [unquote(name.removesuffix(_LOCK_SUFFIX)) for name in names]

    def forget_locks(self, keep: set[str]) -> None:
        """Removes what `lock` left of other names, unless somebody holds it. Call inside `exclusive`."""
        for name in set(self.locks()) - keep:
            descriptor = self.lock(name)
            if descriptor is not None:
                self.forget_lock(name)
                self.unlock(descriptor)

    def idle(self, sequence: str) -> bool:
        """Whether the file exists and nobody has it open. True stays true inside `exclusive`."""
        try:
            descriptor = self._syscalls.open(self.file(sequence), os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            return self._syscalls.try_lock(descriptor)
        finally:
            self._syscalls.close(descriptor)

    def sweep(self) -> int:
        """Delete ephemeral files whose process is gone. Returns the bytes that frees."""
        before = self.bytes_used
        for entry in self._entries():
            probe = entry.name.startswith(PROBE_PREFIX)
            if probe or (entry.name.endswith(_SUFFIX) and self._abandoned(Path(entry.path))):
                os.unlink(entry.path)
        return before - self.bytes_used

    def read_header(self, path: Path, descriptor: int) -> Header | None:
        """The header of an open file, or None where none was written yet.

        Raises:
            TierError: it cannot be read, or is damaged or foreign.
        """
        head = np.empty(min(HEADER_BYTES, os.fstat(descriptor).st_size), np.uint8)
        whole = DirectSupport(direct=False, alignment=1)
        AlignedFile(path, descriptor, whole, IoCounters(), self._syscalls).read(head, 0)
        try:
            return decode(head.tobytes())
        except HeaderError as error:
            raise TierError(f"{path} {error}") from error

    def sync(self) -> None:
        """Wait until the directory itself is on the disk.

        Raises:
            TierError: the disk says it is not.
        """
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise TierError(
                f"cannot flush {self.path}: errno {error.errno}, {error.strerror}; check the disk"
            ) from error

    def close(self) -> None:
        """Let go of the directory; harmless when repeated."""
        with self._mutex:
            if not self.closed:
                os.close(self._descriptor)
                self._descriptor = -1

    def _abandoned(self, path: Path) -> bool:
        try:
            descriptor = self._syscalls.open(path, os.O_RDWR)
        except OSError:
            return False  # not ours to read, so not ours to delete
        try:
            if not self._syscalls.try_lock(descriptor):
                return False
            header = self.read_header(path, descriptor)
        except TierError:
            return False  # a damaged session is not ours to delete: it counts as past, and `open` explains
        finally:
            self._syscalls.close(descriptor)
        return header is None or header.ephemeral

    def _entries(self) -> list[os.DirEntry[str]]:
        with os.scandir(self.path) as entries:
            return [entry for entry in entries if entry.is_file(follow_symlinks=False)]
