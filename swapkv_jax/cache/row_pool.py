"""Whole rows of a generation in DRAM, in front of the files that hold every row."""

from __future__ import annotations

import itertools
import threading

import numpy as np

from swapkv_jax.errors import TierError
from swapkv_jax.plan import Plan
from swapkv_jax.tiers import DramPool


class RowPool:
    """The first `plan.dram_rows` rows of a batch: the payload of every group of every layer, a block per row.

    Blocks are of one size, so that a row of the next generation fits exactly where a past one was. Open and
    close from one thread; `write` and `read` other groups from any.

    Attributes:
      rows: how many rows, counted from the first.
      groups_read, bytes_read: groups served so far, and bytes of their payloads.
    """

    def __init__(self, plan: Plan):
        """Maps and locks the memory (a lock that is refused is a RuntimeWarning).

        Raises:
          TierError: the machine has not got it.
        """
        self.rows = plan.dram_rows or 0
        self.groups_read = 0
        self.bytes_read = 0
        self._shape = (plan.layers, plan.groups, plan.payload_bytes)
        self._pool = DramPool(self.rows * plan.dram_row_bytes)
        self._names: list[str] = []
        self._payloads: list[np.ndarray] = []  # of each row, uint8 [L, N, payload]
        # A block comes with a past row's bytes in it: what was not written in this generation is not there.
        self._written = np.zeros((self.rows, *self._shape[:2]), np.bool_)
        self._lock = threading.Lock()

    def open(self, name: str) -> None:
        """Room for the next row, named `name`; evicts past rows if it must.

        Raises:
          TierError: all rows are in use.
        """
        ref = self._pool.allocate(name, "records", self._shape, np.uint8)
        self._written[len(self._names)] = False
        self._names.append(name)
        self._payloads.append(self._pool.view(ref))

    def write(self, layer: int, row: int, first_group: int, records: np.ndarray) -> None:
        """Keeps adjacent groups of one row, uint8 [n, stride]."""
        groups = slice(first_group, first_group + len(records))
        self._payloads[row][layer, groups] = records[:, : self._shape[2]]
        self._written[row, layer, groups] = True

    def read(
        self, layer: int, rows: np.ndarray, groups: np.ndarray, out: np.ndarray, places: np.ndarray
    ) -> None:
        """Copies groups, int32 [n] in row order, to the places [n] of `out` uint8 [N, stride]; what follows a
        payload stays.

        Raises:
          TierError: one of them was never written.
        """
        absent = np.flatnonzero(~self._written[rows, layer, groups])
        if absent.size:
            row, group = rows[absent[0]], groups[absent[0]]
            raise TierError(
                f"the DRAM pool has no layer {layer}, group {group} of row {row + 1}: it was never written; "
                "prefill the sequence again"
            )
        edges = (0, *(np.flatnonzero(np.diff(rows)) + 1).tolist(), len(rows))
        for begin, end in itertools.pairwise(edges):
            payloads = self._payloads[rows[begin]][layer]
            # `out=` would be slower: into a strided array NumPy copies twice (0.9 against 0.8 µs per 6 KiB).
            out[places[begin:end], : self._shape[2]] = payloads.take(groups[begin:end], axis=0)
        with self._lock:
            self.groups_read += len(rows)
            self.bytes_read += len(rows) * self._shape[2]

    def close(self) -> None:
        """The rows are past: they keep their blocks until the next generation needs them."""
        self._payloads = []
        for name in self._names:
            self._pool.finish(name)
        self._names = []

    def release(self) -> None:
        """Gives the memory back; harmless when repeated."""
        self._payloads, self._names = [], []
        self._pool.close()

    @property
    def used(self) -> int:
        """Bytes in blocks, past rows included."""
        return self._pool.used

    @property
    def evictions(self) -> int:
        """Past rows that had to go so far."""
        return self._pool.evictions

    @property
    def note(self) -> str | None:
        """What the user should know of the pool, if anything."""
        return self._pool.note
