"""From a compiled plan to the cache it describes."""

from __future__ import annotations

from pathlib import Path

from swapkv_jax.cache.base import Cache
from swapkv_jax.cache.disk import DiskLayerCache
from swapkv_jax.cache.dram import AliasLayerCache, PinnedLayerCache
from swapkv_jax.cache.resident import ResidentCache
from swapkv_jax.program import Program
from swapkv_jax.tiers import DiskStore


def make_cache(program: Program, *, fingerprint: str, store_dir: Path, disk_limit: int | None) -> Cache:
    """Allocates the plan's buffers. `store_dir` and `disk_limit` (bytes) matter to tier `disk` alone.

    Raises:
        TierError: a tier has no room.
        UsageError: `store_dir` cannot be written.
    """
    plan = program.plan
    if plan.policy == "resident":
        return ResidentCache(program)
    if plan.tier == "dram":
        return AliasLayerCache(program) if plan.transport == "alias" else PinnedLayerCache(program)
    store = DiskStore(store_dir, limit_bytes=disk_limit, fingerprint=fingerprint)
    try:
        return DiskLayerCache(program, store)
    except BaseException:
        store.close()
        raise
