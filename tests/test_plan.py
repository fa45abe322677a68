"""The plan: JSON, hash, refusals, and what its sizes must satisfy whatever the choices. No compilation."""

from __future__ import annotations

import json
import math
from typing import Any, get_args

import msgspec
import pytest
from engines import geometry
from hypothesis import given
from hypothesis import strategies as st

from swapkv_jax import Plan, PlanError, make_plan
from swapkv_jax.models import Geometry
from swapkv_jax.plan import DType, Tier, staging_shape
from swapkv_jax.selection import Lookahead, Selection, Summary
from swapkv_jax.tiers import planned_file_bytes

PAGE = 4096
GEOMETRY = geometry()
RESIDENT = Plan(policy="resident", layers=7, kv_heads=2, head_dim=16, batch=2, max_context=200)
DRAM = msgspec.structs.replace(RESIDENT, policy="layer", tier="dram", transport="alias", physical_layers=2)
DISK = msgspec.structs.replace(DRAM, tier="disk", staging_groups=3, staging_slots=2)
CHOICE = Selection(selected_groups=12, reuse_slots=12, rank=8)
GROUP = msgspec.structs.replace(
    RESIDENT,
    policy="group",
    tier="disk",
    transport="alias",
    group_tokens=4,
    staging_slots=2,
    selection=CHOICE,
)


def selecting(**fields: Any) -> dict[str, Any]:
    """A change of `GROUP`'s selection."""
    return {"selection": msgspec.structs.replace(CHOICE, **fields)}


GROUP_DRAM = msgspec.structs.replace(GROUP, tier="dram", dram_rows=2)


