"""A throttled disk: its schedule in exact arithmetic on a clock of the test's own, then its rate in real time."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from engines import decode, layer_plan, prompts_of
from hypothesis import given
from hypothesis import strategies as st

from swapkv_jax import Engine, UsageError
from swapkv_jax.disk_curve import DEPTHS, SIZES, measure_disk_curve, profile_curve, throttled_curve
from swapkv_jax.models import Model
from swapkv_jax.tiers import aligned_buffer
from swapkv_jax.tiers.throttled import PROFILES, Schedule, StorageProfile, ThrottledDisk, storage_profile

NVME, EMMC = PROFILES["nvme-1.8GBps"], PROFILES["emmc-250MBps"]

profiles = st.builds(
    StorageProfile,
    name=st.just("any"),
    bandwidth=st.floats(1e6, 1e10),
    read_latency=st.floats(0, 0.01),
    queue_depth=st.integers(1, 64),
)


class Clock:
    """Time that passes only in `sleep`."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


# ---- the schedule ----------------------------------------------------------------------------------------


@given(profile=profiles, size=st.integers(512, 1 << 20))
def test_a_read_alone_takes_its_latency_and_its_bytes(profile: StorageProfile, size: int) -> None:
    (end,) = Schedule(profile).done(7.0, [size])
    assert end == pytest.approx(7.0 + profile.read_latency + size / profile.bandwidth, abs=1e-12)


