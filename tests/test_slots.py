"""SlotTable against a model of plain dicts and lists, one (layer, row) at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import get_args

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from swapkv_jax.errors import PlanError
from swapkv_jax.selection import Replacement
from swapkv_jax.slots import Request, SlotTable


@dataclass
class Slot:
    """The model's slot: what it holds, and the request whose read it awaits."""

    group: int | None = None
    reader: int | None = None
    age: int = 0  # 0 where empty; else when its group was loaded (fifo) or last wanted (lru)


@dataclass
class RowModel:
    """One (layer, row). `time` counts loads under fifo and requests under lru."""

    capacity: int
    policy: str
    time: int = 0
    slots: list[Slot] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.slots = [Slot() for _ in range(self.capacity)]

    def where(self, group: int) -> int | None:
        return next((i for i, slot in enumerate(self.slots) if slot.group == group), None)

    def loads_of(self, wanted: list[int]) -> list[tuple[int, int]] | None:
        """(group, slot) of each group to read, groups ascending; None where slots don't suffice."""
        groups = {group for group in wanted if group >= 0}
        found = {s.group for s in self.slots if self.policy != "all" or s.reader is not None}
        missing = sorted(groups - found)
        free = [i for i, s in enumerate(self.slots) if s.reader is None and s.group not in groups & found]
        free.sort(key=lambda i: (self.slots[i].age, i))
        return list(zip(missing, free, strict=False)) if len(free) >= len(missing) else None

    def load(self, wanted: list[int], loads: list[tuple[int, int]], ticket: int) -> None:
        if self.policy == "all":
            self.slots = [slot if slot.reader is not None else Slot() for slot in self.slots]
        for group, i in loads:
            self.slots[i] = Slot(group, reader=ticket)
        self.time += 1
        if self.policy != "fifo":
            for slot in self.slots:
                if slot.group in wanted:
                    slot.age = self.time
        else:
            for _, i in loads:
                self.slots[i].age = self.time
                self.time += 1

    def end(self, ticket: int, landed: bool) -> None:
        for i, slot in enumerate(self.slots):
            if slot.reader == ticket:
                slot.reader = None
                if not landed:
                    self.slots[i] = Slot()

    def clear(self) -> None:
        self.slots = [Slot(reader=slot.reader) for slot in self.slots]

    def usable(self, wanted: list[int]) -> list[bool]:
        groups = {group for group in wanted if group >= 0}
        return [slot.group in groups and slot.reader is None for slot in self.slots]

    def kept(self) -> list[bool]:
        return [slot.group is not None and slot.reader is None for slot in self.slots]


