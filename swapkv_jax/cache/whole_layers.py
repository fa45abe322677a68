"""The layers of policy `group` that keep every group: group g of a row is in its slot g, and nothing is selected."""

from __future__ import annotations

import numpy as np

from swapkv_jax.cache.lanes import Lane
from swapkv_jax.cache.slot_pools import SlotPools
from swapkv_jax.group_graphs import selection_of
from swapkv_jax.plan import Plan


class WholeLayers:
    """What comes into these layers' slots: a prompt's groups from the tier, later ones from memory as they are
    completed, so that no step waits for a read of theirs."""

    def __init__(self, plan: Plan, pools: SlotPools):
        self._plan, self._pools = plan, pools
        self._layers = frozenset(selection_of(plan).whole)
        self._groups = np.zeros(plan.batch, np.int64)  # of each row's prompt
        # By layer: rows and groups [2, n] that the last step completed, and their records.
        self._completed: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def __contains__(self, layer: int | None) -> bool:
        return layer in self._layers

    def clear(self) -> None:
        """A new generation begins: nothing is in the slots."""
        self._completed.clear()
        for layer in self._layers:
            self._pools.used[layer].host[...] = False

    def prefilled(self, row: int, length: int) -> None:
        """A row's prompt has `length` tokens."""
        self._groups[row] = length // self._plan.group_tokens

    def fill(self, lane: Lane) -> None:
        """Every whole group of the prompts into its slot, in all layers.

        Raises:
          TierError: a record cannot be read or is damaged.
        """
        groups = np.concatenate([np.arange(count, dtype=np.int32) for count in self._groups.tolist()])
        rows = np.repeat(np.arange(self._plan.batch, dtype=np.int32), self._groups)
        for layer in sorted(self._layers):
            most = self._pools.most(layer)
            for first in range(0, len(groups), most):
                here = slice(first, first + most)
                lane.read_now(layer, rows[here], groups[here])
                lane.fence = self._pools.load(layer, lane.staging, rows[here], groups[here])
            self._pools.used[layer].host[rows, groups] = True

    def complete(self, layer: int, rows: np.ndarray, groups: np.ndarray, records: np.ndarray) -> None:
        """A step has completed groups [n] of rows [n]; `records`, uint8 [n, stride], stay as they are."""
        self._completed[layer] = (np.stack([rows, groups]), records)

    def place(self, layer: int, lane: Lane) -> None:
        """What the step before completed into its slots."""
        completed = self._completed.pop(layer, None)
        if completed is None:
            return
        places, records = completed
        most = self._pools.most(layer)
        for first in range(0, len(records), most):
            here = slice(first, first + most)
            lane.wait_reusable()
            lane.staging.records[: len(records[here])] = records[here]
            lane.fence = self._pools.load(layer, lane.staging, *places[:, here])
        self._pools.used[layer].host[tuple(places)] = True
