"""Scattered records of one layer, from several sequences at once, into one buffer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from typing import NamedTuple

import numpy as np

from swapkv_jax.tiers import record
from swapkv_jax.tiers.direct_io import Syscalls
from swapkv_jax.tiers.kernel_reads import KernelReads
from swapkv_jax.tiers.sequence_file import SequenceFile


def write_scattered(
    files: Sequence[SequenceFile], layer: int, rows: np.ndarray, groups: np.ndarray, records: np.ndarray
) -> None:
    """Seals and writes full groups `[n]` of rows `[n]` of `files`, which are alike; `records` uint8 `[n, stride]` as
    `SequenceFile.buffer` gives.

    Raises:
        TierError: no room, or a write keeps failing.
    """
    header = files[0].header
    nonces = np.array([file.header.nonce for file in files], np.uint64)[rows]
    record.stamp(
        records, header.payload_bytes, layer=layer, groups=groups, nonces=nonces, valid=header.group_tokens
    )
    for at, (row, group) in enumerate(zip(rows.tolist(), groups.tolist(), strict=True)):
        files[row].write_sealed(layer, group, records[at : at + 1])


class _Batch(NamedTuple):
    """Records asked for, and the reads that bring them: runs of records adjacent in file and buffer."""

    files: Sequence[SequenceFile]
    layer: int
    rows: np.ndarray  # [n] into files
    groups: np.ndarray  # [n]
    out: np.ndarray  # uint8 [N, stride]
    places: np.ndarray  # [n] into out
    starts: np.ndarray  # [m] first record of each read
    counts: np.ndarray  # [m] records of each read

    def file(self, index: int) -> SequenceFile:
        """Where a record is read from."""
        return self.files[int(self.rows[index])]

    def place(self, index: int, count: int = 1) -> np.ndarray:
        """The part of `out` for `count` records of one read."""
        first = int(self.places[index])
        return self.out[first : first + count]


class ScatteredReader:
    """One batch of up to `size` records at a time, in ascending order of row, group and place; what arrived is
    verified before it is handed over.

    The kernel reads a whole batch asynchronously. Where it cannot, `pool` does, and `note` says so.
    Used by one thread at a time.
    """

    def __init__(self, size: int, syscalls: Syscalls, pool: Executor) -> None:
        self._pool = pool
        self._kernel: KernelReads | None = None
        self.note: str | None = None
        try:
            self._kernel = syscalls.kernel_reads(size)
        except OSError as error:
            self._do_without(error)
        self._batch: _Batch | None = None
        self._job: Future[None] | None = None

    def _do_without(self, error: OSError) -> None:
        self._kernel = None
        self.note = f"no asynchronous reads here ({error.strerror}): threads read groups, more slowly"

    def start(
        self,
        files: Sequence[SequenceFile],
        layer: int,
        rows: np.ndarray,
        groups: np.ndarray,
        out: np.ndarray,
        places: np.ndarray,
    ) -> None:
        """Begins to read groups `[n]` of rows `[n]` of `files` into the `places` `[n]` of `out`.

        `out`, uint8 `[N, stride]` and aligned, must stay untouched until `finish` or `cancel`.

        Raises:
            TierError: a group that its file cannot hold.
        """
        assert self._batch is None, "the batch before has not been finished"
        n, stride = len(rows), out.shape[1]
        if not n:
            return
        offsets = np.empty(n, np.int64)
        edges = [0, *(np.flatnonzero(np.diff(rows)) + 1).tolist(), n]
        for begin, end in itertools.pairwise(edges):
            offsets[begin:end] = files[int(rows[begin])].offsets(layer, groups[begin:end])
        breaks = (np.diff(rows) != 0) | (np.diff(offsets) != stride) | (np.diff(places) != 1)
        starts = np.concatenate([[0], np.flatnonzero(breaks) + 1])
        counts = np.diff(starts, append=n)
        batch = _Batch(files, layer, rows, groups, out, places, starts, counts)
        if self._kernel is not None and all(file.direct for file in files):
            descriptors = np.array([file.descriptor for file in files])[rows[starts]]
            addresses = out.ctypes.data + places[starts] * stride
            self._kernel.submit(descriptors, addresses, counts * stride, offsets[starts])
        else:  # of buffered files too: the kernel would read them synchronously, and leave their pages cached
            self._job = self._pool.submit(self._read_plainly, batch)
        self._batch = batch

    def finish(self) -> None:
        """Waits until every record has arrived and verified; what did not is read once more by itself.

        Raises:
            TierError: a read keeps failing, or a record is damaged, missing or another's. `out` must then
                not be used.
        """
        batch, self._batch = self._batch, None
        if batch is None:
            return
        if self._job is not None:
            try:
                self._job.result()
            finally:
                if self._job.done():  # else the wait was interrupted, and is up to `cancel`
                    self._job = None
            return
        assert self._kernel is not None
        whole = self._kernel.collect() == batch.counts * batch.out.shape[1]
        batch.files[0].arrived(int(whole.sum()), int(batch.counts[whole].sum()) * batch.out.shape[1])
        for read in np.flatnonzero(~whole).tolist():
            first = int(batch.starts[read])
            for index in range(first, first + int(batch.counts[read])):
                self._reread(batch, index)
        first, last = batch.places[0], batch.places[-1]
        adjacent = last - first + 1 == len(batch.places)
        records = batch.out[first : last + 1] if adjacent else batch.out[batch.places]
        nonces = np.array([file.header.nonce for file in batch.files], np.uint64)[batch.rows]
        for index in record.damaged(records, layer=batch.layer, groups=batch.groups, nonces=nonces):
            self._reread(batch, int(index))

    def cancel(self) -> None:
        """Waits until nothing writes into `out` any more; what arrived is forgotten."""
        self._batch = None
        if self._job is not None:
            self._job.exception()
            self._job = None
        if self._kernel is not None:
            try:
                self._kernel.cancel()
            except OSError as error:
                self._kernel.close()
                self._do_without(error)

    def close(self) -> None:
        """As `cancel`, and frees what the kernel holds; harmless when repeated."""
        self.cancel()
        if self._kernel is not None:
            self._kernel.close()

    @staticmethod
    def _reread(batch: _Batch, index: int) -> None:
        batch.file(index).reread(batch.layer, int(batch.groups[index]), batch.place(index))

    @staticmethod
    def _read_plainly(batch: _Batch) -> None:
        for index, count in zip(batch.starts.tolist(), batch.counts.tolist(), strict=True):
            batch.file(index).read(batch.layer, int(batch.groups[index]), count, batch.place(index, count))