class SlotTableMachine(RuleBasedStateMachine):
    """Requests of any shape, ended in any order, between clears of any rows."""

    @initialize(
        layers=st.integers(1, 2),
        rows=st.integers(1, 3),
        slots=st.integers(1, 8),
        groups=st.integers(1, 12),
        policy=st.sampled_from(get_args(Replacement)),
    )
    def build(self, layers, rows, slots, groups, policy):
        self.table = SlotTable(layers, rows, slots, groups, policy)
        self.model = [[RowModel(slots, policy) for _ in range(rows)] for _ in range(layers)]
        self.open: list[Request] = []
        self.ended: list[Request] = []
        self.hits = self.misses = 0

    @rule(data=st.data())
    def request(self, data):
        layer = data.draw(st.integers(0, len(self.model) - 1))
        width = data.draw(st.integers(0, self.table.slots + 1))
        ids = st.lists(st.integers(-1, self.table.groups - 1), min_size=width, max_size=width)
        wanted = data.draw(st.lists(ids, min_size=self.table.rows, max_size=self.table.rows))
        array = np.array(wanted, np.int32).reshape(self.table.rows, width)
        loads = [row.loads_of(ids) for row, ids in zip(self.model[layer], wanted, strict=True)]

        if None in loads:
            before = self.seen(layer)
            with pytest.raises(PlanError, match=rf"row {loads.index(None)} of layer {layer} wants"):
                self.table.request(layer, array)
            assert self.seen(layer) == before
            return

        request = self.table.request(layer, array)
        array[:] = -1  # the caller's buffer is the caller's again
        assert request.wanted.tolist() == wanted
        listed = zip(request.missing_rows, request.missing_groups, request.missing_slots, strict=True)
        assert list(listed) == [
            (b, group, slot) for b, pairs in enumerate(loads) for group, slot in pairs or []
        ]
        distinct = sum(len({group for group in ids if group >= 0}) for ids in wanted)
        assert (request.hits + request.misses, request.misses) == (
            distinct,
            sum(map(len, filter(None, loads))),
        )
        for row, ids, pairs, slots in zip(self.model[layer], wanted, loads, request.slots, strict=True):
            row.load(ids, pairs or [], request.ticket)
            assert [row.where(group) if group >= 0 else -1 for group in ids] == slots.tolist()
        self.hits += request.hits
        self.misses += request.misses
        self.open.append(request)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), landed=st.booleans())
    def end(self, data, landed):
        request = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        (self.table.publish if landed else self.table.cancel)(request)
        for row in self.model[request.layer]:
            row.end(request.ticket, landed)
        self.ended.append(request)

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def end_twice(self, data):
        request = data.draw(st.sampled_from(self.ended))
        assume(request.misses)
        for again in (self.table.publish, self.table.cancel):
            with pytest.raises(ValueError, match=f"request {request.ticket} of layer {request.layer} was"):
                again(request)

    @rule(data=st.data())
    def clear(self, data):
        rows = data.draw(st.none() | st.lists(st.integers(0, self.table.rows - 1), unique=True))
        self.table.clear(rows)
        for layer in self.model:
            for b in range(self.table.rows) if rows is None else rows:
                layer[b].clear()

    def seen(self, layer: int) -> list[list[int]]:
        every = np.tile(np.arange(-1, self.table.groups), (self.table.rows, 1))
        return self.table.lookup(layer, every).tolist()

    @invariant()
    def lookups_agree(self):
        """Absent while being read; and no two groups in one slot, no group in two, as the model can't either."""
        for layer, rows in enumerate(self.model):
            held = [
                {s.group: i for i, s in enumerate(r.slots) if s.group is not None and not s.reader}
                for r in rows
            ]
            assert self.seen(layer) == [[h.get(g, -1) for g in range(-1, self.table.groups)] for h in held]

    @invariant()
    def kept_masks_agree(self):
        for layer, rows in enumerate(self.model):
            assert self.table.kept_mask(layer).tolist() == [row.kept() for row in rows]

    @invariant()
    def masks_agree(self):
        """Of requests in progress and of the latest ended ones."""
        for request in self.open + self.ended[-2:]:
            rows = zip(self.model[request.layer], request.wanted.tolist(), strict=True)
            assert self.table.use_mask(request).tolist() == [row.usable(wanted) for row, wanted in rows]

    @invariant()
    def counters_agree(self):
        assert (self.table.hits, self.table.misses) == (self.hits, self.misses)


TestSlotTable = SlotTableMachine.TestCase
TestSlotTable.settings = settings(max_examples=80, stateful_step_count=20, deadline=None)


