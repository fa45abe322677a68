"""The DRAM pool: its free list and eviction against models, its views, its limits."""

import math
import resource
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from swapkv_jax.errors import TierError, UsageError
from swapkv_jax.memory_limits import available_memory
from swapkv_jax.tiers import BLOCK_BYTES, DramPool, TensorRef
from swapkv_jax.tiers.free_list import FreeList

PAGES = 16


def pages(pool: DramPool, sequence: str, count: int, name: str = "kv") -> TensorRef:
    return pool.allocate(sequence, name, (count, BLOCK_BYTES), np.uint8)


def small_pool(count: int = PAGES) -> DramPool:
    return DramPool(count * BLOCK_BYTES, lock=False)


# --- free list ---


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 20)), max_size=60))
def test_free_list_matches_a_bitmap(steps):
    free, taken, blocks = FreeList(64), np.zeros(64, bool), []
    for allocate, number in steps:
        if allocate:
            offset = free.allocate(number)
            if offset is not None:
                assert not taken[offset : offset + number].any(), "overlaps a block"
                taken[offset : offset + number] = True
                blocks.append((offset, number))
            else:
                assert all(length < number for _, length in free.runs)
        elif blocks:
            offset, length = blocks.pop(number % len(blocks))
            free.release(offset, length)
            taken[offset : offset + length] = False
        edges = np.flatnonzero(np.diff(np.concatenate([[True], taken, [True]]).astype(int)))
        starts, ends = edges[::2], edges[1::2]
        assert free.runs == tuple(zip(starts.tolist(), (ends - starts).tolist(), strict=True))
        assert free.total == int((~taken).sum())
    for offset, length in blocks:
        free.release(offset, length)
    assert free.runs == ((0, 64),)


def test_free_list_takes_the_tightest_run():
    free = FreeList(30)
    assert [free.allocate(n) for n in (6, 2, 4, 2, 16)] == [0, 6, 8, 12, 14]
    free.release(0, 6)
    free.release(8, 4)
    assert free.allocate(3) == 8
    assert free.allocate(7) is None


@pytest.mark.parametrize(("offset", "length"), [(0, 4), (2, 4), (6, 4), (3, 1), (-1, 2), (9, 2), (5, 0)])
def test_free_list_refuses_what_is_free_or_outside(offset, length):
    free = FreeList(10)
    free.allocate(10)
    free.release(2, 2)
    free.release(6, 2)
    runs = free.runs
    with pytest.raises(ValueError, match="cannot release"):
        free.release(offset, length)
    assert free.runs == runs


# --- pool ---


class PoolMachine(RuleBasedStateMachine):
    """Random allocations, frees and finishes; content written into each block must survive all of them."""

    names = st.sampled_from("abcde")

    def __init__(self) -> None:
        super().__init__()
        self.pool = small_pool()
        self.live: dict[str, dict[str, tuple[TensorRef, int]]] = {}
        self.past: list[str] = []
        self.serial = 0

    def teardown(self) -> None:
        for sequence in list(self.live):
            self.pool.free(sequence)
        assert self.pool.free_bytes == self.pool.capacity
        pages(self.pool, "whole", PAGES)  # coalesced back to one block
        self.pool.close()

    def reachable(self, evicted: list[str]) -> int:
        """Longest free run, in pages, once `evicted` are gone."""
        taken = np.zeros(PAGES, bool)
        for sequence, tensors in self.live.items():
            for ref, _ in tensors.values() if sequence not in evicted else ():
                first = ref.offset // BLOCK_BYTES
                taken[first : first + ref.block_bytes // BLOCK_BYTES] = True
        return max(map(len, "".join(".x"[int(flag)] for flag in taken).split("x")))

    @rule(batch=st.lists(names, min_size=1, max_size=3, unique=True), count=st.integers(1, 5))
    def allocate(self, batch, count):
        self.serial += 1
        name, need = f"t{self.serial}", count * len(batch)
        candidates = [sequence for sequence in self.past if sequence not in batch]
        options = (candidates[:n] for n in range(len(candidates) + 1))
        expected = next((run for run in options if self.reachable(run) >= need), None)
        before = self.snapshot()
        if expected is None:
            with pytest.raises(TierError, match="pool full"):
                self.pool.allocate_rows(batch, name, (count, BLOCK_BYTES), np.uint8)
            assert self.snapshot() == before
            return
        refs = self.pool.allocate_rows(batch, name, (count, BLOCK_BYTES), np.uint8)
        for sequence in expected:
            assert all(ref.freed for ref, _ in self.live.pop(sequence).values())
        self.past = [sequence for sequence in self.past if sequence not in {*expected, *batch}]
        rows = self.pool.rows_view(refs)
        assert rows.shape == (len(batch), count, BLOCK_BYTES)
        for row, (sequence, ref) in enumerate(zip(batch, refs, strict=True)):
            mark = (self.serial * 7 + row) % 256
            rows[row] = mark
            self.live.setdefault(sequence, {})[name] = (ref, mark)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), action=st.sampled_from(["free", "finish", "activate"]))
    def change(self, data, action):
        sequence = data.draw(st.sampled_from(sorted(self.live)))
        getattr(self.pool, action)(sequence)
        self.past = [name for name in self.past if name != sequence]
        if action == "free":
            assert all(ref.freed for ref, _ in self.live.pop(sequence).values())
        elif action == "finish":
            self.past.append(sequence)

    @invariant()
    def content_and_accounting(self):
        assert list(self.pool.past) == self.past
        refs = [entry for tensors in self.live.values() for entry in tensors.values()]
        assert self.pool.used == sum(ref.block_bytes for ref, _ in refs)
        assert self.pool.used + self.pool.free_bytes == self.pool.capacity
        for ref, mark in refs:
            assert (self.pool.view(ref) == mark).all()

    def snapshot(self) -> tuple:
        return self.pool.active, self.pool.past, self.pool.used, self.pool.evictions


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("dtype", ["float32", "float16", ml_dtypes.bfloat16])
def test_views_alias_the_arena_aligned(dtype):
    pool = small_pool()
    ref = pool.allocate("a", "k", (3, 5, 7), dtype)
    other = pool.allocate("a", "v", (3, 5, 7), dtype)
    view = pool.view(ref)
    assert view.dtype == np.dtype(dtype)
    assert view.shape == (3, 5, 7)
    assert view.ctypes.data % BLOCK_BYTES == 0
    view[...] = np.arange(105).reshape(3, 5, 7)
    pool.view(other)[...] = -1
    assert np.array_equal(pool.view(pool.lookup("a", "k")), np.arange(105, dtype=dtype).reshape(3, 5, 7))
    assert pool.used == 2 * BLOCK_BYTES


