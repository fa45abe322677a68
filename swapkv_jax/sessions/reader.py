"""A session's keys and values, layer by layer: the next layers are read while the caller takes one."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from swapkv_jax.sessions.files import SessionFiles
from swapkv_jax.sessions.layout import SESSION_GROUP
from swapkv_jax.tiers import SequenceFile, aligned_buffer
from swapkv_jax.tiers.catalog_rows import Span

KV = tuple[np.ndarray, np.ndarray]

_THREADS = 3
_PIECE_BYTES = 2 << 20


class LayerReader:
    """Reads layers in the order 0, 1, … ahead of the caller; any other order works, and waits."""

    def __init__(self, files: SessionFiles) -> None:
        self._files = files
        self._local = threading.local()
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: dict[int, Future[KV]] = {}
        self._what: tuple[object, ...] = ()

    def layer(self, layer: int, spans: Sequence[Span], opened: dict[str, SequenceFile], tokens: int) -> KV:
        """K [Hkv, D, tokens] and V [Hkv, tokens, D], of which those tokens are filled in that `spans` hold.

        Raises:
          TierError: a record cannot be read, or is not what was written.
        """
        if self._what != (spans, tokens):
            self.forget()
            self._what = (spans, tokens)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="session")
        for wanted in range(layer, min(layer + _THREADS + 1, self._files.layout.layers)):
            if wanted not in self._ahead:
                self._ahead[wanted] = self._pool.submit(self._read, wanted, spans, opened, tokens)
        return self._ahead.pop(layer).result()

    def forget(self) -> None:
        """Drops what was read ahead."""
        for future in self._ahead.values():
            if not future.cancel():
                future.exception()  # nobody will use it, nor how it failed
        self._ahead.clear()

    def close(self) -> None:
        """Ends the threads."""
        self.forget()
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _read(self, layer: int, spans: Sequence[Span], opened: dict[str, SequenceFile], tokens: int) -> KV:
        layout = self._files.layout
        k = np.empty((layout.kv_heads, layout.head_dim, tokens), layout.dtype)
        v = np.empty((layout.kv_heads, tokens, layout.head_dim), layout.dtype)
        at = 0
        for name, first, nonces in _pieces(spans, opened):
            file = opened[name]
            records = self._buffer(file.stride)[: len(nonces)]
            self._files.read(file, layer, first, nonces, records)
            end = min(tokens, at + len(nonces) * SESSION_GROUP)
            layout.unpack(records, k[:, :, at:end], v[:, at:end])
            at = end
        return k, v

    def _buffer(self, stride: int) -> np.ndarray:
        buffer = getattr(self._local, "buffer", None)
        if buffer is None or buffer.shape[1] != stride:
            records = max(1, _PIECE_BYTES // stride)
            buffer = self._local.buffer = aligned_buffer(records * stride).reshape(records, stride)
        return buffer


def _pieces(spans: Sequence[Span], opened: dict[str, SequenceFile]) -> Iterator[tuple[str, int, np.ndarray]]:
    """File, first place and nonces [n] of each read: neighbours in a file are read at once, up to a buffer's size."""
    runs: list[tuple[str, int, list[int]]] = []
    for span in spans:
        nonces = [span.nonce] * span.groups
        if runs and runs[-1][0] == span.file and runs[-1][1] + len(runs[-1][2]) == span.first:
            runs[-1][2].extend(nonces)
        else:
            runs.append((span.file, span.first, nonces))
    for name, first, nonces in runs:
        size = max(1, _PIECE_BYTES // opened[name].stride)
        for start in range(0, len(nonces), size):
            yield name, first + start, np.array(nonces[start : start + size], np.uint64)
