"""How fast a disk gives batches of random reads, as a curve over the size of a read and how many are in flight."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import msgspec
import numpy as np

from swapkv_jax import measured
from swapkv_jax.disk_reads import BatchReader, ScratchFile
from swapkv_jax.errors import TierError
from swapkv_jax.talk import Progress
from swapkv_jax.tiers import Syscalls
from swapkv_jax.tiers.throttled import Schedule, StorageProfile

SIZES = (4096, 8192, 16384, 32768, 65536, 262144, 1 << 20)
DEPTHS = (1, 4, 16, 64, 128)
_BAR = "disk curve (points)"


class DiskCurve(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bytes/s of batches of `depths` random reads of `sizes` bytes each, started together and awaited together.

    Attributes:
      identity: of the filesystem and host, see `disk_identity`. measured: when, ISO 8601 in UTC.
      direct: whether reads went past the page cache. reader: "kernel" (asynchronous reads) or "threads".
      rates: bytes/s, one tuple per size, one number per depth; all positive.
    """

    identity: str
    measured: str
    direct: bool
    reader: str
    sizes: tuple[int, ...]
    depths: tuple[int, ...]
    rates: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        shape = (len(self.sizes), *{len(row) for row in self.rates})
        if len(self.rates) != len(self.sizes) or shape != (len(self.sizes), len(self.depths)):
            raise ValueError(f"rates of shape {shape} for {len(self.sizes)} sizes, {len(self.depths)} depths")
        for name in ("sizes", "depths"):
            steps = itertools.pairwise((0, *getattr(self, name)))
            if not all(before < after for before, after in steps):
                raise ValueError(f"{name} must be rising positive numbers")
        if not all(0 < rate < float("inf") for row in self.rates for rate in row):
            raise ValueError("rates must be positive and finite")

    def rate(self, nbytes: float, depth: float) -> float:
        """Bytes/s of a batch of `depth` reads of `nbytes` each. Between the measured points straight on logarithmic
        scales; beyond them the nearest, but that smaller reads take as long as the smallest."""
        reachable = min(max(nbytes, self.sizes[0]), self.sizes[-1])
        by_depth = [
            float(np.interp(np.log(reachable), np.log(self.sizes), np.log(column)))
            for column in zip(*self.rates, strict=True)
        ]
        rate = float(np.exp(np.interp(np.log(max(depth, 1)), np.log(self.depths), by_depth)))
        return rate * min(1.0, nbytes / self.sizes[0])

    def batch_seconds(self, reads: float, nbytes: float) -> float:
        """Seconds from starting `reads` random reads of `nbytes` each to having them all; 0 for none.

        Less than one read (an average over batches, some of them empty) takes its share of one.
        """
        if reads <= 0:
            return 0.0
        return reads * nbytes / self.rate(nbytes, reads)

    @property
    def best(self) -> float:
        """The most bytes/s that any point reached."""
        return max(rate for row in self.rates for rate in row)


def measure_disk_curve(
    directory: Path,
    *,
    syscalls: Syscalls | None = None,
    sizes: tuple[int, ...] = SIZES,
    depths: tuple[int, ...] = DEPTHS,
    file_bytes: int = 256 << 20,
    seconds: float = 0.15,
    progress: Progress | None = None,
) -> DiskCurve:
    """Measures the disk under `directory`, the way the engine reads: past the page cache, asynchronously where the
    kernel can, through `syscalls`. What it writes for that is `file_bytes` and gone afterwards.

    Each point is the median over as many batches as `seconds` have room for, and three at least.

    Raises:
      UsageError: the directory cannot be written. TierError: no room, or a read fails.
    """
    calls = syscalls or Syscalls()
    total = len(sizes) * len(depths)
    rates = []
    with ScratchFile(directory, max(file_bytes, max(sizes)), calls) as file:
        with BatchReader(file, max(depths), max(sizes), calls) as reader:
            for size in sizes:
                row = []
                for depth in depths:
                    row.append(depth * size / reader.batch_seconds(depth, size, seconds))
                    if progress is not None:
                        progress(_BAR, len(rates) * len(depths) + len(row), total)
                rates.append(tuple(row))
            return DiskCurve(
                identity=disk_identity(directory),
                measured=measured.now(),
                direct=file.direct,
                reader=reader.kind,
                sizes=sizes,
                depths=depths,
                rates=tuple(rates),
            )


