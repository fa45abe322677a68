"""The policies that `benchmark.py` and `evaluate.py` know by name, and their plans: ours, and the literature's
systems in the same engine, over the same tiers. `group` takes its own flags; what a system of the literature starts
from is what its paper says, and `--set POLICY.FIELD=VALUE` changes it."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, cast, get_type_hints

import msgspec
from selection_flags import parse_value, plan_choices

from swapkv_jax import Plan, PlanError, UsageError, make_plan
from swapkv_jax.accounting import kv_bytes
from swapkv_jax.models import Geometry
from swapkv_jax.planner import CacheChoice, TierChoice, load_buckets
from swapkv_jax.selection import Selection
from swapkv_jax.strategies.sizes import summary_width

BASELINES = ("quest", "loki", "infinigen")
SELECTIVE = ("group", *BASELINES)
POLICIES = ("resident", "layer", "flexgen", *SELECTIVE)  # flexgen: all layers streamed from disk

TOKENS = 400  # selected per layer, row and step: the KVSwap paper's M·G, for every system
SECTOR = 512  # bytes: records of single tokens, as they are, would half fill a page
_SHAPE = {"group_tokens": int, "record_alignment": int}
_LEAST_RANK = 4
_LARGEST_GROUP = 256

Choices = Mapping[str, Any]
"""Fields of `Selection`, `group_tokens` and `record_alignment`."""


def add_policy_flags(parser: argparse._ActionsContainer) -> None:
    """Adds `--set` and `--kv-memory`."""
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="POLICY.FIELD=VALUE",
        help="a choice for one policy that selects, as loki.rank=8; may be given several times",
    )
    parser.add_argument(
        "--kv-memory",
        type=_fraction,
        metavar="FRACTION",
        help="give every policy that selects this fraction of the whole KV's bytes as memory (0.077, or 1/13), by as "
        "many reuse slots as that leaves room for",
    )


def _fraction(text: str) -> float:
    try:
        value = float(Fraction(text))
    except (ValueError, ZeroDivisionError):
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a fraction; use one like 0.077 or 1/13")
    return value


def parse_settings(settings: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Choices per policy from "POLICY.FIELD=VALUE" each.

    Raises:
      UsageError: a policy that selects nothing, a field that is none, or a value that does not fit.
    """
    hints = {**get_type_hints(Selection), **_SHAPE}
    del hints["strategy"]
    found: dict[str, dict[str, Any]] = {}
    for setting in settings:
        where, equals, value = setting.partition("=")
        policy, _, field = where.partition(".")
        field = field.replace("-", "_")
        if not equals or policy not in SELECTIVE or field not in hints:
            raise UsageError(
                f"--set {setting} is not POLICY.FIELD=VALUE; policies: {', '.join(SELECTIVE)}; fields: "
                f"{', '.join(hints)}"
            )
        try:
            found.setdefault(policy, {})[field] = parse_value(value, hints[field])
        except argparse.ArgumentTypeError as error:
            raise UsageError(f"--set {setting}: {error}") from None
    return found


def policy_plan(
    geometry: Geometry,
    name: str,
    given: Choices,
    *,
    tier: TierChoice = "auto",
    memory: float | None = None,
    **request: Any,
) -> Plan:
    """The plan of the policy `name` of `POLICIES`.

    Args:
      given: what was chosen for it; the rest is `published` for a system of the literature, else the planner's.
      tier: where it keeps KV; flexgen's is the disk.
      memory: see `sized`. request: what else `make_plan` is asked for.
    Raises:
      PlanError: choices that cannot work. UsageError: choices for a policy that selects nothing.
    """
    if name not in SELECTIVE:
        if given:
            raise UsageError(f"policy {name} selects nothing, so there is no {', '.join(given)} to choose")
        if name == "flexgen":
            return make_plan(geometry, cache="layer", tier="disk", **request)
        return make_plan(geometry, cache=cast(CacheChoice, name), tier=tier, **request)
    known = {} if name == "group" else published(geometry, name, given, request.get("batch", 1))
    plan = make_plan(geometry, cache="group", tier=tier, **plan_choices({**known, **given}), **request)
    return plan if memory is None else sized(plan, geometry, memory, fixed=given)


