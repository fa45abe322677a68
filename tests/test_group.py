"""Policy `group`: with everything selected it is `resident`; with less, it attends exactly what it selected."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import ml_dtypes
import numpy as np
import pytest
from engines import (
    CONTEXT,
    GROUP,
    Decoded,
    assert_same,
    decode,
    geometry,
    prompts_of,
    random_model,
    resident_plan,
)
from msgspec.structs import replace

from swapkv_jax import Engine, Plan, PlanError, TierError, make_plan
from swapkv_jax.accounting import device_bytes
from swapkv_jax.adapter import Adapter
from swapkv_jax.cache.group import GroupCache
from swapkv_jax.cache.record_reader import RecordReader
from swapkv_jax.cache.resident import ResidentCache
from swapkv_jax.calibration import calibrate, default_text
from swapkv_jax.models import Model
from swapkv_jax.selection import Lookahead, Selection
from swapkv_jax.slots import Request
from swapkv_jax.staging import fetch, host_view

pytestmark = pytest.mark.usefixtures("shared_programs")

NEW = 14  # completes three groups of four
LENGTHS = (1, GROUP - 1, GROUP + 1, CONTEXT - NEW)
TOLERANCE = 1e-4  # tokens lie in another order in the slots, so sums round otherwise
NAN_BITS = 0x7FC0  # of bfloat16


@pytest.fixture(scope="module")
def adapter(deep: Model) -> Adapter:
    return calibrate(deep, default_text()[:40_000], tokens=1024, window=128)


@pytest.fixture(scope="module")
def reference(deep: Model) -> Decoded:
    with Engine(deep, resident_plan(deep, len(LENGTHS))) as engine:
        return decode(engine, prompts_of(*LENGTHS), NEW)


def selection(**fields: Any) -> Selection:
    known = {"selected_groups": 24, "reuse_slots": 24, "rank": 8, "recent_groups": 2, "load_buckets": (4, 16)}
    return Selection(**{**known, **fields})


def group_plan(model: Model, choice: Selection, *, batch: int = len(LENGTHS), **fields: Any) -> Plan:
    """KV is as exact as `resident`'s, unless `fields` say otherwise."""
    known = {"group_tokens": GROUP, "record_alignment": 512, "prefill_chunks": (8, 20), "kv_dtype": "float32"}
    return make_plan(
        model.geometry,
        cache="group",
        batch=batch,
        max_context=CONTEXT,
        selection=choice,
        **{**known, **fields},
    )


def few(**fields: Any) -> Selection:
    return selection(selected_groups=6, reuse_slots=8, **fields)


def everything(group_tokens: int, **fields: Any) -> Selection:
    groups = CONTEXT // group_tokens
    return selection(**{"selected_groups": groups, "reuse_slots": groups, **fields})


@pytest.mark.parametrize("summary", ["token", "group"])
@pytest.mark.parametrize("lookahead", get_args(Lookahead))
@pytest.mark.parametrize("group_tokens", [1, 4, 8])
def test_all_groups_selected_is_resident(
    deep: Model,
    adapter: Adapter,
    reference: Decoded,
    tmp_path: Path,
    lookahead: str,
    group_tokens: int,
    summary: str,
) -> None:
    """Once with a selection per step, then again, on the same graphs, with rarer ones and nothing else kept."""
    choice = everything(group_tokens, lookahead=lookahead, summary=summary)
    with Engine(
        deep, group_plan(deep, choice, group_tokens=group_tokens), store_dir=tmp_path, adapter=adapter
    ) as engine:
        first = decode(engine, prompts_of(*LENGTHS), NEW)
        assert_same(first, reference, TOLERANCE)
        assert first.compiles == 0
        assert all(step == first.addresses[0] for step in first.addresses)
        assert_same(decode(engine, prompts_of(*LENGTHS), NEW), first)  # and once more on the same engine
        assert (engine.use.overflow_loads > 0) == (group_tokens < 8)  # misses of the first step
    rarer = replace(choice, attended="selected", refresh=(1, 2, 3, 2, 7, 1, 14))
    with Engine(
        deep, group_plan(deep, rarer, group_tokens=group_tokens), store_dir=tmp_path, adapter=adapter
    ) as engine:
        again = decode(engine, prompts_of(*LENGTHS), NEW)
        assert_same(again, reference, TOLERANCE)
        assert again.compiles == 0
        assert all(step == again.addresses[0] for step in again.addresses)


