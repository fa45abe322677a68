"""The planner: its choices, budgets that are kept or named with what is missing, sizes as a user writes them."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

import jax
import pytest
from engines import geometry, random_model
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from swapkv_jax import Budgets, PlanError, UsageError, make_plan
from swapkv_jax.accounting import kv_bytes
from swapkv_jax.planner import SELECTION, parse_size, weight_bytes

GEOMETRY = geometry()

# --- choices ---


@pytest.mark.parametrize(
    ("choice", "policy", "tier", "physical"),
    [
        ({}, "resident", None, None),
        ({"cache": "resident"}, "resident", None, None),
        ({"cache": "layer"}, "layer", "dram", 2),
        ({"cache": "layer", "tier": "disk"}, "layer", "disk", 2),
        ({"tier": "disk"}, "layer", "disk", 2),
        ({"tier": "dram"}, "layer", "dram", 2),
        ({"physical_layers": 3}, "layer", "dram", 3),
        ({"cache": "layer", "physical_layers": 7, "tier": "disk"}, "layer", "disk", 7),
    ],
)
def test_choices(choice: dict[str, Any], policy: str, tier: str | None, physical: int | None) -> None:
    plan = make_plan(GEOMETRY, **choice)
    assert (plan.policy, plan.tier, plan.physical_layers) == (policy, tier, physical)
    assert plan.max_context == GEOMETRY.context_limit


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_platforms(platform: str) -> None:
    assert make_plan(GEOMETRY, platform=platform).segments == (7 if platform == "cpu" else 1)
    for tier in ("dram", "disk"):
        plan = make_plan(GEOMETRY, cache="layer", tier=tier, platform=platform)
        in_graph = (platform, tier) == ("tpu", "dram")
        assert plan.transport == ("alias" if platform == "cpu" else "in_graph" if in_graph else "copy")


def test_overrides_win() -> None:
    plan = make_plan(GEOMETRY, tier="disk", staging_slots=3, transport="copy", record_alignment=512)
    assert (plan.staging_slots, plan.transport, plan.record_alignment) == (3, "copy", 512)
    assert plan.staging_groups
    assert make_plan(GEOMETRY, tier="disk", staging_groups=2).staging_groups == 2
    assert make_plan(GEOMETRY, prefill_chunks=(7,)).prefill_chunks == (7,)


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({"cache": "resident", "tier": "disk"}, "leave --tier and --physical-layers out"),
        ({"cache": "resident", "physical_layers": 2}, "leave --tier and --physical-layers out"),
        ({"physical_layers": 1}, "physical_layers must be at least 2"),
        ({"physical_layers": 0}, "physical_layers must be at least 2"),
        ({"physical_layers": 8}, "use 2 to 7, or policy resident"),
        ({"max_context": 257}, "use at most 256"),
        ({"batch": 0}, "batch must be at least 1"),
        ({"group_tokens": 0}, "group_tokens must be at least 1"),
        ({"colour": "red"}, "unknown field `colour`"),
        ({"io_threads": "many"}, "Expected `int`"),
        ({"cache": "resident", "staging_slots": 2}, "staging_slots means nothing under policy resident"),
        ({"tier": "dram", "staging_slots": 2}, "belong to tier disk"),
        ({"tier": "disk", "staging_slots": 0}, "staging_slots of at least 2"),
        ({"tier": "disk", "record_alignment": 0}, "record_alignment must be a multiple of 512"),
    ],
)
def test_choices_that_contradict(choice: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words) as caught:
        make_plan(GEOMETRY, **choice)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_model_of_one_layer_is_resident() -> None:
    assert make_plan(geometry(layers=1)).policy == "resident"
    with pytest.raises(PlanError, match="no plan fits: resident needs"):
        make_plan(geometry(layers=1), budgets=Budgets(device=1))
    with pytest.raises(PlanError, match="use policy resident"):
        make_plan(geometry(layers=1), cache="layer")


# --- budgets ---


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tied": False},
        {"qkv_bias": True},
        {"o_bias": False, "qk_norm": True, "head_dim": 24},
        {"layers": 1},
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weight_bytes_are_those_held(fields: dict[str, Any], dtype: str) -> None:
    model = random_model(geometry(**fields), dtype)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    assert weight_bytes(model.geometry, dtype) == held


def _bytes(number: str, unit: str) -> int:
    """As in a message, where mebibytes are rounded to one decimal."""
    return int(number) if unit == "bytes" else int((float(number.replace(",", "")) + 0.05) * 2**20) + 1


def _raised(budgets: Budgets, by: int) -> Budgets:
    raised = {name: limit + by for name, limit in asdict(budgets).items() if limit is not None}
    return Budgets(**raised)


def _check_refusal(message: str, budgets: Budgets, choices: dict[str, Any]) -> None:
    """It says by how much: with that much more a plan fits, with a byte less than the least none does."""
    assert "\n" not in message
    assert "raise a budget, or lower --max-context or the rows" in message
    found = re.findall(r"([\d.,]+) (bytes|MiB) over the budget of", message)
    missing = [_bytes(number, unit) for number, unit in found]
    assert missing
    assert min(missing) > 0
    make_plan(GEOMETRY, budgets=_raised(budgets, max(missing)), **choices)
    if "MiB over" not in message and min(missing) > 1:
        with pytest.raises(PlanError):
            make_plan(GEOMETRY, budgets=_raised(budgets, min(missing) - 1), **choices)


limits = st.none() | st.integers(1, 1 << 24)


@settings(max_examples=150, deadline=None)
@given(
    device=limits,
    dram=limits,
    disk=limits,
    host=limits,
    cache=st.sampled_from(["auto", "resident", "layer"]),
    tier=st.sampled_from(["auto", "dram", "disk"]),
    batch=st.integers(1, 8),
    max_context=st.integers(1, 256),
    platform=st.sampled_from(["cpu", "gpu"]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    physical=st.none() | st.integers(2, 7),
)
def test_budgets_are_kept(
    device: int | None,
    dram: int | None,
    disk: int | None,
    host: int | None,
    cache: Any,
    tier: Any,
    batch: int,
    max_context: int,
    platform: str,
    dtype: Any,
    physical: int | None,
) -> None:
    if cache == "resident":
        tier, physical = "auto", None
    budgets = Budgets(device=device, dram=dram, disk=disk, host=host)
    choices: dict[str, Any] = {
        "cache": cache,
        "tier": tier,
        "batch": batch,
        "max_context": max_context,
        "platform": platform,
        "dtype": dtype,
        "physical_layers": physical,
    }
    try:
        plan = make_plan(GEOMETRY, budgets=budgets, **choices)
    except PlanError as error:
        _check_refusal(str(error), budgets, choices)
        return
    memory, weights = plan.memory(GEOMETRY), weight_bytes(GEOMETRY, dtype)
    on_device = weights + memory.device + memory.prefill
    if device is not None:
        assert on_device + memory.aliased <= device
    if dram is not None:
        assert memory.dram <= dram
    if disk is not None:
        assert memory.disk <= disk
    if host is not None:
        assert on_device + memory.dram <= host
    if cache == "auto" and plan.policy == "layer" and tier == "auto" and physical is None:
        with pytest.raises(PlanError):
            make_plan(GEOMETRY, budgets=budgets, **{**choices, "cache": "resident"})
    if tier == "auto" and plan.tier == "disk":
        with pytest.raises(PlanError):
            make_plan(GEOMETRY, budgets=budgets, **{**choices, "cache": "layer", "tier": "dram"})


@pytest.mark.parametrize(
    ("field", "flag"), [("device", "--device-memory"), ("dram", "--dram-memory"), ("disk", "--disk-space")]
)
def test_the_exact_budget_fits_and_a_byte_less_does_not(field: str, flag: str) -> None:
    plan = make_plan(GEOMETRY, cache="layer", tier="disk", max_context=200)
    memory = plan.memory(GEOMETRY)
    weights = weight_bytes(GEOMETRY, "float32")
    need = {"device": memory.device + memory.prefill + memory.aliased + weights, "dram": memory.dram}.get(
        field, memory.disk
    )
    assert make_plan(GEOMETRY, tier="disk", max_context=200, budgets=Budgets(**{field: need})) == plan
    with pytest.raises(PlanError, match=f"of {flag}, 1 bytes over the budget of") as caught:
        make_plan(GEOMETRY, tier="disk", max_context=200, budgets=Budgets(**{field: need - 1}))
    assert "layer (tier disk, 2 physical layers) needs" in str(caught.value)


def test_auto_steps_down() -> None:
    """As the device shrinks: everything on it, then two layers from DRAM, then two layers from disk."""
    weights = weight_bytes(GEOMETRY, "float32")

    def choice(**budgets: int) -> tuple[str, str | None]:
        plan = make_plan(GEOMETRY, batch=4, platform="gpu", group_tokens=64, budgets=Budgets(**budgets))
        return plan.policy, plan.tier

    full = make_plan(GEOMETRY, batch=4, cache="resident").memory(GEOMETRY).device + weights
    assert choice(device=full) == ("resident", None)
    assert choice(device=full - 1) == ("layer", "dram")
    assert choice(device=full - 1, dram=1_800_000) == ("layer", "disk")


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_group_keeps_rows_in_dram_when_told_to(platform: str) -> None:
    def choice(**choices: Any) -> tuple[str | None, int | None]:
        plan = make_plan(GEOMETRY, cache="group", batch=3, platform=platform, **choices)
        return plan.tier, plan.dram_rows

    assert choice() == choice(tier="disk") == ("disk", None)
    assert choice(tier="dram") == ("dram", 3)
    assert choice(tier="dram", dram_rows=2) == ("dram", 2)
    disk = make_plan(GEOMETRY, cache="group", batch=3, platform=platform)
    fixed, row = disk.memory(GEOMETRY).dram, disk.dram_row_bytes
    assert choice(budgets=Budgets(host=1 << 40)) == ("disk", None), "no DRAM budget, no pool"
    assert choice(tier="disk", budgets=Budgets(dram=1 << 40)) == ("disk", None)
    with pytest.raises(PlanError, match="dram_rows means nothing with tier disk"):
        choice(dram_rows=2)
    for rows, budget in (
        (0, fixed),
        (0, fixed + row - 1),
        (1, fixed + row),
        (2, fixed + 3 * row - 1),
        (3, 1 << 40),
    ):
        assert choice(budgets=Budgets(dram=budget)) == (("dram", rows) if rows else ("disk", None))
    with pytest.raises(PlanError, match=r"group \(tier disk; .* of --dram-memory, 1 bytes over"):
        choice(budgets=Budgets(dram=fixed - 1))
    assert choice(tier="dram", budgets=Budgets(dram=fixed + 3 * row)) == ("dram", 3)
    with pytest.raises(PlanError, match=r"3 of 3 row\(s\) in DRAM too.* of --dram-memory, 1 bytes over"):
        choice(tier="dram", budgets=Budgets(dram=fixed + 3 * row - 1))


@given(
    context=st.integers(1, 256),
    group_tokens=st.none() | st.integers(1, 64),
    size=st.tuples(st.integers(1, 6), st.integers(1, 64)),
    batch=st.integers(1, 64),
)
def test_group_defaults_fit_any_model_and_context(
    context: int, group_tokens: int | None, size: tuple[int, int], batch: int
) -> None:
    """No more groups and no higher rank than there are, but for the pinned groups, which have their room; one load
    carries a quarter of what the rows select."""
    kv_heads, half = size
    g = geometry(kv_heads=kv_heads, heads=kv_heads, head_dim=2 * half)
    plan = make_plan(g, cache="group", max_context=context, group_tokens=group_tokens, batch=batch)
    s = plan.selection
    assert s is not None
    pinned = SELECTION.sink_groups + SELECTION.recent_groups
    assert plan.group_tokens == (group_tokens or 8)
    assert s.selected_groups == max(pinned, min(SELECTION.selected_groups, plan.groups))
    assert (plan.dtype, plan.cache_dtype) == ("float32", "bfloat16")
    assert s.reuse_slots == max(pinned, min(SELECTION.reuse_slots, plan.groups))
    assert s.rank == min(SELECTION.rank, 2 * half * kv_heads)
    assert s.load_buckets[0] == 8
    assert s.load_buckets[-1] == min(512, max(8, -(-batch * s.selected_groups // 4)))
    derived = ("selected_groups", "reuse_slots", "rank", "load_buckets")
    assert s == replace(SELECTION, **{name: getattr(s, name) for name in derived})


def test_group_keeps_kv_in_16_bits() -> None:
    """Half the slots where it takes twice the memory; exact policies keep the model's dtype."""
    plans = {
        (dtype, kv): make_plan(
            GEOMETRY, cache="group", dtype=dtype, kv_dtype=kv, max_context=256, group_tokens=1
        )
        for dtype in ("float32", "bfloat16")
        for kv in (None, "float32", "bfloat16", "float16")
    }
    for (_, kv), plan in plans.items():
        assert plan.cache_dtype == (kv or "bfloat16")
        assert plan.selection is not None
        slots = SELECTION.reuse_slots // (2 if plan.cache_dtype == "float32" else 1)
        assert plan.selection.reuse_slots == slots
        assert plan.selection.selected_groups == min(SELECTION.selected_groups, slots)
    for cache in ("resident", "layer"):
        with pytest.raises(PlanError, match="leave --kv-dtype bfloat16 out, or use --cache group"):
            make_plan(GEOMETRY, cache=cache, kv_dtype="bfloat16")
        assert make_plan(GEOMETRY, cache=cache, kv_dtype="float32").cache_dtype == "float32"
    assert make_plan(GEOMETRY, kv_dtype="bfloat16").cache_dtype == "float32", "auto: of group alone"


