"""Policy `layer` over DRAM: the locked pool itself where device memory is host memory, else pinned arrays."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import jax
import numpy as np

from swapkv_jax.cache.base import CacheUse
from swapkv_jax.cache.layer import LayerByLayerCache, LayerCache, Slot, slot_addresses
from swapkv_jax.models.blocks import Params
from swapkv_jax.program import Program
from swapkv_jax.staging import alias, host_view, pinned, to_device, zeros
from swapkv_jax.tiers import DramPool


class DramLayerCache(LayerCache):
    """What all transports share: each layer's K [B, Hkv, D, S] and V [B, Hkv, S, D] as host arrays."""

    _k: list[np.ndarray]
    _v: list[np.ndarray]

    def _keep(self, layer: int, row: int, length: int, k: np.ndarray, v: np.ndarray) -> None:
        self._k[layer][row, :, :, :length] = k[:, :, :length]
        self._v[layer][row, :, :length] = v[:, :length]

    def _append(self, layer: int, row: int, at: int, k: np.ndarray, v: np.ndarray) -> None:
        self._k[layer][row, :, :, at] = k
        self._v[layer][row, :, at] = v


class AliasLayerCache(DramLayerCache):
    """A device slot *is* a layer of the pool: nothing is copied, and the pool is what the graphs read."""

    def __init__(self, program: Program):
        super().__init__(program)
        plan = program.plan
        self._pool = DramPool(plan.memory(program.geometry).dram)
        self._names: list[str] = []
        self._k, self._v, self._slots = [], [], []
        # Donated buffers keep their addresses, so one view of each serves every step.
        self._new_views = [host_view(new) for new in self._new]

    def _open_sequences(self, names: list[str], prompts: Sequence[int], limits: Sequence[int]) -> None:
        plan = self._plan
        k_shape, v_shape = (shape[1:] for shape in plan.layer_shapes(1))
        self._drop_views()
        self._names = names
        for layer in range(plan.layers):
            k = self._pool.allocate_rows(names, f"k.{layer}", k_shape, plan.dtype)
            v = self._pool.allocate_rows(names, f"v.{layer}", v_shape, plan.dtype)
            self._k.append(self._pool.rows_view(k))
            self._v.append(self._pool.rows_view(v))

    def start(self) -> None:
        super().start()
        self._ring = []  # decode reads the pool; prefill's slots are given back
        self._slots = [(alias(k), alias(v)) for k, v in zip(self._k, self._v, strict=True)]

    def step(
        self, layers: list[Params], x: jax.Array, lengths: jax.Array, held: np.ndarray, active: np.ndarray
    ) -> jax.Array:
        segment = self._program.segments[1]
        for layer, params in enumerate(layers):
            k, v = self._slots[layer]
            x, (self._new[layer],) = segment([params], x, [k], [v], [self._new[layer]], lengths)
        return x

    def settle(self, held: np.ndarray, active: np.ndarray) -> None:
        # Waking for each layer's new token costs more than the writes: no layer is read again before the
        # next step, so all are written at once, while the head computes.
        self._new[-1].block_until_ready()
        rows = [int(row) for row in np.flatnonzero(active)]
        for layer, (k, v) in enumerate(self._new_views):
            for row in rows:
                self._append(layer, row, int(held[row]), k[row], v[row])

    def _close_sequences(self) -> None:
        self._drop_views()
        for name in self._names:
            if name in self._pool:  # else the generation failed before it had any memory
                self._pool.finish(name)
        self._names = []

    def _drop_views(self) -> None:
        self._k, self._v, self._slots = [], [], []

    def close(self) -> None:
        super().close()
        self._drop_views()
        self._pool.close()

    @property
    def use(self) -> CacheUse:
        note = self._pool.note
        return CacheUse(dram_used=self._pool.used, wait_s=self._wait_s, notes=(note,) if note else ())

    def addresses(self) -> dict[str, int]:
        return {**super().addresses(), **slot_addresses(self._slots)}


class PinnedLayerCache(DramLayerCache, LayerByLayerCache):
    """Layers in pinned_host arrays: one computes from the device slot while the next ones are copied in.

    An arrival lands in memory of its own, since a copy cannot be aimed at an existing device buffer; moving
    it into the slot on the device is cheap and keeps the address that the graphs read the same.
    """

    def __init__(self, program: Program):
        super().__init__(program)
        plan = program.plan
        k_shape, v_shape = plan.layer_shapes(plan.batch)
        ks = [pinned(k_shape, plan.dtype) for _ in range(plan.layers)]
        vs = [pinned(v_shape, plan.dtype) for _ in range(plan.layers)]
        self._arrays = [(k[0], v[0]) for k, v in zip(ks, vs, strict=True)]
        self._k, self._v = [view for _, view in ks], [view for _, view in vs]
        self._slot = (zeros(k_shape, plan.dtype), zeros(v_shape, plan.dtype))
        self._arriving: deque[tuple[int, tuple[jax.Array, jax.Array]]] = deque()

    def _open_sequences(self, names: list[str], prompts: Sequence[int], limits: Sequence[int]) -> None:
        self._arriving.clear()

    def _prefill_ring(self) -> list[Slot]:
        """Decode's slot and as many more as decode has layers arriving: no memory beyond the plan's."""
        plan = self._plan
        k_shape, v_shape = plan.layer_shapes(plan.batch)
        others = range((plan.physical_layers or 0) - 1)
        return [self._slot, *((zeros(k_shape, plan.dtype), zeros(v_shape, plan.dtype)) for _ in others)]

    def _release_ring(self) -> None:
        if self._ring:
            self._slot, self._ring = self._ring[0], []

    def start(self) -> None:
        super().start()
        self._release_ring()
        for layer in range((self._plan.physical_layers or 0) - 1):
            self._request(layer)

    def _request(self, layer: int) -> None:
        k, v = self._arrays[layer]
        self._arriving.append((layer, (to_device(k), to_device(v))))

    def _arrive(self, layer: int) -> Slot:
        arrived, (k, v) = self._arriving.popleft()
        assert arrived == layer, f"layer {arrived} arrived for layer {layer}"
        assert self._program.fill is not None
        self._slot = self._program.fill(*self._slot, k, v)
        return self._slot

    def _ahead(self, layer: int, held: np.ndarray, active: np.ndarray) -> None:
        self._request((layer + (self._plan.physical_layers or 0) - 1) % self._plan.layers)

    def _close_sequences(self) -> None:
        self._release_ring()
        self._arriving.clear()

    def close(self) -> None:
        super().close()
        self._k, self._v, self._arrays = [], [], []
        self._arriving.clear()

    @property
    def use(self) -> CacheUse:
        held = sum(array.nbytes for layer in self._arrays for array in layer)
        return CacheUse(dram_used=held, wait_s=self._wait_s)

    def addresses(self) -> dict[str, int]:
        return {**super().addresses(), **slot_addresses([self._slot])}
