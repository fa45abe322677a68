"""Scattered groups of one layer, from wherever they are: memory, DRAM pool or files."""

from __future__ import annotations

import itertools
from concurrent.futures import Executor, Future, wait
from typing import NamedTuple

import numpy as np

from swapkv_jax.cache.records import RecordTier
from swapkv_jax.tiers import ScatteredReader


class _Write(NamedTuple):
    """Groups of one layer that one job writes."""

    rows: np.ndarray  # [n]
    groups: np.ndarray  # [n]
    records: np.ndarray  # uint8 [n, stride]
    job: Future[None]


class PendingWrites:
    """Completed groups on their way to the tier. They are served from memory until they are there and their layer was
    read once more: what a step completes the next step wants."""

    def __init__(self, tier: RecordTier, pool: Executor):
        self._tier, self._pool = tier, pool
        self._writes: dict[int, list[_Write]] = {}  # of each layer
        self._failed: Exception | None = None

    def write(
        self, layer: int, rows: np.ndarray, groups: np.ndarray, k: np.ndarray, v: np.ndarray
    ) -> np.ndarray:
        """Starts to write complete groups [n] of rows [n], K [n, Hkv, D, G] and V [n, Hkv, G, D], which are copied;
        the records, uint8 [n, stride], which must stay as they are."""
        records = self._tier.new_records(k, v)
        job = self._pool.submit(self._write, layer, rows, groups, records)
        self._writes[layer] = [*self._unfinished(layer), _Write(rows, groups, records, job)]
        return records

    def _write(self, layer: int, rows: np.ndarray, groups: np.ndarray, records: np.ndarray) -> None:
        try:
            self._tier.write_scattered(layer, rows, groups, records)
        except Exception as error:  # for `find` and `drain`
            self._failed = self._failed or error

    def find(self, layer: int, rows: np.ndarray, groups: np.ndarray) -> dict[int, np.ndarray]:
        """Which of these groups are still in memory: index → record, uint8 [stride].

        Raises:
          TierError: a write has failed.
        """
        if self._failed is not None:
            raise self._failed
        found: dict[int, np.ndarray] = {}
        for write in self._writes.get(layer, ()):
            here = (rows[:, None] == write.rows) & (groups[:, None] == write.groups)
            found.update((int(at), write.records[of]) for at, of in np.argwhere(here))
        self._writes[layer] = self._unfinished(layer)
        return found

    def _unfinished(self, layer: int) -> list[_Write]:
        return [write for write in self._writes.get(layer, ()) if not write.job.done()]

    def drain(self) -> None:
        """Waits for every write; raises what one of them failed with."""
        # Whoever is interrupted here waits again: nothing may be written into the next generation's files.
        wait(write.job for write in itertools.chain.from_iterable(self._writes.values()))
        self._writes.clear()
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed


class RecordReader:
    """Reads one batch of groups at a time into a staging slot. The engine's thread alone uses it."""

    def __init__(self, tier: RecordTier, pending: PendingWrites, size: int, pool: Executor):
        self._tier, self._pending = tier, pending
        self._files = ScatteredReader(size, tier.store.syscalls, pool)

    @property
    def note(self) -> str | None:
        """What the user should know of how it reads, if anything."""
        return self._files.note

    def start(self, layer: int, rows: np.ndarray, groups: np.ndarray, out: np.ndarray) -> None:
        """Begins to put groups [n] of rows [n], in (row, group) order, into `out`, uint8 [n, stride].

        `out` is aligned, and must stay untouched until `finish` or `cancel`.

        Raises:
          TierError: an earlier write has failed, or a group was never stored.
        """
        away = np.ones(len(rows), np.bool_)
        for index, record in self._pending.find(layer, rows, groups).items():
            out[index] = record
            away[index] = False
        pool = self._tier.pool
        if pool is not None:
            pooled = np.flatnonzero(away & (rows < pool.rows))
            if pooled.size:
                pool.read(layer, rows[pooled], groups[pooled], out, pooled)
                away[pooled] = False
        places = np.flatnonzero(away)
        self._files.start(self._tier.files, layer, rows[places], groups[places], out, places)

    def finish(self) -> None:
        """Waits until all of `out` is there, verified.

        Raises:
          TierError: a record cannot be read or is damaged. `out` must then not be used.
        """
        self._files.finish()

    def cancel(self) -> None:
        """Waits until nothing writes into `out` any more."""
        self._files.cancel()

    def close(self) -> None:
        """Frees what it holds; harmless when repeated."""
        self._files.close()
