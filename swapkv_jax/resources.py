"""What this machine has to offer a plan: memory of device and host, cores, disk, and how fast each is.

python -m swapkv_jax.resources [--store-dir DIR] [--measure [device|disk]] [--json]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import msgspec

from swapkv_jax import cgroups
from swapkv_jax.errors import SwapKVError, UsageError
from swapkv_jax.interrupts import exit_code, interrupts_at_checkpoints, run_command
from swapkv_jax.memory_limits import available_memory, format_bytes
from swapkv_jax.store_paths import default_store_dir
from swapkv_jax.talk import Talk
from swapkv_jax.tiers import Syscalls
from swapkv_jax.tiers.direct_io import probe_direct

if TYPE_CHECKING:
    from swapkv_jax.disk_curve import DiskCurve
    from swapkv_jax.rates import DeviceRates

Measurable = Literal["all", "device", "disk"]
_CAP_IPC_LOCK = 14


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Memory of one JAX device, in bytes. Where it is the host's (`shared`), what DRAM holds is not there twice.

    `free` and `total` are None where the backend does not say.
    """

    name: str
    platform: str
    free: int | None
    total: int | None
    shared: bool


@dataclass(frozen=True, kw_only=True)
class StoreDisk:
    """The disk under the store's directory, in bytes. `direct`: whether it takes O_DIRECT, at `alignment`."""

    directory: Path
    free: int
    total: int
    direct: bool
    alignment: int


@dataclass(frozen=True, kw_only=True)
class Resources:
    """A machine as plans see it.

    Attributes:
      devices: of the default JAX backend.
      dram_total: bytes the machine has. dram_available: bytes this process may still take, under every cgroup.
      dram_limit: the tightest cgroup limit, None for none.
      memlock: bytes it may lock, None for no limit.
      cores: it can keep busy, by affinity and CPU quota.
      rates, disk_curve: as last measured; None where never, or too long ago, or elsewhere (`notes` say which).
    """

    devices: tuple[DeviceMemory, ...]
    dram_total: int
    dram_available: int
    dram_limit: int | None
    memlock: int | None
    cores: int
    disk: StoreDisk
    rates: DeviceRates | None
    disk_curve: DiskCurve | None
    notes: tuple[str, ...]


def find_resources(store_dir: Path | None = None) -> Resources:
    """Looks at the machine; measures nothing. `store_dir` (default: the usual one) is made if it is missing.

    Raises:
      UsageError: the directory cannot be made or written.
    """
    from swapkv_jax.disk_curve import saved_disk_curve
    from swapkv_jax.rates import saved_device_rates

    directory = store_dir or default_store_dir()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make {directory}: {error.strerror}; choose another --store-dir") from None
    support = probe_direct(directory, Syscalls())
    space = shutil.disk_usage(directory)
    rates, rates_note = saved_device_rates()
    curve, curve_note = saved_disk_curve(directory)
    return Resources(
        devices=device_memory(),
        dram_total=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        dram_available=available_memory(),
        dram_limit=cgroups.memory_limit(),
        memlock=lockable_memory(),
        cores=cgroups.usable_cores(),
        disk=StoreDisk(
            directory=directory,
            free=space.free,
            total=space.total,
            direct=support.direct,
            alignment=support.alignment,
        ),
        rates=rates,
        disk_curve=curve,
        notes=tuple(note for note in (rates_note, curve_note, support.note) if note),
    )


def lockable_memory() -> int | None:
    """Bytes this process may lock, None for no limit: the limit binds nobody who has the right to ignore it."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return None
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return None if int(fields["CapEff"], 16) >> _CAP_IPC_LOCK & 1 else soft


def device_memory() -> tuple[DeviceMemory, ...]:
    """The default backend's local devices. A CPU's memory is the host's: what this process may still take."""
    import jax

    found = []
    for device in jax.local_devices():
        if shared := device.platform == "cpu":
            free, total = available_memory(), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        else:
            stats = device.memory_stats() or {}
            total = stats.get("bytes_limit")
            free = None if total is None else total - stats.get("bytes_in_use", 0)
        found.append(
            DeviceMemory(
                name=device.device_kind, platform=device.platform, free=free, total=total, shared=shared
            )
        )
    return tuple(found)


