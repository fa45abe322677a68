"""Caps on the memory of a child process, tightened and loosened while it runs: a cgroup, or its address space."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from swapkv_jax.cgroups import cgroup_directories


class MemoryCap(Protocol):
    """A cap of `limit` bytes, loose at first."""

    @property
    def kind(self) -> str: ...

    def inside(self, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` where the cap reaches it."""
        ...

    def tighten(self, pid: int) -> None: ...

    def loosen(self, pid: int) -> None: ...


class Cgroup:
    """A memory cgroup of its own, without swap. It counts the page cache too, and the planner knows of it."""

    def __init__(self, directory: Path, limit: int, limit_file: str, unlimited: str) -> None:
        self.kind = f"memory cgroup {directory}"
        self._directory, self._limit, self._unlimited = directory, limit, unlimited
        self._file = directory / limit_file

    def inside(self, command: Sequence[str]) -> list[str]:
        return ["sh", "-c", 'echo $$ > "$0"/cgroup.procs && exec "$@"', str(self._directory), *command]

    def tighten(self, pid: int) -> None:
        self._file.write_text(str(self._limit))

    def loosen(self, pid: int) -> None:
        self._file.write_text(self._unlimited)


class AddressSpace:
    """RLIMIT_AS, for `limit` bytes more than what a process has reserved but not touched when first capped."""

    kind = "an address space limit"

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._limits: dict[int, int] = {}

    def inside(self, command: Sequence[str]) -> list[str]:
        return list(command)

    def tighten(self, pid: int) -> None:
        if pid not in self._limits:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            size, touched = (
                next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))
                for key in ("VmSize:", "VmRSS:")
            )
            self._limits[pid] = size - touched + self._limit
        self._set(pid, self._limits[pid])

    def loosen(self, pid: int) -> None:
        self._set(pid, resource.RLIM_INFINITY)

    def _set(self, pid: int, soft: int) -> None:
        resource.prlimit(pid, resource.RLIMIT_AS, (soft, resource.RLIM_INFINITY))


@contextlib.contextmanager
def memory_cap(limit: int) -> Iterator[MemoryCap]:
    """A cap of `limit` bytes by the best means that this machine has. Its processes must have ended at the end."""
    for own, version in cgroup_directories("memory"):
        directory = own / f"memory-cap-{os.getpid()}"
        try:
            if version == "cgroup2" and "memory" not in (own / "cgroup.subtree_control").read_text().split():
                continue  # children of this one would have no memory controller
            directory.mkdir()
        except OSError:
            continue
        try:
            if version == "cgroup2":
                (directory / "memory.swap.max").write_text("0")
                yield Cgroup(directory, limit, "memory.max", "max")
            else:
                (directory / "memory.swappiness").write_text("0")
                yield Cgroup(directory, limit, "memory.limit_in_bytes", "-1")
        finally:
            _remove(directory)
        return
    yield AddressSpace(limit)


def _remove(directory: Path) -> None:
    for _ in range(100):  # a process that was just reaped may still be listed
        with contextlib.suppress(OSError):
            directory.rmdir()
            return
        time.sleep(0.02)
    directory.rmdir()
