"""Policy `group` with rows in DRAM: the same tokens, no disk reads for those rows, exact memory, old rows gone."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import jax
import msgspec
import numpy as np
import pytest
from engines import CONTEXT, GROUP, Decoded, assert_same, decode, geometry, prompts_of, resident_plan
from faulty_disk import Disk
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from test_group import LENGTHS, NEW, TOLERANCE, everything, group_plan, selection

from swapkv_jax import Engine, Plan, TierError, make_plan
from swapkv_jax.accounting import device_bytes
from swapkv_jax.adapter import Adapter
from swapkv_jax.cache.group import GroupCache
from swapkv_jax.cache.record_reader import PendingWrites, RecordReader
from swapkv_jax.cache.records import RecordTier
from swapkv_jax.models import Model
from swapkv_jax.report import build_report, describe_plan, summarise
from swapkv_jax.selection import Selection
from swapkv_jax.text import RowText
from swapkv_jax.tiers import DiskStore, aligned_buffer, dram_pool

pytestmark = pytest.mark.usefixtures("shared_programs")

FEW = selection(selected_groups=6, reuse_slots=6, lookahead="layer")
NAMES = ["a", "b", "c"]


def random_adapter(model: Model) -> Adapter:
    """Random directions, for tests to which it does not matter which groups they select."""
    g = model.geometry
    size = g.kv_heads * g.head_dim
    matrices = np.random.default_rng(0).standard_normal((g.layers, size, size))
    return Adapter(
        np.linalg.qr(matrices)[0].astype(np.float32),
        np.ones((g.layers, size)),
        fingerprint=model.fingerprint,
        text_digest="none",
        tokens=1,
        place_tokens=GROUP,
    )


@pytest.fixture(scope="module")
def adapter(deep: Model) -> Adapter:
    return random_adapter(deep)


@pytest.fixture(scope="module")
def reference(deep: Model) -> Decoded:
    with Engine(deep, resident_plan(deep, len(LENGTHS))) as engine:
        return decode(engine, prompts_of(*LENGTHS), NEW)


def dram_plan(model: Model, choice: Selection, rows: int, **fields: int) -> Plan:
    return group_plan(model, choice, tier="dram", dram_rows=rows, **fields)


def cache_of(engine: Engine) -> GroupCache:
    cache = engine._cache
    assert isinstance(cache, GroupCache)
    return cache


# --- decode ---


@pytest.mark.parametrize(
    ("lookahead", "rows"), [("step", 2), ("step", 4), ("layer", 1), ("layer", 3)], ids=str
)
def test_all_groups_selected_is_resident(
    deep: Model, adapter: Adapter, reference: Decoded, tmp_path: Path, lookahead: str, rows: int
) -> None:
    plan = dram_plan(deep, everything(GROUP, lookahead=lookahead), rows)
    with Engine(deep, plan, store_dir=tmp_path, adapter=adapter) as engine:
        pool = cache_of(engine)._tier.pool
        assert pool is not None
        first = decode(engine, prompts_of(*LENGTHS), NEW)
        assert_same(first, reference, TOLERANCE)
        assert first.compiles == 0
        assert pool.evictions == 0
        # The second generation finds the pool full of the first one's rows, and has other lengths per row.
        again = decode(engine, prompts_of(*reversed(LENGTHS)), NEW)
        assert [again.row(row) for row in range(4)] == [reference.row(3 - row) for row in range(4)]
        assert pool.evictions == rows
        use = engine.use
        assert 0 < use.groups_from_dram <= use.groups_read
        assert use.bytes_from_dram == use.groups_from_dram * plan.payload_bytes
        assert (use.reads == use.bytes_read == 0) == (rows == len(LENGTHS))


def test_rows_in_dram_are_never_read_from_disk(deep: Model, adapter: Adapter, tmp_path: Path) -> None:
    """Where the rows are makes no difference to a bit; damage on disk to a row in DRAM is never even seen."""
    prompts = prompts_of(*[CONTEXT - NEW] * len(LENGTHS))
    with Engine(deep, group_plan(deep, FEW), store_dir=tmp_path / "disk", adapter=adapter) as engine:
        expected = decode(engine, prompts, NEW)
        assert engine.use.groups_from_dram == 0
    plan = dram_plan(deep, FEW, 2)
    with Engine(deep, plan, store_dir=tmp_path / "both", adapter=adapter) as engine:
        cache = cache_of(engine)
        start = cache.start

        def damaged() -> None:
            start()
            for file in cache._tier.files[:2]:
                for layer in range(plan.layers):
                    (run,) = file.runs(layer, 0, file.groups)
                    with file.path.open("r+b") as raw:
                        raw.seek(run.file_offset)
                        raw.write(bytes(run.groups * plan.stride_bytes))

        cache.start = damaged  # type: ignore[method-assign]
        assert_same(decode(engine, prompts, NEW), expected)
        assert 0 < engine.use.groups_from_dram < engine.use.groups_read
        assert engine.use.reads > 0


def test_memory_and_report(deep: Model, adapter: Adapter, tmp_path: Path) -> None:
    plan = dram_plan(deep, FEW, 3)
    memory, disk = plan.memory(deep.geometry), group_plan(deep, FEW).memory(deep.geometry)
    row = deep.geometry.layers * plan.groups * plan.payload_bytes
    assert memory.dram - disk.dram == 3 * -(-row // 4096) * 4096
    assert (memory.device, memory.prefill, memory.disk) == (disk.device, disk.prefill, disk.disk)
    prompts = prompts_of(*LENGTHS)
    with Engine(deep, plan, store_dir=tmp_path, adapter=adapter) as engine:
        rows = [RowText(deep.tokenizer, prompt, []) for prompt in prompts]
        generation = engine.generate(prompts, max_new_tokens=NEW, ignore_eos=True)
        for step in generation:
            for row_text, token in zip(rows, step.tokens, strict=True):
                assert token is not None
                row_text.push(token)
        use, device = engine.use, device_bytes(engine)
        report = build_report(engine, generation, prompts, rows)
    assert use.dram_used == memory.dram
    assert device.planned == device.compiled == memory.device
    assert report["memory"]["dram"] == {"planned": memory.dram, "used": memory.dram}
    assert report["io"]["groups_from_dram"] == use.groups_from_dram > 0
    assert report["io"]["bytes_from_dram"] == use.bytes_from_dram
    assert report["plan"]["dram_rows"] == 3
    assert f"{use.groups_from_dram} of the {use.groups_read} others came from DRAM" in summarise(report)
    described = describe_plan(plan, deep.geometry)
    assert "group (tier dram, 3 of 4 row(s) in DRAM too; 6 of up to 24 groups of 4" in described
    assert f"{3 * plan.dram_row_bytes} bytes of it whole rows" in described
    assert report["attention"] == {"kind": "xla", "why_xla": None}
    assert "attention xla:" not in summarise(report) + described
    report["attention"]["why_xla"] = "another reason"
    assert "\n  attention xla: another reason" in summarise(report)


def test_the_report_says_why_no_kernel_attends(deep: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr("swapkv_jax.report.compute_capability", lambda: 8.0)
    _, why, *_ = describe_plan(group_plan(deep, FEW), deep.geometry).splitlines()
    assert why.startswith("  attention xla: attention mosaic_gpu needs compute capability 9.0, not 8.0; use")
    exact = make_plan(deep.geometry, cache="resident", max_context=64)
    assert "attention" not in describe_plan(exact, deep.geometry)


def test_memory_that_cannot_be_locked_only_warns(
    deep: Model, adapter: Adapter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse = SimpleNamespace(mlock=lambda *_: -1)
    monkeypatch.setattr(
        dram_pool, "ctypes", SimpleNamespace(**{**vars(ctypes), "CDLL": lambda *_, **__: refuse})
    )
    plan = dram_plan(deep, FEW, 1)
    with pytest.warns(RuntimeWarning, match="the pool stays pageable"):
        engine = Engine(deep, plan, store_dir=tmp_path, adapter=adapter)
    with engine:
        assert decode(engine, prompts_of(*LENGTHS), 2).compiles == 0
        assert "the DRAM pool is not locked in memory: it may be swapped out" in engine.use.notes


# --- the tier by itself ---


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[RecordTier]:
    """Three rows, the first two in DRAM."""
    tier = RecordTier(tier_plan(dram_rows=2), DiskStore(tmp_path, limit_bytes=None, fingerprint="0" * 32))
    yield tier
    tier.release()


def tier_plan(**fields: int) -> Plan:
    known: dict[str, Any] = {
        "batch": 3,
        "max_context": 40,
        "group_tokens": GROUP,
        "record_alignment": 512,
        "dram_rows": 3,
        "kv_dtype": "float32",
    }
    return make_plan(geometry(layers=2), cache="group", tier="dram", **{**known, **fields})


def records(tier: RecordTier, rng: np.random.Generator, count: int) -> np.ndarray:
    stride = tier._plan.stride_bytes
    out = aligned_buffer(count * stride).reshape(count, stride)
    out[...] = rng.integers(0, 256, out.shape, np.uint8)
    return out


class Held(Executor):
    """Jobs wait until they are released."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Future[Any], partial[Any]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.jobs.append((Future(), partial(fn, *args, **kwargs)))
        return self.jobs[-1][0]

    def release(self, index: int = 0) -> None:
        """Does one of the jobs that wait."""
        future, work = self.jobs.pop(index)
        try:
            future.set_result(work())
        except TierError as error:
            future.set_exception(error)