def profile_curve(profile: StorageProfile) -> DiskCurve:
    """What the curve of a disk of this profile is, by its definition."""

    def rate(size: int, depth: int) -> float:
        return depth * size / Schedule(profile).done(0.0, [size] * depth)[-1]

    return DiskCurve(
        identity=f"profile {profile.name}",
        measured=measured.now(),
        direct=True,
        reader="kernel",
        sizes=SIZES,
        depths=DEPTHS,
        rates=tuple(tuple(rate(size, depth) for depth in DEPTHS) for size in SIZES),
    )


def throttled_curve(curve: DiskCurve, profile: StorageProfile) -> DiskCurve:
    """The curve of a disk that is throttled to a profile: at every point of `curve` the slower of the two."""
    slow = profile_curve(profile)
    rates = tuple(
        tuple(min(rate, slow.rate(size, depth)) for depth, rate in zip(curve.depths, row, strict=True))
        for size, row in zip(curve.sizes, curve.rates, strict=True)
    )
    return msgspec.structs.replace(curve, identity=f"{curve.identity}, as {profile.name}", rates=rates)


def saved_disk_curve(directory: Path) -> tuple[DiskCurve | None, str]:
    """The curve kept for the disk under `directory` if it may be used, else None; and a note that says so."""
    curve, why = measured.load(_path(directory), DiskCurve, disk_identity(directory))
    if curve is None:
        return None, f"disk of {directory}: no curve ({why})"
    return curve, f"disk of {directory}: curve measured {curve.measured[:10]}"


def ensure_disk_curve(directory: Path, progress: Progress | None = None) -> tuple[DiskCurve, str]:
    """As `saved_disk_curve`, but measured and kept where there is none to be used.

    Raises:
      UsageError, TierError: see `measure_disk_curve`; or the cache cannot be written.
    """
    curve, note = saved_disk_curve(directory)
    if curve is None:
        curve = measure_disk_curve(directory, progress=progress)
        measured.save(_path(directory), curve)
        note = f"{note}: measured now"
    return curve, note


def remeasure_disk_curve(directory: Path, progress: Progress | None = None) -> DiskCurve:
    """Measures the curve and keeps it, whatever was kept before. Raises as `measure_disk_curve`."""
    curve = measure_disk_curve(directory, progress=progress)
    measured.save(_path(directory), curve)
    return curve


def _path(directory: Path) -> Path:
    return measured.record_path("disk", _mount(directory)[0])


def disk_identity(directory: Path) -> str:
    """Host, filesystem and its size: what a curve measured in `directory` is true of.

    Raises:
      TierError: there is no such directory.
    """
    try:
        facts = os.statvfs(directory)
    except OSError as error:
        raise TierError(
            f"cannot look at the disk of {directory}: errno {error.errno}, {error.strerror}; "
            "give a directory that exists"
        ) from error
    _, kind, source = _mount(directory)
    size = facts.f_blocks * facts.f_frsize
    return f"{measured.host_name()}, {kind} on {source}, id {facts.f_fsid:x}, {size} bytes"


def _mount(directory: Path) -> tuple[str, str, str]:
    """Mount point, filesystem type and source of a directory; the innermost mount, the last of several there."""
    place = directory.resolve()
    found = ("/", "unknown", "unknown")
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return found  # then the filesystem's id and size must do
    for line in lines:
        before, _, after = line.partition(" - ")
        point = before.split()[4].encode().decode("unicode_escape")
        if place.is_relative_to(point) and len(point) >= len(found[0]):
            kind, source = after.split()[:2]
            found = (point, kind, source)
    return found
