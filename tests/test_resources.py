"""What the machine is said to have, against what the system says itself; and measurements, as they are kept."""

from __future__ import annotations

import json
import os
import resource
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import jax
import msgspec
import pytest

from swapkv_jax import TierError, cgroups, measured, rates
from swapkv_jax.disk_curve import (
    DiskCurve,
    disk_identity,
    ensure_disk_curve,
    measure_disk_curve,
    remeasure_disk_curve,
    saved_disk_curve,
)
from swapkv_jax.disk_reads import random_read_rate
from swapkv_jax.memory_limits import available_memory
from swapkv_jax.rates import DeviceRates, device_identity, saved_device_rates
from swapkv_jax.resources import find_resources, lockable_memory, main
from swapkv_jax.tiers import Syscalls
from swapkv_jax.tiers.kernel_reads import KernelReads


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache of its own; little to measure."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(rates, "_MEMORY_BYTES", 4 << 20)
    monkeypatch.setattr(rates, "_LINK_BYTES", 1 << 20)
    monkeypatch.setattr("swapkv_jax.disk_curve.measure_disk_curve", small_curve)


def small_curve(directory: Path, syscalls: Syscalls | None = None, progress=None) -> DiskCurve:
    return measure_disk_curve(
        directory,
        syscalls=syscalls,
        sizes=(4096, 65536),
        depths=(1, 8),
        file_bytes=1 << 20,
        seconds=0.0,
        progress=progress,
    )


def curve_of(rates: tuple[tuple[float, ...], ...], **other: str) -> DiskCurve:
    facts = {"identity": "a disk", "measured": measured.now(), "reader": "kernel", **other}
    return DiskCurve(**facts, direct=True, sizes=(4096, 16384), depths=(1, 16), rates=rates)


# ---- what there is ---------------------------------------------------------------------------------------


def test_resources_are_the_system_s(tmp_path: Path) -> None:
    found = find_resources(tmp_path / "store")
    (device,) = found.devices
    assert (device.platform, device.shared) == ("cpu", True)
    assert device.free is not None
    assert device.total == found.dram_total == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert found.dram_available == pytest.approx(available_memory(), rel=0.2)
    assert 1 <= found.cores <= len(os.sched_getaffinity(0))
    assert found.disk.total == shutil.disk_usage(tmp_path).total
    assert found.rates is None
    assert found.disk_curve is None
    assert sum("not measured yet" in note for note in found.notes) == 2


