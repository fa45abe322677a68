"""The fence of a staging slot, under a consumer so slow that a slot filled too early is always caught."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from burn import burn, late, rounds_for
from engines import Decoded, assert_same, decode, disks_through, layer_plan, prompts_of, resident_plan

from swapkv_jax import Engine
from swapkv_jax.cache.disk import DiskLayerCache
from swapkv_jax.graph import Graph, Shape
from swapkv_jax.models import Model
from swapkv_jax.models.blocks import split_block
from swapkv_jax.program import _segment
from swapkv_jax.staging import StagingRing, alias, fetch, host_view, pinned, read_only_view, to_device, zeros
from swapkv_jax.tiers import Syscalls, aligned_buffer
from swapkv_jax.writes import fill_records

SHAPE = (4, 256)


def no_fence(self: Any, slot: int) -> None:
    pass


# --- the ring alone ---


@pytest.fixture(scope="module")
def slow_consumer() -> Callable[[jax.Array], tuple[jax.Array, jax.Array]]:
    """Computes for about 60 ms and only then reads the staging array: its content, and a fence."""
    rounds = rounds_for(0.06)

    def consume(staging: jax.Array) -> tuple[jax.Array, jax.Array]:
        burnt = burn(rounds)
        return jnp.where(burnt == 0, staging, jnp.nan), burnt

    return jax.jit(consume).lower(Shape(SHAPE, jnp.float32)).compile()


def carried(
    consume: Callable[..., tuple[jax.Array, jax.Array]], transport: Literal["alias", "copy"], turns: int
) -> list[float]:
    """What arrives when turn t writes t all over a slot, two slots in turn; -1 where a record is torn."""
    ring = StagingRing(2, SHAPE, "float32", transport)

    def fill(turn: int) -> None:
        ring.wait_reusable(turn % 2)
        ring.buffers[turn % 2][...] = turn

    out = []
    with ThreadPoolExecutor(2) as io:
        reads = {turn: io.submit(fill, turn) for turn in range(2)}
        for turn in range(turns):
            reads[turn].result()
            content, fence = consume(ring.arrived(turn % 2))
            out.append(content)
            ring.publish(turn % 2, fence)
            if turn + 2 < turns:
                reads[turn + 2] = io.submit(fill, turn + 2)
    contents = [np.asarray(content) for content in out]
    return [float(c[0, 0]) if (c == c[0, 0]).all() else -1.0 for c in contents]


@pytest.mark.parametrize("transport", ["alias", "copy"])
def test_the_fence_holds(slow_consumer: Any, transport: Literal["alias", "copy"]) -> None:
    assert carried(slow_consumer, transport, 8) == list(range(8))


def test_without_the_fence_it_fails(slow_consumer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is, the test above would see it: the consumer reads what was meant for a later turn."""
    monkeypatch.setattr(StagingRing, "wait_reusable", no_fence)
    assert carried(slow_consumer, "alias", 8) != list(range(8))


def test_each_slot_waits_for_its_own_last_consumer() -> None:
    class Fence:
        waits = 0

        def block_until_ready(self) -> None:
            self.waits += 1

    first, last, other = Fence(), Fence(), Fence()
    ring = StagingRing(3, SHAPE, "float32", "alias")
    for slot, fence in ((0, first), (0, last), (1, other)):
        ring.publish(slot, fence)  # pyright: ignore[reportArgumentType]
    ring.wait_reusable(2)  # nothing reads it yet
    assert (first.waits, last.waits, other.waits) == (0, 0, 0)
    ring.wait_reusable(0)
    assert (first.waits, last.waits, other.waits) == (0, 1, 0)


# --- the disk cache ---

PROMPTS, NEW = (21, 6), 7


@pytest.fixture(scope="module")
def expected(deep: Model) -> Decoded:
    with Engine(deep, resident_plan(deep, 2)) as engine:
        return decode(engine, prompts_of(*PROMPTS), NEW)


class SlowDisk(Syscalls):
    """Records arrive late and out of order."""

    def __init__(self) -> None:
        self._random, self._lock = random.Random(0), threading.Lock()

    def read_at(self, descriptor: int, buffer: np.ndarray, offset: int) -> int:
        with self._lock:
            pause = self._random.choice([0.0, 0.0, 0.001, 0.006])
        time.sleep(pause)
        return super().read_at(descriptor, buffer, offset)


@pytest.fixture
def slow_disk() -> Iterator[None]:
    with disks_through(SlowDisk()):
        yield


def tiny_pieces(deep: Model, slots: int, transport: str = "disk-alias") -> Any:
    return layer_plan(
        deep, transport, 2, physical_layers=3, staging_groups=1, staging_slots=slots, io_threads=4
    )


