"""The rows of a generation as records: all in the disk store, some rows in DRAM too, the newest tokens in a
rolling buffer."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np

from swapkv_jax.cache.base import CacheUse
from swapkv_jax.cache.row_pool import RowPool
from swapkv_jax.plan import Plan
from swapkv_jax.tiers import DiskStore, SequenceFile, aligned_buffer, write_scattered
from swapkv_jax.trace import span


def in_steps(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Values [n, Hkv, ., .] as the nearest multiples of a step, int8, and each KV head's step, float32 [n, Hkv]."""
    values = values.astype(np.float32)
    steps = np.abs(values).max(axis=(2, 3)) / np.float32(127)
    # Next to nothing, a step is none, and so are its values: its inverse might not be finite.
    per_step = np.divide(1, steps, out=np.zeros_like(steps), where=steps > np.finfo(np.float32).tiny)
    return np.rint(values * per_step[..., None, None]).astype(np.int8), steps


def _span(what: str, started: float) -> None:
    """A write that has just ended, for the trace."""
    span(f"writes of {threading.current_thread().name}", what, started, time.perf_counter())


class RecordTier:
    """One sequence file per row; tokens that do not fill a group yet stay in `rolling` [L, B, stride] uint8.

    A record holds K [Hkv, D, G] and V [Hkv, G, D] of one layer's group. If the plan has `dram_rows`, the
    records of that many rows are in DRAM as well, and read from there; the files stay what counts.
    """

    def __init__(self, plan: Plan, store: DiskStore):
        self.store = store
        self.files: list[SequenceFile] = []
        self._names: Sequence[str] = ()  # of the last generation's rows
        self._plan = plan
        size = plan.layers * plan.batch * plan.rolling_bytes
        self.rolling = aligned_buffer(size).reshape(plan.layers, plan.batch, plan.rolling_bytes)
        self.rolling[...] = 0
        self.pool = RowPool(plan) if plan.dram_rows else None

    def parts(self, records: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """K [n, Hkv, D, G] and V [n, Hkv, G, D] of records uint8 [n, stride], as views; K [n, 0, D, G] where records
        have none."""
        return self._parts(records, self._plan.key_heads, self._plan.cache_dtype)

    def rolling_parts(self, rolling: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The same of part of `rolling`, [n, bytes], which has K in any case."""
        return self._parts(rolling, self._plan.kv_heads, self._plan.rolling_dtype)

    def _parts(self, records: np.ndarray, key_heads: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
        p, n = self._plan, len(records)
        head = p.head_dim * p.group_tokens * np.dtype(dtype).itemsize
        keys, values = key_heads * head, p.kv_heads * head
        k = records[:, :keys].view(dtype).reshape(n, key_heads, p.head_dim, p.group_tokens)
        v = records[:, keys : keys + values].view(dtype)
        return k, v.reshape(n, p.kv_heads, p.group_tokens, p.head_dim)

    def put(self, records: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
        """Puts K [n, Hkv, D, G] and V [n, Hkv, G, D] into records uint8 [n, stride]; of int8 their steps after
        them, float32 [Hkv, 2]."""
        k = k[:, : self._plan.key_heads]
        k_out, v_out = self.parts(records)
        if self._plan.cache_dtype != "int8":
            k_out[...], v_out[...] = k, v
            return
        steps = records[:, k_out[0].nbytes + v_out[0].nbytes : self._plan.payload_bytes].view(np.float32)
        k_out[...], steps[:, 0::2] = in_steps(k)
        v_out[...], steps[:, 1::2] = in_steps(v)

    def new_records(self, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Records of their own, uint8 [n, stride], of groups' K [n, Hkv, D, G] and V [n, Hkv, G, D]."""
        records = self.files[0].buffer(len(k))
        self.put(records, k, v)
        return records

    def keep(self, layer: int, row: int, length: int, k: np.ndarray, v: np.ndarray, batch: int) -> None:
        """Writes a prefilled row, K [Hkv, D, S] and V [Hkv, S, D], `batch` records at a time."""
        p = self._plan
        whole, rest = divmod(length, p.group_tokens)
        scratch = self.files[row].buffer(batch)
        for first in range(0, whole, batch):
            n = min(batch, whole - first)
            tokens = slice(first * p.group_tokens, (first + n) * p.group_tokens)
            keys = k[:, :, tokens].reshape(p.kv_heads, p.head_dim, n, p.group_tokens)
            values = v[:, tokens].reshape(p.kv_heads, n, -1, p.head_dim)
            self.put(scratch[:n], keys.transpose(2, 0, 1, 3), values.transpose(1, 0, 2, 3))
            self.write(layer, row, first, scratch[:n])
        if rest:
            k_out, v_out = self.rolling_parts(self.rolling[layer, row][None])
            k_out[0, :, :, :rest] = k[:, :, length - rest : length]
            v_out[0, :, :rest] = v[:, length - rest : length]

    def append(self, layer: int, row: int, at: int, k: np.ndarray, v: np.ndarray) -> int | None:
        """Adds one token, K and V [Hkv, D], at position `at`; the group's number if that completes it.

        A complete group is in `rolling` until the next token comes; writing it is the caller's part.
        """
        group, offset = divmod(at, self._plan.group_tokens)
        k_out, v_out = self.parts(self.rolling[layer, row][None])
        k_out[0, :, :, offset] = k
        v_out[0, :, offset] = v
        return group if offset == self._plan.group_tokens - 1 else None

    def write(self, layer: int, row: int, first_group: int, records: np.ndarray) -> None:
        """Stores adjacent complete groups of a row, uint8 [n, stride] aligned, wherever the row is kept.

        Raises:
          TierError: the disk has no room, or the write keeps failing.
        """
        started = time.perf_counter()
        self.files[row].write(layer, first_group, records)
        _span(f"layer {layer}, row {row}, {len(records)} groups", started)
        self._to_pool(layer, row, first_group, records)

    def write_scattered(self, layer: int, rows: np.ndarray, groups: np.ndarray, records: np.ndarray) -> None:
        """As `write`, complete groups [n] of rows [n]."""
        started = time.perf_counter()
        write_scattered(self.files, layer, rows, groups, records)
        _span(f"layer {layer}, {len(records)} groups", started)
        for at, (row, group) in enumerate(zip(rows.tolist(), groups.tolist(), strict=True)):
            self._to_pool(layer, row, group, records[at : at + 1])

    def _to_pool(self, layer: int, row: int, first_group: int, records: np.ndarray) -> None:
        if self.pool is not None and row < self.pool.rows:
            self.pool.write(layer, row, first_group, records)

    def open(self, names: Sequence[str], limits: Sequence[int]) -> None:
        """Creates the rows' files with room for `limits` tokens each, and gives the first rows their DRAM.

        All the room a row may need is reserved now: a full disk shows before any work is done, and each
        layer is one sequential run.

        Raises:
          TierError: a tier has no room.
        """
        p = self._plan
        self._names = names
        for name, limit in zip(names, limits, strict=True):
            groups = limit // p.group_tokens
            file = self.store.create(
                name,
                layers=p.layers,
                group_tokens=p.group_tokens,
                payload_bytes=p.payload_bytes,
                prompt_groups=groups,
                max_groups=groups,
                alignment=p.record_alignment,
            )
            self.files.append(file)
        if self.pool is not None:
            for name in names[: self.pool.rows]:
                self.pool.open(name)

    def close(self) -> None:
        """The rows' sequences are past."""
        if self.pool is not None:
            self.pool.close()
        for file in self.files:
            self.store.finish(file.sequence)
        self.files = []

    def release(self) -> None:
        """Gives every tier back; harmless when repeated."""
        if self.pool is not None:
            self.pool.release()
        self.store.close()

    @property
    def use(self) -> CacheUse:
        """Bytes on disk, in DRAM and moved so far; the cache adds its own."""
        counts, pool = self.store.counts, self.pool
        notes = (self.store.support.note, pool.note if pool is not None else None)
        return CacheUse(
            dram_used=self.rolling.nbytes + (pool.used if pool is not None else 0),
            disk_used=sum(map(self.store.size, self._names)),
            bytes_read=counts.bytes_read,
            bytes_written=counts.bytes_written,
            reads=counts.reads,
            writes=counts.writes,
            retries=counts.retries,
            notes=tuple(note for note in notes if note),
            groups_from_dram=pool.groups_read if pool is not None else 0,
            bytes_from_dram=pool.bytes_read if pool is not None else 0,
        )
