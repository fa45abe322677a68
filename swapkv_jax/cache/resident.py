"""Policy `resident`: the whole KV on the device. The reference that every other policy is held against."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from swapkv_jax.cache.base import CacheUse
from swapkv_jax.models.blocks import Params
from swapkv_jax.program import Program
from swapkv_jax.staging import read_only_view, zeros


class ResidentCache:
    def __init__(self, program: Program):
        self._program = program
        plan = program.plan
        k_shape, v_shape = plan.layer_shapes(plan.batch)
        self._k = [zeros(k_shape, plan.dtype) for _ in range(plan.layers)]
        self._v = [zeros(v_shape, plan.dtype) for _ in range(plan.layers)]
        new = (2, plan.batch, plan.kv_heads, plan.head_dim)
        self._new = [zeros(new, plan.dtype) for _ in range(plan.layers)]

    def begin(self, prompts: Sequence[int], limits: Sequence[int]) -> None:
        pass  # the buffers are there; what an earlier generation left lies beyond every row's length

    def slot(self, layer: int) -> tuple[jax.Array, jax.Array]:
        return self._k[layer], self._v[layer]

    def filled(self, layer: int, row: int, length: int, k: jax.Array, v: jax.Array) -> None:
        self._k[layer], self._v[layer] = k, v

    def start(self) -> None:
        pass

    def step(
        self, layers: list[Params], x: jax.Array, lengths: jax.Array, held: np.ndarray, active: np.ndarray
    ) -> jax.Array:
        size = self._program.plan.layers_per_segment
        for first in range(0, len(layers), size):
            part = slice(first, first + size)
            graph = self._program.segments[len(layers[part])]
            x, self._new[part] = graph(
                layers[part], x, self._k[part], self._v[part], self._new[part], lengths
            )
        assert self._program.append is not None
        self._k, self._v = self._program.append(self._k, self._v, self._new, lengths)
        return x

    def settle(self, held: np.ndarray, active: np.ndarray) -> None:
        pass

    def newest(self, layer: int, held: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        k, v = read_only_view(self._new[layer])
        return k, v

    def finish(self) -> None:
        pass

    def close(self) -> None:
        self._k, self._v, self._new = [], [], []

    @property
    def use(self) -> CacheUse:
        return CacheUse()

    def addresses(self) -> dict[str, int]:
        return {
            f"{name}.{i}": array.unsafe_buffer_pointer()
            for name, arrays in (("kv.k", self._k), ("kv.v", self._v), ("new", self._new))
            for i, array in enumerate(arrays)
        }