@given(st.data(), st.sampled_from(get_args(Replacement)), st.integers(1, 5), st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_one_step_at_a_time_always_has_every_wanted_group(data, policy, width, spare):
    """The engine's use: C = M and C > M, rows of few or no groups, each request published before the next."""
    table = SlotTable(1, 2, width + spare, 9, policy)
    for _ in range(8):
        ids = st.lists(st.integers(-1, 8), min_size=width, max_size=width)
        wanted = np.array([data.draw(ids), data.draw(ids)])
        request = table.request(0, wanted)
        assert table.use_mask(request).sum() == request.hits
        table.publish(request)
        assert np.array_equal(table.lookup(0, wanted), request.slots)
        assert table.use_mask(request).sum() == request.hits + request.misses


def _step(table: SlotTable, *groups: int) -> Request:
    request = table.request(0, [groups])
    table.publish(request)
    return request


@pytest.mark.parametrize(("policy", "evicted"), [("fifo", 0), ("lru", 1)])
def test_policies_differ_in_whether_a_use_keeps_a_group(policy, evicted):
    table = SlotTable(1, 1, 3, 9, policy)
    for group in (0, 1, 2, 0):
        _step(table, group)
    _step(table, 8)
    assert [group for group in range(3) if table.lookup(0, [[group]])[0, 0] < 0] == [evicted]


def test_fifo_passes_over_the_oldest_group_while_it_is_wanted():
    table = SlotTable(1, 1, 3, 9, "fifo")
    _step(table, 0, 1, 2)
    assert _step(table, 0, 7).missing_slots == [1]
    assert _step(table, 8).missing_slots == [0]  # and takes it as soon as it isn't


def test_groups_loaded_together_leave_in_the_order_they_were_loaded():
    table = SlotTable(1, 1, 3, 9, "fifo")
    for group in (0, 1, 2, 3):
        _step(table, group)  # 3 takes slot 0, so that slots are no longer in order of age
    assert _step(table, 1, 4, 5).missing_slots.tolist() == [2, 0]
    assert _step(table, 6, 7).missing_slots.tolist() == [1, 2]  # 1, then 4 before 5


def test_a_group_being_read_is_not_read_again():
    table = SlotTable(1, 1, 4, 9, "fifo")
    first = table.request(0, [[3, 4]])
    second = table.request(0, [[4, 5]])
    assert (second.hits, second.missing_groups.tolist()) == (1, [5])
    assert second.slots[0, 0] == first.slots[0, 1]
    table.publish(second)
    assert table.use_mask(second).sum() == 1  # 5 alone: 4 is still on its way
    table.publish(first)
    assert table.use_mask(second).sum() == 2


def test_a_read_for_a_cleared_row_is_dropped_and_its_slot_stays_reserved_until_then():
    table = SlotTable(1, 2, 2, 9, "lru")
    stale = table.request(0, [[3, 4], [3, 4]])
    table.clear([0])
    with pytest.raises(
        PlanError, match=r"row 0 of layer 0 wants 1 groups .* 2 slots, 2 of them awaiting .* 3 slots"
    ):
        table.request(0, [[5], [3]])
    table.publish(stale)
    assert table.lookup(0, [[3, 4], [3, 4]]).tolist() == [[-1, -1], [0, 1]]
    assert table.request(0, [[5], [3]]).missing_rows.tolist() == [0]


def test_more_groups_than_slots_are_refused_with_the_number_that_fits():
    table = SlotTable(2, 2, 3, 9, "fifo")
    with pytest.raises(
        PlanError, match=r"row 1 of layer 1 wants 4 groups at once and has 3 slots.*at least 4 slots"
    ):
        table.request(1, [[0, 1, 2, 2], [0, 1, 2, 3]])
    assert table.reuse_rate is None


def test_reuse_rate_counts_distinct_groups():
    table = SlotTable(1, 1, 4, 9, "lru")
    assert _step(table, 1, 2, 2, -1).misses == 2
    assert _step(table, 1, 2, 3, 3).misses == 1
    assert table.reuse_rate == 2 / 5


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ([[0]], r"int64\(1, 1\), not integers of shape \[2, any\]"),
        ([[0.0], [1.0]], r"float64\(2, 1\), not integers"),
        ([[9], [0]], r"ids 0 to 9 are not all within -1 to 8"),
        ([[-2], [0]], r"ids -2 to 0 are not all within"),
    ],
)
def test_bad_groups_are_refused(wanted, message):
    table = SlotTable(1, 2, 3, 9, "fifo")
    for call in (table.request, table.lookup):
        with pytest.raises(ValueError, match=message):
            call(0, wanted)


def test_bad_tables_are_refused():
    with pytest.raises(PlanError, match="'random' is unknown; use fifo or lru"):
        SlotTable(1, 1, 1, 1, "random")  # pyright: ignore[reportArgumentType]
    with pytest.raises(PlanError, match="slots of at least 1, not 0"):
        SlotTable(1, 1, 0, 1, "fifo")