@pytest.mark.parametrize(
    "choice",
    [
        everything(GROUP, aggregate="sum", replacement="fifo"),
        everything(GROUP, replacement="all"),
        everything(GROUP, reuse_slots=31),
        everything(GROUP, load_buckets=(1,)),
        everything(GROUP, rank=32),
        everything(GROUP, summary_dtype="float32"),
        everything(GROUP, summary_dtype="float16", summary="token"),
    ],
    ids=[
        "sum-fifo",
        "no-reuse",
        "spare-slots",
        "single-loads",
        "full-rank",
        "float32-summary",
        "float16-summary",
    ],
)
def test_other_choices_are_resident_too(
    deep: Model, adapter: Adapter, reference: Decoded, tmp_path: Path, choice: Selection
) -> None:
    with Engine(deep, group_plan(deep, choice), store_dir=tmp_path, adapter=adapter) as engine:
        assert_same(decode(engine, prompts_of(*LENGTHS), NEW), reference, TOLERANCE)
        assert (engine.use.reuse_rate == 0) == (choice.replacement == "all")


@pytest.mark.parametrize("transport", ["alias", "copy"])
@pytest.mark.parametrize("lookahead", get_args(Lookahead))
@pytest.mark.parametrize("whole", [(0, 3, 4), (1, 2, 3, 4, 5, 6)])
def test_layers_that_keep_every_group_are_resident(
    deep: Model,
    adapter: Adapter,
    reference: Decoded,
    tmp_path: Path,
    whole: tuple[int, ...],
    lookahead: str,
    transport: str,
) -> None:
    """Also the bytes of plan, compiler and buffers, and addresses that stay; twice, with other rows' slots gone."""
    choice = everything(GROUP, lookahead=lookahead, whole_layers=whole)
    plan = group_plan(deep, choice, transport=transport)
    with Engine(deep, plan, store_dir=tmp_path, adapter=adapter) as engine:
        first = decode(engine, prompts_of(*LENGTHS), NEW)
        device = device_bytes(engine)
        assert_same(first, reference, TOLERANCE)
        assert first.compiles == 0
        assert all(step == first.addresses[0] for step in first.addresses)
        others = prompts_of(*reversed(LENGTHS))
        again = decode(engine, others, NEW)
        with Engine(deep, resident_plan(deep, len(LENGTHS))) as resident:
            assert_same(again, decode(resident, others, NEW), TOLERANCE)
    assert device.planned == device.compiled == plan.memory(deep.geometry).device