ITEMSIZES: dict[DType, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


@st.composite
def plans(draw: st.DrawFn) -> tuple[Plan, Geometry]:
    """Any valid plan and a geometry it is for."""
    kv_heads, repeat = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    g = geometry(
        layers=draw(st.integers(2, 90)),
        heads=kv_heads * repeat,
        kv_heads=kv_heads,
        head_dim=2 * draw(st.integers(1, 80)),
        max_positions=200_000,
    )
    fields: dict[str, Any] = {
        "layers": g.layers,
        "kv_heads": g.kv_heads,
        "head_dim": g.head_dim,
        "batch": draw(st.integers(1, 16)),
        "max_context": draw(st.integers(1, 200_000)),
        "dtype": draw(st.sampled_from(["float32", "bfloat16", "float16"])),
        "group_tokens": draw(st.integers(1, 512)),
        "prefill_chunks": tuple(draw(st.lists(st.integers(1, 4096), min_size=1, max_size=4))),
        "record_alignment": draw(st.sampled_from([512, 4096, 65536])),
        "io_threads": draw(st.integers(1, 64)),
    }
    if draw(st.booleans()):
        plan = Plan(policy="resident", layers_per_segment=draw(st.integers(1, g.layers)), **fields)
    else:
        tier: Tier = draw(st.sampled_from(["dram", "disk"]))
        if tier == "disk":
            fields["staging_groups"] = draw(st.integers(1, 300))
            fields["staging_slots"] = draw(st.integers(2, 16))
        plan = Plan(
            policy="layer",
            tier=tier,
            transport=draw(st.sampled_from(["alias", "copy"])),
            physical_layers=draw(st.integers(2, g.layers)),
            **fields,
        )
    return plan, g


@st.composite
def group_plans(draw: st.DrawFn) -> tuple[Plan, Geometry]:
    """Any valid plan of policy `group`."""
    kv_heads = draw(st.integers(1, 9))
    g = geometry(
        layers=draw(st.integers(2, 90)),
        heads=kv_heads * draw(st.integers(1, 4)),
        kv_heads=kv_heads,
        head_dim=2 * draw(st.integers(1, 80)),
        max_positions=200_000,
    )
    sink, recent = draw(st.integers(0, 3)), draw(st.integers(1, 9))
    selected = draw(st.integers(sink + recent + 1, 300))
    refresh = st.just(()) | st.lists(st.integers(1, 9), min_size=g.layers, max_size=g.layers).map(tuple)
    buckets = draw(st.lists(st.integers(1, 500), min_size=1, max_size=4, unique=True))
    choice = Selection(
        selected_groups=selected,
        reuse_slots=draw(st.integers(selected, 600)),
        rank=draw(st.integers(1, kv_heads * g.head_dim)),
        sink_groups=sink,
        recent_groups=recent,
        summary=draw(st.sampled_from(["token", "group"])),
        summary_dtype=draw(st.sampled_from(["float32", "bfloat16", "float16"])),
        lookahead=draw(st.sampled_from(get_args(Lookahead))),
        attended=draw(st.sampled_from(["selected", "kept"])),
        refresh=draw(refresh),
        load_buckets=tuple(sorted(buckets)),
    )
    batch = draw(st.integers(1, 16))
    rows = draw(st.none() | st.integers(1, batch))
    plan = Plan(
        policy="group",
        layers=g.layers,
        kv_heads=g.kv_heads,
        head_dim=g.head_dim,
        batch=batch,
        max_context=draw(st.integers(1, 200_000)),
        dtype=draw(st.sampled_from(["float32", "bfloat16", "float16"])),
        group_tokens=draw(st.integers(1, 64)),
        tier="dram" if rows else "disk",
        transport=draw(st.sampled_from(["alias", "copy"])),
        staging_slots=draw(st.integers(2, 16)),
        record_alignment=draw(st.sampled_from([512, 4096])),
        selection=choice,
        dram_rows=rows,
        kv_dtype=draw(st.sampled_from([msgspec.UNSET, *ITEMSIZES])),
    )
    return plan, g


# --- JSON and hash ---


@given(plans() | group_plans(), plans() | group_plans())
def test_json_round_trip(one: tuple[Plan, Geometry], other: tuple[Plan, Geometry]) -> None:
    plan, again = one[0], Plan.from_json(one[0].to_json())
    assert again == plan
    assert again.to_json() == plan.to_json()
    assert again.hash == plan.hash
    assert hash(again) == hash(plan)
    assert (plan.hash == other[0].hash) == (plan == other[0])


def test_hash_is_stable() -> None:
    """Over processes and versions: reports and tuned plans refer to it."""
    assert RESIDENT.hash == Plan.from_json(RESIDENT.to_json()).hash
    assert len(RESIDENT.hash) == 16
    reordered = json.dumps(dict(reversed(json.loads(RESIDENT.to_json()).items())))
    assert Plan.from_json(reordered).hash == RESIDENT.hash
    defaults_left_out = (
        '{"policy":"resident","layers":7,"kv_heads":2,"head_dim":16,"batch":2,"max_context":200}'
    )
    assert Plan.from_json(defaults_left_out).hash == RESIDENT.hash


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"colour": "red"}, "unknown field `colour`"),
        ({"batch": "2"}, "Expected `int`, got `str` - at `\\$.batch`"),
        ({"batch": 2.5}, "Expected `int`, got `float` - at `\\$.batch`"),
        ({"batch": None}, "Expected `int`, got `null` - at `\\$.batch`"),
        ({"policy": "paged"}, "Invalid enum value 'paged' - at `\\$.policy`"),
        ({"dtype": "int8"}, "Invalid enum value 'int8' - at `\\$.dtype`"),
        ({"tier": "tape"}, "Invalid enum value 'tape' - at `\\$.tier`"),
        ({"version": 2}, "Invalid enum value 2 - at `\\$.version`"),
        ({"prefill_chunks": [64, "x"]}, "Expected `int`, got `str` - at `\\$.prefill_chunks\\[(1|...)\\]`"),
        ({"selection": {"summary": "head"}}, "Invalid enum value 'head' - at `\\$.selection.summary`"),
        ({"selection": {"summary_dtype": "int8"}}, "value 'int8' - at `\\$.selection.summary_dtype`"),
        ({"selection": {"attended": "all"}}, "Invalid enum value 'all' - at `\\$.selection.attended`"),
        ({"selection": {"refresh": 2}}, "Expected `array`, got `int` - at `\\$.selection.refresh`"),
        ({"selection": {"ranks": [8]}}, "unknown field `ranks` - at `\\$.selection`"),
    ],
)
def test_json_that_is_no_plan(change: dict[str, Any], words: str) -> None:
    text = json.dumps({**json.loads(RESIDENT.to_json()), **change})
    with pytest.raises(PlanError, match=words) as caught:
        Plan.from_json(text, source="p.json")
    message = str(caught.value)
    assert message.startswith("p.json is not a plan: ")
    assert "\n" not in message
    assert "the fields are version, policy, " in message


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '"resident"', "{}", b"\xff\xfe", b'{"policy": "\xff"}']
)
def test_text_that_is_no_plan(text: str | bytes) -> None:
    with pytest.raises(PlanError, match="is not a plan: "):
        Plan.from_json(text)


