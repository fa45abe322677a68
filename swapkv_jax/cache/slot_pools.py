"""The slots of policy `group` on the device: each layer's arrays, and which of its slots a step attends."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from swapkv_jax.group_graphs import GroupGraphs, selection_of
from swapkv_jax.plan import Plan
from swapkv_jax.slot_layouts import Parts
from swapkv_jax.staging import Flags, StagingBuffer, zeros


class SlotPools:
    """Attributes:
    arrays: each layer's slots, as `Plan.pool_parts`. used: [B, C1] of each layer, to be set between its steps.
    """

    def __init__(self, plan: Plan, graphs: GroupGraphs):
        self._plan, self._whole = plan, selection_of(plan).whole
        self._loads = {True: graphs.whole_load, False: graphs.load}
        counts = [plan.pool_slots(layer) for layer in range(plan.layers)]
        self.arrays: list[Parts] = [
            tuple(zeros(part.shape, part.dtype) for part in plan.pool_parts(count).values())
            for count in counts
        ]
        self.used = [Flags((plan.batch, count), plan.transport or "copy") for count in counts]

    def most(self, layer: int) -> int:
        """Records that one load into the layer's slots can carry."""
        return max(self._loads[layer in self._whole])

    def load(
        self,
        layer: int,
        staging: StagingBuffer,
        rows: np.ndarray,
        slots: np.ndarray,
        *keys: Any,
    ) -> jax.Array:
        """Loads the first records of `staging` into slots [n] of rows [n]; its fence, ready when they have been read.

        keys: groups [n] and the summary, which makes the keys that records lack.
        """
        loads = self._loads[layer in self._whole]
        size = next(n for n in sorted(loads) if n >= len(rows))

        def padded(values: np.ndarray, last: int) -> np.ndarray:
            whole = np.full(size, last, np.int32)
            whole[: len(values)] = values
            return whole

        # Padding goes to the spare slot.
        places = [padded(rows, 0), padded(slots, self._plan.slots_of(layer))]
        if keys:
            groups, summary = keys
            places += [padded(groups, 0), summary]
        self.arrays[layer], fence = loads[size](self.arrays[layer], staging.arrived(size), *places)
        return fence

    def forget(self) -> None:
        """Frees the arrays."""
        self.arrays = []
