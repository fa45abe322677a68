"""The rows of a generation as records in the disk store, their newest tokens in a rolling buffer in memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from swapkv_jax.cache.base import CacheUse
from swapkv_jax.plan import Plan
from swapkv_jax.tiers import DiskStore, SequenceFile, aligned_buffer


class RecordTier:
    """One sequence file per row; tokens that do not fill a group yet stay in `rolling` [L, B, stride] uint8.

    A record holds K [Hkv, D, G] and V [Hkv, G, D] of one layer's group.
    """

    def __init__(self, plan: Plan, store: DiskStore):
        self.store = store
        self.files: list[SequenceFile] = []
        self._plan = plan
        size = plan.layers * plan.batch * plan.stride_bytes
        self.rolling = aligned_buffer(size).reshape(plan.layers, plan.batch, plan.stride_bytes)
        self.rolling[...] = 0

    def parts(self, records: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """K [n, Hkv, D, G] and V [n, Hkv, G, D] of records uint8 [n, stride], as views."""
        p = self._plan
        half = p.payload_bytes // 2
        k = records[:, :half].view(p.dtype).reshape(-1, p.kv_heads, p.head_dim, p.group_tokens)
        v = records[:, half : 2 * half].view(p.dtype).reshape(-1, p.kv_heads, p.group_tokens, p.head_dim)
        return k, v

    def keep(self, layer: int, row: int, length: int, k: np.ndarray, v: np.ndarray, batch: int) -> None:
        """Writes a prefilled row, K [Hkv, D, S] and V [Hkv, S, D], `batch` records at a time."""
        p = self._plan
        whole, rest = divmod(length, p.group_tokens)
        scratch = aligned_buffer(batch * p.stride_bytes).reshape(batch, p.stride_bytes)
        for first in range(0, whole, batch):
            n = min(batch, whole - first)
            k_out, v_out = self.parts(scratch[:n])
            tokens = slice(first * p.group_tokens, (first + n) * p.group_tokens)
            k_out[...] = k[:, :, tokens].reshape(p.kv_heads, p.head_dim, n, -1).transpose(2, 0, 1, 3)
            v_out[...] = v[:, tokens].reshape(p.kv_heads, n, -1, p.head_dim).transpose(1, 0, 2, 3)
            self.files[row].write(layer, first, scratch[:n])
        if rest:
            k_out, v_out = self.parts(self.rolling[layer, row][None])
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

    def open(self, names: Sequence[str], limits: Sequence[int]) -> None:
        """Creates the rows' files with room for `limits` tokens each.

        All the room a row may need is reserved now: a full disk shows before any work is done, and each
        layer is one sequential run.
        """
        p = self._plan
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

    def close(self) -> None:
        """The rows' sequences are past."""
        for file in self.files:
            self.store.finish(file.sequence)
        self.files = []

    @property
    def use(self) -> CacheUse:
        """Bytes on disk, in the rolling buffer and moved so far; the cache adds its own."""
        counts, note = self.store.counts, self.store.support.note
        return CacheUse(
            dram_used=self.rolling.nbytes,
            disk_used=self.store.bytes_used,
            bytes_read=counts.bytes_read,
            bytes_written=counts.bytes_written,
            reads=counts.reads,
            writes=counts.writes,
            retries=counts.retries,
            notes=(note,) if note else (),
        )