def measure_resources(store_dir: Path | None, say: Talk, what: Measurable = "all") -> Resources:
    """`find_resources` after measuring the rates of the device, of the disk, or all of them, and keeping them.

    Raises:
      UsageError: the directory cannot be made or written. TierError: no room, a read fails, or the cache cannot
        be written.
    """
    from swapkv_jax.disk_curve import remeasure_disk_curve
    from swapkv_jax.rates import remeasure_device_rates

    directory = find_resources(store_dir).disk.directory
    with say.bars() as progress:
        if what != "disk":
            remeasure_device_rates(progress)
        if what != "device":
            remeasure_disk_curve(directory, progress)
    return find_resources(directory)


def table(found: Resources) -> str:
    """The record for people."""
    rows: list[tuple[str, str]] = []
    for device in found.devices:
        known = "its backend does not say how much memory it has"
        if device.free is not None and device.total is not None:
            known = f"{format_bytes(device.free)} free of {format_bytes(device.total)}"
        rows.append((f"device {device.name}", known + (", the host's own" if device.shared else "")))
    limit = "" if found.dram_limit is None else f", cgroup limit {format_bytes(found.dram_limit)}"
    rows.append(
        ("DRAM", f"{format_bytes(found.dram_available)} available of {format_bytes(found.dram_total)}{limit}")
    )
    rows.append(("lockable", "all of it" if found.memlock is None else format_bytes(found.memlock)))
    rows.append(("cores", str(found.cores)))
    disk = found.disk
    direct = f"O_DIRECT at {disk.alignment} bytes" if disk.direct else "no O_DIRECT"
    rows.append(
        ("disk", f"{format_bytes(disk.free)} free of {format_bytes(disk.total)}, {direct} ({disk.directory})")
    )
    if found.rates is not None:
        r = found.rates
        rows.append(("memory", f"{_rate(r.memory)} read"))
        rows.append(("link", f"{_rate(r.to_device)} to the device, {_rate(r.from_device)} back"))
    lines = [f"{name:<18} {value}" for name, value in rows]
    if found.disk_curve is not None:
        lines += _curve_table(found.disk_curve)
    return "\n".join([*lines, *found.notes])


def _curve_table(curve: DiskCurve) -> list[str]:
    lines = [f"disk, MB/s by reads in flight ({curve.reader}):"]
    lines.append(" " * 12 + "".join(f"{depth:>8}" for depth in curve.depths))
    for size, rates in zip(curve.sizes, curve.rates, strict=True):
        lines.append(f"{size // 1024:>8} KiB" + "".join(f"{rate / 1e6:>8.0f}" for rate in rates))
    return lines


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.1f} GB/s"


def to_json(found: Resources) -> str:
    """The record as JSON."""
    plain: dict[str, Any] = dataclasses.asdict(found)
    plain["disk"]["directory"] = str(found.disk.directory)
    for name in ("rates", "disk_curve"):
        plain[name] = msgspec.to_builtins(getattr(found, name))
    return json.dumps(plain, indent=2)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m swapkv_jax.resources",
        description="What this machine has to offer a plan: memory, cores, disk, and measured rates.",
        epilog="Exit codes: 0 done, 2 usage, 1 failure.",
    )
    add = parser.add_argument
    add("--store-dir", type=Path, metavar="DIR", help="directory of the disk store")
    add(
        "--measure",
        nargs="?",
        const="all",
        choices=get_args(Measurable),
        help="measure rates now (ten seconds), and keep them: of the device, of the disk, or both (default)",
    )
    add("--json", action="store_true", help="print JSON")
    add("--quiet", action="store_true", help="nothing on stderr but errors")
    args = parser.parse_args(argv)
    say = Talk(args.quiet)
    try:
        if args.measure is None:
            found = find_resources(args.store_dir)
        else:
            with interrupts_at_checkpoints():  # it leaves no file that it measured with
                found = measure_resources(args.store_dir, say, args.measure)
    except SwapKVError as error:
        say.always(f"{parser.prog}: error: {error}")
        return error.exit_code
    except KeyboardInterrupt as stop:
        say.always(f"{parser.prog}: interrupted")
        return exit_code(stop)
    print(to_json(found) if args.json else table(found))
    return 0


if __name__ == "__main__":
    run_command("python -m swapkv_jax.resources", main)
