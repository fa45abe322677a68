"""How much memory this process may still take: the machine's free memory and every cgroup limit above it."""

from pathlib import Path

from swapkv_jax.cgroups import cgroup_directories

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
    for directory, kind in cgroup_directories("memory", root):
        headroom = _headroom(directory, *_CGROUP_FILES[kind])
        if headroom is not None:
            available = min(available, headroom)
    return max(available, 0)


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
