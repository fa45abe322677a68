"""Policy `group`: with everything selected it is `resident`; with less, it attends exactly what it selected."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import CONTEXT, GROUP, Decoded, assert_same, decode, prompts_of, resident_plan

from swapkv_jax import Engine, Plan, PlanError, TierError, make_plan
from swapkv_jax.accounting import device_bytes
from swapkv_jax.adapter import Adapter
from swapkv_jax.cache.group import GroupCache
from swapkv_jax.calibration import calibrate, default_text
from swapkv_jax.models import Model
from swapkv_jax.selection import Selection
from swapkv_jax.staging import host_view
from swapkv_jax.tiers import SequenceFile

pytestmark = pytest.mark.usefixtures("shared_programs")

NEW = 14  # completes three groups of four
LENGTHS = (1, GROUP - 1, GROUP + 1, CONTEXT - NEW)
TOLERANCE = 1e-4  # tokens lie in another order in the slots, so sums round otherwise


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
    known = {"group_tokens": GROUP, "record_alignment": 512, "prefill_chunks": (8, 20)}
    return make_plan(
        model.geometry,
        cache="group",
        batch=batch,
        max_context=CONTEXT,
        selection=choice,
        **{**known, **fields},
    )


def everything(group_tokens: int, **fields: Any) -> Selection:
    groups = CONTEXT // group_tokens
    return selection(**{"selected_groups": groups, "reuse_slots": groups, **fields})


@pytest.mark.parametrize("lookahead", ["step", "layer"])
@pytest.mark.parametrize("group_tokens", [1, 4, 8])
def test_all_groups_selected_is_resident(
    deep: Model, adapter: Adapter, reference: Decoded, tmp_path: Path, lookahead: str, group_tokens: int
) -> None:
    choice = everything(group_tokens, lookahead=lookahead)
    with Engine(
        deep, group_plan(deep, choice, group_tokens=group_tokens), store_dir=tmp_path, adapter=adapter
    ) as engine:
        first = decode(engine, prompts_of(*LENGTHS), NEW)
        assert_same(first, reference, TOLERANCE)
        assert first.compiles == 0
        assert all(step == first.addresses[0] for step in first.addresses)
        assert_same(decode(engine, prompts_of(*LENGTHS), NEW), first)  # and once more on the same engine
        assert (engine.use.overflow_loads > 0) == (group_tokens < 8)  # misses of the first step


@pytest.mark.parametrize(
    "choice",
    [
        everything(GROUP, aggregate="sum", replacement="fifo"),
        everything(GROUP, reuse_slots=31),
        everything(GROUP, load_buckets=(1,)),
        everything(GROUP, rank=32),
    ],
    ids=["sum-fifo", "spare-slots", "single-loads", "full-rank"],
)
def test_other_choices_are_resident_too(
    deep: Model, adapter: Adapter, reference: Decoded, tmp_path: Path, choice: Selection
) -> None:
    with Engine(deep, group_plan(deep, choice), store_dir=tmp_path, adapter=adapter) as engine:
        assert_same(decode(engine, prompts_of(*LENGTHS), NEW), reference, TOLERANCE)


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
        for k, v in [*cache._pools, *cache._rolling]:
            host_view(k)[...] = np.nan
            host_view(v)[...] = most
        for summary in cache._summary:
            host_view(summary)[...] = np.nan
        for staging in cache._staging:
            k, v = cache._tier.parts(staging.records)
            k[...], v[...] = np.nan, most
        for records in cache._tier.rolling:
            k, v = cache._tier.parts(records)
            k[...], v[...] = np.nan, most
        assert_same(decode(engine, prompts_of(*LENGTHS), NEW), reference, TOLERANCE)


def test_it_attends_what_it_selected(deep: Model, adapter: Adapter, tmp_path: Path) -> None:
    """After each step the slots in use hold, bit for bit, the K and V of the selected groups."""
    choice = selection(selected_groups=6, reuse_slots=7, load_buckets=(4,))
    plan = group_plan(deep, choice)
    with Engine(deep, plan, store_dir=tmp_path, adapter=adapter) as engine:
        cache = engine._cache
        assert isinstance(cache, GroupCache)
        land, seen = cache._land, []

        def checked(layer: int) -> None:
            arrival = cache._arrivals[layer]
            assert arrival is not None
            request = arrival.request
            land(layer)
            pool_k, pool_v = (host_view(pool) for pool in cache._pools[layer])
            used = cache._used[layer].host[:, :-1]
            for row in range(plan.batch):
                wanted = [g for g in request.wanted[row] if g >= 0]
                assert used[row].sum() == len(set(wanted))
                for group, slot in zip(request.wanted[row], request.slots[row], strict=True):
                    if group < 0:
                        continue
                    assert used[row, slot]
                    record = _stored(cache, layer, row, int(group))
                    k, v = cache._tier.parts(record[None])
                    mine = pool_k[row, :, slot].reshape(v.shape[1:])
                    np.testing.assert_array_equal(mine, k[0].swapaxes(1, 2))
                    np.testing.assert_array_equal(pool_v[row, :, slot].reshape(v.shape[1:]), v[0])
                    seen.append(group)

        cache._land = checked  # type: ignore[method-assign]
        decode(engine, prompts_of(*LENGTHS), NEW)
        assert len(seen) > 500
        assert 0 < engine.use.groups_read < engine.use.groups_selected


def _stored(cache: GroupCache, layer: int, row: int, group: int) -> np.ndarray:
    """A group's record, from memory while it is being written, else from its file."""
    pending = cache._writing.get((layer, row, group))
    if pending is not None:
        pending[1].result()
    file = cache._tier.files[row]
    out = file.buffer(1)
    file.read(layer, group, 1, out)
    return out[0].copy()


def test_memory_is_what_the_plan_says(deep: Model, adapter: Adapter, tmp_path: Path) -> None:
    choice = selection(selected_groups=6, reuse_slots=9)
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


def test_a_slow_disk_only_slows(
    deep: Model, adapter: Adapter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = group_plan(deep, selection(selected_groups=6, reuse_slots=6))
    with Engine(deep, plan, store_dir=tmp_path, adapter=adapter) as engine:
        expected = decode(engine, prompts_of(*LENGTHS), NEW)
        read, rng = SequenceFile.read, np.random.default_rng(0)

        def slow(self: SequenceFile, *arguments: Any) -> np.ndarray:
            time.sleep(float(rng.uniform(0, 0.004)))
            return read(self, *arguments)

        monkeypatch.setattr(SequenceFile, "read", slow)
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
    ],
)
def test_selections_that_cannot_work(deep: Model, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        group_plan(deep, selection(**fields))


def test_a_group_plan_survives_json(deep: Model) -> None:
    plan = group_plan(deep, selection(aggregate="sum", lookahead="layer"))
    assert Plan.from_json(plan.to_json()) == plan
