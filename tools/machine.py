"""What the machine under a benchmark can do: its processor, memory bandwidth, disk rate and load."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax

from swapkv_jax.disk_reads import sequential_rate
from swapkv_jax.rates import memory_bandwidth


def cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0))


def load() -> float:
    """Processes running or waiting, averaged over the last minute. Near 1 is this process alone."""
    return round(os.getloadavg()[0], 2)


def facts(disk: Path | None) -> dict[str, Any]:
    """The machine, measured now. `disk` is the directory whose disk counts, None where none does."""
    return {
        "cpu": cpu(),
        "cores": cores(),
        "memory_bytes": memory_bytes(),
        "memory_bytes_per_s": memory_bandwidth(),
        "disk_bytes_per_s": None if disk is None else sequential_rate(disk),
        "jax": jax.__version__,
        "backend": jax.default_backend(),
        "python": platform.python_version(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def memory_bytes() -> int:
    """Of the whole machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def cpu() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