@dataclass(frozen=True)
class Reading:
    """A reader of one tier, and writes that end when a test says so."""

    reader: RecordReader
    pending: PendingWrites
    writes: Held


@contextmanager
def reading(tier: RecordTier) -> Iterator[Reading]:
    writes, size = Held(), tier._plan.batch * tier._plan.groups
    pending = PendingWrites(tier, writes)
    with ThreadPoolExecutor(1) as pool:
        reader = RecordReader(tier, pending, size, pool)
        yield Reading(reader, pending, writes)
        while writes.jobs:
            writes.release()
        reader.close()


def write_later(
    reading: Reading, tier: RecordTier, layer: int, row: int, group: int, record: np.ndarray
) -> None:
    """As a step does with the group that it completes."""
    reading.pending.write(layer, np.array([row]), np.array([group]), *tier.parts(record))


@settings(
    max_examples=25, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate]
)  # shrinks for minutes
@given(data=st.data())
def test_what_is_read_is_what_was_written(data: st.DataObject) -> None:
    """Rows in DRAM or not, groups in any combination over the rows, several generations on one pool; some groups'
    writes are still held back, others have ended in any order."""
    plan = tier_plan(
        dram_rows=data.draw(st.integers(1, 3)),
        group_tokens=data.draw(st.integers(1, 8)),
        max_context=data.draw(st.integers(16, 64)),
    )
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    payload, pooled_rows = plan.payload_bytes, plan.dram_rows or 0
    with TemporaryDirectory() as directory:
        syscalls = Disk(threads=data.draw(st.booleans()))
        store = DiskStore(Path(directory), limit_bytes=None, fingerprint="0" * 32, syscalls=syscalls)
        tier = RecordTier(plan, store)
        for generation in range(2):
            limits = data.draw(st.lists(st.integers(1, plan.max_context), min_size=3, max_size=3))
            tier.open([f"{name}{generation}" for name in NAMES], limits)
            places = [
                (row, group)
                for row, limit in enumerate(limits)
                for group in range(limit // plan.group_tokens)
            ]
            # Each row's last groups are decode's, written one by one; the others are prefill's.
            decoded = {place for place in places if limits[place[0]] // plan.group_tokens - place[1] <= 2}
            with reading(tier) as r:
                stored = {
                    (layer, *place): records(tier, rng, 1) for layer in range(plan.layers) for place in places
                }
                for (layer, row, group), record in stored.items():
                    if (row, group) in decoded:
                        write_later(r, tier, layer, row, group, record)
                    else:
                        tier.write(layer, row, group, record)
                for _ in range(data.draw(st.integers(0, len(r.writes.jobs)))):
                    r.writes.release(data.draw(st.integers(0, len(r.writes.jobs) - 1)))
                held = {
                    (layer, *rows, *groups)
                    for _, job in r.writes.jobs
                    for layer, rows, groups, _ in [job.args]
                }
                wanted = sorted(data.draw(st.sets(st.sampled_from(places)))) if places else []
                rows, groups = np.array(wanted, np.int32).reshape(-1, 2).T
                # What was written since the layer was last read is in memory, then what is held back.
                later = {(layer, *place) for layer in range(plan.layers) for place in decoded}
                for layer, in_memory in [
                    (layer, known) for layer in range(plan.layers) for known in (later, held)
                ]:
                    out = records(tier, rng, len(wanted))
                    before = tier.use
                    r.reader.start(layer, rows, groups, out)
                    r.reader.finish()
                    for i, (row, group) in enumerate(wanted):
                        np.testing.assert_array_equal(
                            out[i, :payload], stored[layer, row, group][0, :payload]
                        )
                    away = [row for row, group in wanted if (layer, row, group) not in in_memory]
                    pooled = sum(row < pooled_rows for row in away)
                    assert tier.use.groups_from_dram - before.groups_from_dram == pooled
                    assert tier.use.bytes_from_dram - before.bytes_from_dram == pooled * payload
                    assert (tier.use.reads > before.reads) == (pooled < len(away))
            r.pending.drain()
            assert tier.use.dram_used == tier.rolling.nbytes + pooled_rows * plan.dram_row_bytes
            tier.close()
        tier.release()


@pytest.mark.parametrize("row", [0, 2], ids=["pooled", "on-disk"])
def test_a_group_is_in_memory_until_it_is_written_and_was_read(tier: RecordTier, row: int) -> None:
    """What the tier still holds under its name is not seen."""
    rng = np.random.default_rng(0)
    old, new = records(tier, rng, 1), records(tier, rng, 1)
    payload = tier._plan.payload_bytes
    rows, groups = np.array([row], np.int32), np.array([3], np.int32)
    tier.open(NAMES, [40, 40, 40])
    tier.write(1, row, 3, old)
    with reading(tier) as r:
        write_later(r, tier, 1, row, 3, new)
        out, before = records(tier, rng, 1), tier.use
        r.reader.start(1, rows, groups, out)
        r.reader.finish()
        np.testing.assert_array_equal(out[0, :payload], new[0, :payload])
        assert tier.use == before
        with pytest.raises(TierError, match="never written"):  # noqa: PT012 - the other layer's is not there
            r.reader.start(0, rows, groups, out)
            r.reader.finish()
        r.reader.cancel()
        r.writes.release()
        reads = tier.use.reads
        r.reader.start(1, rows, groups, out)
        r.reader.finish()
        assert tier.use.reads == reads
        out, before = records(tier, rng, 1), tier.use
        r.reader.start(1, rows, groups, out)
        r.reader.finish()
        np.testing.assert_array_equal(out[0, :payload], new[0, :payload])
        assert tier.use.groups_from_dram - before.groups_from_dram == (row == 0)
        assert tier.use.reads - before.reads == (row == 2)
    tier.close()


def test_a_write_that_failed_is_raised_by_the_next_read_and_at_the_end(tier: RecordTier) -> None:
    rng = np.random.default_rng(0)
    tier.open(NAMES, [40, 40, 40])
    with reading(tier) as r:
        with patch.object(tier, "write_scattered", side_effect=TierError("no room")):
            write_later(r, tier, 0, 1, 5, records(tier, rng, 1))
            r.writes.release()
        rows, groups, out = np.array([2], np.int32), np.array([0], np.int32), records(tier, rng, 1)
        before = out.copy()
        with pytest.raises(TierError, match="no room"):
            r.reader.start(1, rows, groups, out)
        np.testing.assert_array_equal(out, before)
        with pytest.raises(TierError, match="no room"):
            r.pending.drain()
        r.pending.drain()
    tier.close()


def test_a_group_that_was_not_written_is_an_error(tier: RecordTier) -> None:
    """Its place in the pool holds what a row of the generation before left there."""
    rng = np.random.default_rng(0)
    row, group, out = np.array([1], np.int32), np.array([3], np.int32), records(tier, rng, 1)
    with reading(tier) as r:
        tier.open(NAMES, [40, 40, 40])
        tier.write(1, 1, 3, records(tier, rng, 1))
        r.reader.start(1, row, group, out)
        r.reader.finish()
        tier.close()
        tier.open([name * 2 for name in NAMES], [40, 40, 40])
        with pytest.raises(TierError, match="no layer 1, group 3 of row 2: it was never written"):
            r.reader.start(1, row, group, out)


def test_a_failed_open_leaves_the_tier_usable(tier: RecordTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second row's file cannot be made: nothing stays in use, and the next generation has its room."""
    create, calls = tier.store.create, []

    def failing(name: str, **options: int) -> object:
        calls.append(name)
        if len(calls) == 2:
            raise TierError("no room")
        return create(name, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(tier.store, "create", failing)
    with pytest.raises(TierError, match="no room"):
        tier.open(NAMES, [40, 40, 40])
    tier.close()
    tier.open(["x", "y", "z"], [40, 40, 40])
    tier.write(0, 0, 0, records(tier, np.random.default_rng(0), 1))
    tier.close()


def test_the_pool_cannot_hold_rows_of_two_generations_at_once(tier: RecordTier) -> None:
    tier.open(NAMES, [40, 40, 40])
    assert tier.pool is not None
    with pytest.raises(TierError, match="DRAM pool full"):
        tier.pool.open("one more")


# --- plans ---


def test_a_plan_survives_json_and_old_plans_load() -> None:
    plan = tier_plan(dram_rows=2)
    assert Plan.from_json(plan.to_json()) == plan
    old = msgspec.json.decode(make_plan(geometry(), cache="group").to_json())
    del old["dram_rows"]
    loaded = Plan.from_json(msgspec.json.encode(old))
    assert loaded == make_plan(geometry(), cache="group")
    assert (loaded.tier, loaded.dram_rows) == ("disk", None)
