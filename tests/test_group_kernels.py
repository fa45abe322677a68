"""Policy `group` with the kernels, interpreted: the segment and whole decodes equal those of attention `xla`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import assert_same, decode, geometry, prompts_of, random_model
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from swapkv_jax.kernels.versions import (  # pyright: ignore[reportMissingImports]
    gpu_interpreter,
    tpu_interpreter,
)

from swapkv_jax import Engine, Plan, PlanError, Sampling, UsageError, group_graphs, make_plan
from swapkv_jax.adapter import Adapter
from swapkv_jax.attention_choice import Attention, check_capability, default_attention, why_xla
from swapkv_jax.models.blocks import split_block
from swapkv_jax.program import decode_specs
from swapkv_jax.selection import Lookahead, Selection
from swapkv_jax.slot_layouts import PackedSlots, slot_layout

INTERPRETED: dict[Attention, Any] = {
    "mosaic_tpu": tpu_interpreter(detect_races=True),
    "mosaic_gpu": gpu_interpreter(detect_races=False),
    "mosaic_hopper": gpu_interpreter(detect_races=False),
}
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
NO_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)  # each size compiles for ten seconds
KERNELS = "swapkv_jax.kernels.gather_attention"
every_kernel = pytest.mark.parametrize("attention", INTERPRETED)


@pytest.fixture(autouse=True, scope="module")
def small_tiles() -> Iterator[None]:
    """Four slots are a step already, so that few slots make several steps."""
    with (
        patch(f"{KERNELS}.mosaic_tpu.SLOT_BYTES", 2 * 16 * 1024),
        patch(f"{KERNELS}.mosaic_gpu.step_tokens", lambda dim: 16),
    ):
        yield


def sizes(**fields: Any) -> dict[str, Any]:
    """Of the tiny geometry and its plan: heads that the kernels serve, few of everything else."""
    known = {"kv_heads": 2, "repeat": 3, "head_dim": 80, "group_tokens": 4, "slots": 7, "selected": 5}
    choices = {"attended": "selected", "lookahead": "step", "summary": "group", "dtype": "float32"}
    return {**known, **choices, **fields}


def served(attention: Attention, **fields: Any) -> dict[str, Any]:
    """Sizes that an attention serves."""
    hopper = {"head_dim": 64, "group_tokens": 8, "dtype": "bfloat16"} if attention == "mosaic_hopper" else {}
    return sizes(**{**fields, **hopper})


def plan_of(attention: Attention, size: dict[str, Any], **fields: Any) -> tuple[Plan, Any]:
    model = geometry(
        layers=2,
        heads=size["kv_heads"] * size["repeat"],
        kv_heads=size["kv_heads"],
        head_dim=size["head_dim"],
    )
    choice = Selection(
        selected_groups=size["selected"],
        reuse_slots=size["slots"],
        rank=8,
        recent_groups=1,
        attended=size["attended"],
        lookahead=size["lookahead"],
        summary=size["summary"],
        load_buckets=(4, 16),
    )
    known = {"batch": 3, "max_context": 64, "record_alignment": 512}
    known |= {name: size[name] for name in ("group_tokens", "dtype")}
    known["kv_dtype"] = size["dtype"]
    return make_plan(
        model, cache="group", selection=choice, attention=attention, **{**known, **fields}
    ), model


@lru_cache
def _segment(attention: Attention, items: tuple[tuple[str, Any], ...]) -> tuple[Plan, Any, Any]:
    plan, model = plan_of(attention, dict(items))
    block = split_block(model, plan.dtype)
    interpret = INTERPRETED.get(attention, False)
    selects = group_graphs.selection_of(plan).segments_select
    return plan, block, jax.jit(group_graphs.group_segment(plan, block, selects=selects, interpret=interpret))


def compare_segments(attention: Attention, size: dict[str, Any], seed: int, used: list[int]) -> None:
    """One step on random state. `used`: how many slots each row attends. What no row attends is NaN for the kernel,
    and for `xla`, whose weights of 0 must meet finite values, the largest number in V."""
    items = tuple(size.items())
    plan, block, xla = _segment("xla", items)
    packed_plan, _, kernel = _segment(attention, items)
    rng = np.random.default_rng(seed)
    dtype = jnp.dtype(size["dtype"])

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(dtype)

    b, heads, dim, tokens = plan.batch, plan.kv_heads, plan.head_dim, plan.group_tokens
    choice = plan.selection
    assert choice is not None
    c1 = choice.reuse_slots + 1
    params = jax.tree.map(lambda leaf: draw(*leaf.shape) / np.sqrt(leaf.shape[0]).astype(dtype), block.params)
    adapter = draw(heads * dim, choice.rank)
    lengths = rng.integers(0, plan.capacity, b).astype(np.int32)
    summary = jnp.asarray(draw(b, plan.summary_places, choice.rank), choice.summary_dtype)
    ids = np.zeros((b, choice.selected_groups), np.int32)
    k, v = draw(2, b, heads, c1, tokens, dim)
    rolling_k, rolling_v = draw(2, b, heads, tokens, dim)
    mask = np.zeros((b, c1), bool)
    for row, count in enumerate(used):
        mask[row, rng.permutation(c1 - 1)[:count]] = True
    pools, rollings = [], []
    for spoiled in (jnp.finfo(dtype).max, np.nan):
        ks, vs, near_k, near_v = k.copy(), v.copy(), rolling_k.copy(), rolling_v.copy()
        for row in range(b):
            ks[row, :, ~mask[row]], vs[row, :, ~mask[row]] = np.nan, spoiled
            newest = lengths[row] % tokens
            near_k[row, :, newest + 1 :], near_v[row, :, newest + 1 :] = np.nan, spoiled
        pools.append((ks, vs))
        rollings.append((near_k, near_v))
    xk = pools[0][0].transpose(0, 1, 4, 2, 3).reshape(b, heads, dim, -1)
    xv = pools[0][1].reshape(b, heads, -1, dim)
    (width,) = {part.shape[-1] for part in packed_plan.pool_parts(1).values()}
    fill = [(0, 0)] * 4 + [(0, width - 2 * dim)]
    packed = np.pad(np.concatenate(pools[1], axis=-1), fill)
    packed_rolling = np.pad(np.concatenate(rollings[1], axis=-1), fill[1:])
    x = draw(b, params["qkv"]["kernel"].shape[1])
    after = ids
    more = (ids,) if choice.segments_select else ()
    expected = xla(params, adapter, x, (xk, xv), mask, lengths, after, rollings[0], summary, *more)
    ours = kernel(params, adapter, x, (packed,), mask, lengths, after, (packed_rolling,), summary, *more)
    tolerance = TOLERANCE[size["dtype"]]
    largest = np.abs(np.asarray(expected[0], np.float32)).max()

    def near(ours: Any, expected: Any) -> None:
        pair = (np.asarray(x, np.float32) for x in (ours, expected))
        np.testing.assert_allclose(*pair, rtol=tolerance, atol=tolerance * largest)

    near(ours[0], expected[0])
    for row in range(b):
        held = slice(0, lengths[row] % tokens + 1)
        both = np.concatenate([np.asarray(part)[row, :, held] for part in expected[1]], axis=-1)
        near(np.asarray(ours[1][0])[row, :, held, : 2 * dim], both)
    # Where a group is not complete its mean is of NaN, in both: nobody looks at it.
    summaries = (np.asarray(part[2], np.float32) for part in (ours, expected))
    np.testing.assert_allclose(*summaries, rtol=2e-2, atol=2e-2)  # bfloat16
    for mine, theirs in zip(ours[3:], expected[3:], strict=True):
        for row, other in zip(np.asarray(mine).tolist(), np.asarray(theirs).tolist(), strict=True):
            assert len(set(row) - set(other)) <= 1, (row, other)  # a tie may go either way


@pytest.mark.parametrize(
    "attention",
    [pytest.param(name, marks=[pytest.mark.slow] * (name == "mosaic_hopper")) for name in INTERPRETED],
)
@settings(max_examples=4, deadline=None, derandomize=True)
@given(seed=st.integers(0, 999), used=st.tuples(*[st.integers(0, 5)] * 3))
def test_segment_equals_xla(attention: Attention, seed: int, used: tuple[int, ...]) -> None:
    compare_segments(attention, served(attention), seed, list(used))


@pytest.mark.slow
@every_kernel
@settings(max_examples=8, deadline=None, phases=NO_SHRINKING)
@given(data=st.data())
def test_segment_of_any_size_equals_xla(attention: Attention, data: st.DataObject) -> None:
    draw = data.draw
    slots = draw(st.integers(3, 20))
    selected = draw(st.integers(2, slots))
    attended = draw(st.sampled_from(["selected", "kept"]))
    size = served(
        attention,
        kv_heads=draw(st.integers(1, 4)),
        repeat=draw(st.integers(1, 6)),
        head_dim=draw(st.sampled_from([64, 80, 96, 128, 256])),
        group_tokens=draw(
            st.sampled_from([1, 2, 4, 8, 16] if attention == "mosaic_tpu" else list(range(1, 17)))
        ),
        slots=slots,
        selected=selected,
        attended=attended,
        lookahead=draw(st.sampled_from(get_args(Lookahead))),
        summary=draw(st.sampled_from(["token", "group"])),
    )
    most = slots if attended == "kept" else selected
    used = draw(st.lists(st.integers(0, most), min_size=3, max_size=3))
    compare_segments(attention, size, draw(st.integers(0, 999)), used)


@pytest.mark.parametrize("attention", get_args(Attention))
def test_a_rolling_buffer_keeps_what_was_packed_and_appended(attention: Attention) -> None:
    plan, _ = plan_of(attention, served(attention))
    layout = slot_layout(plan)
    rng = np.random.default_rng(0)
    shape = (plan.batch, plan.kv_heads, plan.group_tokens, plan.head_dim)
    k, v = rng.standard_normal((2, *shape)).astype(jnp.dtype(plan.dtype))
    packed = layout.pack(k, v)
    assert [part.shape for part in packed] == [part.shape for part in plan.rolling_parts.values()]
    new_k, new_v = rng.standard_normal((2, *shape[:2], shape[3])).astype(k.dtype)
    newest = np.array([0, 3, 2], np.int32)
    after = jax.jit(layout.append)(packed, new_k, new_v, newest)
    np.testing.assert_array_equal(jax.jit(layout.keys)(packed), k)
    for row, at in enumerate(newest):
        k[row, :, at], v[row, :, at] = new_k[row], new_v[row]
    for ours, expected in zip(layout.unpack(tuple(map(np.asarray, after))), (k, v), strict=True):
        np.testing.assert_array_equal(ours, expected)


def random_adapter(plan: Plan) -> Adapter:
    """Orthonormal vectors that know nothing of the model: groups come and go."""
    keys = plan.kv_heads * plan.head_dim
    noise = np.random.default_rng(1).standard_normal((plan.layers, keys, 16))
    return Adapter(
        vectors=np.linalg.qr(noise)[0].astype(np.float32),
        spectrum=np.ones((plan.layers, keys)),
        fingerprint=f"{0:032x}",
        text_digest="",
        tokens=1,
        place_tokens=plan.place_tokens,
    )


def interpreted(attention: Attention, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of the test compile their kernels interpreted, without race detection, which is slow. The interpreters
    trace while they run, which decoding otherwise forbids."""
    interpret = {"mosaic_tpu": tpu_interpreter, "mosaic_gpu": gpu_interpreter}[attention](detect_races=False)
    monkeypatch.setattr(
        group_graphs, "group_segment", partial(group_graphs.group_segment, interpret=interpret)
    )
    monkeypatch.setattr(jax, "no_tracing", lambda _: nullcontext())