@pytest.mark.usefixtures("slow_disk")
@pytest.mark.parametrize("slots", [2, 3, 5])
@pytest.mark.parametrize("transport", ["disk-alias", "disk-copy"])
def test_a_slow_disk(deep: Model, expected: Decoded, slots: int, transport: str, tmp_path: Path) -> None:
    with Engine(deep, tiny_pieces(deep, slots, transport), store_dir=tmp_path) as engine:
        assert_same(decode(engine, prompts_of(*PROMPTS), NEW), expected)


def slow_fill(engine: Engine, rounds: int) -> Graph:
    """The engine's fill, which burns before it reads the staging slot."""
    plan = engine.plan
    fill = fill_records(plan)

    def slow(k: Any, v: Any, records: Any, row: Any, first_group: Any) -> Any:
        return fill(k, v, late(records, rounds), row, first_group)

    k, v = (Shape(shape, jnp.float32) for shape in plan.layer_shapes(plan.batch))
    records = Shape((plan.staging_groups, plan.stride_bytes // plan.itemsize), jnp.float32)
    scalar = Shape((), jnp.int32)
    return Graph("slow fill", slow, [k, v, records, scalar, scalar], (0, 1))


def slow_segment(engine: Engine, rounds: int) -> Graph:
    """The engine's segment, which burns before it reads the device slot."""
    plan, geometry = engine.plan, engine.model.geometry
    block = split_block(geometry, plan.dtype)
    segment = _segment(block)

    def slow(layers: Any, x: Any, ks: Any, vs: Any, news: Any, lengths: Any) -> Any:
        ks, vs = late((ks, vs), rounds)
        return segment(layers, x, ks, vs, news, lengths)

    k, v = (Shape(shape, jnp.float32) for shape in plan.layer_shapes(plan.batch))
    x = Shape((plan.batch, geometry.hidden), jnp.float32)
    new = Shape((2, plan.batch, plan.kv_heads, plan.head_dim), jnp.float32)
    arguments = [[block.params], x, [k], [v], [new], Shape((plan.batch,), jnp.int32)]
    return Graph("slow segment", slow, arguments, (1, 4))


@pytest.mark.parametrize("fenced", [True, False])
@pytest.mark.parametrize("consumer", ["fill", "segment"])
def test_consumers_slower_than_reads(
    deep: Model,
    expected: Decoded,
    fenced: bool,
    consumer: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Right with the fence; without it the very same run is caught out."""
    if not fenced:
        monkeypatch.setattr(StagingRing, "wait_reusable", no_fence)
        monkeypatch.setattr(DiskLayerCache, "_wait_unread", no_fence)
    transport = {"fill": "disk-copy", "segment": "disk-alias"}[consumer]
    with Engine(deep, tiny_pieces(deep, 2, transport), store_dir=tmp_path) as engine:
        if consumer == "fill":
            engine.program.fill = slow_fill(engine, rounds_for(0.005))
        else:
            engine.program.segments[1] = slow_segment(engine, rounds_for(0.02))
        decoded = decode(engine, prompts_of(*PROMPTS), NEW)
    if fenced:
        assert_same(decoded, expected)
    else:
        assert not np.array_equal(decoded.logits, expected.logits)


# --- buffers ---


def test_alias_is_the_buffer() -> None:
    view = aligned_buffer(4096).view(np.float32)
    view[...] = 1
    array = alias(view)
    assert array.unsafe_buffer_pointer() == view.ctypes.data
    view[3] = 7
    assert fetch(array)[3] == 7


def test_views_and_copies() -> None:
    array = zeros((3, 5), "bfloat16")
    view = host_view(array)
    view[1, 2] = 4
    assert float(array[1, 2]) == 4
    assert read_only_view(array)[1, 2] == 4
    copy = fetch(array)
    view[1, 2] = 5
    assert copy[1, 2] == 4


def test_pinned_memory_goes_to_the_device() -> None:
    array, view = pinned((2, 3), "float32")
    assert array.sharding.memory_kind == "pinned_host"
    view[...] = np.arange(6).reshape(2, 3)
    arrived = to_device(array)
    assert arrived.sharding.memory_kind != "pinned_host"
    np.testing.assert_array_equal(arrived, view)


def test_a_new_ring_is_finite_and_aligned() -> None:
    ring = StagingRing(3, (5, 128), "float32", "alias")
    assert len(ring) == 3
    for slot in range(3):
        assert (ring.buffers[slot] == 0).all()
        assert ring.records(slot).shape == (5, 512)
        assert ring.records(slot).ctypes.data == ring.arrived(slot).unsafe_buffer_pointer()
