"""From a compiled plan to the cache it describes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from swapkv_jax.adapter import Adapter
from swapkv_jax.cache.base import Cache
from swapkv_jax.cache.disk import DiskLayerCache
from swapkv_jax.cache.dram import AliasLayerCache, DramLayerCache, PinnedLayerCache
from swapkv_jax.cache.group import GroupCache
from swapkv_jax.cache.in_graph import InGraphLayerCache
from swapkv_jax.cache.resident import ResidentCache
from swapkv_jax.models.blocks import Params
from swapkv_jax.plan import Transport
from swapkv_jax.program import Program
from swapkv_jax.tiers import DiskStore, Syscalls

_DRAM_CACHES: dict[Transport, type[DramLayerCache]] = {
    "alias": AliasLayerCache,
    "copy": PinnedLayerCache,
    "in_graph": InGraphLayerCache,
}


def make_cache(
    program: Program,
    *,
    fingerprint: str,
    store_dir: Path,
    disk_limit: int | None,
    adapter: Adapter | None,
    layers: Sequence[Params],
    syscalls: Syscalls | None = None,
    ephemeral: bool = False,
) -> Cache:
    """Allocates the plan's buffers. `store_dir`, `disk_limit` (bytes), `syscalls` and `ephemeral` (files without a
    name) matter to tier `disk` and policy `group`, the adapter to those strategies of policy `group` that need one.

    Raises:
        TierError: a tier has no room.
        UsageError: `store_dir` cannot be written.
    """
    plan = program.plan
    if plan.policy == "resident":
        return ResidentCache(program)
    if plan.policy == "layer" and plan.tier == "dram":
        return _DRAM_CACHES[plan.transport or "copy"](program)
    store = DiskStore(
        store_dir, limit_bytes=disk_limit, fingerprint=fingerprint, syscalls=syscalls, unlinked=ephemeral
    )
    try:
        if plan.policy == "layer":
            return DiskLayerCache(program, store)
        return GroupCache(program, store, adapter, layers)
    except BaseException:
        store.close()
        raise
