"""Policy `layer` over pinned host memory that the graph itself reads, see `swapkv_jax.in_graph`."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from swapkv_jax.cache.base import CacheUse
from swapkv_jax.cache.dram import DramLayerCache
from swapkv_jax.models.blocks import Params
from swapkv_jax.program import Program
from swapkv_jax.staging import pinned


class InGraphLayerCache(DramLayerCache):
    """All layers' KV in two pinned arrays, K [L, B, Hkv, D, S] and V [L, B, Hkv, S, D]."""

    def __init__(self, program: Program):
        super().__init__(program)
        plan = program.plan
        k_shape, v_shape = plan.layer_shapes(plan.batch)
        (self._k_pool, k), (self._v_pool, v) = (
            pinned((plan.layers, *shape), plan.dtype) for shape in (k_shape, v_shape)
        )
        self._k, self._v = list(k), list(v)

    def _open_sequences(self, names: list[str], prompts: Sequence[int], limits: Sequence[int]) -> None:
        return  # a pool has one generation's rows

    def start(self) -> None:
        super().start()
        self._ring = []  # the graph has slots of its own

    def step(
        self, layers: list[Params], x: jax.Array, lengths: jax.Array, held: np.ndarray, active: np.ndarray
    ) -> jax.Array:
        segment = self._program.segments[len(layers)]
        x, self._new = segment(layers, x, self._k_pool, self._v_pool, self._new, lengths)
        return x

    def settle(self, held: np.ndarray, active: np.ndarray) -> None:
        # The outputs of a graph are ready together: it reads the pool no more.
        for layer in range(len(self._new)):
            self._write_back(layer, held, active)

    def _close_sequences(self) -> None:
        return

    def close(self) -> None:
        super().close()
        self._k, self._v = [], []
        del self._k_pool, self._v_pool

    @property
    def use(self) -> CacheUse:
        return CacheUse(dram_used=sum(array.nbytes for array in (*self._k, *self._v)), wait_s=self._wait_s)
