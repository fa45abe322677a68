"""What every cache that keeps KV off the device shares: prefill's ring of slots, which stream out as they fill."""

from __future__ import annotations

import abc
import os
import secrets
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import jax
import numpy as np

from swapkv_jax.cache.base import CacheUse
from swapkv_jax.program import Program
from swapkv_jax.staging import read_only_view, zeros

Slot = tuple[jax.Array, jax.Array]


class OffloadCache(abc.ABC):
    """Subclasses say where rows are kept and how a step reads them: see layer.py and group.py."""

    def __init__(self, program: Program):
        self._program = program
        self._plan = plan = program.plan
        self._io = ThreadPoolExecutor(plan.io_threads, thread_name_prefix="swapkv-io")
        self._name = f"decode-{os.getpid()}-{secrets.token_hex(4)}"  # others may use the same store
        self._generation = 0
        self._wait_s = 0.0
        self._ring: list[Slot] = []  # prefill's slots; layer i uses i mod physical_layers
        self._streams: list[Future[None] | None] = []

    # ---- what a tier provides ------------------------------------------------------------------------

    @abc.abstractmethod
    def _open_sequences(self, names: list[str], prompts: Sequence[int], limits: Sequence[int]) -> None:
        """Makes room for the rows of a new generation."""

    @abc.abstractmethod
    def _keep(self, layer: int, row: int, length: int, k: np.ndarray, v: np.ndarray) -> None:
        """Copies a prefilled row, K [Hkv, D, S] and V [Hkv, S, D], into the tier. Runs on an I/O thread."""

    @abc.abstractmethod
    def _close_sequences(self) -> None: ...

    # ---- prefill -------------------------------------------------------------------------------------

    def begin(self, prompts: Sequence[int], limits: Sequence[int]) -> None:
        self._generation += 1
        names = [f"{self._name}-{self._generation}-row-{row}" for row in range(self._plan.batch)]
        self._open_sequences(names, prompts, limits)
        self._ring = self._prefill_ring()
        self._streams = [None] * len(self._ring)

    def _prefill_ring(self) -> list[Slot]:
        k_shape, v_shape = self._plan.layer_shapes(self._plan.slot_rows)
        dtype = self._plan.dtype
        return [(zeros(k_shape, dtype), zeros(v_shape, dtype)) for _ in range(self._plan.prefill_slots)]

    def slot(self, layer: int) -> Slot:
        index = layer % len(self._ring)
        self._finish_stream(index)
        return self._ring[index]

    def filled(self, layer: int, row: int, length: int, k: jax.Array, v: jax.Array) -> None:
        index = layer % len(self._ring)
        self._ring[index] = (k, v)
        at = 0 if k.shape[0] == 1 else row
        self._streams[index] = self._io.submit(self._stream, layer, row, at, length, k, v)

    def _stream(self, layer: int, row: int, at: int, length: int, k: jax.Array, v: jax.Array) -> None:
        self._keep(layer, row, length, read_only_view(k)[at], read_only_view(v)[at])

    def _finish_stream(self, index: int) -> None:
        stream, self._streams[index] = self._streams[index], None
        if stream is not None:
            stream.result()

    def start(self) -> None:
        for index in range(len(self._ring)):
            self._finish_stream(index)

    # ---- the end -------------------------------------------------------------------------------------

    def finish(self) -> None:
        # What is still streaming belongs to a prefill that was given up: nobody will read it, nor how it failed.
        wait(stream for stream in self._streams if stream is not None)
        self._streams = [None] * len(self._streams)
        self._close_sequences()

    def close(self) -> None:
        self._io.shutdown(wait=True, cancel_futures=True)
        self._ring, self._streams = [], []

    @property
    @abc.abstractmethod
    def use(self) -> CacheUse: ...