def test_group_reads_as_far_ahead_as_its_lookahead() -> None:
    for lookahead, slots in (("layer", 2), ("step", 8), ("layer-then-step", 8)):
        choice = replace(SELECTION, rank=8, lookahead=lookahead)
        assert make_plan(GEOMETRY, cache="group", selection=choice).staging_slots == slots
    assert make_plan(GEOMETRY, cache="group", staging_slots=3).staging_slots == 3
    with pytest.raises(PlanError, match="staging_slots of at least 2"):
        make_plan(GEOMETRY, cache="group", staging_slots=1)


room = st.floats(-0.1, 9)  # in rows, beyond what the policy needs with none of them in DRAM


@settings(max_examples=60, deadline=None)
@given(dram=room, host=st.none() | room, batch=st.integers(1, 8), context=st.integers(1, 256))
def test_group_keeps_as_many_rows_as_fit(dram: float, host: float | None, batch: int, context: int) -> None:
    """On a CPU the device's bytes and the weights come out of the same memory."""
    choices: dict[str, Any] = {"cache": "group", "batch": batch, "max_context": context}
    disk = make_plan(GEOMETRY, **choices)
    memory, row = disk.memory(GEOMETRY), disk.dram_row_bytes
    least = memory.device + memory.prefill + weight_bytes(GEOMETRY, "float32") + memory.dram
    budgets = Budgets(
        dram=memory.dram + int(dram * row), host=None if host is None else least + int(host * row)
    )
    try:
        rows = make_plan(GEOMETRY, budgets=budgets, **choices).dram_rows or 0
    except PlanError:
        with pytest.raises(PlanError):
            make_plan(GEOMETRY, budgets=budgets, tier="disk", **choices)
        return
    assert 0 <= rows <= batch
    for fewer in range(1, rows + 1):
        make_plan(GEOMETRY, budgets=budgets, tier="dram", dram_rows=fewer, **choices)
    if rows < batch:
        with pytest.raises(PlanError, match="over the budget"):
            make_plan(GEOMETRY, budgets=budgets, tier="dram", dram_rows=rows + 1, **choices)


