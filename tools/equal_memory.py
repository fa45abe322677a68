"""Plans that take the same memory, whatever they keep in it."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Mapping
from typing import Any

import msgspec

from swapkv_jax import Plan, PlanError
from swapkv_jax.accounting import kv_bytes
from swapkv_jax.models import Geometry
from swapkv_jax.planner import load_buckets
from swapkv_jax.selection import Selection
from swapkv_jax.strategies.sizes import pinned_groups

_LEAST_RANK = 4
_LARGEST_GROUP = 256
_OF_GROUPS = ("quest", "shadowkv")  # whose summary is smaller, the larger its groups


def memory_fraction(plan: Plan, geometry: Geometry) -> float:
    """Bytes of memory, on the device and in DRAM, that hold keys, values or summaries, over those of the whole KV."""
    held = kv_bytes(plan, geometry)
    return (held["device"] + held["dram"]) / plan.full_kv_bytes


def sized(plan: Plan, geometry: Geometry, memory: float, *, fixed: Mapping[str, Any]) -> Plan:
    """A plan of policy `group` with as many reuse slots as make its `memory_fraction` the most that is no more than
    `memory`; with no more than `fixed` says, where it does.

    Where half of that is not enough for what it needs beside slots, its summary is made smaller first, as far as its
    sizes are not `fixed`: its rank is halved, with shadowkv's outliers and recent groups; quest, whose summary has no
    rank, gets groups of twice the tokens, and so does shadowkv where nothing else would fit. Where there are fewer
    slots than groups to select, fewer are selected.

    Raises:
      PlanError: there is no room for the pinned groups and one more; it says what the smallest takes.
    """

    def least(plan: Plan) -> float:
        return memory_fraction(_with_slots(plan, _least_slots(plan)), geometry)

    while least(plan) > memory / 2:
        smaller = _smaller_summary(plan, fixed)
        if smaller is None and least(plan) > memory:
            smaller = _larger_groups(plan, fixed)
        if smaller is None or least(smaller) >= least(plan):
            break
        plan = smaller
    few = _least_slots(plan)
    wanted = fixed.get("reuse_slots", max(few, plan.groups))
    if "load_buckets" not in fixed:  # they are for as many groups as are selected in the end
        lean = _with_loads(plan, few)
        most = max(few, min(_room(lean, geometry, memory, few), _selection(plan).selected_groups))
        if _selection(plan).replacement == "all":
            most = _most_read(plan, geometry, memory, few, most)
            wanted = min(wanted, most)
        usual = _with_loads(plan, most)
        plan = usual if _room(usual, geometry, memory, few) >= few else lean
    slots = _room(plan, geometry, memory, few)
    if slots < few:
        name = _name(plan)
        smallest = min(_small(plan, fixed), key=least)
        raise PlanError(
            f"policy {name} needs {least(smallest):.4f} of the whole KV's memory for its summary, staging, pinned "
            f"groups and one more (then with group_tokens {smallest.group_tokens}, rank "
            f"{_selection(smallest).rank}), and is to have {memory:.4f}; raise --kv-memory"
            + (", or choose smaller sizes for it" if fixed else "")
        )
    return _with_slots(plan, min(slots, wanted))


def _selection(plan: Plan) -> Selection:
    assert plan.selection is not None
    return plan.selection


def _name(plan: Plan) -> str:
    name = _selection(plan).strategy_name
    return "group" if name == "kvswap" else name


def _room(plan: Plan, geometry: Geometry, memory: float, few: int) -> int:
    """How many slots fit; `few` are tried, which may be more."""
    base, more = (memory_fraction(_with_slots(plan, slots), geometry) for slots in (few, few + 1))
    return few + math.floor((memory - base) / (more - base))


def _most_read(plan: Plan, geometry: Geometry, memory: float, few: int, most: int) -> int:
    """How many slots fit, `few` to `most`, where loads are for all of them: what loads take, slots cannot."""

    def too_many(slots: int) -> bool:
        return _room(_with_loads(plan, slots), geometry, memory, few) < slots

    return few + bisect(range(few + 1, most + 1), x=False, key=too_many)


def _with_loads(plan: Plan, selected: int) -> Plan:
    """The plan with loads for so many groups."""
    choice = msgspec.structs.replace(_selection(plan), load_buckets=_loads(plan, selected))
    return msgspec.structs.replace(plan, selection=choice)


def _loads(plan: Plan, selected: int) -> tuple[int, ...]:
    return load_buckets(plan.batch, selected, _selection(plan).replacement)


def _least_slots(plan: Plan) -> int:
    """For the pinned groups, and one that is selected for its score where there are as many groups."""
    pinned = pinned_groups(_selection(plan))
    return max(pinned, min(pinned + 1, plan.groups))


def _with_slots(plan: Plan, slots: int) -> Plan:
    choice = _selection(plan)
    selected = min(slots, choice.selected_groups)
    choice = msgspec.structs.replace(choice, reuse_slots=slots, selected_groups=selected)
    return msgspec.structs.replace(plan, selection=choice)


def _smaller_summary(plan: Plan, fixed: Mapping[str, Any]) -> Plan | None:
    choice = _selection(plan)
    if choice.strategy_name == "quest":
        return _larger_groups(plan, fixed)
    if "rank" in fixed or choice.rank // 2 < _LEAST_RANK:
        return None
    halved: dict[str, Any] = {"rank": choice.rank // 2}
    if isinstance(choice.outlier_groups, int):
        halved |= {
            "outlier_groups": choice.outlier_groups // 2,
            "recent_groups": max(1, choice.recent_groups // 2),
        }
    halved = {name: value for name, value in halved.items() if name not in fixed}
    return msgspec.structs.replace(plan, selection=msgspec.structs.replace(choice, **halved))


def _larger_groups(plan: Plan, fixed: Mapping[str, Any]) -> Plan | None:
    """Groups of twice the tokens for a system that has a summary of groups; None where it has not."""
    tokens = 2 * plan.group_tokens
    if (
        _name(plan) not in _OF_GROUPS
        or "group_tokens" in fixed
        or tokens > min(_LARGEST_GROUP, plan.max_context)
    ):
        return None
    return _with_groups(plan, tokens, fixed)


def _with_groups(plan: Plan, tokens: int, fixed: Mapping[str, Any]) -> Plan:
    """The plan with groups of so many tokens: fewer are selected, and loads are of fewer."""
    choice = _selection(plan)
    selected = -(-choice.selected_groups * plan.group_tokens // tokens)
    sizes: dict[str, Any] = {"selected_groups": max(_least_slots(plan), selected)}
    if "load_buckets" not in fixed:
        sizes["load_buckets"] = _loads(plan, sizes["selected_groups"])
    return msgspec.structs.replace(
        plan, group_tokens=tokens, selection=msgspec.structs.replace(choice, **sizes)
    )


def _small(plan: Plan, fixed: Mapping[str, Any]) -> list[Plan]:
    """Plans of which one takes the least memory, whatever it loses: of the lowest rank, with nothing pinned that need
    not be, and the smallest loads; of any group size where the summary is of groups."""
    choice = _selection(plan)
    sizes: dict[str, Any] = {"load_buckets": _loads(plan, 1)}
    if choice.strategy_name != "quest":
        sizes["rank"] = min(choice.rank, _LEAST_RANK)
    if isinstance(choice.outlier_groups, int):
        sizes |= {"outlier_groups": 0, "recent_groups": 1}
    sizes = {name: value for name, value in sizes.items() if name not in fixed}
    plan = msgspec.structs.replace(plan, selection=msgspec.structs.replace(choice, **sizes))
    if _name(plan) not in _OF_GROUPS or "group_tokens" in fixed:
        return [plan]
    largest = min(_LARGEST_GROUP, plan.max_context)
    return [_with_groups(plan, tokens, fixed) for tokens in range(4, largest + 1, 4)]