def test_only_layers_that_select_read_in_decode(
    deep: Model, adapter: Adapter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All groups of a whole layer are there before the first step, and its new ones come from memory."""
    whole = (0, 1, 2, 4, 5, 6)
    plan = group_plan(deep, few(whole_layers=whole))
    with Engine(deep, plan, store_dir=tmp_path, adapter=adapter) as engine:
        cache = engine._cache
        assert isinstance(cache, GroupCache)
        requested = []
        request = cache._table.request

        def watched(layer: int, wanted: np.ndarray) -> Request:
            requested.append(layer)
            return request(layer, wanted)

        monkeypatch.setattr(cache._table, "request", watched)
        generation = engine.generate(prompts_of(*LENGTHS), max_new_tokens=NEW, ignore_eos=True)
        for step, _ in enumerate(generation):
            for layer in whole:
                held = [(length + max(0, step - 1)) // GROUP for length in LENGTHS]
                assert cache._pools.used[layer].host.sum(axis=1).tolist() == held
        assert set(requested) == {3}


def test_copied_transport_and_rows_that_end_early(deep: Model, adapter: Adapter, tmp_path: Path) -> None:
    finish = {0: 3, 2: 7}
    with Engine(deep, resident_plan(deep, len(LENGTHS))) as engine:
        expected = decode(engine, prompts_of(*LENGTHS), NEW, finish=finish)
    plan = group_plan(deep, everything(GROUP), transport="copy")
    with Engine(deep, plan, store_dir=tmp_path, adapter=adapter) as engine:
        assert_same(decode(engine, prompts_of(*LENGTHS), NEW, finish=finish), expected, TOLERANCE)


def test_unused_memory_takes_no_part(
    deep: Model, adapter: Adapter, reference: Decoded, tmp_path: Path
) -> None:
    """NaN in unused K and in the summary, the largest finite number in unused V: nothing changes."""
    plan = group_plan(deep, everything(GROUP))
    with Engine(deep, plan, store_dir=tmp_path, adapter=adapter) as engine:
        cache = engine._cache
        assert isinstance(cache, GroupCache)
        most = np.finfo(np.float32).max
        for k, v in [*cache._pools.arrays, *cache._rolling]:
            host_view(k)[...] = np.nan
            host_view(v)[...] = most
        for summary in cache._summary:
            host_view(summary)[...] = NAN_BITS  # a CPU holds bfloat16 as its bits
        for lane in cache._lanes:
            k, v = cache._tier.parts(lane.staging.records)
            k[...], v[...] = np.nan, most
        for records in cache._tier.rolling:
            k, v = cache._tier.parts(records)
            k[...], v[...] = np.nan, most
        assert_same(decode(engine, prompts_of(*LENGTHS), NEW), reference, TOLERANCE)


def test_unused_memory_of_int8_takes_no_part(
    deep: Model, adapter: Adapter, reference: Decoded, tmp_path: Path
) -> None:
    """The largest numbers and steps that are NaN: nothing changes, to the bit."""
    plan = group_plan(deep, everything(GROUP, whole_layers=(2, 5)), kv_dtype="int8")
    decoded = []
    for spoiled in (False, True):
        with Engine(deep, plan, store_dir=tmp_path, adapter=adapter) as engine:
            cache = engine._cache
            assert isinstance(cache, GroupCache)
            for pool in cache._pools.arrays if spoiled else ():
                for part, value in zip(pool, (127, 127, np.nan), strict=True):
                    host_view(part)[...] = value
            decoded.append(decode(engine, prompts_of(*LENGTHS), NEW, forced=forced_by(reference)))
    assert_same(*decoded)


def watch_landings(cache: GroupCache, seen: Callable[[int, Request | None], None]) -> None:
    """Calls `seen(layer, request)` whenever a layer's slots are ready for its next segment; None: as they were."""
    land = cache._land

    def landed(layer: int, *arguments: Any) -> None:
        arrival = cache._arrivals[layer]
        land(layer, *arguments)
        seen(layer, arrival.request if arrival else None)

    cache._land = landed  # type: ignore[method-assign]


def attended(cache: GroupCache, layer: int, row: int) -> list[int]:
    """The groups in the slots that the layer's next segment attends."""
    return cache._table._group_of[layer, row][cache._pools.used[layer].host[row, :-1]].tolist()


@pytest.mark.parametrize("what", ["selected", "kept"])
@pytest.mark.parametrize("lookahead", get_args(Lookahead))
def test_it_attends_what_it_selected_or_kept(
    deep: Model, adapter: Adapter, tmp_path: Path, what: str, lookahead: str
) -> None:
    """The slots in use hold, bit for bit, the K and V of the selected groups, and others only if they are kept."""
    choice = few(attended=what, lookahead=lookahead)
    plan = group_plan(deep, choice)
    with Engine(deep, plan, store_dir=tmp_path, adapter=adapter) as engine:
        cache = engine._cache
        assert isinstance(cache, GroupCache)
        compared, beyond = 0, 0

        def check(layer: int, request: Request | None) -> None:
            nonlocal compared, beyond
            assert request is not None, "a selection in every step"
            pool_k, pool_v = (host_view(pool) for pool in cache._pools.arrays[layer])
            for row in range(plan.batch):
                groups, wanted = attended(cache, layer, row), {g for g in request.wanted[row] if g >= 0}
                assert len(set(groups)) == len(groups)
                assert set(groups) >= wanted
                beyond += len(groups) - len(wanted)
                for group in groups:
                    slot = cache._table._slot_of[layer, row, group]
                    tokens = slice(slot * GROUP, (slot + 1) * GROUP)
                    k, v = cache._tier.parts(_stored(cache, layer, row, group)[None])
                    np.testing.assert_array_equal(pool_k[row, :, :, tokens], k[0])
                    np.testing.assert_array_equal(pool_v[row, :, tokens], v[0])
                    compared += 1

        watch_landings(cache, check)
        decode(engine, prompts_of(*LENGTHS), NEW)
        assert compared > 500
        assert (beyond > 0) == (what == "kept")
        assert 0 < engine.use.groups_read < engine.use.groups_selected


def _stored(cache: GroupCache, layer: int, row: int, group: int) -> np.ndarray:
    """A group's record, from memory while it is being written, else from its file."""
    pending = cache._pending.find(layer, np.array([row]), np.array([group]))
    if pending:
        return pending[0]
    file = cache._tier.files[row]
    out = file.buffer(1)
    file.read(layer, group, 1, out)
    return out[0].copy()


def test_without_spare_slots_kept_is_selected(deep: Model, adapter: Adapter, tmp_path: Path) -> None:
    decoded = []
    for what in ("selected", "kept"):
        choice = selection(selected_groups=6, reuse_slots=6, attended=what)
        with Engine(deep, group_plan(deep, choice), store_dir=tmp_path, adapter=adapter) as engine:
            decoded.append(decode(engine, prompts_of(*LENGTHS), NEW))
    assert_same(decoded[1], decoded[0])


@pytest.mark.parametrize("lookahead", get_args(Lookahead))
@pytest.mark.parametrize(("group_tokens", "opening"), [(1, 1), (4, 1), (4, 3)])
def test_rarer_selections(
    deep: Model, adapter: Adapter, tmp_path: Path, lookahead: str, group_tokens: int, opening: int
) -> None:
    """Layers take turns, every so many steps but for the first ones; meanwhile what is completed joins what was
    selected, in place of what scored least."""
    refresh = (1, 2, 3, 2, 5, 1, 4)
    choice = few(lookahead=lookahead, refresh=refresh, opening_steps=opening, attended="selected")

    def due(layer: int, step: int) -> bool:
        return step < opening or (step + layer) % refresh[layer] == 0

    plan = group_plan(deep, choice, group_tokens=group_tokens)
    with Engine(deep, plan, store_dir=tmp_path, adapter=adapter) as engine:
        cache = engine._cache
        assert isinstance(cache, GroupCache)
        steps, chosen = 0, dict[int, list[list[int]]]()

        def check(layer: int, request: Request | None) -> None:
            nonlocal steps
            complete = [(n + steps) // group_tokens for n in LENGTHS]
            if due(layer, steps):
                assert request is not None
                chosen[layer] = [[int(g) for g in row if g >= 0] for row in request.wanted]
                for groups, count in zip(chosen[layer], complete, strict=True):
                    assert len(groups) == min(count, choice.selected_groups)
            else:
                for row, count in zip(chosen[layer], complete, strict=True):
                    newest = max(row, default=-1)
                    row[:] = [*range(count - 1, newest, -1), *row][: choice.selected_groups]
            for row, groups in enumerate(chosen[layer]):
                assert sorted(attended(cache, layer, row)) == sorted(groups), (steps, layer, row)
            steps += layer == plan.layers - 1

        watch_landings(cache, check)
        runs = count_segments(cache)
        decode(engine, prompts_of(*LENGTHS), NEW)
        assert steps == NEW - 1
    segments = plan.layers * steps
    # Where lookahead is by a step a segment selects, or not, for the step after it.
    first = opening if lookahead == "layer-then-step" else 1
    again = sum(due(layer, step) for step in range(first, NEW) for layer in range(plan.layers))
    selecting = segments if lookahead == "layer" else again
    assert runs == {"segment": selecting, "between": segments - selecting}


@pytest.mark.parametrize("lookahead", get_args(Lookahead))
@pytest.mark.parametrize("kept", [True, False], ids=["kept", "selected"])
def test_rows_that_have_ended_want_nothing(
    deep: Model, adapter: Adapter, tmp_path: Path, lookahead: str, kept: bool
) -> None:
    """Also where the token after their last would have completed a group: nobody writes that. The others go on."""
    choice = few(lookahead=lookahead, attended="kept" if kept else "selected")
    with Engine(deep, group_plan(deep, choice), store_dir=tmp_path, adapter=adapter) as engine:
        expected = decode(engine, prompts_of(*LENGTHS), NEW)
        for last in range(GROUP):
            ended = decode(engine, prompts_of(*LENGTHS), NEW, finish={1: last, 2: last + 1})
            for row in (0, 3):
                assert ended.row(row) == expected.row(row)
                np.testing.assert_array_equal(ended.logits[:, row], expected.logits[:, row])
        cache = engine._cache
        assert isinstance(cache, GroupCache)
        watched = []
        watch_landings(cache, lambda layer, request: watched.append(request))
        decode(engine, prompts_of(*LENGTHS), NEW, finish={0: 0, 1: 0, 2: 0})
        later = [request for request in watched[2 * deep.geometry.layers :] if request is not None]
        assert later
        assert all((request.wanted[:3] == -1).all() for request in later)


def count_segments(cache: GroupCache) -> dict[str, int]:
    """How often each kind of segment has run since, once something has decoded."""
    graphs, runs = cache._graphs, {"segment": 0, "between": 0}

    def counted(name: str, graph: Any) -> Any:
        def run(*arguments: Any) -> Any:
            runs[name] += 1
            return graph(*arguments)

        return None if graph is None else run

    segments = {name: counted(name, getattr(graphs, name)) for name in runs}
    cache._graphs = dataclasses.replace(graphs, **segments)
    return runs


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("summary", ["token", "group"])
def test_the_summary_grows_with_what_is_decoded(
    deep: Model, adapter: Adapter, tmp_path: Path, summary: str, dtype: str
) -> None:
    """After prefill and decode it is the resident cache's keys, or their groups' means, by the adapter, rounded."""
    with Engine(deep, resident_plan(deep, len(LENGTHS))) as engine:
        decode(engine, prompts_of(*LENGTHS), NEW)
        cache = engine._cache
        assert isinstance(cache, ResidentCache)
        keys = [host_view(k).astype(np.float64) for k in cache._k]  # [B, Hkv, D, S]
    choice = everything(GROUP, summary=summary, summary_dtype=dtype)
    plan = group_plan(deep, choice)
    with Engine(deep, plan, store_dir=tmp_path, adapter=adapter) as engine:
        decode(engine, prompts_of(*LENGTHS), NEW)
        cache = engine._cache
        assert isinstance(cache, GroupCache)
        written = [fetch(s).view(dtype).astype(np.float64) for s in cache._summary]
    vectors = adapter.slice(choice.rank).vectors.astype(np.float64)
    assert {s.shape for s in written} == {(len(LENGTHS), CONTEXT // plan.place_tokens, choice.rank)}
    places = [(n + NEW - 1) // plan.place_tokens for n in LENGTHS]  # the last token's keys are not computed
    for layer, k in enumerate(keys):
        flat = k.reshape(len(LENGTHS), -1, CONTEXT // plan.place_tokens, plan.place_tokens).mean(axis=3)
        exact = np.einsum("bcp,cr->bpr", flat, vectors[layer])
        for row, count in enumerate(places):
            mine, theirs = written[layer][row, :count], exact[row, :count]
            rounding = float(ml_dtypes.finfo(dtype).eps) / 2
            np.testing.assert_allclose(mine, theirs, rtol=rounding * 1.01, atol=2e-4)


def test_a_model_of_one_layer(tmp_path: Path) -> None:
    model = random_model(geometry(layers=1))
    vectors = np.linalg.qr(np.random.default_rng(0).standard_normal((1, 32, 32)))[0].astype(np.float32)
    adapter = Adapter(
        vectors=vectors, spectrum=np.ones((1, 32)), fingerprint=model.fingerprint, text_digest="", tokens=1
    )
    with Engine(model, resident_plan(model, len(LENGTHS))) as engine:
        expected = decode(engine, prompts_of(*LENGTHS), NEW)
    with Engine(model, group_plan(model, everything(GROUP)), store_dir=tmp_path, adapter=adapter) as engine:
        assert_same(decode(engine, prompts_of(*LENGTHS), NEW), expected, TOLERANCE)
    with pytest.raises(PlanError, match="the model has 1 layer; use lookahead layer"):
        group_plan(model, everything(GROUP, lookahead="step"))


@pytest.mark.parametrize("lookahead", get_args(Lookahead))
@pytest.mark.parametrize("summary", ["token", "group"])
def test_memory_is_what_the_plan_says(
    deep: Model, adapter: Adapter, tmp_path: Path, summary: str, lookahead: str
) -> None:
    choice = few(summary=summary, lookahead=lookahead)
    plan = group_plan(deep, choice)
    memory = plan.memory(deep.geometry)
    with Engine(deep, plan, store_dir=tmp_path, adapter=adapter) as engine:
        decode(engine, prompts_of(*LENGTHS), NEW)
        device, use = device_bytes(engine), engine.use
        assert device.planned == device.compiled == memory.device
        assert use.dram_used == memory.dram
        assert 0 < use.disk_used <= memory.disk
    buffers = {b.name: b.bytes for b in plan.buffers(deep.geometry)}
    assert use.summary_bytes == sum(size for name, size in buffers.items() if name.startswith("summary"))


@pytest.mark.parametrize("whole", [(), (0, 4)])
@pytest.mark.parametrize(
    ("kv_dtype", "transport", "held"),
    [
        ("bfloat16", "alias", {"uint16"}),
        ("bfloat16", "copy", {"bfloat16"}),
        ("int8", "alias", {"int8", "float32"}),
        ("int8", "copy", {"int8", "float32"}),
    ],
)
def test_kv_in_fewer_bits(
    deep: Model,
    adapter: Adapter,
    reference: Decoded,
    tmp_path: Path,
    kv_dtype: str,
    transport: str,
    held: set[str],
    whole: tuple[int, ...],
) -> None:
    """Close to exact, and not exact; the plan's bytes are those on the device."""
    plan = group_plan(deep, everything(GROUP, whole_layers=whole), kv_dtype=kv_dtype, transport=transport)
    with Engine(deep, plan, store_dir=tmp_path, adapter=adapter) as engine:
        cache = engine._cache
        assert isinstance(cache, GroupCache)
        decoded = decode(engine, prompts_of(*LENGTHS), NEW, forced=forced_by(reference))
        device = device_bytes(engine)
        assert {str(part.dtype) for pool in cache._pools.arrays for part in pool} == held
    assert device.planned == device.compiled == plan.memory(deep.geometry).device
    scale = np.abs(reference.logits).max()
    difference = np.abs(decoded.logits - reference.logits).max() / scale
    assert 1e-5 < difference < (2e-2 if kv_dtype == "bfloat16" else 8e-2)
    assert decoded.compiles == 0


def forced_by(reference: Decoded) -> list[list[int]]:
    """What every row decoded, to be decoded again."""
    return [reference.row(row) for row in range(len(LENGTHS))]


def test_a_slow_disk_only_slows(
    deep: Model, adapter: Adapter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = group_plan(deep, selection(selected_groups=6, reuse_slots=6))
    with Engine(deep, plan, store_dir=tmp_path, adapter=adapter) as engine:
        expected = decode(engine, prompts_of(*LENGTHS), NEW)
        finish, rng = RecordReader.finish, np.random.default_rng(0)

        def slow(self: RecordReader) -> None:
            time.sleep(float(rng.uniform(0, 0.004)))
            finish(self)

        monkeypatch.setattr(RecordReader, "finish", slow)
        assert_same(decode(engine, prompts_of(*LENGTHS), NEW), expected)
        assert engine.use.wait_s > 0


def test_a_damaged_record_is_never_attended(deep: Model, adapter: Adapter, tmp_path: Path) -> None:
    plan = group_plan(deep, everything(GROUP))
    with Engine(deep, plan, store_dir=tmp_path, adapter=adapter) as engine:
        cache = engine._cache
        assert isinstance(cache, GroupCache)
        start = cache.start

        def damaged() -> None:
            start()
            file = cache._tier.files[3]
            at = file.runs(2, 5, 1)[0].file_offset + 33
            with file.path.open("r+b") as raw:
                raw.seek(at)
                byte = raw.read(1)[0]
                raw.seek(at)
                raw.write(bytes([byte ^ 1]))

        cache.start = damaged  # type: ignore[method-assign]
        with pytest.raises(TierError, match="layer 2, group 5"):
            decode(engine, prompts_of(*LENGTHS), NEW)
        cache.start = start  # type: ignore[method-assign]
        assert decode(engine, prompts_of(*LENGTHS), NEW).compiles == 0  # the engine goes on


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"selected_groups": 0}, "selected_groups must be at least 1"),
        ({"reuse_slots": 23}, "use at least 24"),
        ({"rank": 33}, "not between 1 and Hkv·D = 32"),
        ({"recent_groups": 0}, "recent_groups must be at least 1"),
        ({"sink_groups": -1}, "sink_groups must be 0 or more"),
        ({"sink_groups": 20, "recent_groups": 5}, "use selected_groups of at least 25"),
        ({"load_buckets": ()}, "load_buckets"),
        ({"load_buckets": (8, 4)}, "load_buckets"),
        ({"refresh": (2,) * 6}, "6 numbers for 7 layers; give one per layer"),
        ({"refresh": (1, 1, 1, 0, 1, 1, 1)}, r"at least 1 for every layer, not \[1, 1, 1, 0"),
        (
            {"refresh": (1, 2, 3, 1, 2, 3, 1), "selected_groups": 3},
            "refresh of 3 steps needs selected_groups of at least 4, not 3",
        ),
    ],
)
def test_selections_that_cannot_work(deep: Model, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        group_plan(deep, selection(**fields))


def test_a_group_plan_survives_json(deep: Model) -> None:
    plan = group_plan(deep, selection(aggregate="sum", lookahead="layer"))
    assert Plan.from_json(plan.to_json()) == plan
