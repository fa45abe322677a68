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
from swapkv_jax.strategies.sizes import pinned_groups

BASELINES = ("quest", "loki", "infinigen", "shadowkv")
SELECTIVE = ("group", *BASELINES)
POLICIES = ("resident", "layer", "flexgen", *SELECTIVE)  # flexgen: all layers streamed from disk

TOKENS = 400  # selected per layer, row and step: the KVSwap paper's M·G, for every system
SECTOR = 512  # bytes: records of single tokens, as they are, would half fill a page
_SHAPE = {"group_tokens": int, "record_alignment": int}
_GROUP_TOKENS = {"quest": 16, "shadowkv": 8}
_LOW_RANK, _OUTLIERS, _LOCAL = (
    160 / 1024,
    48 / 4096,
    4,
)  # ShadowKV's: of a key's numbers, of all groups, groups
_LEAST_RANK = 4
_LARGEST_GROUP = 256

Choices = Mapping[str, Any]
"""Fields of `Selection`, `group_tokens` and `record_alignment`."""


def add_policy_flags(parser: argparse._ActionsContainer, *, memories: bool = False) -> None:
    """Adds `--set` and `--kv-memory`, which takes several fractions between commas where there may be `memories`."""
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="POLICY.FIELD=VALUE",
        help="a choice for one policy that selects, as loki.rank=8; may be given several times",
    )
    parser.add_argument(
        "--kv-memory",
        type=_fractions if memories else _fraction,
        metavar="FRACTION[,FRACTION]" if memories else "FRACTION",
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


def _fractions(text: str) -> list[float]:
    return list(dict.fromkeys(_fraction(part) for part in text.split(",")))


def parse_settings(settings: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Choices per policy from "POLICY.FIELD=VALUE" each.

    Raises:
      UsageError: a policy that selects nothing, a field that is none, or a value that does not fit.
    """
    hints = {**get_type_hints(Selection), **_SHAPE}
    del hints["strategy"]
    hints["outlier_groups"] = int  # unset but for shadowkv
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
    known = {}
    if name != "group":
        context = request.get("max_context", geometry.context_limit)
        known = published(geometry, name, given, batch=request.get("batch", 1), context=context)
    plan = make_plan(geometry, cache="group", tier=tier, **plan_choices({**known, **given}), **request)
    return plan if memory is None else sized(plan, geometry, memory, fixed=given)


def published(geometry: Geometry, name: str, given: Choices, *, batch: int, context: int) -> dict[str, Any]:
    """What the system `name` starts from: its paper's parameters, for as many tokens as everyone selects."""
    g = geometry
    size = g.kv_heads * g.head_dim
    tokens = given.get("group_tokens", _GROUP_TOKENS.get(name, 1))
    choices: dict[str, Any] = {"strategy": name, "group_tokens": tokens, "sink_groups": 0, "recent_groups": 1}
    beside = 0  # groups selected beside those for their scores
    if name == "shadowkv":
        outliers = given.get("outlier_groups", max(1, round(_OUTLIERS * context / tokens)))
        recent = given.get("recent_groups", _LOCAL)
        choices |= {"outlier_groups": outliers, "recent_groups": recent}
        beside = outliers + 2 * recent  # the prompt's last, and the newest
    selected = given.get("selected_groups", -(-TOKENS // tokens) + beside)
    choices |= {
        "selected_groups": selected,
        "reuse_slots": max(selected, given.get("reuse_slots", selected)),
        "aggregate": "softmax" if name == "shadowkv" else "sum",
        "load_buckets": load_buckets(batch, selected),
    }
    if name == "quest":
        return choices | {"rank": size}
    if name == "shadowkv":
        return choices | {"rank": max(1, round(_LOW_RANK * size))}
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

    Where half of that is not enough for what it needs beside slots, its summary is made smaller first, as far as its
    sizes are not `fixed`: its rank is halved, with shadowkv's outliers and recent groups; quest, whose summary has no
    rank, gets groups of twice the tokens. Where there are fewer slots than groups to select, fewer are selected.

    Raises:
      PlanError: not even the pinned groups fit.
    """

    def least(plan: Plan) -> float:
        return memory_fraction(_with_slots(plan, _pinned(plan)), geometry)

    while least(plan) > memory / 2:
        smaller = _smaller_summary(plan, fixed)
        if smaller is None or least(smaller) >= least(plan):
            break
        plan = smaller
    pinned, base = _pinned(plan), least(plan)
    more = memory_fraction(_with_slots(plan, pinned + 1), geometry)
    slots = pinned + math.floor((memory - base) / (more - base))
    if slots < pinned:
        assert plan.selection is not None
        name = plan.selection.strategy_name
        raise PlanError(
            f"policy {'group' if name == 'kvswap' else name} needs {base:.4f} of the whole KV's memory for its "
            f"summary, staging and pinned groups, and is to have {memory:.4f}; raise --kv-memory, or give it a "
            "smaller summary or smaller loads"
        )
    return _with_slots(plan, min(slots, max(pinned, plan.groups)))


def _pinned(plan: Plan) -> int:
    assert plan.selection is not None
    return pinned_groups(plan.selection)


def _with_slots(plan: Plan, slots: int) -> Plan:
    choice = plan.selection
    assert choice is not None
    selected = min(slots, choice.selected_groups)
    choice = msgspec.structs.replace(choice, reuse_slots=slots, selected_groups=selected)
    return msgspec.structs.replace(plan, selection=choice)


def _smaller_summary(plan: Plan, fixed: Choices) -> Plan | None:
    choice = plan.selection
    assert choice is not None
    if choice.strategy_name == "quest":
        tokens = 2 * plan.group_tokens
        if "group_tokens" in fixed or tokens > min(_LARGEST_GROUP, plan.max_context):
            return None
        selected = max(_pinned(plan), -(-choice.selected_groups // 2))
        choice = msgspec.structs.replace(choice, selected_groups=selected)
        return msgspec.structs.replace(plan, group_tokens=tokens, selection=choice)
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