# --- refusals ---

BAD: list[tuple[Plan, dict[str, Any], str, str]] = [
    *[
        (
            plan,
            {name: value},
            f"its {name} is {value}, the model's {getattr(RESIDENT, name)}",
            "make a plan for",
        )
        for plan in (RESIDENT, DRAM, DISK)
        for name, value in {"layers": 8, "kv_heads": 4, "head_dim": 32}.items()
    ],
    *[
        (plan, {name: value}, f"{name} must be at least 1, not {value}", "at least 1")
        for plan in (RESIDENT, DRAM)
        for name in ("batch", "max_context", "group_tokens", "layers_per_segment", "io_threads")
        for value in (0, -3)
    ],
    (RESIDENT, {"max_context": 257}, "max_context 257 is over the model's limit of 256", "use at most 256"),
    (RESIDENT, {"prefill_chunks": ()}, "one or more positive sizes", "one or more positive sizes"),
    (RESIDENT, {"prefill_chunks": (64, 0)}, "not [64, 0]", "one or more positive sizes"),
    (DISK, {"record_alignment": 0}, "record_alignment must be a multiple of 512 bytes, not 0", "use 4096"),
    (DISK, {"record_alignment": 1000}, "not 1000", "use 4096"),
    (RESIDENT, {"physical_layers": 2}, "physical_layers means nothing under policy resident", "leave it out"),
    (RESIDENT, {"tier": "dram"}, "tier means nothing under policy resident", "leave it out"),
    (RESIDENT, {"transport": "copy"}, "transport means nothing under policy resident", "leave it out"),
    (RESIDENT, {"staging_groups": 1}, "staging_groups means nothing", "leave it out"),
    (RESIDENT, {"staging_slots": 2}, "staging_slots means nothing", "leave it out"),
    (RESIDENT, {"layers_per_segment": 8}, "8 is more than the model's 7 layers", "use at most 7"),
    (DRAM, {"physical_layers": None}, "physical_layers must be at least 2", "use 2"),
    (DRAM, {"physical_layers": 1}, "physical_layers must be at least 2", "not 1; use 2"),
    (DRAM, {"physical_layers": 8}, "8 is more than the model's 7 layers", "use 2 to 7, or policy resident"),
    (DRAM, {"layers_per_segment": 2}, "layers_per_segment must be 1, not 2", "must be 1"),
    (DRAM, {"tier": None}, "needs a tier", "dram or disk"),
    (DRAM, {"transport": None}, "a transport", "alias or copy"),
    (DRAM, {"staging_groups": 1}, "belong to tier disk", "leave them out"),
    (DRAM, {"staging_slots": 2}, "belong to tier disk", "leave them out"),
    (DISK, {"staging_groups": None}, "staging_groups of at least 1", "at least 1"),
    (DISK, {"staging_groups": 0}, "staging_groups of at least 1", "at least 1"),
    (DISK, {"staging_slots": 1}, "staging_slots of at least 2", "at least 2"),
    *[
        (
            plan,
            {"kv_dtype": "bfloat16"},
            f"kv_dtype bfloat16 beside dtype float32 belongs to policy group, not {name}",
            "leave it out",
        )
        for plan, name in ((RESIDENT, "resident"), (DRAM, "layer"), (DISK, "layer"))
    ],
    (RESIDENT, {"dram_rows": 1}, "dram_rows belongs to policy group, not resident", "leave it out"),
    (DRAM, {"dram_rows": 1}, "dram_rows belongs to policy group, not layer", "leave it out"),
    (GROUP, {"dram_rows": 1}, "dram_rows means nothing with tier disk", "use tier dram"),
    (GROUP, {"tier": "dram"}, "dram_rows of 1 to the batch of 2, not None", "use tier disk for none"),
    (GROUP_DRAM, {"dram_rows": 0}, "dram_rows of 1 to the batch of 2, not 0", "use tier disk for none"),
    (GROUP_DRAM, {"dram_rows": 3}, "dram_rows of 1 to the batch of 2, not 3", "1 to the batch"),
    (GROUP, {"staging_slots": None}, "needs staging_slots of at least 2", "not None; use 2, or more"),
    (GROUP, {"staging_slots": 1}, "needs staging_slots of at least 2", "not 1; use 2, or more"),
    (GROUP, {"physical_layers": 2}, "physical_layers means nothing under policy group", "leave it out"),
    (GROUP, {"staging_groups": 1}, "staging_groups means nothing under policy group", "leave it out"),
    (GROUP, {"layers_per_segment": 7}, "layers_per_segment must be 1, not 7", "must be 1"),
    (GROUP, {"selection": None}, "policy group needs a selection", "selected_groups, reuse_slots, rank"),
    (GROUP, selecting(refresh=(1, 2)), "refresh has 2 numbers for 7 layers", "give one per layer"),
    (GROUP, selecting(refresh=(1,) * 8), "refresh has 8 numbers for 7 layers", "or leave it out"),
    (GROUP, selecting(refresh=(1,) * 6 + (0,)), "refresh must be steps of at least 1", "leave it out"),
    (
        GROUP,
        selecting(refresh=(4,) * 7, selected_groups=9),
        "refresh of 4 steps needs selected_groups",
        "at least 10, not 9",
    ),
    (GROUP, selecting(opening_steps=0), "opening_steps must be at least 1, not 0", "at least 1"),
    (GROUP_DRAM, {"tier": None}, "policy group needs a tier", "disk, or dram for a pool"),
    (GROUP_DRAM, {"transport": None}, "a transport", "alias or copy"),
]