def test_rows_are_one_array_and_are_freed_one_by_one():
    pool = small_pool(8)
    refs = pool.allocate_rows(["a", "b", "c"], "k0", (2, 512), np.float32)
    batch = pool.rows_view(refs)
    batch[...] = np.arange(3)[:, None, None]
    assert [pool.view(ref)[0, 0] for ref in refs] == [0, 1, 2]
    pool.free("b")
    assert pool.used == 2 * BLOCK_BYTES
    with pytest.raises(TierError, match="freed"):
        pool.rows_view(refs)
    with pytest.raises(ValueError, match="does not follow"):
        pool.rows_view([refs[0], refs[2]])
    assert pool.rows_view(refs[2:])[0, 0, 0] == 2


def test_misuse_is_refused():
    pool = small_pool(8)
    ref = pool.allocate("a", "k", (4,), np.float32)
    for sequences, name, shape, message in [
        (["a"], "k", (4,), "already has"),
        (["b"], "k", (0, 4), "nothing to allocate"),
        (["b"], "k", (-2, -2), "nothing to allocate"),
        ([], "k", (4,), "nothing to allocate"),
        (["b", "c"], "k", (4,), "not a multiple of 4096"),
        (["b", "b"], "k", (1024,), "twice"),
    ]:
        with pytest.raises(ValueError, match=message):
            pool.allocate_rows(sequences, name, shape, np.float32)
    assert pool.used == BLOCK_BYTES
    assert "b" not in pool
    pool.free("a")
    for action in (
        lambda: pool.view(ref),
        lambda: pool.lookup("a", "k"),
        lambda: pool.free("a"),
        lambda: pool.finish("a"),
        lambda: pool.activate("a"),
    ):
        with pytest.raises(TierError, match="prefill"):
            action()


def test_full_pool_names_what_is_missing_and_keeps_past_sequences():
    pool = small_pool(8)
    for sequence in "abcd":
        pages(pool, sequence, 2)
    pool.finish("b")
    pool.finish("d")
    message = r"needs 20480 bytes in one run, free 0 bytes of .* 16384 bytes held by 2 active .*--dram-memory"
    with pytest.raises(TierError, match=message):
        pages(pool, "e", 5)  # evicting both would leave two runs of 2
    assert pool.past == ("b", "d")
    assert pages(pool, "e", 2).offset == 2 * BLOCK_BYTES
    assert "b" not in pool
    assert "d" in pool
    assert pool.evictions == 1


def test_eviction_takes_as_many_past_sequences_as_make_one_run():
    pool = small_pool(8)
    for sequence in "abcd":
        pages(pool, sequence, 2)
    for sequence in "cab":
        pool.finish(sequence)
    assert pages(pool, "e", 4).offset == 0  # c, the oldest, is not next to a; b completes the run
    assert pool.past == ()
    assert pool.active == ("d", "e")
    assert pool.evictions == 3


def test_close_never_leaves_a_view_dangling():
    pool = small_pool()
    ref = pages(pool, "a", 2)
    view = pool.view(ref)
    view[...] = 7
    assert not pool.close()
    assert (view == 7).all()
    del view
    assert ref.freed
    with pytest.raises(TierError, match="closed"):
        pages(pool, "a", 1)
    assert pool.close()
    assert small_pool().close()


