"""What `auto` chooses, by predicted overhead; budgets that always hold; and that more room never makes it slower."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

import pytest
from engines import geometry
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from swapkv_jax import Budgets, PlanError, UsageError, make_plan
from swapkv_jax.devices import device_names, find_device
from swapkv_jax.models.geometry import Geometry
from swapkv_jax.models.named import named_geometry
from swapkv_jax.plan import Plan
from swapkv_jax.planner import DescribedDisk, Needs, Rates, Request, choose_plan, explain, overhead, step_cost

GEOMETRY = geometry(max_positions=4096)
SLOW = Rates(link=1e6, memory=1e9, disk=DescribedDisk(bandwidth=1e6), source="test")
FAST = Rates(link=1e9, memory=1e9, disk=DescribedDisk(bandwidth=1e9), source="test")
REQUEST: dict[str, Any] = {"batch": 8, "max_context": 4096, "platform": "gpu"}


def device_budget(plan: Plan) -> int:
    return Needs.of(plan, GEOMETRY).device


RESIDENT = device_budget(make_plan(GEOMETRY, cache="resident", **REQUEST))
# DRAM for the staging of either policy but not for the layers.
LITTLE = make_plan(GEOMETRY, cache="layer", tier="disk", **REQUEST).memory(GEOMETRY).dram


# --- the choice ---


@pytest.mark.parametrize(
    ("rates", "choices", "policy", "tier", "reason"),
    [
        (FAST, {}, "layer", "dram", "no more than 30%"),
        (SLOW, {}, "group", "dram", "from DRAM costs"),
        (SLOW, {"exact": True}, "layer", "dram", "no other policy is allowed"),
        (SLOW, {"max_overhead": 1e6}, "layer", "dram", "no more than"),
        (SLOW, {"budgets": Budgets(device=RESIDENT)}, "resident", None, "all KV fits"),
        (Rates(), {}, "layer", "dram", "unknown"),
        (Rates(memory=1e9), {"exact": True}, "layer", "dram", "unknown"),
        (Rates(link=1e6, memory=1e9, disk=DescribedDisk(bandwidth=1e9)), {}, "group", "dram", "group"),
        (Rates(link=1e9, memory=1e9, disk=DescribedDisk(bandwidth=1e3)),
         {"budgets": Budgets(device=RESIDENT - 1, dram=LITTLE)}, "group", "dram", "from disk costs"),
        (Rates(link=1e9, memory=1e9, disk=DescribedDisk(bandwidth=1e9)),
         {"budgets": Budgets(device=RESIDENT - 1, dram=LITTLE)}, "layer", "disk", "no more than 30%"),
    ],
)  # fmt: skip
def test_auto(rates: Rates, choices: dict[str, Any], policy: str, tier: str | None, reason: str) -> None:
    request = {"budgets": Budgets(device=RESIDENT - 1, dram=1 << 30), **REQUEST, **choices}
    most = request.pop("max_overhead", 0.3)
    choice = choose_plan(Request(geometry=GEOMETRY, **request), rates, most)
    assert (choice.plan.policy, choice.plan.tier) == (policy, tier)
    assert reason in choice.reason
    assert choice.plan == make_plan(GEOMETRY, rates=rates, max_overhead=most, **request)


def test_group_that_would_take_longer_is_not_chosen() -> None:
    """Reads of single records can cost more than the whole layers in long ones."""
    rates = Rates(link=1e12, memory=1e12, disk=DescribedDisk(bandwidth=1e8, read_s=0.1))
    budgets = Budgets(device=RESIDENT - 1, dram=LITTLE)
    choice = choose_plan(Request(geometry=GEOMETRY, budgets=budgets, **REQUEST), rates)
    assert (choice.plan.policy, choice.plan.tier) == ("layer", "disk")
    assert "group would take no less" in choice.reason


def test_exact_never_gives_group() -> None:
    with pytest.raises(UsageError, match="--exact rules out"):
        make_plan(GEOMETRY, cache="group", exact=True)
    tight = Budgets(device=RESIDENT - 1, dram=LITTLE)
    assert make_plan(GEOMETRY, budgets=tight, rates=SLOW, **REQUEST).policy == "group"
    assert make_plan(GEOMETRY, budgets=tight, rates=SLOW, exact=True, **REQUEST).policy == "layer"
    short = Budgets(device=device_budget(make_plan(GEOMETRY, cache="group", **REQUEST)))
    assert make_plan(GEOMETRY, budgets=short, rates=SLOW, **REQUEST).policy == "group"
    with pytest.raises(PlanError, match="no plan fits: resident") as caught:
        make_plan(GEOMETRY, budgets=short, rates=SLOW, exact=True, **REQUEST)
    assert "group" not in str(caught.value)


@pytest.mark.parametrize("value", [-0.1, float("nan")])
def test_overheads_that_are_none(value: float) -> None:
    with pytest.raises(UsageError, match="0 or more"):
        make_plan(GEOMETRY, max_overhead=value)


def test_an_override_that_suits_one_policy_only() -> None:
    assert make_plan(GEOMETRY, layers_per_segment=7).policy == "resident"
    assert (
        make_plan(GEOMETRY, budgets=Budgets(device=RESIDENT), layers_per_segment=7, **REQUEST).segments == 1
    )


def test_the_table_says_what_was_considered() -> None:
    request = Request(geometry=GEOMETRY, budgets=Budgets(device=RESIDENT - 1, dram=1 << 30), **REQUEST)
    lines = explain(choose_plan(request, SLOW)).splitlines()
    assert len(lines) == 7
    names = [line[4:].split("  ")[0] for line in lines[2:6]]
    assert names == ["resident", "layer, dram", "layer, disk", "group, dram"]
    assert [line.startswith(" *") for line in lines[2:6]] == [False, False, False, True]
    assert [line.endswith("does not fit") for line in lines[2:6]] == [True, False, False, False]
    assert "by test)" in lines[-1]
    unknown = explain(choose_plan(request, Rates()))
    assert unknown.count("?") == 8


# --- the time of a step ---


def test_a_step_reads_weights_and_kv_once() -> None:
    g = named_geometry("llama-3.1-8b")
    assert g is not None
    rates = Rates.of(find_device("h100"))
    plan = make_plan(g, cache="resident", batch=8, max_context=32768, dtype="bfloat16", platform="gpu")
    cost = step_cost(plan, g, rates)
    assert cost is not None
    weights = 8.03e9 * 2 - 128256 * 4096 * 2  # the embedding's table is not read whole
    assert cost.compute_s == pytest.approx((weights + 32 * 2**30) / 3.35e12, rel=0.01)
    assert cost.transfer_s == 0
    layer = make_plan(g, cache="layer", batch=8, max_context=32768, dtype="bfloat16", platform="gpu")
    moved = step_cost(layer, g, rates)
    assert moved is not None
    assert moved.transfer_s == pytest.approx(32 * 2**30 / 56e9, rel=0.01)
    assert overhead(layer, g, rates) == pytest.approx(moved.transfer_s / cost.compute_s - 1, rel=0.02)


def test_on_a_cpu_layers_in_dram_cost_nothing() -> None:
    plan = make_plan(GEOMETRY, cache="layer", tier="dram", max_context=256)
    assert overhead(plan, GEOMETRY, Rates(memory=1e9)) == pytest.approx(0, abs=1e-6)
    assert overhead(make_plan(GEOMETRY, cache="layer", tier="disk"), GEOMETRY, Rates(memory=1e9)) is None


# --- the least that would do ---


@pytest.mark.parametrize("exact", [False, True])
def test_the_error_says_what_the_smallest_plan_takes(exact: bool) -> None:
    with pytest.raises(PlanError) as caught:
        make_plan(GEOMETRY, budgets=Budgets(host=1), batch=2, exact=exact)
    found = re.search(r"the smallest, (\w+), takes ([\d.,]+) (bytes|MiB) on the device", str(caught.value))
    assert found is not None
    choices: list[dict[str, Any]] = [
        {"cache": "resident"},
        {"cache": "layer"},
        {"cache": "layer", "tier": "disk"},
    ]
    choices += [] if exact else [{"cache": "group"}]
    least = min(Needs.of(make_plan(GEOMETRY, batch=2, **choice), GEOMETRY).memory for choice in choices)
    assert make_plan(GEOMETRY, budgets=Budgets(host=least), batch=2, exact=exact).policy == found[1]
    with pytest.raises(PlanError):
        make_plan(GEOMETRY, budgets=Budgets(host=least - 1), batch=2, exact=exact)


# --- laws ---


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    kv_heads = draw(st.integers(1, 8))
    return geometry(
        layers=draw(st.integers(1, 12)),
        kv_heads=kv_heads,
        heads=kv_heads * draw(st.integers(1, 4)),
        head_dim=2 * draw(st.integers(1, 32)),
        max_positions=4096,
        tied=draw(st.booleans()),
    )


rates = st.builds(
    Rates,
    link=st.floats(1e5, 1e12),
    memory=st.floats(1e6, 1e13),
    disk=st.builds(DescribedDisk, bandwidth=st.floats(1e5, 1e10), read_s=st.floats(0, 1e-2)),
    source=st.just("test"),
)
limits = st.none() | st.integers(10, 27).flatmap(lambda power: st.integers(1 << power, 2 << power))
requests = st.fixed_dictionaries(
    {
        "geometry": geometries(),
        "cache": st.sampled_from(["auto", "auto", "group", "layer"]),
        "batch": st.integers(1, 8),
        "max_context": st.integers(1, 4096),
        "platform": st.sampled_from(["cpu", "gpu", "tpu"]),
        "dtype": st.sampled_from(["float32", "bfloat16"]),
    }
)
all_limits = st.fixed_dictionaries(dict.fromkeys(("device", "dram", "disk", "host"), limits))


def by_tier(plan: Plan, g: Geometry) -> dict[str, int]:
    """Bytes per tier out of the buffers themselves."""
    sums = {"device": 0, "dram": 0, "disk": 0, "aliased": 0}
    for buffer in plan.buffers(g):
        sums["aliased" if buffer.alias_of else buffer.tier] += buffer.bytes
    return sums


@settings(max_examples=150, deadline=None)
@given(request=requests, limit=all_limits, rates=rates, exact=st.booleans())
def test_planned_bytes_never_exceed_a_budget(
    request: dict[str, Any], limit: dict[str, int | None], rates: Rates, exact: bool
) -> None:
    exact = exact and request["cache"] != "group"
    g = request["geometry"]
    assume(g.layers > 1 or request["cache"] != "layer")
    try:
        choice = choose_plan(Request(**request, budgets=Budgets(**limit), exact=exact), rates)
    except PlanError:
        return  # what it then says has tests of its own
    used = by_tier(choice.plan, g)
    weights = Needs.of(choice.plan, g).weights
    used["host"] = used["device"] + used["dram"] + weights
    used["device"] += used.pop("aliased") + weights
    for tier, most in limit.items():
        assert most is None or used[tier] <= most, tier
    assert not (exact and choice.plan.policy == "group")


@settings(max_examples=150, deadline=None)
@given(request=requests, limit=all_limits, more=all_limits, rates=rates, exact=st.booleans())
def test_more_room_never_makes_the_predicted_step_slower(
    request: dict[str, Any],
    limit: dict[str, int | None],
    more: dict[str, int | None],
    rates: Rates,
    exact: bool,
) -> None:
    """Unless it pays for exactness: `auto` leaves `group` for a policy that loses nothing as soon as it may. (No DRAM
    budget at all is not the largest: `group` keeps rows in DRAM only where there is one.)"""
    exact = exact and request["cache"] != "group"
    g = request["geometry"]
    assume(g.layers > 1 or request["cache"] != "layer")
    tight = Budgets(**limit)
    relaxed: dict[str, int | None] = {}
    for name, old in asdict(tight).items():
        unlimited = more[name] is None and name != "dram"
        relaxed[name] = None if old is None or unlimited else old + (more[name] or 0)
    try:
        before = choose_plan(Request(**request, budgets=tight, exact=exact), rates).plan
    except PlanError:
        return
    after = choose_plan(Request(**request, budgets=Budgets(**relaxed), exact=exact), rates).plan
    costs = [step_cost(plan, g, rates) for plan in (before, after)]
    assert costs[0] is not None
    assert costs[1] is not None
    if before.policy != "group" or after.policy == "group":
        assert costs[1].step_s <= costs[0].step_s * (1 + 1e-9)


@pytest.mark.parametrize("device", device_names())
@pytest.mark.parametrize("name", ["llama-3.2-3b", "qwen3-8b"])
def test_descriptions_give_plans_that_fit_them(device: str, name: str) -> None:
    found, g = find_device(device), named_geometry(name)
    assert g is not None
    memory = found.device_memory.value
    dram = memory if found.dram is None else found.dram.value
    shared = Budgets(host=memory) if found.shared else Budgets(device=memory, dram=dram)
    request = Request(
        geometry=g, batch=8, max_context=32768, dtype="bfloat16", platform=found.platform, budgets=shared
    )
    try:
        choice = choose_plan(request, Rates.of(found))
    except PlanError:
        assert Needs.of(make_plan(g, cache="layer", tier="disk", dtype="bfloat16"), g).device > memory / 2
        return
    needs = Needs.of(choice.plan, g)
    assert needs.device + (needs.dram if found.shared else 0) <= memory
    assert all(candidate.cost is not None for candidate in choice.candidates)