@pytest.mark.parametrize(("plan", "change", "what", "remedy"), BAD)
def test_validate_refuses(plan: Plan, change: dict[str, Any], what: str, remedy: str) -> None:
    """Each refusal is one line that says what is wrong and what would work; `buffers` and `memory` refuse too."""
    plan.validate(GEOMETRY)
    bad = msgspec.structs.replace(plan, **change)
    for check in (bad.validate, bad.buffers, bad.memory):
        with pytest.raises(PlanError) as caught:
            check(GEOMETRY)
        message = str(caught.value)
        assert what in message
        assert remedy in message
        assert "\n" not in message


def test_a_model_of_one_layer() -> None:
    one = geometry(layers=1)
    msgspec.structs.replace(RESIDENT, layers=1).validate(one)
    with pytest.raises(PlanError, match="at least 2 layers, not 1; use policy resident"):
        msgspec.structs.replace(DRAM, layers=1).validate(one)
    msgspec.structs.replace(GROUP, layers=1).validate(one)
    with pytest.raises(PlanError, match="the model has 1 layer; use lookahead layer"):
        msgspec.structs.replace(GROUP, layers=1, **selecting(lookahead="step")).validate(one)


# --- sizes ---


@given(plans())
def test_sizes(case: tuple[Plan, Geometry]) -> None:
    """What prefill, the pool, staging and the store rely on."""
    plan, g = case
    plan.validate(g)
    token = g.kv_heads * g.head_dim * plan.itemsize  # bytes of one token's K in one layer
    assert plan.capacity >= plan.max_context
    assert plan.capacity % plan.group_tokens == 0
    assert plan.groups * plan.group_tokens == plan.capacity
    unit = plan.group_tokens
    if plan.tier == "dram":
        assert plan.capacity * token % PAGE == 0, "a row's K is a block of the pool"
        unit = math.lcm(unit, PAGE // math.gcd(PAGE, token))
    if plan.tier == "disk":
        assert plan.staging_groups is not None
        assert plan.groups % plan.staging_groups == 0, "a whole piece fits behind any other"
        unit *= plan.staging_groups
    assert plan.capacity - plan.max_context < unit, "no more than rounding asks for"
    assert plan.full_kv_bytes == plan.batch * plan.max_context * g.kv_bytes_per_token(plan.itemsize)
    assert plan.payload_bytes == 2 * token * plan.group_tokens
    assert plan.stride_bytes > plan.payload_bytes
    assert plan.stride_bytes % plan.record_alignment == 0
    assert plan.stride_bytes - plan.payload_bytes < plan.record_alignment + 64
    assert (plan.segments - 1) * plan.layers_per_segment < g.layers <= plan.segments * plan.layers_per_segment


@given(plans())
def test_buffers_add_up(case: tuple[Plan, Geometry]) -> None:
    plan, g = case
    buffers = plan.buffers(g)
    memory = plan.memory(g)
    assert len({buffer.name for buffer in buffers}) == len(buffers)
    total = memory.device + memory.aliased + memory.prefill + memory.dram + memory.disk
    assert sum(buffer.bytes for buffer in buffers) == total
    row = 2 * g.kv_heads * g.head_dim * plan.capacity * plan.itemsize  # K and V of one layer's row
    layer = plan.batch * row
    state = plan.batch * (g.hidden * plan.itemsize + 4 * 4 + g.vocab * 4)
    state += 2 * plan.batch * g.layers * g.kv_heads * g.head_dim * plan.itemsize  # each layer's new K and V
    if plan.policy == "resident":
        assert (memory.device, memory.aliased) == (state + g.layers * layer, 0)
        assert (memory.prefill, memory.dram, memory.disk) == (0, 0, 0)
        return
    assert plan.physical_layers is not None
    slots = plan.physical_layers * layer
    if plan.tier == "disk" and plan.transport == "copy":  # what was read, on its way into a slot
        slots += (plan.staging_slots or 0) * (plan.staging_groups or 0) * plan.stride_bytes
    if plan.tier == "dram" and plan.transport == "alias":
        assert (memory.device, memory.aliased) == (state, slots)
        assert memory.prefill == plan.physical_layers * row
    else:
        assert (memory.device, memory.aliased, memory.prefill) == (state + slots, 0, 0)
    if plan.tier == "dram":
        assert (memory.dram, memory.disk) == (g.layers * layer, 0)
    else:
        assert plan.staging_slots is not None
        assert plan.staging_groups is not None
        records = plan.staging_slots * plan.staging_groups + g.layers * plan.batch
        assert memory.dram == records * plan.stride_bytes
        file = planned_file_bytes(g.layers, plan.groups, plan.payload_bytes, plan.record_alignment)
        assert memory.disk == plan.batch * file
        assert memory.disk >= plan.batch * g.layers * plan.groups * plan.stride_bytes


@given(group_plans())
def test_buffers_of_group_add_up(case: tuple[Plan, Geometry]) -> None:
    plan, g = case
    s = plan.selection
    assert s is not None
    assert plan.capacity % plan.group_tokens == 0
    assert 0 <= plan.capacity - plan.max_context < plan.group_tokens
    buffers, memory = plan.buffers(g), plan.memory(g)
    assert len({buffer.name for buffer in buffers}) == len(buffers)
    size, width, own = g.kv_heads * g.head_dim, ITEMSIZES[s.summary_dtype], ITEMSIZES[plan.dtype]
    row = (
        2 * (s.reuse_slots + 2) * plan.group_tokens * size * plan.itemsize
    )  # a spare slot, the newest tokens
    places = plan.capacity if s.summary == "token" else plan.groups
    row += places * s.rank * width + (s.reuse_slots + 1) + 4 * s.selected_groups
    weights = (
        size * s.rank * 4 + g.hidden * g.heads * g.head_dim * width
    )  # of the selection: adapter, queries
    state = plan.batch * (g.hidden * own + 4 * 4 + g.vocab * 4 + 4 * s.selected_groups)
    staged = (plan.staging_slots or 0) * s.load_buckets[-1] * plan.stride_bytes
    arriving = staged if plan.transport == "copy" else 0
    assert memory.device == g.layers * (plan.batch * row + weights) + state + arriving
    assert memory.aliased == 0
    assert memory.prefill == 2 * 2 * plan.capacity * size * own  # two layers of one row
    records = (plan.staging_slots or 0) * s.load_buckets[-1] + g.layers * plan.batch
    pool = (plan.dram_rows or 0) * plan.dram_row_bytes
    assert memory.dram == records * plan.stride_bytes + pool
    assert pool >= (plan.dram_rows or 0) * g.layers * plan.groups * plan.payload_bytes
    file = planned_file_bytes(g.layers, plan.groups, plan.payload_bytes, plan.record_alignment)
    assert memory.disk == plan.batch * file


@pytest.mark.parametrize(
    ("fields", "choice", "message"),
    [
        ({}, {"whole_layers": (3, 1)}, "rising numbers of layers, 0 to 6"),
        ({}, {"whole_layers": (1, 1)}, "rising numbers of layers"),
        ({}, {"whole_layers": (7,)}, "rising numbers of layers, 0 to 6"),
        ({}, {"whole_layers": (-1, 2)}, "rising numbers of layers"),
        ({}, {"whole_layers": tuple(range(7))}, "use policy resident"),
        ({"kv_dtype": "int8", "group_tokens": 1}, {}, None),
        (
            {"attention": "mosaic_tpu", "kv_dtype": "int8"},
            {},
            "serves dtype of float32 or bfloat16, not int8",
        ),
    ],
)
def test_whole_layers_and_int8_that_cannot_work(
    fields: dict[str, Any], choice: dict[str, Any], message: str | None
) -> None:
    assert GROUP.selection is not None
    plan = msgspec.structs.replace(
        GROUP, selection=msgspec.structs.replace(GROUP.selection, **choice), **fields
    )
    if message is None:
        plan.validate(GEOMETRY)
        return
    with pytest.raises(PlanError, match=message):
        plan.validate(GEOMETRY)


def test_whole_layers_keep_every_group_and_no_summary() -> None:
    assert GROUP.selection is not None
    none = msgspec.structs.replace(GROUP.selection, whole_layers=())
    assert none == GROUP.selection, "one form for one choice"
    plan = msgspec.structs.replace(
        GROUP, selection=msgspec.structs.replace(GROUP.selection, whole_layers=(2,)), kv_dtype="int8"
    )
    assert Plan.from_json(plan.to_json()) == plan
    shapes = {b.name: b.shape for b in plan.buffers(GEOMETRY)}
    assert shapes["pool.k.2"][-1] == (plan.groups + 1) * plan.group_tokens
    assert shapes["pool.k.3"][-1] == (GROUP.selection.reuse_slots + 1) * plan.group_tokens
    assert shapes["pool.steps.2"][-1] == plan.groups + 1
    assert not {f"{kind}.2" for kind in ("summary", "ids", "queries", "adapter")} & shapes.keys()
    assert {f"{kind}.3" for kind in ("summary", "ids", "queries", "adapter")} <= shapes.keys()


def test_kv_in_another_dtype() -> None:
    """Slots, rolling buffers, staging and records take its bytes; naming the model's own is naming none."""
    halved = msgspec.structs.replace(GROUP, kv_dtype="bfloat16")
    assert (halved.cache_dtype, halved.dtype) == ("bfloat16", "float32")
    assert halved.pool_parts(1)["k"].dtype == "uint16", "on a CPU, which has no other arithmetic of 16 bits"
    assert msgspec.structs.replace(halved, transport="copy").pool_parts(1)["k"].dtype == "bfloat16"
    sizes, halves = ({b.name: b.bytes for b in plan.buffers(GEOMETRY)} for plan in (GROUP, halved))
    assert {name for name in sizes if sizes[name] == 2 * halves[name]} >= {
        "pool.k.0",
        "pool.v.6",
        "rolling.k.3",
    }
    own = ("x", "logits", "summary.0", "adapter.0", "queries.0", "prefill.k.0")
    assert all(sizes[name] == halves[name] for name in own)
    assert 2 * halved.payload_bytes == GROUP.payload_bytes
    assert halved.full_kv_bytes == GROUP.full_kv_bytes
    assert msgspec.structs.replace(GROUP, kv_dtype="float32") == GROUP


def test_rows_in_dram_are_the_only_difference() -> None:
    """The pool of policy `group` changes no other buffer: the graphs are the same."""
    pool = set(GROUP_DRAM.buffers(GEOMETRY)) - set(GROUP.buffers(GEOMETRY))
    assert set(GROUP.buffers(GEOMETRY)) < set(GROUP_DRAM.buffers(GEOMETRY))
    assert {buffer.tier for buffer in pool} == {"dram"}
    assert GROUP_DRAM.capacity == GROUP.capacity == 200
    payloads = GEOMETRY.kv_bytes_per_token(4) * 200
    assert sorted(buffer.bytes for buffer in pool) == [-(-payloads // PAGE) * PAGE] * 2


@given(st.integers(1, 20_000), st.integers(512, 4 << 20))
def test_staging_shape(groups: int, stride: int) -> None:
    """At most two mebibytes, hardly less, and no size of that kind rounds a row up by less."""
    size = staging_shape(groups, stride)
    assert 1 <= size <= groups
    assert size * stride <= 2 << 20 or size == 1
    assert size == groups or (size + 2) * stride > 3 << 19  # two roundings down
    target = max(1, min(groups, (2 << 20) // stride))
    assert -(-groups // size) * size <= -(-groups // target) * target, "the longest piece wastes no less"


def test_the_papers_sums() -> None:
    """SwapKV's slides: 163,840 bytes per token of Llama-3-70B at one byte; its 24-layer example at 1.5 GB."""
    llama70 = geometry(layers=80, heads=64, kv_heads=8, head_dim=128, max_positions=131072)
    assert llama70.kv_bytes_per_token(1) == 163_840
    plan = msgspec.structs.replace(
        DRAM, layers=80, kv_heads=8, head_dim=128, batch=1, max_context=30_000, dtype="float16"
    )
    assert plan.full_kv_bytes == 30_000 * 163_840 * 2
    whole, two = plan.memory(llama70).dram, plan.memory(llama70).aliased
    assert whole == 40 * two


def test_kvswaps_sums() -> None:
    """KVSwap's memory per sequence at 32K, Llama-3-8B in float16, of MiB: summary 256 (σ 8) or 64 (σ 32), reuse 50,
    rolling 0.5; a summary of groups of 4 is a quarter of one of tokens."""
    llama8 = geometry(layers=32, heads=32, kv_heads=8, head_dim=128, max_positions=32768)
    sizes: dict[tuple[int, Summary], float] = {}
    kinds_of: tuple[tuple[int, Summary], ...] = ((8, "token"), (32, "token"), (8, "group"))
    for sigma, summary in kinds_of:
        choice = Selection(
            selected_groups=100, reuse_slots=100, rank=1024 // sigma, summary=summary, summary_dtype="float16"
        )
        plan = make_plan(
            llama8, cache="group", max_context=32768, dtype="float16", group_tokens=4, selection=choice
        )
        kinds: dict[str, int] = {}
        for buffer in plan.buffers(llama8):
            kind = buffer.name.split(".")[0]
            kinds[kind] = kinds.get(kind, 0) + buffer.bytes * (buffer.tier == "device")
        sizes[sigma, summary] = kinds["summary"] / (1 << 20)
        assert kinds["pool"] / 101 * 100 == 50 << 20
        assert kinds["rolling"] == 1 << 19
    assert sizes == {(8, "token"): 256, (32, "token"): 64, (8, "group"): 64}


@pytest.mark.parametrize(
    "change",
    [
        {"staging_slots": 2**31},
        {"staging_groups": 2**62},
        {"io_threads": 10**6},
        {"batch": 2**40},
        {"prefill_chunks": (2**40,)},
        {"record_alignment": 2**40},
    ],
)
def test_sizes_beyond_reason_are_refused_at_once(change: dict[str, Any]) -> None:
    plan = make_plan(GEOMETRY, cache="layer", tier="disk")
    with pytest.raises(PlanError, match="at most"):
        msgspec.structs.replace(plan, **change).validate(GEOMETRY)
