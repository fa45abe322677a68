"""From a model, a batch and memory budgets to a plan and its reasons, or to an error that says what would fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from swapkv_jax.errors import PlanError, UsageError
from swapkv_jax.memory_limits import format_bytes
from swapkv_jax.models.geometry import Geometry
from swapkv_jax.plan import DType, KVDType, Plan
from swapkv_jax.planner.budgets import NO_LIMITS, Budgets, Needs, shortfalls
from swapkv_jax.planner.candidates import CacheChoice, Request, TierChoice, candidates
from swapkv_jax.planner.costs import UNKNOWN, Rates, StepCost, overhead, step_cost

MAX_OVERHEAD = 0.3  # SwapKV's own aim: no more than 30 % slower than all KV on the device


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A plan that was considered. `short` says what it lacks, empty when it fits; `cost` and `overhead` (over
    `resident`, 0.3 is 30 %) are None where a rate is unknown."""

    plan: Plan
    needs: Needs
    short: tuple[str, ...]
    cost: StepCost | None
    overhead: float | None


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The plan that was chosen, why, and what else was considered."""

    plan: Plan
    reason: str
    candidates: tuple[Candidate, ...]
    rates: Rates


class NothingFits(PlanError):
    """No allowed plan fits the budgets; `candidates` are those that were considered."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        super().__init__(_nothing_fits(candidates))
        self.candidates = tuple(candidates)


def make_plan(
    geometry: Geometry,
    *,
    cache: CacheChoice = "auto",
    tier: TierChoice = "auto",
    batch: int = 1,
    max_context: int | None = None,
    dtype: DType = "float32",
    kv_dtype: KVDType | None = None,
    physical_layers: int | None = None,
    group_tokens: int | None = None,
    platform: str = "cpu",
    capability: float | None = None,
    budgets: Budgets = NO_LIMITS,
    rates: Rates = UNKNOWN,
    max_overhead: float = MAX_OVERHEAD,
    exact: bool = False,
    **overrides: Any,
) -> Plan:
    """The plan for a choice of cache and tier, or under `auto` the best that the budgets hold.

    `auto` takes `resident` if it fits. Else it takes `layer`, from DRAM or disk whichever is faster, if its step is
    predicted to be no more than `max_overhead` longer than `resident`'s would be; else `group`, unless that is
    slower still. Where rates are unknown it prefers `layer` from DRAM, `layer` from disk and `group` in this order.

    Policy `group` keeps everything on disk. Tier `dram` keeps every row in DRAM too; `auto` does so with as many
    as the DRAM budget holds, and with none if there is no such budget: the policy is there for small memory.

    Args:
      max_context: tokens per row, prompt and answer together (default: the model's limit).
      kv_dtype: of KV under policy `group` (default: bfloat16 beside float32, else `dtype`; int8 where the model's
        layers were measured, see `measured_models`).
      platform: "cpu", "gpu" or "tpu"; on a CPU device buffers may alias host memory.
      capability: a GPU's compute capability; with an unknown one policy `group` gets no kernel.
      rates: what bytes move at, for predictions.
      max_overhead: 0.3 is 30 %.
      exact: never choose `group`.
      overrides: any other field of `Plan`.
    Raises:
      PlanError: contradictory choices, or budgets that no allowed plan fits; then it says which are short, by how
        much, and what the smallest plan would need.
    """
    request = Request(
        geometry=geometry,
        cache=cache,
        tier=tier,
        batch=batch,
        max_context=max_context,
        dtype=dtype,
        kv_dtype=kv_dtype,
        physical_layers=physical_layers,
        group_tokens=group_tokens,
        platform=platform,
        capability=capability,
        budgets=budgets,
        exact=exact,
        overrides=overrides,
    )
    return choose_plan(request, rates, max_overhead).plan


