"""The control groups this process runs under, v1 and v2: a container's limits are there, not in the machine's."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

_MOST = 1 << 60  # cgroup v1 writes no limit as a number near 2**63


def cgroup_directories(controller: str, root: Path = Path("/")) -> Iterator[tuple[Path, str]]:
    """(directory, "cgroup" or "cgroup2") of each group that has a say over this process, innermost first.

    `controller` is "memory" or "cpu"; `root` is where /proc and /sys are looked up. Nothing is yielded by a
    kernel without cgroups.
    """
    try:
        membership = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return
    paths: dict[str, str] = {}
    for line in membership:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            paths["cgroup2"] = path
        elif controller in controllers.split(","):
            paths["cgroup"] = path
    for line in mounts:
        before, _, after = line.partition(" - ")
        mount_root, mount_point = before.split()[3:5]
        kind, _, options = after.split(" ", 2)
        if kind not in paths or (kind == "cgroup" and controller not in options.split(",")):
            continue
        top = root / mount_point.lstrip("/")
        # Inside a container the mount may show only a subtree whose host path `mount_root` names.
        inner = paths[kind].removeprefix(mount_root.rstrip("/")).strip("/")
        directory = top / inner
        while True:
            yield directory, kind
            if directory == top or top not in directory.parents:
                break
            directory = directory.parent


def memory_limit(root: Path = Path("/")) -> int | None:
    """Bytes of the tightest memory limit above this process, None where there is none."""
    names = {"cgroup2": "memory.max", "cgroup": "memory.limit_in_bytes"}
    limits = [
        int(words[0])
        for directory, kind in cgroup_directories("memory", root)
        if (words := _words(directory / names[kind])) and words[0] != "max"
    ]
    return min((limit for limit in limits if limit < _MOST), default=None)


def usable_cores(root: Path = Path("/")) -> int:
    """Cores this process can keep busy: those it may be scheduled on, or fewer where a CPU quota buys less."""
    cores = float(len(os.sched_getaffinity(0)))
    for directory, kind in cgroup_directories("cpu", root):
        if kind == "cgroup2":
            words = _words(directory / "cpu.max")
        else:
            words = [*_words(directory / "cpu.cfs_quota_us"), *_words(directory / "cpu.cfs_period_us")]
        if len(words) == 2 and words[0] not in ("max", "-1"):
            cores = min(cores, int(words[0]) / int(words[1]))
    return max(1, math.floor(cores))


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []  # the root group has no such file, and a subtree may be hidden from a container