@pytest.mark.parametrize(
    ("capabilities", "limit", "expected"),
    [("0", 1 << 16, 1 << 16), (f"{1 << 14:x}", 1 << 16, None), ("0", resource.RLIM_INFINITY, None)],
)
def test_lockable_memory(
    monkeypatch: pytest.MonkeyPatch, capabilities: str, limit: int, expected: int | None
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    monkeypatch.setattr(Path, "read_text", lambda _: f"Name:\tx: y\nCapEff:\t{capabilities}\n")
    assert lockable_memory() == expected


def fake_system(root: Path, membership: str, mount: str, files: dict[str, str]) -> Path:
    process = root / "proc/self"
    process.mkdir(parents=True)
    (process / "cgroup").write_text(membership)
    (process / "mountinfo").write_text(mount)
    for name, content in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")
    return root


V2 = ("0::/a/b\n", "31 24 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
V1_CPU = ("4:cpu,cpuacct:/a\n", "35 31 0:32 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n")
V1_MEMORY = ("5:memory:/a\n", "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n")


@pytest.mark.parametrize(
    ("system", "files", "expected"),
    [
        (V2, {}, 8),
        (V2, {"a/b/cpu.max": "max 100000"}, 8),
        (V2, {"a/b/cpu.max": "max 100000", "a/cpu.max": "250000 100000"}, 2),
        (V2, {"a/cpu.max": "50000 100000"}, 1),
        (V1_CPU, {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, 8),
        (V1_CPU, {"cpu/a/cpu.cfs_quota_us": "300000", "cpu/a/cpu.cfs_period_us": "100000"}, 3),
    ],
)
def test_cores_heed_every_quota(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    system: tuple[str, str],
    files: dict[str, str],
    expected: int,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert cgroups.usable_cores(fake_system(tmp_path, *system, files)) == expected


@pytest.mark.parametrize(
    ("system", "files", "expected"),
    [
        (V2, {"a/b/memory.max": "max"}, None),
        (V2, {"a/b/memory.max": "9000000", "a/memory.max": "5000000"}, 5_000_000),
        (V1_MEMORY, {"memory/a/memory.limit_in_bytes": "9223372036854771712"}, None),
        (V1_MEMORY, {"memory/a/memory.limit_in_bytes": "7000000"}, 7_000_000),
    ],
)
def test_the_tightest_memory_limit(
    tmp_path: Path, system: tuple[str, str], files: dict[str, str], expected: int | None
) -> None:
    assert cgroups.memory_limit(fake_system(tmp_path, *system, files)) == expected


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--store-dir", str(tmp_path / "store"), "--quiet"]
    assert main(flags) == 0
    assert "not measured yet" in capsys.readouterr().out
    assert main([*flags, "--measure"]) == 0
    shown = capsys.readouterr().out
    assert "GB/s to the device" in shown
    assert "64 KiB" in shown
    assert main([*flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rates"]["identity"] == device_identity()
    assert found["disk_curve"]["sizes"] == [4096, 65536]
    assert not list((tmp_path / "store").iterdir())
    (tmp_path / "file").touch()
    assert main(["--store-dir", str(tmp_path / "file" / "store")]) == 2
    assert "cannot make" in capsys.readouterr().err


def test_each_rate_alone() -> None:
    seen: list[tuple[str, int, int]] = []

    def progress(what: str, done: int, total: int) -> None:
        seen.append((what, done, total))

    measures = (rates.memory_bandwidth, rates.to_device_bandwidth, rates.from_device_bandwidth)
    for measure in measures:
        assert 1e7 < measure(progress) < 1e13
    assert [done for _, done, _ in seen] == [*range(1, 6)] * 3
    assert len({what for what, _, _ in seen}) == 3
    assert saved_device_rates()[0] is None


# ---- the curve -------------------------------------------------------------------------------------------


def test_a_curve_gives_back_its_points_and_rises_between_them() -> None:
    curve = curve_of(((1e6, 8e6), (4e6, 16e6)))
    for size, row in zip(curve.sizes, curve.rates, strict=True):
        for depth, rate in zip(curve.depths, row, strict=True):
            assert curve.rate(size, depth) == pytest.approx(rate)
            assert curve.batch_seconds(depth, size) == pytest.approx(depth * size / rate)
    assert curve.rate(8192, 1) == pytest.approx(2e6)  # half way on logarithmic scales
    assert curve.rate(4096, 4) == pytest.approx(8**0.5 * 1e6)
    assert curve.rate(1 << 20, 99) == pytest.approx(16e6)
    assert curve.best == 16e6


def test_beyond_its_points_a_curve_promises_no_more_than_they() -> None:
    curve = curve_of(((1e6, 8e6), (4e6, 16e6)))
    assert curve.batch_seconds(1, 512) == pytest.approx(curve.batch_seconds(1, 4096))
    assert curve.batch_seconds(0, 4096) == 0
    assert curve.batch_seconds(0.5, 4096) == pytest.approx(0.5 * curve.batch_seconds(1, 4096))


@pytest.mark.parametrize(
    "rates", [((1.0, 2.0),), ((1.0,), (2.0,)), ((1.0, 0.0), (1.0, 1.0)), ((1.0, float("nan")), (1.0, 1.0))]
)
def test_impossible_curves_are_refused(rates: tuple[tuple[float, ...], ...]) -> None:
    with pytest.raises(ValueError, match="rates"):
        curve_of(rates)


class Slow(Syscalls):
    """Every batch of asynchronous reads takes 5 ms more; with `threads` there are none."""

    def __init__(self, *, threads: bool = False) -> None:
        self.threads, self.reads = threads, 0

    def kernel_reads(self, size: int) -> KernelReads:
        if self.threads:
            raise OSError(1, "no")
        return super().kernel_reads(size)

    def read_at(self, descriptor, buffer, offset) -> int:
        self.reads += 1
        return super().read_at(descriptor, buffer, offset)


def test_threads_read_where_the_kernel_does_not(tmp_path: Path) -> None:
    disk = Slow(threads=True)
    curve = small_curve(tmp_path, disk)
    assert curve.reader == "threads"
    assert disk.reads >= 2 * 3 * 9  # two sizes, three batches of 1 and of 8


def test_a_failing_disk_is_an_error(tmp_path: Path) -> None:
    class Broken(Slow):
        def read_at(self, descriptor, buffer, offset) -> int:
            if buffer.size > 4096:
                raise OSError(5, "Input/output error")
            return super().read_at(descriptor, buffer, offset)

    with pytest.raises(TierError, match="Input/output error"):
        small_curve(tmp_path, Broken(threads=True))
    assert not list(tmp_path.glob(".probe*"))


def test_random_reads(tmp_path: Path) -> None:
    files = [tmp_path / "a", tmp_path / "b"]
    files[0].write_bytes(bytes(64 << 10))
    files[1].write_bytes(bytes(100))  # holds no record
    rate = random_read_rate(files, record_bytes=6144, alignment=512, reads=50, depth=8)
    assert 1e5 < rate < 1e12
    with pytest.raises(ValueError, match="no file holds a record of 6144 bytes"):
        random_read_rate(files[1:], record_bytes=6144, alignment=512, reads=5, depth=2)


# ---- what is kept ----------------------------------------------------------------------------------------


def kept_curve(directory: Path) -> Path:
    """Where the curve of `directory` is kept, after one was measured."""
    remeasure_disk_curve(directory)
    (path,) = (Path(os.environ["XDG_CACHE_HOME"]) / "swapkv_jax/rates").glob("disk-*.json")
    return path


def test_a_curve_is_measured_once(tmp_path: Path) -> None:
    first, note = ensure_disk_curve(tmp_path)
    assert "not measured yet" in note
    assert "measured now" in note
    again, note = ensure_disk_curve(tmp_path)
    assert again == first
    assert note.endswith(f"curve measured {first.measured[:10]}")
    assert saved_disk_curve(tmp_path)[0] == first


def old(days: int) -> str:
    return (datetime.now(UTC) - timedelta(days=days)).isoformat(timespec="seconds")


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        ({"measured": old(31)}, "not within the last 30 days"),
        ({"measured": old(-2)}, "not within the last 30 days"),
        ({"identity": "another disk"}, "measured on another device (another disk"),
        ({"measured": "yesterday"}, "damaged"),
        ({"measured": "2026-11-30"}, "damaged"),  # without a time zone
    ],
)
def test_a_stale_or_foreign_curve_is_noticed_and_measured_anew(
    tmp_path: Path, spoil: dict[str, str], why: str
) -> None:
    path = kept_curve(tmp_path)
    good, _ = ensure_disk_curve(tmp_path)
    measured.save(path, msgspec.structs.replace(good, **spoil))
    curve, note = saved_disk_curve(tmp_path)
    assert curve is None
    assert why in note
    curve, note = ensure_disk_curve(tmp_path)
    assert why in note
    assert curve.identity == disk_identity(tmp_path)
    assert saved_disk_curve(tmp_path)[0] == curve


def flip(content: bytes) -> bytes:
    """One digit of a rate is another, which still makes a curve."""
    at = content.index(b'"rates":[[') + len(b'"rates":[[')
    return content[:at] + (b"9" if content[at : at + 1] != b"9" else b"8") + content[at + 1 :]


@pytest.mark.parametrize(
    "spoil", [flip, lambda c: c[:-20], lambda _: b"", lambda _: b"\xff\xfe", lambda _: b"[]"]
)
def test_a_damaged_curve_is_noticed_and_measured_anew(tmp_path: Path, spoil) -> None:
    path = kept_curve(tmp_path)
    path.write_bytes(spoil(path.read_bytes()))
    curve, note = saved_disk_curve(tmp_path)
    assert curve is None
    assert "damaged" in note
    ensure_disk_curve(tmp_path)
    assert saved_disk_curve(tmp_path)[0] is not None


def test_rates_of_another_device_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    rates.remeasure_device_rates()
    assert isinstance(saved_device_rates()[0], DeviceRates)
    monkeypatch.setattr(rates, "usable_cores", lambda: 999)
    found, note = saved_device_rates()
    assert found is None
    assert "another device" in note
    assert jax.devices()[0].device_kind in note


def test_a_cache_that_cannot_be_written_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(TierError, match="cannot keep measurements"):
        ensure_disk_curve(tmp_path)


def test_no_curve_of_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TierError, match="give a directory that exists"):
        saved_disk_curve(tmp_path / "nowhere")