def test_a_whole_layer_gives_its_kernel_every_slot() -> None:
    """Also where it has as many as the layers that select, and those attend fewer."""
    plan, _ = plan_of("mosaic_tpu", served("mosaic_tpu"))
    assert plan.selection is not None
    fewer = replace(plan.selection, attended="selected", selected_groups=plan.selection.reuse_slots - 1)
    layout = slot_layout(replace(plan, selection=fewer), whole=True)
    assert isinstance(layout, PackedSlots)
    used = jnp.arange(fewer.reuse_slots + 1)[None].repeat(plan.batch, 0) < fewer.reuse_slots
    slots, valid = layout._slots(used)
    assert slots[valid].reshape(plan.batch, -1).tolist() == [list(range(fewer.reuse_slots))] * plan.batch


@pytest.mark.slow
@pytest.mark.parametrize(
    "attention", ["mosaic_tpu", "mosaic_gpu"]
)  # the other's bfloat16 decides ties otherwise
def test_decode_equals_xla(attention: Attention, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ragged rows, groups that complete, misses and reuse; nothing moves."""
    size = sizes(repeat=2, head_dim=64, slots=6, selected=4, attended="kept", lookahead="layer")
    fields = {"batch": 2, "max_context": 48, "prefill_chunks": (8, 20)}
    plan, shape = plan_of("xla", size, **fields)
    model = random_model(shape)
    adapter = random_adapter(plan)
    prompts = prompts_of(3, 33)
    with Engine(model, plan, store_dir=tmp_path / "xla", adapter=adapter) as engine:
        expected = decode(engine, prompts, 6)
    interpreted(attention, monkeypatch)
    plan, _ = plan_of(attention, size, **fields)
    with Engine(model, plan, store_dir=tmp_path / "kernel", adapter=adapter) as engine:
        ours = decode(engine, prompts, 6)
        assert engine.use.reuse_rate is not None
        assert 0 < engine.use.reuse_rate < 1
    assert_same(ours, expected, 1e-4)
    assert all(step == ours.addresses[0] for step in ours.addresses)


# ---- compiled for devices that are not here ---------------------------------------------------------------


@pytest.mark.parametrize(("target", "group"), [("v5e", 4), ("v6e", 4), ("h100", 4), ("h100", 8)])
def test_a_segment_compiles_with_its_kernel_and_copies_nothing(
    target: str, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "tools"))
    from portability_targets import TARGETS  # pyright: ignore[reportMissingImports]

    device = TARGETS[target]
    if reason := device.missing():
        pytest.skip(reason)
    model = geometry(layers=2, hidden=1024, heads=32, kv_heads=8, head_dim=128, max_positions=32768)
    attention: Attention = "mosaic_hopper" if group == 8 else "mosaic_gpu"
    if device.kind == "tpu":
        attention = "mosaic_tpu"
    fields = {"dtype": "bfloat16", "platform": device.kind, "group_tokens": group, "attention": attention}
    plan = make_plan(model, cache="group", batch=8, **fields)
    (spec,) = (spec for spec in decode_specs(plan, model, [Sampling()]) if spec.name == "segment")
    compiled = spec.trace(device.sharding()).lower().compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None
    assert memory is not None
    kernel = {"tpu": "tpu_custom_call", "gpu": "mosaic_gpu"}[device.kind]
    assert text.count(f'custom_call_target="{kernel}') == 1
    assert memory.argument_size_in_bytes < 1.02 * spec.argument_bytes
    held = {buffer.name: buffer.bytes for buffer in plan.buffers(model)}
    assert memory.temp_size_in_bytes < min(held["pool.kv.0"], held["summary.0"]) / 2


# ---- which attention a plan gets, and what is refused -----------------------------------------------------


@every_kernel
def test_off_its_platform_a_kernel_is_refused_by_name(attention: Attention) -> None:
    plan, model = plan_of(attention, served(attention))

    (spec,) = (spec for spec in decode_specs(plan, model, [Sampling()]) if spec.name == "segment")
    traced = spec.jit().trace(*spec.arguments)
    with pytest.raises(UsageError, match=f"'{attention}' runs on .*, not on cpu: use 'xla'"):
        traced.lower()


@pytest.mark.parametrize(
    ("platform", "capability", "expected"),
    [
        ("cpu", None, "xla"),
        ("tpu", None, "mosaic_tpu"),
        ("gpu", 9.0, "mosaic_hopper"),
        ("gpu", 10.0, "mosaic_gpu"),
        ("gpu", 8.0, "xla"),
        ("gpu", None, "xla"),
    ],
)
def test_the_planner_takes_the_platforms_kernel(
    monkeypatch: pytest.MonkeyPatch, platform: str, capability: float | None, expected: Attention
) -> None:
    monkeypatch.setattr("swapkv_jax.attention_choice.version", lambda name: "0.12.0.1")
    model = geometry(head_dim=64)
    plan = make_plan(model, cache="group", max_context=64, platform=platform, capability=capability)
    assert plan.attention == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "mosaic_hopper"),
        ({"group_tokens": 16, "head_dim": 256}, "mosaic_hopper"),
        ({"group_tokens": 4}, "mosaic_gpu"),
        ({"head_dim": 80}, "mosaic_gpu"),
        ({"dtype": "float32"}, "mosaic_gpu"),
        ({"capability": 10.0}, "mosaic_gpu"),
        ({"capability": 8.9}, "xla"),
    ],
)
def test_tensor_cores_multiply_where_shapes_and_the_gpu_allow(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], expected: Attention
) -> None:
    monkeypatch.setattr("swapkv_jax.attention_choice.version", lambda name: "0.12.0.1")
    known = {"kv_heads": 8, "heads": 32, "head_dim": 128, "group_tokens": 8, "dtype": "bfloat16"}
    assert default_attention("gpu", **{**known, "capability": 9.0, **fields})[0] == expected


def test_why_xla_attends_where_there_are_kernels() -> None:
    sizes = {"kv_heads": 2, "heads": 4, "head_dim": 64, "group_tokens": 4, "dtype": "bfloat16"}
    assert why_xla("xla", "cpu", **sizes) is None
    assert why_xla("mosaic_tpu", "tpu", **sizes) is None
    assert why_xla("xla", "tpu", **sizes) == "the plan asks for it, where mosaic_tpu would serve"
    for platform, changes, reason in (
        ("tpu", {"head_dim": 72}, "serves head_dim of one of 64, 80, 96, 128, 256, not 72"),
        ("gpu", {"capability": 8.0}, "needs compute capability 9.0, not 8.0"),
        ("gpu", {"capability": None}, "needs compute capability 9.0, not an unknown one"),
    ):
        assert reason in str(why_xla("xla", platform, **{**sizes, **changes}))


def test_kernels_that_would_divide_a_cuda_graph_are_no_default(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"kv_heads": 2, "heads": 4, "head_dim": 64, "group_tokens": 4, "dtype": "bfloat16"}
    for found, expected in (("0.10.2", "xla"), ("0.11.2", "xla"), ("0.12.0.1", "mosaic_gpu")):
        monkeypatch.setattr("swapkv_jax.attention_choice.version", lambda name, found=found: found)
        attention, why = default_attention("gpu", **sizes, capability=9.0)
        assert attention == expected
        assert (why is None) == (expected == "mosaic_gpu")
        assert default_attention("tpu", **sizes) == ("mosaic_tpu", None)


def test_sizes_that_no_kernel_serves_get_xla_and_a_reason() -> None:
    common = {"kv_heads": 2, "heads": 4, "head_dim": 64, "group_tokens": 4, "dtype": "bfloat16"}
    for field, value, reason in (
        ("head_dim", 72, "head_dim of one of 64, 80, 96, 128, 256, not 72"),
        ("group_tokens", 3, "group_tokens of one of 2, 4, 8, 16, not 3"),
        ("group_tokens", 1, "group_tokens of one of 2, 4, 8, 16, not 1"),
        ("dtype", "float16", "dtype of float32 or bfloat16, not float16"),
        ("heads", 34, "query heads per KV head of 1 to 16, not 17"),
    ):
        attention, why = default_attention("tpu", **{**common, field: value})
        assert attention == "xla"
        assert why is not None
        assert reason in why
    assert default_attention("tpu", **common) == ("mosaic_tpu", None)
    assert default_attention("tpu", **{**common, "group_tokens": 1, "dtype": "float32"}) == (
        "mosaic_tpu",
        None,
    )


def test_plans_that_no_kernel_serves_are_refused() -> None:
    with pytest.raises(PlanError, match=r"mosaic_gpu serves head_dim of one of .*, not 16; use that, or"):
        make_plan(geometry(), cache="group", max_context=64, attention="mosaic_gpu")
    with pytest.raises(PlanError, match="attention mosaic_tpu belongs to policy group, not resident"):
        make_plan(geometry(head_dim=64), cache="resident", attention="mosaic_tpu")
    with pytest.raises(PlanError, match=r"needs compute capability 9.0, not 8.0; use attention xla"):
        check_capability("mosaic_gpu", 8.0)
    for capability in (8.9, 10.0, 12.0):
        with pytest.raises(
            PlanError, match=rf"needs compute capability 9.0 \(Hopper\), not {capability}; use"
        ):
            check_capability("mosaic_hopper", capability)
    for attention in ("mosaic_gpu", "mosaic_hopper"):
        check_capability(attention, 9.0)
    check_capability("mosaic_gpu", 10.0)
    check_capability("xla", 8.0)
    with pytest.raises(
        PlanError, match=r"mosaic_hopper serves group_tokens of one of 8, 16, not 4; use that, or"
    ):
        make_plan(
            geometry(head_dim=64), cache="group", max_context=64, attention="mosaic_hopper", group_tokens=4
        )
