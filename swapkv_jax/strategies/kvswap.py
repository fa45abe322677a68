"""Low-rank keys of all KV heads together, the strategy of policy `group` itself (KVSwap, arXiv 2511.11907): see
`predictor`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from swapkv_jax.predictor import group_means, group_scores, low_rank_query, summarise
from swapkv_jax.strategies.places import PlaceStrategy


class KVSwap(PlaceStrategy):
    def summarise(self, k: Float[Array, "1 Hkv D S"], adapter: jax.Array) -> Float[Array, "1 P r"]:
        k = group_means(k, self._place_tokens) if self._place_tokens > 1 else k
        return summarise(k, adapter)

    def place(
        self, newest: Float[Array, "B Hkv D"], group: Float[Array, "B Hkv G D"] | None, adapter: jax.Array
    ) -> Float[Array, "B 1 r"]:
        k = newest if group is None else group.astype(jnp.float32).mean(2)  # [B, Hkv, D]
        return summarise(k[..., None], adapter)

    def score(
        self,
        q: Float[Array, "B Hkv R D"],
        adapter: jax.Array,
        summary: Float[Array, "B P r"],
        lengths: Int[Array, " B"],
    ) -> Float[Array, "B N"]:
        query = low_rank_query(q, adapter, self._aggregate)
        complete = lengths // self._group_tokens
        places = self._group_tokens // self._place_tokens
        return group_scores(query, summary, complete, places, self._aggregate)
