"""Policy `layer` (SwapKV's layer virtualisation): a few physical layers on the device, the rest in a tier.

This base class is the part every tier shares: the prefill ring, whose layers stream out while the next one
computes, and the step, which writes back a layer's new token while the next layer computes.
"""

from __future__ import annotations

import abc
import os
import secrets
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import jax
import numpy as np

from swapkv_jax.cache.base import CacheUse
from swapkv_jax.models.blocks import Params
from swapkv_jax.program import Program
from swapkv_jax.staging import fetch, read_only_view, zeros

Slot = tuple[jax.Array, jax.Array]


class LayerCache(abc.ABC):
    """Subclasses say where layers are kept: see dram.py, disk.py and, for policy `group`, group.py."""

    def __init__(self, program: Program):
        self._program = program
        self._plan = plan = program.plan
        self._io = ThreadPoolExecutor(plan.io_threads, thread_name_prefix="swapkv-io")
        self._name = f"decode-{os.getpid()}-{secrets.token_hex(4)}"  # others may use the same store
        self._generation = 0
        self._wait_s = 0.0
        self._ring: list[Slot] = []  # prefill's slots; layer i uses i mod physical_layers
        self._streams: list[Future[None] | None] = []
        new = (2, plan.batch, plan.kv_heads, plan.head_dim)
        self._new = [zeros(new, plan.dtype) for _ in range(plan.layers)]

    # ---- what a tier provides ------------------------------------------------------------------------

    @abc.abstractmethod
    def _open_sequences(self, names: list[str], prompts: Sequence[int], limits: Sequence[int]) -> None:
        """Makes room for the rows of a new generation."""

    @abc.abstractmethod
    def _keep(self, layer: int, row: int, length: int, k: np.ndarray, v: np.ndarray) -> None:
        """Copies a prefilled row, K [Hkv, D, S] and V [Hkv, S, D], into the tier. Runs on an I/O thread."""

    @abc.abstractmethod
    def _append(self, layer: int, row: int, at: int, k: np.ndarray, v: np.ndarray) -> None:
        """Copies one token, K and V [Hkv, D], to position `at` of a row in the tier."""

    @abc.abstractmethod
    def _arrive(self, layer: int) -> Slot:
        """The layer's KV on the device, or on its way in the order the device executes."""

    def _ahead(self, layer: int, held: np.ndarray, active: np.ndarray) -> None:
        """Starts moving what follows `layer`, which computes now. Layers before it are written back."""
        return

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

    # ---- decode --------------------------------------------------------------------------------------

    def step(
        self, layers: list[Params], x: jax.Array, lengths: jax.Array, held: np.ndarray, active: np.ndarray
    ) -> jax.Array:
        segment = self._program.segments[1]
        for layer, params in enumerate(layers):
            k, v = self._arrive(layer)
            x, (self._new[layer],) = segment([params], x, [k], [v], [self._new[layer]], lengths)
            if layer:
                self._write_back(layer - 1, held, active)
            self._ahead(layer, held, active)
        self._write_back(len(layers) - 1, held, active)
        return x

    def settle(self, held: np.ndarray, active: np.ndarray) -> None:
        return  # every layer was written back while the next one computed

    def _write_back(self, layer: int, held: np.ndarray, active: np.ndarray) -> None:
        k, v = fetch(self._new[layer])  # [B, Hkv, D] each
        for row in np.flatnonzero(active):
            self._append(layer, int(row), int(held[row]), k[row], v[row])

    # ---- the end -------------------------------------------------------------------------------------

    def finish(self) -> None:
        # What is still streaming belongs to a prefill that was given up: nobody will read it, nor how it failed.
        wait(stream for stream in self._streams if stream is not None)
        self._streams = [None] * len(self._streams)
        self._close_sequences()

    def close(self) -> None:
        self._io.shutdown(wait=True, cancel_futures=True)
        self._ring, self._streams, self._new = [], [], []

    @property
    @abc.abstractmethod
    def use(self) -> CacheUse: ...

    def addresses(self) -> dict[str, int]:
        return {f"new.{i}": array.unsafe_buffer_pointer() for i, array in enumerate(self._new)}


def slot_addresses(slots: Sequence[Slot]) -> dict[str, int]:
    """Where the K and V of each device slot lie."""
    return {
        f"slot.{part}.{i}": array.unsafe_buffer_pointer()
        for i, slot in enumerate(slots)
        for part, array in zip("kv", slot, strict=True)
    }
