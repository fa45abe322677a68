"""Cache policies: where each layer's KV is, and how a step reaches it."""

from swapkv_jax.cache.base import Cache, CacheUse
from swapkv_jax.cache.make import make_cache

__all__ = ["Cache", "CacheUse", "make_cache"]