def choose_plan(request: Request, rates: Rates = UNKNOWN, max_overhead: float = MAX_OVERHEAD) -> Choice:
    """As `make_plan`, with what was considered. Raises UsageError for a `max_overhead` below 0, too; the
    PlanError of budgets that are short is a `NothingFits`."""
    if not max_overhead >= 0:
        raise UsageError(f"--max-overhead must be 0 or more, not {max_overhead}; 0.3 allows 30 %")
    considered = _considered(request, rates)
    fitting = [candidate for candidate in considered if not candidate.short]
    if not fitting:
        raise NothingFits(considered)
    chosen, reason = _pick(fitting, max_overhead)
    if len(considered) == 1:
        reason = "as asked for"
    return Choice(plan=chosen.plan, reason=reason, candidates=tuple(considered), rates=rates)


def _considered(request: Request, rates: Rates) -> list[Candidate]:
    found: list[Candidate] = []
    for make in candidates(request):
        try:
            plan = make()
            plan.validate(request.geometry)
        except PlanError:
            if found:  # an override may suit one policy only: then another is no choice
                continue
            raise
        found.append(
            Candidate(
                plan=plan,
                needs=Needs.of(plan, request.geometry),
                short=tuple(shortfalls(plan, request.geometry, request.budgets)),
                cost=step_cost(plan, request.geometry, rates),
                overhead=overhead(plan, request.geometry, rates),
            )
        )
    return found


def _pick(fitting: Sequence[Candidate], most: float) -> tuple[Candidate, str]:
    """The best of some that fit, exact ones first in order of preference; and why."""
    first = fitting[0]
    if first.plan.policy == "resident":
        return first, "all KV fits on the device"
    layers = [candidate for candidate in fitting if candidate.plan.policy == "layer"]
    if not layers:
        return first, "no exact policy fits: this one is approximate (--exact refuses it)"
    known = all(layer.cost is not None for layer in layers)
    layer = min(layers, key=_seconds) if known else layers[0]  # of equals the first: DRAM before disk
    if layer.overhead is None:
        return layer, "not all KV fits on the device; how long moving it takes is unknown, but it is exact"
    if layer.overhead <= most:
        return layer, f"not all KV fits on the device, and moving it costs no more than {most:.0%}"
    origin = "DRAM" if layer.plan.tier == "dram" else "disk"
    costs = (
        f"moving whole layers from {origin} costs {layer.overhead:.0%}, more than --max-overhead ({most:.0%})"
    )
    group = fitting[-1]
    if group.plan.policy != "group":
        return layer, f"{costs}, but no other policy is allowed or fits"
    if _seconds(group) >= _seconds(layer):
        return layer, f"{costs}, but policy group would take no less"
    return group, f"{costs}; policy group is approximate (--exact refuses it)"


def _seconds(candidate: Candidate) -> float:
    return float("inf") if candidate.cost is None else candidate.cost.step_s


def _nothing_fits(considered: Sequence[Candidate]) -> str:
    failures = "; ".join(f"{describe(c.plan)} {', '.join(c.short)}" for c in considered)
    smallest = min(considered, key=lambda candidate: candidate.needs.memory)
    needs = smallest.needs
    return (
        f"no plan fits: {failures}; the smallest, {smallest.plan.policy}, takes {format_bytes(needs.device)} on the "
        f"device, {format_bytes(needs.dram)} of DRAM and {format_bytes(needs.disk)} on disk; raise a budget, or "
        "lower --max-context or the rows"
    )


def describe(plan: Plan) -> str:
    """A plan's policy in a few words."""
    if plan.policy == "resident":
        return "resident"
    if plan.selection is not None:
        s = plan.selection
        kept = f", {plan.dram_rows} of {plan.batch} row(s) in DRAM too" if plan.dram_rows else ""
        whole = f", {len(s.whole)} layers whole" if s.whole else ""
        return (
            f"group (tier {plan.tier}{kept}; {s.selected_groups} of up to {plan.groups} groups of "
            f"{plan.group_tokens}, rank {s.rank}{whole}, attention {plan.attention})"
        )
    return f"layer (tier {plan.tier}, {plan.physical_layers} physical layers)"
