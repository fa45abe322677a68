"""How much memory this process may still take: the machine's free memory and every cgroup limit above it."""

from collections.abc import Iterator
from pathlib import Path

_MEBIBYTE = 1 << 20

# (limit, current use, key of memory.stat that the kernel can reclaim under pressure)
_CGROUP_FILES = {
    "cgroup2": ("memory.max", "memory.current", "inactive_file"),
    "cgroup": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def format_bytes(count: int) -> str:
    """`count` bytes for a message: exact below 1 MiB, else MiB with one decimal."""
    if abs(count) < _MEBIBYTE:
        return f"{count} bytes"
    return f"{count / _MEBIBYTE:,.1f} MiB"


def exact_bytes(count: int) -> str:
    """`count` bytes for a message that someone may want to copy the number from."""
    return format_bytes(count) + (f" ({count} bytes)" if abs(count) >= _MEBIBYTE else "")


def available_memory(root: Path = Path("/")) -> int:
    """Bytes this process could still allocate without swapping or meeting the OOM killer.

    The minimum of `MemAvailable` and, for each cgroup (v1 or v2) from the process's own up to the mount
    point, limit - use + reclaimable page cache. A machine's RAM says nothing inside a container: mlock
    beyond the cgroup limit does not fail, it kills. `root` is where /proc and /sys are looked up.

    Raises:
        OSError: /proc/meminfo cannot be read.
    """
    fields = _key_values((root / "proc/meminfo").read_text())
    available = fields["MemAvailable:"] * 1024
    for directory, kind in _memory_cgroups(root):
        headroom = _headroom(directory, *_CGROUP_FILES[kind])
        if headroom is not None:
            available = min(available, headroom)
    return max(available, 0)


def _memory_cgroups(root: Path) -> Iterator[tuple[Path, str]]:
    """(directory, filesystem type) of each memory cgroup this process is under, innermost first."""
    try:
        membership = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return  # a kernel without cgroups: only the machine limits
    paths: dict[str, str] = {}
    for line in membership:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            paths["cgroup2"] = path
        elif "memory" in controllers.split(","):
            paths["cgroup"] = path
    for line in mounts:
        before, _, after = line.partition(" - ")
        mount_root, mount_point = before.split()[3:5]
        kind, _, options = after.split(" ", 2)
        if kind not in paths or (kind == "cgroup" and "memory" not in options.split(",")):
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


def _headroom(directory: Path, limit_file: str, use_file: str, reclaimable: str) -> int | None:
    try:
        limit = (directory / limit_file).read_text().strip()
        if limit == "max":
            return None
        used = int((directory / use_file).read_text())
        statistics = _key_values((directory / "memory.stat").read_text())
    except OSError:
        return None  # the root cgroup has no such files, and a subtree may be hidden from a container
    return int(limit) - used + statistics.get(reclaimable, 0)


def _key_values(text: str) -> dict[str, int]:
    return {words[0]: int(words[1]) for words in map(str.split, text.splitlines()) if len(words) >= 2}