@given(profile=profiles, sizes=st.lists(st.integers(512, 1 << 20), min_size=1, max_size=200))
def test_neither_bandwidth_nor_depth_is_exceeded(profile: StorageProfile, sizes: list[int]) -> None:
    ends = Schedule(profile).done(0.0, sizes)
    assert ends == sorted(ends)
    moved = np.cumsum(sizes)
    slack = 1e-9 * ends[-1]
    assert (moved / profile.bandwidth <= np.array(ends) + slack - profile.read_latency).all()
    depth = profile.queue_depth
    for first, later in zip(ends, ends[depth:], strict=False):  # a place in the queue must have become free
        assert later >= first + profile.read_latency - slack
    # And no slower than that: all its time, the disk moves bytes or has a full queue waiting out its latency.
    assert ends[-1] <= sum(sizes) / profile.bandwidth + -(-len(sizes) // depth) * profile.read_latency + slack


@given(profile=profiles, size=st.integers(512, 1 << 20))
def test_many_reads_get_the_lower_of_bandwidth_and_depth(profile: StorageProfile, size: int) -> None:
    count = 200 * profile.queue_depth
    end = Schedule(profile).done(0.0, [size] * count)[-1]
    expected = min(profile.bandwidth, profile.queue_depth * size / max(profile.read_latency, 1e-300))
    # Where both bind alike, they add up for each round of the queue.
    together = size / (profile.read_latency / profile.queue_depth + size / profile.bandwidth)
    assert together * 0.99 <= count * size / end <= expected * 1.001


def test_the_paper_s_devices() -> None:
    for profile, peak in ((NVME, 1.8e9), (EMMC, 250e6)):
        small = Schedule(profile).done(0.0, [512] * 10_000)[-1]
        assert 0.02 < 10_000 * 512 / small / peak < 0.06  # the paper: less than 6 %
        large = Schedule(profile).done(0.0, [1 << 20] * 100)[-1]
        assert 100 * (1 << 20) / large == pytest.approx(peak, rel=0.01)


def test_a_curve_of_a_profile_and_of_a_disk_throttled_to_it() -> None:
    slow, fast = profile_curve(EMMC), profile_curve(NVME)
    assert (slow.sizes, slow.depths) == (SIZES, DEPTHS)
    assert slow.rate(4096, 1) == pytest.approx(4096 / (180e-6 + 4096 / 250e6))
    assert slow.rate(4096, 128) / 4096 == pytest.approx(10_000, rel=0.05)
    assert slow.best == pytest.approx(250e6, rel=0.01)
    for curve, profile in ((fast, EMMC), (slow, NVME)):
        np.testing.assert_allclose(throttled_curve(curve, profile).rates, slow.rates)


def test_unknown_profiles() -> None:
    assert storage_profile(EMMC.name) is EMMC
    with pytest.raises(UsageError, match=r"no storage profile 'floppy'; the profiles are nvme-1.8GBps, emmc"):
        storage_profile("floppy")


# ---- reads -----------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    path = tmp_path / "file"
    path.write_bytes(np.arange(1 << 16, dtype=np.uint32).tobytes())
    descriptor = os.open(path, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def test_reads_one_by_one(file: int) -> None:
    clock = Clock()
    disk = ThrottledDisk(EMMC, clock=clock, sleep=clock.sleep)
    buffer = aligned_buffer(4096)
    for number in range(10):
        assert disk.read_at(file, buffer, 4096 * number) == 4096
        assert buffer.view(np.uint32)[0] == 1024 * number
    assert clock.now - 100 == pytest.approx(10 * (180e-6 + 4096 / 250e6))
    clock.now += 5  # an idle disk saves nothing up
    disk.read_at(file, buffer, 0)
    assert clock.now - 105 == pytest.approx(11 * (180e-6 + 4096 / 250e6))


def test_reads_by_the_kernel(file: int) -> None:
    clock = Clock()
    disk = ThrottledDisk(EMMC, clock=clock, sleep=clock.sleep)
    out = aligned_buffer(16 * 4096)
    try:
        kernel = disk.kernel_reads(16)
    except OSError as error:
        pytest.skip(f"no asynchronous reads here: {error}")

    def start() -> None:
        places = np.arange(16)
        kernel.submit(np.full(16, file), out.ctypes.data + 4096 * places, np.full(16, 4096), 4096 * places)

    expected = Schedule(EMMC).done(0.0, [4096] * 16)[-1]
    start()
    assert clock.now == 100  # nothing waits until it is asked for
    assert kernel.collect().tolist() == [4096] * 16
    assert clock.now - 100 == pytest.approx(expected)
    np.testing.assert_array_equal(out.view(np.uint32)[::1024], 1024 * np.arange(16))
    start()
    clock.now += expected / 2  # time in which something else was done is not waited for again
    kernel.collect()
    assert clock.now - 100 == pytest.approx(2 * expected)
    kernel.close()


def test_all_readers_share_one_queue(file: int) -> None:
    """Two threads together get no more than one, where bandwidth is what limits them."""
    asked: list[float] = []
    disk = ThrottledDisk(dataclasses.replace(EMMC, read_latency=0.0), clock=lambda: 0.0, sleep=asked.append)

    def read() -> None:
        buffer = aligned_buffer(65536)
        for _ in range(20):
            disk.read_at(file, buffer, 0)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(asked) == pytest.approx([65536 / 250e6 * number for number in range(1, 41)])


def test_an_engine_on_a_slow_disk_decodes_the_same_and_waits(
    deep: Model, tmp_path: Path, shared_programs: None
) -> None:
    plan, pause = layer_plan(deep, "disk-alias"), 4e-3
    slow = ThrottledDisk(dataclasses.replace(EMMC, read_latency=pause, queue_depth=1))
    results, uses = [], []
    for name, syscalls in (("fast", None), ("slow", slow)):
        with Engine(deep, plan, store_dir=tmp_path / name, syscalls=syscalls) as engine:
            results.append(decode(engine, prompts_of(40), 4))
            uses.append(engine.use)
    assert results[0].tokens == results[1].tokens
    # All reads together take their number of pauses, most of which a tiny model's step does not hide.
    assert uses[1].reads > 20
    assert uses[1].wait_s > 0.2 * pause * uses[1].reads


def _off(seconds: float, expected: float) -> float:
    return max(0.0, abs(seconds - expected) - 40e-6) / expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "profile", [EMMC, dataclasses.replace(NVME, bandwidth=400e6)], ids=["emmc", "400MBps"]
)
def test_its_own_rate_is_within_a_tenth(tmp_path: Path, profile: StorageProfile) -> None:
    """At points where the real disk is well ahead of the profile's; another process may spoil a try.

    What submitting a batch and waking up take, some 40 µs, is a tenth of the shortest batches by itself.
    """
    real = measure_disk_curve(tmp_path, file_bytes=64 << 20)
    expected = profile_curve(profile)
    points = [
        (size, depth)
        for size in SIZES
        for depth in DEPTHS
        if real.rate(size, depth) > 1.5 * expected.rate(size, depth)
    ]
    assert len(points) > 10, "this disk is too slow to be throttled"
    best = np.full(len(points), np.inf)
    for _ in range(3):
        measured = measure_disk_curve(tmp_path, syscalls=ThrottledDisk(profile), file_bytes=64 << 20)
        off = [abs(measured.rate(*point) / expected.rate(*point) - 1) for point in points]
        best = np.minimum(best, off)
        if best.max() < 0.1:
            break
    assert best.max() < 0.1, dict(zip(points, best.round(3).tolist(), strict=True))
