"""Policy `layer` (SwapKV's layer virtualisation): a few physical layers on the device, the rest in a tier."""

from __future__ import annotations

import abc
from collections.abc import Sequence

import jax
import numpy as np

from swapkv_jax.cache.offload import OffloadCache, Slot
from swapkv_jax.models.blocks import Params
from swapkv_jax.program import Program
from swapkv_jax.staging import fetch, read_only_view, zeros


class LayerCache(OffloadCache):
    """What every step has in common: its new tokens, which go back to the tier. Subclasses say where layers are kept
    and how a step reaches them: see dram.py, disk.py and in_graph.py."""

    def __init__(self, program: Program):
        super().__init__(program)
        plan = self._plan
        new = (2, plan.batch, plan.kv_heads, plan.head_dim)
        self._new = [zeros(new, plan.dtype) for _ in range(plan.layers)]

    # ---- what a tier provides ------------------------------------------------------------------------

    @abc.abstractmethod
    def _append(self, layer: int, row: int, at: int, k: np.ndarray, v: np.ndarray) -> None:
        """Copies one token, K and V [Hkv, D], to position `at` of a row in the tier."""

    # ---- decode --------------------------------------------------------------------------------------

    @abc.abstractmethod
    def step(
        self, layers: list[Params], x: jax.Array, lengths: jax.Array, held: np.ndarray, active: np.ndarray
    ) -> jax.Array: ...

    @abc.abstractmethod
    def settle(self, held: np.ndarray, active: np.ndarray) -> None: ...

    def _write_back(self, layer: int, held: np.ndarray, active: np.ndarray) -> None:
        k, v = fetch(self._new[layer])  # [B, Hkv, D] each
        for row in np.flatnonzero(active):
            self._append(layer, int(row), int(held[row]), k[row], v[row])

    def newest(self, layer: int, held: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        k, v = read_only_view(self._new[layer])
        return k, v

    # ---- the end -------------------------------------------------------------------------------------

    def close(self) -> None:
        super().close()
        self._new = []

    def addresses(self) -> dict[str, int]:
        return {f"new.{i}": array.unsafe_buffer_pointer() for i, array in enumerate(self._new)}


class LayerByLayerCache(LayerCache):
    """A step of one graph per layer, whose KV arrives while the layers before it compute; a layer's new token is
    written back while the next one computes."""

    @abc.abstractmethod
    def _arrive(self, layer: int) -> Slot:
        """The layer's KV on the device, or on its way in the order the device executes."""

    @abc.abstractmethod
    def _ahead(self, layer: int, held: np.ndarray, active: np.ndarray) -> None:
        """Starts moving what follows `layer`, which computes now. Layers before it are written back."""

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


def slot_addresses(slots: Sequence[Slot]) -> dict[str, int]:
    """Where the K and V of each device slot lie."""
    return {
        f"slot.{part}.{i}": array.unsafe_buffer_pointer()
        for i, slot in enumerate(slots)
        for part, array in zip("kv", slot, strict=True)
    }
