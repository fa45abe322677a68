"""The disk tier: a directory with one file per sequence, kept under a limit in real bytes."""

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Self

from swapkv_jax.errors import TierError, UsageError
from swapkv_jax.tiers.direct_io import PAGE, IoCounters, IoCounts, Syscalls, probe_direct
from swapkv_jax.tiers.eviction import SequenceOrder
from swapkv_jax.tiers.header import HEADER_BYTES, Header, extent_bytes
from swapkv_jax.tiers.past_sessions import FileCalls, PastSessions
from swapkv_jax.tiers.record import record_stride
from swapkv_jax.tiers.room import Room
from swapkv_jax.tiers.sequence_file import SequenceFile
from swapkv_jax.tiers.store_directory import SESSION_PREFIX, StoreDirectory


def planned_file_bytes(layers: int, groups: int, payload_bytes: int, alignment: int = PAGE) -> int:
    """The most a sequence created with `prompt_groups=groups` takes on disk, filesystem metadata included."""
    extent = extent_bytes(layers, groups, record_stride(payload_bytes, alignment))
    return _with_metadata(HEADER_BYTES + extent)


class DiskStore:
    """Sequences under one directory, for one model.

    A sequence is *active* from `create` or `open` until `finish`, then *past*: evicted, least recently used
    first, when a new one would not fit `limit_bytes`. What counts is the real size of everything in the
    directory, whoever left it. Files in use are locked, so several processes may share a directory.

    Ephemeral sequences go with the store that made them; if it was killed, the next store sweeps them.

    Where the directory has a catalogue of sessions, past ones are evicted too, whole and after all past sequences:
    these can be made again, a conversation cannot.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        limit_bytes: int | None,
        fingerprint: str,
        syscalls: Syscalls | None = None,
        unlinked: bool = False,
    ) -> None:
        """Open or make (mode 0700) `directory`, probe what I/O it takes, sweep what killed processes left.

        `fingerprint` names the model whose KV this is; only its own files are opened. `unlinked` ones lose their
        names as soon as they are made: whatever becomes of this process, nothing is left that anyone could open,
        but nothing outlives `finish` either, and stores of other processes do not count their bytes. Afterwards
        `support.note`, where not None, is a line the user should see, and `reclaimed_bytes` is what the
        sweep freed.

        Raises:
            UsageError: the directory cannot be made or written.
        """
        self.fingerprint = fingerprint
        self._unlinked = unlinked
        self._syscalls = syscalls or Syscalls()
        self._counters = IoCounters()
        self._order = SequenceOrder()
        self._files: dict[str, SequenceFile] = {}
        self._directory = StoreDirectory(directory, self._syscalls)
        files = FileCalls(self.size, self._evictable, self._remove)
        self._room = Room(self._directory, limit_bytes, self._order, files, lambda: self.bytes_used)
        try:
            with self._directory.exclusive():
                self.support = probe_direct(self._directory.path, self._syscalls)
                self.reclaimed_bytes = self._directory.sweep()
                self._room.note_past()
        except BaseException:
            self._directory.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def limit_bytes(self) -> int | None:
        """What everything in the directory may take; None for as much as the disk has."""
        return self._room.limit_bytes

    @limit_bytes.setter
    def limit_bytes(self, limit: int | None) -> None:
        self._room.limit_bytes = limit

    @property
    def sessions(self) -> PastSessions:
        """The sessions in the directory. For use inside `exclusive`."""
        return self._room.sessions

    @property
    def syscalls(self) -> Syscalls:
        """What its files are read and written through."""
        return self._syscalls

    @property
    def directory(self) -> Path:
        """Where the files are."""
        return self._directory.path

    def path(self, sequence: str) -> Path:
        """Where a sequence is stored, or would be."""
        return self._directory.file(sequence)

    @property
    def bytes_used(self) -> int:
        """Real bytes of all files in the directory, leftovers and other processes' included."""
        unlinked = self._files.values() if self._unlinked else ()
        return self._directory.bytes_used + sum(
            os.fstat(file.descriptor).st_blocks * 512 for file in unlinked
        )

    @property
    def direct(self) -> bool:
        """Whether records go past the page cache."""
        return self.support.direct

    @property
    def counts(self) -> IoCounts:
        """Records moved so far, by all sequences of this store."""
        return self._counters.snapshot()

    @property
    def active(self) -> tuple[str, ...]:
        """Sequences in use here."""
        return self._order.active

    @property
    def past(self) -> tuple[str, ...]:
        """Other sequences in the directory, next victim first; sessions are not among them."""
        return self._order.past

    def __contains__(self, sequence: str) -> bool:
        return sequence in self._files or self._directory.file(sequence).exists()

    def create(
        self,
        sequence: str,
        *,
        layers: int,
        group_tokens: int,
        payload_bytes: int,
        prompt_groups: int,
        max_groups: int | None = None,
        alignment: int | None = None,
        meta: Mapping[str, Any] | None = None,
        ephemeral: bool = True,
        shared: bool = False,
    ) -> SequenceFile:
        """A new, active sequence with room for `prompt_groups` groups of `group_tokens` tokens in each layer.

        `payload_bytes` is K and V of one group of one layer. `max_groups` caps later growth. Records are
        aligned to what the filesystem takes unless `alignment` fixes it, as a plan made ahead of any disk
        does. `meta` (JSON values) is kept in the header for the caller. A `shared` one may be opened by others who
        share it, and only read, at the same time.

        Raises:
            UsageError: `alignment` is too fine for O_DIRECT here.
            TierError: the name is taken, or neither disk nor limit has room; nothing is left behind.
            ValueError: a size that is not positive, or more `meta` than the header has room for.
        """
        if min(layers, group_tokens, payload_bytes) <= 0 or prompt_groups < 0:
            raise ValueError(
                f"cannot store {layers} layers of {prompt_groups} groups of {payload_bytes} bytes"
            )
        finest = self.support.alignment
        alignment = alignment or finest
        if self.support.direct and alignment % finest:
            raise UsageError(
                f"records aligned to {alignment} bytes cannot be read past the page cache in "
                f"{self.directory}; align them to {finest}"
            )
        header = Header(
            sequence=sequence,
            fingerprint=self.fingerprint,
            ephemeral=ephemeral,
            layers=layers,
            group_tokens=group_tokens,
            payload_bytes=payload_bytes,
            stride=record_stride(payload_bytes, alignment),
            alignment=alignment,
            nonce=secrets.randbits(64) | 1,  # never 0, which an unwritten record has
            max_groups=max_groups,
            meta=dict(meta or {}),
        )
        path = self._directory.file(sequence)
        with self._directory.exclusive():
            if path.exists() or sequence in self._files:
                raise TierError(
                    f"sequence {sequence!r} is already stored in {path}; open it or delete it first"
                )
            try:
                descriptor = self._syscalls.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            except OSError as error:
                raise _cannot("create", path, error) from error
            self._order.activate(sequence)
            try:
                self._syscalls.try_lock(descriptor, shared=shared)
                file = self._attach(path, header, descriptor)
                file.initialise(prompt_groups)
                if self._unlinked:
                    path.unlink()
            except BaseException:
                self._detach(sequence, descriptor)
                path.unlink(missing_ok=True)
                self._order.discard(sequence)
                raise
            return file

    def open(
        self,
        sequence: str,
        *,
        layers: int | None = None,
        group_tokens: int | None = None,
        payload_bytes: int | None = None,
        shared: bool = False,
    ) -> SequenceFile:
        """A stored sequence, active again. Sizes that are given must be the file's; `shared` is as in `create`.

        Raises:
            TierError: missing, in use elsewhere, damaged, truncated, or of another format, model or size.
        """
        path = self._directory.file(sequence)
        expected = {
            "fingerprint": self.fingerprint,
            "sequence": sequence,
            "layers": layers,
            "group_tokens": group_tokens,
            "payload_bytes": payload_bytes,
        }
        with self._directory.exclusive():
            if sequence in self._files:
                _check(path, self._files[sequence].header, expected)
                self._order.activate(sequence)
                return self._files[sequence]
            try:
                descriptor = self._syscalls.open(path, os.O_RDWR)
            except OSError as error:
                raise _cannot("open", path, error) from error
            try:
                if not self._syscalls.try_lock(descriptor, shared=shared):
                    raise TierError(
                        f"{path} is in use by another process; wait for it or use another sequence"
                    )
                header = self._directory.read_header(path, descriptor)
                if header is None:
                    raise TierError(f"{path} is empty; delete it, its sequence must be prefilled again")
                _check(path, header, expected)
                size = os.fstat(descriptor).st_size
                if size < header.end:
                    raise TierError(
                        f"{path} is truncated: {size} bytes, {header.end - size} short; delete it, its "
                        f"sequence must be prefilled again"
                    )
                file = self._attach(path, header, descriptor)
            except BaseException:
                self._detach(sequence, descriptor)
                raise
            self._order.activate(sequence)
            return file

    def finish(self, sequence: str) -> None:
        """Make a sequence past: it stays until the room is needed. Named ones are closed and unlocked.

        Raises:
            TierError: it is not open here.
        """
        with self._directory.exclusive():
            if sequence not in self._files:
                raise TierError(f"sequence {sequence!r} is not open in {self.directory}")
            file = self._files[sequence]
            if self._unlinked:
                self._remove(sequence)
                return
            if sequence.startswith(SESSION_PREFIX):
                self._order.discard(sequence)  # it is the catalogue that orders sessions
            else:
                os.utime(file.path)  # "least recently used" has to outlive the process
                self._order.finish(sequence)
            if not file.header.ephemeral:
                self._files.pop(sequence).close()

    def delete(self, sequence: str) -> None:
        """Remove a sequence, open here or not.

        Raises:
            TierError: missing, or in use by another process.
        """
        path = self._directory.file(sequence)
        with self._directory.exclusive():
            if not path.exists() and sequence not in self._files:
                raise TierError(f"no sequence {sequence!r} is stored in {self.directory}")
            if not self._evictable(sequence):
                raise TierError(f"{path} is in use by another process; wait for it to finish")
            self._remove(sequence)

    def close(self) -> None:
        """Close every sequence and delete the ephemeral ones; harmless when repeated."""
        if self._directory.closed:
            return
        try:
            with self._directory.exclusive():
                for file in list(self._files.values()):
                    if file.header.ephemeral:
                        self._remove(file.sequence)
                    else:
                        self._files.pop(file.sequence).close()
                self.sessions.close()
        finally:
            self._directory.close()

    # ---- sessions ------------------------------------------------------------------------------------

    def exclusive(self) -> AbstractContextManager[None]:
        """Keep other threads and processes from changing anything in the directory. Reentrant."""
        return self._directory.exclusive()

    @contextmanager
    def room(self, nbytes: int) -> Iterator[None]:
        """`exclusive`, with room for `nbytes` more of any file.

        Raises:
            TierError: the limit leaves no room.
        """
        with self._directory.exclusive():
            self._room.make(nbytes)
            yield

    @property
    def evicted_sessions(self) -> list[str]:
        """Names of sessions that had to go for others; whoever tells the user empties it."""
        return self._room.evicted

    def sync_directory(self) -> None:
        """Wait until the names of new files are on the disk.

        Raises:
            TierError: the disk says they are not.
        """
        self._directory.sync()

    def idle(self, sequence: str) -> bool:
        """Whether a sequence's file exists and nobody has it open. True stays true inside `exclusive`."""
        return self._directory.idle(sequence)

    def size(self, sequence: str) -> int:
        """Real bytes of a sequence's file in the directory; 0 if there is none."""
        return self._directory.size(sequence) if self.path(sequence).exists() else 0

    def shrink(self, nbytes: int) -> list[str]:
        """Evict past sequences and sessions until everything takes `nbytes`. Returns the sessions' names.

        Raises:
            TierError: that is not enough; what could be evicted is.
        """
        with self._directory.exclusive():
            return self._room.shrink(nbytes)

    def _evictable(self, sequence: str) -> bool:
        return sequence in self._files or sequence not in self or self._directory.idle(sequence)

    def _remove(self, sequence: str) -> None:
        if sequence in self._files:
            self._files.pop(sequence).close()
        self._directory.file(sequence).unlink(missing_ok=True)
        self._order.discard(sequence)

    def _attach(self, path: Path, header: Header, descriptor: int) -> SequenceFile:
        @contextmanager
        def room(nbytes: int) -> Iterator[None]:
            with self._directory.exclusive():
                self._room.make(
                    _with_metadata(nbytes), keep=header.sequence, evict_sessions=not header.ephemeral
                )
                yield

        try:
            file = SequenceFile(path, header, descriptor, self.support, self._counters, self._syscalls, room)
        except OSError as error:
            raise _cannot("open", path, error) from error
        self._files[header.sequence] = file
        return file

    def _detach(self, sequence: str, descriptor: int) -> None:
        """Undo a half-done create or open."""
        if sequence in self._files:
            self._files.pop(sequence).close()
        else:
            self._syscalls.close(descriptor)


def _with_metadata(nbytes: int) -> int:
    """`nbytes` and what the filesystem takes to index them (ext4: 12 bytes per fragment)."""
    return nbytes + nbytes // 512 + 4 * PAGE


def _check(path: Path, header: Header, expected: Mapping[str, object]) -> None:
    for name, value in expected.items():
        stored = getattr(header, name)
        if value is not None and stored != value:
            raise TierError(
                f"{path} was stored with {name} {stored!r}, not {value!r}; use what it was stored with, or "
                f"delete it"
            )


def _cannot(verb: str, path: Path, error: OSError) -> TierError:
    if isinstance(error, FileNotFoundError):
        remedy = "it was evicted or never stored: prefill its sequence again"
    else:
        remedy = "free some space, or choose another --store-dir"
    return TierError(f"cannot {verb} {path}: errno {error.errno}, {error.strerror}; {remedy}")
