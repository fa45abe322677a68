"""The policies that `benchmark.py` and `evaluate.py` know by name, and their plans: ours, and the literature's
systems in the same engine, over the same tiers. `group` takes its own flags; what a system of the literature starts
from is what its paper says, and `--set POLICY.FIELD=VALUE` changes it."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, cast, get_args

from equal_memory import sized
from flag_types import paths
from selection_flags import SHAPE, choice_hints, given_choices, parse_value, plan_choices
from settings_file import GOALS, load_settings

from swapkv_jax import Plan, UsageError, make_plan
from swapkv_jax.models import Geometry
from swapkv_jax.plan import KVDType
from swapkv_jax.planner import SELECTION, CacheChoice, TierChoice, load_buckets
from swapkv_jax.selection import Replacement

BASELINES = ("quest", "loki", "infinigen", "shadowkv")
SELECTIVE = ("group", *BASELINES)
POLICIES = ("resident", "layer", "flexgen", *SELECTIVE)  # flexgen: all layers streamed from disk

TOKENS = 400  # selected per layer, row and step: the KVSwap paper's M·G, for every system
SECTOR = 512  # bytes: records of single tokens, as they are, would half fill a page
_GROUP_TOKENS = {"quest": 16, "shadowkv": 8}
_LOW_RANK, _OUTLIERS, _LOCAL = (
    160 / 1024,
    48 / 4096,
    4,
)  # ShadowKV's: of a key's numbers, of all groups, groups

Choices = Mapping[str, Any]
"""Fields of `Selection` and of `SHAPE`."""


def add_policy_flags(parser: argparse._ActionsContainer, *, memories: bool = False) -> None:
    """Adds `--kv-dtype`, `--set`, `--settings` with `--goal`, and `--kv-memory`, which takes several fractions
    between commas where there may be `memories`."""
    parser.add_argument(
        "--kv-dtype",
        choices=get_args(KVDType),
        help="of keys and values under every policy that selects (default: bfloat16 beside float32, else --dtype; "
        "int8 in the default plan of models whose layers were measured); others keep --dtype",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="POLICY.FIELD=VALUE",
        help="a choice for one policy that selects, as loki.rank=8; may be given several times",
    )
    parser.add_argument(
        "--settings",
        type=paths,
        default=[],
        metavar="FILE[,FILE]",
        help="what search_policies.py found for every policy that selects, a file for each --kv-memory; --set and "
        "other flags go before it",
    )
    parser.add_argument(
        "--goal",
        choices=GOALS,
        default=GOALS[0],
        help="of --settings: what lost least, or the fastest within the search's bound, for a policy that has one "
        "(default least-loss)",
    )
    parser.add_argument(
        "--kv-memory",
        type=_fractions if memories else parse_fraction,
        metavar="FRACTION[,FRACTION]" if memories else "FRACTION",
        help="give every policy that selects this fraction of the whole KV's bytes as memory (0.077, or 1/13), by as "
        "many reuse slots as that leaves room for, and no more than are asked for",
    )


def parse_fraction(text: str) -> float:
    """A number above 0 and up to 1, or a quotient. ArgumentTypeError: it is none."""
    try:
        value = float(Fraction(text))
    except (ValueError, ZeroDivisionError):
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a fraction; use one like 0.077 or 1/13")
    return value


def _fractions(text: str) -> list[float]:
    return list(dict.fromkeys(parse_fraction(part) for part in text.split(",")))


def given_by_policy(args: argparse.Namespace, memory: float | None) -> dict[str, dict[str, Any]]:
    """What the flags choose for each policy that selects, at that `memory` (of --kv-memory): the selection flags for
    `group`, `--kv-dtype` for all, `--set` before them, and `--settings` for what none of these says.

    Raises:
      UsageError: see `parse_settings`; files that are none, or none of them for that memory.
    """
    found: dict[str, dict[str, Any]] = {}
    if args.settings:
        files = {path: load_settings(path) for path in args.settings}
        near = [f for f in files.values() if memory and math.isclose(memory, f.kv_memory, rel_tol=1e-3)]
        if not near:
            known = ", ".join(f"{path} is for {file.memory}" for path, file in files.items())
            raise UsageError(
                f"no --settings for --kv-memory {memory or 'of none'}: {known}; give one of those"
            )
        found = near[0].chosen(args.goal)
    given = {"group": given_choices(args)}
    every = {} if args.kv_dtype is None else {"kv_dtype": args.kv_dtype}
    changed = parse_settings(args.set)
    return {
        name: found.get(name, {}) | given.get(name, {}) | every | changed.get(name, {}) for name in SELECTIVE
    }


def parse_settings(settings: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Choices per policy from "POLICY.FIELD=VALUE" each.

    Raises:
      UsageError: a policy that selects nothing, a field that is none, or a value that does not fit.
    """
    hints = choice_hints()
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
    known: dict[str, Any] = {}
    if name != "group":
        context = request.get("max_context", geometry.context_limit)
        known = published(geometry, name, given, batch=request.get("batch", 1), context=context)
    elif given.keys() - SHAPE:
        selected = given.get("selected_groups", SELECTION.selected_groups)
        known = {"load_buckets": load_buckets(request.get("batch", 1), selected, _replacement(given))}
    plan = make_plan(geometry, cache="group", tier=tier, **plan_choices({**known, **given}), **request)
    return plan if memory is None else sized(plan, geometry, memory, fixed=given)


def _replacement(given: Choices) -> Replacement:
    return given.get("replacement", SELECTION.replacement)


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
        "load_buckets": load_buckets(batch, selected, _replacement(given)),
    }
    if name == "quest":
        return choices | {"rank": size}
    if name == "shadowkv":
        return choices | {"rank": max(1, round(_LOW_RANK * size))}
    partial = 0.25 if name == "loki" else 0.3  # of a head's dimensions
    rank = max(1, round(partial * g.head_dim))
    return choices | {"rank": rank, "summary": "token", "record_alignment": SECTOR}