def test_capacity_is_checked_against_available_memory():
    available = available_memory()
    assert available > 0
    with pytest.raises(TierError, match=r"more than is available; --dram-memory up to .* would fit"):
        DramPool(available + (1 << 30), lock=False)
    with pytest.raises(UsageError, match="at least 4096"):
        DramPool(4095)
    assert DramPool(3 * BLOCK_BYTES + 1, lock=False).capacity == 3 * BLOCK_BYTES


def test_lock_holds_or_warns():
    """In subprocesses, since limits are per process: a generous limit locks, a zero one warns and goes on."""
    script = """
import resource, sys, warnings
from swapkv_jax.tiers import DramPool
limit = int(sys.argv[1])
if limit == 0:
    # CAP_IPC_LOCK overrides the limit, so give it up (14) before asking.
    import ctypes
    ctypes.CDLL(None).prctl(24, 14, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
    import os
    if os.geteuid() == 0:
        os.setresuid(65534, 65534, 65534)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    pool = DramPool(64 * 4096)
locked = int(open("/proc/self/status").read().split("VmLck:")[1].split()[0])
print(pool.locked, locked, [str(w.message) for w in caught])
pool.allocate("a", "k", (4,), "float32")
"""
    hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    for limit in (1 << 20, 0):
        output = subprocess.run(
            [sys.executable, "-c", script, str(limit)], capture_output=True, text=True, check=True
        ).stdout
        if limit == 0:
            assert output.startswith("False 0 ")
            assert "RLIMIT_MEMLOCK soft 0 bytes" in output
            assert "at least 256 KiB" in output
        elif hard == resource.RLIM_INFINITY or hard >= limit:
            assert output.startswith("True 256 []")


# --- memory limits ---


def fake_root(tmp_path: Path, *, membership: str, mounts: str, files: dict[str, dict[str, str]]) -> Path:
    process = tmp_path / "proc/self"
    process.mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 4096 kB\nMemAvailable: 2048 kB\nHugePages_Total: 0\n")
    (process / "cgroup").write_text(membership)
    (process / "mountinfo").write_text(mounts)
    for directory, contents in files.items():
        (tmp_path / directory).mkdir(parents=True, exist_ok=True)
        for name, text in contents.items():
            (tmp_path / directory / name).write_text(text)
    return tmp_path


V2_MOUNT = "31 24 0:28 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNT = "35 31 0:32 {root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"


def v2(limit: str, used: int, inactive: int = 0) -> dict[str, str]:
    return {
        "memory.max": limit,
        "memory.current": str(used),
        "memory.stat": f"anon 1\ninactive_file {inactive}\n",
    }


def v1(limit: int, used: int, inactive: int = 0) -> dict[str, str]:
    stat = f"inactive_file 1\ntotal_inactive_file {inactive}\n"
    return {
        "memory.limit_in_bytes": str(limit),
        "memory.usage_in_bytes": str(used),
        "memory.stat": stat,
    }


CGROUP = "sys/fs/cgroup"
LIMITS = {
    "no cgroup": ("", "", {}, 2048 * 1024),
    "v2 own limit": ("0::/job\n", V2_MOUNT, {f"{CGROUP}/job": v2("9000", 5000, 100)}, 4100),
    "v2 parent's limit": (
        "0::/a/b\n",
        V2_MOUNT,
        {f"{CGROUP}/a": v2("5000", 3000), f"{CGROUP}/a/b": v2("max", 1)},
        2000,
    ),
    "v2 over its limit": ("0::/job\n", V2_MOUNT, {f"{CGROUP}/job": v2("9000", 9500)}, 0),
    "v1": (
        "4:cpu:/x\n3:memory:/job\n",
        V1_MOUNT.format(root="/"),
        {f"{CGROUP}/memory/job": v1(8000, 6000, 50)},
        2050,
    ),
    "v1 in a container": (
        "3:memory:/docker/abc\n",
        V1_MOUNT.format(root="/docker/abc"),
        {f"{CGROUP}/memory": v1(7000, 6000)},
        1000,
    ),
}


@pytest.mark.parametrize("case", LIMITS)
def test_available_memory_heeds_every_cgroup(tmp_path, case):
    membership, mounts, files, expected = LIMITS[case]
    root = fake_root(tmp_path, membership=membership, mounts=mounts, files=files)
    assert available_memory(root) == expected


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.sampled_from([np.float32, np.float16, np.uint8]),
)
def test_block_bytes_round_up_to_whole_blocks(shape, dtype):
    ref = TensorRef(0, tuple(shape), np.dtype(dtype))
    assert ref.nbytes == math.prod(shape) * np.dtype(dtype).itemsize
    assert 0 <= ref.block_bytes - ref.nbytes < BLOCK_BYTES
    assert ref.block_bytes % BLOCK_BYTES == 0
