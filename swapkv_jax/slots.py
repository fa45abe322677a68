"""The slot table of the `group` policy: which group of each (layer, row) sits in which device slot.

Bookkeeping only, in NumPy. One `request` per layer and step turns the groups that a selection wants into
slots, and says which groups must be read to fill them. A slot takes part in lookups only after `publish`
said that its data landed; what it held before is gone from the moment it is assigned, since its memory may be
overwritten from then on.

Shapes below: B rows, M wanted groups per row, C slots per layer and row, N groups a row can have, n misses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from swapkv_jax.errors import PlanError
from swapkv_jax.selection import Replacement

IN_USE = np.iinfo(np.int64).max  # the age of a slot that must not be taken
LANDED = 0  # the ticket of a slot that no read is on its way to


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """What one selection of one layer needs. The missing groups are in (row, group) order, each once."""

    layer: int
    ticket: int  # names the request among all of its table
    wanted: NDArray[np.int32]  # [B, M], -1 where nothing is wanted
    slots: NDArray[np.int32]  # [B, M], the slot of each wanted group, -1 where nothing is wanted
    missing_rows: NDArray[np.int32]  # [n]
    missing_groups: NDArray[np.int32]  # [n]
    missing_slots: NDArray[np.int32]  # [n], where each missing group is to go
    hits: int  # distinct wanted groups that had a slot, landed or still being read for an earlier request

    @property
    def misses(self) -> int:
        """Distinct wanted groups that must be read."""
        return len(self.missing_groups)


class SlotTable:
    """Groups in slots, per layer and row, replaced first-in-first-out (`fifo`), least recently used (`lru`), or
    all of them at every request (`all`).

    Every request must be ended by `publish` or `cancel`. Not thread-safe: one thread owns the table, or the
    callers share a lock.

    Args:
      layers, rows: how many independent (layer, row) sets of slots there are.
      slots: C, slots in each set.
      groups: N, group ids run from 0 to N-1.
      policy: what is overwritten first: `fifo` the oldest load (KVSwap, arXiv 2511.11907), `lru` what no
        request wanted for longest, the lowest slot first among equals. Empty slots go before either. `all` empties
        a layer's slots at each request, but for those that are still being read into: every group that is wanted
        is read again.

    Raises:
      PlanError: an unknown policy or a size below 1.
    """

    def __init__(self, layers: int, rows: int, slots: int, groups: int, policy: Replacement) -> None:
        if policy not in get_args(Replacement):
            raise PlanError(
                f"slot replacement {policy!r} is unknown; use {' or '.join(get_args(Replacement))}"
            )
        for name, size in (("layers", layers), ("rows", rows), ("slots", slots), ("groups", groups)):
            if size < 1:
                raise PlanError(f"a slot table needs {name} of at least 1, not {size}")
        self.rows, self.slots, self.groups = rows, slots, groups
        self.policy: Replacement = policy
        self.hits = 0
        self.misses = 0
        self._clock = 1  # of loads under fifo, of requests under lru
        self._tickets = LANDED
        # The column after the last group always says -1. Index -1 ("nothing wanted") added to a row's first
        # position lands on the column of the row before (row 0: of the last), so that no index needs a mask.
        self._slot_of = np.full((layers, rows, groups + 1), -1, np.int32)
        self._group_of = np.full((layers, rows, slots), -1, np.int32)
        self._ticket = np.full((layers, rows, slots), LANDED, np.int64)
        self._lane = np.arange(slots, dtype=np.int64)
        # Age is time * C + slot: sorting ages yields the slots too. Time 0 is an empty slot's.
        self._age = np.tile(self._lane, (layers, rows, 1))
        self._row = np.arange(rows, dtype=np.int64)
        self._group_base = self._row[:, None] * (groups + 1)
        self._mask_base = self._row[:, None] * (slots + 1)

    @property
    def reuse_rate(self) -> float | None:
        """Wanted groups that needed no read, as a fraction of all wanted; None before the first."""
        total = self.hits + self.misses
        return self.hits / total if total else None

    def request(self, layer: int, wanted: ArrayLike) -> Request:
        """Slots for the groups `wanted` (int [B, M], -1 for nothing), assigning one to each that has none.

        A slot is taken only if it holds no group wanted here and no read is on its way to it. A group that an
        earlier request is still reading is not read again: it counts as a hit, and can be used once that
        request is published. Of a group named twice in a row both places get the same slot, and it counts once.

        Raises:
          PlanError: a row wants more distinct groups than C, or than C less what is being read for others.
          ValueError: `wanted` has another row count, is not of integers, or names a group that cannot exist.
          Either leaves the table as it was.
        """
        wanted = self._checked(wanted)
        slot_of = self._slot_of[layer].reshape(-1)
        index = wanted + self._group_base
        slots = slot_of[index]
        if self.policy == "all":
            slots[self._landed(layer, slots)] = -1
        in_use = self._mask(slots)
        hits = int(np.count_nonzero(in_use))
        absent = _distinct(index[(slots < 0) & (wanted >= 0)])
        rows, groups = np.divmod(absent, self.groups + 1)
        targets = self._victims(layer, rows, in_use)

        self._tickets += 1
        if self.policy == "all":
            self._forget(layer, np.flatnonzero(self.kept_mask(layer)))
        if len(absent):
            at = rows * self.slots + targets
            group_of = self._group_of[layer].reshape(-1)
            slot_of[rows * (self.groups + 1) + group_of[at]] = -1
            slot_of[absent] = targets
            group_of[at] = groups
            self._ticket[layer].reshape(-1)[at] = self._tickets
            slots = slot_of[index]
        self._touch(layer, rows, targets, in_use)
        self.hits += hits
        self.misses += len(absent)
        return Request(
            layer=layer,
            ticket=self._tickets,
            wanted=wanted,
            slots=slots,
            missing_rows=rows.astype(np.int32),
            missing_groups=groups.astype(np.int32),
            missing_slots=targets.astype(np.int32),
            hits=hits,
        )

    def publish(self, request: Request) -> None:
        """The missing groups of `request` are in their slots: lookups find them from now on.

        Groups of a row that was cleared meanwhile are dropped, and their slots become free.

        Raises:
          ValueError: the request was published or cancelled before.
        """
        self._ticket[request.layer].reshape(-1)[self._outstanding(request)] = LANDED

    def cancel(self, request: Request) -> None:
        """The read of `request`'s missing groups failed: their slots are empty.

        A later request that wanted some of the same groups doesn't get them either; its mask leaves them out.

        Raises:
          ValueError: the request was published or cancelled before.
        """
        at = self._outstanding(request)
        self._forget(request.layer, at)
        self._ticket[request.layer].reshape(-1)[at] = LANDED

    def lookup(self, layer: int, groups: ArrayLike) -> NDArray[np.int32]:
        """The slot of each group (int [B, any]); -1 where it has none or its data hasn't landed."""
        groups = self._checked(groups)
        slots = self._slot_of[layer].reshape(-1)[groups + self._group_base]
        slots[~self._landed(layer, slots)] = -1
        return slots

    def use_mask(self, request: Request) -> NDArray[np.bool_]:
        """[B, C]: the slots which hold a group that `request` wanted and whose data has landed.

        It counts `hits + misses` slots once the request and those it shares reads with are published, unless
        a later request on the layer took some: make the next only when this one's step has been dispatched.
        """
        return np.ascontiguousarray(self._mask(self.lookup(request.layer, request.wanted)))

    def kept_mask(self, layer: int) -> NDArray[np.bool_]:
        """[B, C]: the slots that hold a group whose data has landed, wanted last or not."""
        return (self._group_of[layer] >= 0) & (self._ticket[layer] == LANDED)

    def clear(self, rows: Sequence[int] | None = None) -> None:
        """Empties these rows (all by default) in every layer, as their sequences end.

        A slot that is still being read into stays reserved until its request is published or cancelled.
        """
        which = self._row if rows is None else np.array(rows, np.int64)
        self._slot_of[:, which] = -1
        self._group_of[:, which] = -1
        self._age[:, which] = self._lane

    def _checked(self, groups: ArrayLike) -> NDArray[np.int32]:
        """A copy as int32, since a request outlives the caller's buffer."""
        array = np.asarray(groups)
        if array.ndim != 2 or len(array) != self.rows or array.dtype.kind not in "iu":
            raise ValueError(
                f"groups are {array.dtype}{array.shape}, not integers of shape [{self.rows}, any]"
            )
        if array.size and not (array.min() >= -1 and array.max() < self.groups):
            raise ValueError(
                f"group ids {array.min()} to {array.max()} are not all within -1 to {self.groups - 1}"
            )
        return array.astype(np.int32)

    def _landed(self, layer: int, slots: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Whether no read is on its way to these slots [B, any]; of -1, whatever another row's slot says."""
        return self._ticket[layer].reshape(-1)[slots + self._row[:, None] * self.slots] == LANDED

    def _forget(self, layer: int, at: NDArray[np.int64]) -> None:
        """Empties a layer's slots [n], counted through all rows."""
        group_of = self._group_of[layer].reshape(-1)
        # A slot of a cleared row holds -1, which is its row's spare column again.
        self._slot_of[layer].reshape(-1)[at // self.slots * (self.groups + 1) + group_of[at]] = -1
        group_of[at] = -1
        self._age[layer].reshape(-1)[at] = at % self.slots

    def _mask(self, slots: NDArray[np.int32]) -> NDArray[np.bool_]:
        """[B, C], true at these slots [B, M]; the spare column takes every -1, as in `_slot_of`."""
        mask = np.zeros(self.rows * (self.slots + 1), np.bool_)
        mask[slots + self._mask_base] = True
        return mask.reshape(self.rows, self.slots + 1)[:, : self.slots]

    def _victims(self, layer: int, rows: NDArray[np.int64], in_use: NDArray[np.bool_]) -> NDArray[np.int64]:
        """A slot [n] for each miss, given its row (ascending); a row's first miss gets the oldest slot."""
        if not len(rows):
            return rows
        ages = np.where(in_use | (self._ticket[layer] != LANDED), IN_USE, self._age[layer])
        ages.sort(axis=1)
        counts = np.bincount(rows, minlength=self.rows)
        rank = np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows]
        taken = ages[rows, np.minimum(rank, self.slots - 1)]
        full = (taken == IN_USE) | (rank >= self.slots)  # out of free slots, or of slots at all
        if full.any():
            row = int(rows[full.argmax()])
            held = int(np.count_nonzero(in_use[row]))
            reading = int(np.count_nonzero((self._ticket[layer, row] != LANDED) & ~in_use[row]))
            raise PlanError(
                f"row {row} of layer {layer} wants {held + int(counts[row])} groups at once and has {self.slots} "
                f"slots, {reading} of them awaiting reads for other requests; use at least "
                f"{held + int(counts[row]) + reading} slots or end those requests first"
            )
        return taken % self.slots

    def _touch(
        self, layer: int, rows: NDArray[np.int64], targets: NDArray[np.int64], in_use: NDArray[np.bool_]
    ) -> None:
        """Makes the slots of this request the youngest: the loaded ones under fifo, all used under lru."""
        age = self._age[layer]
        if self.policy == "fifo":
            order = self._clock + np.arange(len(rows))
            age[rows, targets] = order * self.slots + targets
            self._clock += len(rows)
        else:
            in_use[rows, targets] = True
            np.copyto(age, self._clock * self.slots + self._lane, where=in_use)
            self._clock += 1

    def _outstanding(self, request: Request) -> NDArray[np.int64]:
        """Flat [B*C] positions of the slots that `request` is filling."""
        at = request.missing_rows.astype(np.int64) * self.slots + request.missing_slots
        if (self._ticket[request.layer].reshape(-1)[at] != request.ticket).any():
            raise ValueError(
                f"request {request.ticket} of layer {request.layer} was published or cancelled before"
            )
        return at


def _distinct(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """The values in ascending order, each once. (np.unique does more, at several times the cost.)"""
    values = np.sort(values)
    keep = np.ones(len(values), np.bool_)
    np.not_equal(values[1:], values[:-1], out=keep[1:])
    return values[keep]
