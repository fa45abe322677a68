"""Every checksum of a store's sessions: what is damaged, and what is left when it is cut off."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from swapkv_jax.errors import TierError, UsageError
from swapkv_jax.sessions.cipher import Cipher, Plain
from swapkv_jax.sessions.files import SessionFiles, count
from swapkv_jax.sessions.identity import Identity
from swapkv_jax.sessions.layout import SESSION_GROUP, Layout
from swapkv_jax.sessions.lost import shorten
from swapkv_jax.tiers import DiskStore, SequenceFile, Syscalls
from swapkv_jax.tiers.catalog import without_advice
from swapkv_jax.tiers.catalog_rows import SessionContents, SessionEntry
from swapkv_jax.tiers.header import HEADER_BYTES, damaged_copies, readable

_PIECE_BYTES = 2 << 20


@dataclass(frozen=True)
class Finding:
    """Something that is not as it was written. `repaired` says what was done about it, if anything was."""

    session: str
    problem: str
    repaired: str | None = None


@dataclass
class Verification:
    """What was looked at. `skipped` are sessions that could not be, with the reason."""

    sessions: int = 0
    records: int = 0
    findings: list[Finding] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def intact(self) -> bool:
        """Whether nothing is wrong any more."""
        return all(finding.repaired for finding in self.findings)


def verify(
    directory: Path,
    *,
    names: list[str] | None = None,
    repair: bool = False,
    cipher: Cipher | None = None,
    syscalls: Syscalls | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Verification:
    """Reads back all that sessions hold, of whatever model: their rows, their files' headers, their records.

    Where `repair` is set, a damaged header is written anew from its other copy, and a session with damaged records
    keeps the keys and values before them and all its token ids, so that the rest is computed again. Sessions that
    somebody has open are skipped, and so are those of another key.

    Args:
      names: of the sessions to look at (default: all).
      progress: called with a session's name, the layers that are done, and in all.

    Raises:
      UsageError: there is no session of a name.
      TierError: the catalogue cannot be read: see `salvage`.
    """
    result, cipher = Verification(), cipher or Plain()
    with DiskStore(directory, limit_bytes=None, fingerprint="", syscalls=syscalls) as disk:
        with disk.exclusive():
            entries = {entry.name: entry for entry in disk.sessions.catalog().entries() if entry.committed}
    for name in names or ():
        if name not in entries:
            raise UsageError(f"no session {name!r} in {directory}; there are {', '.join(entries) or 'none'}")
    by_model: defaultdict[str, list[SessionEntry]] = defaultdict(list)
    for name in names or entries:
        by_model[entries[name].identity].append(entries[name])
    for text, some in by_model.items():
        identity = Identity.from_json(text)
        with DiskStore(
            directory, limit_bytes=None, fingerprint=identity.fingerprint, syscalls=syscalls
        ) as disk:
            files = SessionFiles(disk, Layout.of(identity), cipher)
            for entry in some:
                if entry.cipher != cipher.name:
                    result.skipped[entry.name] = "it is encrypted with a key that was not given"
                    continue
                with _locked(disk, entry) as ours:
                    if ours:
                        _Check(files, entry.name, repair, result, progress).run()
                    else:
                        result.skipped[entry.name] = "it is in use"
    return result


@contextmanager
def _locked(disk: DiskStore, entry: SessionEntry) -> Iterator[bool]:
    with disk.exclusive():
        lock = disk.sessions.lock(entry)
    try:
        yield lock is not None
    finally:
        if lock is not None:
            disk.sessions.unlock(lock)


class _Check:
    """One locked session."""

    def __init__(
        self,
        files: SessionFiles,
        name: str,
        repair: bool,
        result: Verification,
        progress: Callable[[str, int, int], None] | None,
    ) -> None:
        self._files, self._name, self._repair = files, name, repair
        self._result, self._progress = result, progress
        self._problems: list[str] = []
        self._good_groups = 0

    def run(self) -> None:
        """Adds to the result."""
        disk, name = self._files.disk, self._name
        with disk.exclusive():
            entry = disk.sessions.catalog().entry(name)
            if entry is None:
                return  # deleted since
            self._result.sessions += 1
            try:
                contents = disk.sessions.catalog().contents(entry)
                for what, value, tokens in (
                    ("tokens", contents.tokens, entry.token_count),
                    ("tail", contents.tail, entry.stored),
                    ("state", contents.state, entry.token_count),
                ):
                    self._files.open_value(value, name, what, tokens)
            except TierError as error:
                self._result.findings.append(Finding(name, without_advice(error, disk.directory)))
                return
        self._good_groups = count(contents.spans)
        self._check_files(contents)
        if not self._problems:
            return
        repaired = None
        if self._repair:
            with disk.exclusive():
                shorten(disk, self._files, entry, contents, self._good_groups)
            kept = self._good_groups * SESSION_GROUP
            repaired = f"kept K and V of {kept} of {entry.token_count} tokens, the rest is computed again"
        self._result.findings.extend(Finding(name, problem, repaired) for problem in self._problems)

    def _check_files(self, contents: SessionContents) -> None:
        opened: dict[str, SequenceFile] = {}
        with self._files.disk.exclusive():
            sizes = self._files.disk.sessions.catalog().files()
        first_group = 0
        try:
            for span in contents.spans:
                if span.file not in opened:
                    lost = self._files.lost(span.file, sizes.get(span.file, 0))
                    if lost is None:
                        self._check_header(span.file)
                        try:
                            opened[span.file] = self._files.open(span.file)
                        except TierError as error:
                            lost = without_advice(error, self._files.disk.directory)
                    if lost is not None:
                        self._bad(first_group, lost)
                        return
                first_group += span.groups
            for layer in range(self._files.layout.layers):
                if self._progress is not None:
                    self._progress(self._name, layer, self._files.layout.layers)
                self._check_layer(layer, contents, opened)
            if self._progress is not None:
                self._progress(self._name, self._files.layout.layers, self._files.layout.layers)
        finally:
            for name in opened:
                self._files.release(name)

    def _check_header(self, name: str) -> None:
        """Both copies of a file's header, while nobody else has it open."""
        disk = self._files.disk
        with disk.exclusive():
            if not disk.idle(name):
                return
            with open(disk.path(name), "rb") as raw:
                head = raw.read(HEADER_BYTES)
            damaged = damaged_copies(head)
            if not damaged or not readable(head):
                return  # nothing is wrong; or all is, as opening it will show
            repaired = None
            if self._repair:
                with suppress(TierError):  # likewise
                    self._files.open(name).sync()
                    self._files.release(name)
                    repaired = "written anew from the other copy"
        problem = f"copy {damaged[0]} of the header of {disk.path(name)} is damaged"
        self._result.findings.append(Finding(self._name, problem, repaired))

    def _check_layer(self, layer: int, contents: SessionContents, opened: dict[str, SequenceFile]) -> None:
        group = 0
        for span in contents.spans:
            file = opened[span.file]
            size = max(1, _PIECE_BYTES // file.stride)
            for start in range(0, span.groups, size):
                n = min(size, span.groups - start)
                self._check_records(layer, group + start, file, span.first + start, n, span.nonce)
            group += span.groups

    def _check_records(
        self, layer: int, group: int, file: SequenceFile, first: int, n: int, nonce: int
    ) -> None:
        try:
            self._files.read(file, layer, first, np.full(n, nonce, np.uint64), file.buffer(n))
        except TierError as error:
            if n == 1:
                self._bad(group, without_advice(error, self._files.disk.directory))
                return
            for i in range(n):
                self._check_records(layer, group + i, file, first + i, 1, nonce)
        else:
            self._result.records += n

    def _bad(self, group: int, problem: str) -> None:
        self._good_groups = min(self._good_groups, group)
        self._problems.append(problem)
