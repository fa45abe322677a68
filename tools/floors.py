"""The least time a step can take, given what it must read of memory and of the disk, and what growth is due."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from swapkv_jax.models import DTYPES, Model
from swapkv_jax.planner import weight_bytes


def floors(row: dict[str, Any], model: Model, memory_bytes_per_s: float) -> dict[str, float]:
    """`floor_memory_s`: weights and the policy's share of KV, each byte once, at the memory's bandwidth.
    `floor_disk_s`: the bytes a step reads at the rate that another reader of the same files got. `floor_s`: the
    larger, since one can hide the other. `over_floor`: how many times that a step took.
    """
    weights = row["weight_bytes"] or weight_bytes(model.geometry, model.dtype)
    memory = (weights + _kv_bytes(row, model)) / memory_bytes_per_s
    rate = row["plain_reader_bytes_per_s"] or row["random_reader_bytes_per_s"]
    disk = row["bytes_read_per_step"] / rate if rate else 0.0
    floor = max(memory, disk)
    return {
        "floor_memory_s": memory,
        "floor_disk_s": disk,
        "floor_s": floor,
        "over_floor": row["tpot_s"] / floor,
    }


def _kv_bytes(row: dict[str, Any], model: Model) -> float:
    """Bytes of KV that a step must read: all of it, or what it attends and the summary where it selects."""
    if row["policy"] == "group":
        return _scanned(row) + row["attended_groups"] * row["group_bytes"]
    per_token = row["token_bytes"] or model.geometry.kv_bytes_per_token(DTYPES[model.dtype].itemsize)
    return row["batch"] * row["context"] * per_token


def _scanned(row: dict[str, Any]) -> float:
    """Bytes of the summary that a step of policy `group` reads, on average."""
    return row["summary_scans"] * row["summary_bytes"]


def growth(rows: Sequence[dict[str, Any]], memory_bytes_per_s: float) -> list[dict[str, Any]]:
    """How a step of policy `group` grows from one context to the next, beside what the summary's scan alone does:
    `scan_s` as its graphs were measured (see `scan`), `scan_floor_s` its bytes at the memory's bandwidth.
    """
    group = sorted(
        (row for row in rows if row["policy"] == "group"),
        key=lambda r: (*_same(r), r["context"]),
    )
    grown = []
    for (name, tier, profile, batch), same in itertools.groupby(group, _same):
        for short, long in itertools.pairwise(same):
            grown.append(
                {
                    "name": name,
                    "tier": tier,
                    "storage_profile": profile,
                    "batch": batch,
                    "contexts": [short["context"], long["context"]],
                    "step_s": long["tpot_s"] - short["tpot_s"],
                    "scan_s": long["scan_s"] - short["scan_s"],
                    "scan_floor_s": (_scanned(long) - _scanned(short)) / memory_bytes_per_s,
                }
            )
    return grown


def _same(row: dict[str, Any]) -> tuple[str, str, str, int]:
    """What differs in its context alone has this in common."""
    return row["name"], row["tier"], row["storage_profile"], row["batch"]