def published(geometry: Geometry, name: str, given: Choices, batch: int) -> dict[str, Any]:
    """What the system `name` starts from: its paper's parameters, for as many tokens as everyone selects."""
    g = geometry
    tokens = given.get("group_tokens", 16 if name == "quest" else 1)
    selected = given.get("selected_groups", -(-TOKENS // tokens))
    choices: dict[str, Any] = {
        "strategy": name,
        "group_tokens": tokens,
        "selected_groups": selected,
        "reuse_slots": max(selected, given.get("reuse_slots", selected)),
        "sink_groups": 0,
        "recent_groups": 1,
        "aggregate": "sum",
        "load_buckets": load_buckets(batch, selected),
    }
    if name == "quest":
        return choices | {"rank": g.kv_heads * g.head_dim}
    partial = 0.25 if name == "loki" else 0.3  # of a head's dimensions
    rank = max(1, round(partial * g.head_dim))
    return choices | {"rank": rank, "summary": "token", "record_alignment": SECTOR}


# ---- equal memory --------------------------------------------------------------------------------------


def memory_fraction(plan: Plan, geometry: Geometry) -> float:
    """Bytes of memory, on the device and in DRAM, that hold keys, values or summaries, over those of the whole KV."""
    held = kv_bytes(plan, geometry)
    return (held["device"] + held["dram"]) / plan.full_kv_bytes


def sized(plan: Plan, geometry: Geometry, memory: float, *, fixed: Choices) -> Plan:
    """A plan of policy `group` with as many reuse slots as make its `memory_fraction` the most that is no more than
    `memory`.

    Where the summary alone takes more than half of that, it is made smaller first, unless its size is `fixed`: its
    rank is halved; quest, whose summary has no rank, gets groups of twice the tokens. Where there are fewer slots
    than groups to select, fewer are selected.

    Raises:
      PlanError: not even the pinned groups fit.
    """
    choice = plan.selection
    assert choice is not None
    while _summary_bytes(plan) > memory / 2 * plan.full_kv_bytes:
        smaller = _smaller_summary(plan, fixed)
        if smaller is None:
            break
        plan = smaller
    choice = plan.selection
    assert choice is not None
    least = choice.sink_groups + choice.recent_groups
    few, more = (_with_slots(plan, slots) for slots in (least, least + 1))
    base = memory_fraction(few, geometry)
    slots = least + math.floor((memory - base) / (memory_fraction(more, geometry) - base))
    if slots < least:
        name = "group" if choice.strategy_name == "kvswap" else choice.strategy_name
        raise PlanError(
            f"policy {name} needs {base:.4f} of the whole KV's memory for its summary, staging and pinned "
            f"groups, and is to have {memory:.4f}; raise --kv-memory, or give it a smaller summary or smaller loads"
        )
    return _with_slots(plan, min(slots, max(least, plan.groups)))


def _with_slots(plan: Plan, slots: int) -> Plan:
    choice = plan.selection
    assert choice is not None
    selected = min(slots, choice.selected_groups)
    choice = msgspec.structs.replace(choice, reuse_slots=slots, selected_groups=selected)
    return msgspec.structs.replace(plan, selection=choice)


def _summary_bytes(plan: Plan) -> int:
    choice = plan.selection
    assert choice is not None
    width = summary_width(choice, plan.kv_heads, plan.head_dim)
    itemsize = 4 if choice.summary_dtype == "float32" else 2
    return plan.layers * plan.batch * plan.summary_places * width * itemsize


def _smaller_summary(plan: Plan, fixed: Choices) -> Plan | None:
    choice = plan.selection
    assert choice is not None
    if choice.strategy_name == "quest":
        tokens = 2 * plan.group_tokens
        if "group_tokens" in fixed or tokens > min(_LARGEST_GROUP, plan.max_context):
            return None
        selected = max(choice.sink_groups + choice.recent_groups, -(-choice.selected_groups // 2))
        choice = msgspec.structs.replace(choice, selected_groups=selected)
        return msgspec.structs.replace(plan, group_tokens=tokens, selection=choice)
    if "rank" in fixed or choice.rank // 2 < _LEAST_RANK:
        return None
    choice = msgspec.structs.replace(choice, rank=choice.rank // 2)
    return msgspec.structs.replace(plan, selection=choice)
