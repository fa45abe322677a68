"""One sequence's KV on disk: a header, then extents of sealed records that are read back verified.

An extent covers some groups of *all* layers, layer after layer: prefill, which goes layer by layer,
writes one long sequential run per layer, and so does a whole layer read back. The first extent holds the
prompt; decode adds more as it goes.
"""

import errno
import os
import resource
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from swapkv_jax.errors import TierError
from swapkv_jax.memory_limits import format_bytes
from swapkv_jax.tiers import record
from swapkv_jax.tiers.direct_io import (
    AlignedFile,
    DirectSupport,
    IoCounters,
    Syscalls,
    aligned_buffer,
)
from swapkv_jax.tiers.header import Extent, Header, encode

_GROWTH_RUN_BYTES = 256 << 10
_GROWTH_SHARE = 8

_BUFFERED = DirectSupport(direct=False, alignment=1)


class Run(NamedTuple):
    """`groups` adjacent records of one layer, from `first_group` on, at `file_offset`."""

    file_offset: int
    first_group: int
    groups: int


class SequenceFile:
    """An open, locked sequence. Made by `DiskStore.create` and `DiskStore.open`, closed by the store too.

    `read` may be called from several threads at once, also beside `write`s of other records. Two reads in
    flight hide the checksums behind the disk; one alone reaches about 85 % of an unverified reader.
    """

    def __init__(
        self,
        path: Path,
        header: Header,
        descriptor: int,
        support: DirectSupport,
        counters: IoCounters,
        syscalls: Syscalls,
        room: Callable[[int], AbstractContextManager[None]],
    ) -> None:
        """Take over `descriptor`, buffered and locked; `room(nbytes)` is held while the file grows."""
        self.path = path
        self.header = header
        # A file laid out for 512-byte sectors may have moved to a disk that insists on more.
        if header.alignment % support.alignment:
            support = DirectSupport(direct=False, alignment=header.alignment)
        flags = os.O_RDWR | (os.O_DIRECT if support.direct else 0)
        self._records = AlignedFile(path, syscalls.open(path, flags), support, counters, syscalls)
        self._headers = AlignedFile(path, descriptor, _BUFFERED, IoCounters(), syscalls)
        self._descriptor = descriptor
        self._syscalls = syscalls
        self._counters = counters
        self._room = room
        self._growing = threading.Lock()
        self._copies_agree = False
        self._closed = False

    @property
    def sequence(self) -> str:
        """Its name in the store."""
        return self.header.sequence

    @property
    def stride(self) -> int:
        """Bytes from one record to the next, in the file and in buffers."""
        return self.header.stride

    @property
    def groups(self) -> int:
        """Groups per layer that room is reserved for."""
        return self.header.groups

    @property
    def direct(self) -> bool:
        """Whether records go past the page cache."""
        return self._records.support.direct

    @property
    def descriptor(self) -> int:
        """The open file that holds the records, to read from at `offsets`; `arrived` counts such reads."""
        return self._records.descriptor

    def arrived(self, reads: int, nbytes: int) -> None:
        """Count reads that went past `read`."""
        self._counters.add(reads=reads, bytes_read=nbytes)

    def buffer(self, groups: int) -> np.ndarray:
        """An aligned uint8 array `[groups, stride]`, payloads at `[:, :header.payload_bytes]`."""
        return aligned_buffer(groups * self.stride).reshape(groups, self.stride)

    def initialise(self, groups: int) -> None:
        """Write the first header of a new, empty file and reserve exactly `groups` groups. For the store.

        Raises:
            TierError: no room; the file is as it was, empty.
        """
        self._extend(groups)

    def reserve(self, groups: int) -> None:
        """Make sure that every layer has room for `groups` groups. `write` does it where needed.

        A new extent takes at least 256 KiB per layer and an eighth of what there is (never more than
        `max_groups`): a layer read back is then a few runs long enough to reach the disk's ceiling, however
        slowly decode appends, for at most an eighth, or 256 KiB a layer, of unused space.

        Raises:
            TierError: the disk or the store's limit has no room; the file is as it was.
            ValueError: over `max_groups`.
        """
        self._check_open()
        with self._growing:
            have, most = self.groups, self.header.max_groups
            if groups <= have:
                return
            if most is not None and groups > most:
                raise ValueError(f"{groups} groups in {self.path}, created for at most {most}")
            growth = max(groups - have, -(-_GROWTH_RUN_BYTES // self.stride), have // _GROWTH_SHARE)
            growth = growth if most is None else min(growth, most - have)
            try:
                self._extend(growth)
            except TierError:
                if growth == groups - have:
                    raise
                self._extend(groups - have)  # a nearly full disk still takes what is needed now

    def runs(self, layer: int, first_group: int, groups: int) -> list[Run]:
        """Where `groups` groups of one layer lie: as few contiguous pieces as the extents allow.

        Raises:
            TierError: some of them have no room in the file, hence were never stored.
            IndexError: no such layer.
        """
        header = self.header
        if not 0 <= layer < header.layers:
            raise IndexError(f"layer {layer} of {header.layers}")
        stop = first_group + groups
        if first_group < 0 or groups < 0 or stop > header.groups:
            raise TierError(
                f"{self.path} holds groups 0 to {header.groups - 1}, not {first_group} to {stop - 1}; "
                f"prefill sequence {self.sequence!r} again"
            )
        pieces = []
        for extent in header.extents:
            start = max(first_group, extent.first_group)
            end = min(stop, extent.first_group + extent.groups)
            if start < end:
                index = layer * extent.groups + start - extent.first_group
                pieces.append(Run(extent.file_offset + index * header.stride, start, end - start))
        return pieces

    def write(
        self,
        layer: int,
        first_group: int,
        records: np.ndarray,
        *,
        last_valid: int | None = None,
        nonce: int | None = None,
    ) -> None:
        """Seal and write the groups of one layer from `first_group` on, one system call per run.

        `records` is uint8 `[n, stride]` as `buffer` gives, payloads filled in; padding and footers are
        written into it. Every group is full but for the last, which holds `last_valid` tokens if given.
        `nonce` seals them in place of the file's own, for a place that is written more than once: a reader who
        knows which writing it wants is never given another.

        Raises:
            TierError: no room, or the write keeps failing.
            ValueError: `records` is not such an array.
        """
        self._check_buffer(records)
        if not len(records):
            raise ValueError("no records to write")
        header = self.header
        valid = np.full(len(records), header.group_tokens, np.uint32)
        if last_valid is not None:
            valid[-1] = last_valid
        record.stamp(
            records,
            header.payload_bytes,
            layer=layer,
            groups=np.arange(first_group, first_group + len(records)),
            nonces=header.nonce if nonce is None else nonce,
            valid=valid,
        )
        self.write_sealed(layer, first_group, records)

    def write_sealed(self, layer: int, first_group: int, records: np.ndarray) -> None:
        """Write records that have their footers, uint8 `[n, stride]` as `buffer` gives. See `write`."""
        self.reserve(first_group + len(records))
        for run in self.runs(layer, first_group, len(records)):
            start = run.first_group - first_group
            self._records.write(records[start : start + run.groups].reshape(-1), run.file_offset)

    def read(
        self, layer: int, first_group: int, groups: int, out: np.ndarray, *, nonces: np.ndarray | None = None
    ) -> np.ndarray:
        """Fill `out` (uint8 `[groups, stride]`, aligned) with verified records, one system call per run.

        Returns how many tokens each group holds, uint32 `[groups]`. A record that does not verify is read
        once more before it is given up. `nonces` `[groups]` are what the records must be sealed with, if not
        with the file's own.

        Raises:
            TierError: the read keeps failing, or a record is damaged, missing or another's. `out` must then
                not be used.
            ValueError: `out` is not such an array.
        """
        self._check_buffer(out)
        if len(out) != groups:
            raise ValueError(f"a buffer of {len(out)} records for {groups} groups")
        self._check_open()
        for run in self.runs(layer, first_group, groups):
            start = run.first_group - first_group
            rows = out[start : start + run.groups]
            self._records.read(rows.reshape(-1), run.file_offset)
            self._verify(layer, run, rows, None if nonces is None else nonces[start : start + run.groups])
        return record.valid_tokens(out)

    def offsets(self, layer: int, groups: np.ndarray) -> np.ndarray:
        """Where the records of these `groups` `[n]` of one layer lie in the file, int64 `[n]`.

        Raises:
            TierError: some of them have no room in the file, hence were never stored, or the file is closed.
            IndexError: no such layer.
        """
        self._check_open()
        header = self.header
        if not 0 <= layer < header.layers:
            raise IndexError(f"layer {layer} of {header.layers}")
        if len(groups) and not 0 <= groups.min() <= groups.max() < header.groups:
            raise TierError(
                f"{self.path} holds groups 0 to {header.groups - 1}, not {groups.min()} to {groups.max()}; "
                f"prefill sequence {self.sequence!r} again"
            )
        if len(header.extents) == 1:  # the usual case, five times as fast
            (whole,) = header.extents
            return whole.file_offset + (layer * whole.groups + groups.astype(np.int64)) * header.stride
        firsts, counts, starts = np.array(header.extents, np.int64).T
        extent = np.searchsorted(firsts, groups, side="right") - 1
        index = layer * counts[extent] + groups - firsts[extent]
        return starts[extent] + index * header.stride

    def reread(self, layer: int, group: int, out: np.ndarray, *, nonce: int | None = None) -> None:
        """Read one record, uint8 `[1, stride]`, that did not arrive or verify; what fails again is given up.

        Raises:
            TierError: the read keeps failing, or the record is damaged, missing or another's.
        """
        (run,) = self.runs(layer, group, 1)
        self._counters.add(retries=1)
        self._records.read(out.reshape(-1), run.file_offset)
        nonce = self.header.nonce if nonce is None else nonce
        if record.damaged(out, layer=layer, groups=np.array([group]), nonces=nonce).size:
            raise TierError(
                f"stored record of layer {layer}, group {group} in {self.path} is damaged or was never "
                f"written; delete the file or decode again without this session"
            )

    def sync(self) -> None:
        """Wait until everything written is on the device, both copies of the header included.

        Raises:
            TierError: the device says it is not.
        """
        self._check_open()
        self._records.flush()
        with self._growing:
            if not self._copies_agree:
                self._write_header(self.header)
                self._headers.flush()
                self._copies_agree = True

    def close(self) -> None:
        """Release the file and its lock; harmless when repeated."""
        if not self._closed:
            self._closed = True
            self._records.close()
            self._headers.close()

    def _extend(self, groups: int) -> None:
        """Add an extent, in a new file after room for the header."""
        header = self.header
        start = header.end if header.generation else 0
        if groups:
            header = replace(header, extents=(*header.extents, Extent(header.groups, groups, header.end)))
        nbytes = header.end - start
        with self._room(nbytes):
            try:
                self._syscalls.reserve(self._descriptor, start, nbytes)
                self._write_header(header)
            except Exception as error:  # not an interrupt: the header may be out, and must keep its extent
                with suppress(OSError):
                    self._syscalls.truncate(self._descriptor, start)
                if isinstance(error, OSError):
                    raise _no_room(self.path, error, nbytes) from error
                raise

    def _write_header(self, header: Header) -> None:
        """Replace the older copy of the header; only then does `self.header` change."""
        header = replace(header, generation=self.header.generation + 1)
        offset, data = encode(header)
        self._headers.write(np.frombuffer(data, np.uint8), offset)
        self._copies_agree = False
        self.header = header

    def _verify(self, layer: int, run: Run, rows: np.ndarray, nonces: np.ndarray | None) -> None:
        groups = np.arange(run.first_group, run.first_group + run.groups)
        expected = np.full(run.groups, self.header.nonce, np.uint64) if nonces is None else nonces
        for index in record.damaged(rows, layer=layer, groups=groups, nonces=expected):
            self.reread(layer, int(groups[index]), rows[index : index + 1], nonce=int(expected[index]))

    def _check_buffer(self, records: np.ndarray) -> None:
        if records.dtype != np.uint8 or records.ndim != 2 or records.shape[1] != self.stride:
            raise ValueError(f"records are {records.dtype}{records.shape}, not uint8[n, {self.stride}]")
        alignment = self._records.support.alignment
        if not records.flags.c_contiguous or not records.flags.writeable or records.ctypes.data % alignment:
            raise ValueError(f"records must be contiguous, writable and at a multiple of {alignment} bytes")

    def _check_open(self) -> None:
        if self._closed:
            raise TierError(f"{self.path} is closed; open sequence {self.sequence!r} in its store again")


def _no_room(path: Path, error: OSError, nbytes: int) -> TierError:
    """Why `nbytes` more could not be reserved, with how much is missing."""
    what = f"cannot reserve {format_bytes(nbytes)} in {path}: errno {error.errno}, {error.strerror}"
    if error.errno == errno.EFBIG:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        size = "" if limit == resource.RLIM_INFINITY else f" of {format_bytes(limit)}"
        return TierError(f"{what}; raise the file size limit{size} (ulimit -f) or lower --max-context")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        status = os.statvfs(path)
        short = nbytes - status.f_bavail * status.f_frsize
        missing = f" ({format_bytes(short)} short)" if short > 0 else ""
        return TierError(
            f"{what}{missing}; free some space, lower --max-context or choose another --store-dir"
        )
    return TierError(f"{what}; choose another --store-dir")
