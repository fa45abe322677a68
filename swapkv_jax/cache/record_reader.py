"""Scattered groups of one layer, from wherever they are: memory, DRAM pool or files."""

from __future__ import annotations

from concurrent.futures import Executor, Future

import numpy as np

from swapkv_jax.cache.records import RecordTier
from swapkv_jax.tiers import ScatteredReader


class PendingWrites:
    """Completed groups on their way to the tier, which are served from memory until they are there."""

    def __init__(self, tier: RecordTier, pool: Executor):
        self._tier, self._pool = tier, pool
        self._writes: dict[tuple[int, int, int], tuple[np.ndarray, Future[None]]] = {}

    def write(self, layer: int, row: int, group: int, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Starts to write a complete group, K [Hkv, D, G] and V [Hkv, G, D], which are copied; the record, uint8
        [stride], which must stay as it is."""
        record = self._tier.new_record(k, v)
        job = self._pool.submit(self._tier.write, layer, row, group, record)
        self._writes[layer, row, group] = (record[0], job)
        return record[0]

    def find(self, layer: int, rows: np.ndarray, groups: np.ndarray) -> dict[int, np.ndarray]:
        """Which of these groups are still in memory: index → record, uint8 [stride].

        Raises:
          TierError: a write has failed.
        """
        found = {}
        for key, (record, job) in list(self._writes.items()):
            if job.done():
                job.result()
                del self._writes[key]
            elif key[0] == layer:
                here = (rows == key[1]) & (groups == key[2])
                found.update(dict.fromkeys(np.flatnonzero(here).tolist(), record))
        return found

    def drain(self) -> None:
        """Waits for every write; raises what one of them failed with."""
        writes, self._writes = self._writes, {}
        failures = [failure for _, job in writes.values() if (failure := job.exception())]
        if failures:
            raise failures[0]


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