# --- sizes ---


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512MiB", 512 << 20),
        ("512 MiB", 512 << 20),
        ("2GB", 2 * 10**9),
        ("1.5GiB", 3 << 29),
        ("1073741824", 1 << 30),
        ("64kib", 64 << 10),
        ("10 KB", 10_000),
        ("7b", 7),
        ("3TiB", 3 << 40),
        ("1PiB", 1 << 50),
        ("2pb", 2 * 10**15),
        (" 1 tb ", 10**12),
    ],
)
def test_parse_size(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    ["", "MiB", "0", "-1", "-5MiB", "12 parsecs", "1e400", "nan", "inf", "1.2.3", "9.3e18", "0.5", "ten"],
)
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="write it like 512MiB, 2GB or 1073741824"):
        parse_size(text)


def test_a_measured_model_has_its_own_default_on_a_cpu() -> None:
    """Whole layers and int8; nothing of it where a wish or a platform says otherwise."""
    sizes = {"layers": 30, "hidden": 576, "heads": 9, "kv_heads": 3, "head_dim": 64, "vocab": 49152}
    model = geometry(**sizes, max_positions=8192)
    plan = make_plan(model, cache="group", batch=8, max_context=7782)
    held = kv_bytes(plan, model)
    assert plan.selection is not None
    assert (plan.cache_dtype, plan.selection.whole) == ("int8", (7, 18, 20))
    assert held["device"] + held["dram"] <= plan.full_kv_bytes / 10
    short = make_plan(model, cache="group", max_context=100).selection
    assert short is not None
    assert short.selected_groups * plan.group_tokens >= 100
    wishes: list[dict[str, Any]] = [{"group_tokens": 8}, {"kv_dtype": "bfloat16"}, {"platform": "tpu"}]
    for wish in wishes:
        other = make_plan(model, cache="group", **wish)
        assert other.selection is not None
        assert not other.selection.whole
        assert other.cache_dtype != "int8"
